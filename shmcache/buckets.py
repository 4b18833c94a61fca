"""In which slots of a hash table in shared memory may the entry of a key lie?

    tags   1 byte a slot: the first byte of its key; 8 slots are a bucket

A key belongs into two buckets and may lie in any of their 16 slots: in the first while 3 slots or more are
free there, then in the emptier of the two. Entries never move. A bucket is given by its first slot, which is
where its tags start, too, from the first tag of its table on.

Leaves out: what an entry is, when it is there, and who leaves where both buckets are full (index, slots).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

SLOTS = 8

# How full buckets are at most rows, and how full the first one may get before the second is looked at.
# With 5 and 4 of 8, 40 % of keys would end up in their second bucket; with 6 and 4 one publish in a
# hundred into a full, churning table would meet two full buckets.
USED_PER_BUCKET = 4.5
PREFER_FIRST_BELOW = 6


def buckets_for(entries: int) -> int:
    """How many buckets so many entries need. Two more, so that a handful has a choice at all."""
    return int(entries / USED_PER_BUCKET) + 2


def matches(find: Callable[[bytes, int, int], int], tag: bytes, buckets: Iterable[int]) -> Iterator[int]:
    """Where in these buckets a tag is, as offsets for `find`, which is that of the mmap with the tags."""
    for start in buckets:
        at = find(tag, start, start + SLOTS)
        while at >= 0:
            yield at
            at = find(tag, at + 1, start + SLOTS)


def slots_of(buckets: Iterable[int]) -> list[int]:
    """All slots of these buckets, each once."""
    return [start + number for start in dict.fromkeys(buckets) for number in range(SLOTS)]


def free_slot(first: int, second: int, states: Callable[[int], Sequence[int]]) -> int:
    """A free slot of the better bucket; -1 where both are full.

    states: of a bucket, one number for each of its slots, 0 where it is free.
    """
    in_first = states(first)
    first_free = in_first.count(0)
    if first_free <= SLOTS - PREFER_FIRST_BELOW:
        in_second = states(second)
        if in_second.count(0) > first_free:
            return second + in_second.index(0)
        if not first_free:
            return -1
    return first + in_first.index(0)
