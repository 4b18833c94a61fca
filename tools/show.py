"""What is known about one row? Everything that its slab says but its token ids and its state.

Leaves out: whether its bytes are whole (check), what its text is (explain tells from a prompt).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from datetime import datetime

import msgspec

from shmcache import kvc
from shmcache.errors import mib
from shmcache.protocol import Tier
from shmcache.shm import Mapping
from shmcache.tools import text
from shmcache.tools.rows import Listed, find, listed
from shmcache.view import View, look

HELP = "everything that is known about one row"


class Batches(msgspec.Struct, frozen=True):
    """A part of the split that made a row: `repeats` batches of `length` tokens."""

    length: int
    repeats: int
    n_ubatch: int
    n_threads: int


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """A row, where it lies, and who made it how."""

    row: Listed
    path: str
    quant: str
    context_size: int
    hostname: str
    shmcache_version: str
    split: list[Batches]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The row."""
    parser.add_argument("key", metavar="KEY", help="its key in hex, or a beginning that no other has")


def run(arguments: argparse.Namespace) -> int:
    """Print it; 1 where it has left meanwhile."""
    with look(arguments.namespace) as view:
        shown = show(view, arguments.key)
    if shown is None:
        print("it has just left")
        return 1
    if arguments.json:
        print(msgspec.json.encode(shown).decode())
    else:
        print("\n".join(_report(shown, time.time())))
    return 0


def show(view: View, key: str) -> Shown | None:
    """Look one row up. Raises ConfigError for a key that none or several have, CorruptSlab, ForeignObject."""
    found = find(view, key)
    row = listed(view, found)
    if row is None:
        return None
    path = view.slab_path(Tier(found.tier), found.key)
    with Mapping.open(path) as mapping:
        image = kvc.parse(mapping.bytes)
        meta = image.meta
        split = [
            Batches(piece.length, piece.repeats, piece.n_ubatch, piece.n_threads) for piece in image.pieces
        ]
    return Shown(
        row=row,
        path=str(path),
        quant=meta.quant_name,
        context_size=meta.context_size,
        hostname=meta.hostname,
        shmcache_version=meta.shmcache_version,
        split=split,
    )


def _report(shown: Shown, now_unix_s: float) -> Iterator[str]:
    row = shown.row
    what = f"head, {row.reason}" if row.is_head else row.reason
    yield f"key          {row.key}"
    yield f"model        {row.model} {shown.quant}, {row.model_fp[:16]} ({row.fingerprint_mode})"
    yield f"context      {shown.context_size:,} tokens, {row.context[:16]}"
    yield f"tenant       {row.tenant or 'none'}"
    yield f"tier         {row.tier}{', pinned' if row.is_pinned else ''}"
    yield f"file         {shown.path}"
    yield f"size         {row.tokens:,} tokens, {row.text_bytes:,} bytes of text, {mib(row.bytes)}"
    yield f"saved        {what}, {_when(row.created_unix_s, now_unix_s)}"
    yield f"used         {row.hits:,} times, {_when(row.used_unix_s, now_unix_s)}"
    yield f"made from    {row.made_from or 'nothing'}"
    yield f"made by      shmcache {shown.shmcache_version} on {shown.hostname}"
    yield "batches      " + ", ".join(f"{part.repeats} x {part.length}" for part in shown.split)


def _when(unix_s: int, now_unix_s: float) -> str:
    moment = datetime.fromtimestamp(unix_s).astimezone().isoformat(" ", "seconds")
    return f"{moment} ({text.age(now_unix_s - unix_s)} ago)"
