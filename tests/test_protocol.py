"""Messages: what is sent arrives, what does not fit is refused, and garbage never gets through."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from shmcache import page, protocol
from shmcache.connection import Head
from shmcache.protocol import (
    MAX_EVICTED,
    MAX_KEYS,
    MAX_PLANS,
    MESSAGE_BYTES,
    NO_MAILBOX,
    Add,
    Added,
    AnyReply,
    AnyRequest,
    Await,
    AwaitClaims,
    Cancel,
    Claim,
    Claimed,
    Clear,
    Delete,
    Deleted,
    Drop,
    Evict,
    Evicted,
    Extend,
    Free,
    Item,
    Outbox,
    Outcome,
    Pin,
    Pinned,
    Plan,
    Prune,
    Release,
    Renew,
    Reserve,
    Reserved,
    Stale,
    Tier,
    Verdict,
    VerdictKind,
    Written,
)

MOST = (1 << 63) - 1
KEY = b"k" * 32
DECISION_KEY = b"k" * 16
HEAD = Head(epoch=MOST, client=MOST, mailbox=page.MAILBOXES - 1, request=MOST)
PLAN = Plan(KEY, KEY, 1 << 48, 1 << 48, Tier.DISK, bytes(16))
REQUESTS: list[AnyRequest] = [
    Reserve(**HEAD, forget=MOST, base=KEY, plans=[PLAN] * MAX_PLANS),
    Reserve(**HEAD, forget=0, base=None, plans=[Plan(None, None, 0, 1, Tier.RAM_FILE)]),
    Extend(**HEAD, token=MOST, slab_bytes=1 << 48),
    Written(**HEAD, token=MOST, key=KEY),
    Await(**HEAD, key=KEY),
    Cancel(**HEAD, tokens=[MOST] * MAX_PLANS, asked=MOST),
    Drop(**HEAD, key=KEY, word=(1 << 64) - 1, why="\U0001f40c" * 200),
    Evict(**HEAD, keys=[KEY] * MAX_EVICTED),
    Pin(**HEAD, key=KEY, pinned=True),
    Claim(**HEAD, limit_ms=1 << 46, keys=[DECISION_KEY] * MAX_KEYS),
    AwaitClaims(**HEAD, keys=[DECISION_KEY] * MAX_KEYS),
    Add(**HEAD, clear=MOST, claim=MOST, items=[Item(DECISION_KEY, b"v" * 100, None)] * 64),
    Add(**HEAD, clear=0, claim=0, items=[], outbox=Outbox(0, page.OUTBOX_BYTES, (1 << 32) - 1)),
    Release(**HEAD, claim=MOST),
    Renew(**HEAD, key=DECISION_KEY, ttl_ms=1 << 46),
    Delete(**HEAD, keys=[DECISION_KEY] * MAX_KEYS),
    Clear(**HEAD),
    Prune(**HEAD),
]
REPLIES: list[AnyReply] = [
    Reserved([Verdict(kind, MOST, 1 << 48) for kind in get_args(VerdictKind)] * 2),
    Reserved([]),
    Outcome(True),
    Outcome(False, "w" * 1000),
    Stale(MOST),
    Evicted(MAX_EVICTED, MAX_EVICTED),
    Pinned(False, "w" * 1000),
    Claimed("granted", MOST),
    Free(),
    Added(["too_large"] * MAX_KEYS),
    Deleted(MOST),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_a_request_arrives_as_it_was_sent_and_fits_a_message(request_: AnyRequest) -> None:
    message = protocol.encode(request_)
    assert len(message) <= MESSAGE_BYTES
    assert protocol.decode_request(message) == request_


@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: type(reply).__name__)
def test_a_reply_arrives_as_it_was_sent_and_fits_a_mailbox(reply: AnyReply) -> None:
    body = protocol.encode(reply)
    assert len(body) <= page.BODY_BYTES
    assert protocol.decode_reply(body) == reply


def test_every_kind_of_message_is_tried_here() -> None:
    assert {type(request) for request in REQUESTS} == set(get_args(AnyRequest))
    assert {type(reply) for reply in REPLIES} == set(get_args(AnyReply))


def test_a_request_is_no_reply_and_a_reply_no_request() -> None:
    for request in REQUESTS:
        with pytest.raises(msgspec.ValidationError):
            protocol.decode_reply(protocol.encode(request))
    for reply in REPLIES:
        with pytest.raises(msgspec.ValidationError):
            protocol.decode_request(protocol.encode(reply))


@pytest.mark.parametrize(
    "request_",
    [
        Reserve(**HEAD, forget=0, base=None, plans=[PLAN] * (MAX_PLANS + 1)),
        Reserve(**HEAD, forget=-1, base=None, plans=[]),
        Reserve(**HEAD, forget=0, base=b"short", plans=[]),
        Reserve(**HEAD, forget=0, base=None, plans=[Plan(KEY + b"k", KEY, 0, 1, Tier.RAM)]),
        Reserve(**HEAD, forget=0, base=None, plans=[Plan(KEY, KEY, 0, (1 << 48) + 1, Tier.RAM)]),
        Reserve(**HEAD, forget=0, base=None, plans=[Plan(KEY, KEY, 0, 1, 3)]),  # type: ignore[arg-type]
        Extend(**HEAD, token=1 << 63, slab_bytes=1),
        Evict(**HEAD, keys=[KEY] * (MAX_EVICTED + 1)),
        Claim(**HEAD, limit_ms=1, keys=[DECISION_KEY] * (MAX_KEYS + 1)),
        Delete(**HEAD, keys=[KEY]),
        Add(**HEAD, clear=0, claim=0, items=[Item(DECISION_KEY, b"", -1)]),
        replace(Await(**HEAD, key=KEY), epoch=1 << 63),
        replace(Await(**HEAD, key=KEY), request=-1),
    ],
)
def test_a_value_out_of_its_range_is_refused(request_: AnyRequest) -> None:
    with pytest.raises(msgspec.ValidationError):
        protocol.decode_request(protocol.encode(request_))


def test_a_mailbox_is_one_of_the_page_or_none() -> None:
    legal = [*range(page.MAILBOXES), NO_MAILBOX]
    for mailbox in range(300):
        message = protocol.encode(replace(Await(**HEAD, key=KEY), mailbox=mailbox))
        if mailbox in legal:
            assert protocol.decode_request(message).mailbox == mailbox
        else:
            with pytest.raises(msgspec.ValidationError):
                protocol.decode_request(message)


def _decode_both(message: bytes) -> None:
    for decode in (protocol.decode_request, protocol.decode_reply):
        try:
            decode(message)
        except msgspec.MsgspecError:
            continue


@given(st.binary(max_size=300))
@example(protocol.encode(REQUESTS[-1]).replace("\U0001f40c".encode(), b"\xff\xfe\xfd\xfc"))
@example(b"\x91" * MESSAGE_BYTES)
@example(b"")
def test_whatever_arrives_is_a_message_or_the_one_error(message: bytes) -> None:
    _decode_both(message)


@given(st.sampled_from(REQUESTS), st.integers(0, 8191), st.integers(0, 255), st.integers(0, 8192))
def test_a_damaged_message_is_a_message_or_the_one_error(
    request_: AnyRequest, at: int, byte: int, length: int
) -> None:
    message = bytearray(protocol.encode(request_))
    message[at % len(message)] = byte
    _decode_both(bytes(message))
    _decode_both(bytes(message[:length]))
