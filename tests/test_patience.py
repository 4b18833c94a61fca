"""Looks that are in vain become rare, and one that is not makes them usual again."""

from __future__ import annotations

from shmcache.patience import MOST_WITHOUT, Patience


def without(patience: Patience) -> int:
    """How many of the next times go without a look."""
    count = 0
    while not patience.looks():
        count += 1
    return count


def test_each_look_in_vain_doubles_the_times_that_go_without() -> None:
    patience = Patience()
    assert without(patience) == 0
    seen = []
    for _ in range(7):
        patience.learn(in_vain=True)
        seen.append(without(patience))
    assert seen == [1, 2, 4, 8, MOST_WITHOUT, MOST_WITHOUT, MOST_WITHOUT]


def test_one_that_is_not_in_vain_ends_that() -> None:
    patience = Patience()
    for _ in range(5):
        patience.learn(in_vain=True)
        without(patience)
    patience.learn(in_vain=False)
    assert without(patience) == 0
    patience.learn(in_vain=True)
    assert without(patience) == 1
