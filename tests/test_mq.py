"""The request queue: never waits in the kernel, and says in words what the kernel refuses."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import stat
import threading
import time
from collections.abc import Iterator

import posix_ipc
import pytest
from support import Namespace, Pipe, needs_root

from shmcache import mq
from shmcache.errors import ForeignObject, NoCoordinator, QueueLimit
from shmcache.mq import MAX_MESSAGES, RequestQueue, ServerQueue
from shmcache.protocol import MESSAGE_BYTES

ORDINARY = 64_003
QUEUE_BYTES = MAX_MESSAGES * (MESSAGE_BYTES + 96)


@pytest.fixture
def server(space: Namespace) -> Iterator[ServerQueue]:
    with contextlib.closing(ServerQueue(space.names)) as made:
        yield made


def fill(sender: RequestQueue) -> None:
    while sender.send(b"x"):
        pass


def test_messages_arrive_in_order_and_an_empty_queue_is_no_wait(
    space: Namespace, server: ServerQueue
) -> None:
    assert server.receive() is None
    with contextlib.closing(RequestQueue(space.names)) as sender:
        for message in (b"", b"1", b"m" * MESSAGE_BYTES):
            assert sender.send(message)
    assert [server.receive() for _ in range(4)] == [b"", b"1", b"m" * MESSAGE_BYTES, None]


def test_poll_says_when_a_message_is_there(space: Namespace, server: ServerQueue) -> None:
    poll = select.poll()
    poll.register(server.fileno(), select.POLLIN)
    assert poll.poll(0) == []
    with contextlib.closing(RequestQueue(space.names)) as sender:
        sender.send(b"x")
    assert poll.poll(0)


def test_without_a_queue_there_is_no_coordinator(space: Namespace) -> None:
    with pytest.raises(NoCoordinator):
        RequestQueue(space.names)
    assert not mq.unlink(space.names)


def test_the_queue_keeps_its_name_and_its_messages_over_restarts(space: Namespace) -> None:
    first = ServerQueue(space.names)
    sender = RequestQueue(space.names)
    assert sender.send(b"1")
    first.close()
    assert sender.send(b"2")
    with contextlib.closing(ServerQueue(space.names)) as second:
        assert [second.receive(), second.receive(), second.receive()] == [b"1", b"2", None]
    sender.close()


def test_a_full_queue_says_no_at_once_and_is_tried_until_the_deadline(
    space: Namespace, server: ServerQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(RequestQueue(space.names)) as sender:
        fill(sender)
        naps: list[float] = []
        monkeypatch.setattr(time, "sleep", naps.append)
        assert not sender.send(b"no")
        assert naps == []

        def room(_s: float) -> None:
            naps.append(_s)
            if len(naps) == 3:
                server.receive()

        monkeypatch.setattr(time, "sleep", room)
        assert sender.send(b"last", time.monotonic_ns() + 10**12)
        assert len(naps) == 3

        now = [0]
        monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
        monkeypatch.setattr(time, "sleep", lambda s: now.__setitem__(0, now[0] + int(s * 1e9)))
        assert not sender.send(b"no", 10_000_000)
        assert now[0] >= 10_000_000


def test_a_signal_handlers_exception_reaches_the_sender(space: Namespace, server: ServerQueue) -> None:
    class Stop(BaseException):
        pass

    def raising(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        raise Stop

    before = signal.signal(signal.SIGUSR1, raising)
    sender = RequestQueue(space.names)
    fill(sender)
    over = threading.Event()

    def shower() -> None:
        while not over.wait(0.001):
            os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=shower)
    try:
        with pytest.raises(Stop):
            thread.start()
            sender.send(b"x", time.monotonic_ns() + 20 * 10**9)
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)
        sender.close()


def test_a_queue_is_the_owners_alone_whatever_the_umask(space: Namespace) -> None:
    before = os.umask(0)
    try:
        with contextlib.closing(ServerQueue(space.names)) as made:
            assert stat.S_IMODE(os.fstat(made.fileno()).st_mode) == 0o600
    finally:
        os.umask(before)


@pytest.mark.parametrize("opener", [ServerQueue, RequestQueue])
@pytest.mark.parametrize("plant", ["mode", "small", "stranger"])
def test_a_queue_that_is_not_ours_is_not_used(
    space: Namespace, opener: type[ServerQueue] | type[RequestQueue], plant: str
) -> None:
    size_bytes = 100 if plant == "small" else MESSAGE_BYTES
    planted = posix_ipc.MessageQueue(
        space.names.queue, posix_ipc.O_CREX, mode=0o600, max_messages=1, max_message_size=size_bytes
    )
    if plant == "mode":
        os.fchmod(planted.mqd, 0o620)
    if plant == "stranger":
        if os.geteuid() != 0:
            pytest.skip("needs root: a second uid")
        os.fchown(planted.mqd, ORDINARY, ORDINARY)
    planted.close()
    with pytest.raises(ForeignObject, match=space.names.queue):
        opener(space.names)


@needs_root
def test_anothers_closed_queue_is_foreign_and_not_a_permission_error() -> None:
    with Namespace(uid=ORDINARY) as space:
        ServerQueue(space.names).close()  # made by root under the ordinary user's name

        def look(_pipe: Pipe) -> None:
            for opener in (ServerQueue, RequestQueue):
                with pytest.raises(ForeignObject):
                    opener(space.names)

        assert space.child(look).wait() == 0


@needs_root
def test_spent_limits_are_named_with_the_bytes_and_the_remedy() -> None:
    with Namespace(uid=ORDINARY) as space:

        def limited(_pipe: Pipe) -> None:
            resource.setrlimit(resource.RLIMIT_MSGQUEUE, (QUEUE_BYTES - 1, QUEUE_BYTES - 1))
            with pytest.raises(QueueLimit) as caught:
                ServerQueue(space.names)
            assert (caught.value.need_bytes, caught.value.limit_bytes) == (QUEUE_BYTES, QUEUE_BYTES - 1)
            for word in ("RLIMIT_MSGQUEUE", str(QUEUE_BYTES), "ulimit -q"):
                assert word in str(caught.value)

        assert space.child(limited).wait() == 0


def test_a_worker_without_descriptors_is_not_told_to_raise_the_queue_limit(
    space: Namespace, server: ServerQueue
) -> None:
    def limited(_pipe: Pipe) -> None:
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, free))
        with pytest.raises(OSError, match="open") as caught:
            RequestQueue(space.names)
        assert not isinstance(caught.value, QueueLimit)

    assert space.child(limited).wait() == 0


def test_senders_and_receiver_end_their_view_and_the_queue_stays(space: Namespace) -> None:
    made = ServerQueue(space.names)
    RequestQueue(space.names).close()
    made.close()
    RequestQueue(space.names).close()
    assert mq.unlink(space.names)
    with pytest.raises(NoCoordinator):
        RequestQueue(space.names)
