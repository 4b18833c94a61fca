"""A start over whatever lies in the tiers: many files, and files that are almost rows."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from crc32c import crc32c
from mutants import corpus, mutants, of_key, reference
from support import (
    PIECES,
    TOKEN_IDS,
    Namespace,
    eventually,
    identity,
    longest,
    meta,
    payload_of,
    prompt,
    save,
)

from shmcache import kvc, shm
from shmcache.check import check
from shmcache.errors import CorruptSlab
from shmcache.key import row_address
from shmcache.tiers import base
from shmcache.tiers.base import HandOver, file_name

WHO = identity()
SHORT = prompt(1000)
TIERS = ["ram_file", "disk"]  # those whose files outlive a coordinator


class Files:
    """Where the files of one tier lie, before its coordinator starts and after."""

    def __init__(self, space: Namespace, tier: str, root: Path) -> None:
        self.hand_overs = space.names.tier(tier, 0) / "in"
        self.rows = root / space.name if tier == "disk" else space.names.tier(tier, 0)
        self._is_disk = tier == "disk"
        for path in (space.names.directory, self.hand_overs.parent, self.hand_overs, self.rows):
            shm.make_directory(path)

    def path(self, key: bytes) -> Path:
        directory = self.rows / f"{key[0]:02x}" if self._is_disk else self.rows
        if not directory.is_dir():
            shm.make_directory(directory)
        return directory / file_name(key)

    def all(self) -> list[Path]:
        return list(self.rows.glob("*/*.kvc" if self._is_disk else "*.kvc"))


def plant(path: Path, content: bytes, size_bytes: int | None = None) -> None:
    """A file of ours, with a hole at its end where size_bytes is more than its content."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    os.write(fd, content)
    os.ftruncate(fd, len(content) if size_bytes is None else size_bytes)
    os.close(fd)


# ---- files that are almost rows


@pytest.mark.parametrize(
    ("count", "rounds"),
    [(150, 1), pytest.param(1_000, 12, marks=[pytest.mark.stress, pytest.mark.timeout(0)])],
)
@pytest.mark.parametrize("tier", TIERS)
def test_a_directory_full_of_mutants_costs_a_miss_each_at_most_and_no_start(
    space: Namespace, tmp_path: Path, tier: str, count: int, rounds: int
) -> None:
    flags = (f"--disk-dir={tmp_path}", "--disk-bytes=1G")
    files = Files(space, tier, tmp_path)
    space.start(*flags)
    cache = space.cache(tier=tier)
    assert save(cache, WHO, SHORT, b"shorter")
    space.stop()
    for number in range(rounds):
        planted = _plant_mutants(files, 100 * rounds + number, count)
        space.start(*flags)
        eventually(lambda: not list(files.hand_overs.iterdir()))
        eventually(lambda: cache.connection.reader() is not None)
        eventually(lambda: space.stat("saves_in_flight") == 0)
        answers = {text: longest(cache, WHO, text) for text in planted}
        for text, content in planted.items():
            answer = answers[text]
            assert answer is not None
            assert answer[1] == b"shorter" or answer[1] == reference(content).payload
            assert answer[1] == b"shorter" or _is_whole(content)
        counters = cache.statistics().counters
        assert counters["corrupt_rows"] <= (number + 1) * count
        assert counters["cache_faults"] == 0

        assert {text: longest(cache, WHO, text) for text in planted} == answers
        assert cache.statistics().counters["corrupt_rows"] == counters["corrupt_rows"], "one miss each"
        eventually(lambda: all(finding.kind == "file" for finding in check(space.name)))
        left = {path.name for path in files.all()} - {f"{row}.kvc" for row in _rows(space)}
        assert all(_version(files, name) not in (None, kvc.VERSION) for name in left), "only theirs stay"

        said = space.log()
        space.restart(*flags)
        assert "is removed" not in space.log()[len(said) :], "never the same failure twice"
        assert payload_of(cache, WHO, SHORT) == b"shorter"
        space.stop()
        for path in files.all():
            if path.name != file_name(row_address(WHO.seed, SHORT).key):
                path.unlink()


def _plant_mutants(files: Files, seed: int, count: int) -> dict[bytes, bytes]:
    """Mutants under the names of rows, one in ten of them handed over instead; by the text of the row."""
    rows = corpus(seed)
    make, planted = mutants(seed, rows), {}
    for number in range(count):
        text = SHORT + prompt(700, f"mutant {seed} {number}")
        key = row_address(WHO.seed, text).key
        planted[text] = make(of_key(rows[number % len(rows)], text)).content
        if number % 10:
            plant(files.path(key), planted[text])
        else:
            plant(files.hand_overs / HandOver(key, number + 1, 0).name, planted[text])
    return planted


def _is_whole(content: bytes) -> bool:
    try:
        kvc.verify_payload(kvc.parse(memoryview(content)))
    except CorruptSlab:
        return False
    return True


def _rows(space: Namespace) -> set[str]:
    reader = space.cache().connection.reader()
    assert reader is not None
    return {found.key.hex() for found in reader.rows()}


def _version(files: Files, name: str) -> int | None:
    return kvc.version_of(files.path(bytes.fromhex(name.removesuffix(".kvc"))).read_bytes())


# ---- many files


@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=[pytest.mark.stress])])
@pytest.mark.parametrize("tier", TIERS)
def test_a_start_over_many_files_tells_how_far_it_is_and_keeps_the_order_of_use_and_the_hits(
    tmp_path: Path, tier: str, count: int
) -> None:
    with Namespace(ram_file_bytes="6G" if count > 10_000 else "200M", max_rows=count + count // 4) as space:
        files = Files(space, tier, tmp_path)
        texts, size_bytes = _plant_rows(files, count)
        flags = (f"--disk-dir={tmp_path}", "--disk-bytes=6G")
        ready = space.start(*flags, patch=_tell_often(count), within_s=120)
        assert f" rows={count} " in ready
        assert f"of {count} files read" in space.log()
        assert "is removed" not in space.log()

        coldest, warmest = texts[0], texts[-1]
        cache = space.cache(tier=tier)
        hit = cache.get(row_address(WHO.seed, coldest).key)
        assert hit is not None
        hit.use()
        hit.close()
        space.stop()
        assert _hits(files, coldest) == 1, "the first of them had none"
        assert _hits(files, warmest) == (count - 1) % 1000

        half = count // 2
        option = "--disk-bytes" if tier == "disk" else "--ram-file-bytes"
        assert f" rows={half} " in space.start(*flags, f"{option}={half * size_bytes}", within_s=120)
        kept = {file_name(row_address(WHO.seed, text).key) for text in (coldest, *texts[-half + 1 :])}
        eventually(lambda: len(files.all()) == half, within_s=120)
        assert {path.name for path in files.all()} == kept


def _tell_often(count: int) -> Callable[[], None]:
    def patch() -> None:
        if count < 10_000:
            base.PROGRESS_S = 0.0

    return patch


def _plant_rows(files: Files, count: int) -> tuple[list[bytes], int]:
    """Texts in the order of their last use, and the size of each file: all but its head is a hole."""
    texts = [number.to_bytes(4, "big") * 300 for number in range(count)]
    payload_bytes = 16_000
    payload_crc32c = crc32c(bytes(payload_bytes))
    heads = {}
    for number, text in enumerate(texts):
        said = meta(WHO, text, last_used_unix_s=1_700_000_000 + number, hit_count=number % 1000)
        heads[text] = kvc.encode_head(said, PIECES, TOKEN_IDS, payload_bytes, payload_crc32c)
    for text in random.Random(count).sample(texts, count):
        size_bytes = len(heads[text]) + payload_bytes
        plant(files.path(row_address(WHO.seed, text).key), heads[text], size_bytes)
    return texts, size_bytes


def _hits(files: Files, text: bytes) -> int:
    content = files.path(row_address(WHO.seed, text).key).read_bytes()
    return kvc.parse(memoryview(content)).meta.hit_count
