"""Reserve, hold, write, link, publish: who may write, and is every byte paid for, in every order?

Workers that save one slab each, a coordinator with its lane, the files in `in/` and in the tier. Every
slab is one unit; the budget is a few units. A worker may let go, be late, get stuck or die between any two
steps, the coordinator may be killed between any two of its own and start again, and nobody waits for
anybody but by the rules.

A message is handled in one step, as in Coordinator.handle; a reply arrives with it (the message model has
the rest). The lane links in two steps, so that a kill can fall between both names. States and events of a
save are those of reservation.TRANSITIONS, looked up there: an illegal one is an error.

What must hold
    B1  Bytes without a name, in `in/` and in the tier never exceed the budget.
    B2  A row that is published has its file.
    B3  One live reservation a key.
    B4  At rest nothing is charged, waits in `in/`, or lies in the tier without a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from shmcache.reservation import ENDED, TRANSITIONS, Event
from shmcache.reservation import State as SaveState

NOBODY = -1
_HOLDS_KEY = (SaveState.RESERVED, SaveState.WRITTEN, SaveState.CHECKED, SaveState.LINKED)


class Reservation(NamedTuple):
    token: int
    client: int
    key: str  # "" where another holds the key of an adopted slab
    state: SaveState
    asked: int = 0  # number of the reserve that it answers


class Message(NamedTuple):
    what: str  # reserve, written, cancel
    client: int
    epoch: int
    token: int = 0
    asked: int = 0


class File(NamedTuple):
    """A slab with a name; the same one in `in/` and in the tier is one file with two names."""

    key: str
    token: int


class Job(NamedTuple):
    what: str  # link, remove
    key: str
    token: int = 0


class Worker(NamedTuple):
    """One save.

    phase    idle → asked → granted → stated → sure → made → complete → linked → unstated → told → done
             or, from granted to made: → lets go → unstated again → done
    stated   what its page says that it holds without a name
    unnamed  what it holds
    asked    reserves sent so far
    owes     a reserve that came to nothing in time, whose cancel is not sent yet
    """

    phase: str = "idle"
    token: int = 0
    epoch: int = 0
    stated: int = 0
    unnamed: int = 0
    lives: bool = True
    asked: int = 0
    owes: int = 0


class Coordinator(NamedTuple):
    """phase: serves, dead → adopted → announced → serves."""

    phase: str = "serves"
    epoch: int = 1
    rows: tuple[str, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    jobs: tuple[Job, ...] = ()
    done: tuple[Job, ...] = ()
    known: tuple[int, ...] = ()  # clients whose pages it has
    held_before: tuple[int, ...] = ()  # by client, what it held when this coordinator came
    leaving: int = 0
    deferred: tuple[tuple[int, Message], ...] = ()  # removals that have to end first, the reserve
    parked: tuple[int, ...] = ()  # clients that wait for the outcome of their token


class State(NamedTuple):
    workers: tuple[Worker, ...]
    coordinator: Coordinator
    queue: tuple[Message, ...]
    handed: tuple[File, ...]
    tier: tuple[File, ...]
    tokens: int
    deaths: int
    kills: int
    stucks: int
    lates: int
    wrong: str = ""


class ReservationModel:
    """Workers that each want one row.

    Args:
        wants: the key that each worker saves.
        budget: units of the tier.
        rows: what lies in the tier at the beginning.
        deaths, kills, stucks, lates: how often a worker dies, the coordinator is killed, a worker is taken
            for stuck, an answer comes too late: then the worker asks again, and its cancel may be late too.
        lets_go: whether a worker may let go of a slab that it was granted.
        faults: planted mistakes, by name.
    """

    def __init__(
        self,
        wants: Iterable[str] = ("K", "J"),
        *,
        budget: int = 1,
        rows: Iterable[str] = (),
        deaths: int = 0,
        kills: int = 0,
        stucks: int = 0,
        lates: int = 0,
        lets_go: bool = False,
        faults: Iterable[str] = (),
    ) -> None:
        self.wants = tuple(wants)
        self._budget = budget
        self._rows = tuple(rows)
        self._may = (deaths, kills, stucks, lates)
        self._lets_go = lets_go
        self._faults = frozenset(faults)

    # ---- explorer.Model

    def starts(self) -> Iterable[State]:
        count = len(self.wants)
        coordinator = Coordinator(rows=self._rows, known=tuple(range(count)), held_before=(0,) * count)
        tier = tuple(File(key, 0) for key in self._rows)
        yield State((Worker(),) * count, coordinator, (), (), tier, 0, *self._may)

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        for client, worker in enumerate(state.workers):
            for what, after in self._worker_steps(state, client, worker):
                yield f"worker {client}: {what}", after
        for what, after in self._coordinator_steps(state):
            yield f"coordinator: {what}", after

    def wrong(self, state: State) -> str:
        if state.wrong:
            return state.wrong
        if (used := self.used(state)) > self._budget:
            return f"B1: {used} units are written and {self._budget} are there"
        if missing := set(state.coordinator.rows) - {file.key for file in state.tier}:
            return f"B2: rows without a file: {missing}"
        keys = [one.key for one in state.coordinator.reservations if one.key and one.state in _HOLDS_KEY]
        return "B3: a key is held twice" if len(keys) != len(set(keys)) else ""

    def stuck(self, state: State) -> str:
        for client, worker in enumerate(state.workers):
            if worker.lives and (worker.phase != "done" or worker.owes):
                return f"B4: worker {client} waits for ever ({worker.phase})"
        coordinator = state.coordinator
        left = (coordinator.reservations, state.handed, coordinator.jobs, coordinator.done, state.queue)
        if any(left):
            return f"B4: at rest there is {left}"
        if {file.key for file in state.tier} != set(coordinator.rows):
            return f"B4: files {state.tier} and rows {coordinator.rows}"
        return ""

    def used(self, state: State) -> int:
        """Units that exist: without a name, and each file once, however many names it has."""
        return sum(worker.unnamed for worker in state.workers) + len({*state.handed, *state.tier})

    # ---- a worker

    def _worker_steps(self, state: State, client: int, worker: Worker) -> Iterator[tuple[str, State]]:
        if not worker.lives:
            return
        if worker.owes and len(state.queue) < len(self.wants):
            yield self._cancels_late(state, client, worker)
        if worker.phase == "done":
            return
        if state.deaths:
            dead = Worker(lives=False, stated=worker.stated)
            yield "dies", _worker(state, client, dead)._replace(deaths=state.deaths - 1)
        phase = worker.phase
        if phase in _NEXT:
            yield self._goes_on(state, client, worker)
            if self._lets_go and phase in ("granted", "stated", "sure", "made"):
                yield "lets go", _worker(state, client, worker._replace(phase="lets go"))
        elif phase in ("idle", "unstated", "unstated again"):
            yield from self._sends(state, client, worker)
        elif phase in ("asked", "told"):
            yield from self._waits(state, client, worker)
        else:
            yield self._frees(state, client, worker)

    def _goes_on(self, state: State, client: int, worker: Worker) -> tuple[str, State]:
        after = worker._replace(phase=_NEXT[worker.phase])
        handed = state.handed
        match worker.phase:
            case "granted":
                what, after = "states its bytes", after._replace(stated=1)
            case "stated":
                what = "looks at the epoch"
                # Only then: who grants for another epoch looks at what is stated when it has announced it.
                is_late = state.coordinator.epoch != worker.epoch
                if is_late and "allocates without looking at the epoch" not in self._faults:
                    what, after = "sees another epoch", worker._replace(phase="lets go")
            case "sure":
                what, after = "allocates them", after._replace(unnamed=1)
            case "made":
                what = "writes all"
            case "complete":
                what, after = "links it into in/", after._replace(unnamed=0)
                handed = (*handed, File(self.wants[client], worker.token))
            case _:
                what, after = "states none any more", after._replace(stated=0)
        return what, _worker(state, client, after)._replace(handed=handed)

    def _frees(self, state: State, client: int, worker: Worker) -> tuple[str, State]:
        """Letting go: the bytes first, then what the page says of them."""
        order = ["unnamed", "stated"]
        if "unstated before they are freed" in self._faults:
            order.reverse()
        for what in order:
            if getattr(worker, what):
                after = worker._replace(**{what: 0})
                said = "frees its bytes" if what == "unnamed" else "states none any more"
                return said, _worker(state, client, after)
        return "has let go", _worker(state, client, worker._replace(phase="unstated again"))

    def _sends(self, state: State, client: int, worker: Worker) -> Iterator[tuple[str, State]]:
        what, after = {
            "idle": ("reserve", "asked"),
            "unstated": ("written", "told"),
            "unstated again": ("cancel", "done"),
        }[worker.phase]
        if state.coordinator.phase == "dead":
            # Nothing is sent to a coordinator that is down.
            yield "nobody to ask", _worker(state, client, worker._replace(phase="done"))
        elif len(state.queue) < len(self.wants):
            asked = worker.asked + (what == "reserve")
            message = Message(what, client, state.coordinator.epoch, worker.token, asked)
            sent = worker._replace(phase=after, epoch=state.coordinator.epoch, asked=asked)
            yield f"sends {what}", _worker(state, client, sent)._replace(queue=(*state.queue, message))

    def _waits(self, state: State, client: int, worker: Worker) -> Iterator[tuple[str, State]]:
        """A wait ends by its answer (coordinator), the lock, the epoch or the deadline."""
        coordinator = state.coordinator
        if coordinator.phase == "dead":
            yield "sees that the lock is free", _worker(state, client, worker._replace(phase="done"))
        elif coordinator.epoch != worker.epoch:
            again = "idle" if worker.phase == "asked" else "unstated"
            yield "sees another epoch", _worker(state, client, worker._replace(phase=again))
        if state.lates and worker.phase == "asked":
            late = worker._replace(phase="idle", owes=worker.asked)
            yield "is late", _worker(state, client, late)._replace(lates=state.lates - 1)

    def _cancels_late(self, state: State, client: int, worker: Worker) -> tuple[str, State]:
        """The queue may have been full: the cancel comes at any time, behind the next reserve too."""
        if state.coordinator.phase == "dead":
            return "owes nobody", _worker(state, client, worker._replace(owes=0))
        cancel = Message("cancel", client, state.coordinator.epoch, asked=worker.owes)
        after = _worker(state, client, worker._replace(owes=0))
        return "sends a late cancel", after._replace(queue=(*state.queue, cancel))

    # ---- the coordinator

    def _coordinator_steps(self, state: State) -> Iterator[tuple[str, State]]:
        coordinator = state.coordinator
        if coordinator.phase == "dead":
            yield from self._adopts(state)
            return
        if state.kills:
            dead = Coordinator(phase="dead", epoch=coordinator.epoch)
            yield "is killed", state._replace(coordinator=dead, kills=state.kills - 1)
        yield from self._lane_steps(state)
        if coordinator.phase == "adopted":
            announced = coordinator._replace(phase="announced", epoch=coordinator.epoch + 1)
            yield "drains the queue, announces", state._replace(coordinator=announced, queue=())
            return
        if coordinator.phase == "announced":
            serves = coordinator._replace(phase="serves")
            if "asks what is held before it announces" not in self._faults:
                serves = serves._replace(held_before=self._held(state))
            yield "asks what is held", self._adopt_orphans(state._replace(coordinator=serves))
            return
        if state.queue:
            message = state.queue[0]
            for after in self._handle(state._replace(queue=state.queue[1:]), message):
                yield f"handles {message.what} of {message.client}", after
        if coordinator.done:
            yield "takes an outcome", self._outcome(state)
        for client in coordinator.known:
            worker = state.workers[client]
            if not worker.lives or "gone though it lives" in self._faults:
                yield f"worker {client} is gone", self._gone(state, client)
            elif state.stucks and _reserved_by(coordinator, client):
                stuck = state._replace(stucks=state.stucks - 1)
                yield f"worker {client} is stuck", self._stuck(stuck, client)
        if self._has_unseen(state):
            yield "sweeps", self._sweep(state)

    def _lane_steps(self, state: State) -> Iterator[tuple[str, State]]:
        """The lane's thread: one job after the other."""
        coordinator = state.coordinator
        if not coordinator.jobs:
            return
        job, *left = coordinator.jobs
        ended = coordinator._replace(jobs=tuple(left), done=(*coordinator.done, job))
        file = File(job.key, job.token)
        if job.what == "remove":
            tier = tuple(one for one in state.tier if one.key != job.key)
            yield f"lane: removes {job.key}", state._replace(tier=tier, coordinator=ended)
        elif file not in state.handed:
            yield "lane: finds nothing to link", state._replace(coordinator=ended)
        elif any(one.key == job.key for one in state.tier):
            # Both names, or another valid slab of this key: the name in `in/` goes.
            handed = tuple(one for one in state.handed if one != file)
            yield f"lane: unlinks {job.key} in in/", state._replace(handed=handed, coordinator=ended)
        else:
            yield f"lane: links {job.key}", state._replace(tier=(*state.tier, file))

    # ---- messages

    def _handle(self, state: State, message: Message) -> Iterator[State]:
        if message.client not in state.coordinator.known:
            yield state  # its page has gone with it: nobody to answer
        elif message.epoch != state.coordinator.epoch:
            yield state  # stale: its sender sees the epoch and asks again
        elif message.what == "reserve":
            yield from self._reserve(state, message)
        elif message.what == "written":
            yield self._written(state, message)
        else:
            yield self._cancel(state, message)

    def _reserve(self, state: State, message: Message) -> Iterator[State]:
        state = self._note_held(state)
        client = message.client
        coordinator, key = state.coordinator, self.wants[client]
        held = next(
            (one for one in coordinator.reservations if one.key == key and one.state in _HOLDS_KEY), None
        )
        if key in coordinator.rows or held is not None:
            is_its_own = held is not None and held.client == client and held.state is SaveState.RESERVED
            if is_its_own and held is not None:
                if "a second reserve answers to the first" not in self._faults:
                    state = _asked(state, held.token, message.asked)
                yield self._granted(state, message, held.token)
            else:
                yield _answered(state, message, "done")
            return
        token = state.tokens + 1
        reservation = Reservation(token, client, key, SaveState.RESERVED, message.asked)
        opened = _open(state._replace(tokens=token), reservation)
        roomy = list(self._with_room(opened))
        for after in roomy:
            yield self._granted(after, message, token)
        if not roomy:
            yield _answered(self._advance(opened, token, Event.LET_GO), message, "done")

    def _granted(self, state: State, message: Message, token: int) -> State:
        """The answer waits until all that leaves is gone."""
        coordinator, client = state.coordinator, message.client
        worker = state.workers[client]
        if not _waits_for(worker, message):
            return state
        if coordinator.leaving and "grant before the removal has ended" not in self._faults:
            told = _worker(state, client, worker._replace(token=token))
            deferred = (*coordinator.deferred, (coordinator.leaving, message))
            return told._replace(coordinator=coordinator._replace(deferred=deferred))
        return _worker(state, client, worker._replace(phase="granted", token=token))

    def _written(self, state: State, message: Message) -> State:
        client, token = message.client, message.token
        state = state._replace(
            coordinator=state.coordinator._replace(parked=(*state.coordinator.parked, client))
        )
        held = _by_token(state.coordinator, token)
        if held is None or held.client != client:
            state = self._adopt_orphans(state)
            if _by_token(state.coordinator, token) is None:
                state = _woken(state, token)
            return state
        if held.state is SaveState.OVERTAKEN:
            return self._advance(_refused(state, token), token, Event.LET_GO)
        return self._take(state, token) if held.state is SaveState.RESERVED else state

    def _cancel(self, state: State, message: Message) -> State:
        """By token, or by the reserve that was not answered in time."""
        for held in state.coordinator.reservations:
            is_it = held.token == message.token if message.token else held.asked == message.asked
            if held.client == message.client and is_it:
                state = self._let_go(state, held)
        return state

    # ---- the shell's events

    def _gone(self, state: State, client: int) -> State:
        for held in state.coordinator.reservations:
            if held.client == client:
                state = self._let_go(state, held)
        state = self._adopt_orphans(state)
        coordinator = state.coordinator
        known = tuple(other for other in coordinator.known if other != client)
        parked = tuple(other for other in coordinator.parked if other != client)
        return state._replace(coordinator=coordinator._replace(known=known, parked=parked))

    def _stuck(self, state: State, client: int) -> State:
        for held in state.coordinator.reservations:
            if held.client == client and held.state is SaveState.RESERVED:
                is_lost = "a lost reservation frees bytes that are still written" in self._faults
                state = self._advance(state, held.token, Event.LET_GO if is_lost else Event.OVERTAKEN)
        return state

    def _has_unseen(self, state: State) -> bool:
        """Something in `in/` that no job and no message will come to."""
        return any(
            (held := _by_token(state.coordinator, file.token)) is None or held.state is SaveState.RESERVED
            for file in state.handed
        )

    def _sweep(self, state: State) -> State:
        for file in state.handed:
            held = _by_token(state.coordinator, file.token)
            if held is not None and held.state is SaveState.RESERVED:
                state = self._take(state, file.token)
        return self._adopt_orphans(state)

    def _outcome(self, state: State) -> State:
        job, *left = state.coordinator.done
        state = state._replace(coordinator=state.coordinator._replace(done=tuple(left)))
        if job.what == "remove":
            return self._removed(state)
        held = _by_token(state.coordinator, job.token)
        if held is None:
            return state
        state = self._advance(state, job.token, Event.LINKED)
        coordinator = state.coordinator
        if job.key not in coordinator.rows:
            state = state._replace(coordinator=coordinator._replace(rows=(*coordinator.rows, job.key)))
        return self._advance(state, job.token, Event.INDEXED)

    def _removed(self, state: State) -> State:
        coordinator = state.coordinator
        deferred = tuple((count - 1, message) for count, message in coordinator.deferred)
        waiting = tuple(entry for entry in deferred if entry[0] > 0)
        state = state._replace(
            coordinator=coordinator._replace(leaving=coordinator.leaving - 1, deferred=waiting)
        )
        for count, message in deferred:
            if count == 0:
                state = _answered(state, message, "granted")
        return state

    # ---- starting

    def _adopts(self, state: State) -> Iterator[tuple[str, State]]:
        """Look at the pages, scan the tier, take what waits in `in/`."""
        lives = tuple(client for client, worker in enumerate(state.workers) if worker.lives)
        coordinator = Coordinator(
            phase="adopted",
            epoch=state.coordinator.epoch,
            rows=tuple(file.key for file in state.tier),
            known=lives,
            held_before=self._held(state),
        )
        yield "the next one adopts", self._adopt_orphans(state._replace(coordinator=coordinator))

    def _note_held(self, state: State) -> State:
        """What a worker held of before and states no more has got its name, or is free."""
        coordinator = state.coordinator
        held = self._held(state)
        before = tuple(min(size, now) for size, now in zip(coordinator.held_before, held, strict=True))
        if before == coordinator.held_before:
            return state
        state = state._replace(coordinator=coordinator._replace(held_before=before))
        is_blind = "does not look at what is stated no more" in self._faults
        return state if is_blind else self._adopt_orphans(state)

    def _held(self, state: State) -> tuple[int, ...]:
        if "does not ask what is held" in self._faults:
            return (0,) * len(state.workers)
        return tuple(worker.stated if worker.lives else 0 for worker in state.workers)

    # ---- saves

    def _advance(self, state: State, token: int, event: Event) -> State:
        """As Reservations.advance: what has ended leaves the table, and its waiter is told."""
        coordinator = state.coordinator
        held = _by_token(coordinator, token)
        assert held is not None
        after = TRANSITIONS[held.state].get(event)
        if after is None:
            return state._replace(wrong=f"illegal: {event.value} in {held.state.value}")
        kept = held._replace(state=after, key=held.key if after in _HOLDS_KEY else "")
        reservations = tuple(
            kept if one.token == token else one
            for one in coordinator.reservations
            if one.token != token or after not in ENDED
        )
        state = state._replace(coordinator=coordinator._replace(reservations=reservations))
        return _woken(state, token) if after in ENDED else state

    def _take(self, state: State, token: int) -> State:
        """RESERVED → WRITTEN → CHECKED, and the link is under way; or refused."""
        state = self._advance(state, token, Event.NAMED)
        file = next((one for one in state.handed if one.token == token), None)
        if file is None:
            return self._advance(state, token, Event.REFUSED)
        return _link_job(self._advance(state, token, Event.CHECKED), file)

    def _let_go(self, state: State, held: Reservation) -> State:
        if held.state in (SaveState.WRITTEN, SaveState.CHECKED, SaveState.LINKED):
            return state
        if any(file.token == held.token for file in state.handed):
            if held.state is SaveState.RESERVED:
                return self._take(state, held.token)
            state = _refused(state, held.token)
        return self._advance(state, held.token, Event.LET_GO)

    def _adopt_orphans(self, state: State) -> State:
        """Slabs in `in/` whose reservation died with another coordinator."""
        for file in state.handed:
            if _by_token(state.coordinator, file.token) is None:
                state = self._adopt_one(state, file)
        return state

    def _adopt_one(self, state: State, file: File) -> State:
        held = any(one.key == file.key and one.state in _HOLDS_KEY for one in state.coordinator.reservations)
        key = "" if held else file.key
        state = _open(state, Reservation(file.token, NOBODY, key, SaveState.RESERVED))
        state = self._advance(state, file.token, Event.NAMED)
        roomy = None if file.key in state.coordinator.rows else next(self._with_room(state), None)
        if roomy is None:
            return self._advance(_refused(state, file.token), file.token, Event.REFUSED)
        return _link_job(self._advance(roomy, file.token, Event.CHECKED), file)

    # ---- room

    def _with_room(self, state: State) -> Iterator[State]:
        """The state after rows have left for what was just charged; none where that is not enough."""
        free = self._free(state)
        if free >= 0:
            yield state
        elif -free <= len(state.coordinator.rows):
            # Which rows are the coldest is not this model's question: any may be.
            rows = state.coordinator.rows
            for first in range(len(rows)):
                victims = (rows[first:] + rows[:first])[:-free]
                yield _evicted(state, victims)

    def _free(self, state: State) -> int:
        """As Coordinator._free_bytes."""
        coordinator = state.coordinator
        charged = [0] * len(self.wants)
        for one in coordinator.reservations:
            if one.client != NOBODY:
                charged[one.client] += 1
        held, before = self._held(state), coordinator.held_before
        unreserved = sum(
            max(min(before[client], held[client]), held[client] - charged[client])
            for client in coordinator.known
        )
        return self._budget - len(coordinator.rows) - len(coordinator.reservations) - unreserved


_NEXT = {
    "granted": "stated",
    "stated": "sure",
    "sure": "made",
    "made": "complete",
    "complete": "linked",
    "linked": "unstated",
}


def _worker(state: State, client: int, worker: Worker) -> State:
    workers = (*state.workers[:client], worker, *state.workers[client + 1 :])
    return state._replace(workers=workers)


def _waits_for(worker: Worker, message: Message) -> bool:
    """Whether the sender of a reserve still waits for the answer to this very one."""
    return worker.phase == "asked" and (worker.epoch, worker.asked) == (message.epoch, message.asked)


def _answered(state: State, message: Message, phase: str) -> State:
    """The answer to a reserve arrives, if its sender still waits for it."""
    worker = state.workers[message.client]
    if not _waits_for(worker, message):
        return state
    return _worker(state, message.client, worker._replace(phase=phase))


def _woken(state: State, token: int) -> State:
    """Who waits for the outcome of this token has it."""
    for client in state.coordinator.parked:
        worker = state.workers[client]
        if worker.token == token:
            parked = tuple(other for other in state.coordinator.parked if other != client)
            state = state._replace(coordinator=state.coordinator._replace(parked=parked))
            if worker.phase == "told":
                state = _worker(state, client, worker._replace(phase="done"))
    return state


def _asked(state: State, token: int, asked: int) -> State:
    """The reservation answers this reserve from now on."""
    reservations = tuple(
        one._replace(asked=asked) if one.token == token else one for one in state.coordinator.reservations
    )
    return state._replace(coordinator=state.coordinator._replace(reservations=reservations))


def _open(state: State, reservation: Reservation) -> State:
    reservations = (*state.coordinator.reservations, reservation)
    return state._replace(coordinator=state.coordinator._replace(reservations=reservations))


def _by_token(coordinator: Coordinator, token: int) -> Reservation | None:
    return next((one for one in coordinator.reservations if one.token == token), None)


def _reserved_by(coordinator: Coordinator, client: int) -> bool:
    return any(one.client == client and one.state is SaveState.RESERVED for one in coordinator.reservations)


def _link_job(state: State, file: File) -> State:
    jobs = (*state.coordinator.jobs, Job("link", file.key, file.token))
    return state._replace(coordinator=state.coordinator._replace(jobs=jobs))


def _refused(state: State, token: int) -> State:
    return state._replace(handed=tuple(file for file in state.handed if file.token != token))


def _evicted(state: State, victims: Iterable[str]) -> State:
    coordinator = state.coordinator
    gone = tuple(victims)
    return state._replace(
        coordinator=coordinator._replace(
            rows=tuple(key for key in coordinator.rows if key not in gone),
            jobs=(*coordinator.jobs, *(Job("remove", key) for key in gone)),
            leaving=coordinator.leaving + len(gone),
        )
    )
