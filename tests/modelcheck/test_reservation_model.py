"""Reservations in every order, their planted faults, and the coordinator's own code on the model's paths."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from explorer import Exploration, explore
from reservation_model import ReservationModel, State
from support import Namespace, plan, prompt, save
from test_coordinator import EPOCH, NOW, SLAB, WHO, Desk, key_of, plan_of

from shmcache.connection import Connection, Head
from shmcache.coordinator import Reply
from shmcache.mq import RequestQueue
from shmcache.protocol import (
    NO_MAILBOX,
    AnyRequest,
    Cancel,
    Reserve,
    Reserved,
    Stale,
    Written,
    decode_request,
)
from shmcache.slab import UnnamedSlab
from shmcache.tiers.base import HandOver, file_name
from shmcache.tiers.supervisor import Link, Survey

KK = ("K", "K")
TEXTS = {key: prompt(700, key) for key in "KJR"}


def run(**options: Any) -> Exploration[State]:
    return explore(ReservationModel(**options))


RUNS: dict[str, tuple[dict[str, Any], int]] = {
    "two keys": ({}, 300),
    "a row has to leave": ({"rows": ["R"]}, 300),
    "one key": ({"wants": KK, "budget": 2}, 150),
    "one dies": ({"deaths": 1, "rows": ["R"]}, 1_500),
    "one is taken for stuck": ({"stucks": 1, "wants": KK, "budget": 2}, 600),
    "one is taken for stuck and one dies": ({"stucks": 1, "deaths": 1, "wants": KK, "budget": 2}, 2_500),
    "let go and late": ({"lets_go": True, "lates": 1}, 4_500),
    "the coordinator is killed": ({"kills": 1, "rows": ["R"]}, 6_000),
    "killed, for one key": ({"kills": 1, "wants": KK, "budget": 2}, 4_000),
    "killed twice": ({"kills": 2}, 20_000),
    "all but late": ({"kills": 1, "deaths": 1, "stucks": 1, "lets_go": True}, 30_000),
}


LONG_RUNS: dict[str, dict[str, Any]] = {
    "late and killed": {"kills": 1, "lates": 1},
    "late twice, one dies": {"lates": 2, "deaths": 1, "lets_go": True},
    "killed twice, one dies": {"kills": 2, "deaths": 1},
    "one key, killed and stuck": {"wants": KK, "budget": 2, "kills": 1, "stucks": 1, "lets_go": True},
}


@pytest.mark.stress
@pytest.mark.parametrize("name", LONG_RUNS)
def test_no_byte_is_given_twice_in_longer_histories(name: str) -> None:
    found = run(**LONG_RUNS[name])
    assert found.counterexample is None, str(found.counterexample)


@pytest.mark.parametrize("name", RUNS)
def test_no_byte_is_given_twice_and_nothing_is_left(name: str) -> None:
    options, floor = RUNS[name]
    found = run(**options)
    assert found.counterexample is None, str(found.counterexample)
    assert found.states > floor


# Where the first thing to show is a worker without an answer.
SHOWN_AS = {"gone though it lives": "B4"}
FAULTS: dict[str, dict[str, Any]] = {
    "a lost reservation frees bytes that are still written": {"stucks": 1},
    "gone though it lives": {},
    "grant before the removal has ended": {"rows": ["R"]},
    "does not ask what is held": {"kills": 1},
    "asks what is held before it announces": {"kills": 1, "lets_go": True},
    "allocates without looking at the epoch": {"kills": 1},
    "does not look at what is stated no more": {"kills": 1},
    "unstated before they are freed": {"kills": 1, "lets_go": True},
    "a second reserve answers to the first": {"lates": 1},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    found = run(**FAULTS[fault], faults=[fault])
    assert found.counterexample is not None
    assert found.counterexample.why.startswith(SHOWN_AS.get(fault, "B1"))


class Replay:
    """The coordinator's own code, led along a path of the model."""

    def __init__(self, model: ReservationModel, space: Namespace, options: dict[str, Any]) -> None:
        self._model = model
        self._desk = Desk(space, slabs=options.get("budget", 1))
        for key in options.get("rows", ()):
            self._desk.save(TEXTS[key])
        self._desk.epoch = EPOCH + 1
        self._desk.coordinator._epoch = EPOCH + 1
        self._queue: list[AnyRequest] = []
        self._asked: dict[tuple[int, int], int] = {}
        self._tokens: dict[int, int] = {}
        self._replies: list[Reply] = []

    def step(self, before: State, what: str, after: State) -> None:
        """Do what the model does, and compare."""
        self._replies = []
        who, _, act = what.partition(": ")
        if who == "coordinator":
            self._coordinator(before, act)
        else:
            self._worker(before, int(who.removeprefix("worker ")), act)
        self._compare(before, after)

    def close(self) -> None:
        self._desk.close()

    # a worker's acts

    def _worker(self, before: State, client: int, act: str) -> None:
        worker = before.workers[client]
        text = TEXTS[self._model.wants[client]]
        token = self._tokens.get(worker.token, 0)
        head = Head(
            epoch=EPOCH + before.coordinator.epoch,
            client=client,
            mailbox=0,
            request=next(self._desk._requests),
        )
        match act:
            case "states its bytes":
                self._desk.unnamed[client] = SLAB
            case "states none any more":
                self._desk.unnamed[client] = 0
            case "links it into in/":
                self._desk.put(text, token)
            case "sends reserve":
                self._asked[client, worker.asked + 1] = head["request"]
                self._queue.append(Reserve(**head, forget=0, base=None, plans=[plan_of(text)]))
            case "sends written":
                self._queue.append(Written(**head, token=token, key=key_of(text)))
            case "sends cancel":
                self._queue.append(Cancel(**{**head, "mailbox": NO_MAILBOX}, tokens=[token]))
            case "sends a late cancel":
                asked = self._asked[client, worker.owes]
                self._queue.append(Cancel(**{**head, "mailbox": NO_MAILBOX}, tokens=[], asked=asked))

    # the coordinator's acts

    def _coordinator(self, before: State, act: str) -> None:
        coordinator = self._desk.coordinator
        match act.split(" "):
            case ["handles", *_]:
                request = self._queue.pop(0)
                if request.client in before.coordinator.known:
                    self._replies = coordinator.handle(request, NOW)
                    self._note_token(before, request)
            case ["lane:", *job]:
                self._lane(job)
            case ["takes", *_]:
                self._take_one()
            case ["worker", client, "is", "gone"]:
                self._replies = coordinator.client_gone(int(client), NOW)
                self._desk.unnamed.pop(int(client), None)
            case ["worker", client, "is", "stuck"]:
                self._replies = coordinator.client_stuck(int(client), NOW)
            case ["sweeps"]:
                self._replies = coordinator.sweep(NOW)
                self._desk.lane.queued.remove(Survey())
            case _:
                self._restart(before, act)

    def _lane(self, job: list[str]) -> None:
        if job[0] != "links":
            self._desk.lane.step()
            return
        # The first of the two steps that MemoryTier.link takes; a kill may come before the second.
        first = self._desk.lane.queued[0]
        assert isinstance(first, Link)
        directory = self._desk.names.tier("ram_file", EPOCH)
        os.link(directory / "in" / first.handover.name, directory / file_name(first.handover.key))

    def _restart(self, before: State, act: str) -> None:
        """What the server does around it."""
        match act:
            case "is killed":
                self._desk.lane.close()
            case "the next one adopts":
                for client, worker in enumerate(before.workers):
                    if not worker.lives:
                        self._desk.unnamed.pop(client, None)
                self._desk.start(epoch=EPOCH + before.coordinator.epoch + 1)
            case "drains the queue, announces":
                self._queue.clear()
            case "asks what is held":
                self._desk.coordinator.announced()

    def _take_one(self) -> None:
        lane = self._desk.lane
        left = lane._done[1:]
        del lane._done[1:]
        self._replies = self._desk.coordinator.outcomes(NOW)
        lane._done = left

    def _note_token(self, before: State, request: AnyRequest) -> None:
        if isinstance(request, Reserve):
            for held in self._desk.coordinator._reservations:
                if held.token not in self._tokens.values():
                    self._tokens[before.tokens + 1] = held.token

    # the comparison

    def _compare(self, before: State, after: State) -> None:
        theirs, ours = after.coordinator, self._desk.coordinator
        names = {key_of(text): key for key, text in TEXTS.items()}
        directory = self._desk.names.tier("ram_file", EPOCH)
        handed = {HandOver.from_name(path.name) for path in (directory / "in").iterdir()}
        assert {(names[one.key], one.token) for one in handed if one is not None} == {
            (file.key, self._tokens[file.token]) for file in after.handed
        }
        files = {names[bytes.fromhex(path.stem)] for path in directory.glob("*.kvc")}
        assert files == {file.key for file in after.tier}
        if theirs.phase == "dead":
            return
        assert {names[found.row.key] for found in self._desk.index.rows()} == set(theirs.rows)
        held = {(one.token, one.client, one.state, one.asked) for one in ours._reservations}
        assert held == {
            (self._tokens[one.token], one.client, one.state, self._asked.get((one.client, one.asked), 0))
            for one in theirs.reservations
        }
        assert self._desk.lane.queued.__len__() == len(theirs.jobs)
        self._compare_replies(before, after)

    def _compare_replies(self, before: State, after: State) -> None:
        """A worker that goes on because of the coordinator has its answer; no other has one."""
        said = {}
        for reply in self._replies:
            asked = self._asked.get((reply.client, before.workers[reply.client].asked))
            if isinstance(reply.body, Reserved) and reply.request != asked:
                continue
            is_grant = isinstance(reply.body, Reserved) and reply.body.verdicts[0].kind == "granted"
            if not isinstance(reply.body, Stale):
                said[reply.client] = "granted" if is_grant else "done"
        for client, (was, now) in enumerate(zip(before.workers, after.workers, strict=True)):
            if was.phase in ("asked", "told") and was.lives and self._replies:
                expected = now.phase if now.phase != was.phase else None
                is_late = was.epoch != after.coordinator.epoch
                assert said.get(client) == expected or is_late, (client, was, now, self._replies)


@pytest.mark.parametrize("name", RUNS)
def test_the_coordinators_own_code_goes_where_the_model_goes(name: str) -> None:
    options, _ = RUNS[name]
    model = ReservationModel(**options)
    chosen = random.Random(name)
    steps = 0
    with Namespace() as space:
        for _ in range(25):
            replay = Replay(model, space, options)
            try:
                (state,) = model.starts()
                path: list[str] = []
                while choices := list(model.steps(state)):
                    what, after = chosen.choice(choices)
                    path.append(what)
                    try:
                        replay.step(state, what, after)
                    except AssertionError as error:
                        raise AssertionError("\n".join([str(error), *path])) from error
                    state = after
                steps += len(path)
            finally:
                replay.close()
                for file in space.names.tier("ram_file", EPOCH).rglob("*.*"):
                    file.unlink()
    assert steps > 200


SAVES = (
    "sends reserve",
    "states its bytes",
    "looks at the epoch",
    "allocates them",
    "writes all",
    "links it into in/",
    "states none any more",
    "sends written",
)
LETS_GO = (*SAVES[:4], "frees its bytes", "states none any more", "sends cancel")


def path_of_one(*, lets_go: bool) -> list[str]:
    """What the model's only worker does, from its reserve to its last message."""
    model = ReservationModel(["K"], lets_go=lets_go)
    (state,) = model.starts()
    path = []
    while choices := list(model.steps(state)):
        if lets_go and state.workers[0].unnamed:
            choices.sort(key=lambda choice: choice[0] != "worker 0: lets go")
        what, state = choices[0]
        path.append(what)
    acts = [what.removeprefix("worker 0: ") for what in path if what.startswith("worker 0")]
    return [act for act in acts if act in (*SAVES, *LETS_GO)]


@pytest.mark.parametrize("lets_go", [False, True], ids=["saves", "lets go"])
def test_a_worker_takes_its_steps_in_the_order_of_the_model(
    lets_go: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []

    def note(owner: Any, name: str, say: Callable[..., str]) -> None:
        inner = getattr(owner, name)

        def noted(*args: Any, **options: Any) -> Any:
            if act := say(*args):
                taken.append(act)
            return inner(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    note(Connection, "hold_unnamed", lambda _, by: "states its bytes" if by > 0 else "states none any more")
    note(Connection, "is_epoch", lambda *_: "looks at the epoch")
    note(UnnamedSlab, "__init__", lambda *_: "allocates them")
    note(UnnamedSlab, "finish", lambda *_: "writes all")
    note(UnnamedSlab, "link", lambda *_: "links it into in/")
    note(UnnamedSlab, "close", lambda *_: "" if "links it into in/" in taken else "frees its bytes")
    note(RequestQueue, "send", lambda _, message, *__: f"sends {sent_kind(message)}")
    with Namespace() as space:
        space.start()
        cache = space.cache()
        assert cache.connection.reader() is not None
        if lets_go:
            (slab,) = cache.reserve([plan(WHO, TEXTS["K"])], None, 0).slabs
            assert slab is not None
            slab.payload(4096)
            slab.cancel()
            cache.flush(5_000)
        else:
            assert save(cache, WHO, TEXTS["K"], bytes(4096))
    assert taken == path_of_one(lets_go=lets_go) == list(LETS_GO if lets_go else SAVES)


def sent_kind(message: bytes) -> str:
    return type(decode_request(message)).__name__.lower()
