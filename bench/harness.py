"""How benches measure and report: two things side by side, in one run, as one row.

    {"name": …, "ours": …, "unit": …, "peer": …, "peer_value": …, "ratio": …}      ratio = ours / peer_value

Owner: bench. Readers: people, and whoever gets the JSON file.

Invariants
    I1  Ours and peer alternate, so that a machine that slows down slows both; a row holds the medians of
        at least MIN_REPEATS rounds, and the ratio of those medians (`compared`) or the median of the rounds'
        own ratios (`paired`).
    I2  The collector of cycles runs between rounds, not in them.

Leaves out: bounds. What a ratio may be is said where it is promised.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

MIN_REPEATS = 9


class Row(msgspec.Struct, frozen=True):
    """One measurement: ours, what it is measured against, and ours ÷ peer."""

    name: str
    ours: float
    unit: str
    peer: str
    peer_value: float
    ratio: float


class Options(msgspec.Struct, frozen=True):
    """What the command line asks for. `quick`: fewer and shorter rounds, the same rows."""

    quick: bool
    trace: Path | None = None

    @property
    def repeats(self) -> int:
        """Rounds of each side."""
        return MIN_REPEATS if self.quick else 21


def measured(name: str, unit: str, peer: str, ours: float, peer_value: float) -> Row:
    """A row of one figure a side, as sizes and counts are, which need no rounds."""
    return Row(name=name, ours=ours, unit=unit, peer=peer, peer_value=peer_value, ratio=ours / peer_value)


def compared(
    name: str, unit: str, peer: str, sides: tuple[Callable[[], float], Callable[[], float]], repeats: int
) -> Row:
    """Run ours and peer in turn and make one row of their medians.

    Each side returns its own figure in `unit`. One round of each runs before the counting ones.
    """
    ours, peers = (statistics.median(values) for values in _rounds(sides, repeats))
    return measured(name, unit, peer, ours, peers)


def paired(
    name: str, unit: str, peer: str, sides: tuple[Callable[[], float], Callable[[], float]], pairs: int
) -> Row:
    """As compared, but ratio is the median of the pairs' own ratios.

    For where what else the machine does, or its speed, changes from pair to pair more than within one.
    """
    ours, peers = _rounds(sides, pairs, takes_turns=True)
    ratio = statistics.median(one / other for one, other in zip(ours, peers, strict=True))
    return Row(name, statistics.median(ours), unit, peer, statistics.median(peers), ratio)


def _rounds(
    sides: tuple[Callable[[], float], Callable[[], float]], repeats: int, *, takes_turns: bool = False
) -> tuple[list[float], list[float]]:
    """The figures of both sides but for the first round; takes_turns: who is first changes each time."""
    if repeats < MIN_REPEATS:
        raise ValueError(f"{repeats} repeats are less than {MIN_REPEATS}")
    figures: tuple[list[float], list[float]] = ([], [])
    was_collecting = gc.isenabled()
    try:
        for number in range(repeats + 1):
            for side in (1, 0) if takes_turns and number % 2 else (0, 1):
                gc.enable()
                gc.collect()
                gc.disable()
                value = sides[side]()
                if number:
                    figures[side].append(value)
    finally:
        if was_collecting:
            gc.enable()
    return figures


def timed(work: Callable[[], object], count: int, per_s: float = 1e6) -> float:
    """Return the time of one of `count` operations that `work` does, in us (or 1 / `per_s` seconds)."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) / count * per_s


def typical(work: Callable[[int], object], runs: int, operations: int = 1) -> float:
    """Return the time of one operation in us: the median over `runs` calls of work(0), work(1), …

    Each call does `operations` of them and should take well under a time slice, so that a process that
    has to wait for its core in some calls is not slower in most.
    """
    took = []
    for run_number in range(runs):
        start = time.perf_counter()
        work(run_number)
        took.append(time.perf_counter() - start)
    return statistics.median(took) / operations * 1e6


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def run(name: str, rows: Callable[[Options], Iterable[Row]], arguments: Sequence[str]) -> int:
    """Parse the command line, print each row when it is there, write the JSON file."""
    parser = argparse.ArgumentParser(prog=f"python -m bench {name}")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds: under 50 s")
    parser.add_argument("--trace", metavar="FILE", type=Path, help="for eviction: the requests to replay")
    chosen = parser.parse_args(arguments)
    done = []
    for row in rows(Options(quick=chosen.quick, trace=chosen.trace)):
        print(
            f"{row.name:<34} {row.ours:>10.3f} {row.unit:<6} {row.peer}: {row.peer_value:.3f}"
            f"   ratio {row.ratio:.3f}",
            flush=True,
        )
        done.append(row)
    if chosen.json is not None:
        chosen.json.write_bytes(msgspec.json.format(msgspec.json.encode(done), indent=2) + b"\n")
    return 0 if done else _nothing(name)


def _nothing(name: str) -> int:
    print(f"bench {name} has measured nothing", file=sys.stderr)
    return 1
