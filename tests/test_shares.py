"""Whose bytes leave for whom, what is taken to the disk at all, and what a row is worth by measurement."""

from __future__ import annotations

import contextlib
import os
from array import array
from pathlib import Path

import pytest
from msgspec.structs import replace
from support import Namespace, eventually, identity, payload_of, plan, prompt, save
from test_coordinator import SLAB, A, B, C, Desk, key_of, kinds, plan_of

from shmcache.admission import Asked
from shmcache.config import Eviction
from shmcache.coordinator import Rules
from shmcache.identity import tenant_hash
from shmcache.kvc import HEAD_DETAIL
from shmcache.page import COUNTERS
from shmcache.policy import Measured, Speed, gain_ms_per_byte
from shmcache.protocol import Reserve, Reserved, Tier, Verdict
from shmcache.server import Clients

ALICE, BOB, CAROL = (tenant_hash(name) for name in ("alice", "bob", "carol"))
HALF = Rules(tenant_share=0.5)


def text_of(tenant: bytes | None, number: int) -> bytes:
    return prompt(1000, f"{tenant!r} {number}")


def reserve(desk: Desk, tenant: bytes | None, *numbers: int) -> list[Verdict]:
    plans = [replace(plan_of(text_of(tenant, number)), tenant=tenant) for number in numbers]
    answer = desk.ask(Reserve(**desk.head(1), forget=0, base=None, plans=plans))
    assert isinstance(answer, Reserved)
    return answer.verdicts


def try_to_save(desk: Desk, tenant: bytes | None, number: int) -> str:
    """One row of a tenant; the verdict, and the row where it was granted."""
    (verdict,) = reserve(desk, tenant, number)
    if verdict.kind == "granted":
        text = text_of(tenant, number)
        desk.put(text, verdict.token, tenant_hash=tenant)
        assert desk.written(text, verdict.token).published
        desk.check()
    return verdict.kind


def held(desk: Desk, tenant: bytes | None) -> list[int]:
    """Numbers of a tenant's rows."""
    return [number for number in range(20) if desk.texts(text_of(tenant, number))]


# ---- shares


@pytest.mark.parametrize("eviction", ["lru", "cost"])
def test_whoever_is_alone_may_fill_a_tier(space: Namespace, eviction: Eviction) -> None:
    with contextlib.closing(Desk(space, slabs=4, rules=Rules(eviction=eviction, tenant_share=0.5))) as desk:
        for number in range(6):
            assert try_to_save(desk, ALICE, number) == "granted"
        assert len(held(desk, ALICE)) == 4


@pytest.mark.parametrize("eviction", ["lru", "cost"])
def test_those_who_hold_more_than_their_share_make_room_and_keep_their_share(
    space: Namespace, eviction: Eviction
) -> None:
    with contextlib.closing(Desk(space, slabs=4, rules=Rules(eviction=eviction, tenant_share=0.5))) as desk:
        for number in range(4):
            try_to_save(desk, ALICE, number)
        for number in range(5):
            assert try_to_save(desk, BOB, number) == "granted"
            assert len(held(desk, ALICE)) >= 2, "no tenant takes what is another's share"
        assert len(held(desk, ALICE)) == len(held(desk, BOB)) == 2
        assert held(desk, BOB)[-1] == 4, "over its share it evicts its own"


def test_a_tenant_below_its_share_is_not_bound_by_it(space: Namespace) -> None:
    with contextlib.closing(Desk(space, slabs=3, rules=HALF)) as desk:
        for tenant in (ALICE, BOB, None):
            try_to_save(desk, tenant, 0)
        assert try_to_save(desk, CAROL, 0) == "granted"
        assert held(desk, ALICE) == [], "nobody is over: the one without use the longest leaves"


def test_a_save_in_flight_counts_in_its_tenants_share(space: Namespace) -> None:
    with contextlib.closing(Desk(space, slabs=4, rules=HALF)) as desk:
        try_to_save(desk, ALICE, 0)
        try_to_save(desk, BOB, 0)
        assert kinds(reserve(desk, BOB, 1, 2, 3, 4)) == ["granted", "granted", "granted", "no_space"]
        assert held(desk, BOB) == []
        assert held(desk, ALICE) == [0]


def test_without_shares_the_coldest_leaves_whoever_asks(space: Namespace) -> None:
    with contextlib.closing(Desk(space, slabs=2)) as desk:
        try_to_save(desk, ALICE, 0)
        for number in range(3):
            try_to_save(desk, BOB, number)
        assert held(desk, ALICE) == []


def test_shares_are_known_again_after_a_restart(space: Namespace) -> None:
    with contextlib.closing(Desk(space, slabs=4, rules=HALF)) as desk:
        for number in range(3):
            try_to_save(desk, ALICE, number)
        try_to_save(desk, BOB, 0)
        desk.restart()
        assert try_to_save(desk, BOB, 1) == "granted"
        assert (len(held(desk, ALICE)), len(held(desk, BOB))) == (2, 2)


# ---- what is taken to the disk


def test_a_key_is_new_once_and_never_another() -> None:
    asked = Asked(64)
    keys = [os.urandom(32) for _ in range(64)]
    assert not any(asked.again(key) for key in keys)
    assert asked.again(keys[-1])
    crowd = Asked(1)
    assert [crowd.again(key) for key in (keys[0], keys[0], keys[1], keys[0])] == [False, True, False, False]


def test_what_admission_remembers_takes_eight_bytes_a_row() -> None:
    marks: array[int] = Asked(1000)._marks
    assert len(marks) * marks.itemsize == 8000


@pytest.fixture
def disk_flags(tmp_path: Path) -> list[str]:
    tmp_path.chmod(0o700)
    return [f"--disk-dir={tmp_path}", "--disk-bytes=16M", "--disk-admission=second_use"]


def test_a_prompt_goes_to_disk_when_it_comes_for_the_second_time(
    space: Namespace, disk_flags: list[str]
) -> None:
    space.start(*disk_flags)
    cache = space.cache(tier="disk")
    who = identity()
    assert not save(cache, who, A, b"a" * 64)
    assert cache.statistics().counters["save_first_use"] == 1
    assert payload_of(cache, who, A) is None
    assert save(cache, who, A, b"a" * 64)
    assert not save(cache, who, B, b"b" * 64)
    eventually(lambda: space.stat("dropped_first_use") == 2)


def test_what_goes_on_from_a_row_on_disk_is_taken_at_once_but_not_behind_a_head(
    space: Namespace, disk_flags: list[str]
) -> None:
    space.start(*disk_flags)
    cache = space.cache(tier="disk")
    who = identity()
    for _ in range(2):
        save(cache, who, A, b"a" * 64, reason_detail=HEAD_DETAIL)
    assert not save(cache, who, B, b"b" * 64, base=key_of(A)), "each prompt begins with it"
    assert save(cache, who, B, b"b" * 64, base=key_of(A))
    assert save(cache, who, C, b"c" * 64, base=key_of(B)), "a conversation under way"
    (unknown,) = cache.reserve([plan(who, A + B, 64)], None, cache.forget).slabs
    assert unknown is None


def test_memory_takes_everything(space: Namespace, disk_flags: list[str]) -> None:
    space.start(*disk_flags)
    assert save(space.cache(), identity(), A, b"a" * 64)


# ---- what was measured


class _Page:
    def __init__(self, **counted: int) -> None:
        self._counted = counted

    def counters(self) -> dict[str, int]:
        return {**dict.fromkeys(COUNTERS, 0), **self._counted}


class _Known:
    def __init__(self, page: _Page) -> None:
        self.page = page


def test_what_a_worker_has_measured_is_what_it_has_counted_of_each_tier(space: Namespace) -> None:
    clients = Clients(space.names)
    counted = {
        "prefilled_tokens": 2000,
        "prefill_us": 4_000_000,
        "restore_us": 5000,
        "restored_bytes": 10 << 20,
    }
    page = _Page(**counted, disk_restore_us=90_000, disk_restored_bytes=30 << 20)
    clients._known[7] = _Known(page)  # type: ignore[assignment]
    assert clients.measured(7, Tier.RAM_FILE).speed == Speed(2.0, 0.5)
    assert clients.measured(7, Tier.DISK).speed == Speed(2.0, 3.0)
    assert clients.measured(8, Tier.DISK) == Measured()


def test_a_row_is_worth_what_its_saver_has_measured(space: Namespace) -> None:
    measured = Measured(2000, 1_000_000, 10 << 20, 20_000)
    with contextlib.closing(Desk(space, slabs=9, rules=Rules(eviction="cost"))) as desk:
        desk.coordinator._measured_of = lambda client, _tier: measured if client == 1 else Measured()
        for text, client, speed in ((A, 2, Speed()), (B, 1, Speed(0.5, 2.0)), (C, 2, Speed(0.5, 2.0))):
            desk.save(text, client=client)
            found = desk.index.get(key_of(text))
            assert found is not None
            gain = desk.coordinator._order._gain[found.slot]
            assert gain == pytest.approx(gain_ms_per_byte(100, SLAB, speed), rel=1e-5), "of the same model"
