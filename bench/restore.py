"""How long from a prompt to a restored sequence, next to the bare copy into the context?

SmolLM2, 2,048 tokens, 47 MB of state (--quick: 1,024). Peers: llama_state_seq_set_data from a warm private
buffer, and the restores of llama-cpp-python's own caches.

    kept_vs_set_data                lookup to restored sequence, mapping kept
    first_use_vs_set_data           the same, mapping fresh and summed
    disk_vs_set_data                from disk, page cache warm, summed
    kept_vs_llama_ram_cache, disk_vs_llama_disk_cache
    disk_bandwidth_vs_dd            bytes a second of a slab read, page cache cold ÷ plain sequential read
    four_workers_pss_vs_one_copy    proportional memory of one row in four workers ÷ its size
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from llama_cpp.llama_cache import LlamaDiskCache, LlamaRAMCache

from bench.harness import Options, Row, compared
from bench.states import Held, Rows, tiers
from shmcache.client import attach
from shmcache.key import PrefixWalk
from shmcache.slab import ReadBuffers, ReadSlab
from shmcache.tiers.disk import disk_directory, disk_path

_WORKERS = 4


def rows(options: Options) -> Iterable[Row]:
    """All rows of this bench."""
    held = Held(options)
    with tiers(held) as by_tier:
        memory, disk = by_tier["ram_file"], by_tier["disk"]
        in_memory, on_disk = memory.add(), disk.add()
        kept, from_disk = restored(held, memory, in_memory), restored(held, disk, on_disk)
        fresh = restored(held, memory, in_memory, keep=False)
        for name, side in (
            ("kept_vs_set_data", kept),
            ("first_use_vs_set_data", fresh),
            ("disk_vs_set_data", from_disk),
        ):
            yield compared(name, "ms", "llama_state_seq_set_data", (side, held.set_data_ms), options.repeats)
        yield from _peers(held, kept, from_disk, options)
        yield _bandwidth(disk, on_disk, options)
        yield _memory(memory, in_memory)


def restored(held: Held, rows: Rows, walk: PrefixWalk, *, keep: bool = True) -> Callable[[], float]:
    """From the prompt's bytes to cells that hold the row."""

    def restore_ms() -> float:
        if not keep:
            rows.cache.let_go()
        start = time.perf_counter()
        hit = next(rows.cache.candidates(walk, walk.text_bytes))
        held.state.copy_in(hit.image.payload, held.tokens)
        hit.use()
        hit.close()
        return (time.perf_counter() - start) * 1e3

    return restore_ms


def _peers(
    held: Held, kept: Callable[[], float], from_disk: Callable[[], float], options: Options
) -> Iterable[Row]:
    directory = Path(tempfile.mkdtemp(prefix="shmcache-bench-", dir=Path.cwd()))
    ram = LlamaRAMCache(capacity_bytes=1 << 33)
    disk = LlamaDiskCache(str(directory), capacity_bytes=1 << 33)
    ids, state = held.ids.tolist(), held.llama.save_state()
    try:
        for name, ours, cache in (
            ("kept_vs_llama_ram_cache", kept, ram),
            ("disk_vs_llama_disk_cache", from_disk, disk),
        ):

            def peer_ms(cache: LlamaRAMCache | LlamaDiskCache = cache) -> float:
                cache[ids] = state  # a hit of the disk cache takes the entry out
                start = time.perf_counter()
                held.llama.load_state(cache[ids])
                return (time.perf_counter() - start) * 1e3

            with redirect_stderr(io.StringIO()):  # the disk cache tells all it does
                yield compared(name, "ms", type(cache).__name__, (ours, peer_ms), options.repeats)
    finally:
        shutil.rmtree(directory)


def _bandwidth(rows: Rows, walk: PrefixWalk, options: Options) -> Row:
    """Our verified read of a file that is not in the page cache, and a plain one."""
    hit = next(rows.cache.candidates(walk, walk.text_bytes))
    path = disk_path(disk_directory(rows.cache.connection.names), hit.found.row.key)
    hit.close()
    buffers = ReadBuffers()
    plain = bytearray(1 << 20)

    def cold(read: Callable[[int], int]) -> float:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            size_bytes = read(fd)
            return size_bytes / (time.perf_counter() - start) / 1e6
        finally:
            os.close(fd)

    def ours(fd: int) -> int:
        slab = ReadSlab(fd, buffers)
        slab.close()
        return slab.size_bytes

    def sequential(fd: int) -> int:
        size_bytes = 0
        while got := os.readv(fd, [plain]):
            size_bytes += got
        return size_bytes

    return compared(
        "disk_bandwidth_vs_dd",
        "MB/s",
        "sequential read",
        (lambda: cold(ours), lambda: cold(sequential)),
        options.repeats,
    )


def _memory(rows: Rows, walk: PrefixWalk) -> Row:
    """Four processes that map one row: what each of them is charged for it, added up."""
    context = get_context("spawn")
    names = rows.cache.connection.names.namespace
    rows.cache.let_go()  # ours would be a fifth share of it
    pipes, workers = [], []
    for _ in range(_WORKERS):
        ours, theirs = context.Pipe()
        worker = context.Process(target=_hold, args=(names, theirs), daemon=True)
        worker.start()
        pipes.append(ours)
        workers.append(worker)
    try:
        key = walk.key_at(walk.text_bytes - 1)
        for pipe in pipes:
            pipe.send(key)
        size_bytes = max([pipe.recv() for pipe in pipes])
        for pipe in pipes:
            pipe.send("measure")
        shares = [pipe.recv() for pipe in pipes]
    finally:
        for pipe, worker in zip(pipes, workers, strict=True):
            pipe.close()
            worker.join(10)
    total = float(sum(shares))
    return Row(
        name="four_workers_pss_vs_one_copy",
        ours=total / 1e6,
        unit="MB",
        peer="one copy",
        peer_value=size_bytes / 1e6,
        ratio=total / size_bytes,
    )


def _hold(namespace: str, pipe: Connection) -> None:
    with attach(namespace) as cache:
        hit = cache.get(pipe.recv())
        assert hit is not None
        pipe.send(hit.found.row.slab_bytes)
        pipe.recv()
        pipe.send(_proportional_bytes(f"{hit.found.row.key.hex()}.kvc"))
        try:
            pipe.recv()
        except EOFError:
            return


def _proportional_bytes(name: str) -> int:
    """This process's proportional share of its mappings of a file, from the kernel's own account."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = line.endswith(name)
        elif inside and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total
