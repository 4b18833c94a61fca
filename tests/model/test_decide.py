"""A real model that decides: legal answers, one state for all questions, one decision for all backends."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import calibration
from bench.backends import requantised
from shmcache.decisions import DecisionCache, MemoryStore, SqliteStore, decision_margins
from shmcache.decisions.legal import is_legal
from shmcache.errors import ConfigError
from shmcache.tools.demo import CoordinatorProcess
from shmcache.tools.main import main
from shmcache.workers.decide import (
    TEMPERATURES,
    TYPES,
    DecisionModel,
    Temperatures,
    calibration_error,
    fit_temperature,
    probabilities,
    respond,
)

QUESTIONS: dict[str, Any] = {
    "intent": {
        "type": "choice",
        "instructions": "What does the customer want?",
        "criteria": {"refund": "money back", "to end the contract": "", "information": None},
    },
    "urgency": {"type": "score", "instructions": "How urgent is it?", "criteria": ["low", "high"]},
    "angry": {"type": "noul", "instructions": "Is the customer angry?"},
}
STATE = "I was charged twice. Please send the money back."
ONE_THREAD = {"n_threads": 1, "n_threads_batch": 1, "n_ctx": 512}


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Iterator[DecisionModel]:
    with DecisionModel(str(smollm2), **ONE_THREAD) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def another_quantisation(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, quantised anew."""
    return requantised(smollm2, tmp_path_factory.mktemp("models"))


def test_every_answer_is_legal_and_its_probabilities_sum_to_one(model: DecisionModel) -> None:
    result = model.predict(STATE, QUESTIONS)
    assert is_legal(QUESTIONS, result)
    for name in ("intent", "urgency"):
        assert sum(result["answers"][name]["probabilities"].values()) == pytest.approx(1, abs=0.001)
    assert list(result["answers"]["intent"]["probabilities"]) == list(QUESTIONS["intent"]["criteria"])
    assert set(decision_margins(result)) == set(QUESTIONS)
    assert json.loads(json.dumps(result)) == result


def test_the_state_is_prefilled_once_for_all_questions(model: DecisionModel) -> None:
    before = model.llama._state.decoded_tokens()
    result = model.predict("word " * 200, QUESTIONS)
    decoded = model.llama._state.decoded_tokens() - before
    assert result["usage"]["input_tokens"] > 200
    assert decoded < 2 * result["usage"]["input_tokens"], "three questions, one reading of the state"


def test_options_are_compared_by_the_mean_over_their_tokens(model: DecisionModel) -> None:
    question = {"type": "choice", "instructions": "Say a word.", "criteria": ["yes", "yes yes yes yes"]}
    once, often = model.scores(STATE, question)
    assert often > 4 * once, "a sum would be four times as low"


def test_a_result_does_not_depend_on_what_was_asked_before(model: DecisionModel) -> None:
    first = model.predict(STATE, QUESTIONS)
    model.predict("Something else entirely.", QUESTIONS)
    assert model.predict(STATE, QUESTIONS) == first


def test_another_quantisation_replays_the_decision_under_a_pinned_fingerprint(
    model: DecisionModel, another_quantisation: Path, tmp_path: Path
) -> None:
    with DecisionModel(str(another_quantisation), **ONE_THREAD) as other:
        alone = other.predict(STATE, QUESTIONS)
        assert alone["answers"] != model.predict(STATE, QUESTIONS)["answers"]
        assert other.decision_fingerprint != model.decision_fingerprint
        path = tmp_path / "decisions.sqlite3"
        with (
            DecisionCache(SqliteStore(path), fingerprint="smollm2") as ours,
            DecisionCache(SqliteStore(path), fingerprint="smollm2") as theirs,
            DecisionCache(SqliteStore(path)) as unpinned,
        ):
            stored = ours.get_or_compute(model, STATE, QUESTIONS, model.predict)
            assert theirs.get_or_compute(other, STATE, QUESTIONS, other.predict) == stored
            assert unpinned.get_or_compute(other, STATE, QUESTIONS, other.predict) == alone


def test_a_question_that_cannot_be_asked_is_named(model: DecisionModel) -> None:
    for question, says in (
        ({"type": "essay", "instructions": "?"}, "essay"),
        ({"type": "choice", "instructions": "?"}, "criteria"),
        ({"type": "choice", "instructions": "?", "criteria": ["a", "a"]}, "different"),
        ({"type": "noul"}, "instructions"),
        ("noul", "None"),
    ):
        with pytest.raises(ValueError, match=says) as caught:
            model.predict(STATE, {"the question": question})
        assert "the question" in str(caught.value)


def test_a_request_over_http_is_answered_once(model: DecisionModel) -> None:
    with DecisionCache(MemoryStore()) as cache:
        questions = {"angry": QUESTIONS["angry"]}
        body = json.dumps({"state": STATE, "questions": questions}).encode()
        status, first = respond(cache, model, body)
        assert (status, first["cached"]) == (200, False)
        status, again = respond(cache, model, body)
        assert (status, again) == (200, {**first, "cached": True})
        for bad in (
            b"{",
            b"[]",
            b'{"state": 1}',
            b'{"state": 1, "questions": {}}',
            b'{"state":1,"questions":{"q":1}}',
        ):
            status, refused = respond(cache, model, bad)
            assert status == 400
            assert refused["error"]["message"]


def test_requests_are_warmed_through_a_model_s_file(
    coordinator: CoordinatorProcess,
    namespace: str,
    model: DecisionModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    questions = {"angry": QUESTIONS["angry"]}
    requests = tmp_path / "requests.jsonl"
    requests.write_text(json.dumps({"state": STATE, "questions": questions}))
    options = [word for name, value in ONE_THREAD.items() for word in ("--llama", f"{name}={value}")]
    warm = [
        "decisions",
        "warm",
        str(requests),
        "--with",
        model.llama.model_path,
        *options,
        "--namespace",
        namespace,
    ]
    assert main([*warm, "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert counts == {"computed": 1, "known": 0, "failed": 0, "not_kept": 0}

    def compute(state: Any, questions: Any) -> Any:
        raise AssertionError("it was decided ahead")

    with DecisionCache(namespace=namespace) as cache:
        assert cache.get_or_compute(model, STATE, questions, compute) == model.predict(STATE, questions)


def test_temperatures_are_in_the_answers_and_in_the_fingerprint(model: DecisionModel) -> None:
    before, fingerprint = model.predict(STATE, QUESTIONS), model.decision_fingerprint
    plain, model.temperatures = model.temperatures, Temperatures(choice=100.0)
    try:
        flat = model.predict(STATE, QUESTIONS)["answers"]["intent"]["probabilities"]
        assert max(flat.values()) - min(flat.values()) < 0.1
        assert model.decision_fingerprint != fingerprint
    finally:
        model.temperatures = plain
    assert model.predict(STATE, QUESTIONS) == before
    with pytest.raises(ConfigError, match="noul"):
        Temperatures(noul=0)


def test_a_file_that_temperatures_were_fitted_for_has_them(
    model: DecisionModel, smollm2: Path, another_quantisation: Path
) -> None:
    fitted = json.loads(TEMPERATURES.read_text())[hashlib.sha256(smollm2.read_bytes()).hexdigest()]
    assert model.temperatures == Temperatures(**{name: fitted[name] for name in TYPES})
    assert min(fitted[name] for name in TYPES) > 1, "this model is too sure of itself"
    with DecisionModel(str(another_quantisation), **ONE_THREAD) as other:
        assert other.temperatures == Temperatures()


@pytest.mark.stress
def test_the_temperatures_of_the_file_are_what_the_labelled_rows_give(model: DecisionModel) -> None:
    for name, question in calibration.QUESTIONS.items():
        scored = calibration.scored_rows(model, name)
        shipped = getattr(model.temperatures, question["type"])
        assert fit_temperature(scored[::2]) == pytest.approx(shipped, rel=0.02)
        assert calibration_error(scored[1::2], shipped) < calibration_error(scored[1::2], 1.0) / 2


def test_a_fitted_temperature_makes_probabilities_mean_what_they_say() -> None:
    # A model that is right in 7 of 10 and says 0.95: the temperature that says 0.7.
    sure = [math.log(0.95), math.log(0.05)]
    rows = [(sure, 0)] * 7 + [(sure, 1)] * 3
    temperature = fit_temperature(rows)
    assert probabilities(sure, temperature)[0] == pytest.approx(0.7, abs=0.001)
    assert calibration_error(rows, temperature) == pytest.approx(0, abs=0.001)
    assert calibration_error(rows, 1.0) == pytest.approx(0.25, abs=0.001)
