"""One contract over every tier: what has a name is complete, and nothing that is not ours is touched."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import PAYLOAD_OFFSET, Namespace, identity, needs_root, prompt, slab_file

from shmcache import kvc, shm
from shmcache.errors import CorruptSlab, ForeignObject
from shmcache.key import row_address
from shmcache.protocol import Tier as TierNumber
from shmcache.tiers.base import Broken, HandOver, Slab, Tier, file_name
from shmcache.tiers.disk import DiskTier
from shmcache.tiers.memory import MemoryTier

WHO = identity()
A, B = prompt(1000), prompt(2000)
CONTENT = slab_file(WHO, A, os.urandom(5000))


def key_of(text: bytes) -> bytes:
    return row_address(WHO.seed, text).key


class Place:
    """A tier, how to open it again, and where its files lie."""

    def __init__(self, open_tier: Callable[[], Tier], rows: Path, hand_overs: Path) -> None:
        self._open_tier = open_tier
        self.rows, self.hand_overs = rows, hand_overs
        self.tier = open_tier()

    def reopen(self) -> Tier:
        self.tier.close()
        self.tier = self._open_tier()
        return self.tier

    def row(self, key: bytes) -> Path:
        """Where the slab of a key lies; its directory is there afterwards."""
        self.tier.directory_fd(key)
        nested = self.rows / f"{key[0]:02x}"
        return (nested if nested.is_dir() else self.rows) / file_name(key)

    def put(self, content: bytes = CONTENT, text: bytes = A, token: int = 5) -> HandOver:
        """A complete slab with its name in `in/`."""
        handover = HandOver(key_of(text), token, forget=3)
        path = self.hand_overs / handover.name
        path.write_bytes(content)
        path.chmod(0o600)
        return handover

    def plant(self, content: bytes, text: bytes = A) -> Path:
        """A file at a row's name."""
        path = self.row(key_of(text))
        path.write_bytes(content)
        path.chmod(0o600)
        return path

    def waiting(self) -> list[HandOver]:
        return list(self.tier.handed_over())


@pytest.fixture(params=["ram", "ram_file", "disk"])
def place(request: pytest.FixtureRequest, space: Namespace, tmp_path: Path) -> Iterator[Place]:
    shm.make_directory(space.names.directory)
    number = TierNumber[request.param.upper()]
    path = space.names.tier(request.param, 7)
    if number is TierNumber.DISK:
        rows = tmp_path / space.name
        made = Place(lambda: DiskTier(space.names, tmp_path), rows, path / "in")
    else:
        made = Place(lambda: MemoryTier(number, path), path, path / "in")
    assert made.tier.number is number
    yield made
    made.tier.close()


def test_a_new_tier_is_empty_and_the_owners_alone(place: Place) -> None:
    assert list(place.tier.scan()) == []
    assert list(place.tier.keys()) == []
    assert place.waiting() == []
    place.tier.directory_fd(key_of(A))
    for path in (place.rows, place.hand_overs, place.row(key_of(A)).parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_slab_that_is_linked_lies_there_byte_for_byte_and_is_handed_over_no_more(place: Place) -> None:
    handover = place.put()
    assert place.waiting() == [handover]
    checked = place.tier.check(handover)
    linked = place.tier.link(handover)
    assert linked == checked == place.tier.read(handover.key)
    assert linked.slab_bytes == len(CONTENT)
    assert linked.head.meta.key == handover.key
    assert place.row(handover.key).read_bytes() == CONTENT
    assert stat.S_IMODE(place.row(handover.key).stat().st_mode) == 0o600
    assert place.waiting() == []
    assert list(place.tier.scan()) == [linked]
    assert list(place.tier.keys()) == [handover.key]


def test_a_slab_that_is_set_aside_is_no_row_and_stays_until_it_is_removed(place: Place) -> None:
    key = place.tier.link(place.put()).head.meta.key
    place.tier.set_aside(key)
    assert list(place.tier.scan()) == list(place.tier.keys()) == []
    assert place.tier.asides() == [(key, len(CONTENT))]
    other = place.tier.link(place.put(slab_file(WHO, B, b"b" * 90), text=B)).head.meta.key
    place.tier.link(place.put())
    place.tier.set_aside(other)
    assert [found for found, _ in place.reopen().asides()] == [key, other], "the oldest first"
    assert place.tier.remove_aside(key)
    assert not place.tier.remove_aside(key)
    assert [found for found, _ in place.tier.asides()] == [other]
    assert list(place.tier.keys()) == [key], "a row of the same key is another file"


def test_what_lies_there_lies_there_when_it_is_opened_again(place: Place) -> None:
    linked = place.tier.link(place.put())
    waiting = place.put(text=B)
    assert list(place.reopen().scan()) == [linked]
    assert place.waiting() == [waiting]


def test_the_same_slab_that_is_there_already_stays(place: Place) -> None:
    there = place.plant(CONTENT)
    before = there.stat().st_ino
    assert place.tier.link(place.put()).slab_bytes == len(CONTENT)
    assert there.stat().st_ino == before
    assert place.waiting() == []


@pytest.mark.parametrize(
    "there", ["garbage", "empty", "other key", "other size", "future", "symlink", "mode"]
)
def test_anything_else_that_is_there_is_replaced(place: Place, there: str) -> None:
    contents = {
        "garbage": b"x" * 5000,
        "empty": b"",
        "other key": slab_file(WHO, B, b"x"),
        "other size": slab_file(WHO, A, b"x"),
        "future": CONTENT[:3] + b"\x09" + CONTENT[4:],
        "mode": CONTENT,
    }
    path = place.row(key_of(A))
    if there == "symlink":
        path.symlink_to("/etc/passwd")
    else:
        place.plant(contents[there])
    if there == "mode":
        path.chmod(0o644)
    assert place.tier.link(place.put()).slab_bytes == len(CONTENT)
    assert path.read_bytes() == CONTENT
    assert not path.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert place.waiting() == []


@pytest.mark.parametrize("what", ["directory", pytest.param("another user's file", marks=needs_root)])
def test_what_is_not_ours_at_a_rows_name_is_set_aside_and_never_removed(place: Place, what: str) -> None:
    path = place.row(key_of(A))
    if what == "directory":
        path.mkdir()
    else:
        path.write_bytes(CONTENT)
        os.chown(path, 64_001, 64_001)
    before = path.stat().st_ino
    assert not place.tier.remove(key_of(A))
    assert path.stat().st_ino == before
    assert place.tier.link(place.put()).slab_bytes == len(CONTENT)
    assert path.read_bytes() == CONTENT
    assert place.waiting() == []
    (aside,) = path.parent.glob(f"{path.name}.aside-*")
    assert aside.stat().st_ino == before
    assert list(place.tier.keys()) == [key_of(A)]


@needs_root
def test_another_users_file_is_not_handed_over(place: Place) -> None:
    handover = place.put()
    os.chown(place.hand_overs / handover.name, 64_001, 64_001)
    assert place.waiting() == []


@pytest.mark.parametrize("wrong", ["other key", "garbage", "cut", "mode", "missing"])
def test_a_slab_that_is_not_what_its_name_says_does_not_pass(place: Place, wrong: str) -> None:
    contents = {"other key": slab_file(WHO, B, b"x"), "garbage": b"x" * 5000, "cut": CONTENT[:-1]}
    handover = place.put(contents.get(wrong, CONTENT))
    path = place.hand_overs / handover.name
    if wrong == "mode":
        path.chmod(0o640)
    if wrong == "missing":
        path.unlink()
    expected = {"mode": ForeignObject, "missing": FileNotFoundError}.get(wrong, CorruptSlab)
    with pytest.raises(expected):
        place.tier.check(handover)


def test_refusing_removes_the_hand_over_and_twice_is_once(place: Place) -> None:
    handover = place.put()
    place.tier.refuse(handover)
    place.tier.refuse(handover)
    assert place.waiting() == []


def test_removing_unlinks_and_whoever_has_it_open_keeps_its_bytes(place: Place) -> None:
    handover = place.put()
    place.tier.link(handover)
    with place.row(handover.key).open("rb") as opened:
        assert place.tier.remove(handover.key)
        assert not place.tier.remove(handover.key)
        assert opened.read() == CONTENT
    assert list(place.tier.keys()) == []
    with pytest.raises(FileNotFoundError):
        place.tier.read(handover.key)


def test_use_is_written_into_two_fields_and_nothing_else(place: Place) -> None:
    handover = place.put()
    place.tier.link(handover)
    place.tier.write_use(handover.key, (1 << 32) + 5, 1_900_000_000)
    content = place.row(handover.key).read_bytes()
    meta = place.tier.read(handover.key).head.meta
    assert (meta.hit_count, meta.last_used_unix_s) == ((1 << 32) - 1, 1_900_000_000)
    assert content[:12] + CONTENT[12:16] + content[16:32] + CONTENT[32:40] + content[40:] == CONTENT
    kvc.verify_payload(kvc.parse(memoryview(content)))


def test_use_of_what_is_gone_or_not_ours_is_no_error(place: Place) -> None:
    place.tier.write_use(key_of(A), 1, 1)
    path = place.plant(CONTENT)
    path.chmod(0o644)
    place.tier.write_use(key_of(A), 1, 1)
    assert path.read_bytes() == CONTENT


def test_a_scan_tells_damaged_slabs_from_what_is_not_ours_to_judge(place: Place) -> None:
    texts = [prompt(100 + number) for number in range(8)]
    place.plant(slab_file(WHO, texts[0], b"good"), texts[0])
    place.plant(b"", texts[1])
    place.plant(slab_file(WHO, texts[2], b"cut")[:-1], texts[2])
    place.plant(slab_file(WHO, texts[0], b"good"), texts[3])
    future = bytearray(slab_file(WHO, texts[4], b"good"))
    future[3] = 3
    place.plant(bytes(future), texts[4])
    place.row(key_of(texts[5])).symlink_to("/nowhere")
    place.row(key_of(texts[6])).mkdir()
    os.mkfifo(place.row(key_of(texts[7])), 0o600)
    found = {
        entry.key if isinstance(entry, Broken) else entry.head.meta.key: entry for entry in place.tier.scan()
    }
    assert isinstance(found[key_of(texts[0])], Slab)
    verdicts = [entry.damaged for text in texts[1:] if isinstance(entry := found[key_of(text)], Broken)]
    assert verdicts == [True, True, True, False, False, False, False]


@pytest.mark.parametrize("name", ["README", "x.kvc", "A" * 64 + ".kvc", "0" * 63 + ".kvc", "0" * 64 + ".KVC"])
def test_a_strangers_name_is_not_seen(place: Place, name: str) -> None:
    path = place.row(key_of(A)).with_name(name)
    path.write_bytes(CONTENT)
    stranger = place.hand_overs / name
    stranger.write_bytes(CONTENT)
    assert list(place.tier.scan()) == []
    assert list(place.tier.keys()) == []
    assert place.waiting() == []
    assert path.exists()
    assert stranger.exists()


def test_names_in_the_hand_over_directory_are_taken_apart_as_they_were_put_together() -> None:
    for token, forget in ((0, 0), ((1 << 63) - 1, 1 << 40)):
        handover = HandOver(key_of(A), token, forget)
        assert HandOver.from_name(handover.name) == handover
    good = HandOver(key_of(A), 5, 0).name
    for wrong in (
        good.upper(),
        good + ".x",
        good[1:],
        "." + good,
        good.replace(".", "-"),
        good[:-1] + "g",
        "",
    ):
        assert HandOver.from_name(wrong) is None


def test_only_the_first_4_kib_of_a_slab_are_read(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    handover = place.put()
    place.tier.link(handover)
    waiting = place.put(slab_file(WHO, B, bytes(100_000)), B)
    real = os.pread
    reads: list[int] = []

    def counted(fd: int, count: int, offset: int) -> bytes:
        reads.append(offset + count)
        return real(fd, count, offset)

    def forbidden(*_: Any) -> None:
        raise AssertionError("a slab is read by pread")

    monkeypatch.setattr(os, "pread", counted)
    monkeypatch.setattr(os, "read", forbidden)
    place.tier.check(waiting)
    place.tier.read(handover.key)
    assert len(list(place.tier.scan())) == 1
    assert len(reads) == 3
    assert max(reads) <= 4096


CALLS = {
    "ram": ["link"],
    "ram_file": ["link"],
    "disk": ["posix_fallocate", "sendfile", "fdatasync", "link", "fsync"],
}


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_call_that_fails_leaves_the_hand_over_and_no_row(
    place: Place, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.tier.directory_fd(key_of(A))
    handover = place.put()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(error, os.strerror(error))

    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (names, not paths)
    for call in CALLS[place.tier.number.name.lower()]:
        monkeypatch.setattr(os, call, fail)
        with pytest.raises(OSError, match=os.strerror(error)):
            place.tier.link(handover)
        monkeypatch.undo()
        assert len(os.listdir("/proc/self/fd")) == before, call  # noqa: PTH208
        assert list(place.tier.keys()) == [], call
        assert place.waiting() == [handover], call
    assert place.tier.link(handover).slab_bytes == len(CONTENT)


@needs_root
def test_a_directory_of_another_uid_is_not_opened(place: Place) -> None:
    os.chown(place.hand_overs, 64_001, 64_001)
    with pytest.raises(ForeignObject):
        place.reopen()
    os.chown(place.hand_overs, 0, 0)
    place.tier = place._open_tier()


def test_a_payload_begins_behind_what_a_scan_reads() -> None:
    assert PAYLOAD_OFFSET >= 4096
