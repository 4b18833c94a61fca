"""What the save and restore benches share: a real state of many tokens, and tiers to put it in.

Not a bench of its own (it has no rows): a SmolLM2 context with `tokens` cells, a coordinator with all three
tiers, and rows of made-up text that hold that state.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import llama_cpp

from bench.harness import Options
from shmcache import kvc
from shmcache.client import Cache, SavePlan, Slab, attach
from shmcache.identity import Identity
from shmcache.key import PrefixWalk, RowAddress, row_address
from shmcache.tools.clean import remove
from shmcache.tools.demo import CoordinatorProcess
from shmcache.tools.model import model_path
from shmcache.workers.state import ContextState

FULL_TOKENS = 2048  # 47 MB of SmolLM2's state
QUICK_TOKENS = 1024
TEXT_BYTES = 8192
TIERS = ("ram", "ram_file", "disk")
_WAIT_MS = 60_000


class Held:
    """A context that holds a state, and the figures of that state."""

    def __init__(self, options: Options) -> None:
        self.tokens = QUICK_TOKENS if options.quick else FULL_TOKENS
        threads = os.cpu_count() or 1
        self.llama = llama_cpp.Llama(
            str(model_path()),
            n_ctx=FULL_TOKENS + 64,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )
        self.ids = array("I", (100 + number % 20_000 for number in range(self.tokens)))
        self.llama.eval(self.ids.tolist())
        self.state = ContextState(self.llama)
        self.state_bytes = self.state.size_bytes()
        self.warm = bytearray(self.state_bytes)
        self.state.copy_out(memoryview(self.warm))

    def get_data_ms(self) -> float:
        """The bare copy out of the context, into a buffer that is there."""
        start = time.perf_counter()
        self.state.copy_out(memoryview(self.warm))
        return (time.perf_counter() - start) * 1e3

    def set_data_ms(self) -> float:
        """The bare copy into the context."""
        start = time.perf_counter()
        self.state.copy_in(self.warm, self.tokens)
        return (time.perf_counter() - start) * 1e3


class Rows:
    """Rows of one identity in one tier, each of them a text of its own."""

    def __init__(self, held: Held, cache: Cache) -> None:
        self._held = held
        self.cache = cache
        self.identity = Identity(model_fp=os.urandom(32), quant=3, ctx_params_hash=os.urandom(32))

    def plan(self) -> tuple[bytes, SavePlan]:
        """A new text and the plan of its row."""
        text = os.urandom(TEXT_BYTES)
        return text, SavePlan(
            address=row_address(self.identity.seed, text),
            text_bytes=len(text),
            payload_offset=kvc.head_bytes(self._held.tokens, 1),
            payload_bytes=self._held.state_bytes,
        )

    def reserve(self, plan: SavePlan) -> Slab:
        """A granted slab."""
        [slab] = self.cache.reserve([plan], None, self.cache.forget).slabs
        if slab is None:
            raise RuntimeError("the bench's coordinator has no room: is /dev/shm full?")
        return slab

    def fill(self, slab: Slab, plan: SavePlan) -> None:
        """What a request pays: the copy out of the context and the hand-over."""
        assert plan.address is not None
        with slab.payload(self._held.state_bytes) as payload:
            self._held.state.copy_out(payload)
        slab.save(
            self._meta(plan, plan.address),
            (kvc.Piece(self._held.tokens, 1, 512, 1, 0),),
            memoryview(self._held.ids),
        )

    def add(self) -> PrefixWalk:
        """Save a row, and return the walk of a prompt that hits it."""
        text, plan = self.plan()
        slab = self.reserve(plan)
        self.fill(slab, plan)
        if not slab.wait(_WAIT_MS):
            raise RuntimeError("the bench's row was not published")
        return PrefixWalk(self.identity.seed, text + b"?")

    def _meta(self, plan: SavePlan, address: RowAddress) -> kvc.Meta:
        now_s = int(time.time())
        return kvc.Meta(
            quant_bits=4,
            save_reason=kvc.Reason.COLD,
            token_count=self._held.tokens,
            context_size=FULL_TOKENS + 64,
            created_unix_s=now_s,
            last_used_unix_s=now_s,
            model_fp=self.identity.model_fp,
            fingerprint_mode="safe",
            quant_name="Q4_1",
            ctx_params_hash=self.identity.ctx_params_hash,
            hostname="bench",
            shmcache_version="bench",
            reason_detail="",
            text_bytes=plan.text_bytes,
            key=address.key,
            block_key=address.block_key,
            n_swa=0,
            pos_min=0,
            rewindable=True,
        )


@contextmanager
def tiers(held: Held) -> Iterator[dict[str, Rows]]:
    """A coordinator with all three tiers, and a cache that saves to each."""
    namespace = f"bench-{os.getpid()}"
    directory = Path(tempfile.mkdtemp(prefix="shmcache-bench-", dir=Path.cwd()))
    budget = f"{held.state_bytes * 6 // (1 << 20) + 64}M"
    coordinator = CoordinatorProcess(
        f"--namespace={namespace}",
        f"--ram-bytes={budget}",
        f"--ram-file-bytes={budget}",
        f"--disk-dir={directory}",
        f"--disk-bytes={budget}",
        f"--staging-bytes={budget}",
        "--max-rows=1024",
        "--log-level=error",
    )
    caches = {tier: attach(namespace, tier=tier) for tier in TIERS}
    try:
        yield {tier: Rows(held, cache) for tier, cache in caches.items()}
    finally:
        for cache in caches.values():
            cache.close()
        coordinator.stop()
        remove(namespace)
        shutil.rmtree(directory)
