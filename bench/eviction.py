"""Which share of a trace's prompt tokens does each eviction policy save, under a budget?

    --trace FILE    requests in the order of time, one JSON object a line: `timestamp` (ms), `input_length`
                    (tokens), `hash_ids`: one id for each block of 512 prompt tokens, the last one partial.
                    Two prompts share a prefix exactly as far as their ids agree. Without it: the small
                    synthetic trace beside this file (conversations, one-time documents, a shared beginning).

Each request takes the longest row that is a prefix of it, and leaves a row of its own full blocks, which is
what a worker does, in blocks. The rows go through eviction.Residents and policy.worth as in the coordinator;
a row that the request has used, and what that was made from, does not leave for it.

    lru_vs_recency_saved_tokens_Npct   our lru, with its touch rules, beside plain recency
    cost_vs_lru_saved_tokens_Npct      cost beside plain recency
    cost_vs_all_saved_tokens_Npct      cost beside a cache that never loses anything: the ceiling

at budgets of N = 1, 5 and 20 % of the distinct blocks of the trace. Nothing here depends on the machine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import msgspec

from bench.harness import Options, Row
from shmcache import policy
from shmcache.config import Eviction
from shmcache.eviction import Entry, Residents

BLOCK_TOKENS = 512
BLOCK_BYTES = BLOCK_TOKENS * 23_040  # SmolLM2-135M: what a byte is does not matter, all rows have the same
BUDGETS_PERCENT = (1, 5, 20)
OWN_TRACE = Path(__file__).with_name("eviction_trace.jsonl")
_TIER = 0


class Request(msgspec.Struct, frozen=True):
    """One line of a trace, but for the length of its reply."""

    timestamp: int
    input_length: int
    hash_ids: list[int]


class Cache(Protocol):
    """Something that loses rows under a budget. Rows are named by the hash of their blocks."""

    def longest(self, names: list[bytes], now_s: int) -> int:
        """How many blocks the longest row among these prefixes has; it counts as used."""

    def add(self, names: list[bytes], used_blocks: int, now_s: int) -> None:
        """Leave a row of all these blocks, made from the row of the first `used_blocks`."""


class Recency:
    """Plain recency: the row used longest ago leaves."""

    def __init__(self, budget_blocks: int) -> None:
        self._budget_blocks = budget_blocks
        self._rows: OrderedDict[bytes, int] = OrderedDict()
        self._used_blocks = 0

    def longest(self, names: list[bytes], now_s: int) -> int:
        """As in Cache."""
        for blocks in range(len(names), 0, -1):
            if names[blocks - 1] in self._rows:
                self._rows.move_to_end(names[blocks - 1])
                return blocks
        return 0

    def add(self, names: list[bytes], used_blocks: int, now_s: int) -> None:
        """As in Cache. The row just used is the warmest, so it leaves last of all."""
        if len(names) > self._budget_blocks or names[-1] in self._rows:
            return
        while self._used_blocks + len(names) > self._budget_blocks:
            self._used_blocks -= self._rows.popitem(last=False)[1]
        self._rows[names[-1]] = len(names)
        self._used_blocks += len(names)


class Ours:
    """The coordinator's own choice, without its files: rows in slots, Residents and policy."""

    def __init__(self, kind: Eviction, budget_blocks: int, most_rows: int) -> None:
        self._residents = Residents(most_rows, 1, kind)
        self._budget_blocks = budget_blocks
        self._free = list(range(most_rows))
        self._slots: dict[bytes, int] = {}
        self._rows: dict[int, tuple[bytes, int]] = {}
        self._used_blocks = 0

    def longest(self, names: list[bytes], now_s: int) -> int:
        """As in Cache."""
        for blocks in range(len(names), 0, -1):
            slot = self._slots.get(names[blocks - 1])
            if slot is not None:
                self._residents.use(slot, now_s)
                return blocks
        return 0

    def add(self, names: list[bytes], used_blocks: int, now_s: int) -> None:
        """As in Cache."""
        if len(names) > self._budget_blocks or names[-1] in self._slots:
            return
        base = self._slots[names[used_blocks - 1]] if used_blocks else None
        if not self._make_room(len(names), base, now_s):
            return
        slot = self._free.pop()
        self._slots[names[-1]] = slot
        self._rows[slot] = names[-1], len(names)
        self._used_blocks += len(names)
        tokens, size_bytes = len(names) * BLOCK_TOKENS, len(names) * BLOCK_BYTES
        self._residents.enter(
            slot,
            Entry(
                tier=_TIER,
                tokens=tokens,
                gain_ms_per_byte=policy.gain_ms_per_byte(tokens, size_bytes, policy.Speed()),
                made_unix_s=now_s,
                used_unix_s=now_s,
            ),
        )
        if base is not None:
            self._residents.descend(slot, base)

    def _make_room(self, blocks: int, base: int | None, now_s: int) -> bool:
        needed = {base, *self._residents.ancestors(base)} if base is not None else set()
        short_blocks = self._used_blocks + blocks - self._budget_blocks
        victims = []
        for slot in self._residents.leaving(_TIER, now_s) if short_blocks > 0 else ():
            if slot not in needed:
                victims.append(slot)
                short_blocks -= self._rows[slot][1]
                if short_blocks <= 0:
                    break
        if short_blocks > 0:
            return False
        for slot in victims:
            self._residents.leave(slot)
            name, gone_blocks = self._rows.pop(slot)
            del self._slots[name]
            self._used_blocks -= gone_blocks
            self._free.append(slot)
        return True


def read_trace(path: Path) -> list[Request]:
    """All requests of a trace. Raises OSError, msgspec.DecodeError."""
    decoder = msgspec.json.Decoder(Request)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]


def footprint_blocks(trace: list[Request]) -> int:
    """Distinct blocks of a trace: what would hold every prompt once, without a block twice."""
    return len({block for request in trace for block in request.hash_ids})


def saved_share(trace: list[Request], cache: Cache) -> float:
    """The share of all prompt tokens that a row of the cache had."""
    saved_blocks = 0
    for request in trace:
        names = _names(request)
        if names:
            now_s = request.timestamp // 1000
            used_blocks = cache.longest(names, now_s)
            saved_blocks += used_blocks
            cache.add(names, used_blocks, now_s)
    return saved_blocks * BLOCK_TOKENS / sum(request.input_length for request in trace)


def _names(request: Request) -> list[bytes]:
    """A name for each of a prompt's prefixes of whole blocks."""
    state = sha256()
    names = []
    for block in request.hash_ids[: request.input_length // BLOCK_TOKENS]:
        state.update(block.to_bytes(8, "little"))
        names.append(state.digest())
    return names


def rows(options: Options) -> Iterable[Row]:
    """All rows of this bench; `quick` changes nothing."""
    trace = read_trace(options.trace or OWN_TRACE)
    ceiling = saved_share(trace, Ours("lru", 1 << 40, len(trace)))
    for percent in BUDGETS_PERCENT:
        budget_blocks = footprint_blocks(trace) * percent // 100
        recency = saved_share(trace, Recency(budget_blocks))
        lru, cost = (saved_share(trace, Ours(kind, budget_blocks, len(trace))) for kind in ("lru", "cost"))
        yield from _compared(percent, lru, cost, recency, ceiling)


def _compared(percent: int, lru: float, cost: float, recency: float, ceiling: float) -> Iterator[Row]:
    for name, ours, peer, theirs in (
        ("lru_vs_recency", lru, "plain recency", recency),
        ("cost_vs_lru", cost, "plain recency", recency),
        ("cost_vs_all", cost, "unlimited", ceiling),
    ):
        yield Row(
            name=f"{name}_saved_tokens_{percent}pct",
            ours=100 * ours,
            unit="%",
            peer=peer,
            peer_value=100 * theirs,
            ratio=ours / theirs if theirs else float(bool(ours)),
        )
