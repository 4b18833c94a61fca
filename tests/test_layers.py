"""Data flows one way: the import table of the project, checked from the real imports.

The table is the layout that INTERNALS.md explains. A module may import what stands in its line, and `errors`
and `config`, which lean on nothing else of ours.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "shmcache"

# module: what it may import from shmcache, besides errors and config
LAYERS: dict[str, str] = {
    "errors": "",
    "config": "",
    "shm": "",
    "key": "",
    "identity": "key",
    "kvc": "key",
    "policy": "",
    "lru": "",
    "admission": "",
    "eviction": "policy lru",
    "protocol": "key",
    "mq": "key shm protocol",
    "reservation": "protocol",
    "claims": "",
    "control": "shm",
    "patience": "",
    "page": "shm patience",
    "buckets": "",
    "index": "shm key page buckets",
    "slots": "buckets",
    "slab": "shm kvc page",
    "tiers": "shm key kvc protocol slab",
    "decisions.table": "slots",
    "decisions.db": "shm decisions.table",
    "view": "shm key kvc protocol control page index tiers decisions.table",
    "coordinator": "policy reservation eviction admission protocol key kvc index tiers page control",
    "decisions.arbiter": "claims coordinator lru protocol slots decisions.table decisions.db",
    "decisions.service": "control coordinator page protocol decisions.arbiter decisions.table decisions.db",
    "connection": "shm protocol mq control page index decisions.table",
    "client": "connection shm key identity kvc policy reservation protocol mq control page index slab tiers",
    "aio": "client key",
    "observe": "protocol page view",
    "check": "shm protocol index slab tiers view",
    "decisions": "shm connection protocol page decisions.table",
    "server": "coordinator policy decisions.service connection shm key kvc protocol mq control page patience "
    "index slab tiers",
    "workers": "shm key identity kvc policy protocol page slab client decisions",
    "workers.serve": "workers key identity client observe decisions",
    "tools": "shm key identity kvc policy protocol mq control page index tiers connection client view "
    "observe check server workers workers.serve decisions decisions.db decisions.table",
}
EVERYBODY = {"errors", "config"}

# numpy takes 139 ms to import, more than everything else between a coordinator's kill and its first reply.
NUMPY_FREE = "server"


def modules() -> dict[str, Path]:
    """Dotted name below shmcache → source file; workers and tools through their links."""
    found = {}
    for folder in [PACKAGE, *subpackages()]:
        for path in folder.glob("*.py"):
            dotted = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            found["" if dotted == "__init__" else dotted.removesuffix(".__init__")] = path
    return found


def subpackages() -> list[Path]:
    """The folders of shmcache that are packages, at either depth."""
    return sorted(path.parent for at in ("*", "*/*") for path in PACKAGE.glob(f"{at}/__init__.py"))


def layer(module: str) -> str:
    """Which line of the table speaks for a module: its own, else its package's."""
    while module not in LAYERS and "." in module:
        module = module.rpartition(".")[0]
    return module


def imports(path: Path) -> Iterator[str]:
    """What a file imports from shmcache, as dotted names below it; imports inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (
                alias.name.removeprefix("shmcache.") for alias in node.names if "shmcache." in alias.name
            )
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute, so that the table can be checked"
            module = node.module or ""
            if module == "shmcache":
                yield from (alias.name for alias in node.names if alias.name != "__version__")
            elif module.startswith("shmcache."):
                yield module.removeprefix("shmcache.")


def test_every_module_has_its_line_in_the_table() -> None:
    unknown = {module for module in modules() if module and layer(module) not in LAYERS}
    assert not unknown, f"new modules without a line in LAYERS: {sorted(unknown)}"


def test_a_module_imports_only_what_lies_below_it() -> None:
    wrong = []
    for module, path in modules().items():
        if not module:
            continue  # the package itself is the public surface and names what it offers
        own = layer(module)
        allowed = {own, *LAYERS[own].split(), *EVERYBODY}
        wrong += [f"{module} imports {name}" for name in imports(path) if layer(name) not in allowed]
    assert not wrong


def test_the_table_has_no_circle() -> None:
    done: set[str] = set(EVERYBODY)
    left = {name: set(allowed.split()) for name, allowed in LAYERS.items() if name not in EVERYBODY}
    while ready := {name for name, needs in left.items() if needs <= done}:
        done |= ready
        left = {name: needs for name, needs in left.items() if name not in ready}
    assert not left


@pytest.mark.skipif("server" not in modules(), reason="there is no coordinator yet")
def test_the_coordinator_starts_without_numpy() -> None:
    code = f"import sys, shmcache.{NUMPY_FREE}; print('numpy' in sys.modules, 'llama_cpp' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output.split() == ["False", "False"]
