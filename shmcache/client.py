"""A worker's side: which stored state fits this prompt, and where does a new one go?

    LOOKUP  candidates(): epoch → index → map (kept, or fresh and summed) → Hit → use()
    SAVE    reserve() → Slab.payload() → Slab.save() → helper thread: sum, trim, link, `written`

Owner: one Cache per process and namespace; a forked child attaches anew by itself.
Readers: the model layer (workers), any number of threads.
Invariants
    I1  No method here raises for anything that the coordinator, a file or /dev/shm can do: what
        fails is a miss or a skipped save, counted, and logged once per kind. Slab.payload alone
        raises, OutOfSpace, because its caller has to know.
    I2  A lookup sends no message and takes no lock that another process can hold; its only system
        calls map a slab that is not kept.
    I3  Every granted reservation ends: saved, cancelled, or taken back by the coordinator when this
        process has let go of its page's lock.
    I4  unnamed bytes are stated before they are allocated and until they have a name or are freed.
Leans on: what is published never changes, so a kept mapping needs no lock, no pin and no second sum.
Leaves out: what a state is, which rows are worth saving (workers, policy).
"""

from __future__ import annotations

import atexit
import errno
import itertools
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

import msgspec

from shmcache import kvc, protocol, shm
from shmcache.config import check_namespace
from shmcache.connection import FAULTS, Connection, Head
from shmcache.errors import ConfigError, CorruptSlab, ForeignObject, NoCoordinator, OutOfSpace
from shmcache.index import Found
from shmcache.key import PrefixWalk, RowAddress
from shmcache.page import COUNTER_INDEX
from shmcache.protocol import Plan, Tier, Verdict, VerdictKind
from shmcache.slab import KeptSlabs, MappedSlab, ReadBuffers, ReadSlab, UnnamedSlab
from shmcache.tiers.base import HandOver, file_name
from shmcache.tiers.disk import disk_directory, disk_path

KEPT_MAPPING_BYTES = 1 << 30
"""How much a worker keeps mapped by default: twenty rows of 2,000 tokens of a small model."""

RESERVE_TIMEOUT_MS = 250
"""An answer takes 0.1 ms, but the request waits for it: past this the prompt is computed unsaved."""

_ANSWER_NS = 2_000_000_000
_IDLE_S = 0.5
_BAD_WORDS = 1000  # publications that did not verify, remembered until so many are
_UNREADABLE_S = 60.0
_VERDICT_COUNTERS: dict[VerdictKind, str] = {
    "present": "save_present",
    "held": "save_held",
    "no_space": "save_dropped_no_space",
    "too_large": "save_dropped_no_space",
    "forgotten": "save_dropped_stale",
    "tier_down": "save_dropped_tier_down",
    "first_use": "save_first_use",
}


HitCounter = Literal["hit_exact", "hit_partial"]
_uses = itertools.count(1)  # of all rows in this process: next() is one step for all threads


class SavePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One row that may be saved.

    address         of the text; None for a reply in the making, whose text is not known yet.
    text_bytes      length of the rendered text, or of what is known of it.
    payload_offset  where the state begins in the slab: kvc.head_bytes of the most it may hold.
    payload_bytes   upper bound of the state.
    tenant_hash     whose share of the tier it takes.
    """

    address: RowAddress | None
    text_bytes: int
    payload_offset: int
    payload_bytes: int
    tenant_hash: bytes | None = None


class Grants(msgspec.Struct, frozen=True):
    """What a reserve was given.

    slabs  in the order of the plans; None for a row that is there already, is held or has no room.
    held   key of the first missing row where somebody else is making it: wait for that, or go on alone.
    kinds  what the coordinator said to each plan; empty where it said nothing in time.
    """

    slabs: list[Slab | None]
    held: bytes | None = None
    kinds: tuple[VerdictKind, ...] = ()


class CacheStatistics(msgspec.Struct, frozen=True):
    """What this worker keeps and has counted, by the names of page.COUNTERS."""

    kept_bytes: int
    counters: dict[str, int]


class Hit:
    """A published row whose text is a prefix of the prompt: mapped or read, and verified."""

    # Few objects, close together: a hit on one of thousands finds none of them in the processor's cache.
    __slots__ = ("_connection", "_slab", "_touch", "found", "image", "opened_us")

    def __init__(self, cache: Cache, found: Found, slab: MappedSlab | ReadSlab) -> None:
        self._connection = cache.connection
        self._slab = slab
        self._touch = found.touch
        self.found = found
        self.image = slab.image
        self.opened_us = 0  # that mapping or reading it took; whoever counts that sets it to 0

    def use(self, counter: HitCounter | None = None) -> None:
        """Note that the row was restored, which keeps it warm; and count the hit, if it is told how."""
        self._slab.used = next(_uses)
        self._connection.used(self._touch, COUNTER_INDEX[counter] if counter is not None else None)

    def close(self) -> None:
        """The image is not looked at any more. A mapping stays with the cache, a buffer goes back."""
        if isinstance(self._slab, ReadSlab):
            self._slab.close()


class Granted(msgspec.Struct, frozen=True):
    """A reservation's token, and the epoch of the coordinator that has charged its bytes."""

    token: int
    epoch: int


class Slab:
    """A granted reservation: memory is made ready for it, filled, and handed over.

    W1 prepare  W2 finish  W3 link  W4 free  W5 written  W6 told: whoever dies before W3 leaves nothing.
    """

    def __init__(self, cache: Cache, plan: SavePlan, granted: Granted, forget: int) -> None:
        self._cache = cache
        self._plan = plan
        self._granted = granted
        self._token = granted.token
        self._forget = forget
        self._ready = threading.Event()
        self._handed_over = False
        self._ended = threading.Event()
        self._unnamed: UnnamedSlab | None = None
        self._payload_bytes = 0
        self._published = False
        self._dropped = "save_dropped_no_space"

    def payload(self, payload_bytes: int) -> memoryview:
        """Where to write a state of so many bytes; waits for the preparation.

        Raises:
            OutOfSpace: /dev/shm or the tier's budget has no room; the reservation is given back.
        """
        self._ready.wait()
        slab_bytes = self._plan.payload_offset + payload_bytes
        if self._unnamed is not None and slab_bytes > self._unnamed.charged_bytes:
            self._grow(payload_bytes)
        if self._unnamed is None:
            self._end_without(self._dropped)
            raise OutOfSpace("/dev/shm", self._plan.payload_offset + payload_bytes, shm.free_bytes())
        self._payload_bytes = payload_bytes
        return self._unnamed.payload(payload_bytes)

    def is_ready(self, timeout_ms: int) -> bool:
        """Whether the preparation has ended, well or not; waits for it, at most so long."""
        return self._ready.wait(timeout_ms / 1000)

    def save(self, meta: kvc.Meta, pieces: Sequence[kvc.Piece], token_ids: memoryview) -> None:
        """The payload is written: sum it, name it and hand it over, on the helper thread."""
        self._handed_over = True
        self._cache.count("save_handed_over")
        self._cache.do(lambda: self._hand_over(meta, pieces, token_ids))

    def wait(self, timeout_ms: int) -> bool:
        """Whether the row is published; waits for the hand-over, at most so long."""
        return self._ended.wait(timeout_ms / 1000) and self._published

    def cancel(self) -> None:
        """Give the reservation back without waiting. Once handed over, or ended, it does nothing."""
        self._end_without("save_dropped_cancelled")

    def _end_without(self, counter: str) -> None:
        if not self._handed_over and not self._ended.is_set():
            self._ended.set()
            self._cache.count(counter)
            self._cache.do(self._give_back)

    def prepare(self) -> None:
        """On the helper thread: allocate, map, populate. A failure shows in payload()."""
        try:
            if not self._ended.is_set():
                self._make(self._plan.payload_bytes)
        except FAULTS as error:
            self._not_made(error)
        finally:
            self._ready.set()

    def _not_made(self, error: Exception) -> None:
        self._cache.connection.fault("prepare", error)
        if getattr(error, "errno", None) != errno.ENOSPC:
            self._dropped = "save_dropped_failed"

    def _make(self, payload_bytes: int) -> None:
        size_bytes = self._plan.payload_offset + payload_bytes
        self._cache.connection.hold_unnamed(size_bytes)
        try:
            self._unnamed = self._allocated(size_bytes)  # W1 prepare
        except BaseException:
            self._cache.connection.hold_unnamed(-size_bytes)
            raise

    def _allocated(self, size_bytes: int) -> UnnamedSlab:
        # Stated first, looked at then: a coordinator that has come since has counted these bytes, or is
        # seen here, and may have granted them to somebody else (I4).
        if not self._cache.connection.is_epoch(self._granted.epoch):
            raise NoCoordinator(self._cache.connection.names.namespace)
        return UnnamedSlab(self._cache.in_fd(), self._plan.payload_offset, size_bytes)

    def _grow(self, payload_bytes: int) -> None:
        """The state is longer than planned: ask for the bytes, then make the slab anew."""
        slab_bytes = self._plan.payload_offset + payload_bytes
        answer = self._cache.connection.ask(
            lambda head: protocol.Extend(**head, token=self._token, slab_bytes=slab_bytes),
            RESERVE_TIMEOUT_MS * 1_000_000,
        )
        self.let_go_of_bytes()
        if isinstance(answer, protocol.Reserved) and answer.verdicts[0].kind == "granted":
            try:
                self._make(payload_bytes)
            except FAULTS as error:
                self._not_made(error)

    def _hand_over(self, meta: kvc.Meta, pieces: Sequence[kvc.Piece], token_ids: memoryview) -> None:
        handover = HandOver(meta.key, self._token, self._forget)
        unnamed = self._unnamed
        if unnamed is None:
            self._ended.set()  # The cache was closed in between.
            return
        try:
            unnamed.finish(meta, pieces, token_ids, self._payload_bytes)  # W2 finish
            unnamed.link(self._cache.in_fd(), handover.name)  # W3 link
        except Exception as error:
            # Whatever is wrong with what is to be saved costs that save alone.
            self._cache.connection.fault("save", error)
            self._cache.count("save_dropped_failed")
            self._give_back()
            return
        finally:
            self.let_go_of_bytes()  # W4 free
            self._cache.connection.progress()
        answer = self._cache.connection.ask(  # W5 written
            lambda head: protocol.Written(**head, token=self._token, key=meta.key), _ANSWER_NS
        )
        # Without an answer the name speaks for itself: this or the next coordinator finds it.
        self._published = isinstance(answer, protocol.Outcome) and answer.published  # W6 told
        self._ended.set()

    def _give_back(self) -> None:
        self.let_go_of_bytes()
        self._ended.set()
        self._cache.connection.give_back([self._token])

    def let_go_of_bytes(self) -> None:
        """Free what has no name yet; whoever still has a view of it keeps the pages."""
        unnamed, self._unnamed = self._unnamed, None
        if unnamed is not None:
            unnamed.close()
            self._cache.connection.hold_unnamed(-unnamed.charged_bytes)


class Cache:
    """A worker's cache of one namespace. Context manager; close() waits for saves handed over."""

    def __init__(
        self, namespace: str, tier: Tier, kept_mapping_bytes: int, *, read_only: bool = False
    ) -> None:
        self.connection = Connection(namespace)
        self.tier = tier
        self.read_only = read_only
        self._kept_mapping_bytes = kept_mapping_bytes
        self._lock = threading.Lock()
        self._start_over()
        _open_caches.add(self)

    def _start_over(self) -> None:
        self._kept: KeptSlabs[Hit] = KeptSlabs(self._kept_mapping_bytes)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._helper: threading.Thread | None = None
        self._slabs: weakref.WeakSet[Slab] = weakref.WeakSet()
        # By publication, until when (time.monotonic()) it is not tried.
        self._bad_words: dict[int, float] = {}
        self._buffers = ReadBuffers()
        self._in_fd = -1
        self._in_place = (0, Path())
        self._disk: Path | None = None

    # ---- LOOKUP

    def candidates(self, walk: PrefixWalk, max_bytes: int) -> Iterator[Hit]:
        """Rows whose text is a prefix of the walk's text and at most max_bytes long, longest first.

        Each is mapped and verified as it is asked for; one that does not verify is dropped for
        everybody, once, and skipped.
        """
        reader = self.connection.reader()
        if reader is None:
            self.count("uncached")
            return
        for found in reader.candidates(walk, max_bytes):
            if (hit := self._open(found)) is not None:
                yield hit

    def get(self, key: bytes) -> Hit | None:
        """The row of a key, mapped and verified, or None."""
        kept = self._kept.get(key)
        if kept is not None and self.connection.holds(kept.found):
            return kept
        reader = self.connection.reader()
        found = reader.get(key) if reader is not None else None
        return self._open(found) if found is not None else None

    def has(self, key: bytes) -> bool:
        """Whether the row is published, in a tier at least as durable as ours: no save of it is needed."""
        reader = self.connection.reader()
        found = reader.get(key) if reader is not None else None
        return found is not None and found.row.tier >= self.tier

    def drop(self, hit: Hit, why: str) -> None:
        """Forget a row that did not restore: everywhere, once, with one log line at the coordinator."""
        self.count("restore_refused")
        self._drop(hit.found, why)

    def quarantine(self, hit: Hit, why: str) -> None:
        """Forget a row whose state is not what its record makes; its slab is kept to be looked at."""
        self.count("audits_differed")
        self._drop(hit.found, why, aside=True)

    def let_go(self) -> None:
        """Unmap all that is kept: the next hit of each row maps and sums it anew."""
        with self._lock:
            self._kept.clear()
            self.connection.state_mapped(self._kept.kept_bytes, self._kept.orphaned_bytes)

    def _open(self, found: Found) -> Hit | None:
        kept = self._kept.get(found.key)
        if kept is not None and kept.found.word == found.word:
            return kept
        if time.monotonic() < self._bad_words.get(found.word, 0):
            return None
        try:
            return self._opened(found)
        except FileNotFoundError:
            # A row leaves before its file does: one that is still there has lost it some other way, and one
            # that is there anew lies elsewhere now.
            again = self._published(found.key)
            if again is not None and again.word != found.word:
                return self._open(again)
            if again is not None:
                self._drop(found, "its file is gone")
            return None
        except (CorruptSlab, ForeignObject) as error:
            self.count("corrupt_rows" if isinstance(error, CorruptSlab) else "foreign_objects")
            self._drop(found, str(error))
        except FAULTS as error:
            self.connection.fault("map", error)
            if isinstance(error, OSError) and error.errno == errno.EIO:
                # A device may take seconds to say so, and no request waits for that twice in a row.
                self._shun(found, _UNREADABLE_S)
        return None

    def _opened(self, found: Found) -> Hit:
        began_ns = time.perf_counter_ns()
        hit = self._read(found) if found.row.tier == Tier.DISK else self._map(found)
        hit.opened_us = (time.perf_counter_ns() - began_ns) // 1000
        return hit

    def _map(self, found: Found) -> Hit:
        row = found.row
        path = self.connection.tier_path(Tier(row.tier)) / file_name(row.key)
        slab = MappedSlab(shm.Mapping.open(path))
        if slab.image.meta.key != row.key:
            slab.close()
            raise CorruptSlab("the slab holds the row of another key")
        self.count("mapped_slabs")
        hit = Hit(self, found, slab)
        with self._lock:
            self._kept.put(row.key, slab, hit)
            self.connection.state_mapped(self._kept.kept_bytes, self._kept.orphaned_bytes)
        self._start_helper()
        return hit

    def _read(self, found: Found) -> Hit:
        key = found.row.key
        if self._disk is None:
            self._disk = disk_directory(self.connection.names)
        fd = shm.open_owned(disk_path(self._disk, key), os.O_RDONLY)
        try:
            slab = ReadSlab(fd, self._buffers)
        finally:
            os.close(fd)
        if slab.image.meta.key != key:
            raise CorruptSlab("the file holds the row of another key")
        self.count("read_slabs")
        return Hit(self, found, slab)

    def _published(self, key: bytes) -> Found | None:
        reader = self.connection.reader()
        return reader.get(key) if reader is not None else None

    def _drop(self, found: Found, why: str, *, aside: bool = False) -> None:
        key = found.row.key
        # First, so that nobody here maps it again; and until the coordinator, if any, has heard of it.
        self._shun(found, math.inf)
        with self._lock:
            self._kept.let_go(key)
        if not self.read_only:
            self.connection.tell(
                lambda head: protocol.Drop(**head, key=key, word=found.word, why=why[:200], aside=aside)
            )

    def _shun(self, found: Found, for_s: float) -> None:
        """Let nobody here try this publication for so long."""
        with self._lock:
            if len(self._bad_words) >= _BAD_WORDS:
                self._bad_words.clear()
            self._bad_words[found.word] = time.monotonic() + for_s

    # ---- SAVE

    def reserve(self, plans: Sequence[SavePlan], base: bytes | None, forget: int) -> Grants:
        """Ask for all missing rows of a prompt at once; slabs are made ready on the helper thread.

        Args:
            plans: in the order of the prompt; at most protocol.MAX_PLANS.
            base: key of the row that was used.
            forget: the forget number under which the sequence began.
        """
        if self.read_only:
            return Grants([None] * len(plans))
        self.progress()  # it has not moved while it had nothing to do, and is not stuck for that
        epoch = 0

        def make(head: Head) -> protocol.Reserve:
            nonlocal epoch
            epoch = head["epoch"]
            wire = [self._wire(plan) for plan in plans]
            return protocol.Reserve(**head, forget=forget, base=base, plans=wire)

        answer = self.connection.ask(make, RESERVE_TIMEOUT_MS * 1_000_000)
        if not isinstance(answer, protocol.Reserved) or len(answer.verdicts) != len(plans):
            return Grants([None] * len(plans))
        slabs: list[Slab | None] = []
        for plan, verdict in zip(plans, answer.verdicts, strict=True):
            if verdict.kind == "granted":
                slab = Slab(self, plan, Granted(verdict.token, epoch), forget)
                self._slabs.add(slab)
                self.do(slab.prepare)
                slabs.append(slab)
            else:
                self.count(_VERDICT_COUNTERS[verdict.kind])
                slabs.append(None)
        kinds = tuple(verdict.kind for verdict in answer.verdicts)
        return Grants(slabs, _held(plans, answer.verdicts), kinds)

    def wait(self, key: bytes, timeout_ms: int) -> bool:
        """Wait until the save of a key that is in flight has ended; whether its row is there then.

        Ends early when its owner lets go, dies or is stuck, and when there is no coordinator.
        """
        self.count("waited")
        answer = self.connection.ask(lambda head: protocol.Await(**head, key=key), timeout_ms * 1_000_000)
        return isinstance(answer, protocol.Outcome) and answer.published

    def resume(self, key: bytes, timeout_ms: int) -> bool:
        """Wait until a row is there whose save may not have told its key yet; whether it is there.

        Ends early when the save of that key has ended without a row, and when there is no coordinator.
        """
        reader = self.connection.reader()
        if reader is None:
            return False
        if reader.get(key) is not None:
            return True
        if timeout_ms <= 0:
            return False
        answer = self.connection.ask(
            lambda head: protocol.Await(**head, key=key, unannounced=True), timeout_ms * 1_000_000
        )
        return isinstance(answer, protocol.Outcome) and answer.published

    def _wire(self, plan: SavePlan) -> Plan:
        address = plan.address
        return Plan(
            key=address.key if address is not None else None,
            block_key=address.block_key if address is not None else None,
            text_bytes=plan.text_bytes,
            slab_bytes=plan.payload_offset + plan.payload_bytes,
            tier=self.tier,
            tenant=plan.tenant_hash,
        )

    def in_fd(self) -> int:
        """Directory that takes finished slabs of this cache's tier. Raises OSError, ForeignObject."""
        # Under another id the directory may be another one of the same name (tools.clean).
        place = (self.connection.client, self.connection.tier_path(self.tier) / "in")
        if place != self._in_place:
            fd, self._in_fd = self._in_fd, shm.open_directory(place[1])
            self._in_place = place
            if fd >= 0:
                os.close(fd)
        return self._in_fd

    def flush(self, timeout_ms: int) -> bool:
        """Wait until everything handed over so far has its outcome; False if it took longer."""
        done = threading.Event()
        self.do(done.set)
        return done.wait(timeout_ms / 1000)

    # ---- counting

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter of page.COUNTERS."""
        self.connection.count(name, by)

    def progress(self) -> None:
        """Say that this worker moves; call it after every decoded piece."""
        self.connection.progress()

    @property
    def forget(self) -> int:
        """The forget number under which a sequence begins now. Read it before the row that it begins with."""
        self.connection.reader()
        return self.connection.forget

    def statistics(self) -> CacheStatistics:
        """What this worker keeps mapped and has counted."""
        return CacheStatistics(self._kept.kept_bytes, self.connection.counters())

    # ---- the helper thread

    def do(self, job: Callable[[], None]) -> None:
        """Run a job on the helper thread, in order."""
        self._jobs.put(job)
        self._start_helper()

    def _start_helper(self) -> None:
        with self._lock:
            if self._helper is None:
                self._helper = threading.Thread(
                    target=self._help, args=(self._jobs,), name="shmcache-helper", daemon=True
                )
                self._helper.start()

    def _help(self, jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while True:
            try:
                job = jobs.get(timeout=_IDLE_S)
            except queue.Empty:
                job = self._look_round
            if job is None:
                return
            try:
                job()
            except Exception as error:
                # Whoever waits for the next job must not wait for ever.
                self.connection.fault("helper", error)

    def _look_round(self) -> None:
        """Twice a second while there is nothing to do."""
        self.connection.send_again()
        self.connection.look_whether_cleaned()
        self._let_go_of_what_left()

    def _let_go_of_what_left(self) -> None:
        """Also an idle worker gives evicted bytes back: what is unlinked and mapped still costs."""
        self.connection.reader()  # the current one, if there is none yet
        with self._lock:
            self._kept.let_go_where(lambda hit: not self.connection.holds(hit.found))
            self.connection.state_mapped(self._kept.kept_bytes, self._kept.orphaned_bytes)

    # ---- leaving

    def close(self, timeout_ms: int = 2_000) -> None:
        """Wait for saves handed over, then let go of everything. The rows stay for everybody else."""
        if self._helper is not None:
            self._jobs.put(None)
            self._helper.join(timeout_ms / 1000)
        with self._lock:
            for slab in list(self._slabs):
                slab.let_go_of_bytes()
            self._kept.clear()
            if self._in_fd >= 0:
                os.close(self._in_fd)
            self._start_over()
        self.connection.close()

    def after_fork(self) -> None:
        """In the child: no helper, no mappings; it attaches anew at its first call."""
        self._lock = threading.Lock()
        inherited_fd = self._in_fd
        for slab in list(self._slabs):
            slab.let_go_of_bytes()
        self._kept.clear()
        self._start_over()
        if inherited_fd >= 0:
            os.close(inherited_fd)

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _held(plans: Sequence[SavePlan], verdicts: Sequence[Verdict]) -> bytes | None:
    """The key of the first missing row, where somebody else holds it."""
    for plan, verdict in zip(plans, verdicts, strict=True):
        if verdict.kind != "present":
            return plan.address.key if verdict.kind == "held" and plan.address is not None else None
    return None


def attach(
    namespace: str = "default",
    *,
    tier: str = "ram_file",
    kept_mapping_bytes: int = KEPT_MAPPING_BYTES,
    read_only: bool = False,
) -> Cache:
    """A cache of this namespace for this process.

    Looks at nothing yet, so it never fails for a coordinator that is not there: lookups miss, saves
    are skipped, and it is looked for again at most once a second.

    Args:
        namespace: as given to shmcache-coordinator.
        tier: where this worker's saves go: "ram", "ram_file" or "disk".
        kept_mapping_bytes: bytes of slabs that stay mapped between requests.
        read_only: take what is there, leave nothing: no row is saved, and one that does not verify is passed
            over here alone.
    Raises:
        ConfigError: a namespace or a tier that cannot be.
    """
    names = [number.name.lower() for number in Tier]
    if tier not in names:
        raise ConfigError(f"tier ({tier}) must be one of {', '.join(names)}")
    return Cache(check_namespace(namespace), Tier[tier.upper()], kept_mapping_bytes, read_only=read_only)


_open_caches: weakref.WeakSet[Cache] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for cache in list(_open_caches):
        cache.after_fork()


def _close_at_exit() -> None:
    """A worker that ends in an ordinary way still hands over what it has saved."""
    for cache in list(_open_caches):
        cache.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_close_at_exit)
