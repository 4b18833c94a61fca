"""The awaited calls do what the plain ones do, and a cancelled one leaves nothing reserved."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence

import pytest
from support import PIECES, TOKEN_IDS, identity, meta, plan

import shmcache
from shmcache import Cache, SavePlan, client
from shmcache.aio import AsyncCache
from shmcache.client import Grants
from shmcache.key import PrefixWalk
from shmcache.tools.demo import CoordinatorProcess

WHO = identity()
SEED = WHO.seed
TEXT = b"what is saved " * 100


@pytest.fixture
def cache(
    coordinator: CoordinatorProcess, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cache]:
    monkeypatch.setattr(client, "RESERVE_TIMEOUT_MS", 10_000)
    with shmcache.attach(namespace) as attached:
        yield attached


async def save(cache: AsyncCache) -> bytes:
    """Save one row and return its key."""
    [slab] = (await cache.reserve([plan(WHO, TEXT)], None, cache.cache.forget)).slabs
    assert slab is not None
    with await cache.payload(slab, 64) as payload:
        payload[:] = bytes(64)
    described = meta(WHO, TEXT)
    slab.save(described, PIECES, TOKEN_IDS)
    assert await cache.published(slab, 30_000)
    return described.key


def test_a_row_is_saved_and_found(cache: Cache) -> None:
    async def main() -> None:
        async with AsyncCache(cache) as awaited:
            key = await save(awaited)
            assert await awaited.wait(key, 1000)
            assert await awaited.resume(key, 1000)
            hit = await awaited.get(key)
            [found] = await awaited.candidates(PrefixWalk(SEED, TEXT + b"!"), len(TEXT) + 1)
            assert hit is found
            assert await awaited.flush(30_000)
            await awaited.drop(found, "for a test")
            assert await awaited.candidates(PrefixWalk(SEED, TEXT), len(TEXT)) == []

    asyncio.run(main())


def test_a_cancelled_reserve_gives_back_what_it_is_granted(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, may_go_on = threading.Event(), threading.Event()
    reserve = cache.reserve

    def slowly(plans: Sequence[SavePlan], base: bytes | None, forget: int) -> Grants:
        asked.set()
        assert may_go_on.wait(30)
        return reserve(plans, base, forget)

    async def main() -> None:
        monkeypatch.setattr(cache, "reserve", slowly)
        call = asyncio.ensure_future(AsyncCache(cache).reserve([plan(WHO, TEXT)], None, cache.forget))
        while not asked.is_set():
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        may_go_on.set()
        while not cache.statistics().counters["save_dropped_cancelled"]:
            await asyncio.sleep(0.001)

    asyncio.run(main())
    monkeypatch.undo()
    assert cache.flush(30_000)
    assert cache.reserve([plan(WHO, TEXT)], None, cache.forget).slabs[0] is not None


def test_a_read_only_cache_finds_rows_and_leaves_none(cache: Cache, namespace: str) -> None:
    async def main() -> None:
        key = await save(AsyncCache(cache))
        with shmcache.attach(namespace, read_only=True) as reading:
            assert reading.reserve([plan(WHO, b"another text")], None, reading.forget).slabs == [None]
            hit = reading.get(key)
            assert hit is not None
            reading.drop(hit, "for a test")
            assert list(reading.candidates(PrefixWalk(SEED, TEXT), len(TEXT))) == []
        with shmcache.attach(namespace) as other:
            assert other.get(key) is not None

    asyncio.run(main())
