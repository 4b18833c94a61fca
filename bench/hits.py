"""What does a whole hit cost: epoch, index, kept mapping, unpacked values, touch and count?

Part of the bench `index`. A real coordinator with small rows that are all mapped; the peers hold the same
keys and values of 128 bytes, and unpack them, because a hit hands out numbers and not bytes.

    whole_hit_vs_lmdb     py-lmdb, a read transaction for each get
    whole_hit_vs_sqlite   SQLite in WAL mode, a prepared select
"""

from __future__ import annotations

import os
import random
import sqlite3
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import lmdb

from bench.harness import Options, Row, compared, typical
from shmcache import kvc
from shmcache.client import Cache, SavePlan, attach
from shmcache.identity import Identity
from shmcache.key import RowAddress, row_address
from shmcache.protocol import MAX_PLANS
from shmcache.tools.clean import remove
from shmcache.tools.demo import CoordinatorProcess

_HELD, _HELD_QUICK = 4_000, 1_000
_CHUNK = 200
_PAYLOAD_BYTES = 64
_TEXT_BYTES = 64
PIECES = (kvc.Piece(1, 1, 1, 1, 0),)
TOKEN_IDS = memoryview(array("I", [1]))
_VALUE = struct.Struct("=16Q")


def rows(options: Options, directory: Path) -> Iterable[Row]:
    """Both rows; the peers' files lie in `directory`."""
    namespace = f"bench-{os.getpid()}"
    coordinator = CoordinatorProcess(
        f"--namespace={namespace}", "--ram-file-bytes=256M", "--max-rows=65536", "--log-level=error"
    )
    try:
        with attach(namespace) as cache:
            keys = _fill(cache, _HELD_QUICK if options.quick else _HELD)
            yield from _compare(cache, keys, directory, options)
    finally:
        coordinator.stop()
        remove(namespace)


def _fill(cache: Cache, count: int) -> list[bytes]:
    """Save rows of one token each, and map them."""
    identity = some_identity()
    addresses = [some_address(identity) for _ in range(count)]
    for first in range(0, count, MAX_PLANS):
        some = addresses[first : first + MAX_PLANS]
        plans = [
            SavePlan(
                address=address,
                text_bytes=_TEXT_BYTES,
                payload_offset=kvc.head_bytes(1, 1),
                payload_bytes=_PAYLOAD_BYTES,
            )
            for address in some
        ]
        slabs = cache.reserve(plans, None, cache.forget).slabs
        for address, slab in zip(some, slabs, strict=True):
            assert slab is not None, "the bench's coordinator has no room"
            slab.payload(_PAYLOAD_BYTES).release()
            slab.save(meta_of(identity, address), PIECES, TOKEN_IDS)
        cache.flush(60_000)
    keys = [address.key for address in addresses]
    assert all(cache.get(key) for key in keys)
    return keys


def meta_of(identity: Identity, address: RowAddress) -> kvc.Meta:
    """What the slab of a row of one token and 64 bytes of text says of itself."""
    return kvc.Meta(
        quant_bits=0,
        save_reason=kvc.Reason.COLD,
        token_count=1,
        context_size=1,
        created_unix_s=0,
        last_used_unix_s=0,
        model_fp=identity.model_fp,
        fingerprint_mode="safe",
        quant_name="",
        ctx_params_hash=identity.ctx_params_hash,
        hostname="bench",
        shmcache_version="bench",
        reason_detail="",
        text_bytes=_TEXT_BYTES,
        key=address.key,
        block_key=address.block_key,
        n_swa=0,
        pos_min=0,
        rewindable=True,
    )


def some_identity() -> Identity:
    """A model that nobody has."""
    return Identity(model_fp=os.urandom(32), quant=0, ctx_params_hash=os.urandom(32))


def some_address(identity: Identity) -> RowAddress:
    """A row of random text."""
    return row_address(identity.seed, os.urandom(_TEXT_BYTES))


def _compare(cache: Cache, keys: Sequence[bytes], directory: Path, options: Options) -> Iterable[Row]:
    runs = 40 if options.quick else 200
    chunks = [random.choices(keys, k=_CHUNK) for _ in range(runs)]
    env = lmdb.open(str(directory / "hits.lmdb"), map_size=1 << 26, sync=False)
    database = sqlite3.connect(directory / "hits.sqlite3")
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("CREATE TABLE hits (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID")
    with env.begin(write=True) as transaction:
        for key in keys:
            transaction.put(key, key * 4)
    database.executemany("INSERT INTO hits VALUES (?, ?)", [(key, key * 4) for key in keys])
    database.commit()
    unpack = _VALUE.unpack

    def ours(run: int) -> None:
        get = cache.get
        for key in chunks[run]:
            hit = get(key)
            assert hit is not None
            hit.use("hit_exact")

    def of_lmdb(run: int) -> None:
        begin = env.begin
        for key in chunks[run]:
            with begin() as transaction:
                unpack(transaction.get(key))

    def of_sqlite(run: int) -> None:
        execute = database.execute
        for key in chunks[run]:
            unpack(execute("SELECT value FROM hits WHERE key = ?", (key,)).fetchone()[0])

    def side(work: Callable[[int], None]) -> Callable[[], float]:
        return lambda: typical(work, runs, _CHUNK)

    try:
        yield compared("whole_hit_vs_lmdb", "us", "py-lmdb", (side(ours), side(of_lmdb)), options.repeats)
        yield compared("whole_hit_vs_sqlite", "us", "SQLite", (side(ours), side(of_sqlite)), options.repeats)
    finally:
        env.close()
        database.close()
