"""Every call into llama.cpp that Llama does not offer: copy a sequence out and in, cut it, ask about it.

    copy_out  cells of sequence 0 → bytes        size_bytes() of them, at a boundary between two decodes
    copy_in   bytes → cleared cells              length and last position are checked, or RestoreRefused
    settle    copy_out, copy_in                  sliding-window models only, see below
    cut       drop the cells from `keep` on      only where may_cut(keep)

Owner: one SharedLlama, under its lock. Readers: the same.
Invariants
    I1  After copy_in the cells are those of the row, or there are none.
    I2  No removal is asked for that llama.cpp would do wrongly (`may_cut`).
Leans on (measured, llama-cpp-python 0.3.36)
    llama_state_seq_set_data checks almost nothing, and what a refusal leaves behind differs by model:
    the memory is cleared before and after.
    A restore carries no logits: sampling right behind it aborts the process.
    On sliding-window models seq_rm says True and decodes wrongly unless
    0 <= pos_min <= max(0, keep - n_swa + 1), with pos_min as it is before the cut. `may_cut` asks for one
    position more: a state is copied with the n_swa positions before its end, and where one of them is
    missing the copy has its cells in another place than the copy of a run that ended there.
    On such models a run that goes on and one that was restored differ (by up to 3 in a logit) once the
    window has wrapped, because cells lie in another order; hence `settle`.
    Recurrent and hybrid models keep one state for all positions: they cannot be cut at all.
    The blob's size is a fixed part and one more for each token; a sliding window only makes it smaller.
Leaves out: which tokens the cells hold (sequence), what to do when a state is refused (shared_llama).
"""

from __future__ import annotations

import ctypes
from itertools import groupby
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING

import llama_cpp
import msgspec
import numpy as np

from shmcache.errors import RestoreRefused
from shmcache.identity import ContextParams, Lora, build_hash, content_hash
from shmcache.kvc import LayerRun, blob_bytes

if TYPE_CHECKING:
    from shmcache.key import Buffer

SEQUENCE = 0
CPU, OFFLOADED = 0, 1  # Piece.device

_NOT_TEXT = (
    llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
    | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
    | llama_cpp.LLAMA_TOKEN_ATTR_UNUSED
)
_SENTINEL = b"\n"  # SentencePiece puts a space before the first word of a text, and nothing before this
_FRAMING_BYTES, _CELL_BYTES = 24, 12
_ROW_HEAD = Struct("<III")
_U8 = ctypes.POINTER(ctypes.c_uint8)


class ModelVocabulary:
    """The pieces of one model (a render.Vocabulary)."""

    def __init__(self, llama: llama_cpp.Llama) -> None:
        self._vocab = llama._model.vocab
        self._n_vocab: int = llama.n_vocab()
        is_spm = llama_cpp.llama_vocab_type(self._vocab) == llama_cpp.LLAMA_VOCAB_TYPE_SPM
        # Without tokens for bytes, llama.cpp throws through C for a text that it cannot spell.
        self._spells_everything = not is_spm or self._has_byte_tokens()
        self._sentinel = self._tokenise(_SENTINEL) if is_spm and self._spells_everything else []

    def tokens_of(self, text: bytes) -> list[int]:
        """The tokens of a text in the middle of other text: no BOS, no special tokens, no space before it.

        Empty where the vocabulary may not spell it, or cannot do without a space before it.
        """
        if not self._spells_everything:
            return []
        if not self._sentinel:
            return self._tokenise(text)
        tokens = self._tokenise(_SENTINEL + text)
        length = len(self._sentinel)
        return tokens[length:] if tokens[:length] == self._sentinel else []

    def _has_byte_tokens(self) -> bool:
        attributes = (llama_cpp.llama_vocab_get_attr(self._vocab, token) for token in range(self._n_vocab))
        return any(attribute & llama_cpp.LLAMA_TOKEN_ATTR_BYTE for attribute in attributes)

    def _tokenise(self, text: bytes) -> list[int]:
        room = len(text) + 2  # for a space before it
        while True:
            tokens = (llama_cpp.llama_token * room)()
            count = llama_cpp.llama_tokenize(self._vocab, text, len(text), tokens, room, False, False)
            if count >= 0:
                return list(tokens[:count])
            room = -count

    def piece(self, token: int) -> bytes:
        """The token's bytes, special tokens spelled out; empty for an id that the model does not have."""
        if not 0 <= token < self._n_vocab:
            return b""  # llama.cpp would throw through C
        size_bytes = 64
        while True:
            buffer = ctypes.create_string_buffer(size_bytes)
            written: int = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, size_bytes, 0, True)
            if written >= 0:
                return buffer.raw[:written]
            size_bytes = -written

    def is_text(self, token: int) -> bool:
        """Whether the token is none of control, unknown and unused."""
        return not llama_cpp.llama_vocab_get_attr(self._vocab, token) & _NOT_TEXT


class SizeLine(msgspec.Struct, frozen=True):
    """How large a state is: exact on full attention, an upper bound where a window caps it.

    layout is what the bytes are made of, empty where they are framed in another way than kvc knows.
    """

    fixed_bytes: int
    token_bytes: int
    layout: tuple[LayerRun, ...] = ()

    def bytes_at(self, token_count: int) -> int:
        """Upper bound of the state of so many tokens."""
        return self.fixed_bytes + self.token_bytes * token_count


class ContextState:
    """The cells of sequence 0 of one llama context."""

    def __init__(self, llama: llama_cpp.Llama) -> None:
        model = llama.model
        self._ctx = llama.ctx
        self._vocab = llama._model.vocab
        self._memory = llama_cpp.llama_get_memory(self._ctx)
        self.n_swa: int = llama_cpp.llama_model_n_swa(model)
        self.n_ubatch: int = llama_cpp.llama_n_ubatch(self._ctx)
        self.n_threads: int = llama_cpp.llama_n_threads(self._ctx)
        self.n_threads_batch: int = llama_cpp.llama_n_threads_batch(self._ctx)
        self.rewindable = not (
            llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model)
        )
        offloads = llama.model_params.n_gpu_layers and llama_cpp.llama_supports_gpu_offload()
        self.device = OFFLOADED if offloads else CPU
        self._n_vocab: int = llama.n_vocab()
        self._scratch = bytearray()

    def clear(self, *, scrub: bool = False) -> None:
        """Empty the cells; `scrub` their bytes too, after a state that nobody vouches for."""
        llama_cpp.llama_memory_clear(self._memory, scrub)

    def pos_min(self) -> int:
        """First position that the cells hold, -1 where they are empty."""
        position: int = llama_cpp.llama_memory_seq_pos_min(self._memory, SEQUENCE)
        return position

    def pos_max(self) -> int:
        """Last position that the cells hold, -1 where they are empty."""
        position: int = llama_cpp.llama_memory_seq_pos_max(self._memory, SEQUENCE)
        return position

    def size_bytes(self) -> int:
        """Exact size of the state as it is now."""
        size: int = llama_cpp.llama_state_seq_get_size(self._ctx, SEQUENCE)
        return size

    def threads_of(self, batch_tokens: int) -> int:
        """How many threads decode a batch of so many tokens."""
        return self.n_threads if batch_tokens == 1 else self.n_threads_batch

    def copy_out(self, target: memoryview) -> None:
        """Write the state into `target`, which has size_bytes() bytes."""
        written = llama_cpp.llama_state_seq_get_data(self._ctx, _pointer(target), len(target), SEQUENCE)
        if written != len(target):
            raise RestoreRefused(f"llama.cpp wrote {written} bytes of a state of {len(target)}")

    def copy_in(self, payload: Buffer, token_count: int) -> None:
        """Replace the cells by a saved state of `token_count` tokens. Raises RestoreRefused, then empty."""
        self.clear()
        taken = llama_cpp.llama_state_seq_set_data(self._ctx, _pointer(payload), len(payload), SEQUENCE)
        last = self.pos_max()
        if taken == len(payload) and last == token_count - 1:
            return
        self.clear(scrub=True)
        raise RestoreRefused(
            f"llama.cpp took {taken} of {len(payload)} bytes and ended at position {last} "
            f"for a state of {token_count} tokens"
        )

    def logits_behind(self, token: int) -> bytes:
        """Decode one token more, and return the logits behind it. The caller knows how to get rid of it."""
        self._decode_one(token)
        logits = llama_cpp.llama_get_logits_ith(self._ctx, -1)
        return ctypes.string_at(logits, self._n_vocab * ctypes.sizeof(ctypes.c_float))

    def _decode_one(self, token: int) -> None:
        batch = llama_cpp.llama_batch_get_one((llama_cpp.llama_token * 1)(token), 1)
        if llama_cpp.llama_decode(self._ctx, batch) != 0:
            raise RestoreRefused("llama.cpp did not decode a single token")

    @property
    def settles(self) -> bool:
        """Whether a run must go on from its own restored state to equal one that was restored."""
        return self.n_swa > 0

    def settle(self) -> None:
        """Put the cells into the order that a restore of them has."""
        size_bytes = self.size_bytes()
        if len(self._scratch) < size_bytes:
            self._scratch = bytearray(size_bytes)
        state = memoryview(self._scratch)[:size_bytes]
        token_count = self.pos_max() + 1
        self.copy_out(state)
        self.copy_in(state, token_count)

    def may_cut(self, keep: int) -> bool:
        """Whether the cells from position `keep` on can be dropped with what is left still right."""
        if keep > self.pos_max():
            return True
        return self.rewindable and 0 <= self.pos_min() <= max(0, keep - self.n_swa)

    def row_may_be_cut(self, token_count: int) -> bool:
        """Whether the last token of a row of so many can be dropped after it was restored."""
        return self.rewindable and (self.n_swa == 0 or token_count <= self.n_swa)

    def cut(self, keep: int) -> bool:
        """Drop the cells from position `keep` on; False, and nothing done, where that may not be."""
        if not self.may_cut(keep):
            return False
        return bool(llama_cpp.llama_memory_seq_rm(self._memory, SEQUENCE, keep, -1))

    def measured_size(self) -> SizeLine:
        """Decode one token, then one more, and see how the state grows. Leaves the cells empty."""
        self.clear()
        token = max(0, llama_cpp.llama_vocab_bos(self._vocab))
        blobs = []
        for _ in range(2):
            self._decode_one(token)
            blobs.append(bytearray(self.size_bytes()))
            self.copy_out(memoryview(blobs[-1]))
        self.clear()
        one_bytes, two_bytes = map(len, blobs)
        layout = _layout(blobs[0]) if self.rewindable and not self.n_swa else ()
        if any(blob_bytes(layout, index + 1) != len(blob) for index, blob in enumerate(blobs)):
            layout = ()
        return SizeLine(2 * one_bytes - two_bytes, two_bytes - one_bytes, layout)

    def decode_us(self) -> int:
        """How long all decoding has taken, by llama.cpp's own counters; 0 in a context that has none."""
        llama_cpp.llama_synchronize(self._ctx)
        counters = llama_cpp.llama_perf_context(self._ctx)
        return int(1000 * (counters.t_p_eval_ms + counters.t_eval_ms))

    def decoded_tokens(self) -> int:
        """All tokens that this context has decoded, by llama.cpp's own counters (n_p_eval + n_eval).

        They read at least 1 each; the time beside them tells a counted 1 from none.
        """
        llama_cpp.llama_synchronize(self._ctx)  # they are counted when a batch has ended
        counters = llama_cpp.llama_perf_context(self._ctx)
        prompt = counters.n_p_eval if counters.n_p_eval > 1 or counters.t_p_eval_ms else 0
        single = counters.n_eval if counters.n_eval > 1 or counters.t_eval_ms else 0
        return int(prompt + single)


def _layout(blob: bytearray) -> tuple[LayerRun, ...]:
    """Read the layers of a state of one token (kvc.blob_bytes draws it); empty where it does not parse."""
    offset = _FRAMING_BYTES + _CELL_BYTES
    rows: list[tuple[int, int]] = []
    while offset + _ROW_HEAD.size <= len(blob):
        type_, row_bytes, values = _ROW_HEAD.unpack_from(blob, offset)
        transposed = values != 0  # type, bytes of one value, values of a row, instead of type, bytes of a row
        if transposed:
            row_bytes *= values
        rows.append((type_, row_bytes))
        offset += _ROW_HEAD.size + row_bytes
    if offset != len(blob) or len(rows) % 2:
        return ()
    half = len(rows) // 2
    layers = [(*key, *value) for key, value in zip(rows[:half], rows[half:], strict=True)]
    return tuple(LayerRun(len(list(run)), *layer) for layer, run in groupby(layers))


def unsupported(llama: llama_cpp.Llama) -> str | None:
    """Why the states of this context are never cached, None where they can be."""
    if llama.context_params.embeddings:
        return "the context computes embeddings"
    if llama.draft_model is not None:
        return "a draft model decodes tokens that are taken back"
    if llama_cpp.llama_model_has_encoder(llama.model):
        return "the model has an encoder"
    if llama_cpp.llama_get_memory(llama.ctx) is None:
        return "the context has no memory"
    return None


def context_params(llama: llama_cpp.Llama, tenant: str | None) -> ContextParams:
    """What makes this context's K/V bytes mean what they mean."""
    asked = llama.context_params
    loras = (Lora(content_hash(llama.lora_path), llama.lora_scale),) if llama.lora_path else ()
    return ContextParams(
        n_ctx=llama_cpp.llama_n_ctx(llama.ctx),
        type_k=asked.type_k,
        type_v=asked.type_v,
        flash_attn=asked.flash_attn_type,
        swa_full=asked.swa_full,
        n_seq_max=llama_cpp.llama_n_seq_max(llama.ctx),
        kv_unified=asked.kv_unified,
        attention_type=asked.attention_type,
        rope_scaling_type=asked.rope_scaling_type,
        rope_freq_base=asked.rope_freq_base,
        rope_freq_scale=asked.rope_freq_scale,
        yarn_ext_factor=asked.yarn_ext_factor,
        yarn_attn_factor=asked.yarn_attn_factor,
        yarn_beta_fast=asked.yarn_beta_fast,
        yarn_beta_slow=asked.yarn_beta_slow,
        yarn_orig_ctx=asked.yarn_orig_ctx,
        kv_overrides=tuple((llama.kv_overrides or {}).items()),
        loras=loras,
        build=build_hash(library_folder()),
        tenant=tenant,
    )


def library_folder() -> Path:
    """Where libllama and the ggml libraries lie that this process uses."""
    return Path(llama_cpp.llama_cpp._lib._name).parent


def _pointer(view: Buffer) -> ctypes._Pointer[ctypes.c_uint8]:
    # numpy gives the address of read-only memory too, which ctypes' from_buffer refuses.
    return ctypes.cast(np.frombuffer(view, dtype=np.uint8).ctypes.data, _U8)
