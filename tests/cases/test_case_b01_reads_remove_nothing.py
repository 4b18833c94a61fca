"""B01: a lookup never takes a row out: one miss, then only hits, also after a reader's death."""

from __future__ import annotations

import pytest
from support import Child, Namespace, Pipe, eventually, identity, longest, prompt, save

from shmcache.check import check
from shmcache.client import attach

WHO = identity()
TEXT = prompt(3000)
PAYLOAD = b"state" * 2000


def ask_for_ever(pipe: Pipe, namespace: str) -> None:
    with attach(namespace) as cache:
        while pipe.hear():
            found = longest(cache, WHO, TEXT)
            pipe.say(found is not None and found[1] == PAYLOAD)


@pytest.mark.parametrize("tier", ["ram", "ram_file", "disk"])
def test_case_b01_one_miss_then_only_hits_and_the_row_survives_its_readers(
    space: Namespace, tier: str, tmp_path: object
) -> None:
    flags = ("--ram-bytes=4M", f"--disk-dir={tmp_path}", "--disk-bytes=64M")
    space.start(*flags)
    workers = [space.child(ask_for_ever, space.name) for _ in range(2)]

    def ask(worker: Child) -> bool:
        worker.say(True)
        return bool(worker.hear())

    assert not ask(workers[0])
    assert save(space.cache(tier=tier), WHO, TEXT, PAYLOAD)
    assert [ask(workers[number % 2]) for number in range(6)] == [True] * 6
    workers[0].kill()  # just after a hit
    assert ask(workers[1])
    if tier != "ram":
        space.kill()
        space.start(*flags)
        assert ask(workers[1])
    eventually(lambda: check(space.name) == [])
