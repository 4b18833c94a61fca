"""A02: a corrupt saved state was rejected, yet half of it stayed, and later answers went empty."""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from model.cold import Answer, ask, cold_logits, largest_difference
from model.conftest import OPTIONS, MakeLlama
from msgspec.structs import replace

from shmcache import Cache, SavePlan
from shmcache.kvc import Image, Meta, Reason, head_bytes
from shmcache.workers import SharedLlama

PROMPT = "A prompt that is long enough to be worth a row of its own, and then some more of it. " * 3
UNRELATED = "Nothing of the kind."


def answer_of(llama: SharedLlama, prompt: str, stock: llama_cpp.Llama) -> Answer:
    """Ask, and compare with an empty context."""
    answer = ask(llama, prompt)
    assert largest_difference(answer.logits, cold_logits(stock, answer.tokens, answer.pieces)) == 0
    return answer


def publish(cache: Cache, meta: Meta, image: Image, payload: bytes) -> None:
    """Publish a row with another payload, checksums and all: what a faulty worker would leave."""
    plan = SavePlan(
        address=None,  # as for a reply: the row itself says its key
        text_bytes=meta.text_bytes,
        payload_offset=head_bytes(meta.token_count, len(image.pieces)),
        payload_bytes=len(payload),
    )
    [slab] = cache.reserve([plan], None, cache.forget).slabs
    assert slab is not None
    with slab.payload(len(payload)) as target:
        target[:] = payload
    slab.save(meta, image.pieces, memoryview(array("I", image.token_ids.tolist())))
    assert slab.wait(30_000)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba", "lfm2"])
def test_case_a02_a_truncated_row_is_a_miss_once_and_leaves_nothing(
    kind: str, tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    stock = llama_cpp.Llama(str(tiny_models[kind]), **OPTIONS)
    saving, reading = (worker(tiny_models[kind], cache) for _ in range(2))
    saved = ask(saving, PROMPT)
    assert cache.flush(30_000)
    for row in cache.connection.names.tier("ram_file", 0).glob("*.kvc"):
        os.truncate(row, row.stat().st_size // 2)

    missed = answer_of(reading, PROMPT, stock)
    assert missed.report.cache_hit_kind == "cold"
    assert largest_difference(missed.logits, saved.logits) == 0
    assert cache.statistics().counters["corrupt_rows"] >= 1
    answer_of(reading, UNRELATED, stock)

    assert cache.flush(30_000)
    corrupt = cache.statistics().counters["corrupt_rows"]
    again = answer_of(worker(tiny_models[kind], cache), PROMPT, stock)
    assert again.report.cache_hit_kind == "exact"  # the miss has saved it anew
    assert cache.statistics().counters["corrupt_rows"] == corrupt


@pytest.mark.parametrize("fault", ["half a state", "another count", "other tokens"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba"])
def test_case_a02_a_row_that_llama_cpp_refuses_is_dropped_once_and_answered_cold(
    kind: str, fault: str, tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    stock = llama_cpp.Llama(str(tiny_models[kind]), **OPTIONS)
    author = worker(tiny_models[kind], cache)
    image, meta = fresh_row(author, cache)
    payload = bytes(image.payload)
    if fault == "half a state":
        payload = payload[: len(payload) // 2]
        meta = replace(meta, layout=())
    elif fault == "another count":
        ids = array("I", image.token_ids.tolist()[:-1])
        meta = replace(meta, token_count=len(ids), layout=())
        piece = image.pieces[-1]
        pieces = (*image.pieces[:-1], replace(piece, length=piece.length - 1))
        image = replace(image, token_ids=memoryview(ids), pieces=pieces)
    else:
        ids = array("I", [7] * meta.token_count)
        image = replace(image, token_ids=memoryview(ids))
    publish(cache, meta, image, payload)

    reading = worker(tiny_models[kind], cache)
    missed = answer_of(reading, PROMPT, stock)
    assert missed.report.cache_hit_kind == "cold"
    assert cache.statistics().counters["restore_refused"] == 1
    answer_of(reading, UNRELATED, stock)
    assert cache.flush(30_000)
    assert answer_of(worker(tiny_models[kind], cache), PROMPT, stock).report.cache_hit_kind == "exact"
    assert cache.statistics().counters["restore_refused"] == 1


def fresh_row(llama: SharedLlama, cache: Cache) -> tuple[Image, Meta]:
    """What a worker would publish for the prompt but for its last token; nothing is published."""
    tokens: list[int] = llama.tokenize(PROMPT.encode())[:-1]
    assert llama._author is not None
    llama.reset()
    llama.eval(tokens)
    trail: Any = llama._cells.trail
    state = bytearray(llama._state.size_bytes())
    llama._state.copy_out(memoryview(state))
    meta = llama._author.meta(trail, Reason.COLD, llama._state.pos_min())
    image = Image(
        meta=meta,
        pieces=tuple(trail.pieces),
        token_ids=memoryview(array("I", tokens)),
        payload=memoryview(state),
        payload_crc32c=0,
        payload_offset=0,
    )
    return image, meta
