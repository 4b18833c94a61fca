"""shmcache.index against its trivial twin: a dict of all rows, searched byte by byte."""

from __future__ import annotations

import mmap
import os
import random
import re
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shmcache import index
from shmcache.errors import LayoutMismatch
from shmcache.index import IndexReader, IndexWriter, Row
from shmcache.key import BLOCK_BYTES, SEED_BYTES, PrefixWalk, row_address
from shmcache.shm import Mapping

SEEDS = [bytes([number]) * SEED_BYTES for number in range(3)]
UNLIMITED = 1 << 62


def memory(max_rows: int) -> memoryview:
    return memoryview(mmap.mmap(-1, index.segment_bytes(max_rows)))


def made(max_rows: int) -> tuple[IndexWriter, IndexReader]:
    buffer = memory(max_rows)
    return IndexWriter.create(buffer, max_rows, epoch=7), IndexReader(buffer.toreadonly())


def row_of(text: bytes, seed: bytes = SEEDS[0], *, tier: int = 1, slab_bytes: int = 4096) -> Row:
    address = row_address(seed, text)
    return Row(
        key=address.key,
        block_key=address.block_key,
        tail=address.tail,
        identity_tag=seed[0],
        text_bytes=len(text),
        slab_bytes=slab_bytes,
        token_count=len(text) // 4,
        tier=tier,
        reason=1,
        flags=0,
    )


def row_at(key: bytes, number: int = 0) -> Row:
    """A row of which only the key matters, alone in its block."""
    return Row(key, key, number % BLOCK_BYTES, 1, number, number, number, 1, 1, 0)


def keys_in_one_pair_of_buckets(count: int) -> list[bytes]:
    """Keys that share both buckets, 0 and 1, and have tags of their own."""
    return [bytes([number]) + bytes(11) + b"\1" + bytes(18) + bytes([number]) for number in range(count)]


def nobody(slots: Sequence[int]) -> int:
    raise AssertionError(f"nobody should have to leave for this row, and {slots} are asked")


def prefixes(reader: IndexReader, seed: bytes, prompt: bytes, max_bytes: int = UNLIMITED) -> list[Row]:
    return [found.row for found in reader.candidates(PrefixWalk(seed, prompt), max_bytes)]


# ---- the twin

BASES = [
    (b"The system prompt and all the tools. " * 140)[:4500] + b"conversation %d " % number * 120
    for number in range(3)
]
lengths = st.one_of(
    st.integers(0, 6000),
    st.builds(lambda block, by: max(0, block * BLOCK_BYTES + by), st.integers(0, 5), st.integers(-2, 2)),
)
texts = st.builds(lambda base, length: BASES[base][:length], st.integers(0, 2), lengths)
seeds = st.sampled_from(SEEDS)


class IndexAndItsTwin(RuleBasedStateMachine):
    """Whatever is published, replaced, removed or evicted: lookups equal a scan of a dict of all rows."""

    @initialize(max_rows=st.integers(1, 20))
    def begin(self, max_rows: int) -> None:
        self.writer, self.reader = made(max_rows)
        self.rows: dict[bytes, tuple[bytes, bytes, Row]] = {}

    @rule(seed=seeds, text=texts, tier=st.integers(0, 2), slab_bytes=st.integers(1, 2**63))
    def publish(self, seed: bytes, text: bytes, tier: int, slab_bytes: int) -> None:
        row = row_of(text, seed, tier=tier, slab_bytes=slab_bytes)
        before = self.rows.get(row.key)
        published = self.writer.publish(row, self.first_of)
        if published is None:
            assert before is None
            assert row.block_key not in dict(self.reader.blocks())
            return
        if published.evicted is not None:
            assert self.rows.pop(published.evicted.row.key)[2] == published.evicted.row
        assert (published.replaced.row if published.replaced else None) == (before[2] if before else None)
        self.rows[row.key] = (seed, text, row)
        found = self.reader.get(row.key)
        assert found is not None
        assert (found.slot, found.word, found.row) == (published.slot, published.word, row)

    def first_of(self, slots: Sequence[int]) -> int:
        assert all(self.reader.at(slot) is not None for slot in slots)
        return slots[0]

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([*sorted(self.rows), bytes(32)]))
        gone = self.writer.remove(key)
        assert (gone.row if gone else None) == (self.rows.pop(key)[2] if gone else None)
        assert self.reader.get(key) is None

    @rule(seed=seeds, prompt=texts, max_bytes=st.one_of(lengths, st.just(UNLIMITED), st.just(-1)))
    def look_up(self, seed: bytes, prompt: bytes, max_bytes: int) -> None:
        scanned = [
            row
            for row_seed, text, row in self.rows.values()
            if row_seed == seed and prompt.startswith(text) and len(text) <= max_bytes
        ]
        scanned.sort(key=lambda row: -row.text_bytes)
        assert prefixes(self.reader, seed, prompt, max_bytes) == scanned

    @invariant()
    def holds_the_same_rows_and_blocks(self) -> None:
        if not hasattr(self, "rows"):
            return
        assert {found.row.key: found.row for found in self.reader.rows()} == {
            key: row for key, (_, _, row) in self.rows.items()
        }
        tails: dict[bytes, int] = {}
        for _, _, row in self.rows.values():
            tails[row.block_key] = tails.get(row.block_key, 0) | 1 << row.tail
        assert dict(self.reader.blocks()) == tails
        stats = self.reader.stats()
        assert (len(self.writer), stats["rows"], stats["blocks"]) == (
            len(self.rows),
            len(self.rows),
            len(tails),
        )
        assert self.reader.statistics().lost == 0


IndexAndItsTwin.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_lookups_equal_a_scan_of_all_rows = IndexAndItsTwin.TestCase


def test_a_row_is_found_at_any_boundary_and_by_no_shorter_prompt() -> None:
    writer, reader = made(64)
    text = os.urandom(5 * BLOCK_BYTES)
    for length in (700, 1023, 1024, 1025, 2048, 4095, 5120):
        writer.publish(row_of(text[:length]), nobody)
    assert [row.text_bytes for row in prefixes(reader, SEEDS[0], text)] == [
        5120, 4095, 2048, 1025, 1024, 1023, 700,
    ]  # fmt: skip
    assert [row.text_bytes for row in prefixes(reader, SEEDS[0], text[:1024])] == [1024, 1023, 700]
    assert [row.text_bytes for row in prefixes(reader, SEEDS[0], text, max_bytes=2047)] == [
        1025,
        1024,
        1023,
        700,
    ]
    assert prefixes(reader, SEEDS[0], text[:699]) == []
    assert prefixes(reader, SEEDS[0], b"") == []
    assert prefixes(reader, SEEDS[1], text) == []


def test_candidates_are_found_as_they_are_asked_for() -> None:
    writer, reader = made(64)
    text = os.urandom(3000)
    writer.publish(row_of(text), nobody)
    writer.publish(row_of(text[:100]), nobody)
    candidates = reader.candidates(PrefixWalk(SEEDS[0], text), UNLIMITED)
    assert next(candidates).row.text_bytes == 3000
    writer.remove(row_of(text[:100]).key)
    assert next(candidates, None) is None


def test_every_tail_of_a_block_can_be_in_use_and_none_is_left_out() -> None:
    writer, reader = made(4096)
    text = os.urandom(2 * BLOCK_BYTES)
    for length in random.sample(range(BLOCK_BYTES, 2 * BLOCK_BYTES), BLOCK_BYTES):
        writer.publish(row_of(text[:length]), nobody)
    assert [row.text_bytes for row in prefixes(reader, SEEDS[0], text)] == list(
        range(2 * BLOCK_BYTES - 1, BLOCK_BYTES - 1, -1)
    )


def test_a_prompt_of_ten_megabytes_finds_its_rows() -> None:
    writer, reader = made(64)
    text = os.urandom(1 << 20) * 10
    for length in (10 << 20, (10 << 20) - 1, 5_000_000, 17):
        writer.publish(row_of(text[:length]), nobody)
    assert [row.text_bytes for row in prefixes(reader, SEEDS[0], text)] == [
        10 << 20,
        (10 << 20) - 1,
        5_000_000,
        17,
    ]


def test_rows_with_one_tag_and_both_buckets_in_common_are_told_apart_by_the_whole_key() -> None:
    writer, reader = made(64)
    same_places = b"\x05" + bytes(15)
    keys = [same_places + bytes([number]) * 16 for number in range(8)]
    for number, key in enumerate(keys):
        writer.publish(row_at(key, number), nobody)
    assert [found_row(reader, key).text_bytes for key in keys] == list(range(8))
    assert reader.get(same_places + bytes([99]) * 16) is None


def test_a_key_of_zeros_is_a_key_like_any_other() -> None:
    writer, reader = made(8)
    assert reader.get(bytes(32)) is None
    writer.publish(row_at(bytes(32), 5), nobody)
    assert found_row(reader, bytes(32)).text_bytes == 5
    writer.remove(bytes(32))
    assert reader.get(bytes(32)) is None


def found_row(reader: IndexReader, key: bytes) -> Row:
    found = reader.get(key)
    assert found is not None
    return found.row


# ---- full buckets


def test_where_both_buckets_are_full_the_row_that_coldest_names_leaves_first() -> None:
    writer, reader = made(1000)
    *keys, late = keys_in_one_pair_of_buckets(17)
    blocks = [os.urandom(32) for _ in range(17)]
    for key, block_key in zip(keys, blocks, strict=False):
        writer.publish(with_block(key, block_key), nobody)
    asked: list[Sequence[int]] = []

    def third(slots: Sequence[int]) -> int:
        asked.append(slots)
        return found_slot(reader, keys[2])

    published = writer.publish(with_block(late, blocks[16]), third)
    assert published is not None
    assert published.evicted is not None
    assert published.evicted.row.key == keys[2]
    assert [sorted(slots) for slots in asked] == [list(range(16))]
    assert reader.get(keys[2]) is None
    assert all(reader.get(key) for key in [*keys[:2], *keys[3:], late])
    assert blocks[2] not in dict(reader.blocks())
    assert reader.stats()["left_buckets_full"] == 1


def test_a_row_is_never_evicted_for_its_own_replacement() -> None:
    writer, reader = made(1000)
    keys = keys_in_one_pair_of_buckets(16)
    for key in keys:
        writer.publish(with_block(key, os.urandom(32)), nobody)
    old = found_slot(reader, keys[0])
    again = with_block(keys[0], found_row(reader, keys[0]).block_key)
    published = writer.publish(
        again, lambda slots: min(slot for slot in slots if slot != old or pytest.fail())
    )
    assert published is not None
    assert published.replaced is not None
    assert published.evicted is not None
    assert published.evicted.row.key != keys[0]
    assert len(writer) == 15


def test_an_eviction_that_takes_the_new_rows_own_block_makes_it_anew() -> None:
    writer, reader = made(1000)
    *keys, late = keys_in_one_pair_of_buckets(17)
    shared = os.urandom(32)
    for key in keys[1:]:
        writer.publish(with_block(key, os.urandom(32)), nobody)
    writer.publish(with_block(keys[0], shared, tail=1), nobody)
    writer.publish(with_block(late, shared, tail=2), lambda slots: found_slot(reader, keys[0]))
    assert dict(reader.blocks())[shared] == 1 << 2


def test_an_answer_that_names_no_row_to_leave_changes_nothing() -> None:
    writer, reader = made(1000)
    *keys, late = keys_in_one_pair_of_buckets(17)
    for key in keys:
        writer.publish(with_block(key, os.urandom(32)), nobody)
    before = bytes(reader_memory(reader))
    with pytest.raises(ValueError, match="none of those that could leave"):
        writer.publish(with_block(late, os.urandom(32)), lambda slots: max(slots) + 1)
    assert bytes(reader_memory(reader)) == before


def test_a_row_whose_block_finds_no_room_is_refused_and_counted() -> None:
    writer, reader = made(1000)
    *blocks, late = keys_in_one_pair_of_buckets(17)
    for block_key in blocks:
        writer.publish(with_block(os.urandom(32), block_key), nobody)
    key = os.urandom(32)
    assert writer.publish(with_block(key, late), nobody) is None
    assert reader.get(key) is None
    assert (len(writer), reader.stats()["refused_blocks_full"]) == (16, 1)
    assert writer.publish(with_block(key, blocks[3], tail=9), nobody) is not None


def test_what_is_no_row_is_refused_before_anything_changes() -> None:
    writer, _ = made(8)
    good = row_at(os.urandom(32))
    for bad in (
        with_block(good.key[:31], good.key),
        with_block(good.key, good.key + b"x"),
        with_block(good.key, good.key, tail=1024),
        with_block(good.key, good.key, tail=-1),
    ):
        with pytest.raises(ValueError, match="not a row"):
            writer.publish(bad, nobody)
    assert list(writer.rows()) == []


def with_block(key: bytes, block_key: bytes, tail: int = 0) -> Row:
    return Row(key, block_key, tail, 1, 0, 0, 0, 1, 1, 0)


def found_slot(reader: IndexReader, key: bytes) -> int:
    found = reader.get(key)
    assert found is not None
    return found.slot


def reader_memory(reader: IndexReader) -> mmap.mmap:
    return reader._raw


# ---- every step


class SteppedWriter(IndexWriter):
    """A writer that shows its memory after every store and every piece of a copy."""

    after_store: Callable[[], None] = staticmethod(lambda: None)
    piece_bytes = 8

    def _store(self, offset: int, word: int) -> None:
        super()._store(offset, word)
        self.after_store()

    def _copy(self, offset: int, data: bytes) -> None:
        for start in range(0, len(data), self.piece_bytes):
            super()._copy(offset + start, data[start : start + self.piece_bytes])
            self.after_store()


TEXT = bytes(range(256)) * 20


def evict_for_one_more(writer: IndexWriter) -> None:
    writer.publish(with_block(keys_in_one_pair_of_buckets(17)[16], b"z" * 32), min)


def fill_a_bucket(writer: IndexWriter) -> None:
    for key in keys_in_one_pair_of_buckets(16):
        writer.publish(with_block(key, sha256(key).digest()), nobody)


# name: what is there before, and the change whose every step is shown
CHANGES: dict[str, tuple[Callable[[IndexWriter], object], Callable[[IndexWriter], object]]] = {
    "first row of a block": (lambda w: None, lambda w: w.publish(row_of(TEXT[:1500]), nobody)),
    "second row of a block": (
        lambda w: w.publish(row_of(TEXT[:1500]), nobody),
        lambda w: w.publish(row_of(TEXT[:1600]), nobody),
    ),
    "replacement": (
        lambda w: w.publish(row_of(TEXT[:1500]), nobody),
        lambda w: w.publish(row_of(TEXT[:1500], tier=2), nobody),
    ),
    "removal of a block's last row": (
        lambda w: w.publish(row_of(TEXT[:1500]), nobody),
        lambda w: w.remove(row_of(TEXT[:1500]).key),
    ),
    "removal of one row of two": (
        lambda w: [w.publish(row_of(TEXT[:length]), nobody) for length in (1500, 1600)],
        lambda w: w.remove(row_of(TEXT[:1500]).key),
    ),
    "a removed row's place taken by another": (
        lambda w: [w.publish(with_block(keys_in_one_pair_of_buckets(8)[3], b"y" * 32), nobody), w.remove(
            keys_in_one_pair_of_buckets(8)[3]
        )],
        lambda w: w.publish(with_block(keys_in_one_pair_of_buckets(8)[4], b"z" * 32), nobody),
    ),
    "eviction from two full buckets": (fill_a_bucket, evict_for_one_more),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_writer_that_dies_at_any_step_leaves_every_row_whole_or_not_there(name: str) -> None:
    prepare, change = CHANGES[name]
    buffer = memory(64)
    writer = SteppedWriter.create(buffer, 64, epoch=1)
    bystander = row_of(TEXT[:1100])
    writer.publish(bystander, nobody)
    prepare(writer)
    before = {found.row.key: found.row for found in writer.rows()}
    images: list[bytes] = []
    writer.after_store = lambda: images.append(bytes(buffer))
    change(writer)
    after = {found.row.key: found.row for found in writer.rows()}

    assert len(images) >= 2
    for image in images:
        with reader_of(image) as reader:
            for key in before.keys() | after.keys():
                found = reader.get(key)
                row = found.row if found else None
                assert row in (before.get(key), after.get(key))
                assert row is not None or key not in before or key not in after
            for prefix in prefixes(reader, SEEDS[0], TEXT):
                assert prefix in (before.get(prefix.key), after.get(prefix.key))
            assert bystander in prefixes(reader, SEEDS[0], TEXT)
            tails = dict(reader.blocks())
            for key in before.keys() & after.keys():
                assert tails[after[key].block_key] >> after[key].tail & 1
            assert reader.statistics().lost == 0
    with reader_of(images[-1]) as reader:
        assert {found.row.key: found.row for found in reader.rows()} == after


@pytest.mark.parametrize("name", CHANGES)
def test_a_bit_is_set_after_its_row_is_there_and_cleared_before_it_goes(name: str) -> None:
    prepare, change = CHANGES[name]
    buffer = memory(64)
    writer = SteppedWriter.create(buffer, 64, epoch=1)
    prepare(writer)
    reader = IndexReader(buffer.toreadonly())

    def check() -> None:
        found = {(found.row.block_key, found.row.tail) for found in reader.rows()}
        bits = {
            (key, tail) for key, tails in reader.blocks() for tail in range(BLOCK_BYTES) if tails >> tail & 1
        }
        assert bits <= found

    writer.after_store = check
    change(writer)


def reader_of(image: bytes) -> IndexReader:
    copy = mmap.mmap(-1, len(image))
    copy[:] = image
    return IndexReader(memoryview(copy))


def test_the_steps_in_the_docstring_are_the_steps_in_the_code() -> None:
    source = Path(index.__file__).read_text(encoding="utf-8")
    documented = re.findall(r"^    ([PR]\d [a-z ]+?)(?:  .*)?$", index.__doc__ or "", re.MULTILINE)
    written = re.findall(r"# ([PR]\d [a-z ]+)$", source, re.MULTILINE)
    assert documented == sorted(documented)
    assert sorted(written) == documented
    assert len(documented) == 12


# ---- readers beside a writer, stepped


class Moving:
    """A reader whose memory becomes another image of a list before those of its accesses that are named."""

    def __init__(self, images: list[bytes]) -> None:
        self.images = images
        self.memory = mmap.mmap(-1, len(images[0]))

    def get(self, key: bytes, moves: dict[int, int]) -> tuple[Row | None, int]:
        """What a lookup that begins at image 0 returns, and how often it looked at the memory."""
        self.memory[:] = self.images[0]
        self.moves, self.accesses = moves, 0
        self.reader = IndexReader(memoryview(self.memory))
        for name in ("row_words", "_header", "_raw", "_find"):
            setattr(self.reader, name, Seen(getattr(self.reader, name), self.access))
        self.reader.get = self.reader._make_get()
        found = self.reader.get(key)
        return found.row if found else None, self.accesses

    def access(self) -> None:
        image = self.moves.get(self.accesses)
        if image is not None:
            self.memory[:] = self.images[image]
        self.accesses += 1


class Seen:
    """A view, or its search, of which each use is told first."""

    def __init__(self, seen: Any, access: Callable[[], None]) -> None:
        self.seen, self.access = seen, access

    def __getitem__(self, place: int | slice) -> Any:
        self.access()
        return self.seen[place]

    def __call__(self, *arguments: object) -> Any:
        self.access()
        return self.seen(*arguments)


def all_lookups(images: list[bytes], key: bytes) -> Iterator[Row | None]:
    """Results of a reader beside whom the writer goes on twice, by any steps, before any two accesses."""
    moving = Moving(images)
    for middle in range(len(images)):
        for end in range(middle, len(images)):
            first = accesses = 0
            while first <= accesses:
                second = first
                while second <= accesses or second == first:
                    row, accesses = moving.get(key, {first: middle, second: end})
                    yield row
                    second += 1
                first += 1


def images_of(
    prepare: Callable[[IndexWriter], object], change: Callable[[IndexWriter], object]
) -> list[bytes]:
    buffer = memory(1)
    writer = SteppedWriter.create(buffer, 1, epoch=1)
    prepare(writer)
    images = [bytes(buffer)]
    writer.after_store = lambda: images.append(bytes(buffer))
    writer.piece_bytes = index.ROW_BYTES
    change(writer)
    return images


@pytest.mark.parametrize("times", [1, 2], ids=["behind the old row", "before it"])
def test_a_row_that_is_being_replaced_is_found_at_every_step(times: int) -> None:
    rows = [row_of(TEXT[:1500], slab_bytes=number) for number in range(3)]
    images = images_of(
        lambda writer: [writer.publish(row, nobody) for row in rows[:times]],
        lambda writer: writer.publish(rows[2], nobody),
    )
    assert set(all_lookups(images, rows[0].key)) == {rows[times - 1], rows[2]}


def test_a_row_that_moves_to_the_bucket_already_searched_is_found() -> None:
    """... even if its old slot has another row's tag before the reader comes there."""
    moved, late, *others = keys_in_one_pair_of_buckets(17)
    old, new = (Row(moved, moved, 0, 1, 0, slab_bytes, 0, 1, 1, 0) for slab_bytes in (1, 2))

    def prepare(writer: IndexWriter) -> None:
        for key in others:
            writer.publish(with_block(key, key), nobody)
        writer.publish(old, nobody)
        assert found_slot(writer, moved) == 15
        writer.remove(next(key for key in others if found_slot(writer, key) < index.SLOTS))

    def change(writer: IndexWriter) -> None:
        writer.publish(new, nobody)
        writer.publish(with_block(late, late), nobody)
        assert found_slot(writer, late) == 15

    assert set(all_lookups(images_of(prepare, change), moved)) == {old, new}


def test_a_reader_of_a_slot_that_changes_hands_sees_one_row_or_the_other_or_none() -> None:
    one, other = keys_in_one_pair_of_buckets(2)
    images = images_of(
        lambda writer: writer.publish(row_at(one, 1), nobody),
        lambda writer: [writer.remove(one), writer.publish(row_at(other, 2), nobody)],
    )
    assert set(all_lookups(images, one)) == {row_at(one, 1), None}
    assert set(all_lookups(images, other)) == {row_at(other, 2), None}


def test_a_slot_that_changes_under_a_reader_is_a_counted_retry() -> None:
    one, other = keys_in_one_pair_of_buckets(2)
    images = images_of(
        lambda writer: writer.publish(row_at(one, 1), nobody),
        lambda writer: [writer.remove(one), writer.publish(row_at(other, 2), nobody)],
    )
    moving = Moving([images[0], images[-1]])
    assert moving.get(one, {2: 1})[0] is None  # after the search and the first load
    assert moving.reader.statistics().retries == 1
    assert moving.reader.statistics().lost == 0


def test_every_flipped_bit_of_an_entry_is_noticed() -> None:
    writer, reader = made(8)
    row = row_of(TEXT[:1500])
    writer.publish(row, nobody)
    slot = found_slot(reader, row.key)
    memory_of_it = reader_memory(reader)
    start = reader._rows.entry(slot)
    for bit in range(index.ROW_BYTES * 8):
        memory_of_it[start + bit // 8] ^= 1 << bit % 8
        assert reader.get(row.key) is None
        assert reader.at(slot) is None
        memory_of_it[start + bit // 8] ^= 1 << bit % 8
    assert found_row(reader, row.key) == row
    assert reader.statistics().retries == reader.statistics().lost == index.ROW_BYTES * 8


def test_the_check_belongs_to_one_publication() -> None:
    """The body of one publication under the word of another is no row: what a reordered load could see."""
    writer, reader = made(8)
    key = os.urandom(32)
    writer.publish(row_at(key, 1), nobody)
    slot = found_slot(reader, key)
    start = reader._rows.entry(slot)
    body = reader_memory(reader)[start + 8 : start + index.ROW_BYTES]
    writer.remove(key)
    assert writer.publish(row_at(key, 2), nobody) is not None
    assert found_slot(reader, key) == slot
    reader_memory(reader)[start + 8 : start + index.ROW_BYTES] = body
    assert reader.get(key) is None


def test_a_bit_without_a_row_costs_a_probe_and_nothing_else() -> None:
    writer, reader = made(8)
    writer.publish(row_of(TEXT[:1500]), nobody)
    slot, _ = reader._find_block(row_of(TEXT[:1500]).block_key)
    place, bit = writer._bit(slot, 700)
    writer._store(place, writer._words[place >> 3] | bit)
    assert [row.text_bytes for row in prefixes(reader, SEEDS[0], TEXT)] == [1500]


# ---- long use


def test_a_table_that_churned_a_hundred_times_its_capacity_probes_like_a_fresh_one() -> None:
    max_rows = 300
    source = random.Random(5)
    fresh, fresh_reader = made(max_rows)
    for number in range(max_rows):
        fresh.publish(row_at(source.randbytes(32), number), nobody)
    worn, worn_reader = made(max_rows)
    held: list[bytes] = []
    for number in range(100 * max_rows):
        if len(held) == max_rows:
            place = source.randrange(max_rows)
            held[place], held[-1] = held[-1], held[place]
            assert worn.remove(held.pop())
        key = source.randbytes(32)
        published = worn.publish(row_at(key, number), lambda slots: slots[0])
        assert published is not None
        if published.evicted is not None:
            held.remove(published.evicted.row.key)
        held.append(key)

    assert {found.row.key for found in worn_reader.rows()} == set(held)
    assert dict(worn_reader.blocks()).keys() == set(held)
    absent = [source.randbytes(32) for _ in range(1000)]
    assert not any(worn_reader.get(key) for key in absent)
    assert searches(worn_reader, held) <= searches(fresh_reader, held_keys(fresh_reader)) + 0.25
    assert reads(worn_reader, absent) <= reads(fresh_reader, absent) + 0.05


def held_keys(reader: IndexReader) -> list[bytes]:
    return [found.row.key for found in reader.rows()]


def searches(reader: IndexReader, keys: list[bytes]) -> float:
    """Buckets searched for each key that is there."""
    before = reader.statistics().second_probes
    assert all(reader.get(key) for key in keys)
    return 1 + (reader.statistics().second_probes - before) / len(keys)


def reads(reader: IndexReader, keys: list[bytes]) -> float:
    """Entries whose word a lookup of an absent key loads, because a tag is the same by chance."""
    loaded = 0
    words = reader.row_words

    class CountedWords:
        def __getitem__(self, slot: int) -> int:
            nonlocal loaded
            loaded += 1
            return words[slot]

    reader.row_words = CountedWords()  # type: ignore[assignment]
    get = reader._make_get()
    assert not any(get(key) for key in keys)
    reader.row_words = words
    return loaded / len(keys)


def test_rows_cost_the_writer_no_memory_beside_the_segment() -> None:
    writer, _ = made(3000)
    rows = [row_at(os.urandom(32), number) for number in range(3000)]
    writer.publish(rows[0], nobody)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for row in rows[1:]:
            writer.publish(row, nobody)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 4096


def test_an_index_for_four_million_rows_is_made_without_touching_it() -> None:
    assert index.segment_bytes(4_000_000) < 4_000_000 * 560
    fd = os.memfd_create("index")
    try:
        os.ftruncate(fd, index.segment_bytes(4_000_000))
        with mmap.mmap(fd, 0) as mapped, memoryview(mapped) as view:
            with IndexWriter.create(view, 4_000_000, epoch=1) as writer:
                assert writer.publish(row_at(os.urandom(32)), nobody) is not None
                assert writer.slots < 1 << 32
            assert os.fstat(fd).st_blocks * 512 < 1 << 20
    finally:
        os.close(fd)


def test_generations_only_grow_and_name_one_publication_each() -> None:
    writer, reader = made(8)
    key = os.urandom(32)
    words = []
    for number in range(50):
        published = writer.publish(row_at(key, number), nobody)
        assert published is not None
        words.append(published.word)
        if number % 3 == 0:
            writer.remove(key)
    assert words == sorted(set(words))
    writer.publish(row_at(key), nobody)
    found = reader.get(key)
    assert found is not None
    assert found.touch == found.slot | (found.word >> 8 & 0xFFFFFFFF) << 32
    assert made(8)[0]._generation != made(8)[0]._generation


def test_a_touch_of_a_row_that_has_left_names_nothing() -> None:
    writer, reader = made(8)
    key = os.urandom(32)
    writer.publish(row_at(key), nobody)
    slot = found_slot(reader, key)
    assert writer.at(slot) == reader.get(key)
    writer.remove(key)
    assert writer.at(slot) is None
    assert writer.at(writer.slots) is None
    assert writer.at(-1) is None


# ---- layout and figures


def changed_header(word: int, value: int) -> memoryview:
    buffer = memory(16)
    IndexWriter.create(buffer, 16, epoch=3).close()
    with buffer[-index.HEADER_BYTES :].cast("Q") as header:
        header[word] = value
    return buffer


@pytest.mark.parametrize(
    ("buffer", "theirs"),
    [
        pytest.param(changed_header(0, 1), 0, id="no magic"),
        pytest.param(changed_header(1, 12345), 12345, id="another layout"),
        pytest.param(changed_header(3 + 1, 1 << 40), index.LAYOUT_HASH, id="more buckets than bytes"),
        pytest.param(memoryview(mmap.mmap(-1, 8192)), 0, id="all zeros"),
        pytest.param(memoryview(mmap.mmap(-1, 100)), 0, id="shorter than a header"),
    ],
)
def test_a_segment_of_another_layout_is_refused_with_both_hashes(buffer: memoryview, theirs: int) -> None:
    with pytest.raises(LayoutMismatch) as raised:
        IndexReader(buffer)
    assert (raised.value.ours, raised.value.theirs) == (index.LAYOUT_HASH, theirs)


def test_a_segment_of_the_wrong_size_is_refused_by_its_writer() -> None:
    with pytest.raises(ValueError, match="1000 rows need"):
        IndexWriter.create(memory(10), 1000, epoch=1)
    with pytest.raises(ValueError, match="0 rows need"):
        IndexWriter.create(memory(0), 0, epoch=1)


def test_readers_see_epoch_capacity_and_figures() -> None:
    writer, reader = made(16)
    assert (reader.epoch, reader.max_rows) == (7, 16)
    writer.set_stat("bytes_disk", 2**64 - 1)
    writer.publish(row_at(os.urandom(32)), nobody)
    assert reader.stats() == dict.fromkeys(index.STAT_NAMES, 0) | {
        "bytes_disk": 2**64 - 1,
        "rows": 1,
        "blocks": 1,
    }
    with pytest.raises(KeyError):
        writer.set_stat("no such figure", 1)


def test_a_closed_reader_lets_its_mapping_go() -> None:
    mapped = mmap.mmap(-1, index.segment_bytes(8))
    view = memoryview(mapped)
    with IndexWriter.create(view, 8, epoch=1) as writer, IndexReader(view) as reader:
        writer.publish(row_at(bytes(32)), nobody)
        assert reader.get(bytes(32))
    view.release()
    mapped.close()


# ---- two processes

HOT = keys_in_one_pair_of_buckets(4) + [bytes([number]) * 32 for number in range(100, 112)]
STEADY = HOT[4:8]  # replaced again and again, never removed


def telling_row(key: bytes, number: int) -> Row:
    """A row whose fields all follow from its number."""
    return Row(
        key, key, number % BLOCK_BYTES, number * 7, number, number ^ 0xABCDEF, number % 1000, number % 3, 1, 5
    )


def churn(path: str, ready: Connection) -> None:
    """Publish, replace and remove on the hot keys at full speed until told to stop."""
    fd = os.open(path, os.O_RDWR)
    with (
        mmap.mmap(fd, 0) as mapped,
        memoryview(mapped) as view,
        IndexWriter.create(view, 64, epoch=1) as writer,
    ):
        source = random.Random(1)
        number = 0
        for key in HOT:
            writer.publish(telling_row(key, 0), nobody)
        ready.send(None)
        while not ready.poll():
            for key in source.choices(HOT, k=200):
                number += 1
                if key in STEADY or source.random() < 0.6:
                    writer.publish(telling_row(key, number), min)
                else:
                    writer.remove(key)
        ready.send(number)


@pytest.fixture
def churned(tmp_path: Path) -> Iterator[tuple[Path, Connection]]:
    path = tmp_path / "index"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(fd, index.segment_bytes(64))
    os.close(fd)
    ours, theirs = get_context("spawn").Pipe()
    writer = get_context("spawn").Process(target=churn, args=(str(path), theirs))
    writer.start()
    ours.recv()
    yield path, ours
    writer.join(10)
    assert writer.exitcode == 0


def test_a_reader_beside_a_writer_at_full_speed_sees_no_wrong_row(churned: tuple[Path, Connection]) -> None:
    path, writer = churned
    hits = 0
    lost_steady = 0
    last: dict[bytes, int] = {}
    source = random.Random(2)
    with Mapping.open(path) as mapping, IndexReader(mapping.bytes) as reader:
        for _ in range(2000):
            for key in source.choices(HOT, k=100):
                found = reader.get(key)
                if found is None:
                    lost_steady += key in STEADY
                    continue
                hits += 1
                row = found.row
                assert row == telling_row(key, row.text_bytes)
                assert row.text_bytes >= last.get(key, 0)
                last[key] = row.text_bytes
        statistics = reader.statistics()
    writer.send(None)
    assert writer.recv() > 1000
    assert hits > 10_000
    assert statistics.retries > 0
    assert lost_steady <= statistics.lost <= statistics.retries
