"""What does one lookup cost in the shared index, next to the fastest store that Python has?

Peer: py-lmdb, a memory-mapped B-tree in C with lock-free readers, in /dev/shm, each get in a read
transaction of its own, because ours sees every publication at once as well. Same keys, values of the
same size (128 bytes).

    reader_get_vs_lmdb              word, body, check, word; 100,000 rows; random keys
    whole_hit_vs_lmdb, _vs_sqlite   a hit as a worker has it (bench.hits)
    hit_growth_vs_lmdb_growth       the same at a million rows (with --quick 200,000) ÷ the same at a thousand
    hit_p99_under_churn_vs_idle     one hit's p99 while another process publishes 2,000 rows a second
    two_readers_vs_one              lookups a second of two processes ÷ those of one
    coordinator_bytes_per_row       what the coordinator holds beside the index (bench.memory)
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import lmdb

from bench import hits, memory
from bench.harness import Options, Row, compared, paired, percentile, typical
from shmcache import index
from shmcache.shm import SHM_ROOT, Mapping

ROW_BYTES = index.ROW_BYTES
HELD = 100_000
SMALL, LARGE = 1_000, 1_000_000
CHURN_PER_S = 2_000
CHURN_TICK_S = 0.005
CHUNK = 500  # lookups that are timed together: about 1 ms


def rows(options: Options) -> Iterable[Row]:
    """All rows of this bench."""
    with working_directory() as directory:
        with Pair(directory, HELD) as pair:
            yield _get(pair, options)
            yield _two_readers(pair, options)
        yield _p99(directory, options)
        yield from hits.rows(options, directory)
        yield memory.row(directory)
        large_rows = LARGE // 5 if options.quick else LARGE
        with Pair(directory, SMALL) as small, Pair(directory, large_rows) as large:
            yield _growth(small, large, options)


class Pair:
    """The same keys in an index and in an LMDB file."""

    def __init__(self, directory: Path, count: int) -> None:
        self.keys = [os.urandom(32) for _ in range(count)]
        self.path = directory / f"index.{count}"
        self._mapping, self.writer = make_index(self.path, count)
        for number, key in enumerate(self.keys):
            self.writer.publish(row(key, number), _nobody)
        self._read_only = Mapping.open(self.path)
        self.reader = index.IndexReader(self._read_only.bytes)
        self.env = lmdb.open(str(directory / f"lmdb.{count}"), map_size=count * 1024 + (64 << 20), sync=False)
        with self.env.begin(write=True) as transaction:
            for key in sorted(self.keys):
                transaction.put(key, key * (ROW_BYTES // 32), append=True)

    def some_keys(self, count: int) -> list[bytes]:
        """Random keys in random order, the same for both sides."""
        return random.choices(self.keys, k=count)

    def chunks(self, count: int) -> list[list[bytes]]:
        """So many lists of CHUNK such keys."""
        return [self.some_keys(CHUNK) for _ in range(count)]

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.env.close()
        self.reader.close()
        self._read_only.close()
        self.writer.close()
        self._mapping.close()
        self.path.unlink()


@contextlib.contextmanager
def working_directory() -> Iterator[Path]:
    """A directory in /dev/shm, gone afterwards: both sides keep their bytes in memory, none on a disk."""
    path = tempfile.mkdtemp(prefix="shmcache-bench-", dir=SHM_ROOT)
    try:
        yield Path(path)
    finally:
        shutil.rmtree(path)


def make_index(path: Path, max_rows: int) -> tuple[Mapping, index.IndexWriter]:
    """A new index in a file, and the writer that owns it."""
    size_bytes = index.segment_bytes(max_rows)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        mapping = Mapping(fd, size_bytes, writable=True)
    finally:
        os.close(fd)
    return mapping, index.IndexWriter.create(mapping.bytes, max_rows, epoch=1)


def row(key: bytes, number: int) -> index.Row:
    """A row that has a block of its own, the dearest kind."""
    return index.Row(key, key, number % 1024, 1, number, 4096, 512, 1, 1, 0)


def _nobody(slots: object) -> int:
    raise AssertionError(f"both buckets are full: {slots}")


def _get(pair: Pair, options: Options) -> Row:
    chunks = pair.chunks(40)
    sides = (lambda: _ours_us(pair, chunks), lambda: _lmdb_us(pair, chunks))
    return paired("reader_get_vs_lmdb", "us", "py-lmdb get", sides, 3 * options.repeats)


def _ours_us(pair: Pair, chunks: list[list[bytes]]) -> float:
    get = pair.reader.get

    def work(number: int) -> None:
        for key in chunks[number]:
            get(key)

    return typical(work, len(chunks), CHUNK)


def _lmdb_us(pair: Pair, chunks: list[list[bytes]]) -> float:
    begin = pair.env.begin

    def work(number: int) -> None:
        for key in chunks[number]:
            with begin() as transaction:
                transaction.get(key)

    return typical(work, len(chunks), CHUNK)


def _growth(small: Pair, large: Pair, options: Options) -> Row:
    few, many = (pair.chunks(20 if options.quick else 100) for pair in (small, large))
    return compared(
        "hit_growth_vs_lmdb_growth",
        "x",
        "py-lmdb get",
        (
            lambda: _ours_us(large, many) / _ours_us(small, few),
            lambda: _lmdb_us(large, many) / _lmdb_us(small, few),
        ),
        options.repeats,
    )


# ---- other processes

SPAWN = get_context("spawn")


def _two_readers(pair: Pair, options: Options) -> Row:
    keys = pair.some_keys(20_000)
    seconds = 0.25 if options.quick else 1.0
    with Helper(_read, str(pair.path), keys) as one, Helper(_read, str(pair.path), keys) as other:
        return compared(
            "two_readers_vs_one",
            "M/s",
            "one reader",
            (lambda: Helper.sum_of(seconds, one, other), lambda: Helper.sum_of(seconds, one)),
            options.repeats,
        )


class Helper:
    """A process that does its work for some seconds each time it is asked, and answers with a figure."""

    def __init__(self, work: Callable[..., None], *arguments: object) -> None:
        self._ours, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=work, args=(theirs, *arguments), daemon=True)
        self._process.start()
        self._ours.recv()

    def ask(self, seconds: float) -> None:
        """Begin."""
        self._ours.send(seconds)

    def answer(self) -> float:
        """Wait for the figure."""
        figure: float = self._ours.recv()
        return figure

    @staticmethod
    def sum_of(seconds: float, *helpers: Helper) -> float:
        """All at once; the sum of their figures."""
        for helper in helpers:
            helper.ask(seconds)
        return sum(helper.answer() for helper in helpers)

    def __enter__(self) -> Helper:
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.send(None)
        self._process.join()


def _read(asked: Connection, path: str, keys: list[bytes]) -> None:
    """Millions of lookups a second, in a process of its own."""
    with Mapping.open(Path(path)) as mapping, index.IndexReader(mapping.bytes) as reader:
        get = reader.get
        asked.send(None)
        while (seconds := asked.recv()) is not None:
            count = 0
            start = time.perf_counter()
            while (passed := time.perf_counter() - start) < seconds:
                for key in keys[:2000]:
                    get(key)
                count += 2000
            asked.send(count / passed / 1e6)


def _p99(directory: Path, options: Options) -> Row:
    """The writer publishes rows of its own and replaces and removes them: the reader's rows stay."""
    path = directory / "churned"
    keys = [os.urandom(32) for _ in range(10_000)]
    seconds = 0.3 if options.quick else 1.5
    with Helper(_publish, str(path), keys) as writer, Mapping.open(path) as mapping:
        reader = index.IndexReader(mapping.bytes)

        def beside_churn() -> float:
            writer.ask(seconds)
            figure = _hit_p99_us(reader, keys, seconds)
            writer.answer()
            return figure

        row = compared(
            "hit_p99_under_churn_vs_idle",
            "us",
            "the same without a writer",
            (beside_churn, lambda: _hit_p99_us(reader, keys, seconds)),
            options.repeats,
        )
        reader.close()
    return row


def _hit_p99_us(reader: index.IndexReader, keys: list[bytes], seconds: float) -> float:
    clock = time.perf_counter_ns
    took = []
    end = clock() + int(seconds * 1e9)
    while clock() < end:
        for key in random.choices(keys, k=1000):
            start = clock()
            reader.get(key)
            took.append(clock() - start)
    return percentile(took, 0.99) / 1e3


def _publish(asked: Connection, path: str, keys: list[bytes]) -> None:
    """Publish CHURN_PER_S rows a second, a tenth of them replacements, and remove as many."""
    mapping, writer = make_index(Path(path), 4 * len(keys))
    for number, key in enumerate(keys):
        writer.publish(row(key, number), _nobody)
    held = [os.urandom(32) for _ in range(len(keys))]
    for number, key in enumerate(held):
        writer.publish(row(key, number), _nobody)
    asked.send(None)
    place = 0
    while (seconds := asked.recv()) is not None:
        start = time.perf_counter()
        done = 0
        while (passed := time.perf_counter() - start) < seconds:
            for _ in range(int(passed * CHURN_PER_S) - done):
                place = (place + 1) % len(held)
                if place % 10:
                    writer.remove(held[place])
                    held[place] = os.urandom(32)
                writer.publish(row(held[place], place), _nobody)
                done += 1
            time.sleep(CHURN_TICK_S)
        asked.send(done / passed)
    writer.close()
    mapping.close()
