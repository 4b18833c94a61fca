"""Which restores are exact: the table in INTERNALS.md, made from the cases that the tests run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from model import tiny
from model.cold import ask, largest_difference
from model.conftest import MakeLlama
from model.test_exactness import CASES
from model.test_shared_llama import LONG
from support import Namespace

import shmcache
from shmcache import client
from shmcache.protocol import Tier
from shmcache.tools.demo import CoordinatorProcess

INTERNALS = Path(__file__).parents[2] / "INTERNALS.md"
OTHER_TIERS = ("ram", "disk")
TIER_OPTIONS: dict[str, Any] = {"flash_attn": True}
TIER_SETTING = "flash-f16"  # the one that the other tiers are tried with


@pytest.fixture
def all_tiers(namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(client, "RESERVE_TIMEOUT_MS", 10_000)
    process = CoordinatorProcess(
        f"--namespace={namespace}",
        "--ram-bytes=64M",
        "--ram-file-bytes=64M",
        f"--disk-dir={tmp_path}",
        "--max-rows=1024",
    )
    yield namespace
    process.stop()


@pytest.mark.parametrize("tier", OTHER_TIERS)
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_row_of_any_tier_restores_to_the_same_bits(
    kind: str, tier: str, all_tiers: str, tiny_models: dict[str, Path], worker: MakeLlama
) -> None:
    with shmcache.attach(all_tiers, tier=tier) as cache:
        saving, restoring = (worker(tiny_models[kind], cache, **TIER_OPTIONS) for _ in range(2))
        cold = ask(saving, LONG)
        assert cache.flush(30_000)
        assert cold.report.finish_key is not None
        row = cache.get(bytes.fromhex(cold.report.finish_key))
        assert row is not None
        assert row.found.row.tier == Tier[tier.upper()]
        row.close()
        warm = ask(restoring, LONG)
        assert (warm.report.cache_hit_kind, warm.report.source) == ("exact", "shared")
        assert largest_difference(warm.logits, cold.logits) == 0
        for llama in (saving, restoring):
            llama.close()


@pytest.mark.parametrize("tier", ["ram_file", "disk"])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_row_restores_to_the_same_bits_after_a_restart(  # noqa: PLR0917  fixtures
    kind: str, tier: str, space: Namespace, tiny_models: dict[str, Path], worker: MakeLlama, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    space.start(f"--disk-dir={tmp_path}")
    cache = space.cache(tier=tier)
    cold = ask(worker(tiny_models[kind], cache, **TIER_OPTIONS), LONG)
    assert cache.flush(30_000)
    space.kill()
    space.start(f"--disk-dir={tmp_path}")
    other = space.cache(tier=tier)
    warm = ask(worker(tiny_models[kind], other, **TIER_OPTIONS), LONG)
    assert (warm.report.cache_hit_kind, warm.report.source) == ("exact", "shared")
    assert largest_difference(warm.logits, cold.logits) == 0


def table() -> str:
    """The table, from the cases of test_exactness (ram_file) and of the test above."""
    lines = ["| model and setting | ram_file | ram | disk |", "|---|---|---|---|"]
    for case in CASES:
        kind, setting = str(case.id).split("-", 1)
        also = "exact" if kind in tiny.KINDS and setting == TIER_SETTING else "the same bytes"
        lines.append(f"| {kind}, {setting} | exact | {also} | {also} |")
    return "\n".join(lines)


def test_the_table_in_internals_is_the_one_that_the_tests_make() -> None:
    assert table() in INTERNALS.read_text(encoding="utf-8"), f"put this there:\n{table()}"
