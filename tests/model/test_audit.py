"""Self-audit: a row is what its record makes, or it is served to nobody any more."""

from __future__ import annotations

import json
import logging
import mmap
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from crc32c import crc32c
from model.cold import Answer, ask, cold_logits, largest_difference
from model.conftest import OPTIONS, SMALL, MakeLlama
from model.test_shared_llama import LONG, OTHER, counters
from msgspec.structs import replace
from support import eventually

import shmcache
from shmcache import Cache, kvc
from shmcache.check import check
from shmcache.errors import ConfigError
from shmcache.protocol import Tier
from shmcache.tiers.base import file_name
from shmcache.tools.main import main
from shmcache.workers import SharedLlama

ALWAYS = {"audit_rate": 1.0}


@pytest.fixture
def other_cache(cache: Cache, namespace: str) -> Iterator[Cache]:
    with shmcache.attach(namespace) as attached:
        yield attached


def never_cached(path: Path, answer: Answer, **options: Any) -> float:
    stock = llama_cpp.Llama(str(path), **OPTIONS, **options)
    return largest_difference(answer.logits, cold_logits(stock, answer.tokens, answer.pieces))


def alter(cache: Cache, key: bytes) -> Path:
    """Change a byte of a row's state and repair its sums, as nothing but a bad worker would leave it."""
    path = cache.connection.tier_path(Tier.RAM_FILE) / file_name(key)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as slab:
        with memoryview(slab) as view:
            image = kvc.parse(view)
            offset, length = image.payload_offset, len(image.payload)
            meta, pieces, ids = image.meta, image.pieces, bytes(image.token_ids)
            image.payload.release()
            image.token_ids.release()
        at = offset + length - 1 if meta.n_swa else offset + length // 2
        slab[at] ^= 0x40
        sum_ = crc32c(slab[offset:])
        head = kvc.encode_head(meta, pieces, memoryview(ids), length, sum_, payload_offset=offset)
        slab[: len(head)] = head
    return path


def longest(cache: Cache, llama: SharedLlama, prompt: str) -> bytes:
    """Key of the longest row that the prompt begins with."""
    assert cache.flush(30_000)
    assert llama._author is not None
    text = llama._renderer.render(llama.tokenize(prompt.encode())).text
    walk = shmcache.key.PrefixWalk(llama._author.identity.seed, text)
    hit = next(iter(cache.candidates(walk, len(text))))
    return hit.image.meta.key


@pytest.mark.parametrize(
    ("kind", "options"),
    [("llama", {}), ("gemma3", {"swa_full": False}), ("mamba", {}), ("lfm2", {"flash_attn": True})],
)
def test_good_rows_are_found_good(
    kind: str, options: dict[str, Any], tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    gates = replace(SMALL, continued_interval=8)
    saving, auditing = (worker(tiny_models[kind], cache, gates=gates, **ALWAYS, **options) for _ in range(2))
    first = ask(saving, LONG, max_tokens=20)
    assert cache.flush(30_000)
    prompts = [LONG, LONG + first.text + OTHER, LONG + first.text[:9] + OTHER, LONG + first.text + OTHER * 2]
    for number, prompt in enumerate(prompts):
        answer = ask(auditing, prompt)
        assert answer.report.source == "shared"
        assert answer.report.prefilled_tokens + answer.report.reused_tokens >= answer.report.prompt_tokens
        assert answer.report.prefilled_tokens < answer.report.prompt_tokens, "the audit's are not counted"
        assert counters(cache)["audits"] == number + 1
        assert never_cached(tiny_models[kind], answer, **options) == 0
        auditing.reset()
        assert cache.flush(30_000)
    assert "audits_differed" not in counters(cache)


def test_good_rows_of_a_real_model_are_found_good(smollm2: Path, cache: Cache, worker: MakeLlama) -> None:
    saving, auditing = (worker(smollm2, cache, **ALWAYS) for _ in range(2))
    chat = [{"role": "system", "content": LONG}, {"role": "user", "content": "Which sea?"}]
    cold = ask(saving, chat)
    assert cache.flush(30_000)
    again = ask(auditing, chat)
    assert (again.report.cache_hit_kind, again.report.source) == ("exact", "shared")
    assert largest_difference(again.logits, cold.logits) == 0
    following = [*chat, {"role": "assistant", "content": cold.text}, {"role": "user", "content": "And then?"}]
    auditing.reset()
    assert ask(auditing, following).report.source == "shared"
    assert counters(cache)["audits"] == 2
    assert "audits_differed" not in counters(cache)


@pytest.mark.parametrize(("kind", "options"), [("llama", {}), ("gemma3", {"swa_full": False}), ("mamba", {})])
def test_a_row_that_was_altered_is_served_to_nobody_and_kept_to_be_looked_at(  # noqa: PLR0917  fixtures
    kind: str,
    options: dict[str, Any],
    tiny_models: dict[str, Path],
    cache: Cache,
    other_cache: Cache,
    namespace: str,
    worker: MakeLlama,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saving = worker(tiny_models[kind], cache, **options)
    auditing = worker(tiny_models[kind], other_cache, **ALWAYS, **options)
    ask(saving, LONG, max_tokens=1)
    key = longest(cache, saving, LONG)
    path = alter(cache, key)
    assert not [finding for finding in check(namespace) if finding.kind == "slab"], "its sums are right"

    answer = ask(auditing, LONG)
    assert answer.report.source == "shared"
    assert never_cached(tiny_models[kind], answer, **options) == 0, "answered from what was computed anew"
    assert counters(other_cache)["audits_differed"] == 1
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    prompt_key = longest_text_key(auditing, LONG)
    assert key.hex() in record.getMessage()
    assert prompt_key in record.getMessage()

    assert eventually(lambda: cache.get(key) is None)
    assert eventually(path.with_suffix(".aside").is_file)
    after = ask(saving, LONG + OTHER)
    assert never_cached(tiny_models[kind], after, **options) == 0
    assert key.hex() in {finding.name for finding in check(namespace) if finding.kind == "aside"}
    assert main(["ls", "--namespace", namespace, "--json"]) == 0
    assert key.hex() in {row["key"] for row in json.loads(capsys.readouterr().out) if row["is_aside"]}
    assert main(["evict", "--namespace", namespace, "--key", key.hex()]) == 0
    assert not path.with_suffix(".aside").exists()


def longest_text_key(llama: SharedLlama, prompt: str) -> str:
    assert llama._author is not None
    text = llama._renderer.render(llama.tokenize(prompt.encode())).text
    return shmcache.key.row_address(llama._author.identity.seed, text).key.hex()


@pytest.mark.parametrize(
    "other", [{"n_ubatch": 64}, {"n_threads_batch": 2}, {"n_threads": 2, "n_threads_batch": 2}]
)
def test_a_worker_that_would_not_make_a_row_alike_does_not_audit_it(
    other: dict[str, int], tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    saving = worker(tiny_models["llama"], cache)
    auditing = worker(tiny_models["llama"], cache, **ALWAYS, **other)
    ask(saving, LONG, max_tokens=1)
    assert cache.flush(30_000)
    assert ask(auditing, LONG).report.source == "shared"
    assert "audits" not in counters(cache)


def test_rows_of_another_machine_are_not_audited(
    tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving, auditing = worker(tiny_models["llama"], cache), worker(tiny_models["llama"], cache, **ALWAYS)
    ask(saving, LONG, max_tokens=1)
    assert cache.flush(30_000)
    monkeypatch.setattr("platform.node", lambda: "elsewhere")
    assert ask(auditing, LONG).report.source == "shared"
    assert "audits" not in counters(cache)


def test_an_audit_that_fails_is_none(
    tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving, auditing = worker(tiny_models["llama"], cache), worker(tiny_models["llama"], cache, **ALWAYS)
    cold = ask(saving, LONG)
    assert cache.flush(30_000)
    decode, failures = auditing._ctx.decode, iter([True])

    def fail_once(batch: Any) -> None:
        if next(failures, False):
            raise RuntimeError("llama_decode returned -3")
        decode(batch)

    monkeypatch.setattr(auditing._ctx, "decode", fail_once)
    answer = ask(auditing, LONG)
    assert (answer.report.cache_hit_kind, answer.report.source) == ("exact", "shared")
    assert largest_difference(answer.logits, cold.logits) == 0
    assert "audits" not in counters(cache)


def test_a_share_of_the_hits_is_audited(
    tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving, auditing = (
        worker(tiny_models["llama"], cache),
        worker(tiny_models["llama"], cache, audit_rate=0.3),
    )
    ask(saving, LONG, max_tokens=1)
    assert cache.flush(30_000)
    drawn = iter([0.29, 0.31, 0.0, 0.99])
    monkeypatch.setattr(random, "random", lambda: next(drawn))
    for expected in (1, 1, 2, 2):
        assert ask(auditing, LONG, max_tokens=1).report.source == "shared"
        assert counters(cache)["audits"] == expected
        auditing.reset()


@pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan")])
def test_a_rate_that_is_no_share_is_refused(rate: float, tiny_models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=f"audit_rate \\({rate}\\)"):
        SharedLlama(str(tiny_models["llama"]), audit_rate=rate, verbose=False)
