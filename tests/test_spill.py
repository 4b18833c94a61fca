"""--spill-on-evict: what leaves a memory tier lies on the disk first, whoever dies on the way."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import (
    PAYLOAD_OFFSET,
    Namespace,
    die_at,
    eventually,
    identity,
    longest,
    payload_of,
    prompt,
    save,
)

from shmcache import config
from shmcache.check import check
from shmcache.client import Cache, Hit
from shmcache.errors import ConfigError
from shmcache.index import Found
from shmcache.key import row_address
from shmcache.protocol import Tier
from shmcache.tiers.disk import DiskTier
from shmcache.tiers.memory import MemoryTier
from shmcache.tools.evict import forget

WHO = identity()
STATE_BYTES = 50_000
SLAB_BYTES = PAYLOAD_OFFSET + STATE_BYTES
BUDGET_BYTES = 10 * SLAB_BYTES + 100
MEMORY = ["ram", "ram_file"]


def flags_of(tmp_path: Path, tier: str, staging_bytes: int = 4 * SLAB_BYTES) -> tuple[str, ...]:
    return (
        f"--ram-bytes={BUDGET_BYTES if tier == 'ram' else 0}",
        f"--ram-file-bytes={BUDGET_BYTES if tier == 'ram_file' else 1 << 20}",
        f"--disk-dir={tmp_path}",
        "--disk-bytes=16M",
        f"--staging-bytes={staging_bytes}",
        "--spill-on-evict",
    )


def text_of(number: int) -> bytes:
    return prompt(1000 + number, f"row {number}")


def state_of(number: int) -> bytes:
    return number.to_bytes(4, "little") * (STATE_BYTES // 4)


def save_rows(cache: Cache, numbers: range) -> None:
    for number in numbers:
        assert save(cache, WHO, text_of(number), state_of(number))


def tier_of(cache: Cache, number: int) -> Tier | None:
    reader = cache.connection.reader()
    found = reader.get(row_address(WHO.seed, text_of(number)).key) if reader is not None else None
    return Tier(found.row.tier) if found is not None else None


def on_disk(cache: Cache, count: int) -> list[bool]:
    return [tier_of(cache, number) is Tier.DISK for number in range(count)]


@pytest.mark.parametrize("tier", MEMORY)
def test_the_coldest_rows_of_a_tier_that_is_nearly_full_go_to_the_disk_and_none_is_lost(
    space: Namespace, tmp_path: Path, tier: str
) -> None:
    flags = flags_of(tmp_path, tier)
    space.start(*flags)
    cache = space.cache(tier=tier)
    save_rows(cache, range(9))
    assert on_disk(cache, 9) == [False] * 9, "nine tenths are no reason"
    hit = cache.get(row_address(WHO.seed, text_of(0)).key)
    assert hit is not None
    hit.use()
    for number in range(9, 15):
        save_rows(cache, range(number, number + 1))
        eventually(lambda number=number: sum(on_disk(cache, number)) == number - 8)  # type: ignore[misc]
    assert on_disk(cache, 15) == [False, *[True] * 6, *[False] * 8]
    assert [payload_of(cache, WHO, text_of(number)) for number in range(15)] == [
        state_of(number) for number in range(15)
    ]
    eventually(lambda: check(space.name) == [])
    assert [space.stat(name) for name in ("spilled", "evictions", "unspilled")] == [6, 0, 0]
    assert space.stat("saves_cold") == 15, "a row that goes on is no second save"
    space.restart(*flags)
    kept = range(15) if tier == "ram_file" else range(1, 7)
    assert [number for number in range(15) if payload_of(cache, WHO, text_of(number))] == list(kept)
    eventually(lambda: check(space.name) == [])


def test_a_save_that_cannot_wait_drops_the_coldest_row_that_is_not_there_yet_and_counts_it(
    space: Namespace, tmp_path: Path
) -> None:
    space.start(*flags_of(tmp_path, "ram_file", staging_bytes=SLAB_BYTES - 1))
    cache = space.cache()
    save_rows(cache, range(13))
    assert [tier_of(cache, number) for number in range(13)] == [None] * 3 + [Tier.RAM_FILE] * 10
    eventually(lambda: space.stat("unspilled") == space.stat("evictions") == 3)
    assert space.stat("spilled") == 0
    eventually(lambda: check(space.name) == [])


def test_a_pinned_row_stays_where_it_is(space: Namespace, tmp_path: Path) -> None:
    flags = flags_of(tmp_path, "ram_file")
    space.start(*flags)
    cache = space.cache()
    save_rows(cache, range(1))
    (path,) = space.names.tier("ram_file", 0).glob("*.kvc")
    path.chmod(0o1600)  # the pin
    space.restart(*flags)
    save_rows(cache, range(1, 10))
    eventually(lambda: space.stat("spilled") == 1)
    assert on_disk(cache, 3) == [False, True, False]


STEPS: dict[str, Callable[[], None]] = {
    "before it has a second name": lambda: die_at(MemoryTier, "hand_on"),
    "with a second name": lambda: die_at(MemoryTier, "hand_on", after=True),
    "before the copy": lambda: die_at(DiskTier, "link"),
    "copied": lambda: die_at(DiskTier, "_name"),
    "on the disk": lambda: die_at(DiskTier, "link", after=True),
    "before it leaves memory": lambda: die_at(MemoryTier, "remove"),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_any_step_loses_nothing_and_leaves_nothing(
    space: Namespace, tmp_path: Path, step: str
) -> None:
    flags = flags_of(tmp_path, "ram_file")
    space.start(*flags, patch=STEPS[step])
    cache = space.cache()
    save_rows(cache, range(10))
    assert space.coordinator is not None
    space.coordinator.wait(20)
    space.start(*flags)
    assert [payload_of(cache, WHO, text_of(number)) for number in range(10)] == [
        state_of(number) for number in range(10)
    ]
    eventually(lambda: sum(on_disk(cache, 10)) == 1)
    eventually(lambda: check(space.name) == [])
    assert all(payload_of(cache, WHO, text_of(number)) == state_of(number) for number in range(10))


def test_what_is_forgotten_on_its_way_to_the_disk_never_arrives(space: Namespace, tmp_path: Path) -> None:
    gate, reached = tmp_path / "gate", tmp_path / "reached"

    def patch() -> None:
        real = DiskTier.link

        def link(self: DiskTier, handover: object) -> object:
            reached.touch()
            while not gate.exists():
                time.sleep(0.01)
            return real(self, handover)  # type: ignore[arg-type]

        DiskTier.link = link  # type: ignore[method-assign, assignment]

    flags = flags_of(tmp_path, "ram_file")
    space.start(*flags, patch=patch)
    cache = space.cache()
    save_rows(cache, range(10))
    eventually(reached.exists)
    worker = space.child(lambda pipe: pipe.say(forget(space.name, []).failed))
    eventually(lambda: tier_of(cache, 9) is None)
    gate.touch()
    assert worker.hear() == 0
    assert list(tmp_path.rglob("*.kvc")) == []
    space.restart(*flags)
    assert longest(cache, WHO, text_of(0)) is None
    assert list((space.names.tier("disk", 0) / "in").iterdir()) == []
    eventually(lambda: check(space.name) == [])


def test_a_disk_that_cannot_take_it_costs_nothing_but_the_try(space: Namespace, tmp_path: Path) -> None:
    def patch() -> None:
        def fail(*_: object) -> None:
            raise OSError(28, os.strerror(28))

        DiskTier._copy = fail  # type: ignore[method-assign, assignment]

    space.start(*flags_of(tmp_path, "ram_file"), patch=patch)
    cache = space.cache()
    save_rows(cache, range(12))
    assert [tier_of(cache, number) for number in range(12)] == [None] * 2 + [Tier.RAM_FILE] * 10
    eventually(lambda: space.stat("downs_disk") == 1, 30)
    assert payload_of(cache, WHO, text_of(11)) == state_of(11)
    eventually(lambda: check(space.name) == [])


def test_without_a_disk_there_is_nowhere_to_spill_to() -> None:
    with pytest.raises(ConfigError, match=r"spill_on_evict \(true\) needs disk_dir \(none\)"):
        config.load({"spill_on_evict": True}, {})


def test_a_row_that_moves_while_it_is_looked_up_is_found_where_it_is_then(
    space: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.start(*flags_of(tmp_path, "ram_file"))
    cache = space.cache(kept_mapping_bytes=1)
    save_rows(cache, range(9))
    real = Cache._map

    def late(self: Cache, found: Found) -> Hit:
        monkeypatch.undo()
        save_rows(cache, range(9, 10))
        eventually(lambda: tier_of(cache, 0) is Tier.DISK)
        eventually(lambda: len(list(space.names.tier("ram_file", 0).glob("*.kvc"))) == 9)
        return real(self, found)

    monkeypatch.setattr(Cache, "_map", late)
    assert payload_of(cache, WHO, text_of(0)) == state_of(0)
    assert cache.statistics().counters["read_slabs"] == 1
