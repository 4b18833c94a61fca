"""The pool with the real model: a worker that dies in the middle of a prompt."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
from support import eventually

from shmcache.observe import observe
from shmcache.tools.demo import PROMPT, AgentWorker, Answer, CoordinatorProcess, Scene
from shmcache.workers.pool import Pool


def test_a_worker_killed_in_its_prefill_is_replaced_and_its_request_answered_from_what_others_saved(
    smollm2: Path, namespace: str, coordinator: CoordinatorProcess
) -> None:
    scene = msgspec.json.decode(PROMPT.read_bytes(), type=Scene)
    chat: dict[str, Any] = {"messages": scene.messages, "max_tokens": 8}
    with Pool(1, AgentWorker, {"namespace": namespace, "model_path": str(smollm2)}) as pool:
        pool.wait_ready()
        call = pool.submit("chat", **chat)
        first_pid = pool.pids()[0]
        while call.worker is None:
            time.sleep(0.01)
        time.sleep(0.5)  # anywhere in a prefill of some seconds
        os.kill(first_pid, signal.SIGKILL)
        cold = msgspec.convert(call.result(timeout_s=120), Answer)
        assert call.tries == 2
        assert pool.pids()[0] != first_pid
        again = msgspec.convert(pool.call("chat", **chat), Answer)
        assert again.reply == cold.reply
        assert (again.hit_kind, again.prefilled_tokens) == ("exact", 1)
    eventually(lambda: not observe(namespace).workers)
    eventually(lambda: observe(namespace).tiers["ram_file"].charged_bytes == 0)
