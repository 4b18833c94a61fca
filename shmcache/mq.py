"""Bytes over the namespace's POSIX message queue: how does a worker reach the coordinator?

One queue per namespace, ten messages of 8,192 bytes, so that one queue serves any number of workers
within the default limits. It keeps its name over restarts of the coordinator.

Owner: the coordinator makes it; nobody unlinks it but `shmcache clean`.
Invariants
    I1  No call here waits inside the kernel: a signal handler's exception is never swallowed.
    I2  A queue of another owner or mode is never used.
Leans on
    A POSIX message queue descriptor is a file descriptor: fstat and poll work on it.
    O_NONBLOCK belongs to the open description: a forked child opens its own.
    mq_open charges max_messages x (message_size + 96) against RLIMIT_MSGQUEUE of the user and says
    EMFILE when that is spent.
Leaves out: what the bytes mean (protocol).
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import posix_ipc

from shmcache.errors import ConfigError, ForeignObject, NoCoordinator, QueueLimit
from shmcache.protocol import MESSAGE_BYTES
from shmcache.shm import Names

MAX_MESSAGES = 10
_OVERHEAD_BYTES = 96
_STEP_S = 0.002
_LIMITS = Path("/proc/sys/fs/mqueue")


class RequestQueue:
    """The worker's side: sends without waiting, or in short steps until a deadline."""

    def __init__(self, names: Names) -> None:
        """Open the queue. Raises NoCoordinator where there is none, ForeignObject, QueueLimit."""
        try:
            self._queue = _open(names, 0)
        except posix_ipc.ExistentialError as error:
            raise NoCoordinator(names.namespace) from error

    def send(self, message: bytes, deadline_ns: int = 0) -> bool:
        """Send, trying until a time.monotonic_ns() deadline; False if the queue stayed full.

        Short sleeps, not poll: poll(POLLOUT) wakes all senders for one free place.
        """
        while True:
            try:
                self._queue.send(message)
            except posix_ipc.BusyError:
                if time.monotonic_ns() >= deadline_ns:
                    return False
                time.sleep(_STEP_S)
            else:
                return True

    def close(self) -> None:
        """End this view; the queue stays."""
        self._queue.close()


class ServerQueue:
    """The coordinator's side: one reader, woken by poll on fileno()."""

    def __init__(self, names: Names) -> None:
        """Open or make the queue. Raises ForeignObject, QueueLimit, ConfigError."""
        self._queue = _open(names, posix_ipc.O_CREAT)

    def fileno(self) -> int:
        """For poll."""
        return int(self._queue.mqd)

    def receive(self) -> bytes | None:
        """The next message, or None when the queue is empty."""
        try:
            message, _priority = self._queue.receive()
        except posix_ipc.BusyError:
            return None
        return bytes(message)

    def close(self) -> None:
        """End this view; the queue stays."""
        self._queue.close()


def unlink(names: Names) -> bool:
    """Remove the queue's name; False if there was none. Whoever has it open sends into nowhere."""
    try:
        posix_ipc.unlink_message_queue(names.queue)
    except posix_ipc.ExistentialError:
        return False
    return True


def _open(names: Names, flags: int) -> posix_ipc.MessageQueue:
    max_messages = min(MAX_MESSAGES, _limit("msg_max", MAX_MESSAGES))
    try:
        queue = posix_ipc.MessageQueue(
            names.queue, flags, mode=0o600, max_messages=max_messages, max_message_size=MESSAGE_BYTES
        )
    except posix_ipc.PermissionsError as error:
        raise ForeignObject(f"message queue {names.queue}", -1, 0) from error
    except ValueError as error:
        raise ConfigError(
            f"message queue {names.queue}: messages of {MESSAGE_BYTES} bytes are needed and "
            f"fs.mqueue.msgsize_max is {_limit('msgsize_max', 0)}: raise it by sysctl"
        ) from error
    except OSError as error:
        # posix_ipc gives EMFILE and ENOSPC without a number. To open a queue that exists costs no bytes:
        # there EMFILE means what it says.
        if flags and error.errno is None:
            need_bytes = max_messages * (MESSAGE_BYTES + _OVERHEAD_BYTES)
            raise QueueLimit(need_bytes, resource.getrlimit(resource.RLIMIT_MSGQUEUE)[0]) from error
        raise
    try:
        _check(queue, names, created=bool(flags))
    except BaseException:
        queue.close()
        raise
    queue.block = False
    return queue


def _check(queue: posix_ipc.MessageQueue, names: Names, *, created: bool) -> None:
    found = os.fstat(queue.mqd)
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ForeignObject(f"message queue {names.queue}", found.st_uid, found.st_mode)
    if created:
        os.fchmod(queue.mqd, 0o600)
    if queue.max_message_size < MESSAGE_BYTES:
        raise ForeignObject(f"message queue {names.queue}", found.st_uid, found.st_mode)


def _limit(name: str, default: int) -> int:
    try:
        return int((_LIMITS / name).read_text())
    except (OSError, ValueError):
        return default
