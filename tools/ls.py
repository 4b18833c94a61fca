"""Which rows does the cache hold? A line for each, those used last first.

Hits and last use are up to a minute old. Leaves out: sums (stat), one row's details (show).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import msgspec

from shmcache.config import TIERS
from shmcache.tools.rows import Listed, all_listed, report, tell_total
from shmcache.view import look

HELP = "list the rows: model, tier, tokens, bytes, hits, age"

_SORTED_BY: dict[str, Callable[[Listed], float]] = {
    "used": lambda row: row.used_unix_s,
    "age": lambda row: -row.created_unix_s,
    "bytes": lambda row: row.bytes,
    "hits": lambda row: row.hits,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which rows, and in which order."""
    parser.add_argument("--tier", choices=TIERS, help="of this tier alone")
    parser.add_argument("--sort", choices=_SORTED_BY, default="used", help="the most first (default: used)")


def run(arguments: argparse.Namespace) -> int:
    """Print the rows. Raises NoCoordinator where the namespace does not exist."""
    with look(arguments.namespace) as view:
        rows = [row for row in all_listed(view) if arguments.tier in (None, row.tier)]
    rows.sort(key=_SORTED_BY[arguments.sort], reverse=True)
    if arguments.json:
        print(msgspec.json.encode(rows).decode())
    else:
        print("\n".join([*report(rows, time.time()), tell_total(rows)]))
    return 0
