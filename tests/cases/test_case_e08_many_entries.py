"""E08: each store rescanned the whole directory, and eviction was linear in the entries.

Figures of time would be the machine's; what is counted is what each operation touches.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from support import Namespace, prompt, slab_file
from test_coordinator import NOW, SLAB, WHO, Desk, key_of

from shmcache.coordinator import Coordinator
from shmcache.index import IndexWriter
from shmcache.key import PrefixWalk
from shmcache.lru import UseOrder
from shmcache.tiers import base

FEW, MANY = 100, 3_000
WATCHED: list[tuple[Any, str]] = [
    (os, "open"),
    (os, "stat"),
    (os, "scandir"),
    (os, "unlink"),
    (os, "link"),
    (base, "_names"),
    (IndexWriter, "at"),
    (IndexWriter, "rows"),
    (UseOrder, "remove"),
    (Coordinator, "_enter"),
]


def filled(space: Namespace, count: int) -> Desk:
    """A coordinator with so many rows, and a budget that is used up by them."""
    desk = Desk(space, slabs=count, max_rows=2 * count)
    directory = desk.names.tier("ram_file", desk.epoch)
    for number in range(count):
        text = prompt(1000, f"row {number}")
        path = directory / base.file_name(key_of(text))
        path.write_bytes(slab_file(WHO, text, bytes(4096)))
        path.chmod(0o600)
    assert desk.restart() == count
    return desk


def touched(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each watched function is called by a put that evicts, a hit, a miss and a touch."""
    counts: dict[str, int] = {}
    with monkeypatch.context() as patched:
        for owner, name in WATCHED:
            real, label = getattr(owner, name), f"{owner.__name__}.{name}"
            counts[label] = 0

            def counted(*arguments: Any, real: Any = real, label: str = label, **options: Any) -> Any:
                counts[label] += 1
                return real(*arguments, **options)

            patched.setattr(owner, name, counted)
        new = prompt(2000, "one more")
        desk.save(new)
        assert desk.index.get(key_of(new)) is not None
        assert desk.index.get(key_of(prompt(10, "never saved"))) is None
        walk = PrefixWalk(WHO.seed, new + b"x" * 3000)
        assert [found.row.key for found in desk.index.candidates(walk, walk.text_bytes)] == [key_of(new)]
        desk.touch(new)
        desk.coordinator.tick(NOW, 0.0)
    assert desk.coordinator.statistics()["evictions"] == 1
    return counts


def test_case_e08_no_operation_touches_more_because_there_are_more_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Namespace() as few, Namespace() as many:
        small, large = filled(few, FEW), filled(many, MANY)
        assert touched(small, monkeypatch) == touched(large, monkeypatch)
        for desk, count in ((small, FEW), (large, MANY)):
            desk.check()
            assert len(desk.index) == count
            desk.close()


def test_case_e08_entries_have_a_limit_as_bytes_have(space: Namespace) -> None:
    desk = Desk(space, slabs=1000, max_rows=50)
    for number in range(60):
        desk.save(prompt(1000, f"row {number}"))
    desk.check()
    assert len(desk.index) == 50
    assert desk.state.used_bytes == 50 * SLAB
    assert desk.texts(*(prompt(1000, f"row {number}") for number in range(10))) == []
    desk.close()
