"""What do desk and engine say to each other? Messages of one request over its own connection.

    desk ── Job ──────────────────────────────────────────► engine
    desk ◄── Begun · FirstToken · Chunk* · Done | Failed ─── engine
    either end closes: the other reads the end of the file, and gives up

Each message is a u32 length, little-endian, and that many bytes of msgpack.

Owner: nobody, the functions are pure but for the stream that they read.
Leaves out: when what is sent (desk, engine).
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Kind = Literal["completion", "chat", "decision"]


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """What a client may say about a prompt: the reply that it goes on from, and how long it may wait for it.

    parent_key  finish_key of that reply, in hex. A hint and no capability: a row must be the prompt's own.
    wait_ms     most that the request waits for other workers' saves.
    """

    parent_key: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")] | None = None
    wait_ms: Annotated[int, Meta(ge=0)] | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has been checked.

    model      name of one of the server's models.
    tenant     whose rows may be used and made; from the key that the client showed, from nothing else.
    arguments  of Llama.create_completion, create_chat_completion or DecisionModel.predict.
    usage      whether a stream ends with a chunk that counts tokens.
    hints      of SharedLlama.asking.
    """

    kind: Kind
    model: str
    tenant: str | None
    arguments: dict[str, Any]
    stream: bool = False
    usage: bool = False
    hints: Hints = Hints()


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one answer."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    completion_tokens: int = 0


class Begun(msgspec.Struct, frozen=True, tag=True):
    """An engine has the request in hand."""


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """The prompt is computed and a token drawn."""


class Chunk(msgspec.Struct, frozen=True, tag=True):
    """A part of a streamed answer: JSON."""

    data: bytes


class Done(msgspec.Struct, frozen=True, tag=True):
    """The end; `data` is the JSON of an answer that is not streamed."""

    data: bytes
    usage: Usage


class Failed(msgspec.Struct, frozen=True, tag=True):
    """There is no answer. `status` is what HTTP calls it."""

    status: int
    message: str
    code: str | None = None


Reply = Begun | FirstToken | Chunk | Done | Failed

_encoder = msgspec.msgpack.Encoder()
_decode_job = msgspec.msgpack.Decoder(Job).decode
_decode_reply = msgspec.msgpack.Decoder(Reply).decode


def frame(message: Job | Reply) -> bytes:
    """A message as it goes over the connection."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


async def read_job(reader: asyncio.StreamReader) -> Job:
    """The job. Raises IncompleteReadError where the desk has given up."""
    return _decode_job(await _read(reader))


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """The next message of the engine. Raises IncompleteReadError where it is gone."""
    return _decode_reply(await _read(reader))


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "little"))
    except ConnectionError as error:  # a reset says the same as an end
        raise asyncio.IncompleteReadError(b"", None) from error
