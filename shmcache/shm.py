"""Owned objects in /dev/shm: create, open, map, lock, link, and refuse what is not ours.

Layout of one namespace; everything below the directory is mode 0600, directories 0700:

    /dev/shm/shmcache.<uid>.<namespace>/     control  pages/  fifo/
                                             ram.<epoch>/  ram_file/  disk/, each with in/
    /dev/shm/shmcache.<uid>.<namespace>.<epoch>.index            segment, and another .decisions
    /shmcache.<uid>.<namespace>                                  message queue

Owner: this module owns no object; it owns the rules by which all others are made and opened.
Invariants
    I1  Nothing is opened through a symbolic link, and nothing is used before fstat said: our uid,
        no permission for anybody else, the kind that we expect.
    I2  Modes are set after creation, on the object itself, so that no umask widens or narrows them.
    I3  A file without a name is complete before it gets one.
Leans on
    O_TMPFILE on tmpfs: a process killed before the link leaves nothing.
    link(2) of /proc/self/fd/N: Python passes AT_SYMLINK_FOLLOW only together with src_dir_fd.
    Open-file-description locks: held until the last descriptor of that open closes, whoever dies;
    F_OFD_GETLK asks without taking.
    posix_fallocate: ENOSPC here instead of SIGBUS at the first touch of a page.
Leaves out: what the bytes mean.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
import weakref
from pathlib import Path
from types import TracebackType

from shmcache.errors import ForeignObject

SHM_ROOT = Path("/dev/shm")

# struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid.
_FLOCK = struct.Struct("hhqqi4x")
_WHOLE_FILE = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_KINDS = {
    stat.S_IFREG: stat.S_ISREG,
    stat.S_IFDIR: stat.S_ISDIR,
    stat.S_IFIFO: stat.S_ISFIFO,
}


class Names:
    """Where everything of one namespace lies. Pure: it touches nothing."""

    def __init__(self, namespace: str, uid: int | None = None) -> None:
        self.namespace = namespace
        self._flat = f"shmcache.{os.geteuid() if uid is None else uid}.{namespace}"
        self.directory = SHM_ROOT / self._flat
        self.control = self.directory / "control"
        self.pages = self.directory / "pages"
        self.fifos = self.directory / "fifo"
        self.queue = f"/{self._flat}"

    def tier(self, name: str, epoch: int) -> Path:
        """A tier's directory in /dev/shm; `in/` below it takes the slabs that workers hand over.

        Only ram is the epoch's own: it ends with its coordinator.
        """
        return self.directory / (f"{name}.{epoch:016x}" if name == "ram" else name)

    @property
    def disk_link(self) -> Path:
        """A file that tells workers where the disk tier's directory is."""
        return self.directory / "disk" / "where"

    def index_segment(self, epoch: int) -> str:
        """Name of an epoch's index segment, as multiprocessing.shared_memory takes it."""
        return f"{self._flat}.{epoch:016x}.index"

    def decisions_segment(self, epoch: int) -> str:
        """Name of an epoch's decision table, as multiprocessing.shared_memory takes it."""
        return f"{self._flat}.{epoch:016x}.decisions"

    def epoch_segments(self) -> list[Path]:
        """Every segment of this namespace that exists, of whatever epoch.

        /dev/shm is open to all: what another user puts there under such a name is none.
        """
        named = SHM_ROOT.glob(f"{self._flat}.{'[0-9a-f]' * 16}.*")
        return sorted(path for path in named if _is_own_file(path))


def _is_own_file(path: Path) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def check_owned(fd: int, name: str, kind: int) -> os.stat_result:
    """fstat, or ForeignObject if the object is not ours alone or not of `kind` (I1)."""
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or found.st_mode & _OTHERS or not _KINDS[kind](found.st_mode):
        raise ForeignObject(name, found.st_uid, found.st_mode)
    return found


def make_directory(path: Path) -> None:
    """A directory of mode 0700 that is ours; an existing one is checked, never repaired."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        os.close(open_directory(path))
        return
    set_mode(path, 0o700)
    os.close(open_directory(path))


def make_fifo(path: Path) -> None:
    """A FIFO of mode 0600; one that is there already stays, and is checked when it is opened."""
    try:
        os.mkfifo(path, 0o600)
    except FileExistsError:
        return
    set_mode(path, 0o600)


def set_mode(path: Path, mode: int) -> None:
    """Set the mode of what we have just made, also where the umask took our own permissions (I2)."""
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        Path(f"/proc/self/fd/{fd}").chmod(mode)
    finally:
        os.close(fd)


def open_directory(path: Path) -> int:
    """Descriptor of a directory that is ours. Raises ForeignObject, or OSError if there is none."""
    return open_owned(path, os.O_RDONLY, kind=stat.S_IFDIR)


def open_owned(path: Path | str, flags: int, *, kind: int = stat.S_IFREG, dir_fd: int | None = None) -> int:
    """Open what exists, with O_NOFOLLOW, and check it (I1).

    Non-blocking, so that a FIFO planted in a file's place is refused instead of waited on.
    """
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    if kind == stat.S_IFDIR:
        flags |= os.O_DIRECTORY
    try:
        fd = os.open(path, flags, dir_fd=dir_fd)
    except OSError as error:
        # ELOOP: a symbolic link; ENOTDIR: a file where a directory should be; EACCES: another's.
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.EISDIR, errno.ENXIO):
            found = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
            raise ForeignObject(str(path), found.st_uid, found.st_mode) from error
        raise
    try:
        check_owned(fd, str(path), kind)
    except BaseException:
        os.close(fd)
        raise
    return fd


def make_unnamed(directory_fd: int) -> int:
    """A file without a name on the directory's file system, mode 0600."""
    fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=directory_fd)
    try:
        os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd


def give_name(fd: int, directory_fd: int, name: str) -> None:
    """Link an unnamed file into a directory. FileExistsError if the name is taken.

    link(2), not rename: rename would replace a newer winner silently.
    """
    os.link(f"/proc/self/fd/{fd}", name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)


def make_complete_file(path: Path, content: bytes, *, size_bytes: int) -> None:
    """A file that appears with all its content and space, or not at all (I3).

    An existing file of that name stays as it is; the caller opens whichever won.
    """
    directory_fd = open_directory(path.parent)
    try:
        fd = make_unnamed(directory_fd)
        try:
            if size_bytes:
                allocate(fd, size_bytes)
            write_all(fd, content, 0)
            with contextlib.suppress(FileExistsError):
                give_name(fd, directory_fd, path.name)
        finally:
            os.close(fd)
    finally:
        os.close(directory_fd)


def allocate(fd: int, size_bytes: int) -> None:
    """Reserve real pages; ENOSPC instead of a later SIGBUS. EINTR is tried again."""
    while True:
        try:
            return os.posix_fallocate(fd, 0, size_bytes)
        except InterruptedError:
            continue


def write_all(fd: int, content: bytes | memoryview, offset: int) -> None:
    """pwrite until all is written; short writes go on."""
    view = memoryview(content)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def unlink_quietly(path: Path | str, *, dir_fd: int | None = None) -> bool:
    """Unlink; False if it was gone already."""
    try:
        os.unlink(path, dir_fd=dir_fd)
    except FileNotFoundError:
        return False
    return True


def free_bytes(path: Path = SHM_ROOT) -> int:
    """Bytes that the file system of `path` can still give us."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def try_lock(fd: int) -> bool:
    """Take the whole file's open-file-description lock; False if another open holds it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WHOLE_FILE)
    except (BlockingIOError, PermissionError):
        return False
    return True


def is_locked(fd: int) -> bool:
    """Whether another open of this file holds its lock. Takes nothing."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _WHOLE_FILE)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


class Mapping:
    """A mapped file and views of it.

    `bytes` is the mapping as a memoryview of B, `words` the same as native 8-byte words.
    close() never raises while somebody keeps a view: the pages then live as long as the view does,
    and the first error of a failing caller is not hidden by a BufferError.
    """

    def __init__(self, fd: int, size_bytes: int, *, writable: bool) -> None:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        # mmap refuses an empty file with a ValueError; to us it is a file whose bytes are not valid.
        self._mmap: mmap.mmap | None = mmap.mmap(fd, size_bytes, access=access) if size_bytes else None
        self.bytes = memoryview(self._mmap if self._mmap is not None else b"")
        self.words = self.bytes[: size_bytes & ~7].cast("Q")

    @classmethod
    def open(cls, path: Path, *, writable: bool = False) -> Mapping:
        """Map an existing file that is ours, whole. The descriptor is not kept."""
        fd = open_owned(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            return cls(fd, os.fstat(fd).st_size, writable=writable)
        finally:
            os.close(fd)

    def close(self) -> weakref.ref[mmap.mmap] | None:
        """End our view; the kernel unmaps when the last view of anybody ends.

        Returns a reference that lives as long as somebody else's view does, None where nobody has one.
        """
        mapped, self._mmap = self._mmap, None
        if mapped is None:
            return None
        self.words.release()
        self.bytes.release()
        try:
            mapped.close()
        except BufferError:
            return weakref.ref(mapped)
        return None

    def __enter__(self) -> Mapping:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
