"""shmcache.key against its trivial twin: SHA-256 of seed and text, put together anew each time."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmcache.key import BLOCK_BYTES, SEED_BYTES, PrefixWalk, identity_tag, key_of, row_address

SEED = bytes(range(SEED_BYTES))
OTHER_SEED = SEED[:-1] + b"\xff"

# A block repeated and a free rest: long texts from small examples.
texts = st.builds(
    lambda unit, times, rest: unit * times + rest,
    st.binary(min_size=1, max_size=700),
    st.integers(0, 12),
    st.binary(max_size=1100),
)


@given(texts, st.data())
def test_a_walk_knows_the_key_of_every_prefix(text: bytes, data: st.DataObject) -> None:
    walk = PrefixWalk(SEED, text)
    assert walk.text_bytes == len(text)
    for length in data.draw(st.lists(st.integers(0, len(text)), max_size=8)):
        assert walk.key_at(length) == sha256(SEED + text[:length]).digest()


@given(texts)
def test_block_keys_are_the_keys_at_the_multiples(text: bytes) -> None:
    walk = PrefixWalk(SEED, text)
    assert walk.block_keys == [
        sha256(SEED + text[:end]).digest() for end in range(0, len(text) + 1, BLOCK_BYTES)
    ]
    assert walk.block_keys == [walk.key_at(BLOCK_BYTES * i) for i in range(len(text) // BLOCK_BYTES + 1)]


@given(texts, texts)
def test_the_walk_of_a_longer_prompt_finds_the_address_of_a_row(text: bytes, more: bytes) -> None:
    row = row_address(SEED, text)
    walk = PrefixWalk(SEED, text + more)
    block = len(text) // BLOCK_BYTES
    assert walk.block_keys[block] == row.block_key
    assert walk.key_at(block * BLOCK_BYTES + row.tail) == row.key == key_of(SEED, text)


@pytest.mark.parametrize("length", [0, 1, 1023, 1024, 1025, 2047, 2048])
def test_an_address_splits_the_text_at_the_last_multiple(length: int) -> None:
    text = bytes(i % 251 for i in range(length))
    row = row_address(SEED, text)
    assert row.tail == length % BLOCK_BYTES
    assert row.block_key == sha256(SEED + text[: length - row.tail]).digest()
    assert (row.key == row.block_key) == (row.tail == 0)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_text_may_be_any_buffer(kind: type) -> None:
    text = bytes(3000)
    assert key_of(SEED, kind(text)) == key_of(SEED, text)
    assert row_address(SEED, kind(text)) == row_address(SEED, text)
    assert PrefixWalk(SEED, kind(text)).key_at(2999) == key_of(SEED, text[:2999])


def test_the_same_text_under_another_identity_has_another_address() -> None:
    ours, theirs = row_address(SEED, b"x" * 3000), row_address(OTHER_SEED, b"x" * 3000)
    assert ours.key != theirs.key
    assert ours.block_key != theirs.block_key


def test_an_identity_tag_is_64_bits_of_model_and_context() -> None:
    tag = identity_tag(SEED[:32], SEED[33:])
    assert 0 <= tag < 1 << 64
    assert tag != identity_tag(SEED[33:], SEED[:32])


@pytest.mark.parametrize("length", [-1, 3001, 4096])
def test_a_length_outside_the_prompt_is_an_index_error(length: int) -> None:
    with pytest.raises(IndexError, match="3000"):
        PrefixWalk(SEED, bytes(3000)).key_at(length)


@pytest.mark.parametrize("seed", [b"", SEED[:-1], SEED + b"\0"])
def test_a_seed_of_another_length_is_refused(seed: bytes) -> None:
    with pytest.raises(ValueError, match="65"):
        key_of(seed, b"")
    with pytest.raises(ValueError, match="65"):
        PrefixWalk(seed, b"")


def test_a_prompt_of_ten_megabytes_is_walked() -> None:
    text = bytes(1000) * 10_486
    walk = PrefixWalk(SEED, text)
    assert len(walk.block_keys) == len(text) // BLOCK_BYTES + 1 == 10_241
    assert walk.key_at(len(text)) == key_of(SEED, text)
