"""C01: whoever only looks takes nothing along when it exits, and says nothing about leaks."""

from __future__ import annotations

from support import Namespace, identity, longest, prompt, run_python, save

WHO = identity()
TEXT = prompt(2500)

LOOK_ONCE = """
import sys
from support import identity, longest, prompt
from shmcache.client import attach
cache = attach(sys.argv[1])
print(longest(cache, identity(), prompt(2500))[0])
"""


def test_case_c01_a_process_that_looks_once_leaves_everything_in_place(space: Namespace) -> None:
    space.start(command=True)
    cache = space.cache()
    assert save(cache, WHO, TEXT, b"state")
    segments = space.names.epoch_segments()
    for _ in range(2):
        assert run_python(LOOK_ONCE, space.name) == "2500\n"
    assert space.names.epoch_segments() == segments
    assert longest(cache, WHO, TEXT) == (2500, b"state")


def test_case_c01_an_index_outlives_the_kill_of_its_coordinator(space: Namespace) -> None:
    space.start(command=True)
    cache = space.cache()
    assert save(cache, WHO, TEXT, b"state")
    segments = space.names.epoch_segments()
    space.kill()
    assert longest(space.cache(), WHO, TEXT) == (2500, b"state")
    assert space.names.epoch_segments() == segments
