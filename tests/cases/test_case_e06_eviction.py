"""E06: new rows are evicted at once, a save evicts the prefix it needs, nested rows push each other out.

Two chats in turn, ten turns each, behind one system prompt. A turn takes the longest row there is and leaves
one of its own, all rows being of one size.
"""

from __future__ import annotations

import contextlib

import pytest
from support import Namespace, prompt
from test_coordinator import NOW, WHO, Desk, key_of, kinds, plan_of

from shmcache.config import Eviction
from shmcache.coordinator import Now, Rules
from shmcache.key import PrefixWalk
from shmcache.kvc import HEAD_DETAIL
from shmcache.protocol import Reserve, Reserved

TURNS = 10
SYSTEM = prompt(1000, "system")


def history(chat: str, turns: int) -> bytes:
    return SYSTEM + prompt(700 * turns, chat)


def turn(desk: Desk, chat: str, number: int) -> bytes | None:
    """Serve one turn; the text of the row that it used, None where it found none."""
    now = Now(NOW.unix_s + 30 * number)
    text = history(chat, number)
    walk = PrefixWalk(WHO.seed, text + b"and a question")
    found = next(desk.index.candidates(walk, walk.text_bytes), None)
    base = found.row.key if found is not None else None
    if found is not None:
        desk.coordinator.touches([found.touch], now)
    answer = desk.ask(Reserve(**desk.head(1), forget=0, base=base, plans=[plan_of(text)]), now)
    assert isinstance(answer, Reserved)
    assert kinds(answer.verdicts) == ["granted"], "a turn can always save"
    assert base is None or desk.index.get(base) is not None, "no row leaves for the request that uses it"
    token = answer.verdicts[0].token
    desk.put(text, token, base_key=base)
    assert desk.written(text, token).published
    assert base is None or desk.index.get(base) is not None
    return text[: found.row.text_bytes] if found is not None else None


@pytest.mark.parametrize("eviction", ["lru", "cost"])
@pytest.mark.parametrize("entries", [3, 4])
def test_case_e06_the_shared_prefix_survives_and_dominated_rows_go_first(
    space: Namespace, eviction: Eviction, entries: int
) -> None:
    with contextlib.closing(Desk(space, slabs=entries, rules=Rules(eviction=eviction))) as desk:
        desk.save(SYSTEM, reason_detail=HEAD_DETAIL)
        used = {(chat, number): turn(desk, chat, number) for number in range(1, TURNS + 1) for chat in "ab"}
        assert desk.index.get(key_of(SYSTEM)) is not None
        assert all(row is not None for row in used.values()), "every turn finds the system prompt at least"
        own = sum(row == history(chat, number - 1) for (chat, number), row in used.items() if number > 1)
        # A turn's own row, the one it extends, the system prompt and the other chat's row are four.
        assert own == 2 * (TURNS - 1) if entries == 4 else own >= TURNS - 1
        assert desk.coordinator.statistics()["evictions"] == 2 * TURNS + 1 - entries
        desk.check()


@pytest.mark.parametrize("eviction", ["lru", "cost"])
def test_case_e06_small_new_rows_are_not_evicted_at_once(space: Namespace, eviction: Eviction) -> None:
    with contextlib.closing(Desk(space, slabs=3, rules=Rules(eviction=eviction))) as desk:
        for number in range(6):
            text = prompt(1000, f"one-time {number}")
            desk.save(text)
            assert desk.index.get(key_of(text)) is not None
        assert len(desk.index) == 3
