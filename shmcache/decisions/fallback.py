"""Where do decisions go while the store that everybody shares cannot be reached?

    get   remote, else local             a remote that can be read while nobody writes is read on
    add   remote, else local             what went to local is remembered, and offered at the return
    return   offer ─► remote keeps the first ─► its value replaces the local one: a conflict

The remote is looked for at most once every LOOK_AGAIN_S while it is lost.

Owner: a DecisionCache. Readers: its threads.
Invariants
    I1  Nothing here raises for a lost remote; losses and conflicts are counted.
    I2  What a remote holds wins over what was decided without it.
Leans on: a remote names the errors that mean its loss (`loss_errors`).
Leaves out: claims that were granted by a remote that is lost; they are gone with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from shmcache.decisions.flights import ClaimingStore, StoreClaim
from shmcache.decisions.forks import watch
from shmcache.decisions.stores import DecisionStore, Held, Item

LOOK_AGAIN_S = 1.0
_OFFER = 64

R = TypeVar("R")


class Remote(DecisionStore, Protocol):
    """A store that may be lost.

    loss_errors  what its calls raise then.
    reads_alone  whether get works on while it is lost for writing.
    """

    loss_errors: ClassVar[tuple[type[Exception], ...]]
    reads_alone: ClassVar[bool]

    def add_many(self, items: Sequence[Item], claim: Any) -> list[bytes]:
        """A batch of add in one round trip."""

    def delete(self, key: bytes) -> bool:
        """Remove one; whether it was there."""


class FallbackStore:
    """A remote store with a local one behind it."""

    def __init__(self, remote: Remote, local: DecisionStore, look_again_s: float = LOOK_AGAIN_S) -> None:
        self._remote = remote
        self._local = local
        self._look_again_s = look_again_s
        self.after_fork()
        watch(self)
        self._lost_until_s = 0.0
        # Decided without the remote: key → value and expiry, as they were added.
        self._meanwhile: dict[bytes, Item] = {}
        self.losses = self.conflicts = 0

    def after_fork(self) -> None:
        """In the child: another thread of the parent may have held the lock."""
        self._lock = threading.RLock()

    @property
    def maxsize(self) -> int | None:
        """The remote's, or the local one's while it is lost."""
        store = self._remote if self._is_up() else self._local
        return getattr(store, "maxsize", None)

    def get(self, key: bytes) -> Held | None:
        """As DecisionStore."""
        if not self._lost_until_s or self._remote.reads_alone or self._is_up():
            try:
                held = self._remote.get(key)
            except self._remote.loss_errors:
                self._lose()
            else:
                if held is not None or key not in self._meanwhile:
                    return held
        return self._local.get(key)

    def add(self, key: bytes, value: bytes, expires: float | None) -> bytes:
        """As DecisionStore."""
        return self.add_many([(key, value, expires)], None)[0]

    def add_many(self, items: Sequence[Item], claim: Any) -> list[bytes]:
        """A batch; the remote's values where it is there."""

        def local() -> list[bytes]:
            values = [self._local.add(*item) for item in items]
            with self._lock:
                self._meanwhile.update({item[0]: item for item in items})
            return values

        return self._either(lambda: self._remote.add_many(items, claim), local)

    def renew(self, key: bytes, expires: float | None) -> None:
        """As DecisionStore."""
        self._either(lambda: self._remote.renew(key, expires), lambda: self._local.renew(key, expires))

    def delete(self, key: bytes) -> bool:
        """Remove one, on both sides."""
        with self._lock:
            self._meanwhile.pop(key, None)
        was_local = self._local.get(key) is not None
        self._local.renew(key, 0)
        return self._either(lambda: self._remote.delete(key), lambda: was_local) or was_local

    def prune(self) -> int:
        """As DecisionStore."""
        return self._local.prune() + self._either(self._remote.prune, lambda: 0)

    def __len__(self) -> int:
        return self._either(lambda: len(self._remote), lambda: len(self._local))

    def clear(self) -> None:
        """As DecisionStore."""
        with self._lock:
            self._meanwhile.clear()
        self._local.clear()
        self._either(self._remote.clear, lambda: None)

    def close(self) -> None:
        """As DecisionStore."""
        self._local.close()
        self._remote.close()

    def claim(self, keys: Sequence[bytes], limit_s: float) -> StoreClaim | Literal["held"] | None:
        """As ClaimingStore; None while the remote is lost, or if it knows of no claims."""
        remote = self._remote
        if not isinstance(remote, ClaimingStore):
            return None
        return self._either(lambda: remote.claim(keys, limit_s), lambda: None)

    def await_claims(self, keys: Sequence[bytes], deadline_ns: int) -> None:
        """As ClaimingStore."""
        remote = self._remote
        if isinstance(remote, ClaimingStore):
            self._either(lambda: remote.await_claims(keys, deadline_ns), lambda: None)

    def _either(self, ask_remote: Callable[[], R], ask_local: Callable[[], R]) -> R:
        if self._is_up():
            try:
                return ask_remote()
            except self._remote.loss_errors:
                self._lose()
        return ask_local()

    def _is_up(self) -> bool:
        if not self._lost_until_s:
            return True
        with self._lock:
            if time.monotonic() < self._lost_until_s:
                return False
            try:
                self._offer()
            except self._remote.loss_errors:
                self._lose()
                return False
            self._lost_until_s = 0.0
            return True

    def _lose(self) -> None:
        with self._lock:
            self.losses += 1
            self._lost_until_s = time.monotonic() + self._look_again_s

    def _offer(self) -> None:
        """The remote is asked for again: with what was decided meanwhile, or with a look at nothing."""
        if not self._meanwhile:
            len(self._remote)
        while self._meanwhile:
            items = list(self._meanwhile.values())[:_OFFER]
            live = [item for item in items if item[2] is None or item[2] > time.time()]
            values = self._remote.add_many(live, None) if live else []
            for (key, value, expires), first in zip(live, values, strict=True):
                if first != value:
                    self.conflicts += 1
                    self._local.renew(key, 0)
                    self._local.add(key, first, expires)
            for item in items:
                self._meanwhile.pop(item[0], None)
