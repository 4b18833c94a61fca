"""Anchors and cuts: worked prompts, and the invariants over any prompt."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmcache.config import Gates
from shmcache.errors import MIB
from shmcache.policy import (
    KERNEL_ROWS,
    MEASURED_TOKENS,
    Measured,
    Speed,
    anchor_is_saved,
    anchors,
    cuts,
    reply_is_saved,
    restore_pays,
)

DEFAULT = Gates()
SMALL = Gates(min_tokens=0, cold_min_tokens=0)


@pytest.mark.parametrize(
    ("n_tokens", "head_tokens", "expected"),
    [
        (512, None, ()),  # n > min_tokens is asked for, not n >= min_tokens
        (513, None, (512,)),  # the trimmed anchor, 256, is below cold_min_tokens
        (2_000, None, (1_792, 1_999)),
        (2_000, 900, (896, 1_792, 1_999)),
        (2_000, 1_800, (1_792, 1_999)),  # both anchors are one
        (2_000, 1_990, (1_792, 1_999)),  # the head would end 15 before the last token
        (2_100, 1_990, (1_792, 1_984, 2_099)),  # the head may lie behind the trimmed anchor
        (576, 600, (575,)),  # 512 would end 63 before the last token
        (577, 500, (512, 576)),  # 448, the head, is below cold_min_tokens
        (1, None, ()),
        (0, None, ()),
    ],
)
def test_a_prompt_has_the_anchors_of_the_rule(
    n_tokens: int, head_tokens: int | None, expected: tuple[int, ...]
) -> None:
    assert anchors(n_tokens, head_tokens, DEFAULT) == expected


@given(n_tokens=st.integers(0, 5_000), head_tokens=st.none() | st.integers(0, 5_000))
def test_anchors_leave_room_for_a_kernel_between_them(n_tokens: int, head_tokens: int | None) -> None:
    found = anchors(n_tokens, head_tokens, SMALL)
    assert all(after - before >= KERNEL_ROWS for before, after in pairwise(found))
    assert not found or found[-1] == n_tokens - 1
    assert all(anchor % KERNEL_ROWS == 0 for anchor in found[:-1])


def test_an_anchor_beyond_the_bound_is_a_cut_but_no_row() -> None:
    gates = Gates(cold_max_tokens=1_000)
    assert anchors(2_000, None, gates) == (1_792, 1_999)
    assert not any(anchor_is_saved(anchor, gates) for anchor in (1_792, 1_999))


def test_a_reply_is_saved_from_min_tokens_on() -> None:
    assert [reply_is_saved(n_tokens, DEFAULT) for n_tokens in (511, 512)] == [False, True]
    assert not reply_is_saved(0, SMALL)


@pytest.mark.parametrize(
    ("start", "n_tokens", "anchors", "expected"),
    [
        (0, 2_000, (1_792, 1_999), (512, 1_024, 1_536, 1_792, 1_999, 2_000)),
        (1_792, 2_000, (1_792, 1_999), (1_999, 2_000)),
        (0, 300, (), (300,)),
        (0, 0, (), ()),
        (7, 7, (), ()),
        (511, 513, (), (513,)),  # 512 would leave a batch of one: left out
        (0, 513, (), (448, 513)),  # left out it would make a batch of 513: moved back by 64
        (0, 530, (529,), (448, 529, 530)),
        (0, 577, (576,), (512, 576, 577)),  # 512 leaves 64 rows
        (500, 530, (529,), (529, 530)),
    ],
)
def test_a_prompt_is_cut_by_the_rule(
    start: int, n_tokens: int, anchors: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert cuts(start, n_tokens, 512, anchors) == expected


prompts = st.tuples(
    st.integers(0, 3_000), st.none() | st.integers(0, 3_000), st.sampled_from([16, 64, 100, 128, 256, 512])
)


@given(prompt=prompts, start=st.integers(0, 3_000))
def test_cuts_ascend_to_the_end_and_no_batch_exceeds_n_ubatch(
    prompt: tuple[int, int | None, int], start: int
) -> None:
    n_tokens, head_tokens, n_ubatch = prompt
    start = min(start, n_tokens)
    found = cuts(start, n_tokens, n_ubatch, anchors(n_tokens, head_tokens, SMALL))
    assert (found[-1] if found else start) == n_tokens
    assert all(0 < after - before <= n_ubatch for before, after in pairwise((start, *found)))


@given(prompt=prompts)
def test_a_hit_on_an_anchor_is_cut_like_the_cold_run(prompt: tuple[int, int | None, int]) -> None:
    n_tokens, head_tokens, n_ubatch = prompt
    found = anchors(n_tokens, head_tokens, SMALL)
    cold = cuts(0, n_tokens, n_ubatch, found)
    for index, cut in enumerate(cold):
        assert cuts(cut, n_tokens, n_ubatch, found) == cold[index + 1 :]


@given(prompt=prompts)
def test_the_last_batch_of_a_prompt_is_not_cut_again(prompt: tuple[int, int | None, int]) -> None:
    n_tokens, head_tokens, n_ubatch = prompt
    cold = (0, *cuts(0, n_tokens, n_ubatch, anchors(n_tokens, head_tokens, SMALL)))
    assert n_tokens == 0 or cuts(cold[-2], n_tokens, n_ubatch) == (n_tokens,)


@given(n_tokens=st.integers(KERNEL_ROWS + 2, 3_000), n_ubatch=st.sampled_from([128, 256, 512]))
def test_no_batch_before_the_last_token_falls_below_a_kernel(n_tokens: int, n_ubatch: int) -> None:
    found = cuts(0, n_tokens, n_ubatch, anchors(n_tokens, None, SMALL))
    assert all(after - before >= KERNEL_ROWS for before, after in pairwise((0, *found[:-1])))


# ---- what is measured

COMPUTED = Measured(prefilled_tokens=2_000, prefill_us=4_000_000)  # 2 ms a token


def restored(ms_per_mib: float, mib: int = 100) -> Measured:
    return COMPUTED.plus(Measured(restored_bytes=mib * MIB, restore_us=int(1000 * ms_per_mib * mib)))


@pytest.mark.parametrize(
    ("measured", "pays"),
    [
        (Measured(), True),  # nothing is known: save
        (COMPUTED, True),
        (Measured(restored_bytes=100 * MIB, restore_us=10**9), True),
        (restored(1e6).plus(Measured(restored_bytes=-100 * MIB + 1)), True),  # hardly a restore
        (restored(0.2), True),  # 23 MiB of 1,000 tokens: 4.6 ms instead of 2 s
        (restored(86.0), True),
        (restored(87.0), False),  # 2,001 ms
        (restored(87.0).plus(Measured(prefill_us=-4_000_000)), True),  # a context without counters
    ],
)
def test_a_row_pays_unless_its_restore_is_measured_to_be_slower_than_its_prefill(
    measured: Measured, pays: bool
) -> None:
    assert restore_pays(1_000, 23 * MIB, measured) is pays


def test_what_is_not_measured_is_assumed() -> None:
    assert Measured().speed == Speed()
    assert COMPUTED.speed == Speed(prefill_ms_per_token=2.0)
    assert restored(0.5).speed == Speed(2.0, 0.5)
    few = Measured(MEASURED_TOKENS - 1, 10_000_000)
    assert few.speed == Speed()


def test_a_slow_restore_is_forgotten_in_time() -> None:
    measured, refusals = restored(500.0), 0
    while not restore_pays(1_000, 23 * MIB, measured):
        measured, refusals = measured.faded(), refusals + 1
    assert 10 < refusals < 100
