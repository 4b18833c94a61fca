"""A save is hit at every named step, in every tier: its worker killed, its worker stopped for long, or its
coordinator killed.

After each: a coordinator starts, or goes on; `check` finds nothing; every row that is there is right in every
bit; nothing is charged, no page, name or descriptor is left. Whoever was only stopped goes on, and does no
harm.
"""

from __future__ import annotations

import mmap
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import kill_points
import pytest
from kill_points import KillPoint
from support import PIECES, TOKEN_IDS, Child, Pipe, eventually, meta, payload_of, plan, save
from three_tiers import STATE, TIERS, WHO, Rig, key_of, text_of

from shmcache import client, server
from shmcache.errors import OutOfSpace

ROUNDS = 1_000
_MEMORY_ONLY = ("save: first name only", "save: two names")
_WHERE_ONE_IS_REPLACED = ("P8", "P9")  # where the key has a less durable row: on disk, then


class Round(NamedTuple):
    """Who is hit, where and how."""

    tier: str
    point: KillPoint
    nth: int
    blow: int

    def __str__(self) -> str:
        return f"{self.tier}, {self.point}, {signal.Signals(self.blow).name}"


class Stage(Rig):
    """A rig whose coordinator may be armed; `is_on` says to it and to a worker that steps count now."""

    def __init__(self, root: Path) -> None:
        self._switch = mmap.mmap(-1, mmap.PAGESIZE)
        self._armed: Round | None = None
        super().__init__(root, self._arm)

    def _arm(self) -> None:
        server.STUCK_S = 0.2
        if self._armed is not None:
            kill_points.arm(self._armed.point, self._armed.nth, self._armed.blow, self.is_on)

    def is_on(self) -> bool:
        """Whether the save has begun that is to be hit."""
        return self._switch[0] == 1

    def switch(self, on: bool) -> None:
        """Say so."""
        self._switch[0] = on

    def hit(self, what: Round) -> bool:
        """One save, hit once; whether it came there. All is at rest again then."""
        number = next(self.numbers)
        self.fill(what.tier)
        if what.tier == "disk" and what.point.step in _WHERE_ONE_IS_REPLACED:
            with self.attach("ram_file") as cache:
                assert save(cache, WHO, text_of(number), STATE)
            self.at_rest()
        if what.point.role == "coordinator":
            is_hit = self._hit_coordinator(what, number)
        else:
            is_hit = self._hit_worker(what, number)
        self.switch(False)
        self.at_rest()
        assert payload_of(self.observer, WHO, text_of(number)) in (STATE, None)
        self.verify()
        return is_hit

    def verify(self) -> None:
        """All rows are right, and no descriptor is left."""
        for tier in TIERS:
            for key in self.rows(tier):
                found = self.observer.get(key)
                assert found is not None
                assert bytes(found.image.payload) == STATE
                found.close()
        eventually(self.has_no_more_descriptors)

    def _hit_coordinator(self, what: Round, number: int) -> bool:
        self._armed = what
        self.space.kill()
        self.start()
        self._armed = None
        with self.attach(what.tier) as cache:
            eventually(lambda: cache.connection.reader() is not None)
            self.switch(True)
            is_told = save(cache, WHO, text_of(number), STATE)
            self.switch(False)
        assert isinstance(self.space.coordinator, Child)
        is_hit = self.space.coordinator.poll() == -signal.SIGKILL
        assert is_hit or is_told
        self.space.kill()
        self.start()
        if is_told:
            eventually(lambda: payload_of(self.observer, WHO, text_of(number)) == STATE or what.tier == "ram")
        return is_hit

    def _hit_worker(self, what: Round, number: int) -> bool:
        child = Child(work, self.space.name, what, number, self)
        try:
            child.hear()
            if what.blow == signal.SIGKILL:
                return child.wait() == -signal.SIGKILL
            eventually(lambda: child.poll() is not None or is_stopped(child.pid))
            is_hit = child.poll() is None
            if is_hit:
                # Its key is free though its bytes are not: somebody else makes the row, or it is there.
                with self.attach(what.tier) as cache:
                    eventually(lambda: cache.has(key_of(number)) or save(cache, WHO, text_of(number), STATE))
                child.send_signal(signal.SIGCONT)
            assert child.wait() == 0
            return is_hit
        finally:
            child.close()


def work(pipe: Pipe, namespace: str, what: Round, number: int, stage: Stage) -> None:
    """A worker that saves one row and is hit."""
    cache = client.attach(namespace, tier=what.tier)
    eventually(lambda: cache.connection.reader() is not None)
    kill_points.arm(what.point, what.nth, what.blow, stage.is_on)
    pipe.say()
    stage.switch(True)
    (slab,) = cache.reserve([plan(WHO, text_of(number), len(STATE))], None, cache.forget).slabs
    if slab is not None:
        try:
            slab.payload(len(STATE))[:] = STATE
        except OutOfSpace:
            return
        slab.save(meta(WHO, text_of(number)), PIECES, TOKEN_IDS)
        slab.wait(20_000)
    cache.close()


def is_stopped(pid: int) -> bool:
    """Whether the kernel has it as stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(client, "RESERVE_TIMEOUT_MS", 2_000)
    monkeypatch.setattr(client, "_ANSWER_NS", 2_000_000_000)
    made = Stage(tmp_path)
    try:
        made.start()
        for tier in TIERS:
            made.fill(tier)
        made.space.kill()
        made.start()
        made.at_rest()
        made.verify()  # from here on descriptors are counted
        yield made
    finally:
        made.close()


def named(role: str, tier: str) -> list[KillPoint]:
    """The named steps of a save in this tier."""
    points = [point for point in kill_points.points(role) if point.step and not point.comes_once]
    if tier == "disk":
        return [point for point in points if point.step not in _MEMORY_ONLY]
    return [point for point in points if not point.step.startswith("disk")]


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=lambda blow: blow.name)
@pytest.mark.parametrize("tier", TIERS)
def test_a_worker_that_is_hit_at_any_step_leaves_a_whole_row_or_none(
    stage: Stage, tier: str, blow: signal.Signals
) -> None:
    points = named("writer", tier)
    assert len(points) >= 6
    missed = [point.step for point in points if not stage.hit(Round(tier, point, 1, blow))]
    assert not missed, missed


@pytest.mark.parametrize("tier", TIERS)
def test_a_coordinator_that_is_killed_at_any_step_leaves_a_whole_row_or_none(stage: Stage, tier: str) -> None:
    points = named("coordinator", tier)
    if tier == "ram_file":
        points = [point for point in points if point.step not in _WHERE_ONE_IS_REPLACED]
    else:  # the index and the replies are the same for all
        steps = ("save", "disk", *(_WHERE_ONE_IS_REPLACED if tier == "disk" else ()))
        points = [point for point in points if point.step.startswith(steps)]
    missed = [point.step for point in points if not stage.hit(Round(tier, point, 1, signal.SIGKILL))]
    assert not missed, missed


@pytest.mark.stress
def test_a_thousand_blows_at_random_lines_leave_nothing(stage: Stage) -> None:
    chosen = random.Random(4)
    points = {role: kill_points.points(role) for role in ("writer", "coordinator")}
    hits = 0
    for _ in range(ROUNDS):
        role = chosen.choice(("writer", "writer", "coordinator"))
        blow = chosen.choice((signal.SIGKILL, signal.SIGSTOP)) if role == "writer" else signal.SIGKILL
        what = Round(chosen.choice(TIERS), chosen.choice(points[role]), chosen.choice((1, 1, 2, 3)), blow)
        try:
            hits += stage.hit(what)
        except AssertionError as failure:
            raise AssertionError(f"{what}: {failure} {stage.space.log()[-2000:]}") from failure
    assert hits > ROUNDS // 8
