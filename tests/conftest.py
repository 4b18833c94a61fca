"""What several test files share: the real model, a namespace of one's own, no debugger on abort."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmcache.tools.model import model_path

# ggml starts gdb on abort, which stops the test run instead of failing the test.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")

_namespaces = 0


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The SmolLM2-135M-Instruct GGUF; fetched at first use, never skipped."""
    return model_path()


@pytest.fixture
def namespace() -> Iterator[str]:
    """A namespace that no other test and no other run uses; nothing of it is left afterwards."""
    global _namespaces  # noqa: PLW0603  one counter for the run
    _namespaces += 1
    name = f"test-{os.getpid()}-{_namespaces}"
    yield name
    for path in Path("/dev/shm").glob(f"shmcache.{os.getuid()}.{name}*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
