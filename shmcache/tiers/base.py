"""What the coordinator asks of a tier: which slabs are there, take this one, let that one go.

    <tier>/<key in hex>.kvc                            a row's slab, immutable
    <tier>/in/<key>.<token>.<forget number>            complete, handed over, not yet checked

Owner: the coordinator, for everything but the names in `in/`, which workers link.
Readers: workers map or read `<key>.kvc`.
Invariants
    I1  What has a name is complete; whoever linked it may be dead.
    I2  A tier reads at most the first 4 KiB of a slab.
    I3  A name that is not of these forms belongs to somebody else and is left alone.
    I4  A tier never decides: it yields, checks, links and unlinks; the coordinator decides.
Leaves out: budgets, use order, the index.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator

import msgspec

from shmcache import kvc
from shmcache.protocol import Tier as TierNumber

_HANDOVER = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{16})\.([0-9a-f]{1,16})")


class HandOver(msgspec.Struct, frozen=True):
    """The name of a slab in `in/`, taken apart."""

    key: bytes
    token: int
    forget: int

    @property
    def name(self) -> str:
        """The file name, in `in/`."""
        return f"{self.key.hex()}.{self.token:016x}.{self.forget:x}"

    @classmethod
    def from_name(cls, name: str) -> HandOver | None:
        """None for a stranger's name (I3)."""
        match = _HANDOVER.fullmatch(name)
        return cls(bytes.fromhex(match[1]), int(match[2], 16), int(match[3], 16)) if match else None


class Slab(msgspec.Struct, frozen=True):
    """A slab that validates: its metadata and its size in bytes."""

    head: kvc.Head
    slab_bytes: int


class Broken(msgspec.Struct, frozen=True):
    """A file at a row's name that is no slab of this version, and why.

    damaged: it was one of ours; a slab of another version, or an object that is not ours, is not.
    """

    key: bytes
    why: str
    damaged: bool


class Tier(ABC):
    """The contract; tests/contract runs over every implementation."""

    number: TierNumber

    @abstractmethod
    def scan(self) -> Iterator[Slab | Broken]:
        """Every file at a row's name."""

    @abstractmethod
    def handed_over(self) -> Iterator[HandOver]:
        """Every slab that waits in `in/`."""

    @abstractmethod
    def check(self, handover: HandOver) -> Slab:
        """Metadata and size of a slab in `in/`.

        Raises CorruptSlab if it is none of this key, ForeignObject, FileNotFoundError.
        """

    @abstractmethod
    def link(self, handover: HandOver) -> Slab:
        """Give it the row's name and take it out of `in/`; returns what lies there then.

        A file that is there already stays if it validates for this key, else it is replaced.
        """

    @abstractmethod
    def refuse(self, handover: HandOver) -> None:
        """Unlink a slab in `in/`."""

    @abstractmethod
    def remove(self, key: bytes) -> bool:
        """Unlink a row's slab; False if it was gone. Whoever maps it keeps its bytes."""

    @abstractmethod
    def write_use(self, key: bytes, hit_count: int, last_used_unix_s: int) -> None:
        """Store the two mutable fields; a slab that is gone is no error."""

    @abstractmethod
    def close(self) -> None:
        """End the view; everything stays."""


def file_name(key: bytes) -> str:
    """The name of a row's slab in its tier."""
    return f"{key.hex()}.kvc"
