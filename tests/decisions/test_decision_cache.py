"""The hook, and the same without one: the rows of the design table and the four rules."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from decisions.fake_model import QUESTIONS, Context, Model, memory_cache, probability

from shmcache.decisions import DecisionCache, FallbackStore, MemoryStore, decision_margins
from shmcache.decisions.shared import SharedStore
from shmcache.errors import ConfigError

YES = {"q": {"type": "choice", "criteria": ["yes", "no"]}}


class FailingStore:
    """Every call fails."""

    def _fail(self, *_: Any) -> Any:
        raise OSError("the store is gone")

    get = add = renew = prune = __len__ = clear = close = _fail


# ---- the hook


def test_a_hit_skips_the_model() -> None:
    with memory_cache() as cache:
        model = Model(cache)
        first = model.predict(["s"])
        assert model.predict(["s"]) == first
        assert model.asked == ["s"]
        info = cache.cache_info()
        assert (info["hits"], info["misses"], info["size"], info["maxsize"]) == (1, 1, 1, 65_536)


def test_only_missing_states_reach_the_model_and_results_keep_the_order_of_the_request() -> None:
    with memory_cache() as cache:
        model = Model(cache)
        (c,) = model.predict(["c"])
        a, b, a_again, c_again, b_again = model.predict(["a", "b", "a", "c", "b"])
        assert model.asked == ["c", "a", "b"]
        assert [probability(result) for result in (c, a, b)] == [0.501, 0.502, 0.503]
        assert (a_again, b_again, c_again) == (a, b, c)
        a["answers"]["angry"]["noul"] = 9
        assert probability(a_again) == 0.502, "copies, not the same object"


def test_a_result_that_a_caller_changes_never_changes_the_store() -> None:
    with memory_cache() as cache:
        model = Model(cache)
        for _ in range(3):
            (result,) = model.predict(["s"])
            assert probability(result) == 0.501
            result["answers"].clear()


def test_the_first_decision_wins_and_the_replaced_one_is_counted() -> None:
    store = MemoryStore()
    ours, theirs = DecisionCache(store, coalesce=False), DecisionCache(store, coalesce=False)
    context = Context(["s"], agent=Model())
    ours.on_predict_start(context)
    Model(theirs).predict(["s"])
    context.results = [Model().result("x") | {"answers": Model().result("s")["answers"]}]
    context.results[0]["answers"]["angry"]["noul"] = 0.9
    ours.on_predict_end(context)
    assert probability(context.results[0]) == 0.501
    assert ours.cache_info()["conflicts"] == 1


def test_what_is_in_the_key_and_what_is_not() -> None:
    with memory_cache() as cache:
        model = Model(cache)
        model.predict(["s"])
        for name, value in (("device", "cuda"), ("dtype", "int8"), ("backend", "onnx")):
            setattr(model, name, value)
        model.predict(["s"])
        assert len(model.asked) == 1
        changes = (
            ("model_id", "other"),
            ("revision", "2"),
            ("temperature", [1, 2, 3]),
            ("cfg", {"max_len": 7}),
        )
        for count, (name, value) in enumerate(changes, 2):
            setattr(model, name, value)
            model.predict(["s"])
            assert len(model.asked) == count, name
        reordered = dict(reversed(QUESTIONS.items()))
        model.predict(["s"], reordered)
        assert len(model.asked) == count + 1
        pinned = DecisionCache(cache.store, fingerprint="pinned")
        one, other = Model(pinned), Model(pinned)
        other.model_id = "somewhere/else"
        one.predict(["s"])
        other.predict(["s"])
        assert (len(one.asked), len(other.asked)) == (1, 0)


def test_an_agent_with_per_language_temperatures_is_left_alone() -> None:
    with memory_cache() as cache:
        model = Model(cache)
        model.lang_temperatures = {"de": {"temperature": [1, 1, 2]}}  # type: ignore[attr-defined]
        model.predict(["s"])
        model.predict(["s"])
        assert len(model.asked) == 2
        assert cache.cache_info()["uncached"] == {"per_language_temperatures": 2}


def test_states_without_a_key_go_uncached_and_counted() -> None:
    with memory_cache() as cache:
        model = Model(cache)
        for _ in range(2):
            nan = float("nan")
            assert len(model.predict([nan, "s", {1: 2}])) == 3
        assert model.asked[:3] == [pytest.approx(nan, nan_ok=True), "s", {1: 2}]
        assert len(model.asked) == 5
        assert cache.cache_info()["uncached"] == {"not_finite": 2, "key_not_string": 2}


def test_a_store_that_fails_never_fails_the_prediction() -> None:
    cache = DecisionCache(FailingStore())  # type: ignore[arg-type]
    model = Model(cache)
    for _ in range(2):
        assert len(model.predict(["a", "b", "a"])) == 3
    assert cache.get_or_compute("m", "s", YES, lambda state, questions: {"q": "yes"}) == {"q": "yes"}
    assert cache.cache_info()["errors"] == 3


def test_a_stored_value_that_cannot_be_decoded_is_expired_and_decided_anew() -> None:
    with memory_cache() as cache:
        model = Model(cache)
        model.predict(["s"])
        (key,) = cache.store._values  # type: ignore[attr-defined]
        cache.store.renew(key, 0)
        cache.store.add(key, b"garbage", None)
        model.predict(["s"])
        model.predict(["s"])
        assert len(model.asked) == 2
        assert cache.cache_info()["errors"] == 1


def test_marks_and_routing_of_one_call_are_not_stored() -> None:
    with memory_cache() as cache:
        context = Context(["s"], agent=Model())
        cache.on_predict_start(context)
        result = Model().result("s") | {"routing": {"model": "english"}}
        result["answers"]["angry"] |= {
            "low_confidence": True,
            "abstention": "abstained",
            "abstention_threshold": 0.9,
        }
        context.results = [result]
        cache.on_predict_end(context)
        assert context.results[0]["answers"]["angry"]["low_confidence"] is True
        (replay,) = Model(cache).predict(["s"])
        assert replay == Model().result("s")


def test_a_failed_call_stores_nothing_and_releases() -> None:
    with memory_cache() as cache:
        model = Model(cache)
        model.result = lambda state: 1 / 0  # type: ignore[assignment, method-assign]
        with pytest.raises(ZeroDivisionError):
            model.predict(["s"])
        Model(cache).predict(["s"])
        assert cache.cache_info()["size"] == 1


def test_a_call_that_another_hook_rewrote_is_not_stored() -> None:
    class Redact:
        def on_predict_start(self, context: Any) -> None:
            context.states = ["redacted"] * len(context.states)

        def on_predict_end(self, context: Any) -> None:
            pass

    with memory_cache() as cache:
        model = Model(cache, Redact())
        model.predict(["secret"])
        assert cache.cache_info()["size"] == 0
        assert cache.cache_info()["uncached"] == {"rewritten": 1}
        assert Model(cache).predict(["redacted"])


# ---- lives


def test_ttl_is_seconds_or_none_or_a_function_and_zero_keeps_nothing() -> None:
    for ttl, kept in (
        (None, 1),
        (60, 1),
        (0, 0),
        (lambda q, r: 0 if r["answers"]["intent"]["choice"] == "refund" else None, 0),
    ):
        with memory_cache(ttl=ttl) as cache:
            Model(cache).predict(["s"])
            assert cache.cache_info()["size"] == kept


def test_a_used_decision_lives_on_and_a_hit_almost_never_writes() -> None:
    store = MemoryStore()
    renewals = []
    renew = store.renew
    store.renew = lambda key, expires: (renewals.append(expires), renew(key, expires))  # type: ignore[assignment, method-assign, func-returns-value]
    cache = DecisionCache(store, ttl=1.6, renew_on_hit=True)
    model = Model(cache)
    model.predict(["s"])
    for _ in range(20):
        model.predict(["s"])
    assert renewals == []
    time.sleep(0.15)
    for _ in range(20):
        model.predict(["s"])
    assert len(renewals) == 1
    assert len(model.asked) == 1


def test_an_expired_decision_is_answered_while_one_request_computes_it_anew() -> None:
    with memory_cache(ttl=0.1, stale_ttl=60) as cache:
        model = Model(cache)
        model.predict(["s"])
        time.sleep(0.15)
        computing, go_on = threading.Event(), threading.Event()

        class Slow(Model):
            def result(self, state: Any) -> dict[str, Any]:
                computing.set()
                assert go_on.wait(10)
                self.asked += [0, 0]
                return super().result(state)

        with ThreadPoolExecutor(1) as pool:
            fresh = pool.submit(Slow(cache).predict, ["s"])
            assert computing.wait(10)
            assert probability(model.predict(["s"])[0]) == 0.501
            go_on.set()
            assert probability(fresh.result(10)[0]) == 0.503
        assert probability(model.predict(["s"])[0]) == 0.503
        assert cache.cache_info()["stale"] == 1
        assert len(model.asked) == 1


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="stale_ttl"):
        memory_cache(stale_ttl=5, coalesce=False)


# ---- without a hook


def test_get_or_compute_and_the_decorator_decide_once() -> None:
    with memory_cache() as cache:
        calls = []

        @cache.decision("triage", YES)
        def triage(state: Any) -> Any:
            calls.append(state)
            return {"q": "yes"}

        assert triage("s") == triage("s") == {"q": "yes"}
        assert cache.get_or_compute("triage", "s", YES, lambda state, questions: {"q": "no"}) == {"q": "yes"}
        assert calls == ["s"]
        assert cache.delete("triage", "s", YES)
        assert cache.get_or_compute("triage", "s", YES, lambda state, questions: {"q": "no"}) == {"q": "no"}
        assert cache.cache_info()["size"] == 1
        cache.cache_clear()
        assert cache.cache_info()["size"] == 0


def test_case_f09_a_failure_is_never_the_first_decision() -> None:
    with memory_cache() as cache:
        outcomes = iter([OSError("down"), None, {"q": "sorry, try later"}, {"q": "no"}])

        def decide(state: Any, questions: Any) -> Any:
            outcome = next(outcomes)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        with pytest.raises(OSError, match="down"):
            cache.get_or_compute("m", "s", YES, decide)
        assert cache.get_or_compute("m", "s", YES, decide) is None
        assert cache.get_or_compute("m", "s", YES, decide) == {"q": "sorry, try later"}
        assert cache.cache_info()["size"] == 0
        for _ in range(2):
            assert cache.get_or_compute("m", "s", YES, decide) == {"q": "no"}
        assert cache.cache_info()["uncached"] == {"not_legal": 2}


@pytest.mark.parametrize("value", [None, False, 0, ""])
def test_case_f09_a_legal_null_false_or_zero_is_a_hit(value: Any) -> None:
    questions = {"q": {"type": "choice", "criteria": [None, False, 0, "", "x"]}}
    with memory_cache() as cache:
        calls: list[int] = []
        for _ in range(2):
            answer = cache.get_or_compute(
                "m", "s", questions, lambda state, q: (calls.append(1), {"q": value})[1]
            )
            assert answer == {"q": value}
        assert len(calls) == 1


def test_a_wrong_answer_is_kept_until_it_expires_and_one_character_makes_another_request() -> None:
    """What a cache of exact requests cannot do better; small margins say where to look."""
    unsure = {
        "answers": {"q": {"type": "choice", "choice": "no", "probabilities": {"no": 0.51, "yes": 0.49}}}
    }
    sure = {"answers": {"q": {"type": "choice", "choice": "yes", "probabilities": {"no": 0.01, "yes": 0.99}}}}
    with memory_cache(ttl=3600) as cache:
        assert cache.get_or_compute("m", "state", YES, lambda state, questions: unsure) == unsure
        assert cache.get_or_compute("m", "state", YES, lambda state, questions: sure) == unsure
        assert decision_margins(unsure)["q"] < 0.1 < decision_margins(sure)["q"]
        assert cache.get_or_compute("m", "state.", YES, lambda state, questions: sure) == sure
        cache.store.renew(cache.key_of("m", "state", YES), time.time() - 1)  # an hour later
        assert cache.get_or_compute("m", "state", YES, lambda state, questions: sure) == sure


def test_a_request_without_a_key_is_computed_each_time() -> None:
    with memory_cache() as cache:
        assert cache.get_or_compute("m", float("nan"), YES, lambda state, q: {"q": "yes"}) == {"q": "yes"}
        assert cache.cache_info()["uncached"] == {"not_finite": 1}


# ---- rule 1: wait, then claim, atomically


def test_eight_threads_that_send_one_request_run_the_model_once() -> None:
    with memory_cache() as cache:
        start = threading.Barrier(8)
        calls = []

        class Slow(Model):
            def result(self, state: Any) -> dict[str, Any]:
                time.sleep(0.3)
                calls.append(state)
                return super().result(state)

        def send(_: int) -> float:
            start.wait()
            return probability(Slow(cache).predict(["s"])[0])

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(send, range(8))) == [0.501] * 8
        info = cache.cache_info()
        assert (len(calls), info["hits"], info["misses"]) == (1, 7, 1)
        assert info["coalesced"] == 7


def test_a_batch_claims_all_its_missing_keys_or_none() -> None:
    with memory_cache() as cache:
        model = Model(cache)
        held = Context(["a"], agent=model)
        cache.on_predict_start(held)
        with ThreadPoolExecutor(2) as pool:
            batch = pool.submit(model.predict, ["a", "b"])
            time.sleep(0.1)
            assert pool.submit(model.predict, ["b"]).result(5), "b was not claimed by who waits for a"
            held.results = [model.result("a")]
            cache.on_predict_end(held)
            assert [probability(result) for result in batch.result(5)] == [0.502, 0.501]
        assert model.asked == ["b", "a"]


def test_two_batches_that_want_each_other_s_keys_never_lock() -> None:
    with memory_cache() as cache:

        class Slow(Model):
            def result(self, state: Any) -> dict[str, Any]:
                time.sleep(0.001)
                return super().result(state)

        def send(number: int) -> None:
            model = Slow(cache)
            for batch in range(20):
                states = [f"{batch}-{(number * 7 + n) % 6}" for n in range(4)]
                model.predict(states if number % 2 else states[::-1])

        with ThreadPoolExecutor(6) as pool:
            for done in [pool.submit(send, number) for number in range(6)]:
                done.result(30)


# ---- rule 2: never wait where one is waited on


def test_nothing_waits_for_its_own_batch() -> None:
    with memory_cache(wait_limit_s=20) as cache:
        contexts = [Context(["s"], agent=Model()) for _ in range(2)]
        for context in contexts:
            cache.on_predict_start(context)
        for number, context in enumerate(reversed(contexts)):
            assert context.results is None
            context.results = [Model().result("s")]
            context.results[0]["answers"]["angry"]["noul"] = number / 10
            cache.on_predict_end(context)
        assert {probability(context.results[0]) for context in contexts} == {0.0}


def test_an_owner_never_waits_for_another_owner() -> None:
    with memory_cache(wait_limit_s=20) as cache:
        theirs = Context(["b"], agent=Model())
        threading.Thread(target=cache.on_predict_start, args=(theirs,)).start()
        time.sleep(0.05)
        ours = Context(["a"], agent=Model())
        cache.on_predict_start(ours)
        started = time.monotonic()
        Model(cache).predict(["b"])
        assert time.monotonic() - started < 5
        cache.on_predict_end(ours)
        cache.on_predict_end(theirs)


@pytest.mark.parametrize("setting", [{"hooks_concurrent": False}, {"hooks_timeout": 5.0}])
def test_serialised_or_limited_hooks_never_wait(setting: dict[str, Any]) -> None:
    with memory_cache(wait_limit_s=20) as cache:
        owner = Context(["s"], agent=Model())
        threading.Thread(target=cache.on_predict_start, args=(owner,)).start()
        time.sleep(0.05)
        model = Model(cache)
        for name, value in setting.items():
            setattr(model, name, value)
        started = time.monotonic()
        model.predict(["s"])
        assert time.monotonic() - started < 5
        assert cache.cache_info()["coalesced"] == 0
        cache.on_predict_end(owner)


# ---- rule 3: always release


def test_a_context_that_is_dropped_without_an_end_hook_releases() -> None:
    with memory_cache(wait_limit_s=20) as cache:
        context = Context(["s"], agent=Model())
        cache.on_predict_start(context)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(Model(cache).predict, ["s"])
            time.sleep(0.1)
            assert not waiting.done()
            del context
            gc.collect()
            assert waiting.result(5)


def test_a_failed_pass_releases_its_waiters_at_once() -> None:
    with memory_cache(wait_limit_s=20) as cache:
        started = threading.Event()

        def fail(state: Any, questions: Any) -> Any:
            started.set()
            time.sleep(0.2)
            raise OSError

        with ThreadPoolExecutor(2) as pool:
            failing = pool.submit(cache.get_or_compute, "m", "s", YES, fail)
            started.wait(5)
            waiting = pool.submit(cache.get_or_compute, "m", "s", YES, lambda state, q: {"q": "no"})
            assert waiting.result(5) == {"q": "no"}
            assert isinstance(failing.exception(5), OSError)


# ---- rule 4: bound a stuck owner


def test_a_waiter_gives_up_on_a_stuck_owner_and_computes_itself() -> None:
    with memory_cache(wait_limit_s=0.2) as cache:
        stuck = Context(["s"], agent=Model())
        threading.Thread(target=cache.on_predict_start, args=(stuck,)).start()
        time.sleep(0.05)
        model = Model(cache)
        (result,) = model.predict(["s"])
        assert model.asked == ["s"]
        stuck.results = [Model().result("s")]
        stuck.results[0]["answers"]["angry"]["noul"] = 0.9
        cache.on_predict_end(stuck)
        assert stuck.results[0] == result


def test_coalescing_can_be_turned_off() -> None:
    with memory_cache(coalesce=False) as cache:
        contexts = [Context(["s"], agent=Model()) for _ in range(2)]
        for context in contexts:
            cache.on_predict_start(context)
            assert context.results is None
        assert cache.cache_info()["coalesced"] == 0


# ---- asyncio


def test_tasks_of_one_loop_compute_once_and_the_loop_goes_on() -> None:
    async def run() -> None:
        cache = memory_cache()
        calls = []
        ticks = 0

        @cache.decision("m", YES)
        async def decide(state: Any) -> Any:
            calls.append(state)
            await asyncio.sleep(0.2)
            return {"q": "yes"}

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.01)

        ticking = asyncio.create_task(tick())
        assert await asyncio.gather(*(decide("s") for _ in range(50))) == [{"q": "yes"}] * 50
        ticking.cancel()
        assert calls == ["s"]
        assert ticks > 5
        with pytest.raises(ZeroDivisionError):
            await cache.aget_or_compute("m", "t", YES, fail)
        assert await cache.aget_or_compute("m", "t", YES, no) == {"q": "no"}
        cache.close()

    async def fail(state: Any, questions: Any) -> Any:
        raise ZeroDivisionError

    async def no(state: Any, questions: Any) -> Any:
        return {"q": "no"}

    asyncio.run(run())


def test_a_task_that_is_cancelled_releases() -> None:
    async def run() -> None:
        cache = memory_cache()

        async def for_ever(state: Any, questions: Any) -> Any:
            await asyncio.sleep(60)

        async def now(state: Any, questions: Any) -> Any:
            return {"q": "no"}

        owner = asyncio.create_task(cache.aget_or_compute("m", "s", YES, for_ever))
        await asyncio.sleep(0.05)
        waiter = asyncio.create_task(cache.aget_or_compute("m", "s", YES, now))
        await asyncio.sleep(0.05)
        assert not waiter.done()
        owner.cancel()
        assert await asyncio.wait_for(waiter, 5) == {"q": "no"}

    asyncio.run(run())


def test_a_child_that_is_forked_while_locks_are_held_starts_over() -> None:
    store = FallbackStore(SharedStore("nobody-serves-this"), MemoryStore())
    cache = DecisionCache(store)
    cache.get_or_compute("m", "s", YES, lambda state, q: {"q": "yes"})
    claimed = Context(["t"], agent=Model())
    cache.on_predict_start(claimed)
    with cache._lock, cache._flights._lock, store._lock:
        pid = os.fork()
        if pid == 0:
            threading.Timer(20, lambda: os._exit(2)).start()
            same = cache.get_or_compute("m", "s", YES, lambda state, q: {"q": "no"}) == {"q": "yes"}
            os._exit(0 if same and Model(cache).predict(["t"]) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
