"""Every call into the system that a save, a load, a forgetting and a start make fails once.

After each: nobody saw an exception, the row is whole or absent and all others are there, `check` finds
nothing, files and descriptors are those of the rows and no others, and whoever missed something finds one
line about it in a log, and a count.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from failing_calls import Board, Call
from support import (
    PAYLOAD_OFFSET,
    PIECES,
    TOKEN_IDS,
    Child,
    Namespace,
    eventually,
    identity,
    longest,
    meta,
    payload_of,
    plan,
    prompt,
    save,
    slab_file,
)

from shmcache import client, connection, server
from shmcache.check import check
from shmcache.client import Cache
from shmcache.connection import Head
from shmcache.errors import OutOfSpace
from shmcache.key import row_address
from shmcache.protocol import Evict, Evicted, Pin, Pinned
from shmcache.tiers import disk
from shmcache.tiers.base import HandOver

WHO = identity()
TIERS = ("ram", "ram_file", "disk")
STATE = os.urandom(100_000)
SLAB = PAYLOAD_OFFSET + len(STATE)
BUDGET = 2 * SLAB + 4096
ERRORS = (errno.EIO, errno.ENOSPC, errno.EINTR)
TRIES = 5
"""Whether a call comes may be chance."""

_FAILED: set[str] = set()
"""Places that have had their turn: the short form fails the calls of each once, in whatever operation."""

WHOLE = pytest.mark.parametrize(
    "whole", [False, pytest.param(True, marks=pytest.mark.stress)], ids=["each call", "each call and error"]
)


def text_of(number: int) -> bytes:
    return prompt(1000 + number)


def key_of(number: int) -> bytes:
    return row_address(WHO.seed, text_of(number)).key


class Rig:
    """A namespace with all three tiers, room for two rows in each, and a board under all calls."""

    def __init__(self, root: Path) -> None:
        root.chmod(0o700)
        self.root = root
        self.board = Board()
        self.space = Namespace(ram_file_bytes=BUDGET, max_rows=64)
        self.numbers = iter(range(1 << 30))
        self.observer = self.space.cache()
        self.descriptors: list[int] = []
        self.said: list[str] = []

    def start(self, *, ready: bool = True) -> None:
        options = {"ram-bytes": BUDGET, "disk-bytes": BUDGET, "staging-bytes": BUDGET, "disk-dir": self.root}
        flags = [f"--{name}={value}" for name, value in options.items()]
        self.space.start(*flags, "--decisions-rows=16", patch=self._patch, ready=ready)

    def _patch(self) -> None:
        server.TICK_S, server.SWEEP_S = 0.01, 0.1
        disk._CHUNK_BYTES = 40_000
        self.board.install("coordinator")

    def attach(self, tier: str) -> Cache:
        """A worker that knows nothing yet."""
        return client.attach(self.space.name, tier=tier)

    def rows(self, tier: str) -> set[bytes]:
        """The keys of a tier's rows."""
        self.observer.connection._look_again_ns = 0
        eventually(lambda: self.observer.connection.reader() is not None)
        reader = self.observer.connection.reader()
        assert reader is not None
        return {found.row.key for found in reader.rows() if found.row.tier == TIERS.index(tier)}

    def fill(self, tier: str) -> None:
        """Two rows, so that the next save evicts one."""
        while len(self.rows(tier)) < 2:
            with self.attach(tier) as cache:
                assert eventually(lambda: save(cache, WHO, text_of(next(self.numbers)), STATE))
            self.at_rest()

    def at_rest(self) -> None:
        """Everything agrees, nothing is charged, and whoever has left has left nothing."""
        assert self.space.coordinator is not None
        assert self.space.coordinator.poll() is None, "the coordinator has ended"
        own = f"{self.observer.connection.client:016x}"
        eventually(lambda: {path.name for path in self.space.names.pages.iterdir()} <= {own})
        eventually(lambda: not self.charged())
        eventually(lambda: check(self.space.name) == [])
        paths = [path for path in self.root.rglob("*") if not path.is_dir()]
        assert {path.name for path in paths if path.suffix != ".kvc"} <= {".lock", ".forget"}

    def charged(self) -> dict[str, int]:
        """What is owed to saves in flight."""
        reader = self.observer.connection.reader()
        stats = reader.stats() if reader is not None else {"no index": 1}
        names = ("no index", "saves_in_flight", *(f"charged_{tier}" for tier in TIERS))
        return {name: stats[name] for name in names if stats.get(name)}

    def has_no_more_descriptors(self) -> bool:
        """Than at the first call: the coordinator and this process."""
        self.observer.let_go()
        now = [self._open_in(pid) for pid in (self.space.pid, os.getpid())]
        self.descriptors = self.descriptors or now
        is_same = all(count <= before for count, before in zip(now, self.descriptors, strict=True))
        if not is_same:
            gc.collect()  # what an exception has held goes with it
        return is_same

    def _open_in(self, pid: int) -> int:
        """Directories on disk stay open once they were used."""
        count = 0
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                count += not os.readlink(link).startswith(str(self.root))  # noqa: PTH115
            except FileNotFoundError:
                continue
        return count

    def close(self) -> None:
        self.space.close()
        self.board.close()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    # What was lost with a message is not waited for as long as a test waits for a slow machine.
    monkeypatch.setattr(client, "RESERVE_TIMEOUT_MS", 1000)
    monkeypatch.setattr(client, "_ANSWER_NS", 1_000_000_000)
    made = Rig(tmp_path)
    # As text, and past what pytest keeps: a record holds its error, and that whatever was open.
    log = logging.Logger("worker")
    log.addFilter(lambda record: made.said.append(record.getMessage()))
    monkeypatch.setattr(connection, "log", log)
    try:
        yield made
    finally:
        made.close()


def ways(calls: Sequence[Call], whole: bool) -> Iterator[tuple[Call, int]]:
    """Each call with every error; or the first and the last from each place with one, another each time."""
    last = {call.place: call.nth for call in calls}
    some = [call for call in calls if call.nth in (1, last[call.place])]
    for number, call in enumerate(calls if whole else some):
        each = call.ways(ERRORS)
        yield from ((call, error) for error in (each if whole else each[number % len(each) :][:1]))


def warned(rig: Rig, since: int) -> list[str]:
    """Warnings and worse of the coordinator since then, and of this process."""
    lines = rig.space.log()[since:].splitlines()
    assert not any(line.startswith("Traceback") for line in lines), lines
    return [line for line in lines if " INFO " not in line] + rig.said


def run(rig: Rig, tier: str, whole: bool, operation: Operation) -> None:
    """Record the operation, and fail each of its calls."""
    rig.start()
    rig.fill(tier)
    with rig.board.installed("worker"):
        for _ in range(2):  # at its first time it makes what is there ever after
            operation.prepare()
            rig.at_rest()
            with rig.board.recording() as calls, rig.attach(tier) as cache:
                assert operation.act(cache)
                eventually(lambda: rig.board.has_recorded("Coordinator.sweep"))
            operation.verify(is_told=True)
            rig.at_rest()
        assert rig.has_no_more_descriptors()
        wrong, unmet = [], []
        for call, error in ways([call for call in calls if whole or call.place not in _FAILED], whole):
            try:
                if not any(fail(rig, tier, operation, call, error) for _ in range(TRIES)):
                    unmet.append(call)
            except AssertionError as failure:
                wrong.append(f"{call} {error}: {failure} {rig.space.log()[-500:]}")
                rig.space.kill()
                rig.start()
        _FAILED.update(call.place for call in calls)
    assert not wrong, "\n".join(wrong)
    # A reply that is there already is not waited for, and a worker that only reads may never be noticed.
    assert all(call.function == "read" or "ClientPage" in call.place for call in unmet), unmet


def fail(rig: Rig, tier: str, operation: Operation, call: Call, error: int) -> bool:
    """The operation with one call that fails; whether that came."""
    rig.fill(tier)
    operation.prepare()
    since = len(rig.space.log())
    rig.said.clear()
    with rig.board.failing(call, error) as has_failed:
        with rig.attach(tier) as cache:
            is_told = operation.act(cache)
            counters = cache.statistics().counters
        if call.is_the_loops:
            eventually(has_failed)
        rig.at_rest()
        is_met = has_failed()
    operation.verify(is_told=is_told)
    lines = warned(rig, since)
    assert len(lines) <= 1, lines
    if not is_told:
        counted = sum(counters[name] for name in counters if name.startswith("save_dropped"))
        counted += counters["cache_faults"] + counters["foreign_objects"] + counters["uncached"]
        assert len(lines) == 1, (lines, counters)
        assert counted or "coordinator" in call.place, counters
    eventually(rig.has_no_more_descriptors)
    return is_met


class Save:
    """A new row into a full tier: reserved, made, handed over, published; another one is evicted for it."""

    def __init__(self, rig: Rig, tier: str) -> None:
        self.rig, self.tier = rig, tier
        self.number = -1
        self.others: set[bytes] = set()

    def prepare(self) -> None:
        self.number = next(self.rig.numbers)
        self.others = self.rig.rows(self.tier)

    def act(self, cache: Cache) -> bool:
        (slab,) = cache.reserve([plan(WHO, text_of(self.number), len(STATE))], None, cache.forget).slabs
        if slab is None:
            return False
        try:
            slab.payload(len(STATE))[:] = STATE
        except OutOfSpace:
            return False
        slab.save(meta(WHO, text_of(self.number)), PIECES, TOKEN_IDS)
        return slab.wait(5_000)

    def verify(self, *, is_told: bool) -> None:
        """One row may have left for it, and is whole where it has not."""
        there = payload_of(self.rig.observer, WHO, text_of(self.number))
        assert there in ((STATE,) if is_told else (STATE, None))
        rows = self.rig.rows(self.tier)
        assert len(rows & self.others) >= len(self.others) - 1
        for key in rows:
            hit = self.rig.observer.get(key)
            assert hit is not None
            assert bytes(hit.image.payload) == STATE
            hit.close()


class Load:
    """A row that is there, by a worker that knows nothing yet."""

    def __init__(self, rig: Rig, tier: str) -> None:
        self.rig, self.tier = rig, tier
        self.number = -1

    def prepare(self) -> None:
        rows = self.rig.rows(self.tier)
        if self.number < 0 or key_of(self.number) not in rows:
            self.number = next(number for number in range(1000) if key_of(number) in rows)

    def act(self, cache: Cache) -> bool:
        found = longest(cache, WHO, text_of(self.number) + b"and more")
        assert found in ((1000 + self.number, STATE), None)
        return found is not None

    def verify(self, *, is_told: bool) -> None:
        """What could not be read once can be the next time: nothing was wrong with it."""
        del is_told
        assert payload_of(self.rig.observer, WHO, text_of(self.number)) == STATE


class Forget:
    """A row that is pinned, and then forgotten for good."""

    def __init__(self, rig: Rig, tier: str) -> None:
        self.rig, self.tier = rig, tier
        self.key = b""
        self.answer: Any = None

    def prepare(self) -> None:
        self.rig.fill(self.tier)
        self.key = min(self.rig.rows(self.tier))

    def act(self, cache: Cache) -> bool:
        pinned = cache.connection.ask(lambda head: Pin(**head, key=self.key, pinned=True), 1_000_000_000)
        self.answer = cache.connection.ask(lambda head: Evict(**head, keys=[self.key]), 1_000_000_000)
        return getattr(pinned, "done", False) and self.answer == Evicted(1, 0)

    def verify(self, *, is_told: bool) -> None:
        """It is gone where anybody has answered, also if its file would not go at once."""
        del is_told
        assert (self.rig.observer.get(self.key) is None) or self.answer is None


Operation = Save | Load | Forget


@WHOLE
@pytest.mark.parametrize("tier", TIERS)
def test_a_save_with_a_call_that_fails_leaves_a_whole_row_or_none(rig: Rig, tier: str, whole: bool) -> None:
    run(rig, tier, whole, Save(rig, tier))


@WHOLE
@pytest.mark.parametrize("tier", TIERS)
def test_a_load_with_a_call_that_fails_is_right_or_a_miss(rig: Rig, tier: str, whole: bool) -> None:
    run(rig, tier, whole, Load(rig, tier))


@WHOLE
@pytest.mark.parametrize("tier", TIERS)
def test_what_is_forgotten_with_a_call_that_fails_does_not_come_back(
    rig: Rig, tier: str, whole: bool
) -> None:
    run(rig, tier, whole, Forget(rig, tier))


# ---- a start


def plant(rig: Rig, tier: str, number: int) -> None:
    """A slab that was handed over when nobody was there to take it."""
    path = rig.space.names.tier(tier, 0) / "in" / HandOver(key_of(number), number + 1, 0).name
    path.write_bytes(slab_file(WHO, text_of(number), STATE))
    path.chmod(0o600)


def pin_of(number: int, head: Head) -> Pin:
    return Pin(**head, key=key_of(number), pinned=True)


def starts(rig: Rig) -> bool:
    """Whether a coordinator comes up; one that cannot says so in one line, and not with a traceback."""
    since = len(rig.space.log())
    try:
        rig.start()
    except AssertionError:
        assert isinstance(rig.space.coordinator, Child)
        assert rig.space.coordinator.wait() == server.EXIT_FAILED
        lines = [line for line in rig.space.log()[since:].splitlines() if line.startswith("shmcache-coord")]
        assert len(lines) == 1, rig.space.log()[since:]
        assert "Traceback" not in rig.space.log()[since:]
        return False
    return True


@WHOLE
def test_a_start_with_a_call_that_fails_serves_all_rows_or_says_why_not(rig: Rig, whole: bool) -> None:
    rig.start()
    kept = {}
    for tier in ("ram_file", "disk"):
        kept[tier] = next(rig.numbers)
        with rig.attach(tier) as cache:
            assert save(cache, WHO, text_of(kept[tier]), STATE)
            pin = cache.connection.ask(partial(pin_of, kept[tier]), 10_000_000_000)
            assert isinstance(pin, Pinned)
            assert pin.done

    def again(number: int) -> bool:
        rig.space.kill()
        for tier in kept:
            plant(rig, tier, number)
        return starts(rig)

    for _ in range(2):
        with rig.board.recording() as calls:
            assert again(next(rig.numbers))
            rig.at_rest()
    calls = [call for call in calls if not call.is_the_loops and (whole or "Coordinator.adopt" in call.place)]
    wrong, refused = [], []
    for call, error in ways(calls, whole):
        number = next(rig.numbers)
        try:
            with rig.board.failing(call, error) as has_failed:
                is_up = again(number)
            if not is_up:
                refused.append(call)
                assert starts(rig)
            for here in kept.values():
                eventually(lambda here=here: payload_of(rig.observer, WHO, text_of(here)) == STATE)
            rig.at_rest()
            assert payload_of(rig.observer, WHO, text_of(number)) in (STATE, None)
            assert has_failed() or not is_up
        except AssertionError as failure:
            wrong.append(f"{call} {error}: {failure} {rig.space.log()[-500:]}")
    assert not wrong, "\n".join(wrong)
    assert not [call for call in refused if "Tier.scan" in call.place or "handed_over" in call.place]
