"""One set of decisions for every backend: what does another quantisation answer alone, what does it replay?

    same_answers_alone   share of requests that Q8_0 answers as Q4_1 does, each with a cache of its own
    same_answers_shared  the same over one SQLite file, under one pinned fingerprint
    replay               a request at Q8_0 that Q4_1 has decided ÷ the same computed by Q4_1

The weights are the same, quantised anew for this bench. An answer is the whole result: labels, probabilities.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from ctypes import byref
from pathlib import Path
from statistics import median
from typing import Any

import llama_cpp

from bench.calibration import LABELLED, QUESTIONS
from bench.harness import Options, Row, measured
from shmcache.decisions import DecisionCache, SqliteStore
from shmcache.tools.model import model_path
from shmcache.workers.decide import DecisionModel


def rows(options: Options) -> Iterable[Row]:
    """All rows of this bench."""
    lines = LABELLED.read_text(encoding="utf-8").splitlines()[: 4 if options.quick else 16]
    states = [json.loads(line)["state"] for line in lines]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shmcache-bench-")))
        models = [
            stack.enter_context(DecisionModel(str(path), n_ctx=512, n_threads=1, n_threads_batch=1))
            for path in (model_path(), requantised(model_path(), directory))
        ]
        caches = [
            stack.enter_context(DecisionCache(SqliteStore(directory / "one.sqlite3"), fingerprint="one"))
            for _ in models
        ]
        first, other = models
        alone = [_answers(first.predict(state, QUESTIONS)) for state in states]
        others = [_answers(other.predict(state, QUESTIONS)) for state in states]
        computed_ms, stored = _decided(caches[0], first, states)
        replayed_ms, replayed = _decided(caches[1], other, states)
    yield _shares("same_answers_alone", "Q4_1, Q8_0: a cache each", alone, others)
    yield _shares("same_answers_shared", "Q4_1, Q8_0: one SQLite file", stored, replayed)
    yield measured("replay", "ms", "computed by Q4_1", replayed_ms, computed_ms)


def requantised(path: Path, directory: Path) -> Path:
    """The same weights as Q8_0."""
    target = directory / "other.q8_0.gguf"
    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype, how.allow_requantize, how.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, True, 1
    if llama_cpp.llama_model_quantize(str(path).encode(), str(target).encode(), byref(how)):
        raise RuntimeError(f"{path} cannot be quantised anew")
    return target


def _decided(cache: DecisionCache, model: DecisionModel, states: list[str]) -> tuple[float, list[Any]]:
    """The median time of a request in ms, and all answers."""
    took_ms, answers = [], []
    for state in states:
        start = time.perf_counter()
        answers.append(_answers(cache.get_or_compute(model, state, QUESTIONS, model.predict)))
        took_ms.append((time.perf_counter() - start) * 1e3)
    return median(took_ms), answers


def _answers(result: Any) -> Any:
    return result["answers"]


def _shares(name: str, peer: str, ours: list[Any], theirs: list[Any]) -> Row:
    same = sum(one == other for one, other in zip(ours, theirs, strict=True)) / len(ours)
    return Row(name, same, "", peer, 1.0, same)
