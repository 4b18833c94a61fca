"""A09: K/V computed under one adapter served a request under another, or under its successor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from model import tiny
from model.cold import ask, cold_logits, largest_difference
from model.conftest import OPTIONS, MakeLlama
from msgspec.structs import replace
from support import PLAIN_CONTEXT

from shmcache import Cache, identity
from shmcache.identity import ContextParams, Identity, Lora
from shmcache.key import key_of


@pytest.fixture
def adapters(tmp_path: Path) -> dict[str, Path]:
    paths = {name: tmp_path / f"{name}.gguf" for name in ("a", "b")}
    for name, path in paths.items():
        path.write_bytes(f"adapter {name}".encode())
    return paths


def key_under(params: ContextParams) -> bytes:
    seed = Identity(model_fp=b"m" * 32, quant=3, ctx_params_hash=identity.ctx_params_hash(params)).seed
    return key_of(seed, b"the same prompt")


def test_case_a09_another_adapter_scale_order_or_content_is_another_key(
    adapters: dict[str, Path], tmp_path: Path
) -> None:
    memo = tmp_path / "cache" / "hashes.json"

    def key(*loras: tuple[str, float]) -> bytes:
        applied = tuple(Lora(identity.content_hash(adapters[name], memo), scale) for name, scale in loras)
        return key_under(replace(PLAIN_CONTEXT, loras=applied))

    put = key(("a", 1.0))
    others = [
        key(),
        key(("b", 1.0)),
        key(("a", 0.5)),
        key(("a", 1.0), ("b", 1.0)),
        key(("b", 1.0), ("a", 1.0)),
    ]
    assert key(("a", 1.0)) == put
    adapters["a"].write_bytes(b"adapter A")  # trained again, under the old name
    others.append(key(("a", 1.0)))
    assert len({put, *others}) == 1 + len(others)


PROMPT = "A prompt that is long enough to be worth a row of its own, and then some more of it. " * 3


def test_case_a09_rows_of_one_adapter_serve_no_other(
    tiny_models: dict[str, Path], tmp_path: Path, cache: Cache, worker: MakeLlama
) -> None:
    path, other = tiny.build_lora(tmp_path / "a.gguf", seed=1), tiny.build_lora(tmp_path / "b.gguf", seed=2)
    seen: list[Any] = []

    def asked(**lora: Any) -> str:
        answer = ask(worker(tiny_models["llama"], cache, **lora), PROMPT)
        assert cache.flush(30_000)
        stock = llama_cpp.Llama(str(tiny_models["llama"]), **OPTIONS, **lora)
        assert largest_difference(answer.logits, cold_logits(stock, answer.tokens, answer.pieces)) == 0
        if answer.report.cache_hit_kind == "cold":
            assert all(largest_difference(answer.logits, before) > 0.01 for before in seen)
            seen.append(answer.logits)
        return answer.report.cache_hit_kind

    assert asked(lora_path=str(path)) == "cold"
    assert asked() == asked(lora_path=str(other)) == asked(lora_path=str(path), lora_scale=0.5) == "cold"
    assert asked(lora_path=str(path)) == "exact"
    before = path.stat()
    tiny.build_lora(path, seed=3)  # trained again, under the old name
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert asked(lora_path=str(path)) == "cold"
