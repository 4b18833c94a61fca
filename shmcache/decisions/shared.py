"""The store that every process of this machine shares: hits in shared memory, the rest by message.

    get    epoch → table → value, and a touch in this process's page: no lock, no message, no system call
    add    one message for a whole batch; answered when it is committed, held values are read in the table
    claim  one message for all missing keys of a call

What is larger than a message lies in this process's outbox meanwhile.

Owner: one per process and namespace; a forked child attaches anew by itself.
Readers: any number of threads.
Invariants
    I1  get works on while the coordinator is down; it raises NoCoordinator only where no table is mapped.
    I2  add returns what is in the table, unless its own value was refused (too large, or deleted
        meanwhile): then it returns that, stored nowhere.
    I3  The outbox holds one message's items until it is answered.
Leans on: a reply comes after what it speaks of is published; connection.ask ends within its limit.
Leaves out: what to do without a coordinator (fallback).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Literal

from crc32c import crc32c

from shmcache import protocol
from shmcache.config import check_namespace
from shmcache.connection import Connection, Head
from shmcache.decisions.forks import watch
from shmcache.decisions.stores import Held
from shmcache.decisions.stores import Item as StoreItem
from shmcache.decisions.table import Decision, TableReader
from shmcache.errors import NoCoordinator, ShmcacheError
from shmcache.page import OUTBOX_BYTES
from shmcache.protocol import MAX_KEYS, Added, AddVerdict, Claimed, Deleted, Item, Outbox

ANSWER_NS = 2_000_000_000
CLAIM_NS = 1_000_000_000
_INLINE_BYTES = 4096
_ITEM_BYTES = 40  # the most that an item takes beside its value


class SharedClaim:
    """A claim at the coordinator, of one epoch; released once."""

    def __init__(self, connection: Connection, token: int) -> None:
        self._connection = connection
        self.token = token
        self.epoch = connection.epoch
        self.clear = connection.clear

    def release(self) -> None:
        """End it; what was added under it has left it already."""
        if self._connection.epoch == self.epoch:
            self._connection.tell(lambda head: protocol.Release(**head, claim=self.token))


class SharedStore:
    """Decisions of all processes of this user and namespace.

    get(key)  as DecisionStore. Raises NoCoordinator where there is no table to read
    """

    get: Callable[[bytes], Held | None]

    loss_errors: ClassVar[tuple[type[Exception], ...]] = (ShmcacheError, OSError)
    reads_alone: ClassVar[bool] = True

    def __init__(self, namespace: str = "default") -> None:
        """Looks at nothing yet, so it never fails for a coordinator that is not there."""
        self._connection = Connection(check_namespace(namespace), self._take_get)
        self.after_fork()
        watch(self)

    def _take_get(self, get: Callable[[bytes], Held | None]) -> None:
        self.get = get

    def after_fork(self) -> None:
        """In the child: another thread of the parent may have held the lock."""
        self._outbox = threading.Lock()

    @property
    def maxsize(self) -> int | None:
        """How many decisions the coordinator's table holds."""
        table = self._connection.decisions()
        return table.max_rows if table is not None else None

    def add(self, key: bytes, value: bytes, expires: float | None) -> bytes:
        """As DecisionStore."""
        return self.add_many([(key, value, expires)])[0]

    def add_many(self, items: Sequence[StoreItem], claim: SharedClaim | None = None) -> list[bytes]:
        """A batch, in one round trip where it fits one message. Raises NoCoordinator."""
        now = time.time()
        wire = [
            Item(key, value, None if expires is None else max(1, int((expires - now) * 1000)))
            for key, value, expires in items
        ]
        verdicts = [verdict for part in _parts(wire) for verdict in self._add(part, claim)]
        values = [value for _, value, _ in items]
        if "held" in verdicts:
            get = self._table().get
            for position, verdict in enumerate(verdicts):
                if verdict == "held" and (held := get(items[position][0])) is not None:
                    values[position] = held[0]
        return values

    def _add(self, items: list[Item], claim: SharedClaim | None) -> list[AddVerdict]:
        if sum([len(item.value) for item in items]) + _ITEM_BYTES * len(items) <= _INLINE_BYTES:
            return self._ask_add(items, None, claim, len(items))
        return self._add_by_outbox(items, claim)

    def _add_by_outbox(self, items: list[Item], claim: SharedClaim | None) -> list[AddVerdict]:
        content = protocol.encode(items)
        with self._outbox:
            self._table()
            if (page := self._connection.page) is None:
                raise NoCoordinator(self._connection.names.namespace)
            page.write_outbox(content)
            return self._ask_add([], Outbox(0, len(content), crc32c(content)), claim, len(items))

    def _ask_add(
        self, items: list[Item], outbox: Outbox | None, claim: SharedClaim | None, count: int
    ) -> list[AddVerdict]:
        connection = self._connection
        # A claim ends with its coordinator: what was computed under it is added like anything else.
        token = claim.token if claim is not None and claim.epoch == connection.epoch else 0
        clear = claim.clear if claim is not None else connection.clear
        answer = connection.ask(
            lambda head: protocol.Add(**head, clear=clear, claim=token, items=items, outbox=outbox), ANSWER_NS
        )
        if not isinstance(answer, Added) or len(answer.verdicts) != count:
            raise NoCoordinator(connection.names.namespace)
        return answer.verdicts

    def renew(self, key: bytes, expires: float | None) -> None:
        """As DecisionStore; seen by everybody when it returns, and committed soon after."""
        ttl_ms = None if expires is None else max(0, int((expires - time.time()) * 1000))
        self._deleted(lambda head: protocol.Renew(**head, key=key, ttl_ms=ttl_ms))

    def delete(self, key: bytes) -> bool:
        """Remove one, for everybody; what is being computed for it is not stored."""
        return self._deleted(lambda head: protocol.Delete(**head, keys=[key])) > 0

    def prune(self) -> int:
        """As DecisionStore."""
        return self._deleted(lambda head: protocol.Prune(**head))

    def clear(self) -> None:
        """As DecisionStore: for everybody."""
        self._deleted(lambda head: protocol.Clear(**head))

    def __len__(self) -> int:
        return len(self._table())

    def close(self) -> None:
        """As DecisionStore."""
        self._connection.close()

    def decisions(self) -> Iterator[Decision]:
        """All decisions that live, in no order: for people."""
        return self._table().decisions()

    def stats(self) -> dict[str, int]:
        """The coordinator's figures."""
        return self._table().stats()

    # ---- claims

    def claim(self, keys: Sequence[bytes], limit_s: float) -> SharedClaim | Literal["held"] | None:
        """As ClaimingStore. A call with more keys than a message takes is not claimed."""
        if len(keys) > MAX_KEYS:
            return None
        answer = self._connection.ask(
            lambda head: protocol.Claim(**head, limit_ms=int(limit_s * 1000), keys=list(keys)), CLAIM_NS
        )
        if not isinstance(answer, Claimed):
            return None
        # `present`: decided since we looked, so looking again is all there is to do.
        return SharedClaim(self._connection, answer.claim) if answer.kind == "granted" else "held"

    def await_claims(self, keys: Sequence[bytes], deadline_ns: int) -> None:
        """As ClaimingStore; a coordinator that dies ends it within 100 ms."""
        left_ns = deadline_ns - time.monotonic_ns()
        if left_ns > 0:
            self._connection.ask(
                lambda head: protocol.AwaitClaims(**head, keys=list(keys[:MAX_KEYS])), left_ns
            )

    def _table(self) -> TableReader:
        table = self._connection.decisions()
        if table is None:
            raise NoCoordinator(self._connection.names.namespace)
        return table

    def _deleted(self, make: Callable[[Head], protocol.AnyRequest]) -> int:
        answer = self._connection.ask(make, ANSWER_NS)
        if not isinstance(answer, Deleted):
            raise NoCoordinator(self._connection.names.namespace)
        return answer.count


def _parts(items: list[Item]) -> Iterator[list[Item]]:
    """Split a batch into what one outbox takes."""
    start = size_bytes = 0
    for position, item in enumerate(items):
        item_bytes = len(item.value) + _ITEM_BYTES
        if position > start and (position - start == MAX_KEYS or size_bytes + item_bytes > OUTBOX_BYTES):
            yield items[start:position]
            start, size_bytes = position, 0
        size_bytes += item_bytes
    if start < len(items):
        yield items[start:]
