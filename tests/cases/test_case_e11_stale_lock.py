"""E11: the kernel's lock decides who coordinates, whatever a file says."""

from __future__ import annotations

import os
import struct

import pytest
from support import Namespace

from shmcache.control import SIZE_BYTES, Word
from shmcache.server import EXIT_ALREADY_RUNNING


@pytest.mark.parametrize("text", ["the pid of a living stranger", "nothing at all", "junk"])
def test_case_e11_a_coordinator_starts_at_once_after_a_kill(space: Namespace, text: str) -> None:
    space.start()
    space.kill()
    with space.names.control.open("r+b") as page:
        if text == "the pid of a living stranger":
            page.seek(8 * Word.PID)
            page.write(struct.pack("<Q", os.getppid()))
        elif text == "nothing at all":
            page.truncate(0)
        else:
            page.write(os.urandom(SIZE_BYTES))
    assert "ready" in space.start()


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
