"""What is known about one request while it is served, and what is reported about it afterwards.

Owner: the request's generator. Readers: shared_llama.
Leaves out: everything about cells and rows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from shmcache.client import Slab
    from shmcache.workers.heads import FixedChat

HitKind = Literal["exact", "partial", "cold", "untracked"]
Source = Literal["live", "shared", ""]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the cache did for one completion.

    cache_hit_kind    exact: all but the last token were there; partial; cold: nothing; untracked: the
                      cells hold something else than known tokens, and the cache was not asked.
    source            where the reused tokens were: "live" in this context, "shared" in the cache, or "".
    prompt_tokens     of the request.
    reused_tokens     that were not decoded.
    prefilled_tokens  that llama.cpp says it decoded before the first token was sampled.
    waited            whether another worker's prefill of the same prompt was waited for.
    finish_key        of the row of prompt and reply, in hex; None where none was saved.
    """

    cache_hit_kind: HitKind = "untracked"
    source: Source = ""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefilled_tokens: int = 0
    waited: bool = False
    finish_key: str | None = None


class Chat:
    """The chat that a completion belongs to: its fixed chat (heads), and the report for its caller."""

    def __init__(self, fixed_chat: FixedChat | None) -> None:
        self.fixed_chat = fixed_chat
        self.report = Report()


class Hints(msgspec.Struct, frozen=True):
    """What a caller says about its requests beside their arguments.

    parent_key  of the row that the prompt goes on from, as reported (finish_key): if it is not there yet, it
                is waited for, at most session_resume_wait_ms. It gives no right to the row: that is used only
                where any other would be.
    wait_ms     most that the request waits for other workers' saves; None: as long as they move.
    """

    parent_key: bytes | None = None
    wait_ms: int | None = None


class Request:
    """One completion, or one bare `generate`."""

    def __init__(
        self, chat: Chat | None = None, call: Mapping[str, Any] | None = None, hints: Hints | None = None
    ) -> None:
        """`call` holds the arguments of a completion; None for a bare `generate`."""
        self.chat = chat
        self.hints = hints or Hints()
        self._began_s = time.monotonic()
        self.is_completion = call is not None
        call = call or {}
        self.max_tokens: int | None = call.get("max_tokens")
        self.wants_all_logits = bool(call.get("echo")) and call.get("logprobs") is not None
        # The prompt comes first in an echo, and only where the reply is not streamed.
        echoes = call.get("echo") and not call.get("stream")
        self._echoed = call["prompt"] if echoes and isinstance(call["prompt"], str) else ""
        self._shown: list[str] = []

        self.epoch: int | None = None  # set when the request takes the context
        self.has_decoded = False  # no more tokens will be asked for
        self.is_full = False  # the context ends before the reply does
        self.counted_from = 0  # llama.cpp's counters when its prefill began: tokens, and microseconds
        self.counted_from_us = 0
        self.prefilled_tokens: int | None = None  # set when the first token is sampled
        self.hit_kind: HitKind = "untracked"
        self.source: Source = ""
        self.prompt_tokens = 0
        self.joined_tokens = 0  # of the prompt as it was decoded, behind a row's own ids
        self.reused_tokens = 0
        self.waited = False
        self.slab: Slab | None = None  # for the finish row
        self.continued_slab: Slab | None = None  # for the next `continued` row
        self.asked_for_slab = False

    def left_ms(self, most_ms: int) -> int:
        """How long it may still wait for others, at most so long."""
        if self.hints.wait_ms is None:
            return most_ms
        waited_ms = int(1000 * (time.monotonic() - self._began_s))
        return max(0, min(most_ms, self.hints.wait_ms - waited_ms))

    def show(self, text: str) -> None:
        """Note what the client sees."""
        self._shown.append(text)

    def shown(self) -> bytes:
        """The reply as the client saw it."""
        return "".join(self._shown).removeprefix(self._echoed).encode("utf-8")

    def report(self, finish_key: bytes | None = None) -> Report:
        """What the cache did."""
        return Report(
            cache_hit_kind=self.hit_kind,
            source=self.source,
            prompt_tokens=self.prompt_tokens,
            reused_tokens=self.reused_tokens,
            prefilled_tokens=self.prefilled_tokens or 0,
            waited=self.waited,
            finish_key=finish_key.hex() if finish_key is not None else None,
        )
