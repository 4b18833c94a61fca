"""Models of a megabyte with random weights, one of each kind of memory, written by the gguf package.

    llama     full attention                          every position has its cell
    gemma3    sliding window of 64 in five of six     cells of old positions are used again
    mamba     recurrent                               one state for all positions
    lfm2      hybrid: convolution and attention

All share one byte-level BPE vocabulary: 256 bytes (ids 0 to 255), three merges, BOS, EOS, a control token.
Those of the first kind come with two more (VOCABULARIES):

    bpe         the one above
    spm         SentencePiece that puts a space before a text, and bytes for what it has no piece for
    spm-bytes   SentencePiece without that space
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

KINDS = ("llama", "gemma3", "mamba", "lfm2")
VOCABULARIES = ("bpe", "spm", "spm-bytes")
WINDOW = 64

_EMBD, _FF, _HEADS, _HEAD = 64, 128, 2, 32
_CONTEXT = 2048
_MERGES = ("t h", "th e", "Ġ the")
_CONTROL = ("<s>", "</s>", "<|turn|>")

_UNSPOKEN = [*range(0x20), *range(0x7F, 0x100), *range(0x103, 0x106)]

Tensors = dict[str, tuple[int, ...]]


def build(kind: str, folder: Path, seed: int = 1, vocabulary: str = "bpe") -> Path:
    """Write one model and return its path; another seed gives other weights of the same shape."""
    path = folder / f"{kind}-{vocabulary}-{seed}.gguf"
    writer = gguf.GGUFWriter(path, kind)
    if vocabulary == "bpe":
        _write_vocabulary(writer)
    else:
        _write_spm_vocabulary(writer, adds_space=vocabulary == "spm")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_EMBD)
    writer.add_layer_norm_rms_eps(1e-5)
    random = np.random.default_rng(seed)
    for name, shape in {"llama": _llama, "gemma3": _gemma3, "mamba": _mamba, "lfm2": _lfm2}[kind](
        writer
    ).items():
        if name == "token_embd.weight" and vocabulary != "bpe":
            shape = (len(_SPM_TOKENS), _EMBD)  # noqa: PLW2901
        writer.add_tensor(name, _weights(random, name, shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def build_lora(path: Path, seed: int) -> Path:
    """Write an adapter of the llama model: rank 2, on the queries and values of both blocks."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 2.0)
    random = np.random.default_rng(seed)
    for name in (f"blk.{block}.attn_{part}.weight" for block in (0, 1) for part in ("q", "v")):
        for side, shape in (("a", (2, _EMBD)), ("b", (_EMBD, 2))):
            writer.add_tensor(f"{name}.lora_{side}", random.normal(0, 0.3, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _weights(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if "norm" in name:
        return np.ones(shape, dtype=np.float32)
    if name.endswith("ssm_a"):
        return -np.exp(random.normal(0, 0.5, shape)).astype(np.float32)
    # Wide enough that logits differ by more than rounding when the state does.
    weights = random.normal(0, 0.2, shape).astype(np.float32)
    if name == "token_embd.weight":
        weights[_UNSPOKEN] *= 0.01  # embeddings are the output too: replies are plain ASCII
    return weights


def _write_vocabulary(writer: gguf.GGUFWriter) -> None:
    tokens = [*_bytes_as_characters(), "th", "the", "Ġthe", *_CONTROL]
    kinds = [gguf.TokenType.NORMAL] * (len(tokens) - len(_CONTROL)) + [gguf.TokenType.CONTROL] * len(_CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(list(_MERGES))
    writer.add_bos_token_id(len(tokens) - 3)
    writer.add_eos_token_id(len(tokens) - 2)
    writer.add_add_bos_token(True)
    writer.add_vocab_size(len(tokens))
    writer.add_chat_template(
        "{% for m in messages %}<|turn|>{{ m.role }}: {{ m.content }}\n{% endfor %}<|turn|>assistant: "
    )


_SPM_CONTROL = ("<unk>", "<s>", "</s>", "<|turn|>")
_SPM_PIECES = (
    "▁",
    *"abcdefghijklmnopqrstuvwxyz.,",
    "th",
    "he",
    "the",
    "▁th",
    "▁the",
    "▁s",
    "ea",
    "▁sea",
    "in",
    "an",
)
_SPM_TOKENS = (*_SPM_CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *_SPM_PIECES)


def _write_spm_vocabulary(writer: gguf.GGUFWriter, *, adds_space: bool) -> None:
    kinds = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * (len(_SPM_CONTROL) - 1)
    kinds += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * len(_SPM_PIECES)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(_SPM_TOKENS))
    writer.add_token_types(kinds)
    writer.add_token_scores([float(len(token)) if len(token) < 6 else 0.0 for token in _SPM_TOKENS])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(adds_space)
    writer.add_vocab_size(len(_SPM_TOKENS))


def _bytes_as_characters() -> Iterator[str]:
    """GPT-2's spelling of the 256 bytes: printable ones as they are, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = 0
    for byte in range(256):
        if byte in printable:
            yield chr(byte)
        else:
            yield chr(0x100 + moved)
            moved += 1


N_VOCAB = 256 + len(_MERGES) + len(_CONTROL)


def _outer(norm: str = "output_norm.weight") -> Tensors:
    return {"token_embd.weight": (N_VOCAB, _EMBD), norm: (_EMBD,)}


def _attention(block: str) -> Tensors:
    return {f"{block}.attn_{part}.weight": (_EMBD, _EMBD) for part in ("q", "k", "v", "output")}


def _feed_forward(block: str) -> Tensors:
    return {
        f"{block}.ffn_norm.weight": (_EMBD,),
        f"{block}.ffn_gate.weight": (_FF, _EMBD),
        f"{block}.ffn_up.weight": (_FF, _EMBD),
        f"{block}.ffn_down.weight": (_EMBD, _FF),
    }


def _llama(writer: gguf.GGUFWriter) -> Tensors:
    tensors = _outer()
    writer.add_block_count(2)
    writer.add_head_count(_HEADS)
    writer.add_feed_forward_length(_FF)
    for block in ("blk.0", "blk.1"):
        tensors |= {f"{block}.attn_norm.weight": (_EMBD,)} | _attention(block) | _feed_forward(block)
    return tensors


def _gemma3(writer: gguf.GGUFWriter) -> Tensors:
    tensors = _outer()
    writer.add_block_count(6)
    writer.add_head_count(_HEADS)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_feed_forward_length(_FF)
    writer.add_sliding_window(WINDOW)
    for block in (f"blk.{index}" for index in range(6)):
        tensors |= {f"{block}.attn_norm.weight": (_EMBD,)} | _attention(block) | _feed_forward(block)
        tensors |= {f"{block}.attn_{part}_norm.weight": (_HEAD,) for part in ("q", "k")}
        tensors |= {f"{block}.post_{part}_norm.weight": (_EMBD,) for part in ("attention", "ffw")}
    return tensors


def _mamba(writer: gguf.GGUFWriter) -> Tensors:
    inner, state, rank, kernel = 2 * _EMBD, 16, 4, 4
    tensors = _outer()
    writer.add_block_count(2)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    for block in ("blk.0", "blk.1"):
        tensors |= {
            f"{block}.attn_norm.weight": (_EMBD,),
            f"{block}.ssm_in.weight": (2 * inner, _EMBD),
            f"{block}.ssm_conv1d.weight": (inner, kernel),
            f"{block}.ssm_conv1d.bias": (inner,),
            f"{block}.ssm_x.weight": (rank + 2 * state, inner),
            f"{block}.ssm_dt.weight": (inner, rank),
            f"{block}.ssm_dt.bias": (inner,),
            f"{block}.ssm_a": (inner, state),
            f"{block}.ssm_d": (inner,),
            f"{block}.ssm_out.weight": (_EMBD, inner),
        }
    return tensors


def _lfm2(writer: gguf.GGUFWriter) -> Tensors:
    kernel = 3
    tensors = _outer("token_embd_norm.weight")
    writer.add_block_count(2)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv([0, _HEADS])  # 0: a convolution block
    writer.add_feed_forward_length(_FF)
    writer.add_uint32("lfm2.shortconv.l_cache", kernel)
    tensors |= {
        "blk.0.shortconv.conv.weight": (_EMBD, kernel),
        "blk.0.shortconv.in_proj.weight": (3 * _EMBD, _EMBD),
        "blk.0.shortconv.out_proj.weight": (_EMBD, _EMBD),
        "blk.1.attn_q_norm.weight": (_HEAD,),
        "blk.1.attn_k_norm.weight": (_HEAD,),
    }
    tensors |= _attention("blk.1")
    for block in ("blk.0", "blk.1"):
        tensors |= {f"{block}.attn_norm.weight": (_EMBD,)} | _feed_forward(block)
    return tensors
