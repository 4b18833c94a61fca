"""A worker's side, with a real coordinator: what fails is a miss or a skipped save, and it is counted."""

from __future__ import annotations

import errno
import gc
import logging
import mmap
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from support import (
    PAYLOAD_OFFSET,
    PIECES,
    TOKEN_IDS,
    WAIT_S,
    Namespace,
    Pipe,
    eventually,
    identity,
    longest,
    meta,
    needs_root,
    payload_of,
    plan,
    prompt,
    save,
    slab_file,
    unknown_plan,
    unnamed_slabs,
)

from shmcache import client, connection, protocol, server, shm, slab
from shmcache.client import Cache, Slab
from shmcache.control import ControlPage
from shmcache.errors import ConfigError, OutOfSpace
from shmcache.key import PrefixWalk, row_address
from shmcache.mq import RequestQueue
from shmcache.page import MAILBOXES, Word
from shmcache.protocol import Await, Outcome
from shmcache.tiers.base import file_name
from shmcache.tools import clean

WHO = identity()
OTHER = identity("another model")
A, B, C = (prompt(size, "chat") for size in (1000, 2048, 3100))
WAIT_MS = int(WAIT_S * 1000)


def key_of(text: bytes) -> bytes:
    return row_address(WHO.seed, text).key


def count(cache: Cache, name: str) -> int:
    return cache.statistics().counters[name]


def reserve(cache: Cache, *texts: bytes | None, payload_bytes: int = 4096) -> list[Slab | None]:
    plans = [plan(WHO, text, payload_bytes) if text else unknown_plan(payload_bytes) for text in texts]
    return cache.reserve(plans, None, cache.forget).slabs


def granted(cache: Cache, text: bytes | None, payload_bytes: int = 4096) -> Slab:
    (made,) = reserve(cache, text, payload_bytes=payload_bytes)
    assert made is not None
    return made


def hand_over(made: Slab, text: bytes, payload: bytes, **changes: Any) -> None:
    made.payload(len(payload))[:] = payload
    made.save(meta(WHO, text, **changes), PIECES, TOKEN_IDS)


# ---- without a coordinator


def test_without_a_coordinator_everything_is_a_miss_or_a_skipped_save(space: Namespace) -> None:
    cache = space.cache()
    assert longest(cache, WHO, A) is None
    assert cache.get(key_of(A)) is None
    assert reserve(cache, A, B) == [None, None]
    assert cache.wait(key_of(A), 1000) is False
    assert cache.forget == 0
    assert cache.flush(WAIT_MS)
    assert count(cache, "uncached") == 1
    assert count(cache, "save_dropped_no_coordinator") > 0
    assert not space.objects(), "looking makes nothing"


def test_who_is_not_there_is_looked_for_once_a_second(
    space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    real = ControlPage.open

    def open_counted(names: shm.Names) -> ControlPage:
        looks.append(1)
        return real(names)

    monkeypatch.setattr(ControlPage, "open", open_counted)
    now = [10**12]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    cache = space.cache()
    for _ in range(100):
        assert longest(cache, WHO, A) is None
    assert len(looks) == 1
    now[0] += 1_000_000_001
    for _ in range(100):
        longest(cache, WHO, A)
    assert len(looks) == 2


def test_a_coordinator_that_comes_later_is_found(space: Namespace) -> None:
    cache = space.cache()
    assert longest(cache, WHO, A) is None
    space.start()
    eventually(lambda: save(cache, WHO, A, b"state"))
    assert longest(cache, WHO, A) == (len(A), b"state")
    assert count(cache, "uncached") == 1, "what was counted before it was there is in its page"
    page = cache.connection.page
    assert page is not None
    assert page.counters()["uncached"] == 1


def test_settings_that_cannot_be_are_refused(space: Namespace) -> None:
    for namespace, tier in (("No", "ram_file"), ("ok", "tape"), ("../x", "disk")):
        with pytest.raises(ConfigError):
            client.attach(namespace, tier=tier)


def test_a_coordinator_of_another_build_means_uncached_and_one_log_line(
    space: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    def patch() -> None:
        setattr(server, "LAYOUT", 1)  # noqa: B010 (it is not exported)

    space.start(patch=patch)
    cache = space.cache()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert longest(cache, WHO, A) is None
            assert reserve(cache, A) == [None]
            cache.connection._look_again_ns = 0
    assert count(cache, "cache_faults") == 3
    assert len([record for record in caplog.records if "layout" in record.getMessage()]) == 1
    assert not list(space.names.pages.iterdir()), "and it leaves no page there"


@pytest.mark.parametrize("plant", ["mode", "symlink", "cut", "stranger"])
def test_an_index_that_is_not_ours_or_not_whole_is_not_read(space: Namespace, plant: str) -> None:
    if plant == "stranger" and os.geteuid() != 0:
        pytest.skip("needs root: a second uid")
    space.start()
    (path,) = [path for path in space.names.epoch_segments() if path.name.endswith(".index")]
    if plant == "mode":
        path.chmod(0o644)
    elif plant == "symlink":
        path.rename(path.with_suffix(".elsewhere"))
        path.symlink_to(path.with_suffix(".elsewhere"))
    elif plant == "cut":
        path.unlink()
        path.write_bytes(b"")
        path.chmod(0o600)
    else:
        os.chown(path, 64_001, 64_001)
    cache = space.cache()
    assert longest(cache, WHO, A) is None
    assert reserve(cache, A) == [None]
    assert count(cache, "cache_faults" if plant == "cut" else "foreign_objects") == 1
    assert count(cache, "uncached") == 1


# ---- saving and finding


def test_what_one_process_saves_another_reads(space: Namespace) -> None:
    space.start()
    payload = os.urandom(100_000)
    assert save(space.cache(), WHO, A, payload)

    def read(_pipe: Pipe) -> None:
        with client.attach(space.name) as cache:
            assert longest(cache, WHO, A + b"and more") == (len(A), payload)

    assert space.child(read).wait() == 0


def test_the_longest_row_that_is_a_prefix_comes_first_and_shorter_ones_after(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    for text in (B, A, C):
        assert save(cache, WHO, text, text[:100])
    walk = PrefixWalk(WHO.seed, C + b"end")
    assert [hit.found.row.text_bytes for hit in cache.candidates(walk, walk.text_bytes)] == [3100, 2048, 1000]
    assert [hit.found.row.text_bytes for hit in cache.candidates(walk, 3099)] == [2048, 1000]
    assert longest(cache, WHO, B[:-1]) == (len(A), A[:100])
    assert longest(cache, WHO, A[:-1]) is None
    assert longest(cache, WHO, prompt(4000, "something else")) is None


def test_two_identities_on_one_cache_never_meet(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    assert save(cache, WHO, A, b"of one model")
    assert longest(cache, OTHER, A) is None
    assert save(cache, OTHER, A, b"of the other")
    others = [OTHER, replace(WHO, quant=3), replace(WHO, ctx_params_hash=b"x" * 32)]
    assert [longest(cache, who, A) for who in (WHO, *others)] == [
        (len(A), b"of one model"),
        (len(A), b"of the other"),
        None,
        None,
    ]


def test_two_namespaces_side_by_side_never_meet(space: Namespace) -> None:
    with Namespace() as other:
        space.start()
        other.start()
        assert save(space.cache(), WHO, A, b"here")
        assert longest(other.cache(), WHO, A) is None
        assert save(other.cache(), WHO, A, b"there")
        assert other.stop() == 0
        assert longest(space.cache(), WHO, A) == (len(A), b"here")


def test_a_hit_on_a_kept_mapping_makes_no_system_call_that_opens_or_maps(
    space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.start()
    cache = space.cache()
    save(cache, WHO, A, b"state")
    assert longest(cache, WHO, A) == (len(A), b"state")

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a system call on the way of a hit")

    for module, name in ((os, "open"), (os, "fstat"), (mmap, "mmap"), (os, "write"), (RequestQueue, "send")):
        monkeypatch.setattr(module, name, forbidden)
    for hit in cache.candidates(PrefixWalk(WHO.seed, A), len(A)):
        hit.use()
        assert bytes(hit.image.payload) == b"state"
    monkeypatch.undo()
    assert count(cache, "mapped_slabs") == 1


def test_a_reply_in_the_making_is_reserved_before_its_text_is_known(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    made = granted(cache, None)
    hand_over(made, B, b"reply")
    assert made.wait(WAIT_MS)
    assert longest(cache, WHO, C) == (len(B), b"reply")


def test_what_is_there_or_held_is_counted_and_named(space: Namespace) -> None:
    space.start()
    first, second = space.cache(), space.cache()
    save(first, WHO, A, b"state")
    assert granted(first, B)
    grants = second.reserve([plan(WHO, text) for text in (A, B, C)], None, second.forget)
    assert grants.slabs == [None, None, None]
    assert grants.held == key_of(B)
    assert (count(second, "save_present"), count(second, "save_held")) == (1, 2)
    assert second.reserve([plan(WHO, A)], None, 0).held is None


def test_hits_are_counted_and_written_into_the_file_at_a_clean_stop(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    save(cache, WHO, A, b"state")
    for _ in range(5):
        for hit in cache.candidates(PrefixWalk(WHO.seed, A), len(A)):
            hit.use()
    cache.close()
    eventually(lambda: not list(space.names.pages.iterdir()))
    eventually(lambda: not list(space.names.fifos.iterdir()))
    # Nothing more than a tick is needed, also for a worker that has left before it.
    assert space.stop() == 0
    content = (space.names.tier("ram_file", 0) / file_name(key_of(A))).read_bytes()
    assert int.from_bytes(content[12:16], "little") == 5
    assert abs(int.from_bytes(content[32:40], "little") - time.time()) < 600
    space.start()
    assert longest(space.cache(), WHO, A) == (len(A), b"state")


# ---- the coordinator dies and comes back


def test_reads_go_on_while_nobody_coordinates_and_saves_are_skipped(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    save(cache, WHO, A, b"kept mapped")
    save(cache, WHO, B, b"not mapped")
    assert payload_of(cache, WHO, A) == b"kept mapped"
    space.kill()
    assert payload_of(cache, WHO, A) == b"kept mapped"
    assert payload_of(cache, WHO, B) == b"not mapped"
    before = count(cache, "save_dropped_no_coordinator")
    assert reserve(cache, C) == [None]
    assert count(cache, "save_dropped_no_coordinator") > before
    assert cache.wait(key_of(C), WAIT_MS) is False, "nobody is waited for who is not there"


def test_a_worker_that_starts_while_nobody_coordinates_reads(space: Namespace) -> None:
    space.start()
    save(space.cache(), WHO, A, b"state")
    space.kill()

    def read(_pipe: Pipe) -> None:
        with client.attach(space.name) as cache:
            assert longest(cache, WHO, A) == (len(A), b"state")
            assert reserve(cache, B) == [None]

    assert space.child(read).wait() == 0


def test_a_new_epoch_is_mapped_within_one_call(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    save(cache, WHO, A, b"state")
    for _ in range(2):
        space.restart()
        assert longest(cache, WHO, A) == (len(A), b"state")
        assert granted(cache, B)
    space.kill()
    cache._look_round()  # as an idle worker does twice a second
    assert reserve(cache, C) == [None]
    space.start()
    assert longest(cache, WHO, A) == (len(A), b"state")
    assert space.stop() == 0
    assert longest(cache, WHO, A) is None, "a clean stop ends the epoch"
    space.start()
    cache.connection._look_again_ns = 0
    assert longest(cache, WHO, A) == (len(A), b"state")


def test_a_kept_mapping_outlives_the_larger_index_that_it_was_found_in(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    save(cache, WHO, A, b"state")
    hit = cache.get(key_of(A))
    assert hit is not None
    space.kill()
    space.start("--max-rows=1")
    assert longest(cache, WHO, A) == (len(A), b"state")
    reader = cache.connection.reader()
    assert reader is not None
    assert reader.slots <= hit.found.slot, "or this test shows nothing"
    assert not cache.connection.holds(hit.found)
    assert cache.get(key_of(A)) is not None


def test_a_worker_finds_its_way_back_after_the_namespace_was_cleaned(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    save(cache, WHO, A, b"state")
    before = count(cache, "save_handed_over")
    space.kill()
    clean.remove(space.name)
    space.start()
    assert eventually(lambda: save(cache, WHO, B, b"state"))
    assert longest(cache, WHO, C) == (len(B), b"state")
    assert count(cache, "save_handed_over") == before + 1, "what it has counted it has counted"
    page = cache.connection.page
    assert page is not None
    assert page.counters()["save_handed_over"] == before + 1


def test_the_index_of_the_time_before_is_let_go_with_its_epoch(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    save(cache, WHO, A, b"state")
    view = cache.connection._view
    assert view is not None
    assert cache.connection.decisions() is not None
    assert in_thread(lambda: longest(cache, WHO, A))()
    maps = [weakref.ref(mapping._mmap) for mapping in (view._mapping, view._decisions)]
    del view
    space.restart()
    gc.disable()
    try:
        assert longest(cache, WHO, A) == (len(A), b"state")
        cache.flush(WAIT_MS)
        assert [mapped() for mapped in maps] == [None, None], "at once, and not at some garbage collection"
    finally:
        gc.enable()


@pytest.mark.parametrize("stage", ["reserved", "filled", "handed over"])
def test_a_save_survives_the_death_of_the_coordinator_that_granted_it(space: Namespace, stage: str) -> None:
    space.start()
    cache = space.cache()
    save(cache, WHO, A, b"attached")
    made = granted(cache, B)
    made.payload(4096)
    payload = os.urandom(4096)
    if stage == "reserved":
        space.restart()
    made.payload(4096)[:] = payload
    if stage == "filled":
        space.restart()
    if stage == "handed over":
        space.kill()
    made.save(meta(WHO, B), PIECES, TOKEN_IDS)
    assert made.wait(WAIT_MS) == (stage != "handed over"), "told at once by the next one, or by nobody"
    if stage == "handed over":
        space.start()
    assert eventually(lambda: payload_of(cache, WHO, B)) == payload
    assert not list((space.names.tier("ram_file", 0) / "in").iterdir())


def test_a_question_of_another_epoch_is_asked_again_under_a_new_id(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    save(cache, WHO, A, b"state")
    asked = []

    def make(head: connection.Head) -> Await:
        asked.append(head["request"])
        request = Await(**head, key=key_of(A))
        return replace(request, epoch=1) if len(asked) == 1 else request

    assert cache.connection.ask(make, 10**10) == Outcome(True)
    assert len(set(asked)) == 2
    asked.clear()

    def always(head: connection.Head) -> Await:
        asked.append(head["request"])
        return replace(Await(**head, key=key_of(A)), epoch=1)

    assert cache.connection.ask(always, 10**10) is None, "once"
    assert len(asked) == 2


# ---- waiting


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start work in a thread; the result when it has ended."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()

    def join() -> Any:
        thread.join(WAIT_S)
        return results[0]

    return join


def parked(space: Namespace, waiting: Cache, cache: Cache) -> None:
    """Until the coordinator has the question: what it is sent later it handles later."""
    eventually(lambda: count(waiting, "waited") > 0)
    eventually(lambda: len(waiting.connection._mailboxes) < MAILBOXES)
    assert cache.connection.ask(lambda head: Await(**head, key=bytes(32)), 10**10) == Outcome(
        False, "nothing in flight"
    )


@pytest.mark.parametrize("end", ["publish", "cancel", "death"])
def test_a_waiter_is_told_when_the_save_ends(space: Namespace, end: str) -> None:
    space.start()
    waiting, cache = space.cache(), space.cache()
    save(waiting, WHO, A, b"attached")

    def own(pipe: Pipe) -> None:
        owner = client.attach(space.name)
        eventually(lambda: reserve(owner, B) != [None])
        made = next(iter(owner._slabs))
        pipe.say()
        pipe.hear()
        if end == "publish":
            hand_over(made, B, b"state")
            assert made.wait(WAIT_MS)
        else:
            made.cancel()
            owner.flush(WAIT_MS)
        pipe.say()
        pipe.hear()

    owner = space.child(own)
    owner.hear()
    told = in_thread(lambda: waiting.wait(key_of(B), WAIT_MS))
    parked(space, waiting, cache)
    if end == "death":
        owner.kill()
    else:
        owner.say()
    assert told() is (end == "publish")
    assert payload_of(cache, WHO, B) == (b"state" if end == "publish" else None)


def test_a_waiter_goes_on_alone_when_the_coordinator_dies(space: Namespace) -> None:
    space.start()
    waiting, cache = space.cache(), space.cache()
    save(waiting, WHO, A, b"attached")
    granted(cache, B)
    told = in_thread(lambda: waiting.wait(key_of(B), 10 * WAIT_MS))
    parked(space, waiting, cache)
    space.kill()
    assert told() is False


def test_a_wait_ends_at_its_own_limit(space: Namespace) -> None:
    space.start()
    cache, waiting = space.cache(), space.cache()
    granted(cache, B)
    assert waiting.wait(key_of(B), 30) is False
    assert len(waiting.connection._mailboxes) == MAILBOXES


def test_threads_of_one_worker_wait_side_by_side(space: Namespace) -> None:
    space.start()
    cache, waiting = space.cache(), space.cache()
    texts = [prompt(1000 + number, "thread") for number in range(MAILBOXES)]
    slabs = [granted(cache, text) for text in texts]
    save(waiting, WHO, A, b"attached")
    told = [in_thread(lambda text=text: waiting.wait(key_of(text), WAIT_MS)) for text in texts]  # type: ignore[misc]
    eventually(lambda: not waiting.connection._mailboxes)
    before = count(waiting, "save_dropped_queue_full")
    assert waiting.wait(key_of(texts[0]), WAIT_MS) is False, "all mailboxes are taken: counted, no error"
    assert reserve(waiting, B) == [None]
    assert count(waiting, "save_dropped_queue_full") == before + 2
    for number, (made, text) in enumerate(zip(slabs, texts, strict=True)):
        if number % 2:
            made.cancel()
        else:
            hand_over(made, text, b"state")
    assert [join() for join in told] == [number % 2 == 0 for number in range(MAILBOXES)]
    assert len(waiting.connection._mailboxes) == MAILBOXES


def test_threads_of_one_worker_save_and_look_up_side_by_side(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    save(cache, WHO, A, b"attached")

    def work(number: int) -> bool:
        for turn in range(10):
            text, payload = prompt(1500 + turn, f"thread {number}"), os.urandom(2000)
            while not save(cache, WHO, text, payload):
                pass
            if longest(cache, WHO, text + b"more") != (len(text), payload):
                return False
        return True

    assert all(join() for join in [in_thread(lambda number=number: work(number)) for number in range(6)])  # type: ignore[misc]


def test_one_thread_uses_one_mailbox(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    for size in range(1000, 1020):
        eventually(lambda size=size: save(cache, WHO, prompt(size, "many"), b"state"))  # type: ignore[misc]
    assert len(list(space.names.fifos.iterdir())) <= 2, "its own, and the helper's beside it"


# ---- questions without an answer


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a coordinator that is stopped: nobody waits long for it."""
    monkeypatch.setattr(client, "RESERVE_TIMEOUT_MS", 100)


def test_a_grant_that_came_too_late_is_taken_back(space: Namespace, impatient: None) -> None:
    space.start()
    cache, other = space.cache(), space.cache()
    save(cache, WHO, A, b"attached")
    os.kill(space.pid, signal.SIGSTOP)
    assert reserve(cache, B) == [None]
    os.kill(space.pid, signal.SIGCONT)
    eventually(lambda: reserve(other, B) != [None])


def test_a_grant_that_came_too_late_is_taken_back_even_if_the_queue_was_full_then(
    space: Namespace, impatient: None
) -> None:
    space.start()
    cache, other = space.cache(), space.cache()
    save(cache, WHO, A, b"attached")
    save(other, WHO, A, b"attached")
    os.kill(space.pid, signal.SIGSTOP)
    garbage = RequestQueue(space.names)

    def fill_then_wait(*arguments: Any) -> None:
        while garbage.send(b"garbage"):
            pass

    page = cache.connection.page
    assert page is not None
    page.wait = fill_then_wait  # type: ignore[method-assign,assignment]
    assert reserve(cache, B) == [None]
    del page.wait
    garbage.close()
    assert cache.connection._cancels, "the queue took no cancel"
    os.kill(space.pid, signal.SIGCONT)
    cache.do(lambda: None)
    eventually(lambda: reserve(other, B) != [None])
    assert not cache.connection._cancels


def test_a_signal_handlers_exception_during_a_wait_loses_no_reservation(space: Namespace) -> None:
    space.start()
    cache, other = space.cache(), space.cache()
    save(cache, WHO, A, b"attached")

    class Stop(BaseException):
        pass

    def interrupted(*_: Any) -> None:
        raise Stop

    page = cache.connection.page
    assert page is not None
    page.wait = interrupted  # type: ignore[method-assign,assignment]
    with pytest.raises(Stop):
        reserve(cache, B)
    del page.wait
    assert len(cache.connection._mailboxes) == MAILBOXES
    eventually(lambda: reserve(other, B) != [None])


def test_a_full_queue_is_a_skipped_save_and_a_count(space: Namespace, impatient: None) -> None:
    space.start()
    cache = space.cache()
    save(cache, WHO, A, b"attached")
    os.kill(space.pid, signal.SIGSTOP)
    filler = RequestQueue(space.names)
    while filler.send(b"garbage"):
        pass
    assert reserve(cache, B) == [None]
    assert count(cache, "save_dropped_queue_full") == 1
    os.kill(space.pid, signal.SIGCONT)
    filler.close()
    eventually(lambda: reserve(cache, B) != [None])


def test_another_thread_may_lose_the_epoch_in_the_middle_of_a_question(
    space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.start()
    cache = space.cache()
    save(cache, WHO, A, b"attached")
    real = ControlPage.coordinator_lives

    def lives(control: Any) -> bool:
        cache.connection._view = None  # what a remap in another thread does first
        return real(control)

    monkeypatch.setattr(ControlPage, "coordinator_lives", lives)
    assert cache.wait(key_of(A), WAIT_MS) is True
    monkeypatch.undo()
    assert cache.connection.reader() is not None
    view = cache.connection._view
    assert view is not None
    cache.connection._view = None
    assert in_thread(lambda: view.reader().get(key_of(A)))() is not None, "a reader that was about to read"


# ---- damaged rows


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "a byte": lambda content: content[:1],
    "head cut": lambda content: content[:3000],
    "payload cut": lambda content: content[:-1],
    "payload flipped": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "zeroed": lambda content: bytes(len(content)),
    "random": lambda content: os.urandom(len(content)),
    "another row": lambda content: slab_file(OTHER, B, b"state"),
    "future version": lambda content: content[:3] + b"\x09" + content[4:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_slab_is_dropped_once_and_the_next_shorter_row_serves(
    space: Namespace, damage: str
) -> None:
    space.start()
    cache = space.cache()
    save(cache, WHO, A, b"shorter")
    save(cache, WHO, B, b"longer")
    path = space.names.tier("ram_file", 0) / file_name(key_of(B))
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    for _ in range(3):
        assert longest(cache, WHO, C) == (len(A), b"shorter")
    assert count(cache, "corrupt_rows") == 1
    eventually(lambda: not path.exists())
    eventually(lambda: space.stat("corrupt_rows") == 1)
    assert space.log().count("is dropped") == 1
    assert save(cache, WHO, B, b"again")
    assert longest(cache, WHO, C) == (len(B), b"again")


@pytest.mark.parametrize("planted", ["gone", "mode", "symlink", "fifo", "directory", "stranger"])
def test_a_slab_that_is_not_ours_or_not_there_is_dropped_once(space: Namespace, planted: str) -> None:
    if planted == "stranger" and os.geteuid() != 0:
        pytest.skip("needs root: a second uid")
    space.start()
    cache = space.cache()
    save(cache, WHO, A, b"shorter")
    save(cache, WHO, B, b"longer")
    path = space.names.tier("ram_file", 0) / file_name(key_of(B))
    content = path.read_bytes()
    path.unlink()
    if planted == "symlink":
        path.symlink_to("/etc/passwd")
    elif planted == "fifo":
        os.mkfifo(path, 0o600)
    elif planted == "directory":
        path.mkdir()
    elif planted != "gone":
        path.write_bytes(content)
        path.chmod(0o644 if planted == "mode" else 0o600)
        if planted == "stranger":
            os.chown(path, 64_001, 64_001)
    for _ in range(3):
        assert longest(cache, WHO, C) == (len(A), b"shorter")
    assert count(cache, "foreign_objects") == (planted != "gone")
    eventually(lambda: space.stat("corrupt_rows") == 1)
    if planted != "directory":
        eventually(lambda: save(cache, WHO, B, b"again"))
        assert longest(cache, WHO, C) == (len(B), b"again")


def test_a_row_that_a_device_cannot_read_is_left_alone_for_a_while_and_not_forgotten(
    space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.start()
    cache = space.cache()
    save(cache, WHO, A, b"shorter")
    save(cache, WHO, B, b"longer")
    cache.let_go()
    tried = []
    real = shm.Mapping.open

    def failing(path: Any, **options: Any) -> Any:
        if path.name == file_name(key_of(B)):
            tried.append(path)
            raise OSError(errno.EIO, "read error")
        return real(path, **options)

    with monkeypatch.context() as broken:
        broken.setattr(shm.Mapping, "open", failing)
        for _ in range(3):
            assert longest(cache, WHO, C) == (len(A), b"shorter")
        assert len(tried) == count(cache, "cache_faults") == 1
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + client._UNREADABLE_S)
    assert longest(cache, WHO, C) == (len(B), b"longer")


def test_a_row_that_did_not_restore_is_dropped_everywhere(space: Namespace) -> None:
    space.start()
    cache, other = space.cache(), space.cache()
    save(cache, WHO, A, b"state")
    hit = cache.get(key_of(A))
    assert hit is not None
    cache.drop(hit, "llama.cpp refused it")
    assert payload_of(cache, WHO, A) is None
    eventually(lambda: payload_of(other, WHO, A) is None)
    assert count(cache, "restore_refused") == 1
    assert "llama.cpp refused it" in space.log()


def test_a_row_evicted_between_lookup_and_mapping_is_a_miss(
    space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.start()
    cache, other = space.cache(), space.cache()
    save(cache, WHO, A, b"state")
    found = cache.get(key_of(A))
    assert found is not None
    real = shm.Mapping.open

    def late(path: Any, **options: Any) -> Any:
        if path.name == file_name(key_of(A)):
            monkeypatch.undo()
            hit = other.get(key_of(A))
            assert hit is not None
            other.drop(hit, "leaves")
            eventually(lambda: not path.exists())
        return real(path, **options)

    cache.let_go()
    monkeypatch.setattr(shm.Mapping, "open", late)
    assert payload_of(cache, WHO, A) is None
    assert count(cache, "corrupt_rows") == count(cache, "cache_faults") == 0


# ---- room


def test_a_state_that_turns_out_longer_is_extended(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    made = granted(cache, B, payload_bytes=1000)
    payload = os.urandom(50_000)
    hand_over(made, B, payload)
    assert made.wait(WAIT_MS)
    assert payload_of(cache, WHO, B) == payload
    page = cache.connection.page
    assert page is not None
    assert page.words[Word.UNNAMED] == 0


def test_a_state_beyond_the_budget_is_out_of_space_and_given_back(space: Namespace) -> None:
    space.start("--ram-file-bytes=100K")
    cache = space.cache()
    assert reserve(cache, A, payload_bytes=200_000) == [None]
    assert count(cache, "save_dropped_no_space") == 1
    made = granted(cache, B, payload_bytes=1000)
    with pytest.raises(OutOfSpace) as caught:
        made.payload(200_000)
    assert caught.value.need_bytes == PAYLOAD_OFFSET + 200_000
    assert count(cache, "save_dropped_no_space") == 2
    assert not made.wait(0)
    eventually(lambda: space.stat("saves_in_flight") == 0)
    assert save(cache, WHO, B, b"small enough")


def test_a_slab_that_cannot_be_made_is_out_of_space_and_the_next_one_works(
    space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.start()
    cache = space.cache()
    save(cache, WHO, A, b"attached")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shm, "allocate", full)
    made = granted(cache, B)
    with pytest.raises(OutOfSpace):
        made.payload(100)
    monkeypatch.undo()
    assert save(cache, WHO, C, b"state")
    page = cache.connection.page
    assert page is not None
    assert page.words[Word.UNNAMED] == 0


def test_bytes_are_stated_before_they_are_taken_and_until_they_have_a_name(
    space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.start()
    cache = space.cache()
    save(cache, WHO, A, b"attached")
    page = cache.connection.page
    assert page is not None
    seen: dict[str, int] = {}
    real_allocate, real_link = shm.allocate, slab.UnnamedSlab.link

    def allocate(fd: int, size_bytes: int) -> None:
        seen["allocate"] = page.words[Word.UNNAMED]
        real_allocate(fd, size_bytes)

    def link(made: slab.UnnamedSlab, directory_fd: int, name: str) -> None:
        seen["link"] = page.words[Word.UNNAMED]
        real_link(made, directory_fd, name)

    monkeypatch.setattr(shm, "allocate", allocate)
    monkeypatch.setattr(slab.UnnamedSlab, "link", link)
    assert save(cache, WHO, B, bytes(4096))
    assert seen == {"allocate": PAYLOAD_OFFSET + 4096, "link": PAYLOAD_OFFSET + 4096}
    assert page.words[Word.UNNAMED] == 0


# ---- a slab's end


def test_cancelling_gives_all_back_and_twice_is_once(space: Namespace) -> None:
    space.start()
    cache, other = space.cache(), space.cache()
    made = granted(cache, B)
    made.cancel()
    made.cancel()
    assert count(cache, "save_dropped_cancelled") == 1
    assert cache.flush(WAIT_MS)
    assert not made.wait(0)
    assert granted(other, B)


def test_what_is_handed_over_cannot_be_cancelled(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    made = granted(cache, B)
    hand_over(made, B, b"state")
    made.cancel()
    assert made.wait(WAIT_MS)
    assert count(cache, "save_dropped_cancelled") == 0
    made.cancel()
    assert payload_of(cache, WHO, B) == b"state"


def test_a_mistake_in_what_is_saved_costs_that_save_alone(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    made = granted(cache, B)
    made.payload(100)
    made.save(meta(WHO, B, token_count=7), PIECES, TOKEN_IDS)
    assert not made.wait(WAIT_MS)
    assert count(cache, "save_dropped_failed") == 1
    cache.do(lambda: {}.clear(1))  # type: ignore[call-arg]
    assert save(cache, WHO, B, b"state"), "the key was given back, and the helper lives"


def test_closing_waits_for_what_was_handed_over_and_frees_the_rest(space: Namespace) -> None:
    space.start()
    cache, other = space.cache(), space.cache()
    save(other, WHO, A, b"attached")
    gc.collect()
    before = unnamed_slabs()
    handed, held = granted(cache, B), granted(cache, C, payload_bytes=4 << 20)
    held.payload(100)
    hand_over(handed, B, b"state")
    assert unnamed_slabs() > before
    cache.close(WAIT_MS)
    assert unnamed_slabs() == before, "what has no name is nobody's any more"
    assert payload_of(other, WHO, B) == b"state"
    held.cancel()
    eventually(lambda: save(cache, WHO, C, b"again"))  # a closed cache attaches anew
    page = cache.connection.page
    assert page is not None
    assert page.words[Word.UNNAMED] == 0


# ---- kept mappings


def test_an_idle_worker_lets_go_of_rows_that_have_left(space: Namespace) -> None:
    space.start()
    cache, other = space.cache(), space.cache()
    save(cache, WHO, A, b"state")
    payload_of(cache, WHO, A)
    page = cache.connection.page
    assert page is not None
    assert page.words[Word.MAPPED] == PAYLOAD_OFFSET + len(b"state")
    hit = other.get(key_of(A))
    assert hit is not None
    other.drop(hit, "leaves")
    eventually(lambda: page.words[Word.MAPPED] == 0)


def test_a_view_in_use_outlives_its_row_and_is_reported(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    save(cache, WHO, A, b"state")
    hit = cache.get(key_of(A))
    assert hit is not None
    page = cache.connection.page
    assert page is not None
    cache.drop(hit, "leaves")
    eventually(lambda: page.words[Word.ORPHANED] == PAYLOAD_OFFSET + len(b"state"))
    assert bytes(hit.image.payload) == b"state"
    del hit
    gc.collect()
    eventually(lambda: page.words[Word.ORPHANED] == 0)


def test_kept_mappings_are_bounded(space: Namespace) -> None:
    space.start()
    cache = space.cache(kept_mapping_bytes=2 * (PAYLOAD_OFFSET + 5))
    for text in (A, B, C):
        save(cache, WHO, text, b"state")
        payload_of(cache, WHO, text)
    assert cache.statistics().kept_bytes == 2 * (PAYLOAD_OFFSET + 5)
    assert count(cache, "mapped_slabs") == 3
    payload_of(cache, WHO, C)
    assert count(cache, "mapped_slabs") == 3
    payload_of(cache, WHO, A)
    assert count(cache, "mapped_slabs") == 4


# ---- fork


def test_a_forked_child_attaches_anew_and_its_end_is_its_own(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    save(cache, WHO, A, b"of the parent")
    payload_of(cache, WHO, A)
    held = granted(cache, C, payload_bytes=1 << 20)
    held.payload(10)

    def work(pipe: Pipe) -> None:
        before = cache.connection.client
        assert cache.connection.page is None
        assert cache.statistics().kept_bytes == 0
        assert payload_of(cache, WHO, A) == b"of the parent"
        held.cancel()  # the parent's, of which the child knows nothing
        assert save(cache, WHO, B, b"of the child")
        assert cache.connection.client == before
        page = cache.connection.page
        assert page is not None
        assert page.words[Word.PID] == os.getpid()
        pipe.say(cache.connection.client)
        pipe.hear()

    child = space.child(work)
    assert child.hear() != cache.connection.client
    assert len(list(space.names.pages.iterdir())) == 2
    child.kill()
    eventually(lambda: len(list(space.names.pages.iterdir())) == 1)
    assert payload_of(cache, WHO, B) == b"of the child"
    hand_over(held, C, b"of the parent")
    assert held.wait(WAIT_MS)


def test_a_parent_that_dies_is_gone_although_its_child_runs(space: Namespace) -> None:
    space.start()

    def parent(pipe: Pipe) -> None:
        cache = client.attach(space.name)
        save(cache, WHO, A, b"state")
        granted(cache, B)
        pid = os.fork()
        if pid == 0:
            signal.pause()
        pipe.say(pid)
        signal.pause()

    child = space.child(parent)
    grandchild = child.hear()
    try:
        child.kill()
        other = space.cache()
        eventually(lambda: reserve(other, B) != [None])
        eventually(lambda: len(list(space.names.pages.iterdir())) == 1)
    finally:
        os.kill(grandchild, signal.SIGKILL)


# ---- a full /dev/shm


@needs_root
def test_a_dev_shm_that_fills_up_is_a_skipped_save_and_no_sigbus() -> None:
    from support import in_small_shm  # noqa: PLC0415

    def small() -> None:
        with Namespace(ram_file_bytes="8M", max_rows=64) as space:
            space.start()
            cache = space.cache()
            assert save(cache, WHO, A, b"state")
            filler = shm.SHM_ROOT / "filler"
            filler.write_bytes(bytes(shm.free_bytes() - (64 << 10)))
            made = granted(cache, B, payload_bytes=1 << 20)
            with pytest.raises(OutOfSpace):
                made.payload(1 << 20)
            assert count(cache, "save_dropped_no_space") == 1
            assert payload_of(cache, WHO, A) == b"state"
            filler.unlink()
            assert save(cache, WHO, B, bytes(1 << 20))

    in_small_shm(24 << 20, small)


def test_protocol_and_page_agree_on_the_number_of_mailboxes() -> None:
    assert protocol.NO_MAILBOX == MAILBOXES
