"""Tiny models of each kind, and a cache whose coordinator runs in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from model import tiny

import shmcache
from shmcache import Cache, client
from shmcache.config import Gates
from shmcache.tools.demo import CoordinatorProcess
from shmcache.workers import SharedLlama

SMALL = Gates(min_tokens=64, cold_min_tokens=64, boundary_align_tokens=64)
"""Gates that let short prompts have all three anchors."""

# One thread: the tests of several projects share two cores, and two that spin for one run ten times slower.
OPTIONS: dict[str, Any] = {
    "n_ctx": 2048,
    "n_batch": 256,
    "n_ubatch": 128,
    "n_threads": 1,
    "n_threads_batch": 1,
    "verbose": False,
}

MakeLlama = Callable[..., SharedLlama]


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model of a megabyte for each kind of memory."""
    folder = tmp_path_factory.mktemp("models")
    return {kind: tiny.build(kind, folder) for kind in tiny.KINDS}


@pytest.fixture
def cache(
    coordinator: CoordinatorProcess, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cache]:
    """A cache with a coordinator, which may be slow to answer: a busy machine skips no save here."""
    monkeypatch.setattr(client, "RESERVE_TIMEOUT_MS", 10_000)
    with shmcache.attach(namespace) as attached:
        yield attached


@pytest.fixture
def worker() -> Iterator[MakeLlama]:
    """Make models for one test: worker(path, cache=…, option=…)."""
    made: list[SharedLlama] = []

    def make(path: Path, cache: Cache | str | None = None, **options: Any) -> SharedLlama:
        llama = SharedLlama(str(path), cache=cache, **{"gates": SMALL, **OPTIONS, **options})
        made.append(llama)
        return llama

    yield make
    for llama in made:
        llama.close()
