"""C05: after SIGKILL fresh names pile up until /dev/shm is full, or a fixed name makes everybody wait."""

from __future__ import annotations

import os
import signal

from support import Namespace, Pipe, eventually, identity, payload_of, plan, prompt, save

from shmcache import client
from shmcache.check import check

WHO = identity()
ROUNDS = 20
STATE = os.urandom(20_000)


def text_of(number: int) -> bytes:
    return prompt(1000 + number)


def work(pipe: Pipe, namespace: str, number: int) -> None:
    """A worker in the middle of things: one row saved, one slab half written, one only prepared."""
    cache = client.attach(namespace)
    eventually(lambda: cache.connection.reader() is not None)
    if payload_of(cache, WHO, text_of(number)) is None:
        assert save(cache, WHO, text_of(number), STATE)
    texts = [prompt(3000 + number, "half written"), prompt(5000 + number, "prepared")]
    half, prepared = cache.reserve([plan(WHO, text, len(STATE)) for text in texts], None, 0).slabs
    assert half is not None
    assert prepared is not None
    half.payload(len(STATE))[: len(STATE) // 2] = STATE[: len(STATE) // 2]
    pipe.say()
    signal.pause()


def test_case_c05_twenty_kills_in_the_middle_leave_no_byte_behind(space: Namespace) -> None:
    used = []
    for number in range(ROUNDS):
        space.start()
        workers = [space.child(work, space.name, 2 * (number % 3) + which) for which in range(2)]
        if number < 3:
            for worker in workers:
                worker.hear()
        space.kill()
        for worker in workers:
            worker.kill()
        # What an unnamed slab held is free already; the next coordinator needs no help with the rest.
        space.start()
        cache = space.cache()
        eventually(lambda: check(space.name) == [])
        if number >= 2:
            for known in range(6):
                assert payload_of(cache, WHO, text_of(known)) == STATE, "a committed entry is kept"
        cache.close()
        eventually(lambda: not list(space.names.pages.iterdir()))
        eventually(lambda: not list(space.names.fifos.iterdir()))
        used.append(space.used_bytes())
        space.kill()
    assert used[2:] == [used[2]] * (ROUNDS - 2)
    assert save(space.cache(), WHO, text_of(99), b"x") is False, "nobody coordinates"
