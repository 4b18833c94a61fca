"""The single writer: may this be saved, is this complete, and who has to leave for it?

    Reserve ─► verdicts            room is made, bytes are charged, the key is held
    Written ─► check ─► Link job ─► linked ─► publish      or refused, and the bytes are given back
    Cancel, client_gone ─► let go                          what has a name is looked at first
    Drop, Evict ─► remove                                  row, then file; or the file is set aside
    tick ─► HandOn job ─► adopted by the disk               a memory tier is nearly full (spill_on_evict)

A tier's directory is touched on the tier's own lane only: jobs go in, outcomes come back (supervisor).
What waits in `in/`, always in /dev/shm, is read and refused right here.

Owner: one per namespace; everything here runs on the thread of the server's loop.
Readers: nobody; workers read the index.
Invariants
    I1  For each tier: bytes of its rows and of slabs set aside + bytes whose unlinking is under way + bytes
        charged to saves in flight + bytes that workers hold beyond what they reserved here <= budget,
        whenever a worker may write: a grant in memory is answered only when what left for it is gone.
    I2  A row is published after its slab is linked, and removed before its slab is unlinked.
    I3  The row that a live reservation extends, and its ancestors, are not evicted.
    I4  Every waiter gets one outcome: at publish, refusal, cancel, or its owner's end; and none once
        its mailbox has asked something else.
    I5  A sequence that began before the last Evict saves nothing: it is refused when it reserves, when it
        is published and when it is adopted. The number that says so moves after the rows have left the
        index, so who has seen the new number has not seen them.
    I6  A pinned row leaves by Evict, or where it does not verify, and not otherwise.
    I7  Nothing here has a clock, a lock or a sleep of its own: time is an argument.
Leans on: a lane runs its jobs in order, so a slab that leaves and one of the same key that comes later do
not meet; and one that came earlier is refused when its link is heard of.
Leaves out: how messages come and go, who lives (server), what bytes mean (kvc).
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import msgspec

from shmcache.admission import Asked
from shmcache.config import Admission, Eviction
from shmcache.errors import CorruptSlab, ForeignObject, mib
from shmcache.eviction import HEAD, PINNED, Entry, Residents
from shmcache.index import Found, IndexWriter, Published, Row
from shmcache.key import identity_tag
from shmcache.kvc import HEAD_DETAIL, Meta
from shmcache.policy import Measured, gain_ms_per_byte
from shmcache.protocol import (
    NO_MAILBOX,
    AnyReply,
    AnyRequest,
    Await,
    Cancel,
    Drop,
    Evict,
    Evicted,
    Extend,
    Outcome,
    Pin,
    Pinned,
    Plan,
    Reserve,
    Reserved,
    Stale,
    Tier,
    Verdict,
    Written,
)
from shmcache.reservation import Event, Reservation, Reservations, State
from shmcache.tiers.base import HandOver, Slab
from shmcache.tiers.supervisor import (
    Done,
    HandOn,
    Lane,
    LaneState,
    Link,
    Look,
    Remove,
    RemoveAside,
    SetAside,
    SetPin,
    StoreForget,
    Survey,
    WriteUse,
)

log = logging.getLogger(__name__)

_NOBODY = -1  # client of what is adopted: its owner was another coordinator's
_SURVEY_SLICE = 2_000
_ASIDE_SLABS = 8  # that a tier keeps to be looked at, the newest
_ASIDE_SHARE = 8  # an eighth of its budget at most
SPILL_AT = 0.9  # of a memory tier's budget: what is left is for saves that come before the disk is done
_AGED_SLOTS = 4_096  # looked at each tick: a whole index of 65,536 rows in seven seconds


class Reply(msgspec.Struct, frozen=True):
    """A reply for the server to deliver."""

    client: int
    mailbox: int
    request: int
    body: AnyReply


class Now(msgspec.Struct, frozen=True):
    """The time, passed in."""

    unix_s: int


class TierState(msgspec.Struct):
    """One tier as the coordinator sees it.

    staging_bytes bounds what is in flight to the disk, in /dev/shm; 0 where slabs are made in place.
    max_rows and max_age_s: None where there is no such limit.
    bytes_of has, by tenant, the bytes of its rows.
    leaving holds, in order, rows that are out of the index and whose unlinking is under way.
    aside has key and bytes of the slabs that were found wrong and are kept, the oldest first.
    deferred are grants that wait until so many removals have ended.
    """

    lane: Lane
    budget_bytes: int
    staging_bytes: int = 0
    max_rows: int | None = None
    max_age_s: int | None = None
    used_bytes: int = 0
    rows: int = 0
    bytes_of: dict[int, int] = msgspec.field(default_factory=dict)
    leaving: deque[tuple[bytes, int]] = msgspec.field(default_factory=deque)
    leaving_bytes: int = 0
    aside: list[tuple[bytes, int]] = msgspec.field(default_factory=list)
    removals: int = 0
    removals_ended: int = 0
    deferred: list[tuple[int, Reply]] = msgspec.field(default_factory=list)
    survey: Iterator[bytes | None] = iter(())

    @property
    def number(self) -> Tier:
        """Which tier it is."""
        return self.lane.tier.number


class Forgetting(msgspec.Struct):
    """An Evict whose files are being removed: it is answered when each tier has ended so many removals."""

    reply: Reply
    rows: int
    keys: frozenset[bytes]
    until: dict[Tier, int]
    failed: int = 0


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that decide who may stay (config.CoordinatorConfig says what they mean)."""

    eviction: Eviction = "lru"
    tenant_share: float = 1.0
    disk_admission: Admission = "always"
    spill_on_evict: bool = False


_DEFAULTS = Rules()


_Place = tuple[int, int]  # client, mailbox


class Coordinator:
    """Index, use order, reservations and tiers of one namespace, and the rules between them."""

    def __init__(
        self,
        index: IndexWriter,
        tiers: Sequence[TierState],
        epoch: int,
        forget: int,
        unnamed_bytes: Callable[[], Mapping[int, int]],
        *,
        rules: Rules = _DEFAULTS,
        store_forget: Callable[[int], None] = lambda _number: None,
        measured_of: Callable[[int, Tier], Measured] = lambda _client, _tier: Measured(),
    ) -> None:
        """Nothing is adopted yet.

        Args:
            index: an empty index.
            tiers: the tiers that this namespace has.
            epoch: of the messages to be answered.
            forget: the control page's forget number.
            unnamed_bytes: by client, the bytes without a name that each worker says it holds.
            rules: who may stay.
            store_forget: shows the forget number to all workers.
            measured_of: what a worker has counted of its computing, and of its restores from a tier.
        """
        self._index = index
        self._tiers = {state.number: state for state in tiers}
        self._epoch = epoch
        self._forget = self._forget_at_start = forget
        self._store_forget = store_forget
        self._aged_to = 0
        self._forgetting: list[Forgetting] = []
        self._unnamed_bytes = unnamed_bytes
        self._held: dict[int, int] = {}
        self._held_before: dict[int, int] = {}
        self._reservations = Reservations()
        self._rules = rules
        self._order = Residents(index.slots, len(Tier), rules.eviction, by_tenant=rules.tenant_share < 1)
        self._tenants: dict[bytes | None, int] = {}
        self._asked = Asked(index.max_rows) if rules.disk_admission == "second_use" else None
        self._measured_of = measured_of
        self._measured: dict[tuple[int, int], Measured] = {}
        # Who waits for a key (Await) or for a token (Written): place and request. Only those still
        # parked are answered.
        self._waiters: dict[bytes | int, list[tuple[_Place, int]]] = {}
        self._parked: dict[_Place, int] = {}
        self._replies: list[Reply] = []
        self._used_since_stored: set[int] = set()
        self._handing_on: dict[bytes, int] = {}  # bytes of rows that are to get a name in the disk's `in/`
        self._counts: dict[str, int] = {}
        self._now = Now(0)

    # ---- messages

    def handle(self, request: AnyRequest, now: Now) -> list[Reply]:
        """Answer one message. Never raises for anything that a message or a file can hold."""
        self._now = now
        if request.mailbox != NO_MAILBOX:
            self.unpark(request.client, request.mailbox)
        if request.epoch != self._epoch:
            self._answer(request, Stale(self._epoch))
        else:
            match request:
                case Reserve():
                    self._note_held()
                    state = self._tiers.get(request.plans[0].tier) if request.plans else None
                    self._answer_when_room(request, Reserved(self._reserve(request)), state)
                case Extend():
                    self._note_held()
                    held = self._reservations.by_token(request.token)
                    state = self._tiers[held.plan.tier] if held is not None else None
                    self._answer_when_room(request, Reserved([self._extend(request)]), state)
                case Written():
                    self._written(request)
                case Await():
                    self._await(request)
                case Cancel():
                    self._cancel(request)
                case Drop():
                    self._drop(request)
                case Evict():
                    self._evict_for_good(request)
                case Pin():
                    self._pin(request)
        return self._take_replies()

    def _reserve(self, request: Reserve) -> list[Verdict]:
        """All free plans together; if the first missing one is held, none (single-flight)."""
        if request.forget < self._forget:
            self._count("dropped_forgotten", len(request.plans))
            return [Verdict("forgotten")] * len(request.plans)
        verdicts: list[Verdict] = []
        made_from = request.base
        first_is_held: bool | None = None
        for plan in request.plans:
            held = self._reservations.by_key(plan.key)
            if plan.key is not None and self._is_there(plan.key, plan.tier):
                verdict = Verdict("present")
            elif held is not None and held.client == request.client and held.state is State.RESERVED:
                # Its answer is this one's from now on: a late cancel of the first question ends nothing.
                held.asked = request.request
                verdict = Verdict("granted", held.token)
            elif held is not None or first_is_held:
                verdict = Verdict("held")
            else:
                verdict = self._grant(request, plan, made_from)
            if verdict.kind != "present" and first_is_held is None:
                first_is_held = verdict.kind == "held"
            if verdict.kind in ("present", "granted"):
                made_from = plan.key
            verdicts.append(verdict)
        return verdicts

    def _is_there(self, key: bytes, tier: Tier) -> bool:
        """Whether a key has a row that is at least as durable as one of this tier."""
        found = self._index.get(key)
        return found is not None and found.row.tier >= tier

    def _grant(self, request: Reserve, plan: Plan, made_from: bytes | None) -> Verdict:
        tier = self._tiers.get(plan.tier)
        if tier is None or tier.lane.state is LaneState.DOWN:
            self._count("dropped_tier_down")
            return Verdict("tier_down")
        if plan.slab_bytes > tier.budget_bytes:
            self._count("dropped_too_large")
            return Verdict("too_large", free_bytes=tier.budget_bytes)
        if plan.tier is Tier.DISK and not self._is_admitted(plan, made_from):
            self._count("dropped_first_use")
            return Verdict("first_use")
        reservation = Reservation(
            token=random.getrandbits(63),
            client=request.client,
            asked=request.request,
            forget=request.forget,
            base=made_from,
            plan=plan,
            charged_bytes=plan.slab_bytes,
        )
        # Opened before room is made, so that I3 covers the row that this very save extends.
        self._reservations.open(reservation)
        if not self._has_room(tier, plan.tenant):
            self._reservations.advance(reservation, Event.LET_GO)
            self._count("dropped_no_space")
            return Verdict("no_space", free_bytes=max(0, self._free_bytes(tier)))
        return Verdict("granted", reservation.token)

    def _extend(self, request: Extend) -> Verdict:
        reservation = self._reservations.by_token(request.token)
        if (
            reservation is None
            or reservation.client != request.client
            or reservation.state is not State.RESERVED
        ):
            return Verdict("held")
        tier = self._tiers[reservation.plan.tier]
        if request.slab_bytes > tier.budget_bytes:
            return Verdict("too_large", free_bytes=tier.budget_bytes)
        before_bytes = reservation.charged_bytes
        self._reservations.extend(reservation, max(before_bytes, request.slab_bytes))
        if not self._has_room(tier, reservation.plan.tenant):
            self._reservations.extend(reservation, before_bytes)
            return Verdict("no_space", free_bytes=max(0, self._free_bytes(tier)))
        return Verdict("granted", reservation.token)

    def _written(self, request: Written) -> None:
        reservation = self._reservations.by_token(request.token)
        self._wait_for(request, request.token)
        if reservation is None or reservation.client != request.client:
            # Of a coordinator before us: the name in `in/` speaks for itself.
            self._note_held()
            self._adopt_orphans()
            if self._reservations.by_token(request.token) is None:
                self._wake(request.token, Outcome(self._index.get(request.key) is not None))
            return
        handover = HandOver(request.key, request.token, reservation.forget)
        if reservation.state is State.OVERTAKEN:
            self._tiers[reservation.plan.tier].lane.tier.refuse(handover)
            self._end(reservation, Event.LET_GO, request.key, "overtaken")
        elif reservation.state is State.RESERVED:
            self._take(reservation, handover)

    def _await(self, request: Await) -> None:
        """Looks into the index first: the save may have ended before the question came."""
        if self._index.get(request.key) is not None:
            self._answer(request, Outcome(True))
        elif request.unannounced or self._reservations.by_key(request.key) is not None:
            self._wait_for(request, request.key)
        else:
            self._answer(request, Outcome(False, "nothing in flight"))

    def _cancel(self, request: Cancel) -> None:
        for reservation in self._reservations.of_client(request.client):
            if reservation.token in request.tokens or request.asked == reservation.asked > 0:
                self._let_go(reservation, "cancelled")

    def _drop(self, request: Drop) -> None:
        found = self._index.get(request.key)
        if found is None or found.word != request.word:
            return
        self._count("corrupt_rows")
        if not request.aside:
            log.warning("row %s is dropped: %s", request.key.hex(), request.why)
            self._remove(found)
            return
        log.error("row %s is set aside: %s", request.key.hex(), request.why)
        self._index.remove(request.key)
        self._forget_row(found, keep_file=True)
        self._set_aside(self._tiers[Tier(found.row.tier)], found.row)

    def _evict_for_good(self, request: Evict) -> None:
        """Rows first, then the number (I5), then whatever of older sequences has a name already."""
        named = [found for key in set(request.keys) if (found := self._index.get(key)) is not None]
        for found in named:
            self._count("forgotten")
            self._remove(found)
        aside = sum(self._forget_aside(state, request.keys) for state in self._tiers.values())
        self._forget += 1
        self._store_forget(self._forget)
        for state in self._tiers.values():
            state.lane.submit(StoreForget(self._forget))
        keys = frozenset(request.keys) | self._take_back()
        if request.mailbox != NO_MAILBOX:
            self._parked[request.client, request.mailbox] = request.request
            reply = Reply(request.client, request.mailbox, request.request, Evicted(0, 0))
            until = {number: state.removals for number, state in self._tiers.items()}
            self._forgetting.append(Forgetting(reply, len(named) + aside, keys, until))
            self._answer_forgetting()

    def _forget_aside(self, state: TierState, keys: Sequence[bytes]) -> int:
        """Remove those slabs of these keys that were set aside; how many."""
        named = [(key, size_bytes) for key, size_bytes in state.aside if key in keys]
        for key, size_bytes in named:
            state.aside.remove((key, size_bytes))
            self._release(state, RemoveAside(key), size_bytes)
        return len(named)

    def _take_back(self) -> frozenset[bytes]:
        """Refuse what older sequences have handed over; the keys of those whose link is under way.

        The lane removes these right behind their link: should we die before we hear of it, the next
        coordinator finds no row.
        """
        self._take_named()
        linking = set()
        for reservation in self._reservations:
            if reservation.state is State.CHECKED and reservation.named is not None:
                linking.add(reservation.named)
                self._release(self._tiers[reservation.plan.tier], Remove(reservation.named), 0)
        return frozenset(linking)

    def _answer_forgetting(self) -> None:
        """Answer those Evicts whose files are gone."""
        for forgetting in list(self._forgetting):
            ended = (self._tiers[tier].removals_ended >= count for tier, count in forgetting.until.items())
            if all(ended):
                self._forgetting.remove(forgetting)
                body = Evicted(forgetting.rows, forgetting.failed)
                self._reply_if_parked(msgspec.structs.replace(forgetting.reply, body=body))

    def _pin(self, request: Pin) -> None:
        """The row is safe at once; the answer comes when a restart would know it too."""
        found = self._index.get(request.key)
        if found is None:
            self._answer(request, Pinned(False, "there is no such row"))
            return
        self._order.pin(found.slot, pinned=request.pinned)
        self._wait_for(request, _pin_of(request.key))
        self._tiers[Tier(found.row.tier)].lane.submit(SetPin(request.key, request.pinned))

    # ---- the shell's events

    def unpark(self, client: int, mailbox: int) -> None:
        """A mailbox asks something new: nothing more is written there for what it asked before."""
        self._parked.pop((client, mailbox), None)

    def client_gone(self, client: int, now: Now) -> list[Reply]:
        """The worker's lock is free: what it named is adopted, what it held is given back."""
        self._now = now
        for place in [place for place in self._parked if place[0] == client]:
            del self._parked[place]
        for reservation in self._reservations.of_client(client):
            self._let_go(reservation, "its owner is gone")
        self._note_held(gone=client)
        self._adopt_orphans()
        return self._take_replies()

    def client_stuck(self, client: int, now: Now) -> list[Reply]:
        """The worker lives and does not move: its keys are free, its bytes are not (reservation I2)."""
        self._now = now
        for reservation in self._reservations.of_client(client):
            if reservation.state is State.RESERVED:
                self._count("overtaken")
                self._end(reservation, Event.OVERTAKEN, reservation.plan.key, "its owner is stuck")
        return self._take_replies()

    def touches(self, touch_words: Sequence[int], now: Now) -> None:
        """Rows that a worker has used, oldest first; a touch of a slot's former row is dropped."""
        for word in touch_words:
            slot = word & 0xFFFFFFFF
            found = self._index.at(slot) if slot < self._index.slots else None
            if found is not None and found.word >> 8 & 0xFFFFFFFF == word >> 32:
                self._used_since_stored.update(self._order.use(slot, now.unix_s))

    def adopt(self, now: Now) -> int:
        """At start: enter every slab that validates, in order of last use; returns how many."""
        self._now = now
        self._look_at_held()
        for state in self._tiers.values():
            slabs: list[Slab] = []
            for entry in state.lane.tier.scan():
                if isinstance(entry, Slab):
                    slabs.append(entry)
                elif entry.damaged:
                    log.warning("row %s is removed: %s", entry.key.hex(), entry.why)
                    self._count("corrupt_rows")
                    self._release(state, Remove(entry.key), 0)
                else:
                    log.warning("row %s is left alone: %s", entry.key.hex(), entry.why)
            slabs.sort(key=lambda slab: slab.head.meta.last_used_unix_s)
            for slab in slabs:
                self._enter(state, slab, None)
            # A row may have been used after those that were made from it, so descent comes second.
            for slab in slabs:
                found = self._index.get(slab.head.meta.key)
                if found is not None and found.row.tier == state.number:
                    self._descend(found.slot, found.row.text_bytes, slab.head.meta.base_key)
            state.aside = state.lane.tier.asides()
            self._bound_aside(state)
            self._evict(self._victims(state)[0])
        self._expire(range(self._index.slots))
        self._adopt_orphans()
        return len(self._index)

    def announced(self) -> None:
        """Our epoch can be seen: what workers hold now is all that they hold for another.

        Who was granted something by the coordinator before us states it first and looks at the epoch then
        (client.Slab): he either is among these, or sees us and lets go.
        """
        self._look_at_held()
        self._adopt_orphans()

    def sweep(self, now: Now) -> list[Reply]:
        """Every 30 s: take what waits in `in/`, and compare each directory with the index."""
        self._now = now
        self._note_held()
        self._take_named()
        self._forget_waiters()
        for state in self._tiers.values():
            state.lane.submit(Survey())
        return self._take_replies()

    def _take_named(self) -> None:
        """Everything that has a name in `in/`, whether its owner has told us or not."""
        for state in self._tiers.values():
            for handover in state.lane.tier.handed_over():
                reservation = self._reservations.by_token(handover.token)
                if reservation is not None and reservation.state is State.RESERVED:
                    self._take(reservation, handover)
        self._adopt_orphans()

    def tick(self, now: Now, now_s: float) -> list[Reply]:
        """A few times a second: lanes that are late, outcomes, a slice of a survey."""
        self._now = now
        self._note_held()
        for state in self._tiers.values():
            before = state.lane.state
            state.lane.look(now_s)
            if state.lane.state is not before:
                log.warning("tier %s is %s", state.number.name.lower(), state.lane.state.value)
            for key in islice(state.survey, _SURVEY_SLICE):
                if key is not None:
                    state.lane.submit(Look(key))
        until = min(self._aged_to + _AGED_SLOTS, self._index.slots)
        self._expire(range(self._aged_to, until))
        self._aged_to = until % self._index.slots
        self._spill()
        return self.outcomes(now)

    def outcomes(self, now: Now) -> list[Reply]:
        """What the lanes have done: publish, free, answer."""
        self._now = now
        self._note_held()
        for state in self._tiers.values():
            for done in state.lane.outcomes():
                self._note_fault(state, done)
                match done.job:
                    case Link():
                        self._linked(state, done.job.handover, done)
                    case Remove() | SetAside() | RemoveAside():
                        self._removed(state, done)
                    case HandOn():
                        self._handed_on(done.job.handover, done)
                    case SetPin():
                        self._wake(_pin_of(done.job.key), Pinned(not done.error, done.error))
                    case Look():
                        self._looked(state, done.job.key, done)
                    case Survey() if not done.error:
                        state.survey = self._disagreeing(state, done.keys)
                    case StoreForget() if done.error:
                        log.warning("the forget number is not stored beside the slabs: %s", done.error)
                    case Survey() | WriteUse() | StoreForget():
                        pass
        return self._take_replies()

    def _note_fault(self, state: TierState, done: Done) -> None:
        """Count what a tier could not do, and say so: once for each, and once for all when it went down."""
        if done.is_fault:
            self._count("tier_faults")
            # What comes of a Link or a StoreForget is said where it is dealt with.
            if state.lane.state is LaneState.UP and not isinstance(done.job, Link | StoreForget):
                what = f"{type(done.job).__name__} in {state.number.name.lower()}"
                log.warning("%s has failed: %s", what, done.error)

    def store_use(self) -> None:
        """Write hit counts and last use into the slabs of rows used since the last call."""
        for slot in self._used_since_stored:
            if (found := self._index.at(slot)) is not None:
                use = WriteUse(found.row.key, self._order.hits[slot], self._order.used_unix_s[slot])
                self._tiers[Tier(found.row.tier)].lane.submit(use)
        self._used_since_stored.clear()

    def budgets(self) -> list[str]:
        """Each tier's bytes and budget, for the log."""
        return [
            f"{state.number.name.lower()}={mib(state.used_bytes)} of {mib(state.budget_bytes)}"
            for state in self._tiers.values()
        ]

    def fold(self, counters: Mapping[str, int]) -> None:
        """Keep what a worker that is gone has counted."""
        for name, count in counters.items():
            self._count(f"gone_{name}", count)

    def statistics(self) -> dict[str, int]:
        """Counters and gauges, by the names of the index's statistics words."""
        counted = dict(self._counts)
        saves = self._reservations.statistics()
        counted["saves_reserved"], counted["saves_published"] = saves.reserved, saves.published
        counted["saves_abandoned"], counted["saves_in_flight"] = saves.abandoned, saves.in_flight
        for number, state in self._tiers.items():
            name = number.name.lower()
            counted[f"rows_{name}"] = state.rows
            counted[f"bytes_{name}"] = state.used_bytes
            counted[f"charged_{name}"] = self._reservations.charged_bytes(number)
            counted[f"budget_{name}"] = state.budget_bytes
            counted[f"is_down_{name}"] = state.lane.state is LaneState.DOWN
            counted[f"downs_{name}"] = state.lane.statistics().downs
        return counted

    # ---- saves

    def _take(self, reservation: Reservation, handover: HandOver) -> None:
        """RESERVED → WRITTEN → CHECKED, and the link is under way; or refused, with nothing left."""
        lane = self._tiers[reservation.plan.tier].lane
        self._reservations.advance(reservation, Event.NAMED)
        reservation.named = handover.key
        try:
            slab = lane.tier.check(handover)
        except (CorruptSlab, ForeignObject, OSError) as error:
            self._refuse(reservation, handover, str(error), logging.WARNING)
            return
        if why := self._mismatch(reservation, slab):
            self._refuse(reservation, handover, why)
            return
        self._reservations.advance(reservation, Event.CHECKED)
        lane.submit(Link(handover))

    def _linked(self, state: TierState, handover: HandOver, done: Done) -> None:
        """CHECKED → LINKED → PUBLISHED; what was forgotten meanwhile goes again."""
        reservation = self._reservations.by_token(handover.token)
        if reservation is None:
            return
        if done.slab is None:
            self._refuse(reservation, handover, done.error, logging.WARNING)
            return
        self._reservations.advance(reservation, Event.LINKED)
        self._note_speed(reservation.client, done.slab.head.meta, state.number)
        if reservation.forget < self._forget:
            self._refuse(reservation, handover, "forgotten")  # Its file goes: _take_back.
        elif self._is_leaving(state, handover.key):
            # A row of this key left when the link was done already: the removal behind it takes this file.
            self._refuse(reservation, handover, "a row of its key was just leaving")
        else:
            # What nobody has saved and is here already, less durable, has come from a memory tier.
            is_spill = reservation.client == _NOBODY and self._index.get(handover.key) is not None
            if self._enter(state, done.slab, reservation.base):
                reason = done.slab.head.meta.save_reason.name.lower()
                self._count("spilled" if is_spill else f"saves_{reason}")
                self._end(reservation, Event.INDEXED, handover.key)
            else:
                self._refuse(reservation, handover, "the index has no room")

    def _note_speed(self, client: int, meta: Meta, tier: Tier) -> None:
        """The model's rows are worth what its workers measure."""
        measured = self._measured_of(client, tier)
        if measured.has_prefilled:
            self._measured[identity_tag(meta.model_fp, meta.ctx_params_hash), tier] = measured

    def _mismatch(self, reservation: Reservation, slab: Slab) -> str:
        """Why a checked slab is not what was reserved; empty if it is."""
        plan, meta = reservation.plan, slab.head.meta
        if reservation.forget < self._forget:
            return "forgotten"
        if slab.slab_bytes > reservation.charged_bytes:
            return f"{slab.slab_bytes} bytes were written and {reservation.charged_bytes} reserved"
        if plan.key is None:
            return "present already" if self._is_there(meta.key, plan.tier) else ""
        if (meta.key, meta.block_key, meta.text_bytes) != (plan.key, plan.block_key, plan.text_bytes):
            return "another row was written than was reserved"
        return ""

    def _refuse(
        self, reservation: Reservation, handover: HandOver, why: str, level: int = logging.INFO
    ) -> None:
        log.log(level, "save of %s is refused: %s", handover.key.hex(), why)
        self._count("dropped_refused")
        self._tiers[reservation.plan.tier].lane.tier.refuse(handover)
        self._end(reservation, Event.REFUSED, handover.key, why)

    def _let_go(self, reservation: Reservation, why: str) -> None:
        """Give back what an owner will not write any more; what it has named is taken all the same."""
        if reservation.state in (State.WRITTEN, State.CHECKED, State.LINKED):
            return
        tier = self._tiers[reservation.plan.tier].lane.tier
        for handover in tier.handed_over():
            if handover.token != reservation.token:
                continue
            if reservation.state is State.RESERVED:
                self._take(reservation, handover)
                return
            tier.refuse(handover)
        self._end(reservation, Event.LET_GO, reservation.plan.key, why)

    def _end(self, reservation: Reservation, event: Event, key: bytes | None, why: str = "") -> None:
        """Advance, and tell everybody who waits for the key or the token (I4).

        What they are told is whether the row is there, whoever has saved it.
        """
        state = self._reservations.advance(reservation, event)
        outcome = Outcome(key is not None and self._index.get(key) is not None, why)
        for waited_for in {key, reservation.plan.key}:
            if waited_for is not None:
                self._wake(waited_for, outcome)
        if state is not State.OVERTAKEN:
            self._wake(reservation.token, outcome)
        if state is State.ABANDONED and reservation.plan.key is not None:
            self._pass_base_on(reservation)

    def _pass_base_on(self, abandoned: Reservation) -> None:
        """What was to extend a row that will not come extends the one before it (I3)."""
        for reservation in self._reservations:
            if reservation.base == abandoned.plan.key:
                reservation.base = abandoned.base

    def _adopt_orphans(self) -> None:
        """Slabs in `in/` whose reservation died with another coordinator."""
        for state in self._tiers.values():
            for handover in state.lane.tier.handed_over():
                if self._reservations.by_token(handover.token) is None:
                    self._adopt_one(state, handover)

    def _adopt_one(self, state: TierState, handover: HandOver) -> None:
        """Reserve its bytes in the name of nobody, and go the way of every other save."""
        try:
            slab = state.lane.tier.check(handover)
        except (CorruptSlab, ForeignObject, OSError) as error:
            log.warning("%s is removed: %s", handover.name, error)
            state.lane.tier.refuse(handover)
            return
        meta = slab.head.meta
        # Complete as it is, it does not wait for somebody who makes the same row now.
        key = meta.key if self._reservations.by_key(meta.key) is None else None
        reservation = Reservation(
            token=handover.token,
            client=_NOBODY,
            asked=0,
            forget=handover.forget,
            base=meta.base_key,
            plan=Plan(key, meta.block_key, meta.text_bytes, slab.slab_bytes, state.number, meta.tenant_hash),
            charged_bytes=slab.slab_bytes,
            named=meta.key,
        )
        self._reservations.open(reservation)
        self._reservations.advance(reservation, Event.NAMED)
        if self._is_there(meta.key, state.number):
            self._refuse(reservation, handover, "present already")
        elif reservation.forget < self._forget:
            self._refuse(reservation, handover, "forgotten")
        elif not self._make_room(state, self._tenant(meta.tenant_hash)):
            self._refuse(reservation, handover, "no space")
        else:
            self._reservations.advance(reservation, Event.CHECKED)
            state.lane.submit(Link(handover))

    # ---- spill: a row that is about to leave memory goes to the disk first, as any other save does

    def _spill(self) -> None:
        """Hand the coldest rows of each memory tier on to the disk, until it is within SPILL_AT."""
        disk = self._tiers.get(Tier.DISK)
        if not self._rules.spill_on_evict or disk is None or disk.lane.state is LaneState.DOWN:
            return
        for state in self._tiers.values():
            if state is not disk and state.lane.state is LaneState.UP:
                self._spill_from(state, disk)

    def _spill_from(self, state: TierState, disk: TierState) -> None:
        room_bytes = disk.staging_bytes - self._reservations.charged_bytes(Tier.DISK)
        room_bytes -= sum(self._handing_on.values())
        short_bytes = int((1 - SPILL_AT) * state.budget_bytes) - self._free_bytes(state)
        protected, spilling = self._protected(), self._spilling()
        on_their_way = (found.row for key in spilling if (found := self._index.get(key)) is not None)
        short_bytes -= sum(row.slab_bytes for row in on_their_way if row.tier == state.number)
        for slot in self._order.leaving(state.number, self._now.unix_s):
            if short_bytes <= 0:
                return
            found = self._index.at(slot)
            if found is None or slot in protected:
                continue
            row = found.row
            if row.key in spilling or row.slab_bytes > min(disk.budget_bytes, disk.staging_bytes):
                continue
            if row.slab_bytes > room_bytes:
                return
            short_bytes -= row.slab_bytes
            room_bytes -= row.slab_bytes
            self._hand_on(state, disk, row)

    def _hand_on(self, state: TierState, disk: TierState, row: Row) -> None:
        """A second name in the disk's `in/`: from there it is a hand-over like any, whoever dies."""
        handover = HandOver(row.key, random.getrandbits(63), self._forget)
        self._handing_on[row.key] = row.slab_bytes
        state.lane.submit(HandOn(handover, disk.lane.tier.in_path))

    def _handed_on(self, handover: HandOver, done: Done) -> None:
        """What lies in the disk's `in/` now is adopted; a row that has left meanwhile is not there."""
        self._handing_on.pop(handover.key, None)
        if not done.error and self._reservations.by_token(handover.token) is None:
            self._adopt_one(self._tiers[Tier.DISK], handover)

    def _spilling(self) -> set[bytes]:
        """Keys of the rows that are on their way to the disk, whoever hands them over."""
        named = {each.named for each in self._reservations if each.plan.tier is Tier.DISK and each.named}
        return named | self._handing_on.keys()

    # ---- directories against the index

    def _expire(self, slots: Iterable[int]) -> None:
        """Rows that were made too long ago leave, but those that a save needs or somebody has pinned."""
        limits = {int(state.number): state.max_age_s for state in self._tiers.values() if state.max_age_s}
        if not limits:
            return
        protected = self._protected()
        for slot in slots:
            limit_s = limits.get(self._order.tier[slot])
            if (
                limit_s is not None
                and self._now.unix_s - self._order.made_unix_s[slot] >= limit_s
                and slot not in protected
                and not self._order.flags[slot] & PINNED
                and (found := self._index.at(slot)) is not None
            ):
                self._count("expired")
                self._remove(found)

    def _disagreeing(self, state: TierState, keys: frozenset[bytes]) -> Iterator[bytes | None]:
        """Keys of files without a row and of rows without a file, and None for each that agrees."""
        for key in keys:
            yield None if self._has_row(state, key) else key
        if len(keys) < state.rows:
            for found in self._index.rows():
                agrees = found.row.tier != state.number or found.row.key in keys
                yield None if agrees else found.row.key

    def _has_row(self, state: TierState, key: bytes) -> bool:
        found = self._index.get(key)
        return found is not None and found.row.tier == state.number

    def _looked(self, state: TierState, key: bytes, done: Done) -> None:
        """A file without a row is adopted or removed; a row without a file goes."""
        if self._is_leaving(state, key):
            return  # the removal behind this look takes the file that it saw
        found = self._index.get(key)
        if done.slab is None:
            if found is not None and found.row.tier == state.number and not done.is_fault:
                log.warning("row %s is dropped: %s", key.hex(), done.error)
                self._count("corrupt_rows")
                self._remove(found)
            elif done.is_damaged:
                log.warning("row %s is removed: %s", key.hex(), done.error)
                self._release(state, Remove(key), 0)
        elif found is None and self._forget > self._forget_at_start:
            # It may be one that was forgotten and would not go: nothing comes back this way.
            self._release(state, Remove(key), done.slab.slab_bytes)
        elif found is None:
            self._enter(state, done.slab, done.slab.head.meta.base_key)
            found = self._index.get(key)
            if found is not None and not self._make_room(state):
                self._remove(found)
        elif found.row.tier > state.number:
            self._release(state, Remove(key), done.slab.slab_bytes)

    # ---- rows

    def _enter(self, state: TierState, slab: Slab, made_from: bytes | None) -> bool:
        """Publish a linked slab and put it at the warm end of its tier.

        False where the index has no room for it; its file goes then.
        """
        meta = slab.head.meta
        row = Row(
            key=meta.key,
            block_key=meta.block_key,
            tail=meta.text_bytes % 1024,
            identity_tag=identity_tag(meta.model_fp, meta.ctx_params_hash),
            text_bytes=meta.text_bytes,
            slab_bytes=slab.slab_bytes,
            token_count=meta.token_count,
            tier=state.number,
            reason=meta.save_reason,
            flags=HEAD if meta.reason_detail == HEAD_DETAIL else 0,
        )
        is_full = self._index.get(row.key) is None and len(self._index) >= self._index.max_rows
        published = None
        if not is_full or self._evict_one(state):
            published = self._index.publish(row, self._least_used)
        if published is None:
            self._release(state, Remove(row.key), row.slab_bytes)
            return False
        entry = self._entry(row, slab, published)
        if published.evicted is not None:
            self._forget_row(published.evicted, keep_file=False)
        self._order.enter(published.slot, entry)
        state.used_bytes += row.slab_bytes
        state.rows += 1
        state.bytes_of[entry.tenant] = state.bytes_of.get(entry.tenant, 0) + row.slab_bytes
        self._descend(published.slot, row.text_bytes, made_from)
        if (before := published.replaced) is not None:
            self._order.succeed(published.slot, before.slot)
            # A row that replaces its like lies under the same name.
            self._forget_row(before, keep_file=before.row.tier == row.tier)
        if entry.flags & PINNED and not slab.is_pinned:
            state.lane.submit(SetPin(row.key, True))
        return True

    def _entry(self, row: Row, slab: Slab, published: Published) -> Entry:
        """What eviction has to know; a row that replaces another of its key inherits its uses."""
        meta, now_s = slab.head.meta, self._now.unix_s
        # A file may say anything of its times; the future is not believed.
        speed = self._measured.get((row.identity_tag, row.tier), Measured()).speed
        uses, used_unix_s = meta.hit_count, min(meta.last_used_unix_s, now_s)
        if (before := published.replaced) is not None:
            uses = max(uses, self._order.hits[before.slot])
            used_unix_s = max(used_unix_s, self._order.used_unix_s[before.slot])
        return Entry(
            tier=row.tier,
            tokens=row.token_count,
            gain_ms_per_byte=gain_ms_per_byte(row.token_count, row.slab_bytes, speed),
            made_unix_s=min(meta.created_unix_s, now_s),
            used_unix_s=used_unix_s,
            uses=uses,
            flags=row.flags | self._pin_flag(slab, published.replaced),
            tenant=self._tenant(meta.tenant_hash),
        )

    def _pin_flag(self, slab: Slab, before: Found | None) -> int:
        """A pin is the slab's own, or that of the row whose place it takes."""
        if slab.is_pinned:
            return PINNED
        return self._order.flags[before.slot] & PINNED if before is not None else 0

    def _descend(self, slot: int, text_bytes: int, made_from: bytes | None) -> None:
        """Note the row that it was made from."""
        above = self._index.get(made_from) if made_from is not None else None
        if above is not None and above.row.text_bytes < text_bytes:
            self._order.descend(slot, above.slot)

    def _has_room(self, state: TierState, tenant: bytes | None) -> bool:
        """Whether what has just been charged fits: on its way, and where it goes."""
        staged_bytes = self._reservations.charged_bytes(state.number) if state.staging_bytes else 0
        return staged_bytes <= state.staging_bytes and self._make_room(state, self._tenant(tenant))

    def _make_room(self, state: TierState, tenant: int | None = None) -> bool:
        """Evict until the tier is within its budgets; nothing if that cannot be. tenant: who needs it."""
        victims, is_enough = self._victims(state, tenant)
        if is_enough:
            self._evict(victims)
        return is_enough

    def _victims(self, state: TierState, tenant: int | None = None) -> tuple[list[Found], bool]:
        """The first rows to leave that may, as many as are needed, and whether that is enough."""
        short_bytes, short_rows = -self._free_bytes(state), self._rows_over(state)
        victims: list[Found] = []
        if short_bytes <= 0 and short_rows <= 0:
            return victims, True
        protected = self._protected()
        for slot in self._in_turn(state, tenant):
            if slot not in protected and (found := self._index.at(slot)) is not None:
                victims.append(found)
                short_bytes -= found.row.slab_bytes
                if short_bytes <= 0 and len(victims) >= short_rows:
                    return victims, True
        return victims, False

    def _in_turn(self, state: TierState, tenant: int | None) -> Iterator[int]:
        """Who leaves for a tenant: its own rows where it is over its share, else first of those who are over.

        Whoever is alone in a tier has no share to keep to.
        """
        now_s = self._now.unix_s
        if tenant is None or self._rules.tenant_share >= 1:
            return self._order.leaving(state.number, now_s)
        share_bytes = int(self._rules.tenant_share * state.budget_bytes)
        held = self._held_by_tenant(state)
        if len(held) > 1 and held.get(tenant, 0) > share_bytes:
            return self._order.leaving(state.number, now_s, tenant)
        over = sorted((share_bytes - size, other) for other, size in held.items() if size > share_bytes)
        return self._over_first(state, {other: -less for less, other in over})

    def _over_first(self, state: TierState, over: Mapping[int, int]) -> Iterator[int]:
        """Rows of tenants that hold so many bytes too many, until they do not, and then all others."""
        named = set()
        for tenant, excess in over.items():
            excess_bytes = excess
            for slot in self._order.leaving(state.number, self._now.unix_s, tenant):
                if excess_bytes <= 0:
                    break
                if (found := self._index.at(slot)) is not None:
                    excess_bytes -= found.row.slab_bytes
                    named.add(slot)
                    yield slot
        for slot in self._order.leaving(state.number, self._now.unix_s):
            if slot not in named:
                yield slot

    def _held_by_tenant(self, state: TierState) -> dict[int, int]:
        """Bytes of each tenant's rows and saves in flight."""
        held = dict(state.bytes_of)
        for reservation in self._reservations:
            if reservation.plan.tier is state.number:
                tenant = self._tenant(reservation.plan.tenant)
                held[tenant] = held.get(tenant, 0) + reservation.charged_bytes
        return held

    def _tenant(self, tenant_hash: bytes | None) -> int:
        """A tenant's number, for as long as this coordinator runs."""
        return self._tenants.setdefault(tenant_hash, len(self._tenants))

    def _is_admitted(self, plan: Plan, made_from: bytes | None) -> bool:
        """Whether a row may go to disk: it was asked for before, or goes on from one that is no head."""
        if self._asked is None:
            return True
        base = self._index.get(made_from) if made_from is not None else None
        goes_on = base is not None and not base.row.flags & HEAD
        return goes_on or (plan.key is not None and self._asked.again(plan.key))

    def _rows_over(self, state: TierState) -> int:
        """How many rows a tier has too many, those that are being saved included."""
        if state.max_rows is None:
            return 0
        in_flight = sum(held.plan.tier is state.number for held in self._reservations)
        return state.rows + in_flight - state.max_rows

    def _evict(self, victims: list[Found]) -> None:
        for found in victims:
            self._count("evictions")
            if self._rules.spill_on_evict and found.row.tier != Tier.DISK:
                self._count("unspilled", found.row.key not in self._spilling())
            self._remove(found)

    def _free_bytes(self, state: TierState) -> int:
        """What the budget leaves once all that leaves is gone; negative when it is exceeded (I1)."""
        free_bytes = state.budget_bytes - state.used_bytes - self._reservations.charged_bytes(state.number)
        free_bytes -= sum(size_bytes for _, size_bytes in state.aside)
        return free_bytes if state.staging_bytes else free_bytes - self._unreserved_bytes()

    def _unreserved_bytes(self) -> int:
        """Bytes in /dev/shm that workers hold for reservations of a coordinator before us."""
        charged: dict[int, int] = {}
        for reservation in self._reservations:
            charged[reservation.client] = charged.get(reservation.client, 0) + reservation.charged_bytes
        return sum(
            max(self._held_before.get(client, 0), size - charged.get(client, 0))
            for client, size in self._held.items()
        )

    def _look_at_held(self) -> None:
        """All that workers hold is of a coordinator before us."""
        self._note_held()
        self._held_before = dict(self._held)

    def _note_held(self, gone: int | None = None) -> None:
        """What workers, but for one that is gone, hold without a name just now.

        A worker states one sum. What it held when we came counts beside what we have granted since, until
        the sum has fallen below it, which it does between two requests. What it states no more it has
        freed, or named: then nobody was charged for it, and it is adopted before anything is granted.
        """
        self._held = {client: size for client, size in self._unnamed_bytes().items() if client != gone}
        before = {client: min(size, self._held.get(client, 0)) for client, size in self._held_before.items()}
        has_fallen = before != self._held_before
        self._held_before = {client: size for client, size in before.items() if size}
        if has_fallen:
            self._adopt_orphans()

    def _protected(self) -> set[int]:
        """Slots of all rows that a live reservation extends, and of their ancestors (I3)."""
        slots: set[int] = set()
        for reservation in self._reservations:
            found = self._index.get(reservation.base) if reservation.base is not None else None
            if found is not None and found.slot not in slots:
                slots.add(found.slot)
                slots.update(self._order.ancestors(found.slot))
        return slots

    def _evict_one(self, state: TierState) -> bool:
        """Make place for one more row: the coldest of this tier that may leave, else of any tier."""
        protected = self._protected()
        for tier in (state, *self._tiers.values()):
            for slot in self._order.leaving(tier.number, self._now.unix_s):
                if slot not in protected and (found := self._index.at(slot)) is not None:
                    self._evict([found])
                    return True
        return False

    def _least_used(self, slots: Sequence[int]) -> int:
        """Which of a full bucket's slots leaves: the one without use the longest, if it may."""
        protected = self._protected()

        def reluctance(slot: int) -> tuple[bool, bool, int]:
            is_pinned = bool(self._order.flags[slot] & PINNED)
            return slot in protected, is_pinned, self._order.used_unix_s[slot]

        return min(slots, key=reluctance)

    def _remove(self, found: Found) -> None:
        self._index.remove(found.row.key)
        self._forget_row(found, keep_file=False)

    def _forget_row(self, found: Found, *, keep_file: bool) -> None:
        """A row has left the index: its place, its bytes and its file go too."""
        tenant = self._order.tenant[found.slot]
        self._order.leave(found.slot)
        self._used_since_stored.discard(found.slot)
        state = self._tiers[Tier(found.row.tier)]
        state.used_bytes -= found.row.slab_bytes
        state.rows -= 1
        state.bytes_of[tenant] -= found.row.slab_bytes
        if not state.bytes_of[tenant]:
            del state.bytes_of[tenant]
        if not keep_file:
            self._release(state, Remove(found.row.key), found.row.slab_bytes)

    def _release(self, state: TierState, job: Remove | SetAside | RemoveAside, slab_bytes: int) -> None:
        """Have a slab lose its name; its bytes count until that is done."""
        state.leaving.append((job.key, slab_bytes))
        state.leaving_bytes += slab_bytes
        state.removals += 1
        state.lane.submit(job)

    def _is_leaving(self, state: TierState, key: bytes) -> bool:
        return any(key == leaving for leaving, _ in state.leaving)

    def _set_aside(self, state: TierState, row: Row) -> None:
        state.aside = [(key, size_bytes) for key, size_bytes in state.aside if key != row.key]
        state.aside.append((row.key, row.slab_bytes))
        self._release(state, SetAside(row.key), row.slab_bytes)
        self._bound_aside(state)

    def _bound_aside(self, state: TierState) -> None:
        """The oldest go where there are too many, or too large ones."""
        bound_bytes = state.budget_bytes // _ASIDE_SHARE
        while len(state.aside) > _ASIDE_SLABS or sum(size for _, size in state.aside) > bound_bytes:
            key, size_bytes = state.aside.pop(0)
            log.warning("row %s, which was set aside, is removed: there is no room for it", key.hex())
            self._release(state, RemoveAside(key), size_bytes)

    def _removed(self, state: TierState, done: Done) -> None:
        """The oldest removal has ended; who waited for it is answered."""
        key, slab_bytes = state.leaving.popleft()
        state.leaving_bytes -= slab_bytes
        state.removals_ended += 1
        if isinstance(done.job, SetAside) and done.error:
            # Under its old name it would be taken for a row again.
            state.aside = [(other, size) for other, size in state.aside if other != key]
            self._release(state, Remove(key), slab_bytes)
        for forgetting in self._forgetting:
            forgetting.failed += bool(done.error) and key in forgetting.keys
        self._answer_forgetting()
        while state.deferred and state.deferred[0][0] <= state.removals_ended:
            self._reply_if_parked(state.deferred.pop(0)[1])

    # ---- replies

    def _answer(self, request: AnyRequest, body: AnyReply) -> None:
        if request.mailbox != NO_MAILBOX:
            self._replies.append(Reply(request.client, request.mailbox, request.request, body))

    def _answer_when_room(self, request: Reserve | Extend, body: Reserved, state: TierState | None) -> None:
        """A grant in memory waits until what left for it is gone (I1); all other answers go at once."""
        granted = any(verdict.kind == "granted" for verdict in body.verdicts)
        if state is None or state.staging_bytes or not state.leaving or not granted:
            self._answer(request, body)
        elif request.mailbox != NO_MAILBOX:
            self._parked[request.client, request.mailbox] = request.request
            reply = Reply(request.client, request.mailbox, request.request, body)
            state.deferred.append((state.removals, reply))

    def _wait_for(self, request: Await | Written | Pin, what: bytes | int) -> None:
        """Park a request until a key or a token has its outcome."""
        if request.mailbox != NO_MAILBOX:
            place = (request.client, request.mailbox)
            waiting = self._waiters.setdefault(what, [])
            # Who has gone on to ask something else is forgotten here, however long the save takes.
            waiting[:] = [(other, asked) for other, asked in waiting if self._parked.get(other) == asked]
            waiting.append((place, request.request))
            self._parked[place] = request.request

    def _forget_waiters(self) -> None:
        """Nobody may ever save what was waited for unannounced; who waits no more is not kept."""
        for what, waiting in list(self._waiters.items()):
            if all(self._parked.get(place) != asked for place, asked in waiting):
                del self._waiters[what]

    def _wake(self, what: bytes | int, outcome: Outcome | Pinned) -> None:
        """Answer all who wait for a key, a token or a pin."""
        for (client, mailbox), request in self._waiters.pop(what, []):
            self._reply_if_parked(Reply(client, mailbox, request, outcome))

    def _reply_if_parked(self, reply: Reply) -> None:
        """A mailbox that has asked something new gets nothing more for its old question."""
        place = (reply.client, reply.mailbox)
        if self._parked.get(place) == reply.request:
            del self._parked[place]
            self._replies.append(reply)

    def _take_replies(self) -> list[Reply]:
        replies, self._replies = self._replies, []
        return replies

    def _count(self, name: str, by: int = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + by


def _pin_of(key: bytes) -> bytes:
    """What those wait for who pin a row; no key is as long."""
    return b"pin " + key
