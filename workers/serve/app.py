"""The HTTP side of a worker: which path, which answer, which status?

    GET  /healthz               200 while this worker answers
    GET  /metrics               Prometheus                                        key
    GET  /v1/models[/NAME]      the server's models                               key
    POST /v1/completions        } one JSON object, or a stream of events          key
    POST /v1/chat/completions   }
    POST /v1/decisions          typed answers about a state, each computed once  key
    POST /v1/cache/lookup       tokens of this prompt that need not be computed   key

    400 a wrong request   401 no key of this server   404 no such model   408 a body that does not come
    413 a body over 16 MiB   503 with Retry-After: as many wait as may, or the server stops

`key` means: where the server has a key file, one of its keys as `Authorization: Bearer KEY`.

Owner: one worker's event loop. Readers: HTTP clients.
Invariants
    I1  The tenant is the key's. No other header and nothing in a body changes it.
    I2  A client that goes away ends its request, also while it waits and while its prompt is computed.
    I3  A status tells what became of the request: a stream begins with its first chunk, not before.
Leans on: after the whole body was received, the next thing that ASGI's `receive` says is that the client is
gone. uvicorn stops reading bodies that nobody takes.
Leaves out: which process computes (desk), what the answer says (answers).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any, TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from shmcache.decisions.cache import DecisionCache
from shmcache.errors import ShmcacheError
from shmcache.workers.serve.desk import Call, Desk, EngineDied, Overloaded, ServerStopping
from shmcache.workers.serve.engine import Engine
from shmcache.workers.serve.keys import ApiKeys
from shmcache.workers.serve.requests import BadRequest, read_decision, read_job, read_lookup
from shmcache.workers.serve.settings import Settings
from shmcache.workers.serve.wire import Chunk, Done, Failed, Kind

BODY_BYTES = 16 << 20
BODY_S = 30.0  # how long a body may take to come
DISCARDED_BYTES = 4 * BODY_BYTES  # of a body that is too large: whoever sends it reads no answer before
STOPPING_RETRY_S = 5

_GONE = 499  # as nginx calls it
_OUTCOMES = {503: "overloaded", _GONE: "hung_up"}

_Result = TypeVar("_Result")
_json = msgspec.json.Encoder().encode


class Refused(Exception):
    """What the client is told instead of an answer."""

    def __init__(
        self, status: int, message: str, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        self.status, self.message, self.code, self.headers = status, message, code, headers
        super().__init__(message)


class _Gone(Exception):
    """The client has gone; nobody reads what it is told."""


class App:
    """What the routes share."""

    def __init__(
        self,
        settings: Settings,
        desk: Desk,
        keys: ApiKeys | None,
        engine: Engine,
        figures: Callable[[], bytes],
    ) -> None:
        """`figures` are the metrics."""
        self._settings = settings
        self._desk = desk
        self._keys = keys
        self._engine = engine
        self._figures = figures
        # Of its own, so that a lookup is answered while the model computes.
        self._lookups = ThreadPoolExecutor(1, "shmcache-lookup")
        self._models = [model.name for model in settings.models]
        self._decisions = DecisionCache(namespace=settings.namespace)

    def routes(self) -> list[Route]:
        """All paths."""
        return [
            Route("/healthz", self.healthz),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/decisions", self.decisions, methods=["POST"]),
            Route("/v1/cache/lookup", self.lookup, methods=["POST"]),
        ]

    async def healthz(self, request: Request) -> Response:
        """Whoever reads this knows that the worker answers."""
        return _answer({"status": "ok", "models": self._models})

    async def metrics(self, request: Request) -> Response:
        """Figures of the whole server, whichever worker is asked."""
        self._tenant(request)
        return Response(self._figures(), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        """All models."""
        self._tenant(request)
        return _answer({"object": "list", "data": [_model(name) for name in self._models]})

    async def model(self, request: Request) -> Response:
        """One model."""
        self._tenant(request)
        return _answer(_model(self._known(request.path_params["name"])))

    async def completions(self, request: Request) -> Response:
        """A prompt goes on."""
        return await self._complete(request, "completion")

    async def chat_completions(self, request: Request) -> Response:
        """A chat goes on."""
        return await self._complete(request, "chat")

    async def decisions(self, request: Request) -> Response:
        """Questions about a state: what was decided before, by any process, or what the model decides now."""
        tenant = self._tenant(request)
        job = read_decision(await _body(request), tenant, self._models[0])
        fingerprint = self._engine.decision_fingerprint(self._known(job.model), tenant)
        computed = False

        async def decide(state: Any, questions: Any) -> Any:
            nonlocal computed
            computed = True
            async with self._desk.call(job) as call:
                return msgspec.json.decode(_done(await call.next()).data)

        asked = job.arguments["state"], job.arguments["questions"]
        deciding = self._decisions.aget_or_compute(fingerprint, *asked, decide)
        result = await _unless_gone(request.receive, deciding)
        self._desk.slot.count("answered")
        return _answer({**result, "cached": not computed})

    async def lookup(self, request: Request) -> Response:
        """How many tokens of a prompt the cache has."""
        tenant = self._tenant(request)
        job = read_lookup(await _body(request), tenant, self._models[0])
        self._known(job.model)
        self._desk.slot.count("lookups")
        loop = asyncio.get_running_loop()
        try:
            tokens, reusable = await loop.run_in_executor(self._lookups, self._engine.reusable_tokens, job)
        except ValueError as error:
            raise BadRequest(str(error)) from error
        return _answer(
            {
                "object": "cache.lookup",
                "model": job.model,
                "prompt_tokens": tokens,
                "reusable_tokens": reusable,
            }
        )

    async def _complete(self, request: Request, kind: Kind) -> Response:
        tenant = self._tenant(request)
        job = read_job(kind, await _body(request), tenant, self._models[0])
        self._known(job.model)
        call = self._desk.call(job)
        try:
            first = await _unless_gone(request.receive, call.next())
        except BaseException:
            call.close()
            raise
        if isinstance(first, Chunk):
            return EventStream(call, first, self._desk.slot.count)
        call.close()
        done = _done(first)
        self._desk.slot.count("answered")
        return Response(done.data, media_type="application/json")

    def close(self) -> None:
        """After the last request."""
        self._lookups.shutdown()
        self._decisions.close()

    def _tenant(self, request: Request) -> str | None:
        """Who asks (I1)."""
        if self._keys is None:
            return None
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        tenant = self._keys.tenant_of(key.strip()) if scheme.lower() == "bearer" else None
        if tenant is None:
            raise Refused(401, "no key of this server", "invalid_api_key", {"WWW-Authenticate": "Bearer"})
        return tenant

    def _known(self, model: str) -> str:
        if model not in self._models:
            known = ", ".join(self._models)
            raise Refused(404, f"there is no model {model!r}, but {known}", "model_not_found")
        return model

    async def on_error(self, request: Request, error: Exception) -> Response:
        """What went wrong, as OpenAI's clients read it."""
        refused = _as_refused(error)
        self._desk.slot.count(_OUTCOMES.get(refused.status, "failed" if refused.status >= 500 else "refused"))
        kind = "invalid_request_error" if refused.status < 500 else "server_error"
        body = {"error": {"message": refused.message, "type": kind, "param": None, "code": refused.code}}
        return _answer(body, refused.status, refused.headers)


def make_app(app: App, engine: Engine, desk: Desk, stop_s: float) -> Starlette:
    """The ASGI application of one worker: loads the models when it starts, saves when it stops."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await engine.start()
        _when_told_to_stop(lambda: desk.stop(stop_s))
        yield
        await engine.stop()
        app.close()

    errors = (Refused, ShmcacheError, _Gone, HTTPException, Exception)
    handlers = dict.fromkeys(errors, app.on_error)
    return Starlette(routes=app.routes(), lifespan=lifespan, exception_handlers=handlers)


def _when_told_to_stop(begin: Callable[[], None]) -> None:
    """Call `begin` at SIGTERM, before uvicorn's own handler, which tells nobody until all is over."""
    loop, following = asyncio.get_running_loop(), signal.getsignal(signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(begin)
        if callable(following):
            following(number, frame)

    signal.signal(signal.SIGTERM, handle)


class EventStream(Response):
    """An answer as events, each sent when it is there.

    A client that reads slowly holds up nobody: what it has not read waits at the desk.
    """

    def __init__(self, call: Call, first: Chunk, count: Callable[[str], None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._call = call
        self._first = first
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop where the client goes."""
        async with self._call:
            try:
                await _unless_gone(receive, self._send(send))
            except _Gone:
                self._count("hung_up")

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events():
            await send({"type": "http.response.body", "body": b"data: " + event + b"\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        message: Chunk | Done | Failed = self._first
        try:
            while isinstance(message, Chunk):
                yield message.data
                message = await self._call.next()
        except ShmcacheError as error:
            message = Failed(_as_refused(error).status, str(error))
        if isinstance(message, Failed):
            # The status has gone out; this is what the openai package raises as an APIError.
            yield _json({"error": {"message": message.message, "type": "server_error", "code": message.code}})
            self._count("failed")
            return
        yield b"[DONE]"
        self._count("answered")


def _done(message: Chunk | Done | Failed) -> Done:
    """An answer that is not streamed. Raises Refused where there is none."""
    if isinstance(message, Failed):
        raise Refused(message.status, message.message, message.code)
    assert isinstance(message, Done)
    return message


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`; _Gone, and the work is cancelled, where the client goes first (I2)."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise _Gone
    finally:
        for task in (working, gone):
            task.cancel()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes:
    """The whole body, within the limits."""
    body, size_bytes = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size_bytes += len(part)
                if size_bytes <= BODY_BYTES:
                    body += part
                elif size_bytes > DISCARDED_BYTES:
                    break
    except TimeoutError:
        raise Refused(408, f"the body did not come within {BODY_S:.0f} s") from None
    except ClientDisconnect:
        raise _Gone from None
    if size_bytes > BODY_BYTES:
        raise Refused(413, f"the body is over {BODY_BYTES >> 20} MiB", headers={"Connection": "close"})
    return bytes(body)


def _as_refused(error: Exception) -> Refused:
    match error:
        case Refused():
            return error
        case Overloaded():
            return Refused(503, str(error), "overloaded", {"Retry-After": str(error.retry_after_s)})
        case ServerStopping():
            return Refused(503, str(error), "stopping", {"Retry-After": str(STOPPING_RETRY_S)})
        case HTTPException():
            return Refused(error.status_code, str(error.detail), headers=error.headers)
    known = ((BadRequest, 400), (EngineDied, 500), (_Gone, _GONE))
    status = next((status for kind, status in known if isinstance(error, kind)), None)
    # Starlette raises what is not known again, and uvicorn logs it.
    return Refused(status, str(error)) if status is not None else Refused(500, "the server failed")


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "shmcache"}


def _answer(body: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_json(body), status, headers, "application/json")
