"""What does the coordinator hold for each row, beside the index?

Part of the bench `index`. A coordinator over a tier full of rows, in this process, so that every
allocation is seen.

    coordinator_bytes_per_row   peer: a least-recently-used dict of objects, a tuple of tier, size, hits and
                                time for each key
"""

from __future__ import annotations

import gc
import mmap
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

from bench import hits
from bench.harness import Row, measured
from shmcache import kvc
from shmcache.coordinator import Coordinator, Now, TierState
from shmcache.index import IndexWriter, segment_bytes
from shmcache.protocol import Tier
from shmcache.tiers.base import file_name
from shmcache.tiers.memory import MemoryTier
from shmcache.tiers.supervisor import Lane

_ROWS = 10_000


def row(directory: Path) -> Row:
    """The row of this bench; its slabs lie in `directory` meanwhile."""
    place = directory / "rows"
    with closing(Lane(partial(MemoryTier, Tier.RAM_FILE, place), lambda: None)) as lane:
        keys = _fill(place)
        # Counted, not timed: once is enough.
        return measured(
            "coordinator_bytes_per_row",
            "bytes",
            "OrderedDict",
            _held_bytes(partial(_adopted, lane)),
            _held_bytes(partial(_objects, keys)),
        )


def _fill(place: Path) -> list[bytes]:
    identity = hits.some_identity()
    keys = []
    for _ in range(_ROWS):
        address = hits.some_address(identity)
        head = kvc.encode_head(hits.meta_of(identity, address), hits.PIECES, hits.TOKEN_IDS, 0, 0)
        (place / file_name(address.key)).write_bytes(head)
        (place / file_name(address.key)).chmod(0o600)
        keys.append(address.key)
    return keys


def _held_bytes(make: Callable[[], object]) -> float:
    """What is held of each row when all are there and everything that was needed on the way is gone."""
    gc.collect()
    tracemalloc.start()
    try:
        kept = make()
        gc.collect()
        held_bytes, _ = tracemalloc.get_traced_memory()
        del kept
    finally:
        tracemalloc.stop()
    return held_bytes / _ROWS


def _adopted(lane: Lane) -> Coordinator:
    """A coordinator that has adopted all rows. Its index is a mapping, which is not counted here."""
    memory = memoryview(mmap.mmap(-1, segment_bytes(_ROWS)))
    index = IndexWriter.create(memory, _ROWS, epoch=1)
    coordinator = Coordinator(index, [TierState(lane, budget_bytes=1 << 40)], 1, 0, dict)
    count = coordinator.adopt(Now(1))
    assert count == _ROWS, f"{count} of {_ROWS} rows were adopted"
    return coordinator


def _objects(keys: list[bytes]) -> OrderedDict[bytes, tuple[int, int, int, int]]:
    return OrderedDict(
        (bytes(bytearray(key)), (1, 4096 + number, number, 1_700_000_000 + number))
        for number, key in enumerate(keys)
    )
