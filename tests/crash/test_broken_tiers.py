"""Each tier breaks in each way (it raises, it hangs, its device is full) while the two others serve."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import eventually, payload_of, save
from three_tiers import STATE, TIERS, WHO, Rig, text_of

from shmcache import client
from shmcache.tiers import supervisor
from shmcache.tiers.disk import DiskTier
from shmcache.tiers.memory import MemoryTier

WAYS = ("raises", "hangs", "is full")
JOBS = {"raises": ("link", "keys"), "hangs": ("link", "keys"), "is full": ("link",)}


class Breakable(Rig):
    """A rig with one tier that is broken for as long as the switch is on."""

    def __init__(self, root: Path, tier: str, way: str) -> None:
        self.tier, self.way = tier, way
        self._switch = mmap.mmap(-1, mmap.PAGESIZE)
        super().__init__(root, self._break)

    def switch(self, broken: bool) -> None:
        self._switch[0] = broken

    def _break(self) -> None:
        supervisor.JOB_DEADLINE_S = 0.2
        supervisor.BACKOFF_S = (0.05,)
        for owner in (MemoryTier, DiskTier):
            for name in JOBS[self.way]:
                setattr(owner, name, self._breaking(getattr(owner, name)))

    def _breaking(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def job(tier: MemoryTier | DiskTier, *arguments: Any) -> Any:
            while self._switch[0] and tier.number.name.lower() == self.tier:
                if self.way == "raises":
                    raise RuntimeError("the device is gone")
                if self.way == "is full":
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                time.sleep(0.01)
            return real(tier, *arguments)

        return job

    def stat(self, name: str) -> int:
        return self.space.stat(name)


@pytest.fixture
def rig(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Breakable]:
    monkeypatch.setattr(client, "RESERVE_TIMEOUT_MS", 1_000)
    monkeypatch.setattr(client, "_ANSWER_NS", 500_000_000)
    made = Breakable(tmp_path, *request.param)
    try:
        made.start()
        yield made
    finally:
        made.switch(False)
        made.close()


CASES = [(tier, way) for tier in TIERS for way in WAYS]


@pytest.mark.parametrize("rig", CASES, ids=" ".join, indirect=True)
def test_a_tier_that_breaks_stops_alone_and_comes_back(rig: Breakable) -> None:
    tier, way = rig.tier, rig.way
    others = [other for other in TIERS if other != tier]
    caches = {name: rig.space.cache(tier=name) for name in TIERS}
    before = next(rig.numbers)
    eventually(lambda: save(caches[tier], WHO, text_of(before), STATE))
    rig.switch(True)
    assert not save(caches[tier], WHO, text_of(next(rig.numbers)), STATE)
    if way == "is full":  # costs each save, and not the tier: what is there is served and may leave
        assert eventually(lambda: rig.stat("tier_faults")) == rig.stat("dropped_refused") == 1
        assert rig.space.log().count(f"[Errno {errno.ENOSPC}]") == 1
    else:
        eventually(lambda: rig.stat(f"is_down_{tier}") or rig.stat(f"downs_{tier}"))
        assert "is down" in rig.space.log()
    for _ in range(3):  # and evict
        for other in others:
            number = next(rig.numbers)
            assert eventually(
                lambda other=other, number=number: save(caches[other], WHO, text_of(number), STATE)
            )
            assert payload_of(caches[tier], WHO, text_of(number)) == STATE
            assert rig.stat(f"downs_{other}") == 0
    assert payload_of(caches[others[0]], WHO, text_of(before)) == STATE, "its rows are read without it"
    rig.switch(False)
    number = next(rig.numbers)
    assert eventually(lambda: save(caches[tier], WHO, text_of(number), STATE))
    assert payload_of(caches[others[0]], WHO, text_of(number)) == STATE
    for cache in caches.values():
        cache.close()
    rig.at_rest()
