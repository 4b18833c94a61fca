"""The control page: which epoch is the namespace in, and does its coordinator live?

    offset size name     writer       meaning
    0      8    magic    maker        "shmcctl2"
    8      8    layout   coordinator  hash of all layouts in shared memory and of the messages
    16     8    epoch    coordinator  random, 63 bits; names the index segment; 0 = none, look again
    24     8    forget   coordinator  number of forget commands so far; never goes back
    32     8    clear    coordinator  the same for decisions; never goes back
    40     8    pid      coordinator  for people to read; liveness is the lock
    48     8    started  coordinator  Unix seconds of the coordinator's start

Owner: the first coordinator makes it, complete, and nobody but `shmcache clean` ever unlinks it; so every
mapping ever made of it, by whatever process, stays the one that the next coordinator writes.
Readers: everybody, through a read-only mapping.
Invariants
    I1  epoch is stored last: whoever reads it not 0 finds layout, forget, clear and index complete.
    I2  A coordinator lives if and only if the file's kernel lock is held.
Leans on
    Aligned 8-byte stores through memoryview.cast("Q") are seen whole.
    On x86-64 stores become visible in program order; elsewhere the index's check words catch a
    reader that sees the epoch first.
Leaves out: what an epoch's index holds (index), how to reach the coordinator (mq).
"""

from __future__ import annotations

import os
import struct
import sys
from enum import IntEnum
from pathlib import Path

from shmcache import shm
from shmcache.errors import AlreadyRunning, LayoutMismatch, NoCoordinator
from shmcache.shm import Mapping, Names

SIZE_BYTES = 4096
_MAGIC = int.from_bytes(b"shmcctl2", "little")


class Word(IntEnum):
    """Index of each 8-byte word."""

    MAGIC = 0
    LAYOUT = 1
    EPOCH = 2
    FORGET = 3
    CLEAR = 4
    PID = 5
    STARTED = 6


EPOCH_WORD = int(Word.EPOCH)
"""A plain int, because every lookup begins with this load."""


class ControlPage:
    """A worker's view: read-only words and the question whether a coordinator lives."""

    def __init__(self, fd: int, *, writable: bool = False) -> None:
        self._fd = fd
        self._mapping = Mapping(fd, SIZE_BYTES, writable=writable)
        self.words = self._mapping.words

    @classmethod
    def open(cls, names: Names) -> ControlPage:
        """Open the namespace's page. Raises NoCoordinator if there never was one, ForeignObject."""
        try:
            os.close(shm.open_directory(names.directory))
            fd = shm.open_owned(names.control, os.O_RDONLY)
        except FileNotFoundError as error:
            raise NoCoordinator(names.namespace) from error
        try:
            page = cls(fd) if os.fstat(fd).st_size >= SIZE_BYTES else None
        except BaseException:
            os.close(fd)
            raise
        if page is None:
            os.close(fd)
            raise NoCoordinator(names.namespace)  # damaged: the next coordinator makes it good
        return page

    def epoch(self, layout: int) -> int:
        """The current epoch, 0 if none. Raises LayoutMismatch if the other side is built otherwise."""
        epoch = self.words[Word.EPOCH]
        if epoch and (theirs := self.words[Word.LAYOUT]) != layout:
            raise LayoutMismatch(layout, theirs)
        return epoch

    @property
    def forget(self) -> int:
        """The number of forget commands so far."""
        return self.words[Word.FORGET]

    def coordinator_lives(self) -> bool:
        """Asks the kernel, so it costs a system call: never on a hit."""
        return shm.is_locked(self._fd)

    def is_current(self, names: Names) -> bool:
        """Whether this is still the namespace's page: `shmcache clean` removes it with everything."""
        return _is_at(self._fd, names.control)

    def close(self) -> None:
        """End this view. Closing the coordinator's own view gives up its lock."""
        self._mapping.close()
        os.close(self._fd)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


class OwnedControlPage(ControlPage):
    """The coordinator's view: holds the lock that says it lives, and writes the words."""

    @classmethod
    def acquire(cls, names: Names) -> OwnedControlPage:
        """Make the page where there is none, and take its lock. Raises AlreadyRunning."""
        content = struct.pack("<Q", _MAGIC)
        while True:
            shm.make_complete_file(names.control, content, size_bytes=SIZE_BYTES)
            fd = shm.open_owned(names.control, os.O_RDWR)
            if not shm.try_lock(fd):
                pid = int.from_bytes(os.pread(fd, 8, 8 * Word.PID), sys.byteorder)
                os.close(fd)
                raise AlreadyRunning(names.namespace, pid)
            if _is_at(fd, names.control):
                break
            os.close(fd)  # `shmcache clean` has removed it between our open and our lock.
        if os.fstat(fd).st_size != SIZE_BYTES:
            os.ftruncate(fd, SIZE_BYTES)
            shm.allocate(fd, SIZE_BYTES)
        page = cls(fd, writable=True)
        if page.words[Word.MAGIC] != _MAGIC:
            # Something else was written here. None of its words is believed, least of all a number
            # that never goes back.
            page._mapping.bytes[:] = bytes(SIZE_BYTES)
        page.words[Word.MAGIC] = _MAGIC
        page.words[Word.PID] = os.getpid()
        return page

    def store_forget(self, number: int) -> None:
        """Show the forget number, unless it would go back."""
        self.words[Word.FORGET] = max(number, self.words[Word.FORGET])

    def close_epoch(self) -> None:
        """Say that there is no index, before the old one goes or the other words change."""
        self.words[Word.EPOCH] = 0

    def open_epoch(self, epoch: int, layout: int, started_unix_s: int) -> None:
        """Announce a complete index: all other words first, the epoch last (I1).

        Within one build the new epoch takes the old one's place: who looks meanwhile finds one of the two.
        """
        if self.words[Word.LAYOUT] != layout:
            self.words[Word.EPOCH] = 0
            self.words[Word.LAYOUT] = layout
        self.words[Word.STARTED] = started_unix_s
        self.words[Word.EPOCH] = epoch
