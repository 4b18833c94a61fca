"""One tier's own thread: does it work, is it late, and when is it tried again?

               job fails 3 times running
    UP ─────────────────────────────────────┐
     ▲  │ a job is late                     ▼
     │  └───────────────────────────────► DOWN ──┐ back-off passed: a new thread,
     └───────────────────────────────────────────┘ a new view of the tier

Owner: the coordinator's thread calls; the lane's thread runs the jobs, in order.
Readers: `statistics()`.
Invariants
    I1  A job never raises into the coordinator: it ends as a Done with its error.
    I2  Every job ends in exactly one Done: run, failed, or given up when its lane went down.
    I3  A thread that hangs is left behind; what it still returns is thrown away (and a file that it
        still links is found by the next sweep).
    I4  The coordinator's thread never waits for a job.
Leans on: a thread blocked in a system call lets the others run; a daemon thread does not keep the
process. Leaves out: what a job's outcome means (coordinator).
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path

import msgspec

from shmcache.errors import CorruptSlab, ForeignObject, ShmcacheError
from shmcache.tiers.base import HandOver, Slab, Tier

JOB_DEADLINE_S = 30.0
BACKOFF_S = (1.0, 2.0, 5.0, 15.0, 60.0)
_FAILURES_TO_GO_DOWN = 3
_MOST_REMOVALS = 4096  # that wait for one synchronisation: their bytes count until then


class LaneState(Enum):
    """Whether a tier takes jobs."""

    UP = "up"
    DOWN = "down"


class Link(msgspec.Struct, frozen=True):
    """Give a handed-over slab its row's name."""

    handover: HandOver


class Remove(msgspec.Struct, frozen=True):
    """Unlink a row's slab."""

    key: bytes


class SetAside(msgspec.Struct, frozen=True):
    """Keep a row's slab under another name: it was found wrong."""

    key: bytes


class RemoveAside(msgspec.Struct, frozen=True):
    """Unlink a slab that was set aside."""

    key: bytes


class WriteUse(msgspec.Struct, frozen=True):
    """Store hit count and last use."""

    key: bytes
    hit_count: int
    last_used_unix_s: int


class Survey(msgspec.Struct, frozen=True):
    """List the keys of all slabs that lie in the tier."""


class Look(msgspec.Struct, frozen=True):
    """Read the head of a key's slab: index and directory disagree about it."""

    key: bytes


class SetPin(msgspec.Struct, frozen=True):
    """Pin a row's slab, or not any more."""

    key: bytes
    pinned: bool


class HandOn(msgspec.Struct, frozen=True):
    """Hand a row's slab over to another tier, whose `in/` lies at in_path; it stays where it is."""

    handover: HandOver
    in_path: Path


class StoreForget(msgspec.Struct, frozen=True):
    """Keep the forget number where the slabs are."""

    number: int


Job = Link | Remove | SetAside | RemoveAside | WriteUse | Survey | Look | SetPin | HandOn | StoreForget


_REMOVALS = Remove | RemoveAside


class Done(msgspec.Struct, frozen=True):
    """How a job ended: a slab for Link and Look, keys for Survey, an error, or nothing.

    is_fault: the error is the tier's, not that of the one slab that it was about.
    is_damaged: the slab was of this version, and is of no use.
    """

    job: Job
    slab: Slab | None = None
    keys: frozenset[bytes] = frozenset()
    error: str = ""
    is_fault: bool = False
    is_damaged: bool = False


class LaneStatistics(msgspec.Struct, frozen=True):
    """Jobs in and out, and how often the tier went down."""

    submitted: int
    ended: int
    downs: int


class _Worker:
    """One thread's life: it is abandoned with all that is queued in it."""

    def __init__(self, tier: Tier, wake: Callable[[], None]) -> None:
        self.tier = tier
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.done: deque[Done] = deque()
        self.pending: deque[Job] = deque()
        self._removed: list[Done] = []
        self._wake = wake
        self.thread = threading.Thread(target=self._run, name=f"shmcache-{tier.number.name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None:
            if isinstance(job, _REMOVALS):
                self._removed.append(_run_job(self.tier, job))
                if self.jobs.empty() or len(self._removed) == _MOST_REMOVALS:
                    self._end_removals()
            else:
                self._end_removals()
                self._end([_run_job(self.tier, job)])
        self._end_removals()
        self.tier.close()

    def _end_removals(self) -> None:
        """Synchronise those that came in a row, at the price of one, and report them."""
        removed, self._removed = self._removed, []
        if removed:
            self._end(_synchronised(self.tier, removed))

    def _end(self, ended: Sequence[Done]) -> None:
        self.done.extend(ended)
        self._wake()


class Lane:
    """A tier behind its thread."""

    def __init__(self, open_tier: Callable[[], Tier], wake: Callable[[], None]) -> None:
        """Open the tier on the caller's thread. Raises what it raises: a start is not a failure at work.

        wake is called from the lane's thread whenever an outcome is there.
        """
        self._open_tier = open_tier
        self._wake = wake
        self._worker: _Worker | None = _Worker(open_tier(), wake)
        self.tier = self._worker.tier
        self.state = LaneState.UP
        self._given_up: list[Done] = []
        self._failures = 0
        self._downs = 0
        self._up_again_s = 0.0
        self._submitted = self._ended = 0

    def submit(self, job: Job) -> None:
        """Queue a job; while the tier is down it ends at once, given up."""
        self._submitted += 1
        if self._worker is None:
            self._given_up.append(Done(job, error="the tier is down", is_fault=True))
            self._wake()
        else:
            if not self._worker.pending:
                self.tier.move()
            self._worker.pending.append(job)
            self._worker.jobs.put(job)

    def outcomes(self) -> list[Done]:
        """All that has ended since the last call."""
        ended, self._given_up = self._given_up, []
        worker = self._worker
        while worker is not None and worker.done:
            done = worker.done.popleft()
            worker.pending.popleft()
            self._failures = self._failures + 1 if done.is_fault else 0
            ended.append(done)
        self._ended += len(ended)
        return ended

    def look(self, now_s: float) -> None:
        """Once a tick: is a job late, did too many fail, is it time to try again?"""
        if self.state is LaneState.DOWN:
            if now_s >= self._up_again_s:
                self._come_up(now_s)
            return
        assert self._worker is not None
        if self._failures >= _FAILURES_TO_GO_DOWN:
            self._go_down(now_s, "its jobs failed")
        elif self._worker.pending and now_s - self.tier.moved_s > JOB_DEADLINE_S:
            self._go_down(now_s, "a job is late")

    def statistics(self) -> LaneStatistics:
        """submitted == ended + those in flight."""
        return LaneStatistics(self._submitted, self._ended, self._downs)

    def close(self, timeout_s: float = 5.0) -> None:
        """Let the queued jobs run, at most so long, and close the tier."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.jobs.put(None)
            worker.thread.join(timeout_s)

    def _go_down(self, now_s: float, why: str) -> None:
        worker, self._worker = self._worker, None
        assert worker is not None
        self.state = LaneState.DOWN
        self._given_up += [Done(job, error=why, is_fault=True) for job in worker.pending]
        worker.jobs.put(None)
        self._up_again_s = now_s + BACKOFF_S[min(self._downs, len(BACKOFF_S) - 1)]
        self._downs += 1
        self._failures = 0
        self._wake()

    def _come_up(self, now_s: float) -> None:
        try:
            tier = self._open_tier()
        except (OSError, ShmcacheError):
            self._up_again_s = now_s + BACKOFF_S[-1]
            return
        self._worker = _Worker(tier, self._wake)
        self.tier = tier
        self.state = LaneState.UP


def _synchronised(tier: Tier, removed: list[Done]) -> list[Done]:
    """The same removals, or all of them failed."""
    tier.move()
    try:
        tier.sync_removals()
    except Exception as error:  # I1
        return [Done(done.job, error=f"{type(error).__name__}: {error}", is_fault=True) for done in removed]
    return removed


def _run_job(tier: Tier, job: Job) -> Done:
    tier.move()
    try:
        match job:
            case Link():
                return Done(job, slab=tier.link(job.handover))
            case Remove():
                tier.remove(job.key)
            case SetAside():
                tier.set_aside(job.key)
            case RemoveAside():
                tier.remove_aside(job.key)
            case WriteUse():
                tier.write_use(job.key, job.hit_count, job.last_used_unix_s)
            case SetPin():
                tier.set_pin(job.key, job.pinned)
            case HandOn():
                tier.hand_on(job.handover, job.in_path)
            case StoreForget():
                tier.store_forget(job.number)
            case Survey():
                return Done(job, keys=frozenset(tier.keys()))
            case Look():
                return Done(job, slab=tier.read(job.key))
    except (CorruptSlab, ForeignObject, FileNotFoundError) as error:
        is_damaged = isinstance(job, Look) and isinstance(error, CorruptSlab) and tier.is_ours(job.key)
        return Done(job, error=str(error), is_damaged=is_damaged)
    except Exception as error:  # I1: whatever a tier raises stays in its lane
        return Done(job, error=f"{type(error).__name__}: {error}", is_fault=True)
    return Done(job)
