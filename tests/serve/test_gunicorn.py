"""gunicorn with the hooks, for an app that is not ours, under each kind of worker."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from gunicorn.config import KNOWN_SETTINGS
from serve.served import Process, assert_nothing_leaked, prompt
from support import ROOT, eventually

from shmcache.observe import observe
from shmcache.tools.demo import CoordinatorProcess
from shmcache.workers import gunicorn_hooks

WORKER_CLASSES = {
    "sync": ("wsgi", "--worker-class=sync"),
    "gthread": ("wsgi", "--worker-class=gthread", "--threads=2"),
    "uvicorn": ("asgi", "--worker-class=uvicorn_worker.UvicornWorker"),
}


class Gunicorn(Process):
    """gunicorn with the hooks and tests/serve/gunicorn_app."""

    def __init__(self, kind: str, *flags: str, workers: int = 2, environment: dict[str, str]) -> None:
        app, *of_kind = WORKER_CLASSES[kind]
        super().__init__(
            [
                *("-m", "gunicorn", "-c", "python:shmcache.workers.gunicorn_hooks", "--bind=127.0.0.1:0"),
                *(
                    "--no-control-socket",
                    f"--workers={workers}",
                    *of_kind,
                    *flags,
                    f"serve.gunicorn_app:{app}",
                ),
            ],
            cwd=ROOT / "tests",
            environment=environment,
        )

    def listening(self) -> str:
        """The address, once it is known."""
        assert self.process.poll() is None, self.log()
        _, _, rest = self.log().partition("Listening at: ")
        self.url = rest.split(" ", 1)[0]
        return self.url

    def ask(self, text: str, timeout_s: float = 60) -> httpx.Response:
        """One prompt."""
        return httpx.post(eventually(self.listening), content=text.encode(), timeout=timeout_s)

    def ask_patiently(self, text: str) -> dict[str, Any]:
        """One prompt, again where the worker was killed under it."""
        while True:
            try:
                answer = self.ask(text)
            except httpx.TransportError:
                assert self.process.poll() is None, self.log()
                continue
            assert answer.status_code == 200, answer.text
            return answer.json()  # type: ignore[no-any-return]


Start = Callable[..., Gunicorn]


@pytest.fixture
def start(namespace: str, tiny_model: Path) -> Iterator[Start]:
    """Start gunicorns of this test: start(kind, flag, …, load="import")."""
    started: list[Gunicorn] = []

    def make(kind: str, *flags: str, load: str, workers: int = 2, **environment: str) -> Gunicorn:
        environment |= {"LOAD": load, "MODEL": str(tiny_model), "NAMESPACE": namespace}
        started.append(Gunicorn(kind, *flags, workers=workers, environment=environment))
        return started[-1]

    yield make
    for server in started:
        server.close()


@pytest.mark.usefixtures("coordinator")
@pytest.mark.parametrize("kind", WORKER_CLASSES)
def test_workers_that_are_recycled_and_killed_for_200_requests_leave_nothing(
    start: Start, namespace: str, tmp_path: Path, kind: str
) -> None:
    server = start(kind, "--preload", "--max-requests=20", load="request", LEFT=str(tmp_path))
    kills = iter((30, 60, 90))
    kill_at = next(kills)

    def ask(number: int) -> dict[str, Any]:
        nonlocal kill_at
        answer = server.ask_patiently(prompt(f"p{number % 4}", 20))
        if number == kill_at:
            kill_at = next(kills, -1)
            with contextlib.suppress(ProcessLookupError):
                os.kill(answer["pid"], signal.SIGKILL)
        return answer

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(200)))
    assert len({(answer["prompt_tokens"], answer["text"]) for answer in answers}) <= 4
    assert len({answer["pid"] for answer in answers}) > 5
    assert sum(answer["cache_hit_kind"] == "exact" for answer in answers) > 150
    eventually(lambda: attached_pids(namespace) <= {worker.pid for worker in server.workers()})
    assert_nothing_leaked(namespace, workers=len(observe(namespace).workers))
    workers = server.workers()
    assert server.stop() == 0
    assert not [worker for worker in workers if worker.is_running()]
    # SIGTERM ended them in Python's own way, so that saves were handed over; also uvicorn's.
    assert {str(worker.pid) for worker in workers} <= {path.name for path in tmp_path.iterdir()}
    assert_nothing_leaked(namespace, workers=0)


def attached_pids(namespace: str) -> set[int]:
    """Processes that have the cache open; a new worker has it once it has loaded its model."""
    return {worker.pid for worker in observe(namespace).workers}


@pytest.mark.usefixtures("coordinator")
def test_a_model_that_is_loaded_with_its_module_is_shared_by_the_workers(start: Start) -> None:
    server = start("sync", load="import")
    text = prompt("import", 20)
    first = server.ask_patiently(text)
    while (other := server.ask_patiently(text))["pid"] == first["pid"]:
        pass
    assert (other["cache_hit_kind"], other["source"], other["text"]) == ("exact", "shared", first["text"])


@pytest.mark.parametrize("kind", WORKER_CLASSES)
def test_a_worker_that_stops_saves_what_no_row_covers(start: Start, namespace: str, kind: str) -> None:
    server = start(kind, load="import", workers=1)
    server.ask_patiently(prompt("unsaved", 20))  # there is no coordinator yet
    coordinator = CoordinatorProcess(f"--namespace={namespace}", "--ram-file-bytes=16M", "--max-rows=64")
    try:
        time.sleep(1.1)  # a worker looks for one at most once a second
        assert server.stop() == 0
        assert eventually(lambda: observe(namespace).saves["shutdown"]) == 1
    finally:
        coordinator.stop()


@pytest.mark.parametrize("kind", ["sync", "uvicorn"])
def test_case_b06_a_model_that_was_used_before_the_fork_is_refused_at_once(start: Start, kind: str) -> None:
    server = start(kind, "--preload", load="evaluated")
    for _ in range(4):
        began_s = time.monotonic()
        assert server.ask("hello", timeout_s=10).status_code == 500
        assert time.monotonic() - began_s < 5
    assert "load the model after the fork" in server.log()


@pytest.mark.usefixtures("coordinator")
def test_case_b06_two_threads_of_one_worker_take_turns(start: Start) -> None:
    server = start("gthread", load="import", workers=1)
    texts = [prompt(f"thread{number % 2}", 20) for number in range(20)]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(server.ask_patiently, texts))
    assert len({answer["pid"] for answer in answers}) == 1
    for number in (0, 1):
        assert len({answer["text"] for answer in answers[number::2]}) == 1


@pytest.mark.parametrize(
    ("kind", "load", "code", "reason"),
    [
        ("sync", "killed", 3, "3 workers in a row ended before they served"),
        ("uvicorn", "killed", 3, "3 workers in a row ended before they served"),
        ("sync", "raises", 3, "there is no such model"),
    ],
)
def test_workers_that_cannot_boot_end_the_server(
    start: Start, kind: str, load: str, code: int, reason: str
) -> None:
    server = start(kind, load=load)
    # gunicorn's own code is 1 where a second worker fails while the first one ends the server.
    assert server.process.wait(60) in (code, 1), server.log()
    assert reason in server.log()


@pytest.mark.parametrize("kind", WORKER_CLASSES)
def test_no_worker_outlives_a_killed_master(start: Start, kind: str) -> None:
    server = start(kind, "--preload", load="request")
    server.ask_patiently("hello")
    workers = server.workers()
    server.process.kill()
    eventually(lambda: not any(worker.is_running() for worker in workers))


def test_the_hooks_set_what_they_say_and_nothing_by_accident() -> None:
    settings = {setting.name for setting in KNOWN_SETTINGS}
    assert settings & set(vars(gunicorn_hooks)) == set(gunicorn_hooks.__all__) - {"worker_threads"}


def test_outside_of_gunicorn_a_process_has_all_cores() -> None:
    assert gunicorn_hooks.worker_threads() == len(os.sched_getaffinity(0))
