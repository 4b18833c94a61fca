"""Given a 32-byte key: which slab holds its state, at which generation? Given a prompt: its longest row?

One segment of shared memory, every word 8 bytes, native and aligned. Two hash tables of the same make:
rows by their key, and blocks by the key of a text up to its last multiple of 1,024 bytes, each with a
bitmap of the tail lengths that its rows have.

         0 ┌───────────────┐ row tags        1 byte a slot: the first byte of its key
           ├───────────────┤ rows          128 bytes a slot
           ├───────────────┤ block tags      1 byte a slot
           ├───────────────┤ blocks         48 bytes a slot
           ├───────────────┤ bitmaps       128 bytes a slot: bit t = some row of this block has tail t
    -4,096 ├───────────────┤ header and statistics, last so that a row's slot is the offset of its tag
           └───────────────┘

    offset size name          writer       meaning
    header
         0    8 magic         coordinator  "shmcidx1", stored last
         8    8 layout        coordinator  LAYOUT_HASH of its build
        16    8 epoch         coordinator  as in the control page
        24    8 max_rows      coordinator  what the segment was made for
        32    8 row_buckets   coordinator
        40    8 block_buckets coordinator
        64    8 replacements  coordinator  moves on when a row takes the place of another of the same key
       512 2048 statistics    coordinator  256 words, named by STAT_NAMES
    row
         0    8 word          coordinator  generation << 8 | 1, or 0: free
         8   32 key           coordinator
        40   32 block_key     coordinator
        72    8 identity_tag  coordinator
        80    8 text_bytes    coordinator
        88    8 slab_bytes    coordinator
        96    4 token_count   coordinator
       100    4 flags         coordinator
       104    2 tail          coordinator
       106    1 tier          coordinator
       107    1 reason        coordinator
       108   16 zero          coordinator
       124    4 check         coordinator  makes the CRC32C of the whole entry 0, the word included
    block
         0    8 word          coordinator  as a row's
         8   32 block_key     coordinator
        40    4 zero          coordinator
        44    4 check         coordinator  as a row's

Two words of a key name its two buckets (`buckets`).
At max_rows rows fill 4.5 of 8 slots, blocks the same at most: 93 % of keys lie in their first bucket (78
% after long churn), and of 6.5 million publishes into a full table 26 met two full buckets.

Publish: each step is one copy or one word store, in this order.
    P1 body         body and check of a free slot, whose word is 0
    P2 tag          probes come by
    P3 word         the row is there
    P4 block body   P4 to P6 only where the block is not there yet
    P5 block tag
    P6 block word   the block is there, its bitmap empty
    P7 bit          the row is found by prefix
    P8 replaced     P8 and P9 only where the key had a row: `replacements` moves on,
    P9 old word     and the old row is gone; the bit is the new one's as well
Remove:
    R1 bit          the row is not found by prefix any more; not where another row needs the bit (I7)
    R2 block word   only where the bitmap is empty now: the block is gone
    R3 word         the row is gone
Where both row buckets are full, the row that `coldest` names leaves first, by R1 to R3. Where both block
buckets are full, the row is refused: one that cannot be found by prefix must not exist.

Owner: the coordinator, through IndexWriter. Nobody else writes a byte.
Readers: every process, through IndexReader over a read-only mapping, without a lock or a message.
    1 find the tag in the first bucket, then in the second; at each match
    2 load the word; 0: the next match
    3 copy the entry
    4 verify the check over the copy, word included
    5 load the word again; where the check or the word differs: the next match, then once more from 1
    6 compare the whole key; another: the next match
    7 at a miss: if `replacements` is not what this reader saw last, once more from 1, because the new
      row may have come behind the reader's back while the old one left before its eyes
    The second attempt ends in a hit or a miss, whatever it meets.
By prefix: the prompt's blocks from the deepest down; in each that is there its set tails from the
longest down; for each the row under the key of that length.

Invariants
    I1  A row is found by its key if and only if its word is not 0; P3, P9 and R3 are single stores.
    I2  What a reader returns was published, whole, between its two word loads: generations only grow,
        so equal words say that the slot was not written in between; and where loads may pass each
        other, the check says that body and word belong together.
    I3  A key that has a row is found at every moment of a replacement (step 7).
    I4  A bit without a row costs one probe, since the row's own key decides. A row without its bit
        exists only between P3 and P7 and between R1 and R3.
    I5  A free block slot has an empty bitmap.
    I6  A writer that dies between two steps leaves every row whole or not there.
    I7  A bit stands for all rows of its block with this tail: texts of one length that begin alike. The
        writer counts those beyond the first, and the bit goes with the last.

Leans on: aligned stores through memoryview.cast("Q"), which never tear (struct.pack_into would show
readers zeros). New segments read as zeros, so creation touches one page. Little-endian words, as KVC has
them: a bitmap is read as one integer.
Leaves out: which row was used least (coordinator), what a slab holds (kvc), which epoch is now (control).
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from mmap import mmap
from typing import Self
from weakref import ref

import msgspec
from crc32c import crc32c

from shmcache.buckets import SLOTS, buckets_for, free_slot, matches, slots_of
from shmcache.errors import LayoutMismatch
from shmcache.key import BLOCK_BYTES, KEY_BYTES, PrefixWalk
from shmcache.page import COUNTERS

STAT_NAMES = (
    "started_unix_s",
    "rows",
    "blocks",
    "refused_blocks_full",
    "left_buckets_full",
    *(
        f"{what}_{tier}"
        for tier in ("ram", "ram_file", "disk")
        for what in ("rows", "bytes", "charged", "budget")
    ),
    "evictions",
    "spilled",
    "unspilled",
    "expired",
    "forgotten",
    *(f"saves_{reason}" for reason in ("unknown", "cold", "continued", "evict", "shutdown", "finish")),
    *(
        f"dropped_{why}"
        for why in ("no_space", "too_large", "forgotten", "refused", "tier_down", "first_use")
    ),
    *(f"saves_{state}" for state in ("reserved", "published", "abandoned", "in_flight")),
    "overtaken",
    *(f"{what}_{tier}" for tier in ("ram", "ram_file", "disk") for what in ("is_down", "downs")),
    "corrupt_rows",
    "tier_faults",
    *(f"gone_{name}" for name in COUNTERS),
)
"""The statistics words in their order. Part of the layout: another list is another layout.

`rows`, `blocks` and the two that follow are kept by IndexWriter, the others by `set_stat`.
"""

HEADER_BYTES = 4096
ROW_BYTES = 128
BLOCK_ENTRY_BYTES = 48
BITMAP_BYTES = BLOCK_BYTES // 8

_MAGIC = int.from_bytes(b"shmcidx1", "little")
_MAGIC_WORD, _LAYOUT_WORD, _EPOCH_WORD, _MAX_ROWS_WORD, _ROW_BUCKETS_WORD, _BLOCK_BUCKETS_WORD = range(6)
_REPLACEMENTS_WORD = 8
_STATS_WORD = 64  # these are words of the header
_STAT_WORD = {name: _STATS_WORD + number for number, name in enumerate(STAT_NAMES)}
assert len(STAT_NAMES) <= 256

_PUBLISHED = 1
_ROW = struct.Struct("<Q32s32sQQQIIHBB16x")
_BLOCK = struct.Struct("<Q32s4x")
_KEY = slice(8, 40)  # of either entry
_CHECK = struct.Struct("<I")
# Of a key: its tag, and the words that name its first and second bucket.
_PLACES = struct.Struct("<c7xII16x")
_places: Callable[[bytes], tuple[bytes, int, int]] = _PLACES.unpack
_first_place: Callable[[bytes], tuple[bytes, int]] = struct.Struct("<c7xI20x").unpack
assert _ROW.size + _CHECK.size == ROW_BYTES
assert _BLOCK.size + _CHECK.size == BLOCK_ENTRY_BYTES

# Bytes, then their CRC32C xor this, have the CRC32C 0: one call verifies an entry, word and check included.
_TO_ZERO = 0x9BE09BAB
assert not crc32c(_CHECK.pack(crc32c(b"") ^ _TO_ZERO))

_SCAN_SLOTS = 1024

_LAYOUT = (
    HEADER_BYTES,
    SLOTS,
    _PLACES.format,
    _ROW.format,
    _BLOCK.format,
    _TO_ZERO,
    BITMAP_BYTES,
    STAT_NAMES,
)
LAYOUT_HASH = int.from_bytes(hashlib.sha256(repr(_LAYOUT).encode()).digest()[:8], "little")


class Row(msgspec.Struct, frozen=True, gc=False):
    """What the index says of one row."""

    key: bytes  # 32 bytes
    block_key: bytes  # 32 bytes
    tail: int  # 0..1023
    identity_tag: int  # 64 bits, for people and statistics
    text_bytes: int
    slab_bytes: int
    token_count: int
    tier: int  # 0 ram, 1 ram_file, 2 disk
    reason: int  # save_reason of KVC v2
    flags: int  # bit 0: head anchor


class Found(msgspec.Struct, frozen=True, gc=False):
    """One publication of a row: a verified copy of its entry, its slot, and the word that published it."""

    image: bytes
    slot: int
    word: int

    @property
    def key(self) -> bytes:
        """The row's key alone."""
        return self.image[8:40]

    @property
    def row(self) -> Row:
        """The entry decoded, anew at each call: a probe does not pay for fields that nobody reads."""
        _, key, block_key, tag, text_bytes, slab_bytes, token_count, flags, tail, tier, reason = (
            _ROW.unpack_from(self.image)
        )
        return Row(key, block_key, tail, tag, text_bytes, slab_bytes, token_count, tier, reason, flags)

    @property
    def touch(self) -> int:
        """The word by which a worker notes that it used this row: slot, and the generation's low half."""
        return self.slot | (self.word >> 8 & 0xFFFFFFFF) << 32


class Published(msgspec.Struct, frozen=True, gc=False):
    """A publication, and who left for it: `evicted` from two full buckets, `replaced` had the same key."""

    slot: int
    word: int
    evicted: Found | None
    replaced: Found | None


class ReaderStatistics(msgspec.Struct, frozen=True):
    """Counts of one reader. `lost` are the retries that met another change and ended in a miss."""

    second_probes: int
    retries: int
    lost: int


class _Table:
    """Where one hash table lies: tags, then entries of `entry_bytes`, in `buckets` buckets."""

    def __init__(self, start: int, buckets: int, entry_bytes: int) -> None:
        self.buckets, self.entry_bytes = buckets, entry_bytes
        self.slots = buckets * SLOTS
        self.tags = _aligned(start)
        self.entries = _aligned(self.tags + self.slots)
        self.end = _aligned(self.entries + self.slots * entry_bytes)

    def entry(self, slot: int) -> int:
        return self.entries + slot * self.entry_bytes

    def buckets_of(self, key: bytes) -> tuple[bytes, int, int]:
        """The tag of a key, and its two buckets."""
        tag, first, second = _places(key)
        return tag, first % self.buckets * SLOTS, second % self.buckets * SLOTS

    def words(self, segment: memoryview) -> memoryview:
        """The publish words by slot, of a segment seen as words."""
        return segment[self.entries // 8 : self.entry(self.slots) // 8 : self.entry_bytes // 8]


class _Layout:
    """Where everything of a segment lies, from its two bucket counts."""

    def __init__(self, row_buckets: int, block_buckets: int) -> None:
        self.rows = _Table(0, row_buckets, ROW_BYTES)
        self.blocks = _Table(self.rows.end, block_buckets, BLOCK_ENTRY_BYTES)
        self.bitmaps = self.blocks.end
        self.segment_bytes = _aligned(self.bitmaps + self.blocks.slots * BITMAP_BYTES, 4096) + HEADER_BYTES

    @classmethod
    def of(cls, max_rows: int) -> _Layout:
        buckets = buckets_for(max_rows)
        return cls(buckets, buckets)


def _aligned(offset: int, to: int = ROW_BYTES) -> int:
    return -(-offset // to) * to


def segment_bytes(max_rows: int) -> int:
    """Return the size of a segment for `max_rows` rows, 545 bytes each: whole pages of 4,096 bytes."""
    return _Layout.of(max_rows).segment_bytes


class IndexReader:
    """Lookups without a lock, for one thread at a time.

    `get(key)` returns the published row of a 32-byte key, or None.

    `buffer` is a memoryview over a whole mmap: searching and copying are done by the mmap itself, in a
    third of the time that a memoryview takes.
    """

    get: Callable[[bytes], Found | None]

    def __init__(self, buffer: memoryview) -> None:
        """Raises LayoutMismatch if another build made the segment, or if it is none."""
        layout = _layout_of(buffer)
        self._raw = _beneath(buffer)
        self._find = self._raw.find
        self._words = buffer.cast("Q")
        self._header = self._words[-HEADER_BYTES // 8 :]
        self._rows, self._blocks, self._bitmaps = layout.rows, layout.blocks, layout.bitmaps
        self.row_words = self._rows.words(self._words)
        """The publish words by slot: a publication is there as long as its word is in its slot."""
        self._block_words = self._blocks.words(self._words)
        self._replacements = self._header[_REPLACEMENTS_WORD]
        self._second_probes = self._retries = self._lost = 0
        self.get = self._make_get()

    @property
    def epoch(self) -> int:
        """The epoch of the coordinator that made this segment."""
        return self._header[_EPOCH_WORD]

    @property
    def max_rows(self) -> int:
        """What the segment was made for. The caller keeps to it: beyond it buckets overflow more often."""
        return self._header[_MAX_ROWS_WORD]

    @property
    def slots(self) -> int:
        """Row slots are numbered 0 to slots - 1, so that figures of rows fit plain arrays."""
        return self._rows.slots

    def __len__(self) -> int:
        return self._header[_STAT_WORD["rows"]]

    def _make_get(self) -> Callable[[bytes], Found | None]:
        """Build `get`: all that it touches in local variables, which takes 8 % off a hit."""
        find, raw, words = self._find, self._raw, self.row_words
        buckets, rows_at = self._rows.buckets, self._rows.entries
        sum_of, first_place, found_as, key_part = crc32c, _first_place, Found, _KEY
        # Not self: a circle would keep the mapping of an old epoch until the next garbage collection.
        owner = ref(self)

        def get(key: bytes) -> Found | None:
            tag, first = first_place(key)
            bucket = first % buckets * 8
            slot = find(tag, bucket, bucket + 8)  # 1
            if slot < 0:
                reader = owner()
                assert reader is not None
                reader._second_probes += 1
                _, _, second = _places(key)
                bucket = second % buckets * 8
                slot = find(tag, bucket, bucket + 8)
                if slot < 0:
                    if reader._header[_REPLACEMENTS_WORD] == reader._replacements:  # 7
                        return None
                    return reader._search(key, is_retry=True)
            word = words[slot]  # 2
            entry = slot * 128 + rows_at
            image = raw[entry : entry + 128]  # 3
            if not sum_of(image) and words[slot] == word and image[key_part] == key and word:  # 4, 5, 6
                return found_as(image, slot, word)
            is_another = not word or (not sum_of(image) and words[slot] == word)
            reader = owner()
            assert reader is not None
            return reader._search(key, is_retry=not is_another)

        return get

    def _search(self, key: bytes, *, is_retry: bool) -> Found | None:
        """The whole algorithm; `get` is its first match and its plain miss, unrolled."""
        tag, *buckets = self._rows.buckets_of(key)
        words = self.row_words
        self._retries += is_retry
        for is_last in (True,) if is_retry else (False, True):
            self._replacements = self._header[_REPLACEMENTS_WORD]
            differs = False
            for slot in matches(self._find, tag, buckets):  # 1
                if word := words[slot]:  # 2
                    entry = self._rows.entry(slot)
                    image = self._raw[entry : entry + ROW_BYTES]  # 3
                    if crc32c(image) or words[slot] != word:  # 4, 5
                        differs = True
                    elif image[_KEY] == key:  # 6
                        return Found(image, slot, word)
            if not differs and self._header[_REPLACEMENTS_WORD] == self._replacements:  # 7
                return None
            if is_last:
                self._lost += 1
            else:
                self._retries += 1
        return None

    def candidates(self, walk: PrefixWalk, max_bytes: int) -> Iterator[Found]:
        """Yield every row whose text is a prefix of the walk's prompt, the longest first, lazily.

        Only rows of the walk's identity with at most `max_bytes` of text; none of them is left out. The
        work is bounded by the prompt's blocks and the tails in use there, whatever else the index holds.
        """
        find, tags, buckets = self._find, self._blocks.tags, self._blocks.buckets
        limit = min(max_bytes, walk.text_bytes)
        for number in range(limit // BLOCK_BYTES, -1, -1):
            block_key = walk.block_keys[number]
            tag, first, second = _places(block_key)
            bucket = first % buckets * SLOTS + tags
            if find(tag, bucket, bucket + SLOTS) < 0:
                bucket = second % buckets * SLOTS + tags
                if find(tag, bucket, bucket + SLOTS) < 0:
                    continue
            start = number * BLOCK_BYTES
            tails = self._tails(block_key) & (2 << limit - start) - 1
            while tails:
                tail = tails.bit_length() - 1
                tails ^= 1 << tail
                if (found := self.get(walk.key_at(start + tail))) is not None:
                    yield found

    def _tails(self, block_key: bytes) -> int:
        """The bitmap of a block as an integer, 0 where the block is not there.

        One attempt: a block whose entry changes meanwhile had no row at some moment of this lookup.
        """
        slot, word = self._find_block(block_key)
        if slot < 0:
            return 0
        tails = self._bitmap(slot)
        return tails if self._block_words[slot] == word else 0

    def _bitmap(self, block: int) -> int:
        start = self._bitmaps + block * BITMAP_BYTES
        return int.from_bytes(self._raw[start : start + BITMAP_BYTES], "little")

    def _find_block(self, block_key: bytes) -> tuple[int, int]:
        """Slot and publish word of a block; slot -1 where it is not there."""
        words, tags = self._block_words, self._blocks.tags
        tag, first, second = self._blocks.buckets_of(block_key)
        for at in matches(self._find, tag, (first + tags, second + tags)):
            slot = at - tags
            if word := words[slot]:
                entry = self._blocks.entry(slot)
                image = self._raw[entry : entry + BLOCK_ENTRY_BYTES]
                if not crc32c(image) and words[slot] == word and image[_KEY] == block_key:
                    return slot, word
        return -1, 0

    def at(self, slot: int) -> Found | None:
        """Return the row in a slot, or None: free, changing just now, or no such slot."""
        if not 0 <= slot < self._rows.slots:
            return None
        word = self.row_words[slot]
        entry = self._rows.entry(slot)
        image = self._raw[entry : entry + ROW_BYTES]
        if not crc32c(image) and self.row_words[slot] == word != 0:
            return Found(image, slot, word)
        return None

    def rows(self) -> Iterator[Found]:
        """Yield all rows, in no order: for people and for checks."""
        for start in range(0, self._rows.slots, _SCAN_SLOTS):
            for slot, word in enumerate(self.row_words[start : start + _SCAN_SLOTS].tolist(), start):
                if word and (found := self.at(slot)) is not None:
                    yield found

    def blocks(self) -> Iterator[tuple[bytes, int]]:
        """Yield all blocks, in no order, as block key and bitmap (bit t: a row with tail t): for checks."""
        for start in range(0, self._blocks.slots, _SCAN_SLOTS):
            for slot, word in enumerate(self._block_words[start : start + _SCAN_SLOTS].tolist(), start):
                if word:
                    entry = self._blocks.entry(slot)
                    block_key = self._raw[entry + 8 : entry + 40]
                    yield block_key, self._tails(block_key)

    def stats(self) -> dict[str, int]:
        """Return the coordinator's figures by name."""
        return {name: self._header[word] for name, word in _STAT_WORD.items()}

    def statistics(self) -> ReaderStatistics:
        """Return this reader's own counts."""
        return ReaderStatistics(self._second_probes, self._retries, self._lost)

    def close(self) -> None:
        """End this view, so that its mapping can be closed. No call may follow."""
        for view in (self.row_words, self._block_words, self._header, self._words):
            view.release()
        del self.get, self._raw, self._find

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _layout_of(buffer: memoryview) -> _Layout:
    """What a segment says of itself, or LayoutMismatch."""
    if buffer.nbytes < HEADER_BYTES or buffer.nbytes % 4096:
        raise LayoutMismatch(LAYOUT_HASH, 0)
    with buffer[-HEADER_BYTES:].cast("Q") as header:
        theirs = header[_LAYOUT_WORD] if header[_MAGIC_WORD] == _MAGIC else 0
        layout = _Layout(header[_ROW_BUCKETS_WORD], header[_BLOCK_BUCKETS_WORD])
    if theirs != LAYOUT_HASH or buffer.nbytes != layout.segment_bytes:
        raise LayoutMismatch(LAYOUT_HASH, theirs)
    return layout


def _beneath(buffer: memoryview) -> mmap:
    whole = buffer.obj
    if not isinstance(whole, mmap) or len(whole) != buffer.nbytes:
        raise TypeError("an index needs a memoryview over a whole mmap")
    return whole


class IndexWriter(IndexReader):
    """The one writer: publishes and removes rows, and keeps blocks and their figures in step."""

    def __init__(self, buffer: memoryview) -> None:
        super().__init__(buffer)
        self._buffer = buffer
        # Random, so that no touch of another epoch's index names a row of this one.
        self._generation = int.from_bytes(os.urandom(6), "little")
        self._sharers: dict[int, int] = {}  # block slot << 10 | tail: rows beyond the first (I7)

    @classmethod
    def create(cls, buffer: memoryview, max_rows: int, epoch: int) -> Self:
        """Lay out an empty index in zeroed memory of `segment_bytes(max_rows)` bytes."""
        layout = _Layout.of(max_rows)
        if max_rows < 1 or buffer.nbytes != layout.segment_bytes:
            raise ValueError(
                f"{max_rows} rows need {layout.segment_bytes} bytes, and the segment has {buffer.nbytes}"
            )
        with buffer[-HEADER_BYTES:].cast("Q") as header:
            header[_LAYOUT_WORD] = LAYOUT_HASH
            header[_EPOCH_WORD] = epoch
            header[_MAX_ROWS_WORD] = max_rows
            header[_ROW_BUCKETS_WORD] = layout.rows.buckets
            header[_BLOCK_BUCKETS_WORD] = layout.blocks.buckets
            header[_MAGIC_WORD] = _MAGIC
        return cls(buffer)

    def publish(self, row: Row, coldest: Callable[[Sequence[int]], int]) -> Published | None:
        """Make a row visible to everybody, or None if the block table has no room for its block.

        `coldest` is called only where both buckets of the key are full: it gets their slots and returns
        the one whose row leaves.
        """
        if len(row.key) != KEY_BYTES or len(row.block_key) != KEY_BYTES or not 0 <= row.tail < BLOCK_BYTES:
            raise ValueError(f"not a row: {row}")
        # Everything that can fail comes before anything that shows.
        word = self._next_word()
        image = _row_image(word, row)
        if not self._has_room_for(row.block_key):
            self._add("refused_blocks_full", 1)
            return None
        replaced, evicted = self.get(row.key), None
        slot = self._free_slot(self._rows, self.row_words, row.key)
        if slot < 0:
            others = [at for at in self._choices(row.key) if replaced is None or at != replaced.slot]
            slot = coldest(others)
            evicted = self._evict(slot, others)
        entry = self._rows.entry(slot)
        self._copy(entry + 8, image[8:])  # P1 body
        self._copy(self._rows.tags + slot, row.key[:1])  # P2 tag
        self._store(entry, word)  # P3 word
        self._publish_bit(row, is_replacement=replaced is not None)
        if replaced is None:
            self._add("rows", 1)
        else:
            place = self._buffer.nbytes - HEADER_BYTES + _REPLACEMENTS_WORD * 8
            self._store(place, self._words[place >> 3] + 1)  # P8 replaced
            self._store(self._rows.entry(replaced.slot), 0)  # P9 old word
        return Published(slot, word, evicted, replaced)

    def _has_room_for(self, block_key: bytes) -> bool:
        return (
            self._find_block(block_key)[0] >= 0
            or self._free_slot(self._blocks, self._block_words, block_key) >= 0
        )

    def _publish_bit(self, row: Row, *, is_replacement: bool) -> None:
        slot, _ = self._find_block(row.block_key)
        if slot < 0:
            slot = self._free_slot(self._blocks, self._block_words, row.block_key)
            word = self._next_word()
            image = _sealed(_BLOCK.pack(word, row.block_key))
            entry = self._blocks.entry(slot)
            self._copy(entry + 8, image[8:])  # P4 block body
            self._copy(self._blocks.tags + slot, row.block_key[:1])  # P5 block tag
            self._store(entry, word)  # P6 block word
            self._add("blocks", 1)
        place, bit = self._bit(slot, row.tail)
        if self._words[place >> 3] & bit and not is_replacement:
            sharer = slot << 10 | row.tail
            self._sharers[sharer] = self._sharers.get(sharer, 0) + 1
        self._store(place, self._words[place >> 3] | bit)  # P7 bit

    def remove(self, key: bytes) -> Found | None:
        """Take a row out and return what it was, or None if there is none."""
        found = self.get(key)
        if found is not None:
            self._remove(found)
        return found

    def _remove(self, found: Found) -> None:
        row = found.row
        block, _ = self._find_block(row.block_key)
        if not self._is_shared(block, row.tail):
            place, bit = self._bit(block, row.tail)
            self._store(place, self._words[place >> 3] & ~bit)  # R1 bit
        if not self._bitmap(block):
            self._store(self._blocks.entry(block), 0)  # R2 block word
            self._add("blocks", -1)
        self._store(self._rows.entry(found.slot), 0)  # R3 word
        self._add("rows", -1)

    def _is_shared(self, block: int, tail: int) -> bool:
        """Whether another row needs this bit; one that did not come first is counted off."""
        others = self._sharers.pop(block << 10 | tail, 0)
        if others > 1:
            self._sharers[block << 10 | tail] = others - 1
        return others > 0

    def _evict(self, slot: int, choices: Sequence[int]) -> Found:
        found = self.at(slot)
        if slot not in choices or found is None:
            raise ValueError(f"slot {slot} is none of those that could leave: {choices}")
        self._remove(found)
        self._add("left_buckets_full", 1)
        return found

    def _choices(self, key: bytes) -> list[int]:
        """The row slots of both buckets of a key."""
        return slots_of(self._rows.buckets_of(key)[1:])

    def _free_slot(self, table: _Table, words: memoryview, key: bytes) -> int:
        """A free slot for a key in its better bucket; -1 where both are full."""
        _, first, second = table.buckets_of(key)
        return free_slot(first, second, lambda bucket: words[bucket : bucket + SLOTS].tolist())

    def _bit(self, block: int, tail: int) -> tuple[int, int]:
        """Where a tail's bit is: the offset of its word, and the word with this bit alone."""
        return self._bitmaps + block * BITMAP_BYTES + (tail >> 6) * 8, 1 << (tail & 63)

    def _next_word(self) -> int:
        self._generation += 1
        return self._generation << 8 | _PUBLISHED

    def set_stat(self, name: str, value: int) -> None:
        """Show a figure, 0 to 2**64 - 1, to everybody. Raises KeyError for a name not in STAT_NAMES."""
        self._header[_STAT_WORD[name]] = value

    def _add(self, name: str, change: int) -> None:
        self._header[_STAT_WORD[name]] += change

    def _store(self, offset: int, word: int) -> None:
        self._words[offset >> 3] = word

    def _copy(self, offset: int, data: bytes) -> None:
        self._buffer[offset : offset + len(data)] = data


def _row_image(word: int, row: Row) -> bytes:
    return _sealed(
        _ROW.pack(
            word,
            row.key,
            row.block_key,
            row.identity_tag,
            row.text_bytes,
            row.slab_bytes,
            row.token_count,
            row.flags,
            row.tail,
            row.tier,
            row.reason,
        )
    )


def _sealed(body: bytes) -> bytes:
    return body + _CHECK.pack(crc32c(body) ^ _TO_ZERO)
