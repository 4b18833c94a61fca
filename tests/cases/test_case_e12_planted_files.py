"""E12: a predictable path and pickle: somebody plants a file, and the one who reads it runs its code."""

from __future__ import annotations

import ast
import os
import pickle
from pathlib import Path

import posix_ipc
import pytest
from support import (
    ROOT,
    WAIT_S,
    Namespace,
    eventually,
    identity,
    longest,
    needs_root,
    payload_of,
    prompt,
    save,
    slab_file,
)

from shmcache import page, shm
from shmcache.decisions.shared import SharedStore
from shmcache.key import row_address
from shmcache.server import EXIT_FAILED
from shmcache.tiers.base import HandOver, file_name

WHO = identity()
A, B = prompt(1000), prompt(2000)
STRANGER = 64_001
CODE_FROM_BYTES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}


class Code:
    """What makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.marker,)


def plant(path: Path, content: bytes, uid: int) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    path.chmod(0o600 if uid == os.geteuid() else 0o644)
    os.chown(path, uid, -1)


@pytest.mark.parametrize("who", ["the same user", pytest.param("another user", marks=needs_root)])
def test_case_e12_a_planted_pickle_is_never_executed(space: Namespace, tmp_path: Path, who: str) -> None:
    uid = os.geteuid() if who == "the same user" else STRANGER
    marker = tmp_path / "was here"
    code = pickle.dumps(Code(marker))
    assert pickle.loads(code) is None
    assert marker.exists()
    marker.unlink()

    disk, database = tmp_path / "disk", tmp_path / "db" / "decisions.sqlite3"
    for directory in (disk, database.parent):
        shm.make_directory(directory)
    flags = (f"--disk-dir={disk}", f"--decisions-file={database}")
    space.start(*flags)
    for tier in ("ram_file", "disk"):
        with space.cache(tier=tier) as cache:
            assert save(cache, WHO, prompt(1000, tier), b"state")
    space.kill()

    key = row_address(WHO.seed, B).key
    (nested,) = {path.parent for path in disk.glob("*/*/*.kvc")}
    planted = [
        *(space.names.tier("ram_file", 0).glob("*.kvc")),
        *(disk.glob("*/*/*.kvc")),
        space.names.tier("ram_file", 0) / file_name(key),
        nested / file_name(bytes([int(nested.name, 16)]) + key[1:]),
        *(space.names.tier(tier, 0) / "in" / HandOver(key, 1, 0).name for tier in ("ram_file", "disk")),
        space.names.pages / f"{5:016x}",
        disk / space.name / ".forget",
        database,
    ]
    for path in planted:
        plant(path, code, uid)
    space.start(*flags)
    queue = posix_ipc.MessageQueue(space.names.queue)
    queue.send(code)
    queue.close()

    cache = space.cache()
    for text in (prompt(1000, "ram_file"), prompt(1000, "disk"), B):
        assert payload_of(cache, WHO, text) is None
    assert longest(cache, WHO, A) is None
    assert SharedStore(space.name).get(b"k" * 16) is None, "the database was set aside"
    eventually(lambda: save(cache, WHO, A, b"state"))
    assert longest(cache, WHO, B) == (len(A), b"state"), "and everybody is served"
    assert "a message of" in space.log()
    assert "is not understood" in space.log()
    assert not marker.exists()


def test_case_e12_a_planted_pickle_in_a_mailbox_is_no_reply(space: Namespace, tmp_path: Path) -> None:
    marker = tmp_path / "was here"
    code = pickle.dumps(Code(marker))
    real = page.ClientPage.send

    def patch() -> None:
        page.ClientPage.send = (  # type: ignore[method-assign]
            lambda self, mailbox, request, body: real(self, mailbox, request, code)
        )

    space.start(patch=patch)
    cache = space.cache()
    assert not save(cache, WHO, A, b"state")
    assert longest(cache, WHO, A) is None
    assert not marker.exists()


def test_case_e12_nothing_that_runs_code_from_bytes_is_imported_anywhere() -> None:
    modules = [path for name in ("shmcache", "workers", "tools") for path in (ROOT / name).rglob("*.py")]
    assert len(modules) > 80
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not CODE_FROM_BYTES & {name.partition(".")[0] for name in names}, path


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o755])
@pytest.mark.parametrize("which", ["namespace", "tier", "hand-over", "disk"])
def test_case_e12_a_directory_that_others_may_use_is_refused(
    space: Namespace, tmp_path: Path, which: str, mode: int
) -> None:
    directory = {
        "namespace": space.names.directory,
        "tier": space.names.tier("ram_file", 0),
        "hand-over": space.names.tier("ram_file", 0) / "in",
        "disk": tmp_path / space.name,
    }[which]
    flags = (f"--disk-dir={tmp_path}",)
    space.start(*flags)
    assert save(space.cache(), WHO, A, slab_file(WHO, A, b"state"))
    space.kill()
    directory.chmod(mode)
    space.start(*flags, ready=False)
    assert space.coordinator is not None
    assert space.coordinator.wait(WAIT_S) == EXIT_FAILED
    assert f"{directory} belongs to uid {os.geteuid()} with mode" in space.log()
    if which == "namespace":
        cache = space.cache()
        assert longest(cache, WHO, A) is None, "and no worker reads from it"
        assert cache.statistics().counters["foreign_objects"] == 1
