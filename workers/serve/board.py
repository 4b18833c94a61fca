"""What do the workers of one server know of each other? A page of words that is there before they fork.

    slot s begins at word s * SLOT_WORDS; every word has one writer, the worker in that slot
    word  name        meaning
    0     state       0 free, 1 booting, 2 serving
    1     open        requests that its desk has taken and not yet answered
    2     running     requests that its engine has in hand
    8..   counters    one word for each name in COUNTERS
    64..  histograms  for each name in HISTOGRAMS: one word a bucket of BOUNDS_S, one for what is longer,
                      and the sum in microseconds

Owner: the server's master, which clears words 0 to 7 once a slot's worker is gone; counts stay and go on
under the next worker in that slot, so that totals never go back.
Readers: every worker of the server.
Invariants
    I1  A dead worker leaves no trace in the gauges: nothing is taken and given back, only stated.
    I2  Sums over the slots may be a moment old; a bound that rests on one can be passed by as many requests
        as there are other workers.
Leans on: anonymous shared memory lives as long as one process maps it, so nothing is left to unlink. Aligned
8-byte stores are whole.
Leaves out: what is done with the figures (desk, metrics).
"""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Sequence

SLOTS = 256
"""Workers of one server at a time: a reload has the old and the new ones side by side."""

SLOT_WORDS = 128
FREE, BOOTING, SERVING = range(3)

COUNTERS = (
    "answered",
    "refused",
    "overloaded",
    "failed",
    "hung_up",
    "tried_again",
    "prompt_tokens",
    "reused_tokens",
    "completion_tokens",
    "lookups",
)
HISTOGRAMS = ("first_token", "request")
BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

_STATE, _OPEN, _RUNNING, _GAUGES = 0, 1, 2, 8
_COUNTERS_AT, _HISTOGRAMS_AT = 8, 64
_HISTOGRAM_WORDS = len(BOUNDS_S) + 2
assert _COUNTERS_AT + len(COUNTERS) <= _HISTOGRAMS_AT
assert _HISTOGRAMS_AT + len(HISTOGRAMS) * _HISTOGRAM_WORDS <= SLOT_WORDS


class Slot:
    """One worker's own words; its event loop alone writes them."""

    def __init__(self, board: Board, index: int) -> None:
        self.index = index
        self._words = board.words
        self._at = index * SLOT_WORDS

    @property
    def state(self) -> int:
        """FREE, BOOTING or SERVING."""
        return self._words[self._at + _STATE]

    @state.setter
    def state(self, state: int) -> None:
        self._words[self._at + _STATE] = state

    def take_request(self) -> None:
        """One more request is open at this desk."""
        self._words[self._at + _OPEN] += 1

    def end_request(self) -> None:
        """One of them has ended, in whatever way."""
        self._words[self._at + _OPEN] -= 1

    def is_busier_than_another(self) -> bool:
        """Whether another worker that serves has fewer requests in hand."""
        states, running = (self._words[word::SLOT_WORDS].tolist() for word in (_STATE, _RUNNING))
        ours = running[self.index]
        return any(state == SERVING and theirs < ours for state, theirs in zip(states, running, strict=True))

    def begin_run(self) -> None:
        """The engine has one more request in hand."""
        self._words[self._at + _RUNNING] += 1

    def end_run(self) -> None:
        """And one less."""
        self._words[self._at + _RUNNING] -= 1

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter of COUNTERS."""
        self._words[self._at + _COUNTERS_AT + COUNTERS.index(name)] += by

    def observe(self, name: str, seconds: float) -> None:
        """Add a duration to a histogram of HISTOGRAMS."""
        at = self._at + _histogram_at(name)
        self._words[at + bisect_left(BOUNDS_S, seconds)] += 1
        self._words[at + len(BOUNDS_S) + 1] += int(seconds * 1e6)


class Histogram:
    """Durations of all workers: `counts[i]` took at most BOUNDS_S[i], those of the last bucket more."""

    def __init__(self, counts: Sequence[int], sum_us: int) -> None:
        self.counts = counts
        self.sum_s = sum_us / 1e6

    @property
    def mean_s(self) -> float:
        """Mean duration, 0 where there is none."""
        count = sum(self.counts)
        return self.sum_s / count if count else 0.0


class Board:
    """All slots. Made by the master before the first fork."""

    def __init__(self) -> None:
        self.words = memoryview(mmap.mmap(-1, SLOTS * SLOT_WORDS * 8)).cast("Q")

    def take_slot(self) -> Slot:
        """A free slot, from now on booting (the master alone calls this)."""
        slot = next(slot for index in range(SLOTS) if (slot := Slot(self, index)).state == FREE)
        slot.state = BOOTING
        return slot

    def vacate(self, slot: Slot) -> None:
        """The worker in this slot is gone: the gauges say so (the master alone calls this)."""
        at = slot.index * SLOT_WORDS
        for word in range(_GAUGES):
            self.words[at + word] = 0

    def serving(self) -> int:
        """Workers that answer."""
        return sum(state == SERVING for state in self._column(_STATE))

    def open(self) -> int:
        """Requests that wait or run, at all desks together."""
        return sum(self._column(_OPEN))

    def running(self) -> int:
        """Requests that engines have in hand."""
        return sum(self._column(_RUNNING))

    def total(self, counter: str) -> int:
        """A counter of COUNTERS over all workers, past ones included."""
        return sum(self._column(_COUNTERS_AT + COUNTERS.index(counter)))

    def histogram(self, name: str) -> Histogram:
        """A histogram of HISTOGRAMS over all workers, past ones included."""
        at = _histogram_at(name)
        *counts, sum_us = (sum(self._column(at + word)) for word in range(_HISTOGRAM_WORDS))
        return Histogram(counts, sum_us)

    def _column(self, word: int) -> memoryview:
        return self.words[word::SLOT_WORDS]


def _histogram_at(name: str) -> int:
    return _HISTOGRAMS_AT + HISTOGRAMS.index(name) * _HISTOGRAM_WORDS
