"""E03: a structurally fine but unusable entry: load, fail, retry for ever; or a bad file stops the start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support import PAYLOAD_OFFSET, Namespace, eventually, identity, longest, needs_root, prompt, save

from shmcache.check import check
from shmcache.key import row_address
from shmcache.tiers.base import file_name

WHO = identity()
SHORT, LONG = prompt(1000), prompt(2000)
STATE = os.urandom(20_000)
BAD = [
    "payload deleted",
    "payload zeroed",
    "payload random",
    "all zeroed",
    "all random",
    "empty",
    "one byte",
    "a bit of the head flipped",
    "a bit of the payload flipped",
    "future version",
    "version 1",
    "directory",
    "symlink",
    "fifo",
    "mode",
    "another user",
    "gone",
]
THEIRS = {"future version", "version 1", "directory", "symlink", "fifo", "mode", "another user"}


def path_of(space: Namespace, tier: str, root: Path) -> Path:
    key = row_address(WHO.seed, LONG).key
    if tier == "disk":
        return root / space.name / f"{key[0]:02x}" / file_name(key)
    return space.names.tier(tier, 0) / file_name(key)


def spoil(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "payload deleted":
        del content[PAYLOAD_OFFSET:]
    elif how == "payload zeroed":
        content[PAYLOAD_OFFSET:] = bytes(len(content) - PAYLOAD_OFFSET)
    elif how == "payload random":
        content[PAYLOAD_OFFSET:] = os.urandom(len(content) - PAYLOAD_OFFSET)
    elif how in ("all zeroed", "all random"):
        content = bytearray(os.urandom(len(content)) if how == "all random" else len(content))
    elif how in ("empty", "one byte"):
        del content[1 if how == "one byte" else 0 :]
    elif how.startswith("a bit"):
        content[100 if "head" in how else -1] ^= 4
    elif how in ("future version", "version 1"):
        content[3] = 1 if how == "version 1" else 200
    path.unlink()
    if how == "directory":
        path.mkdir()
    elif how == "symlink":
        path.symlink_to("/etc/passwd")
    elif how == "fifo":
        os.mkfifo(path, 0o600)
    elif how != "gone":
        path.write_bytes(content)
        path.chmod(0o644 if how == "mode" else 0o600)
        if how == "another user":
            os.chown(path, 64_001, 64_001)


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=needs_root) if how == "another user" else how for how in BAD]
)
@pytest.mark.parametrize("tier", ["ram_file", "disk"])
def test_case_e03_each_bad_entry_costs_one_miss_at_most_and_no_start(
    space: Namespace, tmp_path: Path, tier: str, how: str
) -> None:
    flags = (f"--disk-dir={tmp_path}",)
    space.start(*flags)
    cache = space.cache(tier=tier)
    assert save(cache, WHO, SHORT, b"shorter")
    assert save(cache, WHO, LONG, STATE)
    cache.close()
    space.kill()
    path = path_of(space, tier, tmp_path)
    spoil(path, how)
    stranger = path.with_name("notes.txt")
    stranger.write_text("a stranger's")

    space.start(*flags)
    for _ in range(3):
        assert longest(cache, WHO, LONG) == (len(SHORT), b"shorter")
    counters = cache.statistics().counters
    assert counters["corrupt_rows"] <= 1
    assert counters["cache_faults"] == 0
    assert stranger.read_text() == "a stranger's"
    assert space.log().count("is dropped") + space.log().count("is removed") <= 1
    if how not in THEIRS:
        eventually(lambda: not path.exists())
        assert save(cache, WHO, LONG, STATE), "and the key is free for a good one"
        assert longest(cache, WHO, LONG) == (len(LONG), STATE)
        stranger.unlink()
        eventually(lambda: check(space.name) == [])
    else:
        assert os.path.lexists(path), "what another version or somebody else made is left alone"
    space.restart(*flags)
    assert longest(cache, WHO, LONG) in ((len(LONG), STATE), (len(SHORT), b"shorter"))
    assert space.log().count("is dropped") + space.log().count("is removed") <= 1, (
        "never the same failure twice"
    )
