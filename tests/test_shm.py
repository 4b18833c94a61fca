"""Owned objects in /dev/shm: made whole, of the right mode, and refused where they are not ours."""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import Child, Pipe, in_small_shm, needs_root

from shmcache import shm
from shmcache.errors import ForeignObject
from shmcache.shm import SHM_ROOT, Mapping, Names

STRANGER = 64_001  # a uid that owns nothing here
ORDINARY = 64_002


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory of ours in /dev/shm."""
    path = SHM_ROOT / f"shmcache-test-{os.getpid()}"
    shm.make_directory(path)
    yield path
    for found in sorted(path.rglob("*"), reverse=True):
        found.rmdir() if found.is_dir() and not found.is_symlink() else found.unlink()
    path.rmdir()


def descriptors_below(place: Path) -> list[str]:
    """Which descriptors of this process lead to something in a directory."""
    gc.collect()
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (names, not paths)
        with contextlib.suppress(FileNotFoundError):
            if (target := os.readlink(f"/proc/self/fd/{name}")).startswith(f"{place}/"):  # noqa: PTH115
                found.append(target)
    return found


# ---- names


def test_everything_of_a_namespace_carries_uid_and_namespace() -> None:
    names = Names("n-1", 1000)
    assert names.directory == Path("/dev/shm/shmcache.1000.n-1")
    assert names.queue == "/shmcache.1000.n-1"
    assert names.index_segment(255) == "shmcache.1000.n-1.00000000000000ff.index"
    for path in (names.control, names.pages, names.fifos, names.tier("ram_file", 1), names.disk_link):
        assert names.directory in path.parents


def test_a_namespace_is_never_part_of_another_whose_name_begins_alike(place: Path) -> None:
    segment = SHM_ROOT / f"{Names(f'{place.name}-2').index_segment(1)}"
    segment.write_bytes(b"")
    try:
        assert Names(place.name).epoch_segments() == []
        assert Names(f"{place.name}-2").epoch_segments() == [segment]
    finally:
        segment.unlink()


@pytest.mark.parametrize("plant", ["symlink", "directory", "dangling", "stranger"])
def test_only_a_file_of_ours_is_a_segment_of_ours(place: Path, plant: str) -> None:
    names = Names(place.name)
    path = SHM_ROOT / names.index_segment(7)
    target = place / "target"
    try:
        if plant == "directory":
            path.mkdir()
        elif plant == "stranger":
            if os.geteuid() != 0:
                pytest.skip("needs root: a second uid")
            path.write_bytes(b"")
            os.chown(path, STRANGER, STRANGER)
        else:
            if plant == "symlink":
                target.write_bytes(b"x")
            path.symlink_to(target)
        assert names.epoch_segments() == []
    finally:
        path.rmdir() if plant == "directory" else path.unlink()


# ---- making


@needs_root
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_no_umask_widens_or_narrows_a_mode(place: Path, umask: int) -> None:
    place.chmod(0o777)

    def make(_pipe: Pipe) -> None:
        os.umask(umask)
        shm.make_directory(place / "directory")
        shm.make_fifo(place / "directory" / "fifo")
        shm.make_complete_file(place / "directory" / "file", b"content", size_bytes=100)
        for name, kind, mode in (
            ("", stat.S_IFDIR, 0o700),
            ("fifo", stat.S_IFIFO, 0o600),
            ("file", 0, 0o600),
        ):
            path = place / "directory" / name
            assert stat.S_IMODE(path.lstat().st_mode) == mode
            os.close(shm.open_owned(path, os.O_RDONLY, kind=kind or stat.S_IFREG))

    child = Child(make, uid=ORDINARY)
    try:
        assert child.wait() == 0
    finally:
        child.close()


def test_a_directory_that_is_there_is_checked_and_never_repaired(place: Path) -> None:
    path = place / "open"
    path.mkdir()
    path.chmod(0o755)
    with pytest.raises(ForeignObject, match="mode 40755"):
        shm.make_directory(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


def test_a_complete_file_never_replaces_one_that_is_there(place: Path) -> None:
    shm.make_complete_file(place / "file", b"first", size_bytes=10)
    shm.make_complete_file(place / "file", b"second", size_bytes=10)
    assert (place / "file").read_bytes() == b"first" + bytes(5)
    assert [path.name for path in place.iterdir()] == ["file"]


def test_a_name_is_given_once(place: Path) -> None:
    directory = shm.open_directory(place)
    first, second = shm.make_unnamed(directory), shm.make_unnamed(directory)
    try:
        shm.give_name(first, directory, "name")
        with pytest.raises(FileExistsError):
            shm.give_name(second, directory, "name")
        assert (place / "name").stat().st_ino == os.fstat(first).st_ino
    finally:
        for fd in (first, second, directory):
            os.close(fd)


def test_what_has_no_name_leaves_nothing_behind(place: Path) -> None:
    directory = shm.open_directory(place)
    fd = shm.make_unnamed(directory)
    shm.allocate(fd, 1 << 20)
    os.close(fd)
    os.close(directory)
    assert list(place.iterdir()) == []


def test_allocate_goes_on_after_a_signal(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    real, calls = os.posix_fallocate, []

    def interrupted(fd: int, offset: int, size_bytes: int) -> None:
        calls.append(size_bytes)
        if len(calls) < 3:
            raise InterruptedError
        real(fd, offset, size_bytes)

    monkeypatch.setattr(os, "posix_fallocate", interrupted)
    directory = shm.open_directory(place)
    fd = shm.make_unnamed(directory)
    try:
        shm.allocate(fd, 4096)
        assert os.fstat(fd).st_blocks * 512 == 4096
        assert calls == [4096] * 3
    finally:
        os.close(fd)
        os.close(directory)


@needs_root
def test_a_full_tmpfs_says_so_and_kills_nobody() -> None:
    def full() -> None:
        directory = shm.open_directory(SHM_ROOT) if os.getuid() != 0 else os.open(SHM_ROOT, os.O_RDONLY)
        fd = shm.make_unnamed(directory)
        with pytest.raises(OSError, match="No space left"):
            shm.allocate(fd, 2 << 20)
        os.close(fd)
        assert shm.free_bytes() == 1 << 20

    in_small_shm(1 << 20, full)


def test_writing_goes_on_after_a_short_write(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, offset: real(fd, view[:3], offset))
    directory = shm.open_directory(place)
    fd = shm.make_unnamed(directory)
    try:
        shm.write_all(fd, b"0123456789", 5)
        assert os.pread(fd, 100, 0) == bytes(5) + b"0123456789"
    finally:
        os.close(fd)
        os.close(directory)


# ---- opening


def _plant_file(path: Path, mode: int = 0o600) -> None:
    path.write_bytes(b"content")
    path.chmod(mode)


def _plant_symlink(path: Path) -> None:
    _plant_file(path.with_suffix(".target"))
    path.symlink_to(path.with_suffix(".target"))


def _plant_socket(path: Path) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listening:
        listening.bind(str(path))


def _plant_strangers_file(path: Path) -> None:
    _plant_file(path)
    os.chown(path, STRANGER, STRANGER)


def _plant_hard_link_to_strangers_file(path: Path) -> None:
    _plant_strangers_file(path.with_suffix(".target"))
    path.hardlink_to(path.with_suffix(".target"))


PLANTS: list[Callable[[Path], object]] = [
    lambda path: _plant_file(path, 0o640),
    lambda path: _plant_file(path, 0o602),
    _plant_symlink,
    lambda path: path.symlink_to("/nowhere"),
    Path.mkdir,
    os.mkfifo,
    _plant_socket,
    pytest.param(_plant_strangers_file, marks=needs_root),  # type: ignore[list-item]
    pytest.param(_plant_hard_link_to_strangers_file, marks=needs_root),  # type: ignore[list-item]
]


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
def test_what_is_not_ours_alone_is_not_opened(
    place: Path, plant: Callable[[Path], object], flags: int
) -> None:
    path = place / "planted"
    plant(path)
    before = descriptors_below(place)
    with pytest.raises(ForeignObject) as caught:
        shm.open_owned(path, flags)
    assert str(path) in str(caught.value)
    assert descriptors_below(place) == before


@pytest.mark.parametrize("plant", [_plant_file, _plant_symlink, os.mkfifo])
def test_what_is_no_directory_of_ours_is_not_opened_as_one(
    place: Path, plant: Callable[[Path], object]
) -> None:
    path = place / "planted"
    plant(path)
    with pytest.raises(ForeignObject):
        shm.open_directory(path)
    with pytest.raises(ForeignObject):
        shm.make_directory(path)


def test_a_fifo_without_a_reader_is_not_waited_for(place: Path) -> None:
    shm.make_fifo(place / "fifo")
    with pytest.raises(ForeignObject):
        shm.open_owned(place / "fifo", os.O_WRONLY, kind=stat.S_IFIFO)


def test_what_is_not_there_is_not_there(place: Path) -> None:
    with pytest.raises(FileNotFoundError):
        shm.open_owned(place / "nothing", os.O_RDONLY)
    assert not shm.unlink_quietly(place / "nothing")


@needs_root
def test_anothers_closed_file_is_foreign_and_not_a_permission_error(place: Path) -> None:
    place.chmod(0o755)
    _plant_strangers_file(place / "file")

    def look(_pipe: Pipe) -> None:
        with pytest.raises(ForeignObject) as caught:
            shm.open_owned(place / "file", os.O_RDONLY)
        assert caught.value.owner == STRANGER

    child = Child(look, uid=ORDINARY)
    try:
        assert child.wait() == 0
    finally:
        child.close()
        place.chmod(0o700)


# ---- locks


def test_a_lock_is_seen_by_other_opens_and_asking_takes_nothing(place: Path) -> None:
    _plant_file(place / "file")
    first, second = (shm.open_owned(place / "file", os.O_RDWR) for _ in range(2))
    try:
        assert not shm.is_locked(second)
        assert not shm.is_locked(second)
        assert shm.try_lock(first)
        assert shm.is_locked(second)
        assert not shm.is_locked(first), "its own lock is no other's"
        assert not shm.try_lock(second)
        assert shm.try_lock(first), "an open may take its own lock again"
    finally:
        os.close(first)
        assert not shm.is_locked(second)
        os.close(second)


def test_a_killed_process_lets_its_lock_go(place: Path) -> None:
    _plant_file(place / "file")

    def hold(pipe: Pipe) -> None:
        assert shm.try_lock(shm.open_owned(place / "file", os.O_RDWR))
        pipe.say()
        signal.pause()

    child = Child(hold)
    fd = shm.open_owned(place / "file", os.O_RDONLY)
    try:
        child.hear()
        assert shm.is_locked(fd)
        child.kill()
        assert not shm.is_locked(fd)
    finally:
        child.close()
        os.close(fd)


# ---- mappings


def test_a_mapping_shows_bytes_and_whole_words(place: Path) -> None:
    (place / "file").write_bytes(bytes(range(20)))
    (place / "file").chmod(0o600)
    with Mapping.open(place / "file") as mapping:
        assert bytes(mapping.bytes) == bytes(range(20))
        assert len(mapping.words) == 2
        assert mapping.words[1] == int.from_bytes(bytes(range(8, 16)), sys.byteorder)
        with pytest.raises(TypeError):
            mapping.bytes[0] = 1


def test_an_empty_file_maps_to_nothing(place: Path) -> None:
    _plant_file(place / "file")
    (place / "file").write_bytes(b"")
    with Mapping.open(place / "file") as mapping:
        assert (mapping.bytes.nbytes, len(mapping.words)) == (0, 0)


def test_a_mapping_is_closed_once_however_often_one_asks(place: Path) -> None:
    _plant_file(place / "file")
    mapping = Mapping.open(place / "file")
    assert mapping.close() is None
    assert mapping.close() is None


@pytest.mark.parametrize("keep", ["slice", "cast", "ctypes", "numpy"])
def test_closing_a_mapping_never_raises_and_a_view_of_it_stays_good(place: Path, keep: str) -> None:
    (place / "file").write_bytes(bytes(range(64)))
    (place / "file").chmod(0o600)
    mapping = Mapping.open(place / "file", writable=True)
    part = mapping.bytes[8:16]
    view: object
    if keep == "slice":
        view = part
    elif keep == "cast":
        view = part.cast("Q")
    elif keep == "ctypes":
        view = (ctypes.c_char * 8).from_buffer(part)
    else:
        view = pytest.importorskip("numpy").frombuffer(part, dtype="u1")
    del part
    alive = mapping.close()
    assert alive is not None
    assert alive() is not None
    assert memoryview(view).tobytes() == bytes(range(8, 16))  # type: ignore[arg-type]
    del view
    gc.collect()
    assert alive() is None


def test_words_are_written_in_one_store(place: Path) -> None:
    _plant_file(place / "file")
    os.truncate(place / "file", 64)
    with Mapping.open(place / "file", writable=True) as writer, Mapping.open(place / "file") as reader:
        writer.words[3] = (1 << 64) - 1
        assert reader.words[3] == (1 << 64) - 1
        assert array.array("Q", reader.bytes[16:24].cast("Q")) == array.array("Q", [0])
