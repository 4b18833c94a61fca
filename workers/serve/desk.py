"""A request has come in at this worker: may it wait, who answers it, and what if that one dies?

    open() < seats + waiting? ──no──► Overloaded                       503 with Retry-After
          │ yes
          ▼
    put a connection into the line ──► Begun ──► FirstToken ──► Chunk* ──► Done | Failed
          ▲                              │
          └── the engine died and the client has seen nothing: once more, then EngineDied

Owner: one worker's event loop. Readers: the HTTP side of the same worker (app).
Invariants
    I1  What is counted as open is uncounted once, however the request ends.
    I2  An engine never waits for a client: what it sends is taken at once and kept here, at most one answer a
        request.
    I3  A call that is left is closed, and its engine reads that.
    I4  Nobody waits for ever: once this worker stops, a request ends at the latest when its time is over.
Leaves out: HTTP; which engine it will be (line).
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from shmcache.errors import ShmcacheError
from shmcache.workers.serve.board import Board, Slot
from shmcache.workers.serve.line import Line
from shmcache.workers.serve.wire import Begun, Chunk, Done, Failed, FirstToken, Job, frame, read_reply

MAX_TRIES = 2
LONGEST_RETRY_S = 60  # the openai package obeys a Retry-After of up to a minute


class Overloaded(ShmcacheError):
    """As many requests wait as may; worth another try after `retry_after_s`."""

    def __init__(self, open_requests: int, retry_after_s: int) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"{open_requests} requests are being answered or wait: try again later")


class EngineDied(ShmcacheError):
    """The process that had the request has ended, and so had the one before it, or it was in mid-stream."""


class ServerStopping(ShmcacheError):
    """The server stops, and the time that it gives to open requests is over."""


class Call:
    """One request on its way; iterate it for the answer. `async with` closes it."""

    def __init__(self, desk: Desk, job: Job) -> None:
        self._desk = desk
        self._job = job
        self._since_s = time.monotonic()
        self._arrived: asyncio.Queue[Chunk | Done | Failed | ShmcacheError] = asyncio.Queue()
        self._pump = asyncio.create_task(self._take_replies())
        self._closed = False

    async def __aenter__(self) -> Call:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def next(self) -> Chunk | Done | Failed:
        """The next part of the answer. Raises EngineDied, Overloaded or ServerStopping."""
        message = await self._arrived.get()
        if isinstance(message, ShmcacheError):
            raise message
        return message

    def fail(self, error: ShmcacheError) -> None:
        """End it with this."""
        self._pump.cancel()
        self._arrived.put_nowait(error)

    def close(self) -> None:
        """Nobody reads this answer any more."""
        if not self._closed:
            self._closed = True
            self._pump.cancel()
            self._desk.ended(self)

    async def _take_replies(self) -> None:
        try:
            for _ in range(MAX_TRIES):
                if await self._take_replies_of_one_engine():
                    return
                self._desk.slot.count("tried_again")
            self._arrived.put_nowait(EngineDied("the model process ended while it had this request"))
        except ShmcacheError as error:
            self._arrived.put_nowait(error)

    async def _take_replies_of_one_engine(self) -> bool:
        """Whether it has answered; False where it died and nothing of its answer was seen."""
        seen = False
        async with aclosing(self._desk.replies(self._job)) as replies:
            async for message in replies:
                if isinstance(message, FirstToken):
                    self._desk.slot.observe("first_token", time.monotonic() - self._since_s)
                    continue
                self._arrived.put_nowait(message)
                if not isinstance(message, Chunk):
                    self._desk.slot.observe("request", time.monotonic() - self._since_s)
                    return True
                seen = True
        if seen:
            raise EngineDied("the model process ended in the middle of its answer")
        return False


class Desk:
    """Takes requests and finds engines for them."""

    def __init__(self, line: Line, board: Board, slot: Slot, waiting: int, parallel: int = 1) -> None:
        """`waiting` requests may wait, in the whole server; `parallel` are under way in each engine."""
        self._line = line
        self._board = board
        self._waiting = waiting
        self._parallel = parallel
        self._calls: set[Call] = set()
        self.slot = slot

    def call(self, job: Job) -> Call:
        """Begin a request. Raises Overloaded."""
        if self._board.open() >= self._seats() + self._waiting:
            raise self._overloaded()
        self.slot.take_request()
        call = Call(self, job)
        self._calls.add(call)
        return call

    def _seats(self) -> int:
        """Requests that can be under way at once."""
        return self._board.serving() * self._parallel

    def ended(self, call: Call) -> None:
        """A call was closed."""
        self._calls.discard(call)
        self.slot.end_request()

    def stop(self, after_s: float) -> None:
        """Let the open requests go on for so long; then end them (I4)."""
        asyncio.get_running_loop().call_later(after_s, self._end_calls)

    def _end_calls(self) -> None:
        for call in self._calls:
            call.fail(ServerStopping("the server is stopping"))

    async def replies(self, job: Job) -> AsyncGenerator[FirstToken | Chunk | Done | Failed, None]:
        """What one engine says, up to its last word or its end. Raises Overloaded where the line is full."""
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            with theirs:
                if not self._line.put(theirs):
                    raise self._overloaded()
            writer.write(frame(job))
            with suppress(asyncio.IncompleteReadError):
                while True:
                    message = await read_reply(reader)
                    if not isinstance(message, Begun):
                        yield message
        finally:
            writer.close()

    def _overloaded(self) -> Overloaded:
        """When to come back: once those who are here have been answered, at the pace so far."""
        open_requests = self._board.open()
        wait_s = self._board.histogram("request").mean_s * open_requests / max(1, self._seats())
        return Overloaded(open_requests, min(max(1, math.ceil(wait_s)), LONGEST_RETRY_S))
