"""The coordinator's half, stepped: no process, no queue, no clock but the one that is passed in."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import pytest
from crc32c import crc32c

from shmcache import protocol
from shmcache.connection import Head
from shmcache.decisions import table
from shmcache.decisions.arbiter import GONE_TOGETHER, Arbiter, Now
from shmcache.decisions.db import Batch
from shmcache.decisions.table import Record, Ring, TableReader, TableWriter
from shmcache.protocol import (
    NO_MAILBOX,
    Add,
    Added,
    AwaitClaims,
    Claim,
    Claimed,
    Clear,
    Delete,
    Deleted,
    Free,
    Item,
    Outbox,
    Prune,
    Release,
    Renew,
    Stale,
)

A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))
ALICE, BOB = 1, 2
S = 1000


class World:
    """An arbiter, its table, and batches that wait to be committed."""

    def __init__(
        self,
        rows: int = 64,
        durability: Any = "commit",
        database: bool = True,
        units: int = 64,
        at_once: bool = False,
    ) -> None:
        size = table.segment_bytes(rows, units)
        self.raw = mmap.mmap(-1, size)
        self.table = TableWriter.create(memoryview(self.raw), rows, units, epoch=7)
        head, touches = (memoryview(bytearray(8 * size)).cast("Q") for size in (1, 16))
        self.reader = TableReader(memoryview(self.raw), Ring(head, touches))
        self._touches = touches
        self.batches: list[Batch] = []
        self.clear = 0
        self.now = Now(1_000_000, 5_000_000_000)
        self.at_once = at_once
        self.disk_is = ""  # why a commit fails
        self.arbiter = Arbiter(self.table, 0, durability, self if database else None, self._set_clear)
        self.records: dict[int, Record] = {}
        self._requests = 0

    def _set_clear(self, number: int) -> None:
        self.clear = number

    def send(self, kind: Any, client: int = ALICE, mailbox: int = 0, **fields: Any) -> list[Any]:
        """Replies as (client, body)."""
        self._requests += 1
        head = Head(epoch=fields.pop("epoch", 7), client=client, mailbox=mailbox, request=self._requests)
        outbox = fields.pop("content", b"")
        request = kind(**head, **fields)
        return self.said(
            self.arbiter.handle(request, lambda offset, length: outbox[offset:][:length], self.now)
        )

    def add(self, *items: tuple[bytes, bytes], client: int = ALICE, **fields: Any) -> list[Any]:
        ttl_ms = fields.pop("ttl_ms", None)
        wire = [Item(key, value, ttl_ms) for key, value in items]
        fields = {"clear": 0, "claim": 0, **fields}
        return self.send(Add, client, items=wire, **fields)

    def claim(self, *keys: bytes, client: int = ALICE, limit_ms: int = 300 * S, **fields: Any) -> Claimed:
        ((_, body),) = self.send(Claim, client, limit_ms=limit_ms, keys=list(keys), **fields)
        assert isinstance(body, Claimed)
        return body

    def commit(self, why: str = "") -> list[Any]:
        """All batches that wait, as the database would."""
        replies = []
        while self.batches:
            batch = self.batches.pop(0)
            if not why:
                self._write(batch)
            replies += self.said(self.arbiter.committed(batch, why, self.now))
        return replies

    def submit(self, batch: Batch) -> None:
        self.batches.append(batch)

    def commit_at_once(self, batch: Batch) -> str | None:
        if not self.at_once or self.batches:
            return None
        assert not any(self.value(record.key) for record in batch.records), "seen before it is committed"
        if not self.disk_is:
            self._write(batch)
        return self.disk_is

    def _write(self, batch: Batch) -> None:
        if batch.forget_all:
            self.records.clear()
        for sequence in batch.deleted:
            self.records.pop(sequence, None)
        self.records |= {record.sequence: record for record in batch.records}

    @property
    def rows(self) -> dict[bytes, bytes]:
        """What the database would load: of two records of a key the later one."""
        return {self.records[number].key: self.records[number].value for number in sorted(self.records)}

    def touch(self, key: bytes, *, former: bool = False) -> None:
        """A worker reads, and the coordinator drains its ring; or it is told of an entry long gone."""
        assert self.reader.get(key) is not None
        self.arbiter.touches([self._touches[0] ^ former << 40, former << 23], self.now)

    def later(self, s: float) -> None:
        self.now = Now(self.now.unix_ms + int(s * 1000), self.now.boot_ns + int(s * 1e9))

    def value(self, key: bytes) -> bytes | None:
        entry = self.table.entry(key)
        decision = self.table.decision(entry) if entry is not None else None
        return decision.value if decision is not None else None

    @staticmethod
    def said(replies: Sequence[Any]) -> list[Any]:
        return [(reply.client, reply.body) for reply in replies]


@pytest.fixture
def world() -> World:
    return World()


# ---- add


def test_nothing_is_seen_or_acknowledged_before_it_is_committed(world: World) -> None:
    assert world.add((A, b"1")) == []
    assert world.value(A) is None
    assert world.commit() == [(ALICE, Added(["stored"]))]
    assert world.value(A) == b"1"
    assert world.rows == {A: b"1"}


def test_a_second_add_waits_for_the_commit_of_the_first_and_gets_its_value(world: World) -> None:
    world.add((A, b"1"))
    assert world.add((A, b"2"), client=BOB) == []
    assert world.commit() == [(ALICE, Added(["stored"])), (BOB, Added(["held"]))]
    assert world.value(A) == b"1"
    assert world.add((A, b"3"), client=BOB) == [(BOB, Added(["held"]))]


def test_a_batch_is_answered_when_all_of_it_is_decided(world: World) -> None:
    world.add((A, b"1"))
    world.commit()
    assert world.add((A, b"x"), (B, b"2"), (C, b"3")) == []
    assert world.commit() == [(ALICE, Added(["held", "stored", "stored"]))]


def test_a_failed_commit_stores_nothing_and_the_next_add_may(world: World) -> None:
    world.add((A, b"1"))
    world.add((A, b"2"), client=BOB)
    assert world.commit("disk full") == [(ALICE, Added(["failed"])), (BOB, Added(["failed"]))]
    assert world.value(A) is None
    world.add((A, b"3"))
    world.commit()
    assert world.value(A) == b"3"


@pytest.mark.parametrize("options", [{"durability": "memory"}, {"database": False}])
def test_in_memory_a_decision_is_seen_and_acknowledged_at_once(options: dict[str, Any]) -> None:
    world = World(**options)
    assert world.add((A, b"1")) == [(ALICE, Added(["stored"]))]
    assert world.value(A) == b"1"
    assert world.reader.stats()["durability"] == 0
    world.commit()
    assert world.rows == ({A: b"1"} if "durability" in options else {})


def test_what_can_be_committed_at_once_is_answered_at_once_and_not_seen_before() -> None:
    world = World(at_once=True)
    assert world.add((A, b"1"), (B, b"2"), (A, b"3")) == [(ALICE, Added(["stored", "stored", "held"]))]
    assert world.add((A, b"4"), (C, b"5"), client=BOB) == [(BOB, Added(["held", "stored"]))]
    assert [world.value(key) for key in (A, B, C)] == [b"1", b"2", b"5"]
    assert world.rows == {A: b"1", B: b"2", C: b"5"}
    assert world.batches == []
    assert world.reader.stats()["commits"] == 2


def test_a_commit_at_once_that_fails_stores_nothing_and_the_next_add_may() -> None:
    world = World(at_once=True)
    claim = world.claim(A)
    world.disk_is = "full"
    assert world.add((A, b"1"), claim=claim.claim) == [(ALICE, Added(["failed"]))]
    assert (world.value(A), world.rows) == (None, {})
    world.disk_is = ""
    assert world.add((A, b"2"), claim=claim.claim) == [(ALICE, Added(["stored"]))]
    assert world.claim(A, client=BOB).kind == "present"


def test_while_others_wait_for_a_commit_nobody_is_committed_before_them(world: World) -> None:
    world.add((A, b"1"))
    world.at_once = True
    waiting, world.batches = world.batches, []
    assert world.add((B, b"2"), (A, b"x"), client=BOB) == []
    world.batches = waiting + world.batches
    assert world.commit() == [(ALICE, Added(["stored"])), (BOB, Added(["stored", "held"]))]
    assert world.rows == {A: b"1", B: b"2"}


def test_what_leaves_for_others_leaves_the_database_in_company_or_with_the_tick() -> None:
    world = World(rows=2, at_once=True)
    for number in range(GONE_TOGETHER + 3):
        world.add((bytes([number]) * 16, b"v"))
        assert len(world.table) <= 2
        assert len(world.records) <= 2 + GONE_TOGETHER
    assert len(world.records) < GONE_TOGETHER
    world.arbiter.tick(world.now)
    world.commit()
    assert len(world.records) == len(world.table) == 2


def test_items_in_the_outbox_are_copied_and_then_checked(world: World) -> None:
    content = protocol.encode([Item(A, b"x" * 5000, None)])
    where = Outbox(0, len(content), crc32c(content))
    for bad in (
        Outbox(1, len(content), where.crc32c),
        Outbox(0, len(content), 1),
        Outbox(0, 5, crc32c(content[:5])),
    ):
        assert world.add(outbox=bad, content=content) == [(ALICE, Added([]))]
    world.add(outbox=where, content=content)
    assert world.commit() == [(ALICE, Added(["stored"]))]
    assert world.value(A) == b"x" * 5000


def test_what_can_never_fit_is_refused_and_nobody_leaves_for_it(world: World) -> None:
    world.add((B, b"y" * 1000))
    world.commit()
    assert world.add((A, b"x" * 64 * 256 + b"x")) == [(ALICE, Added(["too_large"]))]
    assert world.value(B) == b"y" * 1000


def test_a_message_of_another_epoch_is_stale(world: World) -> None:
    assert world.add((A, b"1"), epoch=6) == [(ALICE, Stale(7))]


# ---- lives


def test_case_f05_a_life_ends_by_boot_time_whatever_the_wall_clock_says(world: World) -> None:
    world.add((A, b"1"), ttl_ms=10 * S)
    world.now = Now(world.now.unix_ms + 10 * 365 * 86_400 * S, world.now.boot_ns + 1)
    world.add((B, b"2"), ttl_ms=10 * S)
    world.commit()
    world.now = Now(1_000_000 - 3600 * S, world.now.boot_ns + 9_000_000_000)
    assert world.add((A, b"x")) == [(ALICE, Added(["held"]))]
    assert world.add((B, b"x")) == [(ALICE, Added(["held"]))]
    world.later(2)
    world.add((A, b"3"), (B, b"4"))
    assert world.commit() == [(ALICE, Added(["stored", "stored"]))]


def test_case_f05_at_load_the_rest_is_what_both_clocks_allow(world: World) -> None:
    now = world.now.unix_ms
    records = [
        Record(1, b"1" * 16, b"lives", now - 4 * S, now + 6 * S),
        Record(2, b"2" * 16, b"for ever", now - 9 * S, None),
        Record(3, b"3" * 16, b"over", now - 20 * S, now - 10 * S),
        Record(4, b"4" * 16, b"of 2030", now + 1000 * S, now + 1010 * S),
        Record(5, b"5" * 16, b"a small step", now + 30 * S, now + 40 * S),
        Record(6, b"6" * 16, b"of 2030, for ever", now + 1000 * S, None),
    ]
    assert world.arbiter.load(records, world.now) == 3
    assert [world.value(record.key) for record in records] == [
        b"lives",
        b"for ever",
        None,
        None,
        b"a small step",
        None,
    ]
    world.commit()
    world.later(9)
    world.send(Prune)
    assert world.value(b"1" * 16) is None
    assert world.value(b"5" * 16) == b"a small step", "never longer than its ttl of 10 s, nor cut by the step"
    world.later(2)
    world.send(Prune)
    assert world.value(b"5" * 16) is None


def test_renewing_moves_the_end_and_zero_removes(world: World) -> None:
    world.add((A, b"1"), ttl_ms=S)
    world.commit()
    world.send(Renew, mailbox=NO_MAILBOX, key=A, ttl_ms=60 * S)
    world.later(30)
    assert world.add((A, b"x")) == [(ALICE, Added(["held"]))]
    world.send(Renew, mailbox=NO_MAILBOX, key=A, ttl_ms=0)
    world.commit()
    assert world.value(A) is None
    assert world.rows == {}


def test_expired_decisions_leave_by_and_by_and_from_the_database_too(world: World) -> None:
    world.add((A, b"1"), ttl_ms=S)
    world.add((B, b"2"))
    world.commit()
    world.later(2)
    for _ in range(3):
        world.arbiter.tick(world.now)
    world.commit()
    assert (world.value(A), world.rows) == (None, {B: b"2"})
    assert world.send(Prune) == [(ALICE, Deleted(0))]


def test_what_should_have_left_with_a_failed_commit_leaves_with_the_next_tick(world: World) -> None:
    world.add((A, b"1"))
    world.commit()
    world.send(Delete, keys=[A])
    world.commit("disk full")
    assert set(world.rows) == {A}
    world.add((B, b"2"))
    world.commit()
    world.arbiter.tick(world.now)
    world.commit()
    assert set(world.rows) == {B}


# ---- the order of use


def test_the_least_recently_used_leaves_table_and_database() -> None:
    world = World(rows=2)
    world.add((A, b"1"))
    world.add((B, b"2"))
    world.commit()
    world.touch(A)
    world.add((C, b"3"))
    world.commit()
    world.arbiter.tick(world.now)
    world.commit()
    assert [world.value(key) for key in (A, B, C)] == [b"1", None, b"3"]
    assert set(world.rows) == {A, C}
    assert world.reader.stats()["evicted"] == 1


def test_a_touch_of_a_slot_s_former_entry_is_dropped(world: World) -> None:
    world.add((A, b"1"))
    world.commit()
    world.touch(A, former=True)


def test_large_values_leave_for_large_values(world: World) -> None:
    for number in range(10):
        world.add((bytes([number]) * 16, bytes([number]) * 16 * 256))
        world.commit()
    world.add((A, b"small"))
    world.commit()
    world.arbiter.tick(world.now)
    world.commit()
    assert world.reader.stats()["units_used"] == 64
    assert [number for number in range(10) if world.value(bytes([number]) * 16)] == [6, 7, 8, 9]
    assert len(world.table) == len(world.rows) == 5


@pytest.mark.parametrize("at_once", [False, True])
def test_a_table_that_churned_a_hundred_times_over_holds_what_the_database_holds(at_once: bool) -> None:
    world = World(rows=20, at_once=at_once)
    for number in range(2000):
        world.add((number.to_bytes(2) * 8, b"v" * (number % 400)), ttl_ms=None if number % 3 else 5 * S)
        if number % 7 == 0:
            world.send(Delete, keys=[(number - 3).to_bytes(2, signed=True) * 8])
        if number % 5 == 0:
            world.later(1)
            world.arbiter.tick(world.now)
        world.commit()
        assert len(world.table) <= 20
    world.arbiter.tick(world.now)
    world.commit()
    held = {entry[0][8:24]: world.value(entry[0][8:24]) for entry in world.table.entries()}
    assert held == world.rows
    assert len(world.records) == len(held)


# ---- claims


def test_a_call_claims_all_its_keys_or_none(world: World) -> None:
    first = world.claim(A, B)
    assert first.kind == "granted"
    assert world.claim(B, C, client=BOB) == Claimed("held")
    assert world.claim(C, client=BOB).kind == "granted"


def test_the_holder_s_second_claim_gets_the_first_one_s_answer(world: World) -> None:
    assert world.claim(A, B) == world.claim(A, B)


def test_what_is_decided_or_being_committed_is_not_claimed(world: World) -> None:
    world.add((A, b"1"))
    assert world.claim(A, client=BOB).kind == "held"
    world.commit()
    assert world.claim(A, client=BOB).kind == "present"


def test_waiters_are_woken_when_the_decision_can_be_read(world: World) -> None:
    claim = world.claim(A)
    assert world.send(AwaitClaims, BOB, keys=[A]) == []
    world.add((A, b"1"), claim=claim.claim)
    assert world.commit() == [(BOB, Free()), (ALICE, Added(["stored"]))]
    assert world.value(A) == b"1"
    assert world.send(AwaitClaims, BOB, keys=[A]) == [(BOB, Free())], "look first, then wait"


@pytest.mark.parametrize("how", ["release", "gone", "cancel", "delete", "clear"])
def test_a_claim_that_ends_wakes_its_waiters_at_once(world: World, how: str) -> None:
    claim = world.claim(A)
    world.send(AwaitClaims, BOB, keys=[A])
    match how:
        case "release":
            replies = world.send(Release, mailbox=NO_MAILBOX, claim=claim.claim)
        case "gone":
            replies = world.said(world.arbiter.client_gone(ALICE))
        case "cancel":
            replies = world.said(world.arbiter.cancel(ALICE, 1))
        case "delete":
            replies = world.send(Delete, mailbox=NO_MAILBOX, keys=[A])
        case _:
            replies = world.send(Clear, mailbox=NO_MAILBOX)
    assert (BOB, Free()) in replies
    assert world.claim(A, client=BOB).kind == "granted"


def test_only_the_owner_releases(world: World) -> None:
    claim = world.claim(A)
    world.send(Release, BOB, mailbox=NO_MAILBOX, claim=claim.claim)
    assert world.claim(A, client=BOB).kind == "held"


def test_a_stuck_owner_is_overtaken_when_somebody_waits_or_asks(world: World) -> None:
    stuck = world.claim(A, limit_ms=300 * S)
    world.send(AwaitClaims, BOB, keys=[A])
    world.later(299)
    assert world.arbiter.tick(world.now) == []
    world.later(2)
    assert world.said(world.arbiter.tick(world.now)) == [(BOB, Free())]
    taken = world.claim(A, client=BOB, limit_ms=S)
    assert world.add((A, b"late"), claim=stuck.claim) == [(ALICE, Added(["ended"]))]
    world.later(2)
    assert world.claim(A).kind == "granted", "asked for after its limit"
    assert world.add((A, b"later"), client=BOB, claim=taken.claim) == [(BOB, Added(["ended"]))]


def test_an_owner_that_nobody_waits_for_is_left_alone(world: World) -> None:
    slow = world.claim(A, limit_ms=S)
    world.later(60)
    world.arbiter.tick(world.now)
    world.add((A, b"1"), claim=slow.claim)
    assert world.commit() == [(ALICE, Added(["stored"]))]


def test_a_mailbox_that_asks_anew_is_not_written_to_for_what_it_asked_before(world: World) -> None:
    world.claim(A)
    world.send(AwaitClaims, BOB, keys=[A])
    world.send(AwaitClaims, BOB, keys=[A])
    assert world.said(world.arbiter.client_gone(ALICE)) == [(BOB, Free())]
    world.add((B, b"1"), client=BOB)
    world.arbiter.unpark(BOB, 0)
    assert world.commit() == []
    assert world.value(B) == b"1"


# ---- delete and clear


def test_what_is_computed_when_its_key_is_deleted_goes_back_to_its_caller(world: World) -> None:
    claim = world.claim(A, B)
    world.send(Delete, BOB, keys=[A])
    assert world.commit() == [(BOB, Deleted(0))]
    world.add((A, b"1"), (B, b"2"), claim=claim.claim)
    assert world.commit() == [(ALICE, Added(["ended", "stored"]))]
    assert (world.value(A), world.rows) == (None, {B: b"2"})


def test_an_owner_whose_key_somebody_else_has_decided_gets_the_first_decision(world: World) -> None:
    claim = world.claim(A)
    world.add((A, b"first"), client=BOB)  # without a claim: its coordinator did not answer in time
    assert world.commit() == [(BOB, Added(["stored"]))]
    assert world.add((A, b"second"), claim=claim.claim) == [(ALICE, Added(["held"]))]
    assert world.value(A) == b"first"


def test_a_decision_that_is_deleted_while_it_is_committed_does_not_appear(world: World) -> None:
    world.add((A, b"1"))
    world.send(Delete, BOB, keys=[A])
    assert world.commit() == [(ALICE, Added(["ended"])), (BOB, Deleted(0))]
    assert (world.value(A), world.rows) == (None, {})


def test_after_a_clear_nothing_of_before_is_stored(world: World) -> None:
    world.add((A, b"1"))
    world.commit()
    claim = world.claim(B)
    world.add((C, b"3"), client=BOB)
    assert world.send(Clear, mailbox=1) == []
    assert world.clear == 1
    assert world.add((B, b"2"), claim=claim.claim, clear=0) == [(ALICE, Added(["ended"]))]
    assert world.add((A, b"2"), clear=0) == [(ALICE, Added(["ended"]))]
    assert world.commit() == [(BOB, Added(["ended"])), (ALICE, Deleted(1))]
    assert (len(world.table), world.rows) == (0, {})
    world.add((A, b"new"), clear=1)
    world.commit()
    assert world.rows == {A: b"new"}
