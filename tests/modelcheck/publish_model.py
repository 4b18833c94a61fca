"""Publish and read the index: one writer, two readers, every order, a crash anywhere.

The memory of the model: two buckets of one row slot each and one block slot, all that is needed for a row
to be replaced, to leave for another, and for a slot and a block to be used again. A row's body is two
words and a check, so that it can be seen half; `body` of publication n is n in both. P1 stores body and
check in any order, and step 3 loads them in any order, as memcpy may.

Three kinds of memory:
    sc      a store is seen when it is done
    tso     x86: stores wait in a buffer, and later loads may pass them
    weak    stores may overtake each other, and loads too: only those of one word keep their order
In `weak` only I2 is asked for (index.py): what is returned was published like that. A lookup may miss.

Publications are numbered from 1 on and stand for generations: no number comes twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from explorer import replaced

Memory = Literal["sc", "tso", "weak"]
Kind = Literal["get", "prefix"]

STEPS = {
    "P1": "body",
    "P2": "tag",
    "P3": "word",
    "P4": "block body",
    "P5": "block tag",
    "P6": "block word",
    "P7": "bit",
    "P8": "replaced",
    "P9": "old word",
    "R1": "bit",
    "R2": "block word",
    "R3": "word",
}
"""The writer's steps, by their names in index.py."""

READER_STEPS = {
    1: "find the tag",
    2: "load the word",
    3: "copy the entry",
    4: "verify the check",
    5: "load the word again",
    6: "compare the whole key",
    7: "replacements",
}
"""The reader's steps, by their numbers in index.py."""

BUFFERED = {"sc": 0, "tso": 2, "weak": 2}

# A slot's words, then those of the block, then `replacements`.
TAG, WORD, BODY_A, BODY_B, CHECK = range(5)
ROW_WORDS = 5
SLOTS = 2
BLOCK_TAG, BLOCK_WORD, BLOCK_BODY, BLOCK_CHECK, BITS = range(SLOTS * ROW_WORDS, SLOTS * ROW_WORDS + 5)
REPLACEMENTS = SLOTS * ROW_WORDS + 5
WORDS = REPLACEMENTS + 1

NAMES = [f"{name}{slot}" for slot in range(SLOTS) for name in ("tag", "word", "a", "b", "check")]
NAMES += ["block tag", "block word", "block body", "block check", "bits", "replacements"]

TAILS = {"K": 1, "L": 2, "M": 4}
"""A key's bit in the bitmap, unless a model says otherwise."""


class Texts(NamedTuple):
    """Block and tail bit of each key. Two texts of one length that begin alike have both in common."""

    blocks: dict[str, str] = dict.fromkeys(TAILS, "X")
    tails: dict[str, int] = TAILS


class Op(NamedTuple):
    """One thing that the writer is asked for."""

    what: Literal["publish", "remove"]
    key: str


class Stores(NamedTuple):
    """One numbered step: its stores, in any order among themselves."""

    step: str
    stores: tuple[tuple[int, int], ...]


class Reader(NamedTuple):
    """One lookup.

    phase   idle → (block phases) → [again →] find → entry → replacements → done
    loaded  what the word and copy phase has loaded: word, word of the copy, a, b, check, word again
    absent  the row was not there at some moment of this lookup
    result  "", "hit", "miss", "lost", or what is wrong with it
    """

    phase: str = "idle"
    is_last: bool = False
    bucket: int = 0
    differs: bool = False
    replacements: int = 0
    loaded: tuple[int, ...] = ()
    block_word: int = 0
    absent: bool = False
    result: str = ""


class State(NamedTuple):
    """Where everybody stands. `left` are the stores that the writer's current step still has to do."""

    at: int
    left: tuple[tuple[int, int], ...]
    buffer: tuple[tuple[int, int], ...]
    memory: tuple[int, ...]
    readers: tuple[Reader, ...]
    is_dead: bool = False


class Writer:
    """What IndexWriter would do: operations become numbered steps with their stores.

    One writer sees its own stores, so its steps follow from the operations alone.
    """

    def __init__(self, faults: frozenset[str], texts: Texts) -> None:
        self.keys: dict[int, str] = {}
        self.block_keys: dict[int, str] = {}
        self._faults = faults
        self._texts = texts
        self._memory = [0] * WORDS
        self._number = 0

    def steps(self, ops: Iterable[Op]) -> list[Stores]:
        """The steps of these operations, from where the writer stands."""
        done: list[Stores] = []
        for op in ops:
            for stores in self._publish(op.key) if op.what == "publish" else self._remove(op.key):
                done.append(stores)
                for place, value in stores.stores:
                    self._memory[place] = value
        return done

    @property
    def memory(self) -> tuple[int, ...]:
        """What it has stored so far."""
        return tuple(self._memory)

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _slot_of(self, key: str) -> int | None:
        return next((slot for slot in range(SLOTS) if self._key_in(slot) == key), None)

    def _key_in(self, slot: int) -> str | None:
        return self.keys.get(self._memory[slot * ROW_WORDS + WORD])

    def _publish(self, key: str) -> Iterator[Stores]:
        old = self._slot_of(key)
        free = [slot for slot in range(SLOTS) if not self._memory[slot * ROW_WORDS + WORD]]
        if free:
            slot = free[0]
        else:
            # Both buckets are full: the coldest other row leaves; the model takes the last one.
            slot = max(slot for slot in range(SLOTS) if slot != old)
            leaves = self._key_in(slot)
            assert leaves is not None
            yield from self._remove(leaves)
        number = self._next()
        self.keys[number] = key
        row = slot * ROW_WORDS
        body = Stores("P1", ((row + BODY_A, number), (row + BODY_B, number), (row + CHECK, number)))
        tag = Stores("P2", ((row + TAG, 1),))
        word = Stores("P3", ((row + WORD, number),))
        in_order = [body, tag, word]
        if "word before the body" in self._faults:
            in_order = [word, body, tag]
        bit = list(self._publish_bit(key))
        old_word = []
        if old is not None:
            moves_on = Stores("P8", ((REPLACEMENTS, self._memory[REPLACEMENTS] + 1),))
            goes = Stores("P9", ((old * ROW_WORDS + WORD, 0),))
            old_word = [moves_on, goes]
            if "old word before the count" in self._faults:
                old_word = [goes, moves_on]
            if "old row leaves first" in self._faults:
                yield goes
                old_word = [moves_on]
        if "bit before the row" in self._faults:
            yield from (*bit, *in_order, *old_word)
        else:
            yield from (*in_order, *bit, *old_word)

    def _publish_bit(self, key: str) -> Iterator[Stores]:
        bits = self._memory[BITS]
        if not self._memory[BLOCK_WORD]:
            number = self._next()
            self.block_keys[number] = self._texts.blocks[key]
            yield Stores("P4", ((BLOCK_BODY, number), (BLOCK_CHECK, number)))
            yield Stores("P5", ((BLOCK_TAG, 1),))
            yield Stores("P6", ((BLOCK_WORD, number),))
        yield Stores("P7", ((BITS, bits | self._texts.tails[key]),))

    def _remove(self, key: str) -> Iterator[Stores]:
        slot = self._slot_of(key)
        assert slot is not None
        others = (other for at in range(SLOTS) if at != slot and (other := self._key_in(at)))
        is_shared = any(self._texts.tails[other] == self._texts.tails[key] for other in others)
        bits = self._memory[BITS]
        bit = []
        if not is_shared or "bit goes with its first row" in self._faults:
            bits &= ~self._texts.tails[key]
            bit = [Stores("R1", ((BITS, bits),))]
        block = [Stores("R2", ((BLOCK_WORD, 0),))] if not bits else []
        word = Stores("R3", ((slot * ROW_WORDS + WORD, 0),))
        if "row leaves before its bit" in self._faults:
            yield from (word, *bit, *block)
        elif "block leaves before its bit" in self._faults:
            yield from (*block, *bit, word)
        else:
            yield from (*bit, *block, word)


class PublishModel:
    """The writer's program against its readers.

    Args:
        setup: operations that are done before anybody looks.
        script: the operations to interleave.
        readers: what each looks up, and how.
        memory: what the hardware may do.
        faults: planted mistakes, by name.
        texts: where the keys' texts end; in one block, at different tails, where it is not given.
    """

    def __init__(
        self,
        setup: Iterable[Op],
        script: Iterable[Op],
        readers: Iterable[tuple[Kind, str]],
        *,
        memory: Memory = "tso",
        faults: Iterable[str] = (),
        texts: Texts | None = None,
    ) -> None:
        self._faults = frozenset(faults)
        self._texts = texts or Texts()
        writer = Writer(self._faults, self._texts)
        writer.steps(setup)
        self._start_memory = writer.memory
        self.program = writer.steps(script)
        self._keys, self._block_keys = writer.keys, writer.block_keys
        self._readers = tuple(readers)
        self._memory = memory
        self._buffered = BUFFERED[memory]

    # ---- explorer.Model

    def starts(self) -> Iterable[State]:
        left = self.program[0].stores if self.program else ()
        # Where loads pass each other a lookup may miss, so only a single look at each slot is of interest.
        reader = Reader("find", is_last=True, absent=True) if self._memory == "weak" else Reader()
        yield State(0, left, (), self._start_memory, (reader,) * len(self._readers))

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        yield from self._writer_steps(state)
        for number, reader in enumerate(state.readers):
            kind, key = self._readers[number]
            for what, after in self._reader_steps(state.memory, reader, kind, key):
                readers = (*state.readers[:number], after, *state.readers[number + 1 :])
                yield f"reader {number + 1}: {what}", state._replace(readers=readers)

    def wrong(self, state: State) -> str:
        for number, reader in enumerate(state.readers, 1):
            if reader.result not in ("", "hit", "miss", "lost"):
                return f"reader {number}: {reader.result}"
        if self._memory == "weak":
            return ""
        is_at_rest = state.at == len(self.program) and not state.buffer
        return self._wrong_memory(state.memory, is_at_rest=is_at_rest)

    def stuck(self, state: State) -> str:
        if not all(reader.phase == "done" for reader in state.readers):
            return "a reader does not end"
        return ""

    # ---- the writer

    def _writer_steps(self, state: State) -> Iterator[tuple[str, State]]:
        if not state.is_dead and state.at < len(self.program):
            yield "the writer dies", state._replace(is_dead=True)
            if self._buffered == 0 or len(state.buffer) < self._buffered:
                step = self.program[state.at].step
                for chosen in state.left:
                    yield self._store(state, step, chosen)
        for number, (place, value) in enumerate(state.buffer):
            if number and (self._memory != "weak" or any(place == at for at, _ in state.buffer[:number])):
                continue
            buffer = state.buffer[:number] + state.buffer[number + 1 :]
            what = f"{NAMES[place]} = {value} is seen"
            yield what, self._seen(state._replace(buffer=buffer), place, value)

    def _store(self, state: State, step: str, chosen: tuple[int, int]) -> tuple[str, State]:
        place, value = chosen
        left = tuple(store for store in state.left if store != chosen)
        at = state.at
        if not left:
            at += 1
            left = self.program[at].stores if at < len(self.program) else ()
        after = state._replace(at=at, left=left)
        what = f"writer: {step} {STEPS[step]}: {NAMES[place]} = {value}"
        if not self._buffered:
            return what, self._seen(after, place, value)
        return what, after._replace(buffer=(*after.buffer, chosen))

    def _seen(self, state: State, place: int, value: int) -> State:
        memory = replaced(state.memory, place, value)
        readers = tuple(
            reader
            if reader.absent or reader.phase in ("idle", "done") or self._is_there(memory, *who)
            else reader._replace(absent=True)
            for reader, who in zip(state.readers, self._readers, strict=True)
        )
        return state._replace(memory=memory, readers=readers)

    def _is_there(self, memory: tuple[int, ...], kind: Kind, key: str) -> bool:
        """Whether a lookup that took no time would find it now."""
        row = any(
            (word := memory[slot * ROW_WORDS + WORD]) and self._keys[word] == key for slot in range(SLOTS)
        )
        if kind == "get" or not row:
            return row
        block = memory[BLOCK_WORD]
        return bool(
            block
            and self._block_keys[block] == self._texts.blocks[key]
            and memory[BITS] & self._texts.tails[key]
        )

    # ---- a reader

    def _reader_steps(
        self, memory: tuple[int, ...], reader: Reader, kind: Kind, key: str
    ) -> Iterator[tuple[str, Reader]]:
        match reader.phase:
            case "idle":
                first = "block tag" if kind == "prefix" else "find"
                seen = memory[REPLACEMENTS]
                absent = not self._is_there(memory, kind, key)
                yield "begins", reader._replace(phase=first, replacements=seen, absent=absent)
            case "find":
                if memory[reader.bucket * ROW_WORDS + TAG]:
                    yield "1 find the tag", reader._replace(phase="entry", loaded=(-1,) * 6)
                else:
                    yield "1 find no tag", self._next_match(reader)
            case "entry":
                yield from self._entry_steps(memory, reader, key)
            case "replacements":
                seen = memory[REPLACEMENTS]
                if not reader.differs and (seen == reader.replacements or "no step 7" in self._faults):
                    yield "7 miss", self._missed(reader, kind, key)
                elif reader.is_last:
                    yield "7 lost", Reader("done", result="lost")
                else:
                    yield "7 once more", Reader("again", is_last=True, absent=reader.absent)
            case "again":
                seen = memory[REPLACEMENTS]
                yield "7 what it sees last", reader._replace(phase="find", replacements=seen)
            case "block tag" | "block word" | "block body" | "block again" | "bits" | "block still":
                yield from self._block_steps(memory, reader, key)

    def _missed(self, reader: Reader, kind: Kind, key: str) -> Reader:
        is_wrong = not reader.absent and self._memory != "weak"
        result = f"I3: {kind} of {key} missed a row that was there all the time" if is_wrong else "miss"
        return Reader("done", result=result)

    def _entry_steps(self, memory: tuple[int, ...], reader: Reader, key: str) -> Iterator[tuple[str, Reader]]:
        """Steps 2 to 6. What is loaded: 0 word, 1 to 4 the copy (its word, a, b, check), 5 word again."""
        row = reader.bucket * ROW_WORDS
        places = (row + WORD, row + WORD, row + BODY_A, row + BODY_B, row + CHECK, row + WORD)
        for number in self._may_load(reader.loaded):
            loaded = replaced(reader.loaded, number, memory[places[number]])
            what = ("2 word", "3 word", "3 a", "3 b", "3 check", "5 word again")[number]
            what = f"{what} of slot {reader.bucket}: {loaded[number]}"
            if number == 0 and loaded[0] == 0:
                yield what, self._next_match(reader)
            elif -1 in loaded:
                yield what, reader._replace(loaded=loaded)
            else:
                yield what, self._judge(reader, loaded, key)

    def _may_load(self, loaded: tuple[int, ...]) -> list[int]:
        is_left = [value < 0 for value in loaded]
        if self._memory == "weak":
            # The three loads of the word keep their order, everything else may come at any time.
            words = [number for number in (0, 1, 5) if is_left[number]][:1]
            return words + [number for number in (2, 3, 4) if is_left[number]]
        if is_left[0]:
            return [0]
        return [number for number in range(1, 5) if is_left[number]] or [5]

    def _judge(self, reader: Reader, loaded: tuple[int, ...], key: str) -> Reader:
        """4 verify the check, 5 compare the words, 6 compare the key."""
        word, copied, body_a, body_b, check, again = loaded
        if "no check word" in self._faults:
            is_sound = True
        elif "check without the word" in self._faults:
            is_sound = body_a == body_b == check
        else:
            is_sound = copied == body_a == body_b == check
        is_same = word == again or "no second word load" in self._faults
        if not (is_sound and is_same):
            return self._next_match(reader._replace(differs=True))
        if self._keys.get(body_a) != key:
            return self._next_match(reader)
        if not word == body_a == body_b:
            result = f"I2: returned {word, body_a, body_b} for {key}, which was never published"
            return Reader("done", result=result)
        return Reader("done", result="hit")

    def _next_match(self, reader: Reader) -> Reader:
        if reader.bucket + 1 < SLOTS:
            return reader._replace(phase="find", bucket=reader.bucket + 1, loaded=())
        if self._memory == "weak":
            return Reader("done", result="miss")
        return reader._replace(phase="replacements", bucket=0, loaded=())

    def _block_steps(self, memory: tuple[int, ...], reader: Reader, key: str) -> Iterator[tuple[str, Reader]]:
        """The block's tag, word, body and check, word; then its bits, and its word once more."""
        miss = self._missed(reader, "prefix", key)
        match reader.phase:
            case "block tag":
                yield "block tag", reader._replace(phase="block word") if memory[BLOCK_TAG] else miss
            case "block word":
                word = memory[BLOCK_WORD]
                yield "block word", reader._replace(phase="block body", block_word=word) if word else miss
            case "block body":
                loaded = (memory[BLOCK_WORD], memory[BLOCK_BODY], memory[BLOCK_CHECK])
                yield "block body", reader._replace(phase="block again", loaded=loaded)
            case "block again":
                word, body, check = reader.loaded
                is_it = word == body == check and self._block_keys.get(body) == self._texts.blocks[key]
                goes_on = is_it and memory[BLOCK_WORD] == reader.block_word
                yield "block again", reader._replace(phase="bits", loaded=()) if goes_on else miss
            case "bits":
                yield "bits", reader._replace(phase="block still", loaded=(memory[BITS],))
            case "block still":
                is_set = reader.loaded[0] & self._texts.tails[key] and memory[BLOCK_WORD] == reader.block_word
                found = reader._replace(phase="find", loaded=(), block_word=0)
                yield "block still", found if is_set else miss

    # ---- what must hold

    def _wrong_memory(self, memory: tuple[int, ...], *, is_at_rest: bool) -> str:
        """What holds at every moment, so also when the writer dies there."""
        tails = 0
        for slot in range(SLOTS):
            row = slot * ROW_WORDS
            if word := memory[row + WORD]:
                if not word == memory[row + BODY_A] == memory[row + BODY_B] == memory[row + CHECK]:
                    return f"I6: the row in slot {slot} is there and not whole"
                tails |= self._texts.tails[self._keys[word]]
        if memory[BITS] & ~tails:
            return "I4: a bit is set before its row is published, or after it has left"
        if tails & ~memory[BITS] and is_at_rest:
            return "I4: a row has no bit"
        if memory[BITS] and not memory[BLOCK_WORD]:
            return "I5: a free block slot has a bitmap that is not empty"
        return ""
