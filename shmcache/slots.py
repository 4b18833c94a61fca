"""Given a key: in which slot of a hash table in shared memory is its entry?

    tags      as in buckets
    entries   fixed size, a multiple of 8:   word 8 | key | body | check 4

    word   generation << 24 | slot << 1 | 1, or 0: free: it names one entry, of all times
    check  CRC32C of all bytes before it, word included

Bytes 8 to 16 of a key name its two buckets (`buckets`).

Publish: each step is one copy or one word store, in this order.
    P1 body         body and check of a free slot, whose word is 0
    P2 tag          probes come by
    P3 word         the entry is there
    P4 replaced     P4 and P5 only where the key had an entry: `replacements` moves on,
    P5 old word     and the old entry is gone
Remove: R1 word.

Owner: one writer, through SlotWriter.
Readers: every process over a read-only mapping, without a lock or a message.
    1 find the tag in the first bucket, then in the second; at each match
    2 load the word; 0: the next match
    3 copy the entry
    4 verify the check over the copy, word included
    5 load the word again; where the check or the word differs: the next match, then once more from 1
    6 compare the whole key; another: the next match
    7 at a miss: if `replacements` has moved since 1, once more from 1, because the new entry may have
      come behind the reader's back while the old one left before its eyes
    The second attempt ends in a hit or a miss, whatever it meets.
Invariants
    I1  An entry is found by its key if and only if its word is not 0; P3, P5 and R1 are single stores.
    I2  What a reader returns was published, whole, between its two word loads: generations only grow, and
        where loads may pass each other the check says that body and word belong together.
    I3  A key that has an entry is found at every moment of a replacement (7).
    I4  A writer that dies between two steps leaves every entry whole or not there.
Leans on: aligned stores through memoryview.cast("Q") never tear; a new segment reads as zeros.
Leaves out: what a body holds, and who leaves when both buckets are full (the table's owner).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from mmap import mmap

import msgspec
from crc32c import crc32c

from shmcache.buckets import SLOTS, buckets_for, free_slot, matches, slots_of

_PUBLISHED, _SLOT_BITS = 1, 23
_CHECK = struct.Struct("<I")
first_place: Callable[[bytes], tuple[bytes, int]] = struct.Struct("<c7xI4x").unpack
second_place: Callable[[bytes], tuple[int]] = struct.Struct("<12xI").unpack
_places: Callable[[bytes], tuple[bytes, int, int]] = struct.Struct("<c7xII").unpack

# Of bytes followed by their CRC32C the CRC32C is a constant: one call verifies an entry, check included.
SOUND = crc32c(_CHECK.pack(crc32c(b"")))
_SCAN_SLOTS = 1024

Entry = tuple[bytes, int, int]
"""A verified copy, its slot, and the word that published it."""


def slot_of(word: int) -> int:
    """The slot that a publication's word names."""
    return word >> 1 & (1 << _SLOT_BITS) - 1


class Place(msgspec.Struct, frozen=True):
    """Where a table lies in its segment, which starts with its tags: a slot is the offset of its tag."""

    buckets: int
    entry_bytes: int

    @classmethod
    def of(cls, entries: int, entry_bytes: int) -> Place:
        """Place for so many entries."""
        return cls(buckets_for(entries), entry_bytes)

    @property
    def slots(self) -> int:
        """Slots are numbered 0 to slots - 1."""
        return self.buckets * SLOTS

    @property
    def start(self) -> int:
        """Offset of the first entry: entries of 256 bytes are four lines each, and in one page."""
        return -(-self.slots // 256) * 256

    @property
    def end(self) -> int:
        """Offset behind the last entry."""
        return self.start + self.slots * self.entry_bytes


class SlotReader:
    """Lookups without a lock, for any number of threads. Keys have 16 bytes."""

    def __init__(self, raw: mmap, place: Place, replacements: memoryview) -> None:
        """A table in a whole mapping; `replacements` is its counter, a view of one word."""
        self._raw = raw
        self._find = raw.find
        self.place = place
        self._buckets, self._start, self._size = place.buckets, place.start, place.entry_bytes
        self.words = memoryview(raw)[place.start : place.end].cast("Q")[:: place.entry_bytes // 8]
        """The words by slot: a hot path of the table's own loads them itself."""
        self._replacements = replacements
        self.retries = self.lost = 0

    @property
    def slots(self) -> int:
        """Slots are numbered 0 to slots - 1."""
        return self._buckets * SLOTS

    def get(self, key: bytes) -> Entry | None:
        """The entry of a key, or None."""
        tag, *buckets = self._buckets_of(key)
        for is_last in (False, True):
            replacements = self._replacements[0]
            differs = False
            for slot in matches(self._find, tag, buckets):  # 1
                if word := self.words[slot]:  # 2
                    image = self._image(slot)  # 3
                    if crc32c(image) != SOUND or self.words[slot] != word:  # 4, 5
                        differs = True
                    elif image[8:24] == key:  # 6
                        return image, slot, word
            if not differs and self._replacements[0] == replacements:  # 7
                return None
            if is_last:
                self.lost += 1
            else:
                self.retries += 1
        return None

    def at(self, slot: int) -> Entry | None:
        """The entry in a slot, or None: free, changing just now, or no such slot."""
        if not 0 <= slot < self.slots:
            return None
        word = self.words[slot]
        image = self._image(slot)
        if crc32c(image) == SOUND and self.words[slot] == word and word:
            return image, slot, word
        return None

    def entries(self) -> Iterator[Entry]:
        """All entries, in no order."""
        for start in range(0, self.slots, _SCAN_SLOTS):
            for slot, word in enumerate(self.words[start : start + _SCAN_SLOTS].tolist(), start):
                if word and (entry := self.at(slot)) is not None:
                    yield entry

    def close(self) -> None:
        """End this view. No call may follow."""
        self.words.release()
        self._replacements.release()
        del self._raw, self._find

    def _buckets_of(self, key: bytes) -> tuple[bytes, int, int]:
        """The tag of a key, and its two buckets."""
        tag, first, second = _places(key)
        return tag, first % self._buckets * SLOTS, second % self._buckets * SLOTS

    def _image(self, slot: int) -> bytes:
        start = slot * self._size + self._start
        return self._raw[start : start + self._size]


class SlotWriter(SlotReader):
    """The one writer of a table, which is empty when it begins."""

    def __init__(self, raw: mmap, place: Place, replacements: memoryview) -> None:
        if place.slots > 1 << _SLOT_BITS:
            raise ValueError(f"a table has at most {1 << _SLOT_BITS} slots, not {place.slots}")
        super().__init__(raw, place, replacements)
        # By slot, whether its word is not 0: a third of the time that the words themselves take.
        self._taken = bytearray(place.slots)
        # Random, so that nothing noted of another epoch's table names an entry of this one.
        self._generation = int.from_bytes(os.urandom(4), "little")

    def free_slot(self, key: bytes) -> int:
        """A free slot for a key in its better bucket; -1 where both are full."""
        _, first, second = self._buckets_of(key)
        return free_slot(first, second, self._states)

    def _states(self, bucket: int) -> bytearray:
        return self._taken[bucket : bucket + SLOTS]

    def choices(self, key: bytes) -> list[int]:
        """The slots of both buckets of a key."""
        return slots_of(self._buckets_of(key)[1:])

    def get(self, key: bytes) -> Entry | None:
        """The entry of a key, or None. What the one writer sees is whole, so nothing is checked."""
        tag, *buckets = self._buckets_of(key)
        for slot in matches(self._find, tag, buckets):
            start = slot * self._size + self._start
            if (word := self.words[slot]) and self._raw[start + 8 : start + 24] == key:
                return self._image(slot), slot, word
        return None

    def next_word(self, slot: int) -> int:
        """The word of the next publication, into this slot."""
        self._generation += 1
        return self._generation << _SLOT_BITS + 1 | slot << 1 | _PUBLISHED

    def publish(self, slot: int, word: int, image: bytes, replaced: Entry | None) -> None:
        """Show an entry in a free slot; the entry that it replaces goes afterwards.

        image is the whole entry but its check: the word, which is next_word(slot), the key, the body.
        """
        start, raw = slot * self._size + self._start, self._raw
        raw[start + 8 : start + self._size] = image[8:] + _CHECK.pack(crc32c(image))  # P1 body
        raw[slot] = image[8]  # P2 tag
        self.words[slot] = word  # P3 word
        self._taken[slot] = 1
        if replaced is not None:
            self._replacements[0] += 1  # P4 replaced
            self.words[replaced[1]] = 0  # P5 old word
            self._taken[replaced[1]] = 0

    def remove(self, slot: int) -> None:
        """Take an entry out."""
        self.words[slot] = 0  # R1 word
        self._taken[slot] = 0
