"""ram_file: slabs as files in /dev/shm. They outlive coordinator and workers, until reboot.

Owner, invariants: tiers.base.
Leans on
    link(2) fails with EEXIST instead of replacing; rename(2) replaces in one step.
    An unlinked file's pages stay valid for whoever maps them.
Leaves out: the mapping of slabs (slab), which happens in workers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from shmcache import kvc, shm
from shmcache.errors import CorruptSlab, ForeignObject
from shmcache.protocol import Tier as TierNumber
from shmcache.shm import Names
from shmcache.tiers.base import Broken, HandOver, Slab, Tier, file_name

_HEAD_BYTES = 4096
_SUFFIX = ".kvc"
_NAME_LENGTH = 64 + len(_SUFFIX)


class RamFileTier(Tier):
    """The directory `ram_file/` of a namespace."""

    number = TierNumber.RAM_FILE

    def __init__(self, names: Names) -> None:
        path = names.tier("ram_file")
        shm.make_directory(path)
        shm.make_directory(path / "in")
        self._directory_fd = shm.open_directory(path)
        self._in_fd = shm.open_directory(path / "in")

    def scan(self) -> Iterator[Slab | Broken]:
        """Every file at a row's name, validated by its first 4 KiB."""
        for name in _names(self._directory_fd):
            if len(name) != _NAME_LENGTH or not name.endswith(_SUFFIX):
                continue
            try:
                key = bytes.fromhex(name.removesuffix(_SUFFIX))
            except ValueError:
                continue
            try:
                yield _read(self._directory_fd, name, key)
            except CorruptSlab as error:
                yield Broken(key, str(error), damaged=self._is_ours(name))
            except ForeignObject as error:
                yield Broken(key, str(error), damaged=False)
            except FileNotFoundError:
                continue

    def handed_over(self) -> Iterator[HandOver]:
        """Every slab that waits in `in/`."""
        for name in _names(self._in_fd):
            if (handover := HandOver.from_name(name)) is not None:
                yield handover

    def check(self, handover: HandOver) -> Slab:
        """Metadata and size of a slab in `in/`."""
        return _read(self._in_fd, handover.name, handover.key)

    def link(self, handover: HandOver) -> Slab:
        """Give it the row's name, or adopt the valid one that has it."""
        name = file_name(handover.key)
        try:
            os.link(handover.name, name, src_dir_fd=self._in_fd, dst_dir_fd=self._directory_fd)
        except FileExistsError:
            return self._adopt_or_replace(handover, name)
        self.refuse(handover)
        return _read(self._directory_fd, name, handover.key)

    def refuse(self, handover: HandOver) -> None:
        """Unlink a slab in `in/`."""
        shm.unlink_quietly(handover.name, dir_fd=self._in_fd)

    def remove(self, key: bytes) -> bool:
        """Unlink a row's slab."""
        return shm.unlink_quietly(file_name(key), dir_fd=self._directory_fd)

    def write_use(self, key: bytes, hit_count: int, last_used_unix_s: int) -> None:
        """Store the two mutable fields."""
        try:
            fd = shm.open_owned(file_name(key), os.O_RDWR, dir_fd=self._directory_fd)
        except (FileNotFoundError, ForeignObject):
            return
        try:
            kvc.write_use(fd, hit_count, last_used_unix_s)
        finally:
            os.close(fd)

    def close(self) -> None:
        """End the view."""
        os.close(self._directory_fd)
        os.close(self._in_fd)

    def _is_ours(self, name: str) -> bool:
        """Whether a damaged file was of this version: another version's rows are not ours to judge."""
        fd = shm.open_owned(name, os.O_RDONLY, dir_fd=self._directory_fd)
        try:
            return kvc.version_of(os.pread(fd, _HEAD_BYTES, 0)) in (None, kvc.VERSION)
        finally:
            os.close(fd)

    def _adopt_or_replace(self, handover: HandOver, name: str) -> Slab:
        try:
            there = _read(self._directory_fd, name, handover.key)
        except (CorruptSlab, ForeignObject):
            os.rename(handover.name, name, src_dir_fd=self._in_fd, dst_dir_fd=self._directory_fd)
            return _read(self._directory_fd, name, handover.key)
        self.refuse(handover)
        return there


def _read(directory_fd: int, name: str, key: bytes) -> Slab:
    fd = shm.open_owned(name, os.O_RDONLY, dir_fd=directory_fd)
    try:
        slab_bytes = os.fstat(fd).st_size
        head = kvc.parse_head(os.pread(fd, _HEAD_BYTES, 0), slab_bytes)
    finally:
        os.close(fd)
    if head.meta.key != key:
        raise CorruptSlab(f"{name} holds the row of another key, {head.meta.key.hex()}")
    return Slab(head, slab_bytes)


def _names(directory_fd: int) -> list[str]:
    """Every name in an open directory, sorted, so that a scan goes the same way each time."""
    with os.scandir(directory_fd) as entries:
        return sorted(entry.name for entry in entries)
