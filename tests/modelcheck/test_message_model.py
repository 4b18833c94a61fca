"""Messages in every order, their planted faults, and that model, docstrings and code take the same steps."""

from __future__ import annotations

import inspect
import re
import threading
import time
from typing import Any

import pytest
from code_steps import comments
from explorer import Exploration, explore
from message_model import STEPS, WAIT_STEPS, Ask, MessageModel, State
from support import Namespace, identity, plan, prompt

from shmcache import mq, page
from shmcache.control import ControlPage
from shmcache.page import BODY_OFFSET, ClientPage, WorkerPage

THREE: tuple[Ask, ...] = ("await", "await", "other")


def run(**options: Any) -> Exploration[State]:
    return explore(MessageModel(**options))


@pytest.mark.parametrize(
    ("options", "floor"),
    [
        ({"late": 0}, 200),
        ({"late": 1}, 600),
        ({"late": 2, "asks": THREE}, 1_500),
        ({"late": 0, "dies": 1, "starts": 0}, 400),
        ({"late": 0, "dies": 1}, 1_500),
        ({"late": 1, "dies": 2, "asks": THREE}, 30_000),
    ],
    ids=["asked twice", "late once", "late twice", "killed for good", "killed once", "killed twice and late"],
)
def test_every_wait_ends_and_with_the_answer_to_its_own_question(options: dict[str, Any], floor: int) -> None:
    found = run(**options)
    assert found.counterexample is None, str(found.counterexample)
    assert found.states > floor


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "waits without looking into the index": ({"late": 0}, "M2"),
    "answers without looking into the index": ({"late": 0}, "M1"),
    "reply to a mailbox whose request has changed": ({"late": 1}, "M1"),
    "id before the body": ({"late": 0}, "M1"),
    "byte before the reply": ({"late": 0}, "M2"),
    "reads empty after looking": ({"late": 0}, "M2"),
    "looks before its word is seen": ({"late": 0}, "M2"),
    "looks whether anybody sleeps before its reply is seen": ({"late": 0}, "M2"),
    "does not look at the lock": ({"late": 0, "dies": 1, "starts": 0}, "M2"),
    "does not look at the epoch": ({"late": 0, "dies": 1}, "M2"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    options, what = FAULTS[fault]
    found = run(**options, faults=[fault])
    assert found.counterexample is not None
    assert found.counterexample.why.startswith(what)


def test_the_steps_of_a_reply_are_those_of_the_code() -> None:
    documented = re.findall(
        r"(\d)\. (.+?)(?=  \d\.|\.?$)", inspect.getdoc(ClientPage.send) or "", re.MULTILINE
    )
    assert {int(number): name for number, name in documented} == STEPS
    assert comments(ClientPage.send) == list(STEPS)
    with Namespace() as space:
        space.start()
        cache = space.cache()
        assert cache.connection.reader() is not None
        worker = cache.connection.page
        assert worker is not None
        worker.prepare_wait(0)
        client = ClientPage(space.names, worker.client)
        taken: list[int] = []
        _watch(client, taken)
        client.send(0, 7, b"body")
        assert taken == [1, 2, 3], "nobody sleeps"
        assert worker.wait(0, 7, time.monotonic_ns() + 10**9) == b"body"
        worker.words[page.ASLEEP_WORD] = 1
        client.send(0, 8, b"body")
        assert taken == [1, 2, 3, *STEPS]


class _Watched:
    """A view that notes what is stored where."""

    def __init__(self, view: memoryview, note: Any) -> None:
        self._view, self._note = view, note

    def __setitem__(self, at: Any, value: Any) -> None:
        self._note(at)
        self._view[at] = value

    def __getitem__(self, at: Any) -> Any:
        return self._view[at]


def _watch(client: ClientPage, taken: list[int]) -> None:
    """Have the steps noted as they are taken: by the place of each store, and the wake."""
    start = page.MAILBOX_OFFSET

    def stored(at: slice) -> None:
        taken.append({start + BODY_OFFSET: 1, start + 8: 2}[at.start])

    def word_stored(at: int) -> None:
        assert at * 8 == start
        taken.append(3)

    class Mapping:
        bytes = _Watched(client._mapping.bytes, stored)

    wake = client.wake

    def woken(mailbox: int) -> bool:
        taken.append(4)
        return wake(mailbox)

    client._mapping = Mapping()  # type: ignore[assignment]
    client.words = _Watched(client.words, word_stored)  # type: ignore[assignment]
    client.wake = woken  # type: ignore[method-assign]


def test_the_steps_of_a_wait_are_those_of_the_code() -> None:
    documented = (inspect.getdoc(WorkerPage._sleep) or "").lower()
    assert ", ".join(WAIT_STEPS) in documented
    code = inspect.getsource(WorkerPage._sleep)
    taken = ("] = 1", "os.sched_yield()", "self.reply(", "poll.poll(", "os.read(")
    assert sorted(taken, key=code.index) == list(taken)


def test_a_wait_ends_when_the_next_coordinator_is_there_before_anybody_has_looked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found by the model: a restart between two looks at the lock kept a waiter to its deadline."""
    who, text = identity(), prompt(3000)
    with Namespace() as space:
        space.start()
        owner, waiter = space.cache(), space.cache()
        grants = owner.reserve([plan(who, text)], None, 0)
        assert grants.slabs[0] is not None
        key = plan(who, text).address
        assert key is not None
        began_s = time.monotonic()
        waiting = threading.Thread(target=waiter.wait, args=(key.key, 60_000))
        waiting.start()
        monkeypatch.setattr(ControlPage, "coordinator_lives", lambda _page: True)
        space.restart()
        waiting.join(10)
        assert not waiting.is_alive()
        assert time.monotonic() - began_s < 10


def test_a_reservation_is_given_back_though_the_queue_was_full_when_it_was_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    who, text = identity(), prompt(3000)
    with Namespace() as space:
        space.start()
        owner, other = space.cache(), space.cache()
        (slab,) = owner.reserve([plan(who, text)], None, 0).slabs
        assert slab is not None
        slab.payload(4096)
        with monkeypatch.context() as full:
            full.setattr(mq.RequestQueue, "send", lambda *_: False)
            slab.cancel()
            assert owner.flush(5_000)
        until_s = time.monotonic() + 10
        while other.reserve([plan(who, text)], None, 0).slabs[0] is None:
            assert time.monotonic() < until_s
            time.sleep(0.05)
