"""Every object is its owner's alone, and what is somebody else's is neither used, followed nor removed.

Run as root: the namespace belongs to an ordinary user, root plants what is foreign to him, and a second
ordinary user tries to look.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import posix_ipc
import pytest
from support import (
    WAIT_S,
    Child,
    Namespace,
    Pipe,
    eventually,
    identity,
    longest,
    needs_root,
    plan,
    prompt,
    save,
)

from shmcache import client
from shmcache.decisions.shared import SharedStore
from shmcache.errors import OutOfSpace
from shmcache.key import row_address
from shmcache.server import EXIT_FAILED
from shmcache.shm import SHM_ROOT, Names
from shmcache.tiers.base import HandOver, file_name

pytestmark = needs_root

WHO = identity()
A, B = prompt(1000), prompt(2000)
OWNER, OTHER = 64_021, 65_534
ROOT_OWNED = b"root's own, and of no use to anybody"


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory that ordinary users reach, with the owner's own inside: his disk tier and decisions."""
    path = Path(tempfile.mkdtemp(prefix="shmcache-test-"))
    path.chmod(0o755)
    for name in ("disk", "decisions"):
        (path / name).mkdir(mode=0o700)
        os.chown(path / name, OWNER, OWNER)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def owned() -> Iterator[Namespace]:
    """A namespace of the ordinary user's."""
    with Namespace(uid=OWNER) as space:
        yield space


def flags_of(home: Path) -> tuple[str, ...]:
    return (
        "--ram-bytes=4M",
        f"--disk-dir={home}/disk",
        "--disk-bytes=16M",
        f"--decisions-file={home}/decisions/decisions.sqlite3",
    )


def use_everything(pipe: Pipe, namespace: str) -> None:
    """A worker with a row in each tier, a slab in the making, a decision, and a mailbox that was used."""
    caches = [client.attach(namespace, tier=tier) for tier in ("ram", "ram_file", "disk")]
    for number, cache in enumerate(caches):
        eventually(lambda cache=cache: cache.connection.reader() is not None)  # type: ignore[misc]
        assert save(cache, WHO, prompt(1000, f"row {number}"), b"state")
    made = caches[1].reserve([plan(WHO, B)], None, 0).slabs[0]
    assert made is not None
    store = SharedStore(namespace)
    assert store.get(b"k" * 16) is None
    assert store.add(b"k" * 16, b"decision", None) == b"decision"
    pipe.say()
    pipe.hear()


# ---- not readable by another user


def test_nobody_else_reads_lists_or_removes_anything(owned: Namespace, home: Path) -> None:
    owned.start(*flags_of(home))
    worker = owned.child(use_everything, owned.name)
    worker.hear()
    objects = [*owned.objects(), *(home / "disk").rglob("*"), *(home / "decisions").rglob("*")]
    kinds = {stat.S_IFMT(path.lstat().st_mode) for path in objects}
    assert kinds == {stat.S_IFREG, stat.S_IFDIR, stat.S_IFIFO}
    assert sum(path.suffix == ".kvc" for path in objects) == 3
    assert sum(path.suffix in (".index", ".decisions") for path in objects) == 2
    for path in objects:
        found = path.lstat()
        assert (found.st_uid, found.st_mode & 0o077) == (OWNER, 0), path

    directories = {path for path in objects if path.is_dir()}

    def intrude(_pipe: Pipe) -> None:
        for path in objects:
            for flags in (os.O_RDONLY,) if path in directories else (os.O_RDONLY, os.O_WRONLY):
                with pytest.raises(PermissionError):
                    os.open(path, flags | os.O_NONBLOCK)
            with pytest.raises(PermissionError):
                path.rmdir() if path in directories else path.unlink()
        for flags in (os.O_RDONLY, os.O_WRONLY):
            with pytest.raises(posix_ipc.PermissionsError):
                posix_ipc.MessageQueue(
                    owned.names.queue, read=flags == os.O_RDONLY, write=flags == os.O_WRONLY
                )
        with pytest.raises(posix_ipc.PermissionsError):
            posix_ipc.unlink_message_queue(owned.names.queue)

    intruder = Child(intrude, uid=OTHER)
    try:
        assert intruder.wait() == 0
    finally:
        intruder.close()
    worker.say()
    assert worker.wait() == 0


# ---- planted before a start


def place_of(owned: Namespace, home: Path, name: str) -> Path:
    """Where an object of this name lies. `DIR/…` is below the disk tier's directory."""
    key = row_address(WHO.seed, A).key
    nested = name.replace("<row>", file_name(key)).replace("<hand-over>", HandOver(key, 5, 0).name)
    if nested.startswith("DIR"):
        nested = nested.replace("<2 hex>", f"{key[0]:02x}")
        return home / "disk" / owned.name / nested.removeprefix("DIR").lstrip("/")
    if nested.startswith("decisions"):
        return home / "decisions" / nested
    return owned.names.directory / nested if nested else owned.names.directory


def make_parents(owned: Namespace, home: Path, path: Path) -> None:
    """The directories above an object, as their owner would have made them."""
    for parent in reversed(path.parents):
        if (
            owned.names.directory in (parent, *parent.parents) or home in parent.parents
        ) and not parent.exists():
            parent.mkdir(mode=0o700)
            os.chown(parent, OWNER, OWNER)


def plant(path: Path, how: str, *, is_directory: bool) -> None:
    """Something foreign: root's own, or the owner's symbolic link to something that is root's."""
    if how == "link":
        target = path.with_name(path.name + ".target")
        target.mkdir() if is_directory else target.write_bytes(ROOT_OWNED)
        path.symlink_to(target)
        os.lchown(path, OWNER, OWNER)
    elif is_directory:
        path.mkdir(mode=0o700)
    else:
        path.write_bytes(ROOT_OWNED)
        path.chmod(0o600)


def is_untouched(path: Path, how: str) -> bool:
    """Whether what was planted is still what it was, there or where somebody has set it aside."""
    if how == "link":
        target = path.with_name(path.name + ".target")
        return list(target.iterdir()) == [] if target.is_dir() else target.read_bytes() == ROOT_OWNED
    there = [path, *path.parent.glob(f"{path.name}.aside*")]
    kept = [each for each in there if os.path.lexists(each) and each.lstat().st_uid == 0]
    return len(kept) == 1 and (kept[0].is_dir() or kept[0].read_bytes() == ROOT_OWNED)


REFUSED = ["", "pages", "fifo", "ram_file", "ram_file/in", "disk", "disk/in", "DIR"]
REFUSED_FILES = ["control", "DIR/.lock", "disk/where"]
SERVED = ["DIR/<2 hex>"]
SERVED_FILES = [
    "ram_file/<row>",
    "ram_file/in/<hand-over>",
    "disk/in/<hand-over>",
    "DIR/.forget",
    "DIR/<2 hex>/<row>",
    "decisions.sqlite3",
]


@pytest.mark.parametrize("how", ["foreign", "link"])
@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_FILES])
def test_a_start_refuses_what_is_not_its_own_and_names_it(
    owned: Namespace, home: Path, name: str, how: str
) -> None:
    path = place_of(owned, home, name)
    make_parents(owned, home, path)
    plant(path, how, is_directory=name in REFUSED)
    owned.start(*flags_of(home), ready=False)
    assert owned.coordinator is not None
    assert owned.coordinator.wait(WAIT_S) == EXIT_FAILED
    assert f"{path} belongs to uid" in owned.log()
    assert "is not used: remove it" in owned.log()
    assert "Traceback" not in owned.log()
    assert os.path.lexists(path)
    assert is_untouched(path, how)


@pytest.mark.parametrize("how", ["foreign", "link"])
@pytest.mark.parametrize("name", [*SERVED, *SERVED_FILES])
def test_a_start_goes_on_beside_what_costs_a_row_at_most(
    owned: Namespace, home: Path, name: str, how: str
) -> None:
    path = place_of(owned, home, name)
    make_parents(owned, home, path)
    plant(path, how, is_directory=name in SERVED)
    owned.start(*flags_of(home))
    assert "Traceback" not in owned.log()
    assert path.name in owned.log() or "<hand-over>" in name, "it is named; a hand-over it is none"
    assert is_untouched(path, how)

    def work(_pipe: Pipe) -> None:
        for tier in ("ram_file", "disk"):
            with client.attach(owned.name, tier=tier) as cache:
                eventually(lambda cache=cache: cache.connection.reader() is not None)  # type: ignore[misc]
                assert longest(cache, WHO, A) is None or tier == "disk"
                is_saved = save(cache, WHO, A, b"state")
                assert is_saved or (name in SERVED and tier == "disk"), "and the key is free for a good one"
                assert longest(cache, WHO, B) == (len(A), b"state")

    assert owned.child(work).wait() == 0
    assert is_untouched(path, how)
    assert owned.stop() == 0


def test_a_queue_of_another_user_is_refused_by_a_start(owned: Namespace, home: Path) -> None:
    with contextlib.closing(posix_ipc.MessageQueue(owned.names.queue, posix_ipc.O_CREX, mode=0o600)) as queue:
        queue.send(b"root's")
        owned.start(*flags_of(home), ready=False)
        assert owned.coordinator is not None
        assert owned.coordinator.wait(WAIT_S) == EXIT_FAILED
        assert f"{owned.names.queue} belongs to another user" in owned.log()
        assert queue.receive(timeout=0) == (b"root's", 0)


# ---- changed under a running coordinator


def segment(owned: Namespace, suffix: str) -> Path:
    (path,) = SHM_ROOT.glob(f"{owned.names.directory.name}.*{suffix}")
    return path


CHANGED: dict[str, Callable[[Namespace, Path], Path]] = {
    "directory": lambda owned, home: owned.names.directory,
    "control": lambda owned, home: owned.names.control,
    "pages": lambda owned, home: owned.names.pages,
    "fifo": lambda owned, home: owned.names.fifos,
    "index": lambda owned, home: segment(owned, ".index"),
    "ram_file/in": lambda owned, home: owned.names.tier("ram_file", 0) / "in",
    "row": lambda owned, home: place_of(owned, home, "ram_file/<row>"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_worker_is_served_uncached_beside_what_is_not_its_own(
    owned: Namespace, home: Path, what: str
) -> None:
    def work(pipe: Pipe) -> None:
        with client.attach(owned.name) as cache:
            eventually(lambda: save(cache, WHO, A, b"state"))
        pipe.say()
        pipe.hear()
        with client.attach(owned.name) as cache:
            found = longest(cache, WHO, A)
            try:
                saved = save(cache, WHO, B, b"longer")
            except OutOfSpace:  # a skipped save
                saved = False
            counters = cache.statistics().counters
            pipe.say([found is not None, saved, counters["foreign_objects"], counters["cache_faults"]])

    owned.start(*flags_of(home))
    worker = owned.child(work)
    worker.hear()
    path = CHANGED[what](owned, home)
    os.chown(path, 0, 0)
    path.chmod(0o755 if path.is_dir() else 0o644)  # he may look, but it is not his
    worker.say()
    found, saved, foreign, faults = worker.hear()
    assert worker.wait() == 0
    assert (foreign >= 1, faults >= 1) == (what != "fifo", what == "fifo"), "nothing can be made in there"
    assert found == (what in ("fifo", "ram_file/in"))
    assert saved == (what == "row")
    assert path.lstat().st_uid == 0, "it stays"
    assert owned.coordinator is not None
    assert owned.coordinator.poll() is None


# ---- two users


def test_case_d03_two_users_each_with_a_namespace_of_the_same_name_do_not_meet(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "his").mkdir(mode=0o700)
    os.chown(home / "his", OTHER, OTHER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    with Namespace(uid=OWNER) as mine, Namespace(uid=OTHER) as his:
        for space, uid in ((mine, OWNER), (his, OTHER)):
            space.name, space.names = "default", Names("default", uid)
        mine.start(f"--decisions-file={home}/decisions/mine.sqlite3")
        his.start(f"--decisions-file={home}/his/his.sqlite3")

        def work(pipe: Pipe, state: str) -> None:
            with client.attach() as cache:
                assert longest(cache, WHO, B) is None
                eventually(lambda: save(cache, WHO, B, state.encode()))
                pipe.say()
                while pipe.hear():
                    answer = eventually(lambda: longest(cache, WHO, B))
                    assert answer is not None
                    pipe.say([answer[1].decode(), save(cache, WHO, prompt(3000, f"{pipe.hear()}"), b"x")])

        workers = [mine.child(work, "mine"), his.child(work, "his")]

        def ask(number: int, what: str) -> list[object]:
            workers[number].say(True)
            workers[number].say(what)
            answer: list[object] = workers[number].hear()
            return answer

        for worker in workers:
            worker.hear()
        assert [ask(0, "one"), ask(1, "one")] == [["mine", True], ["his", True]]
        mine.kill()
        assert ask(1, "two") == ["his", True]
        assert ask(0, "two") == ["mine", False], "reads on without a coordinator, and saves nothing"
        mine.start(f"--decisions-file={home}/decisions/mine.sqlite3")
        assert ask(1, "three") == ["his", True]
        mine.reboot()
        assert ask(1, "four") == ["his", True]
        assert his.stop() == 0
