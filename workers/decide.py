"""Which option does the model expect to read next? Typed answers from a language model's logits.

    Read the text and answer the question.                         ┐ once per state: its own row in the cache,
    Text: {state}                                                  ┘ shared by all questions and all workers
    Question: {instructions} Options: refund (money back); other   ┐ once per question
    Answer:                                                        ┘
    refund | other                                                 each option: its mean log-probability

    p(option) = softmax of (mean log-probability / temperature of the question's type)

A choice has its options, a score its levels, noul (yes or no) the words yes and no. Options are compared by
the mean over their tokens, so a long one is not punished for its length. A small model is too sure of itself
or too little; the temperature of a type, fitted on labelled rows (fit_temperature), makes its probabilities
mean what they say. temperatures.json holds those of files that they were fitted for, by the SHA-256 of the
file: no other file has the same, not even another quantisation of the same weights.

Owner: the process that loaded the model. Readers: its threads, one request at a time (SharedLlama).
Invariants
    I1  The same request has the same token lists in every process, so its rows are shared.
    I2  A result is legal for its questions, and its probabilities sum to 1 to within their rounding.
Leans on: Llama.generate asks its logits processors before each token, the first one right after the prompt.
Leaves out: that a request is answered once (decisions.cache).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from llama_cpp import LogitsProcessorList

from shmcache.config import Gates
from shmcache.decisions.cache import DecisionCache
from shmcache.errors import ConfigError
from shmcache.identity import fingerprint, gguf_quant
from shmcache.workers.shared_llama import SharedLlama

PROMPT_VERSION = 1
TEMPERATURES = Path(__file__).with_name("temperatures.json")
TYPES = ("choice", "score", "noul")
YES_NO = ("yes", "no")
N_CTX = 2048

# Also a short state is worth a row: several questions follow it, in every worker.
GATES = Gates(min_tokens=16, cold_min_tokens=16)

Scores = npt.NDArray[np.single]


class Temperatures(msgspec.Struct, frozen=True, kw_only=True):
    """One for each type; 1 leaves the model's own probabilities."""

    choice: float = 1.0
    score: float = 1.0
    noul: float = 1.0

    def __post_init__(self) -> None:
        for name in TYPES:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"temperature of {name} ({getattr(self, name)}) must be positive")


def fitted_temperatures(file_hash: str) -> Temperatures:
    """Those that were fitted for the file with this SHA-256 in hex; 1 each where there are none."""
    fitted = json.loads(TEMPERATURES.read_text(encoding="utf-8")).get(file_hash, {})
    return Temperatures(**{name: fitted[name] for name in TYPES if name in fitted})


class _Forced:
    """A logits processor that reads what the model expects, and has it read the option's tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self.log_probabilities: list[npt.NDArray[np.double]] = []

    def __call__(self, input_ids: npt.NDArray[np.intc], scores: Scores) -> Scores:
        self.log_probabilities.append(_log_softmax(scores.astype(np.double)))
        forced = np.full_like(scores, -np.inf)
        forced[self._tokens[len(self.log_probabilities) - 1]] = 0
        return forced


class DecisionModel:
    """Answers choice, score and noul questions about a state. Context manager."""

    def __init__(
        self,
        model: str | SharedLlama,
        *,
        cache: Any = None,
        temperatures: Temperatures | None = None,
        **options: Any,
    ) -> None:
        """Load a model, or stand over one that is loaded.

        Args:
            model: a GGUF file; or a SharedLlama, which whoever loaded it closes.
            cache: an attached Cache, a namespace, or None, as SharedLlama takes it.
            temperatures: fitted for this model; by default those of temperatures.json, for a file that is
                not there 1 each.
            options: everything that SharedLlama takes.
        """
        self._is_owner = isinstance(model, str)
        options = {"n_ctx": N_CTX, "gates": GATES, "verbose": False, **options}
        self.llama = SharedLlama(model, cache=cache, **options) if isinstance(model, str) else model
        path = self.llama.model_path
        file_hash = fingerprint(path).hex()
        self.temperatures = temperatures or fitted_temperatures(file_hash)
        self._file = [file_hash, gguf_quant(path)]

    @property
    def decision_fingerprint(self) -> str:
        """What its answers depend on: file, context, temperatures, and how a request is spelled."""
        parts = [PROMPT_VERSION, self._file, self.llama.n_ctx(), msgspec.structs.astuple(self.temperatures)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def predict(self, state: Any, questions: Mapping[str, Any]) -> dict[str, Any]:
        """Answer all questions about a state: text, or anything that JSON holds.

        Raises:
            ValueError: a question that cannot be asked; the message names it.
        """
        options = {name: _options(name, question) for name, question in questions.items()}
        prefix = self._tokens(_state_text(state), is_first=True)
        if len(questions) > 1:
            self._read(prefix, ())  # leaves a row that ends with the state
        answers, read_tokens = {}, len(prefix)
        for name, question in questions.items():
            suffix = self._tokens(_question_text(question, options[name]))
            read_tokens += len(suffix)
            answers[name] = self._answer(question, options[name], prefix + suffix)
        return {
            "model": self.llama.model_path.rpartition("/")[2],
            "answers": answers,
            "usage": {"input_tokens": read_tokens, "output_tokens": 0},
        }

    def predict_batch(self, states: Sequence[Any], questions: Mapping[str, Any], **_: Any) -> list[Any]:
        """predict for each of some states, as laya's Router asks an agent."""
        return [self.predict(state, questions) for state in states]

    def system_one(self, state: Any, questions: Mapping[str, Any], lang: str | None = None, **_: Any) -> Any:
        """predict, as laya's Router asks an agent."""
        return self.predict(state, questions)

    def scores(self, state: Any, question: Mapping[str, Any]) -> list[float]:
        """Mean log-probability of each option, in their order: what temperatures are fitted on."""
        options = _options("question", question)
        prompt = self._tokens(_state_text(state), is_first=True)
        return self._scores(prompt + self._tokens(_question_text(question, options)), options)

    def close(self) -> None:
        """Free the model, if it was loaded here."""
        if self._is_owner:
            self.llama.close()

    def __enter__(self) -> DecisionModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(
        self, question: Mapping[str, Any], options: Sequence[str], prompt: list[int]
    ) -> dict[str, Any]:
        kind = question["type"]
        chances = probabilities(self._scores(prompt, options), getattr(self.temperatures, kind))
        rounded = [round(chance, 4) for chance in chances]
        best = max(range(len(options)), key=chances.__getitem__)
        match kind:
            case "choice":
                label = list(question["criteria"])[best]
                answer = {"choice": label, "probabilities": dict(zip(options, rounded, strict=True))}
            case "score":
                expected = sum(level * chance for level, chance in enumerate(chances))
                answer = {
                    "score": round(min(expected, len(options) - 1), 4),
                    "probabilities": {str(level): chance for level, chance in enumerate(rounded)},
                }
            case _:
                answer = {"noul": rounded[0]}
        return {"type": kind, **answer, "confidence": rounded[best]}

    def _scores(self, prompt: list[int], options: Sequence[str]) -> list[float]:
        tokens = [self._tokens(f" {option}") for option in options]
        first = self._read(prompt, tokens[0])
        means = []
        for option in tokens:
            # The expectation behind the prompt is every option's; only what follows differs.
            rows = first if len(option) == 1 or option is tokens[0] else self._read(prompt, option)
            means.append(sum(row[token] for row, token in zip(rows, option, strict=False)) / len(option))
        return [float(mean) for mean in means]

    def _read(self, prompt: list[int], option: Sequence[int]) -> list[npt.NDArray[np.double]]:
        """Log-probabilities of every token behind the prompt, and behind each token of the option."""
        forced = _Forced(option or (self.llama.token_eos(),))
        steps = self.llama.generate(prompt, temp=0.0, logits_processor=LogitsProcessorList([forced]))
        try:
            for _ in range(max(1, len(option))):
                next(steps)
        finally:
            steps.close()
        return forced.log_probabilities

    def _tokens(self, text: str, *, is_first: bool = False) -> list[int]:
        return self.llama.tokenize(text.encode(), add_bos=is_first, special=False)


def respond(cache: DecisionCache, model: DecisionModel, body: bytes) -> tuple[int, dict[str, Any]]:
    """Answer the body of a POST /v1/decisions, {"state": …, "questions": {…}}: HTTP status and content.

    `cached` in the content says whether the decision was there already.
    """
    was_computed = False

    def compute(state: Any, questions: Any) -> Any:
        nonlocal was_computed
        was_computed = True
        return model.predict(state, questions)

    try:
        request = msgspec.json.decode(body)
        state, questions = request["state"], request["questions"]
        if not isinstance(questions, dict) or not questions:
            return _refused("questions must be a mapping of names to questions")
        result = cache.get_or_compute(model, state, questions, compute)
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        return _refused(f"missing {error}" if isinstance(error, KeyError) else str(error))
    return 200, {**result, "cached": not was_computed}


def _refused(why: str) -> tuple[int, dict[str, Any]]:
    return 400, {"error": {"type": "invalid_request_error", "message": why}}


def _state_text(state: Any) -> str:
    text = state if isinstance(state, str) else json.dumps(state, ensure_ascii=False)
    return f"Read the text and answer the question.\n\nText: {text}\n\n"


def _question_text(question: Mapping[str, Any], options: Sequence[str]) -> str:
    described = [
        f"{option} ({meaning})" if meaning else option
        for option, meaning in zip(options, _meanings(question, options), strict=True)
    ]
    return f"Question: {question['instructions']}\nOptions: {'; '.join(described)}\nAnswer:"


def _meanings(question: Mapping[str, Any], options: Sequence[str]) -> Sequence[str | None]:
    criteria = question.get("criteria")
    if not isinstance(criteria, Mapping):
        return [None] * len(options)
    if question["type"] == "noul":
        return [criteria.get("true"), criteria.get("false")]
    return list(criteria.values())


def _options(name: str, question: Any) -> list[str]:
    """What the model may answer, as it reads it. Raises ValueError."""
    kind = question.get("type") if isinstance(question, Mapping) else None
    if kind not in TYPES:
        raise ValueError(f"question {name!r}: type {kind!r} is none of {', '.join(TYPES)}")
    if type(question.get("instructions")) is not str:
        raise ValueError(f"question {name!r} has no instructions: say what is asked")
    if kind == "noul":
        return list(YES_NO)
    criteria = question.get("criteria")
    if not isinstance(criteria, (Mapping, list)) or not criteria:
        raise ValueError(f"question {name!r}: {kind} needs criteria, a list or a mapping of options")
    options = [str(option) for option in criteria]
    if len(set(options)) < len(options) or not all(option.strip() for option in options):
        raise ValueError(f"question {name!r}: options must be different, and not blank: {options}")
    return options


def probabilities(scores: Sequence[float], temperature: float) -> list[float]:
    """Softmax of scores over a temperature."""
    return [float(chance) for chance in np.exp(_log_softmax(np.array(scores) / temperature))]


def _log_softmax(scores: npt.NDArray[np.double]) -> npt.NDArray[np.double]:
    shifted = scores - scores.max()
    result: npt.NDArray[np.double] = shifted - np.log(np.exp(shifted).sum())
    return result


# ---- calibration

Labelled = tuple[Sequence[float], int]
"""Scores of a question's options, and which of them is right."""


def fit_temperature(rows: Sequence[Labelled]) -> float:
    """The temperature that makes the right options most likely (least mean negative log-likelihood).

    Golden-section search over its logarithm: the likelihood has one peak there.
    """
    low, high = math.log(0.02), math.log(50)
    ratio = (math.sqrt(5) - 1) / 2
    loss: Callable[[float], float] = lambda log: _loss(rows, math.exp(log))  # noqa: E731
    while high - low > 1e-4:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if loss(left) < loss(right):
            high = right
        else:
            low = left
    return math.exp((low + high) / 2)


def _loss(rows: Sequence[Labelled], temperature: float) -> float:
    return -sum(
        math.log(max(probabilities(scores, temperature)[right], 1e-300)) for scores, right in rows
    ) / len(rows)


def calibration_error(rows: Sequence[Labelled], temperature: float, bins: int = 10) -> float:
    """Expected calibration error: how far confidence is from accuracy, over bins of equal width."""
    confident: list[list[tuple[float, bool]]] = [[] for _ in range(bins)]
    for scores, right in rows:
        chances = probabilities(scores, temperature)
        best = max(range(len(chances)), key=chances.__getitem__)
        confident[min(bins - 1, int(chances[best] * bins))].append((chances[best], best == right))
    return sum(
        abs(sum(chance for chance, _ in rows_in) - sum(is_right for _, is_right in rows_in))
        for rows_in in confident
    ) / len(rows)
