"""Which rows are there? Read from shared memory and from the slabs themselves, without a word to anybody.

    index ─► row ─► first 4 KiB of its slab ─► Listed

Hits and last use are those that the slab says: the coordinator stores them once a minute.

A slab that an audit found wrong is nobody's row any more, and listed as set aside.

Owner: nobody; it reads. Readers: ls, show, evict, pin.
Leaves out: what a row's text is (explain), whether it is whole (check).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from shmcache.errors import ConfigError, CorruptSlab, ForeignObject, mib
from shmcache.index import Row
from shmcache.kvc import HEAD_DETAIL
from shmcache.protocol import Tier
from shmcache.tiers.base import Slab
from shmcache.tools import text
from shmcache.view import View, slab_at

SHORTEST_KEY = 4

HEAD = ("key", "model", "tier", "tokens", "bytes", "hits", "used", "age", "saved", "pinned")


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """One row, as its slab describes it. Hashes in hex; context is what the model was set up as."""

    key: str
    model: str
    model_fp: str
    fingerprint_mode: str
    context: str
    tenant: str | None
    tier: str
    tokens: int
    bytes: int
    text_bytes: int
    hits: int
    created_unix_s: int
    used_unix_s: int
    reason: str
    is_head: bool
    is_pinned: bool
    is_aside: bool
    made_from: str | None


def listed(view: View, row: Row) -> Listed | None:
    """Read a row's slab; None where it has left meanwhile, or cannot be read."""
    try:
        return _listed(Tier(row.tier), view.slab(row))
    except (OSError, CorruptSlab, ForeignObject):
        return None


def asides(view: View) -> Iterator[tuple[Path, Listed]]:
    """Every slab that was set aside and can be read, and where it lies."""
    for tier, path in view.asides():
        with contextlib.suppress(OSError, CorruptSlab, ForeignObject):
            yield path, _listed(tier, slab_at(path, bytes.fromhex(path.stem)), is_aside=True)


def _listed(tier: Tier, slab: Slab, *, is_aside: bool = False) -> Listed:
    meta = slab.head.meta
    return Listed(
        key=meta.key.hex(),
        model=meta.model_name or "unnamed",
        model_fp=meta.model_fp.hex(),
        fingerprint_mode=meta.fingerprint_mode,
        context=meta.ctx_params_hash.hex(),
        tenant=meta.tenant_hash.hex() if meta.tenant_hash is not None else None,
        tier=tier.name.lower(),
        tokens=meta.token_count,
        bytes=slab.slab_bytes,
        text_bytes=meta.text_bytes,
        hits=meta.hit_count,
        created_unix_s=meta.created_unix_s,
        used_unix_s=meta.last_used_unix_s,
        reason=meta.save_reason.name.lower(),
        is_head=meta.reason_detail == HEAD_DETAIL,
        is_pinned=slab.is_pinned,
        is_aside=is_aside,
        made_from=meta.base_key.hex() if meta.base_key is not None else None,
    )


def all_listed(view: View) -> Iterator[Listed]:
    """Every row whose slab can be read, and what was set aside, in no order."""
    for row in view.rows():
        if (found := listed(view, row)) is not None:
            yield found
    for _, aside in asides(view):
        yield aside


def find(view: View, beginning: str) -> Row:
    """The one row whose key begins so, in hex. Raises ConfigError for none and for several."""
    rows = {row.key: row for row in view.rows()}
    return rows[_only(rows, beginning)]


def find_key(view: View, beginning: str) -> bytes:
    """The one key that begins so, of rows and of what was set aside. Raises ConfigError as find."""
    return _only([*(row.key for row in view.rows()), *_aside_keys(view)], beginning)


def _aside_keys(view: View) -> Iterator[bytes]:
    for _, aside in asides(view):
        yield bytes.fromhex(aside.key)


def _only(keys: Iterable[bytes], beginning: str) -> bytes:
    wanted = beginning.lower()
    if len(wanted) < SHORTEST_KEY or set(wanted) - set("0123456789abcdef"):
        raise ConfigError(f"{beginning!r} is not the beginning of a key: {SHORTEST_KEY} hex digits or more")
    found = {key for key in keys if key.hex().startswith(wanted)}
    if len(found) != 1:
        raise ConfigError(f"{len(found)} rows have a key that begins with {wanted}")
    return found.pop()


def report(rows: list[Listed], now_unix_s: float) -> Iterator[str]:
    """A table for people; keys are cut to what tells them apart well enough."""
    lines = [
        (
            row.key[:16],
            row.model,
            row.tier,
            f"{row.tokens:,}",
            mib(row.bytes),
            f"{row.hits:,}",
            f"{text.age(now_unix_s - row.used_unix_s)} ago",
            text.age(now_unix_s - row.created_unix_s),
            "set aside" if row.is_aside else "head" if row.is_head else row.reason,
            "yes" if row.is_pinned else "",
        )
        for row in rows
    ]
    yield from text.table(HEAD, lines)


def tell_total(rows: list[Listed]) -> str:
    """`3 rows, 96 MiB`."""
    return f"{len(rows):,} row{'s' * (len(rows) != 1)}, {mib(sum(row.bytes for row in rows))}"
