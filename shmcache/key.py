"""Which 32 bytes name a row, and which shorter rows could be a prefix of this prompt?

    seed[65]           rendered text
    ├────────────┬───────────┬───────────┬───────────┬────────┐
    │ fp q ctx   │ 1,024     │ 1,024     │ 1,024     │ tail   │
    └────────────┴───────────┴───────────┴───────────┴────────┘
                 ▲           ▲           ▲           ▲        ▲
    block_keys   [0]         [1]         [2]         [3]      key

    key       = SHA-256(seed || text)               seed = model_fp[32] || quant[1] || ctx_params_hash[32]
    block_key = SHA-256(seed || text[: len(text) // 1024 * 1024])
    tail      = len(text) % 1024

A lookup asks for every row whose text is a prefix of the prompt. Each such row ends `tail` bytes behind
some multiple of 1,024, so one SHA-256 pass whose state is copied at each multiple is enough: the copies
name the blocks that the index may know (`block_keys`), and going on from a copy by `tail` bytes names
the row itself (`key_at`).

Owner: whoever made it; nothing here is shared. A walk belongs to one lookup.
Readers: the index (walk, addresses), the worker that saves a row (addresses).

Invariants:
    I1  `walk.key_at(n) == key_of(seed, text[:n])` for every n in 0..len(text), whatever was asked before.
    I2  `walk.block_keys[i] == walk.key_at(1024 * i)`. With tail 0 key and block_key are the same 32 bytes:
        an index tells rows from blocks by kind, not by key.
    I3  The seed has a fixed length, so no identity and text can spell the bytes of another pair.

Leans on: hashlib's `copy()` and `digest()` leave the original usable. Measured: a walk takes about twice
the bare SHA-256 pass.
Leaves out: what the seed holds (identity) and how tokens become text (workers.render).
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from _hashlib import HASH

BLOCK_BYTES = 1024
KEY_BYTES = 32
SEED_BYTES = 65

Buffer = bytes | bytearray | memoryview


class RowAddress(msgspec.Struct, frozen=True):
    """Where the index keeps a row: under its own key, and as one tail bit of its last block."""

    key: bytes  # 32 bytes
    block_key: bytes  # 32 bytes
    tail: int  # 0..1023


def identity_tag(model_fp: bytes, ctx_params_hash: bytes) -> int:
    """Return 64 bits that tell identities apart for people and statistics; no hit is decided by them.

    Without the quant byte, which follows from the model's content: what a KVC file holds is enough.
    """
    return int.from_bytes(sha256(model_fp + ctx_params_hash).digest()[:8], "little")


def key_of(seed: bytes, text: Buffer) -> bytes:
    """Return the 32-byte key of rendered prompt bytes under one identity."""
    state = _seeded(seed)
    state.update(text)
    return state.digest()


def row_address(seed: bytes, text: Buffer) -> RowAddress:
    """Return key, block key and tail of a row, in one pass over its text."""
    view = memoryview(text).cast("B")
    tail = len(view) % BLOCK_BYTES
    state = _seeded(seed)
    state.update(view[: len(view) - tail])
    block_key = state.digest()
    state.update(view[len(view) - tail :])
    return RowAddress(key=state.digest(), block_key=block_key, tail=tail)


class PrefixWalk:
    """The keys of all prefixes of one prompt, after one SHA-256 pass over it.

    `text` must not change while the walk lives (a bytearray cannot be resized meanwhile).
    """

    __slots__ = ("_states", "_view", "block_keys", "text_bytes")

    def __init__(self, seed: bytes, text: Buffer) -> None:
        self._view = view = memoryview(text).cast("B")
        self.text_bytes = len(view)
        self._states = states = [_seeded(seed)]
        for start in range(0, self.text_bytes - BLOCK_BYTES + 1, BLOCK_BYTES):
            state = states[-1].copy()
            state.update(view[start : start + BLOCK_BYTES])
            states.append(state)
        self.block_keys = [state.digest() for state in states]

    def key_at(self, length: int) -> bytes:
        """Return the key of the prompt's first `length` bytes; IndexError beyond its end."""
        if not 0 <= length <= self.text_bytes:
            raise IndexError(f"the prompt has {self.text_bytes} bytes, not {length}")
        block, tail = divmod(length, BLOCK_BYTES)
        if not tail:
            return self.block_keys[block]
        state = self._states[block].copy()
        state.update(self._view[length - tail : length])
        return state.digest()


def _seeded(seed: bytes) -> HASH:
    if len(seed) != SEED_BYTES:
        raise ValueError(f"a seed has {SEED_BYTES} bytes, not {len(seed)}")
    return sha256(seed)
