"""What does an OpenAI request ask of llama_cpp?

    OpenAI                                 llama_cpp
    max_completion_tokens, max_tokens      max_tokens
    response_format json_schema            json_object with that schema
    tool_choice "required", one tool       that tool
    content in parts, all of text          one string; none at all is the empty string
    n, best_of > 1                         refused: a context has one sequence
    top_k, min_p, grammar, mirostat_* …    the same; OpenAI's clients send them as extra_body
    shmcache: parent_key, wait_ms          hints of SharedLlama.asking, as extra_body too

What llama_cpp does not know and what cannot change a reply (user, store, metadata …) is passed over.

Owner: nobody, the structs are frozen. Readers: app.
Invariants
    I1  Nothing in a body says who asks: `user` is passed over, and a tenant is an argument here.
    I2  Whatever bytes come, it is a Job or BadRequest.
Leaves out: whether the model can do it (answers).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shmcache.errors import ShmcacheError
from shmcache.workers.serve.wire import Hints, Job, Kind

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
NonEmpty = Annotated[str, Meta(min_length=1)]
NonNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]

_SEEDS = 1 << 32
_NO_PARAMETERS = {"type": "object", "properties": {}}  # llama_cpp wants a schema of every function


class BadRequest(ShmcacheError):
    """The request is wrong; the message says what."""


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream ends with."""

    include_usage: bool = False


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """What both kinds of request have. None is as good as not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: Positive | None = None
    temperature: NonNegative | None = None
    top_p: Share | None = None
    top_k: int | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    tfs_z: NonNegative | None = None
    mirostat_mode: Literal[0, 1, 2] | None = None
    mirostat_tau: NonNegative | None = None
    mirostat_eta: NonNegative | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repeat_penalty: NonNegative | None = None
    seed: int | None = None
    stop: NonEmpty | list[NonEmpty] | None = None
    logit_bias: dict[str, float] | None = None
    grammar: NonEmpty | None = None
    shmcache: Hints = Hints()


class Completion(Sampling, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Natural | str | list[Natural]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Natural | None = None
    best_of: int | None = None


class Function(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A function that the model may call; `parameters` is a JSON schema, None where it takes none."""

    name: NonEmpty
    description: str = ""
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool; there is one kind."""

    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct, frozen=True):
    """Which function."""

    name: str


class ToolChoice(msgspec.Struct, frozen=True):
    """This tool and no other."""

    type: Literal["function"]
    function: FunctionName


class JsonSchema(msgspec.Struct, frozen=True):
    """As OpenAI's structured outputs name it."""

    schema: dict[str, Any] = {}


class ResponseFormat(msgspec.Struct, frozen=True):
    """Text, any JSON, or JSON of a schema (`schema` is llama_cpp's place for it, `json_schema` OpenAI's)."""

    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | None = None
    json_schema: JsonSchema | None = None


class Chat(Sampling, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Natural | None = None


class Decision(msgspec.Struct, frozen=True):
    """POST /v1/decisions. Questions by name; what they may be is DecisionModel's to say."""

    state: Any
    questions: Annotated[dict[str, Any], Meta(min_length=1)]
    model: str | None = None


_decode_decision = msgspec.json.Decoder(Decision).decode
_decode = {"completion": msgspec.json.Decoder(Completion).decode, "chat": msgspec.json.Decoder(Chat).decode}
_decode_any = msgspec.json.Decoder(dict[str, Any]).decode

# What is no argument of llama_cpp, or is given to it in another form.
_OWN = frozenset(("model", "stream", "stream_options", "n", "best_of", "max_completion_tokens", "shmcache"))


def read_job(kind: Kind, body: bytes, tenant: str | None, default_model: str) -> Job:
    """What to ask of which model. Raises BadRequest."""
    request: Any = _read(lambda: _decode[kind](body))
    for name in ("n", "best_of"):
        if (getattr(request, name, None) or 1) != 1:
            raise BadRequest(f"{name} must be 1: a model answers a request once")
    arguments = {
        name: msgspec.to_builtins(value)
        for name in request.__struct_fields__
        if name not in _OWN and (value := getattr(request, name)) is not None
    }
    if request.seed is not None:
        arguments["seed"] = request.seed % _SEEDS
    if request.logit_bias is not None:
        arguments["logit_bias"] = _logit_bias(request.logit_bias)
    if isinstance(request, Chat):
        arguments |= _chat(request)
    else:
        arguments["prompt"] = _prompt(request.prompt)
    return Job(
        kind=kind,
        model=request.model or default_model,
        tenant=tenant,
        arguments=arguments,
        stream=bool(request.stream),
        usage=bool(request.stream_options and request.stream_options.include_usage),
        hints=request.shmcache,
    )


def read_lookup(body: bytes, tenant: str | None, default_model: str) -> Job:
    """The request whose prompt is looked up: a chat where it has messages. Raises BadRequest."""
    kind: Kind = "chat" if "messages" in _read(lambda: _decode_any(body)) else "completion"
    return read_job(kind, body, tenant, default_model)


def read_decision(body: bytes, tenant: str | None, default_model: str) -> Job:
    """What to decide. Raises BadRequest."""
    asked: Decision = _read(lambda: _decode_decision(body))
    arguments = {"state": asked.state, "questions": asked.questions}
    return Job(kind="decision", model=asked.model or default_model, tenant=tenant, arguments=arguments)


def _read(decode: Any) -> Any:
    try:
        return decode()
    except msgspec.MsgspecError as error:
        raise BadRequest(str(error)) from error
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8: {error}") from error


def _prompt(prompt: str | list[Any]) -> str | list[int]:
    if isinstance(prompt, str) or all(isinstance(part, int) for part in prompt):
        return prompt
    if len(prompt) != 1:
        raise BadRequest(f"prompt holds {len(prompt)} prompts: ask for each by itself")
    return _prompt(prompt[0])


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError as error:
        raise BadRequest(f"logit_bias goes by token ids: {error}") from error


def _chat(request: Chat) -> dict[str, Any]:
    """Arguments that need more than a copy."""
    arguments: dict[str, Any] = {"messages": [_message(message) for message in request.messages]}
    if request.max_completion_tokens is not None:
        arguments["max_tokens"] = request.max_completion_tokens
    if request.tool_choice == "required":
        arguments["tool_choice"] = _only_tool(request.tools or [])
    if request.tools is not None:
        arguments["tools"] = [_tool(tool) for tool in request.tools]
    if request.response_format is not None:
        arguments["response_format"] = _response_format(request.response_format)
    return arguments


def _message(message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise BadRequest("each message has a role")
    content = message.get("content")
    if content is None:  # beside tool calls; templates add it to other strings
        return {**message, "content": ""}
    if not isinstance(content, list):
        if not isinstance(content, str):
            raise BadRequest("a message's content is a string or a list of parts")
        return message
    if not all(isinstance(part, dict) for part in content):
        raise BadRequest("a part of a message's content is an object")
    if all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
        return {**message, "content": "".join(part["text"] for part in content)}
    return message  # images: the model's chat handler may know them


def _tool(tool: Tool) -> dict[str, Any]:
    function = {"parameters": _NO_PARAMETERS, **msgspec.to_builtins(tool.function)}
    return {"type": tool.type, "function": function}


def _only_tool(tools: list[Tool]) -> dict[str, Any]:
    if len(tools) != 1:
        raise BadRequest("tool_choice 'required' needs exactly one tool: name the one that is to be called")
    return {"type": "function", "function": {"name": tools[0].function.name}}


def _response_format(asked: ResponseFormat) -> dict[str, Any]:
    schema = asked.json_schema.schema if asked.json_schema is not None else asked.schema
    if asked.type == "text":
        return {"type": "text"}
    return {"type": "json_object"} | ({"schema": schema} if schema is not None else {})
