"""Files that are almost rows: what disks, crashes and strange writers make of them.

    corpus ─► damage, one to three times ─► sometimes repair ─► a Mutant

damage   bits, bytes, runs of junk, zeroed blocks, cut, grown, lengths and offsets set to what hurts, TLVs
         dropped, doubled or moved, the head of one file before the tail of another
repair   the checksums fit again, so that the lie is met by what comes behind them

`reference` reads an accepted file by its own few lines, as a reader of another make would.
"""

from __future__ import annotations

import array
import random
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from crc32c import crc32c
from msgspec.structs import replace
from support import PAYLOAD_OFFSET, identity, meta, prompt

from shmcache import kvc

_LENGTHS = (0, 1, 2, 3, 4, 5, 12, 13, 31, 33, 63, 64, 255, 4095, 4096, 4097, 65_535, 1 << 20)
_EDGES = (*_LENGTHS, *((1 << bits) + by for bits in (31, 32, 63, 64) for by in (-1, 0, 1)))
_FIELDS = ((8, "I"), (12, "I"), (16, "I"), (24, "Q"), (32, "Q"), (40, "Q"), (48, "Q"), (56, "Q"), (72, "I"))
_SPLIT_BYTES = struct.Struct("<BI")


class Mutant(NamedTuple):
    """content: the file. is_repaired: its checksums were made to fit, so what it says may be a lie."""

    content: bytes
    is_repaired: bool


class Reference(NamedTuple):
    """What an accepted file holds, read without kvc."""

    token_ids: bytes
    payload: bytes


def corpus(seed: int, count: int = 24) -> list[bytes]:
    """Rows of many shapes, some with ids and splits that leave the first page; the same for the same seed."""
    chance = random.Random(seed)
    return [_row(chance, number) for number in range(count)]


def _row(chance: random.Random, number: int) -> bytes:
    lengths = [chance.randint(1, 9) for _ in range(chance.choice((0, 1, 1, 2, 3, 5, 7, 400)))]
    pieces = tuple(
        kvc.Piece(length, chance.randint(1, 4), 512, chance.randint(1, 8), 0) for length in lengths
    )
    token_count = sum(piece.length * piece.repeats for piece in pieces)
    text = prompt(chance.randint(0, 3000), f"row {number}")
    runs = tuple(kvc.LayerRun(1, 1, 4 * chance.randint(0, 2), 1, 4) for _ in range(chance.choice((0, 0, 2))))
    payload_bytes = kvc.blob_bytes(runs, token_count) if runs else chance.choice((0, 1, 63, 64, 500, 5000))
    payload = chance.randbytes(payload_bytes)
    said = meta(
        identity(),
        text,
        token_count=token_count,
        layout=runs,
        hit_count=chance.getrandbits(32),
        reason_detail=chance.choice(("", kvc.HEAD_DETAIL, "anchor 2")),
        tenant_hash=chance.choice((None, chance.randbytes(16))),
        base_key=chance.choice((None, chance.randbytes(32))),
        preview=chance.randbytes(chance.choice((0, 0, 40, 512))),
    )
    ids = array.array("I", (chance.getrandbits(32) for _ in range(token_count))).tobytes()
    head = kvc.encode_head(said, pieces, ids, len(payload), crc32c(payload))
    if chance.random() < 0.3:
        offset = len(head) + 64 * chance.randint(1, 80)
        head = kvc.encode_head(said, pieces, ids, len(payload), crc32c(payload), payload_offset=offset)
    return head + payload


def of_key(content: bytes, text: bytes) -> bytes:
    """The same row under the key of another text, with fitting checksums."""
    image = kvc.parse(memoryview(content))
    wanted = meta(identity(), text)
    said = replace(image.meta, key=wanted.key, block_key=wanted.block_key, text_bytes=wanted.text_bytes)
    head = kvc.encode_head(
        said,
        image.pieces,
        bytes(image.token_ids),
        len(image.payload),
        image.payload_crc32c,
        payload_offset=max(image.payload_offset, PAYLOAD_OFFSET),
    )
    return head + bytes(image.payload)


def mutants(seed: int, rows: Sequence[bytes]) -> Callable[..., Mutant]:
    """A source of mutants: of the row that it is given, else of any of these."""
    chance = random.Random(seed)

    def make(row: bytes | None = None) -> Mutant:
        content = bytearray(row if row is not None else chance.choice(rows))
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            chance.choice(_DAMAGES)(chance, content, rows)
        is_repaired = chance.random() < 0.5
        if is_repaired:
            repair(content)
        return Mutant(bytes(content), is_repaired)

    return make


# ---- damage: each changes the content in place, whatever is left of it


def _flip(chance: random.Random, content: bytearray, _rows: Sequence[bytes]) -> None:
    if content:
        content[_place(chance, content)] ^= 1 << chance.randrange(8)


def _junk(chance: random.Random, content: bytearray, _rows: Sequence[bytes]) -> None:
    at = _place(chance, content)
    junk = chance.randbytes(chance.randint(1, 12))
    content[at : at + len(junk)] = junk


def _zero(chance: random.Random, content: bytearray, _rows: Sequence[bytes]) -> None:
    """A block that never reached the disk."""
    size_bytes = chance.choice((16, 64, 512, 4096))
    at = chance.randrange(len(content) + 1) // size_bytes * size_bytes
    content[at : at + size_bytes] = bytes(len(content[at : at + size_bytes]))


def _cut(chance: random.Random, content: bytearray, _rows: Sequence[bytes]) -> None:
    del content[chance.choice((_place(chance, content), chance.randrange(len(content) + 1))) :]


def _grow(chance: random.Random, content: bytearray, _rows: Sequence[bytes]) -> None:
    content.extend(bytes(chance.choice((1, 63, 64, 4096))))


def _field(chance: random.Random, content: bytearray, _rows: Sequence[bytes]) -> None:
    """A number of header or trailer."""
    at, form = chance.choice(_FIELDS)
    _store(chance, content, at, form)


def _tlv_length(chance: random.Random, content: bytearray, _rows: Sequence[bytes]) -> None:
    if tlvs := _tlvs(content):
        _store(chance, content, chance.choice(tlvs)[0] + 1, "I")


def _tlv_tag(chance: random.Random, content: bytearray, _rows: Sequence[bytes]) -> None:
    if tlvs := _tlvs(content):
        content[chance.choice(tlvs)[0]] = chance.randrange(0x18)


def _tlv_moved(chance: random.Random, content: bytearray, _rows: Sequence[bytes]) -> None:
    """A TLV goes, comes twice, or elsewhere; tlv_bytes says so."""
    tlvs = _tlvs(content)
    if not tlvs:
        return
    begin, end = chance.choice(tlvs)
    tlv = content[begin:end]
    if chance.random() < 0.7:
        del content[begin:end]
    if chance.random() < 0.7:
        at = chance.choice(tlvs)[0]
        content[at:at] = tlv
    sizes_at = tlvs[0][0] - 4
    grown = _number(content, sizes_at, "I") + len(tlv) * chance.choice((-1, 0, 1))
    struct.pack_into("<I", content, sizes_at, grown & 0xFFFFFFFF)


def _spliced(chance: random.Random, content: bytearray, rows: Sequence[bytes]) -> None:
    """The head of this file, the rest of another."""
    other = chance.choice(rows)
    at = chance.choice((48, 72, 4096, chance.randrange(len(content) + 1)))
    content[at:] = other[chance.choice((at, chance.randrange(len(other) + 1))) :]


_DAMAGES = (_flip, _flip, _junk, _zero, _cut, _grow, _field, _tlv_length, _tlv_tag, _tlv_moved, _spliced)


def _place(chance: random.Random, content: bytearray) -> int:
    """Anywhere, but mostly in the head, where everything is decided."""
    bound = min(len(content), chance.choice((80, 500, len(content))))
    return chance.randrange(max(1, bound))


def _store(chance: random.Random, content: bytearray, at: int, form: str) -> None:
    """A length that hurts, or the right one and a little."""
    size_bytes = struct.calcsize(form)
    if at + size_bytes > len(content):
        return
    value = chance.choice(
        (chance.choice(_EDGES), _number(content, at, form) + chance.choice((-64, -1, 1, 64)))
    )
    struct.pack_into(f"<{form}", content, at, value % (1 << 8 * size_bytes))


def _number(content: bytearray, at: int, form: str) -> int:
    value: int = struct.unpack_from(f"<{form}", content, at)[0]
    return value


def _tlvs(content: bytearray) -> list[tuple[int, int]]:
    """Where each TLV begins and ends, as far as they can be followed."""
    found: list[tuple[int, int]] = []
    if len(content) < 80:
        return found
    at = 76 + _number(content, 72, "I") + 4
    while at + 5 <= len(content):
        end = at + 5 + _number(content, at + 1, "I")
        if end > len(content):
            break
        found.append((at, end))
        if content[at] == kvc.Tag.TOKEN_IDS:
            break
        at = end
    return found


# ---- repair


def repair(content: bytearray) -> None:
    """Let every checksum fit what it should cover, as far as that can be found."""
    tlvs = {content[begin]: (begin, end) for begin, end in _tlvs(content)}
    if len(content) < 80 or kvc.Tag.SPLIT not in tlvs:
        return
    split_begin, split_end = tlvs[kvc.Tag.SPLIT][0] + 5, tlvs[kvc.Tag.SPLIT][1]
    ids_bytes = 4 * _number(content, 8, "I")
    if kvc.Tag.VALUES_CRC32C in tlvs:
        begin, end = tlvs[kvc.Tag.VALUES_CRC32C]
        values = content[split_begin:split_end] + content[split_end + 5 : split_end + 5 + ids_bytes]
        if end == begin + 9:
            struct.pack_into("<I", content, begin + 5, crc32c(values))
    offset = _number(content, 48, "Q")
    struct.pack_into("<I", content, 64, crc32c(content[offset:]) if offset <= len(content) else 0)
    ids_head = _SPLIT_BYTES.pack(kvc.Tag.TOKEN_IDS, ids_bytes & 0xFFFFFFFF)
    summed = content[:12] + content[16:32] + content[40:68] + content[72:split_begin] + ids_head
    struct.pack_into("<I", content, 68, crc32c(summed))


# ---- a reader of another make


def reference(content: bytes) -> Reference:
    """Ids and payload of a file that kvc accepts. Asserts what an accepted file must say of itself."""
    token_count = struct.unpack_from("<I", content, 8)[0]
    promised, offset, length, payload_crc32c = struct.unpack_from("<QQQI", content, 40)
    assert promised == length == len(content) - offset
    assert crc32c(content[offset:]) == payload_crc32c
    tlvs_at = 76 + struct.unpack_from("<I", content, 72)[0]
    tlvs_end = tlvs_at + 4 + struct.unpack_from("<I", content, tlvs_at)[0]
    assert tlvs_end <= offset
    ids_at = tlvs_end - 4 * token_count
    assert content[ids_at - 5 : ids_at] == struct.pack("<BI", 9, 4 * token_count)
    return Reference(content[ids_at:tlvs_end], content[offset:])
