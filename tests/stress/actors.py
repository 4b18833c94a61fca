"""Who takes part: readers that verify every hit, writers that save at full speed.

Each runs in a process of its own (support.Child) until the board says stop, and may be killed anywhere.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Sequence

import contents
from board import Board, Column, Word
from contents import Entry, Family
from support import PIECES, TOKEN_IDS, Pipe, identity, meta

from shmcache.client import Cache, Hit, attach
from shmcache.index import IndexReader

_BATCH = 64
_ANSWER_MS = 3_000


def report_wrong(column: Column, what: str) -> None:
    """A hit that is not what was written: the one thing that must not be."""
    column.add(Word.WRONG)
    print(f"WRONG: {what}", file=sys.stderr, flush=True)


class _Retries:
    """A reader's own counts, carried over from one index to the next."""

    def __init__(self, column: Column) -> None:
        self._column = column
        self._reader: IndexReader | None = None
        self._retries = self._lost = 0

    def note(self, reader: IndexReader | None) -> None:
        if reader is not self._reader:
            self._reader, self._retries, self._lost = reader, 0, 0
        if reader is not None:
            now = reader.statistics()
            self._column.add(Word.RETRIES, now.retries - self._retries)
            self._column.add(Word.LOST, now.lost - self._lost)
            self._retries, self._lost = now.retries, now.lost


def read(
    _pipe: Pipe,
    column: Column,
    namespace: str,
    wanted: Sequence[Family],
    kept_mapping_bytes: int,
    arm: Callable[[], None] | None = None,
) -> None:
    """Look up by key and by prefix, and verify every hit in every bit."""
    chosen = random.Random(os.getpid())
    retries = _Retries(column)
    with attach(namespace, kept_mapping_bytes=kept_mapping_bytes) as cache:
        if arm is not None:
            arm()
        while column.goes_on():
            hits = misses = 0
            for _ in range(_BATCH):
                # Some are asked for more than others, as everywhere: their rows stay.
                family = wanted[int(len(wanted) * chosen.random() ** 8)]
                if chosen.random() < 0.1:
                    found = _by_prefix(column, cache, family)
                else:
                    found = _by_key(column, cache, chosen.choice(family.entries), chosen.random() < 0.05)
                hits, misses = hits + found, misses + (found == 0)
            column.add(Word.HITS, hits)
            column.add(Word.MISSES, misses)
            retries.note(cache.connection.reader())
            if not hits:
                time.sleep(0.002)


def _by_key(column: Column, cache: Cache, entry: Entry, is_used: bool) -> int:
    hit = cache.get(entry.address.key)
    if hit is None:
        return 0
    _verify(column, hit, entry)
    if is_used:
        hit.use()
    hit.close()
    return 1


def _by_prefix(column: Column, cache: Cache, family: Family) -> int:
    by_key = {entry.address.key: entry for entry in family.entries}
    count, before = 0, 1 << 62
    for hit in cache.candidates(family.walk, family.walk.text_bytes):
        entry = by_key.get(hit.found.row.key)
        if entry is None or len(entry.text) >= before:
            report_wrong(column, f"{entry} is no next candidate of {family.entries[0].name}")
            continue
        before = len(entry.text)
        _verify(column, hit, entry)
        hit.close()
        count += 1
    return count


def _verify(column: Column, hit: Hit, entry: Entry) -> None:
    image, found = hit.image, hit.found.row
    if (found.key, found.text_bytes, image.meta.key) != (
        entry.address.key,
        len(entry.text),
        entry.address.key,
    ):
        report_wrong(column, f"a hit for {entry.name} says {found} and {image.meta}")
    elif not contents.is_right(image.payload, entry.address.key):
        report_wrong(column, f"the payload of {entry.name} ({len(entry.text)}) is not what was written")


def write(
    _pipe: Pipe,
    column: Column,
    namespace: str,
    wanted: Sequence[Family],
    tiers: Sequence[str] = ("ram_file",),
    arm: Callable[[], None] | None = None,
) -> None:
    """Reserve, write and hand over whatever is missing, at full speed; now and then give it back."""
    chosen = random.Random(os.getpid())
    caches = [attach(namespace, tier=tier, kept_mapping_bytes=1 << 20) for tier in tiers]
    for cache in caches:
        cache.connection.reader()
    if arm is not None:
        arm()
    entries = [entry for family in wanted for entry in family.entries]
    number = os.getpid() << 32
    while column.goes_on():
        cache = chosen.choice(caches)
        some = chosen.sample(entries, 3)
        grants = cache.reserve([entry.plan for entry in some], None, cache.forget)
        last = None
        for entry, slab in zip(some, grants.slabs, strict=True):
            if slab is None:
                continue
            number += 1
            payload = slab.payload(entry.payload_bytes)
            if chosen.random() < 0.05:
                slab.cancel()
                continue
            contents.write(payload, entry.address.key, number)
            payload.release()
            slab.save(meta(identity(entry.name), entry.text), PIECES, TOKEN_IDS)
            column.add(Word.SAVED)
            last = slab
        if last is not None:
            last.wait(_ANSWER_MS)
        elif all(slab is None for slab in grants.slabs):
            time.sleep(0.0005)
    for cache in caches:
        cache.close()


def columns_at_rest(board: Board, columns: Sequence[Column]) -> bool:
    """Whether all these processes have seen the pause."""
    return all(column.is_paused for column in columns)
