"""Saves in flight: who may write which row, and how many bytes does each tier owe for it?

                     named              checked             linked             indexed
    RESERVED ──────────────► WRITTEN ──────────► CHECKED ─────────► LINKED ──────────► PUBLISHED
       │  │                     │                   │                  │
       │  │ overtaken           └───── refused ─────┴──── refused ─────┘
       │  └──────────► OVERTAKEN                    │
       │ let_go            │ let_go                 ▼
       └───────────────────┴──────────────────► ABANDONED

    named      the slab has its name in the tier's `in/`
    checked    size and metadata are what the plan said
    linked     it lies in the tier under its key
    indexed    a reader can find it
    refused    a check, a link or the forget number said no
    let_go     the owner cancelled, or its lock is free: nothing of it is written any more
    overtaken  the owner is stuck: the key is free again, its bytes are not

Owner: the coordinator's thread. Readers: the same thread only.
Invariants
    I1  One live reservation a key: `by_key` holds exactly those in RESERVED .. LINKED whose plan
        names a key; a reply in the making has none until it is written.
    I2  A tier is charged for every reservation that has not ended, OVERTAKEN included: bytes that
        somebody may still be writing are never given to somebody else.
    I3  reserved == published + abandoned + in_flight.
    I4  An illegal event raises IllegalTransition and changes nothing.
Leaves out: eviction, waiting, what a slab holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import msgspec

from shmcache.errors import IllegalTransition
from shmcache.protocol import Plan, Tier


class State(Enum):
    """Where a save stands."""

    RESERVED = "reserved"
    WRITTEN = "written"
    CHECKED = "checked"
    LINKED = "linked"
    PUBLISHED = "published"
    OVERTAKEN = "overtaken"
    ABANDONED = "abandoned"


class Event(Enum):
    """What can happen to it."""

    NAMED = "named"
    CHECKED = "checked"
    LINKED = "linked"
    INDEXED = "indexed"
    REFUSED = "refused"
    LET_GO = "let_go"
    OVERTAKEN = "overtaken"


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.RESERVED: {
        Event.NAMED: State.WRITTEN,
        Event.LET_GO: State.ABANDONED,
        Event.OVERTAKEN: State.OVERTAKEN,
    },
    State.WRITTEN: {Event.CHECKED: State.CHECKED, Event.REFUSED: State.ABANDONED},
    State.CHECKED: {Event.LINKED: State.LINKED, Event.REFUSED: State.ABANDONED},
    State.LINKED: {Event.INDEXED: State.PUBLISHED, Event.REFUSED: State.ABANDONED},
    State.OVERTAKEN: {Event.LET_GO: State.ABANDONED},
    State.PUBLISHED: {},
    State.ABANDONED: {},
}
ENDED = (State.PUBLISHED, State.ABANDONED)
_HOLDS_KEY = (State.RESERVED, State.WRITTEN, State.CHECKED, State.LINKED)


class Reservation(msgspec.Struct):
    """One save. charged_bytes starts at the plan's and grows by Extend.

    asked is the request id of the Reserve that was granted, so that it can be taken back unseen.
    named is the key of the slab that it has become, known when that has its name.
    """

    token: int
    client: int
    asked: int
    forget: int
    base: bytes | None
    plan: Plan
    charged_bytes: int
    state: State = State.RESERVED
    named: bytes | None = None


class ReservationStatistics(msgspec.Struct, frozen=True):
    """Counts since the coordinator's start (I3)."""

    reserved: int
    published: int
    abandoned: int
    in_flight: int


class Reservations:
    """The table: by token, by key, and what each tier is charged."""

    def __init__(self) -> None:
        self._by_token: dict[int, Reservation] = {}
        self._by_key: dict[bytes, Reservation] = {}
        self._charged_bytes = dict.fromkeys(Tier, 0)
        self._ended = dict.fromkeys(ENDED, 0)
        self._reserved = 0

    def open(self, reservation: Reservation) -> None:
        """Enter a new reservation. The caller looked that its key is free."""
        key = reservation.plan.key
        if key in self._by_key or reservation.token in self._by_token:
            raise IllegalTransition(State.RESERVED.value, "open")
        self._by_token[reservation.token] = reservation
        if key is not None:
            self._by_key[key] = reservation
        self._charged_bytes[reservation.plan.tier] += reservation.charged_bytes
        self._reserved += 1

    def advance(self, reservation: Reservation, event: Event) -> State:
        """Apply an event; an ended reservation leaves the table and its charge with it."""
        after = TRANSITIONS[reservation.state].get(event)
        if after is None:
            raise IllegalTransition(reservation.state.value, event.value)
        reservation.state = after
        key = reservation.plan.key
        if key is not None and after not in _HOLDS_KEY and self._by_key.get(key) is reservation:
            del self._by_key[key]
        if after in ENDED:
            del self._by_token[reservation.token]
            self._charged_bytes[reservation.plan.tier] -= reservation.charged_bytes
            self._ended[after] += 1
        return after

    def extend(self, reservation: Reservation, slab_bytes: int) -> None:
        """Charge more for a reservation whose slab turned out longer."""
        self._charged_bytes[reservation.plan.tier] += slab_bytes - reservation.charged_bytes
        reservation.charged_bytes = slab_bytes

    def by_token(self, token: int) -> Reservation | None:
        """The reservation of this token, if it has not ended."""
        return self._by_token.get(token)

    def by_key(self, key: bytes | None) -> Reservation | None:
        """The one reservation that holds this key, if any."""
        return self._by_key.get(key) if key is not None else None

    def of_client(self, client: int) -> list[Reservation]:
        """All that this client has not ended."""
        return [held for held in self._by_token.values() if held.client == client]

    def charged_bytes(self, tier: Tier) -> int:
        """Bytes that a tier owes to saves in flight."""
        return self._charged_bytes[tier]

    def __iter__(self) -> Iterator[Reservation]:
        return iter(list(self._by_token.values()))

    def __len__(self) -> int:
        return len(self._by_token)

    def statistics(self) -> ReservationStatistics:
        """How many saves began and how they ended."""
        return ReservationStatistics(
            self._reserved, self._ended[State.PUBLISHED], self._ended[State.ABANDONED], len(self._by_token)
        )
