"""Which 16 bytes name a request?

    key = BLAKE2b-16 of [[fingerprint, checkpoint, route, budget, scan, version], questions, state]

as JSON in the given order, written by one encoder (msgspec's). Option order is positional, so no key is
sorted: {"a": 1, "b": 2} and {"b": 2, "a": 1} are two requests, and so are 1, 1.0, true and "1", or 0.0
and -0.0, because each is spelled its own way. What JSON cannot hold, or spells like something else, has
no key: NaN and the infinities (null), keys that are no strings, bytes, tuples, sets, lone surrogates,
subclasses of str and float, more than MAX_DEPTH levels. Such a call goes on uncached.

Readers: cache, memo. Any number of threads.
Invariants
    I1  Equal keys mean equal JSON texts, but for a collision of 128 bits.
    I2  A value has a canonical text only if decoding that text gives an equal value: so nothing that the
        encoder converts on the way (NaN, a tuple, a date) can share a key with what it was made into.
    I3  The rule does not depend on the process: a depth limit of our own, not the interpreter's.
Leans on: msgspec writes 1, 1.0 and true differently, and floats in their shortest exact form; the test
holds its spelling to golden bytes. Another spelling would only start afresh, never mix two requests.
Leaves out: what goes into the parts (host).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Literal

import msgspec

KEY_BYTES = 16
KEY_VERSION = 1
MAX_DEPTH = 64
_REMEMBERED = 256

Reason = Literal["not_finite", "key_not_string", "type", "surrogate", "too_deep"]

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class NotCanonical(ValueError):
    """A value has no canonical JSON text; `reason` says why."""

    def __init__(self, reason: Reason) -> None:
        self.reason: Reason = reason
        super().__init__(f"no canonical JSON text: {reason}")


class Facts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a key holds beside questions and state.

    fingerprint  pinned text, or the model's parts.
    checkpoint   the name under which a router knows the model.
    route        what a router detected, where the answer depends on it.
    budget       token limits of this call.
    scan         how a long document is cut into windows; None for one window.
    version      of this layout.
    """

    fingerprint: Any
    checkpoint: str | None = None
    route: Any = None
    budget: Any = None
    scan: Any = None
    version: int = KEY_VERSION


def canonical(value: Any) -> bytes:
    """The one JSON text of a value. Raises NotCanonical."""
    try:
        text = _encode(value)
        # A plain string cannot be mistaken for anything else, and is most of what is asked.
        if type(value) is str or (_is_shallow(text, value) and _decode(text) == value):
            return text
    except (TypeError, ValueError, OverflowError, RecursionError):
        pass
    raise NotCanonical(_why(value))


def _is_shallow(text: bytes, value: Any) -> bool:
    return text.count(b"[") + text.count(b"{") <= MAX_DEPTH or _depth(value) <= MAX_DEPTH


def _depth(value: Any) -> int:
    """Levels of nesting, counted to one more than MAX_DEPTH."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        inner: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                inner.extend(item.values())
            elif isinstance(item, (list, tuple)):
                inner.extend(item)
        depth += any(isinstance(item, (Mapping, list, tuple)) for item in level)
        level = inner
    return depth


def _why(value: Any) -> Reason:
    """The first thing in a value that has no text of its own."""
    if _depth(value) > MAX_DEPTH:
        return "too_deep"
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Mapping):
            if not all(type(key) is str for key in item):
                return "key_not_string"
            stack.extend(item.values())
            stack.extend(item)
        elif isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, float) and not math.isfinite(item):
            return "not_finite"
        elif isinstance(item, str) and _has_surrogate(item):
            return "surrogate"
    return "type"


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


class KeyMaker:
    """Makes keys, and remembers the hashed beginning of those that differ only in their state."""

    def __init__(self) -> None:
        self._remembered: dict[bytes, tuple[Any, Any]] = {}

    def head(self, facts: Facts, questions: Any) -> Any:
        """The hash of everything but the state, for key(). Raises NotCanonical.

        A remembered text alone does not prove that these questions are canonical, and equal questions
        alone do not prove that they are spelled alike (1 == True): both together do.
        """
        try:
            start = _encode((facts, questions))
        except (TypeError, ValueError, OverflowError, RecursionError):
            start = b""
        remembered = self._remembered.get(start)
        if remembered is not None and remembered[0] == questions:
            return remembered[1]
        canonical(list(msgspec.structs.astuple(facts)))
        questions_text = canonical(questions)
        hashed = blake2b(start[:-1] + b",", digest_size=KEY_BYTES)
        if len(self._remembered) >= _REMEMBERED:
            self._remembered.clear()
        # A copy, because the caller may change its questions in place.
        self._remembered[start] = (_decode(questions_text), hashed)
        return hashed

    def key(self, head: Any, state: Any) -> bytes:
        """The key of one state. Raises NotCanonical."""
        hashed = head.copy()
        hashed.update(canonical(state))
        hashed.update(b"]")
        digest: bytes = hashed.digest()
        return digest
