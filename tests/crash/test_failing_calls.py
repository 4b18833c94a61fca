"""Every call into the system that a save, a load, a forgetting and a start make fails once.

After each: nobody saw an exception, the row is whole or absent and all others are there, `check` finds
nothing, files and descriptors are those of the rows and no others, and whoever missed something finds one
line about it in a log, and a count.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from failing_calls import Board, Call
from support import (
    PIECES,
    TOKEN_IDS,
    Child,
    eventually,
    longest,
    meta,
    payload_of,
    plan,
    save,
    slab_file,
)
from three_tiers import STATE, TIERS, WHO, Rig, key_of, text_of

from shmcache import client, connection, server
from shmcache.client import Cache
from shmcache.connection import Head
from shmcache.errors import OutOfSpace
from shmcache.protocol import Evict, Evicted, Pin, Pinned
from shmcache.tiers import supervisor
from shmcache.tiers.base import HandOver

ERRORS = (errno.EIO, errno.ENOSPC, errno.EINTR)
TRIES = 5
BY_CHANCE = (
    *(" read ", "ClientPage", "Tier.read<_run_job", "_is_own<Tier.handed_over"),
    "Tier.handed_over<Coordinator._adopt_orphans",
)
"""A reply that is there already is not waited for, a worker that only reads may never be noticed, and a sweep
looks at what is just being handed over or linked only if it comes then."""

_FAILED: set[str] = set()
"""Places that have had their turn: the short form fails the calls of each once, in whatever operation."""

WHOLE = pytest.mark.parametrize(
    "whole", [False, pytest.param(True, marks=pytest.mark.stress)], ids=["each call", "each call and error"]
)


class Watched(Rig):
    """With a board under all calls, and what this process has said."""

    def __init__(self, root: Path) -> None:
        self.board = Board()
        self.said: list[str] = []
        super().__init__(root, self._watch)

    def _watch(self) -> None:
        supervisor._FAILURES_TO_GO_DOWN = 1 << 30  # one fault follows the other here, and each is alone
        self.board.install("coordinator")

    def close(self) -> None:
        super().close()
        self.board.close()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    # What was lost with a message is not waited for as long as a test waits for a slow machine.
    monkeypatch.setattr(client, "RESERVE_TIMEOUT_MS", 1000)
    monkeypatch.setattr(client, "_ANSWER_NS", 1_000_000_000)
    made = Watched(tmp_path)
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


def warned(rig: Watched, since: int) -> list[str]:
    """Warnings and worse of the coordinator since then, and of this process."""
    lines = rig.space.log()[since:].splitlines()
    assert not any(line.startswith("Traceback") for line in lines), lines
    return [line for line in lines if " INFO " not in line] + rig.said


def run(rig: Watched, tier: str, whole: bool, operation: Operation) -> None:
    """Record the operation, and fail each of its calls."""
    rig.start(*operation.flags)
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
                rig.start(*operation.flags)
        _FAILED.update(call.place for call in calls)
    assert not wrong, "\n".join(wrong)
    never = {call.place for call in unmet if not any(part in call.place for part in BY_CHANCE)}
    assert not never, "\n".join(sorted(never))


def fail(rig: Watched, tier: str, operation: Operation, call: Call, error: int) -> bool:
    """The operation with one call that fails; whether that came."""
    operation.prepare()
    since = len(rig.space.log())
    rig.said.clear()
    with rig.board.failing(call, error) as has_failed:
        with rig.attach(tier) as cache:
            is_told = operation.act(cache)
            counters = cache.statistics().counters
        if call.is_the_loops and not any(part in call.place for part in BY_CHANCE):
            eventually(has_failed)
        rig.at_rest()
        is_met = has_failed()
    operation.verify(is_told=is_told)
    lines = warned(rig, since)
    # What failed in a survey before this one may be said only now.
    assert len(lines) <= 1 + call.is_the_loops, lines
    dropped = sum(counters[name] for name in counters if name.startswith("save_dropped"))
    assert dropped <= 1 or not isinstance(operation, Save), counters
    if not is_told:
        counted = dropped + counters["cache_faults"] + counters["foreign_objects"] + counters["uncached"]
        assert len(lines) == 1, (lines, counters)
        assert counted or "coordinator" in call.place, counters
    eventually(rig.has_no_more_descriptors)
    return is_met


class Save:
    """A new row into a full tier: reserved, made, handed over, published; another one is evicted for it."""

    flags: tuple[str, ...] = ()

    def __init__(self, rig: Watched, tier: str) -> None:
        self.rig, self.tier = rig, tier
        self.number = -1
        self.others: set[bytes] = set()

    def prepare(self) -> None:
        self.rig.fill(self.tier)
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
        assert len(self.rig.rows(self.tier) & self.others) >= len(self.others) - 1
        for key in set().union(*(self.rig.rows(tier) for tier in TIERS)):
            hit = self.rig.observer.get(key)
            assert hit is not None
            assert bytes(hit.image.payload) == STATE
            hit.close()


class Spill(Save):
    """A new row into memory, and for it the one before goes on to the disk, where the coldest leaves."""

    flags = ("--spill-on-evict",)

    def prepare(self) -> None:
        self.rig.fill(self.tier, 1)
        self.number = next(self.rig.numbers)

    def act(self, cache: Cache) -> bool:
        before = self.rig.rows("disk")
        is_told = super().act(cache)
        if not is_told:
            return False
        eventually(lambda: self.rig.rows("disk") - before or self.rig.board.is_failing())
        return True


class Load:
    """A row that is there, by a worker that knows nothing yet."""

    flags: tuple[str, ...] = ()

    def __init__(self, rig: Watched, tier: str) -> None:
        self.rig, self.tier = rig, tier
        self.number = -1

    def prepare(self) -> None:
        self.rig.fill(self.tier)
        rows = self.rig.rows(self.tier)
        if self.number < 0 or key_of(self.number) not in rows:
            self.number = next(number for number in range(1000) if key_of(number) in rows)

    def act(self, cache: Cache) -> bool:
        found = longest(cache, WHO, text_of(self.number) + b"and more")
        assert found in ((len(text_of(self.number)), STATE), None)
        return found is not None

    def verify(self, *, is_told: bool) -> None:
        """What could not be read once can be the next time: nothing was wrong with it."""
        del is_told
        assert payload_of(self.rig.observer, WHO, text_of(self.number)) == STATE


class Forget:
    """A row that is pinned, and then forgotten for good."""

    flags: tuple[str, ...] = ()

    def __init__(self, rig: Watched, tier: str) -> None:
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
def test_a_save_with_a_call_that_fails_leaves_a_whole_row_or_none(
    rig: Watched, tier: str, whole: bool
) -> None:
    run(rig, tier, whole, Save(rig, tier))


@WHOLE
@pytest.mark.parametrize("tier", ["ram", "ram_file"])
def test_a_spill_with_a_call_that_fails_loses_no_row(rig: Watched, tier: str, whole: bool) -> None:
    run(rig, tier, whole, Spill(rig, tier))


@WHOLE
@pytest.mark.parametrize("tier", TIERS)
def test_a_load_with_a_call_that_fails_is_right_or_a_miss(rig: Watched, tier: str, whole: bool) -> None:
    run(rig, tier, whole, Load(rig, tier))


@WHOLE
@pytest.mark.parametrize("tier", TIERS)
def test_what_is_forgotten_with_a_call_that_fails_does_not_come_back(
    rig: Watched, tier: str, whole: bool
) -> None:
    run(rig, tier, whole, Forget(rig, tier))


# ---- a start


def plant(rig: Watched, tier: str, number: int) -> None:
    """A slab that was handed over when nobody was there to take it."""
    path = rig.space.names.tier(tier, 0) / "in" / HandOver(key_of(number), number + 1, 0).name
    path.write_bytes(slab_file(WHO, text_of(number), STATE))
    path.chmod(0o600)


def pin_of(number: int, head: Head) -> Pin:
    return Pin(**head, key=key_of(number), pinned=True)


def starts(rig: Watched) -> bool:
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
def test_a_start_with_a_call_that_fails_serves_all_rows_or_says_why_not(rig: Watched, whole: bool) -> None:
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
    # Lanes go on after the start, as in a save; `write` is the standard library's, to its own tracker.
    calls = [call for call in calls if not call.is_the_loops and "_Worker._run" not in call.place]
    calls = [call for call in calls if call.function != "write" and call.nth == 1]
    calls = [call for call in calls if whole or "Coordinator.adopt" in call.place]
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
