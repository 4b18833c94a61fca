"""A pool of model processes: which worker takes this request, and what happens when one dies?

    caller ── submit ──► waiting ──► supervisor thread ── socket ──► child: boot → answer … → stop
           ◄─ Call ◄──────────────── one select loop  ◄─────────────  Ready Chunk Done Failed

    state      event     next       meaning
    booting    ready     idle       the factory has returned: the model is loaded
    booting    stop      stopping   the pool closes
    booting    gone      dead       a boot failure; the next one waits a little longer
    idle       request   busy       one request at a time: a context has one sequence
    idle       stop      stopping
    idle       gone      dead       replaced at once
    busy       answer    idle
    busy       stop      stopping   the request in hand is still answered
    busy       gone      dead       its request goes once to another worker, then fails
    stopping   answer    stopping
    stopping   gone      dead

Owner: the process that made the pool; each child belongs to one pool and is its direct child.
Readers: any thread of that process may submit.
Invariants
    I1  The model is loaded in the child, in a new interpreter: a child forked after its parent evaluated
        hangs at its own first evaluation.
    I2  All workers together use the cores once: n_threads = n_threads_batch = max(1, cores // workers).
        Two workers that each take all cores spin against each other and run ten times slower.
    I3  A request is answered once: it is tried again only if nothing of its answer was seen yet.
    I4  Nothing respawns for ever: MAX_BOOT_FAILURES in a row end the pool with the last one's reason.
    I5  No child outlives the pool. The socket's end is the sign, so it holds after a kill -9 too.
Leans on
    Sockets of a dead process read as end of file; Python makes descriptors close-on-exec, so no other child
    holds one open. Signal handlers may put into a SimpleQueue (it is reentrant).
Leaves out: HTTP; scheduling by prompt, as every worker reads the same cache; what a request means (handler).
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self

import msgspec

from shmcache.errors import ConfigError, IllegalTransition, PoolStopped, UsedAfterFork, WorkerDied

TRANSITIONS: dict[str, dict[str, str]] = {
    "booting": {"ready": "idle", "stop": "stopping", "gone": "dead"},
    "idle": {"request": "busy", "stop": "stopping", "gone": "dead"},
    "busy": {"answer": "idle", "stop": "stopping", "gone": "dead"},
    "stopping": {"answer": "stopping", "gone": "dead"},
    "dead": {},
}

MAX_BOOT_FAILURES = 3
MAX_TRIES = 2
BOOT_FAILED_EXIT = 3  # the exit code of a child whose factory raised
BOOT_PAUSE_S = 0.2  # before the second boot; doubled before the third
SETTLED_S = 1.0  # a worker that dies idle and sooner than this after it was ready has failed to boot
STOP_S = 40.0  # a stopping worker may block for a `shutdown` save (30 s), and ends its request first
ORPHAN_S = 10.0  # how long a child whose pool is gone may take to end by itself
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker stands: its number in the pool, and its share of the cores."""

    index: int
    workers: int
    threads: int


Factory = Callable[[dict[str, Any], Place], Any]


class Boot(msgspec.Struct, frozen=True, tag=True):
    """First message to a child: what to make."""

    factory: str
    settings: dict[str, Any]
    place: Place


class Request(msgspec.Struct, frozen=True, tag=True):
    """Call a method of the handler."""

    id: int
    method: str
    arguments: dict[str, Any]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Nobody reads this answer any more."""

    id: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Answer what is in hand, close the handler, exit."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The factory has returned."""


class BootFailed(msgspec.Struct, frozen=True, tag=True):
    """The factory raised; the child exits with BOOT_FAILED_EXIT."""

    reason: str


class Chunk(msgspec.Struct, frozen=True, tag=True):
    """One value of a streamed answer."""

    value: Any


class Done(msgspec.Struct, frozen=True, tag=True):
    """The answer; of a streamed one, what its generator returned."""

    value: Any


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The handler raised."""

    kind: str
    message: str


def _plain(value: Any) -> Any:
    # llama-cpp-python puts numpy scalars into log probabilities.
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a worker's answer must be plain data, and holds a {type(value).__name__}")


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_decode_boot = msgspec.msgpack.Decoder(Boot).decode
_decode_for_child = msgspec.msgpack.Decoder(Request | Cancel | Stop).decode
_decode_for_pool = msgspec.msgpack.Decoder(Ready | BootFailed | Chunk | Done | Failed).decode


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and a container's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = CPU_QUOTA.read_text().split()
        cores = min(cores, -(-int(quota) // int(period)))  # "max" is no number: no quota
    return max(1, cores)


class Call:
    """A request on its way. `result()` waits; iterating yields the chunks of a streamed answer.

    worker: number of the worker that answers, None while it waits. tries: workers that were asked so far.
    """

    def __init__(self, pool: Pool, request: Request, worker: int | None) -> None:
        self.request, self.wanted_worker = request, worker
        self.worker: int | None = None
        self.tries = 0
        self.streamed = False
        self._pool = pool
        self._arrived: SimpleQueue[Chunk | Done | Exception] = SimpleQueue()
        self._end: Done | Exception | None = None

    def __iter__(self) -> Iterator[Any]:
        """Chunks as they come; raises what the handler raised, or WorkerDied."""
        while (chunk := self._next(None)) is not None:
            yield chunk.value

    def result(self, timeout_s: float | None = None) -> Any:
        """The answer; chunks are passed over.

        Raises TimeoutError, what the handler raised, WorkerDied or PoolStopped.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while self._next(deadline_s) is not None:
            pass
        assert isinstance(self._end, Done)
        return self._end.value

    def cancel(self) -> None:
        """End a streamed answer after its next chunk, with None for a result; a plain one runs to its end.

        A call that still waits for a worker fails with CancelledError. Never waits.
        """
        self._pool._cancel(self)

    def _next(self, deadline_s: float | None) -> Chunk | None:
        if self._end is None:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            try:
                message = self._arrived.get(timeout=left_s)
            except Empty:
                raise TimeoutError(f"no answer to {self.request.method} within the time given") from None
            if isinstance(message, Chunk):
                return message
            self._end = message
        if isinstance(self._end, Exception):
            raise self._end
        return None

    def _deliver(self, message: Chunk | Done | Exception) -> None:
        self._arrived.put(message)


class PoolStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the pool began: submitted == answered + failed + waiting + running."""

    workers: int
    ready: int
    submitted: int
    answered: int
    failed: int
    waiting: int
    running: int
    tried_again: int
    replaced: int
    boot_failures: int


class _Worker:
    """The pool's view of one child."""

    def __init__(self, boot: Boot) -> None:
        self.index = boot.place.index
        self.state = "booting"
        self.call: Call | None = None
        self.answered = 0
        self.ready_s = 0.0
        self.reason = ""
        ours, theirs = socket.socketpair()
        with theirs:
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; "
                f"from shmcache.workers.pool import child_main; child_main({theirs.fileno()})"
            )
            # Not multiprocessing's spawn: that runs the caller's main module again, pickles the arguments and
            # leaves a resource tracker behind. Prints of a child must not mix into the parent's stdout.
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, f"shmcache-worker-{self.index}"],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
            )
        self.connection = Connection(ours.detach())
        self.send(boot)

    def event(self, name: str) -> None:
        """Take the transition; IllegalTransition changes nothing."""
        following = TRANSITIONS[self.state].get(name)
        if following is None:
            raise IllegalTransition(self.state, name)
        self.state = following

    def send(self, message: Boot | Request | Cancel | Stop) -> None:
        """Into the child's socket; that it is dead shows up as end of file, not here."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(_encode(message))

    def failed_to_boot(self, now_s: float) -> bool:
        """Died before it was of any use?"""
        if self.state == "booting":
            return True
        return self.state == "idle" and not self.answered and now_s - self.ready_s < SETTLED_S

    def bury(self) -> int:
        """Reap the child whose socket has ended; returns its exit code, negative for a signal."""
        self.connection.close()
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class Pool:
    """`workers` processes, each with what `factory(settings, place)` returns; requests go to any free one.

    Args:
        workers: number of processes.
        factory: a function that can be imported, or its name "module:function"; it runs in the child and
            returns the handler. A request names a public method of it. A method that returns a generator
            streams: what it yields arrives as chunks, what it returns is the result. `close()`, if there is
            one, is called at the end.
        settings: plain data for the factory (numbers, strings, lists, dicts).

    threads: each worker's share of the cores, which its handler is told too.
    """

    def __init__(
        self, workers: int, factory: Factory | str, settings: Mapping[str, Any] | None = None
    ) -> None:
        if workers < 1:
            raise ConfigError(f"workers ({workers}) must be at least 1")
        self._factory = factory if isinstance(factory, str) else _importable_name(factory)
        self._settings = dict(settings or {})
        self.threads = max(1, usable_cores() // workers)
        self._made_in = os.getpid()
        self._ids = itertools.count(1)
        # Guards everything below; _changed is told whenever a worker's state or the pool's end changes.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[Call] = deque()
        self._workers: list[_Worker | None] = [None] * workers
        self._counts = dict.fromkeys(
            ("submitted", "answered", "failed", "tried_again", "replaced", "boot_failures"), 0
        )
        self._failures_in_a_row = 0
        self._boot_not_before_s = 0.0
        self._closing_since_s: float | None = None
        self._stopped: PoolStopped | None = None
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._supervisor = threading.Thread(target=self._supervise, name="shmcache-pool", daemon=True)
        self._supervisor.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Until every worker has booted. Raises PoolStopped with the reason, or TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._stopped or self._ready() == len(self._workers), timeout_s
            ):
                raise TimeoutError(
                    f"{self._ready()} of {len(self._workers)} workers were ready in {timeout_s} s"
                )
            if self._stopped:
                raise self._stopped

    def submit(self, method: str, /, *, worker: int | None = None, **arguments: Any) -> Call:
        """Ask any free worker, or the one with this number, to call `method(**arguments)`. Never waits."""
        if os.getpid() != self._made_in:
            raise UsedAfterFork("a worker pool", self._made_in, os.getpid())
        if worker is not None and not 0 <= worker < len(self._workers):
            raise ConfigError(f"worker {worker} of a pool of {len(self._workers)}")
        call = Call(self, Request(next(self._ids), method, arguments), worker)
        with self._lock:
            if self._stopped:
                raise self._stopped
            if self._closing_since_s is not None:
                raise PoolStopped("it was closed")
            self._counts["submitted"] += 1
            self._waiting.append(call)
        self._wake()
        return call

    def call(self, method: str, /, *, worker: int | None = None, **arguments: Any) -> Any:
        """`submit` and wait for the result."""
        return self.submit(method, worker=worker, **arguments).result()

    def pids(self) -> Sequence[int]:
        """Process ids by worker number, for people and for tests; 0 where none runs."""
        with self._lock:
            return [worker.process.pid if worker else 0 for worker in self._workers]

    def statistics(self) -> PoolStatistics:
        """Counts at this moment."""
        with self._lock:
            running = sum(worker is not None and worker.call is not None for worker in self._workers)
            return PoolStatistics(
                workers=len(self._workers),
                ready=self._ready(),
                waiting=len(self._waiting),
                running=running,
                **self._counts,
            )

    def close(self) -> None:
        """Refuse new requests, end those in hand, fail the waiting ones, stop the children. Waits for all."""
        with self._lock:
            if self._closing_since_s is None:
                self._closing_since_s = time.monotonic()
        self._wake()
        if self._supervisor is not threading.current_thread():
            self._supervisor.join()

    # The supervisor's loop: receive, bury, boot, dispatch. It alone changes workers' states.

    def _supervise(self) -> None:
        try:
            while True:
                with self._lock:
                    pause_s = self._boot_missing()
                    self._dispatch()
                    alive = [worker for worker in self._workers if worker is not None]
                    if self._closing_since_s is not None:
                        pause_s = self._stop_all(alive)
                        if not alive:
                            return
                ready = wait([self._wake_read, *(worker.connection for worker in alive)], pause_s)
                with self._lock:
                    for worker in alive:
                        if worker.connection in ready:
                            self._receive(worker)
                    if self._wake_read in ready:
                        with contextlib.suppress(BlockingIOError):
                            self._wake_read.recv(4096)
        except BaseException as error:
            self._stopped = PoolStopped(f"its supervisor failed: {error!r}")
            raise
        finally:
            self._end(self._stopped or PoolStopped("it was closed"))

    def _boot_missing(self) -> float | None:
        """Start a child for each empty place; seconds to the next try if one has to wait."""
        if self._closing_since_s is not None:
            return None
        for index, worker in enumerate(self._workers):
            if worker is not None:
                continue
            wait_s = self._boot_not_before_s - time.monotonic()
            if wait_s > 0:
                return wait_s
            place = Place(index=index, workers=len(self._workers), threads=self.threads)
            self._workers[index] = _Worker(Boot(self._factory, self._settings, place))
        return None

    def _dispatch(self) -> None:
        """Give the waiting calls to idle workers, oldest first; one for a busy worker holds up no other."""
        idle = {worker.index: worker for worker in self._workers if worker and worker.state == "idle"}
        for call in list(self._waiting):
            if not idle:
                return
            index = next(iter(idle)) if call.wanted_worker is None else call.wanted_worker
            worker = idle.pop(index, None)
            if worker is None:
                continue
            self._waiting.remove(call)
            call.worker, worker.call = index, call
            call.tries += 1
            worker.event("request")
            worker.send(call.request)

    def _receive(self, worker: _Worker) -> None:
        """One message of a child, or its end."""
        try:
            message = _decode_for_pool(worker.connection.recv_bytes())
        except (EOFError, OSError):
            self._bury(worker)
            return
        match message:
            case Ready():
                if worker.state == "booting":  # else it was told to stop meanwhile
                    worker.event("ready")
                worker.ready_s = time.monotonic()
            case BootFailed(reason):
                worker.reason = reason
            case Chunk():
                assert worker.call is not None
                worker.call.streamed = True
                worker.call._deliver(message)
            case Done() | Failed():
                assert worker.call is not None
                call, worker.call = worker.call, None
                worker.event("answer")
                worker.answered += 1
                self._failures_in_a_row = 0
                self._finish(call, message if isinstance(message, Done) else _as_exception(message))
        self._changed.notify_all()

    def _bury(self, worker: _Worker) -> None:
        """A child has ended: what becomes of its request, its place and the pool?"""
        boot_failure = worker.failed_to_boot(time.monotonic())
        worker.event("gone")
        exit_code = worker.bury()
        self._workers[worker.index] = None
        if call := worker.call:
            if not call.streamed and call.tries < MAX_TRIES and self._closing_since_s is None:
                self._counts["tried_again"] += 1
                call.worker = None
                self._waiting.appendleft(call)
            else:
                self._finish(call, WorkerDied(worker.index, exit_code, call.tries))
        if self._closing_since_s is None:
            self._counts["replaced"] += 1
            if boot_failure:
                self._count_boot_failure(worker, exit_code)
        self._changed.notify_all()

    def _count_boot_failure(self, worker: _Worker, exit_code: int) -> None:
        self._counts["boot_failures"] += 1
        self._failures_in_a_row += 1
        self._boot_not_before_s = time.monotonic() + BOOT_PAUSE_S * 2 ** (self._failures_in_a_row - 1)
        if self._failures_in_a_row >= MAX_BOOT_FAILURES:
            reason = worker.reason or f"exit code {exit_code}"
            self._stopped = PoolStopped(f"{MAX_BOOT_FAILURES} workers in a row did not boot: {reason}")
            self._closing_since_s = time.monotonic()

    def _finish(self, call: Call, message: Done | Exception) -> None:
        self._counts["answered" if isinstance(message, Done) else "failed"] += 1
        call._deliver(message)

    def _stop_all(self, alive: list[_Worker]) -> float:
        """Tell every child once to stop, and kill what has not when the time is over; seconds left."""
        assert self._closing_since_s is not None
        while self._waiting:
            self._finish(self._waiting.popleft(), self._stopped or PoolStopped("it was closed"))
        for worker in alive:
            if worker.state != "stopping":
                worker.event("stop")
                worker.send(Stop())
        left_s = self._closing_since_s + STOP_S - time.monotonic()
        if left_s <= 0:
            for worker in alive:
                worker.process.kill()
            return STOP_S
        return left_s

    def _end(self, reason: PoolStopped) -> None:
        """Whatever ended the loop: no caller waits for ever and no child is left."""
        with self._lock:
            self._stopped = reason
            for worker in filter(None, self._workers):
                worker.process.kill()
                worker.bury()
                if worker.call:
                    self._finish(worker.call, reason)
            while self._waiting:
                self._finish(self._waiting.popleft(), reason)
            self._workers = [None] * len(self._workers)
            self._wake_read.close()
            self._wake_write.close()
            self._changed.notify_all()

    def _cancel(self, call: Call) -> None:
        with self._lock:
            if call in self._waiting:
                self._waiting.remove(call)
                self._finish(call, CancelledError())
            for worker in filter(None, self._workers):
                if worker.call is call:
                    worker.send(Cancel(call.request.id))

    def _ready(self) -> int:
        return sum(worker is not None and worker.state in ("idle", "busy") for worker in self._workers)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: it has ended
            self._wake_write.send(b"\0")


def _importable_name(factory: Factory) -> str:
    module, name = factory.__module__, factory.__qualname__
    if module == "__main__" or "<" in name:
        raise ConfigError(f"factory {module}:{name} must be a function of a module that a child can import")
    return f"{module}:{name}"


def _as_exception(failed: Failed) -> Exception:
    """The handler's own error where it is one of Python's, so that a pool raises what the model raises."""
    kind = getattr(builtins, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # UnicodeDecodeError wants more than a message
            return kind(failed.message)
    return RuntimeError(f"{failed.kind}: {failed.message}")


# The child.


class _PoolGone(Exception):
    """Nobody reads what this child writes."""


class _Line:
    """The child's end of the socket: writes from the main thread, reads on a thread of its own.

    The reading thread takes what comes while the handler works, and ends the process when the pool is gone.
    """

    def __init__(self, descriptor: int) -> None:
        self.connection = Connection(descriptor)
        self.inbox: SimpleQueue[Request | Stop] = SimpleQueue()
        self.cancelled_id = 0

    def send(self, message: Ready | BootFailed | Chunk | Done | Failed) -> None:
        encoded = _encode(message)
        try:
            self.connection.send_bytes(encoded)
        except OSError:
            raise _PoolGone from None

    def read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = _decode_for_child(self.connection.recv_bytes())
                if isinstance(message, Cancel):
                    self.cancelled_id = message.id
                else:
                    self.inbox.put(message)
        self.inbox.put(Stop())
        time.sleep(ORPHAN_S)
        # Hard, because the main thread is inside a long evaluation. The kernel frees what has no name yet.
        os._exit(1)


def child_main(descriptor: int) -> None:
    """A worker process: boot, answer one request after the other, stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the pool decides
    line = _Line(descriptor)
    signal.signal(signal.SIGTERM, lambda number, frame: line.inbox.put(Stop()))
    boot = _decode_boot(line.connection.recv_bytes())
    threading.Thread(target=line.read, daemon=True).start()
    with contextlib.suppress(_PoolGone):
        try:
            handler = _load(boot.factory)(boot.settings, boot.place)
        except Exception as error:
            line.send(BootFailed(f"{type(error).__name__}: {error}"))
            sys.exit(BOOT_FAILED_EXIT)
        with contextlib.ExitStack() as at_end:
            if hasattr(handler, "close"):
                at_end.callback(handler.close)
            line.send(Ready())
            while isinstance(request := line.inbox.get(), Request):
                _answer(line, handler, request)


def _answer(line: _Line, handler: Any, request: Request) -> None:
    """Call, and send what comes of it; an answer that is not plain data is the handler's error."""
    try:
        answer = getattr(handler, request.method)(**request.arguments)
        if isinstance(answer, Generator):
            answer = _stream(line, answer, request.id)
        line.send(Done(answer))
    except _PoolGone:
        raise
    except Exception as error:
        line.send(Failed(type(error).__name__, str(error)))


def _stream(line: _Line, answer: Generator[Any, None, Any], request_id: int) -> Any:
    """Send each value; returns the generator's return value, or None when it was cancelled."""
    with contextlib.closing(answer):
        while line.cancelled_id != request_id:
            try:
                value = next(answer)
            except StopIteration as end:
                return end.value
            line.send(Chunk(value))
    return None


def _load(name: str) -> Factory:
    module, _, function = name.partition(":")
    factory: Any = importlib.import_module(module)
    for part in function.split("."):
        factory = getattr(factory, part)
    return factory  # type: ignore[no-any-return]
