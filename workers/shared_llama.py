"""A drop-in llama_cpp.Llama that takes a prompt's state from the cache and leaves its own for others.

    prompt ─► LOOKUP   the longest of: the live trail, published rows   the cells hold a boundary of it
                       now and then computed anew instead of restored   AUDIT: does the row hold the same?
           ─► PREFILL  batch by batch to the last boundary              SAVE `cold` at each anchor
           ─► DECODE   llama_cpp's own generate: it finds its prefix in the cells and cuts nothing
                                                                        SAVE `continued` in a long reply
           ─► FINISH   cut back to what the client saw                  SAVE `finish`
    cells that no row covers, before another prompt takes them          SAVE `evict`     and wait
    close()                                                             SAVE `shutdown`  and wait

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
Leaves out: what a row says (rows), where a prompt is cut (policy), how a state is copied (state).
"""

from __future__ import annotations

import inspect
import logging
import os
import random
import threading
import time
from array import array
from bisect import bisect_right
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import msgspec
from llama_cpp import llama_chat_format

from shmcache import policy
from shmcache.client import Cache, Grants, Hit, Slab, attach
from shmcache.config import Gates
from shmcache.errors import ConfigError, RestoreRefused, StaleGenerator, UsedAfterFork
from shmcache.identity import FileState, FingerprintMode, file_state
from shmcache.key import PrefixWalk
from shmcache.kvc import Reason
from shmcache.page import restore_counters
from shmcache.policy import Measured
from shmcache.protocol import Tier
from shmcache.workers import audit, seam
from shmcache.workers.cells import Cells
from shmcache.workers.edge import Edge
from shmcache.workers.heads import FixedChat, Heads
from shmcache.workers.render import Renderer, Text
from shmcache.workers.request import Chat, Hints, Report, Request
from shmcache.workers.rows import Author
from shmcache.workers.seam import Joined, Tokenizer
from shmcache.workers.state import ContextState, ModelVocabulary, unsupported
from shmcache.workers.trail import Trail, common_bytes

REPLY_TOKENS = 256  # of a reply still to come, that its slab is made for; a longer one extends it
CONTINUED_AHEAD = 32  # tokens before a `continued` save that its slab is asked for: time to make it ready
SHORTER_ROWS = 4  # rows that are tried after the longest one did not fit
MOST_WAITS = 8  # for other workers' saves before one prefill: three anchors, and owners that died
WAIT_MS = 60_000  # for one of them; it ends early where its owner is gone or stuck

log = logging.getLogger(__name__)

_HIT_COUNTERS = {"exact": "hit_exact", "partial": "hit_partial", "cold": "miss_cold"}
_GENERATE = inspect.signature(llama_cpp.Llama.generate)
_COMPLETION = inspect.signature(llama_cpp.Llama._create_completion)
_CHAT = inspect.signature(llama_cpp.Llama.create_chat_completion)


class Prompt(msgspec.Struct, frozen=True):
    """A prompt as text, the keys of its prefixes (None without a cache), and its anchors.

    head is the anchor of the system and tool part, 0 where it has none. forget is the forget number before
    any row was looked at: what begins with a row that is forgotten meanwhile began before that.
    """

    text: Text
    walk: PrefixWalk | None
    anchors: tuple[int, ...]
    head: int
    forget: int


class LiveRow(msgspec.Struct, frozen=True):
    """The live trail as a row: its first `mark` tokens, and the prompt behind them."""

    trail: Trail
    mark: int
    text_bytes: int
    joined: Joined


class SharedLlama(llama_cpp.Llama):
    """A llama_cpp.Llama whose prompts' states are shared through a shmcache.

    Every completion carries a `shmcache` entry (request.Report as a dict; in a stream the last chunk does),
    and `last_report` holds the last one. Without a coordinator everything is served all the same, in the
    same batches, so replies do not depend on the cache; they may differ from stock Llama's in rounding.
    """

    def __init__(
        self,
        model_path: str,
        *,
        cache: Cache | str | None = None,
        gates: Gates | None = None,
        tenant: str | None = None,
        fingerprint_mode: FingerprintMode = "safe",
        explain_saves: bool = False,
        audit_rate: float = 0.0,
        **options: Any,
    ) -> None:
        """Load a model as llama_cpp.Llama does.

        Args:
            model_path: a GGUF file.
            cache: an attached Cache (whoever attached it closes it), a namespace, or None.
            gates: when a state is worth a row.
            tenant: rows of another tenant are never used; None is a tenant of its own.
            fingerprint_mode: how the file is identified (identity.fingerprint).
            explain_saves: log, at level INFO, why something was not saved.
            audit_rate: share of the hits whose row is computed anew and compared, 0 to 1 (workers.audit).
            options: everything that llama_cpp.Llama takes.
        Raises:
            ConfigError: an audit_rate that is no share, a namespace that cannot be one.
        """
        if not 0.0 <= audit_rate <= 1.0:
            raise ConfigError(f"audit_rate ({audit_rate}) must be between 0 and 1")
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._epoch = 0
        self._serving: Request | None = None
        self._local = threading.local()
        self._gates = gates or Gates()
        self._tenant = tenant
        self._fingerprint_mode: FingerprintMode = fingerprint_mode
        self._explain_saves = explain_saves
        self._audit_rate = audit_rate
        self._measured = Measured()
        self._owned_cache = attach(cache) if isinstance(cache, str) else None
        self._cache = cache if isinstance(cache, Cache) else self._owned_cache
        self._edge = Edge(self._cache)
        self.last_report = Report()

        loaded = file_state(model_path) if Path(model_path).exists() else None
        super().__init__(model_path, **options)

        # A context asked for 100 cells has 256, but llama_cpp's own arrays have 100.
        self._n_ctx = min(self._n_ctx, len(self.input_ids))
        self._state = ContextState(self)
        vocabulary = ModelVocabulary(self)
        self._renderer = Renderer(vocabulary)
        self._tokenizer = Tokenizer(self._renderer, vocabulary.tokens_of)
        self._cells = Cells(self, self._state, self._renderer)
        self._heads = Heads()
        self._unsupported = unsupported(self)
        self._author: Author | None = None
        if self._cache is not None and self._unsupported is None:
            with self._edge.guard("identity"):
                self._author = self._identified(loaded)
        self.reset()

    def _identified(self, loaded: FileState | None) -> Author:
        """Say what is in memory, provided that the file which was loaded is the one that was hashed."""
        author = Author.of(self, self._state, self._fingerprint_mode, self._tenant)
        if loaded != file_state(self.model_path):
            raise OSError(
                f"{self.model_path} was changed while it was loaded: what is in memory is not known"
            )
        return author

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
        hints = getattr(self._local, "hints", None)
        request = Request(getattr(self._local, "chat", None), call, hints)
        chunks: Any = super()._create_completion(*args, **kwargs)
        return self._serve(request, chunks)

    @contextmanager
    def asking(self, *, parent_key: str | None = None, wait_ms: int | None = None) -> Iterator[None]:
        """Hints for the completions that this thread asks for inside the block.

        Args:
            parent_key: `finish_key` of the reply that the next prompt goes on from. Where another worker is
                still saving it, it is waited for, at most session_resume_wait_ms.
            wait_ms: most that a request waits for other workers' saves.
        Raises:
            ValueError: parent_key is no hex number.
        """
        key = bytes.fromhex(parent_key) if parent_key is not None else None
        outer = getattr(self._local, "hints", None)
        self._local.hints = Hints(key, wait_ms)
        try:
            yield
        finally:
            self._local.hints = outer

    def generate(
        self, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """As in llama_cpp.Llama."""
        request = self._serving or Request()
        from_scratch = _GENERATE.bind(self, tokens, *args, **kwargs).arguments.get("reset", True)
        with self._turn(request):
            self._epoch += 1
            request.epoch = self._epoch
            request.counted_from = self._state.decoded_tokens()
            request.counted_from_us = self._state.decode_us()
            prompt = self._prefill(request, list(tokens)) if from_scratch else list(tokens)
            steps = super().generate(prompt, *args, **kwargs)
        try:
            answer = None
            while True:
                with self._turn(request):
                    try:
                        token = self.token_eos() if self._is_full(request) else steps.send(answer)
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
            trail = self._cells.trail
            if not self._cells.is_tracked() or trail is None:
                super().eval(tokens)
                return
            start = len(trail)
            for end in policy.cuts(start, start + len(tokens), self._state.n_ubatch):
                self._decode(trail, tokens[len(trail) - start : end - start])

    def reset(self) -> None:
        """Empty the context, whatever it held: from here on it is tracked."""
        with self._taking_context():
            super().reset()  # type: ignore[no-untyped-call]
            if self._unsupported is None:
                self._cells.clear(self._edge.forget)

    def save_state(self) -> llama_cpp.LlamaState:
        """As in llama_cpp.Llama, between the steps of a request."""
        self._refuse_fork()
        with self._lock:
            return super().save_state()

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """As in llama_cpp.Llama; where the state came from is not known, so it is untracked."""
        with self._taking_context():
            self._cells.trail = None
            super().load_state(state)

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """As in llama_cpp.Llama, never cached."""
        with self._taking_context():
            return super().embed(*args, **kwargs)

    def save_sequence(self) -> str | None:
        """Save what the context holds now as an `evict` row; its key in hex once it is published.

        Blocks at most evict_save_timeout_ms. None where it is too short or not tracked, and where the row
        could not be saved in time.
        """
        with self._taking_context():
            trail = self._cells.trail
            if not self._cells.is_tracked() or trail is None:
                return None
            key = self._save_and_wait(trail, Reason.EVICT)
            self._cells.close_entry(trail)
            self._cells.cut(trail, len(trail))  # it cuts nothing, and says that there are no logits now
            return key.hex() if key is not None else None

    def close(self) -> None:
        """Save what no row covers (`shutdown`), free the model, and the cache where a namespace was given.

        Blocks at most evict_save_timeout_ms for the save. A child of a fork saves nothing.
        """
        if hasattr(self, "_author") and os.getpid() == self._pid:
            self._save_at_shutdown()
        self._free()

    def __del__(self) -> None:
        # Nobody asked for a save, and the interpreter may be on its way out.
        self._free()

    def _free(self) -> None:
        # Also called for an object whose construction failed at any point.
        if (cache := getattr(self, "_owned_cache", None)) is not None:
            cache.close()
        if hasattr(self, "_stack"):
            super().close()

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),  # type: ignore[no-untyped-call]
            "cache": self._cache.connection.names.namespace if self._cache is not None else None,
            "gates": self._gates,
            "tenant": self._tenant,
            "fingerprint_mode": self._fingerprint_mode,
            "explain_saves": self._explain_saves,
            "audit_rate": self._audit_rate,
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
        """A completion's items; the last one carries the report."""
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
                        choice["finish_reason"] = "length" if request.is_full else choice["finish_reason"]
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
        if not self._may_be_cached(request, tokens):
            self._explain(
                "the prompt",
                self._unsupported or "the cells hold what is not known, or all logits are asked for",
            )
            return tokens
        prompt = self._prompt(request, tokens)
        self._explain_anchors(prompt)
        self._wait_for_parent(request)
        joined, slabs = self._claim(request, prompt, self._look_up(request, prompt))
        request.joined_tokens = len(joined.tokens)
        request.reused_tokens = joined.keep
        request.hit_kind = "exact" if joined.is_exact else "partial" if joined.keep else "cold"
        self._evaluate(prompt, joined, slabs)
        return joined.tokens

    def _wait_for_parent(self, request: Request) -> None:
        """A reply may still be on its way from the worker that gave it."""
        key, trail = request.hints.parent_key, self._cells.trail
        if key is None or self._edge.has(key) or (trail is not None and key in trail.marks.values()):
            return
        wait_ms = request.left_ms(self._gates.session_resume_wait_ms)
        request.waited = self._edge.resume(key, wait_ms) or request.waited

    def _may_be_cached(self, request: Request, tokens: list[int]) -> bool:
        """Whether the prompt begins with cells that we know, or with none."""
        if self._unsupported is not None:
            return False
        if request.wants_all_logits:
            self._save_before_loss(b"", 0)
            self.reset()  # a restore carries none, and those of the live trail may be another prompt's
            return False
        if self._cells.is_tracked():
            return True
        if self.n_tokens and tokens[: self.n_tokens] == self.input_ids[: self.n_tokens].tolist():
            return False  # an image's cells, or a loaded state: the prompt goes on behind them
        self.reset()
        return True

    def _prompt(self, request: Request, tokens: list[int]) -> Prompt:
        text = self._renderer.render(tokens)
        walk = PrefixWalk(self._author.identity.seed, text.text) if self._author is not None else None
        head = None
        if request.chat is not None and request.chat.fixed_chat is not None:
            head = request.chat.fixed_chat.head_tokens(tokens, self._renderer.plain)
        anchors = policy.anchors(len(tokens), head, self._gates)
        return Prompt(text, walk, anchors, policy.head_anchor(head), self._edge.forget)

    def _look_up(self, request: Request, prompt: Prompt) -> Joined:
        """Fill the cells with the longest known beginning of the prompt."""
        live = self._live_row(request, prompt)
        row = self._longest_row(request, prompt, live)
        stays_bytes = row[0].image.meta.text_bytes if row is not None else live.text_bytes if live else 0
        self._save_before_loss(prompt.text.text, stays_bytes)
        if row is not None:
            return self._take(request, prompt, *row)
        if live is not None and self._go_on(live):
            request.source = "live"
            return live.joined
        self.reset()
        return Joined.cold(prompt.text)

    def _live_row(self, request: Request, prompt: Prompt) -> LiveRow | None:
        """The longest beginning of the live trail that the prompt can go on from."""
        trail = self._cells.trail
        if trail is None or self._state.pos_max() != len(trail) - 1 or trail.forget < prompt.forget:
            return None
        shared_bytes = common_bytes(trail.text, prompt.text.text)
        for mark in sorted({*trail.marks, len(trail)} - {0}, reverse=True):
            text_bytes = trail.text_bytes(mark)
            if text_bytes > shared_bytes or not self._state.may_cut(mark):
                continue
            may_end_one_earlier = trail.may_end_at(mark - 1) and self._state.row_may_be_cut(mark)
            joined = seam.join(
                prompt.text,
                trail.tokens[:mark],
                text_bytes,
                self._tokenizer,
                may_end_one_earlier=may_end_one_earlier,
            )
            if joined is not None and self._serves(request, prompt, joined):
                return LiveRow(trail, mark, text_bytes, joined)
        return None

    def _longest_row(
        self, request: Request, prompt: Prompt, live: LiveRow | None
    ) -> tuple[Hit, Joined] | None:
        """The longest published row that the prompt can go on from, if it is longer than what is live."""
        if prompt.walk is None or (live is not None and live.joined.is_exact):
            return None
        for hit in islice(self._edge.candidates(prompt.walk), 1 + SHORTER_ROWS):
            image = hit.image
            if live is not None and image.meta.text_bytes <= live.text_bytes:
                hit.close()
                return None
            row_tokens = image.token_ids.tolist()
            may_end_one_earlier = image.pieces[-1].length == 1 and self._state.row_may_be_cut(len(row_tokens))
            joined = seam.join(
                prompt.text,
                row_tokens,
                image.meta.text_bytes,
                self._tokenizer,
                may_end_one_earlier=may_end_one_earlier,
            )
            if joined is not None and self._serves(request, prompt, joined):
                return hit, joined
            is_whole = image.meta.text_bytes == len(prompt.text.text)
            why = "longer" if joined is not None else "whole" if is_whole else "seam"
            self._edge.count(f"passed_over_{why}")
            hit.close()
        return None

    def _serves(self, request: Request, prompt: Prompt, joined: Joined) -> bool:
        """Whether a prompt behind a row's own tokens does what the request needs."""
        asked = prompt.text.tokens
        if self._logits_all and joined.tokens != asked:
            return False  # llama_cpp finds scores by the caller's token numbers
        if len(joined.tokens) <= len(asked):
            return True
        # llama_cpp bounds the reply by the caller's shorter list: we must be able to end it (_is_full).
        return request.is_completion and len(joined.tokens) < self._n_ctx and self.token_eos() >= 0

    def _go_on(self, live: LiveRow) -> bool:
        """Cut the live trail back to its row; False where that fails."""
        if not self._cells.cut(live.trail, live.mark):
            return False
        self._cells.close_entry(live.trail)
        return self._cells.cut(live.trail, live.joined.keep)

    def _take(self, request: Request, prompt: Prompt, hit: Hit, joined: Joined) -> Joined:
        """Put a row into the cells, or nothing where it does not fit: the row is dropped then."""
        fault = self._restore(request, hit, joined, prompt)
        hit.close()
        if fault is None:
            with self._edge.guard("use"):
                hit.use()
            request.source = "shared"
            return joined
        self._edge.drop(hit, fault)
        self.reset()
        request.source = ""
        return Joined.cold(prompt.text)

    def _restore(self, request: Request, hit: Hit, joined: Joined, prompt: Prompt) -> str | None:
        """Fill the cells with a row and cut it; why not, where that fails."""
        trail = self._audited(request, hit, prompt)
        if trail is None:
            began_ns = time.perf_counter_ns()
            try:
                trail = self._cells.restore(hit.image, prompt.forget)
            except RestoreRefused as refused:
                return str(refused)
            self._measure_restore(hit, (time.perf_counter_ns() - began_ns) // 1000)
        if trail.text != prompt.text.text[: len(trail.text)]:
            return "its tokens do not spell its text"
        return None if self._cells.cut(trail, joined.keep) else "its last token cannot be cut off"

    def _measure_restore(self, hit: Hit, restore_us: int) -> None:
        """Count what a restore took, with the mapping or reading of its row, where that was new."""
        restore_us, hit.opened_us = restore_us + hit.opened_us, 0
        on_disk, restored_bytes = hit.found.row.tier == Tier.DISK, len(hit.image.payload)
        for name, by in zip(restore_counters(on_disk=on_disk), (restored_bytes, restore_us), strict=True):
            self._edge.count(name, by)
        if on_disk == self._edge.saves_to_disk:
            self._measured = self._measured.plus(
                Measured(restored_bytes=restored_bytes, restore_us=restore_us)
            )

    def _audited(self, request: Request, hit: Hit, prompt: Prompt) -> Trail | None:
        """The row as it is computed anew, where this hit is chosen for that; None: restore it."""
        image = hit.image
        if random.random() >= self._audit_rate or not audit.can_audit(self._cells, image):
            return None
        decoded_tokens, decode_us = self._state.decoded_tokens(), self._state.decode_us()
        audited = audit.audit(self._cells, image, prompt.forget, self._decode)
        # None of it belongs to the request's own prefill.
        request.counted_from += self._state.decoded_tokens() - decoded_tokens
        request.counted_from_us += self._state.decode_us() - decode_us
        if audited is None:
            return None
        self._edge.count("audits")
        if audited.difference is None:
            audited.trail.mark(image.meta.key)
        else:
            asked_by = prompt.walk.key_at(prompt.walk.text_bytes).hex() if prompt.walk is not None else "none"
            log.error(
                "row %s, used for the prompt %s, is not what its record makes: %s",
                *(image.meta.key.hex(), asked_by, audited.difference),
            )
            self._edge.quarantine(hit, f"{audited.difference}; used for the prompt {asked_by}")
        return audited.trail

    def _claim(self, request: Request, prompt: Prompt, joined: Joined) -> tuple[Joined, dict[int, Slab]]:
        """Reserve the rows to come; while another worker makes the first of them, wait and look again."""
        for _ in range(MOST_WAITS):
            missing = self._missing_anchors(prompt, joined)
            if not missing:
                break
            grants = self._reserve_anchors(prompt, missing)
            self._explain_refusals("an anchor", grants)
            slabs = zip(missing.values(), grants.slabs, strict=True)
            granted = {position: slab for position, slab in slabs if slab is not None}
            if granted:
                return joined, granted
            if grants.held is not None:
                wait_ms = request.left_ms(WAIT_MS)
                if wait_ms == 0:
                    break
                request.waited = True
                self._edge.wait(grants.held, wait_ms)
            # What is not granted may be there by now.
            longer = self._longest_row(request, prompt, self._live_row(request, prompt))
            if longer is not None:
                joined = self._take(request, prompt, *longer)
            elif grants.held is None:
                break
        return joined, {}

    # ---- PREFILL and SAVE

    def _positions(self, prompt: Prompt, joined: Joined) -> dict[int, int]:
        """Anchors that are passed on the way to the prompt's end, and where in the joined tokens they lie."""
        found = {anchor: joined.position(prompt.text, anchor) for anchor in prompt.anchors}
        return {anchor: at for anchor, at in found.items() if at is not None and at > joined.keep}

    def _missing_anchors(self, prompt: Prompt, joined: Joined) -> dict[int, int]:
        """Those of them that get a row."""
        positions = self._positions(prompt, joined).items()
        saved = {anchor: at for anchor, at in positions if policy.anchor_is_saved(anchor, self._gates)}
        return {anchor: at for anchor, at in saved.items() if self._pays("an anchor", at)}

    def _pays(self, what: str, token_count: int) -> bool:
        """Whether a row of so many tokens is restored sooner than they are computed, as measured here.

        Each row that is not saved for that makes us less sure of it: a slow hour is tried again.
        """
        if self._author is None:
            return True
        state_bytes = self._author.size.bytes_at(token_count)
        if policy.restore_pays(token_count, state_bytes, self._measured):
            return True
        self._edge.count("save_dropped_slower_than_prefill")
        self._explain(
            what, f"its {token_count} tokens would take longer to restore than to compute, as measured"
        )
        self._measured = self._measured.faded()
        return False

    def _reserve_anchors(self, prompt: Prompt, missing: Mapping[int, int]) -> Grants:
        """Ask for their rows, all at once."""
        trail, author, walk = self._cells.trail, self._author, prompt.walk
        if trail is None or author is None or walk is None:
            return Grants([None] * len(missing))
        plans = [
            author.anchor_plan(walk, prompt.text.ends[anchor - 1], at, trail)
            for anchor, at in missing.items()
        ]
        return self._edge.reserve(plans, trail.base_key(), trail.forget)

    def _evaluate(self, prompt: Prompt, joined: Joined, slabs: dict[int, Slab]) -> None:
        """Decode up to the last boundary before the prompt's end; save at each anchor on the way."""
        trail = self._cells.trail
        assert trail is not None
        positions = self._positions(prompt, joined)
        boundaries = list(positions.values())
        ends = policy.cuts(joined.keep, len(joined.tokens), self._state.n_ubatch, boundaries)
        try:
            for end in ends[:-1]:
                self._decode(trail, joined.tokens[len(trail) : end])
                if end in boundaries:
                    self._save(
                        trail, slabs.pop(end, None), Reason.COLD, is_head=end == positions.get(prompt.head)
                    )
                    self._cells.close_entry(trail)
        finally:
            for slab in slabs.values():
                self._edge.cancel(slab)

    def _decode(self, trail: Trail, tokens: Sequence[int]) -> None:
        self._cells.decode(trail, tokens)
        self._edge.progress()

    def _save(
        self, trail: Trail, slab: Slab | None, reason: Reason, *, is_head: bool = False
    ) -> bytes | None:
        """Copy the cells into a slab and hand it over; the row's key, None where there is none."""
        if slab is None or self._author is None:
            return None
        with self._edge.guard("save"):
            try:
                meta = self._author.meta(trail, reason, self._state.pos_min(), is_head=is_head)
                if self._edge.has(meta.key):  # nobody could tell the two states apart
                    self._edge.count("save_present")
                    slab.cancel()
                    trail.mark(meta.key)
                    return meta.key
                with slab.payload(self._state.size_bytes()) as payload:
                    self._state.copy_out(payload)
                slab.save(meta, tuple(trail.pieces), memoryview(array("I", trail.tokens)))
            except BaseException:
                slab.cancel()
                raise
            trail.mark(meta.key)
            return meta.key
        return None

    def _save_and_wait(self, trail: Trail, reason: Reason) -> bytes | None:
        """Save the cells as they are; the row's key once it is published, at most evict_save_timeout_ms."""
        if self._author is None or not policy.reply_is_saved(len(trail), self._gates):
            return None
        if not self._pays("what the cells hold", len(trail)):
            return None
        end_s = time.monotonic() + self._gates.evict_save_timeout_ms / 1000

        def left_ms() -> int:
            return max(0, int(1000 * (end_s - time.monotonic())))

        plan = self._author.live_plan(trail)
        if plan.address is not None and self._edge.has(plan.address.key):
            return plan.address.key
        [slab] = self._edge.reserve([plan], trail.base_key(), trail.forget).slabs
        if slab is None:
            return None
        if not slab.is_ready(left_ms()):
            self._edge.cancel(slab)
            return None
        key = self._save(trail, slab, reason)
        return key if key is not None and slab.wait(left_ms()) else None

    def _save_before_loss(self, text: bytes, stays_bytes: int) -> None:
        """Before a prompt takes the cells: save them where no row and no part that stays covers them.

        Args:
            text: of the prompt.
            stays_bytes: of its beginning, that a row or the cells hold from now on.
        """
        trail = self._cells.trail
        if trail is None or not policy.overwriting_needs_a_save(len(trail), 0, self._gates):
            return
        stays = bisect_right(trail.ends, min(stays_bytes, common_bytes(trail.text, text)))
        covered = max(stays, self._published_tokens(trail))
        if policy.overwriting_needs_a_save(len(trail), covered, self._gates):
            self._save_and_wait(trail, Reason.EVICT)

    def _published_tokens(self, trail: Trail) -> int:
        """How much of the trail the longest row holds that is still there."""
        marks = sorted(trail.marks.items(), reverse=True)
        return next((at for at, key in marks if key is not None and self._edge.has(key)), 0)

    def _save_at_shutdown(self) -> None:
        """Save the cells, unless a row holds all but the last token of them."""
        if not self._lock.acquire(timeout=self._gates.evict_save_timeout_ms / 1000):
            return  # a request that does not end has the cells
        try:
            trail = self._cells.trail if self._cells.is_tracked() else None
            if trail is not None and len(trail) - self._published_tokens(trail) > 1:
                self._save_and_wait(trail, Reason.SHUTDOWN)
            self._author = self._cells.trail = None
        finally:
            self._lock.release()

    # ---- DECODE and FINISH

    def _sampled(self, request: Request) -> None:
        """After each token: the first one ends the prefill, the second says that a reply is under way."""
        if request.prefilled_tokens is None:
            request.prefilled_tokens = self._state.decoded_tokens() - request.counted_from
            self._count(request, self._state.decode_us() - request.counted_from_us)
        elif not request.asked_for_slab:
            request.asked_for_slab = True
            self._reserve_reply(request)
        self._save_continued(request)

    def _save_continued(self, request: Request) -> None:
        """A long reply leaves a row at every continued_interval tokens; the cut is there, saved or not."""
        trail, author = self._cells.trail, self._author
        if trail is None or not request.joined_tokens:
            return
        reply_tokens = len(trail) - request.joined_tokens
        ahead = min(CONTINUED_AHEAD, self._gates.continued_interval - 1)
        if author is not None and policy.continued_is_due(reply_tokens + ahead, self._gates):
            plan = author.reply_plan(len(trail) + ahead, len(trail) + ahead, trail)
            is_long_enough = policy.reply_is_saved(len(trail) + ahead, self._gates)
            if is_long_enough and self._pays("a `continued` row", len(trail) + ahead):
                grants = self._edge.reserve([plan], trail.base_key(), trail.forget)
                self._explain_refusals("a `continued` row", grants)
                [request.continued_slab] = grants.slabs
        if policy.continued_is_due(reply_tokens, self._gates):
            slab, request.continued_slab = request.continued_slab, None
            self._save(trail, slab, Reason.CONTINUED)
            self._cells.close_entry(trail)

    def _is_full(self, request: Request) -> bool:
        """Whether the reply must end because a row spelled the prompt with more tokens than its caller.

        llama_cpp would end it in time by the caller's count; it ends it at once when it is given an EOS.
        """
        longer = request.is_completion and request.joined_tokens > request.prompt_tokens
        request.is_full = longer and self.n_tokens >= self._n_ctx
        return request.is_full

    def _count(self, request: Request, prefill_us: int) -> None:
        self._edge.count(_HIT_COUNTERS.get(request.hit_kind, "untracked"))
        self._edge.count("reused_tokens", request.reused_tokens)
        self._edge.count("prefilled_tokens", request.prefilled_tokens or 0)
        self._edge.count("prefill_us", prefill_us)
        self._measured = self._measured.plus(Measured(request.prefilled_tokens or 0, prefill_us))
        self.last_report = request.report()

    def _reserve_reply(self, request: Request) -> None:
        trail, author = self._cells.trail, self._author
        if trail is None or author is None or not request.is_completion:
            return
        reply_tokens = self._reply_bound(request)
        expected = request.joined_tokens + min(REPLY_TOKENS, reply_tokens)
        if policy.reply_is_saved(expected, self._gates) and self._pays("the reply", expected):
            plans = [author.reply_plan(expected, request.joined_tokens + reply_tokens, trail)]
            grants = self._edge.reserve(plans, trail.base_key(), trail.forget)
            self._explain_refusals("the reply", grants)
            [request.slab] = grants.slabs

    def _reply_bound(self, request: Request) -> int:
        """The most tokens that the reply may get."""
        room = self._n_ctx - request.prompt_tokens
        asked = request.max_tokens
        return room if asked is None or asked <= 0 else min(asked, room)

    def _finish(self, request: Request) -> Report:
        """Cut the cells back to what the client saw, save them, and say what the cache did."""
        key = self._save_reply(request) if request.epoch == self._epoch else None
        self.last_report = request.report(key)
        if request.chat is not None:
            request.chat.report = self.last_report
        return self.last_report

    def _save_reply(self, request: Request) -> bytes | None:
        trail = self._cells.trail
        if not self._cells.is_tracked() or trail is None:
            return None
        keep = request.joined_tokens + self._seen_tokens(trail, request)
        if keep > len(trail) or not self._cells.cut(trail, keep):
            self._explain(
                "the reply", "the client saw less of it than was decoded, and the model cannot be cut back"
            )
            return None
        trail.mark()
        if keep == request.joined_tokens or not policy.reply_is_saved(keep, self._gates):
            self._explain(
                "the reply",
                f"empty, or shorter with its prompt ({keep}) than min_tokens ({self._gates.min_tokens})",
            )
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

    # ---- why not

    def _explain(self, what: str, why: str) -> None:
        if self._explain_saves:
            log.info("not saved: %s: %s", what, why)

    def _explain_anchors(self, prompt: Prompt) -> None:
        if not prompt.anchors:
            least = self._gates.min_tokens
            self._explain(
                "the prompt", f"its {len(prompt.text.tokens)} tokens are not above min_tokens ({least})"
            )
        for anchor in prompt.anchors:
            if not policy.anchor_is_saved(anchor, self._gates):
                most = self._gates.cold_max_tokens
                self._explain("an anchor", f"at {anchor} tokens it lies beyond cold_max_tokens ({most})")

    def _explain_refusals(self, what: str, grants: Grants) -> None:
        """Say what the coordinator had against it: present, held, no_space, …"""
        if not grants.kinds:
            self._explain(what, "no coordinator answered, or the cache is read-only")
        for kind in grants.kinds:
            if kind != "granted":
                self._explain(what, kind)

    # ---- the end of a request

    def _give_back(self, request: Request) -> None:
        """Cancel what was reserved for a reply and not used."""
        for slab in (request.slab, request.continued_slab):
            if slab is not None:
                self._edge.cancel(slab)
        request.slab = request.continued_slab = None

    # ---- chats

    def _fixed_chat(self, call: Mapping[str, Any]) -> FixedChat | None:
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


def _reported(answer: dict[str, Any], report: Report) -> dict[str, Any]:
    answer["shmcache"] = msgspec.to_builtins(report)
    return answer
