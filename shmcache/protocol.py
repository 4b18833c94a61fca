"""Messages between workers and the coordinator: one tagged union per direction.

    worker → coordinator                          coordinator → worker
    Reserve   name the anchors to be saved        Reserved   one verdict a plan, same order
    Extend    a reservation needs more bytes      Reserved   one verdict
    Written   a slab has its name; look now       Outcome    only if a mailbox was given
    Await     tell me when this save has ended    Outcome    at once, or when it ends
    Cancel    a reservation is not used           -
    Drop      a published row did not verify      -
    Evict     forget these rows for good          Evicted    when their files are gone
    Pin       never evict this row, or again      Pinned     when its file says so
                                                  Stale      the message was of another epoch

Every request carries the epoch that its sender saw, the sender's random id, a mailbox (NO_MAILBOX
where no reply is wanted) and a request id that never repeats for that client. Requests are
idempotent per client: the holder's second Reserve or Written gets the first one's answer.

Invariants
    I1  A message fits MESSAGE_BYTES, a reply fits a mailbox: at most MAX_PLANS plans, MAX_KEYS keys. What
        is larger lies in the sender's page, and the message says where (Outbox).
    I2  Whatever bytes arrive, decode() returns a message or raises msgspec.MsgspecError.
Leaves out: how bytes travel (mq, page) and what is answered (coordinator).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Literal

import msgspec
from crc32c import crc32c

NO_MAILBOX = 16  # one behind the last mailbox of a page: any number beyond it is refused unread
MESSAGE_BYTES = 8192
MAX_PLANS = 16
VERSION = 2

Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
TenantHash = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Id = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


class Tier(IntEnum):
    """The three tiers, as a row and a plan number them."""

    RAM = 0
    RAM_FILE = 1
    DISK = 2


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """One row that a worker means to save.

    slab_bytes is an upper bound of the whole file, metadata included, and what the reservation
    charges. key and block_key are None where the text is not known yet: a reply in the making has
    its bytes reserved, and its key when it is written. tenant: whose share of the tier it takes.
    """

    key: Key | None
    block_key: Key | None
    text_bytes: Size
    slab_bytes: Size
    tier: Tier
    tenant: TenantHash | None = None


class Request(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What every request starts with."""

    epoch: Id
    client: Id
    mailbox: Annotated[int, msgspec.Meta(ge=0, le=NO_MAILBOX)]
    request: Id


class Reserve(Request, frozen=True, tag="reserve"):
    """Name all missing anchors of one prompt, in order.

    base is the row that was used, forget the forget number under which the sequence began.
    """

    forget: Id
    base: Key | None
    plans: Annotated[list[Plan], msgspec.Meta(max_length=MAX_PLANS)]


class Extend(Request, frozen=True, tag="extend"):
    """The slab turned out longer: charge slab_bytes in all for this reservation."""

    token: Id
    slab_bytes: Size


class Written(Request, frozen=True, tag="written"):
    """The slab of this reservation lies complete in the tier's `in/`. Only a hint to look now."""

    token: Id
    key: Key


class Await(Request, frozen=True, tag="await"):
    """Reply when no reservation of this key is in flight any more.

    unannounced: also where none of this key is known, for a reply in the making has no key yet; whoever asks
    so has a deadline.
    """

    key: Key
    unannounced: bool = False


class Cancel(Request, frozen=True, tag="cancel"):
    """These reservations are not used and none of their bytes is held any more.

    asked is the request id of a Reserve whose answer never came, 0 for none: what it was granted is
    given back without its tokens being known.
    """

    tokens: Annotated[list[Id], msgspec.Meta(max_length=MAX_PLANS)]
    asked: Id = 0


class Drop(Request, frozen=True, tag="drop"):
    """The publication `word` of this row failed its checks; forget it, once.

    aside: its checks found nothing, its state is wrong all the same: the slab is kept to be looked at.
    """

    key: Key
    word: Annotated[int, msgspec.Meta(ge=0)]
    why: str
    aside: bool = False


MAX_EVICTED = 200


class Evict(Request, frozen=True, tag="evict"):
    """Forget these rows in every tier, and let no sequence that began before now save anything any more."""

    keys: Annotated[list[Key], msgspec.Meta(max_length=MAX_EVICTED)]


class Pin(Request, frozen=True, tag="pin"):
    """Keep a row until it is unpinned: no budget and no age evicts it, over restarts too."""

    key: Key
    pinned: bool


MAX_KEYS = 256
VALUE_LIMIT_BYTES = (1 << 20) + 1

DecisionKey = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
DecisionKeys = Annotated[list[DecisionKey], msgspec.Meta(max_length=MAX_KEYS)]
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 46)]


class Item(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One decision to add. ttl_ms from the moment when it is added; None: it does not expire."""

    key: DecisionKey
    value: Annotated[bytes, msgspec.Meta(max_length=VALUE_LIMIT_BYTES)]
    ttl_ms: Milliseconds | None


class Outbox(msgspec.Struct, frozen=True, array_like=True):
    """Where in the sender's page the items of an Add lie, encoded; the receiver copies, then checks."""

    offset: Size
    length: Size
    crc32c: int


class Claim(Request, frozen=True, tag="claim"):
    """Name all missing keys of one call. Others may take the claim over limit_ms after it was granted."""

    limit_ms: Milliseconds
    keys: DecisionKeys


class AwaitClaims(Request, frozen=True, tag="await_claims"):
    """Reply when one of these keys that is claimed or being committed is not any more."""

    keys: DecisionKeys


class Add(Request, frozen=True, tag="add"):
    """Store decisions, unless somebody was first.

    clear is the clear number under which they were computed, claim the claim (0: none). The items are
    here, or where outbox says.
    """

    clear: Id
    claim: Id
    items: Annotated[list[Item], msgspec.Meta(max_length=MAX_KEYS)]
    outbox: Outbox | None = None


class Release(Request, frozen=True, tag="release"):
    """The claim is not used any more; its keys that were added have left it already."""

    claim: Id


class Renew(Request, frozen=True, tag="renew"):
    """Let a decision live for ttl_ms from now; 0 removes it, None lets it live for ever."""

    key: DecisionKey
    ttl_ms: Milliseconds | None


class Delete(Request, frozen=True, tag="delete"):
    """Forget these decisions."""

    keys: DecisionKeys


class Clear(Request, frozen=True, tag="clear"):
    """Forget all decisions."""


class Prune(Request, frozen=True, tag="prune"):
    """Remove what has expired."""


DecisionRequest = Claim | AwaitClaims | Add | Release | Renew | Delete | Clear | Prune
AnyRequest = Reserve | Extend | Written | Await | Cancel | Drop | Evict | Pin | DecisionRequest

VerdictKind = Literal[
    "granted", "present", "held", "no_space", "too_large", "forgotten", "tier_down", "first_use"
]


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """The answer to one plan. token names a granted reservation; free_bytes goes with no_space."""

    kind: VerdictKind
    token: int = 0
    free_bytes: int = 0


class Reserved(msgspec.Struct, frozen=True, array_like=True, tag="reserved"):
    """Verdicts in the order of the plans."""

    verdicts: list[Verdict]


class Outcome(msgspec.Struct, frozen=True, array_like=True, tag="outcome"):
    """A save has ended: published, or not and why. A published row is in the index already."""

    published: bool
    why: str = ""


class Stale(msgspec.Struct, frozen=True, array_like=True, tag="stale"):
    """The request was of another epoch: remap, and send again under a new request id."""

    epoch: int


class Claimed(msgspec.Struct, frozen=True, array_like=True, tag="claimed"):
    """granted: compute, under this claim. present: read the table again. held: somebody computes."""

    kind: Literal["granted", "present", "held"]
    claim: int = 0


class Free(msgspec.Struct, frozen=True, array_like=True, tag="free"):
    """It is worth looking again."""


AddVerdict = Literal["stored", "held", "ended", "too_large", "failed"]


class Added(msgspec.Struct, frozen=True, array_like=True, tag="added"):
    """Verdicts in the order of the items; held: the table has the value that was first."""

    verdicts: list[AddVerdict]


class Deleted(msgspec.Struct, frozen=True, array_like=True, tag="deleted"):
    """How many decisions there were."""

    count: int


class Evicted(msgspec.Struct, frozen=True, array_like=True, tag="evicted"):
    """How many rows there were, and of how many the file could not be removed."""

    rows: int
    failed: int


class Pinned(msgspec.Struct, frozen=True, array_like=True, tag="pinned"):
    """Whether it was done, or why not."""

    done: bool
    why: str = ""


AnyReply = Reserved | Outcome | Stale | Evicted | Pinned | Claimed | Free | Added | Deleted

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
_reply_decoder: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(AnyReply)
_items_decoder = msgspec.msgpack.Decoder(Annotated[list[Item], msgspec.Meta(max_length=MAX_KEYS)])

LAYOUT = crc32c(
    repr(
        (
            VERSION,
            [(kind.__name__, kind.__struct_fields__) for kind in (*AnyRequest.__args__, *AnyReply.__args__)],
            Plan.__struct_fields__,
            Verdict.__struct_fields__,
            Item.__struct_fields__,
        )
    ).encode()
)

encode = _encoder.encode
decode_request = _request_decoder.decode
decode_reply = _reply_decoder.decode
decode_items = _items_decoder.decode
