"""The control page: one lock, one epoch, and nothing believed that a stranger wrote there."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
from support import Namespace, Pipe, eventually, needs_root

from shmcache import shm
from shmcache.control import SIZE_BYTES, ControlPage, OwnedControlPage, Word
from shmcache.errors import AlreadyRunning, ForeignObject, LayoutMismatch, NoCoordinator

LAYOUT = 0xABCDEF


@pytest.fixture(autouse=True)
def directory(space: Namespace) -> None:
    shm.make_directory(space.names.directory)


def test_before_the_first_coordinator_there_is_nothing(space: Namespace) -> None:
    with pytest.raises(NoCoordinator, match=f"shmcache-coordinator --namespace {space.name}"):
        ControlPage.open(space.names)
    space.names.directory.rmdir()
    with pytest.raises(NoCoordinator):
        ControlPage.open(space.names)


def test_a_new_page_says_that_there_is_no_epoch(space: Namespace) -> None:
    with contextlib.closing(OwnedControlPage.acquire(space.names)):
        view = ControlPage.open(space.names)
        assert view.epoch(LAYOUT) == 0
        assert view.forget == 0
        assert view.words[Word.PID] == os.getpid()
        assert view.coordinator_lives()
        with pytest.raises(TypeError):
            view.words[Word.EPOCH] = 1
        view.close()


def test_every_mapping_ever_made_sees_the_epochs_of_all_coordinators(space: Namespace) -> None:
    first = OwnedControlPage.acquire(space.names)
    view = ControlPage.open(space.names)
    first.open_epoch(7, LAYOUT, started_unix_s=1_000)
    assert view.epoch(LAYOUT) == 7
    assert view.words[Word.STARTED] == 1_000
    first.close_epoch()
    assert view.epoch(LAYOUT) == 0
    first.close()
    assert not view.coordinator_lives()

    second = OwnedControlPage.acquire(space.names)
    second.open_epoch(8, LAYOUT, started_unix_s=2_000)
    assert view.epoch(LAYOUT) == 8
    assert view.coordinator_lives()
    second.close()
    view.close()


def test_the_epoch_is_stored_last(space: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    page = OwnedControlPage.acquire(space.names)
    stores: list[tuple[int, int]] = []

    class Recorder:
        layout = LAYOUT + 1

        def __getitem__(self, word: int) -> int:
            assert word == Word.LAYOUT
            return self.layout

        def __setitem__(self, word: int, value: int) -> None:
            stores.append((word, value))

    monkeypatch.setattr(page, "words", Recorder())
    page.open_epoch(9, LAYOUT, started_unix_s=5)
    assert stores[0] == (Word.EPOCH, 0)
    assert stores[-1] == (Word.EPOCH, 9)
    assert {word for word, _ in stores[1:-1]} == {Word.LAYOUT, Word.STARTED}
    stores.clear()
    monkeypatch.setattr(Recorder, "layout", LAYOUT)
    page.open_epoch(10, LAYOUT, started_unix_s=6)
    assert stores == [(Word.STARTED, 6), (Word.EPOCH, 10)], "no moment without an epoch"
    page.close()


def test_another_layout_is_named_with_both_hashes(space: Namespace) -> None:
    with contextlib.closing(OwnedControlPage.acquire(space.names)) as page:
        page.open_epoch(7, LAYOUT, started_unix_s=1)
        with pytest.raises(LayoutMismatch) as caught:
            page.epoch(LAYOUT + 1)
        assert (caught.value.ours, caught.value.theirs) == (LAYOUT + 1, LAYOUT)
        page.close_epoch()
        assert page.epoch(LAYOUT + 1) == 0


def test_a_second_coordinator_is_told_who_runs(space: Namespace) -> None:
    with contextlib.closing(OwnedControlPage.acquire(space.names)):
        with pytest.raises(AlreadyRunning, match="another --namespace") as caught:
            OwnedControlPage.acquire(space.names)
        assert caught.value.pid == os.getpid()
    OwnedControlPage.acquire(space.names).close()


def test_a_page_that_was_removed_before_its_lock_was_taken_is_not_it(
    space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shm.try_lock

    def cleaned_meanwhile(fd: int) -> bool:
        monkeypatch.undo()
        space.names.control.unlink()
        return real(fd)

    monkeypatch.setattr(shm, "try_lock", cleaned_meanwhile)
    with contextlib.closing(OwnedControlPage.acquire(space.names)) as page:
        assert page.is_current(space.names)
        view = ControlPage.open(space.names)
        assert view.coordinator_lives()
        space.names.control.unlink()
        assert not view.is_current(space.names)
        view.close()


def test_the_kernel_lock_decides_and_not_what_is_written(space: Namespace) -> None:
    def hold(pipe: Pipe) -> None:
        OwnedControlPage.acquire(space.names)
        pipe.say()
        signal.pause()

    child = space.child(hold)
    child.hear()
    view = ControlPage.open(space.names)
    assert view.coordinator_lives()
    child.kill()
    eventually(lambda: not view.coordinator_lives())
    assert view.words[Word.PID] == child.pid
    view.close()


@pytest.mark.parametrize(
    "content",
    [b"", b"4711\n", os.urandom(SIZE_BYTES), b"\xff" * SIZE_BYTES, b"\xff" * (3 * SIZE_BYTES)],
    ids=["empty", "pid", "junk", "ones", "too long"],
)
def test_junk_in_its_place_is_taken_over_and_not_believed(space: Namespace, content: bytes) -> None:
    space.names.control.write_bytes(content)
    space.names.control.chmod(0o600)
    if len(content) < SIZE_BYTES:
        with pytest.raises(NoCoordinator):
            ControlPage.open(space.names)
    with contextlib.closing(OwnedControlPage.acquire(space.names)) as page:
        assert space.names.control.stat().st_size == SIZE_BYTES
        assert (page.words[Word.EPOCH], page.forget, page.words[Word.CLEAR]) == (0, 0, 0)


def test_the_forget_number_survives_the_coordinator(space: Namespace) -> None:
    with contextlib.closing(OwnedControlPage.acquire(space.names)) as page:
        page.words[Word.FORGET] = 5
    with contextlib.closing(OwnedControlPage.acquire(space.names)) as page:
        assert page.forget == 5


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_page_that_others_may_touch_is_not_used(space: Namespace, mode: int) -> None:
    space.names.control.write_bytes(bytes(SIZE_BYTES))
    space.names.control.chmod(mode)
    for opener in (ControlPage.open, OwnedControlPage.acquire):
        with pytest.raises(ForeignObject):
            opener(space.names)


@needs_root
@pytest.mark.parametrize("foreign", ["page", "directory", "link"])
def test_a_page_of_another_uid_is_not_used(space: Namespace, foreign: str) -> None:
    control = space.names.control
    control.write_bytes(bytes(SIZE_BYTES))
    control.chmod(0o600)
    if foreign == "directory":
        os.chown(space.names.directory, 64_001, 64_001)
    elif foreign == "page":
        os.chown(control, 64_001, 64_001)
    else:
        control.rename(control.with_name("elsewhere"))
        control.symlink_to(control.with_name("elsewhere"))
    with pytest.raises(ForeignObject):
        ControlPage.open(space.names)
