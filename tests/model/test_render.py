"""Tokens to bytes: injective, prefix by prefix, over an invented vocabulary and over real ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model.conftest import MakeLlama

from shmcache.workers.render import FRAME, Renderer
from shmcache.workers.state import ModelVocabulary


class Invented:
    """Pieces that would fool a careless rendering: literal frames, lone FFs, two tokens with one piece."""

    PIECES = (
        b"a",
        b"b",
        b"ab",
        b"ab",
        b"\xff",
        b"\x01",
        b"\xff\x01",
        b"\0\0\0\0",
        b"\x08",
        b"<s>",
        b"<s>",
        b"",
    )
    CONTROL = (10,)

    def piece(self, token: int) -> bytes:
        return self.PIECES[token] if token < len(self.PIECES) else b""

    def is_text(self, token: int) -> bool:
        return token not in self.CONTROL


tokens = st.lists(st.integers(0, len(Invented.PIECES) - 1), max_size=12)


def meaning(renderer: Renderer, ids: list[int]) -> list[bytes | int]:
    """What two equal renderings must agree in: text between frames, and the framed ids at their places."""
    found: list[bytes | int] = [b""]
    for token in ids:
        if renderer.is_framed(token):
            found += [token, b""]
        else:
            found[-1] += renderer.plain(token)
    return found


@given(one=tokens, other=tokens)
def test_two_token_lists_render_equal_only_if_text_and_frames_are_equal(
    one: list[int], other: list[int]
) -> None:
    renderer = Renderer(Invented())
    same_bytes = renderer.render(one).text == renderer.render(other).text
    assert same_bytes == (meaning(renderer, one) == meaning(renderer, other))


@given(ids=tokens, keep=st.integers(0, 12))
def test_a_token_prefix_renders_to_a_byte_prefix(ids: list[int], keep: int) -> None:
    renderer = Renderer(Invented())
    whole, part = renderer.render(ids), renderer.render(ids[:keep])
    assert whole.text.startswith(part.text)
    assert whole.ends[:keep] == part.ends
    assert whole.tokens_at(len(part.text)) == len(part.tokens)


def test_a_literal_spelling_never_equals_the_control_token() -> None:
    renderer = Renderer(Invented())
    assert renderer.render([9]).text == b"<s>"
    assert renderer.render([10]).text == FRAME + b"\x0a\0\0\0"
    assert renderer.render([6, 8, 7]).text == b"\xff\xff\x01\x08\0\0\0\0"  # FF 01 08 … as text is no frame


def test_a_token_without_a_piece_is_framed() -> None:
    assert Renderer(Invented()).render([11]).text == FRAME + b"\x0b\0\0\0"


def test_a_byte_inside_a_token_is_no_boundary() -> None:
    text = Renderer(Invented()).render([2, 0])
    assert [text.tokens_at(length) for length in range(5)] == [0, None, 1, 2, None]


@pytest.mark.parametrize("kind", ["smollm2", "llama"])
def test_a_real_vocabulary_renders_each_token_to_bytes_of_its_own_or_to_its_frame(
    kind: str, worker: MakeLlama, smollm2: Path, tiny_models: dict[str, Path]
) -> None:
    llama = worker(smollm2 if kind == "smollm2" else tiny_models[kind])
    renderer = Renderer(ModelVocabulary(llama))
    everything = range(llama.n_vocab())
    rendered = renderer.parts(everything)
    assert all(rendered)
    framed = [token for token in everything if renderer.is_framed(token)]
    assert {llama.token_bos(), llama.token_eos()} <= set(framed)
    assert len({rendered[token] for token in framed}) == len(framed)
    assert all(
        renderer.plain(token) == llama.detokenize([token])
        for token in everything
        if not renderer.is_framed(token) and len(renderer.plain(token)) <= 32  # stock drops longer pieces
    )


def test_ids_outside_the_vocabulary_are_framed_and_never_reach_llama_cpp(
    worker: MakeLlama, tiny_models: dict[str, Path]
) -> None:
    llama = worker(tiny_models["llama"])
    renderer = Renderer(ModelVocabulary(llama))
    assert renderer.parts([-1, llama.n_vocab()]) == [
        FRAME + b"\xff\xff\xff\xff",
        FRAME + llama.n_vocab().to_bytes(4, "little"),
    ]


def test_text_in_many_scripts_renders_to_its_own_bytes(worker: MakeLlama, smollm2: Path) -> None:
    llama = worker(smollm2)
    text = "naïve 日本語 😀 \0 \t\n  <|im_start|> ﬁ"
    ids = llama.tokenize(text.encode(), add_bos=False, special=False)
    assert Renderer(ModelVocabulary(llama)).render(ids).text == text.encode()
    framed = llama.tokenize(b"<|im_start|>", add_bos=False, special=True)
    assert len(framed) == 1
    assert Renderer(ModelVocabulary(llama)).render(framed).text.startswith(FRAME)
