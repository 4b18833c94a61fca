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

from collections.abc import Iterator

import msgspec

from shmcache.page import COUNTERS, Word
from shmcache.protocol import Tier
from shmcache.view import View, look

REASONS = ("cold", "continued", "finish", "evict", "shutdown")


class TierFigures(msgspec.Struct, frozen=True):
    """Rows and bytes of one tier; charged_bytes belong to saves in flight. One that is down takes no jobs."""

    rows: int
    used_bytes: int
    charged_bytes: int
    budget_bytes: int
    is_down: bool


class WorkerFigures(msgspec.Struct, frozen=True):
    """One worker that lives.

    pid is for people; orphaned_bytes are of rows that have left and are still looked at,
    unnamed_bytes of slabs in the making.
    """

    client: str
    pid: int
    mapped_bytes: int
    orphaned_bytes: int
    unnamed_bytes: int
    counters: dict[str, int]


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of a namespace. Without an epoch there is no index: its figures are zero.

    decisions: those of the decision table (decisions.table.STAT_NAMES); none without an epoch.
    """

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
    tier_faults: int
    counters: dict[str, int]
    workers: list[WorkerFigures]
    decisions: dict[str, int]


def observe(namespace: str) -> Observation:
    """Read everything.

    Raises:
        NoCoordinator: the namespace does not exist.
        ForeignObject, LayoutMismatch: it is not ours, or not of this build.
    """
    with look(namespace) as view:
        figures = view.reader.stats() if view.reader is not None else {}
        max_rows = view.reader.max_rows if view.reader is not None else 0
        decisions = view.decisions.stats() if view.decisions is not None else {}
        workers = list(_workers(view))
    counters = {
        name: figures.get(f"gone_{name}", 0) + sum(worker.counters[name] for worker in workers)
        for name in COUNTERS
    }
    return Observation(
        namespace=namespace,
        coordinator_running=view.coordinator_runs,
        coordinator_pid=view.coordinator_pid,
        epoch=f"{view.epoch:016x}",
        started_unix_s=figures.get("started_unix_s", 0),
        rows=figures.get("rows", 0),
        max_rows=max_rows,
        tiers={
            name: TierFigures(
                rows=figures[f"rows_{name}"],
                used_bytes=figures[f"bytes_{name}"],
                charged_bytes=figures[f"charged_{name}"],
                budget_bytes=figures[f"budget_{name}"],
                is_down=bool(figures[f"is_down_{name}"]),
            )
            for name in (tier.name.lower() for tier in Tier)
            if figures.get(f"budget_{name}")
        },
        hits={"exact": counters["hit_exact"], "partial": counters["hit_partial"]},
        misses=counters["miss_cold"],
        saves={reason: figures.get(f"saves_{reason}", 0) for reason in REASONS},
        dropped=_dropped(figures, counters),
        evictions=figures.get("evictions", 0),
        corrupt_rows=figures.get("corrupt_rows", 0),
        tier_faults=figures.get("tier_faults", 0),
        counters=counters,
        workers=workers,
        decisions=decisions,
    )


def _workers(view: View) -> Iterator[WorkerFigures]:
    for name, page in view.pages():
        if page is not None and page.lives():
            yield WorkerFigures(
                name,
                page.words[Word.PID],
                page.words[Word.MAPPED],
                page.words[Word.ORPHANED],
                page.words[Word.UNNAMED],
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
