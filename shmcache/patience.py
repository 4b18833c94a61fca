"""Is it worth looking on for a moment before one sleeps?

To be woken takes several times as long as most answers take. But where the cores are busy with others, or
where nobody asks, looking is in vain and costs somebody else's time.

    in vain       twice as many of the next times go without, MOST_WITHOUT at most
    not in vain   the next time looks

Owner: whoever waits. Two threads at once may count one too many, which costs one sleep.
Leaves out: how long a look is, and what is looked at (page, server).
"""

from __future__ import annotations

MOST_WITHOUT = 16


class Patience:
    """One waiter's experience of its looks."""

    def __init__(self) -> None:
        self._without = 0
        self._next_without = 1

    def looks(self) -> bool:
        """Whether this time is one that looks."""
        if self._without > 0:
            self._without -= 1
            return False
        return True

    def learn(self, *, in_vain: bool) -> None:
        """What became of a look."""
        if in_vain:
            self._without = self._next_without
            self._next_without = min(2 * self._next_without, MOST_WITHOUT)
        else:
            self._next_without = 1
