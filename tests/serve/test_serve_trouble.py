"""Everything around the server fails, and it answers."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest
from serve.conftest import StartServer
from serve.served import NO_END, Served, assert_nothing_leaked, chat
from support import eventually, in_small_shm, needs_root

from shmcache.observe import observe
from shmcache.tools.clean import remove
from shmcache.tools.demo import CoordinatorProcess

ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0.0, "logit_bias": NO_END}
CHATS = [chat(f"trouble{number}", words=30) for number in range(6)]


def reply(server: Served, messages: list[Any]) -> tuple[str, int]:
    """The text, and how many tokens of the prompt were cached."""
    answer = server.client().chat.completions.create(**ASKED, messages=messages)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.choices[0].message.content or "", answer.usage.prompt_tokens_details.cached_tokens or 0


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[str]:
    """What a server says that has nothing to do with any cache."""
    with Served(f"apart-{os.getpid()}", f"--model=tiny={tiny_model}", "--no-reuse") as server:
        return [reply(server, messages)[0] for messages in CHATS]


def test_without_a_coordinator_for_its_whole_life_it_answers_the_same(
    start_server: StartServer, expected: list[str]
) -> None:
    server = start_server(workers=2)
    for _ in range(2):
        assert [reply(server, messages)[0] for messages in CHATS] == expected
    assert server.stop() == 0
    assert "Traceback" not in server.log()


class Killer:
    """A coordinator that is killed and started again, as often as is said."""

    def __init__(self, namespace: str) -> None:
        self._arguments = (f"--namespace={namespace}", "--ram-file-bytes=64M", "--max-rows=1024")
        self.coordinator = CoordinatorProcess(*self._arguments)

    async def kill_every_second(self, times: int) -> None:
        """kill -9, and the next one at once."""
        for _ in range(times):
            await asyncio.sleep(1)
            self.coordinator.kill()
            self.coordinator = await asyncio.to_thread(CoordinatorProcess, *self._arguments)


def requests_while_it_is_killed(server: Served, killer: Killer, times: int) -> list[tuple[int, str]]:
    """Eight clients ask without a pause; chat number and reply of each answer."""

    async def ask() -> list[tuple[int, str]]:
        answers: list[tuple[int, str]] = []
        async with server.async_client() as client:
            killing = asyncio.create_task(killer.kill_every_second(times))

            async def go_on(numbers: itertools.cycle[int]) -> None:
                while not killing.done():
                    number = next(numbers)
                    answer = await client.chat.completions.create(**ASKED, messages=CHATS[number])
                    answers.append((number, answer.choices[0].message.content or ""))

            numbers = itertools.cycle(range(len(CHATS)))
            await asyncio.gather(killing, *(go_on(numbers) for _ in range(8)))
        return answers

    return asyncio.run(ask())


def check_a_coordinator_that_is_killed(
    server: Served, namespace: str, expected: list[str], times: int
) -> None:
    killer = Killer(namespace)
    try:
        answers = requests_while_it_is_killed(server, killer, times)
        assert len(answers) > 10 * times
        wrong = [(number, text) for number, text in answers if text != expected[number]]
        assert not wrong  # and a request that failed would have raised
        assert server.metric("shmcache_serve_requests_total.failed") == 0
        eventually(lambda: reply(server, CHATS[0])[1] > 64)
        assert_nothing_leaked(namespace, workers=2)
    finally:
        killer.coordinator.stop()


def test_a_coordinator_killed_every_second_costs_no_request_and_no_reply(
    start_server: StartServer, namespace: str, expected: list[str]
) -> None:
    check_a_coordinator_that_is_killed(start_server(workers=2), namespace, expected, times=3)


@pytest.mark.stress
def test_a_coordinator_killed_every_second_for_a_minute(
    start_server: StartServer, namespace: str, expected: list[str]
) -> None:
    check_a_coordinator_that_is_killed(start_server(workers=2), namespace, expected, times=60)


def test_what_no_row_covers_is_saved_when_the_server_stops(start_server: StartServer, namespace: str) -> None:
    server = start_server()
    text, _ = reply(server, CHATS[0])  # nobody keeps what it leaves
    coordinator = CoordinatorProcess(f"--namespace={namespace}", "--ram-file-bytes=64M", "--max-rows=64")
    try:
        time.sleep(1.1)  # a worker looks for a coordinator at most once a second
        assert server.stop() == 0
        assert eventually(lambda: observe(namespace).saves["shutdown"]) == 1
        following = [*CHATS[0], {"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
        assert reply(start_server(), following)[1] > 64
    finally:
        coordinator.stop()


def test_a_server_of_another_version_serves_without_the_cache(
    start_server: StartServer, coordinator: CoordinatorProcess, namespace: str
) -> None:
    ours = start_server()
    other = start_server(patch="from shmcache import connection; connection.LAYOUT ^= 1")
    first = reply(ours, CHATS[0])
    assert eventually(lambda: reply(ours, CHATS[0])[1]) > 64
    for messages in CHATS:
        assert reply(other, messages)[1] == 0
    assert reply(other, CHATS[0])[0] == first[0]
    assert other.log().count("run one version of shmcache in coordinator and workers") == 1
    assert other.stop() == 0
    assert reply(ours, CHATS[0])[1] > 64
    assert_nothing_leaked(namespace, workers=1)


@needs_root
def test_a_full_shm_costs_saves_and_no_answers(namespace: str, tiny_model: Path, expected: list[str]) -> None:
    in_small_shm(20 << 20, lambda: _with_full_shm(namespace, tiny_model, expected))


def fill(path: Path) -> None:
    """Write a file that takes all that its file system has left."""
    with path.open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space left"):
        while filler.write(b"x" * 4_096):
            pass


def _with_full_shm(namespace: str, tiny_model: Path, expected: list[str]) -> None:
    coordinator = CoordinatorProcess(f"--namespace={namespace}", "--max-rows=64", "--ram-file-bytes=2M")
    try:
        with Served(namespace, f"--model=tiny={tiny_model}", workers=2) as server:
            assert reply(server, CHATS[0])[0] == expected[0]
            fill(Path("/dev/shm/filler"))
            for _ in range(2):
                assert [reply(server, messages)[0] for messages in CHATS] == expected
            Path("/dev/shm/filler").unlink()
            eventually(lambda: reply(server, CHATS[-1])[1] > 64)
            assert server.metric("shmcache_serve_requests_total.failed") == 0
    finally:
        coordinator.stop()
        remove(namespace)


@needs_root
def test_a_full_disk_costs_saves_and_no_answers(
    namespace: str, tiny_model: Path, tmp_path: Path, expected: list[str]
) -> None:
    in_small_shm(64 << 20, lambda: _with_full_disk(namespace, tiny_model, tmp_path, expected))


def _with_full_disk(namespace: str, tiny_model: Path, folder: Path, expected: list[str]) -> None:
    disk = folder / "disk"
    disk.mkdir(mode=0o700)
    libc = ctypes.CDLL(None)
    assert libc.mount(b"disk", str(disk).encode(), b"tmpfs", 0, b"size=1m,mode=0700") == 0
    arguments = (f"--namespace={namespace}", "--max-rows=64", "--ram-file-bytes=8M", f"--disk-dir={disk}")
    coordinator = CoordinatorProcess(*arguments, "--disk-bytes=900k")
    try:
        with Served(namespace, f"--model=tiny={tiny_model}", "--tier=disk") as server:
            fill(disk / "filler")
            for _ in range(2):
                assert [reply(server, messages)[0] for messages in CHATS] == expected
            assert server.metric("shmcache_serve_requests_total.failed") == 0
    finally:
        coordinator.stop()
        remove(namespace)


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        ("", "Worker failed to boot"),
        (
            "import os; from shmcache.workers.serve import models; "
            "models.Models = lambda *_: os.kill(os.getpid(), 9)",
            "3 workers in a row ended before they served",
        ),
    ],
)
def test_a_server_whose_workers_cannot_load_the_model_ends_and_says_so(
    namespace: str, tmp_path: Path, patch: str, reason: str
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\0\0\0 and no more")
    with Served(namespace, f"--model={broken}", workers=2, patch=patch, ready=False) as server:
        assert server.process.wait(60) == 3
        assert reason in server.log()


def test_an_option_that_llama_cpp_does_not_know_ends_the_server_in_one_line(
    namespace: str, tiny_model: Path
) -> None:
    with Served(namespace, f"--model={tiny_model}", "--llama=n_ctxx=99", ready=False) as server:
        assert server.process.wait(60) == 3
        assert "llama_cpp.Llama has no argument n_ctxx: did you mean n_ctx?" in server.log()
        assert "Traceback" not in server.log()
