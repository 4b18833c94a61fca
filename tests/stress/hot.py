"""Sixteen hot keys and two full buckets: a writer that never stops, readers that never agree with a half row.

The index alone, in memory that the processes share. The slabs of all versions of a key are there before
anybody looks and never change; a row names one of them, and every figure in it follows from key and version.
A hit is right if row and slab say the same, and the slab is, in every bit, what was written there.
"""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Sequence

import contents
from actors import report_wrong
from board import Column, Word
from support import Pipe, identity, prompt

from shmcache import index
from shmcache.index import Found, IndexReader, IndexWriter, Row
from shmcache.key import PrefixWalk, RowAddress, row_address

KEYS = 16
VERSIONS = 8
_MAX_ROWS = 1  # two buckets of eight: as many places as keys, so both are full again and again
_BATCH = 256
_WHO = identity("hot")
_TEXTS = [prompt(30 + 60 * number, "hot") for number in range(KEYS)]


def size_of(number: int) -> int:
    """4 KiB to 1 MiB; half of the keys are small."""
    return contents.SMALLEST_BYTES << max(0, number - KEYS // 2 + 1)


class World:
    """Index and slabs, made before the processes are forked."""

    def __init__(self) -> None:
        self.addresses: list[RowAddress] = [row_address(_WHO.seed, text) for text in _TEXTS]
        self.walk = PrefixWalk(_WHO.seed, _TEXTS[-1])
        self.index = mmap.mmap(-1, index.segment_bytes(_MAX_ROWS))
        IndexWriter.create(memoryview(self.index), _MAX_ROWS, 1).close()
        sizes = [size_of(number) for number in range(KEYS)]
        self.places = [sum(sizes[:number]) * VERSIONS for number in range(KEYS)]
        self.slabs = memoryview(mmap.mmap(-1, sum(sizes) * VERSIONS))
        for number, address in enumerate(self.addresses):
            for version in range(VERSIONS):
                contents.write(self.slab(number, version), address.key, version)

    def slab(self, number: int, version: int) -> memoryview:
        """One version's bytes."""
        size = size_of(number)
        start = self.places[number] + version * size
        return self.slabs[start : start + size]

    def row(self, number: int, version: int) -> Row:
        """All that the index says of it."""
        address = self.addresses[number]
        return Row(
            key=address.key,
            block_key=address.block_key,
            tail=address.tail,
            identity_tag=number << 32 | version,
            text_bytes=self.places[number] + version * size_of(number),
            slab_bytes=size_of(number),
            token_count=version,
            tier=1,
            reason=version % 6,
            flags=version & 1,
        )


def write(_pipe: Pipe, column: Column, world: World) -> None:
    """Publish, replace, evict and remove at full speed."""
    chosen = random.Random(os.getpid())
    writer = IndexWriter(memoryview(world.index))
    versions = [0] * KEYS
    while column.goes_on():
        for _ in range(_BATCH):
            number = chosen.randrange(KEYS)
            if chosen.random() < 0.1:
                writer.remove(world.addresses[number].key)
                continue
            versions[number] = (versions[number] + 1) % VERSIONS
            published = writer.publish(world.row(number, versions[number]), chosen.choice)
            column.add(Word.SAVED, published is not None)


def read(_pipe: Pipe, column: Column, world: World) -> None:
    """Look up by key and by prefix, and compare row and slab."""
    chosen = random.Random(os.getpid())
    reader = IndexReader(memoryview(world.index))
    numbers: Sequence[int] = [number for number in range(KEYS) for _ in range(KEYS - number)]
    by_key = {address.key: number for number, address in enumerate(world.addresses)}
    retries = lost = 0
    while column.goes_on():
        hits = 0
        for _ in range(_BATCH):
            if chosen.random() < 0.02:
                for found in reader.candidates(world.walk, world.walk.text_bytes):
                    hits += _verify(column, world, by_key.get(found.row.key), found)
                continue
            number = chosen.choice(numbers)
            hit = reader.get(world.addresses[number].key)
            hits += hit is not None and _verify(column, world, number, hit)
        column.add(Word.HITS, hits)
        now = reader.statistics()
        column.add(Word.RETRIES, now.retries - retries)
        column.add(Word.LOST, now.lost - lost)
        retries, lost = now.retries, now.lost


def _verify(column: Column, world: World, number: int | None, found: Found) -> bool:
    row = found.row
    if number is None or row != world.row(number, row.token_count):
        report_wrong(column, f"hot key {number}: {row}")
    elif not contents.is_right(world.slab(number, row.token_count), row.key):
        report_wrong(column, f"hot key {number}: the slab of version {row.token_count}")
    return True
