"""C05: kill -9 of everything in the middle of saves, twenty times: /dev/shm holds what it held."""

from __future__ import annotations

from support import Namespace, Pipe, eventually, identity, longest, plan, prompt, save

from shmcache.check import check
from shmcache.client import attach

WHO = identity()
TEXT = prompt(2500)
ROUNDS = 20


def stop_in_the_middle_of_a_save(pipe: Pipe, namespace: str, number: int) -> None:
    cache = attach(namespace)
    [slab] = cache.reserve([plan(WHO, prompt(2500, f"round {number}"))], None, cache.forget).slabs
    assert slab is not None
    slab.payload(100)[:] = b"x" * 100
    pipe.say("reserved and written, without a name")
    pipe.hear()


def test_case_c05_twenty_kills_of_all_leave_the_same_use_and_every_whole_row(space: Namespace) -> None:
    space.start()
    assert save(space.cache(), WHO, TEXT, b"state" * 1000)
    used = set()
    for number in range(ROUNDS):
        worker = space.child(stop_in_the_middle_of_a_save, space.name, number)
        worker.hear()
        space.kill()
        worker.kill()
        space.start()
        assert longest(space.cache(), WHO, TEXT) == (2500, b"state" * 1000)
        used.add(len(space.names.epoch_segments()))
    assert len(used) == 1, "segments pile up"
    eventually(lambda: check(space.name) == [])
