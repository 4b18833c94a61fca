"""A tiny model, and servers that are gone when the test is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from model import tiny
from serve.served import Served

from shmcache.tools.clean import remove
from shmcache.tools.demo import CoordinatorProcess

StartServer = Callable[..., Served]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of a megabyte."""
    return tiny.build("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture
def start_server(namespace: str, tiny_model: Path) -> Iterator[StartServer]:
    """Start servers of this test's namespace: start_server(flag, …, workers=1)."""
    started: list[Served] = []

    def start(*flags: str, **options: object) -> Served:
        started.append(
            Served(options.pop("namespace", namespace), f"--model=tiny={tiny_model}", *flags, **options)
        )  # type: ignore[arg-type]
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture(scope="module")
def server(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """One server with two workers, and a coordinator, for all tests of a module."""
    name = f"serve-{os.getpid()}-{abs(hash(request.module.__name__)) % 10_000}"
    coordinator = CoordinatorProcess(f"--namespace={name}", "--ram-file-bytes=256M", "--max-rows=4096")
    try:
        with Served(name, f"--model=tiny={tiny_model}", "--waiting=200", workers=2) as served:
            yield served
    finally:
        coordinator.stop()
        remove(name)
