"""Removals that wait in a row are synchronised together, and none of them ends before it is."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import Namespace, eventually

from shmcache import shm
from shmcache.tiers import supervisor
from shmcache.tiers.base import file_name
from shmcache.tiers.disk import DiskTier
from shmcache.tiers.supervisor import Done, Job, Lane, Remove, RemoveAside, Survey

COUNT, DIRECTORIES = 300, 8


class Gated(DiskTier):
    """A disk whose surveys wait, so that jobs gather behind one."""

    gate = threading.Event()

    def keys(self) -> Iterator[bytes]:
        assert self.gate.wait(20)
        return super().keys()


@pytest.fixture
def lane(space: Namespace, tmp_path: Path) -> Iterator[Lane]:
    shm.make_directory(space.names.directory)
    Gated.gate.clear()
    made = Lane(lambda: Gated(space.names, tmp_path), lambda: None)
    yield made
    Gated.gate.set()
    made.close()


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The descriptors of all fsyncs, in order."""
    real, seen = os.fsync, []

    def sync(fd: int) -> None:
        seen.append(fd)
        real(fd)

    monkeypatch.setattr(os, "fsync", sync)
    return seen


def keys_of(lane: Lane) -> list[bytes]:
    """Keys of files that lie in the tier, in a few directories."""
    keys = [bytes([number % DIRECTORIES]) + os.urandom(31) for number in range(COUNT)]
    for key in keys:
        os.close(os.open(file_name(key), os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=lane.tier.directory_fd(key)))
    return keys


def run(lane: Lane, jobs: list[Job]) -> list[Done]:
    """All of them, queued behind a survey."""
    lane.submit(Survey())
    for job in jobs:
        lane.submit(job)
    Gated.gate.set()
    done: list[Done] = []

    def all_there() -> bool:
        done.extend(lane.outcomes())
        return len(done) > len(jobs)

    eventually(all_there)
    assert [each.job for each in done] == [Survey(), *jobs]
    return done[1:]


def test_removals_in_a_row_cost_one_synchronisation_of_each_directory(lane: Lane, syncs: list[int]) -> None:
    keys = keys_of(lane)
    syncs.clear()
    done = run(lane, [Remove(key) for key in keys])
    assert all(not each.error for each in done)
    assert len(syncs) == len(set(syncs)) == DIRECTORIES
    assert list(lane.tier.keys()) == []


def test_a_job_between_two_removals_comes_when_the_first_is_synchronised(
    lane: Lane, syncs: list[int]
) -> None:
    first, second, third = keys_of(lane)[:3]
    done = run(lane, [Remove(first), RemoveAside(second), Survey(), Remove(third)])
    assert first not in done[2].keys
    assert third in done[2].keys


def test_a_synchronisation_that_fails_fails_all_that_waited_for_it_and_is_tried_again(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(lane)[:3]

    def fail(_fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        done = run(lane, [Remove(key) for key in keys[:2]])
        assert [(each.is_fault, "Input/output" in each.error) for each in done] == [(True, True)] * 2
    assert len(lane.tier._unsynchronised) == len({key[0] for key in keys[:2]})  # type: ignore[attr-defined]
    (last,) = run(lane, [Remove(keys[2])])
    assert not last.error
    assert not lane.tier._unsynchronised  # type: ignore[attr-defined]


def test_no_more_than_so_many_wait_for_one_synchronisation(
    lane: Lane, syncs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_MOST_REMOVALS", 10)
    keys = keys_of(lane)[:40]
    syncs.clear()
    assert all(not each.error for each in run(lane, [Remove(key) for key in keys]))
    assert len(syncs) == 4 * DIRECTORIES
