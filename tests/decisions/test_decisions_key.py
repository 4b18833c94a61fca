"""Keys: equal requests share one, and nothing else does."""

from __future__ import annotations

import datetime
import math
import subprocess
import sys
from collections import OrderedDict
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmcache.decisions.key import MAX_DEPTH, Facts, KeyMaker, NotCanonical, canonical

QUESTIONS = {"q": {"type": "choice", "criteria": ["a", "b"]}}
FACTS = Facts("model")

GOLDEN = {
    b'{"a":[1,1.0,true,null,"x"]}': {"a": [1, 1.0, True, None, "x"]},
    b"[0.1,1e16,1e-7,-0.0,5e-324,1.7976931348623157e308]": [
        0.1,
        1e16,
        1e-7,
        -0.0,
        5e-324,
        1.7976931348623157e308,
    ],
    b"[9223372036854775808,-9223372036854775808,1180591620717411303424]": [2**63, -(2**63), 2**70],
    '"é\u2028\x7f/<>\\"\\\\\\n\\u0000"'.encode(): 'é\u2028\x7f/<>"\\\n\x00',
}


def key(state: Any, questions: Any = QUESTIONS, facts: Facts = FACTS) -> bytes:
    maker = KeyMaker()
    return maker.key(maker.head(facts, questions), state)


@pytest.mark.parametrize("text", GOLDEN)
def test_the_spelling_is_pinned(text: bytes) -> None:
    assert canonical(GOLDEN[text]) == text


def test_case_f01_every_listed_value_has_its_own_key_or_none() -> None:
    own = [
        0.0,
        -0.0,
        None,
        1,
        1.0,
        True,
        False,
        "1",
        0,
        "",
        {"a": 1, "b": 2},
        {"b": 2, "a": 1},
        [1],
        {"1": 1},
    ]
    assert len({key(value) for value in own}) == len(own)
    assert len({key({"n": value}) for value in own}) == len(own)
    for value in (math.nan, math.inf, -math.inf):
        for state in (value, [value], {"n": value}):
            with pytest.raises(NotCanonical, match="not_finite"):
                key(state)


def test_case_f01_the_rule_is_the_same_in_all_workers() -> None:
    code = (
        "from shmcache.decisions.key import *; m = KeyMaker();"
        "print(m.key(m.head(Facts('model'), {'q': {'type': 'choice', 'criteria': ['a', 'b']}}),"
        " {'b': -0.0, 'a': [1, 1.0, True]}).hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert outputs == {key({"b": -0.0, "a": [1, 1.0, True]}).hex()}


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({1: "a"}, "key_not_string"),
        ({"a": {None: 1}}, "key_not_string"),
        (b"bytes", "type"),
        (["a", {"b"}], "type"),
        ((1, 2), "type"),
        ("\ud800", "surrogate"),
        ({"a": "x\udfff"}, "surrogate"),
        ({"\ud800": 1}, "surrogate"),
        (datetime.datetime(2020, 1, 1), "type"),
        (Decimal("1.0"), "type"),
        (type("Text", (str,), {})("x"), "type"),
        (type("Real", (float,), {})(1.5), "type"),
    ],
)
def test_what_json_cannot_hold_has_no_key_and_says_why(state: Any, reason: str) -> None:
    with pytest.raises(NotCanonical) as caught:
        key(state)
    assert caught.value.reason == reason


def test_depth_has_a_limit_of_our_own() -> None:
    nested: Any = "x"
    for _ in range(MAX_DEPTH):
        nested = [nested]
    key(nested)
    for levels in (1, 100_000):
        deeper = nested
        for _ in range(levels):
            deeper = [deeper]
        with pytest.raises(NotCanonical, match="too_deep"):
            key(deeper)
    key([[] for _ in range(1000)])


def test_each_part_of_a_request_is_in_the_key() -> None:
    keys = {
        key("s"),
        key("t"),
        key("s", {"q": {"type": "choice", "criteria": ["b", "a"]}}),
        *(
            key("s", facts=facts)
            for facts in (
                Facts("other"),
                Facts(["model"]),
                Facts("model", "english"),
                Facts("model", route="de"),
                Facts("model", budget=[1, None]),
                Facts("model", scan=[1, 2, "auto"]),
            )
        ),
    }
    assert len(keys) == 9


def test_remembered_questions_that_change_in_place_are_seen() -> None:
    maker = KeyMaker()
    questions: dict[str, Any] = {"q": {"n": None}}
    first = maker.key(maker.head(FACTS, questions), "s")
    questions["q"]["n"] = math.nan
    with pytest.raises(NotCanonical):
        maker.head(FACTS, questions)
    questions["q"]["n"] = True
    yes = maker.key(maker.head(FACTS, questions), "s")
    questions["q"]["n"] = 1
    assert len({first, yes, maker.key(maker.head(FACTS, questions), "s")}) == 3
    questions["q"] = {"n": None}
    assert maker.key(maker.head(FACTS, OrderedDict(questions)), "s") == first


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=2),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(), inner, max_size=4),
    max_leaves=12,
)


@given(json_values, json_values)
def test_two_values_share_a_key_only_if_they_are_spelled_alike(one: Any, other: Any) -> None:
    try:
        texts = canonical(one), canonical(other)
    except NotCanonical:
        return
    assert (key(one) == key(other)) == (texts[0] == texts[1]) == (repr(one) == repr(other))
