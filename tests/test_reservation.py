"""The reservation table: a literal state machine whose sums add up after any history."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmcache import reservation as module
from shmcache.errors import IllegalTransition
from shmcache.protocol import Plan, Tier
from shmcache.reservation import ENDED, TRANSITIONS, Event, Reservation, Reservations, State

HOLDS_KEY = {State.RESERVED, State.WRITTEN, State.CHECKED, State.LINKED}


def reservation(
    token: int, key: bytes | None = None, charged_bytes: int = 100, client: int = 1
) -> Reservation:
    plan = Plan(key, key, 10, charged_bytes, Tier.RAM_FILE)
    return Reservation(token, client, 1, 0, None, plan, charged_bytes)


def key(number: int) -> bytes:
    return bytes([number]) * 32


def test_the_picture_in_the_docstring_is_the_table() -> None:
    drawn = (module.__doc__ or "").lower()
    for state, events in TRANSITIONS.items():
        assert state.value in drawn
        assert all(event.value in drawn for event in events)
    assert set(TRANSITIONS) == set(State)
    assert {event for events in TRANSITIONS.values() for event in events} == set(Event)


def test_every_state_that_has_not_ended_can_end() -> None:
    for state in State:
        reached, frontier = {state}, [state]
        while frontier:
            for after in TRANSITIONS[frontier.pop()].values():
                if after not in reached:
                    reached.add(after)
                    frontier.append(after)
        assert reached & set(ENDED)


@pytest.mark.parametrize("state", list(State))
def test_an_illegal_event_raises_and_changes_nothing(state: State) -> None:
    for event in set(Event) - set(TRANSITIONS[state]):
        table = Reservations()
        held = reservation(1, key(1))
        table.open(held)
        held.state = state
        before = (held, table.by_key(key(1)), table.charged_bytes(Tier.RAM_FILE), table.statistics())
        with pytest.raises(IllegalTransition):
            table.advance(held, event)
        assert (held.state, held) == (state, before[0])
        assert before[1:] == (table.by_key(key(1)), table.charged_bytes(Tier.RAM_FILE), table.statistics())


def test_a_key_and_a_token_are_reserved_once() -> None:
    table = Reservations()
    table.open(reservation(1, key(1)))
    for again in (reservation(2, key(1)), reservation(1, key(2))):
        with pytest.raises(IllegalTransition):
            table.open(again)
    assert len(table) == 1
    assert table.charged_bytes(Tier.RAM_FILE) == 100
    assert table.by_key(key(2)) is None


def test_an_overtaken_owner_loses_its_key_and_keeps_its_charge() -> None:
    table = Reservations()
    stuck = reservation(1, key(1))
    table.open(stuck)
    table.advance(stuck, Event.OVERTAKEN)
    assert table.by_key(key(1)) is None
    assert table.charged_bytes(Tier.RAM_FILE) == 100

    other = reservation(2, key(1))
    table.open(other)
    assert table.charged_bytes(Tier.RAM_FILE) == 200
    table.advance(stuck, Event.LET_GO)
    assert table.by_key(key(1)) is other
    assert table.charged_bytes(Tier.RAM_FILE) == 100


def test_replies_in_the_making_have_no_key_and_do_not_meet() -> None:
    table = Reservations()
    table.open(reservation(1))
    table.open(reservation(2))
    assert table.by_key(None) is None
    assert [held.token for held in table] == [1, 2]


def test_what_a_client_holds_is_what_has_not_ended() -> None:
    table = Reservations()
    mine, other, ended = reservation(1, client=1), reservation(2, client=2), reservation(3, client=1)
    for held in (mine, other, ended):
        table.open(held)
    table.advance(ended, Event.LET_GO)
    assert table.of_client(1) == [mine]


@given(st.randoms(use_true_random=False), st.lists(st.integers(0, 99), max_size=200))
def test_sums_keys_and_charges_agree_after_any_history(choice: random.Random, steps: list[int]) -> None:
    table = Reservations()
    live: list[Reservation] = []
    tokens = iter(range(1, 1000))
    for step in steps:
        wanted = key(step % 7) if step % 3 else None
        if step < 40 and table.by_key(wanted) is None:
            held = reservation(next(tokens), wanted, charged_bytes=step + 1)
            table.open(held)
            live.append(held)
        elif live:
            held = choice.choice(live)
            if step % 5 == 0:
                table.extend(held, held.charged_bytes + step)
            else:
                table.advance(held, choice.choice(sorted(TRANSITIONS[held.state], key=lambda e: e.value)))
        live = [held for held in live if held.state not in ENDED]

        figures = table.statistics()
        assert figures.reserved == figures.published + figures.abandoned + figures.in_flight
        assert figures.in_flight == len(live) == len(table)
        assert table.charged_bytes(Tier.RAM_FILE) == sum(held.charged_bytes for held in live)
        assert table.charged_bytes(Tier.DISK) == 0
        holders = {held.plan.key: held for held in live if held.state in HOLDS_KEY and held.plan.key}
        for number in range(7):
            assert table.by_key(key(number)) is holders.get(key(number))
        assert list(table) == live
