"""Keep a row: no budget and no age evicts it until it is unpinned. A restart and a reboot know it, too.

A pinned row still counts in its tier's budget. `evict` takes it all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys

from shmcache.connection import Connection
from shmcache.errors import NoCoordinator
from shmcache.protocol import Pin, Pinned
from shmcache.tools.rows import find
from shmcache.view import look

HELP = "keep a row whatever the budget"

_ANSWER_NS = 10_000_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The row."""
    parser.add_argument("key", metavar="KEY", help="its key in hex, or a beginning that no other has")


def run(arguments: argparse.Namespace) -> int:
    """Pin it; 1 where that does not hold."""
    return set_pin(arguments, pinned=True)


def set_pin(arguments: argparse.Namespace, *, pinned: bool) -> int:
    """Ask the coordinator, and say what it says. Raises NoCoordinator, ConfigError."""
    with look(arguments.namespace) as view:
        key = find(view, arguments.key).key
    with contextlib.closing(Connection(arguments.namespace)) as connection:
        answer = connection.ask(lambda head: Pin(**head, key=key, pinned=pinned), _ANSWER_NS)
    if not isinstance(answer, Pinned):
        raise NoCoordinator(arguments.namespace)
    if arguments.json:
        print(json.dumps({"key": key.hex(), "pinned": pinned, "done": answer.done, "why": answer.why}))
    elif answer.done:
        print(f"{key.hex()[:16]} is {'pinned' if pinned else 'not pinned any more'}")
    else:
        print(f"{key.hex()[:16]}: {answer.why}", file=sys.stderr)
    return 0 if answer.done else 1
