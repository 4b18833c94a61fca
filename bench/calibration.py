"""Do a small model's probabilities mean what they say, before and after one temperature for each type?

    ece_choice, ece_score, ece_noul   expected calibration error on held-out rows: fitted ÷ not fitted

48 labelled messages (decisions_labelled.jsonl): temperatures are fitted on every other one of them, and the
error is taken on the rest. The fitted temperatures are in the name of the peer; they are what
workers/temperatures.json has for this model. For another one, copy the loop with rows of your own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.harness import Options, Row, measured
from shmcache.tools.model import model_path
from shmcache.workers.decide import DecisionModel, Labelled, calibration_error, fit_temperature

LABELLED = Path(__file__).with_name("decisions_labelled.jsonl")
QUESTIONS: dict[str, dict[str, Any]] = {
    "intent": {
        "type": "choice",
        "instructions": "What does the customer want?",
        "criteria": ["refund", "cancel", "information"],
    },
    "urgency": {"type": "score", "instructions": "How urgent is it?", "criteria": ["low", "medium", "high"]},
    "angry": {"type": "noul", "instructions": "Is the customer angry?"},
}


def rows(options: Options) -> Iterable[Row]:
    """All rows of this bench; `quick` reads half of the messages."""
    # One thread: with more of them the last bits of a logit may depend on their number.
    with DecisionModel(str(model_path()), n_threads=1, n_threads_batch=1) as model:
        for name, question in QUESTIONS.items():
            scored = scored_rows(model, name, 2 if options.quick else 1)
            temperature = fit_temperature(scored[::2])
            after, before = (calibration_error(scored[1::2], value) for value in (temperature, 1.0))
            peer = f"temperature 1, not {temperature:.2f}"
            yield measured(f"ece_{question['type']}", "", peer, after, before)


def scored_rows(model: DecisionModel, name: str, step: int = 1) -> list[Labelled]:
    """What the model makes of each labelled message, or of each step-th one, for one question."""
    lines = LABELLED.read_text(encoding="utf-8").splitlines()[::step]
    return [_scored(model, name, json.loads(line)) for line in lines]


def _scored(model: DecisionModel, name: str, row: dict[str, Any]) -> Labelled:
    question = QUESTIONS[name]
    match question["type"]:
        case "choice":
            right = question["criteria"].index(row[name])
        case "score":
            right = row[name]
        case _:
            right = 0 if row[name] else 1
    return model.scores(row["state"], question), right
