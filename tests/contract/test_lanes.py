"""A tier behind its thread: a job ends in one outcome, whatever the tier does, and nobody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support import Namespace, eventually, identity, prompt

from shmcache import shm
from shmcache.errors import ForeignObject
from shmcache.key import row_address
from shmcache.protocol import Tier as TierNumber
from shmcache.tiers import supervisor
from shmcache.tiers.memory import MemoryTier
from shmcache.tiers.supervisor import BACKOFF_S, JOB_DEADLINE_S, Done, Lane, LaneState, Look, Remove, Survey

KEY = row_address(identity().seed, prompt(100)).key


class Faulty(MemoryTier):
    """A tier that fails or hangs when told to."""

    error: Exception | None = None
    gate = threading.Event()

    def keys(self) -> Iterator[bytes]:
        if self.error is not None:
            raise self.error
        assert self.gate.wait(20)
        return super().keys()


@pytest.fixture
def lane(space: Namespace) -> Iterator[Lane]:
    shm.make_directory(space.names.directory)
    Faulty.error = None
    Faulty.gate.set()
    made = Lane(lambda: Faulty(TierNumber.RAM_FILE, space.names.tier("ram_file", 1)), lambda: None)
    yield made
    Faulty.gate.set()
    made.close()


def state_of(lane: Lane) -> LaneState:
    return lane.state


def ended(lane: Lane, count: int) -> list[Done]:
    """So many outcomes."""
    done: list[Done] = []

    def all_there() -> bool:
        done.extend(lane.outcomes())
        return len(done) >= count

    eventually(all_there)
    figures = lane.statistics()
    assert figures.submitted == figures.ended == lane.statistics().ended
    return done


def test_jobs_end_in_order_each_in_one_outcome(lane: Lane) -> None:
    jobs: list[Any] = [Survey(), Look(KEY), Remove(KEY), Survey()]
    for job in jobs:
        lane.submit(job)
    done = ended(lane, len(jobs))
    assert [each.job for each in done] == jobs
    assert done[0] == Done(Survey(), keys=frozenset())
    assert "No such file" in done[1].error
    assert not done[1].is_fault, "a slab that is not there is not the tier's fault"


def test_an_exception_is_an_outcome_and_three_running_stop_the_tier(lane: Lane) -> None:
    Faulty.error = RuntimeError("the device is gone")
    for number in range(3):
        lane.submit(Survey())
        (done,) = ended(lane, 1)
        assert done.error == "RuntimeError: the device is gone"
        assert done.is_fault
        lane.look(0.0)
        assert (state_of(lane) is LaneState.DOWN) == (number == 2)
    lane.submit(Survey())
    (given_up,) = ended(lane, 1)
    assert given_up.is_fault, "nothing is known of what a tier holds that is down"
    Faulty.error = None
    lane.look(BACKOFF_S[0] - 0.01)
    assert state_of(lane) is LaneState.DOWN
    lane.look(BACKOFF_S[0])
    assert state_of(lane) is LaneState.UP
    lane.submit(Survey())
    assert ended(lane, 1) == [Done(Survey(), keys=frozenset())]


def test_a_foreign_file_is_no_fault_of_the_tier(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    Faulty.error = ForeignObject("a file", 4711, 0o644)
    for _ in range(5):
        lane.submit(Survey())
        (done,) = ended(lane, 1)
        assert not done.is_fault
    lane.look(0.0)
    assert state_of(lane) is LaneState.UP


def test_a_job_that_hangs_is_given_up_with_all_behind_it_and_what_it_still_returns_is_thrown_away(
    lane: Lane,
) -> None:
    Faulty.gate.clear()
    for _ in range(3):
        lane.submit(Survey())
    began_s = lane.tier.moved_s
    lane.look(began_s + JOB_DEADLINE_S)
    assert state_of(lane) is LaneState.UP
    assert lane.outcomes() == []
    lane.look(began_s + JOB_DEADLINE_S + 0.1)
    assert state_of(lane) is LaneState.DOWN
    done = lane.outcomes()
    assert [(each.error, each.is_fault) for each in done] == [("a job is late", True)] * 3
    Faulty.gate.set()
    lane.look(began_s + JOB_DEADLINE_S + 10)
    lane.submit(Survey())
    assert ended(lane, 1) == [Done(Survey(), keys=frozenset())]
    assert lane.statistics().downs == 1


def test_a_tier_that_cannot_be_opened_again_stays_down(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    Faulty.error = RuntimeError("gone")
    for _ in range(supervisor._FAILURES_TO_GO_DOWN):
        lane.submit(Survey())
        ended(lane, 1)
    lane.look(0.0)
    real = lane._open_tier

    def refuse() -> Faulty:
        raise OSError(5, "Input/output error")

    lane._open_tier = refuse
    lane.look(BACKOFF_S[0])
    assert state_of(lane) is LaneState.DOWN
    Faulty.error = None
    lane._open_tier = real
    lane.look(BACKOFF_S[0] + BACKOFF_S[-1])
    assert state_of(lane) is LaneState.UP
