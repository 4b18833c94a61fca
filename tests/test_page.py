"""A worker's page: liveness, counts, touches that cannot get lost unseen, and replies that cannot be torn."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import stat
import threading
import time
from collections.abc import Iterator

import pytest
from support import Namespace, Pipe, eventually, in_small_shm, needs_root

from shmcache import shm
from shmcache.errors import ForeignObject, LayoutMismatch
from shmcache.page import (
    BODY_BYTES,
    COUNTERS,
    DECISION_RING_OFFSET,
    MAILBOX_BYTES,
    MAILBOX_OFFSET,
    MAILBOXES,
    OUTBOX_BYTES,
    RING_WORDS,
    SIZE_BYTES,
    ClientPage,
    Word,
    WorkerPage,
)

CLIENT = 0x1234


@pytest.fixture(autouse=True)
def directories(space: Namespace) -> None:
    for path in (space.names.directory, space.names.pages, space.names.fifos):
        shm.make_directory(path)


@pytest.fixture
def worker(space: Namespace) -> Iterator[WorkerPage]:
    made = WorkerPage(space.names, CLIENT)
    yield made
    made.close()


@pytest.fixture
def seen(space: Namespace, worker: WorkerPage) -> Iterator[ClientPage]:
    """The same page as the coordinator sees it."""
    with contextlib.closing(ClientPage(space.names, CLIENT)) as opened:
        yield opened


def deadline(after_s: float = 20.0) -> int:
    return time.monotonic_ns() + int(after_s * 1e9)


# ---- the page


def test_the_layout_leaves_no_overlap() -> None:
    assert max(Word) < 512 // 8
    assert 512 + 8 * len(COUNTERS) <= 4096
    assert MAILBOX_OFFSET == 4096 + 8 * RING_WORDS
    assert DECISION_RING_OFFSET == MAILBOX_OFFSET + MAILBOXES * MAILBOX_BYTES
    assert SIZE_BYTES == DECISION_RING_OFFSET + 8 * RING_WORDS
    assert MAILBOX_OFFSET % 8 == 0
    assert len(set(COUNTERS)) == len(COUNTERS)


def test_a_page_has_its_name_only_with_its_lock(space: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    real, locked = shm.give_name, []

    def give_name(fd: int, directory_fd: int, name: str) -> None:
        other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        locked.append(shm.is_locked(other))
        os.close(other)
        assert not list(space.names.pages.iterdir())
        real(fd, directory_fd, name)

    monkeypatch.setattr(shm, "give_name", give_name)
    WorkerPage(space.names, CLIENT).close()
    assert locked == [True]


def test_a_page_lives_as_long_as_its_process(space: Namespace) -> None:
    def work(pipe: Pipe) -> None:
        made = WorkerPage(space.names, CLIENT)
        made.count("hit_exact", 3)
        pipe.say()
        signal.pause()

    child = space.child(work)
    child.hear()
    seen = ClientPage(space.names, CLIENT)
    assert seen.lives()
    assert seen.words[Word.PID] == child.pid
    child.kill()
    eventually(lambda: not seen.lives())
    assert seen.counters()["hit_exact"] == 3, "what it has counted stays readable"
    seen.unlink()
    seen.close()
    assert not list(space.names.pages.iterdir())


def test_a_forked_child_that_leaves_its_parents_page_does_not_keep_it_alive(
    space: Namespace, worker: WorkerPage, seen: ClientPage
) -> None:
    def leave(pipe: Pipe) -> None:
        worker.close_in_child()
        pipe.say()
        signal.pause()

    child = space.child(leave)
    child.hear()
    assert seen.lives()
    os.close(os.dup(worker._fd))  # closing another descriptor of it changes nothing
    assert seen.lives()
    worker.close()
    assert not seen.lives(), "the child still runs and holds nothing"
    worker._fd = os.open("/dev/null", os.O_RDONLY)  # the fixture closes it again


def test_leaving_removes_the_names_before_the_lock(space: Namespace) -> None:
    made = WorkerPage(space.names, CLIENT)
    made.prepare_wait(3)
    seen = ClientPage(space.names, CLIENT)
    made.close()
    assert not list(space.names.pages.iterdir())
    assert not list(space.names.fifos.iterdir())
    assert not seen.lives()
    seen.close()


@pytest.mark.parametrize("change", ["layout", "short", "empty"])
def test_a_page_of_another_build_is_a_mismatch(space: Namespace, worker: WorkerPage, change: str) -> None:
    path = space.names.pages / f"{CLIENT:016x}"
    if change == "layout":
        worker.words[Word.LAYOUT] ^= 1
    else:
        other = space.names.pages / f"{7:016x}"
        other.write_bytes(path.read_bytes()[: 4096 if change == "short" else 0])
        other.chmod(0o600)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (names, not paths)
    with pytest.raises(LayoutMismatch):
        ClientPage(space.names, CLIENT if change == "layout" else 7)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.parametrize("plant", ["mode", "symlink", "fifo", "directory", "stranger"])
def test_a_page_that_is_not_ours_is_not_read(space: Namespace, plant: str) -> None:
    path = space.names.pages / f"{CLIENT:016x}"
    if plant in ("mode", "stranger"):
        path.write_bytes(bytes(SIZE_BYTES))
        path.chmod(0o644 if plant == "mode" else 0o600)
        if plant == "stranger":
            if os.geteuid() != 0:
                pytest.skip("needs root: a second uid")
            os.chown(path, 64_001, 64_001)
    elif plant == "symlink":
        path.symlink_to("/etc/passwd")
    elif plant == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(ForeignObject):
        ClientPage(space.names, CLIENT)


@needs_root
def test_a_page_that_finds_no_room_leaves_no_descriptor_behind() -> None:
    def full() -> None:
        with Namespace() as space:
            directories_of(space)
            filler = shm.SHM_ROOT / "filler"
            filler.write_bytes(bytes(shm.free_bytes()))
            before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
            for _ in range(3):
                with pytest.raises(OSError, match="No space left"):
                    WorkerPage(space.names, CLIENT)
            gc.collect()
            assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
            assert not list(space.names.pages.iterdir())

    def directories_of(space: Namespace) -> None:
        for path in (space.names.directory, space.names.pages, space.names.fifos):
            shm.make_directory(path)

    in_small_shm(1 << 20, full)


# ---- counts and touches


def test_what_is_counted_is_read_by_name(worker: WorkerPage, seen: ClientPage) -> None:
    for number, name in enumerate(COUNTERS):
        worker.count(name, number)
        worker.count(name)
    assert seen.counters() == {name: number + 1 for number, name in enumerate(COUNTERS)}
    assert worker.counters() == seen.counters()


def test_touches_arrive_once_and_in_order(worker: WorkerPage, seen: ClientPage) -> None:
    assert seen.drain_touches() == []
    for touch in (5, 6, 1 << 63):
        worker.use(touch, None)
    assert seen.drain_touches() == [5, 6, 1 << 63]
    assert seen.drain_touches() == []


def test_touches_before_the_first_look_are_not_lost(space: Namespace, worker: WorkerPage) -> None:
    worker.use(9, None)
    with contextlib.closing(ClientPage(space.names, CLIENT)) as seen:
        assert seen.drain_touches() == [9]
        assert seen.touches_missed == 0


def test_a_ring_that_was_overrun_drops_the_oldest_and_says_how_many(
    worker: WorkerPage, seen: ClientPage
) -> None:
    for touch in range(RING_WORDS + 10):
        worker.use(touch, None)
    kept = seen.drain_touches()
    assert kept == list(range(RING_WORDS + 10 - len(kept), RING_WORDS + 10))
    assert seen.touches_missed + len(kept) == RING_WORDS + 10


def test_what_is_overwritten_while_it_is_copied_is_missed_and_not_mistaken(
    worker: WorkerPage, seen: ClientPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for touch in range(RING_WORDS):
        worker.use(touch, None)
    words = seen.words
    reads: list[int] = []

    class Racing:
        """The owner goes on by 20 touches, the last one half stored, after the first word is copied."""

        def __getitem__(self, word: int) -> int:
            value = words[word]
            if word != Word.TOUCHES and not reads:
                reads.append(word)
                for touch in range(1_000_000, 1_000_020):
                    worker.use(touch, None)
                head = worker.words[Word.TOUCHES]
                worker.words[4096 // 8 + head % RING_WORDS] = 2_000_000
            return value

    monkeypatch.setattr(seen, "words", Racing())
    touches = seen.drain_touches()
    assert touches == list(range(RING_WORDS - len(touches), RING_WORDS))
    assert seen.touches_missed + len(touches) == RING_WORDS
    monkeypatch.undo()
    assert seen.drain_touches() == list(range(1_000_000, 1_000_020))


# ---- mailboxes


def test_a_reply_arrives_whatever_its_length(worker: WorkerPage, seen: ClientPage) -> None:
    worker.prepare_wait(0)
    for request, body in enumerate((b"", b"x", os.urandom(BODY_BYTES)), start=1):
        assert worker.reply(0, request) is None
        seen.send(0, request, body)
        assert worker.wait(0, request, deadline()) == body


def test_mailboxes_do_not_touch_each_other(worker: WorkerPage, seen: ClientPage) -> None:
    bodies = {mailbox: os.urandom(BODY_BYTES) for mailbox in range(MAILBOXES)}
    for mailbox, body in bodies.items():
        worker.prepare_wait(mailbox)
        seen.send(mailbox, 77, body)
    assert {mailbox: worker.reply(mailbox, 77) for mailbox in range(MAILBOXES)} == bodies


def test_a_reply_to_another_request_is_no_reply(worker: WorkerPage, seen: ClientPage) -> None:
    worker.prepare_wait(0)
    seen.send(0, 1, b"late")
    assert worker.wait(0, 2, time.monotonic_ns()) is None
    seen.send(0, 2, b"right")
    assert worker.wait(0, 2, deadline()) == b"right"
    assert worker.reply(0, 1) is None


@pytest.mark.parametrize("step", ["body", "length", "request id"])
def test_a_reply_that_is_not_complete_is_no_reply(worker: WorkerPage, seen: ClientPage, step: str) -> None:
    start = MAILBOX_OFFSET
    seen.send(0, 1, b"first reply")
    view = seen._mapping.bytes
    view[start + 16 : start + 22] = b"second"
    if step != "body":
        view[start + 8 : start + 12] = (6).to_bytes(4, "little")
    if step == "request id":  # stored before the checksum: never done, and not believed
        seen.words[start // 8] = 2
        assert worker.reply(0, 2) is None
    assert worker.reply(0, 1) is None


def test_a_length_beyond_the_mailbox_is_not_believed(worker: WorkerPage, seen: ClientPage) -> None:
    seen.send(0, 1, b"x")
    seen._mapping.bytes[MAILBOX_OFFSET + 8 : MAILBOX_OFFSET + 12] = b"\xff" * 4
    assert worker.reply(0, 1) is None


def test_no_wake_is_lost_between_looking_and_polling(
    worker: WorkerPage, seen: ClientPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply comes after the waiter has looked and before it polls: the byte in the FIFO stays."""
    worker.prepare_wait(0)
    real = worker.reply
    looks: list[bytes | None] = []

    def reply(mailbox: int, request: int) -> bytes | None:
        found = real(mailbox, request)
        if not looks:
            seen.send(0, 1, b"between")
        looks.append(found)
        return found

    monkeypatch.setattr(worker, "reply", reply)
    assert worker.wait(0, 1, deadline()) == b"between"
    assert looks == [None, b"between"]


def test_whoever_sleeps_is_woken_and_whoever_looks_needs_no_byte(
    worker: WorkerPage, seen: ClientPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.prepare_wait(0)
    woken: list[int] = []
    wake = seen.wake

    def counted(mailbox: int) -> bool:
        woken.append(mailbox)
        return wake(mailbox)

    monkeypatch.setattr(seen, "wake", counted)
    answering = threading.Timer(0.05, seen.send, (0, 1, b"to a sleeper"))
    answering.start()
    assert worker.wait(0, 1, deadline()) == b"to a sleeper"
    answering.join()
    assert woken == [0]
    seen.send(0, 2, b"to nobody")
    assert worker.wait(0, 2, deadline()) == b"to nobody"
    assert woken == [0]


def test_an_old_byte_costs_one_more_look_and_nothing_else(worker: WorkerPage, seen: ClientPage) -> None:
    worker.prepare_wait(0)
    for _ in range(3):
        seen.wake(0)
    assert worker.wait(0, 1, time.monotonic_ns() + 30_000_000) is None
    reader, _, _ = select.select([worker._fifos[0]], [], [], 0)
    assert not reader, "the FIFO was read empty"


def test_a_full_fifo_is_awake_already(worker: WorkerPage, seen: ClientPage) -> None:
    worker.prepare_wait(0)
    while seen.wake(0) and len(select.select([], [seen._fifos[0]], [], 0)[1]):
        pass
    assert seen.wake(0)
    assert worker.wait(0, 1, time.monotonic_ns() + 30_000_000) is None


def test_nobody_reads_where_no_fifo_is_or_its_reader_is_gone(space: Namespace) -> None:
    made = WorkerPage(space.names, CLIENT)
    seen = ClientPage(space.names, CLIENT)
    assert not seen.wake(0), "no FIFO yet"
    made.prepare_wait(0)
    made.prepare_wait(0)
    made.prepare_wait(1)
    assert seen.wake(0)
    for fd in made._fifos.values():
        os.close(fd)
    made._fifos.clear()
    assert not seen.wake(0), "a FIFO that was open"
    assert not seen.wake(1), "a FIFO that was not"
    seen.wake_all()
    made.close()
    seen.unlink()
    seen.close()


@pytest.mark.parametrize("plant", ["file", "mode", "symlink"])
def test_a_fifo_that_is_not_ours_is_not_written(
    space: Namespace, worker: WorkerPage, seen: ClientPage, plant: str
) -> None:
    path = space.names.fifos / f"{CLIENT:016x}.0"
    if plant == "file":
        path.write_bytes(b"")
        path.chmod(0o600)
    elif plant == "mode":
        os.mkfifo(path)
        path.chmod(0o622)
    else:
        os.mkfifo(path.with_suffix(".target"), 0o600)
        path.symlink_to(path.with_suffix(".target"))
    assert not seen.wake(0)
    with pytest.raises(ForeignObject):
        worker.prepare_wait(0)
    if plant == "file":
        assert path.read_bytes() == b""


def test_modes_are_the_owners_alone(space: Namespace, worker: WorkerPage) -> None:
    worker.prepare_wait(0)
    for path in (*space.names.pages.iterdir(), *space.names.fifos.iterdir()):
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600


def test_a_signal_handlers_exception_ends_a_wait_and_a_harmless_one_does_not(
    worker: WorkerPage, seen: ClientPage
) -> None:
    worker.prepare_wait(0)
    hits: list[int] = []

    class Stop(BaseException):
        pass

    def harmless(_number: int, _frame: object) -> None:
        hits.append(1)
        if len(hits) == 3:
            seen.send(0, 1, b"after signals")

    def raising(_number: int, _frame: object) -> None:
        hits.append(1)
        if len(hits) == 3:
            raise Stop

    def shower() -> None:
        while len(hits) < 3:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.001)

    def while_signals_come(request: int) -> bytes | None:
        hits.clear()
        sender = threading.Thread(target=shower)
        sender.start()
        try:
            return worker.wait(0, request, deadline())
        finally:
            sender.join()

    before = signal.signal(signal.SIGUSR1, harmless)
    try:
        assert while_signals_come(1) == b"after signals"
        signal.signal(signal.SIGUSR1, raising)
        with pytest.raises(Stop):
            while_signals_come(2)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_decisions_have_a_ring_of_their_own(space: Namespace, worker: WorkerPage) -> None:
    with contextlib.closing(ClientPage(space.names, CLIENT)) as page:
        worker.use(1, None)
        head, touches = worker.decision_ring()
        for touch in range(RING_WORDS + 5):
            touches[touch % RING_WORDS] = touch
            head[0] += 1
        assert page.drain_touches() == [1]
        assert page.drain_decision_touches()[-1] == RING_WORDS + 4
        assert page.decision_touches_missed == 6
        assert page.touches_missed == 0


def test_the_outbox_is_read_as_it_was_written_and_nothing_more(space: Namespace, worker: WorkerPage) -> None:
    with contextlib.closing(ClientPage(space.names, CLIENT)) as page:
        assert page.read_outbox(0, 10) == b""
        content = os.urandom(OUTBOX_BYTES)
        worker.write_outbox(content)
        assert page.read_outbox(0, OUTBOX_BYTES) == content
        assert page.read_outbox(7, 5) == content[7:12]
        for offset, length in ((-1, 5), (0, OUTBOX_BYTES + 1), (OUTBOX_BYTES, 1), (0, -1)):
            assert page.read_outbox(offset, length) == b""
    with contextlib.closing(ClientPage(space.names, CLIENT)):
        pass  # a page that has grown is still one
