"""Who computes this decision, and who waits for it?

The four rules, within a process and across processes:

    1 wait, then claim, atomically   under one lock a request claims its missing keys only when nobody
                                     else owns any of them; otherwise it owns nothing, waits, re-reads
    2 never wait where one is        who owns anything never waits, nor does a hook whose end needs what
      waited on                      the waiter holds (the caller says so)
    3 always release                 the end of the call, a failed call, and a dropped context release
    4 bound a stuck owner            after a limit a waiter drops the stale claim and computes itself

    claim(keys) ─► in this process ─► at the store (coordinator) ─► Flight
                        │ owned               │ held
                        ▼                     ▼
                      None              given back, then None

In-process and store claims are one step: without the second the first is given back before anybody
waits, so no owner waits for another. Of the threads that wait for another process one asks the
coordinator, and the others wait for that one.

Owner: a DecisionCache. Readers: its threads and tasks.
Invariants
    I1  A key is owned by at most one flight of this process.
    I2  Whoever registers in when_free() is woken exactly once: when the key is released, dropped, or not
        watched any more.
    I3  Ownership follows the context (contextvars): tasks and helper threads that a computation starts
        count as its owner, so they never wait for each other's relatives.
Leans on: a store without claims leaves coalescing to this process.
Leaves out: reading and storing (cache).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, Protocol, runtime_checkable

from shmcache.decisions.forks import watch

Wake = Callable[[], None]


class StoreClaim(Protocol):
    """What a store granted: given back with its adds, and released at the end."""

    def release(self) -> None:
        """End the claim; whoever waits for its keys looks again."""


@runtime_checkable
class ClaimingStore(Protocol):
    """A store that knows of other processes."""

    def claim(self, keys: Sequence[bytes], limit_s: float) -> StoreClaim | Literal["held"] | None:
        """Claim all keys or none; None where nobody can be asked."""

    def await_claims(self, keys: Sequence[bytes], deadline_ns: int) -> None:
        """Wait until none of the keys is claimed, or until a time.monotonic_ns() deadline."""


class Flight:
    """The right and the duty to compute some keys. release() ends it, once; so does a drop."""

    def __init__(self, flights: Flights, keys: Sequence[bytes]) -> None:
        self._flights = flights
        self.keys = tuple(keys)
        self.claim: StoreClaim | None = None
        self.live = True
        self.waiters: list[Wake] = []

    def release(self) -> None:
        """Give all keys back and wake whoever waits for them."""
        self._flights.release(self)


class Watch:
    """A thread that waits at the store for some keys, and those that wait for it."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.keys = tuple(keys)
        self.waiters: list[Wake] = []


_owned: ContextVar[tuple[Flight, ...]] = ContextVar("shmcache_flights", default=())


class Flights:
    """The claims of one process over one store."""

    def __init__(self, store: object, limit_s: float) -> None:
        self._store = store if isinstance(store, ClaimingStore) else None
        self._limit_s = limit_s
        self._start_over()
        watch(self)

    def _start_over(self) -> None:
        # Reentrant: a finalizer may release while this very thread is in here.
        self._lock = threading.RLock()
        self._owners: dict[bytes, Flight] = {}
        self._watched: dict[bytes, Watch] = {}

    def claim(self, keys: Sequence[bytes]) -> Flight | None:
        """Own all keys, or none of them."""
        flight = Flight(self, keys)
        with self._lock:
            if any(key in self._owners for key in keys):
                return None
            for key in keys:
                self._owners[key] = flight
        if self._store is not None:
            try:
                claim = self._store.claim(keys, self._limit_s)
            except BaseException:
                self.release(flight)
                raise
            if claim == "held":
                self.release(flight)
                return None
            flight.claim = claim
        return flight

    def release(self, flight: Flight) -> None:
        """End a flight. Safe from a finalizer: it may run in any thread, inside any of our calls."""
        with self._lock:
            if not flight.live:
                return
            self._forget(flight)
            claim, waiters = flight.claim, flight.waiters
        if claim is not None:
            claim.release()
        for wake in waiters:
            wake()

    def drop(self, keys: Sequence[bytes]) -> None:
        """Take keys away from whoever owns them: it is stuck."""
        with self._lock:
            stuck = {id(owner): owner for key in keys if (owner := self._owners.get(key)) is not None}
        for flight in stuck.values():
            self.release(flight)

    def when_free(self, keys: Sequence[bytes], wake: Wake) -> bool:
        """Have `wake` called when a key that is taken in this process is not any more; False: none is."""
        with self._lock:
            for key in keys:
                taken = self._owners.get(key) or self._watched.get(key)
                if taken is not None:
                    taken.waiters.append(wake)
                    return True
        return False

    def wait(self, keys: Sequence[bytes], deadline_ns: int) -> None:
        """Return when it is worth looking again, at the deadline at the latest."""
        free = threading.Event()
        watch = self.begin_wait(keys, free.set)
        if watch is None:
            free.wait(max(0, deadline_ns - time.monotonic_ns()) / 1e9)
        else:
            self.watch(watch, deadline_ns)

    def begin_wait(self, keys: Sequence[bytes], wake: Wake) -> Watch | None:
        """As when_free; where no key is taken here the caller has to watch() what is returned.

        One step: of many threads that come together one asks the store, and not each of them.
        """
        with self._lock:
            if self.when_free(keys, wake):
                return None
            watch = Watch(keys)
            for key in keys:
                self._watched.setdefault(key, watch)
            return watch

    def watch(self, watch: Watch, deadline_ns: int) -> None:
        """Wait at the store, then wake everybody in this process who wants one of these keys."""
        try:
            if self._store is not None:
                self._store.await_claims(watch.keys, deadline_ns)
        finally:
            with self._lock:
                for key in watch.keys:
                    if self._watched.get(key) is watch:
                        del self._watched[key]
            for wake in watch.waiters:
                wake()

    def after_fork(self) -> None:
        """In the child: the parent's computations are the parent's."""
        self._start_over()

    def _forget(self, flight: Flight) -> None:
        flight.live = False
        for key in flight.keys:
            if self._owners.get(key) is flight:
                del self._owners[key]


def owns_anything() -> bool:
    """Whether this thread or task computes something: then it must not wait (rule 2)."""
    return any(flight.live for flight in _owned.get())


def own(flight: Flight) -> None:
    """Count this context as the owner, until the flight ends."""
    _owned.set((*(held for held in _owned.get() if held.live), flight))


@contextmanager
def owning(flight: Flight) -> Iterator[None]:
    """Count this context as the owner, and release at the end, whatever happens (rule 3)."""
    own(flight)
    try:
        yield
    finally:
        flight.release()
