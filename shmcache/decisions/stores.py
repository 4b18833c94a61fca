"""Where do decisions live, and who was first?

A DecisionStore needs seven methods over bytes keys and values, with expiries in Unix seconds. Its `add`
keeps an unexpired value and returns it: that one rule makes the first decision win across threads,
processes and machines. Stores may offer more, and DecisionCache uses what is there:

    add_many(items, claim)       a whole batch in one round trip
    delete(key)                  otherwise renew(key, 0) stands for it
    claim, await_claims          single-flight beyond this process (SharedStore)

Here: memory and SQLite. Others: shared (all processes of a machine), redis (fleets), fallback (one store
behind another).

Invariants
    I1  add returns the value that everybody gets from now on: its own, or the one that was first.
    I2  An expired value is never returned, whatever the wall clock did meanwhile: a value written more
        than CLOCK_SLACK_S in the future is expired, and none lives longer than its ttl.
    I3  A SQLite connection is used by one thread at a time, and only in the process that made it.
Leans on: SQLite's own locks between processes; its busy handler, bounded by BUSY_S.
Leaves out: what the bytes mean (codec), what is done when a store fails (cache).
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from shmcache import shm
from shmcache.decisions.forks import watch

CLOCK_SLACK_S = 60.0
BUSY_S = 2.0

Held = tuple[bytes, float | None]
"""A value and when it expires in Unix seconds; None: never."""

Item = tuple[bytes, bytes, float | None]
"""Key, value, expiry."""


@runtime_checkable
class DecisionStore(Protocol):
    """What DecisionCache needs of a store. Thread-safe."""

    def get(self, key: bytes) -> Held | None:
        """The unexpired value of a key."""

    def add(self, key: bytes, value: bytes, expires: float | None) -> bytes:
        """Store a value unless an unexpired one is there; return the one that is there now."""

    def renew(self, key: bytes, expires: float | None) -> None:
        """Move the expiry of a value that is there; one in the past removes it."""

    def prune(self) -> int:
        """Remove expired values; returns how many."""

    def __len__(self) -> int: ...

    def clear(self) -> None:
        """Remove everything."""

    def close(self) -> None:
        """End this view; what others share stays."""


class MemoryStore:
    """The decisions of one process, in order of use; at `maxsize` the least recently used leaves."""

    def __init__(self, maxsize: int = 65_536) -> None:
        self._maxsize = maxsize
        self.after_fork()
        watch(self)
        # Value, Unix expiry as it was given, and the monotonic instant that counts.
        self._values: OrderedDict[bytes, tuple[bytes, float | None, float]] = OrderedDict()

    def after_fork(self) -> None:
        """In the child: another thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    @property
    def maxsize(self) -> int:
        """How many decisions fit."""
        return self._maxsize

    def get(self, key: bytes) -> Held | None:
        """As DecisionStore."""
        with self._lock:
            held = self._values.get(key)
            if held is None or held[2] <= time.monotonic():
                return None
            self._values.move_to_end(key)
            return held[0], held[1]

    def add(self, key: bytes, value: bytes, expires: float | None) -> bytes:
        """As DecisionStore."""
        with self._lock:
            held = self._values.get(key)
            if held is not None and held[2] > time.monotonic():
                return held[0]
            self._values[key] = (value, expires, _instant(expires))
            self._values.move_to_end(key)
            if len(self._values) > self._maxsize:
                self._values.popitem(last=False)
            return value

    def renew(self, key: bytes, expires: float | None) -> None:
        """As DecisionStore."""
        with self._lock:
            held = self._values.get(key)
            if held is not None:
                self._values[key] = (held[0], expires, _instant(expires))

    def delete(self, key: bytes) -> bool:
        """Remove one; whether it was there."""
        with self._lock:
            return self._values.pop(key, None) is not None

    def prune(self) -> int:
        """As DecisionStore."""
        with self._lock:
            now = time.monotonic()
            expired = [key for key, held in self._values.items() if held[2] <= now]
            for key in expired:
                del self._values[key]
            return len(expired)

    def __len__(self) -> int:
        return len(self._values)

    def clear(self) -> None:
        """As DecisionStore."""
        with self._lock:
            self._values.clear()

    def close(self) -> None:
        """As DecisionStore."""
        self.clear()


def _instant(expires: float | None) -> float:
    """The monotonic instant of a Unix expiry: later steps of the wall clock do not move it."""
    return float("inf") if expires is None else time.monotonic() + expires - time.time()


_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS decision (key BLOB PRIMARY KEY, value BLOB NOT NULL, "
    "written REAL NOT NULL, expires REAL) WITHOUT ROWID"
)
# I2: within its life by the wall clock, and not written in the future.
_LIVE = "written <= :now + 60 AND (expires IS NULL OR expires > :now)"
assert CLOCK_SLACK_S == 60
_GET = "SELECT value, expires, written FROM decision WHERE key = ?"


class SqliteStore:
    """Decisions in a SQLite file that any number of processes and threads open.

    Where another process holds the file's lock for longer than BUSY_S, a call raises sqlite3.Error, and
    ForeignObject where the file is of another user or others can write it: DecisionCache answers uncached
    then.
    """

    def __init__(self, path: str | Path, *, full: bool = False) -> None:
        """Nothing is opened yet.

        Args:
            path: the file; made where there is none, mode 0600.
            full: survive power loss (synchronous=FULL) instead of only kill -9.
        """
        self._path = str(path)
        self._full = full
        self._pid = os.getpid()
        self._idle: deque[sqlite3.Connection] = deque()

    def get(self, key: bytes) -> Held | None:
        """As DecisionStore."""
        # Without the context manager and with _LIVE in Python: half the time.
        connection = self._take()
        try:
            row = connection.execute(_GET, (key,)).fetchone()
        finally:
            self._idle.append(connection)
        if row is None:
            return None
        value, expires, written = row
        now = time.time()
        is_live = written <= now + CLOCK_SLACK_S and (expires is None or expires > now)
        return (value, expires) if is_live else None

    def add(self, key: bytes, value: bytes, expires: float | None) -> bytes:
        """As DecisionStore."""
        return self.add_many([(key, value, expires)])[0]

    def add_many(self, items: Sequence[Item], claim: object = None) -> list[bytes]:
        """A batch in one transaction."""
        with self._transaction() as connection:
            return [self._add(connection, item) for item in items]

    def _add(self, connection: sqlite3.Connection, item: Item) -> bytes:
        key, value, expires = item
        names = {"key": key, "value": value, "expires": expires, "now": time.time()}
        live = connection.execute(f"SELECT value FROM decision WHERE key = :key AND {_LIVE}", names)
        if (held := live.fetchone()) is not None:
            return bytes(held[0])
        connection.execute("REPLACE INTO decision VALUES (:key, :value, :now, :expires)", names)
        return value

    def renew(self, key: bytes, expires: float | None) -> None:
        """As DecisionStore."""
        with self._transaction() as connection:
            connection.execute(
                f"UPDATE decision SET written = :now, expires = :expires WHERE key = :key AND {_LIVE}",
                {"key": key, "expires": expires, "now": time.time()},
            )

    def delete(self, key: bytes) -> bool:
        """Remove one; whether it was there."""
        with self._transaction() as connection:
            return connection.execute("DELETE FROM decision WHERE key = ?", (key,)).rowcount > 0

    def prune(self) -> int:
        """As DecisionStore."""
        with self._transaction() as connection:
            now = {"now": time.time()}
            return connection.execute(f"DELETE FROM decision WHERE NOT ({_LIVE})", now).rowcount

    def __len__(self) -> int:
        with self._connection() as connection:
            count: int = connection.execute("SELECT count(*) FROM decision").fetchone()[0]
            return count

    def clear(self) -> None:
        """As DecisionStore."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM decision")

    def close(self) -> None:
        """End the idle connections; one in use ends with its call."""
        if self._pid == os.getpid():
            while self._idle:
                self._idle.pop().close()

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """A connection that nobody else uses meanwhile (I3)."""
        connection = self._take()
        try:
            yield connection
        finally:
            self._idle.append(connection)

    def _take(self) -> sqlite3.Connection:
        """A connection for whoever gives it back to _idle."""
        if self._pid != os.getpid():
            # Kept, because closing a connection of the parent's would disturb its locks.
            _inherited.append(self._idle)
            self._pid, self._idle = os.getpid(), deque()
        try:
            return self._idle.pop()
        except IndexError:
            return self._open()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Immediate: the lock is waited for at the beginning, where the busy handler works."""
        with self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    def _open(self) -> sqlite3.Connection:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        os.close(shm.open_owned(self._path, os.O_RDWR))
        connection = sqlite3.connect(
            self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            _write_ahead(connection)
            connection.execute(f"PRAGMA synchronous = {'FULL' if self._full else 'NORMAL'}")
            connection.execute(_SCHEMA)
        except BaseException:
            connection.close()
            raise
        return connection


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Turn WAL on. Who is not first gets "locked" at once, without the busy handler: look again."""
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)
        else:
            return


_inherited: list[deque[sqlite3.Connection]] = []
