"""Given 16 bytes: which decision is stored under them, and does it still live?

One segment of shared memory: a hash table of fixed entries (slots) with the value inside, and an area of
units for values that are larger.

         0 ┌───────────────┐ tags and entries, as slots lays them out
           ├───────────────┤ units         256 bytes each: values of more than 196 bytes, in one piece
    -4,096 ├───────────────┤ header and statistics
           └───────────────┘

    offset size name           writer       meaning
    header
         0    8 magic          coordinator  "shmcdec1", stored last
         8    8 layout         coordinator  LAYOUT_HASH of its build
        16    8 epoch          coordinator  as in the control page
        24    8 max_rows       coordinator  how many decisions may be in
        32    8 buckets        coordinator
        40    8 units          coordinator
        64    8 replacements   coordinator  as in slots
       512 1024 statistics     coordinator  128 words, named by STAT_NAMES
    entry, 256 bytes
         0    8 word           coordinator  as in slots
         8   16 key            coordinator
        24    8 ends_ns        coordinator  CLOCK_BOOTTIME at which it ends; 0 = never
        32    8 expires_unix_s coordinator  double; the same for people and for renewal; 0 = never
        40    4 written_unix_s coordinator  for people
        44    4 value_bytes    coordinator
        48    4 unit           coordinator  first unit of a larger value; FFFFFFFF = inside
        52    4 value_crc32c   coordinator  of a larger value
        56  196 value          coordinator  zero where the value is in units
       252    4 check          coordinator  as in slots

Owner: the coordinator, through TableWriter.
Readers: every process, through TableReader. Of a larger value the units are copied, then summed, then
the word is loaded once more: units are given to another value only after their entry has gone.
Invariants
    I1  A value is returned only while its life lasts, by a clock that no step of the wall clock moves.
    I2  A value is returned whole: inside it is covered by the entry's check, in units by its own sum
        and by the word that still stands after the copy.
    I3  Units belong to at most one entry; they are free again when its word is 0.
    I4  At most max_rows entries are in.
Leans on: CLOCK_BOOTTIME is read without a system call (vDSO) and goes on while the machine sleeps.
Leaves out: who was first (arbiter), which leaves (arbiter, by lru), what the bytes mean (codec).
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Iterator
from mmap import mmap

import msgspec
from crc32c import crc32c

from shmcache.errors import LayoutMismatch
from shmcache.slots import SOUND, Entry, Place, SlotReader, SlotWriter, first_place, second_place

KEY_BYTES = 16
ENTRY_BYTES = 256
UNIT_BYTES = 256
INSIDE_BYTES = 196
HEADER_BYTES = 4096

STAT_NAMES = (
    "rows",
    "max_rows",
    "units_used",
    "units",
    "loaded",
    "adds",
    "stored",
    "held",
    "refused_ended",
    "refused_too_large",
    "failed",
    "evicted",
    "expired",
    "deleted",
    "claims",
    "claims_held",
    "claims_overtaken",
    "claims_in_flight",
    "commits",
    "durability",
    "is_down",
    "touches_missed",
)
"""The statistics words in their order. `durability` is 2 full, 1 commit, 0 memory."""

_clock, _BOOTTIME = time.clock_gettime_ns, time.CLOCK_BOOTTIME
_INSIDE = 0xFFFFFFFF
_ENTRY = struct.Struct("<Q16sQdIIII196s")
_FIXED = struct.Struct("<QdIIII")
_FIXED_AT = 8 + KEY_BYTES
_VALUE_AT = _FIXED_AT + _FIXED.size
_fixed = _FIXED.unpack_from
# What every hit needs: word, key, ends_ns, expires, value_bytes, unit.
_parts = struct.Struct(f"<Q16sQd4xII{4 + INSIDE_BYTES + 4}x").unpack
assert _ENTRY.size + 4 == _VALUE_AT + INSIDE_BYTES + 4 == ENTRY_BYTES

_MAGIC = int.from_bytes(b"shmcdec1", "little")
_MAGIC_WORD, _LAYOUT_WORD, _EPOCH_WORD, _MAX_ROWS_WORD, _BUCKETS_WORD, _UNITS_WORD = range(6)
_REPLACEMENTS_WORD = 8
_STATS_WORD = 64
_STAT_WORD = {name: _STATS_WORD + number for number, name in enumerate(STAT_NAMES)}
_ROWS_WORD = _STAT_WORD["rows"]
assert len(STAT_NAMES) <= 128

LAYOUT_HASH = int.from_bytes(
    hashlib.sha256(
        repr((2, HEADER_BYTES, UNIT_BYTES, _FIXED.format, ENTRY_BYTES, STAT_NAMES)).encode()
    ).digest()[:8],
    "little",
)


_Held = tuple[bytes, float | None]  # a value and its Unix expiry; None: never


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A decision as the coordinator keeps it. sequence grows with every one: the order in which they came."""

    sequence: int
    key: bytes
    value: bytes
    written_ms: int
    expires_ms: int | None


class Decision(msgspec.Struct, frozen=True, gc=False):
    """One entry, for people and for renewal."""

    key: bytes
    value: bytes
    expires_unix_s: float | None
    written_unix_s: int


class Ring(msgspec.Struct, frozen=True):
    """Words in a worker's page, a power of two of them: a touch is written, then the head that shows it."""

    head: memoryview
    touches: memoryview


class Stands(msgspec.Struct, frozen=True):
    """Whether a table is the current one, which it is while the word says its epoch; and who is, else."""

    word: memoryview
    elsewhere: Callable[[bytes], _Held | None]


def _layout(max_rows: int, units: int) -> tuple[Place, int, int]:
    """Where the entries, the units and the header lie: place, offset of units, segment size."""
    return _layout_of_buckets(Place.of(max_rows, ENTRY_BYTES), units)


def _layout_of_buckets(place: Place, units: int) -> tuple[Place, int, int]:
    units_at = -(-place.end // UNIT_BYTES) * UNIT_BYTES
    end = -(-(units_at + units * UNIT_BYTES) // 4096) * 4096
    return place, units_at, end + HEADER_BYTES


def segment_bytes(max_rows: int, units: int) -> int:
    """Size of a segment: 457 bytes a decision, and its units."""
    return _layout(max_rows, units)[2]


class TableReader:
    """Lookups without a lock, for any number of threads. `buffer` is a memoryview over a whole mmap.

    get(key)  the living value of a key and its Unix expiry, or None; from elsewhere once the epoch has moved
    """

    get: Callable[[bytes], _Held | None]

    def __init__(self, buffer: memoryview, ring: Ring | None = None, stands: Stands | None = None) -> None:
        """Raises LayoutMismatch if another build made the segment, or if it is none.

        Args:
            buffer: the segment.
            ring: where each hit is noted, by a word that names its entry; None for nowhere.
            stands: None for a table that is looked at for its own sake, whatever the epoch.
        """
        if buffer.nbytes < HEADER_BYTES or buffer.nbytes % 8:
            raise LayoutMismatch(LAYOUT_HASH, 0)
        raw = buffer.obj
        if not isinstance(raw, mmap) or len(raw) != buffer.nbytes:
            raise TypeError("a decision table needs a memoryview over a whole mmap")
        self._raw = raw
        self._header = buffer.cast("Q")[-HEADER_BYTES // 8 :]
        theirs = self._header[_LAYOUT_WORD] if self._header[_MAGIC_WORD] == _MAGIC else 0
        place = Place(self._header[_BUCKETS_WORD], ENTRY_BYTES)
        _, self._units_at, size_bytes = _layout_of_buckets(place, self._header[_UNITS_WORD])
        if theirs != LAYOUT_HASH or size_bytes != buffer.nbytes or not place.buckets:
            raise LayoutMismatch(LAYOUT_HASH, theirs)
        replacements = self._header[_REPLACEMENTS_WORD : _REPLACEMENTS_WORD + 1]
        self._slots = self._open(raw, place, replacements)
        # Without a ring hits are noted in a word that nobody reads: cheaper than to ask at each hit.
        self._ring = ring or Ring(memoryview(bytearray(8)).cast("Q"), memoryview(bytearray(8)).cast("Q"))
        self._stands = stands or Stands(self._header[_EPOCH_WORD:], lambda _key: None)
        self.get = self._make_get()

    def _open(self, raw: mmap, place: Place, replacements: memoryview) -> SlotReader:
        return SlotReader(raw, place, replacements)

    @property
    def epoch(self) -> int:
        """The epoch of the coordinator that made this segment."""
        return self._header[_EPOCH_WORD]

    @property
    def max_rows(self) -> int:
        """How many decisions may be in."""
        return self._header[_MAX_ROWS_WORD]

    def __len__(self) -> int:
        return self._header[_ROWS_WORD]

    def _make_get(self) -> Callable[[bytes], _Held | None]:
        """Build `get`: all that it touches in local variables, and the first match of slots' search unrolled.

        The word need not be loaded before the copy as well: the check says that it belongs to the body, and
        the load after the copy that it stands.
        """
        find, raw, words, search = self._raw.find, self._raw, self._slots.words, self._slots.get
        buckets, entries_at, units_at = self._slots.place.buckets, self._slots.place.start, self._units_at
        ring_head, touches, ring_mask = self._ring.head, self._ring.touches, len(self._ring.touches) - 1
        sum_of, sound, parts, clock, boottime = crc32c, SOUND, _parts, _clock, _BOOTTIME
        current, epoch, elsewhere = self._stands.word, self.epoch, self._stands.elsewhere

        def get(key: bytes) -> _Held | None:
            if current[0] != epoch:
                return elsewhere(key)
            tag, first = first_place(key)
            bucket = first % buckets * 8
            slot = find(tag, bucket, bucket + 8)
            if slot < 0:
                bucket = second_place(key)[0] % buckets * 8
                slot = find(tag, bucket, bucket + 8)
            if slot >= 0:
                start = slot * 256 + entries_at
                image = raw[start : start + 256]
                word, found, ends_ns, expires, value_bytes, unit = parts(image)
            # The sum of an entry whose word is 0 is never right: it was made with another word.
            if slot < 0 or found != key or sum_of(image) != sound or words[slot] != word:
                entry = search(key)
                if entry is None:
                    return None
                image, slot, word = entry
                _, _, ends_ns, expires, value_bytes, unit = parts(image)
            if ends_ns and ends_ns <= clock(boottime):
                return None
            if unit == _INSIDE:
                value = image[_VALUE_AT : _VALUE_AT + value_bytes]
            else:
                start = units_at + unit * UNIT_BYTES
                value = raw[start : start + value_bytes]
                if sum_of(value) != _fixed(image, _FIXED_AT)[5] or words[slot] != word:
                    # Its entry has left, and the units with it: at that moment it was a miss.
                    return None
            # Two threads at once may lose a touch: it costs an entry its place in the order of use, and a
            # lock would cost every hit.
            head = ring_head[0]
            touches[head & ring_mask] = word
            ring_head[0] = head + 1
            return value, expires or None

        return get

    def decisions(self) -> Iterator[Decision]:
        """All that live, in no order."""
        now_ns = _clock(_BOOTTIME)
        for entry in self._slots.entries():
            if not ended(entry, now_ns) and (decision := self.decision(entry)) is not None:
                yield decision

    def decision(self, entry: Entry) -> Decision | None:
        """An entry decoded; None where its value has left meanwhile."""
        image, slot, word = entry
        _ends_ns, expires, written, value_bytes, unit, value_crc = _fixed(image, _FIXED_AT)
        value = image[_VALUE_AT : _VALUE_AT + value_bytes]
        if unit != _INSIDE:
            value = self._units(unit, value_bytes)
            if crc32c(value) != value_crc or self._slots.words[slot] != word:
                return None
        return Decision(image[8:_FIXED_AT], value, expires or None, written)

    def stats(self) -> dict[str, int]:
        """The coordinator's figures by name."""
        return {name: self._header[word] for name, word in _STAT_WORD.items()}

    def close(self) -> None:
        """End this view, so that its mapping can be closed. No call may follow."""
        self._slots.close()
        self._header.release()
        del self._raw, self._stands, self.get

    def _units(self, unit: int, value_bytes: int) -> bytes:
        start = self._units_at + unit * UNIT_BYTES
        return self._raw[start : start + value_bytes]


def ended(entry: Entry, now_ns: int) -> bool:
    """Whether the life of an entry is over at this CLOCK_BOOTTIME instant."""
    ends_ns: int = _fixed(entry[0], _FIXED_AT)[0]
    return 0 < ends_ns <= now_ns


class TableWriter(TableReader):
    """The one writer: puts values in, takes them out, and keeps units and figures in step.

    entry(key)      the entry of a key, living or not
    free_slot(key)  a free slot for a key; -1 where one of its choices has to leave first
    """

    entry: Callable[[bytes], Entry | None]
    free_slot: Callable[[bytes], int]

    def __init__(self, buffer: memoryview) -> None:
        super().__init__(buffer)
        # The slots' own, without a call between: each decision asks both.
        self.entry, self.free_slot = self._writer.get, self._writer.free_slot
        self._free = Units(self._header[_UNITS_WORD])
        self._rows, self._most_rows = 0, self.max_rows
        self.set_stat("units", self._header[_UNITS_WORD])

    def _open(self, raw: mmap, place: Place, replacements: memoryview) -> SlotReader:
        self._writer = SlotWriter(raw, place, replacements)
        return self._writer

    @classmethod
    def create(cls, buffer: memoryview, max_rows: int, units: int, epoch: int) -> TableWriter:
        """Lay out an empty table in zeroed memory of exactly `segment_bytes(max_rows, units)`."""
        place, _, size_bytes = _layout(max_rows, units)
        if max_rows < 1 or buffer.nbytes != size_bytes:
            raise ValueError(f"{max_rows} decisions need {size_bytes} bytes, not {buffer.nbytes}")
        with buffer.cast("Q") as words, words[-HEADER_BYTES // 8 :] as header:
            header[_LAYOUT_WORD] = LAYOUT_HASH
            header[_EPOCH_WORD] = epoch
            header[_MAX_ROWS_WORD] = max_rows
            header[_BUCKETS_WORD] = place.buckets
            header[_UNITS_WORD] = units
            header[_MAGIC_WORD] = _MAGIC
        return cls(buffer)

    @property
    def slots(self) -> int:
        """Slots are numbered 0 to slots - 1."""
        return self._writer.slots

    def at(self, slot: int) -> Entry | None:
        """The entry in a slot."""
        return self._writer.at(slot)

    def entries(self) -> Iterator[Entry]:
        """All entries, living or not."""
        return self._writer.entries()

    def choices(self, key: bytes) -> list[int]:
        """The slots that a key may lie in."""
        return self._writer.choices(key)

    def fits(self, value: bytes) -> bool:
        """Whether there is room for a value now; if not, something with units has to leave first."""
        return len(value) <= INSIDE_BYTES or self._free.has(units_of(value))

    def could_fit(self, value: bytes) -> bool:
        """Whether there would be room for a value if nothing else were there."""
        return len(value) <= INSIDE_BYTES or self._free.could_have(units_of(value))

    def put(self, slot: int, record: Record, ends_ns: int, replaced: Entry | None) -> None:
        """Show a decision in a free slot of its key, in place of the entry that the key has.

        The caller has made room: fits(value) is true. It lives until ends_ns by CLOCK_BOOTTIME; 0: for ever.
        """
        value = inside = record.value
        unit, crc = _INSIDE, 0
        if len(value) > INSIDE_BYTES:
            unit, crc, inside = self._free.take(units_of(value)), crc32c(value), b""
            start = self._units_at + unit * UNIT_BYTES
            self._raw[start : start + len(value)] = value
            self.set_stat("units_used", self._free.used)
        word = self._writer.next_word(slot)
        image = _ENTRY.pack(
            word,
            record.key,
            ends_ns,
            record.expires_ms / 1000 if record.expires_ms is not None else 0.0,
            shown_s(record.written_ms),
            len(value),
            unit,
            crc,
            inside,
        )
        self._writer.publish(slot, word, image, replaced)
        if replaced is not None:
            self._give_units(replaced)
        else:
            self._rows += 1
            self._header[_ROWS_WORD] = self._rows

    def remove(self, entry: Entry) -> None:
        """Take an entry out; its units are free afterwards (I3)."""
        self._writer.remove(entry[1])
        self._give_units(entry)
        self._rows -= 1
        self._header[_ROWS_WORD] = self._rows

    def __len__(self) -> int:
        return self._rows

    @property
    def is_full(self) -> bool:
        """Whether somebody has to leave for another decision."""
        return self._rows >= self._most_rows

    def _give_units(self, entry: Entry) -> None:
        _ends, _expires, _written, value_bytes, unit, _crc = _fixed(entry[0], _FIXED_AT)
        if unit != _INSIDE:
            self._free.give(unit, -(-value_bytes // UNIT_BYTES))
            self.set_stat("units_used", self._free.used)

    def set_stat(self, name: str, value: int) -> None:
        """Show a figure to everybody."""
        self._header[_STAT_WORD[name]] = value

    def add_to_stat(self, name: str, by: int) -> None:
        """Move a figure on."""
        self._header[_STAT_WORD[name]] += by


def shown_s(unix_ms: int) -> int:
    """Seconds for people, in what an entry has room for, whatever the clock says."""
    unix_s = unix_ms // 1000
    return unix_s if 0 <= unix_s <= 0xFFFFFFFF else 0


def units_of(value: bytes) -> int:
    """How many units a value takes; 0 where it lies inside its entry."""
    return 0 if len(value) <= INSIDE_BYTES else -(-len(value) // UNIT_BYTES)


def has_units(entry: Entry) -> bool:
    """Whether an entry that leaves gives units back."""
    unit: int = _fixed(entry[0], _FIXED_AT)[4]
    return unit != _INSIDE


class Units:
    """Which units are free? Buddies: blocks of 1, 2, 4 … units; a block that comes back joins its twin.

    A value takes the next power of two, a quarter more than it needs on average, and in return there is
    no search and no compaction.
    """

    def __init__(self, units: int) -> None:
        self.used = 0
        self._all = units
        self._free: list[set[int]] = [set() for _ in range(max(1, units).bit_length())]
        start = 0
        for order in range(len(self._free) - 1, -1, -1):
            if units & 1 << order:
                self._free[order].add(start)
                start += 1 << order

    def has(self, units: int) -> bool:
        """Whether a block of so many units is free."""
        return any(self._free[_order(units) :])

    def could_have(self, units: int) -> bool:
        """Whether there is a block of so many units at all."""
        return 1 << _order(units) <= self._all

    def take(self, units: int) -> int:
        """The first unit of a block that is now taken."""
        order = wanted = _order(units)
        while not self._free[order]:
            order += 1
        start = self._free[order].pop()
        while order > wanted:
            order -= 1
            self._free[order].add(start + (1 << order))
        self.used += 1 << wanted
        return start

    def give(self, start: int, units: int) -> None:
        """Take a block back."""
        order = _order(units)
        self.used -= 1 << order
        while order < len(self._free) and (twin := start ^ 1 << order) in self._free[order]:
            self._free[order].remove(twin)
            start = min(start, twin)
            order += 1
        self._free[order].add(start)


def _order(units: int) -> int:
    return (units - 1).bit_length()
