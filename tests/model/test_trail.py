"""The record of what is in the cells: joined where batches are alike, never across a mark."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmcache.kvc import Piece
from shmcache.workers.trail import Trail, common_bytes


def batch(length: int, n_threads: int = 1) -> Piece:
    return Piece(length, 1, 512, n_threads, 0)


def decode(trail: Trail, *lengths: int) -> Trail:
    for length in lengths:
        tokens = list(range(length))
        trail.decoded(tokens, [bytes([65 + token % 26]) for token in tokens], batch(length))
    return trail


def shape(trail: Trail) -> list[tuple[int, int]]:
    return [(piece.length, piece.repeats) for piece in trail.pieces]


def test_batches_that_are_alike_share_an_entry() -> None:
    assert shape(decode(Trail(0), 512, 512, 300, 1, 1, 1)) == [(512, 2), (300, 1), (1, 3)]


def test_nothing_is_joined_across_a_mark() -> None:
    trail = decode(Trail(0), 1, 1)
    trail.mark()
    assert shape(decode(trail, 1)) == [(1, 2), (1, 1)]


def test_another_thread_count_is_another_entry() -> None:
    trail = decode(Trail(0), 1)
    trail.decoded([0], [b"A"], batch(1, n_threads=2))
    assert [piece.n_threads for piece in trail.pieces] == [1, 2]


def test_a_restored_row_is_not_joined_with_what_follows() -> None:
    trail = Trail(0)
    trail.restored([1, 2], [b"a", b"b"], [Piece(1, 2, 512, 1, 0)], b"k" * 32)
    assert shape(decode(trail, 1)) == [(1, 2), (1, 1)]
    assert trail.base_key() == b"k" * 32


lengths = st.lists(st.sampled_from([1, 1, 1, 3, 64]), min_size=1, max_size=12)


@given(lengths=lengths, marked=st.sets(st.integers(0, 11)), keep=st.integers(0, 800))
def test_a_cut_leaves_what_would_have_been_recorded_without_the_rest(
    lengths: list[int], marked: set[int], keep: int
) -> None:
    trail, ends, shorter = Trail(0), [0], Trail(0)
    for index, length in enumerate(lengths):
        decode(trail, length)
        ends.append(len(trail))
        if ends[-1] <= keep:
            decode(shorter, length)
        if index in marked:
            trail.mark()
            shorter.mark() if ends[-1] <= keep else None
    keep = min(keep, len(trail))
    assert trail.may_end_at(keep) == (keep in ends)
    if keep not in ends:
        with pytest.raises(ValueError, match="inside a batch"):
            trail.cut(keep)
        return
    trail.cut(keep)
    assert (trail.tokens, trail.ends, trail.text) == (shorter.tokens, shorter.ends, shorter.text)
    assert trail.pieces == shorter.pieces
    assert trail.marks == shorter.marks
    assert sum(piece.length * piece.repeats for piece in trail.pieces) == len(trail) == keep


def test_the_base_is_the_longest_row_that_is_known() -> None:
    trail = decode(Trail(0), 2)
    assert trail.base_key() is None
    trail.mark(b"1" * 32)
    decode(trail, 2).mark()
    assert trail.base_key() == b"1" * 32
    trail.mark(b"2" * 32)
    assert trail.base_key() == b"2" * 32
    trail.mark()  # says that a row could be there, and forgets nothing
    assert trail.base_key() == b"2" * 32


@given(one=st.binary(max_size=8), other=st.binary(max_size=8))
def test_common_bytes_is_the_length_of_the_common_prefix(one: bytes, other: bytes) -> None:
    length = common_bytes(bytearray(one), other)
    assert one[:length] == other[:length]
    assert length in (len(one), len(other)) or one[length] != other[length]
