"""What is left of a namespace that nobody uses any more? Its directory, segments and queue go.

Its decisions, which lie in a file of their own, go only where that is asked for; the disk tier stays.

A coordinator leaves its rows in /dev/shm on purpose: the next one takes them over. This is for namespaces
that have no next one.

Invariants
    I1  The coordinator's lock is held while things go, so that none starts in the middle.
Leans on: a worker that still maps a row keeps its bytes until it lets go, and sees that the control page
is another one (connection).
Leaves out: rows of a living cache, and another user's things.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil

from shmcache import mq, shm
from shmcache.control import OwnedControlPage
from shmcache.decisions.db import default_path
from shmcache.decisions.db import remove as remove_decisions
from shmcache.shm import Names

HELP = "remove what a namespace without a coordinator has left in /dev/shm, and its queue"


def remove(namespace: str, *, decisions: bool = True) -> list[str]:
    """Remove all that the namespace has in /dev/shm, its queue, and its decisions if wanted; name it all.

    Raises AlreadyRunning, ForeignObject.
    """
    names = Names(namespace)
    removed = []
    try:
        os.close(shm.open_directory(names.directory))
    except FileNotFoundError:
        removed += _remove_flat(names)
    else:
        with contextlib.closing(OwnedControlPage.acquire(names)):
            # The directory last: without the control page nothing keeps the next coordinator out.
            removed += _remove_flat(names)
            shutil.rmtree(names.directory)
        removed.insert(0, str(names.directory))
    return removed + (remove_decisions(default_path(namespace)) if decisions else [])


def _remove_flat(names: Names) -> list[str]:
    """Segments and queue, which lie beside the directory."""
    removed = []
    for segment in names.epoch_segments():
        segment.unlink()
        removed.append(str(segment))
    if mq.unlink(names):
        removed.append(f"message queue {names.queue}")
    return removed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whether decisions go too."""
    parser.add_argument(
        "--decisions", action="store_true", help="its decisions too (shmcache decisions export keeps a copy)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print what went."""
    removed = remove(arguments.namespace, decisions=arguments.decisions)
    if arguments.json:
        print(json.dumps({"namespace": arguments.namespace, "removed": removed}))
    else:
        print("\n".join(f"removed {name}" for name in removed) or "nothing was there")
    return 0
