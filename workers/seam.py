"""A row ends here; with which tokens does this prompt go on?

    row       [  1  ][Hello][ wor][ld]           its own ids, from its record
    prompt    [  1  ][Hello][ world][ and ][ on]
                                   ▲ text_bytes
    joined    [  1  ][Hello][ wor][ld][ and ][ on]

The row's text is a prefix of the prompt's. Where it ends between two of the prompt's tokens, the prompt's own
remaining tokens follow the row's: their ids are the caller's, so an identical re-send reproduces its reply.
The row's ids stand for its text, even where the prompt spells that text with other ids or with more of them.

Owner: nobody, the functions are pure. Readers: shared_llama.
Invariants
    I1  The joined tokens render to exactly the prompt's text.
    I2  At least one token is left to decode, since cells carry no logits.
Leaves out: a row that ends inside a token: it is passed over for the next shorter one.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shmcache.workers.render import Text


class Joined(msgspec.Struct, frozen=True):
    """A prompt as it is decoded behind a row: `keep` of these tokens are in the cells already."""

    tokens: list[int]
    keep: int

    @property
    def is_exact(self) -> bool:
        """Whether all but the last token are there."""
        return 0 < self.keep == len(self.tokens) - 1

    def longer_by(self, prompt: Text) -> int:
        """How many more tokens than the caller's it has: a row may spell its text in its own way."""
        return len(self.tokens) - len(prompt.tokens)


def join(
    prompt: Text, row_tokens: Sequence[int], text_bytes: int, *, may_end_one_earlier: bool
) -> Joined | None:
    """Return the prompt behind a row, None where the row does not serve it.

    Args:
        prompt: begins with the row's text.
        row_tokens: ids in the row's cells.
        text_bytes: length of their text.
        may_end_one_earlier: whether the row's last token can be dropped and decoded again, which a row
            that is the whole prompt needs for its logits.
    """
    covered = prompt.tokens_at(text_bytes)
    if covered is None:
        return None
    rest = prompt.tokens[covered:]
    keep = len(row_tokens) if rest else len(row_tokens) - 1
    if keep < 1 or not (rest or may_end_one_earlier):
        return None
    return Joined([*row_tokens, *rest], keep)
