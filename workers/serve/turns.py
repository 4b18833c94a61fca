"""Several requests of one worker are under way: which one computes next?

    its first token is still to come ──► first, in the order of asking
    it goes on                       ──► behind those, each in its turn: one token, or one batch of a prompt

Two contexts that computed at once would only take the cores from each other; one after the other, whoever
comes new sees its first token before long replies have ended.

Owner: one worker. Users: the threads of its seats (models).
Invariants
    I1  At most one turn is taken at a time, and while somebody waits one is.
Leaves out: who has a seat at all (engine). Nobody waits for others' saves inside a turn, since a turn is one
batch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """The right to compute, handed from thread to thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._new: deque[threading.Event] = deque()
        self._going_on: deque[threading.Event] = deque()

    @contextmanager
    def turn(self, *, is_new: bool) -> Iterator[None]:
        """Wait for a turn, and have it for as long as the block runs."""
        self._take(self._new if is_new else self._going_on)
        try:
            yield
        finally:
            self._hand_on()

    def _take(self, waiting: deque[threading.Event]) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            ours = threading.Event()
            waiting.append(ours)
        ours.wait()

    def _hand_on(self) -> None:
        with self._lock:
            waiting = self._new or self._going_on
            if waiting:
                waiting.popleft().set()
            else:
                self._taken = False
