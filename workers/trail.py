"""Which tokens do the cells of a context hold, what text is that, and how exactly did they come there?

    tokens   t0 t1 …                      ids in the cells, position by position
    text     rendered bytes of them       ends[i] = byte offset behind token i
    pieces   2x512 | 300 | 1 | 40x1       the batches that decoded them; a row records these
    marks                  ^   ^    ^     boundaries where a row is or could be: anchors, ends of replies

A trail is a row in the worker's hand: it competes with the shared ones by length, and it may be cut back to
a mark.

Owner: one SharedLlama, under its lock. Readers: the same.
Invariants
    I1  len(tokens) == len(ends) == the tokens of all pieces; text is exactly their rendering.
    I2  Two batches share an entry of `pieces` only if they are alike and no mark lies between them. So the
        entries also say where a sliding-window run settled (state): between any two of them.
    I3  A cut leaves whole batches, or it is refused (`may_end_at`).
Leaves out: the cells themselves (state), which marks a prompt has (policy).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from shmcache.key import Buffer
from shmcache.kvc import Piece


class Trail:
    """The tokens in a context's cells, from the first on, and how they were decoded."""

    def __init__(self, forget: int) -> None:
        """`forget` is the forget number under which it begins."""
        self.forget = forget
        self.tokens: list[int] = []
        self.ends: list[int] = []
        self.text = bytearray()
        self.pieces: list[Piece] = []
        self.marks: dict[int, bytes | None] = {}  # position → key of the row there, None where none is known
        self.settled = True

    def __len__(self) -> int:
        return len(self.tokens)

    def restored(
        self, tokens: Sequence[int], parts: Sequence[bytes], pieces: Sequence[Piece], key: bytes
    ) -> None:
        """Begin with a row."""
        self._append_tokens(tokens, parts)
        self.pieces = list(pieces)
        self.marks[len(self)] = key

    def decoded(self, tokens: Sequence[int], parts: Sequence[bytes], piece: Piece) -> None:
        """Append one batch."""
        if self.joins_last_entry(piece):
            self.pieces[-1] = _times(piece, self.pieces[-1].repeats + 1)
        else:
            self.pieces.append(piece)
        self._append_tokens(tokens, parts)
        self.settled = False

    def joins_last_entry(self, piece: Piece) -> bool:
        """Whether one more batch like this goes into the last entry (I2)."""
        return bool(self.pieces) and len(self) not in self.marks and _alike(self.pieces[-1], piece)

    def mark(self, key: bytes | None = None) -> None:
        """Say that a row is, or could be, at the end. Nothing is joined across it."""
        if len(self):
            self.marks[len(self)] = key or self.marks.get(len(self))

    def may_end_at(self, keep: int) -> bool:
        """Whether the first `keep` tokens are whole batches."""
        at = 0
        for piece in self.pieces:
            rows = piece.length * piece.repeats
            if keep <= at + rows:
                return (keep - at) % piece.length == 0
            at += rows
        return keep == at

    def cut(self, keep: int) -> None:
        """Forget everything behind the first `keep` tokens, which are whole batches (I3)."""
        if not self.may_end_at(keep):
            raise ValueError(f"{keep} tokens end inside a batch")
        excess = len(self) - keep
        while excess:
            last = self.pieces.pop()
            rows = last.length * last.repeats
            if rows > excess:
                self.pieces.append(_times(last, (rows - excess) // last.length))
            excess -= min(rows, excess)
        del self.tokens[keep:], self.ends[keep:]
        del self.text[self.text_bytes(keep) :]
        self.marks = {at: key for at, key in self.marks.items() if at <= keep}

    def text_bytes(self, keep: int) -> int:
        """Length of the text of the first `keep` tokens."""
        return self.ends[keep - 1] if keep else 0

    def base_key(self) -> bytes | None:
        """Key of the longest row known to be a prefix, if any."""
        return next((key for _, key in sorted(self.marks.items(), reverse=True) if key), None)

    def _append_tokens(self, tokens: Sequence[int], parts: Sequence[bytes]) -> None:
        self.tokens += tokens
        self.ends += list(accumulate(map(len, parts), initial=len(self.text)))[1:]
        self.text += b"".join(parts)


def common_bytes(one: Buffer, other: Buffer) -> int:
    """Length of the common prefix of two texts."""
    shorter = min(len(one), len(other))
    if not shorter:
        return 0
    differs = np.frombuffer(one, np.uint8, shorter) != np.frombuffer(other, np.uint8, shorter)
    first = int(differs.argmax())
    return first if differs[first] else shorter


def _alike(one: Piece, other: Piece) -> bool:
    return one == _times(other, one.repeats)


def _times(piece: Piece, repeats: int) -> Piece:
    return Piece(piece.length, repeats, piece.n_ubatch, piece.n_threads, piece.device)
