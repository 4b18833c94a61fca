"""How does a fleet of machines share its decisions? Redis's own SET … NX and its own expiry.

One Redis key per decision, `<prefix><key in hex>`; the value is the decision's bytes. `add` is one SET
with NX, and only where that is refused one GET: the first decision wins across machines. Expiry is
Redis's (PXAT), so the clocks of the machines should agree to within what a ttl can bear.

Wrap it in FallbackStore, so that a lost Redis costs nothing but sharing.

Invariants
    I1  A call waits for Redis at most TIMEOUT_S; then it raises, and the fallback takes over.
Leans on: redis-py is safe for threads and opens new connections after a fork.
Leaves out: waiting for another machine's computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import redis

from shmcache.decisions.stores import Held, Item

TIMEOUT_S = 0.5
_SCAN = 1000


class RedisStore:
    """Decisions in a Redis server of version 7 or later."""

    loss_errors: ClassVar[tuple[type[Exception], ...]] = (redis.RedisError, OSError)
    reads_alone: ClassVar[bool] = False

    def __init__(self, client: redis.Redis | str, prefix: str = "shmcache:decision:") -> None:
        """Nothing is opened yet.

        Args:
            client: a client, or a URL ("redis://host:6379/0").
            prefix: of all keys; another one is another set of decisions.
        """
        if isinstance(client, str):
            client = redis.Redis.from_url(client, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
        self._client: Any = client
        self._prefix = prefix.encode()

    def get(self, key: bytes) -> Held | None:
        """As DecisionStore."""
        name = self._name(key)
        value, expires_ms = self._client.pipeline(transaction=False).get(name).pexpiretime(name).execute()
        return None if value is None else (value, expires_ms / 1000 if expires_ms > 0 else None)

    def add(self, key: bytes, value: bytes, expires: float | None) -> bytes:
        """As DecisionStore."""
        return self.add_many([(key, value, expires)])[0]

    def add_many(self, items: Sequence[Item], claim: Any = None) -> list[bytes]:
        """A batch in one round trip, or two where somebody was first."""
        sets = self._client.pipeline(transaction=False)
        for key, value, expires in items:
            sets.set(self._name(key), value, nx=True, pxat=None if expires is None else int(expires * 1000))
        refused = [item for item, was_set in zip(items, sets.execute(), strict=True) if not was_set]
        if not refused:
            return [value for _key, value, _expires in items]
        firsts = self._client.mget([self._name(key) for key, _value, _expires in refused])
        held = {key: first for (key, _value, _expires), first in zip(refused, firsts, strict=True) if first}
        # One that expired between the two looks: ours is as good as any, and not stored.
        return [held.get(key, value) for key, value, _expires in items]

    def renew(self, key: bytes, expires: float | None) -> None:
        """As DecisionStore."""
        if expires is None:
            self._client.persist(self._name(key))
        else:
            self._client.pexpireat(self._name(key), int(expires * 1000))

    def delete(self, key: bytes) -> bool:
        """Remove one; whether it was there."""
        return bool(self._client.delete(self._name(key)))

    def prune(self) -> int:
        """Nothing to do: Redis removes what expires."""
        return 0

    def __len__(self) -> int:
        return sum(1 for _ in self._names())

    def clear(self) -> None:
        """As DecisionStore: all keys of this prefix."""
        names = list(self._names())
        for start in range(0, len(names), _SCAN):
            self._client.unlink(*names[start : start + _SCAN])

    def close(self) -> None:
        """As DecisionStore."""
        self._client.close()

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _names(self) -> Any:
        return self._client.scan_iter(match=self._prefix + b"*", count=_SCAN)
