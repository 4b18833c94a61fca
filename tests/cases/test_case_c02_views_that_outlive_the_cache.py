"""C02: closing with views alive raises nothing, hides no other error, and is silent at exit."""

from __future__ import annotations

import pytest
from support import Namespace, identity, prompt, run_python, save

from shmcache.key import row_address

WHO = identity()
TEXT = prompt(2500)
PAYLOAD = b"state" * 1000

KEEP_A_VIEW = """
import sys
from support import identity, prompt
from shmcache.client import attach
from shmcache.key import row_address
cache = attach(sys.argv[1])
kept = cache.get(row_address(identity().seed, prompt(2500)).key).image.payload
cache.close()
print(bytes(kept[:5]))
"""


def test_case_c02_a_view_stays_valid_when_its_cache_is_closed(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    assert save(cache, WHO, TEXT, PAYLOAD)
    hit = cache.get(row_address(WHO.seed, TEXT).key)
    assert hit is not None
    payload = hit.image.payload
    cache.close()
    assert bytes(payload) == PAYLOAD


def test_case_c02_the_first_error_is_the_one_that_is_seen(space: Namespace) -> None:
    space.start()
    maker = space.cache()
    assert save(maker, WHO, TEXT, PAYLOAD)
    with pytest.raises(ZeroDivisionError), space.cache() as cache:
        hit = cache.get(row_address(WHO.seed, TEXT).key)
        assert hit is not None
        view = hit.image.payload
        assert len(view) / 0


def test_case_c02_the_interpreter_exits_in_silence(space: Namespace) -> None:
    space.start()
    assert save(space.cache(), WHO, TEXT, PAYLOAD)
    assert run_python(KEEP_A_VIEW, space.name) == "b'state'\n"
