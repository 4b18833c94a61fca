"""What bytes keep a decision?

    offset size name  meaning
    0      1    form  0 JSON text, 1 the same through zlib with DICTIONARY, used where it is smaller
    1      n    body

zlib begins with a dictionary of what decisions are made of: 654 bytes of text become 170, without it 302,
in no more time. Another dictionary would be another form.

What is stored is the result alone: no text of the request, no `routing` (a router adds its own to a
replay), and none of the marks that one call's options put on its answers.

Readers: cache, tools.
Invariants
    I1  decode(encode(result)) equals the stripped result, or encode raises: nothing is stored that comes
        back as something else.
    I2  No bytes, however made, decode to more than LIMIT_BYTES of text.
    I3  Whatever bytes arrive, decode returns a value or raises CorruptDecision.
Leaves out: whether a result may be stored (legal).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import msgspec

from shmcache.errors import CorruptDecision

LIMIT_BYTES = 1 << 20
# One more for the form; zlib is only used where it makes a value smaller.
VALUE_LIMIT_BYTES = LIMIT_BYTES + 1
CALL_MARKS = frozenset({"low_confidence", "abstention", "abstention_threshold"})

DICTIONARY = (
    b'"truncated_questions":["options":{"windows":1"reliability":{"legend":{"0":"low","1":"medium","2":"high"}'
    b'{"model":"laya-rl-agent","answers":{"usage":{"input_tokens":1,"output_tokens":0,"state_tokens":1,'
    b'"state_tokens_dropped":0,"truncated":false,"truncated_questions":[]}}'
    b'"false","true":null,"yes","no","other"}},"type":"score","score":1.0,"probabilities":{"0":0.0,"1":0.9,'
    b'"2":0.},"type":"noul","noul":0.9,"type":"choice","choice":"probabilities":{"confidence":0.'
    b'"answer_confidence":0.9,"action":{"act_probability":0.9'
)
"""What is at its end costs the least to name."""

_PLAIN, _DEFLATED = b"\x00", b"\x01"
# Copied for each value, which takes half the time of making one.
_INFLATING = zlib.decompressobj(zdict=DICTIONARY)
# Deflate cannot grow anything more than 1,032 times: below this no limit has to be watched.
_HARMLESS_BYTES = LIMIT_BYTES // 1032

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class NotStorable(ValueError):
    """A result is not plain JSON, or is more than LIMIT_BYTES of it; `reason` is what is counted."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


def stripped(result: Any) -> Any:
    """A result without what belongs to one call only. Shallow: nothing of the caller's is changed."""
    if not isinstance(result, Mapping):
        return result
    kept = {name: value for name, value in result.items() if name != "routing"}
    answers = kept.get("answers")
    if isinstance(answers, Mapping):
        kept["answers"] = {name: _unmarked(answer) for name, answer in answers.items()}
    return kept


def _unmarked(answer: Any) -> Any:
    if isinstance(answer, Mapping) and not CALL_MARKS.isdisjoint(answer):
        return {name: value for name, value in answer.items() if name not in CALL_MARKS}
    return answer


def encode(result: Any) -> bytes:
    """The bytes of a stripped result. Raises NotStorable."""
    try:
        text = _encode(result)
        if _decode(text) != result:
            raise NotStorable("not_json")
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise NotStorable("not_json") from error
    if len(text) > LIMIT_BYTES:
        raise NotStorable("too_large")
    deflating = zlib.compressobj(zdict=DICTIONARY)
    packed = deflating.compress(text) + deflating.flush()
    return _DEFLATED + packed if len(packed) < len(text) else _PLAIN + text


def decode(value: bytes) -> Any:
    """The result, made anew at each call. Raises CorruptDecision."""
    try:
        form, body = value[:1], value[1:]
        if form == _DEFLATED:
            body = _inflated(body)
        elif form != _PLAIN:
            raise CorruptDecision(f"unknown form {form!r}")
        if len(body) > LIMIT_BYTES:
            raise CorruptDecision(f"more than {LIMIT_BYTES} bytes")
        return _decode(body)
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptDecision(str(error)) from error


def _inflated(body: bytes) -> bytes:
    inflating = _INFLATING.copy()
    text = inflating.decompress(body, 0 if len(body) <= _HARMLESS_BYTES else LIMIT_BYTES + 1)
    if len(text) <= LIMIT_BYTES and not inflating.eof:
        raise CorruptDecision("a cut zlib stream")
    return text
