"""A server in processes of its own, and clients for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families
from support import WAIT_S, eventually

from shmcache.check import check
from shmcache.observe import observe
from shmcache.shm import Names

KEY = "sk-0123456789abcdef"

# One thread a worker, and gates that let short prompts have all their rows.
SMALL = (
    "--llama=n_ctx=2048",
    "--llama=n_batch=256",
    "--llama=n_ubatch=128",
    "--llama=n_threads=1",
    "--llama=n_threads_batch=1",
    "--gate=min_tokens=64",
    "--gate=cold_min_tokens=64",
    "--gate=boundary_align_tokens=64",
)

NO_END = {"260": -100}  # a logit bias: the tiny vocabulary's </s> is never drawn


class Process:
    """A gunicorn master and its workers; `arguments` follow the interpreter."""

    def __init__(
        self, arguments: Sequence[str], cwd: Path | None = None, environment: dict[str, str] | None = None
    ) -> None:
        self.url = ""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            cwd=cwd,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )

    def log(self) -> str:
        """Everything that it has said."""
        return os.pread(self._log.fileno(), 1 << 22, 0).decode(errors="replace")

    def wait_answering(self, workers: int = 1) -> None:
        """Until it is up."""
        eventually(lambda: self._is_up(workers), within_s=2 * WAIT_S)

    def _is_up(self, workers: int) -> bool:
        assert self.process.poll() is None, f"it has ended: {self.log()}"
        with contextlib.suppress(httpx.TransportError):
            return bool(httpx.get(f"{self.url}/healthz").status_code == 200)
        return False

    def workers(self) -> list[psutil.Process]:
        """Its worker processes, in the order of their start."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children()
            return sorted(children, key=lambda child: (child.create_time(), child.pid))
        return []

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal the master and wait; its exit code."""
        self.process.send_signal(number)
        return self.process.wait(2 * WAIT_S)

    def close(self) -> None:
        """Nothing of it is left, whatever became of the test."""
        everybody = [*self.workers()]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        psutil.wait_procs(everybody, WAIT_S)
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Served(Process):
    """`shmcache serve` at a port of its own, ready."""

    def __init__(
        self,
        namespace: str,
        *flags: str,
        workers: int = 1,
        patch: str = "",
        ready: bool = True,
        key: str = KEY,
    ) -> None:
        """`patch` is Python that runs first, in the master."""
        code = f"import sys; {patch}\nfrom shmcache.tools.main import main\nsys.exit(main())"
        options = [f"--namespace={namespace}", f"--workers={workers}", "--port=0", *SMALL, *flags]
        super().__init__(["-c", code, "serve", *options])
        self.key = key
        if ready:
            self.wait_answering(workers)

    def _is_up(self, workers: int) -> bool:
        assert self.process.poll() is None, f"it has ended: {self.log()}"
        _, marker, rest = self.log().partition("shmcache serves at ")
        if not marker or "\n" not in rest:
            return False
        self.url = rest.split("/v1 ", 1)[0]
        return super()._is_up(workers) and self.metric("shmcache_serve_workers") == workers

    def client(self, key: str | None = None, **options: Any) -> openai.OpenAI:
        """The real client; what fails is not tried again unless asked for."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key or self.key, **{"max_retries": 0, "timeout": 60, **options}
        )

    def async_client(self, key: str | None = None, **options: Any) -> openai.AsyncOpenAI:
        """The same with async."""
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=key or self.key, **{"max_retries": 0, "timeout": 60, **options}
        )

    def reload(self) -> None:
        """SIGHUP, and wait for the new workers."""
        before = {worker.pid for worker in self.workers()}
        self.process.send_signal(signal.SIGHUP)
        eventually(lambda: not before & {worker.pid for worker in self.workers()}, within_s=2 * WAIT_S)
        self.wait_answering(len(before))

    def metrics(self) -> dict[str, float]:
        """Every sample by its name and label values."""
        answer = httpx.get(f"{self.url}/metrics", headers={"Authorization": f"Bearer {self.key}"})
        assert answer.status_code == 200, answer.text
        return {
            ".".join((sample.name, *sample.labels.values())): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }

    def metric(self, name: str) -> float:
        """One of them."""
        return self.metrics()[name]

    def is_idle(self) -> bool:
        """Nothing is computed and nothing waits."""
        metrics = self.metrics()
        return not metrics["shmcache_serve_running"] and not metrics["shmcache_serve_waiting"]


class Since:
    """How a server's metrics have grown: since("requests_total.answered")."""

    def __init__(self, server: Served) -> None:
        self._server = server
        self._before = server.metrics()

    def __call__(self, name: str) -> float:
        """Growth of `shmcache_serve_<name>`."""
        return self._server.metric(f"shmcache_serve_{name}") - self._before[f"shmcache_serve_{name}"]


def assert_nothing_leaked(namespace: str, workers: int) -> None:
    """Pages and FIFOs are those of workers that live, no save is in flight, and the cache is consistent."""
    names = Names(namespace)
    eventually(lambda: len(list(names.pages.iterdir())) == workers)
    clients = {page.name for page in names.pages.iterdir()}
    eventually(lambda: {fifo.name.partition(".")[0] for fifo in names.fifos.iterdir()} <= clients)
    eventually(lambda: not any(tier.charged_bytes for tier in observe(namespace).tiers.values()))
    assert not any(worker.unnamed_bytes for worker in observe(namespace).workers)
    assert check(namespace) == []


def prompt(name: str, words: int = 40) -> str:
    """A text of some hundred tiny tokens; others for other names from the first word on."""
    return " ".join(f"{name}{number}" for number in range(words))


def chat(name: str, system: str = "", words: int = 40) -> list[Any]:
    """A chat with a question of that name, behind a system message if one is given."""
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": prompt(name, words)}]


def events(stream: httpx.Response) -> Iterator[str]:
    """The data of server-sent events."""
    for line in stream.iter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")
