"""Why a state is saved: each of the five reasons, and what is not saved twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from model.cold import Answer, ask, cold_logits, largest_difference
from model.conftest import OPTIONS, SMALL, MakeLlama
from model.test_shared_llama import LONG, OTHER, counters, letters, saying
from msgspec.structs import replace
from support import eventually

import shmcache
from shmcache import Cache, client
from shmcache.client import Hit
from shmcache.errors import MIB
from shmcache.kvc import HEAD_DETAIL, Meta, Reason
from shmcache.policy import Measured
from shmcache.tools.demo import CoordinatorProcess
from shmcache.workers import SharedLlama
from shmcache.workers.request import Request

EIGHT = replace(SMALL, continued_interval=8)
SLIDING: dict[str, Any] = {"swa_full": False}


def rows_of(cache: Cache, llama: SharedLlama, tokens: list[int]) -> list[Hit]:
    """Rows that a prompt of these tokens begins with, longest first."""
    assert cache.flush(30_000)
    assert llama._author is not None
    text = llama._renderer.render(tokens).text
    walk = shmcache.key.PrefixWalk(llama._author.identity.seed, text)
    return list(cache.candidates(walk, len(text)))


def reasons(hits: list[Hit]) -> list[tuple[Reason, int]]:
    return [(hit.image.meta.save_reason, hit.image.meta.token_count) for hit in hits]


# ---- continued


@pytest.mark.parametrize(("kind", "options"), [("llama", {}), ("gemma3", SLIDING), ("mamba", {})])
def test_a_long_reply_leaves_a_row_at_every_interval(
    kind: str, options: dict[str, Any], tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    llama, other = (worker(tiny_models[kind], cache, gates=EIGHT, **options) for _ in range(2))
    stream = llama.create_completion(
        LONG, stream=True, **saying(llama, *letters("One, two, three, four, five."))
    )
    for _ in range(20):
        next(stream)
    stream.close()  # so there is no finish row
    prompt = llama.tokenize((LONG + "One, two, three, f" + OTHER).encode())
    n = len(llama.tokenize(LONG.encode()))
    found = reasons(rows_of(cache, llama, prompt))
    assert found[:2] == [(Reason.CONTINUED, n + 16), (Reason.CONTINUED, n + 8)]

    answer = ask(other, prompt)
    assert answer.report.reused_tokens == n + 16
    stock = llama_cpp.Llama(str(tiny_models[kind]), **OPTIONS, **options)
    assert largest_difference(answer.logits, cold_logits(stock, answer.tokens, answer.pieces)) == 0


@pytest.mark.parametrize(("kind", "options"), [("llama", {}), ("gemma3", SLIDING)])
def test_a_reply_is_the_same_whether_its_continued_rows_are_saved_or_not(
    kind: str, options: dict[str, Any], tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    saving = worker(tiny_models[kind], cache, gates=EIGHT, **options)
    alone = worker(tiny_models[kind], gates=EIGHT, **options)
    one, other = (ask(llama, LONG, max_tokens=30) for llama in (saving, alone))
    assert largest_difference(one.logits, other.logits) == 0
    assert one.pieces == other.pieces
    assert len(one.logits) == 30


def test_a_continued_slab_that_is_not_used_is_given_back(
    tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    llama = worker(tiny_models["llama"], cache, gates=replace(SMALL, continued_interval=20))
    stream = llama.create_completion(LONG, stream=True, max_tokens=30, temperature=0.0)
    for _ in range(10):
        next(stream)
    stream.close()
    assert cache.flush(30_000)
    assert counters(cache)["save_dropped_cancelled"] == 2  # the finish row's and the continued one's


# ---- evict


def never_finished(llama: SharedLlama, text: str) -> list[int]:
    """Let the context hold a sequence that has left no row."""
    tokens = llama.tokenize(text.encode())
    llama.reset()
    llama.eval(tokens)
    return tokens


@pytest.mark.parametrize(("kind", "options"), [("llama", {}), ("gemma3", SLIDING), ("lfm2", {})])
def test_a_sequence_that_no_row_covers_is_saved_before_another_takes_its_cells(
    kind: str, options: dict[str, Any], tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    gates = replace(SMALL, continued_interval=100)
    llama, other = (worker(tiny_models[kind], cache, gates=gates, **options) for _ in range(2))
    tokens = never_finished(llama, LONG)
    ask(llama, OTHER)
    assert reasons(rows_of(cache, llama, tokens)) == [(Reason.EVICT, len(tokens))]
    answer = ask(other, tokens + llama.tokenize(b"And?", add_bos=False))
    assert answer.report.reused_tokens == len(tokens)
    stock = llama_cpp.Llama(str(tiny_models[kind]), **OPTIONS, **options)
    assert largest_difference(answer.logits, cold_logits(stock, answer.tokens, answer.pieces)) == 0


def goes_on(llama: SharedLlama, tokens: list[int]) -> None:
    ask(llama, tokens + llama.tokenize(b"And?", add_bos=False))


def is_short(llama: SharedLlama, tokens: list[int]) -> None:
    never_finished(llama, LONG[:90])
    ask(llama, OTHER)


def is_covered(llama: SharedLlama, tokens: list[int]) -> None:
    llama.reset()
    ask(llama, LONG)
    ask(llama, OTHER)


@pytest.mark.parametrize("happens", [goes_on, is_short, is_covered])
def test_what_is_not_lost_or_is_covered_is_not_saved(
    happens: Callable[[SharedLlama, list[int]], None],
    tiny_models: dict[str, Path],
    cache: Cache,
    worker: MakeLlama,
) -> None:
    llama = worker(tiny_models["llama"], cache, gates=replace(SMALL, continued_interval=100))
    tokens = never_finished(llama, LONG)
    happens(llama, tokens)
    assert Reason.EVICT not in [reason for reason, _ in reasons(rows_of(cache, llama, tokens))]


def test_a_row_that_has_left_covers_nothing(
    tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    llama = worker(tiny_models["llama"], cache, gates=replace(SMALL, continued_interval=100))
    first = ask(llama, LONG)
    hits = rows_of(cache, llama, first.tokens)
    for hit in hits:
        cache.drop(hit, "for a test")
    assert eventually(lambda: not any(cache.has(hit.found.key) for hit in hits)), "the coordinator has heard"
    ask(llama, OTHER)
    assert [reason for reason, _ in reasons(rows_of(cache, llama, first.tokens))] == [Reason.EVICT]


def test_a_sequence_is_saved_on_request(
    tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    llama = worker(tiny_models["llama"], cache)
    tokens = never_finished(llama, LONG)
    key = llama.save_sequence()
    assert key is not None
    hit = cache.get(bytes.fromhex(key))  # published when the call returns
    assert hit is not None
    assert hit.image.meta.save_reason == Reason.EVICT
    assert llama.save_sequence() == key
    goes_on(llama, tokens)
    assert llama.last_report.source == "live"
    llama.reset()
    assert llama.save_sequence() is None


def test_without_a_coordinator_nothing_blocks(
    tiny_models: dict[str, Path], namespace: str, worker: MakeLlama
) -> None:
    llama = worker(tiny_models["llama"], namespace, gates=replace(SMALL, continued_interval=8))
    never_finished(llama, LONG)
    assert llama.save_sequence() is None
    assert ask(llama, OTHER).report.cache_hit_kind == "cold"


def test_a_save_that_is_not_published_in_time_does_not_hold_up_its_request(
    tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama, coordinator: CoordinatorProcess
) -> None:
    gates = replace(SMALL, evict_save_timeout_ms=0)
    llama = worker(tiny_models["llama"], cache, gates=gates)
    never_finished(llama, LONG)
    assert llama.save_sequence() is None
    assert cache.flush(30_000)


# ---- shutdown


def test_a_worker_that_stops_saves_what_no_row_covers(
    tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    llama, other = worker(tiny_models["llama"], cache), worker(tiny_models["llama"], cache)
    tokens = never_finished(llama, LONG)
    llama.close()
    assert reasons(rows_of(cache, other, tokens)) == [(Reason.SHUTDOWN, len(tokens))]
    llama.close()


def test_a_worker_that_stops_behind_a_finished_reply_saves_nothing_more(
    tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    llama, other = worker(tiny_models["llama"], cache), worker(tiny_models["llama"], cache)
    first = ask(llama, LONG)
    assert cache.flush(30_000)
    llama.close()
    found = [reason for reason, _ in reasons(rows_of(cache, other, first.tokens))]
    assert found[0] == Reason.FINISH
    assert Reason.SHUTDOWN not in found


# ---- heads, doubles, buffers


def test_the_system_parts_anchor_is_marked_and_no_other(
    tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    llama = worker(tiny_models["llama"], cache)
    chat = [{"role": "system", "content": LONG}, {"role": "user", "content": OTHER}]
    answer = ask(llama, chat)
    found = rows_of(cache, llama, answer.tokens)
    details = [(hit.image.meta.reason_detail, hit.found.row.flags) for hit in found]
    assert details == [("", 0), ("", 0), ("", 0), (HEAD_DETAIL, 1)]
    assert found[-1].image.meta.token_count % 64 == 0


def test_a_changed_head_gets_its_own_anchor_although_something_shorter_hit(
    tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    llama, other, third = (worker(tiny_models["llama"], cache) for _ in range(3))
    question = {"role": "user", "content": OTHER}
    ask(llama, [{"role": "system", "content": LONG}, question])
    changed = [{"role": "system", "content": LONG + "And it is short with those who ask of the tide. " * 3}]
    assert cache.flush(30_000)
    hit = ask(other, [*changed, question])
    assert (hit.report.cache_hit_kind, hit.report.source) == ("partial", "shared")
    heads = [row for row in rows_of(cache, other, hit.tokens) if row.image.meta.reason_detail == HEAD_DETAIL]
    [longer, shorter] = [row.image.meta.token_count for row in heads]
    assert shorter == hit.report.reused_tokens < longer
    following = ask(third, [*changed, {"role": "user", "content": "Something else."}])
    assert following.report.reused_tokens == longer


def test_a_reply_that_is_there_already_is_not_copied_again(
    tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama, other = worker(tiny_models["llama"], cache), worker(tiny_models["llama"], cache)
    first = ask(llama, LONG)
    assert cache.flush(30_000)
    monkeypatch.setattr(other._state, "copy_out", lambda _: pytest.fail("the state was copied"))
    again = ask(other, LONG)
    assert again.report.finish_key == first.report.finish_key is not None
    assert counters(cache)["save_present"] == 1


def test_a_row_from_disk_gives_its_buffer_back(
    tiny_models: dict[str, Path], namespace: str, tmp_path: Path, worker: MakeLlama
) -> None:
    process = CoordinatorProcess(
        f"--namespace={namespace}", "--ram-file-bytes=64M", f"--disk-dir={tmp_path}", "--max-rows=1024"
    )
    try:
        with shmcache.attach(namespace, tier="disk") as cache:
            llama, other = worker(tiny_models["llama"], cache), worker(tiny_models["llama"], cache)
            first = ask(llama, LONG)
            assert cache.flush(30_000)
            longer = LONG + first.text + OTHER
            for _ in range(3):
                other.reset()
                assert ask(other, longer, max_tokens=1).report.source == "shared"
            assert counters(cache)["read_slabs"] >= 3
            assert len(cache._buffers._free) == 1
            llama.close()
            other.close()
    finally:
        process.stop()


# ---- a save on its way, and what was not saved


@pytest.fixture
def second_cache(cache: Cache, namespace: str) -> Iterator[Cache]:
    with shmcache.attach(namespace) as attached:
        yield attached


def test_a_next_turn_waits_for_the_reply_that_is_still_being_saved(
    tiny_models: dict[str, Path],
    cache: Cache,
    second_cache: Cache,
    worker: MakeLlama,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gates = replace(SMALL, session_resume_wait_ms=30_000)
    llama, other = (worker(tiny_models["llama"], at, gates=gates) for at in (cache, second_cache))
    may_go_on, asked = threading.Event(), threading.Event()
    save = client.Slab._hand_over

    def save_when_told(slab: client.Slab, meta: Meta, *rest: Any) -> None:
        if meta.save_reason == Reason.FINISH:
            assert may_go_on.wait(30)
        save(slab, meta, *rest)

    monkeypatch.setattr(client.Slab, "_hand_over", save_when_told)
    said = ask(llama, LONG)
    resume = other._edge.resume

    def note(*args: Any) -> bool:
        asked.set()
        return resume(*args)

    monkeypatch.setattr(other._edge, "resume", note)
    answers: list[Answer] = []

    def next_turn() -> None:
        with other.asking(parent_key=said.report.finish_key):
            answers.append(ask(other, LONG + said.text + OTHER, max_tokens=1))

    following = threading.Thread(target=next_turn)
    following.start()
    assert asked.wait(30)
    may_go_on.set()
    following.join()
    [resumed] = answers
    assert resumed.report.reused_tokens == len(said.tokens)
    assert (resumed.report.source, resumed.report.waited) == ("shared", True)


def test_a_reply_that_never_comes_is_waited_for_no_longer_than_the_request_allows(
    tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama
) -> None:
    llama = worker(tiny_models["llama"], cache, gates=replace(SMALL, session_resume_wait_ms=60_000))
    with llama.asking(parent_key="ab" * 32, wait_ms=20):
        report = ask(llama, LONG).report
    assert (report.cache_hit_kind, report.waited) == ("cold", False)
    with pytest.raises(ValueError, match="hex"), llama.asking(parent_key="not a key"):
        pass


def test_another_workers_prefill_is_waited_for_no_longer_than_the_request_allows(
    tiny_models: dict[str, Path], cache: Cache, second_cache: Cache, worker: MakeLlama
) -> None:
    waiter = worker(tiny_models["llama"], second_cache)
    prompt = waiter._prompt(Request(), waiter.tokenize(LONG.encode()))
    assert waiter._author is not None and waiter._cells.trail is not None and prompt.walk is not None
    plans = [
        waiter._author.anchor_plan(prompt.walk, prompt.text.ends[at - 1], at, waiter._cells.trail)
        for at in prompt.anchors
    ]
    slabs = cache.reserve(plans, None, cache.forget).slabs
    with waiter.asking(wait_ms=50):
        report = ask(waiter, LONG).report
    assert (report.cache_hit_kind, report.waited) == ("cold", True)
    for slab in slabs:
        assert slab is not None
        slab.cancel()


def test_a_row_that_is_restored_slower_than_it_is_computed_is_not_saved(
    tiny_models: dict[str, Path], cache: Cache, worker: MakeLlama, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "shmcache.workers")
    llama = worker(tiny_models["llama"], cache, explain_saves=True)
    prompts = iter(f"{number}. {LONG}" for number in range(100))
    ask(llama, next(prompts))
    assert cache.flush(30_000)
    saved = counters(cache)["save_handed_over"]
    assert saved == 3, "as long as nothing is measured"

    llama._measured = Measured(10_000, 10_000, restored_bytes=64 * MIB, restore_us=3_600_000_000)
    assert ask(llama, next(prompts)).report.finish_key is None
    assert cache.flush(30_000)
    assert counters(cache)["save_handed_over"] == saved
    assert counters(cache)["save_dropped_slower_than_prefill"] == 3
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "tokens would take longer to restore than to compute, as measured" in said
    while counters(cache)["save_handed_over"] == saved:
        ask(llama, next(prompts))  # it is tried again in time
        assert cache.flush(30_000)


def test_what_a_worker_measures_says_that_rows_pay(
    tiny_models: dict[str, Path], smollm2: Path, cache: Cache, worker: MakeLlama
) -> None:
    for path, most_share in ((tiny_models["llama"], 0.5), (smollm2, 0.2)):
        llama, other = worker(path, cache), worker(path, cache)
        for number in range(30):
            if llama._measured.has_prefilled and other._measured.has_restored:
                break
            prompt = f"{number}. {LONG * 2}"
            ask(llama, prompt, max_tokens=1)
            assert cache.flush(30_000)
            assert ask(other, prompt, max_tokens=1).report.source == "shared"
        measured = llama._measured.plus(other._measured)
        speed = measured.speed
        assert measured.has_prefilled
        assert measured.has_restored
        token_mib = llama._author.size.token_bytes / MIB  # type: ignore[union-attr]
        assert speed.restore_ms_per_mib * token_mib < most_share * speed.prefill_ms_per_token
    assert "save_dropped_slower_than_prefill" not in counters(cache)
    page = cache.statistics().counters
    assert page["prefill_us"] > 0
    assert page["restored_bytes"] >= MIB
    assert page["disk_restored_bytes"] == 0


def test_what_was_not_saved_says_why(
    tiny_models: dict[str, Path], namespace: str, worker: MakeLlama, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "shmcache.workers")
    gates = replace(SMALL, cold_max_tokens=100)
    llama = worker(tiny_models["llama"], namespace, gates=gates, explain_saves=True)
    ask(llama, "short", max_tokens=2)
    ask(llama, LONG, max_tokens=4)
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "not saved: the prompt: its 6 tokens are not above min_tokens (64)" in said
    assert "lies beyond cold_max_tokens (100)" in said
    assert "not saved: the reply: no coordinator answered" in said
    caplog.clear()
    ask(worker(tiny_models["llama"], namespace), "short", max_tokens=2)
    assert not [record for record in caplog.records if "not saved" in record.getMessage()]
