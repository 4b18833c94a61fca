"""What do two agents that talk in turn, over two workers, save by the cache?

    total_prefill_tokens_vs_no_cache         tokens decoded before first tokens ÷ those of an emptied Llama
    total_time_vs_no_cache                   the same trace, whole requests
    total_prefill_tokens_vs_llama_ram_cache  ÷ stock Llama with a LlamaRAMCache for each worker
    split_<part>_vs_requests                 where the time of our requests goes; what is left is bookkeeping
    overhead_when_nothing_repeats            unrelated prompts with the cache ÷ without it, pair by pair
    herd_prefills                            4 workers, one cold prompt: who prefilled more than 64 tokens

The trace: 2 agents with one system prompt of 1,500 tokens, 10 turns each, a question of some 40 tokens and a
reply of at most 16. Both agents ask at once, at two workers that are processes of their own, and each turn
goes to the worker that did not serve the agent's last one; it names the reply that it goes on from, and
nobody thinks in between. Tokens are llama.cpp's own counters, read when the first token is sampled.

--quick: 300 tokens, 3 turns, gates of 64. There each new turn is a large share of its prompt, so its ratios
are larger than those of the full trace.

Owner: bench. Leaves out: bounds.
"""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import wraps
from typing import Any, Literal

import llama_cpp
import msgspec
from llama_cpp.llama_cache import LlamaRAMCache

from bench.harness import Options, Row, measured, paired
from shmcache.config import Gates
from shmcache.tools.clean import remove
from shmcache.tools.demo import CoordinatorProcess
from shmcache.tools.model import model_path
from shmcache.workers import SharedLlama
from shmcache.workers.pool import Place, Pool
from shmcache.workers.state import ContextState

AGENTS, WORKERS, HERD = 2, 2, 4
REPLY_TOKENS = 16
PREFILL = 64  # more than so many decoded tokens are a prefill
PAIRS = 20
PARENT_WAIT_MS = 10_000  # a machine that is busy with other things is no reason to lose a reply
_RAM_CACHE_BYTES = 4 << 30
_WORDS = ("harbour", "gull", "rope", "tide", "anchor", "lantern", "crew", "north", "signal", "cargo", "storm")

Kind = Literal["shared", "uncached", "ram_cache"]


class Scale(msgspec.Struct, frozen=True):
    """How long the trace is."""

    head_tokens: int
    turns: int
    gates: Gates
    unrelated_tokens: int


FULL = Scale(1500, 10, Gates(session_resume_wait_ms=PARENT_WAIT_MS), 600)
QUICK = Scale(
    300,
    3,
    Gates(
        min_tokens=64,
        cold_min_tokens=64,
        boundary_align_tokens=64,
        session_resume_wait_ms=PARENT_WAIT_MS,
    ),
    128,
)


class Asked(msgspec.Struct, frozen=True):
    """What a worker says of one request; parts are seconds."""

    text: str
    finish_key: str | None
    prefilled_tokens: int
    parts: dict[str, float]


class Totals(msgspec.Struct):
    """What one run of the trace took."""

    prefill_tokens: int = 0
    time_s: float = 0.0
    parts: dict[str, float] = msgspec.field(default_factory=lambda: defaultdict(float))


class Worker:
    """A model in a process of its own: with the cache, with none, or with llama-cpp-python's."""

    def __init__(self, settings: dict[str, Any], place: Place) -> None:
        kind: Kind = settings["kind"]
        scale = msgspec.convert(settings["scale"], Scale)
        self._parts: dict[str, float] = defaultdict(float)
        self._empties = kind == "uncached"
        self._llama: Any
        if kind == "shared":
            self._llama = _shared(scale, settings["namespace"], place.threads)
            _split(self._llama, self._parts)
        else:
            self._llama = _stock(scale, place.threads)
        if kind == "ram_cache":
            self._llama.set_cache(LlamaRAMCache(capacity_bytes=_RAM_CACHE_BYTES))

    def chat(self, messages: list[dict[str, str]], parent_key: str | None) -> dict[str, Any]:
        """Answer a chat that goes on from a reply (Asked as plain data)."""
        self._parts.clear()
        if self._empties:
            self._llama.reset()
        call = self._llama.create_chat_completion
        if isinstance(self._llama, SharedLlama):
            with self._llama.asking(parent_key=parent_key):
                answer, prefilled = self._ask(call, messages)
        else:
            answer, prefilled = self._ask(call, messages)
        text = answer["choices"][0]["message"]["content"]
        finish_key = answer.get("shmcache", {}).get("finish_key")
        asked: dict[str, Any] = msgspec.to_builtins(Asked(text, finish_key, prefilled, self._parts))
        return asked

    def complete(self, tokens: list[int]) -> int:
        """Answer a prompt of token ids; how many of them were decoded."""
        return self._ask(self._llama.create_completion, tokens)[1]

    def _ask(self, call: Callable[..., Any], prompt: Any) -> tuple[Any, int]:
        """The answer, and how many tokens were decoded before its first one was sampled."""
        state = ContextState(self._llama)
        before, at_first = state.decoded_tokens(), 0

        def tap(_: Any, scores: Any) -> Any:
            nonlocal at_first
            at_first = at_first or state.decoded_tokens()
            return scores

        processors = llama_cpp.LogitsProcessorList([tap])
        answer = call(prompt, max_tokens=REPLY_TOKENS, temperature=0.0, logits_processor=processors)
        return answer, at_first - before

    def close(self) -> None:
        """Ends the model."""
        self._llama.close()


def rows(options: Options) -> Iterable[Row]:
    """All rows of this bench."""
    scale = QUICK if options.quick else FULL
    with served() as namespace:
        ours = run_trace("shared", scale, namespace)
        without = run_trace("uncached", scale, namespace)
        ram_cache = run_trace("ram_cache", scale, namespace)
        tokens = ours.prefill_tokens
        yield measured(
            "total_prefill_tokens_vs_no_cache", "tokens", "no cache", tokens, without.prefill_tokens
        )
        yield measured("total_time_vs_no_cache", "s", "no cache", ours.time_s, without.time_s)
        name = "total_prefill_tokens_vs_llama_ram_cache"
        yield measured(name, "tokens", "LlamaRAMCache", tokens, ram_cache.prefill_tokens)
        for part, took_s in ours.parts.items():
            yield measured(f"split_{part}_vs_requests", "ms", "requests", took_s * 1e3, ours.time_s * 1e3)
        yield herd(namespace, scale)
        yield overhead(namespace, scale)


def run_trace(kind: Kind, scale: Scale, namespace: str) -> Totals:
    """Serve all turns; both agents ask at once, at different workers."""
    rng = random.Random(7)
    head = _text(rng, scale.head_tokens)
    chats: list[list[dict[str, str]]] = [[{"role": "system", "content": head}] for _ in range(AGENTS)]
    questions = [[_text(rng, 40) for _ in range(scale.turns)] for _ in range(AGENTS)]
    parents: list[str | None] = [None] * AGENTS
    totals = Totals()
    with _workers(kind, WORKERS, scale, namespace) as pool:
        for turn in range(scale.turns):
            calls = []
            start = time.perf_counter()
            for agent, chat in enumerate(chats):
                chat.append({"role": "user", "content": questions[agent][turn]})
                worker = (turn + agent) % WORKERS
                calls.append(pool.submit("chat", worker=worker, messages=chat, parent_key=parents[agent]))
            for agent, call in enumerate(calls):
                asked = msgspec.convert(call.result(), Asked)
                totals.prefill_tokens += asked.prefilled_tokens
                parents[agent] = asked.finish_key
                chats[agent].append({"role": "assistant", "content": asked.text})
                for part, took_s in asked.parts.items():
                    totals.parts[part] += took_s / AGENTS  # they run beside each other
            totals.time_s += time.perf_counter() - start
    return totals


def overhead(namespace: str, scale: Scale) -> Row:
    """Prompts that share nothing, at a worker with the cache and at a stock Llama."""
    rng = random.Random(11)
    with closing(_shared(scale, namespace, 1)) as ours, closing(_stock(scale, 1)) as stock:

        def side(llama: Any) -> Callable[[], float]:
            def request_ms() -> float:
                tokens = _unrelated(rng, scale.unrelated_tokens)
                llama.reset()
                start = time.perf_counter()
                llama.create_completion(tokens, max_tokens=8, temperature=0.0)
                return (time.perf_counter() - start) * 1e3

            return request_ms

        return paired("overhead_when_nothing_repeats", "ms", "stock Llama", (side(ours), side(stock)), PAIRS)


def herd(namespace: str, scale: Scale) -> Row:
    """Several workers get one cold prompt at once."""
    tokens = _unrelated(random.Random(), 2 * scale.unrelated_tokens)
    with _workers("shared", HERD, scale, namespace) as pool:
        calls = [pool.submit("complete", worker=number, tokens=tokens) for number in range(HERD)]
        prefills = sum(call.result() > PREFILL for call in calls)
    return measured("herd_prefills", "", "one prefill", prefills, 1)


@contextmanager
def served() -> Iterator[str]:
    """A namespace with a coordinator; nothing of it is left."""
    namespace = f"bench-trace-{os.getpid()}"
    process = CoordinatorProcess(f"--namespace={namespace}", "--ram-file-bytes=2G", "--max-rows=1024")
    try:
        yield namespace
    finally:
        process.stop()
        remove(namespace)


@contextmanager
def _workers(kind: Kind, count: int, scale: Scale, namespace: str) -> Iterator[Pool]:
    settings = {"kind": kind, "scale": msgspec.to_builtins(scale), "namespace": namespace}
    with Pool(count, Worker, settings) as pool:
        pool.wait_ready()
        yield pool


def _options(scale: Scale, threads: int) -> dict[str, Any]:
    context = scale.head_tokens + 120 * scale.turns + 2 * scale.unrelated_tokens
    return {"n_ctx": context, "n_threads": threads, "n_threads_batch": threads, "verbose": False}


def _shared(scale: Scale, namespace: str, threads: int) -> SharedLlama:
    return SharedLlama(str(model_path()), cache=namespace, gates=scale.gates, **_options(scale, threads))


def _stock(scale: Scale, threads: int) -> llama_cpp.Llama:
    return llama_cpp.Llama(str(model_path()), **_options(scale, threads))


def _text(rng: random.Random, n_tokens: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(n_tokens))  # each is one token to SmolLM2


def _unrelated(rng: random.Random, n_tokens: int) -> list[int]:
    return [rng.randrange(100, 20_000) for _ in range(n_tokens)]


def _split(llama: SharedLlama, parts: dict[str, float]) -> None:
    """Note what each step takes. prefill is all decoding before a first token; decode what comes after it."""

    def timed(owner: Any, method: str, part: Callable[[], str]) -> None:
        call = getattr(owner, method)

        @wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                parts[part()] += time.perf_counter() - start

        setattr(owner, method, wrapper)

    def phase() -> str:
        serving = llama._serving
        return "prefill" if serving is not None and serving.prefilled_tokens is None else "decode"

    timed(llama, "tokenize", lambda: "tokenise")
    timed(llama._renderer, "render", lambda: "render")
    timed(llama._edge, "resume", lambda: "wait")
    timed(llama._edge, "wait", lambda: "wait")
    timed(llama, "_longest_row", lambda: "lookup")
    timed(llama._state, "copy_in", lambda: "restore")
    timed(llama._cells, "decode", phase)
    timed(llama, "_save", lambda: "save")
