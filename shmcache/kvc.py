"""Given the bytes of a file or slab: which state is in it, made how, and are they all there?

KVC v2, one encoding everywhere: the bytes of a slab in /dev/shm are the bytes of the file on disk.
Little-endian throughout.

    0        48        72                              payload_offset            end of file
    ├─ header ┼─ trailer ┼─ preview ─┼─ TLVs ─┼─ gap 00 ─┼─ payload ──────────────────┤
                                       … 0C split, 09 token ids: always the last two

    offset size name             writer       meaning
         0    3 magic            worker       "KVC"
         3    1 version          worker       2
         4    1 quant_bits       worker       bits per weight, for people; 0 unknown
         5    1 save_reason      worker       Reason
         6    2                  worker       0
         8    4 token_count      worker       rows in the state; ids in 09; sum of the split
        12    4 hit_count        coordinator  mutable; no reader uses it
        16    4 context_size     worker       cells of the context that made it
        20    4                  worker       0
        24    8 created_unix_s   worker
        32    8 last_used_unix_s coordinator  mutable; no reader uses it
        40    8 payload_bytes    worker       the same number as payload_length
        48    8 payload_offset   worker       a multiple of 64
        56    8 payload_length   worker       the file ends where the payload ends
        64    4 payload_crc32c   worker
        68    4 meta_crc32c      worker       see below
        72    4 preview_bytes    worker
        76    … preview          worker       a bit of the prompt for people; empty by default; never trusted
         …    4 tlv_bytes        worker       of all TLVs together
         …    … TLVs             worker       (u8 tag | u32 length | value)*, no tag twice
         …    … gap              worker       zero, never read: a slab is made before its tokens are known
         …    … payload          worker       the blob of llama_state_seq_get_data

    tag size name                             tag size name
     01   32 model_fp                          0B   32 key
     02    … fingerprint_mode, UTF-8           0D    9 use: u32 n_swa, i32 pos_min, u8 rewindable
     03    … quant_name, UTF-8                 0E    4 CRC32C of the values of 0C and 09, in this order
     04   32 ctx_params_hash                   0F    … model_name, UTF-8 (optional)
     05    … hostname, UTF-8                   10   16 tenant_hash (optional)
     06    … shmcache_version, UTF-8           11 20·n layout: LayerRun* (optional)
     07    … reason_detail, UTF-8              12   32 block_key
     08    4 token_count                       13   32 base_key (optional)
     09  4·n token ids, u32                    14      kept free: parent key
     0A    8 text_bytes                        15      kept free: base token count
     0C 13·n split: u32 length, u32 repeats, u16 n_ubatch, u16 n_threads, u8 device

An unknown tag is skipped; what a reader must not skip gets another version. 14 and 15 are for rows that store
only what their parent lacks, hence for such a version.

`meta_crc32c` is the CRC32C of these ranges, one after the other:

    [0, 12) [16, 32) [40, 68)      header and trailer but hit_count, last_used_unix_s and itself
    [72, the value of 0C)          preview, TLVs and the head of 0C; ends within the first 4,096 bytes
    the head of 09                 its five bytes, `09` and 4 · token_count

The head of 09 may lie behind the first 4,096 bytes, but other numbers fix it: 09 ends where the TLVs end.
So the first 4,096 bytes and the file's size decide whether the metadata is whole, and a start-up scan reads
no more; `parse` then compares the real head of 09 with the one that was summed.

A worked file, which the tests parse from this very page: ids 48 and 49 ("Hi") in a model with one layer and
two f16 values in each row of K and V. The seed of its keys is model_fp, the quant byte 3 and ctx_params_hash.

    0000  4b 56 43                                         magic "KVC"
    0003  02                                               version 2
    0004  04                                               quant_bits 4
    0005  01                                               save_reason 1 (cold)
    0006  00 00                                            0
    0008  02 00 00 00                                      token_count 2
    000c  07 00 00 00                                      hit_count 7
    0010  00 01 00 00                                      context_size 256
    0014  00 00 00 00                                      0
    0018  00 78 e7 68 00 00 00 00                          created_unix_s 1760000000
    0020  3c 78 e7 68 00 00 00 00                          last_used_unix_s 1760000060
    0028  58 00 00 00 00 00 00 00                          payload_bytes 88
    0030  c0 01 00 00 00 00 00 00                          payload_offset 448
    0038  58 00 00 00 00 00 00 00                          payload_length 88
    0040  71 e7 ab 88                                      payload_crc32c
    0044  74 fb 8d 3b                                      meta_crc32c
    0048  02 00 00 00                                      preview_bytes 2
    004c  48 69                                            preview "Hi"
    004e  6d 01 00 00                                      tlv_bytes 365
    0052  01 20 00 00 00                                   tag 01, 32 bytes
    0057  11 11 11 11 11 11 11 11 11 11 11 11 11 11 11 11  model_fp
    0067  11 11 11 11 11 11 11 11 11 11 11 11 11 11 11 11  …
    0077  02 04 00 00 00                                   tag 02, 4 bytes
    007c  73 61 66 65                                      fingerprint_mode "safe"
    0080  03 04 00 00 00                                   tag 03, 4 bytes
    0085  51 34 5f 31                                      quant_name "Q4_1"
    0089  04 20 00 00 00                                   tag 04, 32 bytes
    008e  22 22 22 22 22 22 22 22 22 22 22 22 22 22 22 22  ctx_params_hash
    009e  22 22 22 22 22 22 22 22 22 22 22 22 22 22 22 22  …
    00ae  05 03 00 00 00                                   tag 05, 3 bytes
    00b3  62 6f 78                                         hostname "box"
    00b6  06 05 00 00 00                                   tag 06, 5 bytes
    00bb  30 2e 31 2e 30                                   shmcache_version "0.1.0"
    00c0  07 08 00 00 00                                   tag 07, 8 bytes
    00c5  61 6e 63 68 6f 72 20 32                          reason_detail "anchor 2"
    00cd  08 04 00 00 00                                   tag 08, 4 bytes
    00d2  02 00 00 00                                      token_count 2
    00d6  0a 08 00 00 00                                   tag 0A, 8 bytes
    00db  02 00 00 00 00 00 00 00                          text_bytes 2
    00e3  0b 20 00 00 00                                   tag 0B, 32 bytes
    00e8  c5 6a 85 7e 01 5f 30 8b ee b7 73 75 94 33 d2 66  key = SHA-256(seed | "Hi")
    00f8  1e 89 5b 02 94 10 a9 08 34 26 81 ed 83 bd 42 0a  …
    0108  0d 09 00 00 00                                   tag 0D, 9 bytes: use
    010d  00 00 00 00                                      n_swa 0
    0111  00 00 00 00                                      pos_min 0
    0115  01                                               rewindable 1
    0116  0e 04 00 00 00                                   tag 0E, 4 bytes
    011b  24 15 34 a8                                      CRC32C of the values of 0C and 09
    011f  0f 04 00 00 00                                   tag 0F, 4 bytes
    0124  74 69 6e 79                                      model_name "tiny"
    0128  10 10 00 00 00                                   tag 10, 16 bytes
    012d  33 33 33 33 33 33 33 33 33 33 33 33 33 33 33 33  tenant_hash
    013d  11 14 00 00 00                                   tag 11, 20 bytes: layout
    0142  01 00 00 00                                      1 layer
    0146  01 00 00 00                                      K type 1 (f16)
    014a  04 00 00 00                                      K row of 4 bytes
    014e  01 00 00 00                                      V type 1 (f16)
    0152  04 00 00 00                                      V row of 4 bytes
    0156  12 20 00 00 00                                   tag 12, 32 bytes
    015b  89 16 48 6d 0a e4 e8 9f f1 ff 1b dc 6e ea 99 fe  block_key = SHA-256(seed)
    016b  60 13 37 b0 f2 a1 b0 9b b5 94 43 75 fc 4d 84 3b  …
    017b  13 20 00 00 00                                   tag 13, 32 bytes
    0180  44 44 44 44 44 44 44 44 44 44 44 44 44 44 44 44  base_key
    0190  44 44 44 44 44 44 44 44 44 44 44 44 44 44 44 44  …
    01a0  0c 0d 00 00 00                                   tag 0C, 13 bytes: split
    01a5  02 00 00 00                                      length 2
    01a9  01 00 00 00                                      1 repeat
    01ad  00 02                                            n_ubatch 512
    01af  02 00                                            2 threads
    01b1  00                                               device 0
    01b2  09 08 00 00 00                                   tag 09, 8 bytes: token ids
    01b7  30 00 00 00                                      token id 48
    01bb  31 00 00 00                                      token id 49
    01bf  00                                               gap
    01c0  d8 3c 14 af                                      blob: magic
    01c4  00 00 00 00                                      sequence 0
    01c8  01 00 00 00                                      1 stream
    01cc  02 00 00 00                                      2 cells
    01d0  00 00 00 00 01 00 00 00 00 00 00 00              cell 0: position 0, 1 sequence, 0
    01dc  01 00 00 00 01 00 00 00 00 00 00 00              cell 1: position 1, 1 sequence, 0
    01e8  00 00 00 00                                      V is not transposed
    01ec  01 00 00 00                                      1 layer
    01f0  01 00 00 00 04 00 00 00 00 00 00 00              K: type 1, row of 4 bytes
    01fc  00 3c 00 40                                      K of cell 0: 1.0, 2.0
    0200  00 42 00 44                                      K of cell 1: 3.0, 4.0
    0204  01 00 00 00 04 00 00 00 00 00 00 00              V: type 1, row of 4 bytes
    0210  00 b8 00 bc                                      V of cell 0: -0.5, -1.0
    0214  00 c0 00 c2                                      V of cell 1: -2.0, -3.0

Owner: the worker that reserved the slab writes all of it before it has a name; from then on the coordinator
rewrites hit_count and last_used_unix_s (`write_use`), and nobody anything else.
Readers: any process, by mapping (`parse`); the coordinator's scan (`parse_head`).

Invariants:
    I1  Whatever the bytes, `parse_head`, `parse` and `verify_payload` return or raise CorruptSlab.
    I2  What was encoded parses to the same Meta, pieces, ids and payload.
    I3  A change of any byte outside the two mutable fields and the gap is seen: by `parse`, or in the payload
        by `verify_payload`.
    I4  Every length is checked against what is there before it is used.

Leans on: a little-endian machine (`cast("I")` is native, and needs no alignment); crc32c takes memoryviews
and lets other threads run; the blob's own framing as measured with llama-cpp-python 0.3.36 (`blob_bytes`).
Leaves out: what the payload means (llama.cpp alone knows), compression, and whom to trust: a checksum finds
faults, not forgers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

import msgspec
from crc32c import crc32c
from msgspec.structs import astuple

from shmcache.errors import CorruptSlab
from shmcache.key import KEY_BYTES, Buffer

VERSION = 2
SCAN_BYTES = 4096
PAYLOAD_ALIGN = 64
TENANT_HASH_BYTES = 16
HEAD_DETAIL = (
    "head"  # reason_detail of a system part that prompts share: eviction spares it, after a restart too
)

_HEADER = Struct("<3sBBB2xIII4xQQQ")
_TRAILER = Struct("<QQII")
_U32 = Struct("<I")
_U64 = Struct("<Q")
_TLV = Struct("<BI")
_PIECE = Struct("<IIHHB")
_USE = Struct("<IiB")
_LAYER_RUN = Struct("<IIIII")
_HIT_COUNT_OFFSET = 12
_LAST_USED_OFFSET = 32
_TRAILER_OFFSET = 48
_META_CRC32C_OFFSET = 68
_PREVIEW_OFFSET = 72
assert _HEADER.size == _TRAILER_OFFSET
assert _TRAILER_OFFSET + _TRAILER.size == _PREVIEW_OFFSET
assert (_TLV.size, _PIECE.size, _USE.size, _LAYER_RUN.size) == (5, 13, 9, 20)

_MAGIC = b"KVC"
_SUMMED_RANGES = ((0, 12), (16, 32), (40, 68))  # of header and trailer, by meta_crc32c


class Tag(IntEnum):
    """The TLVs of version 2."""

    MODEL_FP = 0x01
    FINGERPRINT_MODE = 0x02
    QUANT_NAME = 0x03
    CTX_PARAMS_HASH = 0x04
    HOSTNAME = 0x05
    SHMCACHE_VERSION = 0x06
    REASON_DETAIL = 0x07
    TOKEN_COUNT = 0x08
    TOKEN_IDS = 0x09
    TEXT_BYTES = 0x0A
    KEY = 0x0B
    SPLIT = 0x0C
    USE = 0x0D
    VALUES_CRC32C = 0x0E
    MODEL_NAME = 0x0F
    TENANT_HASH = 0x10
    LAYOUT = 0x11
    BLOCK_KEY = 0x12
    BASE_KEY = 0x13


# Longer texts are cut: they are for people, and with them at these bounds a layout of 125 runs still fits
# into the 4,096 bytes of a scan.
_MAX_TEXT_BYTES = {
    Tag.FINGERPRINT_MODE: 32,
    Tag.QUANT_NAME: 32,
    Tag.HOSTNAME: 64,
    Tag.SHMCACHE_VERSION: 64,
    Tag.REASON_DETAIL: 256,
    Tag.MODEL_NAME: 256,
}
_MAX_PREVIEW_BYTES = 512


class Reason(IntEnum):
    """Why a row was saved."""

    UNKNOWN = 0
    COLD = 1
    CONTINUED = 2
    EVICT = 3
    SHUTDOWN = 4
    FINISH = 5


_LAST_REASON = max(Reason).value


class Piece(msgspec.Struct, frozen=True):
    """`repeats` batches of `length` tokens each, decoded one after the other in the same way."""

    length: int  # u32, 1 or more
    repeats: int  # u32, 1 or more
    n_ubatch: int  # u16
    n_threads: int  # u16
    device: int  # u8


class LayerRun(msgspec.Struct, frozen=True):
    """`layers` neighbouring attention layers whose K and V rows look the same; all numbers are u32."""

    layers: int
    k_type: int  # ggml type
    k_row_bytes: int
    v_type: int
    v_row_bytes: int


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """All that a row says about itself but its split, ids and payload."""

    quant_bits: int
    save_reason: Reason
    token_count: int
    hit_count: int = 0
    context_size: int
    created_unix_s: int
    last_used_unix_s: int
    model_fp: bytes  # 32 bytes
    fingerprint_mode: str
    quant_name: str
    ctx_params_hash: bytes  # 32 bytes
    hostname: str
    shmcache_version: str
    reason_detail: str
    text_bytes: int  # length of the rendered text that the key covers
    key: bytes  # 32 bytes
    block_key: bytes  # 32 bytes
    n_swa: int
    pos_min: int  # of the saved sequence; > 0 where only a window was saved
    rewindable: bool
    model_name: str = ""
    tenant_hash: bytes | None = None  # 16 bytes
    layout: tuple[LayerRun, ...] = ()  # empty: the payload's length is not checked against one
    base_key: bytes | None = None  # 32 bytes: the row it was made from, a hint for eviction
    preview: bytes = b""


class Head(msgspec.Struct, frozen=True):
    """What the first 4,096 bytes and the size of a file say, checked."""

    meta: Meta
    payload_offset: int
    payload_bytes: int
    payload_crc32c: int
    split_offset: int  # of the value of 0C
    split_bytes: int
    values_crc32c: int  # of the values of 0C and 09


class Image(msgspec.Struct, frozen=True):
    """A whole row. The views point into the bytes that were parsed."""

    meta: Meta
    pieces: tuple[Piece, ...]
    token_ids: memoryview  # format "I"
    payload: memoryview
    payload_crc32c: int
    payload_offset: int


class _Header(NamedTuple):
    magic: bytes
    version: int
    quant_bits: int
    save_reason: int
    token_count: int
    hit_count: int
    context_size: int
    created_unix_s: int
    last_used_unix_s: int
    payload_bytes: int


class _Trailer(NamedTuple):
    payload_offset: int
    payload_length: int
    payload_crc32c: int
    meta_crc32c: int


def head_bytes(token_count: int, piece_count: int) -> int:
    """Return a payload offset that is large enough for any metadata with so many tokens and pieces.

    For slabs made before their tokens are known. Some 3 kB may stay unused: less than the state of one token.
    """
    ids_bytes = _TLV.size + _U32.size * token_count
    return _aligned(SCAN_BYTES + _PIECE.size * piece_count + ids_bytes)


def blob_bytes(layout: Sequence[LayerRun], cell_count: int) -> int:
    """Return the length of a llama_state_seq_get_data blob of one sequence in a plain attention cache.

    The blob: 24 bytes of framing, 12 for each cell (position, 1, sequence), for each layer K and V by
    themselves: 12 bytes of type and row size, then a row for each cell. V takes the same room when it is
    transposed (no flash attention). Sliding-window, recurrent and multi-axis-position caches are framed in
    another way: their rows carry no layout.
    """
    rows = sum(run.layers * (24 + cell_count * (run.k_row_bytes + run.v_row_bytes)) for run in layout)
    return 24 + 12 * cell_count + rows


def version_of(first: Buffer) -> int | None:
    """Return the version that a file claims to have, None where it is no KVC file at all."""
    view = memoryview(first).cast("B")
    return view[3] if len(view) > 3 and view[:3] == _MAGIC else None


def parse(view: memoryview) -> Image:
    """Check and return a whole row but for its payload's checksum; the views point into `view`."""
    whole = view.cast("B")
    head = parse_head(whole[:SCAN_BYTES], len(whole))
    ids_head_offset = head.split_offset + head.split_bytes
    ids_offset = ids_head_offset + _TLV.size
    ids_bytes = _U32.size * head.meta.token_count
    if whole[ids_head_offset:ids_offset] != _TLV.pack(Tag.TOKEN_IDS, ids_bytes):
        raise CorruptSlab(f"no {head.meta.token_count} token ids behind the split, at {ids_head_offset}")

    split = whole[head.split_offset : ids_head_offset]
    ids = whole[ids_offset : ids_offset + ids_bytes]
    if crc32c(ids, crc32c(split)) != head.values_crc32c:
        raise CorruptSlab("split and token ids do not have their checksum")
    if len(split) % _PIECE.size:
        raise CorruptSlab(f"a split of {len(split)} bytes is not made of {_PIECE.size} each")
    pieces = tuple(Piece(*fields) for fields in _PIECE.iter_unpack(split))
    fault = _split_fault(pieces, head.meta.token_count)
    if fault:
        raise CorruptSlab(fault)
    return Image(
        meta=head.meta,
        pieces=pieces,
        token_ids=ids.cast("I"),
        payload=whole[head.payload_offset :],
        payload_crc32c=head.payload_crc32c,
        payload_offset=head.payload_offset,
    )


def verify_payload(image: Image, summed_crc32c: int | None = None) -> None:
    """Raise CorruptSlab if the payload does not have its checksum. Once for each new mapping or read.

    summed_crc32c: of the payload, where whoever read it has summed it on the way.
    """
    if (crc32c(image.payload) if summed_crc32c is None else summed_crc32c) != image.payload_crc32c:
        raise CorruptSlab(f"{len(image.payload)} payload bytes do not have their checksum")


def parse_head(first: Buffer, file_bytes: int) -> Head:
    """Check and return the metadata, given the first 4,096 bytes of a file (all of a shorter one)."""
    view = memoryview(first).cast("B")[:SCAN_BYTES]
    version = version_of(view)
    if version is None:
        raise CorruptSlab(f"not a KVC file: it begins with {bytes(view[:4]).hex(' ') or 'nothing'}")
    if version != VERSION:
        raise CorruptSlab(f"KVC version {version} is not read, only version {VERSION}")
    if len(view) < min(file_bytes, SCAN_BYTES):
        raise CorruptSlab(f"{len(view)} bytes are there of the first {min(file_bytes, SCAN_BYTES)}")

    header = _Header(*_HEADER.unpack(_take(view, 0, _HEADER.size)))
    trailer = _Trailer(*_TRAILER.unpack(_take(view, _TRAILER_OFFSET, _TRAILER.size)))
    preview = _take(view, _PREVIEW_OFFSET + _U32.size, _u32(view, _PREVIEW_OFFSET))
    tlv_bytes_offset = _PREVIEW_OFFSET + _U32.size + len(preview)
    tlv_offset = tlv_bytes_offset + _U32.size
    tlv_end = tlv_offset + _u32(view, tlv_bytes_offset)
    values, split_offset, split_bytes = _walk_tlvs(view, tlv_offset)

    ids_bytes = _U32.size * header.token_count
    if split_offset + split_bytes + _TLV.size + ids_bytes != tlv_end:
        raise CorruptSlab(
            f"{split_bytes} bytes of split at {split_offset} and {header.token_count} token ids "
            f"do not end at {tlv_end}"
        )
    if _meta_crc32c(view, split_offset, ids_bytes) != trailer.meta_crc32c:
        raise CorruptSlab("the metadata do not have their checksum")
    if trailer.payload_offset % PAYLOAD_ALIGN or trailer.payload_offset < tlv_end:
        raise CorruptSlab(f"a payload at {trailer.payload_offset} behind metadata that end at {tlv_end}")
    if not header.payload_bytes == trailer.payload_length == file_bytes - trailer.payload_offset:
        raise CorruptSlab(
            f"{header.payload_bytes} and {trailer.payload_length} payload bytes are promised "
            f"at {trailer.payload_offset} of a file of {file_bytes}"
        )
    meta = _meta(header, bytes(preview), values)
    fault = _layout_fault(meta, trailer.payload_length)
    if fault:
        raise CorruptSlab(fault)
    return Head(
        meta=meta,
        payload_offset=trailer.payload_offset,
        payload_bytes=trailer.payload_length,
        payload_crc32c=trailer.payload_crc32c,
        split_offset=split_offset,
        split_bytes=split_bytes,
        values_crc32c=values.number(Tag.VALUES_CRC32C, _U32),
    )


def _take(view: memoryview, offset: int, size_bytes: int) -> memoryview:
    """Return exactly so many bytes. The only way into bytes whose length a file names."""
    if offset + size_bytes > len(view):
        raise CorruptSlab(f"{size_bytes} bytes of metadata at {offset} leave the first {len(view)} bytes")
    return view[offset : offset + size_bytes]


def _u32(view: memoryview, offset: int) -> int:
    value: int = _U32.unpack(_take(view, offset, _U32.size))[0]
    return value


class _Values:
    """The TLVs of one file by tag; what is missing or has the wrong form is a CorruptSlab."""

    def __init__(self, by_tag: dict[int, memoryview]) -> None:
        self._by_tag = by_tag

    def raw(self, tag: Tag, default: bytes | None = None) -> memoryview | bytes:
        value = self._by_tag.get(tag, default)
        if value is None:
            raise CorruptSlab(f"{tag.name} is missing")
        return value

    def text(self, tag: Tag, default: bytes | None = None) -> str:
        try:
            return str(self.raw(tag, default), "utf-8")
        except UnicodeDecodeError as fault:
            raise CorruptSlab(f"{tag.name} is not UTF-8: {fault}") from None

    def exact(self, tag: Tag, size_bytes: int) -> bytes:
        value = self.raw(tag)
        if len(value) != size_bytes:
            raise CorruptSlab(f"{tag.name} has {len(value)} bytes, not {size_bytes}")
        return bytes(value)

    def optional(self, tag: Tag, size_bytes: int) -> bytes | None:
        return self.exact(tag, size_bytes) if tag in self._by_tag else None

    def number(self, tag: Tag, form: Struct) -> int:
        value: int = form.unpack(self.exact(tag, form.size))[0]
        return value


def _walk_tlvs(view: memoryview, offset: int) -> tuple[_Values, int, int]:
    """Return the TLVs before the split, and where the split's value is; it must begin within `view`."""
    by_tag: dict[int, memoryview] = {}
    ids_tag, split_tag = Tag.TOKEN_IDS.value, Tag.SPLIT.value  # looked up once: this loop is most of a scan
    while offset + _TLV.size <= len(view):
        tag, size_bytes = _TLV.unpack_from(view, offset)
        offset += _TLV.size
        if tag == split_tag:
            return _Values(by_tag), offset, size_bytes
        if tag in by_tag or tag == ids_tag:
            raise CorruptSlab(f"tag {tag:02X} at {offset - _TLV.size} is out of place")
        by_tag[tag] = _take(view, offset, size_bytes)
        offset += size_bytes
    raise CorruptSlab(f"no split in the first {len(view)} bytes")


def _meta(header: _Header, preview: bytes, values: _Values) -> Meta:
    if header.save_reason > _LAST_REASON:
        raise CorruptSlab(f"save reason {header.save_reason} is none of 0..{_LAST_REASON}")
    if values.number(Tag.TOKEN_COUNT, _U32) != header.token_count:
        raise CorruptSlab(f"the header counts {header.token_count} tokens and tag 08 another number")
    n_swa, pos_min, rewindable = _USE.unpack(values.exact(Tag.USE, _USE.size))
    if rewindable > 1:
        raise CorruptSlab(f"rewindable is {rewindable}, neither 0 nor 1")
    layout = values.raw(Tag.LAYOUT, default=b"")
    if len(layout) % _LAYER_RUN.size:
        raise CorruptSlab(f"a layout of {len(layout)} bytes is not made of {_LAYER_RUN.size} each")
    return Meta(
        quant_bits=header.quant_bits,
        save_reason=Reason(header.save_reason),
        token_count=header.token_count,
        hit_count=header.hit_count,
        context_size=header.context_size,
        created_unix_s=header.created_unix_s,
        last_used_unix_s=header.last_used_unix_s,
        model_fp=values.exact(Tag.MODEL_FP, KEY_BYTES),
        fingerprint_mode=values.text(Tag.FINGERPRINT_MODE),
        quant_name=values.text(Tag.QUANT_NAME),
        ctx_params_hash=values.exact(Tag.CTX_PARAMS_HASH, KEY_BYTES),
        hostname=values.text(Tag.HOSTNAME),
        shmcache_version=values.text(Tag.SHMCACHE_VERSION),
        reason_detail=values.text(Tag.REASON_DETAIL),
        text_bytes=values.number(Tag.TEXT_BYTES, _U64),
        key=values.exact(Tag.KEY, KEY_BYTES),
        block_key=values.exact(Tag.BLOCK_KEY, KEY_BYTES),
        n_swa=n_swa,
        pos_min=pos_min,
        rewindable=bool(rewindable),
        model_name=values.text(Tag.MODEL_NAME, default=b""),
        tenant_hash=values.optional(Tag.TENANT_HASH, TENANT_HASH_BYTES),
        layout=tuple(LayerRun(*fields) for fields in _LAYER_RUN.iter_unpack(layout)),
        base_key=values.optional(Tag.BASE_KEY, KEY_BYTES),
        preview=preview,
    )


def encode_head(
    meta: Meta,
    pieces: Sequence[Piece],
    token_ids: Buffer,
    payload_bytes: int,
    payload_crc32c: int,
    *,
    payload_offset: int | None = None,
) -> bytes:
    """Return all that comes before the payload, `payload_offset` bytes (None: as few as possible).

    `token_ids` are u32, 4 bytes each. Texts for people are cut where they are too long. Whatever else the
    format cannot say, or `parse` would refuse, is a ValueError or struct.error: our own fault, not a file's.
    """
    ids = memoryview(token_ids).cast("B")
    split = b"".join(_PIECE.pack(*astuple(piece)) for piece in pieces)
    _refuse_unsound(meta, pieces, len(ids), payload_bytes)

    values: tuple[tuple[Tag, Buffer], ...] = (
        *_values(meta, crc32c(ids, crc32c(split))),
        (Tag.SPLIT, split),
        (Tag.TOKEN_IDS, ids),
    )
    tlvs = b"".join(part for tag, value in values for part in (_TLV.pack(tag, len(value)), value))
    preview = meta.preview[:_MAX_PREVIEW_BYTES]
    described = b"".join((_U32.pack(len(preview)), preview, _U32.pack(len(tlvs)), tlvs))
    used_bytes = _PREVIEW_OFFSET + len(described)
    split_offset = used_bytes - len(ids) - _TLV.size - len(split)
    if split_offset > SCAN_BYTES:
        raise ValueError(
            f"{split_offset} bytes of metadata do not fit into the {SCAN_BYTES} that a scan reads"
        )
    offset = _aligned(used_bytes) if payload_offset is None else payload_offset
    if offset < used_bytes or offset % PAYLOAD_ALIGN:
        raise ValueError(f"{used_bytes} bytes of metadata cannot be followed by a payload at {offset}")

    header = _Header(
        magic=_MAGIC,
        version=VERSION,
        quant_bits=meta.quant_bits,
        save_reason=meta.save_reason,
        token_count=meta.token_count,
        hit_count=meta.hit_count,
        context_size=meta.context_size,
        created_unix_s=meta.created_unix_s,
        last_used_unix_s=meta.last_used_unix_s,
        payload_bytes=payload_bytes,
    )
    head = bytearray(offset)
    _HEADER.pack_into(head, 0, *header)
    _TRAILER.pack_into(head, _TRAILER_OFFSET, *_Trailer(offset, payload_bytes, payload_crc32c, meta_crc32c=0))
    head[_PREVIEW_OFFSET:used_bytes] = described
    _U32.pack_into(head, _META_CRC32C_OFFSET, _meta_crc32c(head, split_offset, len(ids)))
    return bytes(head)


def write_use(fd: int, hit_count: int, last_used_unix_s: int) -> None:
    """Rewrite the two mutable fields of a published file. The coordinator alone does this."""
    os.pwrite(fd, _U32.pack(min(hit_count, 0xFFFFFFFF)), _HIT_COUNT_OFFSET)
    os.pwrite(fd, _U64.pack(last_used_unix_s), _LAST_USED_OFFSET)


def _refuse_unsound(meta: Meta, pieces: Sequence[Piece], ids_bytes: int, payload_bytes: int) -> None:
    if ids_bytes != _U32.size * meta.token_count:
        raise ValueError(f"{ids_bytes} bytes of ids are not those of {meta.token_count} tokens")
    if any(len(key) != KEY_BYTES for key in (meta.model_fp, meta.ctx_params_hash, meta.key, meta.block_key)):
        raise ValueError(f"model_fp, ctx_params_hash, key and block_key have {KEY_BYTES} bytes each")
    if meta.base_key is not None and len(meta.base_key) != KEY_BYTES:
        raise ValueError(f"base_key has {KEY_BYTES} bytes, not {len(meta.base_key)}")
    if meta.tenant_hash is not None and len(meta.tenant_hash) != TENANT_HASH_BYTES:
        raise ValueError(f"tenant_hash has {TENANT_HASH_BYTES} bytes, not {len(meta.tenant_hash)}")
    fault = _split_fault(pieces, meta.token_count) or _layout_fault(meta, payload_bytes)
    if fault:
        raise ValueError(fault)


def _values(meta: Meta, values_crc32c: int) -> Iterator[tuple[Tag, bytes]]:
    """Yield all TLVs but the last two."""
    yield Tag.MODEL_FP, meta.model_fp
    yield Tag.FINGERPRINT_MODE, _text(Tag.FINGERPRINT_MODE, meta.fingerprint_mode)
    yield Tag.QUANT_NAME, _text(Tag.QUANT_NAME, meta.quant_name)
    yield Tag.CTX_PARAMS_HASH, meta.ctx_params_hash
    yield Tag.HOSTNAME, _text(Tag.HOSTNAME, meta.hostname)
    yield Tag.SHMCACHE_VERSION, _text(Tag.SHMCACHE_VERSION, meta.shmcache_version)
    yield Tag.REASON_DETAIL, _text(Tag.REASON_DETAIL, meta.reason_detail)
    yield Tag.TOKEN_COUNT, _U32.pack(meta.token_count)
    yield Tag.TEXT_BYTES, _U64.pack(meta.text_bytes)
    yield Tag.KEY, meta.key
    yield Tag.USE, _USE.pack(meta.n_swa, meta.pos_min, meta.rewindable)
    yield Tag.VALUES_CRC32C, _U32.pack(values_crc32c)
    if meta.model_name:
        yield Tag.MODEL_NAME, _text(Tag.MODEL_NAME, meta.model_name)
    if meta.tenant_hash is not None:
        yield Tag.TENANT_HASH, meta.tenant_hash
    if meta.layout:
        yield Tag.LAYOUT, b"".join(_LAYER_RUN.pack(*astuple(run)) for run in meta.layout)
    yield Tag.BLOCK_KEY, meta.block_key
    if meta.base_key is not None:
        yield Tag.BASE_KEY, meta.base_key


def _text(tag: Tag, text: str) -> bytes:
    """Return UTF-8 of at most the tag's bytes, cut between characters."""
    encoded = text.encode("utf-8", "replace")
    return encoded[: _MAX_TEXT_BYTES[tag]].decode("utf-8", "ignore").encode()


# What reader and writer share.


def _meta_crc32c(head: Buffer, split_offset: int, ids_bytes: int) -> int:
    """Sum the docstring's ranges; the head of 09 comes from its number, not from the file."""
    view = memoryview(head)
    total = 0
    for start, end in (*_SUMMED_RANGES, (_PREVIEW_OFFSET, split_offset)):
        total = crc32c(view[start:end], total)
    return crc32c(_TLV.pack(Tag.TOKEN_IDS, ids_bytes), total)


def _split_fault(pieces: Sequence[Piece], token_count: int) -> str | None:
    if any(piece.length == 0 or piece.repeats == 0 for piece in pieces):
        return "the split has an empty piece"
    split_tokens = sum(piece.length * piece.repeats for piece in pieces)
    if split_tokens != token_count:
        return f"the split has {split_tokens} tokens and the row {token_count}"
    return None


def _layout_fault(meta: Meta, payload_bytes: int) -> str | None:
    if not meta.layout:
        return None
    expected_bytes = blob_bytes(meta.layout, meta.token_count)
    if payload_bytes != expected_bytes:
        return f"the layout asks for {expected_bytes} payload bytes, not {payload_bytes}"
    return None


def _aligned(offset: int) -> int:
    return -(-offset // PAYLOAD_ALIGN) * PAYLOAD_ALIGN
