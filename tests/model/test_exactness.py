"""The heart of it: what is restored decodes to the same bits as what was never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from model import tiny
from model.cold import Answer, ask, cold_logits, largest_difference
from model.conftest import OPTIONS, MakeLlama

from shmcache import Cache

SYSTEM = "You answer shortly and to the point. Tools: none of them. "
QUESTION = {"role": "user", "content": "Which colours does the flag of Iceland have, and since when?"}
OTHER_QUESTION = {"role": "user", "content": "Name the rivers of Vienna, the largest one first."}
NEXT_QUESTION = {"role": "user", "content": "And what do they stand for?"}

KINDS = ("smollm2", *tiny.KINDS)
SETTINGS = [
    pytest.param({"flash_attn": False}, id="plain-f16"),
    pytest.param({"flash_attn": True}, id="flash-f16"),
    pytest.param({"flash_attn": False, "type_k": llama_cpp.GGML_TYPE_Q8_0}, id="plain-q8_0"),
    pytest.param(
        {"flash_attn": True, "type_k": llama_cpp.GGML_TYPE_Q8_0, "type_v": llama_cpp.GGML_TYPE_Q8_0},
        id="flash-q8_0",
    ),
]


CASES = [
    *(pytest.param(kind, *case.values, id=f"{kind}-{case.id}") for kind in KINDS for case in SETTINGS),
    # The window's own cells only: they are used again as the window moves on.
    pytest.param("gemma3", {"flash_attn": False, "swa_full": False}, id="gemma3-plain-f16-window"),
    pytest.param("gemma3", {"flash_attn": True, "swa_full": False}, id="gemma3-flash-f16-window"),
]


def next_turn(chat: list[dict[str, str]], answer: Answer) -> list[dict[str, str]]:
    return [*chat, {"role": "assistant", "content": answer.text}, NEXT_QUESTION]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_a_restored_conversation_equals_the_same_one_never_interrupted(  # noqa: PLR0917  fixtures
    kind: str,
    options: dict[str, Any],
    cache: Cache,
    worker: MakeLlama,
    tiny_models: dict[str, Path],
    smollm2: Path,
) -> None:
    path = smollm2 if kind == "smollm2" else tiny_models[kind]
    unbroken = worker(path, **options)
    saving, restoring, third = (worker(path, cache, **options) for _ in range(3))
    # Tiny models spell each letter with a token: these fill more than 512 cells, where kernels change.
    system = {"role": "system", "content": SYSTEM * (8 if kind == "smollm2" else 14)}
    chat = [system, QUESTION]

    uncached = ask(unbroken, chat)
    cold = ask(saving, chat)
    assert cache.flush(30_000)
    again = ask(restoring, chat)
    other = ask(third, [system, OTHER_QUESTION])
    live = ask(unbroken, next_turn(chat, cold))
    resumed = ask(third, next_turn(chat, cold))

    assert (cold.report.cache_hit_kind, cold.report.source) == ("cold", "")
    assert (again.report.cache_hit_kind, again.report.source) == ("exact", "shared")
    assert (other.report.cache_hit_kind, other.report.source) == ("partial", "shared")
    assert (live.report.cache_hit_kind, live.report.source) == ("partial", "live")
    assert (resumed.report.cache_hit_kind, resumed.report.source) == ("partial", "shared")
    assert again.report.prefilled_tokens == 1
    assert live.report.reused_tokens == resumed.report.reused_tokens

    assert largest_difference(uncached.logits, cold.logits) == 0
    assert largest_difference(again.logits, cold.logits) == 0
    assert largest_difference(resumed.logits, live.logits) == 0
    assert resumed.pieces == live.pieces
    stock = llama_cpp.Llama(str(path), **OPTIONS, **options)
    never_interrupted = cold_logits(stock, resumed.tokens, resumed.pieces)
    assert largest_difference(cold.logits, never_interrupted) == 0
    assert largest_difference(resumed.logits, never_interrupted) == 0
    assert largest_difference(other.logits, cold_logits(stock, other.tokens, other.pieces)) == 0
