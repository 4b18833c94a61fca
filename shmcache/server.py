"""The coordinator's process: the loop around the single writer.

    start   lock → directories → budget → index → adopt → drain the queue → epoch → ready
    loop    poll(queue, signals) → receive, handle, reply → tick → …
    stop    store hit counts → epoch 0 → segment → lock

Owner: the process; the control page's kernel lock says so, never a pid or a file's presence.
Invariants
    I1  Two coordinators of one namespace never run together.
    I2  The epoch is announced when the index is complete and the queue holds nothing older (control).
    I3  After any end, kill -9 included, the next start removes what the last one named and needs no
        help; rows in ram_file stay.
    I4  No receiver is ever waited for: mailboxes and FIFOs are written without blocking.
Leans on
    poll on the queue's descriptor; set_wakeup_fd, so that no signal is lost between two polls.
    SharedMemory registers with the resource tracker, which would unlink the segment for everybody
    when this process dies: it is taken out at once, because workers read on while nobody coordinates.
Leaves out: every decision (coordinator).
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import random
import re
import resource
import select
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import get_args

import msgspec

from shmcache import __version__, config, index, protocol, shm
from shmcache.config import CoordinatorConfig
from shmcache.connection import LAYOUT
from shmcache.control import OwnedControlPage
from shmcache.coordinator import Coordinator, Now, Reply, Rules, TierState
from shmcache.decisions.service import DecisionService, table_bytes
from shmcache.errors import (
    MIB,
    AlreadyRunning,
    ConfigError,
    ForeignObject,
    LayoutMismatch,
    OutOfSpace,
    ShmcacheError,
    mib,
)
from shmcache.mq import ServerQueue
from shmcache.page import ClientPage, Word, remove_if_dead, restore_counters
from shmcache.patience import Patience
from shmcache.policy import Measured
from shmcache.protocol import AnyRequest, Cancel, DecisionRequest, Tier
from shmcache.shm import SHM_ROOT, Names
from shmcache.tiers import base
from shmcache.tiers.disk import DiskTier, announce_directory, lock_directory, stored_forget
from shmcache.tiers.memory import MemoryTier
from shmcache.tiers.supervisor import Lane

log = logging.getLogger("shmcache.coordinator")

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_ALREADY_RUNNING = 3

TICK_S = 0.25
SWEEP_S = 30.0
STORE_USE_S = 60.0
STUCK_S = 60.0
LET_GO_S = 2.0  # an idle worker lets go of an index within half a second
_MESSAGES_A_TURN = 256
_LOOK_FOR_MORE_NS = 150_000
_DECISION_REQUESTS = get_args(DecisionRequest)  # isinstance of a union takes ten times as long
_PAGE = re.compile(r"[0-9a-f]{16}")


class _Client:
    """A worker as the loop sees it: its page, and since when its progress word has not moved."""

    def __init__(self, page: ClientPage, now_s: float) -> None:
        self.page = page
        self._progress = page.words[Word.PROGRESS]
        self._moved_s = now_s

    def is_stuck(self, now_s: float) -> bool:
        progress = self.page.words[Word.PROGRESS]
        if progress != self._progress:
            self._progress, self._moved_s = progress, now_s
        return now_s - self._moved_s > STUCK_S


class Clients:
    """The workers of a namespace, found by their pages."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._known: dict[int, _Client] = {}
        self._refused: set[str] = set()
        self._unreadable: set[str] = set()

    def find(self, client: int) -> ClientPage | None:
        """The page of a worker that lives, opened at its first message or at the next look."""
        if client not in self._known and (name := f"{client:016x}") not in self._refused:
            self._open(name)
        known = self._known.get(client)
        return known.page if known is not None else None

    def look(self) -> list[int]:
        """List the pages, open new ones, and return the clients that are gone."""
        try:
            names = os.listdir(self._names.pages)  # noqa: PTH208 (names, not paths)
        except OSError as error:
            log.warning("no new pages are seen: %s", error)
            names = []
        for name in names:
            if _PAGE.fullmatch(name) and name not in self._refused and int(name, 16) not in self._known:
                self._open(name)
        self._unreadable -= {name for name in self._unreadable if remove_if_dead(self._names, name)}
        return [client for client, known in self._known.items() if not known.page.lives()]

    def stuck(self) -> list[int]:
        """Clients that live and whose progress has not moved for a minute."""
        now_s = time.monotonic()
        return [client for client, known in self._known.items() if known.is_stuck(now_s)]

    def forget(self, client: int) -> dict[str, int]:
        """A dead worker's counters; its page and FIFOs are removed.

        What will not go is found at the next look, and counted then.
        """
        page = self._known.pop(client).page
        counters = page.counters()
        try:
            page.unlink()
        except OSError as error:
            log.warning("page %016x stays for now: %s", client, error)
            counters = {}
        page.close()
        return counters

    def unnamed_bytes(self) -> dict[int, int]:
        """By client, the bytes without a name that it states."""
        return {client: known.page.words[Word.UNNAMED] for client, known in self._known.items()}

    def measured(self, client: int, tier: Tier) -> Measured:
        """What this worker has counted of its computing, and of its restores from a tier."""
        if (known := self._known.get(client)) is None:
            return Measured()
        counted = known.page.counters()
        restored_bytes, restore_us = (counted[name] for name in restore_counters(on_disk=tier is Tier.DISK))
        return Measured(counted["prefilled_tokens"], counted["prefill_us"], restored_bytes, restore_us)

    def drain_touches(self) -> Iterator[list[int]]:
        """Touch words of each worker since the last call."""
        for known in self._known.values():
            if touches := known.page.drain_touches():
                yield touches

    def pages(self) -> list[ClientPage]:
        """The pages of all workers that are known."""
        return [known.page for known in self._known.values()]

    def wake_all(self) -> None:
        """Let every waiter look at the epoch again."""
        for known in self._known.values():
            known.page.wake_all()

    def close(self) -> None:
        """End all views; pages and FIFOs stay their workers'."""
        for known in self._known.values():
            known.page.close()
        self._known.clear()

    def _open(self, name: str) -> None:
        try:
            page = ClientPage(self._names, int(name, 16))
        except (ForeignObject, LayoutMismatch) as error:
            self._refused.add(name)
            if isinstance(error, LayoutMismatch):
                self._unreadable.add(name)
            log.warning("page %s is not used: %s", name, error)
        except FileNotFoundError:
            return
        except OSError as error:  # too many descriptors, say: at the next message it is tried again
            log.warning("page %s cannot be opened: %s", name, error)
        else:
            self._known[page.client] = _Client(page, time.monotonic())


class Server:
    """One namespace's coordinator, from its lock to its last word. Context manager."""

    def __init__(self, settings: CoordinatorConfig) -> None:
        """Everything up to the announcement. Raises ShmcacheError with nothing left behind."""
        self._settings = settings
        self._patience = Patience()
        self._names = names = Names(settings.namespace)
        with _full_in_words(settings), ExitStack() as stack:
            shm.make_directory(names.directory)
            self._control = stack.enter_context(closing(OwnedControlPage.acquire(names)))
            shm.make_directory(names.pages)
            shm.make_directory(names.fifos)
            self._queue = stack.enter_context(closing(ServerQueue(names)))
            self._clients = stack.enter_context(closing(Clients(names)))
            for client in self._clients.look():
                self._clients.forget(client)
            epoch = random.SystemRandom().randrange(1, 1 << 63)
            self._wake_fd = stack.enter_context(_event())
            budgets = _budgets(settings, names, sum(self._clients.unnamed_bytes().values()))
            tiers = [
                TierState(
                    self._lane(stack, tier, epoch),
                    budget_bytes,
                    staging_bytes,
                    max_rows=settings.rows_by_tier().get(tier.name.lower()),
                    max_age_s=settings.max_age_s_by_tier().get(tier.name.lower()),
                )
                for tier, (budget_bytes, staging_bytes) in budgets.items()
            ]
            self._make_place(_fixed_bytes(settings))
            segment = stack.enter_context(
                _segment(names.index_segment(epoch), index.segment_bytes(settings.max_rows))
            )
            self._index = index.IndexWriter.create(segment, settings.max_rows, epoch)
            stack.callback(self._index.close)
            self._coordinator = Coordinator(
                self._index,
                tiers,
                epoch,
                self._control.forget,
                self._clients.unnamed_bytes,
                rules=Rules(
                    eviction=settings.eviction,
                    tenant_share=settings.tenant_share,
                    disk_admission=settings.disk_admission,
                    spill_on_evict=settings.spill_on_evict,
                ),
                measured_of=self._clients.measured,
                store_forget=self._control.store_forget,
            )
            decisions = stack.enter_context(_segment(names.decisions_segment(epoch), table_bytes(settings)))
            self._decisions = stack.enter_context(
                DecisionService(settings, decisions, epoch, self._control, self._wake)
            )
            stack.callback(self._control.close_epoch)
            self._start(epoch)
            self._stack = stack.pop_all()

    def _lane(self, stack: ExitStack, number: Tier, epoch: int) -> Lane:
        """A tier on its own thread; ram's directory goes with this coordinator."""
        names, settings = self._names, self._settings
        path = names.tier(number.name.lower(), epoch)
        open_tier: Callable[[], base.Tier]
        if number is Tier.DISK:
            directory = Path(settings.disk_dir or "")
            stack.callback(os.close, lock_directory(names, directory))
            open_tier = partial(DiskTier, names, directory, settings.disk_write_bytes_per_s)
            # A reboot has taken the control page, and not the slabs.
            self._control.store_forget(stored_forget(names, directory))
        else:
            open_tier = partial(MemoryTier, number, path)
        if number is Tier.RAM:
            stack.callback(shutil.rmtree, path, ignore_errors=True)
        lane = Lane(open_tier, self._wake)
        stack.callback(lane.close)
        if number is Tier.DISK:
            announce_directory(names, directory)
        return lane

    def _make_place(self, need_bytes: int) -> None:
        """Where old and new segments do not fit side by side, the old ones go first.

        Workers miss until the new ones are there; an index that they still map is not free yet.
        """
        if shm.free_bytes() >= need_bytes:
            return
        self._control.close_epoch()
        self._clients.wake_all()
        self._remove_older(0)
        until_s = time.monotonic() + LET_GO_S
        while shm.free_bytes() < need_bytes and time.monotonic() < until_s:
            time.sleep(0.02)

    def _start(self, epoch: int) -> None:
        rows = self._coordinator.adopt(_now())
        while self._queue.receive() is not None:
            pass
        self._publish_statistics()
        self._index.set_stat("started_unix_s", _now().unix_s)
        self._control.open_epoch(epoch, LAYOUT, _now().unix_s)
        self._coordinator.announced()
        self._clients.wake_all()
        self._remove_older(epoch)
        self._ready = (
            f"shmcache-coordinator ready: namespace={self._settings.namespace} pid={os.getpid()} "
            f"epoch={epoch:016x} rows={rows} max_rows={self._settings.max_rows} "
            f"decisions={self._decisions.loaded} " + " ".join(self._coordinator.budgets())
        )

    def _remove_older(self, epoch: int) -> None:
        """What coordinators before this one named, now that nobody is led there any more."""
        for segment in self._names.epoch_segments():
            if f".{epoch:016x}." not in segment.name:
                shm.unlink_quietly(segment)
        for path in self._names.directory.glob("ram.*"):
            if path != self._names.tier("ram", epoch):
                shutil.rmtree(path, ignore_errors=True)

    @property
    def ready(self) -> str:
        """The line that says that it answers."""
        return self._ready

    def serve(self, stop: int) -> None:
        """Run until `stop` is readable."""
        poll = select.poll()
        poll.register(self._queue.fileno(), select.POLLIN)
        poll.register(stop, select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        next_tick = next_sweep = next_store = time.monotonic()
        while True:
            timeout_ms = max(0, int((next_tick - time.monotonic()) * 1000))
            ready = {fd for fd, _event in poll.poll(timeout_ms)}
            if stop in ready:
                return
            if self._queue.fileno() in ready:
                self._receive()
            if self._wake_fd in ready:
                self._take_outcomes()
            now_s = time.monotonic()
            if now_s >= next_tick:
                self._tick()
                next_tick = now_s + TICK_S
            if now_s >= next_sweep:
                self._deliver(self._coordinator.sweep(_now()))
                next_sweep = now_s + SWEEP_S
            if now_s >= next_store:
                self._coordinator.store_use()
                next_store = now_s + STORE_USE_S

    def _receive(self) -> None:
        """Handle what waits, commit it as one, and look a moment for what comes next.

        Whoever was answered soon asks again, and to be woken takes longer than to answer (patience).
        """
        looks = self._patience.looks()
        taken, is_committed, until_ns = 0, False, 0
        while taken < _MESSAGES_A_TURN:
            message = self._queue.receive()
            if message is not None:
                self._take(message)
                taken, is_committed = taken + 1, False
            elif not is_committed:
                self._deliver(self._decisions.commit())
                is_committed, until_ns = True, time.monotonic_ns() + _LOOK_FOR_MORE_NS
            elif not looks:
                return
            elif time.monotonic_ns() < until_ns:
                os.sched_yield()  # where whoever asks shares our core, it needs it
            else:
                self._patience.learn(in_vain=taken == 1)
                return
        self._deliver(self._decisions.commit())

    def _take(self, message: bytes) -> None:
        try:
            request = protocol.decode_request(message)
        except msgspec.MsgspecError as error:
            log.warning("a message of %d bytes is not understood: %s", len(message), error)
            return
        page = self._clients.find(request.client)
        if page is not None:
            self._deliver(self._handle(request, page))

    def _handle(self, request: AnyRequest, page: ClientPage) -> list[Reply]:
        """The tiers' messages to the coordinator, the decisions' to theirs."""
        if isinstance(request, _DECISION_REQUESTS):
            self._coordinator.unpark(request.client, request.mailbox)
            return self._decisions.handle(request, page)
        self._decisions.unpark(request.client, request.mailbox)
        replies = self._coordinator.handle(request, _now())
        if isinstance(request, Cancel):
            replies += self._decisions.cancel(request.client, request.asked)
        return replies

    def _wake(self) -> None:
        """From a lane's thread: an outcome is there."""
        os.eventfd_write(self._wake_fd, 1)

    def _take_outcomes(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
            self._deliver(self._coordinator.outcomes(_now()))
            self._deliver(self._decisions.commit())

    def _deliver(self, replies: list[Reply]) -> None:
        for reply in replies:
            page = self._clients.find(reply.client)
            if page is not None:
                page.send(reply.mailbox, reply.request, protocol.encode(reply.body))

    def _tick(self) -> None:
        gone = self._clients.look()
        self._take_touches()
        for client in gone:
            log.info("worker %016x is gone", client)
            self._deliver(self._coordinator.client_gone(client, _now()))
            self._deliver(self._decisions.client_gone(client))
            self._coordinator.fold(self._clients.forget(client))
        for client in self._clients.stuck():
            self._deliver(self._coordinator.client_stuck(client, _now()))
        self._deliver(self._coordinator.tick(_now(), time.monotonic()))
        self._deliver(self._decisions.tick(self._clients.pages()))
        self._publish_statistics()

    def _take_touches(self) -> None:
        for touches in self._clients.drain_touches():
            self._coordinator.touches(touches, _now())

    def _publish_statistics(self) -> None:
        for name, value in self._coordinator.statistics().items():
            self._index.set_stat(name, value)

    def close(self) -> None:
        """A clean stop: hit counts are stored, the epoch ends, the segment goes."""
        self._clients.look()  # a worker that came since the last tick has used rows, too
        self._take_touches()
        self._coordinator.store_use()
        self._control.close_epoch()
        self._clients.wake_all()
        self._stack.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _now() -> Now:
    return Now(int(time.time()))


def _fixed_bytes(settings: CoordinatorConfig) -> int:
    """What index and decision table take of /dev/shm."""
    return index.segment_bytes(settings.max_rows) + table_bytes(settings)


def _full(settings: CoordinatorConfig) -> OutOfSpace:
    return OutOfSpace(
        "/dev/shm",
        _fixed_bytes(settings) + MIB,
        shm.free_bytes(),
        f"start with a smaller --max-rows (now {settings.max_rows}) or --decisions-rows (now "
        f"{settings.decisions_rows}), or give the container --shm-size 1g",
    )


@contextmanager
def _full_in_words(settings: CoordinatorConfig) -> Iterator[None]:
    """ENOSPC of anything that a start makes, with the numbers and the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC or shm.free_bytes() > _fixed_bytes(settings) + MIB:
            raise  # the disk's, which the error itself names
        raise _full(settings) from error


def _held_bytes(paths: Iterable[Path]) -> int:
    """What files really take; a stranger's link, hole or directory takes nothing of ours."""
    held_bytes = 0
    for path in paths:
        with suppress(FileNotFoundError):
            found = path.lstat()
            if stat.S_ISREG(found.st_mode):
                held_bytes += found.st_blocks * 512 // found.st_nlink
    return held_bytes


def _budgets(settings: CoordinatorConfig, names: Names, unnamed_bytes: int) -> dict[Tier, tuple[int, int]]:
    """Budget and staging bytes of each tier that is wanted, checked against what the machine has free.

    What the namespace's own slabs hold already counts as free, those in the making (`unnamed_bytes`) and
    those handed over included: they are the budget's.
    """
    index_bytes = _fixed_bytes(settings)
    own = (*names.directory.glob("ram*/*.kvc"), *names.directory.glob("*/in/*"), *names.epoch_segments())
    free_bytes = shm.free_bytes() + _held_bytes(own) + unnamed_bytes - index_bytes
    if free_bytes < MIB:
        raise _full(settings)
    ram_file_bytes = settings.ram_file_bytes
    if ram_file_bytes is None:
        ram_file_bytes = max(MIB, (free_bytes - settings.ram_bytes) // 2)
    staging_bytes = 0
    if settings.disk_dir is not None:
        staging_bytes = settings.staging_bytes or ram_file_bytes // 4
    wanted_bytes = settings.ram_bytes + ram_file_bytes + (settings.staging_bytes or 0)
    if wanted_bytes > free_bytes:
        raise ConfigError(
            f"/dev/shm has {mib(free_bytes)} free beside the index, ram_file needs {mib(ram_file_bytes)}"
            f"{_others(settings)}: start with {_smaller(settings, free_bytes)} "
            f"or give the container --shm-size {_rounded_up(wanted_bytes + index_bytes)}"
        )
    budgets = {}
    if settings.ram_bytes:
        budgets[Tier.RAM] = (settings.ram_bytes, 0)
    budgets[Tier.RAM_FILE] = (ram_file_bytes, 0)
    if settings.disk_dir is not None:
        budgets[Tier.DISK] = (_disk_budget(settings, Path(settings.disk_dir), names), staging_bytes)
    return budgets


def _others(settings: CoordinatorConfig) -> str:
    """What else is wanted in /dev/shm, for the message."""
    others = (("ram", settings.ram_bytes), ("staging", settings.staging_bytes or 0))
    return "".join(f", {name} {mib(size_bytes)}" for name, size_bytes in others if size_bytes)


def _smaller(settings: CoordinatorConfig, free_bytes: int) -> str:
    """Options that would fit: what is free shared out as it was asked for, a quarter left."""
    asked = [
        (option, size_bytes)
        for option, size_bytes in (
            ("--ram-file-bytes", settings.ram_file_bytes or 0),
            ("--ram-bytes", settings.ram_bytes),
            ("--staging-bytes", settings.staging_bytes or 0),
        )
        if size_bytes
    ]
    total_bytes = sum(size_bytes for _option, size_bytes in asked)
    return " ".join(
        f"{option} {max(1, free_bytes * 3 // 4 * size_bytes // total_bytes // MIB)}M"
        for option, size_bytes in asked
    )


def _disk_budget(settings: CoordinatorConfig, directory: Path, names: Names) -> int:
    if not directory.is_dir():
        raise ConfigError(f"disk_dir ({directory}) is no directory: make it first, for this user alone")
    held_bytes = _held_bytes(directory.glob(f"{names.namespace}/*/*.kvc"))
    free_bytes = shm.free_bytes(directory) + held_bytes
    if settings.disk_bytes is None:
        return free_bytes // 2
    if settings.disk_bytes > free_bytes:
        raise ConfigError(
            f"{directory} has {mib(free_bytes)} free, disk needs {mib(settings.disk_bytes)}: "
            f"start with --disk-bytes {free_bytes * 3 // 4 // MIB}M or another --disk-dir"
        )
    return settings.disk_bytes


def _rounded_up(size_bytes: int) -> str:
    return f"{-(-size_bytes // (1 << 30))}g"


@contextmanager
def _segment(name: str, size_bytes: int) -> Iterator[memoryview]:
    """A segment of this epoch, zeroed; unlinked at a clean end, left to workers by any other."""
    segment = SharedMemory(name, create=True, size=size_bytes)
    resource_tracker.unregister(f"/{segment.name}", "shared_memory")
    path = SHM_ROOT / segment.name
    try:
        shm.set_mode(path, 0o600)
        fd = shm.open_owned(path, os.O_RDWR)
        try:
            shm.allocate(fd, size_bytes)
        finally:
            os.close(fd)
        assert segment.buf is not None
        yield segment.buf
    finally:
        # SharedMemory.unlink would talk to the tracker again.
        shm.unlink_quietly(path)
        segment.close()


@contextmanager
def _event() -> Iterator[int]:
    """A descriptor that other threads make readable."""
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _signals() -> Iterator[int]:
    """A descriptor that becomes readable at SIGTERM or SIGINT, and at nothing else.

    Other signals interrupt a system call and change nothing: Python tries again with the time left.
    """
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def stop(_number: int, _frame: object) -> None:
        with suppress(BlockingIOError):
            os.write(writer, b"!")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    # Whoever started us may have held them back meanwhile (tools.demo), and what is held back is inherited.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
    try:
        yield reader
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


def arguments() -> argparse.ArgumentParser:
    """The command line of shmcache-coordinator."""
    parser = argparse.ArgumentParser(
        prog="shmcache-coordinator",
        description="One cache of KV states for all llama.cpp workers of this machine and user.",
        epilog="Each option can also stand in a TOML file (--config) or in the environment "
        "(SHMCACHE_RAM_FILE_BYTES=2G); the command line wins over the environment, which wins over the "
        f"file. Exit codes: 0 stopped, {EXIT_FAILED} failed, {EXIT_USAGE} wrong settings, "
        f"{EXIT_ALREADY_RUNNING} one is running already.",
    )
    parser.add_argument("--version", action="version", version=f"shmcache {__version__}")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with the names below")
    parser.add_argument("--namespace", help="[a-z0-9-]{1,32}; default: default")
    parser.add_argument(
        "--ram-file-bytes",
        metavar="SIZE",
        help="budget in /dev/shm, as 512M or 2G; default: half of what is free",
    )
    parser.add_argument(
        "--ram-bytes", metavar="SIZE", help="budget of the tier that ends with the coordinator; default: 0"
    )
    parser.add_argument("--disk-dir", metavar="DIR", help="directory of the disk tier; default: no disk tier")
    parser.add_argument(
        "--disk-bytes", metavar="SIZE", help="its budget; default: half of what is free there"
    )
    parser.add_argument(
        "--staging-bytes",
        metavar="SIZE",
        help="most in /dev/shm on its way to disk; default: a quarter of ram_file",
    )
    parser.add_argument(
        "--disk-write-bytes-per-s", metavar="SIZE", help="bound of the copies to disk; default: none"
    )
    parser.add_argument("--max-rows", type=int, metavar="N", help="capacity of the index; default: 65536")
    parser.add_argument(
        "--tier-rows",
        metavar="N",
        help="most rows of each tier, or as ram_file=500,disk=20000; default: no limit",
    )
    parser.add_argument(
        "--max-age",
        metavar="AGE",
        help="rows leave so long after they were made, as 12h or ram_file=12h,disk=7d; default: never",
    )
    parser.add_argument(
        "--tenant-share",
        type=float,
        metavar="SHARE",
        help="most of a tier that one tenant holds while others want it, as 0.25; default: 1",
    )
    parser.add_argument(
        "--disk-admission",
        choices=get_args(config.Admission),
        help="what goes to disk: always (default), or second_use, which keeps one-time prompts off it",
    )
    parser.add_argument(
        "--spill-on-evict",
        action="store_const",
        const=True,
        help="hand the coldest rows of a memory tier that is nearly full on to the disk; default: they go",
    )
    parser.add_argument(
        "--eviction",
        choices=get_args(config.Eviction),
        help="who leaves a full tier: lru, not used the longest (default); cost, the least worth a byte",
    )
    parser.add_argument(
        "--decisions-rows", type=int, metavar="N", help="capacity of the decision table; default: 16384"
    )
    parser.add_argument(
        "--decisions-bytes", metavar="SIZE", help="room for larger decisions beside it; default: 4M"
    )
    parser.add_argument(
        "--decisions-durability",
        choices=config.DURABILITIES,
        help="what an acknowledged decision survives: power loss, any kill -9 (default), a clean stop",
    )
    parser.add_argument(
        "--decisions-file",
        metavar="FILE",
        help="SQLite file that keeps them; default: one in the user's cache directory",
    )
    parser.add_argument("--log-level", choices=config.LOG_LEVELS, help="default: info")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point of shmcache-coordinator; returns its exit code."""
    options = vars(arguments().parse_args(argv))
    file = options.pop("config")
    try:
        settings = config.load(options, file=file)
        logging.basicConfig(
            level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        _raise_descriptor_limit()
        # Signals first: one that comes during the start stops the coordinator right after it.
        with _signals() as stop, Server(settings) as server:
            print(server.ready, flush=True)
            server.serve(stop)
    except AlreadyRunning as error:
        return _fail(error, EXIT_ALREADY_RUNNING)
    except ConfigError as error:
        return _fail(error, EXIT_USAGE)
    except (ShmcacheError, OSError) as error:
        return _fail(error, EXIT_FAILED)
    return 0


def _raise_descriptor_limit() -> None:
    """A worker costs a descriptor for its page and one for each mailbox that it uses, 17 at most."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _fail(error: Exception, code: int) -> int:
    print(f"shmcache-coordinator: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
