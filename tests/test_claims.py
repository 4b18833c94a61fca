"""Claims: one holder a key, and sums that add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmcache.claims import TRANSITIONS, Claim, Claims, Event, State
from shmcache.errors import IllegalTransition

A, B = b"a" * 16, b"b" * 16


def claim(token: int, *keys: bytes, client: int = 1, limit_ns: int = 100) -> Claim:
    return Claim(token, client, token, 0, limit_ns, dict.fromkeys(keys, State.HELD))


def test_the_table_names_every_state_and_what_can_happen() -> None:
    assert set(TRANSITIONS) == set(State)
    assert set(TRANSITIONS[State.HELD]) == set(Event)
    assert all(not TRANSITIONS[state] for state in State if state is not State.HELD)


def test_an_illegal_event_raises_and_changes_nothing() -> None:
    claims = Claims()
    held = claim(1, A, B)
    claims.open(held)
    claims.advance(held, A, Event.DECIDED)
    before = claims.statistics()
    with pytest.raises(IllegalTransition):
        claims.advance(held, A, Event.RELEASED)
    with pytest.raises(IllegalTransition):
        claims.open(claim(2, B))
    assert claims.statistics() == before
    assert claims.by_key(B) is held
    assert claims.by_key(A) is None


def test_a_claim_is_there_while_it_holds_a_key() -> None:
    claims = Claims()
    held = claim(1, A, B)
    claims.open(held)
    claims.advance(held, A, Event.DECIDED)
    assert claims.by_token(1) is held
    assert held.held == [B]
    claims.advance(held, B, Event.DELETED)
    assert claims.by_token(1) is None
    assert len(claims) == 0


def test_overdue_is_beyond_the_limit() -> None:
    claims = Claims()
    claims.open(claim(1, A))
    assert claims.overdue(100) == []
    assert [late.token for late in claims.overdue(101)] == [1]


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([*Event, None]))))
def test_the_sums_hold_whatever_happens(steps: list[tuple[int, Event | None]]) -> None:
    claims = Claims()
    for token, (number, event) in enumerate(steps):
        key = bytes([number]) * 16
        holder = claims.by_key(key)
        if event is None and holder is None:
            claims.open(claim(token, key))
        elif event is not None and holder is not None:
            claims.advance(holder, key, event)
        count = claims.statistics()
        assert count.held == (
            count.decided + count.released + count.overtaken + count.ended + count.in_flight
        )
