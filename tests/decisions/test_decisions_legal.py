"""What may become everybody's decision."""

from __future__ import annotations

import math
from typing import Any

import pytest
from decisions.fake_model import QUESTIONS, Model

from shmcache.decisions import decision_margins
from shmcache.decisions.legal import is_legal

ANY = {"q": {"type": "choice", "criteria": [None, False, 0, ""]}}


def test_a_model_s_result_is_legal() -> None:
    assert is_legal(QUESTIONS, Model().result("s"))


@pytest.mark.parametrize("value", [None, False, 0, ""])
def test_case_f09_a_legal_null_false_or_zero_is_a_decision(value: Any) -> None:
    assert is_legal(ANY, {"q": value})
    assert is_legal(ANY, {"answers": {"q": {"type": "choice", "choice": value}}})


@pytest.mark.parametrize(
    "result", [None, "sorry", {}, {"answers": None}, {"answers": {}}, {"q": "sorry"}, {"q": True}, {"q": 0.0}]
)
def test_case_f09_what_the_question_does_not_allow_is_none(result: Any) -> None:
    assert not is_legal(ANY, result)


@pytest.mark.parametrize(
    ("question", "value", "legal"),
    [
        ({"type": "score", "criteria": ["a", "b"]}, 1, True),
        ({"type": "score", "criteria": ["a", "b"]}, 1.5, False),
        ({"type": "score", "criteria": ["a", "b"]}, math.nan, False),
        ({"type": "score", "criteria": ["a", "b"]}, None, False),
        ({"type": "score"}, 99, True),
        ({"type": "noul"}, False, True),
        ({"type": "noul"}, 0, True),
        ({"type": "noul"}, 1.01, False),
        ({"type": "noul"}, "yes", False),
        ({"type": "choice", "criteria": {"a": "", "b": ""}}, "c", False),
        ({"type": "essay"}, "anything", True),
        ({"type": "essay"}, None, False),
    ],
)
def test_each_type_has_its_range(question: Any, value: Any, legal: bool) -> None:
    assert is_legal({"q": question}, {"q": value}) is legal
    if isinstance(question.get("type"), str):
        assert is_legal({"q": question}, {"q": {question["type"]: value}}) is (
            legal or question["type"] == "essay"
        )


def test_margins_say_how_far_an_answer_is_from_flipping() -> None:
    answers = {
        "sure": {"choice": "a", "probabilities": {"a": 0.9, "b": 0.05, "c": 0.05}},
        "torn": {"choice": "a", "probabilities": {"a": 0.5, "b": 0.5}},
        "only": {"choice": "a", "probabilities": {"a": 1.0}},
        "yes": {"noul": 0.25},
        "level": {"score": 1.9},
        "between": {"score": 1.5},
        "bare": "a",
    }
    margins = decision_margins({"answers": answers})
    assert margins == pytest.approx(
        {"sure": 0.85, "torn": 0, "only": 1, "yes": 0.5, "level": 0.8, "between": 0}
    )
