"""Is a row what its record makes? Asked by computing it once more, now and then.

    record   0C split: 512 · 320 · 1 · 1 · 1       decoded again, batch by batch, in emptied cells
    state    what the cells then hold              ═══ the row's payload, byte by byte
    logits   of one token behind both              ═══ the cells as recomputed, and as restored

A sum says that bytes are those that were written. This says that they are those that should have been: it
finds a worker with bad memory, a library that changed under the same name, and mistakes of our own.

Owner: one SharedLlama, under its lock. Readers: the same.
Invariants
    I1  What the cells hold afterwards was computed here, whatever was found: a request that was chosen for
        an audit is answered rightly also where the row is wrong.
    I2  Only a row that this very context would make alike is audited: batch limit, threads, device, and the
        machine, because processors round differently.
    I3  Nothing that goes wrong in an audit fails a request: it counts as one that did not take place.
Leans on: the same batches in the same build on the same machine give the same bits (cells, state).
Leaves out: which hits are chosen, and what becomes of a row that differs (shared_llama, coordinator).
"""

from __future__ import annotations

import logging
import platform

import msgspec
import numpy as np

from shmcache.kvc import Image
from shmcache.workers.cells import Cells, Decode
from shmcache.workers.trail import Trail

log = logging.getLogger(__name__)


class Audit(msgspec.Struct, frozen=True):
    """The row as it was computed here, and how the one that was saved differs from it, if it does."""

    trail: Trail
    difference: str | None


def can_audit(cells: Cells, image: Image) -> bool:
    """Whether this context would decode each batch of a row as it was decoded (I2)."""
    state = cells.state
    return image.meta.hostname == platform.node() and all(
        (piece.n_ubatch, piece.n_threads, piece.device)
        == (state.n_ubatch, state.threads_of(piece.length), state.device)
        for piece in image.pieces
    )


def audit(cells: Cells, image: Image, forget: int, decode: Decode) -> Audit | None:
    """Compute a row anew and compare; the cells hold what was computed, or nothing where that failed (None).

    Args:
        cells: of the context; what they hold is lost.
        image: the row.
        forget: the forget number under which the sequence begins.
        decode: computes a batch behind a trail (Cells.decode, and whatever its caller does around it).
    """
    try:
        trail = cells.recompute(image, forget, decode)
        difference = _state_difference(cells, image)
        cells.close_entry(trail)
        if difference is None and (difference := _logits_difference(cells, image)) is not None:
            trail = cells.recompute(image, forget, decode)
            cells.close_entry(trail)
    except Exception as error:  # I3; as when the client has gone meanwhile
        log.info("no audit of row %s: %s", image.meta.key.hex(), error)
        cells.clear(forget)
        return None
    return Audit(trail, difference)


def _state_difference(cells: Cells, image: Image) -> str | None:
    """Of the bytes that the cells are copied to."""
    size_bytes, saved_bytes = cells.state.size_bytes(), len(image.payload)
    if size_bytes != saved_bytes:
        return f"its state has {saved_bytes} bytes, computed anew {size_bytes}"
    computed = bytearray(size_bytes)
    cells.state.copy_out(memoryview(computed))
    differing = np.flatnonzero(np.frombuffer(computed, np.uint8) != np.frombuffer(image.payload, np.uint8))
    if not len(differing):
        return None
    return f"{len(differing)} of {size_bytes} bytes differ, computed anew, the first at {differing[0]}"


def _logits_difference(cells: Cells, image: Image) -> str | None:
    """Of one token behind the cells as they are, and behind a restore; the cells are the row's then."""
    state, token_count = cells.state, image.meta.token_count
    if token_count >= image.meta.context_size:
        return None  # there is no room for a token
    token = int(image.token_ids[-1])
    computed = state.logits_behind(token)
    state.copy_in(image.payload, token_count)
    restored = state.logits_behind(token)
    if computed != restored:
        return "restored, it has other logits than computed anew"
    state.copy_in(image.payload, token_count)
    return None
