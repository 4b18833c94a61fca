"""disk: slabs as files in a directory of the user's. They live until they are deleted.

    DIR/<namespace>/.lock              held while a coordinator uses the directory
    DIR/<namespace>/.forget            the forget number, in hex; outlives the control page
    DIR/<namespace>/<2 hex>/<key>.kvc  256 directories, so that none grows too long

Taking a slab, in this order; a crash between any two steps leaves no name on the disk:

    1. file without a name on the disk   2. space (ENOSPC here, not half-way)   3. copy, in the kernel
    4. fdatasync   5. link   6. fsync of the directory   7. the hand-over in /dev/shm goes

Owner: the coordinator's disk lane. Readers: workers, by positioned reads; they verify at every read.
Invariants
    I1  A name on the disk means complete and synchronised.
    I2  A failed copy or fsync discards the file: after a failed fsync nobody knows what the disk has.
Leans on
    sendfile(2) copies between file systems without a pass through this process.
    O_TMPFILE, which ext4, xfs, btrfs, tmpfs and overlayfs have.
Leaves out: budgets, and what deserves a place on the disk (coordinator).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from shmcache import shm
from shmcache.errors import ConfigError, CorruptSlab, ForeignObject
from shmcache.protocol import Tier as TierNumber
from shmcache.shm import Names
from shmcache.tiers.base import HandOver, Slab, Tier, file_name, is_ours_to_remove, set_aside

log = logging.getLogger(__name__)

_CHUNK_BYTES = 4 << 20
_SYNC_BYTES = 64 << 20  # of a larger file at once: one wait for all of it would look like a lane that hangs
_LOCK = ".lock"
_FORGET = ".forget"


class DiskTier(Tier):
    """A directory on a file system that survives a reboot."""

    number = TierNumber.DISK

    def __init__(self, names: Names, directory: Path, write_bytes_per_s: int = 0) -> None:
        """Open or make the directory. Raises ForeignObject, OSError.

        write_bytes_per_s bounds the copy, 0 does not.
        """
        super().__init__(names.tier("disk", 0) / "in")
        self._write_bytes_per_s = write_bytes_per_s
        self.path = directory / names.namespace
        try:
            shm.make_directory(self.path)
            self._root_fd = shm.open_directory(self.path)
        except BaseException:
            os.close(self.in_fd)
            raise
        self._fan_out: dict[int, int] = {}
        self._unusable: set[int] = set()
        self._unsynchronised: set[int] = set()

    def directory_fd(self, key: bytes) -> int:
        """The directory of the key's first byte, made at first use."""
        first = key[0]
        if first not in self._fan_out:
            path = disk_path(self.path, key).parent
            shm.make_directory(path)
            os.fsync(self._root_fd)
            self._fan_out[first] = shm.open_directory(path)
        return self._fan_out[first]

    def directory_fds(self) -> Iterator[int]:
        """Those that exist and can be opened; a log line names each that cannot, once."""
        for first in range(256):
            path = self.path / f"{first:02x}"
            try:
                fd = self.directory_fd(bytes([first])) if path.is_dir() else -1
            except (OSError, ForeignObject) as error:
                if first not in self._unusable:
                    log.warning("%s is left alone: %s", path, error)
                    self._unusable.add(first)
                continue
            if fd >= 0:
                yield fd

    def link(self, handover: HandOver) -> Slab:
        """Copy, synchronise, name (the numbered steps above)."""
        directory_fd = self.directory_fd(handover.key)
        name = file_name(handover.key)
        slab = self.check(handover)
        source = shm.open_owned(handover.name, os.O_RDONLY, dir_fd=self.in_fd)
        try:
            target = shm.make_unnamed(directory_fd)  # 1
            try:
                size_bytes = os.fstat(source).st_size
                shm.allocate(target, size_bytes)  # 2
                self._copy(source, target, size_bytes)  # 3
                os.fdatasync(target)  # 4
                there = self._name(target, directory_fd, handover, slab)  # 5
            finally:
                os.close(target)
        finally:
            os.close(source)
        try:
            os.fsync(directory_fd)  # 6
        except OSError:
            if there is None:
                shm.unlink_quietly(name, dir_fd=directory_fd)
            raise
        self.refuse(handover)  # 7
        return there or slab

    def remove(self, key: bytes) -> bool:
        """Unlink; a power loss may undo it until sync_removals."""
        self._unsynchronised.add(self.directory_fd(key))
        return super().remove(key)

    def remove_aside(self, key: bytes) -> bool:
        """As remove."""
        self._unsynchronised.add(self.directory_fd(key))
        return super().remove_aside(key)

    def sync_removals(self) -> None:
        """fsync of each directory that has lost a name."""
        while self._unsynchronised:
            fd = next(iter(self._unsynchronised))
            os.fsync(fd)
            self._unsynchronised.discard(fd)
            self.move()

    def set_aside(self, key: bytes) -> None:
        """Rename, and synchronise the directory: after a power loss it is no row again either."""
        super().set_aside(key)
        os.fsync(self.directory_fd(key))

    def store_forget(self, number: int) -> None:
        """Replace the number in one step, and synchronise."""
        fd = shm.make_unnamed(self._root_fd)
        try:
            shm.write_all(fd, f"{number:x}".encode(), 0)
            os.fsync(fd)
            shm.unlink_quietly(f"{_FORGET}.new", dir_fd=self._root_fd)
            shm.give_name(fd, self._root_fd, f"{_FORGET}.new")
        finally:
            os.close(fd)
        try:
            os.rename(f"{_FORGET}.new", _FORGET, src_dir_fd=self._root_fd, dst_dir_fd=self._root_fd)
        except OSError:
            shm.unlink_quietly(f"{_FORGET}.new", dir_fd=self._root_fd)
            raise
        os.fsync(self._root_fd)

    def close(self) -> None:
        """End the view."""
        for fd in (*self._fan_out.values(), self._root_fd):
            os.close(fd)
        self._fan_out.clear()
        super().close()

    def _copy(self, source: int, target: int, size_bytes: int) -> None:
        began_s, done_bytes, synchronised_bytes = time.monotonic(), 0, 0
        while done_bytes < size_bytes:
            count = min(_CHUNK_BYTES, size_bytes - done_bytes)
            copied_bytes = _send(source, target, done_bytes, count)
            if copied_bytes == 0:
                raise CorruptSlab(f"the hand-over ends at {done_bytes} of {size_bytes} bytes")
            done_bytes += copied_bytes
            self.move()
            if done_bytes - synchronised_bytes >= _SYNC_BYTES:
                os.fdatasync(target)
                synchronised_bytes = done_bytes
                self.move()
            if self._write_bytes_per_s:
                due_s = began_s + done_bytes / self._write_bytes_per_s
                time.sleep(max(0.0, due_s - time.monotonic()))

    def _name(self, target: int, directory_fd: int, handover: HandOver, slab: Slab) -> Slab | None:
        """Give the name, unless the same slab has it already: that one then."""
        name = file_name(handover.key)
        try:
            shm.give_name(target, directory_fd, name)
        except FileExistsError:
            if (there := self._adopted(handover, slab)) is not None:
                return there
            if is_ours_to_remove(directory_fd, name):
                os.unlink(name, dir_fd=directory_fd)
            else:
                set_aside(directory_fd, name)
            shm.give_name(target, directory_fd, name)
        return None


def disk_path(directory: Path, key: bytes) -> Path:
    """Where the slab of a key lies below `DIR/<namespace>`."""
    return directory / f"{key[0]:02x}" / file_name(key)


def disk_directory(names: Names) -> Path:
    """`DIR/<namespace>` of a running coordinator, for its workers. Raises OSError, ForeignObject."""
    fd = shm.open_owned(names.disk_link, os.O_RDONLY)
    try:
        return Path(os.fsdecode(os.read(fd, 4096)))
    finally:
        os.close(fd)


def announce_directory(names: Names, directory: Path) -> None:
    """Tell workers where the disk tier is; a new file each time, so that no reader sees half a path.

    Raises ForeignObject, OSError.
    """
    with contextlib.suppress(FileNotFoundError):
        os.close(shm.open_owned(names.disk_link, os.O_RDONLY))
        names.disk_link.unlink()
    content = os.fsencode(directory.resolve() / names.namespace)
    shm.make_complete_file(names.disk_link, content, size_bytes=len(content))


def _send(source: int, target: int, offset: int, count: int) -> int:
    """Copy in the kernel, or by a read and a write where it does not offer that."""
    os.lseek(target, offset, os.SEEK_SET)
    try:
        return os.sendfile(target, source, offset, count)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
    chunk = os.pread(source, count, offset)
    shm.write_all(target, chunk, offset)
    return len(chunk)


def lock_directory(names: Names, directory: Path) -> int:
    """A descriptor that keeps other coordinators out of the directory for as long as it is open.

    Not part of the tier: a tier whose thread hangs is opened anew while the old one still stands.
    Raises ForeignObject, OSError; ConfigError if another coordinator uses it.
    """
    path = directory / names.namespace
    shm.make_directory(path)
    shm.make_complete_file(path / _LOCK, b"", size_bytes=0)
    fd = shm.open_owned(path / _LOCK, os.O_RDWR)
    if shm.try_lock(fd):
        return fd
    os.close(fd)
    raise ConfigError(f"disk directory {path} is used by another coordinator: start with another --disk-dir")


def stored_forget(names: Names, directory: Path) -> int:
    """The forget number that lies beside the slabs; 0 where none does, or something else."""
    path = directory / names.namespace / _FORGET
    try:
        fd = shm.open_owned(path, os.O_RDONLY)
    except FileNotFoundError:
        return 0
    except (ForeignObject, OSError) as error:
        log.warning("no forget number is read: %s", error)
        return 0
    try:
        content = os.read(fd, 64)
    finally:
        os.close(fd)
    if re.fullmatch(rb"[0-9a-f]{1,15}", content) is None:
        log.warning("%s holds no forget number", path)
        return 0
    return int(content, 16)
