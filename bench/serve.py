"""What do 16 clients of one server wait for, when all their chats begin alike?

    ttft_p50_vs_no_cache, ttft_p99_vs_no_cache, requests_per_s_vs_no_cache
    ttft_p50_vs_llama_cpp_server, ttft_p99_vs_llama_cpp_server, requests_per_s_vs_llama_cpp_server
    failed_requests              of ours, of all that were asked

Three servers: `shmcache serve` with 2 workers of 8 contexts each and a coordinator; the same with --no-reuse
and none; llama-cpp-python's own server with its RAM cache, which is one process that takes all cores. Each
serves the same chats by turns: 16 clients with one system prompt of 1,200 tokens, each with questions of its
own of some 40 tokens and replies of at most 16, all clients of a turn at once. The first turn, in which
caches are empty, is not counted. Time to first token is measured by the openai package, from the request to
the first chunk with text. --quick: 4 clients, 300 tokens, 1 counted turn.

Owner: bench. Leaves out: bounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import httpx
import msgspec
import openai

from bench.harness import Options, Row, measured, percentile
from shmcache.tools.clean import remove
from shmcache.tools.demo import CoordinatorProcess
from shmcache.tools.model import model_path

WORKERS = 2
PARALLEL = 8
REPLY_TOKENS = 16
QUESTION_TOKENS = 40
READY_S = 120
STATE_TOKEN_BYTES = 23_100  # of SmolLM2
LOST_S = 3600.0  # what a request that fails counts as
_WORDS = ("harbour", "gull", "rope", "tide", "anchor", "lantern", "crew", "north", "signal", "cargo", "storm")


class Scale(msgspec.Struct, frozen=True):
    """How much is asked; turns that count."""

    clients: int
    head_tokens: int
    turns: int
    gates: tuple[str, ...]


FULL = Scale(16, 1200, 3, ())
QUICK = Scale(4, 300, 1, ("--gate=min_tokens=64", "--gate=cold_min_tokens=64"))


class Side:
    """One server, the chats of its clients, and what they have seen."""

    def __init__(self, url: str, scale: Scale) -> None:
        rng = random.Random(7)
        head = {"role": "system", "content": _text(rng, scale.head_tokens)}
        self.chats: list[list[Any]] = [[head] for _ in range(scale.clients)]
        self.questions = [[_text(rng, QUESTION_TOKENS) for _ in range(scale.turns + 1)] for _ in self.chats]
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LOST_S)
        self.first_token_s: list[float] = []
        self.took_s = 0.0
        self.failed = 0

    async def turn(self, number: int) -> None:
        """One question of every client, all at once."""
        began_s = time.perf_counter()
        first_token_s = await asyncio.gather(
            *(self._ask(client, number) for client in range(len(self.chats)))
        )
        if number:
            self.took_s += time.perf_counter() - began_s
            self.first_token_s += first_token_s

    async def _ask(self, client: int, number: int) -> float:
        chat = self.chats[client]
        chat.append({"role": "user", "content": self.questions[client][number]})
        began_s, first_s, reply = time.perf_counter(), 0.0, ""
        try:
            stream: Any = await self.client.chat.completions.create(
                model="model",
                messages=chat,
                max_tokens=REPLY_TOKENS,
                temperature=0.0,
                stream=True,
            )
            async for chunk in stream:
                text = chunk.choices[0].delta.content if chunk.choices else None
                if text and not reply:
                    first_s = time.perf_counter() - began_s
                reply += text or ""
            first_s = first_s or time.perf_counter() - began_s  # the model's first word was its last
        except openai.OpenAIError:
            self.failed += 1
            first_s = LOST_S
        chat.append({"role": "assistant", "content": reply})
        return first_s


def rows(options: Options) -> Iterable[Row]:
    """All rows of this bench."""
    scale = QUICK if options.quick else FULL
    with contextlib.ExitStack() as stack:
        ours, no_cache, theirs = (Side(stack.enter_context(server(scale)), scale) for server in SERVERS)
        asyncio.run(_turns((ours, no_cache, theirs), scale))
    if no_cache.failed or theirs.failed:
        raise RuntimeError(
            f"peers failed {no_cache.failed} and {theirs.failed} requests: nothing is compared"
        )
    for peer, side in (("no_cache", no_cache), ("llama_cpp_server", theirs)):
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            times = (percentile(one.first_token_s, share) * 1e3 for one in (ours, side))
            yield measured(f"ttft_{name}_vs_{peer}", "ms", peer, *times)
        rates = (len(one.first_token_s) / one.took_s for one in (ours, side))
        yield measured(f"requests_per_s_vs_{peer}", "1/s", peer, *rates)
    yield measured("failed_requests", "", "asked", ours.failed, scale.clients * (scale.turns + 1))


async def _turns(sides: Sequence[Side], scale: Scale) -> None:
    ours, no_cache, theirs = sides
    for side in (ours, theirs):
        await side.turn(0)
    no_cache.chats = [[*chat] for chat in ours.chats]  # it has no cache to fill
    for number in range(1, scale.turns + 1):
        for side in sides:  # by turns, so that a machine that slows down slows all
            await side.turn(number)
    for side in sides:
        await side.client.close()


@contextlib.contextmanager
def with_cache(scale: Scale) -> Iterator[str]:
    """`shmcache serve` and a coordinator; its address."""
    namespace = f"bench-serve-{os.getpid()}"
    coordinator = CoordinatorProcess(f"--namespace={namespace}", "--ram-file-bytes=3G", "--max-rows=4096")
    try:
        with _serve(scale, f"--namespace={namespace}") as url:
            yield url
    finally:
        coordinator.stop()
        remove(namespace)


@contextlib.contextmanager
def without_cache(scale: Scale) -> Iterator[str]:
    """The same server, which computes every prompt anew; its address."""
    with _serve(scale, f"--namespace=bench-none-{os.getpid()}", "--no-reuse") as url:
        yield url


@contextlib.contextmanager
def llama_cpp_server(scale: Scale) -> Iterator[str]:
    """llama-cpp-python's own server with its RAM cache; its address."""
    options = {
        "model": model_path(),
        "model_alias": "model",
        "n_ctx": _n_ctx(scale),
        "n_threads": os.cpu_count(),
        "n_threads_batch": os.cpu_count(),
        "cache": True,
        "cache_type": "ram",
        # Two states a client. The scores that it keeps beside each, 197 kB a token, do not count.
        "cache_size": 2 * scale.clients * _n_ctx(scale) * STATE_TOKEN_BYTES,
        "interrupt_requests": False,  # else each request ends the one before it
        "verbose": False,
        "port": _free_port(),
    }
    with _process("-m", "llama_cpp.server", *(f"--{name}={value}" for name, value in options.items())) as url:
        yield url


SERVERS = (with_cache, without_cache, llama_cpp_server)


def _serve(scale: Scale, *flags: str) -> contextlib.AbstractContextManager[str]:
    return _process(
        *("-m", "shmcache.tools.main", "serve", f"--model=model={model_path()}", f"--workers={WORKERS}"),
        f"--parallel={PARALLEL}",
        *(f"--llama=n_ctx={_n_ctx(scale)}", *scale.gates, *flags, f"--port={_free_port()}"),
    )


@contextlib.contextmanager
def _process(*arguments: str) -> Iterator[str]:
    """A server in a process of its own, once it answers; the last option is its port."""
    url = f"http://127.0.0.1:{arguments[-1].rpartition('=')[2]}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            _wait_answering(process, url, log)
            yield url
        finally:
            process.terminate()
            process.wait()


def _wait_answering(process: subprocess.Popen[bytes], url: str, log: Any) -> None:
    until_s = time.monotonic() + READY_S
    while time.monotonic() < until_s and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/v1/models").status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(
        f"{url} does not answer: {os.pread(log.fileno(), 1 << 16, 0).decode(errors='replace')}"
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def _n_ctx(scale: Scale) -> int:
    return scale.head_tokens + (scale.turns + 1) * (QUESTION_TOKENS + REPLY_TOKENS + 40)


def _text(rng: random.Random, tokens: int) -> str:
    """Some words, about a token each."""
    return " ".join(rng.choice(_WORDS) for _ in range(tokens))
