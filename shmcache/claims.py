"""Decisions in the making: who computes which key, and for whom does everybody else wait?

                 decided
    HELD ───────────────────► DECIDED     its value is committed and in the table
       │     released
       ├────────────────────► RELEASED    the owner has finished without it, or its lock is free
       │     overtaken
       ├────────────────────► OVERTAKEN   it took longer than its limit, and somebody waits
       │     deleted
       └────────────────────► ENDED       the key was deleted: what is being computed is out of date

A claim is one call's missing keys; each of them goes its own way.

Owner: the coordinator's thread. Readers: the same thread only.
Invariants
    I1  A key is held by one claim at most.
    I2  A claim is there while it holds a key.
    I3  held == decided + released + overtaken + ended + in_flight, counted in keys.
    I4  An illegal event raises IllegalTransition and changes nothing.
Leaves out: who waits, and what is added (arbiter).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec

from shmcache.errors import IllegalTransition


class State(Enum):
    """Where a key of a claim stands."""

    HELD = "held"
    DECIDED = "decided"
    RELEASED = "released"
    OVERTAKEN = "overtaken"
    ENDED = "ended"


class Event(Enum):
    """What can happen to it."""

    DECIDED = "decided"
    RELEASED = "released"
    OVERTAKEN = "overtaken"
    DELETED = "deleted"


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.HELD: {
        Event.DECIDED: State.DECIDED,
        Event.RELEASED: State.RELEASED,
        Event.OVERTAKEN: State.OVERTAKEN,
        Event.DELETED: State.ENDED,
    },
    State.DECIDED: {},
    State.RELEASED: {},
    State.OVERTAKEN: {},
    State.ENDED: {},
}


class Claim(msgspec.Struct):
    """One call's right to compute. asked is the id of the request that it answered."""

    token: int
    client: int
    asked: int
    since_ns: int
    limit_ns: int
    keys: dict[bytes, State]

    def is_overdue(self, now_ns: int) -> bool:
        """Whether others may take it over."""
        return now_ns - self.since_ns > self.limit_ns

    @property
    def held(self) -> list[bytes]:
        """The keys that are not decided yet."""
        return [key for key, state in self.keys.items() if state is State.HELD]


class ClaimStatistics(msgspec.Struct, frozen=True):
    """Counts of keys since the coordinator's start (I3)."""

    held: int
    decided: int
    released: int
    overtaken: int
    ended: int
    in_flight: int


class Claims:
    """The table: by token and by key."""

    def __init__(self) -> None:
        self._by_token: dict[int, Claim] = {}
        self._by_key: dict[bytes, Claim] = {}
        self._counts = dict.fromkeys(State, 0)

    def open(self, claim: Claim) -> None:
        """Enter a claim whose keys are all free and HELD. The caller looked that they are."""
        if claim.token in self._by_token or any(key in self._by_key for key in claim.keys):
            raise IllegalTransition(State.HELD.value, "open")
        self._by_token[claim.token] = claim
        self._by_key.update(dict.fromkeys(claim.keys, claim))
        self._counts[State.HELD] += len(claim.keys)

    def advance(self, claim: Claim, key: bytes, event: Event) -> State:
        """Apply an event to a key; a claim that holds nothing any more leaves the table."""
        after = TRANSITIONS[claim.keys[key]].get(event)
        if after is None:
            raise IllegalTransition(claim.keys[key].value, event.value)
        claim.keys[key] = after
        del self._by_key[key]
        self._counts[after] += 1
        if not claim.held:
            del self._by_token[claim.token]
        return after

    def by_token(self, token: int) -> Claim | None:
        """The claim of this token, while it holds a key."""
        return self._by_token.get(token)

    def by_key(self, key: bytes) -> Claim | None:
        """The claim that holds this key."""
        return self._by_key.get(key)

    def of_client(self, client: int) -> list[Claim]:
        """All claims of a client."""
        return [claim for claim in self._by_token.values() if claim.client == client]

    def all(self) -> list[Claim]:
        """All claims."""
        return list(self._by_token.values())

    def overdue(self, now_ns: int) -> list[Claim]:
        """All claims that others may take over."""
        return [claim for claim in self._by_token.values() if claim.is_overdue(now_ns)]

    def is_held(self, keys: Sequence[bytes]) -> bool:
        """Whether any of these keys is held."""
        return any(key in self._by_key for key in keys)

    def __len__(self) -> int:
        return len(self._by_token)

    def statistics(self) -> ClaimStatistics:
        """How many keys were claimed, and what became of them."""
        count = self._counts
        return ClaimStatistics(
            count[State.HELD],
            count[State.DECIDED],
            count[State.RELEASED],
            count[State.OVERTAKEN],
            count[State.ENDED],
            len(self._by_key),
        )
