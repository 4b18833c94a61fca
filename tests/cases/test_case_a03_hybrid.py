"""A03: a restore reported full success, and then every token was processed again."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import pytest
from model.cold import ask, cold_logits, largest_difference
from model.conftest import OPTIONS, MakeLlama

from shmcache import Cache

PROMPT = "A prompt that is long enough to be worth a row of its own, and then some more of it. " * 3


@pytest.mark.parametrize("kind", ["lfm2", "mamba", "gemma3"])
def test_case_a03_a_continuation_reuses_all_and_a_diverging_prompt_none_of_it(
    kind: str, tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    stock = llama_cpp.Llama(str(tiny_models[kind]), **OPTIONS)
    saving, reading = (worker(tiny_models[kind], cache) for _ in range(2))
    ask(saving, PROMPT, max_tokens=1)
    assert cache.flush(30_000)
    n_tokens = len(saving.tokenize(PROMPT.encode()))

    continuing = ask(reading, PROMPT + "x")
    assert continuing.report.reused_tokens == n_tokens - 1  # all but the token that was sampled from
    assert continuing.report.prefilled_tokens == 2
    diverging = ask(reading, PROMPT[: len(PROMPT) // 3] + "and now for something else")
    assert diverging.report.cache_hit_kind == "cold"
    assert diverging.report.reused_tokens == 0
    assert diverging.report.prefilled_tokens == diverging.report.prompt_tokens
    for answer in (continuing, diverging):
        assert largest_difference(answer.logits, cold_logits(stock, answer.tokens, answer.pieces)) == 0

    counters = cache.statistics().counters
    assert counters["reused_tokens"] == n_tokens - 1
    assert counters["prefilled_tokens"] == n_tokens + 2 + diverging.report.prompt_tokens
