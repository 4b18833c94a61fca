"""B04: a template wrote BOS and the tokenizer added one more; states with one and with two were mixed."""

from __future__ import annotations

from pathlib import Path

import pytest
from model.cold import ask
from model.conftest import MakeLlama

from shmcache import Cache

CHAT = [{"role": "user", "content": "A question that is long enough to be worth a row of its own. " * 4}]


def test_case_b04_states_with_and_without_bos_never_serve_each_other(
    tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    llama = worker(tiny_models["llama"], cache)
    rendered = f"<|turn|>user: {CHAT[0]['content']}\n<|turn|>assistant: "
    with_bos = llama.tokenize(rendered.encode(), add_bos=True, special=True)
    assert with_bos[0] == llama.token_bos()

    chat = ask(llama, CHAT)  # its template writes no BOS
    assert cache.flush(30_000)
    assert llama.token_bos() not in chat.tokens[: chat.report.prompt_tokens]
    text = ask(worker(tiny_models["llama"], cache), rendered)  # a completion's text gets one
    assert text.report.cache_hit_kind == "cold"
    assert text.tokens[: text.report.prompt_tokens] == with_bos
    assert cache.flush(30_000)

    fresh = worker(tiny_models["llama"], cache)
    with pytest.warns(RuntimeWarning, match="duplicate leading"):
        double = ask(fresh, "<s>" + rendered)
    assert double.report.cache_hit_kind == "cold"
    assert double.tokens[:2] == [llama.token_bos()] * 2
    for prompt, expected in ((CHAT, chat), (rendered, text)):
        assert ask(fresh, prompt).report.prompt_tokens == expected.report.prompt_tokens
        assert fresh.last_report.cache_hit_kind == "exact"


def test_case_b04_a_chat_and_its_tokens_are_the_same_prompt(
    tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    llama = worker(tiny_models["llama"], cache)
    chat = ask(llama, CHAT)
    assert cache.flush(30_000)
    prompt = chat.tokens[: chat.report.prompt_tokens]
    assert ask(worker(tiny_models["llama"], cache), prompt).report.cache_hit_kind == "exact"
