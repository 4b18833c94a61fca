"""What several test files share: the real model, a namespace of one's own, a coordinator in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import Namespace

from shmcache.tools.clean import remove
from shmcache.tools.demo import CoordinatorProcess
from shmcache.tools.model import model_path

# ggml starts gdb on abort, which stops the test run instead of failing the test.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")
# Threads that wait in a busy loop for each other take minutes where other work shares the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

_namespaces = 0


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The SmolLM2-135M-Instruct GGUF; fetched at first use, never skipped."""
    return model_path()


@pytest.fixture
def namespace() -> Iterator[str]:
    """A namespace that no other test and no other run uses; nothing of it is left afterwards.

    A coordinator that still runs at the end is the test's fault, and an error (AlreadyRunning).
    """
    global _namespaces  # noqa: PLW0603  one counter for the run
    _namespaces += 1
    name = f"test-{os.getpid()}-{_namespaces}"
    yield name
    remove(name)


@pytest.fixture
def coordinator(namespace: str) -> Iterator[CoordinatorProcess]:
    """A coordinator of that namespace in a process of its own, ready; it may be killed or stopped."""
    process = CoordinatorProcess(f"--namespace={namespace}", "--ram-file-bytes=256M", "--max-rows=1024")
    yield process
    process.stop()


@pytest.fixture
def space() -> Iterator[Namespace]:
    """A namespace whose coordinator the test starts, kills and restarts; nothing of it is left."""
    with Namespace() as made:
        yield made
