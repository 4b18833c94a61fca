"""Order of use of a table's entries: which entry of this list has been without use the longest?

Doubly linked lists over the table's slots. Arrays, not objects: 16 bytes a slot, of which the lists alone
take 8.

    prev, next   u32 each   neighbours in the slot's list; the list ends are slots behind the table
    hits         u32        touches received
    used_unix_s  u32        last touch

Owner: the coordinator's thread. Readers: the same thread only.
Invariants
    I1  Every slot that was added and not removed is in exactly one list; no other slot is in any.
    I2  A list runs from the coldest slot to the one used last.
Leaves out: what else is known of a row (eviction), budgets and rows in use (coordinator).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator


class Lists:
    """Lists of slots, from the coldest to the one used last."""

    def __init__(self, slots: int, lists: int) -> None:
        self._slots = slots
        ends = slots + lists
        self._prev = array("I", range(ends))
        self._next = array("I", range(ends))

    def add_list(self) -> int:
        """Make one more list; its number."""
        end = len(self._prev)
        self._prev.append(end)
        self._next.append(end)
        return end - self._slots

    def insert(self, slot: int, number: int) -> None:
        """Enter a slot at the warm end of list `number`."""
        self._insert_before(slot, self._slots + number)

    def remove(self, slot: int) -> None:
        """Take a slot out of its list."""
        before, after = self._prev[slot], self._next[slot]
        self._next[before], self._prev[after] = after, before
        self._prev[slot] = self._next[slot] = slot

    def warm(self, slot: int, number: int) -> None:
        """Move to the warm end: used just now."""
        self.remove(slot)
        self._insert_before(slot, self._slots + number)

    def cool(self, slot: int, number: int) -> None:
        """Move to the cold end: the next to leave."""
        self.remove(slot)
        self._insert_before(slot, self._next[self._slots + number])

    def coldest(self, number: int) -> Iterator[int]:
        """Slots of a list from the cold end; the one just yielded may be removed."""
        end = self._slots + number
        slot = self._next[end]
        while slot != end:
            after = self._next[slot]
            yield slot
            slot = after

    def _insert_before(self, slot: int, after: int) -> None:
        before = self._prev[after]
        self._next[before] = self._prev[after] = slot
        self._prev[slot], self._next[slot] = before, after


class UseOrder(Lists):
    """Lists of slots by last use, with hits."""

    def __init__(self, slots: int, lists: int) -> None:
        super().__init__(slots, lists)
        self.hits = array("I", [0]) * slots
        self.used_unix_s = array("I", [0]) * slots

    def add(self, slot: int, number: int, used_unix_s: int, hits: int = 0) -> None:
        """Enter a slot whose row is new at the warm end of list `number`."""
        self.hits[slot] = hits
        self.used_unix_s[slot] = used_unix_s
        self._insert_before(slot, self._slots + number)
