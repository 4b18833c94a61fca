"""Frozen settings, checked once: what may a namespace hold, and when is a state worth saving?

Three sources, the later over the earlier: a TOML file, the environment (`SHMCACHE_RAM_FILE_BYTES`),
the command line (`--ram-file-bytes`). One name everywhere, spelled as each source spells names.

Owner: whoever starts a coordinator or a worker. Readers: everybody, and nobody changes a value.
Leaves out: the command line itself (server, tools) and what a machine has free (server).
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from shmcache.errors import ConfigError

NAMESPACE = re.compile(r"[a-z0-9-]{1,32}")
SIZES = (
    "ram_bytes",
    "ram_file_bytes",
    "disk_bytes",
    "staging_bytes",
    "disk_write_bytes_per_s",
    "decisions_bytes",
)
TIERS = ("ram", "ram_file", "disk")
DURABILITIES = ("full", "commit", "memory")
Eviction = Literal["lru", "cost"]
Admission = Literal["always", "second_use"]
LOG_LEVELS = ("debug", "info", "warning", "error")
MAX_ROWS_LIMIT = 4_000_000

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+)\s*([smhd]?)", re.IGNORECASE)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(value: str | int) -> int:
    """Bytes from `48M`, `1.5GiB`, `512k` or a plain number. Raises ConfigError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    # A settings file may hold anything here: a fraction, a list, a table.
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(f"{value!r} is not a size: write bytes, or a number with K, M, G or T")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_duration(value: str) -> int:
    """Seconds from `90`, `90s`, `15m`, `12h` or `7d`. Raises ConfigError."""
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        raise ConfigError(f"{value!r} is not a duration: write seconds, or a number with s, m, h or d")
    return int(match[1]) * _SECONDS[match[2].lower()]


def parse_count(value: str) -> int:
    """A plain number. Raises ConfigError."""
    if not value.strip().isdecimal():
        raise ConfigError(f"{value!r} is not a number")
    return int(value)


def per_tier(name: str, value: str, parse: Callable[[str], int]) -> dict[str, int]:
    """Values by tier, from `7d` for all or `ram_file=12h,disk=7d`; tiers that are not named have none.

    Raises ConfigError, also for 0: it would keep nothing.
    """
    named: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in value.split(","))):
        tier, is_named, text = part.rpartition("=")
        tiers = (tier.strip(),) if is_named else TIERS
        if not set(tiers) <= set(TIERS):
            raise ConfigError(f"{name} ({value}) names {tier!r}: it must be one of {', '.join(TIERS)}")
        for one in tiers:
            if one in named or (named and not is_named):
                raise ConfigError(f"{name} ({value}) says twice what holds for {one}")
            named[one] = parse(text)
        if not named[tiers[0]]:
            raise ConfigError(f"{name} ({value}) must be at least 1")
    return named


def check_namespace(namespace: str) -> str:
    """The namespace itself, or ConfigError: it becomes part of file, queue and segment names."""
    if NAMESPACE.fullmatch(namespace) is None:
        raise ConfigError(f"namespace {namespace!r} must match [a-z0-9-]{{1,32}}")
    return namespace


class CoordinatorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one coordinator.

    namespace               whose index, slabs and queue these are.
    ram_bytes               budget of the ram tier; 0, the default, means none: ram_file does the same
                            work and survives the coordinator.
    ram_file_bytes          budget of the ram_file tier; None takes half of what /dev/shm has free at
                            start, because the model's buffers and other programs want the rest.
    disk_dir                directory of the disk tier; None, the default, means none.
    disk_bytes              its budget; None takes half of what the file system has free: disk is the
                            cheap tier, and the largest.
    staging_bytes           most that may be on its way to the disk in /dev/shm; None takes a quarter of
                            the ram_file budget.
    disk_write_bytes_per_s  bound of the copies to disk, which spares others who use it; 0: none.
    max_rows                capacity of the index in rows; 65,536 rows of 40 MB are 2.6 TB, more than
                            any memory tier holds, in 36 MB of index.
    tier_rows               most rows of a tier, beside its bytes: a number, or `ram_file=500,disk=20000`.
    max_age                 rows leave when they were made so long ago: `7d`, or `ram_file=12h,disk=7d`;
                            pinned ones do not. None by default.
    tenant_share            most of a tier's bytes that one tenant holds while others have rows there; 1: all.
    disk_admission          `second_use` takes a row to disk when it is asked for the second time, or goes on
                            from one there: prompts that come once never wear the disk out.
    spill_on_evict          a memory tier that is nearly full hands its coldest rows on to the disk, as new
                            rows: the disk is written more, and less is computed again.
    eviction                who leaves a full tier: `lru` the row without use the longest, `cost` the one
                            that is expected to spare the least prefill for its bytes.
    decisions_rows          capacity of the decision table: 16,384 take 7.5 MB of /dev/shm.
    decisions_bytes         beside it, for decisions that compress to more than 196 bytes.
    decisions_durability    what an acknowledged decision survives: `full` a power loss, `commit` any
                            kill -9, `memory` nothing but a clean stop.
    decisions_file          SQLite file that keeps them; None takes one in the user's cache directory.
    log_level               of the coordinator's log on stderr.
    """

    namespace: str = "default"
    ram_bytes: int = 0
    ram_file_bytes: int | None = None
    disk_dir: str | None = None
    disk_bytes: int | None = None
    staging_bytes: int | None = None
    disk_write_bytes_per_s: int = 0
    max_rows: int = 65_536
    tier_rows: str = ""
    max_age: str = ""
    tenant_share: float = 1.0
    disk_admission: Admission = "always"
    spill_on_evict: bool = False
    eviction: Eviction = "lru"
    decisions_rows: int = 16_384
    decisions_bytes: int = 4 << 20
    decisions_durability: Literal["full", "commit", "memory"] = "commit"
    decisions_file: str | None = None
    log_level: str = "info"

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        for name in SIZES:
            value = getattr(self, name)
            least = 0 if name in ("ram_bytes", "disk_write_bytes_per_s") else 1
            if value is not None and value < least:
                raise ConfigError(f"{name} ({value}) must be at least {least}")
        if self.disk_dir is None and self.disk_bytes is not None:
            raise ConfigError(f"disk_bytes ({self.disk_bytes}) needs disk_dir (none)")
        if self.disk_dir is None and self.spill_on_evict:
            raise ConfigError("spill_on_evict (true) needs disk_dir (none)")
        if not 1 <= self.max_rows <= MAX_ROWS_LIMIT:
            raise ConfigError(f"max_rows ({self.max_rows}) must be between 1 and {MAX_ROWS_LIMIT}")
        if not 0.0 < self.tenant_share <= 1.0:
            raise ConfigError(f"tenant_share ({self.tenant_share}) must be above 0 and at most 1")
        self.rows_by_tier()
        self.max_age_s_by_tier()
        if not 1 <= self.decisions_rows <= MAX_ROWS_LIMIT:
            raise ConfigError(
                f"decisions_rows ({self.decisions_rows}) must be between 1 and {MAX_ROWS_LIMIT}"
            )
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"log_level ({self.log_level}) must be one of {', '.join(LOG_LEVELS)}")

    def rows_by_tier(self) -> dict[str, int]:
        """tier_rows, taken apart."""
        return per_tier("tier_rows", self.tier_rows, parse_count)

    def max_age_s_by_tier(self) -> dict[str, int]:
        """max_age, taken apart, in seconds."""
        return per_tier("max_age", self.max_age, parse_duration)


class Gates(msgspec.Struct, frozen=True, kw_only=True):
    """When a state is worth a row. Tokens, bytes of nothing, milliseconds for the two waits.

    min_tokens               shortest row: below it a restore saves less than the save costs.
    cold_min_tokens          shortest prompt whose head and trimmed anchors are saved.
    cold_max_tokens          deepest anchor that is saved: beyond it one row outweighs many.
    continued_interval       decoded tokens between two `continued` saves.
    boundary_trim_tokens     the trimmed anchor stays this far before the end, where turns differ.
    boundary_align_tokens    its alignment; a multiple of 64, below which kernels change (policy).
    session_resume_wait_ms   how long a lookup may wait for a save in flight.
    evict_save_timeout_ms    how long the blocking reasons, evict and shutdown, may block.
    """

    min_tokens: int = 512
    cold_min_tokens: int = 512
    cold_max_tokens: int = 30_000
    continued_interval: int = 2_048
    boundary_trim_tokens: int = 65
    boundary_align_tokens: int = 256
    session_resume_wait_ms: int = 500
    evict_save_timeout_ms: int = 30_000

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} ({getattr(self, name)}) must not be negative")
        if self.cold_min_tokens < self.min_tokens:
            raise ConfigError(
                f"cold_min_tokens ({self.cold_min_tokens}) must be >= min_tokens ({self.min_tokens})"
            )
        if self.cold_max_tokens < self.cold_min_tokens:
            raise ConfigError(
                f"cold_max_tokens ({self.cold_max_tokens}) must be >= "
                f"cold_min_tokens ({self.cold_min_tokens})"
            )
        if self.continued_interval < 1:
            raise ConfigError(f"continued_interval ({self.continued_interval}) must be at least 1")
        if self.boundary_align_tokens < 64 or self.boundary_align_tokens % 64:
            raise ConfigError(
                f"boundary_align_tokens ({self.boundary_align_tokens}) must be a multiple of 64"
            )


def load(
    flags: Mapping[str, Any], environment: Mapping[str, str] = os.environ, file: Path | None = None
) -> CoordinatorConfig:
    """Settings from flags over environment over file.

    Args:
        flags: values by setting name; None means not given.
        environment: `SHMCACHE_<NAME>` strings.
        file: a TOML file with the same names, dashes or underscores.
    Raises:
        ConfigError: an unknown name, a value of the wrong type, or one out of its range.
    """
    names = CoordinatorConfig.__struct_fields__
    values: dict[str, Any] = _read_file(file, names) if file is not None else {}
    for name in names:
        if (from_environment := environment.get(f"SHMCACHE_{name.upper()}")) is not None:
            values[name] = from_environment
        if flags.get(name) is not None:
            values[name] = flags[name]
    for name in SIZES:
        if values.get(name) is not None:
            try:
                values[name] = parse_size(values[name])
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
    try:
        return msgspec.convert(values, CoordinatorConfig, strict=False)
    except msgspec.ValidationError as error:
        # Our own checks arrive wrapped: the cause carries the message with both values.
        raise ConfigError(str(error.__cause__ or error)) from error


def _read_file(file: Path, names: tuple[str, ...]) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            table = tomllib.load(stream)
    except (OSError, ValueError) as error:  # not TOML, or not even UTF-8
        raise ConfigError(f"settings file {file}: {error}") from error
    values = {name.replace("-", "_"): value for name, value in table.items()}
    if unknown := sorted(set(values) - set(names)):
        raise ConfigError(f"settings file {file}: unknown {', '.join(unknown)}; known: {', '.join(names)}")
    return values
