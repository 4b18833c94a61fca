"""Whatever a disk, a crash or a stranger made of a row: it restores equal bytes, or is a typed error."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from mutants import Mutant, corpus, mutants, reference
from support import Child, Pipe

from shmcache import kvc
from shmcache.errors import CorruptSlab

PROCESSES = 2

Settled = tuple[object, ...]


def settled(image: kvc.Image) -> Settled:
    """All that a reader uses: the two mutable fields aside."""
    said = replace(image.meta, hit_count=0, last_used_unix_s=0)
    return said, image.pieces, bytes(image.token_ids), bytes(image.payload)


def accepted(content: bytes) -> kvc.Image | None:
    """The row, None where the one typed error was raised; anything else fails the test.

    The scan is no stricter and no laxer about metadata than a reader.
    """
    try:
        kvc.version_of(content[: kvc.SCAN_BYTES])
        kvc.parse_head(content[: kvc.SCAN_BYTES], len(content))
    except CorruptSlab:
        with pytest.raises(CorruptSlab):
            kvc.parse(memoryview(content))
        return None
    try:
        image = kvc.parse(memoryview(content))
        kvc.verify_payload(image)
    except CorruptSlab:
        return None
    return image


def judge(mutant: Mutant, whole: frozenset[Settled]) -> bool:
    """The contract for one mutant; whether it is accepted."""
    image = accepted(mutant.content)
    if image is None:
        return False
    held = reference(mutant.content)
    assert (bytes(image.token_ids), bytes(image.payload)) == held
    assert sum(piece.length * piece.repeats for piece in image.pieces) == image.meta.token_count
    if image.meta.layout:
        assert len(image.payload) == kvc.blob_bytes(image.meta.layout, image.meta.token_count)
    # Behind its own checksums a file is what somebody wrote, all of it.
    assert mutant.is_repaired or settled(image) in whole
    return True


def judge_many(seed: int, count: int) -> int:
    """How many of so many mutants are accepted."""
    rows = corpus(seed)
    whole = frozenset(settled(kvc.parse(memoryview(row))) for row in rows)
    make = mutants(seed, rows)
    return sum(judge(make(), whole) for _ in range(count))


@pytest.mark.parametrize(
    ("count", "seed"),
    [(4_000, 1), pytest.param(1_000_000, 2, marks=[pytest.mark.stress, pytest.mark.timeout(0)])],
)
def test_a_mutant_restores_equal_bytes_or_is_corrupt(count: int, seed: int) -> None:
    def work(pipe: Pipe, number: int) -> None:
        pipe.say(judge_many(1000 * seed + number, count // PROCESSES))

    children = [Child(work, number) for number in range(PROCESSES)]
    try:
        accepted_counts = [child.hear(within_s=3600) for child in children]
        assert [child.wait() for child in children] == [0] * PROCESSES
    finally:
        for child in children:
            child.close()
    share = sum(accepted_counts) / count
    assert 0.01 < share < 0.5, f"{share:.3f} of the mutants are accepted: they no longer get to the checks"


@settings(max_examples=200)
@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_a_mutant_of_any_row_restores_equal_bytes_or_is_corrupt(row_seed: int, seed: int) -> None:
    rows = corpus(row_seed, count=2)
    whole = frozenset(settled(kvc.parse(memoryview(row))) for row in rows)
    judge(mutants(seed, rows)(), whole)
