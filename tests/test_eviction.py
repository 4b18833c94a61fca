"""Who leaves first: what a row is worth, and the two orders, against plain twins."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bench import eviction as bench
from bench import eviction_trace
from shmcache import policy
from shmcache.config import Eviction
from shmcache.eviction import HEAD, PINNED, SAMPLE, TURN_TOKENS, Entry, Experience, Residents
from shmcache.policy import MIB, Speed, Standing, gain_ms_per_byte, worth

TIER = 1
NOW_S = 1_000_000
ROW = Standing(gain_ms_per_byte=0.01, chance=0.5, used_s=NOW_S, is_dominated=False)

shares = st.floats(0.001, 0.999)
times = st.integers(0, 100_000)


def entry(**changes: object) -> Entry:
    """A row of 1,000 tokens, made just now."""
    plain = Entry(tier=TIER, tokens=1000, gain_ms_per_byte=0.01, made_unix_s=NOW_S, used_unix_s=NOW_S)
    return replace(plain, **changes)


def residents(count: int, kind: Eviction = "lru", *, by_tenant: bool = False) -> Residents:
    """Rows in slots 0 to count - 1, made one second after the other."""
    made = Residents(max(count, 1) + 8, 3, kind, by_tenant=by_tenant)
    for slot in range(count):
        made.enter(slot, entry(used_unix_s=NOW_S + slot))
    return made


def leaving(rows: Residents, now_s: int = NOW_S + 100, tenant: int | None = None) -> list[int]:
    return list(rows.leaving(TIER, now_s, tenant))


# ---- what a row is worth


@given(shares, times, times)
def test_a_row_is_worth_less_the_longer_it_was_not_used(chance: float, age: int, more: int) -> None:
    row = replace(ROW, chance=chance)
    younger, older = (worth(row, NOW_S + at, 60.0) for at in (age, age + more))
    assert 0.0 <= older <= younger <= row.gain_ms_per_byte


@given(shares, shares, times)
def test_a_row_that_is_likelier_to_be_used_is_worth_more(one: float, other: float, age: int) -> None:
    low, high = sorted((one, other))
    assert worth(replace(ROW, chance=low), NOW_S + age, 60.0) <= worth(
        replace(ROW, chance=high), NOW_S + age, 60.0
    )


def test_worth_is_by_the_byte_and_by_what_a_use_spares() -> None:
    speed = Speed(prefill_ms_per_token=2.0, restore_ms_per_mib=1.0)
    assert gain_ms_per_byte(1000, MIB, speed) == pytest.approx(1999.0 / MIB)
    assert gain_ms_per_byte(1, 100 * MIB, speed) == 0.0, "what restores slower than it is computed"
    fast = replace(speed, prefill_ms_per_token=1.0)
    assert gain_ms_per_byte(1000, MIB, fast) < gain_ms_per_byte(1000, MIB, speed)
    twice = replace(ROW, gain_ms_per_byte=2 * ROW.gain_ms_per_byte)
    assert worth(twice, NOW_S + 9, 60.0) == pytest.approx(2 * worth(ROW, NOW_S + 9, 60.0))


def test_half_of_the_chance_is_left_after_a_half_life() -> None:
    rare = replace(ROW, chance=1e-6)
    assert worth(rare, NOW_S + 60, 60.0) == pytest.approx(worth(rare, NOW_S, 60.0) / 2, rel=1e-4)


def test_a_clock_that_was_set_back_makes_nothing_worth_more() -> None:
    assert worth(ROW, NOW_S - 3600, 60.0) == worth(ROW, NOW_S, 60.0)


def test_a_dominated_row_is_worth_nothing() -> None:
    assert worth(replace(ROW, is_dominated=True), NOW_S, 60.0) == 0.0


# ---- what became of rows


def test_the_chance_is_the_share_that_was_used_and_old_experience_fades() -> None:
    seen = Experience()
    first = seen.chance(0)
    for _ in range(150):
        seen.entered(0)
        seen.used(0, 10.0, 1.0)
    assert seen.chance(0) > 0.95 > first
    for _ in range(10 * Experience.MOST_ROWS):
        seen.entered(0)
    assert seen.chance(0) < 0.05
    assert seen.chance(1) == first, "another situation"


@given(st.lists(st.tuples(st.sampled_from(["entered", "left", "used"]), st.integers(0, 3)), max_size=400))
def test_a_chance_is_always_one_between_none_and_all(steps: list[tuple[str, int]]) -> None:
    seen = Experience()
    for step, situation in steps:
        if step == "used":
            seen.used(situation, 5.0, 100.0)
        else:
            getattr(seen, step)(situation)
        assert all(0.0 < seen.chance(other) < 1.0 for other in range(4))


def test_the_half_life_follows_the_gaps_that_spare_the_most() -> None:
    seen = Experience()
    assert seen.half_life_s == Experience.FIRST_GAP_S
    for _ in range(1000):
        seen.used(0, 10.0, 5000.0)
        seen.used(0, 900.0, 1.0)
    assert 9.0 < seen.half_life_s < 20.0


# ---- both orders


kinds = pytest.mark.parametrize("kind", ["lru", "cost"])


@kinds
def test_each_row_is_named_once_however_many_there_are(kind: Eviction) -> None:
    for count in (0, 1, SAMPLE, SAMPLE + 1, 10 * SAMPLE + 3):
        assert sorted(leaving(residents(count, kind))) == list(range(count))


@kinds
def test_a_pinned_row_is_never_named(kind: Eviction) -> None:
    rows = residents(3 * SAMPLE, kind, by_tenant=True)
    for slot in range(0, 3 * SAMPLE, 2):
        rows.flags[slot] |= PINNED
    expected = list(range(1, 3 * SAMPLE, 2))
    assert sorted(leaving(rows)) == sorted(leaving(rows, tenant=0)) == expected


@kinds
def test_a_tenants_rows_are_named_alone(kind: Eviction) -> None:
    rows = Residents(300, 3, kind, by_tenant=True)
    for slot in range(200):
        rows.enter(slot, entry(tenant=slot % 3, used_unix_s=NOW_S + slot))
    assert sorted(leaving(rows, tenant=1)) == list(range(1, 200, 3))
    for slot in range(1, 200, 3):
        rows.leave(slot)
    assert leaving(rows, tenant=1) == []
    assert len(leaving(rows)) == len(leaving(rows, tenant=0)) + len(leaving(rows, tenant=2))


steps = st.lists(
    st.tuples(
        st.sampled_from(["enter", "leave", "use", "descend", "pin"]), st.integers(0, 40), st.integers(0, 40)
    ),
    max_size=120,
)


@kinds
@settings(deadline=None)
@given(steps=steps)
def test_whatever_happens_those_that_are_here_are_named_and_no_other(
    kind: Eviction, steps: list[tuple[str, int, int]]
) -> None:
    rows = Residents(41, 3, kind, by_tenant=True)
    here: dict[int, int] = {}  # slot → tokens, which only grow on the way down
    pinned: set[int] = set()
    now_s = NOW_S
    for step, slot, other in steps:
        now_s += 7
        if step == "enter" and slot not in here:
            here[slot] = 100 * (other + 1)
            flags = HEAD if other % 5 == 0 else 0
            made = entry(tokens=here[slot], tenant=other % 2, flags=flags, used_unix_s=now_s)
            rows.enter(slot, made)
            pinned.discard(slot)
        elif step == "leave" and slot in here:
            rows.leave(slot)
            del here[slot]
            pinned.discard(slot)
        elif step == "use" and slot in here:
            assert set(rows.use(slot, now_s)) <= set(here)
        elif step == "descend" and here.get(slot, 0) > here.get(other, 1 << 30):
            if rows.base[slot] == 0xFFFFFFFF:
                rows.descend(slot, other)
            assert set(rows.ancestors(slot)) <= set(here)
        elif step == "pin" and slot in here:
            rows.flags[slot] ^= PINNED
            pinned ^= {slot}
        named = list(rows.leaving(TIER, now_s))
        assert sorted(named) == sorted(set(here) - pinned)
        by_tenant = [*rows.leaving(TIER, now_s, 0), *rows.leaving(TIER, now_s, 1)]
        assert sorted(by_tenant) == sorted(named)


def test_what_eviction_knows_takes_less_than_128_bytes_a_row() -> None:
    rows = Residents(1000, 3, "cost", by_tenant=True)
    for slot in range(1000):
        rows.enter(slot, entry())
    found: list[array[int]] = []

    def collect(value: object) -> None:
        if isinstance(value, array):
            found.append(value)
        elif isinstance(value, list):
            for one in value:
                collect(one)
        elif hasattr(value, "__dict__"):
            for one in vars(value).values():
                collect(one)

    collect(rows)
    assert sum(len(one) * one.itemsize for one in found) < 128 * 1000


# ---- lru


def test_lru_names_the_row_without_use_the_longest() -> None:
    rows = residents(4)
    rows.use(0, NOW_S + 50)
    assert leaving(rows) == [1, 2, 3, 0]


def test_a_use_warms_heads_and_forks_on_the_way_and_no_plain_waypoint() -> None:
    rows = residents(0)
    for slot, flags in enumerate((HEAD, 0, 0, 0, 0, 0)):
        rows.enter(slot, entry(flags=flags, tokens=100 * (slot + 1)))
    head, fork, waypoint, leaf, branch, other = range(6)
    rows.descend(fork, head)
    rows.descend(waypoint, fork)
    rows.descend(branch, fork)
    rows.descend(leaf, waypoint)
    assert leaving(rows)[0] == waypoint, "the one that another stands for is the first to go"
    assert rows.use(leaf, NOW_S + 50) == [head, fork, leaf]
    assert leaving(rows) == [waypoint, branch, other, head, fork, leaf]


def test_what_leaves_hands_its_children_up() -> None:
    rows = residents(0)
    for slot in range(5):
        rows.enter(slot, entry(flags=HEAD if slot == 0 else 0, tokens=100 * (slot + 1)))
    for slot, above in ((1, 0), (2, 1), (3, 1), (4, 3)):
        rows.descend(slot, above)
    rows.leave(1)
    assert [list(rows.ancestors(slot)) for slot in (2, 3, 4)] == [[0], [0], [3, 0]]
    assert rows.children[0] == 2
    rows.enter(1, entry())
    assert list(rows.ancestors(1)) == [], "the slot's next row is another"
    rows.leave(0)
    assert [list(rows.ancestors(slot)) for slot in (2, 3, 4)] == [[], [], [3]]
    rows.leave(4)
    assert rows.children[3] == 0


def test_a_row_that_takes_anothers_place_takes_its_children() -> None:
    rows = residents(4)
    rows.descend(1, 0)
    rows.descend(2, 0)
    rows.succeed(3, 0)
    rows.leave(0)
    assert [list(rows.ancestors(slot)) for slot in (1, 2)] == [[3], [3]]
    assert rows.children[3] == 2


# ---- cost


def test_cost_keeps_a_branch_point_before_a_waypoint_that_another_stands_for() -> None:
    rows = residents(0, "cost")
    for slot in range(5):
        rows.enter(slot, entry(tokens=1000 + slot))
    branch, waypoint, *leaves = range(5)
    rows.descend(leaves[0], branch)
    rows.descend(leaves[1], branch)
    rows.descend(leaves[2], waypoint)
    assert leaving(rows)[0] == waypoint
    rows.use(branch, NOW_S + 99)
    rows.use(branch, NOW_S + 99)
    assert leaving(rows)[-1] == branch
    rows.leave(leaves[2])
    rows.enter(leaves[2], entry(used_unix_s=NOW_S - 999))
    assert leaving(rows).index(leaves[2]) < leaving(rows).index(waypoint), "nobody stands for it any more"


def test_cost_learns_that_conversations_go_on_and_documents_do_not() -> None:
    rows = Residents(8000, 3, "cost")
    free = iter(range(8000))
    now_s = NOW_S

    def add(tokens: int, above: int | None = None) -> int:
        slot = next(free)
        rows.enter(slot, entry(tokens=tokens, used_unix_s=now_s, made_unix_s=now_s))
        if above is not None:
            rows.descend(slot, above)
        return slot

    for _ in range(200):
        now_s += 20
        first = add(TURN_TOKENS)
        rows.use(first, now_s + 10)
        turn = add(TURN_TOKENS + 500, first)
        rows.use(turn, now_s + 15)
        add(4 * TURN_TOKENS)
    now_s += 20
    document = add(4 * TURN_TOKENS)
    begun = add(TURN_TOKENS)
    rows.use(begun, now_s)
    under_way = add(TURN_TOKENS + 500, begun)
    order = leaving(rows, now_s)
    assert order.index(document) < order.index(under_way)


def test_cost_prefers_what_spares_more_for_its_bytes() -> None:
    rows = residents(0, "cost")
    for slot, gain in enumerate((0.02, 0.001, 0.005)):
        rows.enter(slot, entry(gain_ms_per_byte=gain))
    assert leaving(rows) == [1, 2, 0]


@pytest.mark.parametrize("count", [1_000, 30_000])
def test_a_victim_costs_one_sample_however_many_rows_there_are(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = residents(count, "cost")
    looked_at = []
    monkeypatch.setattr(policy, "worth", lambda row, *others: looked_at.append(row) or worth(row, *others))
    next(rows.leaving(TIER, NOW_S + count))
    assert len(looked_at) == SAMPLE
    looked_at.clear()
    assert len(leaving(rows, NOW_S + count)) == count
    assert len(looked_at) < 3 * count, "also where all have to leave"


# ---- the bench


def test_the_trace_in_the_repository_is_the_one_that_its_script_makes() -> None:
    made = "\n".join(eviction_trace.lines()) + "\n"
    assert Path(bench.OWN_TRACE).read_text(encoding="utf-8") == made


def test_under_a_budget_nothing_saves_more_than_without_and_cost_more_than_recency() -> None:
    trace = bench.read_trace(bench.OWN_TRACE)
    budget = bench.footprint_blocks(trace) // 5
    ceiling = bench.saved_share(trace, bench.Ours("lru", 1 << 40, len(trace)))
    recency = bench.saved_share(trace, bench.Recency(budget))
    lru, cost = (bench.saved_share(trace, bench.Ours(kind, budget, len(trace))) for kind in ("lru", "cost"))
    assert recency < cost <= ceiling
    assert lru <= ceiling
