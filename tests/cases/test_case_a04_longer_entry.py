"""A04: a stored prompt longer than the new one was trimmed, and its old logits were sampled."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import pytest
from model.cold import ask, cold_logits, largest_difference
from model.conftest import OPTIONS, MakeLlama

from shmcache import Cache
from shmcache.config import Gates

SHORT = "Here is a joke."
LONG = SHORT + " Z" * 120
EVERYTHING = Gates(min_tokens=1, cold_min_tokens=1, boundary_align_tokens=64)


@pytest.mark.parametrize("kind", ["smollm2", "llama", "gemma3", "mamba", "lfm2"])
def test_case_a04_a_longer_row_never_answers_for_a_shorter_prompt(
    kind: str, tiny_models: dict[str, Path], smollm2: Path, cache: Cache, worker: MakeLlama
) -> None:
    path = smollm2 if kind == "smollm2" else tiny_models[kind]
    stock = llama_cpp.Llama(str(path), **OPTIONS)
    first, second = (worker(path, cache) for _ in range(2))
    assert ask(first, LONG).report.finish_key is not None
    assert cache.flush(30_000)
    for llama in (first, second):  # the one has the long prompt in its cells, the other in the cache
        answer = ask(llama, SHORT)
        assert answer.report.cache_hit_kind == "cold"
        assert answer.report.reused_tokens == 0
        assert largest_difference(answer.logits, cold_logits(stock, answer.tokens, answer.pieces)) == 0
        assert answer.tokens[: answer.report.prompt_tokens] == llama.tokenize(SHORT.encode())


@pytest.mark.parametrize(
    ("kind", "expected"), [("llama", "exact"), ("gemma3", "partial"), ("mamba", "partial")]
)
def test_case_a04_a_row_that_is_the_whole_prompt_never_lends_its_logits(
    kind: str, expected: str, tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    stock = llama_cpp.Llama(str(tiny_models[kind]), **OPTIONS)
    first, second = (worker(tiny_models[kind], cache, gates=EVERYTHING) for _ in range(2))
    said = ask(first, LONG)
    assert cache.flush(30_000)
    whole = LONG + said.text[:-1]  # the reply's last token was sampled and never decoded: this is a row
    for llama in (second, first):
        # Its last token is decoded again; where the model cannot be cut, the next shorter row is used.
        answer = ask(llama, whole)
        assert answer.report.cache_hit_kind == (expected if llama is second else "exact")
        assert answer.report.prefilled_tokens >= 1
        assert largest_difference(answer.logits, cold_logits(stock, answer.tokens, answer.pieces)) == 0
        assert cache.flush(30_000)
