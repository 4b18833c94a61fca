"""Which calls into the system does an operation make, and what if one of them fails?

    record   one clean run notes every call that our code makes, and from where
    fail     the run again, once for each call and error: that call fails, and no other

A call has a name by where it is made: its process, its function, and the functions of ours that led there.
So it is found again whatever other threads do in between, and a call that is new in the code is in the next
record. The nth call from one place is a call of its own.

    word 0   what is done: nothing, record, fail
    word 1   hash of the call that is to fail
    word 2   which time it fails
    word 3   how it fails: an errno, or SHORT
    word 4   times that it has been made since

The words are shared with every process that is forked after the board was made.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import blake2b
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from support import ROOT

SHORT = 0
"""Instead of an errno: the call moves half of the bytes."""

_NOTHING, _RECORD, _FAIL = range(3)
_OURS = str(ROOT / "shmcache")
_MOVES_BYTES = {"read", "write", "pread", "preadv", "pwrite", "sendfile", "copy_file_range"}
_LOOPS = ("Coordinator.sweep",)
_CHANCE = ("Server.", "Clients.", "Coordinator.client_gone", "Coordinator.tick", "Coordinator.outcomes")
_CALLS: dict[ModuleType, tuple[str, ...]] = {
    os: (
        *_MOVES_BYTES,
        *("open", "link", "rename", "replace", "unlink", "mkdir", "rmdir", "mkfifo", "scandir", "listdir"),
        *("stat", "lstat", "fstat", "statvfs", "chmod", "fchmod", "lseek"),
        *("fsync", "fdatasync", "ftruncate", "posix_fallocate", "posix_fadvise"),
    ),
    mmap: ("mmap",),
}


class Call(NamedTuple):
    """The nth call from one place. place: process, function, line, and who called whom."""

    place: str
    nth: int

    @property
    def function(self) -> str:
        """The function of the system that is called."""
        return self.place.split(" ")[1]

    @property
    def is_the_loops(self) -> bool:
        """Whether a coordinator makes it again and again, whatever anybody asks."""
        return any(loop in self.place for loop in ("Clients.look", "Tier.keys", *_LOOPS))

    def ways(self, errors: tuple[int, ...]) -> list[int]:
        """How it can fail."""
        return [*errors, *([SHORT] if self.function in _MOVES_BYTES else [])]


class Board:
    """What is recorded and what fails, for all processes of a test."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 4096)
        self._words = memoryview(self._shared).cast("Q")
        self._record = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self._write, self._fd = os.write, self._record.fileno()

    def install(self, process: str) -> list[tuple[ModuleType, str, Any]]:
        """Watch all calls of this process from now on; what was there before."""
        before = []
        for module, names in _CALLS.items():
            for name in names:
                real = getattr(module, name)
                before.append((module, name, real))
                setattr(module, name, self._watched(process, name, real))
        return before

    @contextlib.contextmanager
    def installed(self, process: str) -> Iterator[None]:
        """The same, for a while."""
        before = self.install(process)
        try:
            yield
        finally:
            for module, name, real in before:
                setattr(module, name, real)

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Call]]:
        """All calls that are made meanwhile, filled in at the end."""
        calls: list[Call] = []
        os.lseek(self._fd, 0, os.SEEK_SET)
        os.ftruncate(self._fd, 0)
        self._words[0] = _RECORD
        try:
            yield calls
        finally:
            self._words[0] = _NOTHING
        counted = Counter(os.pread(self._fd, os.fstat(self._fd).st_size, 0).decode().splitlines())
        for place, count in counted.items():
            # How often a loop that has no end comes by is chance; once is enough.
            times = 1 if Call(place, 1).is_the_loops else count
            calls += [Call(place, nth) for nth in range(1, times + 1)]

    def has_recorded(self, name: str) -> bool:
        """Whether one of our functions of this name is in the record already."""
        return name in os.pread(self._fd, os.fstat(self._fd).st_size, 0).decode()

    @contextlib.contextmanager
    def failing(self, call: Call, error: int) -> Iterator[Callable[[], bool]]:
        """That call fails, once; yields whether it has."""
        for word, value in enumerate((_hash(call.place), call.nth, error, 0), start=1):
            self._words[word] = value
        self._words[0] = _FAIL
        try:
            yield lambda: self._words[4] >= call.nth
        finally:
            self._words[0] = _NOTHING

    def is_failing(self) -> bool:
        """Whether a call is to fail, or has."""
        return self._words[0] == _FAIL

    def close(self) -> None:
        """Nothing of it is left."""
        self._words.release()
        self._shared.close()
        self._record.close()

    def _watched(self, process: str, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        words = self._words

        def watched(*arguments: Any, **options: Any) -> Any:
            state = words[0]
            if state == _NOTHING or not (place := _place(process, name)):
                return real(*arguments, **options)
            if state == _RECORD:
                self._write(self._fd, f"{place}\n".encode())
            elif _hash(place) == words[1]:
                words[4] += 1
                if words[4] == words[2]:
                    return _failed(name, real, arguments, options, words[3])
            return real(*arguments, **options)

        return watched


def _failed(name: str, real: Callable[..., Any], arguments: Any, options: Any, error: int) -> Any:
    if error != SHORT:
        raise OSError(error, os.strerror(error))
    some = list(arguments)
    if name in ("pread", "read"):
        some[1] = max(1, some[1] // 2)
    elif name in ("sendfile", "copy_file_range"):
        at = 3 if name == "sendfile" else 2
        some[at] = max(1, some[at] // 2)
    elif name == "preadv":
        some[1] = [view[: max(1, len(view) // 2)] for view in some[1][:1]]
    else:
        some[1] = some[1][: max(1, len(some[1]) // 2)]
    return real(*some, **options)


def _place(process: str, name: str) -> str:
    """Where a call is made; empty where it is not made by our code."""
    frame: FrameType | None = sys._getframe(2)
    line, names = 0, []
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_OURS):
            line = line or frame.f_lineno
            names.append(code.co_qualname)
        frame = frame.f_back
    # Which turn of the server's loop comes to it first is chance, but for what it does all the time.
    turn = [loop for loop in _LOOPS if loop in names]
    led = [names[0], *(caller for caller in names[1:] if not caller.startswith(_CHANCE))] if names else []
    return f"{process} {name} {line} {'<'.join([*led, *turn])}" if names else ""


def _hash(place: str) -> int:
    return int.from_bytes(blake2b(place.encode(), digest_size=8).digest(), "little")
