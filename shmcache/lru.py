"""Order of use of an index's rows: which row of this tier has been without use the longest?

Doubly linked lists over the index's slots, one list a tier, and beside them what eviction must know
of a row: hits, and the row that it was made from. Arrays, not objects: 28 bytes a slot, of which the lists
alone take 8.

    prev, next   u32 each   neighbours in the tier's list; the list ends are slots behind the table
    base         u32        slot of the row it was made from, or NONE
    base_mark    u32        low half of that row's generation: a slot that was used again is not it
    children     u32        rows that were made from this one and are still here
    hits         u32        touches received
    used_unix_s  u32        last touch

Owner: the coordinator's thread. Readers: the same thread only.
Invariants
    I1  Every slot of a published row is in exactly one list; no other slot is in any.
    I2  A list runs from the coldest row to the one used last.
Leaves out: budgets, protection of rows in use (coordinator).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

NONE = 0xFFFFFFFF


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
    """Lists of slots by last use, with hits and descent."""

    def __init__(self, slots: int, lists: int) -> None:
        super().__init__(slots, lists)
        self.base = array("I", [NONE]) * slots
        self.base_mark = array("I", [0]) * slots
        self.children = array("I", [0]) * slots
        self.hits = array("I", [0]) * slots
        self.used_unix_s = array("I", [0]) * slots

    def add(self, slot: int, number: int, used_unix_s: int, hits: int = 0) -> None:
        """Enter a slot whose row is new at the warm end of list `number`."""
        self.hits[slot] = hits
        self.used_unix_s[slot] = used_unix_s
        self.base[slot] = NONE
        self.children[slot] = 0
        self.insert(slot, number)
