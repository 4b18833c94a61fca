"""Serve models over HTTP, as OpenAI does, with the cache behind them.

Leaves out: the coordinator, which runs by itself (`shmcache-coordinator`): without one everything is served,
and nothing is shared.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from shmcache.config import LOG_LEVELS
from shmcache.errors import ConfigError

HELP = "serve models with an OpenAI-compatible API"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All settings; those of the file (--config) are overruled by the command line."""
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="[NAME=]PATH",
        help="a GGUF file, and its name for clients (default: the file's); again for more",
    )
    parser.add_argument(
        "--llama",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument of llama_cpp.Llama for these models, like n_ctx=8192; again for more",
    )
    parser.add_argument(
        "--gate",
        action="append",
        default=[],
        metavar="KEY=TOKENS",
        help="when a state is worth saving, like min_tokens=256; again for more",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file with the same settings")
    parser.add_argument("--host", help="address to listen at (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port, 0 for any free one (default: 8000)")
    parser.add_argument("--workers", type=int, help="processes with the models each (default: 2)")
    parser.add_argument(
        "--parallel", type=int, help="requests under way in each worker, a context for each (default: 1)"
    )
    parser.add_argument("--tier", help="where states are saved: ram_file, ram or disk (default: ram_file)")
    parser.add_argument(
        "--waiting", type=int, help="requests that may wait before others get 503 (default: 64)"
    )
    parser.add_argument("--api-keys", metavar="FILE", help="lines of a key and its tenant")
    parser.add_argument(
        "--stop-s", type=float, help="seconds that open requests get once the server stops (default: 30)"
    )
    add_explain_saves(parser)
    parser.add_argument(
        "--audit-rate",
        type=float,
        metavar="SHARE",
        help="of the hits, 0 to 1, that are computed anew and compared with their state (default: 0)",
    )
    parser.add_argument("--log-level", choices=LOG_LEVELS, help="of the log on stderr (default: info)")
    parser.add_argument(
        "--no-reuse", dest="reuse", action="store_false", default=None, help="compute every prompt anew"
    )


def add_explain_saves(parser: argparse.ArgumentParser) -> None:
    """The option of every command that runs models."""
    parser.add_argument(
        "--explain-saves",
        action="store_true",
        default=None,
        help="log, at level info, why something was not saved",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends it."""
    try:
        from shmcache.workers.serve.master import Server  # noqa: PLC0415
        from shmcache.workers.serve.settings import Settings, load  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"{error}: pip install 'shmcache[serve,llama]'") from error
    table = {**dict(map(key_value, arguments.llama)), "gates": dict(map(key_value, arguments.gate))}
    models = {name: {"path": path, **table} for name, path in map(_named, arguments.model)}
    if len(models) < len(arguments.model):
        raise ConfigError("two models have one name: give each its own (NAME=PATH)")
    flags = {name: getattr(arguments, name, None) for name in Settings.__struct_fields__ if name != "models"}
    Server(load(flags, models, arguments.config)).run()
    return 0


def _named(model: str) -> tuple[str, str]:
    name, equals, path = model.partition("=")
    return (name, path) if equals else (Path(model).stem, model)


def key_value(given: str) -> tuple[str, Any]:
    """A name and a JSON value, or a string where it is none."""
    name, equals, value = given.partition("=")
    if not equals:
        raise ConfigError(f"{given!r} is not KEY=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
