"""Decisions of all processes: a real coordinator, real children, kill -9."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import Namespace, Pipe, eventually

from shmcache import connection
from shmcache.decisions import DecisionCache, MemoryStore
from shmcache.decisions.fallback import FallbackStore
from shmcache.decisions.shared import SharedClaim, SharedStore
from shmcache.errors import NoCoordinator
from shmcache.page import WorkerPage

QUESTIONS = {"q": {"type": "score"}}
KEY = b"k" * 16
PR_SET_SECCOMP = 22


@pytest.fixture
def store(space: Namespace) -> Iterator[SharedStore]:
    space.start()
    made = SharedStore(space.name)
    yield made
    made.close()


def cache_in(name: str, **options: Any) -> DecisionCache:
    return DecisionCache(namespace=name, **options)


# ---- the store


def test_a_decision_is_read_by_another_process(space: Namespace, store: SharedStore) -> None:
    store.add(KEY, b"here", None)

    def read(pipe: Pipe) -> None:
        other = SharedStore(space.name)
        value = other.get(KEY)
        other.add(b"o" * 16, b"there", None)
        pipe.say(value is not None and value[0].decode())

    assert space.child(read).hear() == "here"
    assert store.get(b"o" * 16) == (b"there", None)


def test_a_hit_makes_no_system_call(space: Namespace, store: SharedStore) -> None:
    """The kernel kills whoever makes another call than read or write in its strict mode.

    It also forbids the time stamp counter there, so these decisions live for ever.
    """
    store.add(KEY, b"for ever", None)
    store.add(b"l" * 16, b"large" * 1000, None)
    strict = 1

    def read(pipe: Pipe) -> None:
        other = SharedStore(space.name)
        prctl = ctypes.CDLL(None).prctl

        def hits(count: int) -> bool:
            return all(other.get(key) is not None for _ in range(count) for key in (KEY, b"l" * 16))

        hits(100)  # attached, and with memory for all that a hit makes
        gc.disable()
        if prctl(PR_SET_SECCOMP, strict, 0, 0, 0):
            pipe.say("refused")
        elif hits(100):
            pipe.say("hits")

    said = space.child(read).hear()
    if said == "refused":
        pytest.skip("another filter of system calls is around this process")
    assert said == "hits"


def test_closing_a_cache_leaves_what_is_shared_and_clearing_is_for_everybody(space: Namespace) -> None:
    space.start()
    one, other = cache_in(space.name), cache_in(space.name, ttl=0.05)
    assert one.get_or_compute("m", "s", QUESTIONS, lambda state, questions: {"q": 1}) == {"q": 1}
    one.close()
    assert other.get_or_compute("m", "s", QUESTIONS, lambda state, questions: {"q": 2}) == {"q": 1}
    other.get_or_compute("m", "short", QUESTIONS, lambda state, questions: {"q": 1})
    time.sleep(0.06)
    assert other.prune() + len(other.store) in (1, 2), "the coordinator prunes by itself as well"
    assert other.cache_info()["size"] == 1
    assert other.delete("m", "s", QUESTIONS)
    other.cache_clear()
    assert (other.cache_info()["size"], other.cache_info()["hits"]) == (0, 0)
    other.close()


def test_maxsize_bounds_what_is_kept_without_a_coordinator(space: Namespace) -> None:
    with cache_in(space.name, maxsize=2) as cache:
        for state in range(5):
            cache.get_or_compute("m", state, QUESTIONS, lambda state, questions: {"q": 1})
        assert (cache.cache_info()["size"], cache.cache_info()["maxsize"]) == (2, 2)


def test_a_thread_that_comes_while_another_attaches_asks_as_well(
    space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a claim was answered None there: two computed, and the owner kept its own answer."""
    space.start()
    store = SharedStore(space.name)
    is_making, go_on = threading.Event(), threading.Event()

    def slowly(*arguments: Any) -> WorkerPage:
        is_making.set()
        assert go_on.wait(20)
        return WorkerPage(*arguments)

    monkeypatch.setattr(connection, "WorkerPage", slowly)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(store.claim, [KEY], 300)
        assert is_making.wait(20)
        second = pool.submit(store.claim, [b"o" * 16], 300)
        with pytest.raises(TimeoutError):
            second.result(0.05)
        go_on.set()
        assert isinstance(first.result(), SharedClaim)
        assert isinstance(second.result(), SharedClaim)
    store.close()


def test_a_batch_larger_than_a_message_goes_in_one_round_trip(store: SharedStore) -> None:
    items = [(number.to_bytes(16), os.urandom(2000), None) for number in range(100)]
    before = store._connection._request_ids.__reduce__()[1][0]
    assert store.add_many(items) == [value for _key, value, _expires in items]
    assert store._connection._request_ids.__reduce__()[1][0] == before + 1
    assert store.get(items[99][0]) == (items[99][1], None)
    many = [(number.to_bytes(16), b"v", None) for number in range(1000, 1600)]
    assert store.add_many(many) == [b"v"] * 600


def test_a_value_beyond_the_limit_is_returned_and_not_stored(space: Namespace, store: SharedStore) -> None:
    large = os.urandom((1 << 20) + 1)
    assert store.add(KEY, large, None) == large
    assert store.get(KEY) == (large, None)
    space.stop()
    space.start("--decisions-bytes=64K")
    eventually(lambda: len(store) == 0)
    assert store.add(b"l" * 16, os.urandom(100_000), None) is not None
    assert store.get(b"l" * 16) is None
    assert store.stats()["refused_too_large"] == 1


def test_without_a_coordinator_decisions_are_local_and_offered_when_one_comes(space: Namespace) -> None:
    with pytest.raises(NoCoordinator):
        SharedStore(space.name).get(KEY)
    local = FallbackStore(SharedStore(space.name), MemoryStore(), look_again_s=0.05)
    assert local.add(KEY, b"here", None) == b"here"
    assert local.get(KEY) == (b"here", None)
    space.start()
    other = SharedStore(space.name)
    eventually(lambda: local.add(b"x" * 16, b"x", None) and other.get(KEY) == (b"here", None))
    local.close()
    other.close()


def test_touched_decisions_stay_when_the_table_is_full(space: Namespace) -> None:
    space.start("--decisions-rows=8")
    store = SharedStore(space.name)
    keys = [os.urandom(16) for _ in range(8)]
    for key in keys:
        store.add(key, b"v", None)
    for _ in range(3):
        for key in keys[:4]:
            store.get(key)
        time.sleep(0.3)  # a tick drains the touches
    for _ in range(4):
        store.add(os.urandom(16), b"v", None)
    assert sum(store.get(key) is not None for key in keys[:4]) >= 3
    assert len(store) == 8
    store.close()


def test_a_hit_goes_on_while_the_coordinator_is_down(space: Namespace) -> None:
    space.start()
    with cache_in(space.name) as cache:
        assert cache.get_or_compute("m", 1, QUESTIONS, lambda state, q: {"q": 1}) == {"q": 1}
        space.kill()
        assert cache.get_or_compute("m", 1, QUESTIONS, lambda state, q: {"q": 9}) == {"q": 1}
        assert cache.get_or_compute("m", 2, QUESTIONS, lambda state, q: {"q": 2}) == {"q": 2}
        space.start()
        assert cache.get_or_compute("m", 1, QUESTIONS, lambda state, q: {"q": 9}) == {"q": 1}


# ---- durability


@pytest.mark.parametrize("durability", ["full", "commit"])
def test_no_acknowledged_decision_is_lost_by_a_kill(space: Namespace, durability: str) -> None:
    flag = f"--decisions-durability={durability}"
    space.start(flag)
    store = SharedStore(space.name)
    acknowledged = {}
    for round_number in range(3):
        for number in range(60):
            key = bytes([round_number, number]) * 8
            value = os.urandom(100 + number * 10)
            acknowledged[key] = store.add(key, value, None)
        space.kill()
        space.start(flag)
        eventually(lambda: len(store) == len(acknowledged))
        assert {key: store.get(key) for key in acknowledged} == {
            key: (value, None) for key, value in acknowledged.items()
        }
    assert store.stats()["loaded"] == len(acknowledged)
    store.close()


def test_memory_says_in_its_figures_that_it_may_decide_again(space: Namespace) -> None:
    space.start("--decisions-durability=memory")
    store = SharedStore(space.name)
    store.add(KEY, b"v", None)
    assert store.stats()["durability"] == 0
    space.stop()
    space.start()
    eventually(lambda: store.get(KEY) == (b"v", None))
    store.close()


def test_a_damaged_database_is_set_aside_and_the_start_goes_on(space: Namespace, tmp_path: Path) -> None:
    path = tmp_path / "d.sqlite3"
    path.write_bytes(b"garbage" * 1000)
    path.chmod(0o600)
    assert "decisions=0" in space.start(f"--decisions-file={path}")
    assert "set aside" in space.log()


# ---- across processes


def _decide(pipe: Pipe, name: str, seconds: float, options: dict[str, Any]) -> None:
    cache = cache_in(name, **options)
    pipe.say("ready")
    pipe.hear()

    def compute(state: Any, questions: Any) -> Any:
        pipe.say("computing")
        time.sleep(seconds)
        return {"q": os.getpid()}

    answer = cache.get_or_compute("m", "s", QUESTIONS, compute)
    pipe.say(answer["q"])
    pipe.hear()


def _herd(space: Namespace, count: int, seconds: float, **options: Any) -> list[Any]:
    children = [space.child(_decide, space.name, seconds, options) for _ in range(count)]
    for child in children:
        assert child.hear() == "ready"
    for child in children:
        child.say()
    return children


def _answers(children: list[Any]) -> tuple[set[int], int]:
    """The answers that processes got, and how many of them computed."""
    answers, computed = set(), 0
    for child in children:
        said = child.hear()
        if said == "computing":
            computed += 1
            said = child.hear()
        answers.add(said)
    return answers, computed


def test_case_f06_of_eight_processes_one_computes(space: Namespace) -> None:
    space.start()
    answers, computed = _answers(_herd(space, 8, 0.3))
    assert (len(answers), computed) == (1, 1)


def test_case_f06_of_sixteen_processes_one_computes_and_after_its_kill_one_more(
    space: Namespace, tmp_path: Path
) -> None:
    """A model of 1 s, and kill -9 of whoever computes: one answer for all who are left."""
    space.start()
    computing = tmp_path / "computing"
    computing.touch()

    def decide(pipe: Pipe) -> None:
        cache = cache_in(space.name)
        pipe.say("ready")
        pipe.hear()

        def compute(state: Any, questions: Any) -> Any:
            with computing.open("a") as stream:
                stream.write(f"{os.getpid()}\n")
            time.sleep(1)
            return {"q": os.getpid()}

        pipe.say(cache.get_or_compute("m", "s", QUESTIONS, compute)["q"])

    children = [space.child(decide) for _ in range(16)]
    for child in children:
        assert child.hear() == "ready"
    for child in children:
        child.say()
    eventually(lambda: computing.read_text().endswith("\n"))
    owner = next(child for child in children if child.pid == int(computing.read_text()))
    owner.kill()
    killed = time.monotonic()
    answers = {child.hear() for child in children if child is not owner}
    assert time.monotonic() - killed < 10
    assert computing.read_text().split() == [str(owner.pid), *map(str, answers)]


def test_case_f06_when_the_one_that_computes_is_killed_another_takes_over(space: Namespace) -> None:
    space.start()
    children = _herd(space, 1, 60)
    (owner,) = children
    assert owner.hear() == "computing"
    waiting = _herd(space, 5, 0.1)
    time.sleep(0.3)
    owner.kill()
    killed = time.monotonic()
    answers, computed = _answers(waiting)
    assert (len(answers), computed) == (1, 1)
    assert time.monotonic() - killed < 5


def test_case_f06_a_stuck_owner_is_overtaken_after_the_limit(space: Namespace) -> None:
    space.start()
    (stuck,) = _herd(space, 1, 60, wait_limit_s=0.5)
    assert stuck.hear() == "computing"
    answers, computed = _answers(_herd(space, 2, 0.1, wait_limit_s=10.0))
    assert (len(answers), computed) == (1, 1)


def test_threads_of_two_processes_share_one_pass(space: Namespace) -> None:
    space.start()

    def many(pipe: Pipe) -> None:
        cache = cache_in(space.name)
        calls: list[int] = []

        def compute(state: Any, questions: Any) -> Any:
            calls.append(1)
            time.sleep(0.3)
            return {"q": os.getpid()}

        pipe.say()
        pipe.hear()
        with ThreadPoolExecutor(24) as pool:
            done = [pool.submit(cache.get_or_compute, "m", "s", QUESTIONS, compute) for _ in range(24)]
            answers = {one.result()["q"] for one in done}
        pipe.say([sorted(answers), len(calls)])

    children = [space.child(many) for _ in range(2)]
    for child in children:
        child.hear()
    for child in children:
        child.say()
    (one, calls), (other, other_calls) = (child.hear() for child in children)
    assert one == other
    assert len(one) == 1
    assert calls + other_calls == 1


def test_batches_of_two_processes_that_want_each_other_s_keys_never_lock(space: Namespace) -> None:
    space.start()

    def many(pipe: Pipe, number: int) -> None:
        cache = cache_in(space.name, wait_limit_s=60)

        def compute(state: Any, questions: Any) -> Any:
            time.sleep(0.001)
            return {"q": number}

        pipe.say()
        pipe.hear()
        for batch in range(30):
            keys = [f"{batch}-{n}" for n in range(4)]
            for state in keys if number else keys[::-1]:
                cache.get_or_compute(
                    "m", state, QUESTIONS, lambda state, q: (time.sleep(0.001), {"q": number})[1]
                )
        pipe.say("done")

    children = [space.child(many, number) for number in range(2)]
    for child in children:
        child.hear()
    for child in children:
        child.say()
    assert [child.hear() for child in children] == ["done", "done"]


def test_a_delete_refuses_what_another_process_computes_for_the_key(space: Namespace) -> None:
    space.start()
    (owner,) = _herd(space, 1, 2.0)
    assert owner.hear() == "computing"
    with cache_in(space.name) as cache:
        cache.delete("m", "s", QUESTIONS)
        assert isinstance(owner.hear(), int), "its caller has its answer"
        assert cache.get_or_compute("m", "s", QUESTIONS, lambda state, q: {"q": 0}) == {"q": 0}


def _ask_on(pipe: Pipe, name: str) -> None:
    """Ask for 40 states in turn until told to stop; say what was answered after the last restart."""
    cache = cache_in(name)
    seen: dict[str, float] = {}
    requests = 0
    pipe.say()
    stop = threading.Event()
    threading.Thread(target=lambda: (pipe.hear(within_s=120), stop.set()), daemon=True).start()
    while not stop.is_set() or requests % 40:
        state = str(requests % 40)
        requests += 1
        answer = cache.get_or_compute("m", state, QUESTIONS, lambda state, q: {"q": time.monotonic_ns()})
        seen[state] = answer["q"]
    pipe.say([requests, seen])


def test_killing_the_coordinator_under_load_loses_no_request_and_no_decision(space: Namespace) -> None:
    space.start()
    children = [space.child(_ask_on, space.name) for _ in range(3)]
    for child in children:
        child.hear()
    store = SharedStore(space.name)
    before: dict[bytes, bytes] = {}
    for _ in range(3):
        eventually(lambda: len(store) == 40)
        held = {decision.key: decision.value for decision in store.decisions()}
        assert before in ({}, held), "what was acknowledged is there, and is the same"
        before = held
        space.restart()
    eventually(lambda: store.stats()["loaded"] == 40)
    for child in children:
        child.say()
    done = [child.hear() for child in children]
    assert all(seen == done[0][1] for _requests, seen in done)
    assert all(requests > 100 for requests, _seen in done)
    store.close()


def test_after_a_fork_the_child_has_claims_and_a_connection_of_its_own(space: Namespace) -> None:
    space.start()
    cache = cache_in(space.name)
    cache.get_or_compute("m", 1, QUESTIONS, lambda state, q: {"q": 1})

    def child(pipe: Pipe) -> None:
        one = cache.get_or_compute("m", 1, QUESTIONS, lambda state, q: {"q": 9})
        two = cache.get_or_compute("m", 2, QUESTIONS, lambda state, q: {"q": 2})
        pipe.say([one, two])

    assert space.child(child).hear() == [{"q": 1}, {"q": 2}]
    assert cache.get_or_compute("m", 2, QUESTIONS, lambda state, q: {"q": 9}) == {"q": 2}
    cache.close()
