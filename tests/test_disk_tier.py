"""The disk tier's own ways: how a slab is copied, synchronised on the way, and kept from taking the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import Namespace, eventually, identity, plan, prompt, save, slab_file

from shmcache import shm
from shmcache.errors import ConfigError
from shmcache.key import row_address
from shmcache.tiers import disk
from shmcache.tiers.base import HandOver
from shmcache.tiers.disk import DiskTier, disk_path, lock_directory

WHO = identity()
TEXT = prompt(1000)
KEY = row_address(WHO.seed, TEXT).key
CONTENT = slab_file(WHO, TEXT, os.urandom(100_000))
CHUNK_BYTES = 4096


class Clock:
    """A clock that moves only when somebody sleeps or it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept_s: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_CHUNK_BYTES", CHUNK_BYTES)


@pytest.fixture
def tier(space: Namespace, tmp_path: Path) -> Iterator[DiskTier]:
    shm.make_directory(space.names.directory)
    made = DiskTier(space.names, tmp_path)
    yield made
    made.close()


def hand_over(space: Namespace) -> HandOver:
    handover = HandOver(KEY, 5, 0)
    path = space.names.tier("disk", 0) / "in" / handover.name
    path.write_bytes(CONTENT)
    path.chmod(0o600)
    return handover


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOSYS])
def test_where_the_kernel_offers_no_copy_it_is_read_and_written(
    space: Namespace, tier: DiskTier, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "sendfile", refuse)
    tier.link(hand_over(space))
    assert disk_path(tier.path, KEY).read_bytes() == CONTENT


def test_short_copies_go_on(space: Namespace, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.sendfile
    monkeypatch.setattr(os, "sendfile", lambda out, into, at, count: real(out, into, at, min(count, 777)))
    tier.link(hand_over(space))
    assert disk_path(tier.path, KEY).read_bytes() == CONTENT


def test_copies_keep_to_the_bytes_a_second_that_are_allowed(
    space: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(disk, "time", clock)
    shm.make_directory(space.names.directory)
    slow = DiskTier(space.names, tmp_path, write_bytes_per_s=50_000)
    try:
        slow.link(hand_over(space))
    finally:
        slow.close()
    assert sum(clock.slept_s) == pytest.approx(len(CONTENT) / 50_000)
    assert max(clock.slept_s) == pytest.approx(CHUNK_BYTES / 50_000), (
        "in steps, so that the lane is seen to move"
    )


def test_a_large_file_is_synchronised_on_the_way_and_the_lane_is_seen_to_move(
    space: Namespace, tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, real, synchronised = Clock(), os.fdatasync, 0

    def slow(fd: int) -> None:
        nonlocal synchronised
        synchronised += 1
        clock.now_s += 20
        real(fd)

    def move() -> None:
        late_s.append(clock.now_s - moved_s[-1])
        moved_s.append(clock.now_s)

    late_s, moved_s = [], [clock.now_s]
    monkeypatch.setattr(os, "fdatasync", slow)
    monkeypatch.setattr(disk, "_SYNC_BYTES", 5 * CHUNK_BYTES)
    monkeypatch.setattr(tier, "move", move)
    tier.link(hand_over(space))
    assert synchronised == len(CONTENT) // (5 * CHUNK_BYTES) + 1
    assert max(late_s) == 20


@pytest.mark.parametrize("nth", [1, 3])
def test_a_file_that_cannot_be_synchronised_on_the_way_is_discarded(
    space: Namespace, tier: DiskTier, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    calls = iter(range(1, 100))

    def fail(_fd: int) -> None:
        if next(calls) == nth:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", fail)
    monkeypatch.setattr(disk, "_SYNC_BYTES", 5 * CHUNK_BYTES)
    handover = hand_over(space)
    with pytest.raises(OSError, match="Input/output"):
        tier.link(handover)
    assert list(tier.keys()) == []
    assert list(tier.handed_over()) == [handover]


def test_a_directory_belongs_to_one_coordinator_at_a_time(space: Namespace, tmp_path: Path) -> None:
    held = lock_directory(space.names, tmp_path)
    with pytest.raises(ConfigError, match="another coordinator: start with another --disk-dir"):
        lock_directory(space.names, tmp_path)
    os.close(held)
    os.close(lock_directory(space.names, tmp_path))


# ---- what is on its way


def test_no_more_is_on_its_way_than_staging_bytes_say(space: Namespace, tmp_path: Path) -> None:
    payload_bytes = 100_000
    slab_bytes = plan(WHO, TEXT, payload_bytes).payload_offset + payload_bytes
    space.start(f"--disk-dir={tmp_path}", "--disk-bytes=16M", f"--staging-bytes={2 * slab_bytes}")
    cache = space.cache(tier="disk")
    plans = [plan(WHO, prompt(1000, f"row {number}"), payload_bytes) for number in range(3)]
    grants = [cache.reserve([each], None, cache.forget) for each in plans]
    assert [kind for grant in grants for kind in grant.kinds] == ["granted", "granted", "no_space"]
    eventually(lambda: space.stat("charged_disk") == 2 * slab_bytes)
    (slab,) = grants[0].slabs
    assert slab is not None
    slab.cancel()
    eventually(lambda: cache.reserve(plans[2:], None, cache.forget).kinds == ("granted",))
    more = plan(WHO, prompt(1000, "more than all"), 3 * payload_bytes)
    assert cache.reserve([more], None, cache.forget).kinds == ("no_space",)
    space.restart(f"--disk-dir={tmp_path}", "--disk-bytes=16M", f"--staging-bytes={2 * slab_bytes}")
    assert save(cache, WHO, TEXT, b"state"), "what was granted before a restart is on nobody's account"
