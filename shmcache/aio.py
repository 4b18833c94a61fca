"""The calls of a Cache in an event loop: which are awaited, and what does a cancelled one leave?

    cache = AsyncCache(shmcache.attach("default"))
    hits = await cache.candidates(walk, walk.text_bytes)

Each runs in a thread of the loop's own pool, because mapping a slab and waiting for an answer block. What
takes no time (count, progress, statistics, Slab.save, Slab.cancel) is called on Cache and Slab themselves.

Owner: whoever attached the Cache closes it, here or there. Readers: one event loop.
Invariants
    I1  A call that is cancelled leaves nothing reserved: what is granted to it later is given back.
Leans on: a Cache may be used by any number of threads.
Leaves out: everything that a call does (client).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice

from shmcache.client import Cache, Grants, Hit, SavePlan, Slab
from shmcache.key import PrefixWalk


class AsyncCache:
    """A Cache whose blocking calls are awaited. Async context manager."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    async def candidates(self, walk: PrefixWalk, max_bytes: int, most: int = 5) -> list[Hit]:
        """The longest rows whose text the walk's text begins with, at most `most`, longest first."""
        return await asyncio.to_thread(lambda: list(islice(self.cache.candidates(walk, max_bytes), most)))

    async def get(self, key: bytes) -> Hit | None:
        """The row of a key, mapped and verified, or None."""
        return await asyncio.to_thread(self.cache.get, key)

    async def drop(self, hit: Hit, why: str) -> None:
        """Forget a row that did not restore, everywhere."""
        await asyncio.to_thread(self.cache.drop, hit, why)

    async def reserve(self, plans: Sequence[SavePlan], base: bytes | None, forget: int) -> Grants:
        """Ask for all missing rows of a prompt at once (Cache.reserve)."""
        asked = asyncio.ensure_future(asyncio.to_thread(self.cache.reserve, plans, base, forget))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(_give_back)
            raise

    async def payload(self, slab: Slab, payload_bytes: int) -> memoryview:
        """Where to write a state, once it is prepared (Slab.payload). Raises OutOfSpace."""
        return await asyncio.to_thread(slab.payload, payload_bytes)

    async def published(self, slab: Slab, timeout_ms: int) -> bool:
        """Whether the row of a slab that was handed over is published (Slab.wait)."""
        return await asyncio.to_thread(slab.wait, timeout_ms)

    async def wait(self, key: bytes, timeout_ms: int) -> bool:
        """Wait until the save of a key that is in flight has ended; whether its row is there then."""
        return await asyncio.to_thread(self.cache.wait, key, timeout_ms)

    async def resume(self, key: bytes, timeout_ms: int) -> bool:
        """Wait until a row is there whose save may not have told its key yet."""
        return await asyncio.to_thread(self.cache.resume, key, timeout_ms)

    async def flush(self, timeout_ms: int) -> bool:
        """Wait until everything handed over so far has its outcome; False if it took longer."""
        return await asyncio.to_thread(self.cache.flush, timeout_ms)

    async def close(self) -> None:
        """Wait for saves handed over, then let go of everything."""
        await asyncio.to_thread(self.cache.close)

    async def __aenter__(self) -> AsyncCache:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _give_back(asked: asyncio.Future[Grants]) -> None:
    if not asked.cancelled() and asked.exception() is None:
        for slab in asked.result().slabs:
            if slab is not None:
                slab.cancel()
