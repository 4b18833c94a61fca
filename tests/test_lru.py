"""Order of use: a linked list in arrays behaves as a plain list of slots does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shmcache.lru import Lists, UseOrder

SLOTS, LISTS = 8, 3

steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "warm", "cool"]),
        st.integers(0, SLOTS - 1),
        st.integers(0, LISTS - 1),
    ),
    max_size=60,
)


def orders(order: UseOrder) -> list[list[int]]:
    return [list(order.coldest(number)) for number in range(LISTS)]


@given(steps)
def test_lists_run_from_the_coldest_to_the_one_used_last(steps: list[tuple[str, int, int]]) -> None:
    order = UseOrder(SLOTS, LISTS)
    twin: list[list[int]] = [[] for _ in range(LISTS)]
    for verb, slot, number in steps:
        home = next((number for number, slots in enumerate(twin) if slot in slots), None)
        if verb == "add":
            if home is None:
                order.add(slot, number, used_unix_s=7)
                twin[number].append(slot)
        elif home is not None:
            twin[home].remove(slot)
            if verb == "remove":
                order.remove(slot)
            elif verb == "warm":
                order.warm(slot, home)
                twin[home].append(slot)
            else:
                order.cool(slot, home)
                twin[home].insert(0, slot)
        assert orders(order) == twin


def test_an_empty_list_yields_nothing() -> None:
    assert orders(UseOrder(SLOTS, LISTS)) == [[], [], []]


def test_the_slot_just_yielded_may_be_removed() -> None:
    order = UseOrder(SLOTS, LISTS)
    for slot in range(4):
        order.add(slot, 0, used_unix_s=0)
    for slot in order.coldest(0):
        order.remove(slot)
    assert orders(order) == [[], [], []]


def test_a_slot_that_is_entered_anew_knows_nothing_of_its_former_row() -> None:
    order = UseOrder(SLOTS, LISTS)
    order.add(3, 1, used_unix_s=9, hits=4)
    order.remove(3)
    order.add(3, 1, used_unix_s=10)
    assert (order.hits[3], order.used_unix_s[3]) == (0, 10)


def test_a_list_that_is_added_later_is_like_the_others() -> None:
    lists = Lists(SLOTS, 1)
    late = lists.add_list()
    for slot, number in ((0, 0), (1, late), (2, late)):
        lists.insert(slot, number)
    lists.warm(1, late)
    assert [list(lists.coldest(number)) for number in (0, late)] == [[0], [2, 1]]


def test_a_slot_costs_16_bytes() -> None:
    order = UseOrder(1000, 3)
    arrays = [value for value in vars(order).values() if hasattr(value, "itemsize")]
    assert sum(array.itemsize for array in arrays) == 16
