"""Whatever workers do, and in whatever order they and the tier get on: no byte too many, no answer too few.

A machine of random steps: reserve, write, hand over with and without a message, cancel, die, get stuck,
wait, touch, restart, and single jobs of the tier's lane in between. After each step the budget is compared
with the bytes that really are in /dev/shm, and each reply with the one question that it answers.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace
from support import Namespace, prompt
from test_coordinator import EPOCH, NOW, SLAB, Desk, key_of, plan_of

from shmcache.coordinator import Reply
from shmcache.protocol import (
    NO_MAILBOX,
    AnyRequest,
    Await,
    Cancel,
    Extend,
    Plan,
    Reserve,
    Reserved,
    Stale,
    Tier,
    Verdict,
    Written,
)

CLIENTS = (1, 2, 3)
TEXTS = [prompt(size, name) for name in ("x", "y") for size in (700, 1400, 2100)]
SLABS = 5

clients = st.sampled_from(CLIENTS)
numbers = st.integers(0, len(TEXTS) - 1)  # of a text; short in a report


class Held:
    """A granted reservation in a worker's hand: whose it is, for what, and how many bytes lie unnamed."""

    def __init__(self, client: int, token: int, plan: Plan) -> None:
        self.client, self.token, self.plan = client, token, plan
        self.slab_bytes = plan.slab_bytes


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.space = Namespace()
        self.desk = Desk(self.space, slabs=SLABS, max_rows=4)
        self.epoch = EPOCH
        self.asked: dict[tuple[int, int], AnyRequest] = {}
        self.answered: set[tuple[int, int]] = set()
        self.held: list[Held] = []

    def teardown(self) -> None:
        try:
            for client in CLIENTS:
                self.deliver(self.desk.coordinator.client_gone(client, NOW))
            self.deliver(self.desk.run())
            self.desk.check()
            assert not self.desk.waiting()
            assert len(self.desk.coordinator._reservations) == 0
            assert not self.desk.coordinator._waiters
        finally:
            self.desk.close()
            self.space.close()

    # a worker's side

    def send(self, request: AnyRequest) -> None:
        if request.mailbox != NO_MAILBOX:
            self.asked[request.client, request.mailbox] = request
        self.deliver(self.desk.tell(request))

    def deliver(self, replies: list[Reply]) -> None:
        for reply in replies:
            request = self.asked.pop((reply.client, reply.mailbox), None)
            assert request is not None, f"{reply} answers nobody"
            assert request.request == reply.request, f"{reply} answers another question than {request}"
            if isinstance(request, Reserve) and isinstance(reply.body, Reserved):
                for plan, verdict in zip(request.plans, reply.body.verdicts, strict=True):
                    self.granted(request.client, plan, verdict)

    def granted(self, client: int, plan: Plan, verdict: Verdict) -> None:
        if verdict.kind == "granted" and all(held.token != verdict.token for held in self.held):
            self.held.append(Held(client, verdict.token, plan))
            self.state_unnamed()

    def let_go(self, held: Held) -> None:
        self.held.remove(held)
        self.state_unnamed()

    def state_unnamed(self) -> None:
        unnamed = dict.fromkeys(CLIENTS, 0)
        for held in self.held:
            unnamed[held.client] += held.slab_bytes
        self.desk.unnamed = unnamed

    def link(self, held: Held, text: bytes, **changes: Any) -> None:
        """Name the slab: it is the coordinator's from here on."""
        self.desk.put(text, held.token, size_bytes=held.slab_bytes - (SLAB - 4096), **changes)
        self.let_go(held)

    # steps

    @rule(
        client=clients,
        wanted=st.lists(numbers, min_size=1, max_size=3, unique=True),
        base=st.none() | numbers,
        mailbox=st.integers(0, 1),
    )
    def reserve(self, client: int, wanted: list[int], base: int | None, mailbox: int) -> None:
        plans = [plan_of(TEXTS[number]) for number in wanted]
        base_key = key_of(TEXTS[base]) if base is not None else None
        self.send(Reserve(**self.desk.head(client, mailbox), forget=0, base=base_key, plans=plans))

    @rule(client=clients, size=st.integers(1, 3))
    def reserve_a_reply(self, client: int, size: int) -> None:
        plan = Plan(None, None, 0, size * SLAB, Tier.RAM_FILE)
        self.send(Reserve(**self.desk.head(client), forget=0, base=None, plans=[plan]))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), number=numbers, mailbox=st.sampled_from([0, 2, NO_MAILBOX]))
    def write(self, data: st.DataObject, number: int, mailbox: int) -> None:
        held = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        by_key = {key_of(text): text for text in TEXTS}
        text = by_key[held.plan.key] if held.plan.key is not None else TEXTS[number]
        self.link(held, text)
        request = Written(**self.desk.head(held.client, mailbox), token=held.token, key=key_of(text))
        self.send(request)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), number=numbers)
    def write_what_was_not_reserved(self, data: st.DataObject, number: int) -> None:
        held = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        self.link(held, TEXTS[number], text_bytes=1)
        self.send(Written(**self.desk.head(held.client), token=held.token, key=key_of(TEXTS[number])))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        held = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        request = Extend(
            **self.desk.head(held.client, 3), token=held.token, slab_bytes=held.slab_bytes + SLAB
        )
        self.asked[held.client, 3] = request
        for reply in self.desk.tell(request):
            self.deliver([reply])
            if isinstance(reply.body, Reserved) and reply.body.verdicts[0].kind == "granted":
                held.slab_bytes += SLAB
                self.state_unnamed()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        held = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        self.let_go(held)
        self.send(Cancel(**self.desk.head(held.client, NO_MAILBOX), tokens=[held.token]))

    @rule(client=clients, number=numbers, mailbox=st.integers(0, 1))
    def wait(self, client: int, number: int, mailbox: int) -> None:
        self.send(Await(**self.desk.head(client, mailbox), key=key_of(TEXTS[number])))

    @rule(client=clients)
    def ask_another_epoch(self, client: int) -> None:
        request = replace(Await(**self.desk.head(client), key=key_of(TEXTS[0])), epoch=1)
        self.asked[client, 0] = request
        (reply,) = self.desk.tell(request)
        assert reply.body == Stale(self.epoch)
        self.deliver([reply])

    @rule(client=clients, data=st.data())
    def die(self, client: int, data: st.DataObject) -> None:
        """At any stage: some of what it held may have got its name just before."""
        for held in [held for held in self.held if held.client == client]:
            if held.plan.key is not None and data.draw(st.booleans()):
                self.link(held, next(text for text in TEXTS if key_of(text) == held.plan.key))
            else:
                self.let_go(held)
        self.asked = {place: request for place, request in self.asked.items() if place[0] != client}
        self.deliver(self.desk.coordinator.client_gone(client, NOW))

    @rule(client=clients)
    def get_stuck(self, client: int) -> None:
        self.deliver(self.desk.coordinator.client_stuck(client, NOW))

    @rule(number=numbers)
    def touch(self, number: int) -> None:
        found = self.desk.index.get(key_of(TEXTS[number]))
        if found is not None:
            self.desk.coordinator.touches([found.touch], NOW)

    @precondition(lambda self: self.desk.lane.queued)
    @rule()
    def lane_works(self) -> None:
        self.desk.lane.step()

    @rule()
    def look_at_outcomes(self) -> None:
        self.deliver(self.desk.coordinator.outcomes(NOW))

    @rule()
    def sweep(self) -> None:
        self.deliver(self.desk.coordinator.sweep(NOW))

    @rule()
    def tick(self) -> None:
        self.deliver(self.desk.coordinator.tick(NOW, 0.0))

    @rule()
    def kill_the_coordinator(self) -> None:
        """Its queued work is lost, and so is every question; what workers hold, they hold."""
        self.asked.clear()
        self.epoch += 1
        self.desk.restart(epoch=self.epoch)

    # what is true

    @invariant()
    def everything_agrees(self) -> None:
        self.desk.check()

    @invariant()
    def no_byte_is_given_twice(self) -> None:
        state, coordinator = self.desk.state, self.desk.coordinator
        assert coordinator._free_bytes(state) >= 0
        directory = self.desk.names.tier("ram_file", self.epoch)
        named_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        unnamed_bytes = sum(self.desk.unnamed.values())
        assert named_bytes + unnamed_bytes <= state.budget_bytes

    @invariant()
    def a_key_is_held_once(self) -> None:
        keys = [
            held.plan.key for held in self.desk.coordinator._reservations if held.state.value != "overtaken"
        ]
        named = [key for key in keys if key is not None]
        assert len(named) == len(set(named))

    @invariant()
    def who_asked_is_parked_until_it_is_answered(self) -> None:
        parked = {place: request.request for place, request in self.asked.items()}
        assert self.desk.coordinator._parked == parked


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_budget_keys_and_answers_hold_after_any_history = Machine.TestCase
