"""What do two agents that talk in turn, over two workers, save by the cache?

    total_prefill_tokens_vs_no_cache         tokens decoded before first tokens ÷ those of an emptied Llama
    total_time_vs_no_cache                   the same trace, whole requests
    total_prefill_tokens_vs_llama_ram_cache  ÷ stock Llama with a LlamaRAMCache for each worker
    split_<part>_vs_requests                 where the time of our requests goes; what is left is bookkeeping
    overhead_when_nothing_repeats            unrelated prompts with the cache ÷ without it, back to back
    herd_prefills                            4 workers, one cold prompt: who prefilled more than 64 tokens

The trace: 2 agents with one system prompt of 1,500 tokens, 10 turns each, a question of some 40 tokens and a
reply of at most 16; each turn goes to the worker that did not serve the agent's last one. Tokens are
llama.cpp's own counters, read when the first token is sampled. --quick: 300 tokens, 3 turns, gates of 64.

Owner: bench. Leaves out: bounds.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import llama_cpp
import msgspec
from llama_cpp.llama_cache import LlamaRAMCache

from bench.harness import Options, Row, compared
from shmcache.client import Cache, attach
from shmcache.config import Gates
from shmcache.tools.clean import remove
from shmcache.tools.demo import CoordinatorProcess
from shmcache.tools.model import model_path
from shmcache.workers import SharedLlama
from shmcache.workers.state import ContextState

AGENTS, WORKERS, HERD = 2, 2, 4
REPLY_TOKENS = 16
PREFILL = 64  # more than so many decoded tokens are a prefill
PAIRS = 20
_RAM_CACHE_BYTES = 4 << 30
_WORDS = ("harbour", "gull", "rope", "tide", "anchor", "lantern", "crew", "north", "signal", "cargo", "storm")


class Scale(msgspec.Struct, frozen=True):
    """How long the trace is."""

    head_tokens: int
    turns: int
    gates: Gates
    unrelated_tokens: int
    threads: int


FULL = Scale(1500, 10, Gates(), 600, os.cpu_count() or 1)
QUICK = Scale(300, 3, Gates(min_tokens=64, cold_min_tokens=64, boundary_align_tokens=64), 128, 1)


class Totals(msgspec.Struct):
    """What one run of the trace took."""

    prefill_tokens: int = 0
    time_s: float = 0.0


def rows(options: Options) -> Iterable[Row]:
    """All rows of this bench."""
    scale = QUICK if options.quick else FULL
    with served() as namespace:
        with attach(namespace) as one, attach(namespace) as other:
            workers = [_shared(scale, cache) for cache in (one, other)]
            parts: dict[str, float] = defaultdict(float)
            for llama in workers:
                _split(llama, parts)
            ours = run_trace(workers, scale, lambda: one.flush(60_000) and other.flush(60_000))
            _close(workers)
        without = run_trace(_stock(scale, WORKERS), scale, None)
        caching = _stock(scale, WORKERS)
        for llama in caching:
            llama.set_cache(LlamaRAMCache(capacity_bytes=_RAM_CACHE_BYTES))
        ram_cache = run_trace(caching, scale, None)
        _close(caching)
        tokens = ours.prefill_tokens
        yield _row("total_prefill_tokens_vs_no_cache", tokens, "tokens", "no cache", without.prefill_tokens)
        yield _row("total_time_vs_no_cache", ours.time_s, "s", "no cache", without.time_s)
        name = "total_prefill_tokens_vs_llama_ram_cache"
        yield _row(name, tokens, "tokens", "LlamaRAMCache", ram_cache.prefill_tokens)
        for part, took_s in parts.items():
            yield _row(f"split_{part}_vs_requests", took_s * 1e3, "ms", "requests", ours.time_s * 1e3)
        yield overhead(namespace, scale)
        yield herd(namespace, scale)


def run_trace(workers: list[Any], scale: Scale, between: Callable[[], object] | None) -> Totals:
    """Serve all turns; `between` runs after each reply, as a person's thinking does, and is not counted."""
    rng = random.Random(7)
    head = _text(rng, scale.head_tokens)
    chats: list[list[dict[str, str]]] = [[{"role": "system", "content": head}] for _ in range(AGENTS)]
    questions = [[_text(rng, 40) for _ in range(scale.turns)] for _ in range(AGENTS)]
    totals = Totals()
    for turn in range(scale.turns):
        for agent, chat in enumerate(chats):
            llama = workers[(turn + agent) % len(workers)]
            chat.append({"role": "user", "content": questions[agent][turn]})
            if not isinstance(llama, SharedLlama) and llama.cache is None:
                llama.reset()
            start = time.perf_counter()
            reply, prefilled = _ask(llama, chat)
            totals.time_s += time.perf_counter() - start
            totals.prefill_tokens += prefilled
            chat.append({"role": "assistant", "content": reply})
            if between is not None:
                between()
    return totals


def _ask(llama: Any, chat: list[dict[str, str]]) -> tuple[str, int]:
    """The reply, and how many tokens were decoded before its first one was sampled."""
    state = ContextState(llama)
    before, prefilled = state.decoded_tokens(), 0
    sampled = False

    def tap(_: Any, scores: Any) -> Any:
        nonlocal prefilled, sampled
        if not sampled:
            sampled, prefilled = True, state.decoded_tokens() - before
        return scores

    answer = llama.create_chat_completion(
        chat,
        max_tokens=REPLY_TOKENS,
        temperature=0.0,
        logits_processor=llama_cpp.LogitsProcessorList([tap]),
    )
    return answer["choices"][0]["message"]["content"], prefilled


def overhead(namespace: str, scale: Scale) -> Row:
    """Prompts that share nothing, at a worker with the cache and at a stock Llama."""
    rng = random.Random(11)
    with attach(namespace) as cache:
        ours, [stock] = _shared(scale, cache), _stock(scale, 1)

        def side(llama: Any) -> Callable[[], float]:
            def request_ms() -> float:
                tokens = [rng.randrange(100, 20_000) for _ in range(scale.unrelated_tokens)]
                llama.reset()
                start = time.perf_counter()
                llama.create_completion(tokens, max_tokens=8, temperature=0.0)
                return (time.perf_counter() - start) * 1e3

            return request_ms

        row = compared("overhead_when_nothing_repeats", "ms", "stock Llama", (side(ours), side(stock)), PAIRS)
        _close([ours, stock])
    return row


def herd(namespace: str, scale: Scale) -> Row:
    """Several workers get one cold prompt at once."""
    rng = random.Random()
    tokens = [rng.randrange(100, 20_000) for _ in range(2 * scale.unrelated_tokens)]
    caches = [attach(namespace) for _ in range(HERD)]
    workers = [_shared(scale, cache, threads=1) for cache in caches]
    all_here = threading.Barrier(HERD)

    def ask(llama: SharedLlama) -> None:
        all_here.wait()
        llama.create_completion(tokens, max_tokens=2, temperature=0.0)

    threads = [threading.Thread(target=ask, args=(llama,)) for llama in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    prefills = sum(llama.last_report.prefilled_tokens > PREFILL for llama in workers)
    _close(workers)
    for cache in caches:
        cache.close()
    return _row("herd_prefills", prefills, "", "one prefill", 1)


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


def _options(scale: Scale, threads: int) -> dict[str, Any]:
    context = scale.head_tokens + 120 * scale.turns + 2 * scale.unrelated_tokens
    return {"n_ctx": context, "n_threads": threads, "n_threads_batch": threads, "verbose": False}


def _shared(scale: Scale, cache: Cache, threads: int | None = None) -> SharedLlama:
    options = _options(scale, threads or scale.threads)
    return SharedLlama(str(model_path()), cache=cache, gates=scale.gates, **options)


def _stock(scale: Scale, count: int) -> list[llama_cpp.Llama]:
    options = _options(scale, scale.threads)
    return [llama_cpp.Llama(str(model_path()), **options) for _ in range(count)]


def _close(workers: Iterable[Any]) -> None:
    for llama in workers:
        llama.close()


def _text(rng: random.Random, n_tokens: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(n_tokens * 3 // 4))  # some words are two tokens


def _row(name: str, ours: float, unit: str, peer: str, peer_value: float) -> Row:
    return Row(name, ours, unit, peer, peer_value, ours / peer_value)


def _split(llama: SharedLlama, parts: dict[str, float]) -> None:
    """Note what each step takes. prefill is all decoding before a first token; decode what comes after it."""

    def timed(owner: Any, method: str, part: Callable[[tuple[Any, ...]], str]) -> None:
        call = getattr(owner, method)

        @wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                parts[part(args)] += time.perf_counter() - start

        setattr(owner, method, wrapper)

    timed(llama, "tokenize", lambda _: "tokenise")
    timed(llama._renderer, "render", lambda _: "render")
    timed(llama, "_longest_row", lambda _: "lookup")
    timed(llama._state, "copy_in", lambda _: "restore")
    timed(
        llama._cells,
        "decode",
        lambda _: (
            "prefill" if llama._serving is not None and llama._serving.prefilled_tokens is None else "decode"
        ),
    )
