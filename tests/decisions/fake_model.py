"""What the tests of decisions share: questions, a model that counts, and a context like a hook's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shmcache.decisions import DecisionCache, MemoryStore

QUESTIONS: dict[str, Any] = {
    "intent": {
        "type": "choice",
        "instructions": "What is wanted?",
        "criteria": {"refund": "money", "other": ""},
    },
    "urgency": {"type": "score", "instructions": "How urgent?", "criteria": ["low", "medium", "high"]},
    "angry": {"type": "noul", "instructions": "Is the customer angry?"},
}


class Context:
    """The fields of a hook's context."""

    def __init__(self, states: Sequence[Any], questions: Any = QUESTIONS, agent: Any = None) -> None:
        self.states, self.questions, self.agent = list(states), questions, agent
        self.results: list[Any] | None = None
        self.router = self.decision = self.error = self.max_len = self.head_max_len = None
        self.model = "model"

    def skip(self, results: list[Any]) -> None:
        assert len(results) in (1, len(self.states))
        self.results = results


class Model:
    """An agent that hooks wrap: counts what reaches it; a state's answer tells how often it was asked."""

    model_id = "model"
    revision = "1"

    def __init__(self, *hooks: Any) -> None:
        self.hooks = hooks
        self.asked: list[Any] = []

    def result(self, state: Any) -> dict[str, Any]:
        self.asked.append(state)
        probability = round(0.5 + len(self.asked) / 1000, 4)
        answers = {
            "intent": {
                "type": "choice",
                "choice": "refund",
                "probabilities": {"refund": probability, "other": round(1 - probability, 4)},
                "confidence": probability,
            },
            "urgency": {"type": "score", "score": 1.25, "probabilities": {"0": 0.25, "1": 0.25, "2": 0.5}},
            "angry": {"type": "noul", "noul": probability, "confidence": probability},
        }
        return {"model": "m", "answers": answers, "usage": {"input_tokens": 7, "output_tokens": 0}}

    def predict(self, states: Sequence[Any], questions: Any = QUESTIONS) -> list[Any]:
        context = Context(states, questions, self)
        for hook in self.hooks:
            hook.on_predict_start(context)
        try:
            if context.results is None:
                context.results = [self.result(state) for state in context.states]
        except BaseException as error:
            context.error = error
            raise
        finally:
            for hook in self.hooks:
                hook.on_predict_end(context)
        return context.results


def memory_cache(**options: Any) -> DecisionCache:
    """A cache of this process alone, whatever runs on this machine."""
    return DecisionCache(MemoryStore(), **options)


def probability(result: Any) -> float:
    """What tells one computation of Model from another."""
    return float(result["answers"]["angry"]["noul"])
