"""Is there a coordinator, what does its index say, and how do I ask it?

    not attached ──look, at most once a second──► attached ──epoch moves──► remapped
         ▲                                           │
         └────────── fork: the child starts over ────┘

Owner: one Connection per process and namespace; a forked child attaches anew under its own id.
Readers: any number of threads; counts and mailboxes are serialised here.
Invariants
    I1  view() takes one load to see that nothing has changed, and no system call then.
    I2  Whoever looks for a coordinator that is not there looks at most once a second.
    I3  ask() ends: with the answer, at its deadline, or within 100 ms of the coordinator's death, even
        where the next one is there by then.
    I4  What is counted before a page exists is in the page once it does.
Leans on
    The epoch is stored last (control I1): an index that opens under it is complete.
    posix_ipc.send without blocking never swallows a signal handler's exception; a FIFO wait is poll.
Leaves out: what is asked and what is done with the answer (client).
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypedDict

import msgspec

from shmcache import page, protocol, shm
from shmcache.control import EPOCH_WORD, ControlPage
from shmcache.control import Word as ControlWord
from shmcache.decisions.table import LAYOUT_HASH as DECISIONS_LAYOUT_HASH
from shmcache.decisions.table import Ring, Stands, TableReader
from shmcache.errors import ForeignObject, NoCoordinator, ShmcacheError
from shmcache.index import LAYOUT_HASH, Found, IndexReader
from shmcache.mq import RequestQueue
from shmcache.page import COUNTER_INDEX, COUNTERS, MAILBOXES, Word, WorkerPage
from shmcache.protocol import NO_MAILBOX, AnyReply, AnyRequest, Stale, Tier
from shmcache.shm import SHM_ROOT, Names

log = logging.getLogger(__name__)

LAYOUT = LAYOUT_HASH ^ DECISIONS_LAYOUT_HASH ^ page.LAYOUT ^ protocol.LAYOUT << 32
"""What the control page must say: index, decisions, pages and messages are those of this build."""

FAULTS = (ShmcacheError, OSError)
"""What a cache may run into; a worker turns these into a miss or a skipped save."""

_LOOK_AGAIN_NS = 1_000_000_000
_LOOK_AT_LOCK_NS = 100_000_000


_Get = Callable[[bytes], tuple[bytes, float | None] | None]


class Head(TypedDict):
    """What every request starts with (protocol.Request)."""

    epoch: int
    client: int
    mailbox: int
    request: int


class _View:
    """One epoch's index and decisions, mapped; readers for each thread, because readers keep counts.

    Nobody closes it: another thread may be about to read. The mappings go with the last reference.
    """

    def __init__(self, epoch: int, mapping: shm.Mapping, decisions: shm.Mapping) -> None:
        self.epoch = epoch
        self._mapping = mapping
        self._decisions = decisions
        self.decisions: TableReader | None = None
        self.local = threading.local()
        self.row_words = self.reader().row_words

    def reader(self) -> IndexReader:
        """This thread's reader. Raises LayoutMismatch."""
        reader: IndexReader | None = getattr(self.local, "reader", None)
        if reader is None:
            reader = self.local.reader = IndexReader(self._mapping.bytes)
        return reader

    def read_decisions(self, page: WorkerPage | None, stands: Stands) -> TableReader:
        """The reader of the decision table; hits are noted in the page. Raises LayoutMismatch."""
        ring = Ring(*page.decision_ring()) if page is not None else None
        self.decisions = TableReader(self._decisions.bytes, ring, stands)
        return self.decisions


class Connection:
    """One process's link to a namespace's coordinator. Making one never fails and looks at nothing."""

    def __init__(self, namespace: str, take_get: Callable[[_Get], None] = lambda _get: None) -> None:
        """take_get is handed what looks decisions up: decision(), and a table's own get once it is read."""
        self.names = Names(namespace)
        self._take_get = take_get
        self._lock = threading.RLock()
        self._start_over()
        _alive.add(self)

    def _start_over(self) -> None:
        self.client = random.SystemRandom().getrandbits(63)
        self._control: ControlPage | None = None
        self._hold(None)
        self._page: WorkerPage | None = None
        self._queue: RequestQueue | None = None
        self._look_again_ns = self._cleaned_look_ns = 0
        self._counts = [0] * len(COUNTERS)
        self._unnamed_bytes = 0
        self._faults_logged: set[tuple[str, type]] = set()
        self._request_ids = itertools.count(1)
        self._cancels: deque[tuple[list[int], int]] = deque()
        # The one used last is used next: each costs the coordinator a descriptor from its first use on.
        self._mailboxes = list(reversed(range(MAILBOXES)))

    # ---- reading

    def reader(self) -> IndexReader | None:
        """The current index, remapped where the epoch has moved; None where there is none (I1)."""
        view, control = self._view, self._control
        if view is not None and control is not None and control.words[EPOCH_WORD] == view.epoch:
            return view.reader()
        view = self._attach()
        return view.reader() if view is not None else None

    def _current(self) -> _View | None:
        """The view of the current epoch, as reader()."""
        view, control = self._view, self._control
        if view is not None and control is not None and control.words[EPOCH_WORD] == view.epoch:
            return view
        return self._attach()

    def holds(self, found: Found) -> bool:
        """Whether the current index still has this very publication: two loads, no search, no check."""
        view, control = self._view, self._control
        try:
            return (
                view is not None
                and control is not None
                and control.words[EPOCH_WORD] == view.epoch
                and view.row_words[found.slot] == found.word
            )
        except IndexError:  # found in the larger index of an earlier coordinator
            return False

    def decision(self, key: bytes) -> tuple[bytes, float | None] | None:
        """A decision as TableReader.get, from the current table. Raises NoCoordinator where there is none.

        From then on that table's own get is asked, without a call between, until the epoch moves.
        """
        table = self.decisions()
        if table is None:
            raise NoCoordinator(self.names.namespace)
        self._take_get(table.get)
        return table.get(key)

    def decisions(self) -> TableReader | None:
        """The current decision table, as reader()."""
        view, control = self._current(), self._control
        if view is None or control is None:
            return None
        table = view.decisions
        if table is None:
            stands = Stands(control.words[EPOCH_WORD : EPOCH_WORD + 1], self.decision)
            table = view.read_decisions(self._page, stands)
        return table

    @property
    def clear(self) -> int:
        """The clear number under which a decision is computed now; 0 without a coordinator."""
        return self._control.words[ControlWord.CLEAR] if self._control is not None else 0

    @property
    def epoch(self) -> int:
        """The epoch that this process reads; 0 without one."""
        return self._view.epoch if self._view is not None else 0

    def is_epoch(self, epoch: int) -> bool:
        """Whether this is the epoch still, read from the control page just now."""
        return self._control is not None and self._control.words[EPOCH_WORD] == epoch

    @property
    def page(self) -> WorkerPage | None:
        """This process's own page."""
        return self._page

    def tier_path(self, tier: Tier) -> Path:
        """Where a tier's slabs are handed over and, in memory, lie. Raises NoCoordinator."""
        view = self._view
        if view is None:
            raise NoCoordinator(self.names.namespace)
        return self.names.tier(tier.name.lower(), view.epoch)

    @property
    def forget(self) -> int:
        """The forget number under which a sequence begins now; 0 without a coordinator."""
        return self._control.forget if self._control is not None else 0

    def _attach(self) -> _View | None:
        """Look for the current epoch, at most once a second while there is nothing to find (I2)."""
        with self._lock:
            now_ns = time.monotonic_ns()
            if now_ns < self._look_again_ns:
                return None
            view = None
            try:
                view = self._current_view()
                if view is not None and self._page is None:
                    self._make_page()
            except FAULTS as error:
                self.fault("attach", error)
                view = None
            # The page first: a thread that sees the view asks at once, and notes its hits there.
            self._hold(view)
            if view is None:
                self._look_again_ns = now_ns + _LOOK_AGAIN_NS
            return view

    def _current_view(self) -> _View | None:
        """The view of the current epoch, mapped anew where it has moved; None where there is none."""
        if self._control is None:
            self._control = ControlPage.open(self.names)
        for last_try in (False, True):
            epoch = self._control.epoch(LAYOUT)
            if self._view is not None and self._view.epoch == epoch:
                return self._view
            self._hold(None)
            if epoch == 0:
                return None
            try:
                mapping = shm.Mapping.open(SHM_ROOT / self.names.index_segment(epoch))
                decisions = shm.Mapping.open(SHM_ROOT / self.names.decisions_segment(epoch))
            except FileNotFoundError:
                # A newer coordinator has removed it between our two looks.
                if last_try:
                    raise
            else:
                return _View(epoch, mapping, decisions)
        return None

    def _hold(self, view: _View | None) -> None:
        """Read from this view from now on; nobody keeps a former one for looking decisions up."""
        self._view = view
        self._take_get(self.decision)

    def _make_page(self) -> None:
        worker_page = WorkerPage(self.names, self.client)
        for name, index in COUNTER_INDEX.items():
            worker_page.count(name, self._counts[index])
        worker_page.words[Word.UNNAMED] = self._unnamed_bytes
        self._page = worker_page

    # ---- counting

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter of page.COUNTERS (I4)."""
        with self._lock:
            if self._page is not None:
                self._page.count(name, by)
            else:
                self._counts[COUNTER_INDEX[name]] += by

    def counters(self) -> dict[str, int]:
        """What this process has counted."""
        if self._page is not None:
            return self._page.counters()
        return dict(zip(COUNTERS, self._counts, strict=True))

    def used(self, touch: int, counter: int | None) -> None:
        """Note the use of a row (index.Found.touch), and count it by a counter's number, if any."""
        with self._lock:
            if self._page is not None:
                self._page.use(touch, counter)

    def progress(self) -> None:
        """Say that this worker moves: an owner that does not for a minute counts as stuck."""
        if self._page is not None:
            self._page.words[Word.PROGRESS] += 1

    def hold_unnamed(self, by_bytes: int) -> None:
        """State how many bytes without a name this worker holds."""
        with self._lock:
            # A slab of before a close or a fork gives back what this page has never stated.
            self._unnamed_bytes = max(0, self._unnamed_bytes + by_bytes)
            if self._page is not None:
                self._page.words[Word.UNNAMED] = self._unnamed_bytes

    def state_mapped(self, kept_bytes: int, orphaned_bytes: int) -> None:
        """State how many bytes of slabs this worker keeps mapped, and has let go but not everybody."""
        if self._page is not None:
            self._page.words[Word.MAPPED] = kept_bytes
            self._page.words[Word.ORPHANED] = orphaned_bytes

    def fault(self, what: str, error: BaseException) -> None:
        """Count a fault of the cache, and log the first of its kind; nobody there is none, but is said."""
        if not isinstance(error, NoCoordinator):
            self.count("foreign_objects" if isinstance(error, ForeignObject) else "cache_faults")
        kind = (what, type(error))
        if kind not in self._faults_logged:
            self._faults_logged.add(kind)
            log.warning("%s: %s: served without the cache (further ones are only counted)", what, error)

    # ---- asking

    def ask(self, make: Callable[[Head], AnyRequest], timeout_ns: int) -> AnyReply | None:
        """Send a request and wait for its answer; None if there is none in time (I3).

        An answer `stale` means a new coordinator: the request is sent to it again, once.
        """
        deadline_ns = time.monotonic_ns() + timeout_ns
        if self._cancels:
            self.send_again()
        mailboxes = self._mailboxes  # to which it goes back, also where all starts over meanwhile
        try:
            mailbox = mailboxes.pop()
        except IndexError:
            self.count("save_dropped_queue_full")
            return None
        try:
            reply = self._ask_once(make, mailbox, deadline_ns)
            if isinstance(reply, Stale):
                reply = self._ask_once(make, mailbox, deadline_ns)
        except FAULTS as error:
            self.fault("ask", error)
            return None
        finally:
            mailboxes.append(mailbox)
        return None if isinstance(reply, Stale) else reply

    def tell(self, make: Callable[[Head], AnyRequest], timeout_ns: int = 0) -> bool:
        """Send a request that wants no answer; False if it could not be sent in time."""
        try:
            return self._send(make, NO_MAILBOX, time.monotonic_ns() + timeout_ns) is not None
        except FAULTS as error:
            self.fault("tell", error)
            return False

    def _ask_once(
        self, make: Callable[[Head], AnyRequest], mailbox: int, deadline_ns: int
    ) -> AnyReply | None:
        view = self._current()  # attaches, or remaps
        worker_page, control = self._page, self._control
        if view is None or worker_page is None or control is None:
            self.count("save_dropped_no_coordinator")
            return None
        worker_page.prepare_wait(mailbox)
        sent = self._send(make, mailbox, deadline_ns)
        if sent is None:
            return None
        is_over = False
        try:
            while (now_ns := time.monotonic_ns()) < deadline_ns:
                until_ns = min(deadline_ns, now_ns + _LOOK_AT_LOCK_NS)
                body = worker_page.wait(mailbox, sent["request"], until_ns)
                if body is not None:
                    is_over = True
                    return _decoded(body)
                epoch = control.words[EPOCH_WORD]
                is_over = not control.coordinator_lives() or epoch != sent["epoch"]
                if is_over:
                    # Killed and started again between two looks, the next one knows nothing of us.
                    return Stale(epoch) if epoch != sent["epoch"] else None
            return None
        finally:
            # A signal handler's exception ends a wait as well. If this was a Reserve it may be granted
            # yet, and nobody would know of what it holds.
            if not is_over:
                self.give_back([], sent["request"])

    def give_back(self, tokens: list[int], asked: int = 0) -> None:
        """Cancel reservations, by token or by the request that asked for them (protocol.Cancel).

        Sent at once, or where the queue is full by `send_again`: a cancel that is lost would hold its key
        and its bytes for as long as this process lives.
        """
        with self._lock:
            self._cancels.append((tokens, asked))
            self.send_again()

    def send_again(self) -> None:
        """Send the cancels that the queue has not taken yet, oldest first."""
        with self._lock:
            while self._cancels:
                tokens, asked = self._cancels[0]
                if not self.tell(partial(_cancel, tokens, asked)):
                    return
                self._cancels.popleft()

    def _send(self, make: Callable[[Head], AnyRequest], mailbox: int, deadline_ns: int) -> Head | None:
        """Send under the current epoch; how the message began, or None if nothing was sent.

        Not to a coordinator that is down: nobody would answer, and its queue would be full of the past.
        """
        view = self._current()
        control = self._control
        if view is None or control is None or not control.coordinator_lives():
            self.look_whether_cleaned()
            if mailbox != NO_MAILBOX:
                self.count("save_dropped_no_coordinator")
            return None
        queue = self._queue or self._open_queue()
        request = next(self._request_ids)
        head = Head(epoch=view.epoch, client=self.client, mailbox=mailbox, request=request)
        if not queue.send(protocol.encode(make(head)), deadline_ns):
            if mailbox != NO_MAILBOX:
                self.count("save_dropped_queue_full")
            return None
        return head

    def _open_queue(self) -> RequestQueue:
        with self._lock:
            if self._queue is None:
                self._queue = RequestQueue(self.names)
            return self._queue

    def look_whether_cleaned(self) -> None:
        """Start over where the control page is not the namespace's any more (tools.clean); once a second."""
        with self._lock:
            now_ns, control = time.monotonic_ns(), self._control
            if control is None or now_ns < self._cleaned_look_ns or control.coordinator_lives():
                return
            # Not the time of the look for an epoch: the next coordinator's is seen at the next call.
            self._cleaned_look_ns = now_ns + _LOOK_AGAIN_NS
            if not control.is_current(self.names):
                counts = list(self.counters().values())
                self.close()
                self._counts = counts

    # ---- leaving

    def close(self) -> None:
        """Leave: the page's lock goes last, and with it all that this process still held."""
        with self._lock:
            self._hold(None)
            if self._queue is not None:
                self._queue.close()
            if self._page is not None:
                self._page.close()
            if self._control is not None:
                self._control.close()
            self._start_over()

    def after_fork(self) -> None:
        """In the child: the parent's lock, page and mailboxes stay the parent's."""
        self._lock = threading.RLock()
        inherited = (self._queue, self._control)
        worker_page = self._page
        self._start_over()
        if worker_page is not None:
            worker_page.close_in_child()
        for opened in inherited:
            if opened is not None:
                opened.close()


def _cancel(tokens: list[int], asked: int, head: Head) -> AnyRequest:
    return protocol.Cancel(**head, tokens=tokens, asked=asked)


def _decoded(body: bytes) -> AnyReply | None:
    try:
        return protocol.decode_reply(body)
    except msgspec.MsgspecError:
        return None


_alive: weakref.WeakSet[Connection] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for connection in list(_alive):
        connection.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
