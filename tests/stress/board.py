"""Counts that outlive whoever counted: one shared page of words, and a switch that all processes look at.

Each process has a column of its own; it is killed in the middle of things, and what it has counted stays.
"""

from __future__ import annotations

import mmap
import os
import time
from enum import IntEnum

_COLUMNS = 32
_WORDS = 16


class Word(IntEnum):
    """What a column counts. PAUSED says that its process has seen the switch, and is at rest."""

    PAUSED = 0
    HITS = 1
    MISSES = 2
    WRONG = 3
    RETRIES = 4
    LOST = 5
    SAVED = 6
    MAPPED = 7


GO, PAUSE, STOP = 1, 2, 3


class Board:
    """The page. Made before the processes are forked."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, mmap.PAGESIZE)
        self._words = memoryview(self._map).cast("Q")
        self._used = 0

    def column(self) -> Column:
        """A column for a process that is about to start; it keeps what was counted there before."""
        self._used = self._used % (_COLUMNS - 1) + 1
        return Column(self._words, self._used * _WORDS)

    def total(self, word: Word) -> int:
        """What all columns have counted."""
        return sum(self._words[number * _WORDS + word] for number in range(1, _COLUMNS))

    def switch(self, to: int) -> None:
        """Tell everybody."""
        self._words[0] = to


class Column:
    """One process's counts, and its view of the switch."""

    def __init__(self, words: memoryview, start: int) -> None:
        self._words, self._start = words, start
        self._words[start + Word.PAUSED] = 0

    def add(self, word: Word, by: int = 1) -> None:
        """Count."""
        self._words[self._start + word] += by

    @property
    def is_paused(self) -> bool:
        """Whether its process is at rest."""
        return self._words[self._start + Word.PAUSED] == 1

    def goes_on(self) -> bool:
        """Asked by its process between two steps: waits while all are paused; False where it is to stop."""
        if self._words[0] == GO:
            return True
        parent = os.getppid()
        self._words[self._start + Word.PAUSED] = 1
        while self._words[0] == PAUSE:
            time.sleep(0.001)
            if os.getppid() != parent:
                return False
        self._words[self._start + Word.PAUSED] = 0
        return self._words[0] == GO
