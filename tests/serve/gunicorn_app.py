"""An app of anybody's, WSGI and ASGI, that holds a SharedLlama; how it loads it is in the environment.

LOAD  import     with the module, as most people write it
      request    at the first request, so that --preload is right
      evaluated  with the module, and a prompt is computed there
      killed     the process ends while it loads
      raises     loading fails
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from shmcache.config import Gates
from shmcache.workers import SharedLlama
from shmcache.workers.gunicorn_hooks import worker_threads

LOAD = os.environ["LOAD"]


@functools.cache
def llama() -> SharedLlama:
    """The model, once in this process."""
    assert worker_threads() >= 1
    return SharedLlama(
        os.environ["MODEL"],
        cache=os.environ["NAMESPACE"],
        gates=Gates(min_tokens=64, cold_min_tokens=64, boundary_align_tokens=64),
        n_ctx=512,
        n_threads=1,
        n_threads_batch=1,
        verbose=False,
    )


if LOAD == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif LOAD == "raises":
    raise RuntimeError("there is no such model")
elif LOAD == "evaluated":
    llama()("a prompt", max_tokens=1)
elif LOAD == "import":
    llama()

if "LEFT" in os.environ:
    atexit.register(lambda: Path(os.environ["LEFT"], str(os.getpid())).touch())


def answer(prompt: str) -> bytes:
    """Compute a reply."""
    reply = llama()(prompt, max_tokens=4, temperature=0.0)
    return json.dumps({"text": reply["choices"][0]["text"], "pid": os.getpid(), **reply["shmcache"]}).encode()


def wsgi(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """POST a prompt."""
    body = answer(environ["wsgi.input"].read().decode())
    start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
    return [body]


async def asgi(scope: Any, receive: Any, send: Any) -> None:
    """POST a prompt."""
    if scope["type"] == "lifespan":
        while (message := await receive())["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": f"{message['type']}.complete"})
        return
    prompt, more = b"", True
    while more:
        message = await receive()
        prompt, more = prompt + message.get("body", b""), message.get("more_body", False)
    body = answer(prompt.decode())
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
    )
    await send({"type": "http.response.body", "body": body})
