"""kill -9 of the coordinator at every numbered step of start, save, eviction and stop.

After each: a worker that is there goes on, the next coordinator starts without help, what was complete is
there, nothing else is, and `check` finds nothing.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support import (
    PAYLOAD_OFFSET,
    PIECES,
    TOKEN_IDS,
    WAIT_S,
    Namespace,
    die_at,
    eventually,
    identity,
    meta,
    payload_of,
    plan,
    prompt,
    save,
)

from shmcache import server, shm
from shmcache.check import check
from shmcache.client import Cache
from shmcache.control import OwnedControlPage
from shmcache.coordinator import Coordinator
from shmcache.index import IndexWriter, Row
from shmcache.key import row_address
from shmcache.mq import ServerQueue
from shmcache.page import ClientPage
from shmcache.reservation import Reservations
from shmcache.server import Clients, Server
from shmcache.tiers.base import Tier
from shmcache.tiers.memory import MemoryTier
from shmcache.tiers.supervisor import Lane

WHO = identity()
A, B, C = (prompt(size, "chat") for size in (1000, 2048, 3100))
PAYLOAD = b"p" * 4096
SLAB = PAYLOAD_OFFSET + len(PAYLOAD)


def key_of(text: bytes) -> bytes:
    return row_address(WHO.seed, text).key


def dead(space: Namespace) -> None:
    assert space.coordinator is not None
    assert space.coordinator.wait(WAIT_S) == -signal.SIGKILL


def sound(space: Namespace) -> None:
    """At rest nothing disagrees, and of former epochs nothing is left."""
    eventually(lambda: check(space.name) == [])
    assert len({path.name.split(".")[3] for path in space.names.epoch_segments()}) == 1
    assert not list((space.names.tier("ram_file", 0) / "in").iterdir())


def rows(cache: Cache) -> set[bytes]:
    """Which of the three texts are served, and right."""
    found = set()
    for text in (A, B, C):
        payload = payload_of(cache, WHO, text)
        assert payload in (None, PAYLOAD)
        if payload is not None:
            found.add(text)
    return found


# ---- start

START: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("1 lock", OwnedControlPage, "acquire", {"after": True}),
    ("2 directories", shm, "make_directory", {"nth": 3, "after": True}),
    ("3 queue", ServerQueue, "__init__", {"after": True}),
    ("4 pages", Clients, "look", {"after": True}),
    ("5 budget", server, "_budgets", {"after": True}),
    ("6 tier", Lane, "__init__", {"after": True}),
    ("7 segment", IndexWriter, "create", {}),
    ("8 index", IndexWriter, "create", {"after": True}),
    ("9 half adopted", IndexWriter, "publish", {"nth": 2}),
    ("10 adopted", Coordinator, "adopt", {"after": True}),
    ("11 drained", ServerQueue, "receive", {"after": True}),
    ("12 before the epoch", OwnedControlPage, "open_epoch", {}),
    ("13 after the epoch", OwnedControlPage, "open_epoch", {"after": True}),
    ("14 before the old ones go", Server, "_remove_older", {}),
    ("15 after the old ones went", Server, "_remove_older", {"after": True}),
]


@pytest.mark.parametrize("step", START, ids=lambda step: step[0])
def test_a_start_that_dies_is_no_burden_for_the_next(
    space: Namespace, step: tuple[str, Any, str, dict[str, Any]]
) -> None:
    name, owner, attribute, options = step
    space.start()
    cache = space.cache()
    for text in (A, B):
        assert save(cache, WHO, text, PAYLOAD)
    space.kill()
    space.start(patch=lambda: die_at(owner, attribute, **options), ready=False)
    dead(space)
    # Before the epoch the old index is there, after it the new one is: a worker always reads.
    assert rows(cache) == {A, B}, name
    assert "rows=2 " in space.start()
    assert rows(cache) == {A, B}
    assert save(cache, WHO, C, PAYLOAD)
    sound(space)


def test_a_start_that_dies_between_two_epochs_means_uncached_until_the_next(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    save(cache, WHO, A, PAYLOAD)
    space.kill()

    def patch() -> None:
        real = OwnedControlPage.open_epoch

        def half(page: OwnedControlPage, *_: Any) -> None:
            page.close_epoch()
            die_at(os, "getpid")
            os.getpid()
            real(page, *_)

        setattr(OwnedControlPage, "open_epoch", half)  # noqa: B010 (a method)

    space.start(patch=patch, ready=False)
    dead(space)
    assert rows(cache) == set()
    space.start()
    cache.connection._look_again_ns = 0
    assert rows(cache) == {A}
    sound(space)


# ---- a save


def armed(key: bytes, arm: Callable[[], None]) -> None:
    """Count steps from the publication of this key on: those of rows before it are not meant."""
    real = IndexWriter.publish

    def publish(index: IndexWriter, row: Row, coldest: Any) -> Any:
        if row.key == key:
            arm()
        return real(index, row, coldest)

    setattr(IndexWriter, "publish", publish)  # noqa: B010 (a method)


def at_store(number: int) -> Callable[[], None]:
    """Before the nth copy or store, P1 to P7 of index."""

    def arm() -> None:
        steps = iter(range(1, 1 << 30))
        for name in ("_copy", "_store"):
            real = getattr(IndexWriter, name)

            def dying(index: IndexWriter, *arguments: Any, real: Any = real) -> None:
                if next(steps) == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                real(index, *arguments)

            setattr(IndexWriter, name, dying)

    return lambda: armed(key_of(B), arm)


SAVE: list[tuple[str, Callable[[], None]]] = [
    ("received", lambda: die_at(Coordinator, "_written")),
    ("before it is checked", lambda: die_at(Tier, "check")),
    ("checked", lambda: die_at(Tier, "check", after=True)),
    ("before the link", lambda: die_at(MemoryTier, "link")),
    ("two names", lambda: die_at(os, "link", nth=2, after=True)),  # the control page has been tried first
    ("one name", lambda: die_at(Tier, "refuse", after=True)),
    ("linked", lambda: die_at(MemoryTier, "link", after=True)),
    *((f"index step P{number}", at_store(number)) for number in range(1, 8)),
    ("published", lambda: armed(key_of(B), lambda: die_at(Coordinator, "_descend"))),
    ("before the reply", lambda: armed(key_of(B), lambda: die_at(ClientPage, "send"))),
    ("after the reply", lambda: armed(key_of(B), lambda: die_at(ClientPage, "send", after=True))),
]


@pytest.mark.parametrize(("name", "patch"), SAVE, ids=[name for name, _ in SAVE])
def test_a_save_that_was_handed_over_is_there_whenever_the_coordinator_dies(
    space: Namespace, name: str, patch: Callable[[], None]
) -> None:
    space.start()
    save(space.cache(), WHO, A, PAYLOAD)
    space.kill()
    space.start(patch=patch)
    cache, reader = space.cache(), space.cache()
    (made,) = cache.reserve([plan(WHO, B, len(PAYLOAD))], key_of(A), cache.forget).slabs
    assert made is not None
    made.payload(len(PAYLOAD))[:] = PAYLOAD
    made.save(meta(WHO, B, base_key=key_of(A)), PIECES, TOKEN_IDS)
    is_told = made.wait(int(WAIT_S * 1000))
    dead(space)
    assert is_told == (name == "after the reply"), "told if and only if the reply was complete"
    seen = rows(reader)
    assert seen >= {A}
    assert B in seen or not is_told
    space.start()
    eventually(lambda: rows(reader) == {A, B})
    sound(space)
    assert save(cache, WHO, C, PAYLOAD)


# ---- an eviction


def at_removal(number: int) -> Callable[[], None]:
    """Before the nth store of a removal, R1 to R3 of index."""

    def patch() -> None:
        real = IndexWriter._remove

        def remove(index: IndexWriter, found: Any) -> None:
            die_at(IndexWriter, "_store", nth=number)
            real(index, found)

        setattr(IndexWriter, "_remove", remove)  # noqa: B010 (a method)

    return patch


EVICTION: list[tuple[str, Callable[[], None], bool]] = [
    ("reserved", lambda: die_at(Reservations, "open", after=True), False),
    *((f"index step R{number}", at_removal(number), False) for number in range(1, 4)),
    ("out of the index", lambda: die_at(Coordinator, "_forget_row"), False),
    ("before the unlink", lambda: die_at(Tier, "remove"), False),
    ("unlinked", lambda: die_at(Tier, "remove", after=True), True),
    ("before the reply", lambda: die_at(ClientPage, "send"), True),
]


@pytest.mark.parametrize(("name", "patch", "is_gone"), EVICTION, ids=[name for name, _, _ in EVICTION])
def test_an_eviction_that_dies_leaves_a_row_whole_or_gone(
    name: str, patch: Callable[[], None], is_gone: bool
) -> None:
    with Namespace(ram_file_bytes=2 * SLAB) as space:
        space.start()
        cache = space.cache()
        for text in (A, B):
            assert save(cache, WHO, text, PAYLOAD)
        space.kill()
        space.start(patch=patch)
        assert rows(cache) == {A, B}
        cache.let_go()
        assert cache.reserve([plan(WHO, C, len(PAYLOAD))], key_of(B), cache.forget).slabs == [None]
        dead(space)
        assert rows(cache) >= {B}, "what the save extends stays"
        space.start()
        assert eventually(lambda: rows(cache)) == ({B} if is_gone else {A, B})
        sound(space)
        assert save(cache, WHO, C, PAYLOAD, base=key_of(B))
        assert rows(cache) == {B, C}
        sound(space)


# ---- a stop

STOP: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("uses stored", Coordinator, "store_use", {"nth": 2, "after": True}),
    ("before the epoch ends", OwnedControlPage, "close_epoch", {}),
    ("the epoch has ended", OwnedControlPage, "close_epoch", {"after": True}),
    ("lanes closed", Lane, "close", {"after": True}),
    ("queue closed", ServerQueue, "close", {"after": True}),
]


@pytest.mark.parametrize("step", STOP, ids=lambda step: step[0])
def test_a_stop_that_dies_is_as_good_as_a_kill(
    space: Namespace, step: tuple[str, Any, str, dict[str, Any]]
) -> None:
    _name, owner, attribute, options = step
    space.start(patch=lambda: die_at(owner, attribute, **options))
    cache = space.cache()
    for text in (A, B):
        assert save(cache, WHO, text, PAYLOAD)
    assert space.stop() == -signal.SIGKILL
    assert rows(cache) in ({A, B}, set())
    assert "rows=2 " in space.start()
    cache.connection._look_again_ns = 0
    assert rows(cache) == {A, B}
    sound(space)


def test_bytes_that_have_a_name_and_are_not_announced_yet_are_granted_to_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Linked after a restart, `written` not sent: stated no more, named by nobody's reservation."""
    with Namespace(ram_file_bytes=2 * SLAB) as space:
        space.start()
        cache, other = space.cache(), space.cache()
        assert other.connection.reader() is not None
        (made,) = cache.reserve([plan(WHO, A, len(PAYLOAD))], None, cache.forget).slabs
        assert made is not None
        made.payload(len(PAYLOAD))[:] = PAYLOAD
        space.kill()
        # No tick and no sweep comes in time: only what a reserve looks at itself counts.
        space.start(patch=lambda: setattr(server, "TICK_S", 3_600.0))
        assert made.is_ready(0)
        is_linked, goes_on = threading.Event(), threading.Event()
        real = cache.connection.ask

        def ask(*arguments: Any) -> Any:
            is_linked.set()
            assert goes_on.wait(WAIT_S)
            return real(*arguments)

        monkeypatch.setattr(cache.connection, "ask", ask)
        made.save(meta(WHO, A), PIECES, TOKEN_IDS)
        assert is_linked.wait(WAIT_S)
        slabs = other.reserve([plan(WHO, text, len(PAYLOAD)) for text in (B, C)], None, other.forget).slabs
        named = len(list(space.names.directory.glob("ram_file/*.kvc")))
        named += len(list(space.names.directory.glob("ram_file/in/*")))
        assert sum(slab is not None for slab in slabs) + named <= 2
        goes_on.set()
        made.wait(int(WAIT_S * 1000))
        for slab in slabs:
            if slab is not None:
                slab.cancel()
