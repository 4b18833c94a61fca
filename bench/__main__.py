"""`python -m bench NAME [--json FILE] [--quick]`: which bench?

A bench is a module of this package with `rows(options) -> Iterable[Row]`; its name is the module's.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys

import bench
from bench.harness import run

_NOT_BENCHES = {"__main__", "eviction_trace", "harness", "hits", "states"}


def names() -> list[str]:
    """The benches that exist."""
    return sorted(
        module.name for module in pkgutil.iter_modules(bench.__path__) if module.name not in _NOT_BENCHES
    )


def main(arguments: list[str]) -> int:
    """Run the bench that the first argument names with the rest."""
    if not arguments or arguments[0] not in names():
        print(f"usage: python -m bench {{{','.join(names())}}} [--json FILE] [--quick]", file=sys.stderr)
        return 2
    name, *rest = arguments
    # Before llama.cpp is loaded: threads that wait for each other in a busy loop measure who else is there.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    return run(name, importlib.import_module(f"bench.{name}").rows, rest)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
