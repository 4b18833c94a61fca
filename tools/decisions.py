"""What has been decided, and what should be known beforehand? Look, pre-warm, hand over, forget.

    stat                 figures of the coordinator's table
    show [KEY…]          decisions as JSON, all or those whose key begins so
    export FILE          all of them, a line of JSON each
    import FILE          add what a file holds; who is there already stays (the first decision wins)
    warm FILE            compute what a file asks, through a GGUF model or a function, unless it is decided
    delete KEY…          forget, for everybody
    prune                remove what has expired

A line of an export: {"key": hex, "result": …, "expires": Unix seconds or null, "written": Unix seconds}.
A line to warm with: {"state": …, "questions": {…}}. A file named `-` is standard input or output.

Leaves out: what a decision means (shmcache.decisions), the SQLite file (the coordinator keeps it locked).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from shmcache.decisions import DecisionCache, SharedStore
from shmcache.decisions.codec import NotStorable, encode
from shmcache.decisions.codec import decode as decode_value
from shmcache.decisions.key import KEY_BYTES
from shmcache.decisions.stores import Item
from shmcache.decisions.table import Decision
from shmcache.errors import ConfigError, CorruptDecision, NoCoordinator
from shmcache.tools.serve import key_value
from shmcache.tools.text import bar
from shmcache.view import look

if TYPE_CHECKING:
    from shmcache.workers.decide import DecisionModel

HELP = "look at decisions, compute them ahead, hand them over, forget them"

DURABILITY = (
    "memory: it may decide again after a crash",
    "commit: survives any kill",
    "full: survives power loss",
)
"""In words, by the figure of that name."""

_BATCH = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommands."""
    # Also behind the action, where a default would overwrite what stands before it.
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument("--namespace", help="whose decisions")
    common.add_argument("--json", action="store_true", help="end with one line of JSON")
    parsers = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(action: str, text: str) -> argparse.ArgumentParser:
        return parsers.add_parser(action, help=text, description=text, parents=[common])

    add("stat", "figures of the decision table")
    show = add("show", "decisions as JSON")
    show.add_argument("keys", nargs="*", metavar="KEY", help="beginnings of keys in hex; none: all")
    export = add("export", "write all decisions, a line of JSON each")
    export.add_argument("file", metavar="FILE")
    importing = add("import", "add what a file holds; the first decision wins")
    importing.add_argument("file", metavar="FILE")
    warm = add("warm", "compute what a file asks, unless it is decided")
    warm.add_argument("file", metavar="FILE", help="lines of {state, questions}")
    warm.add_argument(
        "--with",
        dest="compute",
        required=True,
        metavar="GGUF|MODULE:NAME",
        help="what answers: a model's file, a function of (state, questions), or an object with `predict`",
    )
    warm.add_argument(
        "--llama",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument of llama_cpp.Llama for a GGUF, like n_ctx=4096; again for more",
    )
    warm.add_argument("--fingerprint", help="stands for the model in every key; default: the model's own")
    warm.add_argument("--ttl", type=float, metavar="S", help="seconds that they live; default: for ever")
    delete = add("delete", "forget decisions, for everybody")
    delete.add_argument("keys", nargs="+", metavar="KEY", help="beginnings of keys in hex")
    add("prune", "remove what has expired")


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked. Raises NoCoordinator where there is no table."""
    with contextlib.closing(SharedStore(arguments.namespace)) as store:
        return _ACTIONS[arguments.action](store, arguments)


def _stat(store: SharedStore, arguments: argparse.Namespace) -> int:
    figures = store.stats()
    if arguments.json:
        print(json.dumps(figures))
        return 0
    for name, value in figures.items():
        shown = DURABILITY[value] if name == "durability" else f"{value:,}"
        print(f"{name:<18} {shown}")
    return 0


def _show(store: SharedStore, arguments: argparse.Namespace) -> int:
    shown = 0
    for decision in _chosen(store, arguments.keys):
        print(json.dumps(_line(decision)))
        shown += 1
    return 0 if shown or not arguments.keys else 1


def _chosen(store: SharedStore, beginnings: list[str]) -> Iterator[Decision]:
    """Decisions whose key in hex begins with one of these; all where there is none. Raises ConfigError."""
    for beginning in beginnings:
        if not set(beginning) <= set("0123456789abcdef"):
            raise ConfigError(f"{beginning!r} is no beginning of a key: write hexadecimal digits")
    for decision in store.decisions():
        if not beginnings or decision.key.hex().startswith(tuple(beginnings)):
            yield decision


def _line(decision: Decision) -> dict[str, Any]:
    try:
        result = decode_value(decision.value)
    except CorruptDecision as error:
        result = {"error": str(error)}
    return {
        "key": decision.key.hex(),
        "result": result,
        "expires": decision.expires_unix_s,
        "written": decision.written_unix_s,
    }


def _export(store: SharedStore, arguments: argparse.Namespace) -> int:
    count = 0
    with _opened(arguments.file, "w") as stream:
        for decision in store.decisions():
            stream.write(json.dumps(_line(decision), ensure_ascii=False) + "\n")
            count += 1
    return _say(arguments, exported=count)


def _import(store: SharedStore, arguments: argparse.Namespace) -> int:
    counts = {"added": 0, "known": 0, "held": 0, "refused": 0}
    items: list[Item] = []
    for number, line in _lines(arguments.file):
        item = _item(line)
        if item is None:
            print(f"line {number} is left out: not a decision, or expired", file=sys.stderr)
            counts["refused"] += 1
        else:
            items.append(item)
    for start in range(0, len(items), _BATCH):
        batch = items[start : start + _BATCH]
        before = [store.get(key) for key, _value, _expires in batch]
        for (_key, value, _expires), held, first in zip(batch, before, store.add_many(batch), strict=True):
            counts["held" if first != value else "added" if held is None else "known"] += 1
    return _say(arguments, **counts)


def _item(line: Any) -> Item | None:
    """A line of an export as an item to add; None where it is none any more."""
    try:
        key, expires = bytes.fromhex(line["key"]), line["expires"]
        is_alive = expires is None or expires > time.time()
        return (key, encode(line["result"]), expires) if len(key) == KEY_BYTES and is_alive else None
    except (KeyError, TypeError, ValueError, NotStorable):
        return None


def _delete(store: SharedStore, arguments: argparse.Namespace) -> int:
    keys = [decision.key for decision in _chosen(store, arguments.keys)]
    return _say(arguments, deleted=sum(store.delete(key) for key in keys))


def _prune(store: SharedStore, arguments: argparse.Namespace) -> int:
    return _say(arguments, pruned=store.prune())


def _warm(store: SharedStore, arguments: argparse.Namespace) -> int:
    with look(arguments.namespace) as view:
        if not view.coordinator_runs:
            raise NoCoordinator(arguments.namespace)
    requests = [request for _, request in _lines(arguments.file)]
    failed = 0
    with contextlib.ExitStack() as stack:
        model, compute = _answerer(arguments, stack)
        # Over the coordinator's store alone: what is not kept there is not warmed, and counted.
        cache = DecisionCache(store, fingerprint=arguments.fingerprint, ttl=arguments.ttl)
        show = stack.enter_context(bar(len(requests)))
        for number, request in enumerate(requests, 1):
            try:
                cache.get_or_compute(model, request["state"], request["questions"], compute)
            except Exception as error:
                print(f"\n{error!r}", file=sys.stderr)
                failed += 1
            show(number)
        info = cache.cache_info()
    not_kept = info["errors"] + sum(info["uncached"].values())
    computed = info["misses"] - failed
    return _say(arguments, computed=computed, known=info["hits"], failed=failed, not_kept=not_kept)


def _answerer(
    arguments: argparse.Namespace, stack: contextlib.ExitStack
) -> tuple[Any, Callable[[Any, Any], Any]]:
    """What stands for the model in keys, and the function that answers. Raises ConfigError."""
    name = arguments.compute
    if name.endswith(".gguf") or Path(name).is_file():
        model = stack.enter_context(_model(arguments))
        return model, model.predict
    module, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--with {name}: {error}") from error
    predict = getattr(found, "predict", None)
    return (name, found) if predict is None else (found, predict)


def _model(arguments: argparse.Namespace) -> DecisionModel:
    """A model, with its states in the same namespace's cache. llama_cpp is imported only here."""
    if not Path(arguments.compute).is_file():
        raise ConfigError(f"there is no file {arguments.compute}")
    try:
        from shmcache.workers.decide import DecisionModel  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"{error}: pip install 'shmcache[llama]'") from error
    options = dict(map(key_value, arguments.llama))
    return DecisionModel(arguments.compute, cache=arguments.namespace, **options)


def _lines(file: str) -> Iterator[tuple[int, Any]]:
    """Numbered lines of JSON. Raises ConfigError for what is none."""
    with _opened(file, "r") as stream:
        number = 0
        try:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield number, json.loads(line)
        except ValueError as error:  # no JSON, or no UTF-8
            raise ConfigError(f"{file}, line {number}: {error}") from error


@contextlib.contextmanager
def _opened(file: str, mode: Literal["r", "w"]) -> Iterator[TextIO]:
    if file == "-":
        yield sys.stdin if mode == "r" else sys.stdout
        return
    try:
        with Path(file).open(mode, encoding="utf-8") as stream:
            yield stream
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error


def _say(arguments: argparse.Namespace, **counts: int) -> int:
    """The counts, for people or as JSON; 1 if something failed."""
    if arguments.json:
        print(json.dumps(counts))
    else:
        text = ", ".join(f"{count:,} {name}" for name, count in counts.items())
        print(text, file=sys.stderr if getattr(arguments, "file", "") == "-" else sys.stdout)
    return 1 if counts.get("failed") or counts.get("not_kept") else 0


_ACTIONS: dict[str, Callable[[SharedStore, argparse.Namespace], int]] = {
    "stat": _stat,
    "show": _show,
    "export": _export,
    "import": _import,
    "warm": _warm,
    "delete": _delete,
    "prune": _prune,
}
