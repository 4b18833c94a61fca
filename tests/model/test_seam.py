"""A prompt goes on behind a row's own tokens, and spells exactly what it did."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import pytest
from model import tiny
from model.cold import ask, cold_logits, largest_difference
from model.conftest import OPTIONS, MakeLlama
from model.test_shared_llama import letters, saying

from shmcache import Cache
from shmcache.workers.render import FRAME, Renderer, Text
from shmcache.workers.seam import Joined, Tokenizer, join
from shmcache.workers.state import ModelVocabulary


class Spelled:
    """Twenty tokens: nothing, letters a to p, FF, a control token, and `de`."""

    PIECES = (b"", *(bytes([letter]) for letter in b"abcdefghijklmnop"), b"\xff", b"<s>", b"de")

    def piece(self, token: int) -> bytes:
        return self.PIECES[token] if token < len(self.PIECES) else b""

    def is_text(self, token: int) -> bool:
        return token != 18

    def tokens_of(self, text: bytes) -> list[int]:
        return [self.PIECES.index(bytes([byte])) for byte in text if bytes([byte]) in self.PIECES]


SPELLED = Spelled()
TOKENIZER = Tokenizer(Renderer(SPELLED), SPELLED.tokens_of)

#                   [ab]     [c]   [def]
PROMPT = Text(tokens=[10, 11, 12], text=b"abcdef", ends=[2, 3, 6])


def test_the_callers_remaining_tokens_follow_the_row() -> None:
    joined = join(PROMPT, [10, 11], 3, TOKENIZER, may_end_one_earlier=False)
    assert joined == Joined([10, 11, 12], keep=2, rest_ends=[6])
    assert joined.is_exact


def test_the_rows_ids_stand_for_its_text_even_where_there_are_more_of_them() -> None:
    joined = join(PROMPT, [1, 2, 3], 3, TOKENIZER, may_end_one_earlier=False)
    assert joined == Joined([1, 2, 3, 12], keep=3, rest_ends=[6])
    assert joined.position(PROMPT, 3) == 4


def test_behind_a_row_that_ends_inside_a_token_the_rest_is_tokenised() -> None:
    joined = join(PROMPT, [1], 1, TOKENIZER, may_end_one_earlier=True)
    assert joined == Joined([1, 2, 3, 4, 5, 6], keep=1, rest_ends=[2, 3, 4, 5, 6])
    assert [joined.position(PROMPT, n_tokens) for n_tokens in (1, 2, 3)] == [2, 3, 6]


def test_a_boundary_that_the_new_tokens_do_not_have_is_none() -> None:
    prompt = Text(tokens=[10, 11, 12], text=b"abcdef", ends=[2, 4, 6])
    new_tokens = Tokenizer(Renderer(SPELLED), lambda _: [2, 3, 19, 6])
    joined = join(prompt, [1], 1, new_tokens, may_end_one_earlier=True)
    assert joined == Joined([1, 2, 3, 19, 6], keep=1, rest_ends=[2, 3, 5, 6])
    assert [joined.position(prompt, n_tokens) for n_tokens in (1, 2, 3)] == [2, None, 5]


def test_frames_are_their_ids_and_a_literal_ff_is_text() -> None:
    rendered = Renderer(SPELLED).render([4, 18, 17, 5, 17, 17, 18, 6])
    assert TOKENIZER.tokenise(rendered.text, 0) == (rendered.tokens, rendered.ends)
    assert TOKENIZER.tokenise(rendered.text, 9) == (rendered.tokens, [9 + end for end in rendered.ends])


def test_a_text_that_does_not_render_to_itself_is_passed_over() -> None:
    prompt = Text(tokens=[10], text=b"ab?d", ends=[4])
    assert join(prompt, [1], 1, TOKENIZER, may_end_one_earlier=True) is None


def test_of_a_row_that_is_the_whole_prompt_the_last_token_is_decoded_again() -> None:
    whole = join(PROMPT, [10, 11, 12], 6, TOKENIZER, may_end_one_earlier=True)
    assert whole == Joined([10, 11, 12], keep=2, rest_ends=[])
    assert join(PROMPT, [10, 11, 12], 6, TOKENIZER, may_end_one_earlier=False) is None


def test_a_row_of_one_token_that_is_the_whole_prompt_saves_nothing() -> None:
    prompt = Text(tokens=[10], text=b"ab", ends=[2])
    assert join(prompt, [10], 2, TOKENIZER, may_end_one_earlier=True) is None
    assert not Joined([10], keep=0, rest_ends=[2]).is_exact


# ---- real vocabularies


@pytest.fixture(scope="session")
def by_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("vocabularies")
    return {name: tiny.build("llama", folder, vocabulary=name) for name in tiny.VOCABULARIES}


TEXTS = (
    "the sea, the other sea.  then  in the north",
    "<|turn|> is spelled <s> out",
    "nothing \N{EURO SIGN}5 or \N{LATIN SMALL LETTER E WITH ACUTE}t\N{LATIN SMALL LETTER E WITH ACUTE}",
    "\nthe\n\n the\t\0 the",
    "the \N{GRINNING FACE} sea",
)


@pytest.mark.parametrize("vocabulary", tiny.VOCABULARIES)
def test_a_text_cut_anywhere_is_spelled_again_or_passed_over(
    vocabulary: str, by_vocabulary: dict[str, Path], worker: MakeLlama
) -> None:
    llama = worker(by_vocabulary[vocabulary])
    used = 0
    for text in TEXTS:
        turn = llama.tokenize(b"<|turn|>", add_bos=False, special=True)
        tokens = [*llama.tokenize(text.encode()), *turn, *llama.tokenize(text.encode(), add_bos=False)]
        prompt = llama._renderer.render(tokens)
        first_text = prompt.ends[0]
        for at in range(first_text, len(prompt.text)):
            inside_frame = any(
                end - 6 < at < end
                for token, end in zip(tokens, prompt.ends, strict=True)
                if llama._renderer.is_framed(token)
            )
            if inside_frame:
                continue
            again = llama._tokenizer.tokenise(prompt.text[at:], at)
            if again is None:
                assert not _is_whole_text(prompt.text[at:].split(FRAME)[0]), (text, at)
                continue
            used += 1
            new = llama._renderer.render(again[0])
            assert new.text == prompt.text[at:]
            assert [at + end for end in new.ends] == again[1]
            # A literal spelling stays text, and a control token stays one.
            assert sum(map(llama._renderer.is_framed, again[0])) == (
                1 if at < prompt.text.rfind(b"\xff\x01") + 1 else 0
            )
    assert used > 200


def _is_whole_text(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("vocabulary", tiny.VOCABULARIES)
def test_every_token_is_its_own_bytes_or_its_id(
    vocabulary: str, by_vocabulary: dict[str, Path], worker: MakeLlama
) -> None:
    llama = worker(by_vocabulary[vocabulary])
    pieces = ModelVocabulary(llama)
    for token in range(llama.n_vocab()):
        [rendered] = llama._renderer.parts([token])
        if pieces.piece(token) and pieces.is_text(token):
            assert rendered == pieces.piece(token).replace(b"\xff", b"\xff\xff")
        else:
            assert rendered == FRAME + token.to_bytes(4, "little")


@pytest.mark.parametrize("vocabulary", tiny.VOCABULARIES)
def test_a_reply_that_ends_inside_a_token_of_the_next_prompt_is_gone_on_from(
    vocabulary: str, by_vocabulary: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    path = by_vocabulary[vocabulary]
    llama, other = worker(path, cache), worker(path, cache)
    start = "the sea, in the north and the south. " * 8
    answer = llama.create_completion(start, **saying(llama, *letters("and t")))
    assert answer["shmcache"]["finish_key"] is not None
    assert cache.flush(30_000)
    saved = len(llama._cells.trail or [])

    # `th` and `the` are one token: the row ends behind their first letter.
    prompt = start + "and the sea, and so on."
    resumed = ask(other, prompt)
    assert (resumed.report.cache_hit_kind, resumed.report.source) == ("partial", "shared")
    assert resumed.report.reused_tokens == saved
    asked = other.tokenize(prompt.encode())
    rendered = other._renderer.render(resumed.tokens).text
    assert rendered.startswith(other._renderer.render(asked).text)
    assert resumed.tokens[: len(asked)] != asked
    stock = llama_cpp.Llama(str(path), **OPTIONS)
    assert largest_difference(resumed.logits, cold_logits(stock, resumed.tokens, resumed.pieces)) == 0
    # What it leaves are rows of the prompt's own text: a re-send finds them.
    assert cache.flush(30_000)
    assert ask(llama, prompt).report.cache_hit_kind == "exact"
