"""A08: a checkpoint of one set of weights was accepted by another model of the same shape and name."""

from __future__ import annotations

import os
from pathlib import Path

import llama_cpp
import pytest
from model import tiny
from model.cold import ask, cold_logits, largest_difference
from model.conftest import OPTIONS, MakeLlama

from shmcache import Cache

PROMPT = "A prompt that is long enough to be worth a row of its own, and then some more of it. " * 3


@pytest.fixture(autouse=True)
def own_memory_of_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_case_a08_other_weights_under_the_same_path_and_size_are_another_model(
    tiny_models: dict[str, Path], tmp_path: Path, cache: Cache, worker: MakeLlama
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_models["llama"].read_bytes())
    first = ask(worker(path, cache), PROMPT)
    assert cache.flush(30_000)
    assert ask(worker(path, cache), PROMPT).report.cache_hit_kind == "exact"

    times = path.stat()
    other = tiny.build("llama", tmp_path, seed=2).read_bytes()
    assert len(other) == times.st_size
    path.write_bytes(other)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a copy that keeps times would leave it

    answer = ask(worker(path, cache), PROMPT)
    assert answer.report.cache_hit_kind == "cold"
    stock = llama_cpp.Llama(str(path), **OPTIONS)
    assert largest_difference(answer.logits, cold_logits(stock, answer.tokens, answer.pieces)) == 0
    assert largest_difference(answer.logits, first.logits) > 0.1
    assert cache.statistics().counters["restore_refused"] == 0


def test_case_a08_the_same_weights_under_another_path_are_the_same_model(
    tiny_models: dict[str, Path], tmp_path: Path, cache: Cache, worker: MakeLlama
) -> None:
    ask(worker(tiny_models["llama"], cache), PROMPT)
    assert cache.flush(30_000)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny_models["llama"].read_bytes())
    assert ask(worker(copy, cache), PROMPT).report.cache_hit_kind == "exact"


def test_case_a08_a_few_changed_bytes_of_weights_are_another_model(
    tiny_models: dict[str, Path], tmp_path: Path, cache: Cache, worker: MakeLlama
) -> None:
    ask(worker(tiny_models["llama"], cache), PROMPT)
    assert cache.flush(30_000)
    path, weights = tmp_path / "model.gguf", bytearray(tiny_models["llama"].read_bytes())
    weights[-3] ^= 1
    path.write_bytes(weights)
    assert ask(worker(path, cache), PROMPT).report.cache_hit_kind == "cold"


def test_case_a08_two_models_in_one_process_on_one_cache_never_meet(
    tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    models = [worker(tiny_models[kind], cache) for kind in tiny.KINDS]
    for expected in ("cold", "exact"):
        for llama in models:
            answer = ask(llama, PROMPT)
            assert answer.report.cache_hit_kind == expected
            assert cache.flush(30_000)
            llama.reset()
