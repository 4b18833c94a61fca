"""May this result become the one decision that everybody gets?

A failure must never be: no result at all, an apology where an option was asked for, a probability that
is none. Null, false, 0 and "" may be, where the question allows them.

    choice  one of the options: the keys of `criteria`, or its members
    score   a number from 0 to the number of levels - 1 (any number where no levels are given)
    noul    true, false, or a number from 0 to 1

An answer is the bare value, or a mapping that holds it under the type's own name ({"choice": "refund",
"probabilities": …}). A result is a mapping with `answers`, or the mapping of answers itself; every
question has its answer. A question of another type is answered by anything but null.

Leaves out: whether the result is JSON (codec).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_ABSENT = object()


def answers_of(result: Any) -> Mapping[str, Any] | None:
    """The mapping of answers in a result, or None where it has none."""
    if not isinstance(result, Mapping):
        return None
    answers = result.get("answers", result)
    return answers if isinstance(answers, Mapping) else None


def is_legal(questions: Mapping[str, Any], result: Any) -> bool:
    """Whether a result answers all questions, each within what it allows."""
    answers = answers_of(result)
    return answers is not None and all(
        name in answers and _is_legal_answer(question, answers[name]) for name, question in questions.items()
    )


def _is_legal_answer(question: Any, answer: Any) -> bool:
    kind = question.get("type") if isinstance(question, Mapping) else None
    value = answer.get(kind, _ABSENT) if isinstance(answer, Mapping) and kind is not None else answer
    criteria = question.get("criteria") if isinstance(question, Mapping) else None
    match kind:
        case "choice":
            return _is_option(criteria, value)
        case "score":
            levels = len(criteria) if isinstance(criteria, (Mapping, list, tuple)) else math.inf
            return _is_number(value) and 0 <= value <= levels - 1
        case "noul":
            return isinstance(value, bool) or (_is_number(value) and 0 <= value <= 1)
        case _:
            return answer is not None


def _is_option(criteria: Any, value: Any) -> bool:
    """Equal and of one type: 0 is not False, and neither is an option where only the other one is."""
    if not isinstance(criteria, (Mapping, list, tuple)):
        return value is not _ABSENT and value is not None
    return any(type(option) is type(value) and option == value for option in criteria)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
