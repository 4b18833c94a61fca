"""Copying cells out and in, and where they may be cut: asked of llama.cpp itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from model import tiny
from model.cold import cold_logits
from model.conftest import OPTIONS

from shmcache.errors import RestoreRefused
from shmcache.kvc import Piece, blob_bytes
from shmcache.workers.state import ContextState, library_folder, unsupported

TOKENS = [32 + 7 * index % 90 for index in range(300)]


class Stock:
    """A plain model, its state, and tokens decoded in batches of at most 64."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.llama = llama_cpp.Llama(str(path), **{**OPTIONS, **options})
        self.state = ContextState(self.llama)

    def decode(self, start: int, end: int) -> np.ndarray:
        for at in range(start, end, 64):
            batch = TOKENS[at : min(at + 64, end)]
            self.llama._batch.set_batch(batch, at, False)
            self.llama._ctx.decode(self.llama._batch)
        logits = self.llama._ctx.get_logits_ith(-1)
        return np.ctypeslib.as_array(logits, shape=(self.llama.n_vocab(),)).copy()

    def copy(self) -> bytearray:
        blob = bytearray(self.state.size_bytes())
        self.state.copy_out(memoryview(blob))
        return blob


@pytest.fixture
def stock(tiny_models: dict[str, Path]) -> Any:
    return lambda kind="llama", **options: Stock(tiny_models[kind], **options)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_what_was_copied_out_decodes_on_alike_in_another_context(kind: str, stock: Any) -> None:
    one, other = stock(kind), stock(kind)
    one.decode(0, 200)
    blob = one.copy()
    one.state.settle()
    other.state.copy_in(memoryview(bytes(blob)), 200)  # a mapping is read-only, too
    assert np.array_equal(one.decode(200, 201), other.decode(200, 201))


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("kept", ["half", "eight bytes", "nothing"])
def test_a_state_that_is_cut_off_is_refused_and_leaves_nothing(kind: str, kept: str, stock: Any) -> None:
    one = stock(kind)
    expected = one.decode(0, 100)
    blob = one.copy()
    part = {"half": blob[: len(blob) // 2], "eight bytes": blob[:8], "nothing": blob[:0]}[kept]
    with pytest.raises(RestoreRefused, match="100 tokens"):
        one.state.copy_in(memoryview(part), 100)
    assert one.state.pos_max() == -1
    assert np.array_equal(one.decode(0, 100), expected)


def test_a_state_with_more_behind_it_or_another_length_is_refused(stock: Any) -> None:
    one = stock()
    one.decode(0, 100)
    blob = one.copy()
    with pytest.raises(RestoreRefused):
        one.state.copy_in(memoryview(blob + b"\0"), 100)
    with pytest.raises(RestoreRefused):
        one.state.copy_in(memoryview(blob), 99)


def test_a_state_of_another_kv_type_or_attention_is_refused(stock: Any) -> None:
    blobs = {}
    contexts = {
        "f16": stock(),
        "flash": stock(flash_attn=True),
        "q8_0": stock(type_k=llama_cpp.GGML_TYPE_Q8_0),
    }
    for name, context in contexts.items():
        context.decode(0, 64)
        blobs[name] = context.copy()
    for name, context in contexts.items():
        for other in set(blobs) - {name}:
            with pytest.raises(RestoreRefused):
                context.state.copy_in(memoryview(blobs[other]), 64)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_size_is_foretold(kind: str, stock: Any) -> None:
    one = stock(kind)
    size = one.state.measured_size()
    assert one.state.pos_max() == -1
    for start, end in ((0, 1), (1, 50), (50, 300)):
        one.decode(start, end)
        foretold = size.bytes_at(end)
        assert foretold >= one.state.size_bytes()
        if kind != "gemma3":
            assert foretold == one.state.size_bytes()


@pytest.mark.parametrize("options", [{}, {"flash_attn": True}, {"type_k": llama_cpp.GGML_TYPE_Q8_0}])
def test_the_layout_says_how_long_a_state_is(options: dict[str, Any], stock: Any) -> None:
    one = stock(**options)
    size = one.state.measured_size()
    assert size.layout
    for tokens in (1, 77, 300):
        assert blob_bytes(size.layout, tokens) == size.bytes_at(tokens)


@pytest.mark.parametrize("kind", ["gemma3", "mamba", "lfm2"])
def test_states_that_are_framed_otherwise_have_no_layout(kind: str, stock: Any) -> None:
    assert stock(kind).state.measured_size().layout == ()


@pytest.mark.parametrize("options", [{}, {"swa_full": False}, {"flash_attn": True, "swa_full": False}])
@pytest.mark.parametrize("restored_at", [None, 40, 200])
def test_a_cut_that_is_allowed_decodes_as_if_the_rest_had_never_been(
    options: dict[str, Any], restored_at: int | None, stock: Any
) -> None:
    """Sliding windows: seq_rm says True wherever it is asked."""
    allowed = 0
    for back in (1, 2, 3, 5, 40, 150):
        one, reference = stock("gemma3", **options), stock("gemma3", **options)
        if restored_at is not None:
            one.decode(0, restored_at)
            one.state.settle()
        end = (restored_at or 0) + 8 if restored_at != 40 else 40
        one.decode(restored_at or 0, end) if end > (restored_at or 0) else None
        keep = end - back
        if keep < 1 or not one.state.cut(keep):
            assert keep < 1 or one.state.pos_max() == end - 1  # refused: nothing changed
            continue
        allowed += 1
        reference.decode(0, keep)
        difference = np.max(np.abs(one.decode(keep, keep + 1) - reference.decode(keep, keep + 1)))
        assert difference < 0.05, f"{back} back of {end}: {difference}"
    assert allowed


@pytest.mark.parametrize("kind", ["mamba", "lfm2"])
def test_a_recurrent_state_is_never_cut(kind: str, stock: Any) -> None:
    one = stock(kind)
    one.decode(0, 100)
    assert not one.state.may_cut(99)
    assert not one.state.cut(50)
    assert one.state.cut(100)
    assert one.state.pos_max() == 99


def test_decoded_tokens_are_counted_by_llama_cpp(stock: Any) -> None:
    one = stock()
    begin = one.state.decoded_tokens()
    assert begin == 0
    one.decode(0, 1)
    assert one.state.decoded_tokens() - begin == 1
    one.decode(1, 101)
    assert one.state.decoded_tokens() - begin == 101
    one.llama._ctx.reset_timings()
    assert one.state.decoded_tokens() == 0


def test_what_cannot_be_cached_says_why(tiny_models: dict[str, Path]) -> None:
    path = str(tiny_models["llama"])
    assert unsupported(llama_cpp.Llama(path, **OPTIONS)) is None
    embedding = llama_cpp.Llama(path, **{**OPTIONS, "n_ctx": 256}, embedding=True)
    assert "embeddings" in (unsupported(embedding) or "")
    draft = llama_cpp.llama_speculative.LlamaPromptLookupDecoding()
    drafting = llama_cpp.Llama(path, **{**OPTIONS, "n_ctx": 256}, draft_model=draft)
    assert "draft" in (unsupported(drafting) or "")


def test_the_libraries_are_where_they_are_said_to_be() -> None:
    assert list(library_folder().glob("libllama*"))


def test_the_reference_settles_where_an_entry_ends(stock: Any) -> None:
    """What the other tests compare with: two entries differ from one where the window has wrapped."""
    one = stock("gemma3", flash_attn=True)
    # By a multiple of the vector width cells may move without changing a sum: hence 123.
    joined = cold_logits(one.llama, TOKENS[:246], [Piece(123, 2, 128, 1, 0)])
    apart = cold_logits(one.llama, TOKENS[:246], [Piece(123, 1, 128, 1, 0)] * 2)
    assert not np.array_equal(joined[246], apart[246])
