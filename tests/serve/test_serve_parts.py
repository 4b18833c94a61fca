"""The parts of the server that need no server: words, line, messages, keys, settings, requests."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import multiprocessing
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import eventually

from shmcache.config import Gates
from shmcache.errors import ConfigError
from shmcache.workers.serve import desk as desk_module
from shmcache.workers.serve.board import BOOTING, BOUNDS_S, COUNTERS, FREE, HISTOGRAMS, SERVING, SLOTS, Board
from shmcache.workers.serve.desk import Desk, EngineDied, Overloaded, ServerStopping
from shmcache.workers.serve.engine import Engine
from shmcache.workers.serve.keys import ApiKeys
from shmcache.workers.serve.line import Line
from shmcache.workers.serve.requests import BadRequest, read_job, read_lookup
from shmcache.workers.serve.settings import DEFAULT_N_CTX, load
from shmcache.workers.serve.turns import Turns
from shmcache.workers.serve.wire import (
    Begun,
    Chunk,
    Done,
    Failed,
    FirstToken,
    Hints,
    Job,
    Reply,
    Usage,
    frame,
    read_reply,
)
from shmcache.workers.serve.wire import (
    read_job as job_from,
)

# ---- the board


def test_slots_are_taken_vacated_and_taken_again_and_totals_never_go_back() -> None:
    board = Board()
    slots = [board.take_slot() for _ in range(3)]
    assert [slot.index for slot in slots] == [0, 1, 2]
    assert {slot.state for slot in slots} == {BOOTING}
    for slot in slots:
        slot.state = SERVING
        slot.take_request()
        slot.begin_run()
        slot.count("answered", 2)
    assert (board.serving(), board.open(), board.running()) == (3, 3, 3)
    board.vacate(slots[1])
    assert (board.serving(), board.open(), board.running(), board.total("answered")) == (2, 2, 2, 6)
    assert slots[1].state == FREE
    again = board.take_slot()
    assert again.index == 1
    again.count("answered")
    assert board.total("answered") == 7


def test_whoever_has_more_in_hand_than_another_that_serves_is_busier() -> None:
    board = Board()
    ours, other, boots = (board.take_slot() for _ in range(3))
    ours.state = other.state = SERVING
    assert not ours.is_busier_than_another()
    ours.begin_run()
    assert ours.is_busier_than_another()
    assert not other.is_busier_than_another()
    other.begin_run()
    assert not ours.is_busier_than_another(), "one that boots does not count"
    boots.state = SERVING
    assert ours.is_busier_than_another()


def test_every_word_of_every_slot_is_its_own() -> None:
    board = Board()
    for index in (0, 1, SLOTS - 1):
        slot = desk_module.Slot(board, index)
        for name in COUNTERS:
            slot.count(name, index + 1)
        for name in HISTOGRAMS:
            slot.observe(name, 0.3)
    assert {board.total(name) for name in COUNTERS} == {1 + 2 + SLOTS}
    assert {sum(board.histogram(name).counts) for name in HISTOGRAMS} == {3}
    assert (board.serving(), board.open(), board.running()) == (0, 0, 0)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1000), max_size=30))
def test_a_histogram_counts_each_duration_in_its_bucket(durations: list[float]) -> None:
    board = Board()
    slot = board.take_slot()
    for duration in durations:
        slot.observe("request", duration)
    histogram = board.histogram("request")
    below = [sum(duration <= bound for duration in durations) for bound in (*BOUNDS_S, float("inf"))]
    assert [sum(histogram.counts[: at + 1]) for at in range(len(below))] == below
    assert histogram.sum_s == pytest.approx(sum(durations), abs=1e-4)


# ---- the line


def test_the_line_gives_each_connection_to_one_taker_in_order() -> None:
    line = Line()
    assert line.take() is None
    ours = []
    for number in range(20):
        mine, theirs = socket.socketpair()
        with theirs:
            assert line.put(theirs)
        mine.sendall(bytes([number]))
        ours.append(mine)
    for number in range(20):
        taken = line.take()
        assert taken is not None
        with taken:
            assert taken.recv(1) == bytes([number])
        assert ours[number].recv(1) == b""  # its taker has closed
    for mine in ours:
        mine.close()
    assert line.take() is None


def test_a_line_that_is_full_says_so_and_loses_nothing() -> None:
    line = Line()
    placed = []
    while True:
        mine, theirs = socket.socketpair()
        with theirs:
            if not line.put(theirs):
                mine.close()
                break
        placed.append(mine)
        if len(placed) > 300:
            break
    assert len(placed) > 100
    for mine in placed:
        taken = line.take()
        assert taken is not None
        taken.close()
        assert mine.recv(1) == b""
        mine.close()


def test_whoever_is_killed_with_a_connection_is_noticed_at_the_other_end() -> None:
    line = Line()
    mine, theirs = socket.socketpair()
    with theirs:
        line.put(theirs)
    child = multiprocessing.get_context("fork").Process(target=_take_and_die, args=(line,))
    child.start()
    child.join()
    mine.settimeout(10)
    assert mine.recv(1) == b""
    mine.close()


def _take_and_die(line: Line) -> None:
    assert line.take() is not None
    os.kill(os.getpid(), 9)


# ---- turns


def test_first_tokens_come_before_further_ones_and_each_in_the_order_of_asking() -> None:
    turns = Turns()
    order: list[str] = []
    waiting: list[threading.Thread] = []

    def compute(name: str) -> None:
        with turns.turn(is_new=name.startswith("new")):
            order.append(name)
            time.sleep(0.001)
            order.append(name)

    with turns.turn(is_new=False):
        for name in ("on 1", "new 1", "on 2", "new 2"):
            waiting.append(threading.Thread(target=compute, args=(name,)))
            waiting[-1].start()
            eventually(lambda: len(turns._new) + len(turns._going_on) == len(waiting))
        assert not order
    for thread in waiting:
        thread.join()
    assert order == [name for name in ("new 1", "new 2", "on 1", "on 2") for _ in range(2)]
    compute("new 3")
    assert order[-1] == "new 3"


def test_a_turn_is_handed_on_also_by_one_that_fails() -> None:
    turns = Turns()
    with pytest.raises(ValueError, match="fails"), turns.turn(is_new=True):
        raise ValueError("fails")
    with turns.turn(is_new=False):
        pass


# ---- desk and engine, the engine played by the test


JOB = Job(
    kind="completion",
    model="m",
    tenant=None,
    arguments={"prompt": "x"},
    stream=True,
    usage=False,
    hints=Hints(),
)


class Bench:
    """A desk, and an engine whose every word the test says."""

    def __init__(self, waiting: int = 4) -> None:
        self.board = Board()
        self.slot = self.board.take_slot()
        self.slot.state = SERVING
        self.line = Line()
        self.desk = Desk(self.line, self.board, self.slot, waiting)

    async def take(self) -> tuple[Job, asyncio.StreamReader, asyncio.StreamWriter]:
        """As an engine does."""
        while (connection := self.line.take()) is None:
            await asyncio.sleep(0.001)
        reader, writer = await asyncio.open_connection(sock=connection)
        return await job_from(reader), reader, writer

    async def say(self, writer: asyncio.StreamWriter, *replies: Reply) -> None:
        """And die."""
        for reply in replies:
            writer.write(frame(reply))
        writer.close()
        await writer.wait_closed()


def test_an_answer_arrives_in_its_parts_and_is_counted() -> None:
    async def scene() -> None:
        bench = Bench()
        async with bench.desk.call(JOB) as call:
            assert bench.board.open() == 1
            job, _, writer = await bench.take()
            assert job == JOB
            done = Done(b"", Usage(3, 2, 1))
            await bench.say(writer, Begun(), FirstToken(), Chunk(b"1"), Chunk(b"2"), done)
            assert [await call.next() for _ in range(3)] == [Chunk(b"1"), Chunk(b"2"), done]
        assert bench.board.open() == 0
        assert sum(bench.board.histogram("first_token").counts) == 1

    asyncio.run(scene())


def test_a_request_whose_engine_dies_before_it_has_said_anything_goes_to_the_next() -> None:
    async def scene() -> None:
        bench = Bench()
        async with bench.desk.call(JOB) as call:
            _, _, first = await bench.take()
            await bench.say(first, Begun(), FirstToken())
            _, _, second = await bench.take()
            await bench.say(second, Begun(), FirstToken(), Failed(400, "no"))
            assert await call.next() == Failed(400, "no")
            assert bench.board.total("tried_again") == 1

    asyncio.run(scene())


@pytest.mark.parametrize("said", [[], [Begun(), FirstToken(), Chunk(b"1")]])
def test_a_request_is_not_tried_for_ever_and_a_stream_not_begun_again(said: list[Reply]) -> None:
    async def scene() -> None:
        bench = Bench()
        async with bench.desk.call(JOB) as call:
            for _ in range(1 if said else desk_module.MAX_TRIES):
                _, _, writer = await bench.take()
                await bench.say(writer, *said)
            if said:
                assert await call.next() == Chunk(b"1")
            with pytest.raises(EngineDied):
                await call.next()
        assert bench.line.take() is None

    asyncio.run(scene())


class HeldModels:
    """Stands in for models: each answer waits until it may come."""

    def __init__(self, may_answer: threading.Event, seats: int) -> None:
        self._may_answer = may_answer
        self.seats = [self] * seats

    def hang_up(self, model: str) -> HeldModels:
        return self

    def begin(self) -> None:
        """As HangUp."""

    def set(self) -> None:
        """As HangUp."""

    def answer(self, job: Job, send: Any) -> Done:
        assert self._may_answer.wait(20)
        return Done(b"", Usage(1, 1, 1))

    def close(self) -> None:
        """Nothing to free."""


def test_requests_are_spread_over_the_workers_and_then_over_their_contexts() -> None:
    async def scene() -> None:
        bench, may_answer = Bench(), threading.Event()
        slots = [bench.slot, bench.board.take_slot()]
        lines = [bench.line, copy.copy(bench.line)]
        lines[1]._out = bench.line._out.dup()  # a loop has one reader for a descriptor; a worker has its own
        engines = [
            Engine(line, slot, 4, lambda: HeldModels(may_answer, 4))  # type: ignore[arg-type,return-value]
            for line, slot in zip(lines, slots, strict=True)
        ]
        for engine in engines:
            await engine.start()
        calls = [bench.desk.call(JOB) for _ in range(4)]
        while bench.board.running() < len(calls):
            await asyncio.sleep(0.001)
        assert not any(slot.is_busier_than_another() for slot in slots), "two requests each"
        may_answer.set()
        for call in calls:
            assert await call.next() == Done(b"", Usage(1, 1, 1))
            call.close()
        for engine in engines:
            await engine.stop()
        assert bench.board.running() == 0

    asyncio.run(scene())


def test_a_call_that_is_left_is_read_as_the_end_by_its_engine() -> None:
    async def scene() -> None:
        bench = Bench()
        async with bench.desk.call(JOB):
            _, reader, writer = await bench.take()
        assert await reader.read() == b""
        writer.close()
        async with bench.desk.call(JOB):
            pass  # left while it waits
        assert bench.board.open() == 0

    asyncio.run(scene())


def test_as_many_wait_as_may_and_no_more() -> None:
    async def scene() -> None:
        bench = Bench(waiting=2)
        calls = [bench.desk.call(JOB) for _ in range(3)]
        with pytest.raises(Overloaded) as refused:
            bench.desk.call(JOB)
        assert refused.value.retry_after_s == 1
        calls[0].close()
        calls[0].close()
        assert bench.board.open() == 2
        calls.append(bench.desk.call(JOB))
        for call in calls:
            call.close()
        assert bench.board.open() == 0

    asyncio.run(scene())


def test_once_the_server_stops_nobody_waits_longer_than_was_said() -> None:
    async def scene() -> None:
        bench = Bench()
        async with bench.desk.call(JOB) as call:
            bench.desk.stop(0.01)
            with pytest.raises(ServerStopping):
                await call.next()

    asyncio.run(scene())


def test_messages_of_any_size_arrive_whole() -> None:
    async def scene() -> None:
        reader = asyncio.StreamReader()
        chunk = Chunk(os.urandom(1 << 20))
        reader.feed_data(frame(chunk) + frame(Begun())[:-1])
        reader.feed_eof()
        assert await read_reply(reader) == chunk
        with pytest.raises(asyncio.IncompleteReadError):
            await read_reply(reader)

    asyncio.run(scene())


# ---- keys


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_key_is_its_tenants_and_nobody_elses(tmp_path: Path) -> None:
    keys = ApiKeys.read(key_file(tmp_path, "a-key-of-somebody-1 one\n\n# note\na-key-of-somebody-2\ttwo\n"))
    assert keys.tenant_of("a-key-of-somebody-1") == "one"
    assert keys.tenant_of("a-key-of-somebody-2") == "two"
    for other in ("", "a-key-of-somebody-", "a-key-of-somebody-11", "one", "\udc80"):
        assert keys.tenant_of(other) is None


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("a-key-of-somebody-1 one\n", 0o644, "can be read by others"),
        ("a-key-of-somebody-1\n", 0o600, "line 1"),
        ("# one\nshort one\n", 0o600, "line 2"),
        ("a-key-of-somebody-1 one two\n", 0o600, "line 1"),
        ("a-key-of-somebody-1 one\na-key-of-somebody-1 two\n", 0o600, "stands there twice"),
        ("# nothing\n", 0o600, "holds no key"),
    ],
)
def test_a_key_file_that_cannot_be_right_is_refused(
    tmp_path: Path, text: str, mode: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ApiKeys.read(key_file(tmp_path, text, mode))


# ---- settings


def test_settings_come_from_the_file_and_the_command_line_wins(tmp_path: Path, tiny_model: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        f'port = 9000\nstop-s = 5\n[models.b]\npath = "{tiny_model}"\nflash-attn = true\n'
        f'[models.a]\npath = "{tiny_model}"\n'
    )
    table = {"path": str(tiny_model), "n_ctx": 512, "gates": {"min_tokens": 64}}
    loaded = load({"port": 9001, "workers": None}, {"a": table}, file)
    assert (loaded.port, loaded.stop_s, loaded.workers, loaded.host) == (9001, 5.0, 2, "127.0.0.1")
    a, b = loaded.models
    assert (a.name, a.options, a.gates) == ("a", {"n_ctx": 512}, Gates(min_tokens=64))
    assert (b.name, b.options) == ("b", {"n_ctx": DEFAULT_N_CTX, "flash_attn": True})


@pytest.mark.parametrize(
    ("flags", "models", "message"),
    [
        ({}, {}, "name at least one"),
        ({}, {"m": {}}, "no path"),
        ({}, {"m": {"path": "/no/such/file"}}, "No such file"),
        ({}, {"m": {"path": __file__}}, "is not a GGUF file"),
        ({}, {"m": {"path": "TINY", "gates": {"min": 1}}}, "gates of model m"),
        ({}, {"m": {"path": "TINY", "gates": {"min_tokens": 9999}}}, "cold_min_tokens"),
        ({"workers": 0}, {"m": {"path": "TINY"}}, "workers"),
        ({"port": 70_000}, {"m": {"path": "TINY"}}, "port"),
        ({"waiting": 100_000}, {"m": {"path": "TINY"}}, "waiting"),
        ({"tier": "tape"}, {"m": {"path": "TINY"}}, "tier"),
        ({"namespace": "No"}, {"m": {"path": "TINY"}}, "namespace"),
        ({"colour": 1}, {"m": {"path": "TINY"}}, "unknown settings: colour"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    tiny_model: Path, flags: dict[str, Any], models: dict[str, dict[str, Any]], message: str
) -> None:
    tables = {
        name: {key: str(tiny_model) if value == "TINY" else value for key, value in table.items()}
        for name, table in models.items()
    }
    with pytest.raises(ConfigError, match=message):
        load(flags, tables, None)


@pytest.mark.parametrize(
    "text", ["models = 3", "[models]\na = 3", "port = [", "colour = 1\n[models.a]\npath='x'"]
)
def test_a_settings_file_that_cannot_be_right_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        load({}, {}, file)


# ---- requests


TEXT = st.sampled_from(["", "x", "user", "\0é", "text", "json_object", "function", "7"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        *("model", "prompt", "messages", "tools", "tool_choice", "response_format", "stop", "logit_bias"),
        *("seed", "stream", "n", "max_tokens", "user"),
    ]
)


@settings(deadline=None)
@given(st.dictionaries(FIELDS, JSON, max_size=6), st.sampled_from(["completion", "chat"]))
def test_any_json_is_a_job_or_a_bad_request(body: dict[str, Any], kind: Any) -> None:
    text = json.dumps(body).encode()
    for read in (lambda: read_job(kind, text, "t", "m"), lambda: read_lookup(text, "t", "m")):
        try:
            job = read()
        except BadRequest:
            continue
        assert job.tenant == "t"
        assert "user" not in job.arguments
        assert msgspec.msgpack.decode(frame(job)[4:], type=Job) == job


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_are_a_job_or_a_bad_request(body: bytes) -> None:
    for kind in ("completion", "chat"):
        with contextlib.suppress(BadRequest):
            read_job(kind, body, None, "m")  # type: ignore[arg-type]


def test_what_openai_calls_otherwise_reaches_llama_cpp_under_its_own_names() -> None:
    body = {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None},
        ],
        "max_completion_tokens": 5,
        "seed": -1,
        "logit_bias": {"7": 1.5},
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "object"}},
        },
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_k": 3,
        "user": "somebody",
        "store": True,
    }
    job = read_job("chat", json.dumps(body).encode(), None, "default")
    assert (job.model, job.stream, job.usage) == ("default", True, True)
    assert job.arguments == {
        "messages": [{"role": "system", "content": "ab"}, {"role": "assistant", "content": ""}],
        "max_tokens": 5,
        "seed": 0xFFFFFFFF,
        "logit_bias": {7: 1.5},
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_object", "schema": {"type": "object"}},
        "top_k": 3,
    }
