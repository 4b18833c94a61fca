"""What does llama_cpp's answer look like to an OpenAI client?

    llama_cpp                                       here
    usage                                           … with prompt_tokens_details.cached_tokens
    stream                                          … with a last chunk of usage alone, where it was asked for
    ValueError, a template's own error              400, the request's fault
    any other exception                             500, logged

Owner: nobody, the functions keep nothing. Readers: models.
Leaves out: HTTP and the framing of events (app).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jinja2
import msgspec
from llama_cpp.llama_grammar import LlamaGrammar

from shmcache.workers.decide import DecisionModel
from shmcache.workers.serve.wire import Chunk, Done, Failed, Job, Reply, Usage

if TYPE_CHECKING:
    from shmcache.workers.serve.models import ServedLlama

log = logging.getLogger(__name__)

_REQUESTS_FAULT = (ValueError, jinja2.TemplateError, RecursionError)


def answer(llama: ServedLlama, job: Job, send: Callable[[Reply], None]) -> Done | Failed:
    """Answer a request; a streamed answer's chunks go to `send`."""
    try:
        if job.kind == "decision":
            return Done(_json(DecisionModel(llama).predict(**job.arguments)), Usage())
        _check_tokens(job, llama.n_vocab())
        if job.stream:
            return _stream(llama, job, send)
        return _whole(llama, job)
    except _REQUESTS_FAULT as error:
        return _refused(error)
    except Exception as error:
        if not llama.hang_up.is_set():  # else this is what stopping it looks like
            log.exception("model %s failed", job.model)
        return Failed(500, f"{type(error).__name__}: {error}")


def _check_tokens(job: Job, n_vocab: int) -> None:
    """llama.cpp and numpy would fail for an id beyond the vocabulary, each in its own way."""
    prompt = job.arguments.get("prompt")
    ids = [*(prompt if isinstance(prompt, list) else ()), *job.arguments.get("logit_bias", ())]
    if wrong := [token for token in ids if not 0 <= token < n_vocab]:
        raise ValueError(f"there is no such token: {wrong[0]}")


def _whole(llama: ServedLlama, job: Job) -> Done:
    body = _ask(llama, job, stream=False)
    usage = _usage(llama)
    body["usage"] = {**body.get("usage", {}), "prompt_tokens_details": _details(usage)}
    return Done(_json(body), usage)


def _stream(llama: ServedLlama, job: Job, send: Callable[[Reply], None]) -> Done:
    chunks: Iterator[dict[str, Any]] = _ask(llama, job, stream=True)
    last: dict[str, Any] = {}
    for last in chunks:
        send(Chunk(_json(last)))
    usage = _usage(llama)
    if job.usage and last:
        send(Chunk(_json({**_head(last), "choices": [], "usage": _as_openai(usage)})))
    return Done(b"", usage)


def _ask(llama: ServedLlama, job: Job, *, stream: bool) -> Any:
    ask = llama.create_chat_completion if job.kind == "chat" else llama.create_completion
    arguments = job.arguments
    if (grammar := arguments.get("grammar")) is not None:
        arguments = {**arguments, "grammar": LlamaGrammar.from_string(grammar, verbose=False)}
    return ask(**arguments, model=job.model, stream=stream)


def _usage(llama: ServedLlama) -> Usage:
    report = llama.last_report
    return Usage(report.prompt_tokens, report.reused_tokens, llama.completion_tokens)


def _as_openai(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": _details(usage),
    }


def _details(usage: Usage) -> dict[str, int]:
    return {"cached_tokens": usage.reused_tokens}


def _head(chunk: dict[str, Any]) -> dict[str, Any]:
    return {name: chunk[name] for name in ("id", "object", "created", "model")}


def _refused(error: Exception) -> Failed:
    message = str(error) or type(error).__name__
    too_long = "exceed context window" in message
    return Failed(400, message, "context_length_exceeded" if too_long else None)


def _plain(value: Any) -> Any:
    # llama_cpp puts numpy scalars into log probabilities.
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"an answer holds a {type(value).__name__}")


_json = msgspec.json.Encoder(enc_hook=_plain).encode
