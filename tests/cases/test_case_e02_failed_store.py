"""E02: a store that failed stayed visible, and each later hit was gibberish; or a hit came in mid-write."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import (
    PIECES,
    TOKEN_IDS,
    WAIT_S,
    Namespace,
    eventually,
    identity,
    longest,
    meta,
    plan,
    prompt,
    save,
)

from shmcache import shm, slab
from shmcache.check import check
from shmcache.errors import OutOfSpace
from shmcache.tiers.disk import DiskTier
from shmcache.tiers.memory import MemoryTier

WHO = identity()
A, B = prompt(1000), prompt(2000)
STATE = os.urandom(100_000)
TIERS = ["ram", "ram_file", "disk"]


def failing(error: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(error, os.strerror(error))

    return fail


def started(space: Namespace, tmp_path: Path, patch: Callable[[], None] | None = None) -> None:
    space.start("--ram-bytes=16M", f"--disk-dir={tmp_path}", patch=patch)


@pytest.mark.parametrize(
    ("step", "error"),
    [*itertools.product(["allocate", "map", "finish", "link"], [errno.ENOSPC, errno.EIO])],
)
@pytest.mark.parametrize("tier", TIERS)
def test_case_e02_a_write_that_fails_in_the_worker_is_a_miss(  # noqa: PLR0917 (fixtures and cases)
    space: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str, step: str, error: int
) -> None:
    started(space, tmp_path)
    cache, other = space.cache(tier=tier), space.cache(tier=tier)
    assert save(cache, WHO, A, b"shorter")
    owner, name = {
        "allocate": (shm, "allocate"),
        "map": (slab, "Mapping"),
        "finish": (slab.UnnamedSlab, "finish"),
        "link": (slab.UnnamedSlab, "link"),
    }[step]
    monkeypatch.setattr(owner, name, failing(error))
    (made,) = cache.reserve([plan(WHO, B, len(STATE))], None, 0).slabs
    assert made is not None
    try:
        made.payload(len(STATE))[:] = STATE
        made.save(meta(WHO, B), PIECES, TOKEN_IDS)
        assert not made.wait(int(WAIT_S * 1000))
    except OutOfSpace:
        assert step in ("allocate", "map")
    monkeypatch.undo()
    for reader in (cache, other):
        assert longest(reader, WHO, B) == (len(A), b"shorter")
    assert eventually(lambda: save(other, WHO, B, STATE)), "the key is free"
    assert longest(cache, WHO, B) == (len(B), STATE)
    eventually(lambda: check(space.name) == [])


@pytest.mark.parametrize("tier", TIERS)
def test_case_e02_a_write_that_fails_in_the_coordinator_is_a_miss(
    space: Namespace, tmp_path: Path, tier: str
) -> None:
    def patch() -> None:
        owner = DiskTier if tier == "disk" else MemoryTier
        real = owner.link
        calls = iter(range(1000))

        def link(*arguments: Any) -> Any:
            if next(calls) == 1:
                failing(errno.EIO)()
            return real(*arguments)

        setattr(owner, "link", link)  # noqa: B010 (a method)

    started(space, tmp_path, patch)
    cache, other = space.cache(tier=tier), space.cache(tier=tier)
    assert save(cache, WHO, A, b"shorter")
    assert not save(cache, WHO, B, STATE)
    assert longest(other, WHO, B) == (len(A), b"shorter")
    assert save(other, WHO, B, STATE)
    assert longest(cache, WHO, B) == (len(B), STATE)
    eventually(lambda: check(space.name) == [])


@pytest.mark.parametrize("tier", TIERS)
def test_case_e02_nothing_is_visible_during_a_slow_write(
    space: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    started(space, tmp_path)
    cache, other = space.cache(tier=tier), space.cache(tier=tier)
    assert save(cache, WHO, A, b"shorter")
    seen = []

    def look(*_: Any) -> None:
        seen.append(longest(other, WHO, B))

    real = slab.UnnamedSlab.link

    def link(*arguments: Any) -> None:
        look()
        real(*arguments)

    monkeypatch.setattr(slab.UnnamedSlab, "link", link)
    (made,) = cache.reserve([plan(WHO, B, len(STATE))], None, 0).slabs
    assert made is not None
    view = made.payload(len(STATE))
    look()
    view[: len(STATE) // 2] = STATE[: len(STATE) // 2]
    look()
    view[:] = STATE
    look()
    made.save(meta(WHO, B), PIECES, TOKEN_IDS)
    assert made.wait(int(WAIT_S * 1000))
    assert seen == [(len(A), b"shorter")] * 4
    assert longest(other, WHO, B) == (len(B), STATE)
