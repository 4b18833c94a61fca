"""E11: the kernel's lock decides who coordinates, whatever a file says."""

from __future__ import annotations

import os
import struct

import pytest
from support import Child, Namespace, eventually, identity, longest, prompt, save

from shmcache.control import SIZE_BYTES, Word
from shmcache.server import EXIT_ALREADY_RUNNING

WHO = identity()
TEXT = prompt(2500)


@pytest.mark.parametrize("text", ["the pid of a living stranger", "nothing at all", "junk"])
def test_case_e11_a_coordinator_starts_at_once_after_a_kill(space: Namespace, text: str) -> None:
    space.start()
    cache = space.cache()
    assert save(cache, WHO, TEXT, b"state")
    cache.close()
    space.kill()
    with space.names.control.open("r+b") as page:
        if text == "the pid of a living stranger":
            page.seek(8 * Word.PID)
            page.write(struct.pack("<Q", os.getppid()))
        elif text == "nothing at all":
            page.truncate(0)
        else:
            page.write(os.urandom(SIZE_BYTES))
    assert "rows=1" in space.start()
    assert longest(cache, WHO, TEXT) == (2500, b"state")
    assert save(cache, WHO, prompt(2600), b"more"), "no number that was written there is believed"


def test_case_e11_two_coordinators_never_run_together(space: Namespace) -> None:
    space.start(command=True)
    first = space.coordinator
    assert first is not None
    space.coordinator = None
    space.start(command=True, ready=False)
    assert space.coordinator is not None
    assert space.coordinator.wait(60) == EXIT_ALREADY_RUNNING
    assert f"is running already (pid {first.pid})" in space.log()
    space.coordinator = first
    assert first.poll() is None


def test_case_e11_of_several_that_start_at_once_one_runs(space: Namespace) -> None:
    started: list[Child] = []
    try:
        for _ in range(4):
            space.start(ready=False)
            assert isinstance(space.coordinator, Child)
            started.append(space.coordinator)
            space.coordinator = None
        eventually(lambda: sum(child.poll() is None for child in started) == 1)
        codes = [child.poll() for child in started]
        assert sorted(code for code in codes if code is not None) == [EXIT_ALREADY_RUNNING] * 3
        assert eventually(lambda: save(space.cache(), WHO, TEXT, b"state"))
    finally:
        for child in started:
            child.close()
