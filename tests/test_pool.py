"""The pool's mechanics with a handler of a few lines; the real model is in test_pool_model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from support import eventually

from shmcache.errors import ConfigError, IllegalTransition, PoolStopped, UsedAfterFork, WorkerDied
from shmcache.workers import pool as pool_module
from shmcache.workers.pool import TRANSITIONS, Place, Pool, _Worker, usable_cores


class Echo:
    """Answers, streams, fails, dies: one method each."""

    def __init__(self, settings: dict[str, Any], place: Place) -> None:
        self.settings, self.where = settings, place

    def echo(self, value: Any) -> Any:
        return value

    def pid(self) -> int:
        return os.getpid()

    def place(self) -> list[int]:
        return [self.where.index, self.where.workers, self.where.threads]

    def count(self, until: int, file: str = "") -> Iterator[int]:
        try:
            yield from range(until)
        finally:
            if file:
                Path(file).write_text("closed")
        return "counted"  # type: ignore[return-value]

    def fail(self) -> None:
        raise ValueError("Requested tokens (700) exceed context window of 512")

    def fail_oddly(self) -> None:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte")

    def unplain(self) -> object:
        return object()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def die_once(self, mark: str) -> str:
        if not Path(mark).exists():
            Path(mark).touch()
            self.die()
        return "alive"

    def stream_and_die(self) -> Iterator[int]:
        yield 1
        self.die()

    def hold(self, mark: str) -> str:
        """Until the file is there."""
        Path(mark + ".held").touch()
        eventually(Path(mark).exists)
        return "released"

    def close(self) -> None:
        if mark := self.settings.get("closed"):
            Path(mark).touch()


def cannot_boot(settings: dict[str, Any], place: Place) -> None:
    raise FileNotFoundError(f"Model path does not exist: {settings['model_path']}")


def dies_at_boot(settings: dict[str, Any], place: Place) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def two() -> Iterator[Pool]:
    with Pool(2, Echo) as pool:
        yield pool
    assert not [
        child for child in psutil.Process().children() if "shmcache-worker" in " ".join(child.cmdline())
    ]


def test_any_free_worker_answers_and_a_named_one_when_asked(two: Pool) -> None:
    assert two.call("echo", value={"a": [1, 2.5, "x", None, b"\xff"]}) == {"a": [1, 2.5, "x", None, b"\xff"]}
    assert [two.call("pid", worker=index) for index in (0, 1)] == list(two.pids())
    assert os.getpid() not in two.pids()


def test_the_workers_share_the_cores(two: Pool) -> None:
    threads = max(1, usable_cores() // 2)
    assert [two.call("place", worker=index) for index in (0, 1)] == [[0, 2, threads], [1, 2, threads]]


def test_a_container_quota_bounds_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pool_module, "CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert usable_cores() == 16
    for text, cores in [("max 100000", 16), ("150000 100000", 2), ("50000 100000", 1)]:
        (tmp_path / "cpu.max").write_text(text)
        assert usable_cores() == cores


def test_chunks_arrive_one_by_one_and_the_return_value_is_the_result(two: Pool) -> None:
    call = two.submit("count", until=3)
    assert list(call) == [0, 1, 2]
    assert call.result() == "counted"
    assert two.submit("count", until=100).result() == "counted"


def test_a_cancelled_stream_closes_its_generator(two: Pool, tmp_path: Path) -> None:
    call = two.submit("count", until=10**9, file=str(tmp_path / "closed"))
    assert next(iter(call)) == 0
    call.cancel()
    assert call.result(timeout_s=20) is None
    assert (tmp_path / "closed").read_text() == "closed"


def test_a_waiting_call_can_be_cancelled(two: Pool, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    held = two.submit("hold", worker=0, mark=str(mark))
    waiting = two.submit("echo", worker=0, value=1)
    other = two.submit("echo", value=2)
    assert other.result() == 2, "a call that waits for a busy worker holds up no other"
    waiting.cancel()
    with pytest.raises(CancelledError):
        waiting.result()
    with pytest.raises(TimeoutError):
        held.result(timeout_s=0.01)
    mark.touch()
    assert held.result() == "released"


def test_the_handlers_error_is_raised_in_the_caller(two: Pool) -> None:
    with pytest.raises(ValueError, match=r"Requested tokens \(700\) exceed context window of 512"):
        two.call("fail")
    with pytest.raises(RuntimeError, match=r"UnicodeDecodeError: .*bad byte"):
        two.call("fail_oddly")
    with pytest.raises(TypeError, match="must be plain data, and holds a object"):
        two.call("unplain")
    with pytest.raises(AttributeError):
        two.call("no_such_method")
    assert two.statistics().replaced == 0


def test_a_crashed_worker_is_replaced_and_its_request_tried_once_more(two: Pool, tmp_path: Path) -> None:
    two.wait_ready()
    before = set(two.pids())
    call = two.submit("die_once", mark=str(tmp_path / "mark"))
    assert call.result() == "alive"
    assert call.tries == 2
    two.wait_ready()
    assert len(set(two.pids()) - before) == 1
    assert two.statistics().tried_again == 1


def test_a_request_that_kills_every_worker_fails_at_its_second_try(two: Pool) -> None:
    with pytest.raises(WorkerDied, match=r"signal 9 .*\(try 2\)"):
        two.call("die")
    two.wait_ready()
    assert two.call("echo", value="still here") == "still here"


def test_a_stream_is_not_begun_again(two: Pool) -> None:
    call = two.submit("stream_and_die")
    with pytest.raises(WorkerDied, match=r"\(try 1\)"):
        list(call)
    with pytest.raises(WorkerDied):
        call.result()


def test_an_idle_worker_that_is_killed_is_replaced_unasked(two: Pool) -> None:
    two.wait_ready()
    two.call("echo", worker=0, value=0)
    old = two.pids()[0]
    os.kill(old, signal.SIGKILL)
    eventually(lambda: two.pids()[0] not in (0, old))
    assert two.call("pid", worker=0) == two.pids()[0]


def test_the_counts_add_up(two: Pool) -> None:
    calls = [two.submit("echo", value=number) for number in range(50)]
    with pytest.raises(ValueError, match="Requested"):
        two.call("fail")
    now = two.statistics()
    assert now.submitted == now.answered + now.failed + now.waiting + now.running == 51
    assert [call.result() for call in calls] == list(range(50))
    assert (two.statistics().answered, two.statistics().failed) == (50, 1)


def test_many_threads_may_ask(two: Pool) -> None:
    results: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda n=number: results.update({n: two.call("echo", value=n)}))
        for number in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: number for number in range(16)}


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        (cannot_boot, "FileNotFoundError: Model path does not exist: /nowhere"),
        (dies_at_boot, "exit code -9"),
        ("no_such_module:factory", "ModuleNotFoundError"),
    ],
)
def test_workers_that_cannot_boot_end_the_pool_and_say_why(factory: Any, reason: str) -> None:
    with Pool(2, factory, {"model_path": "/nowhere"}) as pool:
        call = pool.submit("echo", value=1)
        with pytest.raises(PoolStopped, match=reason):
            pool.wait_ready()
        with pytest.raises(PoolStopped, match="3 workers in a row did not boot"):
            call.result()
        with pytest.raises(PoolStopped, match=reason):
            pool.submit("echo", value=1)
        assert pool.statistics().boot_failures == 3


def test_a_worker_that_does_not_boot_has_its_own_exit_code() -> None:
    child = pool_module._Worker(
        pool_module.Boot(f"{__name__}:cannot_boot", {"model_path": "x"}, Place(index=0, workers=1, threads=1))
    )
    assert child.process.wait(20) == pool_module.BOOT_FAILED_EXIT
    child.connection.close()


def test_close_answers_what_is_in_hand_and_closes_the_handlers(tmp_path: Path) -> None:
    mark, closed = tmp_path / "mark", tmp_path / "closed"
    pool = Pool(1, Echo, {"closed": str(closed)})
    held = pool.submit("hold", mark=str(mark))
    waiting = pool.submit("echo", value=1)
    eventually(Path(f"{mark}.held").exists)
    closer = threading.Thread(target=pool.close)
    closer.start()
    with pytest.raises(PoolStopped):
        waiting.result()
    mark.touch()
    assert held.result() == "released"
    closer.join()
    assert closed.exists()
    pool.close()
    with pytest.raises(PoolStopped, match="it was closed"):
        pool.submit("echo", value=1)


def test_sigterm_stops_a_worker_through_its_handler(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    with Pool(1, Echo, {"closed": str(closed)}) as pool:
        pool.call("echo", value=1)
        os.kill(pool.pids()[0], signal.SIGTERM)
        eventually(closed.exists)


@pytest.mark.parametrize("busy", [False, True])
def test_no_worker_outlives_a_pool_that_was_killed(busy: bool) -> None:
    """The parent prints its workers' pids and is killed with -9; their sockets end, and so do they."""
    code = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_pool
pool = test_pool.Pool(2, test_pool.Echo)
pool.wait_ready()
if {busy}:
    pool.submit("count", until=10**9)
print(*pool.pids(), flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_a_pool_is_not_used_in_a_forked_child(two: Pool) -> None:
    pid = os.fork()
    if not pid:
        try:
            two.submit("echo", value=1)
        except UsedAfterFork:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


def test_what_a_pool_cannot_be_made_of_is_said_at_once(two: Pool) -> None:
    with pytest.raises(ConfigError, match=r"workers \(0\) must be at least 1"):
        Pool(0, Echo)
    with pytest.raises(ConfigError, match="must be a function of a module"):
        Pool(1, lambda settings, place: None)
    with pytest.raises(ConfigError, match="worker 2 of a pool of 2"):
        two.submit("echo", worker=2, value=1)


def test_an_illegal_event_raises_and_changes_nothing() -> None:
    worker = _Worker.__new__(_Worker)
    for state, following in TRANSITIONS.items():
        for event in {event for row in TRANSITIONS.values() for event in row}:
            worker.state = state
            if event in following:
                worker.event(event)
                assert worker.state == following[event]
            else:
                with pytest.raises(IllegalTransition):
                    worker.event(event)
                assert worker.state == state


@pytest.mark.stress
def test_every_call_ends_while_workers_are_killed_at_random() -> None:
    random = Random(1)
    answered = failed = 0
    with Pool(3, Echo) as pool:
        for _ in range(100):
            calls = [pool.submit("count", until=50) for _ in range(random.randrange(1, 8))]
            time.sleep(random.random() / 50)
            if pid := random.choice(pool.pids()):
                os.kill(pid, signal.SIGKILL)
            for call in calls:
                try:
                    assert call.result(timeout_s=60) == "counted"
                    answered += 1
                except WorkerDied:
                    failed += 1
            pool.wait_ready()
        counts = pool.statistics()
    assert (counts.answered, counts.failed, counts.waiting, counts.running) == (answered, failed, 0, 0)
    assert counts.submitted == answered + failed
    assert counts.replaced > 50
