"""How long does a save block its request, next to the bare copy out of the context?

SmolLM2, 2,048 tokens, 47 MB of state (--quick: 1,024). Peers: llama_state_seq_get_data into a buffer that is
there already, and the saves of llama-cpp-python's own RAM and disk caches.

    <tier>_blocked_vs_get_data       copy and hand-over into a slab that was made ready beforehand
    unprepared_blocked_vs_get_data   reserve, make the slab, copy, hand over, all on the request's path
    prefill_with_saves_vs_without    one prefill, slabs made beside it or not
    <tier>_blocked_vs_llama_…        the same save ÷ Llama.save_state and the store of llama-cpp-python
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr
from pathlib import Path

from llama_cpp.llama_cache import LlamaDiskCache, LlamaRAMCache

from bench.harness import Options, Row, compared
from bench.states import TIERS, Held, Rows, tiers
from shmcache.config import Gates
from shmcache.tools.model import model_path
from shmcache.workers import SharedLlama

_PREFILL_TOKENS = 256  # of the prefill with saves beside it: the slabs are small, and so is the prefill


def rows(options: Options) -> Iterable[Row]:
    """All rows of this bench."""
    held = Held(options)
    with tiers(held) as by_tier:
        for tier in TIERS:
            sides = (prepared(by_tier[tier]), held.get_data_ms)
            yield compared(
                f"{tier}_blocked_vs_get_data", "ms", "llama_state_seq_get_data", sides, options.repeats
            )
        yield compared(
            "unprepared_blocked_vs_get_data",
            "ms",
            "llama_state_seq_get_data",
            (unprepared(by_tier["ram_file"]), held.get_data_ms),
            options.repeats,
        )
        yield from _peers(held, by_tier, options)
        namespace = by_tier["ram_file"].cache.connection.names.namespace
        yield _prefill(namespace, options)


def prepared(rows: Rows) -> Callable[[], float]:
    """A save whose slab was made while the model worked."""

    def save_ms() -> float:
        _text, plan = rows.plan()
        slab = rows.reserve(plan)
        rows.cache.flush(60_000)  # the helper has made it ready
        start = time.perf_counter()
        rows.fill(slab, plan)
        blocked_ms = (time.perf_counter() - start) * 1e3
        slab.wait(60_000)
        return blocked_ms

    return save_ms


def unprepared(rows: Rows) -> Callable[[], float]:
    """A save that nobody saw coming."""

    def save_ms() -> float:
        _text, plan = rows.plan()
        start = time.perf_counter()
        rows.fill(rows.reserve(plan), plan)
        blocked_ms = (time.perf_counter() - start) * 1e3
        rows.cache.flush(60_000)
        return blocked_ms

    return save_ms


def _peers(held: Held, by_tier: dict[str, Rows], options: Options) -> Iterable[Row]:
    """llama-cpp-python's own caches: they copy the whole context and a table of scores."""
    ram = LlamaRAMCache(capacity_bytes=1 << 33)
    directory = Path(tempfile.mkdtemp(prefix="shmcache-bench-", dir=Path.cwd()))
    disk = LlamaDiskCache(str(directory), capacity_bytes=1 << 33)
    try:
        for tier, name, cache in (
            ("ram", "ram_blocked_vs_llama_ram_cache", ram),
            ("disk", "disk_blocked_vs_llama_disk_cache", disk),
        ):

            def peer_ms(cache: LlamaRAMCache | LlamaDiskCache = cache) -> float:
                start = time.perf_counter()
                cache[held.ids.tolist()] = held.llama.save_state()
                return (time.perf_counter() - start) * 1e3

            sides = (prepared(by_tier[tier]), peer_ms)
            with redirect_stderr(io.StringIO()):  # the disk cache tells all it does
                yield compared(name, "ms", type(cache).__name__, sides, options.repeats)
    finally:
        shutil.rmtree(directory)


def _prefill(namespace: str, options: Options) -> Row:
    """The same prefill with a cache that saves its anchors, and without one."""
    gates = Gates(min_tokens=64, cold_min_tokens=64)
    threads = os.cpu_count() or 1

    def model(cache: str | None) -> SharedLlama:
        return SharedLlama(
            str(model_path()),
            cache=cache,
            gates=gates,
            n_ctx=2 * _PREFILL_TOKENS,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )

    with_saves, without = model(namespace), model(None)

    def prefill_ms(llama: SharedLlama) -> Callable[[], float]:
        def side() -> float:
            tokens = [100 + byte for byte in os.urandom(_PREFILL_TOKENS)]
            llama.reset()
            start = time.perf_counter()
            llama.create_completion(tokens, max_tokens=1, temperature=0)
            return (time.perf_counter() - start) * 1e3

        return side

    try:
        sides = (prefill_ms(with_saves), prefill_ms(without))
        return compared("prefill_with_saves_vs_without", "ms", "no cache", sides, options.repeats)
    finally:
        with_saves.close()
        without.close()
