"""The coordinator's process: starts without help after any end, serves beside strangers, stops cleanly."""

from __future__ import annotations

import os
import re
import resource
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import posix_ipc
import pytest
from support import (
    WAIT_S,
    Namespace,
    Pipe,
    eventually,
    identity,
    in_small_shm,
    longest,
    needs_root,
    payload_of,
    plan,
    prompt,
    save,
    slab_file,
)

from shmcache import client, mq, page, server, shm
from shmcache.client import Cache
from shmcache.control import ControlPage
from shmcache.control import Word as ControlWord
from shmcache.index import segment_bytes
from shmcache.key import row_address
from shmcache.mq import RequestQueue
from shmcache.page import WorkerPage
from shmcache.protocol import MESSAGE_BYTES, Cancel, encode
from shmcache.server import EXIT_ALREADY_RUNNING, EXIT_FAILED, EXIT_USAGE
from shmcache.shm import SHM_ROOT
from shmcache.tiers.base import file_name

WHO = identity()
A, B, C = (prompt(size, "chat") for size in (1000, 2048, 3100))
STRANGER = 64_001
ORDINARY = 64_004


def key_of(text: bytes) -> bytes:
    return row_address(WHO.seed, text).key


def left_over(space: Namespace) -> list[str]:
    """What is in /dev/shm, without the rows and the directories that stay."""
    kept = {"control", "pages", "fifo", "ram_file", "in", space.names.directory.name}
    return [path.name for path in space.objects() if path.name not in kept and path.suffix != ".kvc"]


def reserve(cache: Cache, text: bytes) -> bool:
    return cache.reserve([plan(WHO, text)], None, cache.forget).slabs != [None]


# ---- start and stop


def test_readiness_is_one_line_that_says_what_it_serves(space: Namespace) -> None:
    line = space.start("--log-level=warning", command=True)
    assert re.fullmatch(
        rf"shmcache-coordinator ready: namespace={space.name} pid={space.pid} epoch=[0-9a-f]{{16}} rows=0 "
        r"max_rows=1024 .*ram_file=0 MiB of 16 MiB\n",
        line,
    )
    assert save(space.cache(), WHO, A, b"state")
    assert space.log() == ""
    assert "rows=1 " in space.restart()


def test_the_program_takes_its_settings_from_file_environment_and_flags(
    space: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('max-rows = 7\nram-file-bytes = "3M"\nlog_level = "error"\n')
    monkeypatch.setenv("SHMCACHE_LOG_LEVEL", "warning")
    space._settings = {"--ram-file-bytes": "2M"}
    line = space.start(f"--config={file}", command=True)
    assert "max_rows=7 " in line
    assert "of 2 MiB" in line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly(space: Namespace, number: int) -> None:
    space.start(command=True)
    cache = space.cache()
    save(cache, WHO, A, b"state")
    cache.close()
    assert space.stop(number) == 0
    assert left_over(space) == []
    assert "Traceback" not in space.log()
    control = ControlPage.open(space.names)
    assert control.words[ControlWord.EPOCH] == 0
    assert not control.coordinator_lives()
    control.close()


@pytest.mark.parametrize("step", ["_budgets", "_now"])
def test_a_signal_during_the_start_stops_it_right_after(space: Namespace, step: str) -> None:
    def patch() -> None:
        real = getattr(server, step)

        def interrupted(*arguments: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return real(*arguments)

        setattr(server, step, interrupted)

    space.start(patch=patch)
    assert space.coordinator is not None
    assert space.coordinator.wait(WAIT_S) == 0
    assert left_over(space) == []


def test_whoever_holds_signals_back_while_it_starts_a_coordinator_can_stop_it(space: Namespace) -> None:
    space.start(patch=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT}))
    assert space.coordinator is not None
    os.kill(space.pid, signal.SIGTERM)
    assert space.coordinator.wait(WAIT_S) == 0
    assert left_over(space) == []


def test_a_second_coordinator_says_who_runs_and_leaves_with_its_own_code(space: Namespace) -> None:
    space.start()
    first = space.pid
    cache = space.cache()
    save(cache, WHO, A, b"state")
    with Namespace() as other:
        other.name, other.names = space.name, space.names
        other.start(command=True, ready=False)
        assert other.coordinator is not None
        assert other.coordinator.wait(WAIT_S) == EXIT_ALREADY_RUNNING
        said = other.log()
        other.name, other.names = "nothing", shm.Names("nothing")
    assert f"namespace '{space.name}' is running already (pid {first})" in said
    assert "Traceback" not in said
    assert longest(cache, WHO, A) == (len(A), b"state")
    assert reserve(cache, B)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--namespace=No", "must match"),
        ("--max-rows=0", "max_rows (0) must be between 1 and 4000000"),
        ("--ram-file-bytes=much", "'much' is not a size"),
        ("--config=/nowhere.toml", "/nowhere.toml"),
    ],
)
def test_wrong_settings_are_one_line_and_their_own_code(space: Namespace, flag: str, message: str) -> None:
    space.start(flag, ready=False)
    assert space.coordinator is not None
    assert space.coordinator.wait(WAIT_S) == EXIT_USAGE
    assert space.log().startswith("shmcache-coordinator: ")
    assert message in space.log()
    assert space.log().count("\n") == 1


def test_after_kill_it_starts_without_help_and_leaves_nothing_of_the_one_before(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    for text in (A, B):
        save(cache, WHO, text, os.urandom(10_000))
    cache.close()
    eventually(lambda: left_over(space) == [path.name for path in space.names.epoch_segments()])
    before = space.used_bytes()
    for _ in range(5):
        assert "rows=2" in space.restart()
        assert space.used_bytes() == before
    assert len({path.name.split(".")[3] for path in space.names.epoch_segments()}) == 1


def test_messages_of_the_time_before_are_not_handled(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    save(cache, WHO, A, b"state")
    os.kill(space.pid, signal.SIGSTOP)
    head = {
        "epoch": cache.connection.epoch,
        "client": cache.connection.client,
        "mailbox": 0,
        "request": 10**6,
    }
    with_queue = RequestQueue(space.names)
    for _ in range(5):
        assert with_queue.send(encode(Cancel(**head, tokens=[1])))
    with_queue.close()
    space.restart()
    eventually(lambda: reserve(cache, B))
    assert space.log().count("not understood") == 0


# ---- workers that misbehave


def test_garbage_in_the_queue_is_survived(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    save(cache, WHO, A, b"state")
    page_ = cache.connection.page
    assert page_ is not None
    sender = RequestQueue(space.names)
    head = {"epoch": cache.connection.epoch, "client": cache.connection.client, "request": 10**6}
    messages = [
        b"",
        b"\xc1",
        os.urandom(MESSAGE_BYTES),
        b"\x91" * MESSAGE_BYTES,
        encode(Cancel(**head, mailbox=200, tokens=[])),
        encode(Cancel(**{**head, "client": 12345}, mailbox=0, tokens=[])),
        encode(Cancel(**{**head, "epoch": 1}, mailbox=15, tokens=[])),
    ]
    for message in messages:
        assert sender.send(message, time.monotonic_ns() + 10**10)
    sender.close()
    assert reserve(cache, B)
    assert space.log().count("is not understood") == 5


@pytest.mark.parametrize("name", ["README", "0x1", "00000000000000zz", "1_0", "ABCDEF0123456789"])
def test_a_strangers_file_among_the_pages_is_left_alone(space: Namespace, name: str) -> None:
    space.start()
    cache = space.cache()
    save(cache, WHO, A, b"state")
    path = space.names.pages / name
    path.write_text("hello")
    eventually(lambda: space.stat("saves_published") == 1)
    space.restart()
    assert save(cache, WHO, B, b"state")
    assert path.read_text() == "hello"
    assert "page" not in space.log()


@pytest.mark.parametrize("plant", ["mode", "symlink", "fifo", "directory", "stranger"])
def test_a_page_that_is_not_ours_is_said_once_and_ignored(space: Namespace, plant: str) -> None:
    if plant == "stranger" and os.geteuid() != 0:
        pytest.skip("needs root: a second uid")
    space.start()
    path = space.names.pages / f"{77:016x}"
    if plant == "symlink":
        path.symlink_to("/etc/passwd")
    elif plant == "fifo":
        os.mkfifo(path, 0o600)
    elif plant == "directory":
        path.mkdir()
    else:
        path.write_bytes(bytes(page.SIZE_BYTES))
        path.chmod(0o644 if plant == "mode" else 0o600)
        if plant == "stranger":
            os.chown(path, STRANGER, STRANGER)
    cache = space.cache()
    for text in (A, B):
        assert eventually(lambda text=text: save(cache, WHO, text, b"state"))  # type: ignore[misc]
    eventually(lambda: space.stat("saves_published") == 2)
    assert os.path.lexists(path)
    assert space.log().count(f"page {77:016x} is not used") == 1


def test_a_page_of_another_build_is_said_once_and_goes_with_its_worker(space: Namespace) -> None:
    space.start()

    def work(pipe: Pipe) -> None:
        made = WorkerPage(space.names, 77)
        made.prepare_wait(0)
        made.words[page.Word.LAYOUT] ^= 1
        pipe.say()
        signal.pause()

    worker = space.child(work)
    worker.hear()
    eventually(lambda: "is not used" in space.log())
    cache = space.cache()
    assert save(cache, WHO, A, b"state")
    assert (space.names.pages / f"{77:016x}").exists()
    worker.kill()
    eventually(lambda: not (space.names.pages / f"{77:016x}").exists())
    assert not (space.names.fifos / f"{77:016x}.0").exists()
    assert space.log().count("is not used") == 1


def test_a_dead_workers_page_fifos_and_reservations_are_freed(space: Namespace) -> None:
    space.start()

    def work(pipe: Pipe) -> None:
        cache = client.attach(space.name)
        eventually(lambda: save(cache, WHO, A, b"state"))
        for text in (B, C):
            (made,) = cache.reserve([plan(WHO, text, 1 << 20)], None, 0).slabs
            assert made is not None
            made.payload(10)
        pipe.say(cache.connection.client)
        signal.pause()

    worker = space.child(work)
    name = f"{worker.hear():016x}"
    cache = space.cache()
    assert not reserve(cache, B)
    worker.kill()
    eventually(lambda: reserve(cache, B))
    assert reserve(cache, C)
    eventually(lambda: not (space.names.pages / name).exists())
    assert not [path for path in space.names.fifos.iterdir() if path.name.startswith(name)]
    assert payload_of(cache, WHO, A) == b"state"
    eventually(lambda: space.stat("gone_save_handed_over") == 1)


def test_a_worker_without_work_is_not_stuck_when_it_gets_some(space: Namespace) -> None:
    """Its progress word has not moved for a minute, and the first piece takes longer than a tick."""

    def patch() -> None:
        server.STUCK_S = 0.6

    space.start(patch=patch)
    cache, other = space.cache(), space.cache()
    save(cache, WHO, A, b"state")
    ticks = space.stat("started_unix_s")
    until_s = time.monotonic() + 1.2
    eventually(lambda: time.monotonic() > until_s)
    assert reserve(cache, B)
    assert ticks
    save(other, WHO, C, b"a tick passes")
    eventually(lambda: space.stat("saves_published") == 2)
    assert space.stat("overtaken") == 0


def test_an_owner_that_does_not_move_is_overtaken_and_one_that_moves_is_not(space: Namespace) -> None:
    def patch() -> None:
        server.STUCK_S = 0.3

    space.start(patch=patch)
    stuck, moving, waiting = space.cache(), space.cache(), space.cache()
    assert reserve(stuck, A)
    assert reserve(moving, B)

    def moved_until_overtaken() -> bool:
        moving.progress()
        return space.stat("overtaken") == 1

    assert eventually(moved_until_overtaken)
    assert waiting.wait(key_of(A), 10_000) is False
    assert reserve(waiting, A)
    assert not reserve(waiting, B)


def test_many_mailboxes_of_many_workers_are_no_reason_to_run_out_of_descriptors(space: Namespace) -> None:
    def patch() -> None:
        _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))

    space.start(patch=patch)
    limits = Path(f"/proc/{space.pid}/limits").read_text()
    soft, hard = re.findall(r"Max open files +(\d+) +(\d+)", limits)[0]
    assert soft == hard


# ---- a small /dev/shm


def ended(space: Namespace, *flags: str) -> tuple[int, str]:
    """Exit code and words of a coordinator that cannot start."""
    space.start(*flags, command=True, ready=False)
    assert space.coordinator is not None
    code = space.coordinator.wait(WAIT_S)
    said = space.log()
    assert "Traceback" not in said
    assert said.startswith("shmcache-coordinator: ")
    return code, said


@needs_root
def test_a_dev_shm_too_small_for_the_index_is_refused_with_numbers_and_remedy() -> None:
    def small() -> None:
        with Namespace(ram_file_bytes="1M", max_rows=65_536) as space:
            code, said = ended(space)
            assert code == EXIT_FAILED
            assert "/dev/shm has 16 MiB free and " in said
            assert "--max-rows (now 65536)" in said
            assert "--shm-size 1g" in said
            assert left_over(space) == []

    in_small_shm(16 << 20, small)


@needs_root
def test_a_dev_shm_too_small_for_the_budget_is_refused_with_numbers_and_remedy() -> None:
    def small() -> None:
        with Namespace(ram_file_bytes="64M", max_rows=64) as space:
            code, said = ended(space)
            assert code == EXIT_USAGE
            assert "ram_file needs 64 MiB" in said
            assert re.search(r"start with --ram-file-bytes \d+M or give the container --shm-size 1g", said)
            advised = re.findall(r"--ram-file-bytes (\d+M)", said)[0]
            space._settings["--ram-file-bytes"] = advised
            space.start()

    in_small_shm(32 << 20, small)


@needs_root
def test_a_full_dev_shm_is_refused_with_numbers_and_remedy() -> None:
    def small() -> None:
        (SHM_ROOT / "filler").write_bytes(bytes(shm.free_bytes()))
        with Namespace(ram_file_bytes="1M", max_rows=64) as space:
            code, said = ended(space)
            assert code == EXIT_FAILED
            assert "/dev/shm has 0 MiB free and " in said
            assert left_over(space) == []

    in_small_shm(1 << 20, small)


@needs_root
def test_by_default_half_of_what_is_free_is_used() -> None:
    def small() -> None:
        with Namespace(max_rows=64) as space:
            del space._settings["--ram-file-bytes"]
            line = space.start()
            budget_mib = float(re.findall(r"of ([\d.]+) MiB", line)[0])
            assert 16 < budget_mib <= 32

    in_small_shm(64 << 20, small)


@needs_root
def test_where_two_indexes_do_not_fit_the_next_one_starts_all_the_same() -> None:
    def small() -> None:
        max_rows = 20_000
        assert 10 << 20 < segment_bytes(max_rows) < 16 << 20
        with Namespace(ram_file_bytes="2M", max_rows=max_rows) as space:
            space.start(command=True)
            cache = space.cache()
            assert save(cache, WHO, A, b"state")
            assert payload_of(cache, WHO, A) == b"state"
            for _ in range(2):
                space.kill()
                # The worker still maps the index of the time before, and lets go when it is idle.
                assert "rows=1" in space.start(command=True)
                assert eventually(lambda: payload_of(cache, WHO, A)) == b"state"
            assert len({path.name.split(".")[3] for path in space.names.epoch_segments()}) == 1

    in_small_shm(28 << 20, small)


@needs_root
def test_bytes_that_workers_hold_are_the_budgets_at_a_restart() -> None:
    def small() -> None:
        with Namespace(ram_file_bytes="20M", max_rows=64) as space:
            space.start(command=True)
            cache = space.cache()
            save(cache, WHO, A, bytes(4 << 20))
            (made,) = cache.reserve([plan(WHO, B, 10 << 20)], None, 0).slabs
            assert made is not None
            made.payload(10)
            space.kill()
            assert "rows=1" in space.start(command=True), "rows and slabs in the making are its own"

    in_small_shm(32 << 20, small)


# ---- what is not ours


def _root_owned(path: Path) -> None:
    path.mkdir(mode=0o700)


PLANTS: dict[str, Callable[[Namespace], object]] = {
    "directory": lambda space: None,
    "directory mode": lambda space: space.names.directory.chmod(0o755),
    "control": lambda space: space.names.control.write_bytes(b""),
    "pages": lambda space: space.names.pages.mkdir(mode=0o700),
    "fifo": lambda space: space.names.fifos.mkdir(mode=0o700),
    "tier": lambda space: (space.names.directory / "ram_file").mkdir(mode=0o700),
    "hand-over": lambda space: (space.names.directory / "ram_file/in").mkdir(mode=0o700, parents=True),
    "queue": lambda space: posix_ipc.MessageQueue(space.names.queue, posix_ipc.O_CREX, mode=0o600).close(),
    "pages link": lambda space: space.names.pages.symlink_to("/tmp"),
    "tier file": lambda space: (space.names.directory / "ram_file").write_bytes(b""),
}


@needs_root
@pytest.mark.parametrize("plant", PLANTS)
def test_a_coordinator_that_finds_what_is_not_its_own_says_so_and_ends(plant: str) -> None:
    with Namespace(uid=ORDINARY) as space:
        directory = space.names.directory
        directory.mkdir(mode=0o700)
        before = {*directory.rglob("*")}
        PLANTS[plant](space)
        made = {*directory.rglob("*")} - before
        if plant != "directory":
            os.chown(directory, ORDINARY, ORDINARY)
        if plant == "hand-over":
            os.chown(directory / "ram_file", ORDINARY, ORDINARY)
        space.start(ready=False)
        assert space.coordinator is not None
        assert space.coordinator.wait(WAIT_S) == EXIT_FAILED
        assert "is not used: remove it, or start with another --namespace" in space.log()
        assert "Traceback" not in space.log()
        assert all(os.path.lexists(path) for path in made), "left alone"


@needs_root
def test_a_segment_that_another_user_planted_is_left_alone_and_no_obstacle() -> None:
    with Namespace(uid=ORDINARY) as space:
        planted = SHM_ROOT / space.names.index_segment(0)
        planted.write_bytes(bytes(100))
        os.truncate(planted, 1 << 40)  # and claims to take all the world
        space.start()
        assert planted.exists()
        assert space.stop() == 0


@needs_root
def test_an_ordinary_user_is_served_whatever_the_umask() -> None:
    with Namespace(uid=ORDINARY) as space:

        def patch() -> None:
            os.umask(0o777)

        def work(_pipe: Pipe) -> None:
            os.umask(0o777)
            with client.attach(space.name) as cache:
                eventually(lambda: save(cache, WHO, A, b"state"))
                assert longest(cache, WHO, A) == (len(A), b"state")

        space.start(patch=patch)
        assert space.child(work).wait() == 0
        for path in space.objects():
            found = path.lstat()
            assert found.st_uid == ORDINARY
            assert stat.S_IMODE(found.st_mode) == (0o700 if path.is_dir() else 0o600), path
        space.kill()
        assert "rows=1" in space.start(patch=patch)


def test_a_dangling_link_among_the_rows_is_no_obstacle(space: Namespace) -> None:
    space.start()
    save(space.cache(), WHO, A, b"state")
    directory = space.names.tier("ram_file", 0)
    (directory / "x.kvc").symlink_to("/nowhere")
    (directory / file_name(key_of(B))).symlink_to("/nowhere")
    sparse = directory / "y.kvc"
    sparse.write_bytes(b"")
    os.truncate(sparse, 1 << 45)
    (directory / "z.kvc").mkdir()
    assert "rows=1" in space.restart()
    assert sorted(path.name for path in directory.iterdir() if len(path.name) < 10) == [
        "in",
        "x.kvc",
        "y.kvc",
        "z.kvc",
    ]


# ---- broken rows at a start


def test_each_broken_file_is_removed_and_named_once(space: Namespace) -> None:
    space.start()
    cache = space.cache()
    save(cache, WHO, A, b"state")
    directory = space.names.tier("ram_file", 0)
    for text, content in ((B, b""), (C, slab_file(WHO, A, b"state"))):
        path = directory / file_name(key_of(text))
        path.write_bytes(content)
        path.chmod(0o600)
    space.restart()
    eventually(lambda: [path.name for path in directory.glob("*.kvc")] == [file_name(key_of(A))])
    assert space.log().count("is removed") == 2
    space.restart()
    assert space.log().count("is removed") == 2
    assert longest(cache, WHO, C) == (len(A), b"state")


def test_nothing_of_a_namespace_is_left_when_a_test_has_ended() -> None:
    with Namespace() as space:
        space.start()
        cache = space.cache()
        save(cache, WHO, A, b"state")
        reserve(cache, B)
        names = space.names
        assert space.objects()
    assert space.objects() == []
    assert not mq.unlink(names)
