"""Slabs in a worker: nothing is left of one in the making, and a kept mapping never goes under a reader."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c
from support import (
    PAYLOAD_OFFSET,
    PIECES,
    TOKEN_IDS,
    Namespace,
    identity,
    in_small_shm,
    meta,
    needs_root,
    prompt,
    slab_file,
    unnamed_slabs,
)

from shmcache import shm, slab
from shmcache.errors import CorruptSlab
from shmcache.shm import SHM_ROOT, Mapping
from shmcache.slab import KeptSlabs, MappedSlab, ReadBuffers, ReadSlab, UnnamedSlab

WHO = identity()
TEXT = prompt(100)


@pytest.fixture
def place(space: Namespace) -> Iterator[int]:
    """Descriptor of a directory in /dev/shm."""
    shm.make_directory(space.names.directory)
    fd = shm.open_directory(space.names.directory)
    yield fd
    os.close(fd)


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (names, not paths)


def mapped(space: Namespace, name: str, payload: bytes = b"payload") -> MappedSlab:
    path = space.names.directory / name
    path.write_bytes(slab_file(WHO, TEXT, payload))
    path.chmod(0o600)
    return MappedSlab(Mapping.open(path))


# ---- in the making


def test_what_a_worker_makes_is_what_a_reader_gets(space: Namespace, place: int) -> None:
    payload = os.urandom(10_000)
    made = UnnamedSlab(place, PAYLOAD_OFFSET, PAYLOAD_OFFSET + 50_000)
    made.payload(len(payload))[:] = payload
    made.finish(meta(WHO, TEXT), PIECES, TOKEN_IDS, len(payload))
    assert list(space.names.directory.iterdir()) == [], "no name before it is complete"
    made.link(place, "name")
    made.close()
    path = space.names.directory / "name"
    assert path.stat().st_size == PAYLOAD_OFFSET + len(payload), "trimmed to what is in it"
    assert path.read_bytes() == slab_file(WHO, TEXT, payload)
    read = MappedSlab(Mapping.open(path))
    assert bytes(read.image.payload) == payload
    assert read.image.payload_crc32c == crc32c(payload)
    assert read.size_bytes == PAYLOAD_OFFSET + len(payload)


@pytest.mark.parametrize("done", ["made", "filled", "finished"])
def test_a_slab_that_is_given_up_leaves_nothing(space: Namespace, place: int, done: str) -> None:
    before, nameless = descriptors(), unnamed_slabs()
    made = UnnamedSlab(place, PAYLOAD_OFFSET, PAYLOAD_OFFSET + (8 << 20))
    assert unnamed_slabs() > nameless
    if done != "made":
        made.payload(100)[:] = bytes(100)
    if done == "finished":
        made.finish(meta(WHO, TEXT), PIECES, TOKEN_IDS, 100)
    made.close()
    made.close()
    assert descriptors() == before
    assert list(space.names.directory.iterdir()) == []
    assert unnamed_slabs() == nameless


def test_all_pages_are_there_before_the_first_copy(place: int) -> None:
    made = UnnamedSlab(place, PAYLOAD_OFFSET, PAYLOAD_OFFSET + (4 << 20))
    assert os.fstat(made._fd).st_blocks * 512 >= PAYLOAD_OFFSET + (4 << 20)
    made.close()


def test_a_machine_that_cannot_populate_is_slower_and_just_as_right(
    space: Namespace, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab, "_MADV_POPULATE_WRITE", 12_345)  # EINVAL
    test_what_a_worker_makes_is_what_a_reader_gets(space, place)


@pytest.mark.parametrize("failing", ["allocate", "Mapping", "_populate"])
def test_a_slab_that_cannot_be_made_leaves_no_descriptor(
    place: int, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(shm if failing == "allocate" else slab, failing, fail)
    before = descriptors()
    with pytest.raises(OSError, match="Cannot allocate"):
        UnnamedSlab(place, PAYLOAD_OFFSET, PAYLOAD_OFFSET + 100)
    assert descriptors() == before


@needs_root
def test_a_slab_larger_than_dev_shm_is_an_error_and_not_a_sigbus() -> None:
    def small() -> None:
        directory = os.open(SHM_ROOT, os.O_RDONLY)
        free = shm.free_bytes()
        with pytest.raises(OSError, match="No space left"):
            UnnamedSlab(directory, PAYLOAD_OFFSET, 2 << 20)
        assert shm.free_bytes() == free

    in_small_shm(1 << 20, small)


# ---- mapped


@pytest.mark.parametrize("size_bytes", [0, 1, 3, 47, 72, 100, 4095, PAYLOAD_OFFSET, PAYLOAD_OFFSET + 6])
def test_a_truncated_slab_is_corrupt_wherever_it_ends(space: Namespace, place: int, size_bytes: int) -> None:
    path = space.names.directory / "cut"
    path.write_bytes(slab_file(WHO, TEXT, b"payload")[:size_bytes])
    path.chmod(0o600)
    before = descriptors()
    with pytest.raises(CorruptSlab):
        MappedSlab(Mapping.open(path))
    assert descriptors() == before


@pytest.mark.parametrize("at", [0, 3, 40, 60, 80, 300, PAYLOAD_OFFSET, PAYLOAD_OFFSET + 6])
def test_an_overwritten_slab_is_corrupt_wherever_it_was_hit(space: Namespace, place: int, at: int) -> None:
    content = bytearray(slab_file(WHO, TEXT, b"payload"))
    content[at] ^= 0x40
    path = space.names.directory / "hit"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(CorruptSlab):
        MappedSlab(Mapping.open(path))


# ---- read


def read(path: Path, buffers: ReadBuffers) -> bytes:
    """The payload of a slab that is read from a file."""
    with path.open("rb") as file:
        slab_read = ReadSlab(file.fileno(), buffers)
    payload = bytes(slab_read.image.payload)
    slab_read.close()
    return payload


@pytest.mark.parametrize("size_bytes", [0, 1, 5000, slab._READ_BYTES, 3 * slab._READ_BYTES + 77])
def test_what_is_read_in_pieces_is_what_was_written(tmp_path: Path, size_bytes: int) -> None:
    payload = os.urandom(size_bytes)
    path = tmp_path / "slab"
    path.write_bytes(slab_file(WHO, TEXT, payload))
    assert read(path, ReadBuffers()) == payload


@pytest.mark.parametrize("piece_bytes", [1000, 4096, PAYLOAD_OFFSET, PAYLOAD_OFFSET + 1])
def test_short_reads_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    payload = os.urandom(20_000)
    path = tmp_path / "slab"
    path.write_bytes(slab_file(WHO, TEXT, payload))
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real(fd, [views[0][:piece_bytes]], at))
    assert read(path, ReadBuffers()) == payload


@pytest.mark.parametrize("at", [0, 3, 40, 60, 80, 300, PAYLOAD_OFFSET, slab._READ_BYTES, -1])
def test_a_file_is_corrupt_wherever_it_was_hit(tmp_path: Path, at: int) -> None:
    content = bytearray(slab_file(WHO, TEXT, os.urandom(2 * slab._READ_BYTES)))
    content[at] ^= 0x40
    path = tmp_path / "hit"
    path.write_bytes(content)
    with pytest.raises(CorruptSlab):
        read(path, ReadBuffers())


@pytest.mark.parametrize("size_bytes", [0, 1, 47, 4095, PAYLOAD_OFFSET, PAYLOAD_OFFSET + 6, 1 << 42])
def test_a_file_that_lies_about_its_size_is_corrupt_before_a_buffer_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: int
) -> None:
    path = tmp_path / "slab"
    path.write_bytes(slab_file(WHO, TEXT, b"payload"))
    os.truncate(path, size_bytes)
    monkeypatch.setattr(ReadBuffers, "take", None)
    with pytest.raises(CorruptSlab):
        read(path, ReadBuffers())


def test_a_file_that_ends_while_it_is_read_is_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "slab"
    path.write_bytes(slab_file(WHO, TEXT, os.urandom(2 * slab._READ_BYTES)))
    real = os.preadv

    def cut(*arguments: Any) -> int:
        os.truncate(path, slab._READ_BYTES + 5)
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", cut)
    with pytest.raises(CorruptSlab, match="the file ends at"):
        read(path, ReadBuffers())


def test_a_buffer_is_used_again_when_nobody_looks_at_it_and_not_before() -> None:
    buffers = ReadBuffers()
    small = buffers.take(1000)
    with memoryview(small)[:10]:
        buffers.give_back(small)
        assert buffers.take(1000) is not small
    buffers.give_back(small)
    assert buffers.take(1000) is small
    buffers.give_back(small)
    assert len(buffers.take(10_000_000)) >= 10_000_000


def test_memory_that_is_not_there_for_a_buffer_is_a_fault_of_the_cache() -> None:
    with pytest.raises(OSError, match="Cannot allocate memory"):
        ReadBuffers().take(1 << 60)


# ---- kept


def test_a_mapping_is_kept_with_what_is_handed_out_for_it(space: Namespace, place: int) -> None:
    kept: KeptSlabs[str] = KeptSlabs(1 << 20)
    kept.put(b"a", mapped(space, "a"), "the handle of a")
    assert kept.get(b"a") == "the handle of a"
    assert kept.get(b"b") is None
    kept.clear()
    assert kept.get(b"a") is None


def test_the_mapping_used_longest_ago_makes_way(space: Namespace, place: int) -> None:
    size_bytes = len(slab_file(WHO, TEXT, b"payload"))
    kept: KeptSlabs[int] = KeptSlabs(2 * size_bytes)
    for name, used in (("a", 2), ("b", 1)):
        slab = mapped(space, name)
        slab.used = used
        kept.put(name.encode(), slab, 1)
    kept.put(b"c", mapped(space, "c"), 1)
    assert [name for name in (b"a", b"b", b"c") if kept.get(name)] == [b"a", b"c"]
    assert kept.kept_bytes == 2 * size_bytes
    kept.put(b"a", mapped(space, "a2"), 2)
    assert kept.get(b"a") == 2
    assert kept.kept_bytes == 2 * size_bytes
    kept.clear()
    assert kept.kept_bytes == 0


def test_a_slab_beyond_the_limit_is_used_once_and_not_kept(space: Namespace, place: int) -> None:
    kept: KeptSlabs[int] = KeptSlabs(100)
    made = mapped(space, "a")
    kept.put(b"a", made, 1)
    assert kept.get(b"a") is None
    assert kept.kept_bytes == 0
    assert bytes(made.image.payload) == b"payload"


def test_what_somebody_still_looks_at_is_let_go_and_reported(space: Namespace, place: int) -> None:
    kept: KeptSlabs[int] = KeptSlabs(1 << 20)
    made = mapped(space, "a", payload=b"still here")
    size_bytes = made.size_bytes
    view = made.image.payload
    kept.put(b"a", made, 1)
    del made
    kept.let_go_where(lambda handle: handle == 1)
    assert (kept.kept_bytes, kept.orphaned_bytes) == (0, size_bytes)
    (space.names.directory / "a").unlink()
    assert bytes(view) == b"still here"
    del view
    gc.collect()
    assert kept.orphaned_bytes == 0


def test_only_what_has_left_is_let_go(space: Namespace, place: int) -> None:
    kept: KeptSlabs[bytes] = KeptSlabs(1 << 20)
    for name in (b"a", b"b"):
        kept.put(name, mapped(space, name.decode()), name)
    kept.let_go_where(lambda handle: handle == b"a")
    assert kept.get(b"a") is None
    assert kept.get(b"b") == b"b"
    kept.clear()


def test_a_directory_that_holds_unnamed_slabs_looks_empty(space: Namespace, place: int) -> None:
    made = [UnnamedSlab(place, PAYLOAD_OFFSET, PAYLOAD_OFFSET + 64) for _ in range(3)]
    assert list(Path(space.names.directory).iterdir()) == []
    for each in made:
        each.close()
