"""A09: K/V computed under one adapter served a request under another, or under its successor."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from support import PLAIN_CONTEXT

from shmcache import identity
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
