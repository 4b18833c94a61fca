"""B02: generated text that is sent back tokenises differently from the ids that were generated.

The rule: a row's own ids stand for its text, and the prompt's own remaining tokens follow, where the row ends
between two of them; otherwise the next shorter row is used.
"""

from __future__ import annotations

from pathlib import Path

import llama_cpp
from model.cold import Answer, ask, cold_logits, largest_difference
from model.conftest import OPTIONS, MakeLlama

from shmcache import Cache

SYSTEM = {"role": "system", "content": "You answer in Japanese and in English, line by line. " * 8}
QUESTION = {"role": "user", "content": "日本の首都はどこですか。\nWrite a list of its rivers."}


def assert_equals_cold_of_its_ids(answer: Answer, stock: llama_cpp.Llama) -> None:
    assert largest_difference(answer.logits, cold_logits(stock, answer.tokens, answer.pieces)) == 0


def test_case_b02_the_next_turn_goes_on_behind_the_ids_that_were_generated(
    smollm2: Path, cache: Cache, worker: MakeLlama
) -> None:
    stock = llama_cpp.Llama(str(smollm2), **OPTIONS)
    first, second = (worker(smollm2, cache) for _ in range(2))
    said = ask(first, [SYSTEM, QUESTION], max_tokens=60, temperature=1.0, seed=3)
    assert cache.flush(30_000)
    chat = [SYSTEM, QUESTION, {"role": "assistant", "content": said.text}]
    following = ask(second, [*chat, {"role": "user", "content": "Go on.\n続けて。"}])

    assert following.report.source == "shared"
    assert following.tokens[: following.report.reused_tokens] == said.tokens[: following.report.reused_tokens]
    assert following.report.reused_tokens >= said.report.prompt_tokens - 1
    assert_equals_cold_of_its_ids(following, stock)


def test_case_b02_a_prompt_that_ends_inside_a_stored_word_is_answered_as_from_nothing(
    smollm2: Path, cache: Cache, worker: MakeLlama
) -> None:
    stock = llama_cpp.Llama(str(smollm2), **OPTIONS)
    first, second = (worker(smollm2, cache) for _ in range(2))
    prompt = "The rivers of Austria are the Danube, the Inn, the Enns and the Mur. " * 8
    ask(first, prompt)
    assert cache.flush(30_000)
    for cut in (3, 5, 8):  # inside "Mur", "the", "and"
        answer = ask(second, prompt[:-cut] + "sterious stream")
        assert answer.report.cache_hit_kind in ("cold", "partial")
        assert answer.report.reused_tokens + answer.report.prefilled_tokens == answer.report.prompt_tokens
        asked = second.tokenize((prompt[:-cut] + "sterious stream").encode())
        assert answer.tokens[: len(asked)] == asked
        assert_equals_cold_of_its_ids(answer, stock)
