"""Why is this prompt a hit or a miss? The row that it would get, or what stands in the way.

    prompt ─► tokens ─► rendered bytes          by the model's own vocabulary, weights not loaded
    index  ─► contexts of this model's rows     each a way in which a worker was set up
    hit    ─► the longest row under each context
    miss   ─► the row that goes along the furthest, and the first byte that differs; or, where no row is
              of this model, which models the rows are of

Leaves out: what workers keep live, which is not shared.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shmcache import kvc
from shmcache.errors import ConfigError, CorruptSlab, ForeignObject
from shmcache.identity import Identity, fingerprint, gguf_quant
from shmcache.index import Row
from shmcache.key import PrefixWalk
from shmcache.protocol import Tier
from shmcache.shm import Mapping
from shmcache.view import View, look

if TYPE_CHECKING:
    from shmcache.workers.render import Renderer, Text

HELP = "which row a prompt would hit, or why it would miss"
_CONTEXT_BYTES = 30


class Hit(msgspec.Struct, frozen=True):
    """The longest row under one context."""

    context: str
    key: str
    tier: str
    reused_tokens: int
    prompt_tokens: int


class Miss(msgspec.Struct, frozen=True):
    """The row under one context that goes along with the prompt the furthest."""

    context: str
    key: str
    equal_bytes: int
    row_bytes: int
    prompt_goes_on: str
    row_goes_on: str


class Explanation(msgspec.Struct, frozen=True):
    """All that can be said. other_models is filled where no row is of this model."""

    model: str
    prompt_bytes: int
    prompt_tokens: int
    hits: list[Hit]
    misses: list[Miss]
    other_models: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The prompt and the model."""
    parser.add_argument("--model", type=Path, required=True, metavar="GGUF", help="the model that is asked")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prompt", type=Path, metavar="FILE", help="the prompt; default: standard input")
    what.add_argument("--chat", type=Path, metavar="FILE", help="a JSON list of messages instead")


def run(arguments: argparse.Namespace) -> int:
    """Print the explanation; 1 where the prompt would miss."""
    explanation = explain(arguments.namespace, arguments.model, _prompt(arguments))
    if arguments.json:
        print(msgspec.json.encode(explanation).decode())
    else:
        print("\n".join(_report(explanation)))
    return 0 if explanation.hits else 1


def _prompt(arguments: argparse.Namespace) -> str | list[dict[str, str]]:
    try:
        if arguments.chat is not None:
            messages: list[dict[str, str]] = json.loads(arguments.chat.read_text())
            return messages
        return arguments.prompt.read_text() if arguments.prompt is not None else sys.stdin.read()
    except (OSError, ValueError) as error:
        raise ConfigError(f"the prompt cannot be read: {error}") from error


def explain(namespace: str, model: Path, prompt: str | list[dict[str, str]]) -> Explanation:
    """Look a prompt up under every context that this model has rows of.

    Raises:
        NoCoordinator, ForeignObject, LayoutMismatch: of the namespace.
        ConfigError: of the model's file.
    """
    hits: list[Hit] = []
    misses: list[Miss] = []
    others: set[str] = set()
    asked = Prompt(model, prompt)
    text, renderer = asked.text, asked.renderer
    with look(namespace) as view:
        model_fp, quant = fingerprint(model), gguf_quant(model)
        for context, rows in _rows_by_context(view, model_fp, others):
            identity = Identity(model_fp=model_fp, quant=quant, ctx_params_hash=context)
            hit = _hit(view, identity, text)
            if hit is not None:
                hits.append(hit)
            elif (miss := _nearest(view, context, rows, text, renderer)) is not None:
                misses.append(miss)
    return Explanation(
        model=f"{model.name} {model_fp.hex()[:16]}",
        prompt_bytes=len(text.text),
        prompt_tokens=len(text.tokens),
        hits=hits,
        misses=misses,
        other_models=[] if hits or misses else sorted(others),
    )


class Prompt:
    """A prompt as a worker renders it, and the vocabulary that did so, loaded for as long as this lives.

    text      tokenised as create_completion and create_chat_completion do.
    renderer  of the same vocabulary, for the tokens of rows.
    """

    def __init__(self, model: Path, prompt: str | list[dict[str, str]]) -> None:
        """Load the vocabulary only, and tokenise. Raises ConfigError where the file is no model."""
        from llama_cpp import Llama  # noqa: PLC0415 (the other tools do without it)

        from shmcache.workers.render import Renderer  # noqa: PLC0415
        from shmcache.workers.state import ModelVocabulary  # noqa: PLC0415

        try:
            # Kept, because the renderer asks its vocabulary at each token that it has not seen.
            self._llama = Llama(os.fspath(model), vocab_only=True, verbose=False)
        except ValueError as error:
            raise ConfigError(f"{model} cannot be loaded: {error}") from error
        self.renderer = Renderer(ModelVocabulary(self._llama))
        tokens = self._of_text(prompt) if isinstance(prompt, str) else self._of_chat(prompt)
        self.text: Text = self.renderer.render(tokens)

    def _of_text(self, prompt: str) -> list[int]:
        llama = self._llama
        begin = [llama.token_bos()] if llama._model.add_bos_token() and llama.token_bos() >= 0 else []
        return begin + llama.tokenize(prompt.encode(), add_bos=False, special=True)

    def _of_chat(self, messages: list[dict[str, str]]) -> list[int]:
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter  # noqa: PLC0415

        llama = self._llama
        template = llama.metadata.get("tokenizer.chat_template")
        if template is None:
            raise ConfigError(f"{Path(llama.model_path).name} has no chat template: give the prompt as text")
        formatter = Jinja2ChatFormatter(
            template=template,
            eos_token=llama._model.token_get_text(llama.token_eos()),
            bos_token=llama._model.token_get_text(llama.token_bos()),
        )
        chat = formatter(messages=messages).prompt  # type: ignore[arg-type]
        return llama.tokenize(chat.encode(), add_bos=False, special=True)


def _rows_by_context(view: View, model_fp: bytes, others: set[str]) -> Iterator[tuple[bytes, list[Row]]]:
    """Rows of this model by context; names of other models are added to `others`."""
    by_context: dict[bytes, list[Row]] = {}
    for row in view.rows():
        try:
            meta = view.meta(row)
        except (OSError, CorruptSlab, ForeignObject):
            continue
        if meta.model_fp == model_fp:
            by_context.setdefault(meta.ctx_params_hash, []).append(row)
        else:
            others.add(f"{meta.model_name or 'unnamed'} {meta.quant_name} {meta.model_fp.hex()[:16]}")
    yield from sorted(by_context.items())


def _hit(view: View, identity: Identity, text: Text) -> Hit | None:
    """The row that a worker of this identity would restore: the first that ends between two tokens."""
    assert view.reader is not None
    for found in view.reader.candidates(PrefixWalk(identity.seed, text.text), len(text.text)):
        tokens = text.tokens_at(found.row.text_bytes)
        if tokens is not None:
            return Hit(
                context=identity.ctx_params_hash.hex()[:16],
                key=found.row.key.hex(),
                tier=Tier(found.row.tier).name.lower(),
                reused_tokens=min(tokens, len(text.tokens) - 1),
                prompt_tokens=len(text.tokens),
            )
    return None


def _nearest(view: View, context: bytes, rows: list[Row], text: Text, renderer: Renderer) -> Miss | None:
    best: Miss | None = None
    for row in rows:
        try:
            with Mapping.open(view.slab_path(Tier(row.tier), row.key)) as mapping:
                theirs = renderer.render(kvc.parse(mapping.bytes).token_ids.tolist()).text
        except (OSError, CorruptSlab, ForeignObject):
            continue
        equal = len(os.path.commonprefix([text.text, theirs]))  # noqa: RUF071 (bytes, not paths)
        if best is None or equal > best.equal_bytes:
            best = Miss(
                context=context.hex()[:16],
                key=row.key.hex(),
                equal_bytes=equal,
                row_bytes=len(theirs),
                prompt_goes_on=_excerpt(text.text, equal),
                row_goes_on=_excerpt(theirs, equal),
            )
    return best


def _excerpt(text: bytes, at: int) -> str:
    """A few bytes on both sides of the place where two texts part."""
    before = text[max(0, at - _CONTEXT_BYTES) : at].decode("utf-8", "backslashreplace")
    after = text[at : at + _CONTEXT_BYTES].decode("utf-8", "backslashreplace")
    return f"{before}▸{after}" if at < len(text) else f"{before}▸ (ends here)"


def _report(found: Explanation) -> Iterator[str]:
    yield f"model   {found.model}"
    yield f"prompt  {found.prompt_bytes:,} rendered bytes, {found.prompt_tokens:,} tokens"
    for hit in found.hits:
        yield (
            f"hit     {hit.reused_tokens:,} of {hit.prompt_tokens:,} tokens from row {hit.key[:16]} "
            f"in {hit.tier} (context {hit.context})"
        )
    for miss in found.misses:
        yield f"miss    row {miss.key[:16]} is nearest (context {miss.context})"
        yield f"        equal for {miss.equal_bytes:,} bytes of the row's {miss.row_bytes:,}, then:"
        yield f"        prompt  {miss.prompt_goes_on!r}"
        yield f"        row     {miss.row_goes_on!r}"
    if not found.hits and not found.misses:
        yield "miss    no row is of this model's content"
        for model in found.other_models:
            yield f"        rows of {model}"
