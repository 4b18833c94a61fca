"""Let a pinned row be evicted again, like any other."""

from __future__ import annotations

import argparse

from shmcache.tools import pin

HELP = "let a pinned row be evicted again"

add_arguments = pin.add_arguments


def run(arguments: argparse.Namespace) -> int:
    """Unpin it; 1 where that does not hold."""
    return pin.set_pin(arguments, pinned=False)
