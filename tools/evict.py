"""Forget rows for good: from every tier, with what is being saved, and so that they do not come back.

    rows that match ─► Evict ─► look again, until none matches

The coordinator answers when the files are gone and their directories are synchronised. Whatever began before
saves nothing any more: the second look finds what was published between the first one and its message, and
the third nothing.

Several conditions choose the rows that meet all of them. With none that matches, saves in flight are
refused all the same.

What an audit has set aside is chosen like any row, by what its slab says.

Leaves out: what workers hold in their own contexts; each lets go of it with its next request.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from shmcache import kvc
from shmcache.config import parse_duration
from shmcache.connection import Connection
from shmcache.errors import ConfigError, CorruptSlab, ForeignObject, NoCoordinator, ShmcacheError
from shmcache.identity import fingerprint, tenant_hash
from shmcache.protocol import MAX_EVICTED, Evict, Evicted, Tier
from shmcache.shm import Mapping
from shmcache.tools.explain import Prompt
from shmcache.tools.rows import Listed, asides, find_key, listed, report, tell_total
from shmcache.view import View, look

HELP = "forget rows for good: by key, model, tenant, age or text"

_ANSWER_S = 120
_MOST_LOOKS = 100
_HEX_DIGITS = 8  # of a model's fingerprint that name it

Condition = Callable[[View, Path, Listed], bool]
"""Whether a row meets it, by where its slab lies and what that says."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What was forgotten, or with dry_run would be. failed: files that could not be removed."""

    dry_run: bool
    rows: list[Listed]
    forgotten: int
    failed: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Conditions; rows that meet all that are given are chosen."""
    parser.add_argument(
        "--key", action="append", metavar="KEY", help="this row; a beginning of its key will do"
    )
    parser.add_argument("--model", metavar="MODEL", help="of this GGUF file, model name, or fingerprint")
    parser.add_argument("--tenant", metavar="NAME", help="of this tenant")
    parser.add_argument("--older-than", metavar="AGE", help="made longer ago than this, as 90m, 12h or 7d")
    parser.add_argument(
        "--prefix",
        type=Path,
        metavar="FILE",
        help="whose text begins with what the file holds (a line break at its end aside); needs --model GGUF",
    )
    parser.add_argument("--all", action="store_true", help="every row")
    parser.add_argument("--dry-run", action="store_true", help="say what would go, and change nothing")


def run(arguments: argparse.Namespace) -> int:
    """Forget, and say what; 1 where a file could not be removed."""
    result = forget(arguments.namespace, conditions(arguments), dry_run=arguments.dry_run)
    if arguments.json:
        print(msgspec.json.encode(result).decode())
    else:
        print("\n".join(_report(result)))
    return 1 if result.failed else 0


def conditions(arguments: argparse.Namespace) -> list[Condition]:
    """What the options ask for. Raises ConfigError where they ask for nothing, or for too little."""
    found: list[Condition] = []
    if arguments.key:
        found.append(_has_key(tuple(arguments.key)))
    if arguments.model is not None:
        found.append(_is_of_model(arguments.model))
    if arguments.tenant is not None:
        wanted = tenant_hash(arguments.tenant).hex()
        found.append(lambda _view, _path, about: about.tenant == wanted)
    if arguments.older_than is not None:
        before_unix_s = time.time() - parse_duration(arguments.older_than)
        found.append(lambda _view, _path, about: about.created_unix_s < before_unix_s)
    if arguments.prefix is not None:
        found.append(_begins_with(arguments.prefix, arguments.model))
    if not found and not arguments.all:
        raise ConfigError("say which rows: --key, --model, --tenant, --older-than, --prefix, or --all")
    if found and arguments.all:
        raise ConfigError("--all leaves nothing to choose: drop it, or the other conditions")
    return found


def _has_key(beginnings: tuple[str, ...]) -> Condition:
    keys: set[str] = set()

    def condition(view: View, _path: Path, about: Listed) -> bool:
        if not keys:
            keys.update(find_key(view, beginning).hex() for beginning in beginnings)
        return about.key in keys

    return condition


def _is_of_model(model: str) -> Condition:
    prints: dict[str, str] = {}

    def condition(_view: View, _path: Path, about: Listed) -> bool:
        if Path(model).is_file():
            mode = about.fingerprint_mode
            if mode not in prints:
                prints[mode] = fingerprint(model, mode).hex()  # type: ignore[arg-type]
            return about.model_fp == prints[mode]
        is_print = len(model) >= _HEX_DIGITS and about.model_fp.startswith(model.lower())
        return about.model == model or is_print

    return condition


def _begins_with(file: Path, model: str | None) -> Condition:
    """By the rows' own token ids and the model's vocabulary; rows of other models never match."""
    if model is None or not Path(model).is_file():
        raise ConfigError("--prefix needs the model's file, to read what rows hold: --model GGUF")
    try:
        text = file.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the prefix cannot be read: {error}") from error
    if not text:
        raise ConfigError(f"{file} is empty, and every row begins with nothing: use --all")
    prefix = Prompt(Path(model), text)

    def condition(_view: View, path: Path, _about: Listed) -> bool:
        try:
            with Mapping.open(path) as mapping:
                token_ids = kvc.parse(mapping.bytes).token_ids.tolist()
        except (OSError, CorruptSlab, ForeignObject):
            return False
        return prefix.renderer.render(token_ids).text.startswith(prefix.text.text)

    return condition


def forget(namespace: str, wanted: list[Condition], *, dry_run: bool = False) -> Result:
    """Forget all rows that meet every condition; with none, all rows.

    Raises:
        NoCoordinator, ShmcacheError: nobody answers. What was told before that is forgotten.
        ConfigError: a key that no row has, or several.
    """
    gone: dict[bytes, Listed | None] = {}
    forgotten = failed = 0
    with contextlib.closing(Connection(namespace)) as connection:
        for number in range(_MOST_LOOKS):
            with look(namespace) as view:
                chosen = dict(_chosen(view, wanted))
            gone |= chosen
            if dry_run or (number and not chosen):
                break
            for keys in _parts(list(chosen)):
                answer = _ask(connection, keys)
                forgotten += answer.rows
                failed += answer.failed
    rows = [row for row in gone.values() if row is not None]
    return Result(dry_run=dry_run, rows=rows, forgotten=forgotten, failed=failed)


def _chosen(view: View, wanted: list[Condition]) -> Iterator[tuple[bytes, Listed | None]]:
    """Rows that meet all conditions; one that cannot be read meets no condition, but is one of all."""
    for row in view.rows():
        about = listed(view, row)
        if not wanted or (
            about is not None and _meets(view, view.slab_path(Tier(row.tier), row.key), about, wanted)
        ):
            yield row.key, about
    for path, about in asides(view):
        if _meets(view, path, about, wanted):
            yield bytes.fromhex(about.key), about


def _meets(view: View, path: Path, about: Listed, wanted: list[Condition]) -> bool:
    return all(condition(view, path, about) for condition in wanted)


def _parts(keys: list[bytes]) -> Iterator[list[bytes]]:
    """As many as fit a message each; also none at all is told, for the sake of saves in flight."""
    for start in range(0, max(1, len(keys)), MAX_EVICTED):
        yield keys[start : start + MAX_EVICTED]


def _ask(connection: Connection, keys: list[bytes]) -> Evicted:
    answer = connection.ask(lambda head: Evict(**head, keys=keys), _ANSWER_S * 1_000_000_000)
    if isinstance(answer, Evicted):
        return answer
    with look(connection.names.namespace) as view:
        if not view.coordinator_runs:
            raise NoCoordinator(view.names.namespace)
    raise ShmcacheError(f"the coordinator has not answered within {_ANSWER_S} s: ask again")


def _report(result: Result) -> Iterator[str]:
    yield from report(result.rows, time.time())
    if result.dry_run:
        yield f"would forget {tell_total(result.rows)}; nothing was changed"
    else:
        yield f"forgotten: {result.forgotten:,} rows, and every save of what had begun before"
    if result.failed:
        yield f"{result.failed:,} files could not be removed (the coordinator's log says why): ask again"
