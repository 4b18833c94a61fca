"""What must a hit hold, bit for bit? Payloads that follow from a key and a number.

    0    32 key
    32    8 number      of this publication; no two writes of a key have the same
    40    8 size_bytes  of the payload
    48    8 start       where in the pool the rest begins, from key and number
    56      the pool's bytes from there on

The pool is the same random bytes in every process, so a payload is compared as a whole and nothing needs to
be kept of it. A payload that mixes two publications, two keys or a piece of something else differs.
"""

from __future__ import annotations

import random
import struct
from typing import NamedTuple

import numpy as np
from support import identity, prompt

from shmcache.client import SavePlan
from shmcache.key import PrefixWalk, RowAddress, row_address

HEAD = struct.Struct("<32sQQQ")
PAYLOAD_OFFSET = 1024
SMALLEST_BYTES, LARGEST_BYTES = 4096, 1 << 20
"""Of a whole slab."""

_POOL_BYTES = 4 << 20
_POOL = np.random.default_rng(20).integers(0, 1 << 64, _POOL_BYTES // 8, dtype=np.uint64)
_PRIME = 2_654_435_761


class Entry(NamedTuple):
    """One row that may be there."""

    name: str
    text: bytes
    address: RowAddress
    payload_bytes: int

    @property
    def plan(self) -> SavePlan:
        """What is reserved for it."""
        return SavePlan(
            address=self.address,
            text_bytes=len(self.text),
            payload_offset=PAYLOAD_OFFSET,
            payload_bytes=self.payload_bytes,
        )


class Family(NamedTuple):
    """Rows that are prefixes of one another, under an identity of their own."""

    entries: list[Entry]
    walk: PrefixWalk


def families(count: int, *, largest_bytes: int = LARGEST_BYTES, seed: int = 1) -> list[Family]:
    """`count` families of 4 rows of 4 KiB to largest_bytes, most of them small."""
    made = random.Random(seed)
    return [_family(number, largest_bytes, made) for number in range(count)]


def _family(number: int, largest_bytes: int, made: random.Random) -> Family:
    who = identity(f"family {number}")
    lengths = sorted(made.sample(range(1, 2600), 4))
    text = prompt(lengths[-1], f"family {number}")
    entries = []
    for length in lengths:
        doublings = (largest_bytes // SMALLEST_BYTES).bit_length() - 1
        # Each doubling half as likely as the one before it, so that every size costs the same to compare.
        size = SMALLEST_BYTES << min(doublings, int(made.expovariate(0.45)))
        size += made.randrange(size // 2) & ~7 if size < largest_bytes else 0
        address = row_address(who.seed, text[:length])
        entries.append(Entry(f"family {number}", text[:length], address, size - PAYLOAD_OFFSET))
    return Family(entries, PrefixWalk(who.seed, text))


def start_of(key: bytes, number: int, size_bytes: int) -> int:
    """Where a payload's bytes begin in the pool, in words."""
    mixed = int.from_bytes(key[:8], "little") ^ number * _PRIME
    return mixed % ((_POOL_BYTES - size_bytes) // 8)


def write(into: memoryview, key: bytes, number: int) -> None:
    """Fill a payload; its size is a multiple of 8."""
    size_bytes = into.nbytes
    start = start_of(key, number, size_bytes)
    HEAD.pack_into(into, 0, key, number, size_bytes, start)
    into[HEAD.size :] = memoryview(_POOL[start : start + (size_bytes - HEAD.size) // 8]).cast("B")


def is_right(payload: memoryview, key: bytes) -> bool:
    """Whether this is, in every bit, a payload that was written under this key."""
    size_bytes = payload.nbytes
    key_there, number, size_there, start = HEAD.unpack_from(payload)
    if key_there != key or size_there != size_bytes or start != start_of(key, number, size_bytes):
        return False
    words = np.frombuffer(payload, np.uint64, offset=HEAD.size)
    return bool((words == _POOL[start : start + words.size]).all())
