"""Ask, wait and be answered: queue, mailbox and FIFO in every order, with timeouts, deaths and restarts.

One waiter asks from one mailbox, twice; one owner saves the row that it waits for, lets it go or dies; the
coordinator receives, handles, and delivers each reply in the four steps of page.ClientPage.send. Both store
through a buffer of their own. write(2) and read(2) on the FIFO take its lock, so they come after all stores
before them; the coordinator's barrier and the waiter's system call are there so that each one's look comes
after its stores, too.

A request is a number, a reply the number that it answers and what it says. A reply's length and checksum
are one value here, the reply itself, and so are both halves of its body: the checksum holds where all
three are the same.

What must hold
    M1  An answer that a waiter gets is the one to its question, and says of the row what was true.
    M2  No waiter stays in poll for ever: its answer comes, or the coordinator's death or a new epoch does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from explorer import replaced

STEPS = {
    1: "body",
    2: "length and checksum",
    3: "request id",
    4: "the byte in the FIFO, if its reader sleeps",
}
"""How a reply is written, by the numbers in page.ClientPage.send."""

WAIT_STEPS = ("say that we sleep", "look", "poll", "read empty", "look again")
"""How a reply is waited for after a first look, as page.WorkerPage._sleep says it."""

BODY_A, BODY_B, HEAD, ID = range(4)
_BUFFERED = 2

Ask = Literal["await", "other"]


class Message(NamedTuple):
    """What lies in the queue."""

    what: str  # await, other, written, cancel
    epoch: int
    request: int = 0


class Reply(NamedTuple):
    """request * 4 + 1 for "the row is there", + 2 for "it is not", + 3 for anything else."""

    code: int

    @property
    def request(self) -> int:
        return self.code // 4


class Coordinator(NamedTuple):
    """It lives, knows the epoch, the save in flight and who is parked, and delivers what is left to say.

    saving   the save of the row is in flight
    parked   request of the waiter's mailbox that waits for the save, 0 for none
    left     replies still to be written; at is the next of the four steps of the first
    """

    lives: bool = True
    epoch: int = 1
    saving: bool = True
    parked: int = 0
    left: tuple[int, ...] = ()
    at: int = 1


class Waiter(NamedTuple):
    """phase: idle → look id → look head → look a → look b → say → enter kernel → look id … → poll →
    read empty → look id …, done

    sleeps   it has said so
    stored   what it has said and others have not seen yet, oldest first
    """

    phase: str = "idle"
    sleeps: bool = False
    stored: tuple[bool, ...] = ()
    asked: int = 0  # requests sent so far; the number of the current one
    epoch: int = 1  # of the current one
    head: int = 0
    body_a: int = 0
    late: int = 0  # how often it gave up


class State(NamedTuple):
    waiter: Waiter
    owner: str  # holds, written, gone
    coordinator: Coordinator
    queue: tuple[Message, ...]
    buffer: tuple[tuple[int, int], ...]
    mailbox: tuple[int, ...]
    asleep: bool  # the waiter's word, as others see it
    byte: bool  # the FIFO holds something
    in_index: bool
    epoch: int  # of the control page
    dies: int  # deaths of the coordinator that are left
    starts: int  # starts of a next one that are left
    wrong: str = ""


class MessageModel:
    """One waiter, one owner, one coordinator.

    Args:
        asks: what the waiter asks, one after the other, from the same mailbox.
        owner: what the owner may do.
        late: how often the waiter may give up before its answer has come.
        dies: how often the coordinator may be killed.
        starts: how often a next one may start.
        faults: planted mistakes, by name.
    """

    def __init__(
        self,
        asks: Iterable[Ask] = ("await", "other"),
        *,
        owner: Iterable[str] = ("written", "gone"),
        late: int = 1,
        dies: int = 0,
        starts: int = 2,
        faults: Iterable[str] = (),
    ) -> None:
        self._asks = tuple(asks)
        self._owner = tuple(owner)
        self._late = late
        self._dies = dies
        self._starts = starts
        self._faults = frozenset(faults)

    # ---- explorer.Model

    def starts(self) -> Iterable[State]:
        yield State(
            waiter=Waiter(),
            owner="holds",
            coordinator=Coordinator(),
            queue=(),
            buffer=(),
            mailbox=(0, 0, 0, 0),
            asleep=False,
            byte=False,
            in_index=False,
            epoch=1,
            dies=self._dies,
            starts=self._starts,
        )

    def wrong(self, state: State) -> str:
        return state.wrong

    def stuck(self, state: State) -> str:
        if state.waiter.phase != "done":
            return f"M2: request {state.waiter.asked} waits for ever ({state.waiter.phase})"
        return ""

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        yield from self._waiter_steps(state)
        yield from self._owner_steps(state)
        yield from self._coordinator_steps(state)
        if state.buffer:
            place, value = state.buffer[0]
            mailbox = replaced(state.mailbox, place, value)
            yield f"{STEPS_OF[place]} is seen", state._replace(mailbox=mailbox, buffer=state.buffer[1:])

        if stored := state.waiter.stored:
            waiter = state.waiter._replace(stored=stored[1:])
            what = "asleep" if stored[0] else "awake"
            yield f"{what} is seen", state._replace(asleep=stored[0], waiter=waiter)

    # ---- the owner

    def _owner_steps(self, state: State) -> Iterator[tuple[str, State]]:
        if state.owner != "holds" or not state.coordinator.lives:
            return
        for what in self._owner:
            if what == "gone":
                yield "owner: dies", state._replace(owner="gone")
            elif len(state.queue) < 2:
                message = Message("written", state.epoch)
                yield "owner: sends written", state._replace(owner="written", queue=(*state.queue, message))

    # ---- the waiter

    def _waiter_steps(self, state: State) -> Iterator[tuple[str, State]]:
        waiter = state.waiter
        match waiter.phase:
            case "idle":
                if waiter.asked == len(self._asks) or not state.coordinator.lives:
                    done = Waiter("done", stored=waiter.stored)
                    yield "waiter: has asked all, or nobody is there", state._replace(waiter=done)
                elif len(state.queue) < 2:
                    yield self._send(state, self._asks[waiter.asked])
            case "say":
                if len(waiter.stored) < _BUFFERED:
                    goes_on = "look id" if "looks before its word is seen" in self._faults else "enter kernel"
                    said = waiter._replace(phase=goes_on, sleeps=True, stored=(*waiter.stored, True))
                    yield "waiter: says that it sleeps", state._replace(waiter=said)
            case "enter kernel":
                if not waiter.stored:
                    yield "waiter: enters the kernel", state._replace(waiter=waiter._replace(phase="look id"))
            case "poll":
                if state.byte:
                    phase = "look id" if "reads empty after looking" in self._faults else "read empty"
                    yield "waiter: poll", state._replace(waiter=waiter._replace(phase=phase))
                yield from self._other_ends(state)
            case "read empty":
                after = state._replace(byte=False, waiter=waiter._replace(phase="look id"))
                if "reads empty after looking" in self._faults:
                    after = state._replace(byte=False, waiter=waiter._replace(phase="poll"))
                yield "waiter: read empty", after
            case _:
                yield from self._look_steps(state)

    def _look_steps(self, state: State) -> Iterator[tuple[str, State]]:
        waiter = state.waiter
        match waiter.phase:
            case "look id":
                is_it = state.mailbox[ID] == waiter.asked
                phase = "look head" if is_it else self._no_reply(waiter)
                yield "waiter: look", state._replace(waiter=waiter._replace(phase=phase))
            case "look head":
                found = waiter._replace(phase="look a", head=state.mailbox[HEAD])
                yield "waiter: look head", state._replace(waiter=found)
            case "look a":
                found = waiter._replace(phase="look b", body_a=state.mailbox[BODY_A])
                yield "waiter: look a", state._replace(waiter=found)
            case "look b":
                yield "waiter: look b", self._judge(state)

    def _no_reply(self, waiter: Waiter) -> str:
        if not waiter.sleeps:
            return "say"
        return "read empty" if "reads empty after looking" in self._faults else "poll"

    def _send(self, state: State, ask: Ask) -> tuple[str, State]:
        request = state.waiter.asked + 1
        waiter = state.waiter._replace(phase="look id", asked=request, epoch=state.epoch)
        message = Message(ask, state.epoch, request)
        return f"waiter: sends {ask} {request}", state._replace(waiter=waiter, queue=(*state.queue, message))

    def _judge(self, state: State) -> State:
        waiter = state.waiter
        body_b = state.mailbox[BODY_B]
        if not waiter.head == waiter.body_a == body_b:
            return state._replace(waiter=waiter._replace(phase=self._no_reply(waiter), head=0, body_a=0))
        wrong = ""
        if Reply(body_b).request != waiter.asked:
            wrong = f"M1: request {waiter.asked} got the answer to {Reply(body_b).request}"
        return self._next(state)._replace(wrong=wrong)

    def _next(self, state: State) -> State:
        waiter = state.waiter
        stored = (*waiter.stored, False) if waiter.sleeps else waiter.stored
        return state._replace(waiter=Waiter(asked=waiter.asked, late=waiter.late, stored=stored))

    def _other_ends(self, state: State) -> Iterator[tuple[str, State]]:
        """How a wait ends without an answer: the deadline, the lock, the epoch."""
        waiter = state.waiter
        if waiter.late < self._late:
            late = waiter._replace(late=waiter.late + 1)
            yield "waiter: is late", self._next(state._replace(waiter=late))
        if not state.coordinator.lives and "does not look at the lock" not in self._faults:
            yield "waiter: sees that the lock is free", self._next(state)
        if state.epoch != waiter.epoch and "does not look at the epoch" not in self._faults:
            yield "waiter: sees another epoch", self._next(state)

    # ---- the coordinator

    def _coordinator_steps(self, state: State) -> Iterator[tuple[str, State]]:
        coordinator = state.coordinator
        if not coordinator.lives and not state.starts:
            return
        if not coordinator.lives:
            # The next one drains the queue, then announces its epoch; what was in flight is gone.
            epoch = state.epoch + 1
            after = state._replace(
                coordinator=Coordinator(epoch=epoch, saving=False),
                queue=(),
                epoch=epoch,
                byte="does not wake all" not in self._faults or state.byte,
                starts=state.starts - 1,
            )
            yield "coordinator: the next one starts", after
            return
        if state.dies:
            dead = Coordinator(lives=False, epoch=coordinator.epoch, saving=False)
            yield "coordinator: is killed", state._replace(coordinator=dead, dies=state.dies - 1)
        if coordinator.left:
            yield from self._deliver(state)
        elif state.queue:
            message = state.queue[0]
            yield f"coordinator: handles {message.what}", self._handle(state, message)
        if not coordinator.left and state.owner == "gone" and coordinator.saving:
            yield "coordinator: the owner is gone", self._end(state, published=False)

    def _handle(self, state: State, message: Message) -> State:
        state = state._replace(queue=state.queue[1:])
        coordinator = state.coordinator
        if message.request and "reply to a mailbox whose request has changed" not in self._faults:
            coordinator = coordinator._replace(parked=0)
        state = state._replace(coordinator=coordinator)
        if message.epoch != coordinator.epoch:
            return self._answer(state, message, 3) if message.request else state
        if message.what == "written":
            return self._end(state, published=True) if coordinator.saving else state
        if message.what == "other":
            return self._answer(state, message, 3)
        return self._await(state, message)

    def _await(self, state: State, message: Message) -> State:
        """Looks into the index first: the save may have ended before the question came."""
        coordinator = state.coordinator
        parked = coordinator._replace(parked=message.request)
        if "waits without looking into the index" in self._faults:
            return state._replace(coordinator=parked)
        if state.in_index and "answers without looking into the index" not in self._faults:
            return self._answer(state, message, 1)
        if not coordinator.saving:
            after = self._answer(state, message, 2)
            wrong = "M1: told that a row is not there, which is there" if state.in_index else ""
            return after._replace(wrong=wrong)
        return state._replace(coordinator=parked)

    def _answer(self, state: State, message: Message, says: int) -> State:
        left = (*state.coordinator.left, message.request * 4 + says)
        return state._replace(coordinator=state.coordinator._replace(left=left))

    def _end(self, state: State, *, published: bool) -> State:
        """The save ends: published before anybody is told."""
        coordinator = state.coordinator._replace(saving=False, parked=0)
        if state.coordinator.parked:
            reply = state.coordinator.parked * 4 + (1 if published else 2)
            coordinator = coordinator._replace(left=(*coordinator.left, reply))
        return state._replace(coordinator=coordinator, in_index=state.in_index or published)

    def _deliver(self, state: State) -> Iterator[tuple[str, State]]:
        """1. body  2. length and checksum  3. request id  4. the byte, if its reader sleeps."""
        coordinator = state.coordinator
        reply = coordinator.left[0]
        order = list(STEPS)
        if "id before the body" in self._faults:
            order = [3, 1, 2, 4]
        elif "byte before the reply" in self._faults:
            order = [4, 1, 2, 3]
        step = order[coordinator.at - 1]
        if coordinator.at < len(order):
            after = coordinator._replace(at=coordinator.at + 1)
        else:
            after = coordinator._replace(left=coordinator.left[1:], at=1)
        what = f"coordinator: {step} {STEPS[step]} of the reply to {Reply(reply).request}"
        if step == 4:
            if not state.buffer or "looks whether anybody sleeps before its reply is seen" in self._faults:
                yield what, state._replace(coordinator=after, byte=state.byte or state.asleep)
            return
        stores = {
            1: ((BODY_A, reply), (BODY_B, reply)),
            2: ((HEAD, reply),),
            3: ((ID, Reply(reply).request),),
        }[step]
        if len(state.buffer) + len(stores) <= _BUFFERED:
            yield what, state._replace(coordinator=after, buffer=(*state.buffer, *stores))


STEPS_OF = {BODY_A: "body a", BODY_B: "body b", HEAD: "length and checksum", ID: "request id"}
