"""The demo, whole and with the real model; and what it says when a reply is wrong."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from support import eventually

from shmcache.errors import ConfigError, OutOfSpace
from shmcache.shm import Names
from shmcache.tools import demo
from shmcache.tools.clean import remove
from shmcache.tools.demo import Answer, CoordinatorProcess, Scene, Step
from shmcache.tools.main import make_parser

COMMAND = [sys.executable, "-m", "shmcache.tools.main", "demo", "--json", "--explain-saves"]
STEPS = ["cold", "other_worker", "next_turn", "coordinator_restarted", "workers_restarted"]


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A run in the background ignores SIGINT, and so would all that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A word in the environment, by which the children of children are found."""
    mark = f"SHMCACHE_TEST_{os.getpid()}_{tmp_path.name}"
    monkeypatch.setenv(mark, "1")
    return mark


def left_of(pid: int, mark: str) -> list[object]:
    """What a demo of this process id has left in /dev/shm and among the processes."""
    left: list[object] = list(Path("/dev/shm").glob(f"*demo-{pid}*"))
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and mark in process.environ():
                left.append(process)
    return left


def test_the_demo_runs_with_the_real_model_and_leaves_nothing(smollm2: Path, marked: str) -> None:
    done = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = done.communicate()
    assert done.returncode == 0, err
    figures = json.loads(out.splitlines()[-1])
    assert figures["replies_equal"] is True
    assert list(figures) == [*STEPS, "replies_equal"]
    cold = figures["cold"]
    assert cold["prompt_tokens"] >= 1200
    assert (cold["prefilled_tokens"], cold["reused_tokens"]) == (cold["prompt_tokens"], 0)
    for name in STEPS[1:]:
        step = figures[name]
        assert step["prefilled_tokens"] + step["reused_tokens"] == step["prompt_tokens"]
        # One request under load may be late; how fast it is on a quiet machine, the demo itself says.
        assert step["ttft_ms"] < cold["ttft_ms"] / 4
    for name in ("other_worker", "coordinator_restarted", "workers_restarted"):
        assert figures[name]["prefilled_tokens"] == 1
    new_turn = figures["next_turn"]["prompt_tokens"] - cold["prompt_tokens"] - 80
    assert figures["next_turn"]["prefilled_tokens"] == new_turn + 1  # the reply's last token is in no row
    assert not left_of(done.pid, marked)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_demo_that_is_stopped_takes_everything_down(smollm2: Path, marked: str, number: int) -> None:
    with subprocess.Popen(COMMAND, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        process.stderr.readline()  # the coordinator and the workers come up behind this line
        os.kill(process.pid, number)
        process.stderr.read()
    assert process.returncode == 128 + number
    assert not left_of(process.pid, marked)


@pytest.mark.parametrize("when", ["while it is made", "before it is ready"])
def test_a_signal_during_the_start_leaves_no_coordinator(
    monkeypatch: pytest.MonkeyPatch, marked: str, when: str
) -> None:
    namespace, real = f"demo-{os.getpid()}", subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> Any:
        made = real(*arguments, **options)
        if when == "while it is made":
            os.kill(os.getpid(), signal.SIGINT)
        else:
            interruption = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
            interruption.start()
        return made

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        CoordinatorProcess(f"--namespace={namespace}", "--ram-file-bytes=1M", "--max-rows=64").stop()
    remove(namespace)
    eventually(lambda: not left_of(os.getpid(), marked))


def step(name: str, reply: list[int]) -> Step:
    """A step of 1,000 prompt tokens; the cold one waited for 8 s, each other for 80 ms."""
    cold = name == "cold"
    answer = Answer(
        text="",
        prompt=[1] * 1000,
        split=[512, 488],
        reply=reply,
        hit_kind="cold" if cold else "exact",
        reused_tokens=0 if cold else 999,
        prefilled_tokens=1000 if cold else 1,
    )
    return Step(name=name, title=name, worker=0, ttft_ms=8000.0 if cold else 80.0, answer=answer)


@pytest.mark.parametrize("different", [False, True])
def test_a_reply_that_differs_fails_the_demo_and_names_the_step(
    different: bool, namespace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def play(self: demo.Demo) -> None:
        self.steps += [step(name, [1, 2, 3]) for name in STEPS]

    monkeypatch.setattr(demo.Demo, "play", play)
    monkeypatch.setattr(
        demo.Demo, "compare", lambda self: {name: not (different and name == "next_turn") for name in STEPS}
    )
    parsed = make_parser().parse_args(["demo", "--namespace", namespace])
    assert demo.run(parsed) == int(different)
    last = capsys.readouterr().out.splitlines()[-1]
    if different:
        assert last == "The reply differs from the one without the cache in: next_turn."
    else:
        assert "3,996 of 4,000 prompt tokens came out of shared memory" in last
        assert "took 0.3 s together instead of about 32 s" in last
    parsed.json = True
    demo.run(parsed)
    figures = json.loads(capsys.readouterr().out)
    assert figures["replies_equal"] is not different
    assert figures["next_turn"]["replies_equal"] is not different


def test_a_namespace_in_use_is_not_touched(namespace: str, coordinator: CoordinatorProcess) -> None:
    with pytest.raises(ConfigError, match="wants one of its own"):
        demo.run(argparse.Namespace(namespace=namespace, json=False))
    assert Names(namespace).control.exists()


def test_the_demo_does_not_take_the_namespace_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMCACHE_NAMESPACE", "production")
    assert make_parser().parse_args(["demo"]).namespace == demo.NAMESPACE
    assert make_parser().parse_args(["stat"]).namespace == "production"


def test_too_little_shared_memory_is_said_before_anything_starts(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "free_bytes", lambda: 64 << 20)
    with pytest.raises(OutOfSpace, match=r"/dev/shm has 64 MiB free and 512 MiB are needed: .*--shm-size"):
        demo.run(argparse.Namespace(namespace=namespace, json=False))


def test_the_split_of_a_prompt_ends_where_its_reply_begins() -> None:
    class Piece:
        def __init__(self, length: int, repeats: int) -> None:
            self.length, self.repeats = length, repeats

    pieces = [Piece(512, 2), Piece(300, 1), Piece(1, 40)]
    assert demo._split(pieces, 1325) == [512, 512, 300, 1]
    assert demo._split(pieces, 1324) == [512, 512, 300]


def test_the_prompt_is_a_long_chat_with_a_next_turn() -> None:
    scene = msgspec.json.decode(demo.PROMPT.read_bytes(), type=Scene)
    assert scene.messages[0]["role"] == "system"
    assert scene.messages[-1]["role"] == "user"
    assert scene.max_tokens >= 64
