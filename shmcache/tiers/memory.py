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
from shmcache.protocol import Tier as TierNumber
from shmcache.tiers.base import HandOver, Slab, Tier, file_name, is_ours_to_remove, set_aside


class MemoryTier(Tier):
    """One directory in /dev/shm."""

    def __init__(self, number: TierNumber, path: Path) -> None:
        self.number = number
        super().__init__(path / "in")
        try:
            self._directory_fd = shm.open_directory(path)
        except BaseException:
            os.close(self.in_fd)
            raise

    def directory_fd(self, key: bytes) -> int:
        """One directory holds all."""
        return self._directory_fd

    def directory_fds(self) -> Iterator[int]:
        """One directory holds all."""
        yield self._directory_fd

    def link(self, handover: HandOver) -> Slab:
        """A second name, then the first one goes."""
        name = file_name(handover.key)
        slab = self.check(handover)  # read before it has the name: what fails leaves none
        try:
            os.link(handover.name, name, src_dir_fd=self.in_fd, dst_dir_fd=self._directory_fd)
        except FileExistsError:
            if (there := self._adopted(handover, slab)) is not None:
                slab = there
            else:
                self._replace(handover, name)
        self.refuse(handover)
        return slab

    def sync_removals(self) -> None:
        """A power loss takes all that lies here."""

    def store_forget(self, number: int) -> None:
        """The control page lives as long as the slabs here, and has it."""

    def close(self) -> None:
        """End the view."""
        os.close(self._directory_fd)
        super().close()

    def _replace(self, handover: HandOver, name: str) -> None:
        if not is_ours_to_remove(self._directory_fd, name):
            set_aside(self._directory_fd, name)
        os.rename(handover.name, name, src_dir_fd=self.in_fd, dst_dir_fd=self._directory_fd)
