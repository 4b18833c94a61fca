"""The cells of a context and the record of what is in them, kept in step.

    clear    nothing                          tracked again, whatever it was before
    decode   one batch more
    restore  a row instead of what there was  or nothing, and RestoreRefused
    recompute  the same, decoded anew         as its record says; or nothing, and what decoding raised
    cut      the first `keep` tokens          or nothing changes, and False
    close    an entry of the record ends      sliding-window models settle between entries

Owner: one SharedLlama, under its lock. Readers: the same.
Invariants
    I1  While `trail` is not None, the cells hold its tokens and nothing else, and llama_cpp's own n_tokens
        and input_ids say the same.
    I2  `trail` is None where the cells hold what we did not put there; `clear` alone ends that.
Leans on: llama_cpp's eval, reset and load_state are the only ways in which its own code fills cells; an image
handler or a caller that does it by itself changes n_tokens, and is seen by that (`is_tracked`).
Leaves out: which rows there are (shared_llama), how a state is copied (state).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import llama_cpp

from shmcache.kvc import Image, Piece
from shmcache.workers.render import Renderer
from shmcache.workers.state import ContextState
from shmcache.workers.trail import Trail

Decode = Callable[[Trail, Sequence[int]], None]


class Cells:
    """What one context holds."""

    def __init__(self, llama: llama_cpp.Llama, state: ContextState, renderer: Renderer) -> None:
        self._llama = llama
        self._renderer = renderer
        self.state = state
        self.trail: Trail | None = None

    def is_tracked(self) -> bool:
        """Whether all that the cells hold came from token ids that we know."""
        if self.trail is not None and self._llama.n_tokens != len(self.trail):
            self.trail = None  # somebody decoded or cut past us
        return self.trail is not None

    def clear(self, forget: int) -> None:
        """Empty the cells; `forget` is the forget number under which the new sequence begins."""
        self.state.clear()
        self._say(0)
        self.trail = Trail(forget)

    def decode(self, trail: Trail, tokens: Sequence[int]) -> None:
        """Decode one batch behind the trail. Where that fails the cells are empty."""
        state = self.state
        piece = Piece(len(tokens), 1, state.n_ubatch, state.threads_of(len(tokens)), state.device)
        try:
            if not trail.joins_last_entry(piece):
                self._settle(trail)
            llama_cpp.Llama.eval(self._llama, tokens)
        except BaseException:
            self.clear(trail.forget)
            raise
        trail.decoded(tokens, self._renderer.parts(tokens), piece)

    def restore(self, image: Image, forget: int) -> Trail:
        """Replace everything by a row. Raises RestoreRefused; the cells are empty then."""
        tokens = image.token_ids.tolist()
        self.clear(forget)
        self.state.copy_in(image.payload, len(tokens))
        trail = self.trail = Trail(forget)
        trail.restored(tokens, self._renderer.parts(tokens), image.pieces, image.meta.key)
        self._llama.input_ids[: len(tokens)] = tokens
        self._say(len(tokens))
        return trail

    def recompute(self, image: Image, forget: int, decode: Decode) -> Trail:
        """Replace everything by what a row's record makes. The last batch is not settled."""
        tokens = image.token_ids.tolist()
        self.clear(forget)
        trail = self.trail
        assert trail is not None
        for piece in image.pieces:
            trail.mark()  # entries that are alike stay two, and settle between them (Trail I2)
            for _ in range(piece.repeats):
                decode(trail, tokens[len(trail) : len(trail) + piece.length])
        return trail

    def cut(self, trail: Trail, keep: int) -> bool:
        """Keep the first `keep` tokens; False, and nothing changed, where the cells cannot be cut there."""
        if keep < len(trail):
            if not self.state.cut(keep):
                return False
            trail.cut(keep)
        self._say(keep)
        return True

    def close_entry(self, trail: Trail) -> None:
        """A row is, or could be, at the end of the trail (Trail I2)."""
        trail.mark()
        self._settle(trail)

    def _settle(self, trail: Trail) -> None:
        """Sliding-window models go on from their own restored state between two entries (Trail I2)."""
        if self.state.settles and not trail.settled:
            self.state.settle()
            trail.settled = True

    def _say(self, n_tokens: int) -> None:
        """Tell llama_cpp what there is; there are no logits of it."""
        self._llama.n_tokens = n_tokens
        self._llama._requires_eval = True
