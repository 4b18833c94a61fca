"""Was this key asked for before? What keeps prompts that come once off the disk.

    mark   u64   8 bytes of the key that was asked for last of all those that share the place

Owner: the coordinator's thread. Readers: the same thread only.
Invariants
    I1  8 bytes for each place, whatever is asked.
    I2  A key that was never asked for is never taken for one that was, but for a chance of 2^-64.
    I3  One whose place another has taken since counts as new once more: a row comes to the disk a time later.
Leaves out: what else lets a row in (coordinator).
"""

from __future__ import annotations

from array import array


class Asked:
    """Keys that were asked for, as many as there are places, more or less."""

    def __init__(self, places: int) -> None:
        self._marks = array("Q", [0]) * places

    def again(self, key: bytes) -> bool:
        """Whether it was asked for before, and from now on it was."""
        place = int.from_bytes(key[:8], "little") % len(self._marks)
        mark = int.from_bytes(key[8:16], "little")
        before, self._marks[place] = self._marks[place], mark
        return before == mark
