"""The `shmcache` command: which tool answers this question?

Each subcommand is a module beside this one with `HELP`, `add_arguments(parser)` and `run(arguments) -> int`;
one that never works on the user's own namespace has a `NAMESPACE` too.

Leaves out: the coordinator, which is a command of its own (`shmcache-coordinator`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from shmcache import __version__
from shmcache.config import check_namespace
from shmcache.errors import ConfigError, ShmcacheError
from shmcache.tools import (
    check,
    clean,
    decisions,
    demo,
    evict,
    explain,
    ls,
    pin,
    serve,
    show,
    stat,
    unpin,
    warm,
)

SUBCOMMANDS: dict[str, ModuleType] = {
    "stat": stat,
    "ls": ls,
    "show": show,
    "check": check,
    "explain": explain,
    "evict": evict,
    "pin": pin,
    "unpin": unpin,
    "warm": warm,
    "decisions": decisions,
    "clean": clean,
    "serve": serve,
    "demo": demo,
}
USAGE_ERROR = 2


def make_parser() -> argparse.ArgumentParser:
    """All subcommands with their options."""
    parser = argparse.ArgumentParser(
        prog="shmcache", description="Look at, and try, the KV-state cache that llama.cpp workers share."
    )
    parser.add_argument("--version", action="version", version=f"shmcache {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, module in SUBCOMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        command.add_argument(
            "--namespace",
            default=getattr(module, "NAMESPACE", os.environ.get("SHMCACHE_NAMESPACE", "default")),
            help="whose cache (default: %(default)s)",
        )
        command.add_argument("--json", action="store_true", help="end with one line of JSON")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 1 when the tool says no, or 2 for wrong usage."""
    parsed = make_parser().parse_args(arguments)
    try:
        check_namespace(parsed.namespace)
        return int(parsed.run(parsed))
    except ConfigError as error:
        print(f"shmcache: {error}", file=sys.stderr)
        return USAGE_ERROR
    except ShmcacheError as error:
        print(f"shmcache: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
