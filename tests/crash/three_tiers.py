"""Three tiers under a coordinator that ticks fast: how they are filled, and what holds at rest."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

from support import PAYLOAD_OFFSET, Namespace, eventually, identity, prompt, save

from shmcache import client, server
from shmcache.check import check
from shmcache.client import Cache
from shmcache.key import row_address
from shmcache.tiers import disk

WHO = identity()
TIERS = ("ram", "ram_file", "disk")
STATE = os.urandom(100_000)
SLAB = PAYLOAD_OFFSET + len(STATE)
BUDGET = 2 * SLAB + 4096


def text_of(number: int) -> bytes:
    """The text of a row of this number, the only one of its last block."""
    return prompt(1500, f"row {number}")


def key_of(number: int) -> bytes:
    """Its key."""
    return row_address(WHO.seed, text_of(number)).key


class Rig:
    """A namespace with all three tiers and room for two rows in each; `patch` runs in its coordinators."""

    def __init__(self, root: Path, patch: Callable[[], None]) -> None:
        root.chmod(0o700)
        self.root = root
        self._change = patch
        self.space = Namespace(ram_file_bytes=BUDGET, max_rows=64)
        self.numbers = iter(range(1 << 30))
        self.observer = self.space.cache()
        self.descriptors: dict[int, int] = {}

    def start(self, *more: str) -> None:
        """A coordinator, with more flags perhaps."""
        options = {"ram-bytes": BUDGET, "disk-bytes": BUDGET, "staging-bytes": BUDGET, "disk-dir": self.root}
        flags = [f"--{name}={value}" for name, value in options.items()]
        self.space.start(*flags, "--decisions-rows=16", *more, patch=self._patch)

    def _patch(self) -> None:
        server.TICK_S, server.SWEEP_S = 0.01, 0.1
        disk._CHUNK_BYTES = 40_000
        self._change()

    def attach(self, tier: str) -> Cache:
        """A worker that knows nothing yet."""
        return client.attach(self.space.name, tier=tier)

    def rows(self, tier: str) -> set[bytes]:
        """The keys of a tier's rows."""
        self.observer.connection._look_again_ns = 0
        eventually(lambda: self.observer.connection.reader() is not None)
        reader = self.observer.connection.reader()
        assert reader is not None
        return {found.row.key for found in reader.rows() if found.row.tier == TIERS.index(tier)}

    def fill(self, tier: str, rows: int = 2) -> None:
        """So many rows; after two the next save evicts one."""
        while len(self.rows(tier)) < rows:
            with self.attach(tier) as cache:
                assert eventually(lambda: save(cache, WHO, text_of(next(self.numbers)), STATE))
            self.at_rest()

    def at_rest(self) -> None:
        """Everything agrees, nothing is charged, and whoever has left has left nothing."""
        assert self.space.coordinator is not None
        assert self.space.coordinator.poll() is None, "the coordinator has ended"
        own = f"{self.observer.connection.client:016x}"
        eventually(lambda: {path.name for path in self.space.names.pages.iterdir()} <= {own})
        eventually(lambda: not self.charged())
        eventually(lambda: check(self.space.name) == [])
        paths = [path for path in self.root.rglob("*") if not path.is_dir()]
        assert {path.name for path in paths if path.suffix != ".kvc"} <= {".lock", ".forget"}

    def charged(self) -> dict[str, int]:
        """What is owed to saves in flight."""
        reader = self.observer.connection.reader()
        stats = reader.stats() if reader is not None else {"no index": 1}
        names = ("no index", "saves_in_flight", *(f"charged_{tier}" for tier in TIERS))
        return {name: stats[name] for name in names if stats.get(name)}

    def has_no_more_descriptors(self) -> bool:
        """Than at the first call, by process: a new coordinator is a fork, and has what this one had open."""
        self.observer.let_go()
        now = {pid: self._open_in(pid) for pid in (self.space.pid, os.getpid())}
        is_same = all(count <= self.descriptors.setdefault(pid, count) for pid, count in now.items())
        if not is_same:
            gc.collect()  # what an exception has held goes with it
        return is_same

    def _open_in(self, pid: int) -> int:
        """Directories on disk stay open once they were used."""
        count = 0
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                count += not os.readlink(link).startswith(str(self.root))  # noqa: PTH115
            except FileNotFoundError:
                continue
        return count

    def close(self) -> None:
        self.space.close()
