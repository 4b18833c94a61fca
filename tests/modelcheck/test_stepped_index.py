"""IndexWriter and IndexReader themselves: each load against each store, and the model's steps as stored."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import partial

import pytest
from publish_model import TAILS, Op, PublishModel, Texts
from stepped_index import (
    Choose,
    Published,
    RecordingWriter,
    World,
    as_published,
    orders,
    reader_of,
    row,
    rows_in,
)

from shmcache.index import SLOTS, IndexReader
from shmcache.key import PrefixWalk, RowAddress, row_address

SEED = bytes(65)
BUCKETS = 2


def buckets_of(key: bytes) -> tuple[int, int]:
    return int.from_bytes(key[8:12], "little") % BUCKETS, int.from_bytes(key[12:16], "little") % BUCKETS


def texts(wanted: Callable[[RowAddress], bool]) -> Iterable[bytes]:
    for number in range(100_000):
        text = hashlib.sha256(str(number).encode()).hexdigest().encode()[: 10 + number % 50]
        if wanted(row_address(SEED, text)):
            yield text


def two_buckets(address: RowAddress) -> bool:
    return buckets_of(address.key) == (0, 1)


K_TEXT = next(iter(texts(two_buckets)))
K = row_address(SEED, K_TEXT)
# The same tag and the same buckets, so that probes for one meet the other.
L_TEXT = next(
    text
    for text in texts(lambda at: two_buckets(at) and at.key[0] == K.key[0])
    if not K_TEXT.startswith(text) and not text.startswith(K_TEXT)
)
L = row_address(SEED, L_TEXT)
ADDRESSES = {"K": K, "L": L}
OTHERS = [row_address(SEED, text) for text, _ in zip(texts(two_buckets), range(17), strict=False)][1:]


class Table:
    """A recording writer, asked as the model's scripts ask."""

    def __init__(self) -> None:
        self.writer = RecordingWriter.make()
        self._number = 0

    def publish(self, address: RowAddress, leaves: int = -1) -> int:
        """Publish, and have the row in slot `leaves` go where both buckets are full; the slot it got."""
        self._number += 1
        entry = row(address.key, address.block_key, address.tail, self._number)
        published = self.writer.publish(entry, lambda slots: leaves)
        assert published is not None
        return published.slot

    def do(self, op: str) -> None:
        what, _, key = op.partition(" ")
        if what == "publish":
            self.publish(ADDRESSES[key])
        else:
            assert self.writer.remove(ADDRESSES[key].key) is not None


SCRIPTS: dict[str, tuple[list[str], list[str]]] = {
    "publish": ([], ["publish K"]),
    "publish beside": (["publish L"], ["publish K"]),
    "replace": (["publish K"], ["publish K"]),
    "replace back": (["publish K", "publish K"], ["publish K"]),
    "republish": (["publish K"], ["remove K", "publish K"]),
    "reuse": (["publish K"], ["remove K", "publish L"]),
    "reuse back": (["publish L"], ["remove L", "publish K"]),
    "churn": (["publish K", "publish L"], ["publish K", "remove L", "remove K", "publish L", "publish K"]),
    "replace twice": (["publish K"], ["publish K", "publish K"]),
}


def world(script: str, *, is_backward: bool = False, frozen: str = "") -> World:
    table = Table()
    setup, ops = SCRIPTS[script]
    for op in setup:
        table.do(op)
    before, table.writer.record = table.writer.memory, []
    for op in ops:
        table.do(op)
    return World(before, table.writer.record, is_backward=is_backward, frozen=frozen)


def get(key: bytes, reader: IndexReader) -> Published | None:
    found = reader.get(key)
    return as_published(found) if found is not None else None


def by_prefix(text: bytes, reader: IndexReader) -> Published | None:
    found = next(reader.candidates(PrefixWalk(SEED, text), len(text)), None)
    return as_published(found) if found is not None else None


def explored(seen_world: World, look: str) -> tuple[int, int]:
    """Look for K in every order; how many orders there were, and how many different answers."""
    there = [rows_in(memory).get(K.key, []) for memory in seen_world.states]
    # A row that is just coming or leaving is there by its key and not yet, or no more, by prefix.
    is_there = [bool(rows) for rows in there]
    if look == "prefix":
        is_there = [bit and rows for bit, rows in zip(map(has_bit, seen_world.states), is_there, strict=True)]
    lookup = partial(get, K.key) if look == "get" else partial(by_prefix, K_TEXT)
    answers = set()

    def run(choose: Choose) -> None:
        found, first, last, reader = seen_world.run(choose, lookup)
        if found is not None:
            assert any(found in rows for rows in there[first : last + 1]), "I2"
        elif reader.statistics().lost == 0:
            assert not all(is_there[first : last + 1]), "I3"
        answers.add(found)

    return orders(run), len(answers)


def has_bit(memory: bytes) -> bool:
    return bool(reader_of(memory)._tails(K.block_key) >> K.tail & 1)


@pytest.mark.parametrize("is_backward", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("look", ["get", "prefix"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_no_order_of_loads_and_stores_shows_a_reader_anything_wrong(
    script: str, look: str, is_backward: bool
) -> None:
    count, answers = explored(world(script, is_backward=is_backward), look)
    # As many as differ: a store that a load does not read makes no order of its own.
    assert count >= 2
    assert answers >= 2


def test_a_reader_that_does_not_see_the_count_of_replacements_is_found_out() -> None:
    with pytest.raises(AssertionError, match="I3"):
        explored(world("replace back", frozen="_header"), "get")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_writer_that_dies_between_two_stores_leaves_whole_rows(script: str) -> None:
    for memory in world(script).states:
        for rows in rows_in(memory).values():
            assert len(rows) <= 2


MODEL_SCRIPTS: dict[str, tuple[list[Op], list[Op]]] = {
    "a first row": ([], [Op("publish", "K")]),
    "a row in a block that is there": ([Op("publish", "L")], [Op("publish", "K")]),
    "a row for another": ([Op("publish", "K")], [Op("publish", "K")]),
    "the last row of a block": ([Op("publish", "K")], [Op("remove", "K")]),
    "one row of two": ([Op("publish", "K"), Op("publish", "L")], [Op("remove", "K")]),
}


@pytest.mark.parametrize("script", MODEL_SCRIPTS)
def test_the_writer_stores_in_the_order_of_the_model(script: str) -> None:
    setup, ops = MODEL_SCRIPTS[script]
    table = Table()
    for op in setup:
        table.do(f"{op.what} {op.key}")
    table.writer.record.clear()
    for op in ops:
        table.do(f"{op.what} {op.key}")
    model = PublishModel(setup, ops, [])
    assert [store.step for store in table.writer.record] == [stores.step for stores in model.program]


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_row_that_leaves_two_full_buckets_goes_first_as_in_the_model(is_shared: bool) -> None:
    table = Table()
    for address in OTHERS[: BUCKETS * SLOTS - 1]:
        table.publish(address)
    tails = {address.tail for address in OTHERS}
    leaves = next(
        address
        for text in texts(two_buckets)
        if (address := row_address(SEED, text)) not in (*OTHERS, K) and (address.tail in tails) == is_shared
    )
    slot = table.publish(leaves)
    table.writer.record.clear()
    table.publish(K, slot)
    # The model's keys are in one block, which stays, as it does here: no R2, no P4 to P6.
    model = PublishModel(
        [Op("publish", "K"), Op("publish", "L")],
        [Op("publish", "M")],
        [],
        texts=Texts(tails=dict.fromkeys(TAILS, 1)) if is_shared else None,
    )
    assert [store.step for store in table.writer.record] == [stores.step for stores in model.program]
