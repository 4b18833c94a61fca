"""The models of one worker, by name: who answers as whom, and how is a computation stopped?

Owner: each seat the engine's thread for it; `reusable_tokens` and `hang_up` may be asked from others.
Invariants
    I1  A request sees rows of its own tenant and of nobody else, and the cells hold no other tenant's
        conversation while it runs.
    I2  A hang-up ends a prefill within one node of llama.cpp's graph, and a reply at its next token. A reply
        that was cut short is still saved as far as it went; the cells of a prefill that was cut short are
        cleared (cells).
    I3  A grammar that llama.cpp cannot parse is the request's error; given to a sampler it ends the process.
Leans on
    ggml asks the abort callback between two nodes of its graph, from a thread that holds no GIL; here it is
    libc's strlen over a buffer that holds either nothing or one byte: "false" or "true" without Python.
    A decode that was aborted raises RuntimeError in llama_cpp, and cells clears what it left.
Leaves out: what an answer looks like (answers).
"""

from __future__ import annotations

import ctypes
import difflib
import hashlib
import inspect
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, NoReturn

import llama_cpp
import msgspec
from llama_cpp import llama_chat_format
from llama_cpp.llama_grammar import LlamaGrammar
from msgspec.structs import replace

from shmcache.client import Cache, attach
from shmcache.errors import ConfigError
from shmcache.identity import ctx_params_hash
from shmcache.workers.decide import DecisionModel
from shmcache.workers.lookup import reusable_tokens
from shmcache.workers.rows import Author
from shmcache.workers.serve import answers
from shmcache.workers.serve.settings import ModelSettings, Settings
from shmcache.workers.serve.turns import Turns
from shmcache.workers.serve.wire import Done, Failed, FirstToken, Job, Reply
from shmcache.workers.shared_llama import SharedLlama
from shmcache.workers.state import context_params
from shmcache.workers.trail import Trail

_STRLEN = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p).value or 0


class HangUp:
    """Whether the client is gone; set from any thread, read by llama.cpp itself."""

    def __init__(self) -> None:
        self._byte = ctypes.create_string_buffer(2)
        self._lock = threading.Lock()
        self._set = False
        self._is_prefill = False

    @property
    def address(self) -> ctypes.c_void_p:
        """Of a string that is empty until a prefill is to be stopped."""
        return ctypes.cast(self._byte, ctypes.c_void_p)

    def is_set(self) -> bool:
        """Whether the client is gone."""
        return self._set

    def set(self) -> None:
        """The client is gone."""
        with self._lock:
            self._set = True
            self._tell()

    def begin(self) -> None:
        """A request begins, and its prompt is computed."""
        with self._lock:
            self._set, self._is_prefill = False, True
            self._tell()

    def prefilled(self) -> None:
        """From here on tokens follow each other quickly: the next one ends the reply, and nothing is lost."""
        with self._lock:
            self._is_prefill = False
            self._tell()

    def _tell(self) -> None:
        self._byte[0] = b"\1" if self._set and self._is_prefill else b"\0"


class ServedLlama(SharedLlama):
    """A SharedLlama that serves one tenant after the other, counts tokens, and can be stopped."""

    def __init__(self, model_path: str, *, turns: Turns, reuse: bool = True, **options: Any) -> None:
        """`reuse` False computes every prompt from its first token, to compare with."""
        self._turns = turns
        self.hang_up = HangUp()
        self.completion_tokens = 0
        self._reuse = reuse
        self._authors: dict[str | None, Author] = {}
        self._on_first_token: Callable[[], None] | None = None
        super().__init__(model_path, **options)
        self._first_author = self._author
        # Kept, because llama.cpp keeps only its address.
        self._abort_callback = llama_cpp.ggml_abort_callback(_STRLEN)
        llama_cpp.llama_set_abort_callback(self.ctx, self._abort_callback, self.hang_up.address)

    @contextmanager
    def request(self, tenant: str | None, on_first_token: Callable[[], None]) -> Iterator[None]:
        """One request of a tenant."""
        self._serve_tenant(tenant)
        if not self._reuse:
            self.reset()
        self.completion_tokens = 0
        self._on_first_token = on_first_token
        try:
            yield
        finally:
            self.hang_up.prefilled()

    def _serve_tenant(self, tenant: str | None) -> None:
        with self._lock:
            if tenant != self._tenant:
                self._save_before_loss(b"", 0)  # under the old tenant: what is in the cells is that one's
                self.reset()
                self._author, self._tenant = self._author_of(tenant), tenant

    def _author_of(self, tenant: str | None) -> Author | None:
        """Whoever signs this tenant's rows; None, and nothing is shared, where that cannot be said."""
        if tenant not in self._authors and self._first_author is not None:
            with self._edge.guard("identity"):
                context = ctx_params_hash(context_params(self, tenant))
                identity = replace(self._first_author.identity, ctx_params_hash=context)
                self._authors[tenant] = replace(self._first_author, identity=identity, tenant=tenant)
        return self._authors.get(tenant)

    def create_completion(self, *args: Any, **kwargs: Any) -> Any:
        """As in llama_cpp.Llama; a grammar that cannot be parsed is a ValueError (I3)."""
        if (grammar := kwargs.get("grammar")) is not None:
            self._check_grammar(grammar)
        return super().create_completion(*args, **kwargs)

    def _check_grammar(self, grammar: LlamaGrammar) -> None:
        sampler = llama_cpp.llama_sampler_init_grammar(
            self._model.vocab, grammar._grammar.encode("utf-8"), grammar._root.encode("utf-8")
        )
        if not sampler:
            raise ValueError("the grammar cannot be parsed")
        llama_cpp.llama_sampler_free(sampler)

    def generate(
        self, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """As in llama_cpp.Llama; ends where the client has gone."""
        with closing(super().generate(tokens, *args, **kwargs)) as steps:
            for token in steps:
                if self._on_first_token is not None:
                    self.hang_up.prefilled()
                    self._on_first_token()
                    self._on_first_token = None
                if self.hang_up.is_set():
                    return
                self.completion_tokens += not llama_cpp.llama_vocab_is_eog(self._model.vocab, token)
                yield token

    def _decode(self, trail: Trail, tokens: Sequence[int]) -> None:
        with self._turns.turn(is_new=self._on_first_token is not None):
            super()._decode(trail, tokens)

    def tokens_of(self, job: Job) -> list[int]:
        """The prompt of a request as llama_cpp would decode it. Raises ValueError for a wrong one."""
        listener = _Listener(self)
        try:
            if job.kind == "completion":
                listener.create_completion(**job.arguments)
            else:
                self._handler()(llama=listener, **job.arguments)
        except _Heard as heard:
            return heard.tokens
        raise ValueError("this chat handler does more than write a prompt")

    def _handler(self) -> Callable[..., Any]:
        # As in llama_cpp.Llama.create_chat_completion.
        template = self.chat_format or ""
        handler: Callable[..., Any] = (
            self.chat_handler
            or self._chat_handlers.get(template)
            or llama_chat_format.get_chat_completion_handler(template)
        )
        return handler

    def reusable_tokens(self, tenant: str | None, tokens: list[int]) -> int:
        """How many tokens of this prompt a request of this tenant would find in the cache."""
        author = self._author_of(tenant)
        if author is None:
            return 0
        return reusable_tokens(self._edge, self._renderer, author.identity, tokens)


class _Heard(Exception):
    """Not an error: it carries a prompt out of llama_cpp's own code."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        super().__init__()


class _Listener:
    """Stands in for a model that may be busy: what only reads is asked of it, and nothing is generated."""

    def __init__(self, llama: llama_cpp.Llama) -> None:
        self._llama = llama

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llama, name)

    def create_completion(self, prompt: str | list[int], **arguments: Any) -> NoReturn:
        next(llama_cpp.Llama._create_completion(self, prompt, **arguments))  # type: ignore[arg-type]
        raise AssertionError("a completion has begun without generating")

    def set_seed(self, seed: int) -> None:
        """The model's own is not touched."""

    def generate(self, tokens: list[int], **_: Any) -> NoReturn:
        raise _Heard(tokens)


def check_options(settings: Settings) -> None:
    """Raises ConfigError for an option that llama_cpp.Llama would pass over in silence."""
    known = inspect.signature(llama_cpp.Llama.__init__).parameters.keys() - {"self", "model_path", "kwargs"}
    for model in settings.models:
        for name in sorted(model.options.keys() - known):
            close = difflib.get_close_matches(name, known, 1)
            advice = f": did you mean {close[0]}?" if close else ""
            raise ConfigError(f"model {model.name}: llama_cpp.Llama has no argument {name}{advice}")


class Seat:
    """What answers one request at a time: a context of each model."""

    def __init__(self, models: Mapping[str, ServedLlama]) -> None:
        self._models = models

    def model(self, name: str) -> ServedLlama:
        """One of the models, for questions that generate nothing."""
        return self._models[name]

    def hang_up(self, model: str) -> HangUp:
        """What to set when the client of this model's request has gone."""
        return self._models[model].hang_up

    def answer(self, job: Job, send: Callable[[Reply], None]) -> Done | Failed:
        """Answer a request; what comes before its last word goes to `send`."""
        llama = self._models[job.model]
        hints = llama.asking(parent_key=job.hints.parent_key, wait_ms=job.hints.wait_ms)
        with hints, llama.request(job.tenant, lambda: send(FirstToken())):
            return answers.answer(llama, job, send)

    def close(self) -> None:
        """Make the `shutdown` saves and free the models."""
        for llama in self._models.values():
            llama.close()


class Models:
    """Every model of the server, loaded in this process, once for each seat."""

    def __init__(self, settings: Settings, threads: int) -> None:
        """Load them all. Raises what llama_cpp raises for a file that it cannot load."""
        self._cache: Cache | None = attach(settings.namespace, tier=settings.tier) if settings.reuse else None
        turns = Turns()
        self.seats = tuple(
            Seat({model.name: self._load(settings, model, threads, turns) for model in settings.models})
            for _ in range(settings.parallel)
        )

    def _load(self, settings: Settings, model: ModelSettings, threads: int, turns: Turns) -> ServedLlama:
        return ServedLlama(
            model.path,
            turns=turns,
            cache=self._cache,
            gates=model.gates,
            reuse=settings.reuse,
            explain_saves=settings.explain_saves,
            audit_rate=settings.audit_rate,
            **{"n_threads": threads, "n_threads_batch": threads, "verbose": False, **model.options},
        )

    def reusable_tokens(self, job: Job) -> tuple[int, int]:
        """Tokens of the prompt, and how many of them the cache has. Raises ValueError for a wrong request."""
        llama = self.seats[0].model(job.model)
        tokens = llama.tokens_of(job)
        return len(tokens), llama.reusable_tokens(job.tenant, tokens)

    def decision_fingerprint(self, model: str, tenant: str | None) -> str:
        """What decisions of this model for this tenant depend on."""
        asked = [DecisionModel(self.seats[0].model(model)).decision_fingerprint, tenant]
        return hashlib.sha256(msgspec.json.encode(asked)).hexdigest()

    def close(self) -> None:
        """Make the `shutdown` saves and free everything."""
        for seat in self.seats:
            seat.close()
        if self._cache is not None:
            self._cache.close()
