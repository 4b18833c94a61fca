"""ram and ram_file: slabs as files in /dev/shm, which workers map.

    ram        ram.<epoch>/    ends with its coordinator: the next one removes the directory
    ram_file   ram_file/       ends at reboot: the next coordinator adopts what lies there

Owner, invariants: tiers.base. Taking a slab is two names of one file: no byte is copied.
Leaves out: the mapping of slabs (slab), which happens in workers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from shmcache import shm
from shmcache.errors import CorruptSlab, ForeignObject
from shmcache.protocol import Tier as TierNumber
from shmcache.tiers.base import HandOver, Slab, Tier, file_name


class MemoryTier(Tier):
    """One directory in /dev/shm."""

    def __init__(self, number: TierNumber, path: Path) -> None:
        self.number = number
        super().__init__(path / "in")
        self._directory_fd = shm.open_directory(path)

    def directory_fd(self, key: bytes) -> int:
        """One directory holds all."""
        return self._directory_fd

    def directory_fds(self) -> Iterator[int]:
        """One directory holds all."""
        yield self._directory_fd

    def link(self, handover: HandOver) -> Slab:
        """A second name, then the first one goes."""
        name = file_name(handover.key)
        try:
            os.link(handover.name, name, src_dir_fd=self.in_fd, dst_dir_fd=self._directory_fd)
        except FileExistsError:
            self._adopt_or_replace(handover, name)
        self.refuse(handover)
        return self.read(handover.key)

    def store_forget(self, number: int) -> None:
        """The control page lives as long as the slabs here, and has it."""

    def close(self) -> None:
        """End the view."""
        os.close(self._directory_fd)
        super().close()

    def _adopt_or_replace(self, handover: HandOver, name: str) -> None:
        slab_bytes = self.check(handover).slab_bytes
        try:
            is_same = self.read(handover.key).slab_bytes == slab_bytes
        except (CorruptSlab, ForeignObject):
            is_same = False
        if not is_same:
            os.rename(handover.name, name, src_dir_fd=self.in_fd, dst_dir_fd=self._directory_fd)
