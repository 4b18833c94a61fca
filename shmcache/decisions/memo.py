"""What did we detect in this state the last time?

Detecting a state's language costs more than looking its decision up: a router that remembers its last
few thousand detections makes a hit cheap. Any `route(state)` can be remembered, if equal states are
routed alike. The key is a hash of the state, so no text is kept.

Owner: one memo per process. Readers: any number of threads.
Invariants
    I1  A state without a canonical text is routed each time.
    I2  A result that a caller changes does not change the memo: its top level is copied.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from shmcache.decisions.key import KEY_BYTES, NotCanonical, canonical

REMEMBERED = 4096

R = TypeVar("R")


class DetectionMemo(Generic[R]):
    """A callable that stands for `route` and remembers its last results, the most recently used ones."""

    def __init__(self, route: Callable[[Any], R], remembered: int = REMEMBERED) -> None:
        self._route = route
        self._limit = remembered
        self._lock = threading.Lock()
        self._results: OrderedDict[bytes, R] = OrderedDict()
        self.hits = self.misses = 0

    def __call__(self, state: Any) -> R:
        """What route(state) says, or said."""
        try:
            key = blake2b(canonical(state), digest_size=KEY_BYTES).digest()
        except NotCanonical:
            return self._route(state)
        with self._lock:
            result = self._results.get(key)
            if result is not None:
                self._results.move_to_end(key)
                self.hits += 1
                return copy.copy(result)
        result = self._route(state)
        with self._lock:
            self.misses += 1
            self._results[key] = copy.copy(result)
            if len(self._results) > self._limit:
                self._results.popitem(last=False)
        return result

    def __len__(self) -> int:
        return len(self._results)

    def clear(self) -> None:
        """Forget everything, as after a change of the router's rules."""
        with self._lock:
            self._results.clear()
