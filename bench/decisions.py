"""What does a decision cost that was made before, next to the design it comes from, rebuilt with json,
zlib and sqlite3, and next to a locked OrderedDict in one process? 100,000 decisions held on each side (with
--quick 10,000 in the rows beside the seed's figures).

    hit_N_vs_sqlite_design         the whole hook, key to decoded result, for a state of N characters
    store_get_vs_sqlite            the shared store's get ÷ a prepared SELECT with its expiry
    store_get_vs_memory            the same ÷ a locked OrderedDict that keeps the order of use
    add_vs_sqlite_normal           an add, acknowledged when the coordinator committed it ÷ a transaction
                                   here, both with their share of what SQLite does every thousand pages
    typical_add_vs_sqlite_normal   the same without that share: the median add ÷ the median transaction
    add_batch64_vs_sqlite_normal   a decision in a batch of 64 ÷ one transaction each, both with their share
    bytes_per_decision_vs_sqlite   /dev/shm per decision at full capacity ÷ the SQLite file's bytes
    disk_bytes_vs_sqlite           the coordinator's own file beside it
    herd_computations              8 processes, one request, a model of 0.3 s: the most that computed it

The other rows put ours beside the figure of the seed's table of costs, which was measured elsewhere: key_N,
encode, decode, memory_get, memory_bytes, sqlite_get, sqlite_bytes, sqlite_add, sqlite_add_full, router_hit_N
(a whole Router.predict of laya), miss_coalescing (what coalescing adds to a miss), and memo_2000 (a router's
hit with the detection memo ÷ without).
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from hashlib import blake2b
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import laya
import laya.router

from bench.harness import Options, Row, compared, measured, paired, timed, typical
from shmcache.decisions import DecisionCache, DetectionMemo, MemoryStore, SqliteStore
from shmcache.decisions.codec import decode, encode
from shmcache.decisions.key import Facts, KeyMaker
from shmcache.decisions.shared import SharedStore
from shmcache.decisions.table import segment_bytes
from shmcache.tools.clean import remove

HELD = 100_000
GETS = 2_000
ADDS = 960  # of each side in a round, and with them their share of folding the log into the file
LARGER_BYTES = 4 << 20
SIZES = (140, 2_000, 20_000)
SEED_KEY_US = {140: 15.6, 2_000: 22.0, 20_000: 83.5}
SEED_ROUTER_HIT_US = {140: 73.0, 2_000: 76.0, 20_000: 167.0}
HERD, MODEL_S = 8, 0.3

QUESTIONS = {
    "intent": {
        "type": "choice",
        "instructions": "What does the customer want?",
        "criteria": {"refund": "money back", "cancel": "to end the contract", "other": "anything else"},
    },
    "angry": {"type": "noul", "instructions": "Is the customer angry?"},
}
RESULT = {
    "model": "laya-rl-agent",
    "answers": {
        "intent": {
            "type": "choice",
            "choice": "refund",
            "probabilities": {"refund": 0.8123, "cancel": 0.1017, "other": 0.086},
            "confidence": 0.4312,
            "answer_confidence": 0.8123,
            "action": {"act_probability": 0.9321},
        },
        "angry": {
            "type": "noul",
            "noul": 0.7345,
            "confidence": 0.7345,
            "answer_confidence": 0.7345,
            "action": {"act_probability": 0.9321},
        },
    },
    "usage": {"input_tokens": 312, "output_tokens": 0, "state_tokens": 40, "truncated": False},
}


class Context:
    """The fields of a hook's context."""

    def __init__(self, states: list[Any], agent: Any) -> None:
        self.states, self.questions, self.agent, self.model = states, QUESTIONS, agent, "english"
        self.router = self.decision = self.error = self.max_len = self.head_max_len = None
        self.results: list[Any] | None = None

    def skip(self, results: list[Any]) -> None:
        """As laya's."""
        self.results = results


class Agent:
    """What a fingerprint reads, and an instant model."""

    model_id, revision = "convaiinnovations/laya", "3f1a"
    temperature: Sequence[float] = (1.1, 1.4, 0.9)

    def __init__(self) -> None:
        self.temperature = [1.1, 1.4, 0.9]
        self.cfg = {"max_len": 512, "head_max_len": 192}

    def system_one(self, state: Any, questions: Any, lang: str | None = None) -> Any:
        """An answer without any work."""
        return decode(encode(RESULT))


class SeedDesign:
    """The design that this one comes from: canonical JSON, BLAKE2b, zlib, one SQLite file per machine."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)
        for statement in (
            "PRAGMA journal_mode = WAL",
            "PRAGMA synchronous = NORMAL",
            "CREATE TABLE decision (key BLOB PRIMARY KEY, value BLOB NOT NULL, expires REAL) WITHOUT ROWID",
        ):
            self.connection.execute(statement)
        self._fingerprint = blake2b(json.dumps([Agent.model_id, Agent.revision]).encode()).hexdigest()

    def key(self, questions: Any, state: Any) -> bytes:
        """One canonical text, hashed."""
        parts = [1, self._fingerprint, "english", None, [None, None], questions, state]
        text = json.dumps(parts, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return blake2b(text.encode(), digest_size=16).digest()

    def get(self, key: bytes) -> bytes | None:
        """A SELECT, and the expiry."""
        row = self.connection.execute("SELECT value, expires FROM decision WHERE key = ?", (key,)).fetchone()
        if row is None or (row[1] is not None and row[1] <= time.time()):
            return None
        value: bytes = row[0]
        return value

    def add(self, key: bytes, value: bytes, expires: float | None) -> bytes:
        """One transaction that keeps what is there."""
        execute = self.connection.execute
        execute("BEGIN IMMEDIATE")
        row = execute("SELECT value, expires FROM decision WHERE key = ?", (key,)).fetchone()
        if row is not None and (row[1] is None or row[1] > time.time()):
            execute("COMMIT")
            held: bytes = row[0]
            return held
        execute("REPLACE INTO decision VALUES (?, ?, ?)", (key, value, expires))
        execute("COMMIT")
        return value

    def fill(self, items: Sequence[tuple[bytes, bytes, float | None]]) -> None:
        """Many at once: the preparation, not the measurement."""
        self.connection.execute("BEGIN")
        self.connection.executemany("INSERT INTO decision VALUES (?, ?, ?)", items)
        self.connection.execute("COMMIT")

    @staticmethod
    def encode(result: Any) -> bytes:
        """Compact JSON, through zlib where that is smaller."""
        text = json.dumps(result, ensure_ascii=False, separators=(",", ":")).encode()
        packed = zlib.compress(text)
        return b"\x01" + packed if len(packed) < len(text) else b"\x00" + text

    @staticmethod
    def decode(value: bytes) -> Any:
        """The other way."""
        return json.loads(zlib.decompress(value[1:]) if value[:1] == b"\x01" else value[1:])

    def on_predict_start(self, context: Context) -> None:
        """The hook's way to a hit."""
        value = self.get(self.key(context.questions, context.states[0]))
        if value is not None:
            context.skip([self.decode(value)])


class LockedDict:
    """The memory store of that design."""

    def __init__(self, items: Iterable[tuple[bytes, bytes, float | None]]) -> None:
        self._lock = threading.Lock()
        self._values = OrderedDict((key, (value, expires)) for key, value, expires in items)

    def get(self, key: bytes) -> bytes | None:
        """Look up, check the expiry, and move to the warm end."""
        with self._lock:
            held = self._values.get(key)
            if held is None or (held[1] is not None and held[1] <= time.time()):
                return None
            self._values.move_to_end(key)
            return held[0]


class World:
    """Both sides, filled with the same decisions."""

    def __init__(self, directory: Path, namespace: str) -> None:
        self.directory = directory
        self.agent = Agent()
        self.expires = time.time() + 86_400
        value = encode(RESULT)
        self.items = [(os.urandom(16), value, self.expires) for _ in range(HELD)]
        self.store = SharedStore(namespace)
        for start in range(0, HELD, 256):
            self.store.add_many(self.items[start : start + 256])
        self.cache = DecisionCache(self.store, ttl=86_400)
        self.seed = SeedDesign(directory / "seed.sqlite3")
        self.seed.fill([(key, SeedDesign.encode(RESULT), expires) for key, _value, expires in self.items])
        self.memory = LockedDict(self.items)

    def state(self, characters: int) -> str:
        """A state of so many characters that both sides hold."""
        state = (f"State of {characters}: my order has not arrived. " * (characters // 20))[:characters]
        context = Context([state], self.agent)
        self.cache.on_predict_start(context)
        context.results = context.results or [decode(encode(RESULT))]
        self.cache.on_predict_end(context)
        self.seed.add(self.seed.key(QUESTIONS, state), SeedDesign.encode(RESULT), self.expires)
        return state

    def some_keys(self, count: int) -> list[bytes]:
        """Random keys, spread over all that is held."""
        step = 7919
        return [self.items[number * step % HELD][0] for number in range(count)]


def rows(options: Options) -> Iterable[Row]:
    """All rows of this bench."""
    # Room for all that is added: nobody has to leave for another.
    with _world(HELD + 4 * (options.repeats + 1) * ADDS) as world:
        count = 600 if options.quick else 4_000
        for characters in SIZES:
            yield _hit(world, characters, count, options)
        yield from _gets(world, options)
        yield from _bytes(world)
        yield from _adds(world, options)
        yield from _beside_the_seed(world, count, options)
        yield _memo(options)
    yield _herd(2 if options.quick else 10)


@contextmanager
def _world(decisions_rows: int) -> Any:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shmcache-bench-")))
        namespace = stack.enter_context(_coordinator(directory / "ours.sqlite3", decisions_rows))
        yield World(directory, namespace)


@contextmanager
def _coordinator(file: Path, decisions_rows: int) -> Any:
    namespace = f"bench-{os.getpid()}"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "shmcache.server",
            f"--namespace={namespace}",
            "--ram-file-bytes=16M",
            "--max-rows=64",
            f"--decisions-rows={decisions_rows}",
            f"--decisions-bytes={LARGER_BYTES}",
            f"--decisions-file={file}",
            "--log-level=warning",
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("the coordinator did not start")
        yield namespace
    finally:
        process.terminate()
        process.wait()
        remove(namespace)


def _each(work: Callable[[Any], object], arguments: Sequence[Any]) -> Callable[[], float]:
    """A side: the time of one call of `work`, over all arguments."""

    def all_of_them() -> None:
        for argument in arguments:
            work(argument)

    return lambda: timed(all_of_them, len(arguments))


def _hit(world: World, characters: int, count: int, options: Options) -> Row:
    state = world.state(characters)

    def through(hook: Any) -> Callable[[Any], None]:
        def work(_: Any) -> None:
            context = Context([state], world.agent)
            hook(context)
            assert context.results is not None

        return work

    return compared(
        f"hit_{characters}_vs_sqlite_design",
        "us",
        "json, BLAKE2b, SQLite, zlib, json",
        (
            _each(through(world.cache.on_predict_start), range(count)),
            _each(through(world.seed.on_predict_start), range(count)),
        ),
        options.repeats,
    )


def _gets(world: World, options: Options) -> Iterable[Row]:
    keys = world.some_keys(GETS)
    pairs = 20 if options.quick else 200
    for name, peer, get in (
        ("store_get_vs_sqlite", "SELECT, WAL", world.seed.get),
        ("store_get_vs_memory", "locked OrderedDict", world.memory.get),
    ):
        sides = (_each(world.store.get, keys), _each(get, keys))
        yield paired(name, "us", peer, sides, pairs)


def _adds(world: World, options: Options) -> Iterable[Row]:
    value = encode(RESULT)

    def fresh(count: int) -> list[bytes]:
        return [os.urandom(16) for _ in range(count)]

    def one_each(add: Callable[..., Any]) -> float:
        return _each(lambda key: add(key, value, world.expires), fresh(ADDS))()

    def typical_of(add: Callable[..., Any]) -> float:
        keys = fresh(ADDS)
        return typical(lambda number: add(keys[number], value, world.expires), ADDS)

    def batches() -> float:
        items = [(key, value, world.expires) for key in fresh(ADDS)]
        parts = [items[start : start + 64] for start in range(0, ADDS, 64)]
        return _each(world.store.add_many, parts)() / 64

    ours, theirs = world.store.add, world.seed.add
    for name, peer, sides in (
        (
            "add_vs_sqlite_normal",
            "one transaction, NORMAL",
            (lambda: one_each(ours), lambda: one_each(theirs)),
        ),
        (
            "typical_add_vs_sqlite_normal",
            "one transaction, NORMAL",
            (lambda: typical_of(ours), lambda: typical_of(theirs)),
        ),
        ("add_batch64_vs_sqlite_normal", "one transaction each", (batches, lambda: one_each(theirs))),
    ):
        yield paired(name, "us", peer, sides, options.repeats)


def _bytes(world: World) -> Iterable[Row]:
    world.seed.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    count = world.seed.connection.execute("SELECT count(*) FROM decision").fetchone()[0]
    seed_bytes = (world.directory / "seed.sqlite3").stat().st_size / count
    shared_bytes = segment_bytes(HELD, LARGER_BYTES // 256) / HELD
    ours = sum(file.stat().st_size for file in world.directory.glob("ours.sqlite3*")) / len(world.store)
    yield measured("bytes_per_decision_vs_sqlite", "B", "SQLite file", shared_bytes, seed_bytes)
    yield measured("disk_bytes_vs_sqlite", "B", "SQLite file", ours, seed_bytes)


def _beside_the_seed(world: World, count: int, options: Options) -> Iterable[Row]:
    def beside(name: str, figure: float, side: Callable[[], float], unit: str = "us") -> Row:
        return compared(name, unit, "the seed's figure", (side, lambda: figure), options.repeats)

    maker, facts = KeyMaker(), Facts("convaiinnovations/laya", "english")
    for characters, figure in SEED_KEY_US.items():
        state = world.state(characters)
        key = _each(lambda state: maker.key(maker.head(facts, QUESTIONS), state), [state] * count)
        yield beside(f"key_{characters}", figure, key)
    value = encode(RESULT)
    yield beside("encode", 17, _each(encode, [RESULT] * count))
    yield beside("decode", 8, _each(decode, [value] * count))
    items = world.items[: HELD // 10 if options.quick else HELD]
    memory, keys = MemoryStore(HELD), [items[number * 7919 % len(items)][0] for number in range(count)]
    for item in items:
        memory.add(*item)
    yield beside("memory_get", 0.48, _each(memory.get, keys))
    yield measured("memory_bytes", "B", "the seed's figure", _heap_bytes(items[: HELD // 10]), 336)
    for name, figure, full in (("sqlite_add", 115.0, False), ("sqlite_add_full", 276.0, True)):
        sqlite = SqliteStore(world.directory / f"{name}.sqlite3", full=full)

        def add(_: Any, sqlite: SqliteStore = sqlite) -> None:
            sqlite.add(os.urandom(16), value, world.expires)

        if not full:
            sqlite.add_many(items)
            yield beside("sqlite_get", 7.5, _each(sqlite.get, keys))
            with sqlite3.connect(world.directory / f"{name}.sqlite3") as file:
                file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            size_bytes = (world.directory / f"{name}.sqlite3").stat().st_size / len(items)
            yield measured("sqlite_bytes", "B", "the seed's figure", size_bytes, 319)
        yield beside(name, figure, _each(add, range(50)))
        sqlite.close()
    for characters, figure in SEED_ROUTER_HIT_US.items():
        state = world.state(characters)
        router = _router(world.cache)
        router.predict(state, QUESTIONS)
        with _memoised():
            hit = _each(partial(_predict, router), [state] * (count // 4))
            yield beside(f"router_hit_{characters}", figure, hit)
    yield beside("miss_coalescing", 15, lambda: _miss(True, count // 4) - _miss(False, count // 4))


def _heap_bytes(items: Sequence[tuple[bytes, bytes, float | None]]) -> float:
    """What a decision takes in this process's memory, its key and value included."""
    memory = MemoryStore(len(items))
    tracemalloc.start()
    for key, value, expires in items:
        memory.add(bytes(bytearray(key)), bytes(bytearray(value)), expires)
    size_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size_bytes / len(items)


def _predict(router: Any, state: str) -> None:
    router.predict(state, QUESTIONS)


def _router(cache: DecisionCache) -> Any:
    router = laya.Router(hooks=[cache])
    for name in ("english", "multilingual"):
        router.attach(name, Agent())
    return router


@contextmanager
def _memoised() -> Any:
    analyse = laya.router.analyse
    laya.router.analyse = DetectionMemo(analyse)
    try:
        yield
    finally:
        laya.router.analyse = analyse


def _miss(coalesce: bool, count: int) -> float:
    """A miss in this process's memory, over an instant model."""
    cache, agent = DecisionCache(MemoryStore(), coalesce=coalesce), Agent()

    def miss(number: int) -> None:
        context = Context([f"a state that nobody has seen: {number}"], agent)
        cache.on_predict_start(context)
        context.results = [RESULT]
        cache.on_predict_end(context)

    return _each(miss, range(count))()


def _memo(options: Options) -> Row:
    cache = DecisionCache(MemoryStore())
    router = _router(cache)
    state = ("My order has not arrived, and I would like to have my money back. " * 40)[:2_000]
    router.predict(state, QUESTIONS)
    hit = _each(partial(_predict, router), [state] * (30 if options.quick else 200))

    def with_memo() -> float:
        with _memoised():
            router.predict(state, QUESTIONS)
            return hit()

    return compared("memo_2000", "us", "detection each time", (with_memo, hit), options.repeats)


def _herd(rounds: int) -> Row:
    """The most processes that computed one request of a herd."""
    forking = get_context("fork")
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shmcache-bench-")))
        namespace = stack.enter_context(_coordinator(directory / "herd.sqlite3", 1_000))
        together = forking.Barrier(HERD)
        computed = [forking.Value("i", 0) for _ in range(rounds)]

        def member() -> None:
            cache = DecisionCache(namespace=namespace)
            for number in range(rounds):

                def compute(state: Any, questions: Any, count: Any = computed[number]) -> Any:
                    with count.get_lock():
                        count.value += 1
                    time.sleep(MODEL_S)
                    return RESULT

                together.wait()
                cache.get_or_compute("model", number, QUESTIONS, compute)

        members = [forking.Process(target=member) for _ in range(HERD)]
        for process in members:
            process.start()
        for process in members:
            process.join()
    most = max(count.value for count in computed)
    return measured("herd_computations", "passes", "one pass for all", most, 1)
