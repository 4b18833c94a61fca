"""One decision per request: was this state asked these questions before, and what was the answer?

    hook     on_predict_start  key → store → skip(), or claim what is missing
             on_predict_end    model's results → encode → add → everybody's value
    without  get_or_compute, aget_or_compute, @decision: the same steps around any function

    states of a call      a  b  a  c        c is stored
    reach the model       a  b              each once
    results               A  B  A' C'       A' a copy, C' a replay: in the order of the states

Owner: whoever made the cache; one serves any number of models, threads and tasks.
Invariants
    I1  A prediction never fails because of the cache: what a store raises is counted, logged once per
        kind, and the model answers.
    I2  What is returned is what the store holds: where another request was first, its value replaces
        ours, counted as a conflict.
    I3  What is stored was computed from the very request that its key names: keys are made again at the
        end, and a call that was rewritten meanwhile (by another hook, or in place) is not stored.
    I4  Results are made anew from bytes, so a caller that changes one changes nothing else.
    I5  Every claim ends: with its call, with a failed call, or with a context that is dropped.
Leaves out: coalescing (flights), what a key is made of (key, host), what may be stored (legal, codec).
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import logging
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypedDict

import msgspec

from shmcache.decisions import codec, host
from shmcache.decisions.codec import NotStorable
from shmcache.decisions.fallback import FallbackStore
from shmcache.decisions.flights import Flight, Flights, own, owning, owns_anything
from shmcache.decisions.forks import watch
from shmcache.decisions.host import StandsAside
from shmcache.decisions.key import Facts, KeyMaker, NotCanonical
from shmcache.decisions.legal import is_legal
from shmcache.decisions.shared import SharedStore
from shmcache.decisions.stores import DecisionStore, Item, MemoryStore
from shmcache.errors import ConfigError, CorruptDecision

log = logging.getLogger(__name__)

Ttl = float | int | None | Callable[[Any, Any], float | int | None]
Compute = Callable[[Any, Any], Any]

WAIT_LIMIT_S = 300.0
MAXSIZE = 65_536
_RENEWALS_PER_TTL = 16
_STORE_THREADS = 4

_MISS = object()


class CacheInfo(TypedDict):
    """Figures of one cache; size and maxsize are the store's, and so everybody's.

    uncached  calls and states that went past the cache, by reason.
    """

    size: int
    maxsize: int | None
    hits: int
    misses: int
    conflicts: int
    coalesced: int
    stale: int
    errors: int
    uncached: dict[str, int]


class _Run(msgspec.Struct, frozen=True):
    """A step: something that may take as long as a store does."""

    call: Callable[[], Any]


class _Wait(msgspec.Struct, frozen=True):
    """A step: until it is worth looking at these keys again."""

    keys: tuple[bytes, ...]
    deadline_ns: int


class _Compute(msgspec.Struct, frozen=True):
    """A step: the caller's own function."""


_Step = _Run | _Wait | _Compute


class _Settled(msgspec.Struct, frozen=True):
    """What is known of the wanted keys: replays, and the claim on the rest if it was granted.

    replaced  keys whose expired value is still held, and has to make room.
    """

    found: dict[bytes, Any]
    flight: Flight | None = None
    replaced: bool = False


class _Begun(msgspec.Struct, frozen=True):
    """A call between its two hooks.

    asked    positions of the states that the model was given.
    keys     of all states; None where a state has none.
    replays  by position.
    """

    states: Sequence[Any]
    keys: list[bytes | None]
    asked: list[int]
    replays: dict[int, Any]
    flight: Flight | None
    replaced: bool


class DecisionCache:
    """A prediction hook, and the same cache for any function."""

    def __init__(
        self,
        store: DecisionStore | None = None,
        *,
        namespace: str = "default",
        fingerprint: str | None = None,
        ttl: Ttl = None,
        renew_on_hit: bool = False,
        maxsize: int = MAXSIZE,
        coalesce: bool = True,
        wait_limit_s: float = WAIT_LIMIT_S,
        stale_ttl: float | None = None,
    ) -> None:
        """Nothing is opened yet.

        Args:
            store: where decisions live; by default in shared memory where a coordinator runs, and in
                this process's memory meanwhile.
            namespace: of the coordinator, for the default store.
            fingerprint: stands for the model in every key, across upgrades and backends.
            ttl: seconds that a decision lives, None for ever, 0 not at all; or what ttl(questions,
                result) returns.
            renew_on_hit: let a used decision live on; written at most once every ttl / 16.
            maxsize: decisions in this process's memory, for the default store.
            coalesce: wait for a request that computes the same, instead of computing it too.
            wait_limit_s: after which an owner counts as stuck.
            stale_ttl: seconds beyond its ttl for which a decision is still answered while one request
                computes it anew.
        Raises:
            ConfigError: settings that contradict each other.
        """
        if stale_ttl is not None and (not coalesce or renew_on_hit or stale_ttl <= 0):
            raise ConfigError(
                f"stale_ttl ({stale_ttl}) must be positive, with coalesce (now {coalesce}) and without "
                f"renew_on_hit (now {renew_on_hit})"
            )
        if store is None:
            store = FallbackStore(SharedStore(namespace), MemoryStore(maxsize))
        self.store: DecisionStore = store
        self._fingerprint = fingerprint
        self._ttl = ttl
        self._renews = renew_on_hit
        self._coalesces = coalesce
        self._limit_ns = int(wait_limit_s * 1e9)
        self._stale_s = stale_ttl or 0.0
        self._keys = KeyMaker()
        self._flights = Flights(store, wait_limit_s)
        self._start_over()
        self._faults_logged: set[type] = set()
        self._reset_counts()
        watch(self)

    def _start_over(self) -> None:
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._begun: weakref.WeakKeyDictionary[Any, _Begun] = weakref.WeakKeyDictionary()

    def after_fork(self) -> None:
        """In the child: calls in flight are the parent's."""
        self._start_over()

    # ---- the hook

    def on_predict_start(self, context: Any) -> None:
        """Answer what is stored; leave the rest to the model."""
        try:
            self._start(context)
        except (StandsAside, NotCanonical) as aside:
            self._pass_by(aside.reason)
        except Exception as error:
            self._fault(error)

    def on_predict_end(self, context: Any) -> None:
        """Store what the model answered, and put all results in the order of the states."""
        begun = self._begun.pop(context, None)
        if begun is None:
            return
        try:
            if context.error is None and context.results is not None:
                self._finish(context, begun)
        except Exception as error:
            self._fault(error)
        finally:
            if begun.flight is not None:
                begun.flight.release()

    def on_error(self, context: Any) -> None:
        """A failed call lets its waiters go at once."""
        begun = self._begun.get(context)
        if begun is not None and begun.flight is not None:
            begun.flight.release()

    def _start(self, context: Any) -> None:
        states, questions = context.states, context.questions
        if context.results is not None or not isinstance(states, (list, tuple)):
            return
        head = self._keys.head(host.facts_of(context, self._fingerprint), questions)
        if len(states) == 1:
            key = self._keys.key(head, states[0])
            result = self._replay(key, questions)
            if result is not _MISS:
                with self._lock:
                    self._counts["hits"] += 1
                context.skip([result])
                return
            keys: list[bytes | None] = [key]
        else:
            keys = [self._key(head, state, self._pass_by) for state in states]
        wanted = tuple(dict.fromkeys(key for key in keys if key is not None))
        if not wanted:
            return
        waits = host.may_wait(context) and not owns_anything()
        settled = _drive(self._settle(wanted, questions, waits), self._perform)
        try:
            self._begin(context, keys, settled)
        except BaseException:
            if settled.flight is not None:
                settled.flight.release()
            raise

    def _begin(self, context: Any, keys: list[bytes | None], settled: _Settled) -> None:
        """Split a call into replays and what the model is asked."""
        states = context.states
        replays: dict[int, Any] = {}
        asked: list[int] = []
        seen: set[bytes] = set()
        for position, key in enumerate(keys):
            if key is not None and key in settled.found:
                replays[position] = copy.deepcopy(settled.found[key]) if key in seen else settled.found[key]
                seen.add(key)
            elif key is None or key not in seen:
                asked.append(position)
                if key is not None:
                    seen.add(key)
        self._count("misses", len(asked))
        self._count("hits", len(keys) - len(asked))
        if not asked:
            context.skip([replays[position] for position in range(len(keys))])
            return
        begun = _Begun(states, keys, asked, replays, settled.flight, settled.replaced)
        if settled.flight is not None:
            own(settled.flight)
            weakref.finalize(context, settled.flight.release).atexit = False
        self._begun[context] = begun
        if len(asked) < len(keys):
            context.states = [states[position] for position in asked]

    def _finish(self, context: Any, begun: _Begun) -> None:
        results = list(context.results)
        if len(results) != len(begun.asked):
            # Another hook has answered, or changed what the model was asked: not ours to put in order.
            self._pass_by("rewritten")
            return
        unchanged = self._unchanged(context, begun)
        keyed = [
            (key, result)
            for key, result, same in zip(
                (begun.keys[position] for position in begun.asked), results, unchanged, strict=True
            )
            if key is not None and same
        ]
        kept = self._keep(keyed, context.questions, begun.flight, begun.replaced)
        computed = {
            position: _like(kept[key], result) if key in kept else result
            for position, result in zip(begun.asked, results, strict=True)
            for key in (begun.keys[position],)
        }
        example = results[0] if results else None
        by_key = {begun.keys[position]: result for position, result in computed.items()}
        merged = []
        for position, key in enumerate(begun.keys):
            if position in computed:
                merged.append(computed[position])
            elif position in begun.replays:
                merged.append(_like(begun.replays[position], example))
            else:
                merged.append(copy.deepcopy(by_key[key]))
        context.results = merged
        context.states = begun.states

    def _unchanged(self, context: Any, begun: _Begun) -> list[bool]:
        """Whether each state that was asked still has the key that it had (I3)."""
        try:
            head = self._keys.head(host.facts_of(context, self._fingerprint), context.questions)
            now = [self._key(head, state, lambda reason: None) for state in context.states]
        except (StandsAside, NotCanonical):
            now = []
        before = [begun.keys[position] for position in begun.asked]
        if len(now) == len(before) and now == before:
            return [True] * len(before)
        self._pass_by("rewritten")
        if len(now) != len(before):
            return [False] * len(before)
        return [one == other for one, other in zip(now, before, strict=True)]

    # ---- without a hook

    def get_or_compute(self, model: Any, state: Any, questions: Any, compute: Compute) -> Any:
        """The stored result of this request, or what compute(state, questions) returns.

        Args:
            model: what answers: its name, or an object that host.fingerprint_of knows how to read.
            state: what is asked about; JSON.
            questions: by name, each with its type; in the key in their order.
            compute: called without any lock; what it raises is the caller's.
        """
        steps = self._decide(model, state, questions)
        return _drive(steps, lambda step: self._perform(step, lambda: compute(state, questions)))

    async def aget_or_compute(
        self, model: Any, state: Any, questions: Any, compute: Callable[[Any, Any], Awaitable[Any]]
    ) -> Any:
        """As get_or_compute, for a coroutine function; the loop never waits for another request."""
        steps = self._decide(model, state, questions)
        advance: Callable[[], _Step] = functools.partial(next, steps)
        while True:
            try:
                step = advance()
            except StopIteration as stop:
                return stop.value
            try:
                if isinstance(step, _Compute):
                    done = await compute(state, questions)
                else:
                    done = await self._aperform(step)
                advance = functools.partial(steps.send, done)
            except BaseException as error:
                advance = functools.partial(steps.throw, error)

    def decision(self, model: Any, questions: Any) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
        """Decorate a function of a state, plain or async, so that each state is decided once."""

        def decorate(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
            if inspect.iscoroutinefunction(function):

                @functools.wraps(function)
                async def decided_async(state: Any) -> Any:
                    return await self.aget_or_compute(model, state, questions, lambda st, _: function(st))

                return decided_async

            @functools.wraps(function)
            def decided(state: Any) -> Any:
                return self.get_or_compute(model, state, questions, lambda st, _: function(st))

            return decided

        return decorate

    def _decide(self, model: Any, state: Any, questions: Any) -> Generator[_Step, Any, Any]:
        """The steps of one request; whoever drives them performs them, blocking or not."""
        try:
            key = self.key_of(model, state, questions)
            result = self._replay(key, questions)
        except NotCanonical as aside:
            self._pass_by(aside.reason)
            return (yield _Compute())
        except Exception as error:
            self._fault(error)
            return (yield _Compute())
        if result is not _MISS:
            self._count("hits")
            return result
        settled = yield from self._settle_safely(key, questions)
        if key in settled.found:
            self._count("hits")
            return settled.found[key]
        self._count("misses")
        if settled.flight is None:
            result = yield _Compute()
            kept = yield _Run(lambda: self._keep([(key, result)], questions, None, False))
            return kept.get(key, result)
        with owning(settled.flight):
            result = yield _Compute()
            kept = yield _Run(
                lambda: self._keep([(key, result)], questions, settled.flight, settled.replaced)
            )
            return kept.get(key, result)

    def _settle_safely(self, key: bytes, questions: Any) -> Generator[_Step, Any, _Settled]:
        try:
            return (yield from self._settle((key,), questions, not owns_anything()))
        except Exception as error:
            self._fault(error)
            return _Settled({})

    # ---- looking up, and deciding who computes

    def key_of(self, model: Any, state: Any, questions: Any, checkpoint: str | None = None) -> bytes:
        """The key of a request. Raises NotCanonical.

        checkpoint is the name under which a Router knows the model; hooks on one put it into the key.
        """
        pinned = self._fingerprint
        facts = Facts(pinned if pinned is not None else host.fingerprint_of(model), checkpoint)
        return self._keys.key(self._keys.head(facts, questions), state)

    def _key(self, head: Any, state: Any, refuse: Callable[[str], None]) -> bytes | None:
        try:
            return self._keys.key(head, state)
        except NotCanonical as aside:
            refuse(aside.reason)
            return None

    def _settle(
        self, wanted: tuple[bytes, ...], questions: Any, waits: bool
    ) -> Generator[_Step, Any, _Settled]:
        """Read; claim what is missing, or wait for those who own it and read again (rule 1)."""
        give_up_ns = time.monotonic_ns() + self._limit_ns
        while True:
            found, stale = self._read(wanted, questions)
            missing = tuple(key for key in wanted if key not in found and key not in stale)
            claimed = missing or tuple(stale)
            if not claimed or not self._coalesces:
                return _Settled(found)
            flight: Flight | None = yield _Run(functools.partial(self._flights.claim, claimed))
            if flight is not None:
                # Decided between our look and our claim?
                if any(self.store.get(key) is not None for key in missing):
                    flight.release()
                    continue
                if not missing:
                    return _Settled(found, flight, replaced=True)
                self._count("stale", len(stale))
                return _Settled(found | stale, flight)
            if any(self.store.get(key) is not None for key in missing):
                continue
            if not missing or not waits:
                self._count("stale", len(stale))
                return _Settled(found | stale)
            if time.monotonic_ns() >= give_up_ns:
                self._flights.drop(missing)
                flight = yield _Run(functools.partial(self._flights.claim, missing))
                return _Settled(found | stale, flight)
            self._count("coalesced")
            yield _Wait(missing, give_up_ns)

    def _read(self, wanted: tuple[bytes, ...], questions: Any) -> tuple[dict[bytes, Any], dict[bytes, Any]]:
        """What is stored: the living, and those that have expired and may still be answered."""
        found: dict[bytes, Any] = {}
        stale: dict[bytes, Any] = {}
        for key in wanted:
            result = self._replay(key, questions, stale)
            if result is not _MISS:
                found[key] = result
        return found, stale

    def _replay(self, key: bytes, questions: Any, stale: dict[bytes, Any] | None = None) -> Any:
        """The stored result of a key, made anew (I4), or _MISS."""
        held = self.store.get(key)
        if held is None:
            return _MISS
        value, expires = held
        is_stale = self._stale_s and expires is not None and expires - self._stale_s <= time.time()
        if is_stale and stale is None:
            return _MISS
        try:
            result = codec.decode(value)
        except CorruptDecision as error:
            self._fault(error)
            self.store.renew(key, 0)
            return _MISS
        if is_stale and stale is not None:
            stale[key] = result
            return _MISS
        if self._renews and expires is not None:
            self._renew(key, expires, questions, result)
        return result

    def _renew(self, key: bytes, expires: float, questions: Any, result: Any) -> None:
        ttl = self._ttl_of(questions, result)
        now = time.time()
        if ttl is not None and expires - now < ttl - ttl / _RENEWALS_PER_TTL:
            self.store.renew(key, now + ttl)

    # ---- storing

    def _keep(
        self, keyed: list[tuple[bytes, Any]], questions: Any, flight: Flight | None, replaced: bool
    ) -> dict[bytes, Any]:
        """Store results; returns, by key, the value that was there first, where it is another (I2)."""
        try:
            items = [item for key, result in keyed for item in self._item(key, questions, result)]
            if not items:
                return {}
            if replaced:
                for key, _value, _expires in items:
                    self.store.renew(key, 0)
            values = self._add(items, flight)
            firsts = {
                key: codec.decode(first)
                for (key, value, _expires), first in zip(items, values, strict=True)
                if first != value
            }
        except Exception as error:
            self._fault(error)
            return {}
        self._count("conflicts", len(firsts))
        return firsts

    def _item(self, key: bytes, questions: Any, result: Any) -> list[Item]:
        """The item that keeps a result; none where it must not be kept."""
        result = codec.stripped(result)
        if not is_legal(questions, result):
            self._pass_by("not_legal")
            return []
        try:
            value = codec.encode(result)
        except NotStorable as refusal:
            self._pass_by(refusal.reason)
            return []
        ttl = self._ttl_of(questions, result)
        if ttl is not None and ttl <= 0:
            return []
        return [(key, value, None if ttl is None else time.time() + ttl + self._stale_s)]

    def _add(self, items: list[Item], flight: Flight | None) -> list[bytes]:
        add_many = getattr(self.store, "add_many", None)
        if add_many is None:
            return [self.store.add(*item) for item in items]
        values: list[bytes] = add_many(items, flight.claim if flight is not None else None)
        return values

    def _ttl_of(self, questions: Any, result: Any) -> float | None:
        ttl = self._ttl(questions, result) if callable(self._ttl) else self._ttl
        return None if ttl is None else float(ttl)

    # ---- housekeeping

    def delete(self, model: Any, state: Any, questions: Any, checkpoint: str | None = None) -> bool:
        """Forget one decision everywhere, and refuse what is being computed for it just now."""
        return delete_key(self.store, self.key_of(model, state, questions, checkpoint))

    def prune(self) -> int:
        """Remove what has expired; returns how many."""
        return self.store.prune()

    def cache_info(self) -> CacheInfo:
        """Figures; see CacheInfo."""
        with self._lock:
            counts, uncached = dict(self._counts), dict(self._uncached)
        try:
            size = len(self.store)
        except Exception as error:
            self._fault(error)
            size = 0
        return CacheInfo(
            size=size,
            maxsize=getattr(self.store, "maxsize", None),
            hits=counts["hits"],
            misses=counts["misses"],
            conflicts=counts["conflicts"] + getattr(self.store, "conflicts", 0),
            coalesced=counts["coalesced"],
            stale=counts["stale"],
            errors=counts["errors"] + getattr(self.store, "losses", 0),
            uncached=uncached,
        )

    def cache_clear(self) -> None:
        """Forget all decisions, for everybody who shares the store, and this cache's figures."""
        self.store.clear()
        self._reset_counts()

    def close(self) -> None:
        """Let go of the store; what is shared stays."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)
        self.store.close()

    def __enter__(self) -> DecisionCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reset_counts(self) -> None:
        with self._lock:
            self._counts = dict.fromkeys(("hits", "misses", "conflicts", "coalesced", "stale", "errors"), 0)
            self._uncached: dict[str, int] = {}

    def _count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by

    def _pass_by(self, reason: str) -> None:
        with self._lock:
            self._uncached[reason] = self._uncached.get(reason, 0) + 1

    def _fault(self, error: Exception) -> None:
        """Count what a store raised, and log the first of its kind (I1)."""
        self._count("errors")
        if type(error) not in self._faults_logged:
            self._faults_logged.add(type(error))
            log.warning(
                "decided without the cache: %s: %s (further ones are counted)", type(error).__name__, error
            )

    # ---- performing steps

    def _perform(self, step: _Step, compute: Callable[[], Any] | None = None) -> Any:
        match step:
            case _Run():
                return step.call()
            case _Wait():
                return self._flights.wait(step.keys, step.deadline_ns)
            case _Compute():
                assert compute is not None
                return compute()

    async def _aperform(self, step: _Run | _Wait) -> Any:
        loop = asyncio.get_running_loop()
        if isinstance(step, _Run):
            if self._executor is None:
                # Not the loop's own: its few threads may all be busy with what waits for us.
                self._executor = ThreadPoolExecutor(_STORE_THREADS, "shmcache-decisions")
            return await loop.run_in_executor(self._executor, step.call)
        free = loop.create_future()

        def settle() -> None:
            if not free.done():
                free.set_result(None)

        def wake() -> None:
            loop.call_soon_threadsafe(settle)

        watch = self._flights.begin_wait(step.keys, wake)
        if watch is not None:
            watch.waiters.append(wake)
            threading.Thread(target=self._flights.watch, args=(watch, step.deadline_ns), daemon=True).start()
        await asyncio.wait((free,), timeout=max(0, step.deadline_ns - time.monotonic_ns()) / 1e9)
        return None


def _drive(steps: Generator[_Step, Any, Any], perform: Callable[[_Step], Any]) -> Any:
    """Perform steps one after the other; what a step raises is raised inside the generator."""
    advance: Callable[[], _Step] = functools.partial(next, steps)
    while True:
        try:
            step = advance()
        except StopIteration as stop:
            return stop.value
        try:
            advance = functools.partial(steps.send, perform(step))
        except BaseException as error:
            advance = functools.partial(steps.throw, error)


def delete_key(store: DecisionStore, key: bytes) -> bool:
    """Remove one decision; a store without `delete` has it expire."""
    delete = getattr(store, "delete", None)
    if delete is not None:
        return bool(delete(key))
    was_there = store.get(key) is not None
    store.renew(key, 0)
    return was_there


def _like(result: Any, example: Any) -> Any:
    """A replay with what this call puts on its own results: the routing, and marks of a confidence gate."""
    if not isinstance(result, dict) or not isinstance(example, Mapping):
        return result
    if "routing" in example:
        result["routing"] = copy.deepcopy(example["routing"])
    answers, examples = result.get("answers"), example.get("answers")
    if isinstance(answers, dict) and isinstance(examples, Mapping):
        for name, answer in answers.items():
            mark = examples.get(name)
            if isinstance(answer, dict) and isinstance(mark, Mapping) and "abstention_threshold" in mark:
                answer.update(_gate(answer, mark["abstention_threshold"]))
    return result


def _gate(answer: Mapping[str, Any], threshold: float) -> dict[str, Any]:
    """The marks that laya's confidence gate puts on an answer at this threshold."""
    confidence = answer.get("answer_confidence", answer.get("confidence"))
    if not isinstance(confidence, (int, float)):
        return {"abstention": "unevaluated", "abstention_threshold": threshold}
    if confidence < threshold:
        return {"low_confidence": True, "abstention": "abstained", "abstention_threshold": threshold}
    return {"abstention": "passed", "abstention_threshold": threshold}
