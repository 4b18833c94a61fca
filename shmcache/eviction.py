"""Of the rows that are here: which leaves first?

    enter ─► use, descend ─► leave        by slot of the index: no key, no file and no clock is known here

    lru    the order of last use; a row that another stands for is at the cold end
    cost   the least worth (policy.worth) of SAMPLE rows, drawn in turn from all rows of the tier: the price
           of a victim does not grow with their number

A use also warms what the row was made from, where that is a head or has other descendants. A new row cools
the plain waypoints that it was made from, unless somebody else used them.

Arrays beside those of UseOrder, 50 bytes a slot, and 8 more where tenants have lists of their own:

    base         u32  slot of the row it was made from, or NONE; of the next one up where that has left
    children     u32  rows right below this one, by `base`
    first_child, next_sibling, prev_sibling    u32 each: these rows, so that they can be told when it leaves
    made_unix_s  u32
    tokens       u32
    gain         f32  milliseconds that a use spares, over the row's bytes
    place        u32  where the row stands among its tier's members, which are 4 bytes each
    members      u32
    tenant       u32  whose it is
    tier         u8   _NOWHERE where no row is
    flags        u8   HEAD, PINNED
    situation    u8   see below
    extended     u8   longer rows that were made from it so far, up to 3

What became of rows in the same situation says what may become of this one (Experience):

    0, 1      not used yet, mostly new: of at most TURN_TOKENS, or of more
    2, 3      not used yet, made from a row that was used: a conversation under way, which adds at most
              TURN_TOKENS to it, or a document behind a known beginning, which adds more
    4 + 4u+e  used u + 1 times (3 and more are one), with e longer rows made from it (3 and more are one)

Owner: the coordinator's thread. Readers: the same thread only; `bench eviction`.
Invariants
    I1  A slot is entered and left in turn; between the two it is in its tier's list and among its members.
    I2  A pinned row is never named.
    I3  A row's ancestors are rows that are here: what leaves hands its children up.
    I4  `leaving` names each other row of the tier once, if it is asked long enough.
Leans on: each row is longer than the one it was made from, so a walk up ends.
Leaves out: budgets, and rows that a save in flight needs (coordinator).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec

from shmcache import policy
from shmcache.config import Eviction
from shmcache.lru import Lists, UseOrder

NONE = 0xFFFFFFFF
HEAD = 1
PINNED = 2

SAMPLE = 64
TURN_TOKENS = 2_048

_SITUATIONS = 16
_NEW, _GOES_ON, _USED = 0, 2, 4
_FEW = 3
_NOWHERE = 255


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a row that enters. tenant: any number."""

    tier: int
    tokens: int
    gain_ms_per_byte: float
    made_unix_s: int
    used_unix_s: int
    uses: int = 0
    flags: int = 0
    tenant: int = 0


class Experience:
    """Which share of the rows in one situation was used again, and after how long.

    Old experience fades: a situation's counts are halved at MOST_ROWS rows, and the mean time between two
    uses, weighted by the tokens that each spared, looks back over about LAST_USES uses.
    """

    MOST_ROWS = 200
    LAST_USES = 256
    # What is expected before there is any: of three rows one, after 100 s, as firmly as 8 uses would say it.
    FIRST_CHANCE = (1.0, 3.0)
    FIRST_GAP_S = 100.0
    FIRST_WEIGHT = 8.0

    def __init__(self) -> None:
        self._rows = array("d", [0.0]) * _SITUATIONS
        self._used = array("d", [0.0]) * _SITUATIONS
        self._gap_sum = self._weight_sum = self._uses = 0.0

    def chance(self, situation: int) -> float:
        """Of a row in this situation, to be used again; strictly between 0 and 1."""
        used, rows = self.FIRST_CHANCE
        return (self._used[situation] + used) / (self._rows[situation] + rows)

    @property
    def half_life_s(self) -> float:
        """The mean time between two uses of a row."""
        mean_s = self._gap_sum / self._weight_sum if self._weight_sum else 0.0
        firsts = self.FIRST_GAP_S * self.FIRST_WEIGHT
        return (mean_s * self._uses + firsts) / (self._uses + self.FIRST_WEIGHT)

    def entered(self, situation: int) -> None:
        """One more row is in this situation."""
        self._rows[situation] += 1
        if self._rows[situation] > self.MOST_ROWS:
            self._rows[situation] /= 2
            self._used[situation] /= 2

    def left(self, situation: int) -> None:
        """It was none of these after all."""
        self._rows[situation] = max(self._used[situation], self._rows[situation] - 1)

    def used(self, situation: int, gap_s: float, weight: float) -> None:
        """A row in this situation was used again."""
        self._used[situation] = min(self._used[situation] + 1, self._rows[situation])
        keep = 1 - 1 / self.LAST_USES
        self._gap_sum = self._gap_sum * keep + gap_s * weight
        self._weight_sum = self._weight_sum * keep + weight
        self._uses = self._uses * keep + 1


class Residents(UseOrder):
    """The rows of all tiers as eviction sees them."""

    def __init__(self, slots: int, tiers: int, kind: Eviction = "lru", *, by_tenant: bool = False) -> None:
        """by_tenant: `leaving` may be asked for the rows of one tenant."""
        super().__init__(slots, tiers)
        self._kind = kind
        self.base = array("I", [NONE]) * slots
        self.children = array("I", [0]) * slots
        self._first_child = array("I", [NONE]) * slots
        self._next_sibling = array("I", [NONE]) * slots
        self._prev_sibling = array("I", [NONE]) * slots
        self.made_unix_s = array("I", [0]) * slots
        self.tier = array("B", [_NOWHERE]) * slots
        self.flags = array("B", [0]) * slots
        self._tokens = array("I", [0]) * slots
        self._gain = array("f", [0.0]) * slots
        self._situation = array("B", [0]) * slots
        self._extended = array("B", [0]) * slots
        self._place = array("I", [0]) * slots
        self._members = [array("I") for _ in range(tiers)]
        self._drawn = [0] * tiers
        self.tenant = array("I", [0]) * slots
        self._by_tenant = Lists(slots, 0) if by_tenant else None
        self._tenant_lists: dict[tuple[int, int], int] = {}
        self._experience = Experience()

    # ---- what happens to a row

    def enter(self, slot: int, entry: Entry) -> None:
        """A row is published in this slot."""
        self.add(slot, entry.tier, entry.used_unix_s, entry.uses)
        self.made_unix_s[slot] = entry.made_unix_s
        self.tier[slot] = entry.tier
        self.flags[slot] = entry.flags
        self._tokens[slot] = entry.tokens
        self._gain[slot] = entry.gain_ms_per_byte
        self._extended[slot] = 0
        members = self._members[entry.tier]
        self._place[slot] = len(members)
        members.append(slot)
        self.tenant[slot] = entry.tenant
        if self._by_tenant is not None:
            self._by_tenant.insert(slot, self._tenant_list(entry.tier, entry.tenant))
        self._situation[slot] = _used(entry.uses, 0) if entry.uses else _unused(_NEW, entry.tokens)
        self._experience.entered(self._situation[slot])

    def leave(self, slot: int) -> None:
        """The row of this slot is published no more."""
        self._hand_up(slot)
        self.remove(slot)
        if self._by_tenant is not None:
            self._by_tenant.remove(slot)
        members, self.tier[slot] = self._members[self.tier[slot]], _NOWHERE
        last = members.pop()
        if last != slot:
            members[self._place[slot]] = last
            self._place[last] = self._place[slot]

    def use(self, slot: int, now_unix_s: int) -> list[int]:
        """A row was restored; returns the slots that are warmer for it."""
        gap_s = max(1, now_unix_s - self.used_unix_s[slot])
        self._experience.used(self._situation[slot], gap_s, self._tokens[slot])
        self.hits[slot] = min(self.hits[slot] + 1, NONE)
        self._situation[slot] = _used(self.hits[slot], self._extended[slot])
        self._experience.entered(self._situation[slot])
        needed = [above for above in self.ancestors(slot) if self._is_needed_by_many(above)]
        warmed = [*reversed(needed), slot]
        for warm in warmed:
            self.used_unix_s[warm] = now_unix_s
            self.warm(warm, self.tier[warm])
            if self._by_tenant is not None:
                self._by_tenant.warm(warm, self._tenant_list(self.tier[warm], self.tenant[warm]))
        return warmed

    def pin(self, slot: int, *, pinned: bool) -> None:
        """Never name the row, or name it again."""
        self.flags[slot] = self.flags[slot] | PINNED if pinned else self.flags[slot] & ~PINNED

    def descend(self, slot: int, above: int) -> None:
        """The row was made from the one in `above`, which is shorter; plain waypoints on the way cool."""
        self._put_below(slot, above)
        self._extended[above] = min(_FEW, self._extended[above] + 1)
        if self.hits[above]:
            self._move(above, _used(self.hits[above], self._extended[above]))
        if not self.hits[slot]:
            self._move(slot, self._made_how(slot))
        for waypoint in self.ancestors(slot):
            if self.children[waypoint] <= 1 and self._is_plain(waypoint):
                self.cool(waypoint, self.tier[waypoint])
                if self._by_tenant is not None:
                    number = self._tenant_list(self.tier[waypoint], self.tenant[waypoint])
                    self._by_tenant.cool(waypoint, number)

    def ancestors(self, slot: int) -> Iterator[int]:
        """The rows that this one was made from, nearest first, as far as they are still here."""
        while (slot := self.base[slot]) != NONE:
            yield slot

    def succeed(self, slot: int, before: int) -> None:
        """The row in `slot` takes the place of another with the same text: that one's children come along."""
        while (child := self._first_child[before]) != NONE:
            self._take_out(child)
            self._put_below(child, slot)

    # ---- who leaves

    def leaving(self, tier: int, now_unix_s: int, tenant: int | None = None) -> Iterator[int]:
        """Rows of a tier, or of one tenant in it, the first to leave first; pinned ones never.

        The one just yielded may leave where the caller asks no further.
        """
        if tenant is not None:
            assert self._by_tenant is not None
            coldest: Iterable[int] = self._by_tenant.coldest(self._tenant_list(tier, tenant))
            return self._of_one_tenant(iter(coldest), now_unix_s)
        if self._kind == "cost":
            return self._least_worth(tier, now_unix_s)
        return (slot for slot in self.coldest(tier) if not self.flags[slot] & PINNED)

    def _of_one_tenant(self, coldest: Iterator[int], now_unix_s: int) -> Iterator[int]:
        """In the order of last use; for `cost`, each SAMPLE of them by worth."""
        free = (slot for slot in coldest if not self.flags[slot] & PINNED)
        while sample := list(islice(free, SAMPLE)):
            yield from sample if self._kind == "lru" else self._by_worth(sample, now_unix_s)

    def _least_worth(self, tier: int, now_unix_s: int) -> Iterator[int]:
        """The two least of the first sample, then twice as many of each that follows.

        One victim costs one sample; even where all must leave, a row is looked at twice or so.
        """
        named: set[int] = set()
        take = 2
        while sample := self._draw(tier, named):
            for slot in self._by_worth(sample, now_unix_s)[:take]:
                named.add(slot)
                yield slot
            take = min(2 * take, SAMPLE)

    def _draw(self, tier: int, named: set[int]) -> list[int]:
        """The next SAMPLE members in turn that may leave and were not named yet."""
        members, sample = self._members[tier], []
        for _ in range(len(members)):
            self._drawn[tier] = (self._drawn[tier] + 1) % len(members)
            slot = members[self._drawn[tier]]
            if slot not in named and not self.flags[slot] & PINNED:
                sample.append(slot)
                if len(sample) == SAMPLE:
                    break
        return sample

    def _by_worth(self, slots: Iterable[int], now_unix_s: int) -> list[int]:
        half_life_s = self._experience.half_life_s
        return sorted(slots, key=lambda slot: policy.worth(self._standing(slot), now_unix_s, half_life_s))

    def _standing(self, slot: int) -> policy.Standing:
        return policy.Standing(
            gain_ms_per_byte=self._gain[slot],
            chance=self._experience.chance(self._situation[slot]),
            used_s=self.used_unix_s[slot],
            is_dominated=self.children[slot] == 1 and self._is_plain(slot),
        )

    # ---- what a row is

    def _put_below(self, slot: int, above: int) -> None:
        first = self._first_child[above]
        if first != NONE:
            self._prev_sibling[first] = slot
        self._next_sibling[slot], self._prev_sibling[slot] = first, NONE
        self._first_child[above] = slot
        self.base[slot] = above
        self.children[above] += 1

    def _take_out(self, slot: int) -> None:
        """From its siblings, if it is below anything."""
        above = self.base[slot]
        if above == NONE:
            return
        before, after = self._prev_sibling[slot], self._next_sibling[slot]
        if before != NONE:
            self._next_sibling[before] = after
        else:
            self._first_child[above] = after
        if after != NONE:
            self._prev_sibling[after] = before
        self.base[slot] = NONE
        self.children[above] -= 1

    def _hand_up(self, slot: int) -> None:
        """What was made from it stands below what it was made from itself."""
        above = self.base[slot]
        self._take_out(slot)
        while (child := self._first_child[slot]) != NONE:
            self._take_out(child)
            if above != NONE:
                self._put_below(child, above)

    def _is_plain(self, slot: int) -> bool:
        """Neither a head nor used by more than the one who went on from it."""
        return self.hits[slot] <= 1 and not self.flags[slot] & HEAD

    def _is_needed_by_many(self, slot: int) -> bool:
        return self.children[slot] > 1 or bool(self.flags[slot] & HEAD)

    def _made_how(self, slot: int) -> int:
        """The situation of a row that was not used yet, by the nearest used row on the way to it."""
        tokens = self._tokens[slot]
        for above in self.ancestors(slot):
            if self.flags[above] & HEAD:
                break
            if self.hits[above]:
                used_tokens = self._tokens[above]
                return _unused(_GOES_ON if used_tokens > tokens // 4 else _NEW, tokens - used_tokens)
        return _unused(_NEW, tokens)

    def _move(self, slot: int, situation: int) -> None:
        self._experience.left(self._situation[slot])
        self._experience.entered(situation)
        self._situation[slot] = situation

    def _tenant_list(self, tier: int, tenant: int) -> int:
        assert self._by_tenant is not None
        if (tier, tenant) not in self._tenant_lists:
            self._tenant_lists[tier, tenant] = self._by_tenant.add_list()
        return self._tenant_lists[tier, tenant]


def _unused(kind: int, added_tokens: int) -> int:
    return kind + (added_tokens > TURN_TOKENS)


def _used(uses: int, extended: int) -> int:
    return _USED + 4 * (min(uses, _FEW) - 1) + extended
