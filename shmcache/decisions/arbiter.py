"""Who decides first, who waits, and when does everybody see it? The coordinator's half of decisions.

    Claim ─► granted | present | held          all keys of a call, or none
    Add ─► pending ─► committed ─► in the table ─► acknowledged
             │ a second add of the key waits for that commit, and gets its value
    Delete, Clear ─► out of the table ─► committed ─► acknowledged; claims on the keys end

Owner: one per namespace; everything here runs on the thread of the server's loop.
Readers: nobody; workers read the table.
Invariants
    I1  The first decision wins: a key that lives in the table or is pending keeps its value.
    I2  What is not committed is seen by nobody (with durability `memory`: it is seen at once).
    I3  What leaves the table leaves the database by the next tick, or with GONE_TOGETHER others before, so
        max_rows bounds both, and a miss never asks the disk. What somebody deletes leaves before the answer.
    I4  A waiter of a key gets one answer: when the key is decided, released, overtaken or deleted.
    I5  handle() has no clock of its own: time is an argument. A life ends at a boot-time instant that is
        fixed when it is added; Unix time is for the database and for people.
    I6  An add under a claim that has ended, or under an older clear number, goes back to its caller.
Leans on: one thread, and a committer that reports batches in their order.
Leaves out: how messages come and go, who lives (server, service); what a value means (codec).
"""

from __future__ import annotations

import random
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec
from crc32c import crc32c

from shmcache import protocol
from shmcache.claims import Claim, Claims, Event, State
from shmcache.coordinator import Reply
from shmcache.decisions.db import Batch, Durability
from shmcache.decisions.table import KEY_BYTES, Record, TableWriter, ended, has_units, shown_s
from shmcache.lru import UseOrder
from shmcache.protocol import (
    NO_MAILBOX,
    Add,
    Added,
    AddVerdict,
    AnyReply,
    AwaitClaims,
    Claimed,
    Clear,
    DecisionRequest,
    Delete,
    Deleted,
    Free,
    Item,
    Prune,
    Release,
    Renew,
    Request,
    Stale,
    decode_items,
)
from shmcache.slots import Entry, slot_of

CLOCK_SLACK_MS = 60_000
"""A record that was written more than this in the future is of a clock that was wrong: expired."""

GONE_TOGETHER = 64
"""When so many have left the table the next commit takes them out of the database; fewer, the tick (I3)."""

DURABILITY_NUMBER: dict[Durability, int] = {"memory": 0, "commit": 1, "full": 2}
_SLOTS_A_TICK = 512
_VERDICT_STATS: dict[AddVerdict, str] = {
    "stored": "stored",
    "held": "held",
    "failed": "failed",
    "ended": "refused_ended",
    "too_large": "refused_too_large",
}
_LIST = 0


class Now(msgspec.Struct, frozen=True):
    """The time by both clocks, passed in."""

    unix_ms: int
    boot_ns: int


class _Adding(msgspec.Struct):
    """An Add that waits for commits. reply is None where none is wanted."""

    reply: Reply | None
    verdicts: list[AddVerdict]
    left: int


class _Pending(msgspec.Struct):
    """A key that is being committed; those who added it and wait, the first one first.

    is_new: the table had no entry of this key, and gets none before this one.
    """

    record: Record
    ends_ns: int
    is_new: bool
    is_deleted: bool = False
    waiters: list[tuple[_Adding, int]] = []


class Commits(Protocol):
    """How batches are committed, in their order (db.Committer)."""

    def submit(self, batch: Batch) -> None:
        """Have it committed; committed() tells when."""

    def commit_at_once(self, batch: Batch) -> str | None:
        """Commit it now: why that failed, or nothing; None where it is to be submitted instead."""


class Arbiter:
    """Table, order of use, claims and commits of one namespace's decisions."""

    def __init__(
        self,
        table: TableWriter,
        clear: int,
        durability: Durability,
        commits: Commits | None,
        set_clear: Callable[[int], None],
    ) -> None:
        """Nothing is loaded yet.

        Args:
            table: an empty table.
            clear: the control page's clear number.
            durability: memory acknowledges before the commit.
            commits: None where there is no database.
            set_clear: writes the control page's clear number.
        """
        self._table = table
        self._epoch = table.epoch
        self._clear = clear
        self._waits_for_commit = durability != "memory" and commits is not None
        self._commits = commits
        self._set_clear = set_clear
        self._claims = Claims()
        self._order = UseOrder(table.slots, 1)
        self._pending: dict[bytes, _Pending] = {}
        self._committing: dict[int, tuple[list[bytes], Reply | None]] = {}
        self._numbers = 0
        self._sequence = 0
        self._records: list[Record] = []
        self._gone: list[int] = []
        # By slot, the record that keeps its decision.
        self._sequences = array("Q", [0]) * table.slots
        self._waiters: dict[bytes, list[Reply]] = {}
        # Mailboxes whose request has no answer yet; one that asks anew is not written to for the old one.
        self._parked: dict[tuple[int, int], int] = {}
        self._replies: list[Reply] = []
        # Since the last replies.
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._swept = 0
        table.set_stat("max_rows", table.max_rows)
        table.set_stat("durability", DURABILITY_NUMBER[durability] if commits is not None else 0)
        table.set_stat("is_down", commits is None)

    # ---- messages

    def handle(self, request: DecisionRequest, outbox: Callable[[int, int], bytes], now: Now) -> list[Reply]:
        """Answer one message; `outbox` copies from its sender's page. Never raises for what it may hold."""
        if request.epoch != self._epoch:
            self._answer(request, Stale(self._epoch))
        elif isinstance(request, Add):
            self._add(request, outbox, now)
        else:
            match request:
                case protocol.Claim():
                    self._answer(request, self._claim(request, now))
                case AwaitClaims():
                    self._await(request)
                case Release():
                    if (claim := self._claims.by_token(request.claim)) is not None:
                        self._let_go(claim, request.client)
                case Renew():
                    self._answer(request, self._renew(request, now))
                case Delete():
                    self._delete(request)
                case Clear():
                    self._forget_all(request)
                case Prune():
                    self._answer(request, Deleted(sum(self._expire(entry, now) for entry in self._entries())))
            self._commit()
        return self._take_replies()

    def _claim(self, request: protocol.Claim, now: Now) -> Claimed:
        first = self._claims.by_key(request.keys[0]) if request.keys else None
        if first is not None and first.client == request.client and first.held == request.keys:
            return Claimed("granted", first.token)
        if any(self._living(key, now) is not None for key in request.keys):
            return Claimed("present")
        for key in request.keys:
            holder = self._claims.by_key(key)
            if holder is not None and holder.is_overdue(now.boot_ns):
                self._overtake(holder)
        if self._claims.is_held(request.keys) or any(key in self._pending for key in request.keys):
            self._count("claims_held")
            return Claimed("held")
        claim = Claim(
            token=random.getrandbits(63),
            client=request.client,
            asked=request.request,
            since_ns=now.boot_ns,
            limit_ns=request.limit_ms * 1_000_000,
            keys=dict.fromkeys(request.keys, State.HELD),
        )
        self._claims.open(claim)
        self._count("claims")
        return Claimed("granted", claim.token)

    def _await(self, request: AwaitClaims) -> None:
        """Looks first: the claim may have ended before the question came."""
        busy = [key for key in request.keys if self._claims.by_key(key) or key in self._pending]
        if not busy:
            self._answer(request, Free())
        elif (reply := self._park(request, Free())) is not None:
            self._waiters.setdefault(busy[0], []).append(reply)

    def _add(self, request: Add, outbox: Callable[[int, int], bytes], now: Now) -> None:
        """Judge each item, commit what is new, then publish it: at once, or when the committer says so."""
        items = self._items(request, outbox)
        verdicts: list[AddVerdict] = ["failed"] * len(items)
        undecided: list[tuple[int, bytes]] = []  # position, and a key that is new or pending
        new: dict[bytes, _Pending] = {}
        entry_of, pending, boot_ns = self._table.entry, self._pending, now.boot_ns
        for position, item in enumerate(items):
            key = item.key
            entry = entry_of(key)
            if entry is not None and not ended(entry, boot_ns):
                verdicts[position] = "held"  # also of an ended claim: somebody else's decision ended it
            elif request.clear < self._clear or (request.claim and not self._holds(request.claim, key)):
                verdicts[position] = "ended"
            elif key in pending or key in new:
                undecided.append((position, key))
            elif self._table.could_fit(item.value):
                undecided.append((position, key))
                new[key] = _Pending(*self._record(key, item.value, item.ttl_ms, now), entry is None)
            else:
                verdicts[position] = "too_large"
        self._counts["adds"] += len(items)
        why = self._commit_new(new) if undecided else ""
        if why is None:
            self._wait_for_commits(request, verdicts, undecided)
            return
        outcomes = {key: self._conclude(one, why, now) for key, one in new.items()}
        for position, key in undecided:
            verdicts[position] = outcomes[key]
            if outcomes[key] == "stored":
                outcomes[key] = "held"  # to whoever named it a second time
        for verdict in verdicts:
            self._counts[_VERDICT_STATS[verdict]] += 1
        self._answer(request, Added(verdicts))
        if self._records:
            self._commit()  # with durability `memory`

    def _commit_new(self, new: dict[bytes, _Pending]) -> str | None:
        """Why the records of now could not be committed, or nothing; None where that has to be waited for."""
        if not self._waits_for_commit or self._commits is None:
            return ""
        if new:
            # What had to leave for others waits for company: with a deletion a commit takes twice the time.
            batch = self._take_batch(with_gone=len(self._gone) >= GONE_TOGETHER)
            why = self._commits.commit_at_once(batch) if not self._pending else None
            if why is not None:
                self._note_commit(batch, why)
                return why
            self._pending.update(new)
            self._give(batch, list(new))
        return None

    def _wait_for_commits(
        self, request: Add, verdicts: list[AddVerdict], undecided: list[tuple[int, bytes]]
    ) -> None:
        adding = _Adding(self._park(request, Added(verdicts)), verdicts, len(verdicts))
        waiting = dict(undecided)
        for position, verdict in enumerate(verdicts):
            if (key := waiting.get(position)) is not None:
                self._pending[key].waiters.append((adding, position))
            else:
                self._settle(adding, position, verdict)

    def _items(self, request: Add, outbox: Callable[[int, int], bytes]) -> Sequence[Item]:
        """The items here, or a copy of those in the sender's page; none if they are not what was said."""
        if (where := request.outbox) is None:
            return request.items
        content = outbox(where.offset, where.length)
        if len(content) != where.length or crc32c(content) != where.crc32c:
            return []
        try:
            return decode_items(content)
        except msgspec.MsgspecError:
            return []

    def _renew(self, request: Renew, now: Now) -> Deleted:
        entry = self._living(request.key, now)
        if entry is None:
            return Deleted(0)
        if request.ttl_ms == 0:
            self._remove(entry)
            return Deleted(1)
        decision = self._table.decision(entry)
        assert decision is not None
        self._publish(*self._record(request.key, decision.value, request.ttl_ms, now), now, entry)
        return Deleted(0)

    def _delete(self, request: Delete) -> None:
        """Out of the table, and nothing that is computed or committed for these keys comes back."""
        count = 0
        for key in request.keys:
            if (claim := self._claims.by_key(key)) is not None:
                self._advance(claim, key, Event.DELETED)
            if (pending := self._pending.get(key)) is not None and not pending.is_deleted:
                pending.is_deleted = True
                self._gone.append(pending.record.sequence)
            if (entry := self._table.entry(key)) is not None:
                self._remove(entry)
                count += 1
        self._count("deleted", count)
        self._answer_when_committed(request, Deleted(count))

    def _forget_all(self, request: Clear) -> None:
        self._clear += 1
        self._set_clear(self._clear)
        for pending in self._pending.values():
            pending.is_deleted = True
        for claim in self._claims.all():
            for key in claim.held:
                self._advance(claim, key, Event.DELETED)
        count = 0
        for entry in list(self._table.entries()):
            self._remove(entry)
            count += 1
        self._count("deleted", count)
        self._records.clear()
        self._gone.clear()
        self._commit_batch(forget_all=True, answer=self._park(request, Deleted(count)))

    # ---- the shell's events

    def load(self, records: Sequence[Record], now: Now) -> int:
        """At start: everything that lives still, in the order in which it came; returns how many."""
        for record in records:
            self._sequence = max(self._sequence, record.sequence)
            ends_ns = _ends_ns(record, now)
            if ends_ns is None or len(record.key) != KEY_BYTES:
                self._gone.append(record.sequence)
                continue
            self._publish(record, ends_ns, now, self._table.entry(record.key))
        self._table.set_stat("loaded", len(self._table))
        self._commit()
        return len(self._table)

    def committed(self, batch: Batch, why: str, now: Now) -> list[Reply]:
        """A batch is on the disk, or failed: publish, then acknowledge (I2).

        What leaves the table for it leaves the database with the next batch; so does what should have left
        with one that failed.
        """
        keys, answer = self._committing.pop(batch.number)
        self._note_commit(batch, why)
        for key in keys:
            pending = self._pending.pop(key)
            verdict = self._conclude(pending, why, now)
            for adding, position in pending.waiters:
                self._settle(adding, position, verdict)
                if verdict == "stored":
                    verdict = "held"  # to everybody but the first
            if key in self._waiters:
                self._wake(key)
        self._reply_if_parked(answer)
        return self._take_replies()

    def client_gone(self, client: int) -> list[Reply]:
        """The worker's lock is free: others may compute what it had claimed, at once."""
        for claim in self._claims.of_client(client):
            self._let_go(claim, client)
        for place in [place for place in self._parked if place[0] == client]:
            del self._parked[place]
        return self._take_replies()

    def cancel(self, client: int, asked: int) -> list[Reply]:
        """The answer to this request was not waited for: what it granted is given back."""
        for claim in self._claims.of_client(client):
            if claim.asked == asked:
                self._let_go(claim, client)
        return self._take_replies()

    def unpark(self, client: int, mailbox: int) -> None:
        """A mailbox asks something new: nothing more is written there for what it asked before."""
        self._parked.pop((client, mailbox), None)

    def touches(self, touch_words: Sequence[int], now: Now) -> None:
        """Entries that a worker has read, by their words, oldest first; one that is gone is dropped."""
        for word in touch_words:
            slot = slot_of(word)
            entry = self._table.at(slot)
            if entry is not None and entry[2] == word:
                self._order.warm(slot, _LIST)
                self._order.used_unix_s[slot] = shown_s(now.unix_ms)

    def tick(self, now: Now) -> list[Reply]:
        """Overtake the stuck whom somebody waits for, and remove some of what has expired."""
        for claim in self._claims.overdue(now.boot_ns):
            if any(key in self._waiters for key in claim.held):
                self._overtake(claim)
        for slot in range(self._swept, min(self._swept + _SLOTS_A_TICK, self._table.slots)):
            if (entry := self._table.at(slot)) is not None:
                self._expire(entry, now)
        self._swept = (self._swept + _SLOTS_A_TICK) % (self._table.slots + _SLOTS_A_TICK)
        self._table.set_stat("claims_in_flight", self._claims.statistics().in_flight)
        self._commit()
        return self._take_replies()

    # ---- deciding

    def _conclude(self, pending: _Pending, why: str, now: Now) -> AddVerdict:
        """Its commit has ended: into the table, unless it failed or was deleted meanwhile."""
        if why:
            return "failed"
        if pending.is_deleted:
            return "ended"
        replaced = None if pending.is_new else self._table.entry(pending.record.key)
        is_stored = self._publish(pending.record, pending.ends_ns, now, replaced)
        return "stored" if is_stored else "too_large"

    def _publish(self, record: Record, ends_ns: int, now: Now, replaced: Entry | None) -> bool:
        """Into the table, for which others may leave; where there is no room at all, its record goes.

        replaced: the entry that the key has.
        """
        table, key = self._table, record.key
        while replaced is None and table.is_full:
            self._evict(next(self._order.coldest(_LIST)))
        while (slot := table.free_slot(key)) < 0:
            kept = replaced[1] if replaced is not None else -1
            others = [other for other in table.choices(key) if other != kept]
            self._evict(min(others, key=self._order.used_unix_s.__getitem__))
        if not table.fits(record.value) and not self._make_units(record):
            return False
        table.put(slot, record, ends_ns, replaced)
        if replaced is not None:
            self._order.remove(replaced[1])
            self._gone.append(self._sequences[replaced[1]])
        self._sequences[slot] = record.sequence
        self._order.add(slot, _LIST, shown_s(now.unix_ms))
        if (claim := self._claims.by_key(key)) is not None:
            self._advance(claim, key, Event.DECIDED)
        return True

    def _make_units(self, record: Record) -> bool:
        """Larger values leave for a larger value; where none is left, its own record goes."""
        while not self._table.fits(record.value):
            victim = self._coldest_with_units(record.key)
            if victim is None:
                self._gone.append(record.sequence)
                return False
            self._evict(victim)
        return True

    def _coldest_with_units(self, but: bytes) -> int | None:
        for slot in self._order.coldest(_LIST):
            entry = self._table.at(slot)
            if entry is not None and has_units(entry) and entry[0][8:24] != but:
                return slot
        return None

    def _evict(self, slot: int) -> None:
        entry = self._table.at(slot)
        assert entry is not None, f"slot {slot} is in the order of use and not in the table"
        self._remove(entry)
        self._count("evicted")

    def _expire(self, entry: Entry, now: Now) -> bool:
        if not ended(entry, now.boot_ns):
            return False
        self._remove(entry)
        self._count("expired")
        return True

    def _remove(self, entry: Entry) -> None:
        self._order.remove(entry[1])
        self._gone.append(self._sequences[entry[1]])
        self._table.remove(entry)

    def _living(self, key: bytes, now: Now) -> Entry | None:
        entry = self._table.entry(key)
        return None if entry is None or ended(entry, now.boot_ns) else entry

    def _entries(self) -> Iterator[Entry]:
        return iter(list(self._table.entries()))

    # ---- claims and waiters

    def _holds(self, token: int, key: bytes) -> bool:
        holder = self._claims.by_key(key)
        return holder is not None and holder.token == token

    def _let_go(self, claim: Claim, client: int) -> None:
        """What the owner will not decide any more; only the owner may say so."""
        if claim.client == client:
            for key in claim.held:
                self._advance(claim, key, Event.RELEASED)

    def _overtake(self, claim: Claim) -> None:
        self._count("claims_overtaken")
        for key in claim.held:
            self._advance(claim, key, Event.OVERTAKEN)

    def _advance(self, claim: Claim, key: bytes, event: Event) -> None:
        self._claims.advance(claim, key, event)
        self._wake(key)

    def _wake(self, key: bytes) -> None:
        """Everybody who waits for this key looks again (I4)."""
        for reply in self._waiters.pop(key, ()):
            self._reply_if_parked(reply)

    # ---- commits

    def _record(self, key: bytes, value: bytes, ttl_ms: int | None, now: Now) -> tuple[Record, int]:
        """A decision that begins to live now, in the database with the next commit; and when it ends (I5)."""
        self._sequence += 1
        expires_ms = None if ttl_ms is None else now.unix_ms + ttl_ms
        record = Record(self._sequence, key, value, now.unix_ms, expires_ms)
        self._records.append(record)
        return record, 0 if ttl_ms is None else now.boot_ns + ttl_ms * 1_000_000

    def _commit(self) -> None:
        if self._records or self._gone:
            self._commit_batch()

    def _answer_when_committed(self, request: Request, body: AnyReply) -> None:
        self._commit_batch(answer=self._park(request, body))

    def _commit_batch(self, *, forget_all: bool = False, answer: Reply | None = None) -> None:
        """Everything that has changed since the last one, and nothing that anybody waits to see."""
        batch = self._take_batch(forget_all=forget_all)
        if not self._give(batch, [], answer):
            self._reply_if_parked(answer)

    def _take_batch(self, *, with_gone: bool = True, forget_all: bool = False) -> Batch:
        records, deleted = self._records, self._gone if with_gone else []
        self._records = []
        if deleted:
            self._gone = []
            # Deletions come before records: what came and went since the last commit is neither.
            gone = set(deleted)
            records, deleted = [record for record in records if record.sequence not in gone], sorted(gone)
        self._numbers += 1
        return Batch(self._numbers, records, deleted, forget_all)

    def _give(self, batch: Batch, keys: list[bytes], answer: Reply | None = None) -> bool:
        """To the committer, if any; with its end these pending keys are decided, and the answer goes."""
        if self._commits is None:
            return False
        self._committing[batch.number] = keys, answer
        self._commits.submit(batch)
        return True

    def _note_commit(self, batch: Batch, why: str) -> None:
        self._counts["commits"] += 1
        if why:
            self._gone.extend(batch.deleted)

    # ---- replies

    def _settle(self, adding: _Adding, position: int, verdict: AddVerdict) -> None:
        adding.verdicts[position] = verdict  # which are the reply's own
        adding.left -= 1
        self._counts[_VERDICT_STATS[verdict]] += 1
        if not adding.left:
            self._reply_if_parked(adding.reply)

    def _answer(self, request: Request, body: AnyReply) -> None:
        """Reply now; what the mailbox asked before is not answered any more."""
        if request.mailbox != NO_MAILBOX:
            self._parked.pop((request.client, request.mailbox), None)
            self._replies.append(Reply(request.client, request.mailbox, request.request, body))

    def _park(self, request: Request, body: AnyReply) -> Reply | None:
        """A reply that may have to wait; None where none is wanted."""
        if request.mailbox == NO_MAILBOX:
            return None
        self._parked[request.client, request.mailbox] = request.request
        return Reply(request.client, request.mailbox, request.request, body)

    def _reply_if_parked(self, reply: Reply | None) -> None:
        """Deliver, unless the mailbox has asked something else meanwhile."""
        if reply is not None and self._parked.get((reply.client, reply.mailbox)) == reply.request:
            del self._parked[reply.client, reply.mailbox]
            self._replies.append(reply)

    def _take_replies(self) -> list[Reply]:
        for name, count in self._counts.items():
            self._table.add_to_stat(name, count)
        self._counts.clear()
        replies, self._replies = self._replies, []
        return replies

    def _count(self, name: str, by: int = 1) -> None:
        self._counts[name] += by


def _ends_ns(record: Record, now: Now) -> int | None:
    """When a stored life ends, by a clock that may have been set since; 0: never, None: it has ended.

    Nothing lives longer than its ttl, and nothing that was written in the future lives.
    """
    if record.written_ms > now.unix_ms + CLOCK_SLACK_MS:
        return None
    if record.expires_ms is None:
        return 0
    rest_ms = min(record.expires_ms - now.unix_ms, record.expires_ms - record.written_ms)
    return now.boot_ns + rest_ms * 1_000_000 if rest_ms > 0 else None
