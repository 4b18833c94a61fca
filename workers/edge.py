"""The cache as a model worker sees it: it may be absent or broken, and nothing that it does fails a request.

Owner: one SharedLlama. Readers: the same.
Invariants
    I1  Without a cache every question has the answer of an empty one.
    I2  A ShmcacheError or an OSError ends here: counted, and logged once per kind (Connection.fault). Only
        what would make going on wrong is let through: ConfigError, StaleGenerator, UsedAfterFork.
Leans on: the client's own promise not to raise (client I1); this is the second belt.
Leaves out: what is asked and why (shared_llama).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shmcache.client import Cache, Grants, Hit, SavePlan, Slab
from shmcache.errors import ConfigError, ShmcacheError, StaleGenerator, UsedAfterFork
from shmcache.key import PrefixWalk
from shmcache.protocol import Tier

_NEVER_HIDDEN = (ConfigError, StaleGenerator, UsedAfterFork)


class Edge:
    """A Cache, or none."""

    def __init__(self, cache: Cache | None) -> None:
        self._cache = cache

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """What fails inside for the cache's sake is counted, and the block is left."""
        try:
            yield
        except _NEVER_HIDDEN:
            raise
        except (ShmcacheError, OSError) as fault:
            if self._cache is not None:
                self._cache.connection.fault(what, fault)

    @property
    def forget(self) -> int:
        """The forget number under which a sequence begins now."""
        return self._cache.forget if self._cache is not None else 0

    def candidates(self, walk: PrefixWalk) -> Iterator[Hit]:
        """Rows whose text the walk's text begins with, longest first."""
        if self._cache is not None:
            with self.guard("lookup"):
                yield from self._cache.candidates(walk, walk.text_bytes)

    def has(self, key: bytes) -> bool:
        """Whether the row of a key is published where we would save it."""
        if self._cache is not None:
            with self.guard("lookup"):
                return self._cache.has(key)
        return False

    def drop(self, hit: Hit, why: str) -> None:
        """Forget a row that did not restore, for everybody."""
        if self._cache is not None:
            with self.guard("drop"):
                self._cache.drop(hit, why)

    def quarantine(self, hit: Hit, why: str) -> None:
        """Forget a row that is not what its record makes, for everybody; its slab is set aside."""
        if self._cache is not None:
            with self.guard("drop"):
                self._cache.quarantine(hit, why)

    @property
    def saves_to_disk(self) -> bool:
        """Whether our saves go to the disk tier."""
        return self._cache is not None and self._cache.tier is Tier.DISK

    def reserve(self, plans: Sequence[SavePlan], base: bytes | None, forget: int) -> Grants:
        """Ask for slabs; without a cache, or where it fails, none is granted."""
        if self._cache is not None and plans:
            with self.guard("reserve"):
                return self._cache.reserve(plans, base, forget)
        return Grants([None] * len(plans))

    def wait(self, key: bytes, timeout_ms: int) -> bool:
        """Wait for another worker's save of a row; whether it is there then."""
        if self._cache is not None:
            with self.guard("wait"):
                return self._cache.wait(key, timeout_ms)
        return False

    def resume(self, key: bytes, timeout_ms: int) -> bool:
        """Wait for the row of a reply that may be on its way; whether it is there."""
        if self._cache is not None:
            with self.guard("wait"):
                return self._cache.resume(key, timeout_ms)
        return False

    def cancel(self, slab: Slab) -> None:
        """Give a reservation back."""
        with self.guard("cancel"):
            slab.cancel()

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter of page.COUNTERS."""
        if self._cache is not None:
            with self.guard("count"):
                self._cache.count(name, by)

    def progress(self) -> None:
        """Say that this worker moves."""
        if self._cache is not None:
            self._cache.progress()
