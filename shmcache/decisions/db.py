"""Which decisions survive the coordinator? One SQLite file, written behind the table by a thread of its own.

    decision   sequence INTEGER PRIMARY KEY · key · value · written_ms · expires_ms (null: never)

Nobody looks anything up here, so there is no index over keys: a commit appends, to a page or two, where a
tree of random keys would write a page for each decision. Of two records of one key the later one counts.

    submit(batch) ─► everything that waits by now, in one transaction ─► outcomes(), and a wake-up

Owner: the coordinator. SQLite's exclusive locking mode keeps every other process out while it runs, and
spares each commit the locking: whoever wants to look inside meanwhile asks for an export.
Invariants
    I1  Batches are committed in the order of submit(), and reported in it, after their commit.
    I2  A failed transaction fails every batch in it, and changes nothing.
    I3  No file stops a start: one that is damaged, of another owner, or no database of ours is set aside,
        with all that could still be read of it kept.
Leans on
    WAL with synchronous=NORMAL: a commit is in the page cache, so it survives any kill -9; with FULL it is
    on the disk, so it survives power loss.
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
from collections.abc import Callable, Iterator, Sequence
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
_SCHEMA_VERSION = 1
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS decision (sequence INTEGER PRIMARY KEY, key BLOB NOT NULL, "
    "value BLOB NOT NULL, written_ms INTEGER NOT NULL, expires_ms INTEGER)"
)
_BATCHES_A_COMMIT = 1024
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
        self._connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            self._prepare(durability)
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self, durability: Durability) -> None:
        execute = self._connection.execute
        execute("PRAGMA locking_mode = EXCLUSIVE")
        tables = [name for (name,) in execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        stamp = execute("PRAGMA application_id").fetchone()[0], execute("PRAGMA user_version").fetchone()[0]
        if tables and stamp != (_APPLICATION_ID, _SCHEMA_VERSION):
            raise NotOurs(f"application {stamp[0]:08x}, version {stamp[1]}")
        execute("PRAGMA journal_mode = WAL")
        execute(f"PRAGMA synchronous = {'FULL' if durability == 'full' else 'NORMAL'}")
        execute("BEGIN IMMEDIATE")
        execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        execute(_SCHEMA)
        execute("COMMIT")

    def records(self) -> Iterator[Record]:
        """All rows, the oldest first. Raises sqlite3.DatabaseError where the file is damaged."""
        rows = self._connection.execute(
            "SELECT sequence, key, value, written_ms, expires_ms FROM decision ORDER BY sequence"
        )
        for row in rows:
            yield Record(*row)

    def commit(self, batches: Sequence[Batch]) -> None:
        """All batches in one transaction. Raises sqlite3.Error, with nothing changed."""
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            for batch in batches:
                if batch.forget_all:
                    connection.execute("DELETE FROM decision")
                if batch.deleted:
                    sequences = [(sequence,) for sequence in batch.deleted]
                    connection.executemany("DELETE FROM decision WHERE sequence = ?", sequences)
                rows = [msgspec.structs.astuple(record) for record in batch.records]
                connection.executemany("INSERT INTO decision VALUES (?, ?, ?, ?, ?)", rows)
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")

    def close(self) -> None:
        """Fold the log into the file."""
        self._connection.close()


def load(path: Path, durability: Durability) -> tuple[Database | None, list[Record]]:
    """Open the file and read it; None where there can be none (I3).

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
    """The thread that commits."""

    def __init__(self, database: Database, wake: Callable[[], None]) -> None:
        """Start it; `wake` is called from it after each commit, when outcomes() has something."""
        self._database = database
        self._wake = wake
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Batch, str]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="shmcache-decisions-db", daemon=True)
        self._thread.start()

    def submit(self, batch: Batch) -> None:
        """Have it committed, after all that was submitted before."""
        self._batches.put(batch)

    def outcomes(self) -> Iterator[tuple[Batch, str]]:
        """Batches that are done, in order, each with why it failed, or nothing."""
        while True:
            try:
                yield self._done.get_nowait()
            except queue.Empty:
                return

    def close(self) -> None:
        """Commit what was submitted, and close the file."""
        self._batches.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while True:
            batches, is_last = self._take()
            why = self._commit(batches) if batches else ""
            for batch in batches:
                self._done.put((batch, why))
            if batches:
                self._wake()
            if is_last:
                self._database.close()
                return

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
            log.warning("decisions could not be committed: %s", error)
            return str(error)
        return ""
