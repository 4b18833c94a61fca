"""Do index, slabs, files, bitmaps and counters agree? Both ways, and every disagreement is a finding.

    row     → slab file of the right size, whose metadata and payload are those of this row
    row     → bit in its block's bitmap                      bit  → row with that block and tail
    file    → row                                            in/  → nothing at rest
    counter → what was counted here                          page → lock held; FIFO → page
    epoch   → one segment, and none of another epoch

Owner: nobody; it only reads. Meant for a namespace at rest: a save in flight may show as a finding.
Readers: `shmcache check`, every crash test, the end of every stress run.
Leaves out: mending. The coordinator mends at start and every 30 seconds; a finding that stays is a bug.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shmcache.control import ControlPage
from shmcache.control import Word as ControlWord
from shmcache.errors import CorruptSlab, ForeignObject, LayoutMismatch, NoCoordinator
from shmcache.index import IndexReader, Row
from shmcache.page import ClientPage
from shmcache.protocol import Tier
from shmcache.shm import SHM_ROOT, Mapping, Names
from shmcache.slab import MappedSlab
from shmcache.tiers.base import file_name
from shmcache.tiers.disk import disk_directory, disk_path


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
    return list(_check(Names(namespace)))


def _check(names: Names) -> Iterator[Finding]:
    try:
        control = ControlPage.open(names)
    except NoCoordinator:
        return
    with contextlib.closing(control):
        epoch = control.words[ControlWord.EPOCH]
        lives = control.coordinator_lives()
    for segment in names.epoch_segments():
        if f".{epoch:016x}." not in segment.name:
            yield Finding("segment", segment.name, "belongs to no epoch")
    yield from _check_pages(names, lives=lives)
    if epoch == 0:
        return
    try:
        mapping = Mapping.open(SHM_ROOT / names.index_segment(epoch))
    except FileNotFoundError:
        yield Finding("segment", names.index_segment(epoch), "the epoch has no index")
        return
    with mapping, IndexReader(mapping.bytes) as reader:
        yield from _check_index(names, epoch, reader)


def _check_index(names: Names, epoch: int, reader: IndexReader) -> Iterator[Finding]:
    rows = [found.row for found in reader.rows()]
    yield from _check_blocks(reader, rows)
    for row in rows:
        yield from _check_row(names, epoch, row)
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
        yield from _check_files(names, epoch, tier, held)
    yield from _differs(
        "saves_reserved",
        figures["saves_reserved"],
        figures["saves_published"] + figures["saves_abandoned"] + figures["saves_in_flight"],
    )


def _check_row(names: Names, epoch: int, row: Row) -> Iterator[Finding]:
    """The slab is there, whole, and says what the row says."""
    try:
        path = _directory(names, epoch, Tier(row.tier), row.key) / file_name(row.key)
        slab = MappedSlab(Mapping.open(path))
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
    for (block_key, tail), count in Counter((row.block_key, row.tail) for row in rows).items():
        if count > 1:
            yield Finding("row", block_key.hex(), f"{count} rows share the tail {tail}")


def _check_files(names: Names, epoch: int, tier: Tier, held: dict[str, Row]) -> Iterator[Finding]:
    name = tier.name.lower()
    with contextlib.suppress(FileNotFoundError):
        for path in (names.tier(name, epoch) / "in").iterdir():
            yield Finding("file", f"{name}/in/{path.name}", "was handed over and is not taken")
        directory = disk_directory(names) if tier is Tier.DISK else names.tier(name, epoch)
        for path in directory.glob("*/*.kvc" if tier is Tier.DISK else "*.kvc"):
            if path.name not in held:
                yield Finding("file", f"{name}/{path.name}", "no row names it")


def _directory(names: Names, epoch: int, tier: Tier, key: bytes) -> Path:
    if tier is Tier.DISK:
        return disk_path(disk_directory(names), key).parent
    return names.tier(tier.name.lower(), epoch)


def _check_pages(names: Names, *, lives: bool) -> Iterator[Finding]:
    """With a coordinator that lives, dead workers leave nothing."""
    living = set()
    with contextlib.suppress(FileNotFoundError):
        for path in names.pages.iterdir():
            try:
                with contextlib.closing(ClientPage(names, int(path.name, 16))) as page:
                    if page.lives():
                        living.add(path.name)
                    elif lives:
                        yield Finding("page", path.name, "its worker is gone")
            except (ValueError, ForeignObject, LayoutMismatch) as error:
                yield Finding("page", path.name, str(error))
            except FileNotFoundError:
                continue
        for path in names.fifos.iterdir():
            if lives and path.name.partition(".")[0] not in living:
                yield Finding("fifo", path.name, "its worker is gone")


def _differs(name: str, counted: int, found: int) -> Iterator[Finding]:
    if counted != found:
        yield Finding("counter", name, f"says {counted} and {found} are there")
