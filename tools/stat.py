"""What does the cache hold, and does it help? Rows and bytes by tier, hits, misses, saves, workers.

Read from shared memory without a message to the coordinator (`shmcache.observe`), so it answers while the
coordinator is down too.

Leaves out: whether the figures agree with each other (check), single rows (ls).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping

import msgspec
import psutil

from shmcache.errors import mib
from shmcache.observe import Observation, WorkerFigures, observe
from shmcache.tools.decisions import DURABILITY
from shmcache.tools.text import table

HELP = "what the cache holds and what it saved"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


def run(arguments: argparse.Namespace) -> int:
    """Print the figures; 1 (NoCoordinator) where the namespace does not exist."""
    observation = observe(arguments.namespace)
    if arguments.json:
        print(msgspec.json.encode(observation).decode())
    else:
        print("\n".join(report(observation, time.time())))
    return 0


def report(seen: Observation, now_unix_s: float) -> Iterator[str]:
    """The lines for people."""
    yield f"namespace    {seen.namespace}"
    yield f"coordinator  {_coordinator(seen, now_unix_s)}"
    if not seen.max_rows:
        return  # no index, so there is nothing to count
    yield f"rows         {seen.rows:,} of {seen.max_rows:,}"
    yield ""
    yield from table(
        ("tier", "rows", "used", "in saves", "budget", "full"),
        [
            (
                name,
                f"{tier.rows:,}",
                mib(tier.used_bytes),
                mib(tier.charged_bytes),
                mib(tier.budget_bytes),
                "down"
                if tier.is_down
                else f"{(tier.used_bytes + tier.charged_bytes) / tier.budget_bytes:.0%}",
            )
            for name, tier in seen.tiers.items()
        ],
    )
    yield ""
    yield f"lookups      {_counts({**seen.hits, 'cold': seen.misses, **_other_requests(seen.counters)})}"
    yield f"tokens       {_tokens(seen.counters)}"
    yield f"saves        {_counts(seen.saves)}"
    yield f"dropped      {_counts(seen.dropped) or 'none'}"
    yield f"evictions    {seen.evictions:,}"
    yield f"corrupt rows {seen.corrupt_rows:,}"
    yield f"tier faults  {seen.tier_faults:,}"
    yield f"decisions    {_decisions(seen.decisions)}"
    yield ""
    yield f"{len(seen.workers)} workers attached" if len(seen.workers) != 1 else "1 worker attached"
    yield from table(
        ("worker", "pid", "memory", "mapped", "hits", "reused", "prefilled"),
        [_worker(worker) for worker in seen.workers],
    )


def _coordinator(seen: Observation, now_unix_s: float) -> str:
    if not seen.coordinator_running:
        return "not running" + ("; workers go on reading what is there" if seen.max_rows else "")
    hours_minutes, seconds = divmod(int(now_unix_s - seen.started_unix_s), 60)
    hours, minutes = divmod(hours_minutes, 60)
    return f"running for {hours}:{minutes:02}:{seconds:02}, pid {seen.coordinator_pid}, epoch {seen.epoch}"


def _other_requests(counters: Mapping[str, int]) -> dict[str, int]:
    """Requests that no row could serve: shown only where there are some."""
    return {name: counters[name] for name in ("untracked", "uncached") if counters[name]}


def _tokens(counters: Mapping[str, int]) -> str:
    reused, prefilled = counters["reused_tokens"], counters["prefilled_tokens"]
    share = f" ({reused / (reused + prefilled):.0%} of all)" if reused + prefilled else ""
    return f"{reused:,} reused{share}, {prefilled:,} prefilled"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())


def _decisions(figures: Mapping[str, int]) -> str:
    """How many, and what they survive."""
    if not figures:
        return "no table"
    kept = "memory only: the database is down" if figures["is_down"] else DURABILITY[figures["durability"]]
    return f"{figures['rows']:,} of {figures['max_rows']:,}; {kept}"


def _worker(worker: WorkerFigures) -> tuple[str, ...]:
    counters = worker.counters
    return (
        worker.client,
        str(worker.pid),
        _memory(worker.pid),
        mib(worker.mapped_bytes),
        f"{counters['hit_exact'] + counters['hit_partial']:,}",
        f"{counters['reused_tokens']:,}",
        f"{counters['prefilled_tokens']:,}",
    )


def _memory(pid: int) -> str:
    """Resident bytes of a process, shared pages included; a pid of another container shows as unknown."""
    try:
        return mib(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return "unknown"
