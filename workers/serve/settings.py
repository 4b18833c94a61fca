"""Frozen settings of a server, checked before anything starts.

Two sources, the second over the first: a TOML file, the command line.

    workers = 2                           the names of Settings
    [models.small]                        a model by its name; what is neither path nor gates is an argument
    path = "small.gguf"                   of llama_cpp.Llama
    n_ctx = 8192
    gates = { min_tokens = 256 }

Owner: whoever starts a server. Readers: its master and workers, and nobody changes a value.
Leaves out: the command line itself (tools/serve), whether llama.cpp can load a model (models).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shmcache.config import LOG_LEVELS, Gates, check_namespace
from shmcache.errors import ConfigError
from shmcache.identity import gguf_quant

MAX_WORKERS = 64
MAX_PARALLEL = 64
MAX_WAITING = 512  # each one is a descriptor on its way, and a process may have 1,024 of those
TIERS = ("ram_file", "ram", "disk")
_Struct = TypeVar("_Struct", bound=msgspec.Struct)

DEFAULT_N_CTX = 4096  # llama_cpp's own 512 is too short for a chat


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One model: `options` are further arguments of llama_cpp.Llama."""

    name: str
    path: str
    options: dict[str, Any]
    gates: Gates = Gates()

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError(f"the model {self.path} has an empty name")
        try:
            gguf_quant(self.path)
        except (OSError, ConfigError) as error:
            raise ConfigError(f"model {self.name}: {error}") from error


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one server.

    models     at least one; the first answers requests that name none.
    namespace  whose cache the workers share.
    tier       where their saves go.
    workers    processes with the models each; two, because one that computes a long prompt must not make
               everybody wait, and each gets its share of the cores.
    parallel   requests that a worker has under way at once, each in a context of its own: computed one after
               the other, first tokens before further ones. Each context takes n_ctx cells of memory.
    host       127.0.0.1: whoever can reach the port can use the models.
    waiting    requests that may wait for a worker, in the whole server, before others are sent away.
    api_keys   a file of keys, each with its tenant; None: everybody is the same tenant.
    stop_s     how long open requests may go on once the server stops.
    reuse      False computes every prompt anew, to compare with.
    explain_saves  log, at level info, why something was not saved.
    audit_rate     share of the hits whose row is computed anew and compared, 0 to 1.
    log_level  of the server's log on stderr.
    """

    models: tuple[ModelSettings, ...]
    namespace: str = "default"
    tier: str = "ram_file"
    workers: int = 2
    parallel: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    waiting: int = 64
    api_keys: str | None = None
    stop_s: float = 30.0
    reuse: bool = True
    explain_saves: bool = False
    audit_rate: float = 0.0
    log_level: str = "info"

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        if not self.models:
            raise ConfigError("there is no model: name at least one (--model PATH)")
        names = [model.name for model in self.models]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"two models are called {', '.join(sorted(twice))}: name them (NAME=PATH)")
        if self.tier not in TIERS:
            raise ConfigError(f"tier ({self.tier}) must be one of {', '.join(TIERS)}")
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"log_level ({self.log_level}) must be one of {', '.join(LOG_LEVELS)}")
        for name, least, most in (
            ("workers", 1, MAX_WORKERS),
            ("parallel", 1, MAX_PARALLEL),
            ("port", 0, 65_535),
            ("waiting", 0, MAX_WAITING),
            ("stop_s", 0, 3_600),
            ("audit_rate", 0, 1),
        ):
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"{name} ({getattr(self, name)}) must be between {least} and {most}")


def model_settings(table: Mapping[str, Any], name: str) -> ModelSettings:
    """One model from its table. Raises ConfigError."""
    options = {key.replace("-", "_"): value for key, value in table.items()}
    path, gates = options.pop("path", None), options.pop("gates", {})
    if not isinstance(path, str):
        raise ConfigError(f"model {name} has no path")
    if unknown := sorted(set(gates) - set(Gates.__struct_fields__)):
        raise ConfigError(f"gates of model {name}: unknown {', '.join(unknown)}")
    return ModelSettings(
        name=name,
        path=str(Path(path).expanduser()),
        options={"n_ctx": DEFAULT_N_CTX, **options},
        gates=_converted(gates, Gates, f"gates of model {name}"),
    )


def load(flags: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]], file: Path | None) -> Settings:
    """Settings from the command line over a file.

    Args:
        flags: values by setting name; None means not given.
        models: tables by model name, as in the file; they come before those of the file.
        file: TOML.
    Raises:
        ConfigError: an unknown name, a value of the wrong type, or one out of its range.
    """
    values = _read_file(file) if file is not None else {}
    tables = {
        **models,
        **{name: table for name, table in values.pop("models", {}).items() if name not in models},
    }
    values |= {name: value for name, value in flags.items() if value is not None}
    if unknown := sorted(set(values) - set(Settings.__struct_fields__)):
        raise ConfigError(f"unknown settings: {', '.join(unknown)}")
    values["models"] = [model_settings(table, name) for name, table in tables.items()]
    return _converted(values, Settings, "settings")


def _read_file(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            table = tomllib.load(stream)
    except (OSError, ValueError) as error:  # not TOML, or not even UTF-8
        raise ConfigError(f"settings file {file}: {error}") from error
    if not all(isinstance(model, dict) for model in _dict(table.get("models", {}), file).values()):
        raise ConfigError(f"settings file {file}: each of models is a table, [models.NAME]")
    return {name.replace("-", "_"): value for name, value in table.items()}


def _dict(value: Any, file: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"settings file {file}: models is a table")
    return value


def _converted(values: Any, kind: type[_Struct], what: str) -> _Struct:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        # Our own checks arrive wrapped: the cause carries the message with both values.
        raise ConfigError(str(error.__cause__ or f"{what}: {error}")) from error
