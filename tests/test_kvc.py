"""shmcache.kvc: the worked file of its docstring, round trips, and whatever bytes a disk may hold."""

from __future__ import annotations

import array
import os
import re
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import llama_cpp
import pytest
from crc32c import crc32c
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shmcache import kvc
from shmcache.errors import CorruptSlab
from shmcache.key import row_address
from shmcache.kvc import LayerRun, Meta, Piece, Reason

u16 = st.integers(0, 2**16 - 1)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
byte = st.integers(0, 255)
hashes = st.binary(min_size=32, max_size=32)


def file_of(meta: Meta, pieces: tuple[Piece, ...], ids: bytes, payload: bytes, gap_bytes: int = 0) -> bytes:
    head = kvc.encode_head(meta, pieces, ids, len(payload), crc32c(payload))
    if gap_bytes:
        offset = len(head) + gap_bytes
        head = kvc.encode_head(meta, pieces, ids, len(payload), crc32c(payload), payload_offset=offset)
    return head + payload


# ---- the worked file


def worked_lines() -> list[tuple[int, bytes, str]]:
    lines = re.findall(
        r"^    ([0-9a-f]{4})  ((?:[0-9a-f]{2} ){0,15}[0-9a-f]{2}) +(\S.*)$", kvc.__doc__ or "", re.M
    )
    return [(int(offset, 16), bytes.fromhex(hexed), name) for offset, hexed, name in lines]


def worked_file() -> bytes:
    return b"".join(part for _, part, _ in worked_lines())


WORKED_PAYLOAD = worked_file()[448:]
WORKED_ADDRESS = row_address(b"\x11" * 32 + b"\x03" + b"\x22" * 32, b"Hi")
WORKED_META = Meta(
    quant_bits=4,
    save_reason=Reason.COLD,
    token_count=2,
    hit_count=7,
    context_size=256,
    created_unix_s=1_760_000_000,
    last_used_unix_s=1_760_000_060,
    model_fp=b"\x11" * 32,
    fingerprint_mode="safe",
    quant_name="Q4_1",
    ctx_params_hash=b"\x22" * 32,
    hostname="box",
    shmcache_version="0.1.0",
    reason_detail="anchor 2",
    text_bytes=2,
    key=WORKED_ADDRESS.key,
    block_key=WORKED_ADDRESS.block_key,
    n_swa=0,
    pos_min=0,
    rewindable=True,
    model_name="tiny",
    tenant_hash=b"\x33" * 16,
    layout=(LayerRun(layers=1, k_type=1, k_row_bytes=4, v_type=1, v_row_bytes=4),),
    base_key=b"\x44" * 32,
    preview=b"Hi",
)
WORKED_PIECES = (Piece(length=2, repeats=1, n_ubatch=512, n_threads=2, device=0),)
WORKED_IDS = array.array("I", [48, 49]).tobytes()


def test_the_worked_file_names_every_byte_once() -> None:
    end = 0
    for offset, part, name in worked_lines():
        assert offset == end, name
        end += len(part)
    assert end == len(worked_file()) == 536


def test_the_worked_file_parses_to_what_its_names_say() -> None:
    image = kvc.parse(memoryview(worked_file()))
    kvc.verify_payload(image)
    assert image.meta == WORKED_META
    assert image.pieces == WORKED_PIECES
    assert list(image.token_ids) == [48, 49]
    assert image.payload == WORKED_PAYLOAD


def test_the_worked_file_is_encoded_to_the_same_bytes() -> None:
    assert file_of(WORKED_META, WORKED_PIECES, WORKED_IDS, WORKED_PAYLOAD) == worked_file()
    image = kvc.parse(memoryview(worked_file()))
    assert file_of(image.meta, image.pieces, bytes(image.token_ids), bytes(image.payload)) == worked_file()


def test_the_checksums_of_the_worked_file_cover_the_ranges_that_the_page_names() -> None:
    whole = worked_file()
    split, ids = whole[0x1A5:0x1B2], whole[0x1B7:0x1BF]
    metadata = whole[:12] + whole[16:32] + whole[40:68] + whole[72:0x1A5] + whole[0x1B2:0x1B7]
    assert int.from_bytes(whole[68:72], "little") == crc32c(metadata)
    assert int.from_bytes(whole[0x11B:0x11F], "little") == crc32c(split + ids)
    assert int.from_bytes(whole[64:68], "little") == crc32c(WORKED_PAYLOAD)
    assert whole[0xE8:0x108] == sha256(b"\x11" * 32 + b"\x03" + b"\x22" * 32 + b"Hi").digest()


# ---- round trips


def texts(tag: kvc.Tag) -> st.SearchStrategy[str]:
    bound = {kvc.Tag.HOSTNAME: 64, kvc.Tag.SHMCACHE_VERSION: 64, kvc.Tag.REASON_DETAIL: 256}.get(tag, 32)
    return st.text(max_size=bound // 4)  # a character has at most four bytes


pieces_lists = st.lists(
    st.builds(
        Piece,
        length=st.integers(1, 40),
        repeats=st.integers(1, 5),
        n_ubatch=u16,
        n_threads=u16,
        device=byte,
    ),
    max_size=5,
).map(tuple)


@st.composite
def rows(draw: st.DrawFn) -> tuple[Meta, tuple[Piece, ...], bytes, bytes]:
    pieces = draw(pieces_lists)
    token_count = sum(piece.length * piece.repeats for piece in pieces)
    layout = draw(
        st.lists(
            st.builds(LayerRun, st.integers(1, 3), u32, st.integers(0, 8), u32, st.integers(0, 8)), max_size=3
        ).map(tuple)
    )
    payload_bytes = kvc.blob_bytes(layout, token_count) if layout else draw(st.integers(0, 300))
    meta = draw(
        st.builds(
            Meta,
            quant_bits=byte,
            save_reason=st.sampled_from(Reason),
            token_count=st.just(token_count),
            hit_count=u32,
            context_size=u32,
            created_unix_s=u64,
            last_used_unix_s=u64,
            model_fp=hashes,
            fingerprint_mode=texts(kvc.Tag.FINGERPRINT_MODE),
            quant_name=texts(kvc.Tag.QUANT_NAME),
            ctx_params_hash=hashes,
            hostname=texts(kvc.Tag.HOSTNAME),
            shmcache_version=texts(kvc.Tag.SHMCACHE_VERSION),
            reason_detail=texts(kvc.Tag.REASON_DETAIL),
            text_bytes=u64,
            key=hashes,
            block_key=hashes,
            n_swa=u32,
            pos_min=st.integers(-(2**31), 2**31 - 1),
            rewindable=st.booleans(),
            model_name=texts(kvc.Tag.MODEL_NAME),
            tenant_hash=st.none() | st.binary(min_size=16, max_size=16),
            layout=st.just(layout),
            base_key=st.none() | hashes,
            preview=st.binary(max_size=512),
        )
    )
    seed = draw(st.binary(min_size=4, max_size=4))
    ids = (seed * token_count)[: 4 * token_count]
    return meta, pieces, ids, (seed * (payload_bytes // 4 + 1))[:payload_bytes]


@given(rows(), st.integers(0, 3))
def test_a_row_parses_to_what_was_encoded(
    row: tuple[Meta, tuple[Piece, ...], bytes, bytes], gap_steps: int
) -> None:
    meta, pieces, ids, payload = row
    whole = file_of(*row, gap_bytes=64 * gap_steps)
    image = kvc.parse(memoryview(whole))
    kvc.verify_payload(image)
    assert image.meta == meta
    assert image.pieces == pieces
    assert image.token_ids.tobytes() == ids
    assert image.payload == payload
    assert image.payload_offset % 64 == 0
    head = kvc.parse_head(whole[:4096], len(whole))
    assert (head.meta, head.payload_offset) == (meta, image.payload_offset)
    assert (head.payload_bytes, head.payload_crc32c) == (len(payload), image.payload_crc32c)


@given(rows())
def test_a_slab_made_before_its_tokens_are_known_has_room_for_its_head(
    row: tuple[Meta, tuple[Piece, ...], bytes, bytes],
) -> None:
    meta, pieces, ids, payload = row
    offset = kvc.head_bytes(meta.token_count, len(pieces))
    head = kvc.encode_head(meta, pieces, ids, len(payload), 0, payload_offset=offset)
    assert len(head) == offset
    assert kvc.parse(memoryview(head + payload)).payload_offset == offset


def test_the_largest_metadata_still_fit_into_a_scan_and_into_head_bytes() -> None:
    text = "é" * 1000
    meta = replace(
        WORKED_META,
        fingerprint_mode=text,
        quant_name=text,
        hostname=text,
        shmcache_version=text,
        reason_detail=text,
        model_name=text,
        preview=b"x" * 1000,
        layout=tuple(replace(WORKED_META.layout[0], k_type=i) for i in range(125)),
    )
    offset = kvc.head_bytes(2, 1)
    payload = bytes(kvc.blob_bytes(meta.layout, 2))
    head = kvc.encode_head(meta, WORKED_PIECES, WORKED_IDS, len(payload), 0, payload_offset=offset)
    parsed = kvc.parse_head(head[:4096], len(head) + len(payload)).meta
    assert parsed.layout == meta.layout
    assert (parsed.hostname, parsed.model_name, parsed.preview) == ("é" * 32, "é" * 128, b"x" * 512)


def test_a_split_and_ids_beyond_the_first_page_leave_the_scan_at_one_read() -> None:
    pieces = tuple(replace(WORKED_PIECES[0], length=1 + i % 3) for i in range(2000))
    token_count = sum(piece.length for piece in pieces)
    ids = array.array("I", range(token_count)).tobytes()
    meta = replace(WORKED_META, token_count=token_count, layout=())
    whole = file_of(meta, pieces, ids, WORKED_PAYLOAD)
    assert kvc.parse_head(whole[:4096], len(whole)).meta == meta
    image = kvc.parse(memoryview(whole))
    assert image.pieces == pieces
    assert list(image.token_ids) == list(range(token_count))


def test_text_that_is_no_unicode_is_written_all_the_same() -> None:
    meta = replace(WORKED_META, model_name=os.fsdecode(b"model-\xff.gguf"))
    whole = file_of(meta, WORKED_PIECES, WORKED_IDS, WORKED_PAYLOAD)
    assert kvc.parse(memoryview(whole)).meta.model_name == "model-?.gguf"


# ---- whatever bytes


def settled(image: kvc.Image) -> tuple[object, ...]:
    """All that a reader uses: the two mutable fields aside."""
    meta = replace(image.meta, hit_count=0, last_used_unix_s=0)
    return meta, image.pieces, image.token_ids.tobytes(), bytes(image.payload)


def accepted_or_corrupt(whole: bytes) -> kvc.Image | None:
    """The contract: bytes are accepted, or the one typed error is raised."""
    try:
        image = kvc.parse(memoryview(whole))
        kvc.verify_payload(image)
    except CorruptSlab:
        return None
    return image


def test_no_flipped_bit_of_the_worked_file_changes_what_a_reader_gets() -> None:
    whole = worked_file()
    good = settled(kvc.parse(memoryview(whole)))
    harmless = {*range(12, 16), *range(32, 40), 0x1BF}  # hit_count, last_used_unix_s, the gap
    for offset in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[offset] ^= 1 << bit
            image = accepted_or_corrupt(bytes(flipped))
            assert (image is not None) == (offset in harmless), offset
            assert image is None or settled(image) == good, offset


def test_a_truncated_file_is_corrupt_at_any_length() -> None:
    whole = worked_file()
    for length in range(len(whole)):
        assert accepted_or_corrupt(whole[:length]) is None, length
        with pytest.raises(CorruptSlab):
            kvc.parse_head(whole[:length], len(whole))


def test_a_file_with_a_tail_is_corrupt() -> None:
    assert accepted_or_corrupt(worked_file() + b"\0") is None


@settings(max_examples=300)
@given(rows(), st.data())
def test_a_mutated_row_is_equal_or_corrupt(
    row: tuple[Meta, tuple[Piece, ...], bytes, bytes], data: st.DataObject
) -> None:
    whole = bytearray(file_of(*row))
    good = settled(kvc.parse(memoryview(whole)))
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(whole) - 1))
        junk = data.draw(st.binary(min_size=1, max_size=8))
        whole[start : start + len(junk)] = junk
    image = accepted_or_corrupt(bytes(whole))
    assert image is None or settled(image) == good


@settings(max_examples=300)
@given(st.binary(max_size=300))
@example(b"")
@example(b"KVC")
@example(b"KVC\x02")
def test_random_bytes_are_corrupt(junk: bytes) -> None:
    assert accepted_or_corrupt(junk) is None
    assert accepted_or_corrupt(b"KVC\x02" + junk) is None
    assert accepted_or_corrupt(worked_file()[:72] + junk) is None


def summed_again(whole: bytearray) -> bytes:
    """The file with a fitting meta_crc32c: what a strange writer, not a broken disk, would make."""
    ids_head = b"\x09" + (4 * int.from_bytes(whole[8:12], "little") & 0xFFFFFFFF).to_bytes(4, "little")
    metadata = whole[:12] + whole[16:32] + whole[40:68] + whole[72:0x1A5] + ids_head
    whole[68:72] = crc32c(metadata).to_bytes(4, "little")
    return bytes(whole)


@settings(max_examples=500)
@given(st.integers(0, 0x1A0), st.binary(min_size=1, max_size=8))
def test_lies_under_a_fitting_checksum_are_accepted_or_corrupt(start: int, junk: bytes) -> None:
    whole = bytearray(worked_file())
    whole[start : start + len(junk)] = junk
    accepted_or_corrupt(summed_again(whole))


def with_bytes(offset: int, new: bytes) -> Callable[[], bytes]:
    def build() -> bytes:
        whole = bytearray(worked_file())
        whole[offset : offset + len(new)] = new
        return summed_again(whole)

    return build


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: b"", "not a KVC file"),
        (lambda: b"GGUF" + worked_file()[4:], "47 47 55 46"),
        (lambda: b"KVC\x01" + worked_file()[4:], "version 1 "),
        (lambda: b"KVC\x03" + worked_file()[4:], "version 3 "),
        (with_bytes(5, b"\x06"), "save reason 6"),
        (with_bytes(0x28, b"\x59"), "89 and 88 payload bytes"),
        (with_bytes(0x30, b"\xc1"), "payload at 449"),
        (with_bytes(0x30, b"\x80"), "payload at 384"),
        (with_bytes(0x52, b"\x7f"), "MODEL_FP is missing"),
        (with_bytes(0x77, b"\x01"), "tag 01 at 119 is out of place"),
        (with_bytes(0x77, b"\x09"), "tag 09 at 119 is out of place"),
        (with_bytes(0x7C, b"\xff"), "FINGERPRINT_MODE is not UTF-8"),
        (with_bytes(0xD2, b"\x03"), "tag 08"),
        (with_bytes(0xD6, b"\x0f"), "out of place"),
        (with_bytes(0x115, b"\x02"), "rewindable is 2"),
        (with_bytes(0x142, b"\x02"), "the layout asks for 128 payload bytes, not 88"),
        (with_bytes(0x48, b"\xff\xff\xff\xff"), "leave the first"),
    ],
)
def test_a_lie_is_named(build: Callable[[], bytes], says: str) -> None:
    with pytest.raises(CorruptSlab, match=re.escape(says)):
        kvc.parse(memoryview(build()))


def test_an_unknown_tag_is_skipped() -> None:
    whole = bytearray(worked_file())
    whole[0x17B] = 0x7F  # base_key becomes something from the future
    image = kvc.parse(memoryview(summed_again(whole)))
    assert image.meta == replace(WORKED_META, base_key=None)


def test_a_version_is_told_without_parsing() -> None:
    assert kvc.version_of(worked_file()) == 2
    assert kvc.version_of(b"KVC\x01") == 1
    assert kvc.version_of(b"KVC") is None
    assert kvc.version_of(b"GGUF\x03") is None


# ---- a writer's own faults


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"token_count": 3}, "8 bytes of ids"),
        ({"key": b"short"}, "32 bytes each"),
        ({"base_key": b"short"}, "base_key has 32 bytes"),
        ({"tenant_hash": b"short"}, "tenant_hash has 16 bytes"),
        ({"layout": (LayerRun(2, 1, 4, 1, 4),)}, "128 payload bytes"),
    ],
)
def test_an_unsound_row_is_not_encoded(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        file_of(replace(WORKED_META, **change), WORKED_PIECES, WORKED_IDS, WORKED_PAYLOAD)


@pytest.mark.parametrize("pieces", [(), (replace(WORKED_PIECES[0], repeats=0),), WORKED_PIECES * 2])
def test_a_split_of_other_tokens_is_not_encoded(pieces: tuple[Piece, ...]) -> None:
    with pytest.raises(ValueError, match="split"):
        file_of(WORKED_META, pieces, WORKED_IDS, WORKED_PAYLOAD)


@pytest.mark.parametrize("offset", [0, 384, 449])
def test_a_payload_offset_that_does_not_fit_is_not_encoded(offset: int) -> None:
    with pytest.raises(ValueError, match=str(offset)):
        kvc.encode_head(WORKED_META, WORKED_PIECES, WORKED_IDS, 88, 0, payload_offset=offset)


def test_a_layout_too_long_for_a_scan_is_not_encoded() -> None:
    runs = tuple(LayerRun(1, i, 4, 1, 4) for i in range(300))
    meta = replace(WORKED_META, layout=runs)
    with pytest.raises(ValueError, match="4096"):
        kvc.encode_head(meta, WORKED_PIECES, WORKED_IDS, kvc.blob_bytes(runs, 2), 0)


# ---- use


def test_noting_a_use_changes_two_fields_and_no_checksum() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(worked_file())
        file.flush()
        kvc.write_use(file.fileno(), 2**40, 1_760_000_999)
        file.seek(0)
        image = kvc.parse(memoryview(file.read()))
    assert image.meta == replace(WORKED_META, hit_count=2**32 - 1, last_used_unix_s=1_760_000_999)
    assert settled(image) == settled(kvc.parse(memoryview(worked_file())))


# ---- the real thing


@pytest.mark.parametrize(
    ("run", "flash_attn"),
    [
        (LayerRun(layers=30, k_type=1, k_row_bytes=384, v_type=1, v_row_bytes=384), False),  # V is transposed
        (LayerRun(layers=30, k_type=1, k_row_bytes=384, v_type=1, v_row_bytes=384), True),
        (LayerRun(layers=30, k_type=8, k_row_bytes=204, v_type=8, v_row_bytes=204), True),
        (LayerRun(layers=30, k_type=8, k_row_bytes=204, v_type=1, v_row_bytes=384), False),
    ],
)
def test_blob_bytes_is_what_llama_cpp_says(smollm2: Path, run: LayerRun, flash_attn: bool) -> None:
    llm = llama_cpp.Llama(
        str(smollm2),
        n_ctx=256,
        n_threads=1,
        n_threads_batch=1,
        type_k=run.k_type,
        type_v=run.v_type,
        flash_attn=flash_attn,
        verbose=False,
    )
    llm.eval(list(range(100, 105)))
    assert llama_cpp.llama_state_seq_get_size(llm.ctx, 0) == kvc.blob_bytes((run,), 5)
    llm.close()
