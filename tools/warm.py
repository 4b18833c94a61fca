"""Fill the cache ahead of traffic: compute prompts and chats here, so that workers find their states.

    file ─► prompt or chat ─► one token of a reply ─► the rows that any worker would leave

A worker only finds them if it runs the same model file with the same context settings (--llama) and tenant.
A prompt that is there already costs a lookup.

Owner: this process, which loads the model.
Leans on: SharedLlama hands its rows over while it goes on; `flush` waits until they are published.
Leaves out: which prompts are worth it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shmcache.client import Cache, attach
from shmcache.config import Gates
from shmcache.errors import ConfigError, NoCoordinator
from shmcache.tools.serve import add_explain_saves, key_value
from shmcache.tools.text import bar, log_to_stderr, table
from shmcache.view import look

if TYPE_CHECKING:
    from shmcache.client import Slab
    from shmcache.workers.seam import Joined
    from shmcache.workers.shared_llama import SharedLlama
    from shmcache.workers.trail import Trail

HELP = "compute prompts ahead of traffic"

_PUBLISHED_WITHIN_MS = 60_000

Asked = str | dict[str, Any]


class Warmed(msgspec.Struct, frozen=True):
    """One file's prompt. reused tokens were there already."""

    file: str
    prompt_tokens: int
    reused_tokens: int
    prefilled_tokens: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model as workers run it, and what to compute."""
    parser.add_argument("--model", type=Path, required=True, metavar="GGUF", help="the model's file")
    parser.add_argument(
        "--prompt", type=Path, action="append", default=[], metavar="FILE", help="a prompt; again for more"
    )
    parser.add_argument(
        "--chat",
        type=Path,
        action="append",
        default=[],
        metavar="FILE.json",
        help="a list of messages, or an object with messages and tools; again for more",
    )
    parser.add_argument(
        "--llama",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument of llama_cpp.Llama, like n_ctx=8192: what the workers have; again for more",
    )
    parser.add_argument(
        "--gate",
        action="append",
        default=[],
        metavar="KEY=TOKENS",
        help="when a state is worth saving, like min_tokens=256; again for more",
    )
    parser.add_argument("--tenant", metavar="NAME", help="whose rows these are (default: nobody's)")
    add_explain_saves(parser)
    parser.add_argument("--tier", default="ram_file", help="where they are saved (default: ram_file)")


def run(arguments: argparse.Namespace) -> int:
    """Compute everything; 1 where some row was not published in time."""
    prompts = [(file, _text(file)) for file in arguments.prompt] + [
        (file, _chat(file)) for file in arguments.chat
    ]
    if not prompts:
        raise ConfigError("there is nothing to compute: --prompt FILE or --chat FILE.json")
    with look(arguments.namespace) as view:
        if not view.coordinator_runs:
            raise NoCoordinator(arguments.namespace)
    with (
        closing(attach(arguments.namespace, tier=arguments.tier)) as cache,
        closing(_load(arguments, cache)) as llama,
    ):
        done = [_warm(llama, str(file), prompt) for file, prompt in prompts]
        is_published = cache.flush(_PUBLISHED_WITHIN_MS)
    if arguments.json:
        print(msgspec.json.encode(done).decode())
    else:
        print("\n".join(_report(done)))
    return 0 if is_published else 1


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the prompt cannot be read: {error}") from error


def _chat(file: Path) -> dict[str, Any]:
    try:
        chat = json.loads(_text(file))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    call = {"messages": chat} if isinstance(chat, list) else chat
    if not isinstance(call, dict) or not isinstance(call.get("messages"), list):
        raise ConfigError(f"{file} holds no messages: a list of them, or an object with `messages`")
    return {name: value for name, value in call.items() if name in ("messages", "tools", "tool_choice")}


def _load(arguments: argparse.Namespace, cache: Cache) -> SharedLlama:
    """A SharedLlama that shows how far it is. llama_cpp is imported only here."""
    if not arguments.model.is_file():
        raise ConfigError(f"there is no file {arguments.model}")
    try:
        from shmcache.workers.shared_llama import Prompt, SharedLlama  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"{error}: pip install 'shmcache[llama]'") from error

    class Watched(SharedLlama):
        """Draws a bar while it computes a prompt."""

        _show: Callable[[int], None] | None = None

        def _evaluate(self, prompt: Prompt, joined: Joined, slabs: dict[int, Slab]) -> None:
            with bar(len(joined.tokens), "tokens") as self._show:
                super()._evaluate(prompt, joined, slabs)

        def _decode(self, trail: Trail, tokens: Sequence[int]) -> None:
            super()._decode(trail, tokens)
            if self._show is not None:
                self._show(len(trail))

    gates = Gates(**dict(map(key_value, arguments.gate)))
    options = {"verbose": False, **dict(map(key_value, arguments.llama))}
    if arguments.explain_saves:
        log_to_stderr()
        options["explain_saves"] = True
    return Watched(str(arguments.model), cache=cache, gates=gates, tenant=arguments.tenant, **options)


def _warm(llama: SharedLlama, file: str, prompt: Asked) -> Warmed:
    """Compute one prompt; the one token of a reply makes llama_cpp go through all of it."""
    if isinstance(prompt, str):
        llama.create_completion(prompt, max_tokens=1, temperature=0.0)
    else:
        llama.create_chat_completion(**prompt, max_tokens=1, temperature=0.0)
    report = llama.last_report
    return Warmed(file, report.prompt_tokens, report.reused_tokens, report.prefilled_tokens)


def _report(done: list[Warmed]) -> Iterator[str]:
    yield from table(
        ("file", "tokens", "there already", "computed"),
        [
            (one.file, f"{one.prompt_tokens:,}", f"{one.reused_tokens:,}", f"{one.prefilled_tokens:,}")
            for one in done
        ],
    )
