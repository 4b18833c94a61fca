"""The single writer, pure: messages and a clock go in, replies come out; a real index and a real tier below.

Its lane is stepped by hand, so that every order of a tier's work and of messages can be tried.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from support import PAYLOAD_OFFSET, Namespace, identity, prompt, slab_file

from shmcache import index, shm
from shmcache.connection import Head
from shmcache.coordinator import Coordinator, Now, Reply, Rules, TierState
from shmcache.index import IndexWriter
from shmcache.key import PrefixWalk, row_address
from shmcache.kvc import HEAD_DETAIL
from shmcache.page import MAILBOXES
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
    Plan,
    Reserve,
    Reserved,
    Stale,
    Tier,
    Verdict,
    Written,
)
from shmcache.reservation import State
from shmcache.tiers import base
from shmcache.tiers.base import HandOver, file_name
from shmcache.tiers.memory import MemoryTier
from shmcache.tiers.supervisor import Done, Job, Lane, LaneState, LaneStatistics, _run_job

WHO = identity()
EPOCH = 77
NOW = Now(1_800_000_000)
SLAB = PAYLOAD_OFFSET + 4096
"""Bytes of one row as these tests make it."""


class SteppedLane(Lane):
    """A tier whose jobs run when a test says so."""

    def __init__(self, tier: base.Tier) -> None:
        self.tier = tier
        self.state = LaneState.UP
        self.queued: deque[Job] = deque()
        self._done: list[Done] = []

    def submit(self, job: Job) -> None:
        if self.state is LaneState.DOWN:
            self._done.append(Done(job, error="down", is_fault=True))
        else:
            self.queued.append(job)

    def step(self) -> None:
        self._done.append(_run_job(self.tier, self.queued.popleft()))

    def break_down(self) -> None:
        """All that is queued is given up, as by a lane that hangs."""
        self.state = LaneState.DOWN
        self._done += [Done(job, error="down", is_fault=True) for job in self.queued]
        self.queued.clear()

    def outcomes(self) -> list[Done]:
        done, self._done = self._done, []
        return done

    def look(self, now_s: float) -> None:
        pass

    def statistics(self) -> LaneStatistics:
        return LaneStatistics(0, 0, 0)

    def close(self, timeout_s: float = 5.0) -> None:
        self.tier.close()


class Desk:
    """A coordinator and what surrounds it: messages in, replies out, files where workers put them."""

    def __init__(
        self,
        space: Namespace,
        *,
        slabs: float = 100,
        max_rows: int = 1000,
        rules: Rules | None = None,
        **limits: int | None,
    ) -> None:
        """`limits` are further fields of TierState."""
        self.names = space.names
        self.rules = rules or Rules()
        self.limits = limits
        self.shown_forget: list[int] = []
        shm.make_directory(self.names.directory)
        self.budget_bytes = int(slabs * SLAB)
        self.max_rows = max_rows
        self.unnamed: dict[int, int] = {}
        self._requests = iter(range(1, 1 << 40))
        self.lane: SteppedLane
        self.start()

    def start(self, *, forget: int = 0, epoch: int = EPOCH, now: Now = NOW) -> int:
        """A coordinator, the first or the next one; how many rows it has adopted."""
        self._map = mmap.mmap(-1, index.segment_bytes(self.max_rows))
        self.index = IndexWriter.create(memoryview(self._map), self.max_rows, epoch)
        self.lane = SteppedLane(MemoryTier(Tier.RAM_FILE, self.names.tier("ram_file", epoch)))
        self.state = TierState(self.lane, self.budget_bytes, **self.limits)  # type: ignore[arg-type]
        self.epoch = epoch
        self.coordinator = Coordinator(
            self.index,
            [self.state],
            epoch,
            forget,
            lambda: self.unnamed,
            rules=self.rules,
            store_forget=self.shown_forget.append,
        )
        return self.coordinator.adopt(now)

    def restart(self, *, forget: int = 0, epoch: int = EPOCH, now: Now = NOW) -> int:
        self.lane.close()
        return self.start(forget=forget, epoch=epoch, now=now)

    # messages

    def ask(self, request: AnyRequest, now: Now = NOW) -> AnyReply | None:
        """Handle a message, let the lane work, and return the answer to it."""
        replies = self.coordinator.handle(request, now)
        return self._mine(request, [*replies, *self.run()])

    def tell(self, request: AnyRequest) -> list[Reply]:
        """Handle a message and let nothing else happen."""
        return self.coordinator.handle(request, NOW)

    def run(self) -> list[Reply]:
        """Let the lane do all it has."""
        replies = []
        while True:
            replies += self.coordinator.outcomes(NOW)
            if not self.lane.queued:
                return replies
            self.lane.step()

    @staticmethod
    def _mine(request: AnyRequest, replies: list[Reply]) -> AnyReply | None:
        mine = [
            reply for reply in replies if (reply.client, reply.request) == (request.client, request.request)
        ]
        assert len(mine) <= 1
        return mine[0].body if mine else None

    def head(self, client: int, mailbox: int = 0) -> Head:
        return Head(epoch=self.epoch, client=client, mailbox=mailbox, request=next(self._requests))

    def reserve(
        self,
        *texts: bytes | None,
        client: int = 1,
        base: bytes | None = None,
        forget: int = 0,
        slab_bytes: int = SLAB,
        mailbox: int = 0,
        tier: Tier = Tier.RAM_FILE,
    ) -> list[Verdict]:
        plans = [plan_of(text, slab_bytes, tier) for text in texts]
        request = Reserve(**self.head(client, mailbox), forget=forget, base=base, plans=plans)
        answer = self.ask(request)
        assert isinstance(answer, Reserved)
        return answer.verdicts

    def grant(self, text: bytes | None, **options: Any) -> int:
        (verdict,) = self.reserve(text, **options)
        assert verdict.kind == "granted", verdict
        return verdict.token

    def written(self, text: bytes, token: int, client: int = 1, mailbox: int = 0) -> Outcome:
        answer = self.ask(Written(**self.head(client, mailbox), token=token, key=key_of(text)))
        assert isinstance(answer, Outcome)
        return answer

    def wait_for(self, text: bytes, client: int, mailbox: int = 0) -> tuple[int, list[Reply]]:
        request = Await(**self.head(client, mailbox), key=key_of(text))
        return request.request, self.tell(request)

    def cancel(self, *tokens: int, client: int = 1, asked: int = 0) -> list[Reply]:
        return self.tell(Cancel(**self.head(client, NO_MAILBOX), tokens=list(tokens), asked=asked))

    # files

    def put(
        self, text: bytes, token: int, forget: int = 0, size_bytes: int = 4096, **changes: Any
    ) -> HandOver:
        """What a worker does: a complete slab with its name in `in/`."""
        handover = HandOver(key_of(text), token, forget)
        path = self.names.tier("ram_file", self.epoch) / "in" / handover.name
        path.write_bytes(slab_file(WHO, text, bytes(size_bytes), **changes))
        path.chmod(0o600)
        return handover

    def save(self, text: bytes, *, base: bytes | None = None, client: int = 1, **changes: Any) -> None:
        """Reserve, hand over and publish one row."""
        token = self.grant(text, base=key_of(base) if base is not None else None, client=client)
        base_key = key_of(base) if base is not None else None
        self.put(text, token, base_key=base_key, **changes)
        assert self.written(text, token, client).published

    def waiting(self) -> list[str]:
        return sorted(os.listdir(self.lane.tier.in_fd))  # noqa: PTH208 (a descriptor)

    def files(self) -> set[bytes]:
        return set(self.lane.tier.keys())

    def keys(self) -> set[bytes]:
        return {found.row.key for found in self.index.rows()}

    def texts(self, *known: bytes) -> list[bytes]:
        """Which of these have a row."""
        return [text for text in known if key_of(text) in self.keys()]

    def touch(self, text: bytes, now: Now = NOW) -> None:
        found = self.index.get(key_of(text))
        assert found is not None
        self.coordinator.touches([found.touch], now)

    def order(self, *known: bytes) -> list[bytes]:
        """Those of these texts that have rows, from the coldest."""
        by_key = {key_of(text): text for text in known}
        slots = self.coordinator._order.coldest(Tier.RAM_FILE)
        rows = [found.row.key for slot in slots if (found := self.index.at(slot)) is not None]
        return [by_key[key] for key in rows if key in by_key]

    def check(self) -> None:
        """What must be true after every message, whatever happened."""
        state, reservations = self.state, self.coordinator._reservations
        rows = list(self.index.rows())
        assert len(rows) == len(self.index) == state.rows <= self.max_rows
        assert sum(found.row.slab_bytes for found in rows) == state.used_bytes
        slots = list(self.coordinator._order.coldest(Tier.RAM_FILE))
        assert sorted(slots) == sorted(found.slot for found in rows)
        figures = reservations.statistics()
        assert figures.reserved == figures.published + figures.abandoned + figures.in_flight
        assert reservations.charged_bytes(Tier.RAM_FILE) == sum(held.charged_bytes for held in reservations)
        leaving = [key for key, _ in state.leaving]
        assert sum(size for _, size in state.leaving) == state.leaving_bytes
        assert self.files() >= {found.row.key for found in rows}, "a row has its file"
        linked = [held.plan.key for held in reservations if held.state is State.CHECKED]
        assert self.files() <= {*self.keys(), *leaving, *linked} or None in linked

    def close(self) -> None:
        self.lane.close()


def key_of(text: bytes) -> bytes:
    return row_address(WHO.seed, text).key


def plan_of(text: bytes | None, slab_bytes: int = SLAB, tier: Tier = Tier.RAM_FILE) -> Plan:
    if text is None:
        return Plan(None, None, 0, slab_bytes, tier)
    address = row_address(WHO.seed, text)
    return Plan(address.key, address.block_key, len(text), slab_bytes, tier)


def kinds(verdicts: Sequence[Verdict]) -> list[str]:
    return [verdict.kind for verdict in verdicts]


@pytest.fixture
def desk(space: Namespace) -> Iterator[Desk]:
    with contextlib.closing(Desk(space)) as made:
        yield made
        made.run()
        made.check()


A, B, C, D = (prompt(size, "chat") for size in (1000, 2000, 3000, 4000))
OTHER, THIRD = prompt(1500, "other"), prompt(1500, "third")


# ---- a save


def test_a_row_is_found_only_when_its_slab_is_linked(desk: Desk) -> None:
    token = desk.grant(A)
    handover = desk.put(A, token)
    assert desk.index.get(key_of(A)) is None
    request = Written(**desk.head(1), token=token, key=key_of(A))
    assert desk.tell(request) == []
    assert desk.index.get(key_of(A)) is None, "checked, and the link is under way"
    desk.lane.step()
    assert desk.files() == {key_of(A)}
    assert desk.index.get(key_of(A)) is None, "linked, and not yet looked at"
    (reply,) = desk.coordinator.outcomes(NOW)
    assert (reply.request, reply.body) == (request.request, Outcome(True))
    found = desk.index.get(key_of(A))
    assert found is not None
    assert (found.row.text_bytes, found.row.slab_bytes, found.row.tier) == (len(A), SLAB, Tier.RAM_FILE)
    assert desk.waiting() == []
    assert handover.key == found.row.key


def test_all_anchors_of_a_prompt_are_granted_together(desk: Desk) -> None:
    verdicts = desk.reserve(A, B, C)
    assert kinds(verdicts) == ["granted"] * 3
    assert len({verdict.token for verdict in verdicts}) == 3


def test_what_is_there_is_said_to_be_there(desk: Desk) -> None:
    desk.save(A)
    assert kinds(desk.reserve(A, B)) == ["present", "granted"]


def test_a_second_worker_waits_for_the_first_missing_row_and_is_granted_nothing(desk: Desk) -> None:
    desk.save(A)
    desk.grant(B)
    assert kinds(desk.reserve(A, B, C, client=2)) == ["present", "held", "held"]
    assert kinds(desk.reserve(C, B, D, client=2)) == ["granted", "held", "granted"]


def test_a_holders_second_reserve_gets_the_first_ones_answer(desk: Desk) -> None:
    first = desk.reserve(A, B)
    assert desk.reserve(A, B) == first
    assert desk.coordinator._reservations.statistics().reserved == 2


def test_what_a_worker_has_handed_over_is_not_granted_to_it_again(desk: Desk) -> None:
    token = desk.grant(A)
    desk.put(A, token)
    desk.tell(Written(**desk.head(1, 3), token=token, key=key_of(A)))
    request = Reserve(**desk.head(1), forget=0, base=None, plans=[plan_of(A)])
    (reply,) = desk.tell(request)
    assert reply.body == Reserved([Verdict("held")])


def test_a_second_written_gets_the_first_ones_answer(desk: Desk) -> None:
    token = desk.grant(A)
    desk.put(A, token)
    first = Written(**desk.head(1, 3), token=token, key=key_of(A))
    second = Written(**desk.head(1, 4), token=token, key=key_of(A))
    desk.tell(first)
    desk.tell(second)
    replies = {reply.mailbox: reply.body for reply in desk.run()}
    assert replies == {3: Outcome(True), 4: Outcome(True)}
    assert desk.written(A, token) == Outcome(True), "also when it is long published"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("missing", "No such file"),
        ("garbage", "not a KVC file"),
        ("longer", "reserved"),
        ("text", "another row"),
        ("key", "another key"),
        ("mode", "belongs to uid"),
    ],
)
def test_a_slab_that_is_not_what_was_reserved_is_refused_and_gone(desk: Desk, change: str, why: str) -> None:
    token = desk.grant(A)
    path = desk.names.tier("ram_file", EPOCH) / "in" / HandOver(key_of(A), token, 0).name
    if change == "longer":
        desk.put(A, token, size_bytes=4097)
    elif change == "text":
        desk.put(A, token, text_bytes=len(A) - 1)
    elif change != "missing":
        desk.put(A, token)
    if change == "garbage":
        path.write_bytes(b"garbage" * 1000)
    elif change == "key":
        path.write_bytes(slab_file(WHO, B, bytes(100)))
    elif change == "mode":
        path.chmod(0o640)
    outcome = desk.written(A, token)
    assert not outcome.published
    assert why in outcome.why
    assert desk.waiting() == []
    assert desk.coordinator.statistics()["dropped_refused"] == 1
    assert desk.coordinator._reservations.charged_bytes(Tier.RAM_FILE) == 0
    assert kinds(desk.reserve(A, client=2)) == ["granted"], "the key is free again"


def test_a_reply_in_the_making_gets_its_key_when_it_is_written(desk: Desk) -> None:
    token = desk.grant(None)
    desk.put(B, token)
    assert desk.written(B, token).published
    assert desk.texts(A, B) == [B]


def test_a_reply_that_is_there_already_costs_nothing_but_its_copy(desk: Desk) -> None:
    desk.save(B)
    token = desk.grant(None, client=2)
    desk.put(B, token)
    outcome = desk.written(B, token, client=2)
    assert outcome == Outcome(True, "present already"), "the row is there, which is what the owner asks"
    assert desk.waiting() == []


def test_a_reply_may_publish_a_row_that_somebody_else_is_making(desk: Desk) -> None:
    held = desk.grant(B, client=2)
    asked, _ = desk.wait_for(B, client=3)
    token = desk.grant(None, client=1)
    desk.put(B, token)
    request = Written(**desk.head(1), token=token, key=key_of(B))
    replies = {reply.request: reply.body for reply in [*desk.tell(request), *desk.run()]}
    assert replies == {request.request: Outcome(True), asked: Outcome(True)}, "who waits for the row has it"
    desk.put(B, held)
    assert desk.written(B, held, client=2).published
    assert desk.files() == desk.keys() == {key_of(B)}


def test_a_file_in_the_way_is_adopted_if_it_is_the_same_row_and_size(desk: Desk) -> None:
    token = desk.grant(A)
    there = desk.names.tier("ram_file", EPOCH) / file_name(key_of(A))
    there.write_bytes(slab_file(WHO, A, bytes(4096)))
    there.chmod(0o600)
    before = there.stat().st_ino
    desk.put(A, token)
    assert desk.written(A, token).published
    assert there.stat().st_ino == before


@pytest.mark.parametrize("content", ["garbage", "other size", "other key", "symlink"])
def test_any_other_file_in_the_way_is_replaced(desk: Desk, content: str) -> None:
    token = desk.grant(A)
    there = desk.names.tier("ram_file", EPOCH) / file_name(key_of(A))
    if content == "garbage":
        there.write_bytes(b"garbage")
    elif content == "symlink":
        there.symlink_to("/etc/passwd")
    else:
        there.write_bytes(slab_file(WHO, A if content == "other size" else B, bytes(8192)))
    if content != "symlink":
        there.chmod(0o600)
    desk.put(A, token)
    assert desk.written(A, token).published
    assert not there.is_symlink()
    assert there.stat().st_size == SLAB
    assert desk.waiting() == []


def test_a_stranger_s_directory_in_the_way_is_set_aside_and_the_save_published(desk: Desk) -> None:
    token = desk.grant(A)
    there = desk.names.tier("ram_file", EPOCH) / file_name(key_of(A))
    there.mkdir()
    desk.put(A, token)
    assert desk.written(A, token).published
    (aside,) = there.parent.glob(f"{there.name}.aside-*")
    assert aside.is_dir()


def test_a_row_that_the_index_cannot_take_is_refused_and_its_file_goes(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk.index, "publish", lambda *_: None)
    token = desk.grant(A)
    desk.put(A, token)
    outcome = desk.written(A, token)
    assert not outcome.published
    assert desk.files() == set()
    figures = desk.coordinator.statistics()
    assert (figures["saves_published"], figures["saves_abandoned"]) == (0, 1)


# ---- extend, cancel, drop


def test_a_longer_slab_is_charged_before_it_is_made(space: Namespace) -> None:
    desk = Desk(space, slabs=3)
    token = desk.grant(None)

    def extend(slab_bytes: int, client: int = 1, asked: int = token) -> Verdict:
        request = Extend(**desk.head(client), token=asked, slab_bytes=slab_bytes)
        answer = desk.ask(request)
        assert isinstance(answer, Reserved)
        return answer.verdicts[0]

    assert extend(2 * SLAB).kind == "granted"
    assert desk.coordinator._reservations.charged_bytes(Tier.RAM_FILE) == 2 * SLAB
    assert extend(SLAB).kind == "granted"
    assert desk.coordinator._reservations.charged_bytes(Tier.RAM_FILE) == 2 * SLAB, "it never shrinks"
    assert extend(4 * SLAB).kind == "too_large"
    desk.grant(A, client=2)
    refused = extend(3 * SLAB)
    assert (refused.kind, refused.free_bytes) == ("no_space", 0)
    assert desk.coordinator._reservations.charged_bytes(Tier.RAM_FILE) == 3 * SLAB
    assert extend(SLAB, client=2).kind == "held", "another's token"
    assert extend(SLAB, asked=12345).kind == "held", "no token at all"
    desk.close()


def test_cancelling_gives_key_and_bytes_back(desk: Desk) -> None:
    first, second = (verdict.token for verdict in desk.reserve(A, B))
    desk.cancel(first, client=2)
    assert len(desk.coordinator._reservations) == 2, "another's token is not mine to cancel"
    desk.cancel(first, 4711)
    assert kinds(desk.reserve(A, client=2)) == ["granted"]
    assert kinds(desk.reserve(B, client=2)) == ["held"]
    assert desk.coordinator._reservations.by_token(second) is not None


def test_an_answer_that_never_came_is_taken_back_by_its_question(desk: Desk) -> None:
    request = Reserve(**desk.head(1), forget=0, base=None, plans=[plan_of(A), plan_of(B)])
    desk.ask(request)
    kept = desk.grant(C)
    desk.cancel(asked=request.request)
    assert [held.token for held in desk.coordinator._reservations] == [kept]
    desk.cancel()
    assert [held.token for held in desk.coordinator._reservations] == [kept], "a cancel of nothing"


def test_a_cancel_that_comes_after_the_name_publishes_all_the_same(desk: Desk) -> None:
    token = desk.grant(A)
    desk.put(A, token)
    desk.cancel(token)
    desk.run()
    assert desk.texts(A) == [A]


def test_a_row_that_did_not_verify_is_dropped_once(desk: Desk) -> None:
    desk.save(A)
    found = desk.index.get(key_of(A))
    assert found is not None

    def drop(word: int) -> None:
        desk.tell(Drop(**desk.head(2, NO_MAILBOX), key=key_of(A), word=word, why="it is wrong"))

    drop(found.word + 256)
    assert desk.texts(A) == [A], "another publication than this one"
    drop(found.word)
    drop(found.word)
    desk.run()
    assert desk.keys() == desk.files() == set()
    assert desk.coordinator.statistics()["corrupt_rows"] == 1
    desk.save(A)
    drop(found.word)
    assert desk.texts(A) == [A], "a late report about the one before"


def set_aside(desk: Desk, text: bytes) -> None:
    found = desk.index.get(key_of(text))
    assert found is not None
    head = desk.head(2, NO_MAILBOX)
    desk.tell(Drop(**head, key=key_of(text), word=found.word, why="its state differs", aside=True))
    desk.run()


def test_a_row_that_an_audit_found_wrong_is_nobodys_and_its_slab_is_kept(desk: Desk) -> None:
    desk.save(A)
    desk.save(B)
    set_aside(desk, A)
    assert desk.keys() == desk.files() == {key_of(B)}
    assert desk.state.lane.tier.asides() == [(key_of(A), SLAB)]
    assert desk.coordinator.statistics()["corrupt_rows"] == 1
    desk.save(A)
    assert desk.keys() == {key_of(A), key_of(B)}, "its text may be saved again"
    assert desk.restart() == 2, "what is set aside is not adopted"
    assert desk.state.aside == [(key_of(A), SLAB)]
    evict = Evict(**desk.head(2), keys=[key_of(A)])
    assert desk.ask(evict) == Evicted(2, 0), "the new row, and the old slab"
    assert desk.state.lane.tier.asides() == []


def test_what_is_set_aside_is_charged_and_bounded(space: Namespace) -> None:
    with contextlib.closing(Desk(space, slabs=17)) as desk:
        texts = [prompt(1000, name=f"text {number}") for number in range(4)]
        for text in texts[:3]:
            desk.save(text)
            set_aside(desk, text)
        kept = [key for key, _ in desk.state.lane.tier.asides()]
        assert kept == [key_of(text) for text in texts[1:3]], "an eighth of 17 slabs holds two"
        assert desk.coordinator._free_bytes(desk.state) == 15 * SLAB


def test_a_slab_that_cannot_be_set_aside_goes(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_key: bytes) -> None:
        raise OSError(5, "Input/output error")

    desk.save(A)
    monkeypatch.setattr(desk.state.lane.tier, "set_aside", fail)
    set_aside(desk, A)
    desk.run()
    assert desk.keys() == desk.files() == set()
    assert desk.state.aside == []


# ---- waiting


def test_who_waits_for_a_reply_that_has_no_key_yet_hears_of_it_when_it_is_published(desk: Desk) -> None:
    desk.ask(
        Reserve(**desk.head(1), forget=0, base=None, plans=[replace(plan_of(A), key=None, block_key=None)])
    )
    [held] = desk.coordinator._reservations
    waiting = Await(**desk.head(2, 3), key=key_of(A), unannounced=True)
    assert desk.ask(waiting) is None
    assert desk.ask(Await(**desk.head(3, 3), key=key_of(A))) == Outcome(False, "nothing in flight")
    desk.put(A, held.token)
    request = Written(**desk.head(1), token=held.token, key=key_of(A))
    told = [*desk.tell(request), *desk.run()]
    assert [reply.body for reply in told if reply.client == 2] == [Outcome(True)]


def test_who_waits_in_vain_is_not_kept_for_ever(desk: Desk) -> None:
    desk.ask(Await(**desk.head(2, 3), key=key_of(A), unannounced=True))
    desk.ask(Await(**desk.head(2, 4), key=key_of(B), unannounced=True))
    desk.ask(Await(**desk.head(2, 3), key=key_of(C)))  # its mailbox asks for something else
    desk.coordinator.sweep(NOW)
    assert list(desk.coordinator._waiters) == [key_of(B)]


@pytest.mark.parametrize("end", ["publish", "refusal", "cancel", "death", "stuck"])
def test_a_waiter_is_answered_once_however_the_save_ends(desk: Desk, end: str) -> None:
    token = desk.grant(A)
    asked = {
        desk.wait_for(A, client=2)[0],
        desk.wait_for(A, client=2, mailbox=1)[0],
        desk.wait_for(A, client=3)[0],
    }
    assert desk.coordinator.tick(NOW, 0.0) == []
    if end == "publish":
        desk.put(A, token)
        replies = desk.tell(Written(**desk.head(1, NO_MAILBOX), token=token, key=key_of(A)))
    elif end == "refusal":
        replies = desk.tell(Written(**desk.head(1, NO_MAILBOX), token=token, key=key_of(A)))
    elif end == "cancel":
        replies = desk.cancel(token)
    elif end == "death":
        replies = desk.coordinator.client_gone(1, NOW)
    else:
        replies = desk.coordinator.client_stuck(1, NOW)
    replies += desk.run()
    assert {reply.request for reply in replies} == asked
    assert len(replies) == 3
    for reply in replies:
        assert isinstance(reply.body, Outcome)
        assert reply.body.published == (end == "publish")
    assert desk.run() == []


def test_waiting_looks_into_the_index_first(desk: Desk) -> None:
    desk.save(A)
    assert [reply.body for reply in desk.wait_for(A, client=2)[1]] == [Outcome(True)]
    assert [reply.body for reply in desk.wait_for(B, client=2)[1]] == [Outcome(False, "nothing in flight")]


def test_a_mailbox_that_asks_something_new_gets_nothing_more_for_its_old_question(desk: Desk) -> None:
    token = desk.grant(A)
    desk.wait_for(A, client=2)
    second, _ = desk.wait_for(A, client=2)
    desk.wait_for(A, client=2, mailbox=5)
    desk.reserve(B, client=2, mailbox=5)
    assert [reply.request for reply in desk.cancel(token)] == [second]


def test_waiting_for_hours_does_not_pile_up(desk: Desk) -> None:
    desk.grant(A)
    for _ in range(1000):
        for mailbox in range(MAILBOXES):
            desk.wait_for(A, client=2, mailbox=mailbox)
    assert len(desk.coordinator._waiters[key_of(A)]) == MAILBOXES


def test_a_dead_waiter_is_not_written_to(desk: Desk) -> None:
    token = desk.grant(A)
    desk.wait_for(A, client=2)
    asked, _ = desk.wait_for(A, client=3)
    assert desk.coordinator.client_gone(2, NOW) == []
    assert [reply.request for reply in desk.cancel(token)] == [asked]


def test_without_a_mailbox_nothing_is_answered(desk: Desk) -> None:
    for request in (
        Reserve(**desk.head(1, NO_MAILBOX), forget=0, base=None, plans=[plan_of(A)]),
        Await(**desk.head(1, NO_MAILBOX), key=key_of(A)),
        Written(**desk.head(1, NO_MAILBOX), token=1, key=key_of(B)),
        Extend(**desk.head(1, NO_MAILBOX), token=1, slab_bytes=1),
    ):
        assert [*desk.tell(request), *desk.run()] == []


# ---- owners


def test_a_dead_owners_reservations_are_free_and_what_it_named_is_published(desk: Desk) -> None:
    named, _ = (verdict.token for verdict in desk.reserve(A, B))
    desk.put(A, named)
    desk.coordinator.client_gone(1, NOW)
    desk.run()
    assert desk.texts(A, B) == [A]
    assert len(desk.coordinator._reservations) == 0


def test_a_stuck_owner_loses_its_key_and_not_its_bytes(space: Namespace) -> None:
    desk = Desk(space, slabs=2)
    token = desk.grant(A)
    desk.coordinator.client_stuck(1, NOW)
    assert kinds(desk.reserve(A, client=2)) == ["granted"]
    assert kinds(desk.reserve(B, client=3)) == ["no_space"], "the stuck one may still be writing"
    desk.put(A, token)
    assert not desk.written(A, token).published
    assert desk.waiting() == []
    assert kinds(desk.reserve(B, client=3)) == ["granted"], "it has moved, and let go"
    desk.close()


def test_a_stuck_owner_that_dies_gives_its_bytes_back(desk: Desk) -> None:
    token = desk.grant(A)
    desk.coordinator.client_stuck(1, NOW)
    desk.put(A, token)
    desk.coordinator.client_gone(1, NOW)
    desk.run()
    assert desk.waiting() == []
    assert desk.keys() == set()
    assert len(desk.coordinator._reservations) == 0


def test_what_is_handed_over_is_beyond_its_owners_death(desk: Desk) -> None:
    token = desk.grant(A)
    desk.put(A, token)
    desk.tell(Written(**desk.head(1), token=token, key=key_of(A)))
    desk.coordinator.client_gone(1, NOW)
    desk.coordinator.client_stuck(1, NOW)
    assert desk.run() == [], "nobody is there to be told"
    assert desk.texts(A) == [A]


# ---- another coordinator's time


def test_a_message_of_another_epoch_is_answered_and_changes_nothing(desk: Desk) -> None:
    head = desk.head(1)
    head["epoch"] = EPOCH + 1
    for request in (
        Reserve(**head, forget=0, base=None, plans=[plan_of(A)]),
        Written(**head, token=1, key=key_of(A)),
        Await(**head, key=key_of(A)),
    ):
        (reply,) = desk.tell(request)
        assert reply.body == Stale(EPOCH)
    assert len(desk.coordinator._reservations) == 0


def test_a_stale_question_too_ends_the_one_before_it(desk: Desk) -> None:
    token = desk.grant(A)
    desk.wait_for(A, client=2)
    desk.tell(replace(Await(**desk.head(2), key=key_of(A)), epoch=1))
    assert desk.cancel(token) == []


def test_what_was_handed_over_before_a_restart_is_adopted(desk: Desk) -> None:
    desk.put(A, token=5)
    desk.restart()
    desk.run()
    assert desk.texts(A) == [A]
    assert desk.waiting() == []


def test_a_slab_of_a_reservation_before_the_restart_is_taken_at_once(desk: Desk) -> None:
    token = desk.grant(A)
    desk.restart(epoch=EPOCH + 1)
    desk.put(A, token)
    assert desk.written(A, token) == Outcome(True)
    assert desk.texts(A) == [A]


def test_a_slab_whose_message_got_lost_is_taken_by_the_sweep(desk: Desk) -> None:
    mine = desk.grant(A)
    desk.put(A, mine)
    desk.put(B, token=99)
    desk.coordinator.sweep(NOW)
    desk.run()
    assert desk.texts(A, B) == [A, B]
    assert len(desk.coordinator._reservations) == 0


def test_a_dead_worker_of_the_time_before_is_looked_after_too(desk: Desk) -> None:
    desk.put(A, token=5)
    desk.coordinator.client_gone(9, NOW)
    desk.run()
    assert desk.texts(A) == [A]


def test_what_is_complete_does_not_wait_for_somebody_who_makes_the_same_row(desk: Desk) -> None:
    held = desk.grant(A, client=2)
    asked, _ = desk.wait_for(A, client=3)
    desk.put(A, token=5)
    desk.coordinator.sweep(NOW)
    assert [(reply.request, reply.body) for reply in desk.run()] == [(asked, Outcome(True))]
    assert desk.texts(A) == [A]
    desk.put(A, held)
    assert desk.written(A, held, client=2).published
    assert desk.files() == {key_of(A)}


@pytest.mark.parametrize("why", ["present", "forgotten", "garbage", "no space", "too large"])
def test_a_slab_that_nobody_wants_is_removed(space: Namespace, why: str) -> None:
    desk = Desk(space, slabs=2)
    forget = 3 if why == "forgotten" else 0
    desk.restart(forget=forget)
    if why == "present":
        desk.save(A)
    if why == "no space":
        desk.reserve(B, C, client=2)
    desk.put(A, token=5, forget=max(0, forget - 1), size_bytes=4 * SLAB if why == "too large" else 4096)
    if why == "garbage":
        (desk.names.tier("ram_file", EPOCH) / "in" / HandOver(key_of(A), 5, 0).name).write_bytes(b"x")
    desk.coordinator.sweep(NOW)
    desk.run()
    assert desk.waiting() == []
    assert desk.texts(A) == ([A] if why == "present" else [])
    desk.check()
    desk.close()


@pytest.mark.parametrize("plant", ["directory", "symlink", "fifo", "name"])
def test_a_strangers_object_in_the_hand_over_directory_is_left_alone(desk: Desk, plant: str) -> None:
    path = desk.names.tier("ram_file", EPOCH) / "in" / HandOver(key_of(A), 5, 0).name
    if plant == "directory":
        path.mkdir()
    elif plant == "symlink":
        path.symlink_to("/etc/passwd")
    elif plant == "fifo":
        os.mkfifo(path)
    else:
        path = path.with_name("README")
        path.write_text("hello")
    for _ in range(2):
        desk.coordinator.sweep(NOW)
        desk.run()
        desk.restart()
    desk.run()
    assert os.path.lexists(path)
    assert desk.keys() == set()


def test_a_forgotten_sequence_saves_nothing_at_any_step(desk: Desk) -> None:
    desk.restart(forget=4)
    assert kinds(desk.reserve(A, forget=3)) == ["forgotten"]
    token = desk.grant(A, forget=4)
    desk.put(A, token, forget=4)
    desk.tell(Evict(**desk.head(9, NO_MAILBOX), keys=[]))  # between reserve and written
    assert not desk.written(A, token).published

    token = desk.grant(B, forget=5)
    desk.put(B, token, forget=5)
    desk.tell(Written(**desk.head(1), token=token, key=key_of(B)))
    desk.tell(Evict(**desk.head(9, NO_MAILBOX), keys=[]))  # and while it is being linked
    desk.run()
    assert desk.keys() == desk.files() == set()
    assert desk.waiting() == []


# ---- start


def test_rows_hits_and_order_of_use_survive_a_restart(desk: Desk) -> None:
    for text in (A, OTHER, THIRD):
        desk.save(text)
    desk.touch(OTHER, Now(NOW.unix_s + 30))
    desk.touch(OTHER, Now(NOW.unix_s + 30))
    desk.touch(A, Now(NOW.unix_s + 60))
    desk.coordinator.store_use()
    desk.run()
    before = desk.order(A, OTHER, THIRD)
    assert before == [THIRD, OTHER, A]
    real = NOW.unix_s
    assert desk.restart(now=Now(real + 100)) == 3
    assert desk.order(A, OTHER, THIRD) == before
    found = desk.index.get(key_of(OTHER))
    assert found is not None
    assert desk.coordinator._order.hits[found.slot] == 2
    assert desk.coordinator._order.used_unix_s[found.slot] == real + 30


@pytest.mark.parametrize(
    "broken", ["empty", "short", "zeros", "random", "payload gone", "future", "version 1"]
)
def test_a_broken_file_costs_nothing_but_itself(desk: Desk, broken: str) -> None:
    desk.save(A)
    desk.save(B)
    path = desk.names.tier("ram_file", EPOCH) / file_name(key_of(A))
    content = bytearray(path.read_bytes())
    if broken in ("empty", "short", "payload gone"):
        content = content[: {"empty": 0, "short": 60, "payload gone": PAYLOAD_OFFSET}[broken]]
    elif broken in ("zeros", "random"):
        content = bytearray(os.urandom(len(content)) if broken == "random" else len(content))
    else:
        content[3] = 3 if broken == "future" else 1
    path.write_bytes(content)
    assert desk.restart() == 1
    desk.run()
    assert desk.texts(A, B) == [B]
    is_ours = broken not in ("future", "version 1")
    assert path.exists() != is_ours, "another version's rows are not ours to judge"
    assert desk.restart() == 1
    assert desk.coordinator.statistics().get("corrupt_rows", 0) == 0, "never the same failure twice"
    if not is_ours:
        path.unlink()


@pytest.mark.parametrize("plant", ["directory", "symlink", "dangling", "fifo", "mode", "name", "upper case"])
def test_a_strangers_object_among_the_rows_is_left_alone(desk: Desk, plant: str) -> None:
    desk.save(B)
    directory = desk.names.tier("ram_file", EPOCH)
    path = directory / file_name(key_of(A))
    if plant == "directory":
        path.mkdir()
    elif plant == "symlink":
        path.symlink_to("/etc/passwd")
    elif plant == "dangling":
        path.symlink_to("/nowhere")
    elif plant == "fifo":
        os.mkfifo(path, 0o600)
    elif plant == "mode":
        path.write_bytes(slab_file(WHO, A))
        path.chmod(0o644)
    elif plant == "name":
        path = directory / "notes.kvc"
        path.write_bytes(b"")
    else:
        path = directory / file_name(key_of(B)).upper().replace("KVC", "kvc")
        path.write_bytes(b"x")
    for _ in range(2):
        assert desk.restart() == 1
        desk.run()
        assert desk.texts(A, B) == [B]
        assert os.path.lexists(path)
    path.rmdir() if plant == "directory" else path.unlink()


@pytest.mark.parametrize("last_used_unix_s", [0, NOW.unix_s + 10**6, (1 << 32) - 1, 1 << 32, (1 << 64) - 1])
def test_whatever_a_file_says_of_its_use_is_no_reason_not_to_start(desk: Desk, last_used_unix_s: int) -> None:
    desk.save(A)
    path = desk.names.tier("ram_file", EPOCH) / file_name(key_of(A))
    content = bytearray(path.read_bytes())
    content[12:16] = b"\xff" * 4
    content[32:40] = last_used_unix_s.to_bytes(8, "little")
    path.write_bytes(content)
    assert desk.restart() == 1
    found = desk.index.get(key_of(A))
    assert found is not None
    assert desk.coordinator._order.used_unix_s[found.slot] == min(last_used_unix_s, NOW.unix_s)
    desk.touch(A)
    assert desk.coordinator._order.hits[found.slot] == (1 << 32) - 1, "a count that is full stays full"
    desk.coordinator.store_use()


def test_what_a_row_was_made_from_is_known_after_a_restart_whatever_was_used_last(desk: Desk) -> None:
    desk.save(A, reason_detail=HEAD_DETAIL)
    desk.save(B, base=A)
    desk.save(OTHER)
    desk.touch(A, Now(NOW.unix_s + 50))
    desk.touch(OTHER, Now(NOW.unix_s + 55))
    desk.coordinator.store_use()
    desk.run()
    desk.restart(now=Now(NOW.unix_s + 60))
    assert desk.order(A, B, OTHER) == [B, A, OTHER]
    desk.touch(B, Now(NOW.unix_s + 70))
    assert desk.order(A, B, OTHER) == [OTHER, A, B], "the head is touched with its descendant"
    desk.coordinator.store_use()
    desk.run()
    desk.restart(now=Now(NOW.unix_s + 80))
    assert desk.order(A, B, OTHER)[0] == OTHER, "and that too survives"


def test_files_that_claim_to_be_made_from_each_other_do_not_hang_the_start(desk: Desk) -> None:
    directory = desk.names.tier("ram_file", EPOCH)
    for text, base_text in ((A, B), (B, A), (C, C)):
        path = directory / file_name(key_of(text))
        path.write_bytes(slab_file(WHO, text, base_key=key_of(base_text)))
        path.chmod(0o600)
    assert desk.restart() == 3
    for text in (A, B, C):
        desk.touch(text)


def test_a_lower_budget_is_applied_before_anything_is_served(space: Namespace) -> None:
    desk = Desk(space, slabs=3)
    for number, text in enumerate((A, B, OTHER)):
        desk.save(text, last_used_unix_s=1000 + number)
    desk.budget_bytes = 2 * SLAB
    assert desk.restart() == 2
    desk.run()
    assert desk.texts(A, B, OTHER) == [B, OTHER]
    desk.unnamed = {9: SLAB}
    desk.budget_bytes = SLAB // 2
    assert desk.restart() == 0, "as much as can leave leaves, also where that is not enough"
    desk.run()
    desk.check()
    desk.close()


def test_fewer_rows_at_a_restart_keep_those_used_last(space: Namespace) -> None:
    desk = Desk(space)
    for number, text in enumerate((A, B, C, OTHER)):
        desk.save(text, last_used_unix_s=1000 + number)
    desk.max_rows = 2
    assert desk.restart() == 2
    desk.run()
    assert desk.texts(A, B, C, OTHER) == [C, OTHER]
    assert len(desk.files()) == 2
    desk.check()
    desk.close()


# ---- room


def test_the_coldest_rows_leave_and_only_as_many_as_needed(space: Namespace) -> None:
    desk = Desk(space, slabs=3)
    for text in (A, OTHER, THIRD):
        desk.save(text)
    desk.touch(A)
    desk.grant(D)
    desk.run()
    assert desk.texts(A, OTHER, THIRD) == [A, THIRD]
    assert desk.coordinator.statistics()["evictions"] == 1
    desk.close()


def test_a_row_larger_than_the_budget_is_refused_and_evicts_nothing(space: Namespace) -> None:
    desk = Desk(space, slabs=2)
    desk.save(A)
    (verdict,) = desk.reserve(B, slab_bytes=2 * SLAB + 1)
    assert (verdict.kind, verdict.free_bytes) == ("too_large", 2 * SLAB)
    assert desk.texts(A) == [A]
    desk.close()


def test_where_there_is_no_room_nothing_is_evicted_for_nothing(space: Namespace) -> None:
    desk = Desk(space, slabs=4)
    desk.save(A)
    desk.grant(B, client=2, slab_bytes=2 * SLAB)
    (verdict,) = desk.reserve(C, slab_bytes=3 * SLAB)
    assert (verdict.kind, verdict.free_bytes) == ("no_space", SLAB)
    desk.run()
    assert desk.texts(A) == [A]
    desk.close()


def test_bytes_that_workers_still_hold_for_another_coordinator_are_taken(space: Namespace) -> None:
    desk = Desk(space, slabs=3)
    desk.unnamed = {7: 2 * SLAB}
    assert kinds(desk.reserve(A, B)) == ["granted", "no_space"]
    desk.unnamed = {1: SLAB, 7: 2 * SLAB}
    assert kinds(desk.reserve(B)) == ["no_space"], "what it holds is what it has reserved"
    desk.unnamed = {1: SLAB}
    assert kinds(desk.reserve(B)) == ["granted"]
    desk.close()


def test_a_grant_waits_until_what_left_for_it_is_gone(space: Namespace) -> None:
    desk = Desk(space, slabs=2)
    desk.save(A)
    desk.save(OTHER)
    request = Reserve(**desk.head(1), forget=0, base=None, plans=[plan_of(B)])
    assert desk.tell(request) == []
    assert desk.texts(A) == [], "the row is out of the index"
    assert key_of(A) in desk.files(), "and its bytes are still there"
    desk.lane.step()
    assert key_of(A) not in desk.files()
    (reply,) = desk.coordinator.outcomes(NOW)
    assert isinstance(reply.body, Reserved)
    assert (reply.request, kinds(reply.body.verdicts)) == (request.request, ["granted"])
    desk.close()


def test_a_grant_that_nobody_waits_for_any_more_is_not_written_anywhere(space: Namespace) -> None:
    desk = Desk(space, slabs=1)
    desk.save(A)
    request = Reserve(**desk.head(1), forget=0, base=None, plans=[plan_of(B)])
    assert desk.tell(request) == []
    desk.cancel(asked=request.request)
    other, _ = desk.wait_for(B, client=1)
    assert all(reply.request != request.request for reply in desk.run())
    assert len(desk.coordinator._reservations) == 0
    assert other
    desk.close()


def test_the_row_limit_holds_as_the_byte_limit_does(space: Namespace) -> None:
    desk = Desk(space, max_rows=2)
    for text in (A, OTHER, THIRD):
        desk.save(text)
        desk.check()
    assert desk.texts(A, OTHER, THIRD) == [OTHER, THIRD]
    assert len(desk.files()) == 2
    desk.close()


def test_a_row_that_takes_its_own_place_costs_no_other_its(space: Namespace) -> None:
    desk = Desk(space, max_rows=2)
    held = desk.grant(B, client=2)
    desk.save(A)
    token = desk.grant(None)
    desk.put(B, token)
    desk.written(B, token)
    desk.put(B, held)
    assert desk.written(B, held, client=2).published
    desk.run()
    assert desk.texts(A, B) == [A, B]
    desk.check()
    desk.close()


def test_where_every_row_is_needed_the_row_limit_refuses_the_save(space: Namespace) -> None:
    desk = Desk(space, max_rows=1)
    desk.save(A)
    token = desk.grant(B, base=key_of(A))
    desk.put(B, token)
    outcome = desk.written(B, token)
    assert (outcome.published, outcome.why) == (False, "the index has no room")
    assert desk.texts(A, B) == [A]
    desk.run()
    desk.check()
    desk.close()


# ---- who leaves


def test_what_a_save_extends_is_safe_until_the_save_ends(space: Namespace) -> None:
    desk = Desk(space, slabs=3)
    desk.save(A)
    desk.save(B, base=A)
    token = desk.grant(C, base=key_of(B))
    assert kinds(desk.reserve(OTHER, client=2)) == ["no_space"], "B and its ancestor A are needed"
    desk.cancel(token)
    assert kinds(desk.reserve(OTHER, client=2)) == ["granted"]
    desk.run()
    assert desk.texts(A, B) == [A, B]
    assert kinds(desk.reserve(THIRD, client=2)) == ["granted"]
    desk.run()
    assert len(desk.texts(A, B)) == 1
    desk.close()


def test_a_chain_of_anchors_protects_what_its_first_one_extends(space: Namespace) -> None:
    desk = Desk(space, slabs=3)
    desk.save(A)
    first, _second = (verdict.token for verdict in desk.reserve(B, C, base=key_of(A)))
    desk.cancel(first)
    assert kinds(desk.reserve(OTHER, client=2)) == ["granted"]
    assert kinds(desk.reserve(THIRD, client=2)) == ["no_space"]
    assert desk.texts(A) == [A], "C extends A now that B will not come"
    desk.close()


def test_a_waypoint_that_only_its_own_chat_has_used_leaves_first(desk: Desk) -> None:
    desk.save(OTHER)
    desk.save(A)
    desk.touch(A)
    desk.save(B, base=A)
    assert desk.order(A, B, OTHER) == [A, OTHER, B]


@pytest.mark.parametrize("why", ["head", "used by others", "a fork"])
def test_a_row_that_others_need_is_no_plain_waypoint(desk: Desk, why: str) -> None:
    desk.save(OTHER)
    desk.save(A, reason_detail=HEAD_DETAIL if why == "head" else "")
    desk.touch(A)
    if why == "used by others":
        desk.touch(A)
    desk.save(B, base=A)
    if why == "a fork":
        desk.save(prompt(1800, "chat"), base=A)
        desk.touch(A)
        desk.save(prompt(1900, "chat"), base=A)
    assert desk.order(A, OTHER) == [OTHER, A]


def test_a_touch_keeps_heads_and_forks_warm_and_lets_plain_waypoints_be(desk: Desk) -> None:
    head, fork, waypoint, leaf = (prompt(size, "chat") for size in (500, 900, 1300, 1700))
    desk.save(head, reason_detail=HEAD_DETAIL)
    desk.save(fork, base=head)
    desk.save(waypoint, base=fork)
    desk.save(prompt(950, "chat"), base=fork)
    desk.save(leaf, base=waypoint)
    desk.save(OTHER)
    desk.touch(leaf, Now(NOW.unix_s + 9))
    assert desk.order(head, fork, waypoint, leaf, OTHER) == [waypoint, OTHER, head, fork, leaf]
    for text in (head, fork, leaf):
        found = desk.index.get(key_of(text))
        assert found is not None
        assert desk.coordinator._order.used_unix_s[found.slot] == NOW.unix_s + 9


def test_two_long_chats_in_turn_keep_their_shared_head_and_lose_dominated_snapshots_first(
    space: Namespace,
) -> None:
    """E06: room for the head, both chats' last rows and the row that one of them is about to save."""
    desk = Desk(space, slabs=4)
    head = prompt(500, "system")
    desk.save(head, reason_detail=HEAD_DETAIL)
    last = {"x": head, "y": head}
    used_bases = []
    for turn in range(1, 11):
        for chat, before in list(last.items()):
            text = head + prompt(700 * turn, chat)
            found = before if desk.index.get(key_of(before)) is not None else head
            used_bases.append(found == before)
            desk.touch(found)
            desk.save(text, base=found)
            assert desk.texts(head) == [head], "the shared prefix stays"
            assert desk.texts(found) == [found], "and so does the row that the save extends"
            desk.check()
            last[chat] = text
    assert all(used_bases), "every turn went on from its own last row"
    assert set(desk.texts(*last.values())) == set(last.values())
    desk.close()


def test_a_touch_of_a_slots_former_row_is_dropped(desk: Desk) -> None:
    desk.save(A)
    found = desk.index.get(key_of(A))
    assert found is not None
    desk.tell(Drop(**desk.head(1, NO_MAILBOX), key=key_of(A), word=found.word, why=""))
    desk.run()
    desk.save(A)
    desk.save(OTHER)
    desk.coordinator.touches([found.touch, 0, (1 << 64) - 1, desk.index.slots], NOW)
    assert desk.order(A, OTHER) == [A, OTHER]
    again = desk.index.get(key_of(A))
    assert again is not None
    assert desk.coordinator._order.hits[again.slot] == 0


def test_a_slab_that_was_linked_before_its_like_left_is_no_row_without_a_file(desk: Desk) -> None:
    """Two of one key came from another coordinator's workers; the removal of the one takes both."""
    desk.put(A, 5)
    desk.put(A, 6)
    desk.restart()
    desk.lane.step()
    desk.coordinator.outcomes(NOW)
    found = desk.index.get(key_of(A))
    assert found is not None
    desk.tell(Drop(**desk.head(1, NO_MAILBOX), key=key_of(A), word=found.word, why=""))
    desk.lane.step()
    desk.coordinator.outcomes(NOW)
    assert desk.index.get(key_of(A)) is None, "its file is about to go"
    desk.run()
    assert desk.files() == set()
    assert desk.waiting() == []


def test_descent_forgets_rows_that_have_left(desk: Desk) -> None:
    desk.save(A)
    desk.save(B, base=A)
    found = desk.index.get(key_of(B))
    assert found is not None
    desk.tell(Drop(**desk.head(1, NO_MAILBOX), key=key_of(B), word=found.word, why=""))
    desk.run()
    parent = desk.index.get(key_of(A))
    assert parent is not None
    assert desk.coordinator._order.children[parent.slot] == 0
    desk.save(B, base=A)
    desk.save(C, base=A)
    assert desk.coordinator._order.children[parent.slot] == 2


def test_rows_of_one_length_that_begin_alike_are_found_until_each_has_left(desk: Desk) -> None:
    same = [prompt(500, name) for name in ("x", "y", "z")]
    for text in same:
        desk.save(text)

    def found(text: bytes) -> list[bytes]:
        walk = PrefixWalk(WHO.seed, text + b"and more")
        return [row.row.key for row in desk.index.candidates(walk, walk.text_bytes)]

    for gone, text in enumerate(same):
        assert [found(each) for each in same[gone:]] == [[key_of(each)] for each in same[gone:]]
        row = desk.index.get(key_of(text))
        assert row is not None
        desk.tell(Drop(**desk.head(1, NO_MAILBOX), key=key_of(text), word=row.word, why=""))
        desk.run()
        assert found(text) == []
    assert list(desk.index.blocks()) == []


# ---- directories against the index


def survey(desk: Desk) -> None:
    desk.coordinator.sweep(NOW)
    desk.run()
    desk.coordinator.tick(NOW, 0.0)
    desk.run()


def test_a_row_whose_file_somebody_removed_goes_at_the_sweep(desk: Desk) -> None:
    desk.save(A)
    desk.save(B)
    (desk.names.tier("ram_file", EPOCH) / file_name(key_of(A))).unlink()
    survey(desk)
    assert desk.texts(A, B) == [B]
    assert desk.coordinator.statistics()["corrupt_rows"] == 1


def test_a_file_that_has_no_row_gets_one_at_the_sweep(desk: Desk) -> None:
    path = desk.names.tier("ram_file", EPOCH) / file_name(key_of(A))
    path.write_bytes(slab_file(WHO, A, bytes(100)))
    path.chmod(0o600)
    survey(desk)
    assert desk.texts(A) == [A]


def test_a_file_that_is_looked_at_while_its_row_leaves_gets_no_row_again(desk: Desk) -> None:
    desk.coordinator.sweep(NOW)
    desk.lane.step()  # the survey sees no file
    desk.save(A)
    desk.coordinator.tick(NOW, 0.0)  # so the row is without one, it seems
    found = desk.index.get(key_of(A))
    assert found is not None
    desk.tell(Drop(**desk.head(1, NO_MAILBOX), key=key_of(A), word=found.word, why="it left"))
    assert [type(job).__name__ for job in desk.lane.queued] == ["Look", "Remove"]
    for _ in range(2):
        desk.lane.step()
        desk.coordinator.outcomes(NOW)
        assert not desk.keys()
    assert not desk.files()
    desk.check()


def test_a_file_that_has_no_row_and_no_room_goes(space: Namespace) -> None:
    desk = Desk(space, slabs=2)
    desk.reserve(B, C)
    path = desk.names.tier("ram_file", EPOCH) / file_name(key_of(A))
    path.write_bytes(slab_file(WHO, A, bytes(100)))
    path.chmod(0o600)
    survey(desk)
    assert desk.texts(A) == []
    assert not path.exists()
    desk.check()
    desk.close()


@pytest.mark.parametrize("content", ["garbage", "future"])
def test_a_damaged_file_that_has_no_row_goes_and_another_versions_stays(desk: Desk, content: str) -> None:
    path = desk.names.tier("ram_file", EPOCH) / file_name(key_of(A))
    whole = bytearray(slab_file(WHO, A, bytes(100)))
    whole[3] = 3 if content == "future" else whole[3]
    path.write_bytes(whole if content == "future" else b"garbage")
    path.chmod(0o600)
    survey(desk)
    assert path.exists() == (content == "future")
    path.unlink(missing_ok=True)


def test_a_tier_that_is_down_loses_no_row(desk: Desk) -> None:
    for text in (A, B):
        desk.save(text)
    desk.lane.break_down()
    survey(desk)
    survey(desk)
    assert desk.texts(A, B) == [A, B]
    (verdict,) = desk.reserve(C)
    assert verdict.kind == "tier_down"
    desk.lane.state = LaneState.UP
    survey(desk)
    assert desk.texts(A, B) == [A, B]


def test_a_tier_that_goes_down_answers_all_who_wait_for_it(space: Namespace) -> None:
    desk = Desk(space, slabs=2)
    desk.save(A)
    token = desk.grant(B)
    desk.put(B, token)
    written = Written(**desk.head(1, 1), token=token, key=key_of(B))
    reserve = Reserve(**desk.head(2), forget=0, base=None, plans=[plan_of(OTHER)])
    waiting, _ = desk.wait_for(B, client=3)
    assert [*desk.tell(written), *desk.tell(reserve)] == []
    desk.lane.break_down()
    replies = {reply.request: reply.body for reply in desk.coordinator.outcomes(NOW)}
    assert replies[written.request] == replies[waiting] == Outcome(False, "down")
    assert isinstance(replies[reserve.request], Reserved)
    assert desk.waiting() == []
    desk.close()
