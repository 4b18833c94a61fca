"""A06: states saved under other settings were refused, or reused across K/V types for garbage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from model.cold import ask
from model.conftest import MakeLlama

from shmcache import Cache

PROMPT = "A prompt that is long enough to be worth a row of its own, and then some more of it. " * 3
Q8_0 = llama_cpp.GGML_TYPE_Q8_0

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flash attention": {"flash_attn": True},
    "q8_0 keys": {"type_k": Q8_0},
    "q8_0 keys and values": {"flash_attn": True, "type_k": Q8_0, "type_v": Q8_0},
    "a smaller context": {"n_ctx": 512},
    "another rope base": {"rope_freq_base": 5_000.0},
    "an override": {"kv_overrides": {"llama.attention.layer_norm_rms_epsilon": 2e-5}},
}


def test_case_a06_each_setting_has_rows_of_its_own(
    tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    def workers() -> Any:
        for settings in SETTINGS.values():
            yield worker(tiny_models["llama"], cache, **settings)
        with monkeypatch.context() as patched:
            patched.setattr(llama_cpp.llama_cpp, "llama_context_default_params", two_sequences)
            yield worker(tiny_models["llama"], cache)

    for llama in workers():
        assert ask(llama, PROMPT).report.cache_hit_kind == "cold"
        assert cache.flush(30_000)
    for llama in workers():  # nobody's row was taken by another's
        assert ask(llama, PROMPT).report.cache_hit_kind == "exact"
    counters = cache.statistics().counters
    assert counters["restore_refused"] == counters["corrupt_rows"] == 0


def two_sequences(_default: Any = llama_cpp.llama_cpp.llama_context_default_params) -> Any:
    parameters = _default()
    parameters.n_seq_max = 2
    return parameters


def test_case_a06_rounding_only_settings_share_rows(
    tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    ask(worker(tiny_models["llama"], cache), PROMPT)
    assert cache.flush(30_000)
    for settings in ({"n_batch": 64, "n_ubatch": 64}, {"n_threads": 2}, {"use_mmap": False}):
        assert ask(worker(tiny_models["llama"], cache, **settings), PROMPT).report.cache_hit_kind == "exact"
