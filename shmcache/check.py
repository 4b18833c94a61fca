"""Do index, slabs, files, bitmaps and counters agree? Both ways, and every disagreement is a finding.

    row     → slab file of the right size, whose metadata and payload are those of this row
    row     → bit in its block's bitmap                      bit  → row with that block and tail
    file    → row                                            in/  → nothing at rest
    aside   → nothing: a slab that an audit found wrong is a finding until it is evicted
    counter → what was counted here                          page → lock held; FIFO → page
    epoch   → one segment, and none of another epoch

Owner: nobody; it only reads. Meant for a namespace at rest: a save in flight may show as a finding.
Readers: `shmcache check`, every crash test, the end of every stress run.
Leaves out: mending. The coordinator mends at start and every 30 seconds; a finding that stays is a bug.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from shmcache.errors import CorruptSlab, ForeignObject, NoCoordinator
from shmcache.index import IndexReader, Row
from shmcache.protocol import Tier
from shmcache.shm import Mapping
from shmcache.slab import MappedSlab
from shmcache.tiers.base import file_name
from shmcache.tiers.disk import disk_directory
from shmcache.view import View, look


class Finding(msgspec.Struct, frozen=True):
    """One disagreement: what kind, at which object, and how."""

    kind: str
    name: str
    detail: str


def check(namespace: str) -> list[Finding]:
    """Walk everything. An empty list is the only good answer.

    Raises:
        ForeignObject: the namespace's directory or control page is not ours.
    """
    try:
        with look(namespace) as view:
            return list(_check(view))
    except NoCoordinator:
        return []


def _check(view: View) -> Iterator[Finding]:
    for segment in view.names.epoch_segments():
        if f".{view.epoch:016x}." not in segment.name:
            yield Finding("segment", segment.name, "belongs to no epoch")
    yield from _check_pages(view)
    if view.reader is not None:
        yield from _check_index(view, view.reader)
    elif view.epoch:
        yield Finding("segment", view.names.index_segment(view.epoch), "the epoch has no index")


def _check_index(view: View, reader: IndexReader) -> Iterator[Finding]:
    rows = [found.row for found in reader.rows()]
    yield from _check_blocks(reader, rows)
    for row in rows:
        yield from _check_row(view, row)
        found = reader.get(row.key)
        if found is None or found.row != row:
            yield Finding("row", row.key.hex(), "is not found by its key")
    by_tier: dict[int, dict[str, Row]] = {}
    for row in rows:
        by_tier.setdefault(row.tier, {})[file_name(row.key)] = row
    figures = reader.stats()
    yield from _differs("rows", figures["rows"], len(rows))
    for tier in Tier:
        name = tier.name.lower()
        held = by_tier.get(tier, {})
        yield from _differs(f"rows_{name}", figures[f"rows_{name}"], len(held))
        held_bytes = sum(row.slab_bytes for row in held.values())
        yield from _differs(f"bytes_{name}", figures[f"bytes_{name}"], held_bytes)
        if held_bytes + figures[f"charged_{name}"] > figures[f"budget_{name}"]:
            yield Finding("budget", name, f"{held_bytes} bytes are over {figures[f'budget_{name}']}")
        yield from _check_files(view, tier, held)
    for _, path in view.asides():
        yield Finding("aside", path.stem, f"an audit found it wrong: {path} is kept until it is evicted")
    yield from _differs(
        "saves_reserved",
        figures["saves_reserved"],
        figures["saves_published"] + figures["saves_abandoned"] + figures["saves_in_flight"],
    )


def _check_row(view: View, row: Row) -> Iterator[Finding]:
    """The slab is there, whole, and says what the row says."""
    try:
        slab = MappedSlab(Mapping.open(view.slab_path(Tier(row.tier), row.key)))
    except (OSError, CorruptSlab, ForeignObject) as error:
        yield Finding("slab", row.key.hex(), str(error))
        return
    with contextlib.closing(slab):
        meta = slab.image.meta
        theirs = (meta.key, meta.block_key, meta.text_bytes, meta.token_count, slab.size_bytes)
        if theirs != (row.key, row.block_key, row.text_bytes, row.token_count, row.slab_bytes):
            yield Finding("slab", row.key.hex(), "says something else than its row")


def _check_blocks(reader: IndexReader, rows: list[Row]) -> Iterator[Finding]:
    wanted = {(row.block_key, row.tail) for row in rows}
    there: set[tuple[bytes, int]] = set()
    for block_key, bitmap in reader.blocks():
        there.update((block_key, tail) for tail in range(1024) if bitmap >> tail & 1)
    for block_key, tail in wanted - there:
        yield Finding("bitmap", block_key.hex(), f"bit {tail} is not set though a row needs it")
    for block_key, tail in there - wanted:
        yield Finding("bitmap", block_key.hex(), f"bit {tail} is set and no row has it")


def _check_files(view: View, tier: Tier, held: dict[str, Row]) -> Iterator[Finding]:
    name = tier.name.lower()
    with contextlib.suppress(FileNotFoundError):
        directory = view.names.tier(name, view.epoch)
        for path in (directory / "in").iterdir():
            yield Finding("file", f"{name}/in/{path.name}", "was handed over and is not taken")
        slabs = disk_directory(view.names).glob("*/*.kvc") if tier is Tier.DISK else directory.glob("*.kvc")
        for path in slabs:
            if path.name not in held:
                yield Finding("file", f"{name}/{path.name}", "no row names it")


def _check_pages(view: View) -> Iterator[Finding]:
    """With a coordinator that lives, dead workers leave nothing."""
    living = set()
    for name, page in view.pages():
        if page is None:
            yield Finding("page", name, "is not a page of ours")
        elif page.lives():
            living.add(name)
        elif view.coordinator_runs:
            yield Finding("page", name, "its worker is gone")
    with contextlib.suppress(FileNotFoundError):
        for path in view.names.fifos.iterdir():
            if view.coordinator_runs and path.name.partition(".")[0] not in living:
                yield Finding("fifo", path.name, "its worker is gone")


def _differs(name: str, counted: int, found: int) -> Iterator[Finding]:
    if counted != found:
        yield Finding("counter", name, f"says {counted} and {found} are there")
