"""A drop-in llama_cpp.Llama that takes a prompt's state from the cache and leaves its own for others.

    prompt ─► LOOKUP   the longest of: the live trail, published rows   the cells hold a boundary of it
           ─► PREFILL  batch by batch to the last boundary              SAVE `cold` at each anchor
           ─► DECODE   llama_cpp's own generate: it finds its prefix in the cells and cuts nothing
           ─► FINISH   cut back to what the client saw                  SAVE `finish`

Owner: the process that loaded the model. Readers: any number of its threads, one request at a time.
Invariants
    I1  A restore equals the same batches decoded in an empty context, bit for bit in logits, or it is a
        miss.
    I2  A fault of the cache never fails a request: it is counted, logged once per kind, and the request is
        served without the cache. A wrong request fails as it does in llama_cpp.
    I3  Cells that did not all come from token ids we know are untracked until they are cleared: served,
        never cached, counted.
    I4  A generator that goes on after another request took the context raises StaleGenerator; every call in
        a forked child raises UsedAfterFork.
    I5  Each granted slab is saved or cancelled, also where a request fails or is given up.
Leans on (llama-cpp-python 0.3.36)
    `generate` compares its tokens with input_ids[:n_tokens] and decodes what lies behind: with n_tokens at a
    boundary before the prompt's end it cuts nothing. It calls `eval` and `reset`.
    `create_completion` calls `_create_completion` with keyword arguments; only there are stop, echo and
    logprobs known. Between two items of a stream nothing of it runs.
    A generator that its loop drops is closed at once, by its reference count.
Leaves out: boundaries inside a token (seam), waiting for a save in flight, evict and shutdown saves.
"""

from __future__ import annotations

import inspect
import os
import threading
from array import array
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import llama_cpp
import msgspec
from llama_cpp import llama_chat_format

from shmcache import policy
from shmcache.client import Cache, Hit, Slab, attach
from shmcache.config import Gates
from shmcache.errors import ConfigError, RestoreRefused, ShmcacheError, StaleGenerator, UsedAfterFork
from shmcache.identity import FingerprintMode
from shmcache.key import PrefixWalk
from shmcache.kvc import Piece, Reason
from shmcache.workers import seam
from shmcache.workers.heads import Heads, head_tokens
from shmcache.workers.render import Renderer, Text
from shmcache.workers.request import Chat, Report, Request
from shmcache.workers.rows import Author
from shmcache.workers.seam import Joined
from shmcache.workers.state import ContextState, ModelVocabulary, unsupported
from shmcache.workers.trail import Trail

REPLY_TOKENS = 256  # of a reply still to come, that its slab is made for; a longer one extends it
SHORTER_ROWS = 4  # rows that are tried after the longest one did not fit

_NEVER_HIDDEN = (ConfigError, StaleGenerator, UsedAfterFork)  # going on would be wrong
_HIT_COUNTERS = {"exact": "hit_exact", "partial": "hit_partial", "cold": "miss_cold"}
_GENERATE = inspect.signature(llama_cpp.Llama.generate)
_COMPLETION = inspect.signature(llama_cpp.Llama._create_completion)
_CHAT = inspect.signature(llama_cpp.Llama.create_chat_completion)


class LiveRow(msgspec.Struct, frozen=True):
    """The live trail as a row: its first `mark` tokens, and the prompt behind them."""

    mark: int
    text_bytes: int
    joined: Joined


class SharedLlama(llama_cpp.Llama):
    """A llama_cpp.Llama whose prompts' states are shared through a shmcache.

    Every completion carries a `shmcache` entry (request.Report as a dict; in a stream the last chunk does),
    and `last_report` holds the last one. Without a coordinator everything is served all the same, with the
    same batches, so replies do not depend on the cache; they may differ from stock Llama in rounding.
    """

    def __init__(
        self,
        model_path: str,
        *,
        cache: Cache | str | None = None,
        gates: Gates | None = None,
        tenant: str | None = None,
        fingerprint_mode: FingerprintMode = "safe",
        **options: Any,
    ) -> None:
        """Load a model as llama_cpp.Llama does.

        Args:
            model_path: a GGUF file.
            cache: an attached Cache (whoever attached it closes it), a namespace, or None.
            gates: when a state is worth a row.
            tenant: rows of another tenant are never used; None is a tenant of its own.
            fingerprint_mode: how the file is identified (identity.fingerprint).
            options: everything that llama_cpp.Llama takes.
        """
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._epoch = 0
        self._serving: Request | None = None
        self._local = threading.local()
        self._gates = gates or Gates()
        self._tenant = tenant
        self._fingerprint_mode: FingerprintMode = fingerprint_mode
        self._owns_cache = isinstance(cache, str)
        self._shared: Cache | None = attach(cache) if isinstance(cache, str) else cache
        self._live: Trail | None = None
        self.last_report = Report()

        super().__init__(model_path, **options)

        # A context asked for 100 cells has 256, but llama_cpp's own arrays have 100.
        self._n_ctx = min(self._n_ctx, len(self.input_ids))
        self._state = ContextState(self)
        self._renderer = Renderer(ModelVocabulary(self))
        self._heads = Heads()
        self._unsupported = unsupported(self)
        self._author: Author | None = None
        if self._shared is not None and self._unsupported is None:
            self._author = Author.of(self, self._state, fingerprint_mode, tenant)
        self.reset()

    # ---- the calls of llama_cpp.Llama

    def create_chat_completion(self, *args: Any, **kwargs: Any) -> Any:
        """As in llama_cpp.Llama; the answer, or the last chunk, has a `shmcache` entry."""
        chat = Chat(self._fixed_chat(_CHAT.bind(self, *args, **kwargs).arguments))
        with self._in_chat(chat):
            answer: Any = super().create_chat_completion(*args, **kwargs)
        if isinstance(answer, dict):
            return _reported(answer, chat.report)
        return self._chat_chunks(chat, answer)

    def _create_completion(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_fork()
        call = _COMPLETION.bind(self, *args, **kwargs).arguments
        request = Request(getattr(self._local, "chat", None), call)
        chunks: Any = super()._create_completion(*args, **kwargs)
        return self._serve(request, chunks)

    def generate(
        self, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """As in llama_cpp.Llama."""
        request = self._serving or Request()
        from_scratch = _GENERATE.bind(self, tokens, *args, **kwargs).arguments.get("reset", True)
        with self._turn(request):
            self._epoch += 1
            request.epoch = self._epoch
            prompt = self._prefill(request, list(tokens)) if from_scratch else list(tokens)
            steps = super().generate(prompt, *args, **kwargs)
        try:
            answer = None
            while True:
                with self._turn(request):
                    try:
                        token = steps.send(answer)
                    except StopIteration:
                        return
                    self._sampled(request)
                answer = yield token
        finally:
            request.has_decoded = True
            steps.close()

    def eval(self, tokens: Sequence[int]) -> None:
        """As in llama_cpp.Llama, in batches that end at absolute multiples of n_ubatch."""
        with self._taking_context():
            if not self._is_tracked():
                super().eval(tokens)
                return
            start = self.n_tokens
            for end in policy.cuts(start, start + len(tokens), self._state.n_ubatch):
                self._decode(tokens[self.n_tokens - start : end - start])

    def reset(self) -> None:
        """Empty the context, whatever it held: from here on it is tracked."""
        with self._taking_context():
            super().reset()  # type: ignore[no-untyped-call]
            if self._unsupported is None:
                self._state.clear()
                self._live = Trail(self._shared.forget if self._shared is not None else 0)

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """As in llama_cpp.Llama; where the state came from is not known, so it is untracked."""
        with self._taking_context():
            self._live = None
            super().load_state(state)

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """As in llama_cpp.Llama, never cached."""
        with self._taking_context():
            return super().embed(*args, **kwargs)

    def close(self) -> None:
        """Free the model, and the cache where a namespace was given."""
        cache, self._shared = getattr(self, "_shared", None), None
        if cache is not None and self._owns_cache:
            cache.close()
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        namespace = self._shared.connection.names.namespace if self._shared is not None else None
        return {
            **super().__getstate__(),  # type: ignore[no-untyped-call]
            "cache": namespace,
            "gates": self._gates,
            "tenant": self._tenant,
            "fingerprint_mode": self._fingerprint_mode,
        }

    # ---- one request at a time

    @contextmanager
    def _turn(self, request: Request) -> Iterator[None]:
        """One step of a request: nobody else's may run, and none may have run since its last one."""
        self._refuse_fork()
        with self._lock:
            if request.epoch not in (None, self._epoch) and not request.has_decoded:
                raise StaleGenerator(
                    "another request took this context: finish or close a stream before the next request, "
                    "or load the model once more for a second one"
                )
            outer, self._serving = self._serving, request
            try:
                yield
            finally:
                self._serving = outer

    @contextmanager
    def _taking_context(self) -> Iterator[None]:
        """A call that changes the cells: from outside it ends the request that is suspended."""
        self._refuse_fork()
        with self._lock:
            if self._serving is None:
                self._epoch += 1
            yield

    def _refuse_fork(self) -> None:
        # Before the lock: a thread that the child does not have may hold it.
        if os.getpid() != self._pid:
            raise UsedAfterFork("SharedLlama", self._pid, os.getpid())

    def _serve(self, request: Request, chunks: Generator[Any, None, None]) -> Iterator[Any]:
        try:
            while True:
                with self._turn(request):
                    try:
                        chunk = next(chunks)
                    except StopIteration:
                        return
                    choice = chunk["choices"][0]
                    request.show(choice["text"])
                    if choice["finish_reason"] is not None:
                        _reported(chunk, self._finish(request))
                yield chunk
        finally:
            chunks.close()
            self._give_back(request)

    # ---- LOOKUP

    def _prefill(self, request: Request, tokens: list[int]) -> list[int]:
        """Bring the cells to the last boundary before the prompt's end; return the prompt to go on with."""
        if not tokens and self.token_bos() >= 0:
            tokens = [self.token_bos()]  # stock Llama fails an assertion on a model that adds no BOS
        request.prompt_tokens = request.joined_tokens = len(tokens)
        request.counted_from = self._state.decoded_tokens()
        if not self._may_be_cached(request, tokens):
            self._count("untracked")
            return tokens
        prompt = self._renderer.render(tokens)
        walk = PrefixWalk(self._author.identity.seed, prompt.text) if self._author is not None else None
        joined = self._look_up(request, prompt, walk)
        request.joined_tokens = len(joined.tokens)
        request.reused_tokens = joined.keep
        request.hit_kind = "exact" if joined.is_exact else "partial" if joined.keep else "cold"
        self._evaluate(request, prompt, joined, walk)
        return joined.tokens

    def _may_be_cached(self, request: Request, tokens: list[int]) -> bool:
        """Whether the prompt begins with cells that we know, or with none."""
        if self._unsupported is not None:
            return False
        if request.wants_all_logits:
            self.reset()  # a restore carries none, and those of the live trail may be another prompt's
            return False
        if self._is_tracked():
            return True
        if self.n_tokens and tokens[: self.n_tokens] == self.input_ids[: self.n_tokens].tolist():
            return False  # an image's cells, or a loaded state: the prompt goes on behind them
        self.reset()
        return True

    def _is_tracked(self) -> bool:
        if self._live is not None and self.n_tokens != len(self._live):
            self._live = None  # somebody decoded or cut past us
        return self._live is not None

    def _look_up(self, request: Request, prompt: Text, walk: PrefixWalk | None) -> Joined:
        """Fill the cells with the longest known beginning of the prompt."""
        live = self._live_row(request, prompt)
        joined = self._restore_longest(request, prompt, walk, live) if walk is not None else None
        if joined is not None:
            request.source = "shared"
            return joined
        if live is not None and self._live is not None and self._go_on(self._live, live):
            request.source = "live"
            return live.joined
        self.reset()
        return Joined(prompt.tokens, 0)

    def _live_row(self, request: Request, prompt: Text) -> LiveRow | None:
        """The longest beginning of the live trail that the prompt can go on from."""
        trail = self._live
        if trail is None or self._state.pos_max() != len(trail) - 1:
            return None
        for mark in sorted({*trail.marks, len(trail)} - {0}, reverse=True):
            text_bytes = trail.text_bytes(mark)
            if trail.text[:text_bytes] != prompt.text[:text_bytes] or not self._state.may_cut(mark):
                continue
            joined = self._join(
                request,
                prompt,
                trail.tokens[:mark],
                text_bytes,
                may_end_one_earlier=trail.may_end_at(mark - 1) and self._state.may_cut(mark - 1),
            )
            if joined is not None:
                return LiveRow(mark, text_bytes, joined)
        return None

    def _restore_longest(
        self, request: Request, prompt: Text, walk: PrefixWalk, live: LiveRow | None
    ) -> Joined | None:
        """Restore the longest published row, if it is longer than what is live."""
        if self._shared is None or (live is not None and live.joined.is_exact):
            return None
        live_bytes = live.text_bytes if live is not None else 0
        with self._cache_edge("lookup"):
            rows = self._shared.candidates(walk, len(prompt.text))
            for hit in islice(rows, 1 + SHORTER_ROWS):
                if hit.image.meta.text_bytes <= live_bytes:
                    return None
                joined = self._join(
                    request,
                    prompt,
                    hit.image.token_ids.tolist(),
                    hit.image.meta.text_bytes,
                    may_end_one_earlier=self._state.rewindable and hit.image.pieces[-1].length == 1,
                )
                if joined is not None:
                    return joined if self._restore(hit, joined, prompt) else None
        return None

    def _join(
        self,
        request: Request,
        prompt: Text,
        row_tokens: list[int],
        text_bytes: int,
        *,
        may_end_one_earlier: bool,
    ) -> Joined | None:
        """The prompt behind a row, where it fits the context and what the request needs."""
        joined = seam.join(prompt, row_tokens, text_bytes, may_end_one_earlier=may_end_one_earlier)
        if joined is None:
            return None
        room = self._n_ctx - len(joined.tokens)
        if len(joined.tokens) > len(prompt.tokens) and room < self._reply_bound(request):
            return None  # llama_cpp bounded the reply by the caller's own, shorter list
        if self._logits_all and joined.tokens != prompt.tokens:
            return None  # scores are found by the caller's token numbers
        return joined

    def _reply_bound(self, request: Request) -> int:
        """The most tokens that the reply may get."""
        room = self._n_ctx - request.prompt_tokens
        asked = request.max_tokens
        return room if asked is None or asked <= 0 else min(asked, room)

    def _go_on(self, trail: Trail, live: LiveRow) -> bool:
        """Cut the live trail back to its row; False, and the trail is lost, where that fails."""
        if not self._cut(trail, live.mark):
            return False
        self._close_entry(trail)
        return self._cut(trail, live.joined.keep)

    def _restore(self, hit: Hit, joined: Joined, prompt: Text) -> bool:
        """Put a row into the cells; False, they are empty and the row is dropped, where it does not fit."""
        assert self._shared is not None
        image = hit.image
        tokens = image.token_ids.tolist()
        parts = self._renderer.parts(tokens)
        trail = Trail(self._shared.forget)
        trail.restored(tokens, parts, image.pieces, image.meta.key)
        if trail.text != prompt.text[: len(trail.text)]:
            self._shared.drop(hit, "its tokens do not render to its text")
            return False
        self._live = None  # from here on the cells are not what they were
        try:
            self._state.copy_in(image.payload, len(tokens))
        except RestoreRefused as refused:
            self._shared.drop(hit, str(refused))
            return False
        hit.use()
        self._live = trail
        self.input_ids[: len(tokens)] = tokens
        return self._cut(trail, joined.keep)

    def _cut(self, trail: Trail, keep: int) -> bool:
        """Keep the first `keep` tokens; False, and the trail is lost, where the cells cannot be cut."""
        if keep < len(trail):
            if not self._state.cut(keep):
                self._live = None
                return False
            trail.cut(keep)
        self.n_tokens = keep
        self._requires_eval = True
        return True

    # ---- PREFILL and SAVE

    def _evaluate(self, request: Request, prompt: Text, joined: Joined, walk: PrefixWalk | None) -> None:
        """Decode up to the last boundary before the prompt's end; save at each anchor on the way."""
        trail = self._live
        assert trail is not None
        shift = len(joined.tokens) - len(prompt.tokens)  # a row may spell its text with more or fewer tokens
        anchors = policy.anchors(len(prompt.tokens), self._head_tokens(request, prompt), self._gates)
        boundaries = [anchor + shift for anchor in anchors]
        ends = policy.cuts(joined.keep, len(joined.tokens), self._state.n_ubatch, boundaries)
        slabs = self._reserve_anchors(prompt, anchors, shift, walk) if walk is not None else {}
        try:
            for end in ends[:-1]:
                self._decode(joined.tokens[len(trail) : end])
                if end in boundaries:
                    self._save(trail, slabs.pop(end, None), Reason.COLD)
                    self._close_entry(trail)
        finally:
            for slab in slabs.values():
                self._cancel(slab)

    def _head_tokens(self, request: Request, prompt: Text) -> int | None:
        if request.chat is None or request.chat.fixed_chat is None:
            return None
        return head_tokens(prompt.tokens, request.chat.fixed_chat, self._renderer.plain)

    def _reserve_anchors(
        self, prompt: Text, anchors: Sequence[int], shift: int, walk: PrefixWalk
    ) -> dict[int, Slab]:
        """Ask for all rows of the prompt that are still to come, at once; slabs by position."""
        trail, author, cache = self._live, self._author, self._shared
        assert trail is not None
        missing = [
            anchor
            for anchor in anchors
            if anchor + shift > len(trail) and policy.anchor_is_saved(anchor, self._gates)
        ]
        if not missing or author is None or cache is None:
            return {}
        plans = [
            author.anchor_plan(walk, prompt.ends[anchor - 1], anchor + shift, trail) for anchor in missing
        ]
        slabs: list[Slab | None] = []
        with self._cache_edge("reserve"):
            slabs = cache.reserve(plans, trail.base_key(), trail.forget).slabs
        granted = zip(missing, slabs, strict=False)
        return {anchor + shift: slab for anchor, slab in granted if slab is not None}

    def _decode(self, tokens: Sequence[int]) -> None:
        """One batch, recorded."""
        trail, state = self._live, self._state
        assert trail is not None
        self._live = None  # a batch that fails leaves cells that nobody knows
        super().eval(tokens)
        n_threads = state.n_threads if len(tokens) == 1 else state.n_threads_batch
        piece = Piece(len(tokens), 1, state.n_ubatch, n_threads, state.device)
        trail.decoded(tokens, self._renderer.parts(tokens), piece)
        self._live = trail
        if self._shared is not None:
            self._shared.progress()

    def _save(self, trail: Trail, slab: Slab | None, reason: Reason) -> bytes | None:
        """Copy the cells into a slab and hand it over; its key, None where nothing was saved."""
        if slab is None or self._author is None:
            return None
        with self._cache_edge("save"):
            try:
                meta = self._author.meta(trail, reason, self._state.pos_min())
                with slab.payload(self._state.size_bytes()) as payload:
                    self._state.copy_out(payload)
                slab.save(meta, tuple(trail.pieces), memoryview(array("I", trail.tokens)))
            except BaseException:
                slab.cancel()
                raise
            trail.mark(meta.key)
            return meta.key
        return None

    def _close_entry(self, trail: Trail) -> None:
        """End an entry of the record: a row is, or could be, here (Trail I2)."""
        trail.mark()
        if self._state.settles and not trail.settled:
            self._state.settle()
            trail.settled = True

    # ---- DECODE and FINISH

    def _sampled(self, request: Request) -> None:
        """After each token: the first one ends the prefill, the second says that a reply is under way."""
        if request.prefilled_tokens is None:
            request.prefilled_tokens = self._state.decoded_tokens() - request.counted_from
            self._count_request(request)
        elif not request.asked_for_slab:
            request.asked_for_slab = True
            self._reserve_reply(request)

    def _count_request(self, request: Request) -> None:
        self._count(_HIT_COUNTERS.get(request.hit_kind, "untracked"))
        self._count("reused_tokens", request.reused_tokens)
        self._count("prefilled_tokens", request.prefilled_tokens or 0)
        self.last_report = request.report()

    def _reserve_reply(self, request: Request) -> None:
        trail, author, cache = self._live, self._author, self._shared
        if trail is None or author is None or cache is None or not request.is_completion:
            return
        most = request.joined_tokens + min(REPLY_TOKENS, self._reply_bound(request))
        if not policy.reply_is_saved(most, self._gates):
            return
        with self._cache_edge("reserve"):
            plans = [author.reply_plan(most, trail)]
            [request.slab] = cache.reserve(plans, trail.base_key(), trail.forget).slabs

    def _finish(self, request: Request) -> Report:
        """Cut the cells back to what the client saw, save them, and say what the cache did."""
        key = self._save_reply(request) if request.epoch == self._epoch else None
        self.last_report = request.report(key)
        if request.chat is not None:
            request.chat.report = self.last_report
        return self.last_report

    def _save_reply(self, request: Request) -> bytes | None:
        if not self._is_tracked() or (trail := self._live) is None:
            return None
        keep = request.joined_tokens + self._seen_tokens(trail, request)
        if keep > len(trail) or not (keep == len(trail) or self._state.may_cut(keep)):
            return None
        self._cut(trail, keep)
        trail.mark()
        if keep == request.joined_tokens or not policy.reply_is_saved(keep, self._gates):
            return None
        slab, request.slab = request.slab, None
        return self._save(trail, slab, Reason.FINISH)

    def _seen_tokens(self, trail: Trail, request: Request) -> int:
        """How many tokens of the reply lie in the cells and wholly inside what the client saw."""
        shown, at = request.shown(), 0
        reply = trail.tokens[request.joined_tokens :]
        for seen, token in enumerate(reply):
            piece = self._renderer.plain(token)
            if self._renderer.is_framed(token) or not shown.startswith(piece, at):
                return seen
            at += len(piece)
        return len(reply)

    # ---- chats

    def _fixed_chat(self, call: Mapping[str, Any]) -> bytes | None:
        # As in llama_cpp.Llama.create_chat_completion.
        template = self.chat_format or ""
        handler = (
            self.chat_handler
            or self._chat_handlers.get(template)
            or llama_chat_format.get_chat_completion_handler(template)
        )
        return self._heads.fixed_chat(handler, template, call)

    @contextmanager
    def _in_chat(self, chat: Chat) -> Iterator[None]:
        """Completions that this thread makes meanwhile belong to the chat."""
        outer = getattr(self._local, "chat", None)
        self._local.chat = chat
        try:
            yield
        finally:
            self._local.chat = outer

    def _chat_chunks(self, chat: Chat, chunks: Iterator[Any]) -> Iterator[Any]:
        try:
            while True:
                with self._in_chat(chat):  # some handlers make their completion only now
                    try:
                        chunk = next(chunks)
                    except StopIteration:
                        return
                if chunk["choices"] and chunk["choices"][0].get("finish_reason") is not None:
                    _reported(chunk, chat.report)
                yield chunk
        finally:
            if isinstance(chunks, Generator):
                chunks.close()

    # ---- the edge to the cache

    @contextmanager
    def _cache_edge(self, what: str) -> Iterator[None]:
        """What the cache does wrong ends here (I2)."""
        try:
            yield
        except _NEVER_HIDDEN:
            raise
        except (ShmcacheError, OSError) as fault:
            if self._shared is not None:
                self._shared.connection.fault(what, fault)

    def _cancel(self, slab: Slab) -> None:
        with self._cache_edge("cancel"):
            slab.cancel()

    def _give_back(self, request: Request) -> None:
        slab, request.slab = request.slab, None
        if slab is not None:
            self._cancel(slab)

    def _count(self, name: str, by: int = 1) -> None:
        if self._shared is not None:
            with self._cache_edge("count"):
                self._shared.count(name, by)


def _reported(answer: dict[str, Any], report: Report) -> dict[str, Any]:
    answer["shmcache"] = msgspec.to_builtins(report)
    return answer
