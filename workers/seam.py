"""A row ends here; with which tokens does this prompt go on?

    row       [  1  ][Hello][ wor][ld]           its own ids, from its record
    prompt    [  1  ][Hello][ world][ and ][ on]
                                   ▲ text_bytes
    joined    [  1  ][Hello][ wor][ld][ and ][ on]

The row's text is a prefix of the prompt's. Where it ends between two of the prompt's tokens, the prompt's own
remaining tokens follow the row's: their ids are the caller's, so an identical re-send reproduces its reply.
The row's ids stand for its text, even where the prompt spells that text with other ids or with more of them.

    prompt    [  1  ][Hello][ worldly][ and ][ on]
                                 ▲ text_bytes: inside a token
    joined    [  1  ][Hello][ wor][ld][ly][ and ][ on]
                                      └─────────────── the rest of the text, tokenised anew

Where it ends inside one, the rest of the text is tokenised: frames are their ids, and what lies between them
is text and nothing else, whatever special token it may spell. Used only where it renders to that very text,
which it does not where a character is split or a tokenizer cleans up.

Owner: nobody, the functions are pure. Readers: shared_llama.
Invariants
    I1  The joined tokens render to exactly the prompt's text.
    I2  At least one token is left to decode, since cells carry no logits.
Leaves out: how a vocabulary tokenises (state), which row is tried next (shared_llama).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

import msgspec

from shmcache.workers.render import ESCAPE, FRAME, Renderer, Text

_FRAME_BYTES = len(FRAME) + 4


class Joined(msgspec.Struct, frozen=True):
    """A prompt as it is decoded behind a row: `keep` of these tokens are in the cells already.

    rest_ends[i] is the offset in the prompt's text behind token i of those that follow the row's own.
    """

    tokens: list[int]
    keep: int
    rest_ends: list[int]

    @classmethod
    def cold(cls, prompt: Text) -> Joined:
        """The prompt behind nothing."""
        return cls(prompt.tokens, 0, prompt.ends)

    @property
    def is_exact(self) -> bool:
        """Whether all but the last token are there."""
        return 0 < self.keep == len(self.tokens) - 1

    def position(self, prompt: Text, n_tokens: int) -> int | None:
        """How many of these tokens spell what the prompt's first `n_tokens` do; None where none do so.

        Only of boundaries behind the row.
        """
        text_bytes = prompt.ends[n_tokens - 1]
        index = bisect_left(self.rest_ends, text_bytes)
        if index == len(self.rest_ends) or self.rest_ends[index] != text_bytes:
            return None
        return len(self.tokens) - len(self.rest_ends) + index + 1


class Tokenizer:
    """Tokenises rendered text that goes on behind a row."""

    def __init__(self, renderer: Renderer, tokens_of: Callable[[bytes], list[int]]) -> None:
        """`tokens_of` tokenises plain text in the middle of other text."""
        self._renderer = renderer
        self._tokens_of = tokens_of

    def tokenise(self, rendered: bytes, begins_at: int) -> tuple[list[int], list[int]] | None:
        """Return tokens that render to these bytes, and where each ends; None where there are none.

        `begins_at` is the offset of the bytes in their prompt.
        """
        tokens: list[int] = []
        at = 0
        while at < len(rendered):
            if rendered.startswith(FRAME, at):
                tokens.append(int.from_bytes(rendered[at + len(FRAME) : at + _FRAME_BYTES], "little"))
                at += _FRAME_BYTES
            else:
                end = _next_frame(rendered, at)
                tokens += self._tokens_of(rendered[at:end].replace(ESCAPE * 2, ESCAPE))
                at = end
        parts = self._renderer.parts(tokens)
        if b"".join(parts) != rendered:
            return None
        return tokens, list(accumulate(map(len, parts), initial=begins_at))[1:]


def _next_frame(rendered: bytes, at: int) -> int:
    """Offset of the next frame from `at` on, the end where there is none."""
    while (at := rendered.find(ESCAPE, at)) >= 0:
        if rendered.startswith(FRAME, at):
            return at
        at += 2  # a literal FF is doubled
    return len(rendered)


def join(
    prompt: Text,
    row_tokens: Sequence[int],
    text_bytes: int,
    tokenizer: Tokenizer,
    *,
    may_end_one_earlier: bool,
) -> Joined | None:
    """Return the prompt behind a row, None where the row does not serve it.

    Args:
        prompt: begins with the row's text.
        row_tokens: ids in the row's cells.
        text_bytes: length of their text.
        tokenizer: for a row that ends inside one of the prompt's tokens.
        may_end_one_earlier: whether the row's last token can be dropped and decoded again, which a row
            that is the whole prompt needs for its logits.
    """
    covered = prompt.tokens_at(text_bytes)
    if covered is None:
        again = tokenizer.tokenise(prompt.text[text_bytes:], text_bytes)
        return Joined([*row_tokens, *again[0]], len(row_tokens), again[1]) if again is not None else None
    rest = prompt.tokens[covered:]
    keep = len(row_tokens) if rest else len(row_tokens) - 1
    if keep < 1 or not (rest or may_end_one_earlier):
        return None
    return Joined([*row_tokens, *rest], keep, prompt.ends[covered:])
