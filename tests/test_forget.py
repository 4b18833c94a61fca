"""Forgetting, pinning, age: what is said to be gone is gone, and what is said to stay stays."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import (
    Namespace,
    eventually,
    identity,
    longest,
    payload_of,
    plan,
    prompt,
    save,
    slab_file,
)
from test_coordinator import EPOCH, NOW, OTHER, THIRD, A, B, C, Desk, key_of, kinds, survey

from shmcache.check import check
from shmcache.client import Cache
from shmcache.connection import Head
from shmcache.control import OwnedControlPage
from shmcache.coordinator import Now
from shmcache.key import row_address
from shmcache.kvc import Reason
from shmcache.protocol import Evict, Evicted, Extend, Pin, Pinned, Tier, Written
from shmcache.tiers.base import HandOver, file_name
from shmcache.tiers.disk import stored_forget

WHO = identity()


@pytest.fixture
def desk(space: Namespace) -> Iterator[Desk]:
    with contextlib.closing(Desk(space)) as made:
        yield made
        made.run()
        made.check()


def evict(desk: Desk, *texts: bytes) -> Evicted:
    answer = desk.ask(Evict(**desk.head(9), keys=[key_of(text) for text in texts]))
    assert isinstance(answer, Evicted)
    return answer


def pin(desk: Desk, text: bytes, pinned: bool = True) -> Pinned:
    answer = desk.ask(Pin(**desk.head(9), key=key_of(text), pinned=pinned))
    assert isinstance(answer, Pinned)
    return answer


def path_of(desk: Desk, text: bytes) -> Path:
    return desk.names.tier("ram_file", EPOCH) / file_name(key_of(text))


# ---- the rows


def test_the_answer_comes_when_the_files_are_gone(desk: Desk) -> None:
    desk.save(A)
    desk.save(OTHER)
    request = Evict(**desk.head(9), keys=[key_of(A)])
    assert desk.tell(request) == []
    assert desk.texts(A, OTHER) == [OTHER], "nobody finds it any more"
    assert path_of(desk, A).exists()
    (reply,) = desk.run()
    assert (reply.client, reply.request, reply.body) == (9, request.request, Evicted(1, 0))
    assert not path_of(desk, A).exists()


def test_rows_that_are_not_there_are_not_counted_and_a_key_counts_once(desk: Desk) -> None:
    desk.save(A)
    assert evict(desk, A, A, OTHER) == Evicted(1, 0)
    assert evict(desk) == Evicted(0, 0)


def test_a_row_that_a_save_extends_is_forgotten_all_the_same(desk: Desk) -> None:
    desk.save(A)
    desk.grant(B, base=key_of(A))
    assert evict(desk, A) == Evicted(1, 0)
    assert desk.texts(A) == []


def test_two_who_forget_at_once_are_both_answered(desk: Desk) -> None:
    desk.save(A)
    desk.save(OTHER)
    for mailbox, text in enumerate((A, OTHER, A)):
        assert desk.tell(Evict(**desk.head(9, mailbox), keys=[key_of(text)])) == []
    answers = {reply.mailbox: reply.body for reply in desk.run()}
    assert answers == {0: Evicted(1, 0), 1: Evicted(1, 0), 2: Evicted(0, 0)}


def test_a_file_that_does_not_go_is_said_not_to_have_gone_and_does_not_come_back(desk: Desk) -> None:
    desk.save(A)
    request = Evict(**desk.head(9), keys=[key_of(A)])
    desk.tell(request)
    desk.lane.break_down()
    (reply,) = desk.coordinator.outcomes(NOW)
    assert reply.body == Evicted(1, 1)
    desk.lane.state = type(desk.lane.state).UP
    assert path_of(desk, A).exists()
    survey(desk)
    desk.run()
    assert desk.texts(A) == []
    assert not path_of(desk, A).exists()


# ---- the number


def test_the_number_moves_once_a_command_and_all_workers_see_it(desk: Desk) -> None:
    desk.start(forget=4)
    evict(desk)
    evict(desk, A)
    assert desk.shown_forget == [5, 6]


def test_rows_leave_before_the_number_moves(desk: Desk) -> None:
    """Who reads the number first and the rows then never begins with a forgotten row under the new one."""
    desk.save(A)
    seen: list[list[bytes]] = []
    desk.shown_forget = seen  # type: ignore[assignment]
    desk.coordinator._store_forget = lambda _number: seen.append(desk.texts(A))
    evict(desk, A)
    assert seen == [[]]


def test_a_sequence_that_began_before_saves_nothing_and_a_new_one_does(desk: Desk) -> None:
    evict(desk)
    assert kinds(desk.reserve(A, B, forget=0)) == ["forgotten"] * 2
    assert kinds(desk.reserve(A, B, forget=1)) == ["granted"] * 2


@pytest.mark.parametrize("key_is_known", [True, False], ids=["anchor", "reply"])
@pytest.mark.parametrize("when", ["reserved", "named", "told", "linked"])
def test_a_save_in_flight_leaves_nothing_whenever_it_is_met(
    desk: Desk, when: str, key_is_known: bool
) -> None:
    token = desk.grant(A if key_is_known else None)
    written = Written(**desk.head(1, 3), token=token, key=key_of(A))
    if when != "reserved":
        desk.put(A, token)
    if when in ("told", "linked"):
        desk.tell(written)
    if when == "linked":
        desk.lane.step()
        assert path_of(desk, A).exists()
    evict(desk)
    assert desk.waiting() == []
    assert not path_of(desk, A).exists()
    if when == "reserved":
        desk.put(A, token)
        assert not desk.written(A, token).published
    desk.run()
    assert desk.waiting() == []
    assert desk.texts(A) == []
    assert desk.restart(forget=1) == 0


def test_a_coordinator_that_dies_after_the_answer_leaves_no_file_for_the_next(desk: Desk) -> None:
    """The save was linked and its outcome never heard."""
    token = desk.grant(A)
    desk.put(A, token)
    desk.tell(Written(**desk.head(1, 3), token=token, key=key_of(A)))
    desk.tell(Evict(**desk.head(9), keys=[]))
    while desk.lane.queued:
        desk.lane.step()
    assert desk.restart(forget=1) == 0
    assert desk.files() == set()


def test_what_an_older_sequence_left_for_another_coordinator_is_refused(desk: Desk) -> None:
    desk.put(A, 5, forget=2)
    desk.put(OTHER, 6, forget=3)
    desk.restart(forget=3)
    desk.run()
    assert desk.texts(A, OTHER) == [OTHER]
    assert desk.waiting() == []


def test_more_bytes_for_a_forgotten_save_change_nothing(desk: Desk) -> None:
    token = desk.grant(A)
    evict(desk)
    desk.ask(Extend(**desk.head(1), token=token, slab_bytes=9000))
    desk.put(A, token)
    assert not desk.written(A, token).published


def test_the_number_never_goes_back(space: Namespace) -> None:
    space.start()
    space.kill()
    with contextlib.closing(OwnedControlPage.acquire(space.names)) as page:
        page.store_forget(5)
        page.store_forget(3)
        assert page.forget == 5
    cache = space.cache()
    space.start()
    eventually(lambda: cache.forget == 5)


# ---- pins


def test_a_pinned_row_is_not_evicted_and_an_unpinned_one_is(space: Namespace) -> None:
    with contextlib.closing(Desk(space, slabs=2)) as desk:
        desk.save(A)
        desk.save(OTHER)
        assert pin(desk, A) == Pinned(True)
        desk.save(THIRD)
        assert desk.texts(A, OTHER, THIRD) == [A, THIRD]
        assert pin(desk, THIRD) == Pinned(True)
        assert kinds(desk.reserve(OTHER)) == ["no_space"]
        assert pin(desk, A, False) == Pinned(True)
        desk.save(OTHER)
        assert desk.texts(A, OTHER, THIRD) == [OTHER, THIRD]


def test_a_pin_is_answered_when_the_file_has_it_and_a_restart_knows_it(space: Namespace) -> None:
    with contextlib.closing(Desk(space, slabs=1)) as desk:
        desk.save(A)
        assert desk.tell(Pin(**desk.head(9), key=key_of(A), pinned=True)) == []
        (reply,) = desk.run()
        assert reply.body == Pinned(True)
        assert stat.S_IMODE(path_of(desk, A).stat().st_mode) == 0o600 | stat.S_ISVTX
        assert desk.restart() == 1
        assert kinds(desk.reserve(OTHER)) == ["no_space"]
        assert pin(desk, A, False) == Pinned(True)
        assert stat.S_IMODE(path_of(desk, A).stat().st_mode) == 0o600
        desk.restart()
        assert kinds(desk.reserve(OTHER)) == ["granted"]


def test_a_row_that_is_not_there_cannot_be_pinned(desk: Desk) -> None:
    assert not pin(desk, A).done


def test_a_pinned_row_can_be_forgotten(desk: Desk) -> None:
    desk.save(A)
    pin(desk, A)
    assert evict(desk, A) == Evicted(1, 0)


def test_a_pin_that_its_file_did_not_take_is_said_not_to_hold(desk: Desk) -> None:
    desk.save(A)
    desk.tell(Pin(**desk.head(9), key=key_of(A), pinned=True))
    desk.lane.break_down()
    (reply,) = desk.coordinator.outcomes(NOW)
    assert reply.body == Pinned(False, "down")


# ---- age, and rows of a tier


def test_rows_leave_when_they_are_as_old_as_their_tier_allows(space: Namespace) -> None:
    with contextlib.closing(Desk(space, max_age_s=100)) as desk:
        desk.save(A, created_unix_s=NOW.unix_s - 60)
        desk.save(OTHER, created_unix_s=NOW.unix_s)
        desk.save(THIRD, created_unix_s=NOW.unix_s - 60)
        pin(desk, THIRD)
        desk.touch(A)
        desk.coordinator.tick(Now(NOW.unix_s + 39), 0.0)
        assert len(desk.keys()) == 3
        desk.coordinator.tick(Now(NOW.unix_s + 40), 0.0)
        assert desk.texts(A, OTHER, THIRD) == [OTHER, THIRD]
        desk.run()
        assert not path_of(desk, A).exists()
        assert desk.restart(now=Now(NOW.unix_s + 100)) == 1, "and at the start"
        assert desk.texts(OTHER, THIRD) == [THIRD]


def test_a_row_that_a_save_extends_grows_old_when_the_save_has_ended(space: Namespace) -> None:
    with contextlib.closing(Desk(space, max_age_s=100)) as desk:
        desk.save(A, created_unix_s=NOW.unix_s)
        token = desk.grant(B, base=key_of(A))
        later = Now(NOW.unix_s + 200)
        desk.coordinator.tick(later, 0.0)
        assert desk.texts(A) == [A]
        desk.cancel(token)
        desk.coordinator.tick(later, 0.0)
        assert desk.texts(A) == []


def test_a_row_from_the_future_does_not_live_the_longer_for_it(space: Namespace) -> None:
    with contextlib.closing(Desk(space, max_age_s=100)) as desk:
        desk.save(A, created_unix_s=NOW.unix_s + 1_000_000)
        desk.coordinator.tick(Now(NOW.unix_s + 100), 0.0)
        assert desk.texts(A) == []


def test_a_tier_holds_no_more_rows_than_it_may(space: Namespace) -> None:
    with contextlib.closing(Desk(space)) as desk:
        desk.state.max_rows = 3
        for text in (A, OTHER, THIRD, C):
            desk.save(text)
            assert desk.state.rows <= 3
        assert desk.texts(A, OTHER, THIRD, C) == [OTHER, THIRD, C]
        assert kinds(desk.reserve(*(prompt(100 + size, "x") for size in range(5)))) == [
            "granted",
            "granted",
            "granted",
            "no_space",
            "no_space",
        ]
        assert desk.state.rows == 0, "room for what is on its way"


# ---- with a coordinator of its own


def in_flight(cache: Cache, text: bytes, forget: int) -> bool:
    """Save a row of a sequence that began under this number; whether it was published."""
    (slab,) = cache.reserve([plan(WHO, text, 64)], None, forget).slabs
    if slab is None:
        return False
    slab.cancel()
    return True


def test_a_forgotten_prefix_does_not_come_back_over_a_restart(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    assert save(cache, WHO, A, b"a" * 64)
    before = cache.forget
    answer = cache.connection.ask(
        lambda head: Evict(**head, keys=[row_address(WHO.seed, A).key]), 10_000_000_000
    )
    assert answer == Evicted(1, 0)
    assert longest(cache, WHO, A) is None
    assert cache.forget == before + 1, "seen as soon as the answer is"
    assert not in_flight(cache, B, before)
    space.restart()
    eventually(lambda: cache.connection.reader() is not None)
    assert cache.forget == before + 1
    assert not in_flight(cache, B, before)
    assert save(cache, WHO, B, b"b" * 64)
    eventually(lambda: check(space.name) == [])


def test_a_hand_over_of_an_older_sequence_is_refused_by_the_next_coordinator(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    before = cache.forget
    assert cache.connection.ask(lambda head: Evict(**head, keys=[]), 10_000_000_000) == Evicted(0, 0)
    space.kill()
    handover = HandOver(row_address(WHO.seed, A).key, 77, before)
    path = space.names.tier("ram_file", 0) / "in" / handover.name
    path.write_bytes(slab_file(WHO, A, b"a" * 64, save_reason=Reason.FINISH))
    path.chmod(0o600)
    space.start()
    eventually(lambda: not path.exists())
    assert payload_of(space.cache(), WHO, A) is None


def test_the_disk_keeps_the_number_over_a_reboot(space: Namespace, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    flags = (f"--disk-dir={tmp_path}", "--disk-bytes=16M")
    space.start(*flags)
    cache = space.cache(tier="disk")
    assert save(cache, WHO, A, b"a" * 64)
    assert save(cache, WHO, B, b"b" * 64)
    key = row_address(WHO.seed, A).key

    def forget(head: Head) -> Evict:
        return Evict(**head, keys=[key])

    assert cache.connection.ask(forget, 10_000_000_000) == Evicted(1, 0)
    assert cache.connection.ask(forget, 10_000_000_000) == Evicted(0, 0)
    eventually(lambda: stored_forget(space.names, tmp_path) == 2)
    cache.close()
    space.reboot()
    space.start(*flags)
    again = space.cache(tier="disk")
    assert again.forget == 2
    assert payload_of(again, WHO, A) is None
    assert payload_of(again, WHO, B) == b"b" * 64


def test_a_damaged_number_beside_the_slabs_is_none_and_no_failed_start(
    space: Namespace, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / space.name).mkdir(mode=0o700)
    number = tmp_path / space.name / ".forget"
    number.write_text("not a number")
    number.chmod(0o600)
    space.start(f"--disk-dir={tmp_path}")
    assert space.cache().forget == 0
    assert "holds no forget number" in space.log()


def test_pins_survive_a_restart_in_each_tier(space: Namespace, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    flags = (f"--disk-dir={tmp_path}", "--disk-bytes=16M")
    space.start(*flags)
    for tier, text in (("ram_file", A), ("disk", OTHER)):
        cache = space.cache(tier=tier)
        assert save(cache, WHO, text, b"a" * 64)
        key = row_address(WHO.seed, text).key
        answer = cache.connection.ask(lambda head, key=key: Pin(**head, key=key, pinned=True), 10_000_000_000)
        assert answer == Pinned(True)
    space.kill()
    space.start(*flags)
    modes = {path.stat().st_mode & stat.S_ISVTX for path in tmp_path.rglob("*.kvc")}
    modes |= {path.stat().st_mode & stat.S_ISVTX for path in space.names.directory.rglob("*.kvc")}
    assert modes == {stat.S_ISVTX}
    eventually(lambda: check(space.name) == [])
    reader = space.cache().connection.reader()
    assert reader is not None
    assert {found.row.tier for found in reader.rows()} == {Tier.RAM_FILE, Tier.DISK}
