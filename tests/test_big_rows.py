"""Rows of gigabytes: no length is cut to 32 bits anywhere, and budgets hold."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support import PAYLOAD_OFFSET, PIECES, TOKEN_IDS, Namespace, eventually, identity, meta, plan, prompt

from shmcache import shm
from shmcache.check import check
from shmcache.client import Cache, Hit
from shmcache.key import row_address

WHO = identity()
GIB = 1 << 30
TIERS = ["ram", "ram_file", "disk"]
WITHIN_S = 300.0  # a disk that others use as well


def needs(tmp_path: Path, *, shm_bytes: int, memory_bytes: int = 0, disk_bytes: int = 0) -> None:
    """Skip where the machine cannot hold it beside what else it does.

    memory_bytes: beside what lies in /dev/shm at the same time. A hand-over has left when its row is read.
    """
    for what, need_bytes, free_bytes in (
        ("/dev/shm", shm_bytes, shm.free_bytes()),
        ("memory", shm_bytes + memory_bytes, psutil.virtual_memory().available),
        (str(tmp_path), disk_bytes, shm.free_bytes(tmp_path)),
    ):
        if free_bytes < need_bytes + GIB:
            pytest.skip(f"{what} has {free_bytes / GIB:.1f} GiB free, {need_bytes / GIB + 1:.1f} are needed")


def flags_of(tmp_path: Path, tier: str, budget_bytes: int, staging_bytes: int) -> tuple[str, ...]:
    """Room in this tier alone; the others get what they must have."""
    budgets = {name: budget_bytes if name == tier else 1 << 20 for name in TIERS}
    return (
        f"--ram-bytes={budgets['ram']}",
        f"--ram-file-bytes={budgets['ram_file']}",
        f"--disk-dir={tmp_path}",
        f"--disk-bytes={budgets['disk']}",
        f"--staging-bytes={staging_bytes if tier == 'disk' else 1 << 20}",
    )


def marks(size_bytes: int, number: int) -> Iterator[tuple[int, bytes]]:
    """A few bytes at both ends and around every power of two on the way; all else stays zero."""
    edges = [0, size_bytes - 8, *(1 << bits for bits in range(29, 34))]
    for at in {edge + by for edge in edges for by in (-8, 0, 8)}:
        if 0 <= at <= size_bytes - 8:
            yield at, struct.pack("<II", number, at & 0xFFFFFFFF)


def save_big(cache: Cache, number: int, size_bytes: int) -> bytes:
    """A row that holds its marks; its key."""
    text = prompt(2000, f"big {number}")
    (slab,) = cache.reserve([plan(WHO, text, size_bytes)], None, cache.forget).slabs
    assert slab is not None
    with slab.payload(size_bytes) as payload:
        for at, mark in marks(size_bytes, number):
            payload[at : at + 8] = mark
    slab.save(meta(WHO, text), PIECES, TOKEN_IDS)
    key = row_address(WHO.seed, text).key
    eventually(lambda: cache.has(key), WITHIN_S)
    return key


def restore_big(cache: Cache, key: bytes, number: int, size_bytes: int) -> None:
    """The row is there, summed, with each mark in its place."""
    hit = cache.get(key)
    assert hit is not None
    assert len(hit.image.payload) == size_bytes
    assert hit.found.row.slab_bytes == PAYLOAD_OFFSET + size_bytes
    assert _marks_of(hit, size_bytes, number) == list(marks(size_bytes, number))
    hit.close()


def _marks_of(hit: Hit, size_bytes: int, number: int) -> list[tuple[int, bytes]]:
    return [(at, bytes(hit.image.payload[at : at + 8])) for at, _mark in marks(size_bytes, number)]


@pytest.mark.stress
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "size_bytes",
    [pytest.param(3 * GIB // 2, id="1.5GiB"), pytest.param(4 * GIB + (1 << 20) + 77, id="over4GiB")],
)
@pytest.mark.parametrize("tier", TIERS)
def test_a_big_row_is_reserved_written_summed_restarted_and_read(
    space: Namespace, tmp_path: Path, tier: str, size_bytes: int
) -> None:
    needs(tmp_path, shm_bytes=size_bytes, disk_bytes=size_bytes if tier == "disk" else 0)
    budget_bytes = size_bytes + (64 << 20)
    flags = flags_of(tmp_path, tier, budget_bytes, staging_bytes=budget_bytes)
    space.start(*flags)
    cache = space.cache(tier=tier, kept_mapping_bytes=1)
    key = save_big(cache, 1, size_bytes)
    restore_big(cache, key, 1, size_bytes)
    eventually(lambda: space.stat(f"bytes_{tier}") == PAYLOAD_OFFSET + size_bytes)
    eventually(lambda: check(space.name) == [], WITHIN_S)
    if tier != "ram":
        space.restart(*flags)
        restore_big(cache, key, 1, size_bytes)
        eventually(lambda: check(space.name) == [], WITHIN_S)


@pytest.mark.stress
@pytest.mark.timeout(0)
@pytest.mark.parametrize("tier", TIERS)
def test_of_ten_rows_of_a_gibibyte_a_tier_keeps_what_its_budget_holds(
    space: Namespace, tmp_path: Path, tier: str
) -> None:
    needs(
        tmp_path,
        shm_bytes=3 * GIB,
        memory_bytes=GIB,
        disk_bytes=(3 * GIB + GIB // 2) if tier == "disk" else 0,
    )
    flags = flags_of(tmp_path, tier, 3 * GIB + GIB // 2, staging_bytes=2 * GIB)
    space.start(*flags)
    cache = space.cache(tier=tier, kept_mapping_bytes=1)
    keys = []
    for number in range(10):
        keys.append(save_big(cache, number, GIB))
        assert space.stat(f"bytes_{tier}") + space.stat(f"charged_{tier}") <= 3 * GIB + GIB // 2
    eventually(lambda: [cache.has(key) for key in keys] == [False] * 7 + [True] * 3)
    for number in range(7, 10):
        restore_big(cache, keys[number], number, GIB)
    eventually(lambda: check(space.name) == [], WITHIN_S)


@pytest.mark.stress
@pytest.mark.timeout(0)
def test_ten_rows_of_a_gibibyte_live_on_disk_under_a_small_budget_of_memory(
    space: Namespace, tmp_path: Path
) -> None:
    needs(tmp_path, shm_bytes=2 * GIB, memory_bytes=GIB, disk_bytes=10 * GIB)
    budget_bytes = 10 * GIB + (64 << 20)
    flags = flags_of(tmp_path, "disk", budget_bytes, staging_bytes=2 * GIB)
    space.start(*flags)
    cache = space.cache(tier="disk")
    keys = [save_big(cache, number, GIB) for number in range(10)]
    space.restart(*flags)
    for number, key in enumerate(keys):
        restore_big(cache, key, number, GIB)
    assert space.used_bytes() < GIB
    eventually(lambda: check(space.name) == [], WITHIN_S)


@pytest.mark.stress
@pytest.mark.timeout(0)
def test_a_big_row_is_handed_on_to_the_disk_before_it_leaves_memory(space: Namespace, tmp_path: Path) -> None:
    size_bytes = 3 * GIB // 2
    needs(tmp_path, shm_bytes=2 * size_bytes, disk_bytes=size_bytes)
    budget_bytes = size_bytes + (64 << 20)
    flags = (
        f"--ram-file-bytes={budget_bytes}",
        f"--disk-dir={tmp_path}",
        f"--disk-bytes={budget_bytes}",
        f"--staging-bytes={budget_bytes}",
        "--spill-on-evict",
    )
    space.start(*flags)
    cache = space.cache(kept_mapping_bytes=1)
    key = save_big(cache, 1, size_bytes)
    eventually(lambda: space.stat("spilled") == 1, WITHIN_S)
    restore_big(cache, key, 1, size_bytes)
    assert cache.statistics().counters["read_slabs"] == 1
    space.restart(*flags)
    restore_big(cache, key, 1, size_bytes)
    eventually(lambda: check(space.name) == [], WITHIN_S)


@pytest.mark.parametrize("tier", TIERS)
def test_a_row_larger_than_the_whole_budget_is_refused_when_it_is_reserved(
    space: Namespace, tmp_path: Path, tier: str
) -> None:
    budget_bytes = 4 << 20
    space.start(*flags_of(tmp_path, tier, budget_bytes, staging_bytes=16 << 20))
    cache = space.cache(tier=tier)
    fits, too_large = budget_bytes - PAYLOAD_OFFSET, 1 << 40
    for payload_bytes, kind in ((too_large, "too_large"), (fits + 1, "too_large"), (fits, "granted")):
        grants = cache.reserve([plan(WHO, prompt(2000), payload_bytes)], None, cache.forget)
        assert grants.kinds == (kind,)
        assert (grants.slabs[0] is None) == (kind != "granted")
    assert cache.statistics().counters["save_dropped_no_space"] == 2
    eventually(lambda: space.stat("dropped_too_large") == 2)
