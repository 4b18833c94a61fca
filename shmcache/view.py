"""A look at a namespace from outside: its epoch, its index, where its rows lie. Nothing is changed.

Owner: whoever looks. Readers: observe, check, the tools.
Invariants
    I1  A namespace in any state can be looked at; what is not there is None or empty.
    I2  Nothing is locked, asked or written, so looking needs no coordinator and disturbs none.
Leaves out: figures (observe), agreement (check).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shmcache import kvc
from shmcache.control import ControlPage
from shmcache.control import Word as ControlWord
from shmcache.decisions.table import TableReader
from shmcache.errors import ForeignObject, LayoutMismatch
from shmcache.index import IndexReader, Row
from shmcache.page import ClientPage
from shmcache.protocol import Tier
from shmcache.shm import SHM_ROOT, Mapping, Names
from shmcache.tiers.base import ASIDE_SUFFIX, Slab, file_name, read_slab
from shmcache.tiers.disk import disk_directory, disk_path


class View:
    """One epoch of one namespace."""

    def __init__(
        self,
        names: Names,
        control: ControlPage,
        reader: IndexReader | None,
        decisions: TableReader | None = None,
    ) -> None:
        self.names = names
        self.epoch = control.words[ControlWord.EPOCH]
        self.coordinator_runs = control.coordinator_lives()
        self.coordinator_pid = control.words[ControlWord.PID] if self.coordinator_runs else 0
        self.reader = reader
        self.decisions = decisions

    def slab_path(self, tier: Tier, key: bytes) -> Path:
        """Where the slab of a row lies. Raises OSError, ForeignObject where the disk tier is unknown."""
        directory = self.tier_path(tier)
        return disk_path(directory, key) if tier is Tier.DISK else directory / file_name(key)

    def rows(self) -> Iterator[Row]:
        """All rows, in no order."""
        if self.reader is not None:
            for found in self.reader.rows():
                yield found.row

    def meta(self, row: Row) -> kvc.Meta:
        """What a row's slab says of itself. Raises CorruptSlab, ForeignObject, OSError."""
        return self.slab(row).head.meta

    def slab(self, row: Row) -> Slab:
        """A row's slab, by its first 4 KiB. Raises CorruptSlab, ForeignObject, OSError."""
        return slab_at(self.slab_path(Tier(row.tier), row.key), row.key)

    def asides(self) -> Iterator[tuple[Tier, Path]]:
        """Every slab that was found wrong and is kept: its tier, and where it lies."""
        for tier in Tier:
            with contextlib.suppress(OSError, ForeignObject):
                pattern = f"{'*/' if tier is Tier.DISK else ''}*{ASIDE_SUFFIX}"
                yield from ((tier, path) for path in sorted(self.tier_path(tier).glob(pattern)))

    def tier_path(self, tier: Tier) -> Path:
        """Where a tier's slabs lie. Raises OSError, ForeignObject where the disk tier is unknown."""
        if tier is Tier.DISK:
            return disk_directory(self.names)
        return self.names.tier(tier.name.lower(), self.epoch)

    def pages(self) -> Iterator[tuple[str, ClientPage | None]]:
        """Every worker's page by name; None for one that is not ours or not of this build."""
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(path.name for path in self.names.pages.iterdir()):
                try:
                    page = ClientPage(self.names, int(name, 16))
                except (ValueError, ForeignObject, LayoutMismatch):
                    yield name, None
                except FileNotFoundError:
                    continue
                else:
                    with contextlib.closing(page):
                        yield name, page


def slab_at(path: Path, key: bytes) -> Slab:
    """A slab by its first 4 KiB. Raises CorruptSlab, ForeignObject, OSError."""
    directory_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return read_slab(directory_fd, path.name, key)
    finally:
        os.close(directory_fd)


@contextmanager
def look(namespace: str) -> Iterator[View]:
    """Open a namespace for as long as the block runs.

    Raises:
        NoCoordinator: the namespace does not exist.
        ForeignObject, LayoutMismatch: it is not ours, or not of this build.
    """
    names = Names(namespace)
    with contextlib.ExitStack() as stack:
        control = stack.enter_context(contextlib.closing(ControlPage.open(names)))
        reader, decisions = None, None
        if epoch := control.words[ControlWord.EPOCH]:
            with contextlib.suppress(FileNotFoundError):
                mapping = stack.enter_context(Mapping.open(SHM_ROOT / names.index_segment(epoch)))
                reader = stack.enter_context(IndexReader(mapping.bytes))
                mapping = stack.enter_context(Mapping.open(SHM_ROOT / names.decisions_segment(epoch)))
                decisions = stack.enter_context(contextlib.closing(TableReader(mapping.bytes)))
        yield View(names, control, reader, decisions)
