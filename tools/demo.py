"""Does it work here? A coordinator and two real model workers share one prompt, on this machine, now.

    step                    worker  what the cache has to do
    cold                    A       nothing: the whole prompt is computed and its anchors are saved
    other_worker            B       restore in another process what A computed
    next_turn               B       prompt + reply + a new message: compute the new message only
    coordinator_restarted   A       kill -9 of the coordinator between: adopt what lies in /dev/shm
    workers_restarted       A       two new processes: nothing was kept in the old ones

Each reply is compared, token id for token id, with the same step in one unbroken context that has no cache
and decodes the tokens in the same batches (the split, which a row records): that is what "equal" means for
a model, see INTERNALS.md.

Owner: this process starts everything, and everything is gone when it ends: processes, segments, queue, rows.
Leaves out: measurements to compare versions by (bench).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import msgspec

from shmcache.errors import ConfigError, OutOfSpace, ShmcacheError
from shmcache.shm import Names, free_bytes
from shmcache.tools.clean import remove
from shmcache.tools.model import MODEL_NAME, model_path
from shmcache.tools.serve import add_explain_saves
from shmcache.tools.text import log_to_stderr
from shmcache.workers.pool import Place, Pool

HELP = "show the cache at work with a real model, in about a minute"
NAMESPACE = f"demo-{os.getpid()}"

PROMPT = Path(__file__).with_name("demo_prompt.json")
N_CTX = 2048
RAM_FILE_BYTES = 512 << 20  # six rows of about 35 MB, and room to see that nothing is evicted
FLUSH_MS = 10_000
A, B = 0, 1


class Scene(msgspec.Struct, frozen=True):
    """The prompt file: a chat, the message that comes after the reply, and the length of replies."""

    messages: list[dict[str, str]]
    next_message: str
    max_tokens: int


class Answer(msgspec.Struct, frozen=True):
    """What a worker reports of one completion; tokens are ids, split is the prompt's batches."""

    text: str
    prompt: list[int]
    split: list[int]
    reply: list[int]
    hit_kind: str
    reused_tokens: int
    prefilled_tokens: int


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table."""

    name: str
    title: str
    worker: int
    ttft_ms: float
    answer: Answer

    def figures(self, reply_equal: bool) -> dict[str, Any]:
        """The step as --json shows it."""
        return {
            "prompt_tokens": len(self.answer.prompt),
            "prefilled_tokens": self.answer.prefilled_tokens,
            "reused_tokens": self.answer.reused_tokens,
            "ttft_ms": round(self.ttft_ms, 3),
            "replies_equal": reply_equal,
        }


# In the workers.


class AgentWorker:
    """A model worker of the demo: SharedLlama, and what the comparison needs to know of each reply."""

    def __init__(self, settings: dict[str, Any], place: Place) -> None:
        # llama.cpp and numpy, which the asking process does not need.
        from shmcache.client import attach  # noqa: PLC0415
        from shmcache.workers import SharedLlama  # noqa: PLC0415

        class Recorder(SharedLlama):
            """Keeps the ids that create_chat_completion turns into text."""

            reply: list[int]

            def generate(
                self, tokens: Sequence[int], *args: Any, **options: Any
            ) -> Generator[int, Any, None]:
                self.reply = []
                for token in super().generate(tokens, *args, **options):
                    self.reply.append(token)
                    yield token

        explain_saves = settings.get("explain_saves", False)
        if explain_saves:
            log_to_stderr()
        self._cache = attach(settings["namespace"])
        self._llama = Recorder(
            settings["model_path"],
            cache=self._cache,
            n_ctx=N_CTX,
            n_threads=place.threads,
            n_threads_batch=place.threads,
            explain_saves=explain_saves,
            verbose=False,
        )

    def chat(self, messages: list[dict[str, str]], max_tokens: int) -> Generator[str, None, Answer]:
        """Stream the reply's text; the first chunk is the first token. Returns an Answer."""
        text = []
        for chunk in self._llama.create_chat_completion(
            messages, max_tokens=max_tokens, temperature=0.0, stream=True
        ):
            text.append(chunk["choices"][0]["delta"].get("content", ""))
            yield text[-1]
        return self._answer("".join(text))

    def _answer(self, text: str) -> Answer:
        report, reply = self._llama.last_report, self._llama.reply
        self._cache.flush(FLUSH_MS)
        row = self._cache.get(bytes.fromhex(report.finish_key)) if report.finish_key else None
        if row is None:
            raise RuntimeError("the completion was not saved, so there is no record of its split")
        # The last token was sampled and not decoded: it is in the reply and in no cell.
        tokens = row.image.token_ids.tolist()
        prompt_tokens = len(tokens) - (len(reply) - 1)
        if tokens[prompt_tokens:] != reply[:-1]:
            raise RuntimeError("the row of prompt and reply does not end with the reply")
        return Answer(
            text=text,
            prompt=tokens[:prompt_tokens],
            split=_split(row.image.pieces, prompt_tokens),
            reply=reply,
            hit_kind=report.cache_hit_kind,
            reused_tokens=report.reused_tokens,
            prefilled_tokens=report.prefilled_tokens,
        )

    def close(self) -> None:
        """Ends the model and the view of the cache."""
        self._llama.close()
        self._cache.close()


def _split(pieces: Sequence[Any], prompt_tokens: int) -> list[int]:
    """Lengths of the batches that decoded the prompt; the reply's own come after them in a row's record."""
    lengths: list[int] = []
    for piece in pieces:
        for _ in range(piece.repeats):
            if sum(lengths) == prompt_tokens:
                return lengths
            lengths.append(piece.length)
    return lengths


class UnbrokenContext:
    """The reference: a plain llama_cpp.Llama that is never cleared, restored or cut."""

    def __init__(self, settings: dict[str, Any], place: Place) -> None:
        import llama_cpp  # noqa: PLC0415

        # Decoded logits depend on the thread count (INTERNALS.md), so it takes the workers' one.
        threads = settings["threads"]
        self._llama = llama_cpp.Llama(
            settings["model_path"], n_ctx=N_CTX, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        self._tokens: list[int] = []

    def reply(self, prompt: list[int], split: list[int], reply_tokens: int) -> list[int]:
        """Go on from where it is to the prompt's end in the split's batches, then decode greedily."""
        assert prompt[: len(self._tokens)] == self._tokens, "not a continuation of this context"
        at = 0
        for length in split:
            if at >= len(self._tokens):
                self._evaluate(prompt[at : at + length])
            at += length
        reply: list[int] = []
        while True:
            reply.append(self._llama.sample(temp=0.0))
            if len(reply) == reply_tokens:
                return reply
            self._evaluate(reply[-1:])

    def _evaluate(self, tokens: list[int]) -> None:
        self._llama.eval(tokens)
        self._tokens += tokens


# In the asking process.


@contextmanager
def _held_back(*numbers: signal.Signals) -> Iterator[None]:
    """These signals come when this has ended, not within it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class CoordinatorProcess:
    """A coordinator as a child of this process."""

    def __init__(self, *arguments: str) -> None:
        """Returns when it is ready. Raises ShmcacheError when it does not start (it says why on stderr)."""
        started = False
        try:
            with _held_back(signal.SIGINT, signal.SIGTERM):
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "shmcache.server", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                started = True
            assert self._process.stdout is not None
            ready = self._process.stdout.readline()
        except BaseException:  # whoever interrupts this has no handle to stop it by
            if started:
                self.stop()
            raise
        if not ready:
            raise ShmcacheError(f"the coordinator did not start (exit code {self.stop()})")

    def suspend(self) -> None:
        """SIGSTOP: it lives, and does nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._process.kill()
        self.stop()

    def stop(self) -> int:
        """SIGTERM; returns the exit code. Nothing happens to one that has ended."""
        self._process.terminate()
        code = self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code


class Demo:
    """Runs the steps and keeps them."""

    def __init__(self, namespace: str, scene: Scene, out: TextIO, *, explain_saves: bool = False) -> None:
        self.steps: list[Step] = []
        self._namespace, self._scene, self._out = namespace, scene, out
        self._settings = {
            "namespace": namespace,
            "model_path": str(model_path()),
            "explain_saves": explain_saves,
        }

    def play(self) -> None:
        """All five steps, and everything stopped again."""
        self._say(f"Two workers with {MODEL_NAME} and a coordinator, namespace {self._namespace}.\n")
        self._say(HEADLINE)
        first = self._scene.messages
        with ExitStack() as stack:
            self._start_coordinator()
            stack.callback(self._stop_coordinator)
            with self._start_workers() as workers:
                self.threads = workers.threads
                self._ask(workers, A, "cold", "cold", first)
                self._ask(workers, B, "other_worker", "same prompt, other worker", first)
                following = [
                    *first,
                    {"role": "assistant", "content": self.steps[-1].answer.text},
                    {"role": "user", "content": self._scene.next_message},
                ]
                self._ask(workers, B, "next_turn", "next turn", following)
                self._coordinator.kill()
                self._start_coordinator()
                self._ask(workers, A, "coordinator_restarted", "coordinator killed, restarted", following)
            with self._start_workers() as workers:
                self._ask(workers, A, "workers_restarted", "both workers restarted", following)

    def compare(self) -> dict[str, bool]:
        """By step: is the reply the one of the same step in one unbroken context without the cache?"""
        self._say("\nThe same conversation in one context without the cache, for comparison ...")
        settings = {**self._settings, "threads": self.threads}
        equal: dict[str, bool] = {}
        expected: tuple[list[int], list[int], list[int]] = [], [], []
        with Pool(1, UnbrokenContext, settings) as pool:
            for step in self.steps:
                answer = step.answer
                if answer.prompt != expected[0]:  # the next turn; the steps after it ask the same again
                    reply = pool.call(
                        "reply", prompt=answer.prompt, split=answer.split, reply_tokens=len(answer.reply)
                    )
                    expected = (answer.prompt, answer.split, reply)
                equal[step.name] = (answer.prompt, answer.split, answer.reply) == expected
        return equal

    def _start_coordinator(self) -> None:
        self._coordinator = CoordinatorProcess(
            f"--namespace={self._namespace}",
            f"--ram-file-bytes={RAM_FILE_BYTES}",
            "--max-rows=1024",
            "--log-level=warning",
        )

    def _stop_coordinator(self) -> None:
        self._coordinator.stop()  # the one that runs now

    @contextmanager
    def _start_workers(self) -> Iterator[Pool]:
        with Pool(2, AgentWorker, self._settings) as pool:
            pool.wait_ready()
            yield pool

    def _ask(self, pool: Pool, worker: int, name: str, title: str, messages: list[dict[str, str]]) -> None:
        asked_ns = time.monotonic_ns()
        call = pool.submit("chat", worker=worker, messages=messages, max_tokens=self._scene.max_tokens)
        next(iter(call))
        ttft_ms = (time.monotonic_ns() - asked_ns) / 1e6
        answer = msgspec.convert(call.result(), Answer)
        self.steps.append(Step(name=name, title=title, worker=worker, ttft_ms=ttft_ms, answer=answer))
        self._say(table_row(self.steps[-1], self.steps[0]))

    def _say(self, line: str) -> None:
        print(line, file=self._out, flush=True)


HEADLINE = (
    f"{'step':30} worker {'prompt':>7} {'prefilled':>10} {'reused':>7} {'first token':>12} {'of cold':>8}"
)


def table_row(step: Step, cold: Step) -> str:
    """One line under HEADLINE."""
    answer = step.answer
    return (
        f"{step.title:30} {'AB'[step.worker]:6} {len(answer.prompt):7,} {answer.prefilled_tokens:10,} "
        f"{answer.reused_tokens:7,} {step.ttft_ms:9,.0f} ms {step.ttft_ms / cold.ttft_ms:8.1%}"
    )


def closing_sentence(steps: Sequence[Step]) -> str:
    """What was saved, in plain words; the waits without the cache are those of the cold step by length."""
    cold, *others = steps
    per_token_ms = cold.ttft_ms / len(cold.answer.prompt)
    expected_s = sum(len(step.answer.prompt) for step in others) * per_token_ms / 1000
    waited_s = sum(step.ttft_ms for step in others) / 1000
    reused = sum(step.answer.reused_tokens for step in others)
    asked = sum(len(step.answer.prompt) for step in others)
    return (
        f"After the first prompt, {reused:,} of {asked:,} prompt tokens came out of shared memory: "
        f"the four first tokens took {waited_s:.1f} s together instead of about {expected_s:.0f} s, "
        f"and every reply is the same, token for token, as without the cache."
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What else it should say."""
    add_explain_saves(parser)


def run(arguments: argparse.Namespace) -> int:
    """Play, compare, report; 1 where a reply differs."""
    if find_spec("llama_cpp") is None:
        raise ConfigError("the demo needs llama-cpp-python: pip install 'shmcache[llama]'")
    names = Names(arguments.namespace)
    if names.directory.exists():
        raise ConfigError(f"namespace {arguments.namespace} is in use: the demo wants one of its own")
    if (free := free_bytes()) < RAM_FILE_BYTES:
        raise OutOfSpace("/dev/shm", RAM_FILE_BYTES, free, "start the container with --shm-size 1g")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that all is taken down
    scene = msgspec.json.decode(PROMPT.read_bytes(), type=Scene)
    out = sys.stderr if arguments.json else sys.stdout
    demo = Demo(arguments.namespace, scene, out, explain_saves=bool(arguments.explain_saves))
    try:
        demo.play()
        equal = demo.compare()
    finally:
        remove(arguments.namespace)
    different = [name for name, same in equal.items() if not same]
    if arguments.json:
        figures: dict[str, Any] = {step.name: step.figures(equal[step.name]) for step in demo.steps}
        print(json.dumps({**figures, "replies_equal": not different}))
    elif different:
        print(f"\nThe reply differs from the one without the cache in: {', '.join(different)}.")
    else:
        print("\n" + closing_sentence(demo.steps))
    return 1 if different else 0
