"""What must start over in a forked child? Locks that a thread of the parent held, and calls in flight.

Leans on: os.register_at_fork runs before anything else of the child.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """Something that says how it starts over."""

    def after_fork(self) -> None:
        """In the child, before anything else."""


_alive: weakref.WeakSet[Forked] = weakref.WeakSet()


def watch(thing: Forked) -> None:
    """Have it start over in every child that is forked while it lives."""
    _alive.add(thing)


def _after_fork_in_child() -> None:
    for thing in list(_alive):
        thing.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
