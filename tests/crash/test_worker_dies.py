"""kill -9 of a worker at every numbered step of a save, with a coordinator and without one.

    W1 reserved    W2 prepared    W3 payload written    W4 finished    W5 linked    W6 `written` sent

Before W5 nothing of it is left; from W5 on the row is there. In both cases its page, its FIFOs, its
reservation and its bytes are free.
"""

from __future__ import annotations

import os
import signal
import threading

import pytest
from support import (
    PAYLOAD_OFFSET,
    PIECES,
    TOKEN_IDS,
    Namespace,
    Pipe,
    die,
    die_at,
    eventually,
    identity,
    meta,
    payload_of,
    plan,
    prompt,
    save,
)

from shmcache import client, protocol, slab
from shmcache.check import check
from shmcache.mq import RequestQueue
from shmcache.slab import UnnamedSlab

WHO = identity()
A, B = prompt(1000, "chat"), prompt(2048, "chat")
PAYLOAD = os.urandom(100_000)
STEPS = ("W1 reserved", "W2 prepared", "W3 payload written", "W4 finished", "W5 linked", "W6 written sent")


def work(pipe: Pipe, namespace: str, step: str) -> None:
    """A worker that dies at a step; it says so first, and waits to be told."""
    cache = client.attach(namespace)
    eventually(lambda: save(cache, WHO, A, b"before"))
    pipe.say()
    pipe.hear()
    if step == "W2 prepared":
        cache.do(lambda: die_at(slab, "_populate", after=True))
    elif step == "W4 finished":
        die_at(UnnamedSlab, "finish", after=True)
    elif step == "W5 linked":
        die_at(UnnamedSlab, "link", after=True)
    gate = threading.Event()

    def hold() -> None:
        """The helper does nothing before it is told, so that W1 comes before W2."""
        gate.wait()

    cache.do(hold)
    (made,) = cache.reserve([plan(WHO, B, len(PAYLOAD))], None, cache.forget).slabs
    assert made is not None
    pipe.say()
    pipe.hear()
    if step == "W1 reserved":
        die()
    gate.set()
    view = made.payload(len(PAYLOAD))
    view[: len(PAYLOAD) // 2] = PAYLOAD[: len(PAYLOAD) // 2]
    if step == "W3 payload written":
        die()
    view[:] = PAYLOAD
    if step == "W6 written sent":
        real = RequestQueue.send

        def send(queue: RequestQueue, message: bytes, deadline_ns: int = 0) -> bool:
            is_sent = real(queue, message, deadline_ns)
            if isinstance(protocol.decode_request(message), protocol.Written):
                die()
            return is_sent

        setattr(RequestQueue, "send", send)  # noqa: B010 (a method)
    made.save(meta(WHO, B), PIECES, TOKEN_IDS)
    signal.pause()


CASES = [(step, is_down) for is_down in (False, True) for step in STEPS[: 5 if is_down else 6]]
"""To a coordinator that is down nothing is sent, so there is no W6."""


@pytest.mark.parametrize(("step", "is_down"), CASES)
def test_a_worker_that_dies_leaves_a_whole_row_or_nothing(space: Namespace, step: str, is_down: bool) -> None:
    space.start()
    worker = space.child(work, space.name, step)
    worker.hear()
    cache = space.cache()
    assert payload_of(cache, WHO, A) == b"before"
    eventually(lambda: space.stat("saves_in_flight") == 0)
    before = space.used_bytes()
    worker.say()
    worker.hear()
    if is_down:
        space.kill()
    worker.say()
    assert worker.wait() == -signal.SIGKILL
    if is_down:
        space.start()
    is_complete = step in STEPS[4:]
    if is_complete:
        assert eventually(lambda: payload_of(cache, WHO, B)) == PAYLOAD
    eventually(lambda: [path.name for path in space.names.pages.iterdir()] == [own_page(cache)])
    eventually(lambda: space.stat("saves_in_flight") == 0)
    eventually(lambda: check(space.name) == [])
    assert {path.name.split(".")[0] for path in space.names.fifos.iterdir()} <= {own_page(cache)}
    if not is_complete:
        assert payload_of(cache, WHO, B) is None
        assert save(cache, WHO, B, PAYLOAD), "the key is free"
    row_bytes = -(-(PAYLOAD_OFFSET + len(PAYLOAD)) // 4096) * 4096
    eventually(lambda: space.used_bytes() <= before + row_bytes)


def own_page(cache: client.Cache) -> str:
    return f"{cache.connection.client:016x}"
