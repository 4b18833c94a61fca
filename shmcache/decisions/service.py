"""The decisions of a running coordinator: table, arbiter, and the thread that commits.

    Server ─► handle, outcomes, tick ─► Arbiter ─► TableWriter
                                            └────► Committer ─► Database

Owner: the server's thread.
Invariants
    I1  The table is complete before the epoch is announced: every decision that was committed and lives.
    I2  close() commits what was submitted.
Leaves out: every decision about decisions (arbiter).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from shmcache.config import CoordinatorConfig
from shmcache.control import OwnedControlPage, Word
from shmcache.coordinator import Reply
from shmcache.decisions.arbiter import Arbiter, Now
from shmcache.decisions.db import Committer, default_path, load
from shmcache.decisions.table import UNIT_BYTES, TableWriter, segment_bytes
from shmcache.page import ClientPage
from shmcache.protocol import DecisionRequest


def table_bytes(settings: CoordinatorConfig) -> int:
    """Size of the decision table's segment."""
    return segment_bytes(settings.decisions_rows, _units(settings))


def database_path(settings: CoordinatorConfig) -> Path:
    """Where decisions are kept."""
    if settings.decisions_file is not None:
        return Path(settings.decisions_file)
    return default_path(settings.namespace)


class DecisionService:
    """One namespace's decisions while its coordinator runs. Context manager."""

    def __init__(
        self,
        settings: CoordinatorConfig,
        segment: memoryview,
        epoch: int,
        control: OwnedControlPage,
        wake: Callable[[], None],
    ) -> None:
        """Make the table in its segment and fill it with what was kept; `wake` comes with each commit."""
        durability = settings.decisions_durability
        self._table = TableWriter.create(segment, settings.decisions_rows, _units(settings), epoch)
        database, records = load(database_path(settings), durability)
        self._committer = Committer(database, wake, durability) if database is not None else None

        def set_clear(number: int) -> None:
            control.words[Word.CLEAR] = number

        self._arbiter = Arbiter(
            self._table,
            control.words[Word.CLEAR],
            durability,
            self._committer,
            set_clear,
        )
        self.loaded = self._arbiter.load(records, _now())
        self.unpark = self._arbiter.unpark
        self.cancel = self._arbiter.cancel
        self.client_gone = self._arbiter.client_gone

    def handle(self, request: DecisionRequest, page: ClientPage) -> list[Reply]:
        """Answer a worker's message; what it changes is answered by a later commit()."""
        return self._arbiter.handle(request, page.read_outbox, _now())

    def commit(self) -> list[Reply]:
        """Commit what all messages so far have changed; the answers to what is committed."""
        if self._committer is None:
            return []
        return [
            reply
            for batch, why in self._committer.commit()
            for reply in self._arbiter.committed(batch, why, _now())
        ]

    def tick(self, pages: Iterable[ClientPage]) -> list[Reply]:
        """Drain touches, remove what has expired, overtake the stuck."""
        missed = 0
        for page in pages:
            self._arbiter.touches(page.drain_decision_touches(), _now())
            missed += page.decision_touches_missed
        self._table.set_stat("touches_missed", missed)
        return self._arbiter.tick(_now()) + self.commit()

    def close(self) -> None:
        """Commit, then end the view of the table."""
        if self._committer is not None:
            self._committer.close()
        self._table.close()

    def __enter__(self) -> DecisionService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _units(settings: CoordinatorConfig) -> int:
    return settings.decisions_bytes // UNIT_BYTES


def _now() -> Now:
    return Now(time.time_ns() // 1_000_000, time.clock_gettime_ns(time.CLOCK_BOOTTIME))
