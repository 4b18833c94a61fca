"""The model side of a worker: take the next request of the whole server, answer it, take the next.

    free seat ──the line has one──► Begun ── its thread ──► FirstToken, Chunk*, Done | Failed ──► free seat
                                       │
                                       └ the desk's end closes: HangUp, and the model stops

Owner: one worker. The event loop takes and sends; each seat's models run in one thread, always the same.
Readers: whoever is at the other end of a connection (desk).
Invariants
    I1  One request a seat, and one seat computes at a time (turns): the cores are shared out so that each
        worker computes one thing.
    I2  A request that nobody waits for any more is not begun, and one that is under way ends within one graph
        node of llama.cpp or one token.
    I3  Whatever a request does in the model, the engine takes the next one.
Leaves out: what an answer is (answers), which request comes next (line).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from shmcache.workers.serve.board import SERVING, Slot
from shmcache.workers.serve.line import Line
from shmcache.workers.serve.wire import Begun, Done, Job, Reply, frame, read_job

if TYPE_CHECKING:
    from shmcache.workers.serve.models import HangUp, Models

log = logging.getLogger(__name__)

SEND_S = 10.0  # how long a desk may take to read the rest of an answer: it always reads at once
GIVE_WAY_S = 0.002
GIVE_WAY_TIMES = 10  # a worker that hangs is not waited for longer

_Result = TypeVar("_Result")


class Engine:
    """Answers requests with the models that `make_models` loads, `parallel` of them at once."""

    def __init__(self, line: Line, slot: Slot, parallel: int, make_models: Callable[[], Models]) -> None:
        self._line = line
        self._slot = slot
        self._make_models = make_models
        self._threads = [ThreadPoolExecutor(1, f"shmcache-seat-{number}") for number in range(parallel)]
        # The seat that became free last is taken first: its memory is warm.
        self._free: asyncio.LifoQueue[int] = asyncio.LifoQueue()
        for number in reversed(range(parallel)):
            self._free.put_nowait(number)
        self._loop: asyncio.Task[None] | None = None
        self._stopping = False
        self._idle: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Load the models, then take requests. Raises what loading raises."""
        self.models = await self._in_thread(0, self._make_models)
        self._loop = asyncio.create_task(self._take_requests())
        self._slot.state = SERVING

    async def stop(self) -> None:
        """Answer what is in hand, take nothing more, and let the models make their `shutdown` saves."""
        self._stopping = True
        if self._idle is not None:
            _settle(self._idle)
        if self._loop is not None:
            await self._loop
            await self._in_thread(0, self.models.close)
        for thread in self._threads:
            thread.shutdown()

    def reusable_tokens(self, job: Job) -> tuple[int, int]:
        """As Models says it, in the caller's thread."""
        return self.models.reusable_tokens(job)

    def decision_fingerprint(self, model: str, tenant: str | None) -> str:
        """As Models says it, in the caller's thread."""
        return self.models.decision_fingerprint(model, tenant)

    async def _take_requests(self) -> None:
        async with asyncio.TaskGroup() as under_way:
            while not self._stopping:
                seat = await self._free.get()
                if (connection := await self._next()) is None:
                    break
                self._slot.begin_run()
                under_way.create_task(self._serve(seat, connection))

    async def _next(self) -> socket.socket | None:
        """The next connection of the line; None once this engine stops.

        One that has more in hand than another gives that one time to take it.
        """
        while not self._stopping:
            for _ in range(GIVE_WAY_TIMES):
                if not self._slot.is_busier_than_another():
                    break
                await asyncio.sleep(GIVE_WAY_S)
            if (connection := self._line.take()) is not None:
                return connection
            await self._until_somebody_waits()
        return None

    async def _serve(self, seat: int, connection: socket.socket) -> None:
        """One request, from its first word to its last; what befalls it ends here."""
        with contextlib.closing(connection):
            try:
                await self._speak(seat, connection)
            except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
                pass  # the desk has given up, or its process is gone
            except Exception:
                log.exception("a request was lost")
            finally:
                self._slot.end_run()
                self._free.put_nowait(seat)

    async def _speak(self, seat: int, connection: socket.socket) -> None:
        # A copy of the descriptor, because the transport closes what it is given.
        reader, writer = await asyncio.open_connection(sock=connection.dup())
        try:
            await self._answer(seat, reader, writer)
            writer.close()
            async with asyncio.timeout(SEND_S):
                await writer.wait_closed()
        finally:
            writer.transport.abort()

    async def _until_somebody_waits(self) -> None:
        loop = asyncio.get_running_loop()
        idle = self._idle = loop.create_future()
        loop.add_reader(self._line, _settle, idle)
        try:
            await idle
        finally:
            loop.remove_reader(self._line)

    async def _answer(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        job = await read_job(reader)
        writer.write(frame(Begun()))

        def send(reply: Reply) -> None:
            loop.call_soon_threadsafe(writer.write, frame(reply))

        seat = self.models.seats[number]
        hang_up = seat.hang_up(job.model)
        hang_up.begin()  # before anybody can set it
        watch = asyncio.create_task(_until_closed(reader, hang_up))
        try:
            reply = await self._in_thread(number, lambda: seat.answer(job, send))
        finally:
            watch.cancel()
        if isinstance(reply, Done):
            for name in reply.usage.__struct_fields__:
                self._slot.count(name, getattr(reply.usage, name))
        writer.write(frame(reply))

    async def _in_thread(self, seat: int, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads[seat], work)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _until_closed(reader: asyncio.StreamReader, hang_up: HangUp) -> None:
    """The desk says nothing more, so whatever can be read here is the end."""
    with contextlib.suppress(ConnectionError):
        await reader.read(1)
    hang_up.set()
