"""What exact means: the logits of an empty context that decodes the same tokens in the same batches.

ask(llama, …)      serve one request and keep the logits that each token was sampled from
cold_logits(…)     decode a record from nothing, and return the logits behind each of its batches
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llama_cpp
import msgspec
import numpy as np
import numpy.typing as npt

from shmcache.kvc import Piece
from shmcache.workers import Report, SharedLlama
from shmcache.workers.state import ContextState

Logits = npt.NDArray[np.single]


class Answer(msgspec.Struct, frozen=True):
    """One served request. `logits[n]` are those behind n tokens."""

    report: Report
    text: str
    logits: dict[int, Logits]
    tokens: list[int]  # in the cells when it was over
    pieces: list[Piece]


def ask(llama: SharedLlama, prompt: str | list[int] | list[dict[str, str]], **options: Any) -> Answer:
    """Serve a completion, or a chat where the prompt is a list of messages, greedily."""
    seen: list[Logits] = []

    def tap(_: npt.NDArray[np.intc], scores: Logits) -> Logits:
        seen.append(scores.copy())
        return scores

    options = {"temperature": 0.0, "max_tokens": 8, **options}
    processors = llama_cpp.LogitsProcessorList([tap])
    if isinstance(prompt, list) and isinstance(prompt[0], dict):
        answer = llama.create_chat_completion(prompt, logits_processor=processors, **options)
        text = answer["choices"][0]["message"]["content"]
    else:
        answer = llama.create_completion(prompt, logits_processor=processors, **options)
        text = answer["choices"][0]["text"]
    report = msgspec.convert(answer["shmcache"], Report)
    first = report.reused_tokens + report.prefilled_tokens
    trail = llama._cells.trail
    return Answer(
        report=report,
        text=text,
        logits={first + index: logits for index, logits in enumerate(seen)},
        tokens=list(trail.tokens) if trail else [],
        pieces=list(trail.pieces) if trail else [],
    )


def cold_logits(llama: llama_cpp.Llama, tokens: Sequence[int], pieces: Sequence[Piece]) -> dict[int, Logits]:
    """Decode the tokens in these batches in an empty context; the logits behind each batch by position."""
    state = ContextState(llama)
    state.clear()
    logits: dict[int, Logits] = {}
    at = 0
    for index, piece in enumerate(pieces):
        if index and state.settles:
            state.settle()  # Trail I2: an entry ends where a row is, or could be
        llama_cpp.llama_set_n_threads(llama.ctx, piece.n_threads, piece.n_threads)
        for _ in range(piece.repeats):
            llama._batch.set_batch(list(tokens[at : at + piece.length]), at, False)
            llama._ctx.decode(llama._batch)
            at += piece.length
            logits[at] = np.ctypeslib.as_array(llama._ctx.get_logits_ith(-1), shape=(llama.n_vocab(),)).copy()
    assert at == len(tokens)
    return logits


def largest_difference(one: dict[int, Logits], other: dict[int, Logits]) -> float:
    """Largest difference of a logit at the positions that both have; there must be some."""
    positions = one.keys() & other.keys()
    assert positions
    return max(float(np.max(np.abs(one[position] - other[position]))) for position in positions)
