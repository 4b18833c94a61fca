"""Where is a prompt cut into batches, which of those boundaries is worth a row, and what is a row worth?

    0        256       512       768    A1=832   1024            A2=1536         n-1 n      n_ubatch 512
    ├─────────────────────┼─────────────────┼─────┼────────────────┼──────────────┼─┤
                        512                832  1024             1536          n-1  n

    anchors  boundaries that every worker picks alike, from a prompt's tokens and messages alone:
             (1) the end of the system and tool part, rounded down to a multiple of 64: agents share it
             (2) the prompt's length less 65, rounded down to a multiple of 256: a next turn shares it
             (3) all but the last token: a re-send decodes one token
    cuts     ends of the batches: the anchors, saved or not, and the absolute multiples of n_ubatch

Two runs agree bit for bit where their batches and cells do. Cutting at absolute multiples and at every
anchor makes a cold run and a hit on one of the prompt's own anchors decode the same batches.

Why 64: with flash attention and f16 or f32 K/V, llama.cpp picks its kernel by the rows of a batch, and 64
and more, 2 to 63, and 1 differ. A batch of 64 rows or more may end anywhere without changing a bit; the
shorter one that a multiple of n_ubatch would leave before the last token is avoided (`cuts`).

A row's worth, by which `--eviction cost` chooses who leaves, is the prefill that one of its bytes may still
spare: (chance of another use) x (prefill - restore, in ms) / bytes. With c the share of such rows that are
used again at all, and half of these uses still to come after each half-life h, a row that was not used for
the time a is used yet with the chance  c 2^(-a/h) / (1 - c + c 2^(-a/h)).

Owner: nobody, the functions are pure. Readers: workers (before each prefill), eviction.
Invariants
    I1  `cuts` ascends, ends at n_tokens, and no batch is longer than n_ubatch.
    I2  From any cut on, the cuts that follow are the same ones: cuts(c, …) is the rest of cuts(s, …).
    I3  Anchors are 64 or more apart, and 64 or more before the one at n - 1.
Leaves out: chances and mean gaps as they are observed (eviction), what a worker does at a boundary
(workers.shared_llama).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from shmcache.config import Gates
from shmcache.errors import MIB

MEASURED_TOKENS = 1_000  # of prefill, before a worker's speed is believed
KERNEL_ROWS = 64  # the fewest rows of a batch that llama.cpp's flash attention treats like any longer one


def anchors(n_tokens: int, head_tokens: int | None, gates: Gates) -> tuple[int, ...]:
    """Return the anchors of a prompt of `n_tokens`, ascending.

    `head_tokens` is where its system and tool part ends, None where no messages are known.
    """
    last = n_tokens - 1
    if last < max(1, gates.min_tokens):
        return ()
    found: list[int] = []
    for anchor in sorted((head_anchor(head_tokens), _trimmed(n_tokens, gates))):
        clear_of_last = last - anchor >= KERNEL_ROWS
        clear_of_first = not found or anchor - found[-1] >= KERNEL_ROWS
        if anchor >= gates.cold_min_tokens and clear_of_first and clear_of_last:
            found.append(anchor)
    return (*found, last)


def head_anchor(head_tokens: int | None) -> int:
    """Where the system and tool part gets its anchor, if it gets one; 0 for none."""
    return (head_tokens or 0) // KERNEL_ROWS * KERNEL_ROWS


def _trimmed(n_tokens: int, gates: Gates) -> int:
    align = gates.boundary_align_tokens
    return max(0, n_tokens - gates.boundary_trim_tokens) // align * align


def anchor_is_saved(n_tokens: int, gates: Gates) -> bool:
    """Whether an anchor gets a row, besides being a cut; beyond the bound one row outweighs many others."""
    return n_tokens <= gates.cold_max_tokens


def reply_is_saved(n_tokens: int, gates: Gates) -> bool:
    """Whether prompt and reply together, `n_tokens`, get a `finish` row."""
    return n_tokens >= max(1, gates.min_tokens)


def continued_is_due(reply_tokens: int, gates: Gates) -> bool:
    """Whether a `continued` row belongs behind so many tokens of a reply."""
    return reply_tokens > 0 and reply_tokens % gates.continued_interval == 0


def overwriting_needs_a_save(n_tokens: int, covered_tokens: int, gates: Gates) -> bool:
    """Whether a sequence of `n_tokens`, of which so many are in a row or stay, is saved before it is lost."""
    return reply_is_saved(n_tokens, gates) and n_tokens - covered_tokens >= gates.continued_interval


def cuts(start: int, n_tokens: int, n_ubatch: int, anchors: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the batch ends in (start, n_tokens]: absolute multiples of n_ubatch and all anchors.

    A multiple that would leave fewer than 64 rows before the last token is left out, or moved back by 64
    where the batch would exceed n_ubatch.
    """
    if start >= n_tokens:
        return ()
    fixed = [start, *(anchor for anchor in anchors if start < anchor < n_tokens), n_tokens]
    ends: list[int] = []
    for begin, end in pairwise(fixed):
        ends += _multiples(begin, end, n_tokens - 1, n_ubatch)
        ends.append(end)
    return tuple(ends)


def _multiples(begin: int, end: int, last: int, n_ubatch: int) -> Iterator[int]:
    """Yield the cuts strictly between two fixed ones."""
    before = begin
    for multiple in range((begin // n_ubatch + 1) * n_ubatch, end, n_ubatch):
        cut = multiple
        if last - multiple < KERNEL_ROWS:
            if end - before <= n_ubatch:
                return
            moved = multiple - KERNEL_ROWS
            if moved > before and end - moved <= n_ubatch:
                cut = moved
        yield cut
        before = cut


class Speed(msgspec.Struct, frozen=True):
    """How fast a model's prompts are computed and its rows restored.

    Until it is measured: a small model on two cores. Rows of one model rank alike whatever stands here.
    """

    prefill_ms_per_token: float = 5.0
    restore_ms_per_mib: float = 0.15


class Measured(msgspec.Struct, frozen=True):
    """What a worker has counted: tokens that it computed, bytes that it restored, and what both took."""

    prefilled_tokens: int = 0
    prefill_us: int = 0
    restored_bytes: int = 0
    restore_us: int = 0

    @property
    def has_prefilled(self) -> bool:
        """Whether it has computed enough to be believed. A context without counters has taken no time."""
        return self.prefilled_tokens >= MEASURED_TOKENS and self.prefill_us > 0

    @property
    def has_restored(self) -> bool:
        """Whether it has restored enough to be believed."""
        return self.restored_bytes >= MIB

    @property
    def speed(self) -> Speed:
        """The two speeds; what is not measured is assumed."""
        assumed = Speed()
        return Speed(
            self.prefill_us / 1000 / self.prefilled_tokens
            if self.has_prefilled
            else assumed.prefill_ms_per_token,
            self.restore_us / 1000 / (self.restored_bytes / MIB)
            if self.has_restored
            else assumed.restore_ms_per_mib,
        )

    def plus(self, other: Measured) -> Measured:
        """Both together."""
        return Measured(
            self.prefilled_tokens + other.prefilled_tokens,
            self.prefill_us + other.prefill_us,
            self.restored_bytes + other.restored_bytes,
            self.restore_us + other.restore_us,
        )

    def faded(self) -> Measured:
        """With less of what was restored: after some dozens of these nothing is known any more."""
        return msgspec.structs.replace(
            self, restored_bytes=self.restored_bytes * 7 // 8, restore_us=self.restore_us * 7 // 8
        )


class Standing(msgspec.Struct, frozen=True):
    """What eviction knows of a row.

    gain_ms_per_byte  what a use spares, over the row's bytes.
    chance            that it would be used again, when it was used last; 0 < chance < 1.
    used_s            when that was, or when it was made.
    is_dominated      one row was made from it and stands for it: nobody else has used it, and it is no head.
    """

    gain_ms_per_byte: float
    chance: float
    used_s: float
    is_dominated: bool


def gain_ms_per_byte(token_count: int, slab_bytes: int, speed: Speed) -> float:
    """What one use of a row spares, over its bytes: its prefill, less its restore."""
    prefill_ms = token_count * speed.prefill_ms_per_token
    restore_ms = slab_bytes / MIB * speed.restore_ms_per_mib
    return max(0.0, prefill_ms - restore_ms) / slab_bytes


def restore_pays(token_count: int, slab_bytes: int, measured: Measured) -> bool:
    """Whether a row's restore takes less than its prefill; as long as either is not measured, it does."""
    if not (measured.has_prefilled and measured.has_restored):
        return True
    return gain_ms_per_byte(token_count, slab_bytes, measured.speed) > 0


def worth(row: Standing, now_s: float, half_life_s: float) -> float:
    """Milliseconds of prefill that keeping one byte of the row may still spare.

    Args:
        row: what is known of it.
        now_s: the clock that used_s was read from.
        half_life_s: of what is still expected of a row, from its last use on.
    """
    if row.is_dominated:
        return 0.0
    waits = row.chance * math.pow(0.5, max(0.0, now_s - row.used_s) / half_life_s)
    return waits / (1 - row.chance + waits) * row.gain_ms_per_byte
