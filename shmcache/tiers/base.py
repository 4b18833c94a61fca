"""What the coordinator asks of a tier: which slabs are there, take this one, let that one go.

    <tier>/<key in hex>.kvc                            a row's slab, immutable; disk: <tier>/<2 hex>/…
    <tier>/<key in hex>.aside                          one that was found wrong: nobody's row, kept to look at
    /dev/shm/…/<tier>/in/<key>.<token>.<forget>        complete, handed over, not yet taken

Owner: the coordinator, for everything but the names in `in/`, which workers link.
Readers: workers map or read `<key>.kvc`.
Invariants
    I1  What has a name is complete; whoever linked it may be dead.
    I2  A tier reads at most the first 4 KiB of a slab.
    I3  A name that is not of these forms belongs to somebody else and is left alone.
    I4  A pin is the sticky bit of the slab's mode: it goes where the file goes, over restarts and reboots.
    I5  A tier never decides: it yields, checks, links and unlinks; the coordinator decides.
Leans on
    link(2) fails with EEXIST instead of replacing; rename(2) replaces in one step.
    An unlinked file's bytes stay valid for whoever has it open or mapped.
Leaves out: budgets, use order, the index; on which thread it runs (supervisor).
"""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shmcache import kvc, shm
from shmcache.errors import CorruptSlab, ForeignObject
from shmcache.protocol import Tier as TierNumber

log = logging.getLogger(__name__)

SUFFIX = ".kvc"
PROGRESS_S = 1.0  # between two lines of a scan
ASIDE_SUFFIX = ".aside"
_HANDOVER = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{16})\.([0-9a-f]{1,16})")
_ROW = re.compile(r"([0-9a-f]{64})\.kvc")
_KINDS = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK)
_ASIDE = re.compile(r"([0-9a-f]{64})\.aside")


class HandOver(msgspec.Struct, frozen=True):
    """The name of a slab in `in/`, taken apart."""

    key: bytes
    token: int
    forget: int

    @property
    def name(self) -> str:
        """The file name, in `in/`."""
        return f"{self.key.hex()}.{self.token:016x}.{self.forget:x}"

    @classmethod
    def from_name(cls, name: str) -> HandOver | None:
        """None for a stranger's name (I3)."""
        match = _HANDOVER.fullmatch(name)
        return cls(bytes.fromhex(match[1]), int(match[2], 16), int(match[3], 16)) if match else None


class Slab(msgspec.Struct, frozen=True):
    """A slab that validates: its metadata, its size in bytes, and whether it is pinned."""

    head: kvc.Head
    slab_bytes: int
    is_pinned: bool = False


class Broken(msgspec.Struct, frozen=True):
    """A file at a row's name that is no slab of this version, and why.

    damaged: it was one of ours; a slab of another version, or an object that is not ours, is not.
    """

    key: bytes
    why: str
    damaged: bool


class Tier(ABC):
    """A place for slabs; tests/contract runs over every implementation.

    moved_s is when the current job last got on (time.monotonic), for whoever supervises it.
    """

    number: TierNumber

    def __init__(self, in_path: Path) -> None:
        shm.make_directory(in_path.parent)
        shm.make_directory(in_path)
        self.in_path = in_path
        self.in_fd = shm.open_directory(in_path)
        self.moved_s = time.monotonic()

    @abstractmethod
    def directory_fd(self, key: bytes) -> int:
        """The open directory where the slab of a key lies. OSError where it cannot be opened."""

    @abstractmethod
    def directory_fds(self) -> Iterator[int]:
        """Every open directory that may hold slabs."""

    @abstractmethod
    def link(self, handover: HandOver) -> Slab:
        """Give it the row's name and take it out of `in/`; returns what lies there then.

        A file that is there already stays if it validates for this key and size, else it is replaced;
        a directory is set aside. Raises OSError, CorruptSlab, ForeignObject; nothing new is left then but
        the hand-over itself.
        """

    def move(self) -> None:
        """Say that the current job gets on."""
        self.moved_s = time.monotonic()

    def scan(self) -> Iterator[Slab | Broken]:
        """Every file at a row's name, judged by its first 4 KiB; a log line says how far it is."""
        files = [(fd, key) for fd in self.directory_fds() for key in _readable_keys(fd)]
        said_s = time.monotonic()
        for done, (directory_fd, key) in enumerate(files):
            if time.monotonic() - said_s >= PROGRESS_S:
                said_s = time.monotonic()
                log.info("tier %s: %d of %d files read", self.number.name.lower(), done, len(files))
            try:
                yield read_slab(directory_fd, file_name(key), key)
            except CorruptSlab as error:
                yield Broken(key, str(error), damaged=_is_ours(directory_fd, file_name(key)))
            except ForeignObject as error:
                yield Broken(key, str(error), damaged=False)
            except FileNotFoundError:
                continue
            except OSError as error:
                yield Broken(key, str(error), damaged=False)

    def keys(self) -> Iterator[bytes]:
        """The key of every file at a row's name, unread."""
        for directory_fd in self.directory_fds():
            yield from _keys(directory_fd)

    def read(self, key: bytes) -> Slab:
        """The slab at a row's name. Raises CorruptSlab, ForeignObject, FileNotFoundError."""
        return read_slab(self.directory_fd(key), file_name(key), key)

    def is_ours(self, key: bytes) -> bool:
        """Whether a damaged file at a row's name was of this version."""
        return _is_ours(self.directory_fd(key), file_name(key))

    def handed_over(self) -> Iterator[HandOver]:
        """Every slab that waits in `in/`. What is no file of ours there was not handed over (I3).

        None as long as the directory cannot be read: the coordinator looks again.
        """
        try:
            names = _names(self.in_fd)
        except OSError as error:
            log.warning("what is handed over to %s is not seen: %s", self.number.name.lower(), error)
            return
        for name in names:
            handover = HandOver.from_name(name)
            if handover is not None and _is_own(self.in_fd, name, stat.S_IFREG):
                yield handover

    def check(self, handover: HandOver) -> Slab:
        """Metadata and size of a slab in `in/`. Raises CorruptSlab, ForeignObject, FileNotFoundError."""
        return read_slab(self.in_fd, handover.name, handover.key)

    def refuse(self, handover: HandOver) -> None:
        """Unlink a slab in `in/`. One that stays is looked at again with all that waits there."""
        try:
            shm.unlink_quietly(handover.name, dir_fd=self.in_fd)
        except OSError as error:
            log.warning("%s stays for now: %s", handover.name, error)

    def remove(self, key: bytes) -> bool:
        """Unlink a row's slab; False if it was gone, or not ours (I3). Whoever maps it keeps its bytes."""
        fd = self.directory_fd(key)
        return is_ours_to_remove(fd, file_name(key)) and shm.unlink_quietly(file_name(key), dir_fd=fd)

    @abstractmethod
    def sync_removals(self) -> None:
        """What was removed stays removed, whatever happens now. Raises OSError; it is tried again then."""

    def set_aside(self, key: bytes) -> None:
        """Take a row's name from its slab and keep it under another. Raises OSError."""
        fd = self.directory_fd(key)
        os.rename(file_name(key), aside_name(key), src_dir_fd=fd, dst_dir_fd=fd)

    def remove_aside(self, key: bytes) -> bool:
        """Unlink a slab that was set aside; False if it was gone."""
        return shm.unlink_quietly(aside_name(key), dir_fd=self.directory_fd(key))

    def asides(self) -> list[tuple[bytes, int]]:
        """Key and size of every slab that was set aside, the oldest first."""
        found = []
        for directory_fd in self.directory_fds():
            for name in _names(directory_fd):
                if (match := _ASIDE.fullmatch(name)) is not None:
                    status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
                    found.append((status.st_ctime_ns, bytes.fromhex(match[1]), status.st_size))
        return [(key, size_bytes) for _, key, size_bytes in sorted(found)]

    def write_use(self, key: bytes, hit_count: int, last_used_unix_s: int) -> None:
        """Store the two mutable fields; a slab that is gone is no error."""
        try:
            fd = shm.open_owned(file_name(key), os.O_RDWR, dir_fd=self.directory_fd(key))
        except (FileNotFoundError, ForeignObject):
            return
        try:
            kvc.write_use(fd, hit_count, last_used_unix_s)
        finally:
            os.close(fd)

    def hand_on(self, handover: HandOver, in_path: Path) -> None:
        """Give a row's slab a second name, in another tier's `in/` on the same file system.

        Raises OSError (FileNotFoundError where the row has left), ForeignObject.
        """
        fd = self.directory_fd(handover.key)
        in_fd = shm.open_directory(in_path)
        try:
            os.link(file_name(handover.key), handover.name, src_dir_fd=fd, dst_dir_fd=in_fd)
        finally:
            os.close(in_fd)

    def set_pin(self, key: bytes, pinned: bool) -> None:
        """Pin a row's slab, or not any more (I4). Raises OSError, ForeignObject."""
        fd = shm.open_owned(file_name(key), os.O_RDONLY, dir_fd=self.directory_fd(key))
        try:
            os.fchmod(fd, 0o600 | (stat.S_ISVTX if pinned else 0))
            os.fsync(fd)
        finally:
            os.close(fd)

    def _adopted(self, handover: HandOver, slab: Slab) -> Slab | None:
        """What has the row's name already, if it is the same slab."""
        try:
            there = self.read(handover.key)
        except (CorruptSlab, ForeignObject):
            return None
        return there if there.slab_bytes == slab.slab_bytes else None

    @abstractmethod
    def store_forget(self, number: int) -> None:
        """Keep the forget number for as long as the slabs live."""

    def close(self) -> None:
        """End the view; everything stays."""
        os.close(self.in_fd)


def file_name(key: bytes) -> str:
    """The name of a row's slab in its directory."""
    return f"{key.hex()}{SUFFIX}"


def aside_name(key: bytes) -> str:
    """Its name once it was set aside."""
    return f"{key.hex()}{ASIDE_SUFFIX}"


def read_slab(directory_fd: int, name: str, key: bytes) -> Slab:
    """Judge a slab by its first 4 KiB. Raises CorruptSlab, ForeignObject, FileNotFoundError."""
    fd = shm.open_owned(name, os.O_RDONLY, dir_fd=directory_fd)
    try:
        found = os.fstat(fd)
        head = kvc.parse_head(_first_bytes(fd), found.st_size)
    finally:
        os.close(fd)
    if head.meta.key != key:
        raise CorruptSlab(f"{name} holds the row of another key, {head.meta.key.hex()}")
    return Slab(head, found.st_size, bool(found.st_mode & stat.S_ISVTX))


def _first_bytes(fd: int) -> bytes:
    """What a scan reads (I2); a short read is gone on with, so that only the file's end cuts it."""
    content = os.pread(fd, kvc.SCAN_BYTES, 0)
    while len(content) < kvc.SCAN_BYTES and (
        more := os.pread(fd, kvc.SCAN_BYTES - len(content), len(content))
    ):
        content += more
    return content


def _is_ours(directory_fd: int, name: str) -> bool:
    """Whether a damaged file was of this version: another version's rows are not ours to judge."""
    try:
        fd = shm.open_owned(name, os.O_RDONLY, dir_fd=directory_fd)
    except (OSError, ForeignObject):
        return False
    try:
        return kvc.version_of(_first_bytes(fd)) in (None, kvc.VERSION)
    except OSError:
        return False
    finally:
        os.close(fd)


def is_ours_to_remove(directory_fd: int, name: str) -> bool:
    """Whether it is neither a directory nor another user's: a link of ours is, whatever it points to."""
    return _is_own(directory_fd, name, *(kind for kind in _KINDS if kind != stat.S_IFDIR))


def _is_own(directory_fd: int, name: str, *kinds: int) -> bool:
    try:
        found = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    except OSError:
        return False
    return found.st_uid == os.geteuid() and stat.S_IFMT(found.st_mode) in kinds


def set_aside(directory_fd: int, name: str) -> None:
    """Rename what lies at a row's name: it is not ours to remove (I3), and the row needs the name."""
    aside = f"{name}.aside-{time.time_ns()}"
    os.rename(name, aside, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
    log.warning("what is not ours lay at the name of a row, and is %s now", aside)


def _readable_keys(directory_fd: int) -> Iterator[bytes]:
    """None of a directory that cannot be read."""
    try:
        yield from _keys(directory_fd)
    except OSError as error:
        log.warning("rows are not seen: %s", error)


def _keys(directory_fd: int) -> Iterator[bytes]:
    for name in _names(directory_fd):
        if (match := _ROW.fullmatch(name)) is not None:
            yield bytes.fromhex(match[1])


def _names(directory_fd: int) -> list[str]:
    """Every name in an open directory, sorted, so that a scan goes the same way each time."""
    with os.scandir(directory_fd) as entries:
        return sorted(entry.name for entry in entries)
