"""D03: messages of a dead run do not reach the next one; a worker without a coordinator just works."""

from __future__ import annotations

import logging

import pytest
from support import Namespace, Pipe, eventually, identity, longest, needs_root, plan, prompt, save

from shmcache import protocol
from shmcache.check import check
from shmcache.client import attach
from shmcache.mq import RequestQueue
from shmcache.observe import observe
from shmcache.shm import Names

WHO = identity()
ORDINARY = 64_011


def test_case_d03_five_messages_of_a_dead_run_are_dropped(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    assert save(cache, WHO, prompt(2500), b"state")
    epoch, client = cache.connection.epoch, cache.connection.client
    space.kill()
    queue = RequestQueue(space.names)
    for number in range(5):
        message = protocol.Reserve(
            epoch=epoch,
            client=client,
            mailbox=0,
            request=1000 + number,
            forget=0,
            base=None,
            plans=[
                protocol.Plan(
                    key=bytes([number]) * 32,
                    block_key=bytes([number]) * 32,
                    text_bytes=2048,
                    slab_bytes=4096,
                    tier=protocol.Tier.RAM_FILE,
                )
            ],
        )
        assert queue.send(protocol.encode(message))
    queue.close()
    space.start()
    assert observe(space.name).tiers["ram_file"].charged_bytes == 0
    assert save(cache, WHO, prompt(2500, "afterwards"), b"state")
    eventually(lambda: check(space.name) == [])


def test_case_d03_a_message_of_an_old_epoch_is_answered_stale_and_sent_again(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    assert save(cache, WHO, prompt(2500), b"one")
    space.restart()  # the worker has not looked since
    assert save(cache, WHO, prompt(2500, "two"), b"two")
    assert longest(cache, WHO, prompt(2500)) == (2500, b"one")


def test_case_d03_without_a_coordinator_a_worker_says_so_and_serves_uncached(
    space: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    cache = space.cache()
    assert longest(cache, WHO, prompt(2500)) is None
    assert cache.reserve([plan(WHO, prompt(2500))], None, cache.forget).slabs == [None]
    assert f"start shmcache-coordinator --namespace {space.name}" in caplog.text
    assert cache.statistics().counters["uncached"] == 1
    assert space.objects() == []


@needs_root
def test_case_d03_a_second_user_has_everything_of_his_own() -> None:
    with Namespace() as mine, Namespace(uid=ORDINARY) as his:
        his.name, his.names = mine.name, Names(mine.name, ORDINARY)
        assert mine.names.queue != his.names.queue
        mine.start()
        his.start()
        assert save(mine.cache(), WHO, prompt(2500), b"mine")

        def work(_pipe: Pipe) -> None:
            with attach(his.name) as cache:
                assert longest(cache, WHO, prompt(2500)) is None
                eventually(lambda: save(cache, WHO, prompt(2500), b"his"))
                assert longest(cache, WHO, prompt(2500)) == (2500, b"his")

        assert his.child(work).wait() == 0
        assert longest(mine.cache(), WHO, prompt(2500)) == (2500, b"mine")
