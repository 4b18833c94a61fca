"""The index's own code, stepped: every load of a reader against every store of a writer.

What IndexWriter stores is recorded once, step by step. Then IndexReader runs again and again, over memory
that changes under it: before each of its loads so many of the recorded stores are made as a list of
choices says. A load is only worth a choice where a store has changed what it reads, since a store that it
does not read can as well come later; so the choices cover every order.

Copies are pieces, as memcpy may make them: an entry is stored and loaded in four, forwards or backwards.

Leans on: IndexWriter stores through `_store` and `_copy` alone; a reader loads through its memoryviews,
its mmap and the mmap's `find`, which are replaced here by stepped ones, wherever they are kept.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from code_steps import step_at

from shmcache import index
from shmcache.index import Found, IndexReader, IndexWriter, Row

Choose = Callable[[int], int]
_ENTRY_CUTS = (8, 64, 124)  # word | key | the rest of the body | check


class Store(NamedTuple):
    """One store that somebody may see: the step that made it, where, and what."""

    step: str
    offset: int
    data: bytes


class RecordingWriter(IndexWriter):
    """Keeps what it stores, with the step that the source names at that line."""

    record: list[Store]

    @classmethod
    def make(cls) -> RecordingWriter:
        """A table of two buckets, in memory of its own."""
        size_bytes = index.segment_bytes(1)
        writer = cls.create(memoryview(mmap.mmap(-1, size_bytes)), 1, 1)
        writer.record = []
        return writer

    def _store(self, offset: int, word: int) -> None:
        self.record.append(Store(step_at(sys._getframe(1)), offset, word.to_bytes(8, "little")))
        super()._store(offset, word)

    def _copy(self, offset: int, data: bytes) -> None:
        self.record.append(Store(step_at(sys._getframe(1)), offset, data))
        super()._copy(offset, data)

    @property
    def memory(self) -> bytes:
        """All that is there now."""
        return bytes(self._buffer)


class World:
    """Memory that changes while somebody reads it."""

    def __init__(
        self, memory: bytes, stores: Iterable[Store], *, is_backward: bool = False, frozen: str = ""
    ) -> None:
        """`frozen` names an attribute of the reader that shows the first state for ever: a planted fault."""
        self._memory = memory
        self._frozen = frozen
        self._backward = is_backward
        self.stores = list(_in_pieces(stores, is_backward=is_backward))
        self.states = list(_states(memory, self.stores))
        self.mapping = mmap.mmap(-1, len(memory))

    def run(self, choose: Choose, look: Callable[[IndexReader], Any]) -> tuple[Any, int, int, IndexReader]:
        """One lookup; returns what it says and between which states of the memory it looked."""
        self.mapping[:] = self._memory
        self._choose = choose
        self._done = 0
        self._first = -1
        reader = IndexReader(memoryview(self.mapping))
        self._step(reader)
        result = look(reader)
        return result, max(self._first, 0), self._done, reader

    def load(self, offset: int, size_bytes: int) -> None:
        """Before a load of these bytes: as many stores as are chosen."""
        options = [0]
        for count, store in enumerate(self.stores[self._done :], 1):
            if store.offset < offset + size_bytes and offset < store.offset + len(store.data):
                options.append(count)
        chosen = options[self._choose(len(options))]
        for store in self.stores[self._done : self._done + chosen]:
            self.mapping[store.offset : store.offset + len(store.data)] = store.data
        self._done += chosen
        if self._first < 0:
            self._first = self._done

    def load_in_pieces(self, offset: int, size_bytes: int) -> bytes:
        """A copy that sees each of its pieces at another time."""
        pieces = list(_cut(offset, size_bytes))
        copied = bytearray(size_bytes)
        for start, end in reversed(pieces) if self._backward else pieces:
            self.load(start, end - start)
            copied[start - offset : end - offset] = self.mapping[start:end]
        return bytes(copied)

    def _step(self, reader: IndexReader) -> None:
        """Replace all through which the reader loads."""
        at = _address(memoryview(self.mapping))
        for name, value in list(vars(reader).items()):
            if name == self._frozen:
                setattr(reader, name, value.tolist())
            elif isinstance(value, memoryview):
                setattr(reader, name, _View(self, value, _address(value) - at))
            elif value is self.mapping:
                setattr(reader, name, _Raw(self))
            elif getattr(value, "__self__", None) is self.mapping:
                setattr(reader, name, _Raw(self).find)
        reader.get = reader._make_get()


class _View:
    def __init__(self, world: World, view: memoryview, start: int) -> None:
        self._world, self._view, self._start = world, view, start
        assert view.strides is not None
        self._step = view.strides[0]

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, int):
            number = at % len(self._view)
            self._world.load(self._start + number * self._step, self._view.itemsize)
        else:
            first, _, step = at.indices(len(self._view))
            part = self._view[at]
            self._world.load(self._start + first * self._step, len(part) * step * self._step)
        return self._view[at]


class _Raw:
    def __init__(self, world: World) -> None:
        self._world = world

    def __getitem__(self, at: slice) -> bytes:
        return self._world.load_in_pieces(at.start, at.stop - at.start)

    def find(self, what: bytes, start: int, end: int) -> int:
        self._world.load(start, end - start)
        return self._world.mapping.find(what, start, end)


class Published(NamedTuple):
    """One publication as somebody may find it."""

    image: bytes
    slot: int
    word: int


def orders(run: Callable[[Choose], None], most: int = 200_000) -> int:
    """Call `run` once for each list of choices; returns how many there were."""
    path: list[list[int]] = []
    count = 0
    while True:
        place = 0

        def choose(options: int) -> int:
            nonlocal place
            if place == len(path):
                path.append([0, options])
            place += 1
            return path[place - 1][0]

        run(choose)
        count += 1
        if count > most:
            raise MemoryError(f"more than {most} orders")
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return count
        path[-1][0] += 1


def reader_of(memory: bytes) -> IndexReader:
    """A reader of a memory at rest."""
    copy = mmap.mmap(-1, len(memory))
    copy[:] = memory
    return IndexReader(memoryview(copy))


def rows_in(memory: bytes) -> dict[bytes, list[Published]]:
    """What is published in a memory at rest, by key; damaged rows are an error."""
    reader = reader_of(memory)
    there: dict[bytes, list[Published]] = {}
    rows = list(reader.rows())
    for found in rows:
        there.setdefault(found.row.key, []).append(Published(found.image, found.slot, found.word))
    words = reader.row_words.tolist()
    assert sum(word != 0 for word in words) == len(rows), "I6: a row is there and not whole"
    return there


def as_published(found: Found) -> Published:
    """A lookup's answer, to be compared."""
    return Published(bytes(found.image), found.slot, found.word)


def row(key: bytes, block_key: bytes, tail: int, number: int) -> Row:
    """A row whose every figure tells its number."""
    return Row(
        key=key,
        block_key=block_key,
        tail=tail,
        identity_tag=number,
        text_bytes=tail,
        slab_bytes=number,
        token_count=number,
        tier=1,
        reason=number % 6,
        flags=0,
    )


def _states(memory: bytes, stores: Sequence[Store]) -> Iterator[bytes]:
    now = bytearray(memory)
    yield memory
    for store in stores:
        now[store.offset : store.offset + len(store.data)] = store.data
        yield bytes(now)


def _in_pieces(stores: Iterable[Store], *, is_backward: bool) -> Iterator[Store]:
    for store in stores:
        pieces = list(_cut(store.offset, len(store.data)))
        for start, end in reversed(pieces) if is_backward else pieces:
            yield Store(store.step, start, store.data[start - store.offset : end - store.offset])


def _cut(offset: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """The pieces of a copy. Entries start at multiples of 8 and are cut behind their word and body."""
    base = offset if size_bytes == index.ROW_BYTES else offset - 8
    cuts = [base + cut for cut in _ENTRY_CUTS if offset < base + cut < offset + size_bytes]
    yield from zip([offset, *cuts], [*cuts, offset + size_bytes], strict=True)


def _address(view: memoryview) -> int:
    address: int = np.asarray(view).__array_interface__["data"][0]
    return address
