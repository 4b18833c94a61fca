"""A worker's page: what has this worker counted and touched, and where do its replies go?

    offset size  name      writer       meaning
    0      8     magic     worker       "shmcpag2"
    8      8     layout    worker       LAYOUT of whoever made the page
    16     8     client    worker       random id; the page's file name in hex
    24     8     pid       worker       for people to read; liveness is the lock
    32     8     progress  worker       moves with every decoded piece and written slab
    40     8     unnamed   worker       bytes of slabs without a name that it holds
    48     8     touches   worker       touches written so far, modulo nothing: the ring's head
    56     8     mapped    worker       bytes of slabs that it keeps mapped
    64     8     orphaned  worker       those of them whose row has left
    72     8     decided   worker       the head of the second ring
    128    128   asleep    worker       one word for each mailbox: 1 while its reader sleeps
    512    1024  counters  worker       one word for each name in COUNTERS
    4096   8192  ring      worker       1,024 touch words: slot | generation << 32
    12288  65536 mailboxes coordinator  16 of 4,096 bytes:
                                        0 request id (stored last) · 8 length · 12 crc32c · 16 body
    77824  8192  ring 2    worker       1,024 words of the decision table's entries, as in slots
    86016  1 MiB outbox    worker       what is too large for a message; not mapped, made when it is used

Owner: the worker, one page each, in pages/<client>. Made without a name, locked, then linked: there
is no moment in which a scanner could see it unlocked while its owner lives.
Readers: the coordinator, once a tick and at messages; `shmcache stat`.
Invariants
    I1  The owner lives if and only if the page's kernel lock is held; once it is free nothing of
        that process writes here any more.
    I2  Each word has one writer.
    I3  A reply is complete if and only if its mailbox's request id is the one that was asked:
        body, length and checksum are stored before it.
    I4  The ring is never full: an old touch is overwritten, and the reader counts what it missed.
Leans on
    A forked child that closes the descriptor does not free the lock of its parent; one that keeps
    it keeps the lock alive, hence the at-fork hook in client.
    A reader says that it sleeps before it looks for the last time, and a reply is there before its writer
    looks whether anybody sleeps: one of the two sees the other, as long as neither look passes the store
    before it. Both sides see to that; where it fails, the reader looks again by itself (connection).
    A FIFO opened for reading and writing never reports a hang-up; its bytes stay until read; a write
    to one that nobody reads fails with EPIPE or ENXIO.
Leaves out: the meaning of messages (protocol).
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import struct
import threading
import time
from enum import IntEnum

from crc32c import crc32c

from shmcache import shm
from shmcache.errors import ForeignObject, LayoutMismatch
from shmcache.patience import Patience
from shmcache.shm import Mapping, Names

MAILBOXES = 16
MAILBOX_BYTES = 4096
BODY_OFFSET = 16
BODY_BYTES = MAILBOX_BYTES - BODY_OFFSET
RING_WORDS = 1024
MAILBOX_OFFSET = 4096 + 8 * RING_WORDS
DECISION_RING_OFFSET = MAILBOX_OFFSET + MAILBOXES * MAILBOX_BYTES
SIZE_BYTES = DECISION_RING_OFFSET + 8 * RING_WORDS
OUTBOX_BYTES = (1 << 20) + 65_536
"""An outbox takes the largest decision, or a batch of ordinary ones."""

LOOK_ON_NS = 250_000

_FIFO_BYTES = 65_536  # all that a FIFO holds
_MAGIC = int.from_bytes(b"shmcpag2", "little")
_COUNTER_WORD = 512 // 8
_RING_WORD = 4096 // 8
ASLEEP_WORD = 128 // 8
_DECISION_RING_WORD = DECISION_RING_OFFSET // 8
_RING_READABLE = RING_WORDS - 1  # the oldest one may be in the middle of being overwritten
_REPLY_HEAD = struct.Struct("<II")

# Appended to, never reordered. `save_dropped_*` is a save that did not happen, and why. `passed_over_*` is a
# row that would not have been exact: the vocabulary cannot spell what follows it, it is the whole prompt and
# its last token cannot be decoded again, or its ids are more than the request can do with.
COUNTERS = (
    "hit_exact",
    "hit_partial",
    "miss_cold",
    "untracked",
    "uncached",
    "reused_tokens",
    "prefilled_tokens",
    "mapped_slabs",
    "read_slabs",
    "corrupt_rows",
    "restore_refused",
    "cache_faults",
    "waited",
    "save_handed_over",
    "save_present",
    "save_held",
    "save_dropped_no_space",
    "save_dropped_tier_down",
    "save_dropped_queue_full",
    "save_dropped_no_coordinator",
    "save_dropped_stale",
    "save_dropped_timeout",
    "save_dropped_cancelled",
    "save_dropped_failed",
    "foreign_objects",
    "prefill_us",
    "restore_us",
    "restored_bytes",
    "save_first_use",
    "disk_restore_us",
    "disk_restored_bytes",
    "save_dropped_slower_than_prefill",
    "audits",
    "audits_differed",
    "passed_over_seam",
    "passed_over_whole",
    "passed_over_longer",
)


def restore_counters(*, on_disk: bool) -> tuple[str, str]:
    """Counters of the bytes that were restored, and of the microseconds: from /dev/shm, or from a disk."""
    return ("disk_restored_bytes", "disk_restore_us") if on_disk else ("restored_bytes", "restore_us")


COUNTER_INDEX = {name: index for index, name in enumerate(COUNTERS)}

LAYOUT = crc32c(repr((3, SIZE_BYTES, MAILBOXES, MAILBOX_BYTES, RING_WORDS, COUNTERS)).encode())


class Word(IntEnum):
    """Index of each 8-byte word of the first part."""

    MAGIC = 0
    LAYOUT = 1
    CLIENT = 2
    PID = 3
    PROGRESS = 4
    UNNAMED = 5
    TOUCHES = 6
    MAPPED = 7
    ORPHANED = 8
    DECISION_TOUCHES = 9


_TOUCHES = int(Word.TOUCHES)  # plain ints: an enum's member costs as much as the store


class _PageView:
    def __init__(self, mapping: Mapping, client: int) -> None:
        self.client = client
        self._mapping = mapping
        self.words = mapping.words

    def counters(self) -> dict[str, int]:
        """What this worker has counted since it attached."""
        return dict(
            zip(COUNTERS, self.words[_COUNTER_WORD : _COUNTER_WORD + len(COUNTERS)].tolist(), strict=True)
        )


def _map_page(fd: int) -> Mapping:
    """Map an existing page. Raises LayoutMismatch where a differently built worker made it."""
    if not SIZE_BYTES <= os.fstat(fd).st_size <= SIZE_BYTES + OUTBOX_BYTES:
        raise LayoutMismatch(LAYOUT, 0)
    mapping = Mapping(fd, SIZE_BYTES, writable=True)
    if (theirs := mapping.words[Word.LAYOUT]) != LAYOUT:
        mapping.close()
        raise LayoutMismatch(LAYOUT, theirs)
    return mapping


class WorkerPage(_PageView):
    """The owner's side: holds the lock, counts, touches, and waits for replies."""

    def __init__(self, names: Names, client: int) -> None:
        self._path = names.pages / f"{client:016x}"
        self._fifo_directory = names.fifos
        self._fifos: dict[int, int] = {}
        self._patience = Patience()
        directory_fd = shm.open_directory(names.pages)
        try:
            self._fd = shm.make_unnamed(directory_fd)
            try:
                self._fill(directory_fd, client)
            except BaseException:
                # /dev/shm may be full for hours, and we are asked again every second.
                os.close(self._fd)
                raise
        finally:
            os.close(directory_fd)

    def _fill(self, directory_fd: int, client: int) -> None:
        shm.allocate(self._fd, SIZE_BYTES)
        super().__init__(Mapping(self._fd, SIZE_BYTES, writable=True), client)
        for word, value in (
            (Word.MAGIC, _MAGIC),
            (Word.LAYOUT, LAYOUT),
            (Word.CLIENT, client),
            (Word.PID, os.getpid()),
        ):
            self.words[word] = value
        shm.try_lock(self._fd)
        shm.give_name(self._fd, directory_fd, self._path.name)

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter. The caller serialises threads (client)."""
        self.words[_COUNTER_WORD + COUNTER_INDEX[name]] += by

    def use(self, touch: int, counter: int | None) -> None:
        """Note the use of a row: the touch (index.Found.touch), then the head that shows it; and count it."""
        words = self.words
        head = words[_TOUCHES]
        words[_RING_WORD + head % RING_WORDS] = touch
        words[_TOUCHES] = head + 1
        if counter is not None:
            words[_COUNTER_WORD + counter] += 1

    def decision_ring(self) -> tuple[memoryview, memoryview]:
        """The second ring's head and its words, for whoever reads decisions."""
        words = self.words
        return (
            words[Word.DECISION_TOUCHES : Word.DECISION_TOUCHES + 1],
            words[_DECISION_RING_WORD : _DECISION_RING_WORD + RING_WORDS],
        )

    def write_outbox(self, content: bytes) -> None:
        """Lay down what a message will point to. Raises OSError where /dev/shm is full.

        By pwrite, not through a mapping, which would kill by SIGBUS there; and the receiver reads it so.
        """
        shm.write_all(self._fd, content, SIZE_BYTES)

    def prepare_wait(self, mailbox: int) -> None:
        """Make the mailbox's FIFO, once, before its first request is sent."""
        if mailbox in self._fifos:
            return
        path = self._fifo_directory / f"{self.client:016x}.{mailbox}"
        try:
            shm.make_fifo(path)
            # Read and write: with a writer of our own there is no hang-up to spin on.
            self._fifos[mailbox] = shm.open_owned(path, os.O_RDWR, kind=stat.S_IFIFO)
        except ForeignObject:
            raise  # somebody else's
        except BaseException:
            shm.unlink_quietly(path)  # close() knows only those that it has opened
            raise

    def reply(self, mailbox: int, request: int) -> bytes | None:
        """The reply to `request`, or None if it is not there yet (I3)."""
        start = MAILBOX_OFFSET + mailbox * MAILBOX_BYTES
        if self.words[start // 8] != request:
            return None
        length, crc = _REPLY_HEAD.unpack_from(self._mapping.bytes, start + 8)
        if length > BODY_BYTES:
            return None
        body = bytes(self._mapping.bytes[start + BODY_OFFSET : start + BODY_OFFSET + length])
        return body if crc32c(body) == crc else None

    def wait(self, mailbox: int, request: int, deadline_ns: int) -> bytes | None:
        """Wait for a reply until a time.monotonic_ns() deadline; None when it has passed.

        At first we look on for a moment, which is what most answers take (patience).
        """
        if self._patience.looks():
            words, word = self.words, (MAILBOX_OFFSET + mailbox * MAILBOX_BYTES) // 8
            until_ns = min(deadline_ns, time.monotonic_ns() + LOOK_ON_NS)
            while (is_missing := words[word] != request) and time.monotonic_ns() < until_ns:
                os.sched_yield()  # where we share a core, the answer needs it
            self._patience.learn(in_vain=is_missing)
            if (body := self.reply(mailbox, request)) is not None:
                return body
        return self._sleep(mailbox, request, deadline_ns)

    def _sleep(self, mailbox: int, request: int, deadline_ns: int) -> bytes | None:
        """Say that we sleep, look, poll, read empty, look again.

        A byte that arrives between two looks is never lost, and an old byte costs one more look.
        """
        fd = self._fifos[mailbox]
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        self.words[ASLEEP_WORD + mailbox] = 1
        try:
            os.sched_yield()  # the kernel is entered between our word and our look: neither passes the other
            while (body := self.reply(mailbox, request)) is None:
                left_ns = deadline_ns - time.monotonic_ns()
                if left_ns <= 0:
                    return None
                poll.poll(max(1, left_ns // 1_000_000))
                with contextlib.suppress(BlockingIOError):
                    os.read(fd, _FIFO_BYTES)
            return body
        finally:
            self.words[ASLEEP_WORD + mailbox] = 0

    def close_in_child(self) -> None:
        """In a forked child: let the parent's lock go with the parent, and touch nothing else."""
        os.close(self._fd)
        for fd in self._fifos.values():
            os.close(fd)
        self._fifos.clear()
        self._mapping.close()

    def close(self) -> None:
        """Leave: the names go first, the page's last, then the lock; the coordinator frees the rest."""
        # A FIFO that stays keeps the page's name, by which the coordinator finds both.
        with contextlib.suppress(OSError):
            for mailbox in self._fifos:
                shm.unlink_quietly(self._fifo_directory / f"{self.client:016x}.{mailbox}")
            shm.unlink_quietly(self._path)
        for fd in self._fifos.values():
            os.close(fd)
        self._fifos.clear()
        self._mapping.close()
        os.close(self._fd)


class _Ring:
    """A reader's place in a ring of touches: the head word that the worker moves, and what was seen."""

    def __init__(self, words: memoryview, head: int, first: int) -> None:
        self._head, self._first = head, first
        # Touches before this coordinator's time name rows of another index: none of this one's.
        self._seen = max(0, words[head] - _RING_READABLE)
        self.missed = 0

    def drain(self, words: memoryview) -> list[int]:
        """Touches since the last call, oldest first."""
        head = words[self._head]
        first = max(self._seen, head - _RING_READABLE)
        touches = [words[self._first + n % RING_WORDS] for n in range(first, head)]
        # The owner may have gone round while we copied: what it has overtaken is not what we wanted.
        overtaken = max(0, words[self._head] - _RING_READABLE - first)
        self.missed += first - self._seen + overtaken
        self._seen = head
        return touches[overtaken:]


class ClientPage(_PageView):
    """The coordinator's side of one worker: liveness, touches, counts, mailboxes."""

    def __init__(self, names: Names, client: int) -> None:
        self._path = names.pages / f"{client:016x}"
        self._fifo_directory = names.fifos
        self._fifos: dict[int, int] = {}
        self._fd = shm.open_owned(self._path, os.O_RDWR)
        try:
            super().__init__(_map_page(self._fd), client)
        except BaseException:
            os.close(self._fd)
            raise
        self._barrier = threading.Lock()  # to take it orders our stores before it and our loads after it
        self._rows = _Ring(self.words, Word.TOUCHES, _RING_WORD)
        self._decisions = _Ring(self.words, Word.DECISION_TOUCHES, _DECISION_RING_WORD)

    @property
    def touches_missed(self) -> int:
        """Touches of rows that were overwritten before they were drained."""
        return self._rows.missed

    @property
    def decision_touches_missed(self) -> int:
        """The same of decisions."""
        return self._decisions.missed

    def lives(self) -> bool:
        """Whether the worker's process holds its lock (I1)."""
        return shm.is_locked(self._fd)

    def drain_touches(self) -> list[int]:
        """Touch words since the last call, oldest first; those overwritten meanwhile are counted."""
        return self._rows.drain(self.words)

    def drain_decision_touches(self) -> list[int]:
        """The same of decisions."""
        return self._decisions.drain(self.words)

    def read_outbox(self, offset: int, length: int) -> bytes:
        """A copy of what the worker laid down; shorter than asked where there is no such place."""
        if offset < 0 or not 0 <= length <= OUTBOX_BYTES - offset:
            return b""
        return os.pread(self._fd, length, SIZE_BYTES + offset)

    def send(self, mailbox: int, request: int, body: bytes) -> None:
        """Put a reply into a mailbox, and wake its reader.

        1. body  2. length and checksum  3. request id  4. the byte in the FIFO, if its reader sleeps.
        """
        start = MAILBOX_OFFSET + mailbox * MAILBOX_BYTES
        view = self._mapping.bytes
        view[start + BODY_OFFSET : start + BODY_OFFSET + len(body)] = body  # 1
        view[start + 8 : start + BODY_OFFSET] = _REPLY_HEAD.pack(len(body), crc32c(body))  # 2
        self.words[start // 8] = request  # 3
        with self._barrier:
            is_asleep = self.words[ASLEEP_WORD + mailbox]
        if is_asleep:
            self.wake(mailbox)  # 4

    def wake(self, mailbox: int) -> bool:
        """One byte into the mailbox's FIFO; a full FIFO is awake already.

        False where that cannot be: who waits there looks again by itself, ten times a second (connection).
        """
        try:
            if mailbox not in self._fifos:
                path = self._fifo_directory / f"{self.client:016x}.{mailbox}"
                self._fifos[mailbox] = shm.open_owned(path, os.O_WRONLY, kind=stat.S_IFIFO)
            os.write(self._fifos[mailbox], b"!")
        except BlockingIOError:
            return True
        except (ForeignObject, OSError):
            return False
        return True

    def wake_all(self) -> None:
        """Wake every waiter of this worker, to look at the epoch again."""
        for mailbox in range(MAILBOXES):
            self.wake(mailbox)

    def close(self) -> None:
        """End our view; the worker's own things stay."""
        for fd in self._fifos.values():
            os.close(fd)
        self._fifos.clear()
        self._mapping.close()
        os.close(self._fd)

    def unlink(self) -> None:
        """Remove the names that a dead worker left, the page's last: by it the others are found again."""
        for mailbox in range(MAILBOXES):
            shm.unlink_quietly(self._fifo_directory / f"{self.client:016x}.{mailbox}")
        shm.unlink_quietly(self._path)


def remove_if_dead(names: Names, name: str) -> bool:
    """Remove a page that another build made, once its lock is free; whether it is gone."""
    try:
        fd = shm.open_owned(names.pages / name, os.O_RDONLY)
    except (FileNotFoundError, ForeignObject):
        return True
    try:
        if shm.is_locked(fd):
            return False
    finally:
        os.close(fd)
    for fifo in names.fifos.glob(f"{name}.*"):
        shm.unlink_quietly(fifo)
    return shm.unlink_quietly(names.pages / name)
