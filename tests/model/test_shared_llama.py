"""SharedLlama as its users meet it: a drop-in that says what it did, and harms nobody when it cannot."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from model import tiny
from model.cold import Answer, ask, cold_logits, largest_difference
from model.conftest import OPTIONS, SMALL, MakeLlama
from msgspec.structs import replace

import shmcache
from shmcache import Cache, client
from shmcache.config import Gates
from shmcache.errors import ConfigError, StaleGenerator
from shmcache.workers import SharedLlama
from shmcache.workers.request import Request
from shmcache.workers.shared_llama import REPLY_TOKENS

LONG = "A rather long prompt that speaks of this and of that, and then of the sea. " * 4
OTHER = "Nothing that was ever asked before. " * 6


@pytest.fixture
def tiny_llama(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["llama"]


@pytest.fixture
def stock(tiny_llama: Path) -> llama_cpp.Llama:
    return llama_cpp.Llama(str(tiny_llama), **OPTIONS)


def assert_equals_cold(answer: Answer, stock: llama_cpp.Llama) -> None:
    assert largest_difference(answer.logits, cold_logits(stock, answer.tokens, answer.pieces)) == 0


def counters(cache: Cache) -> dict[str, int]:
    return {name: value for name, value in cache.statistics().counters.items() if value}


def saying(llama: SharedLlama, *pieces: bytes) -> dict[str, Any]:
    """Options of a completion that make it reply with these tokens, whatever the model would say."""
    vocabulary = {llama._renderer.plain(token): token for token in range(llama.n_vocab())}
    script = chain([vocabulary[piece] for piece in pieces], repeat(llama.token_eos()))

    def choose(_: np.ndarray, scores: np.ndarray) -> np.ndarray:
        scores[:] = -1e9
        scores[next(script)] = 0
        return scores

    return {
        "logits_processor": llama_cpp.LogitsProcessorList([choose]),
        "max_tokens": len(pieces) + 1,
        "temperature": 0.0,
    }


def letters(text: str) -> list[bytes]:
    return [character.encode() for character in text]


# ---- a drop-in


def test_a_short_prompt_is_answered_as_stock_llama_answers_it(
    tiny_llama: Path, stock: llama_cpp.Llama, cache: Cache, worker: MakeLlama
) -> None:
    llama = worker(tiny_llama, cache)
    ours = llama.create_completion("The sea", max_tokens=12, temperature=0.0, seed=1)
    theirs = stock.create_completion("The sea", max_tokens=12, temperature=0.0, seed=1)
    assert ours.pop("shmcache")["cache_hit_kind"] == "cold"
    for answer in (ours, theirs):
        del answer["id"], answer["created"]
    assert ours == theirs


def test_every_form_of_call_reports(tiny_llama: Path, cache: Cache, worker: MakeLlama) -> None:
    llama = worker(tiny_llama, cache)
    messages = [{"role": "user", "content": LONG}]
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0}

    called = llama(LONG, **options)["shmcache"]
    assert llama.last_report.finish_key == called["finish_key"]
    *first, last = llama.create_completion(LONG, stream=True, **options)
    assert not any("shmcache" in chunk for chunk in first)
    assert last["shmcache"]["cache_hit_kind"] == "exact"
    chat = llama.create_chat_completion(messages, **options)["shmcache"]
    assert chat["cache_hit_kind"] == "cold"
    *first, last = llama.create_chat_completion(messages, stream=True, **options)
    assert not any("shmcache" in chunk for chunk in first)
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["shmcache"]["cache_hit_kind"] == "exact"
    assert last["shmcache"]["prompt_tokens"] == chat["prompt_tokens"]
    assert last["shmcache"]["prefilled_tokens"] == 1

    tokens = llama.generate(llama.tokenize(LONG.encode()), temp=0.0)
    next(tokens)
    assert llama.last_report.cache_hit_kind == "exact"


def test_a_stream_says_what_a_whole_answer_says(tiny_llama: Path, cache: Cache, worker: MakeLlama) -> None:
    llama = worker(tiny_llama, cache)
    options: dict[str, Any] = {"max_tokens": 30, "temperature": 0.0}
    whole = llama.create_completion(LONG, **options)["choices"][0]["text"]
    llama.reset()
    stream = llama.create_completion(LONG, stream=True, **options)
    assert "".join(chunk["choices"][0]["text"] for chunk in stream) == whole


def test_an_empty_prompt_is_answered(tiny_llama: Path, smollm2: Path, worker: MakeLlama) -> None:
    for path in (tiny_llama, smollm2):  # the one adds a BOS, the other does not
        answer = worker(path).create_completion("", max_tokens=3, temperature=0.0)
        assert answer["usage"]["completion_tokens"] in (3, 4)
        assert answer["shmcache"]["prefilled_tokens"] == 1
        assert answer["shmcache"]["cache_hit_kind"] == "cold"


def test_a_prompt_longer_than_the_context_fails_as_in_llama_cpp(
    tiny_llama: Path, cache: Cache, worker: MakeLlama
) -> None:
    llama = worker(tiny_llama, cache, n_ctx=256)
    with pytest.raises(ValueError, match="exceed context window of 256"):
        llama.create_completion(LONG * 4)
    assert ask(llama, LONG[:100]).report.cache_hit_kind == "cold"


def test_the_context_ends_where_the_smaller_bound_says(tiny_llama: Path, worker: MakeLlama) -> None:
    llama = worker(tiny_llama, n_ctx=100)  # llama.cpp makes 256 cells of it, llama_cpp's arrays have 100
    with pytest.raises(ValueError, match="exceed context window"):
        llama.create_completion(LONG[:150])
    answer = llama.create_completion(LONG[:80], max_tokens=None, temperature=0.0)
    assert answer["usage"]["total_tokens"] == 100


def test_a_pickled_model_is_made_again_with_its_cache_settings(
    tiny_llama: Path, namespace: str, worker: MakeLlama
) -> None:
    llama = worker(tiny_llama, namespace, tenant="acme", fingerprint_mode="gguf_chunked")
    again = pickle.loads(pickle.dumps(llama))
    assert again.__getstate__() == llama.__getstate__()
    again.close()


def test_a_wrong_namespace_is_refused_and_nothing_is_left(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="Not_This"):
        SharedLlama(str(tiny_llama), cache="Not_This", verbose=False)
    with pytest.raises(ValueError, match="does not exist"):
        SharedLlama("/no/such/model.gguf", verbose=False)
    assert "Exception ignored" not in capsys.readouterr().err


def test_a_fixed_seed_draws_the_same_samples_warm_and_cold(
    tiny_llama: Path, cache: Cache, worker: MakeLlama
) -> None:
    samplers: list[dict[str, Any]] = [
        {"temperature": 0.9, "top_k": 40},
        {"temperature": 0.9, "mirostat_mode": 1},
        {"temperature": 0.9, "mirostat_mode": 2},
        {"temperature": 0.7, "repeat_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"temperature": 1.2, "top_k": 0, "top_p": 0.8, "min_p": 0.02, "typical_p": 0.9},
        {"temperature": 1.0, "logit_bias": {"97": 2.0, "98": -100.0}},
        {"temperature": 0.9, "grammar": llama_cpp.LlamaGrammar.from_string("root ::= [a-z]+", verbose=False)},
    ]
    for number, sampler in enumerate(samplers):
        prompt = f"{number}. {LONG}"
        texts = []
        for llama in (worker(tiny_llama, cache), worker(tiny_llama, cache)):
            answer = llama.create_completion(prompt, max_tokens=12, seed=7, **sampler)
            assert cache.flush(30_000)
            texts.append(answer["choices"][0]["text"])
        assert answer["shmcache"]["cache_hit_kind"] == "exact"
        assert texts[0] == texts[1]


# ---- what is restored, and from where


BYTES = [
    pytest.param("bpe", list(b"NUL \x00 and \x00\x00 here. " * 12), id="NUL"),
    pytest.param("bpe", list(b"\xff\xfe is no UTF-8, and \xc3( neither. " * 8), id="invalid UTF-8"),
    pytest.param(
        "bpe", list("日本の首都はどこですか。€uro ".encode() * 8), id="characters in several tokens"
    ),
    pytest.param(
        "spm", [4 + byte for byte in "日本 €\x00\xff ".encode("latin-1", "replace") * 30], id="bytes of spm"
    ),
]


@pytest.mark.parametrize(("vocabulary", "tokens"), BYTES)
def test_prompts_of_any_bytes_are_rows_like_others(
    vocabulary: str, tokens: list[int], tmp_path: Path, cache: Cache, worker: MakeLlama
) -> None:
    path = tiny.build("llama", tmp_path, vocabulary=vocabulary)
    saving, restoring = worker(path, cache), worker(path, cache)
    first = ask(saving, tokens)
    assert cache.flush(30_000)
    again = ask(restoring, tokens)
    assert (again.report.cache_hit_kind, again.report.source) == ("exact", "shared")
    assert largest_difference(again.logits, first.logits) == 0
    for cut in (1, 2, 3):  # inside a character, where there are some
        shorter = ask(restoring, [*tokens[:-cut], 65])
        assert_equals_cold(shorter, llama_cpp.Llama(str(path), **OPTIONS))
        assert shorter.tokens[: len(tokens) - cut] == tokens[:-cut]


def test_a_prompt_is_tokenised_once_and_what_is_decoded_spells_it(
    smollm2: Path, cache: Cache, worker: MakeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = worker(smollm2, cache), worker(smollm2, cache)
    tokenise, tokenised = llama_cpp.llama_tokenize, [0]

    def count(vocabulary: Any, text: bytes, size_bytes: int, *rest: Any) -> int:
        tokenised[0] += size_bytes
        return tokenise(vocabulary, text, size_bytes, *rest)

    chat = [{"role": "system", "content": LONG}, {"role": "user", "content": "Which sea is it?"}]
    monkeypatch.setattr(llama_cpp, "llama_tokenize", count)
    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_tokenize", count)
    said = ""
    for llama, more in ((one, ""), (other, ""), (other, "And which"), (one, "And whichever of them?")):
        if more:
            chat = [*chat, {"role": "assistant", "content": said}, {"role": "user", "content": more}]
        tokenised[0] = 0
        answer = ask(llama, chat)
        assert cache.flush(30_000)
        said = answer.text
        prompt = b"".join(
            f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n".encode() for message in chat
        )
        prompt += b"<|im_start|>assistant\n"
        behind_seam = answer.tokens[: answer.report.prompt_tokens] != llama.tokenize(prompt, special=True)
        assert tokenised[0] - len(prompt) <= len(prompt) + 20 + (len(more) + 100 if behind_seam else 0)
        spelled = llama._renderer.render(llama.tokenize(prompt, add_bos=False, special=True)).text
        assert llama._cells.trail is not None
        assert bytes(llama._cells.trail.text).startswith(spelled)


def test_a_model_that_is_loaded_again_is_known_by_its_content(
    tiny_models: dict[str, Path], tmp_path: Path, cache: Cache, worker: MakeLlama
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_models["llama"].read_bytes())
    first = worker(path, cache)
    ask(first, LONG)
    assert cache.flush(30_000)
    first.close()
    again = worker(path, cache)
    assert ask(again, LONG).report.cache_hit_kind == "exact"
    again.close()
    path.unlink()
    path.write_bytes(tiny.build("llama", tmp_path, seed=3).read_bytes())
    assert ask(worker(path, cache), LONG).report.cache_hit_kind == "cold"


def test_a_row_that_would_not_be_exact_is_passed_over_and_counted(
    tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    saving, restoring = (worker(tiny_models["mamba"], cache) for _ in range(2))
    said = ask(saving, LONG)
    assert cache.flush(30_000)
    whole = ask(restoring, saving.detokenize(said.tokens[1:]).decode())  # its finish row, to the last token
    assert whole.report.cache_hit_kind == "partial"
    assert counters(cache)["passed_over_whole"] == 1
    assert "passed_over_seam" not in counters(cache)


def test_the_longest_of_live_and_shared_rows_is_used(
    tiny_llama: Path, stock: llama_cpp.Llama, cache: Cache, worker: MakeLlama
) -> None:
    one, other = worker(tiny_llama, cache), worker(tiny_llama, cache)
    first = ask(one, LONG)
    assert cache.flush(30_000)
    ask(other, LONG[:200])  # live in `other`: shorter than what `one` has saved
    longer = ask(other, LONG + first.text + OTHER)
    assert (longer.report.source, longer.report.cache_hit_kind) == ("shared", "partial")
    assert longer.report.reused_tokens == len(first.tokens)
    again = ask(other, LONG + first.text + OTHER)
    assert (again.report.source, again.report.cache_hit_kind) == ("live", "exact")
    for answer in (longer, again):
        assert_equals_cold(answer, stock)


def test_a_conversation_without_a_cache_goes_on_in_its_own_cells(
    tiny_llama: Path, stock: llama_cpp.Llama, worker: MakeLlama
) -> None:
    llama = worker(tiny_llama)
    first = ask(llama, LONG)
    second = ask(llama, LONG + first.text + OTHER)
    assert (second.report.source, second.report.cache_hit_kind) == ("live", "partial")
    assert second.report.reused_tokens == len(first.tokens)
    assert_equals_cold(second, stock)


def test_prefilled_and_reused_tokens_are_the_whole_prompt(
    tiny_llama: Path, cache: Cache, worker: MakeLlama
) -> None:
    for verbose in (False, True):  # verbose, llama_cpp resets llama.cpp's counters
        llama = worker(tiny_llama, cache, verbose=verbose)
        for prompt in (LONG, LONG, LONG[:-20] + OTHER, "x", OTHER + LONG):
            report = ask(llama, prompt).report
            assert report.prefilled_tokens + report.reused_tokens == report.prompt_tokens
            assert report.prefilled_tokens >= 1


def test_rows_made_with_other_threads_restore_to_the_bits_of_their_record(
    tiny_llama: Path, cache: Cache, worker: MakeLlama
) -> None:
    options = {"flash_attn": True}
    two = worker(tiny_llama, cache, n_threads=2, n_threads_batch=2, **options)
    one = worker(tiny_llama, cache, **options)
    prompt = LONG * 3
    first = ask(two, prompt)
    assert cache.flush(30_000)
    second = ask(one, prompt + first.text + OTHER)
    assert {piece.n_threads for piece in second.pieces} == {1, 2}
    assert second.report.source == "shared"
    assert_equals_cold(second, llama_cpp.Llama(str(tiny_llama), **OPTIONS, **options))


def test_rows_of_another_tenant_are_never_used(tiny_llama: Path, cache: Cache, worker: MakeLlama) -> None:
    ask(worker(tiny_llama, cache, tenant="a"), LONG)
    assert cache.flush(30_000)
    for tenant in ("b", None, ""):
        assert ask(worker(tiny_llama, cache, tenant=tenant), LONG).report.cache_hit_kind == "cold"
    assert ask(worker(tiny_llama, cache, tenant="a"), LONG).report.cache_hit_kind == "exact"


def test_an_anchor_beyond_the_bound_is_not_saved(tiny_llama: Path, cache: Cache, worker: MakeLlama) -> None:
    gates = Gates(min_tokens=64, cold_min_tokens=64, boundary_align_tokens=64, cold_max_tokens=150)
    one, other = (worker(tiny_llama, cache, gates=gates) for _ in range(2))
    ask(one, LONG, max_tokens=1)
    assert cache.flush(30_000)
    report = ask(other, LONG, max_tokens=1).report
    assert report.cache_hit_kind == "cold"
    assert "save_handed_over" not in counters(cache)


# ---- the reply that is saved


def test_behind_a_stop_string_the_row_ends_where_the_client_stopped_reading(
    tiny_llama: Path, stock: llama_cpp.Llama, cache: Cache, worker: MakeLlama
) -> None:
    llama = worker(tiny_llama, cache)
    script = saying(llama, *letters("Yes, it is.STOP and more"))
    answer = llama.create_completion(LONG, stop=["STOP"], **script)
    assert answer["choices"][0]["text"] == "Yes, it is."
    key = bytes.fromhex(answer["shmcache"]["finish_key"])
    assert cache.flush(30_000)
    row = cache.get(key)
    assert row is not None
    text = llama.tokenize(LONG.encode()), letters("Yes, it is.")
    assert row.image.meta.token_count == len(text[0]) + len(text[1])
    following = ask(worker(tiny_llama, cache), LONG + "Yes, it is." + OTHER)
    assert following.report.reused_tokens == row.image.meta.token_count
    assert_equals_cold(following, stock)
    assert ask(llama, LONG + "Yes, it is." + OTHER).report.cache_hit_kind == "exact"


def test_a_character_that_is_not_complete_is_not_in_the_row(
    tiny_llama: Path, stock: llama_cpp.Llama, cache: Cache, worker: MakeLlama
) -> None:
    llama = worker(tiny_llama, cache)
    euro = "€".encode()
    script = saying(llama, b"5", euro[:1], euro[1:2], euro[2:], b"!", euro[:1], euro[1:2])
    answer = llama.create_completion(LONG, **script)
    assert answer["choices"][0]["text"] == "5€!"
    assert cache.flush(30_000)
    row = cache.get(bytes.fromhex(answer["shmcache"]["finish_key"]))
    assert row is not None
    assert bytes(row.image.token_ids.tolist()[-5:]) == "5€!".encode()
    following = ask(worker(tiny_llama, cache), LONG + "5€! And then?")
    assert following.report.reused_tokens == row.image.meta.token_count
    assert_equals_cold(following, stock)


def test_a_reply_of_many_tokens_that_reads_as_fewer_goes_on_with_its_own(
    tiny_llama: Path, stock: llama_cpp.Llama, cache: Cache, worker: MakeLlama
) -> None:
    """B02: the same text, tokenised again, has other ids and another count."""
    llama = worker(tiny_llama, cache)
    reply = b"the the the."
    llama.create_completion(LONG, **saying(llama, *letters(reply.decode())))
    assert cache.flush(30_000)
    prompt = LONG + reply.decode() + OTHER
    resumed, live = ask(worker(tiny_llama, cache), prompt), ask(llama, prompt[:-1])
    asked = llama.tokenize(prompt.encode())
    assert resumed.report.prompt_tokens == len(asked)
    assert resumed.report.reused_tokens + resumed.report.prefilled_tokens > len(asked)
    assert resumed.tokens[: len(asked)] != asked
    for answer in (resumed, live):
        assert answer.report.cache_hit_kind == "partial"
        assert_equals_cold(answer, stock)


def test_a_reply_longer_than_its_slab_was_made_for_is_saved(
    tiny_llama: Path, stock: llama_cpp.Llama, cache: Cache, worker: MakeLlama
) -> None:
    llama = worker(tiny_llama, cache)
    reply = "And so on. " * 28
    assert len(reply) > REPLY_TOKENS
    llama.create_completion(LONG, **saying(llama, *letters(reply)))
    assert cache.flush(30_000)
    following = ask(worker(tiny_llama, cache), LONG + reply + OTHER)
    assert following.report.reused_tokens == len(llama.tokenize(LONG.encode())) + len(reply)
    assert_equals_cold(following, stock)


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_behind_a_longer_row_ends_where_the_context_does(
    stream: bool, tiny_llama: Path, cache: Cache, worker: MakeLlama
) -> None:
    llama = worker(tiny_llama, cache, n_ctx=640)
    llama.create_completion(LONG, **saying(llama, *letters("the the the.")))
    prompt = LONG + "the the the." + OTHER
    letters_only = llama_cpp.LlamaGrammar.from_string("root ::= [a-z]*", verbose=False)
    options: dict[str, Any] = {"max_tokens": None, "temperature": 0.0, "grammar": letters_only}
    answer = llama.create_completion(prompt, stream=stream, **options)
    *first, last = answer if stream else [answer]
    text = "".join(chunk["choices"][0]["text"] for chunk in [*first, last])
    assert last["choices"][0]["finish_reason"] == "length"
    report = last["shmcache"]
    joined = report["reused_tokens"] + report["prefilled_tokens"]
    assert joined > report["prompt_tokens"]
    assert llama.n_tokens == 640
    assert len(text) >= 640 - joined


def test_a_model_that_cannot_be_cut_saves_only_replies_that_were_seen_whole(
    tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    llama = worker(tiny_models["mamba"], cache)
    seen = llama.create_completion(LONG, **saying(llama, *letters("Yes.")))
    assert seen["shmcache"]["finish_key"] is not None
    stopped = llama.create_completion(OTHER, stop=["STOP"], **saying(llama, *letters("Yes.STOP")))
    assert stopped["choices"][0]["text"] == "Yes."
    assert stopped["shmcache"]["finish_key"] is None


def test_a_short_conversation_is_not_saved(tiny_llama: Path, cache: Cache, worker: MakeLlama) -> None:
    llama = worker(tiny_llama, cache, gates=Gates())
    assert ask(llama, LONG).report.finish_key is None
    assert cache.flush(30_000)
    assert "save_handed_over" not in counters(cache)


# ---- what is not tracked


def test_a_loaded_state_is_served_and_not_cached_until_it_is_cleared(
    tiny_llama: Path, stock: llama_cpp.Llama, cache: Cache, worker: MakeLlama
) -> None:
    llama = worker(tiny_llama, cache)
    ask(llama, LONG)
    state = llama.save_state()
    llama.load_state(state)
    text = llama.detokenize(llama._input_ids.tolist()).decode()
    going_on = ask(llama, text + "!", max_tokens=4)
    assert going_on.report.cache_hit_kind == "untracked"
    assert going_on.report.prefilled_tokens < 10
    assert counters(cache)["untracked"] == 1
    assert ask(llama, OTHER).report.cache_hit_kind == "cold"  # another prompt clears it
    llama.load_state(state)
    llama.reset()
    assert_equals_cold(ask(llama, LONG + "?"), stock)


def test_llama_cpps_own_prompt_cache_may_be_used_beside_it(
    tiny_llama: Path, stock: llama_cpp.Llama, cache: Cache, worker: MakeLlama
) -> None:
    llama = worker(tiny_llama, cache)
    llama.set_cache(llama_cpp.LlamaRAMCache())
    first = ask(llama, LONG)
    ask(llama, OTHER)
    again = ask(llama, LONG + first.text[:-1] + OTHER)  # begins with all that llama_cpp has kept
    assert (first.report.cache_hit_kind, again.report.cache_hit_kind) == ("cold", "untracked")
    assert_equals_cold(ask(llama, OTHER + LONG), stock)


def test_cells_that_grew_without_us_are_not_cached(tiny_llama: Path, cache: Cache, worker: MakeLlama) -> None:
    """What an image handler does: decode by itself, move n_tokens, then complete all of input_ids."""
    llama = worker(tiny_llama, cache)
    llama.reset()
    tokens = llama.tokenize(LONG.encode())
    llama.eval(tokens[:-5])
    llama._batch.set_batch(tokens[-5:], llama.n_tokens, False)
    llama._ctx.decode(llama._batch)
    llama.input_ids[llama.n_tokens : llama.n_tokens + 5] = tokens[-5:]
    llama.n_tokens += 5
    answer = ask(llama, llama.input_ids[: llama.n_tokens].tolist())
    assert answer.report.cache_hit_kind == "untracked"
    assert answer.report.finish_key is None
    assert cache.flush(30_000)
    assert "save_handed_over" not in counters(cache)


def test_evaluated_tokens_are_a_row_in_hand(
    tiny_llama: Path, stock: llama_cpp.Llama, worker: MakeLlama
) -> None:
    llama = worker(tiny_llama)
    tokens = llama.tokenize(LONG.encode())
    llama.eval(tokens[:150])
    llama.eval(tokens[150:151])
    answer = ask(llama, tokens)
    assert (answer.report.source, answer.report.reused_tokens) == ("live", 151)
    assert [(piece.length, piece.repeats) for piece in answer.pieces[:3]] == [(64, 1), (86, 1), (1, 1)]
    assert_equals_cold(answer, stock)


def test_edited_cells_are_cleared_before_the_next_prompt(
    tiny_llama: Path, stock: llama_cpp.Llama, worker: MakeLlama
) -> None:
    llama = worker(tiny_llama)
    ask(llama, LONG)
    llama._ctx.kv_cache_seq_rm(0, 40, -1)
    answer = ask(llama, LONG)
    assert answer.report.cache_hit_kind == "cold"
    assert_equals_cold(answer, stock)


def test_a_draft_model_and_embeddings_are_served_uncached(
    tiny_llama: Path, cache: Cache, worker: MakeLlama
) -> None:
    draft = llama_cpp.llama_speculative.LlamaPromptLookupDecoding()
    drafting = worker(tiny_llama, cache, draft_model=draft)
    assert ask(drafting, LONG[:100]).report.cache_hit_kind == "untracked"
    embedding = worker(tiny_llama, cache, embedding=True, n_ctx=256)
    assert len(embedding.embed("The sea")) > 0
    assert cache.flush(30_000)
    assert "save_handed_over" not in counters(cache)


def test_logprobs_after_a_hit_are_those_of_the_cold_run(
    tiny_llama: Path, cache: Cache, worker: MakeLlama
) -> None:
    one, other = (worker(tiny_llama, cache, logits_all=True) for _ in range(2))
    options: dict[str, Any] = {"max_tokens": 5, "temperature": 0.0, "logprobs": 3}
    cold = one.create_completion(LONG, **options)
    assert cache.flush(30_000)
    warm = other.create_completion(LONG, **options)
    assert warm["shmcache"]["cache_hit_kind"] == "exact"
    assert warm["choices"] == cold["choices"]

    short = LONG[:40]  # one batch, as stock decodes it
    stock = llama_cpp.Llama(str(tiny_llama), **OPTIONS, logits_all=True)
    expected = stock.create_completion(short, echo=True, **options)["choices"]
    for llama in (one, other):
        echoed = llama.create_completion(short, echo=True, **options)
        assert echoed["shmcache"]["cache_hit_kind"] == "untracked"
        assert echoed["choices"] == expected


# ---- one context, many callers


def test_a_stream_that_goes_on_after_another_request_raises(
    tiny_llama: Path, cache: Cache, worker: MakeLlama
) -> None:
    llama = worker(tiny_llama, cache)
    calls: list[Callable[[], Any]] = [
        lambda: llama.create_completion(OTHER, max_tokens=2),
        llama.reset,
        lambda: llama.eval([1, 2, 3]),
        lambda: next(llama.generate([1, 2, 3])),
    ]
    for call in calls:
        stream = llama.create_completion(LONG, max_tokens=20, temperature=0.0, stream=True)
        next(stream)
        call()
        with pytest.raises(StaleGenerator, match="another request took this context"):
            list(stream)
    tokens = llama.generate(llama.tokenize(LONG.encode()))
    next(tokens)
    ask(llama, OTHER)
    with pytest.raises(StaleGenerator):
        next(tokens)


def test_a_stream_whose_last_item_was_taken_ends_in_peace(tiny_llama: Path, worker: MakeLlama) -> None:
    llama = worker(tiny_llama)
    stream = llama.create_completion(LONG, max_tokens=3, temperature=0.0, stream=True)
    chunks = []
    for chunk in stream:
        chunks.append(chunk)
        if chunk["choices"][0]["finish_reason"]:
            break
    ask(llama, OTHER)
    assert list(stream) == []


def test_a_stream_that_is_closed_gives_its_reservation_back(
    tiny_llama: Path, cache: Cache, worker: MakeLlama
) -> None:
    llama = worker(tiny_llama, cache)
    stream = llama.create_completion(LONG, max_tokens=20, temperature=0.0, stream=True)
    for _ in range(3):
        next(stream)
    stream.close()
    assert cache.flush(30_000)
    assert counters(cache)["save_dropped_cancelled"] == 1
    assert ask(llama, LONG).report.cache_hit_kind == "exact"


def test_a_stream_may_be_closed_by_another_thread(tiny_llama: Path, cache: Cache, worker: MakeLlama) -> None:
    llama = worker(tiny_llama, cache)
    stream = llama.create_completion(LONG, max_tokens=20, temperature=0.0, stream=True)
    for _ in range(3):
        next(stream)
    closer = threading.Thread(target=stream.close)
    closer.start()
    closer.join()
    assert ask(llama, LONG).report.cache_hit_kind == "exact"


def test_a_stream_that_is_closed_in_the_middle_of_a_save_leaves_it_whole(
    tiny_llama: Path, stock: llama_cpp.Llama, cache: Cache, worker: MakeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = replace(SMALL, continued_interval=8)
    llama = worker(tiny_llama, cache, gates=gates)
    copying, may_go_on = threading.Event(), threading.Event()
    copy_out = llama._state.copy_out

    def wait_in_the_middle(target: memoryview) -> None:
        copying.set()
        assert may_go_on.wait(30)
        copy_out(target)

    stream = llama.create_completion(LONG, stream=True, **saying(llama, *letters("One, two, three, four.")))
    next(stream)
    monkeypatch.setattr(llama._state, "copy_out", wait_in_the_middle)
    reading = threading.Thread(target=lambda: list(stream))
    reading.start()
    assert copying.wait(30)
    with pytest.raises(ValueError, match="already executing"):
        stream.close()  # Python itself keeps it out
    may_go_on.set()
    reading.join()
    assert cache.flush(30_000)
    answer = ask(worker(tiny_llama, cache, gates=gates), LONG + "One, two, three, f" + OTHER)
    assert answer.report.source == "shared"
    assert_equals_cold(answer, stock)


def test_a_prefill_that_fails_gives_its_reservations_back_and_leaves_no_cells(
    tiny_llama: Path, stock: llama_cpp.Llama, cache: Cache, worker: MakeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = worker(tiny_llama, cache)
    decode, calls = llama._ctx.decode, 0

    def fail_at_the_second(batch: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("llama_decode returned -3")
        decode(batch)

    with monkeypatch.context() as patched:
        patched.setattr(llama._ctx, "decode", fail_at_the_second)
        with pytest.raises(RuntimeError, match="returned -3"):
            ask(llama, LONG)
    assert cache.flush(30_000)
    assert counters(cache)["save_dropped_cancelled"] >= 1
    answer = ask(llama, LONG)
    assert_equals_cold(answer, stock)


# ---- a cache in trouble


def test_without_a_coordinator_replies_are_the_same(
    tiny_llama: Path, namespace: str, worker: MakeLlama
) -> None:
    alone, unattached = worker(tiny_llama), worker(tiny_llama, namespace)
    for prompt in (LONG, LONG, LONG + OTHER):
        one, other = ask(alone, prompt), ask(unattached, prompt)
        assert largest_difference(one.logits, other.logits) == 0
        assert other.report.finish_key is None
        assert one.report == other.report


class BrokenCache(Cache):
    """Raises in everything that a request asks of it."""

    def _break(self, *_: Any, **__: Any) -> Any:
        raise OSError(5, "Input/output error")

    candidates = reserve = drop = wait = count = _break


def test_a_cache_that_raises_fails_no_request_and_is_logged_once_per_kind(  # noqa: PLR0917  fixtures
    tiny_llama: Path,
    stock: llama_cpp.Llama,
    coordinator: Any,
    namespace: str,
    worker: MakeLlama,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with BrokenCache(namespace, client.Tier.RAM_FILE, 1 << 20) as broken:
        llama = worker(tiny_llama, broken)
        for _ in range(3):
            assert_equals_cold(ask(llama, LONG + OTHER), stock)
            llama.reset()
        assert broken.connection.counters()["cache_faults"] >= 6
    assert len([record for record in caplog.records if "lookup" in record.message]) == 1


def test_a_slab_that_cannot_be_made_skips_the_save_only(
    tiny_llama: Path, stock: llama_cpp.Llama, cache: Cache, worker: MakeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(client, "UnnamedSlab", no_room)
    answer = ask(worker(tiny_llama, cache), LONG)
    assert_equals_cold(answer, stock)
    assert answer.report.finish_key is None
    assert counters(cache)["save_dropped_no_space"] >= 2


def test_a_model_file_that_changes_while_it_is_loaded_is_not_cached(
    tiny_llama: Path, tmp_path: Path, cache: Cache, worker: MakeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_llama.read_bytes())
    load = llama_cpp.Llama.__init__

    def touch_while_loading(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        path.write_bytes(tiny_llama.read_bytes())

    monkeypatch.setattr(llama_cpp.Llama, "__init__", touch_while_loading)
    llama = worker(path, cache)
    ask(llama, LONG)
    assert cache.flush(30_000)
    assert "save_handed_over" not in counters(cache)
    assert counters(cache)["cache_faults"] == 1


# ---- waiting for another worker's prefill


@pytest.fixture
def second_cache(cache: Cache, namespace: str) -> Iterator[Cache]:
    with shmcache.attach(namespace) as attached:
        yield attached


def test_one_prompt_at_several_workers_is_prefilled_once(
    tiny_llama: Path, cache: Cache, namespace: str, worker: MakeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        caches = [stack.enter_context(shmcache.attach(namespace)) for _ in range(3)]
        owner, waiters = worker(tiny_llama, cache), [worker(tiny_llama, theirs) for theirs in caches]
        at_first_batch, may_go_on = threading.Event(), threading.Event()
        decode = owner._cells.decode

        def wait_in_the_first_batch(*args: Any) -> None:
            at_first_batch.set()
            assert may_go_on.wait(30)
            decode(*args)

        monkeypatch.setattr(owner._cells, "decode", wait_in_the_first_batch)
        answers: dict[SharedLlama, Answer] = {}
        threads = [
            threading.Thread(target=lambda llama=llama: answers.update({llama: ask(llama, LONG)}))
            for llama in (owner, *waiters)
        ]
        threads[0].start()
        assert at_first_batch.wait(30)
        for thread in threads[1:]:
            thread.start()
        for theirs, thread in zip(caches, threads[1:], strict=True):
            while not counters(theirs).get("waited"):
                thread.join(0.01)
        may_go_on.set()
        for thread in threads:
            thread.join()
        first = answers.pop(owner)
        assert (first.report.cache_hit_kind, first.report.waited) == ("cold", False)
        for answer in answers.values():
            assert (answer.report.cache_hit_kind, answer.report.waited) == ("exact", True)
            assert largest_difference(first.logits, answer.logits) == 0


def test_who_waits_for_a_save_that_is_given_up_goes_on_alone(
    tiny_llama: Path, stock: llama_cpp.Llama, cache: Cache, second_cache: Cache, worker: MakeLlama
) -> None:
    waiter = worker(tiny_llama, second_cache)
    prompt = waiter._prompt(Request(), waiter.tokenize(LONG.encode()))
    assert waiter._author is not None
    assert waiter._cells.trail is not None
    assert prompt.walk is not None
    plans = [
        waiter._author.anchor_plan(prompt.walk, prompt.text.ends[at - 1], at, waiter._cells.trail)
        for at in prompt.anchors
    ]
    slabs = cache.reserve(plans, None, cache.forget).slabs
    answers: list[Answer] = []
    waiting = threading.Thread(target=lambda: answers.append(ask(waiter, LONG)))
    waiting.start()
    while not counters(second_cache).get("waited"):
        waiting.join(0.01)
    for slab in slabs:
        assert slab is not None
        slab.cancel()
    waiting.join()
    assert (answers[0].report.cache_hit_kind, answers[0].report.waited) == ("cold", True)
    assert answers[0].report.finish_key is not None
    assert_equals_cold(answers[0], stock)


# ---- processes and threads


def in_child(job: Callable[[], Any]) -> str:
    """What a job raises in a forked child."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            job()
            text = "nothing"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader, "rb") as pipe:
        return pipe.read().decode()


def test_a_forked_child_is_told_at_once(tiny_llama: Path, cache: Cache, worker: MakeLlama) -> None:
    llama = worker(tiny_llama, cache)
    ask(llama, LONG)
    stream = llama.create_completion(LONG, stream=True)
    next(stream)
    calls: list[Callable[[], Any]] = [
        lambda: llama.create_completion("x"),
        lambda: llama.create_completion("x", stream=True),
        lambda: llama.create_chat_completion([{"role": "user", "content": "x"}]),
        lambda: next(llama.generate([1])),
        lambda: llama.eval([1]),
        llama.reset,
        lambda: next(stream),
    ]
    for call in calls:
        told = in_child(call)
        assert told.startswith("UsedAfterFork: SharedLlama was made in process"), told
        assert "load the model after the fork" in told
    assert ask(llama, LONG).report.cache_hit_kind == "exact"
