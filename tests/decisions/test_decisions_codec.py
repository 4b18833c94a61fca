"""Values: what comes back is what went in, and no bytes can hurt."""

from __future__ import annotations

import contextlib
import math
import os
import zlib
from typing import Any

import pytest
from decisions.fake_model import Model
from hypothesis import given
from hypothesis import strategies as st

from shmcache.decisions.codec import (
    DICTIONARY,
    LIMIT_BYTES,
    VALUE_LIMIT_BYTES,
    NotStorable,
    decode,
    encode,
    stripped,
)
from shmcache.errors import CorruptDecision

RESULT = Model().result("s")


def test_a_decision_comes_back_and_is_smaller_where_zlib_helps() -> None:
    value = encode(RESULT)
    assert decode(value) == RESULT
    assert value[0] == 1
    assert len(value) < 263
    assert encode({"a": 1}) == b'\x00{"a":1}'


def test_no_text_of_a_request_and_nothing_of_one_call_is_stored() -> None:
    marked = Model().result("s") | {"routing": {"model": "english"}}
    marked["answers"]["angry"] |= {
        "low_confidence": True,
        "abstention": "abstained",
        "abstention_threshold": 0.9,
    }
    assert stripped(marked) == RESULT
    assert marked["answers"]["angry"]["low_confidence"] is True


@pytest.mark.parametrize(
    "result", [{"a": math.nan}, {1: 2}, b"x", {"a": (1, 2)}, {"a": {1}}, "\ud800", object()]
)
def test_a_result_that_is_not_plain_json_is_refused(result: Any) -> None:
    with pytest.raises(NotStorable, match="not_json"):
        encode(result)


def test_values_have_a_limit_of_one_mebibyte() -> None:
    fits = "x" * (LIMIT_BYTES - 2)
    assert decode(encode(fits)) == fits
    hard = os.urandom(LIMIT_BYTES // 2 - 1).hex()
    assert len(encode(hard)) <= VALUE_LIMIT_BYTES
    with pytest.raises(NotStorable, match="too_large"):
        encode(fits + "x")


def test_a_bomb_is_corrupt_and_stays_small() -> None:
    for size in (LIMIT_BYTES + 1, 64 << 20):
        with pytest.raises(CorruptDecision):
            deflating = zlib.compressobj(zdict=DICTIONARY)
            decode(b"\x01" + deflating.compress(b'"' + b"x" * size + b'"') + deflating.flush())
    with pytest.raises(CorruptDecision):
        decode(b"\x00" + b'"' + b"x" * LIMIT_BYTES + b'"')


@given(st.binary(max_size=200), st.sampled_from([b"", b"\x00", b"\x01", b"\x02"]))
def test_garbage_decodes_or_is_corrupt(body: bytes, form: bytes) -> None:
    with contextlib.suppress(CorruptDecision):
        decode(form + body)


def test_a_cut_stream_is_corrupt() -> None:
    value = encode({"a": "y" * 500_000 + os.urandom(3000).hex()})
    assert len(value) > LIMIT_BYTES // 1032
    for cut in (1, 2, 100, len(value) - 1):
        with pytest.raises(CorruptDecision):
            decode(value[:cut])
