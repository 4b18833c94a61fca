"""The decision table: whole values or none, whatever the writer does."""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmcache.decisions import table
from shmcache.decisions.table import INSIDE_BYTES, UNIT_BYTES, Record, TableReader, TableWriter, Units
from shmcache.errors import LayoutMismatch


class Pair:
    """A writer, and a reader over a read-only mapping of the same file."""

    def __init__(self, path: Path, rows: int, units: int) -> None:
        size = table.segment_bytes(rows, units)
        fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        os.ftruncate(fd, size)
        self.raw = mmap.mmap(fd, size)
        self.writer = TableWriter.create(memoryview(self.raw), rows, units, epoch=7)
        self.read_only = memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_READ))
        self.reader = TableReader(self.read_only)
        os.close(fd)

    def put(self, key: bytes, value: bytes, expires: float | None = None, ends_ns: int = 0) -> None:
        """As the arbiter does it: whoever is in the way leaves."""
        while (slot := self.writer.free_slot(key)) < 0:
            entry = self.writer.at(self.writer.choices(key)[0])
            assert entry is not None
            self.writer.remove(entry)
        assert self.writer.fits(value)
        expires_ms = int(expires * 1000) if expires is not None else None
        self.writer.put(slot, Record(1, key, value, 1000, expires_ms), ends_ns, self.writer.entry(key))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    yield Pair(tmp_path / "table", rows=64, units=64)


def test_a_value_comes_back_inside_and_in_units(pair: Pair) -> None:
    for number, size in enumerate((0, 1, INSIDE_BYTES, INSIDE_BYTES + 1, UNIT_BYTES * 5 + 3)):
        key, value = bytes([number]) * 16, os.urandom(size)
        pair.put(key, value, 1234.5, 1 << 62)
        assert pair.reader.get(key) == (value, 1234.5)
    assert len(pair.reader) == 5
    assert pair.reader.get(b"x" * 16) is None
    assert {decision.key[0] for decision in pair.reader.decisions()} == set(range(5))
    assert (pair.reader.epoch, pair.reader.max_rows) == (7, 64)


def test_a_value_ends_at_its_boot_time_instant(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    pair.put(b"a" * 16, b"v", 1.0, now + 10**9)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert pair.reader.get(b"a" * 16) == (b"v", 1.0)
    monkeypatch.setattr(table, "_clock", lambda clock: now + 10**9)
    pair.reader.get = pair.reader._make_get()
    assert pair.reader.get(b"a" * 16) is None
    assert list(pair.reader.decisions()) == []


def test_a_replacement_gives_its_units_back(pair: Pair) -> None:
    for round_number in range(50):
        pair.put(b"a" * 16, bytes([round_number]) * 3000)
        assert pair.reader.get(b"a" * 16) == (bytes([round_number]) * 3000, None)
    assert pair.reader.stats()["units_used"] == 16
    entry = pair.writer.entry(b"a" * 16)
    assert entry is not None
    pair.writer.remove(entry)
    assert pair.reader.stats()["units_used"] == len(pair.reader) == 0


def test_a_reader_never_sees_units_that_were_given_to_another_value(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.put(b"a" * 16, b"a" * 3000, 1e9, 1 << 62)
    entry = pair.writer.entry(b"a" * 16)
    assert entry is not None
    clock = table._clock

    def overtaken(which: int) -> int:
        pair.writer.remove(entry)
        pair.put(b"b" * 16, b"b" * 3000)
        return clock(which)

    monkeypatch.setattr(table, "_clock", overtaken)
    pair.reader.get = pair.reader._make_get()
    assert pair.reader.get(b"a" * 16) is None
    assert pair.reader.get(b"b" * 16) == (b"b" * 3000, None)


class Died(Exception):
    """The writer is gone."""


class Dying:
    """Stores go through until a shared number of them is used up."""

    def __init__(self, target: Any, stores: list[int]) -> None:
        self._target, self._stores = target, stores

    def __getitem__(self, place: Any) -> Any:
        return self._target[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        if not self._stores:
            raise Died
        self._stores.pop()
        self._target[place] = value


@pytest.mark.parametrize("stores", range(5), ids=["P1", "P2", "P3", "P4", "P5"])
def test_a_writer_that_dies_before_a_step_leaves_the_old_value_or_the_new(pair: Pair, stores: int) -> None:
    pair.put(b"a" * 16, b"old")
    writer: Any = pair.writer._writer
    left = [0] * stores
    for name in ("_raw", "words", "_replacements"):
        setattr(writer, name, Dying(getattr(writer, name), left))
    with pytest.raises(Died):
        pair.put(b"a" * 16, b"new")
    is_new = stores > 2
    assert pair.reader.get(b"a" * 16) in ((b"old", None), (b"new", None))
    assert {decision.value for decision in pair.reader.decisions()} == {b"old", *([b"new"] if is_new else [])}


def test_readers_verify_every_hit_while_the_writer_churns(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "churn", rows=32, units=512)
    stop = threading.Event()
    keys = [bytes([number]) * 16 for number in range(24)]
    wrong: list[bytes] = []
    hits = 0

    def write() -> None:
        numbers = random.Random(1)
        while not stop.is_set():
            key = numbers.choice(keys)
            if numbers.random() < 0.2 and (entry := pair.writer.entry(key)) is not None:
                pair.writer.remove(entry)
            else:
                pair.put(key, key[:1] * numbers.choice([10, 150, 400, 3000]))

    writing = threading.Thread(target=write)
    writing.start()
    try:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            for key in keys:
                held = pair.reader.get(key)
                if held is not None:
                    hits += 1
                    if set(held[0]) != set(key):
                        wrong.append(held[0])
    finally:
        stop.set()
        writing.join()
    assert not wrong
    assert hits > 1000


def test_another_layout_is_refused(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "t", rows=4, units=4)
    with pytest.raises(LayoutMismatch):
        TableReader(memoryview(mmap.mmap(-1, 8192)))
    pair.raw[-4096 + 8 : -4096 + 16] = b"other  !"
    with pytest.raises(LayoutMismatch):
        TableReader(pair.read_only)


@given(st.integers(1, 200), st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_units_are_given_once_and_come_back(units: int, steps: list[tuple[bool, int]]) -> None:
    free, taken = Units(units), {}
    for is_take, size in steps:
        if is_take and free.has(size):
            assert free.could_have(size)
            start = free.take(size)
            block = range(start, start + (1 << (size - 1).bit_length()))
            assert block.stop <= units
            assert not any(set(block) & set(other) for other, _ in taken.values())
            taken[start] = (block, size)
        elif taken:
            start = next(iter(taken))
            free.give(start, taken.pop(start)[1])
        assert free.used == sum(len(block) for block, _ in taken.values())
    for start, (_, size) in taken.items():
        free.give(start, size)
    largest = 1 << units.bit_length() - 1
    assert free.used == 0
    assert free.has(largest)
