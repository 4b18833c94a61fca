"""What becomes of requests that wait, that nobody waits for, and whose process is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serve.conftest import StartServer
from serve.served import NO_END, Served, Since, assert_nothing_leaked, chat, events, prompt
from support import eventually

SAME = {"temperature": 0.0, "seed": 1}
ENDLESS: dict[str, Any] = {"model": "tiny", "max_tokens": 1900, "logit_bias": NO_END, **SAME}
LONG: dict[str, Any] = {**ENDLESS, "max_tokens": 300}
SHORT: dict[str, Any] = {"model": "tiny", "max_tokens": 2, **SAME}


@pytest.fixture(scope="module")
def lone(tiny_model: Path) -> Iterator[Served]:
    """One worker, and one request may wait. There is no coordinator, and none is missed."""
    with Served(f"lone-{os.getpid()}", f"--model=tiny={tiny_model}", "--waiting=1") as served:
        yield served


def test_past_the_bound_a_request_is_sent_away_with_the_time_to_come_back(lone: Served) -> None:
    since = Since(lone)
    client = lone.client()
    running = client.completions.create(**ENDLESS, prompt=prompt("runs"), stream=True)
    next(running)

    async def ask_three() -> list[Any]:
        async with lone.async_client() as asking:
            waits = asyncio.create_task(asking.completions.create(**SHORT, prompt="waits"))
            while lone.metric("shmcache_serve_waiting") < 1:
                await asyncio.sleep(0.01)
            refused = await asyncio.gather(
                *(asking.completions.create(**SHORT, prompt="refused") for _ in range(2)),
                return_exceptions=True,
            )
            running.close()
            return [*refused, await waits]

    *refused, answered = asyncio.run(ask_three())
    for error in refused:
        assert isinstance(error, openai.InternalServerError)
        assert error.status_code == 503
        assert 1 <= int(error.response.headers["retry-after"]) <= 60
        assert error.code == "overloaded"
    assert answered.choices
    assert since("requests_total.overloaded") == 2
    assert client.completions.create(**SHORT, prompt="later").choices


def test_the_openai_package_comes_back_by_itself(lone: Served) -> None:
    async def ask() -> list[Any]:
        async with lone.async_client(max_retries=30) as client:
            return await asyncio.gather(
                *(client.completions.create(**SHORT, prompt=f"again {number}") for number in range(6))
            )

    assert len(asyncio.run(ask())) == 6


@pytest.fixture(scope="module")
def wide(tiny_model: Path) -> Iterator[Served]:
    """One worker with three contexts."""
    with Served(f"wide-{os.getpid()}", f"--model=tiny={tiny_model}", "--parallel=3", "--waiting=0") as served:
        yield served


def test_with_several_contexts_a_long_reply_holds_up_nobody(wide: Served) -> None:
    client = wide.client()
    alone = client.completions.create(**LONG, prompt=prompt("long")).choices[0].text
    short = client.completions.create(**SHORT, prompt="short").choices[0].text
    first, second = (client.completions.create(**ENDLESS, prompt=prompt(name), stream=True) for name in "ab")
    next(first), next(second)
    assert wide.metric("shmcache_serve_running") == 2
    assert client.completions.create(**SHORT, prompt="short").choices[0].text == short
    assert client.completions.create(**LONG, prompt=prompt("long")).choices[0].text == alone
    third = client.completions.create(**ENDLESS, prompt=prompt("c"), stream=True)
    next(third)
    with pytest.raises(openai.InternalServerError) as refused:
        client.completions.create(**SHORT, prompt="one too many")
    assert refused.value.status_code == 503
    for stream in (first, second, third):
        next(stream)  # they go on
        stream.close()
    eventually(lambda: wide.metric("shmcache_serve_running") == 0)


def test_whoever_hangs_up_in_mid_stream_frees_the_worker(lone: Served) -> None:
    since = Since(lone)
    with lone.client().completions.create(**ENDLESS, prompt=prompt("hangs up"), stream=True) as stream:
        next(stream)
    eventually(lone.is_idle)
    assert since("tokens_total.completion") < 1900
    assert since("requests_total.hung_up") == 1


def test_whoever_hangs_up_on_a_whole_answer_frees_the_worker(lone: Served) -> None:
    since = Since(lone)
    with pytest.raises(openai.APITimeoutError):
        lone.client(timeout=0.2).completions.create(**ENDLESS, prompt=prompt("times out"))
    eventually(lone.is_idle)
    assert since("tokens_total.completion") < 1900


def test_a_request_that_waits_and_hangs_up_is_never_begun(lone: Served) -> None:
    since = Since(lone)
    with lone.client().completions.create(**ENDLESS, prompt=prompt("runs"), stream=True) as running:
        next(running)
        with pytest.raises(openai.APITimeoutError):
            lone.client(timeout=0.1).completions.create(**SHORT, prompt=prompt("gives up"))
        eventually(lambda: not lone.metric("shmcache_serve_waiting"))
    eventually(lone.is_idle)
    assert lone.client().completions.create(**SHORT, prompt=prompt("other")).choices
    assert since("requests_total.hung_up") == 2
    assert since("first_token_seconds_count") == 2


def test_a_slow_reader_holds_up_nobody(lone: Served) -> None:
    since = Since(lone)
    body = httpx.Request(
        "POST", f"{lone.url}/v1/completions", json={**LONG, "prompt": prompt("slow"), "stream": True}
    ).content
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((httpx.URL(lone.url).host, httpx.URL(lone.url).port))
        slow.sendall(head.encode() + body)
        assert slow.recv(100).startswith(b"HTTP/1.1 200 OK")
        # It reads no more, and its answer is computed to its end all the same.
        eventually(lambda: since("request_seconds_count") == 1)
        assert lone.client().completions.create(**SHORT, prompt="quick").choices
        received = b""
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            part = slow.recv(1 << 16)
            assert part
            received += part
    assert received.count(b"data: ") > 200


def test_a_hang_up_stops_a_prompt_that_is_being_computed(namespace: str, smollm2: Path) -> None:
    with Served(namespace, f"--model=real={smollm2}") as server:
        text = " ".join(f"{number} bottles" for number in range(300))  # a prefill of many seconds
        began_s = time.monotonic()
        with pytest.raises(openai.APITimeoutError):
            server.client(timeout=1).completions.create(model="real", prompt=text, max_tokens=1)
        eventually(server.is_idle, within_s=3)
        assert time.monotonic() - began_s < 4
        assert not server.metric("shmcache_serve_first_token_seconds_count")
        assert server.client().completions.create(model="real", prompt="One, two,", max_tokens=1).choices


@pytest.mark.usefixtures("coordinator")
@pytest.mark.parametrize(
    ("requests", "kills"), [(60, 3), pytest.param(3000, 60, marks=pytest.mark.stress, id="stress")]
)
def test_workers_that_are_killed_under_load_lose_no_answer(
    start_server: StartServer, namespace: str, requests: int, kills: int
) -> None:
    server = start_server("--waiting=200", workers=2)
    killed = 0
    at_once = asyncio.Semaphore(60)

    async def ask() -> list[Any]:
        nonlocal killed
        async with server.async_client(max_retries=10) as client:

            async def one(number: int) -> Any:
                async with at_once:
                    return await client.chat.completions.create(
                        **{**SHORT, "max_tokens": 30}, messages=chat(f"killed{number % 8}"), logit_bias=NO_END
                    )

            tasks = [asyncio.create_task(one(number)) for number in range(requests)]
            while not all(task.done() for task in tasks):
                if killed < kills and both_serve(server):
                    os.kill(server.workers()[0].pid, signal.SIGKILL)
                    killed += 1
                await asyncio.sleep(0.1)
            return await asyncio.gather(*tasks)

    answers = asyncio.run(ask())
    assert killed
    replies: dict[int, set[str]] = {}
    for number, answer in enumerate(answers):
        replies.setdefault(number % 8, set()).add(answer.choices[0].message.content)
    assert all(len(texts) == 1 for texts in replies.values())
    eventually(lambda: both_serve(server) and server.is_idle())
    assert_nothing_leaked(namespace, workers=2)


def both_serve(server: Served) -> bool:
    try:
        return server.metric("shmcache_serve_workers") == 2
    except httpx.TransportError:
        return False  # it came to the one that has just been killed


def test_sigterm_lets_a_stream_go_on_to_its_end(start_server: StartServer) -> None:
    server = start_server(workers=2)
    with server.client().completions.create(**LONG, prompt=prompt("last"), stream=True) as stream:
        parts = [next(stream)]
        workers = server.workers()
        server.process.send_signal(signal.SIGTERM)
        parts += stream
    assert parts[-1].choices[0].finish_reason == "length"
    assert server.process.wait(60) == 0
    assert not [worker for worker in workers if worker.is_running()]


def test_a_stream_that_outlasts_the_stop_ends_with_an_error(start_server: StartServer) -> None:
    server = start_server("--stop-s=0.2")
    body = {**ENDLESS, "prompt": prompt("cut"), "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
        data = events(stream)
        next(data)
        server.process.send_signal(signal.SIGTERM)
        *_, last = data
    assert '"error"' in last
    assert server.process.wait(60) == 0


def test_no_worker_outlives_a_master_that_was_killed(start_server: StartServer) -> None:
    server = start_server(workers=2)
    workers = server.workers()
    server.process.kill()
    eventually(lambda: not any(worker.is_running() for worker in workers))
