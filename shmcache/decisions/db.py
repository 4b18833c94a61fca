"""Which decisions survive the coordinator? One SQLite file, written before the table shows anything of it.

    records   first INTEGER PRIMARY KEY · count · body: that many records in MessagePack, numbered from first

Nobody looks anything up here, so there is no index over keys: a commit appends, to a page or two, where a
tree of random keys would write a page for each decision. What was added together is one row, which takes a
quarter of the time of one each; where some of them leave before the others, its row is written anew without
them, so no row holds what is gone. Of two records of one key the later one counts.

    commit_at_once(batch)     durability `commit`: no fsync, so it takes microseconds
    submit(batch) ─► commit() everything that waits, in one transaction: here, as above, or by the thread:
                              `full`, anything large, checkpoints, and all that comes meanwhile; a wake-up
                              says that commit() has something to report

Owner: the coordinator. SQLite's exclusive locking mode keeps every other process out while it runs, and
spares each commit the locking: whoever wants to look inside meanwhile asks for an export.
Invariants
    I1  Batches are committed in the order of submit(), and reported in it, after their commit.
    I2  A failed transaction fails every batch in it, and changes nothing.
    I3  The caller's thread does not wait for the disk: it makes no checkpoint and no fsync, commits only
        while the thread is idle, and leaves all to the thread for a second after a commit that was slow.
    I4  No file stops a start: one that is damaged, of another owner, or no database of ours is set aside,
        with all that could still be read of it kept.
Leans on
    WAL with synchronous=NORMAL: a commit is in the page cache, so it survives any kill -9; with FULL it is
    on the disk, so it survives power loss. A checkpoint waits for the disk in both.
    sqlite3 lets other threads run while a statement steps.
Leaves out: what is worth keeping, and when a life ends (arbiter).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sqlite3
import threading
import time
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from shmcache import shm
from shmcache.decisions.table import Record
from shmcache.errors import ForeignObject

log = logging.getLogger(__name__)

Durability = Literal["full", "commit", "memory"]

# "shmd"; user_version is the schema's number.
_APPLICATION_ID = 0x73686D64
_SCHEMA_VERSION = 2
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS records (first INTEGER PRIMARY KEY, count INTEGER NOT NULL, "
    "body BLOB NOT NULL)"
)
_INSERT = "INSERT INTO records VALUES (?, ?, ?)"
_DELETE = "DELETE FROM records WHERE first = ?"
_PACK_BYTES = 65_536  # what is taken apart when one of its records leaves

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Record]).decode

PAGE_BYTES = 1024  # a commit writes whole pages: it takes half the time that it takes with SQLite's 4,096
CHECKPOINT_PAGES = 16_000  # a checkpoint waits for the disk however little it folds
_BATCHES_A_COMMIT = 1024
_SMALL_PAGES = 256
_SLOW_S, _SLOW_FOR_S = 0.005, 1.0
_CLOSE_S = 30.0


def default_path(namespace: str) -> Path:
    """In the user's cache directory, which outlives a reboot."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "shmcache" / f"decisions.{namespace}.sqlite3"


def remove(path: Path) -> list[str]:
    """Remove a file with its log and what was set aside; returns the names that went."""
    gone = [file for file in (path, *path.parent.glob(f"{path.name}[-.]*")) if file.exists()]
    for file in gone:
        file.unlink()
    return [str(file) for file in gone]


class Batch(msgspec.Struct):
    """What one message changes: `forget_all` first, then the deletions, then the records.

    number is the caller's, by which it knows what to do when the batch is committed; deleted are the
    sequences of records.
    """

    number: int
    records: Sequence[Record] = ()
    deleted: Sequence[int] = ()
    forget_all: bool = False

    @property
    def pages(self) -> int:
        """How much it writes, roughly: nothing that is measured depends on it."""
        if self.forget_all:
            return CHECKPOINT_PAGES
        return 1 + len(self.deleted) + sum([len(record.value) for record in self.records]) // PAGE_BYTES


class NotOurs(Exception):
    """The file is a database, and not one of ours."""


class Database:
    """The file, in one thread."""

    def __init__(self, path: Path, durability: Durability) -> None:
        """Open or make it. Raises sqlite3.Error, ForeignObject, NotOurs, OSError."""
        for _ in range(2):
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
            with contextlib.suppress(FileNotFoundError):
                os.close(shm.open_owned(path, os.O_RDWR))
                break
        self._log_pages = 0
        self._connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            self._prepare(durability)
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self, durability: Durability) -> None:
        execute = self._connection.execute
        execute(f"PRAGMA page_size = {PAGE_BYTES}")  # of a file that is made now
        execute("PRAGMA locking_mode = EXCLUSIVE")
        tables = [name for (name,) in execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        stamp = execute("PRAGMA application_id").fetchone()[0], execute("PRAGMA user_version").fetchone()[0]
        if tables and stamp != (_APPLICATION_ID, _SCHEMA_VERSION):
            raise NotOurs(f"application {stamp[0]:08x}, version {stamp[1]}")
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA wal_autocheckpoint = 0")
        execute(f"PRAGMA synchronous = {'FULL' if durability == 'full' else 'NORMAL'}")
        execute("BEGIN IMMEDIATE")
        execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        execute(_SCHEMA)
        execute("COMMIT")
        self._read_packs()

    def records(self) -> Iterator[Record]:
        """All records, the oldest first. Raises sqlite3.DatabaseError where the file is damaged."""
        for (body,) in self._connection.execute("SELECT body FROM records ORDER BY first"):
            yield from _decoded(body)

    def commit(self, batches: Sequence[Batch]) -> None:
        """All batches in one transaction. Raises sqlite3.Error, with nothing changed."""
        if not any(batch.deleted or batch.forget_all for batch in batches):
            runs = _runs([record for batch in batches for record in batch.records])
            if len(runs) == 1:
                # A statement alone is a transaction: two less to run.
                self._insert(runs[0])
                return
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        try:
            for batch in batches:
                self._apply(batch)
            execute("COMMIT")
        except BaseException:
            execute("ROLLBACK")
            self._read_packs()
            raise

    def _apply(self, batch: Batch) -> None:
        if batch.forget_all:
            self._connection.execute("DELETE FROM records")
            self._log_pages += CHECKPOINT_PAGES
            self._read_packs()
        if batch.deleted:
            self._delete(batch.deleted)
        for run in _runs(batch.records):
            self._insert(run)

    def _insert(self, records: Sequence[Record]) -> None:
        """A run of records as one row."""
        first, count, body = records[0].sequence, len(records), _encode(records)
        self._log_pages += 1 + len(body) // PAGE_BYTES
        self._connection.execute(_INSERT, (first, count, body))
        if count > 1:
            self._packs[first] = count
            insort(self._firsts, first)

    def _delete(self, sequences: Iterable[int]) -> None:
        """Rows of one record go; a pack that loses some leaves as many rows as the others are runs."""
        alone: list[tuple[int]] = []
        by_pack: dict[int, set[int]] = {}
        for sequence in sequences:
            place = bisect_right(self._firsts, sequence) - 1
            first = self._firsts[place] if place >= 0 else sequence
            if sequence < first + self._packs.get(first, 0):
                by_pack.setdefault(first, set()).add(sequence)
            else:
                alone.append((sequence,))
        for first, gone in by_pack.items():
            left: list[Record] = []
            if len(gone) < self._packs[first]:
                (body,) = self._connection.execute(
                    "SELECT body FROM records WHERE first = ?", (first,)
                ).fetchone()
                left = [record for record in _decoded(body) if record.sequence not in gone]
            self._connection.execute(_DELETE, (first,))
            del self._packs[first], self._firsts[bisect_right(self._firsts, first) - 1]
            for run in _runs(left):
                self._insert(run)
        self._connection.executemany(_DELETE, alone)
        self._log_pages += len(by_pack) + len(alone)

    def _read_packs(self) -> None:
        rows = self._connection.execute("SELECT first, count FROM records WHERE count > 1 ORDER BY first")
        self._packs: dict[int, int] = dict(rows)
        self._firsts = list(self._packs)

    @property
    def wants_checkpoint(self) -> bool:
        """Whether the log has grown to where it should be folded into the file."""
        return self._log_pages >= CHECKPOINT_PAGES

    def checkpoint(self) -> None:
        """Fold the log into the file: waits for the disk. Raises sqlite3.Error."""
        self._log_pages = 0
        self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def close(self) -> None:
        """Fold the log into the file."""
        self._connection.close()


def _runs(records: Sequence[Record]) -> list[list[Record]]:
    """What can be one row each: records that are numbered without a gap, and are not too much."""
    runs: list[list[Record]] = []
    next_sequence, run_bytes = -1, 0
    for record in records:
        run_bytes += len(record.value)
        if record.sequence != next_sequence or run_bytes > _PACK_BYTES:
            runs.append([])
            run_bytes = len(record.value)
        runs[-1].append(record)
        next_sequence = record.sequence + 1
    return runs


def _decoded(body: bytes) -> list[Record]:
    try:
        return _decode(body)
    except msgspec.MsgspecError as error:
        raise sqlite3.DatabaseError(f"a row that holds no records: {error}") from error


def load(path: Path, durability: Durability) -> tuple[Database | None, list[Record]]:
    """Open the file and read it; None where there can be none (I4).

    Of a damaged one is kept what could be read before the damage, in a new file.
    """
    kept: list[Record] = []
    try:
        # Its own maker makes a directory 0700; one that others can write is none for decisions.
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(shm.open_directory(path.parent))
        database = Database(path, durability)
    except (sqlite3.DatabaseError, ForeignObject, NotOurs) as error:
        if _is_locked(error):
            log.warning("decisions are not kept: %s is in use by another process", path)
            return None, []
        return _anew(path, durability, kept, error)
    except OSError as error:
        log.warning("decisions are not kept: %s: %s", path, error)
        return None, []
    try:
        kept.extend(database.records())
    except sqlite3.DatabaseError as error:
        database.close()
        return _anew(path, durability, kept, error)
    return database, kept


def _is_locked(error: Exception) -> bool:
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)


def _anew(
    path: Path, durability: Durability, kept: list[Record], error: Exception
) -> tuple[Database | None, list[Record]]:
    """Set a file aside, and go on in a new one with what was read."""
    aside = path.with_name(f"{path.name}.aside-{time.time_ns()}")
    try:
        for suffix in ("-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{path}{suffix}").rename(f"{aside}{suffix}")
        path.rename(aside)
        database = Database(path, durability)
        database.commit([Batch(0, kept)])
    except (OSError, ForeignObject, sqlite3.Error) as again:
        log.warning("decisions are not kept: %s: %s, and then: %s", path, error, again)
        return None, kept
    log.warning("%s is set aside as %s: %s; %d decisions could be read", path, aside.name, error, len(kept))
    return database, kept


class Committer:
    """Commits batches on its caller's thread, or on its own where that could wait (I3)."""

    def __init__(self, database: Database, wake: Callable[[], None], durability: Durability) -> None:
        """Start the thread; `wake` is called from it after each of its commits."""
        self._database = database
        self._wake = wake
        self._waits_for_no_disk = durability == "commit"
        self._slow_until_s = 0.0
        self._said = ""  # the last commit's failure
        self._waiting: list[Batch] = []
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._done: deque[tuple[Batch, str]] = deque()
        # Batches given to the thread, and those that it has done with: the second one is the thread's.
        self._given = self._ended = 0
        self._thread = threading.Thread(target=self._run, name="shmcache-decisions-db", daemon=True)
        self._thread.start()

    def submit(self, batch: Batch) -> None:
        """Have it committed by the next commit(), after all that was submitted before."""
        self._waiting.append(batch)

    def commit_at_once(self, batch: Batch) -> str | None:
        """Commit it before all that comes: why that failed, or nothing.

        None where it could wait for the disk or has to wait for its turn: it is to be submitted.
        """
        is_idle = self._is_idle  # before its outcomes are looked at: I1
        if not is_idle or self._waiting or self._done or not self._may_commit_here([batch]):
            return None
        return self._commit_here([batch])

    def commit(self) -> list[tuple[Batch, str]]:
        """Commit what was submitted, or have it committed.

        Returns the batches that are done, in order, each with why it failed, or nothing.
        """
        is_idle = self._is_idle  # as above
        outcomes: list[tuple[Batch, str]] = []
        while self._done:
            outcomes.append(self._done.popleft())
        batches = self._waiting
        if batches:
            self._waiting = []
            if is_idle and self._may_commit_here(batches):
                why = self._commit_here(batches)
                outcomes.extend((batch, why) for batch in batches)
            else:
                self._give(batches)
        return outcomes

    @property
    def _is_idle(self) -> bool:
        return self._ended == self._given

    def _may_commit_here(self, batches: list[Batch]) -> bool:
        return (
            self._waits_for_no_disk
            and sum([batch.pages for batch in batches]) <= _SMALL_PAGES
            and (not self._slow_until_s or time.monotonic() >= self._slow_until_s)
        )

    def _commit_here(self, batches: list[Batch]) -> str:
        start_s = time.monotonic()
        why = self._commit(batches)
        end_s = time.monotonic()
        # A disk that cannot keep up makes writers to the page cache wait as well.
        self._slow_until_s = end_s + _SLOW_FOR_S if end_s - start_s > _SLOW_S else 0.0
        if self._database.wants_checkpoint:
            self._give([_NOTHING])
        return why

    def _give(self, batches: list[Batch]) -> None:
        self._given += len(batches)
        for batch in batches:
            self._batches.put(batch)

    def close(self) -> None:
        """Commit what was submitted, and close the file."""
        self._give(self._waiting)
        self._batches.put(None)
        self._thread.join(_CLOSE_S)

    # ---- the thread

    def _run(self) -> None:
        while True:
            batches, is_last = self._take()
            real = [batch for batch in batches if batch is not _NOTHING]
            if real:
                why = self._commit(real)
                for batch in real:
                    self._done.append((batch, why))
                self._wake()
            if is_last:
                self._database.close()
                return
            if self._database.wants_checkpoint:
                self._checkpoint()
            self._ended += len(batches)

    def _take(self) -> tuple[list[Batch], bool]:
        """Everything that waits by now, at least one; and whether that was all."""
        batches: list[Batch] = []
        batch = self._batches.get()
        while batch is not None:
            batches.append(batch)
            if len(batches) == _BATCHES_A_COMMIT:
                return batches, False
            try:
                batch = self._batches.get_nowait()
            except queue.Empty:
                return batches, False
        return batches, True

    def _commit(self, batches: list[Batch]) -> str:
        try:
            self._database.commit(batches)
        except sqlite3.Error as error:
            if str(error) != self._said:
                log.warning("decisions could not be committed: %s (said once)", error)
            self._said = str(error)
            return self._said
        self._said = ""
        return ""

    def _checkpoint(self) -> None:
        try:
            self._database.checkpoint()
        except sqlite3.Error as error:
            log.warning("the log of decisions goes on growing: %s", error)


_NOTHING = Batch(0)
"""Given to the thread so that it looks whether a checkpoint is due."""
