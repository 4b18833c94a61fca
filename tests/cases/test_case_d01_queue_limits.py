"""D01: the queue limits of a user: sixty-four workers cost one queue; spent limits are named, and uncached.

As an ordinary user, because root passes RLIMIT_MSGQUEUE, under the limits that Linux has by default.
"""

from __future__ import annotations

import resource
from contextlib import suppress

import posix_ipc
import pytest
from support import Namespace, Pipe, eventually, identity, longest, needs_root, prompt, save

from shmcache.client import attach
from shmcache.errors import QueueLimit
from shmcache.mq import ServerQueue
from shmcache.server import EXIT_FAILED

ORDINARY = 65534
LIMIT_BYTES = 819_200
WORKERS = 64
WHO = identity()
SHARED = prompt(2500)


def under_the_default_limit() -> None:
    resource.setrlimit(resource.RLIMIT_MSGQUEUE, (LIMIT_BYTES, LIMIT_BYTES))


def work(pipe: Pipe, namespace: str, number: int) -> None:
    """Look up, save a row of one's own, wait for the row that all want, and read it."""
    under_the_default_limit()
    with attach(namespace) as cache:
        own = prompt(2500, f"worker {number}")
        assert longest(cache, WHO, own) is None
        # Sixty-four at once on two cores: a refused send is a skipped save, and is tried again here.
        eventually(lambda: save(cache, WHO, own, b"state of %d" % number))
        eventually(
            lambda: longest(cache, WHO, SHARED) == (2500, b"shared") or save(cache, WHO, SHARED, b"shared")
        )
        assert longest(cache, WHO, own) == (2500, b"state of %d" % number)
        pipe.say("done")
        pipe.hear()


@needs_root
def test_case_d01_sixty_four_workers_of_an_ordinary_user_share_one_queue() -> None:
    with Namespace(uid=ORDINARY) as space:
        space.start(patch=under_the_default_limit)
        workers = [space.child(work, space.name, number) for number in range(WORKERS)]
        assert [worker.hear(within_s=120) for worker in workers] == ["done"] * WORKERS
        for worker in workers:
            worker.say("leave")
        assert [worker.wait(60) for worker in workers] == [0] * WORKERS


@needs_root
def test_case_d01_spent_limits_are_named_and_requests_go_uncached() -> None:
    with Namespace(uid=ORDINARY) as space:

        def spend_all(_pipe: Pipe) -> None:
            under_the_default_limit()
            taken: list[posix_ipc.MessageQueue] = []
            try:
                with suppress(OSError):  # the kernel's no
                    while True:
                        taken.append(posix_ipc.MessageQueue(None, posix_ipc.O_CREX))
                assert taken
                with pytest.raises(QueueLimit, match=rf"RLIMIT_MSGQUEUE \({LIMIT_BYTES} bytes"):
                    ServerQueue(space.names)
                with attach(space.name) as cache:
                    assert longest(cache, WHO, SHARED) is None
                    assert not save(cache, WHO, SHARED, b"state")
            finally:
                for queue in taken:
                    queue.close()
                    queue.unlink()

        assert space.child(spend_all).wait(60) == 0


@needs_root
def test_case_d01_a_coordinator_that_gets_no_queue_says_why_and_ends() -> None:
    with Namespace(uid=ORDINARY) as space:

        def without_any() -> None:
            resource.setrlimit(resource.RLIMIT_MSGQUEUE, (0, 0))

        space.start(patch=without_any, ready=False)
        assert space.coordinator is not None
        assert space.coordinator.wait(60) == EXIT_FAILED
        assert "RLIMIT_MSGQUEUE (0 bytes" in space.log()
        assert "ulimit -q" in space.log()
