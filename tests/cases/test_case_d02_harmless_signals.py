"""D02: signals in the middle of waits lose nothing and double nothing; SIGTERM still stops."""

from __future__ import annotations

import signal

from support import Namespace, Pipe, eventually, identity, longest, prompt, save

from shmcache.check import check
from shmcache.client import attach
from shmcache.observe import observe

WHO = identity()
SAVES = 500
SIGNALS = 200


def catch() -> None:
    signal.signal(signal.SIGUSR1, lambda _number, _frame: None)


def save_many(pipe: Pipe, namespace: str) -> None:
    catch()
    with attach(namespace) as cache:
        pipe.say("ready")
        for number in range(SAVES):
            assert save(cache, WHO, prompt(1200, f"text {number}"), b"state %d" % number), number
        pipe.say("done")
        pipe.hear()


def test_case_d02_two_hundred_signals_lose_and_double_no_save(space: Namespace) -> None:
    space.start("--max-rows=2048", patch=catch)
    assert space.coordinator is not None
    worker = space.child(save_many, space.name)
    assert worker.hear() == "ready"
    sent = 0
    while observe(space.name).saves["cold"] < SAVES and worker.poll() is None:
        if sent < SIGNALS:
            space.coordinator.send_signal(signal.SIGUSR1)
            worker.send_signal(signal.SIGUSR1)
            sent += 1
    assert worker.hear(within_s=60) == "done"
    assert sent == SIGNALS
    eventually(lambda: observe(space.name).rows == SAVES)
    assert check(space.name) == []
    assert longest(space.cache(), WHO, prompt(1200, "text 499")) == (1200, b"state 499")
    worker.say("leave")
    assert worker.wait() == 0
    assert space.stop(signal.SIGTERM) == 0
