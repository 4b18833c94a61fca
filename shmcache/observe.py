"""What is going on in a namespace? Read from shared memory alone, without a word to the coordinator.

Owner: nobody; it reads what coordinator and workers write about themselves.
Readers: `shmcache stat`, the tests, whoever monitors.
Invariants
    I1  Nothing is locked, changed or asked; a namespace in any state can be observed.
    I2  Totals are those of the coordinator's time: workers that are gone were folded into the index's
        statistics, workers that live are read from their pages.
Leaves out: whether the figures agree with each other (check).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import msgspec

from shmcache.control import ControlPage
from shmcache.control import Word as ControlWord
from shmcache.errors import ForeignObject, LayoutMismatch
from shmcache.index import IndexReader
from shmcache.page import COUNTERS, ClientPage
from shmcache.page import Word as PageWord
from shmcache.protocol import Tier
from shmcache.shm import SHM_ROOT, Mapping, Names

REASONS = ("cold", "continued", "finish", "evict", "shutdown")


class TierFigures(msgspec.Struct, frozen=True):
    """Rows and bytes of one tier; charged_bytes belong to saves in flight."""

    rows: int
    used_bytes: int
    charged_bytes: int
    budget_bytes: int


class WorkerFigures(msgspec.Struct, frozen=True):
    """One worker that lives: pid for people, bytes it keeps mapped or holds without a name."""

    client: str
    pid: int
    mapped_bytes: int
    unnamed_bytes: int
    counters: dict[str, int]


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of a namespace. Without an epoch there is no index: its figures are zero."""

    namespace: str
    coordinator_running: bool
    coordinator_pid: int
    epoch: str
    started_unix_s: int
    rows: int
    max_rows: int
    tiers: dict[str, TierFigures]
    hits: dict[str, int]
    misses: int
    saves: dict[str, int]
    dropped: dict[str, int]
    evictions: int
    corrupt_rows: int
    counters: dict[str, int]
    workers: list[WorkerFigures]


def observe(namespace: str) -> Observation:
    """Read everything.

    Raises:
        NoCoordinator: the namespace does not exist.
        ForeignObject, LayoutMismatch: it is not ours, or not of this build.
    """
    names = Names(namespace)
    with contextlib.closing(ControlPage.open(names)) as control:
        epoch = control.words[ControlWord.EPOCH]
        running = control.coordinator_lives()
        pid = control.words[ControlWord.PID] if running else 0
    figures, max_rows = _index_figures(names, epoch)
    workers = list(_workers(names))
    counters = {
        name: figures.get(f"gone_{name}", 0) + sum(worker.counters[name] for worker in workers)
        for name in COUNTERS
    }
    return Observation(
        namespace=namespace,
        coordinator_running=running,
        coordinator_pid=pid,
        epoch=f"{epoch:016x}",
        started_unix_s=figures.get("started_unix_s", 0),
        rows=figures.get("rows", 0),
        max_rows=max_rows,
        tiers={
            name: TierFigures(*(figures[f"{what}_{name}"] for what in ("rows", "bytes", "charged", "budget")))
            for name in (tier.name.lower() for tier in Tier)
            if figures.get(f"budget_{name}")
        },
        hits={"exact": counters["hit_exact"], "partial": counters["hit_partial"]},
        misses=counters["miss_cold"],
        saves={reason: figures.get(f"saves_{reason}", 0) for reason in REASONS},
        dropped=_dropped(figures, counters),
        evictions=figures.get("evictions", 0),
        corrupt_rows=figures.get("corrupt_rows", 0),
        counters=counters,
        workers=workers,
    )


def _index_figures(names: Names, epoch: int) -> tuple[dict[str, int], int]:
    """The coordinator's statistics and max_rows; empty where no index can be read."""
    if epoch == 0:
        return {}, 0
    try:
        mapping = Mapping.open(SHM_ROOT / names.index_segment(epoch))
    except FileNotFoundError:
        return {}, 0
    with mapping, IndexReader(mapping.bytes) as reader:
        return reader.stats(), reader.max_rows


def _workers(names: Names) -> Iterator[WorkerFigures]:
    with contextlib.suppress(FileNotFoundError), os.scandir(names.pages) as entries:
        for name in sorted(entry.name for entry in entries):
            try:
                page = ClientPage(names, int(name, 16))
            except (FileNotFoundError, ValueError, ForeignObject, LayoutMismatch):
                continue
            with contextlib.closing(page):
                if page.lives():
                    yield WorkerFigures(
                        name,
                        page.words[PageWord.PID],
                        page.words[PageWord.MAPPED],
                        page.words[PageWord.UNNAMED],
                        page.counters(),
                    )


def _dropped(figures: dict[str, int], counters: dict[str, int]) -> dict[str, int]:
    """Saves that did not happen, by reason; each is counted once, where it was decided."""
    prefix = "save_dropped_"
    dropped = {
        name.removeprefix(prefix): count for name, count in counters.items() if name.startswith(prefix)
    }
    dropped["refused"] = figures.get("dropped_refused", 0)
    return {why: count for why, count in dropped.items() if count}
