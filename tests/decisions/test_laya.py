"""DecisionCache as a hook of the real laya package's Router, over an agent that stands in for a model."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import laya
import pytest
from decisions.fake_model import QUESTIONS, Model, memory_cache, probability

from shmcache.decisions import DetectionMemo

ENGLISH = "I was charged twice and I would like to have my money back as soon as possible"


class Agent(Model):
    """What a Router needs of an agent."""

    def system_one(self, state: Any, questions: Any, lang: str | None = None, **budget: Any) -> Any:
        return self.result(state)

    def predict_batch(self, states: Any, questions: Any, batch_size: int | None = None, **budget: Any) -> Any:
        return [self.result(state) for state in states]

    def predict_long(self, state: Any, questions: Any, lang: str | None = None, **scan: Any) -> Any:
        result = self.result(state)
        result["usage"]["windows"] = 3
        return result


def router_of(*hooks: Any, agent: Any = None, **options: Any) -> tuple[Any, Any]:
    router = laya.Router(hooks=list(hooks), **options)
    agent = agent or Agent()
    for name in ("english", "multilingual"):
        router.attach(name, agent)
    return router, agent


def test_a_repeat_is_replayed_with_the_router_s_own_routing() -> None:
    with memory_cache() as cache:
        router, agent = router_of(cache)
        first = router.predict(ENGLISH, QUESTIONS)
        again = router.predict(ENGLISH, QUESTIONS)
        assert again == first
        assert again["routing"]["model"] == "english"
        assert len(agent.asked) == 1
        assert b"money back" not in cache.store.get(next(iter(cache.store._values)))[0]  # type: ignore[attr-defined]


def test_the_gate_of_one_call_is_not_in_the_store() -> None:
    with memory_cache() as cache:
        router, _agent = router_of(cache)
        gated = router.predict(ENGLISH, QUESTIONS, min_confidence=0.99)
        assert gated["answers"]["angry"]["abstention"] == "abstained"
        assert "abstention" not in router.predict(ENGLISH, QUESTIONS)["answers"]["angry"]
        assert (
            router.predict(ENGLISH, QUESTIONS, min_confidence=0.1)["answers"]["angry"]["abstention"]
            == "passed"
        )
        assert cache.cache_info()["hits"] == 2


def test_a_batch_with_repeats_is_computed_without_waiting_for_itself() -> None:
    with memory_cache(wait_limit_s=20) as cache:
        router, agent = router_of(cache)
        router.predict("b", QUESTIONS, model="english")
        requests = [{"state": state, "questions": QUESTIONS, "model": "english"} for state in "abac"]
        started = time.monotonic()
        results = router.predict_batch(requests)
        assert time.monotonic() - started < 5
        assert results[0]["answers"] == results[2]["answers"]
        assert probability(results[1]) == 0.501
        assert [result["routing"]["model"] for result in results] == ["english"] * 4
        assert router.predict_batch(requests) == results
        assert agent.asked.count("b") == 1


def test_a_scan_of_a_document_and_one_window_of_it_are_two_requests() -> None:
    with memory_cache() as cache:
        router, agent = router_of(cache)
        window = router.predict(ENGLISH, QUESTIONS)
        scan = router.predict_long(ENGLISH, QUESTIONS)
        assert probability(window) != probability(scan)
        assert router.predict_long(ENGLISH, QUESTIONS) == scan
        assert scan["usage"]["windows"] == 3
        router.predict_long(ENGLISH, QUESTIONS, window=64)
        assert router.predict(ENGLISH, QUESTIONS) == window
        assert len(agent.asked) == 3


@pytest.mark.parametrize("entry", ["predict", "predict_long"])
def test_hooks_with_a_time_limit_are_cached_and_know_a_scan(entry: str) -> None:
    with memory_cache() as cache:
        router, agent = router_of(cache, hooks_timeout=5.0)
        first = getattr(router, entry)(ENGLISH, QUESTIONS)
        assert getattr(router, entry)(ENGLISH, QUESTIONS) == first
        other = "predict" if entry == "predict_long" else "predict_long"
        assert probability(getattr(router, other)(ENGLISH, QUESTIONS)) != probability(first)
        assert len(agent.asked) == 2


def test_serialised_hooks_under_many_threads_never_lock() -> None:
    with memory_cache(wait_limit_s=20) as cache:
        router, _agent = router_of(cache, hooks_concurrent=False)
        started = time.monotonic()
        with ThreadPoolExecutor(6) as pool:
            answers = list(
                pool.map(lambda n: router.predict("s", QUESTIONS, model="english")["answers"], range(24))
            )
        assert time.monotonic() - started < 10
        assert all(answer == answers[0] for answer in answers)


def test_eight_threads_over_a_slow_model_run_it_once() -> None:
    class Slow(Agent):
        def system_one(self, *arguments: Any, **options: Any) -> Any:
            time.sleep(0.3)
            return super().system_one(*arguments, **options)

    with memory_cache() as cache:
        router, agent = router_of(cache, agent=Slow())
        start = threading.Barrier(8)

        def send(_: int) -> Any:
            start.wait()
            return router.predict(ENGLISH, QUESTIONS)["answers"]

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(send, range(8)))
        assert all(answer == answers[0] for answer in answers)
        assert len(agent.asked) == 1


def test_on_a_router_per_language_temperatures_put_the_route_into_the_key() -> None:
    with memory_cache() as cache:
        agent = Agent()
        agent.lang_temperatures = {"de": {}}  # type: ignore[attr-defined]
        router, _ = router_of(cache, agent=agent)
        router.predict(ENGLISH, QUESTIONS)
        router.predict(ENGLISH, QUESTIONS)
        assert len(agent.asked) == 1
        router.predict(ENGLISH, QUESTIONS, lang="en")
        assert len(agent.asked) == 2
        router.predict(ENGLISH, QUESTIONS, model="english")
        router.predict(ENGLISH, QUESTIONS, model="english")
        assert len(agent.asked) == 4, "with an explicit model the language is not to be seen"
        assert cache.cache_info()["uncached"] == {"route": 2}


def test_the_detection_memo_gives_what_detection_gives() -> None:
    memo = DetectionMemo(laya.detect_language)
    for _ in range(2):
        assert memo(ENGLISH) == laya.detect_language(ENGLISH)
        memo(ENGLISH)["language"] = "changed"
    assert (memo.hits, memo.misses) == (3, 1)


def test_the_memo_keeps_the_last_4096() -> None:
    memo: DetectionMemo[dict[str, Any]] = DetectionMemo(lambda state: {"state": len(state)}, remembered=2)
    for state in ("a", "bb", "a", "ccc", "a", "bb"):
        assert memo(state) == {"state": len(state)}
    assert (memo.hits, memo.misses, len(memo)) == (2, 4, 2)
    assert DetectionMemo(len)._limit == 4096
