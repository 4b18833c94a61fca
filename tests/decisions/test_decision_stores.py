"""One contract over all decision stores."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from decisions.redis_server import RedisServer
from fakeredis import FakeRedis, FakeServer
from support import Namespace

from shmcache.decisions import DecisionCache, FallbackStore, MemoryStore, SqliteStore, stores
from shmcache.decisions.redis import RedisStore
from shmcache.decisions.shared import SharedStore
from shmcache.errors import ForeignObject

KEY, OTHER = b"k" * 16, b"o" * 16


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def redis_store(redis_server: RedisServer) -> Iterator[RedisStore]:
    store = RedisStore(redis_server.url, prefix=f"test-{os.urandom(4).hex()}:")
    yield store
    store.close()


@pytest.fixture(params=["memory", "sqlite", "redis", "fallback", "shared", "shared fallback"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    made: Any
    match request.param:
        case "memory":
            made = MemoryStore()
        case "sqlite":
            made = SqliteStore(tmp_path / "decisions.sqlite3")
        case "redis":
            made = request.getfixturevalue("redis_store")
        case "fallback":
            made = FallbackStore(request.getfixturevalue("redis_store"), MemoryStore())
        case _:
            space: Namespace = request.getfixturevalue("space")
            space.start()
            made = SharedStore(space.name)
            if request.param == "shared fallback":
                made = FallbackStore(made, MemoryStore())
    yield made
    made.close()


def test_the_first_decision_wins(store: Any) -> None:
    assert store.get(KEY) is None
    assert store.add(KEY, b"first", None) == b"first"
    assert store.add(KEY, b"second", None) == b"first"
    assert store.get(KEY) == (b"first", None)
    assert len(store) == 1
    assert isinstance(store, stores.DecisionStore)


def test_a_value_lives_until_it_expires(store: Any) -> None:
    expires = round(time.time() + 0.6, 3)
    store.add(KEY, b"short", expires)
    value, said = store.get(KEY)
    assert (value, said) == (b"short", pytest.approx(expires, abs=0.2))
    assert store.add(KEY, b"late", None) == b"short"
    time.sleep(0.9)
    assert store.get(KEY) is None
    assert store.add(KEY, b"next", None) == b"next"


def test_renewing_moves_an_expiry_and_one_in_the_past_removes(store: Any) -> None:
    store.add(KEY, b"v", time.time() + 0.2)
    store.renew(KEY, time.time() + 60)
    time.sleep(0.25)
    assert store.get(KEY)[0] == b"v"
    store.renew(KEY, None)
    assert store.get(KEY) == (b"v", None)
    store.renew(KEY, 0)
    assert store.get(KEY) is None
    store.renew(OTHER, None)
    assert store.get(OTHER) is None
    assert store.add(KEY, b"w", None) == b"w"


def test_pruning_removes_what_has_expired(store: Any) -> None:
    store.add(KEY, b"short", time.time() + 0.05)
    store.add(OTHER, b"long", None)
    time.sleep(0.1)
    assert store.prune() in (0, 1)  # Redis does it by itself.
    assert len(store) == 1
    assert store.get(OTHER) == (b"long", None)


def test_delete_and_clear(store: Any) -> None:
    for key in (KEY, OTHER):
        store.add(key, b"v", None)
    assert store.delete(KEY)
    assert not store.delete(KEY)
    assert store.get(KEY) is None
    store.clear()
    assert len(store) == 0


def test_a_batch_says_who_was_first(store: Any) -> None:
    store.add(KEY, b"first", None)
    items = [(KEY, b"mine", None), (OTHER, b"new", None)]
    add_many = getattr(store, "add_many", None) or (lambda items, claim: [store.add(*item) for item in items])
    assert add_many(items, None) == [b"first", b"new"]


def test_values_of_a_mebibyte_and_empty_ones(store: Any) -> None:
    large = os.urandom(1 << 20)
    assert store.add(KEY, large, None) == large
    assert store.get(KEY) == (large, None)
    store.add(OTHER, b"", None)
    assert store.get(OTHER) == (b"", None)


def test_of_many_threads_one_is_first(store: Any) -> None:
    start = threading.Barrier(8)

    def add(number: int) -> bytes:
        start.wait()
        return bytes(store.add(KEY, str(number).encode(), None))

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(add, range(8)))) == 1


# ---- memory


def test_at_maxsize_the_least_recently_used_leaves() -> None:
    store = MemoryStore(maxsize=2)
    store.add(b"a", b"1", None)
    store.add(b"b", b"2", None)
    store.get(b"a")
    store.add(b"c", b"3", None)
    assert [store.get(key) is not None for key in (b"a", b"b", b"c")] == [True, False, True]


# ---- the clock


@pytest.mark.parametrize("make", [lambda path: MemoryStore(), lambda path: SqliteStore(path / "d")])
def test_case_f05_a_clock_that_jumps_keeps_nothing_alive_for_years(
    make: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, real = make(tmp_path), time.time
    ten_years = 10 * 365 * 86400.0
    monkeypatch.setattr(time, "time", lambda: real() + ten_years)
    store.add(KEY, b"from 2030", time.time() + 10)
    monkeypatch.setattr(time, "time", real)
    if isinstance(store, SqliteStore):
        assert store.get(KEY) is None
        assert store.add(KEY, b"now", time.time() + 10) == b"now"
    else:
        assert store._values[KEY][2] <= time.monotonic() + 10
    store.add(OTHER, b"live", time.time() + 10)
    monkeypatch.setattr(time, "time", lambda: real() - 30)
    assert store.get(OTHER) is not None, "a small step expires nothing"
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    if isinstance(store, SqliteStore):
        assert store.get(OTHER) is None, "an hour longer is not what ttl said"


# ---- SQLite between processes


QUESTIONS = {"q": {"type": "score"}}


def _decide_a_lot(path: str, number: int, results: Any) -> None:
    cache = DecisionCache(SqliteStore(path))
    answers = [
        cache.get_or_compute("m", count, QUESTIONS, lambda state, q: {"q": number})["q"]
        for count in range(200)
    ]
    results.put((answers, cache.cache_info()["errors"]))


def test_case_f07_sixteen_processes_open_a_fresh_store_at_once(tmp_path: Path) -> None:
    forking = get_context("fork")
    results = forking.Queue()
    path = str(tmp_path / "fresh.sqlite3")
    processes = [forking.Process(target=_decide_a_lot, args=(path, n, results)) for n in range(16)]
    for process in processes:
        process.start()
    done = [results.get(timeout=200) for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    different = sum(len(set(answers)) > 1 for answers in zip(*(answers for answers, _ in done), strict=True))
    assert different <= sum(errors for _, errors in done), "one answer, but where a lock was not had in time"
    assert (tmp_path / "fresh.sqlite3").stat().st_mode & 0o777 == 0o600


def test_case_f07_a_lock_that_is_held_too_long_costs_a_bounded_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "BUSY_S", 0.2)
    path = tmp_path / "d"
    with DecisionCache(SqliteStore(path)) as cache:
        assert cache.get_or_compute("m", 0, QUESTIONS, lambda state, q: {"q": 1}) == {"q": 1}
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        started = time.monotonic()
        assert cache.get_or_compute("m", 1, QUESTIONS, lambda state, q: {"q": 2}) == {"q": 2}
        assert time.monotonic() - started < 2
        assert cache.get_or_compute("m", 0, QUESTIONS, lambda state, q: {"q": 9}) == {"q": 1}, "hits go on"
        assert cache.cache_info()["errors"] == 1
        holder.close()


def test_a_file_that_others_can_write_is_not_used_and_fails_no_call(tmp_path: Path) -> None:
    path = tmp_path / "d"
    path.write_bytes(b"")
    path.chmod(0o666)
    (link := tmp_path / "link").symlink_to(path)
    for there in (path, link):
        with pytest.raises(ForeignObject, match=str(there)):
            SqliteStore(there).add(KEY, b"value", None)
        with DecisionCache(SqliteStore(there)) as cache:
            assert cache.get_or_compute("m", 0, QUESTIONS, lambda state, q: {"q": 1}) == {"q": 1}
            assert cache.cache_info()["errors"] > 0
    assert path.read_bytes() == b""


def test_case_f07_an_inherited_connection_is_not_used_after_fork(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "d")
    store.add(KEY, b"parent", None)
    inherited = list(store._idle)

    def child(results: Any) -> None:
        value = store.get(KEY)
        results.put((value, any(connection in store._idle for connection in inherited)))

    forking = get_context("fork")
    results = forking.Queue()
    process = forking.Process(target=child, args=(results,))
    process.start()
    assert results.get(timeout=30) == ((b"parent", None), False)
    process.join()


# ---- a remote that is lost


def test_a_lost_redis_degrades_to_the_local_store_and_is_offered_what_was_decided(
    redis_server: RedisServer,
) -> None:
    remote = RedisStore(redis_server.url, prefix="lost:")
    store = FallbackStore(remote, MemoryStore(), look_again_s=0.05)
    store.add(b"before", b"1", None)
    redis_server.stop()
    assert store.get(b"before") is None
    assert store.add(KEY, b"here", None) == b"here"
    assert store.add(OTHER, b"ours", time.time() + 60) == b"ours"
    assert store.get(KEY) == (b"here", None)
    assert store.losses == 1
    redis_server.start()
    RedisStore(redis_server.url, prefix="lost:").add(OTHER, b"theirs", None)
    time.sleep(0.1)
    assert store.get(KEY) == (b"here", None)
    assert remote.get(KEY) == (b"here", None)
    assert store.get(OTHER) == (b"theirs", None)
    assert store.conflicts == 1
    redis_server.stop()
    assert store.get(OTHER)[0] == b"theirs", "the remote's value replaced the local one"
    redis_server.start()


def test_a_redis_that_is_faked_in_this_process_will_do() -> None:
    server = FakeServer()
    one, other = (RedisStore(FakeRedis(server=server)) for _ in range(2))
    assert one.add(KEY, b"first", time.time() + 60) == b"first"
    assert other.add_many([(KEY, b"second", None), (OTHER, b"theirs", None)]) == [b"first", b"theirs"]
    assert one.get(OTHER) == (b"theirs", None)


@pytest.mark.parametrize("server", ["fakeredis", "REDIS_URL"])
def test_the_redis_example_replays_on_the_second_machine(server: str, redis_server: RedisServer) -> None:
    example = Path(__file__).parents[2] / "examples" / "decision_store_redis.py"
    environment = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    if server == "REDIS_URL":
        environment["REDIS_URL"] = redis_server.url
    output = subprocess.run(
        [sys.executable, example], check=True, capture_output=True, text=True, env=environment
    ).stdout
    times = [float(word) for word in re.findall(r"refund in ([\d.]+) ms", output)]
    assert times[0] >= 500 > times[1]
    assert "decisions in Redis: 1" in output
