"""The small trace that `bench eviction` replays where none is given: how is it made?

    python -m bench.eviction_trace > bench/eviction_trace.jsonl

Ten minutes of traffic, invented: a system prompt of one block that all share; conversations that grow by one
to three blocks a turn, a minute or so apart; long documents that are asked about once; and three documents
that are asked about again and again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

BLOCK_TOKENS = 512
_SECONDS = 600
_CONVERSATIONS, _ONE_TIME, _REFERENCES = 60, 90, 3


def requests(seed: int = 4) -> list[dict[str, object]]:
    """All requests in the order of time; the same for the same seed."""
    chance = random.Random(seed)
    new = iter(range(1, 1 << 30))
    made = [*_conversations(chance, new), *_documents(chance, new), *_references(chance, new)]
    made.sort(key=lambda request: request[0])
    return [
        {
            "timestamp": int(at_s * 1000),
            "input_length": len(blocks) * BLOCK_TOKENS + chance.randrange(BLOCK_TOKENS),
            "output_length": chance.randrange(20, 400),
            "hash_ids": [*blocks, next(new)],
        }
        for at_s, blocks in made
        if at_s < _SECONDS
    ]


def _blocks(new: Iterator[int], count: int) -> list[int]:
    return [next(new) for _ in range(count)]


def _conversations(chance: random.Random, new: Iterator[int]) -> Iterator[tuple[float, list[int]]]:
    for _ in range(_CONVERSATIONS):
        at_s, blocks = chance.uniform(0, _SECONDS), [0, *_blocks(new, chance.randrange(1, 8))]
        for _ in range(1 + int(chance.expovariate(0.4))):
            yield at_s, blocks
            at_s += chance.lognormvariate(4.0, 0.7)
            blocks = [*blocks, *_blocks(new, chance.randrange(1, 4))]


def _documents(chance: random.Random, new: Iterator[int]) -> Iterator[tuple[float, list[int]]]:
    for _ in range(_ONE_TIME):
        yield chance.uniform(0, _SECONDS), [0, *_blocks(new, chance.randrange(10, 40))]


def _references(chance: random.Random, new: Iterator[int]) -> Iterator[tuple[float, list[int]]]:
    for _ in range(_REFERENCES):
        text = [0, *_blocks(new, chance.randrange(15, 25))]
        for _ in range(12):
            yield chance.uniform(0, _SECONDS), [*text, next(new)]


def lines(seed: int = 4) -> Iterator[str]:
    """The trace as it lies in the file."""
    for request in requests(seed):
        yield json.dumps(request)


if __name__ == "__main__":
    print("\n".join(lines()))
