"""The database behind the coordinator: what was committed is there, and no file stops a start."""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest

from shmcache.decisions import db
from shmcache.decisions.db import Batch, Committer, Database, load
from shmcache.decisions.table import Record

A, B = Record(1, b"a" * 16, b"1", 10, None), Record(2, b"b" * 16, b"2", 20, 30)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "decisions.sqlite3"


def commit(path: Path, *batches: Batch) -> None:
    database, _ = load(path, "commit")
    assert database is not None
    database.commit(batches)
    database.close()


def records(path: Path) -> list[Record]:
    database, kept = load(path, "commit")
    assert database is not None
    database.close()
    return kept


def test_what_was_committed_is_there_in_its_order(path: Path) -> None:
    commit(path, Batch(1, [B]), Batch(2, [A]))
    assert records(path) == [A, B]
    commit(path, Batch(3, deleted=[A.sequence]))
    assert records(path) == [B]
    commit(path, Batch(4, [A], forget_all=True))
    assert records(path) == [A]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_commit_survives_a_kill(path: Path) -> None:
    commit(path)
    pid = os.fork()
    if pid == 0:
        database, _ = load(path, "commit")
        assert database is not None
        database.commit([Batch(1, [A])])
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    assert records(path) == [A]


def test_a_failed_transaction_changes_nothing(path: Path) -> None:
    database, _ = load(path, "commit")
    assert database is not None
    with pytest.raises(sqlite3.Error):
        database.commit([Batch(1, [A]), Batch(2, [A])])  # one number twice
    database.commit([Batch(3, [B])])
    database.close()
    assert records(path) == [B]


@pytest.mark.parametrize("content", [b"", b"not a database" * 100, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_damaged_file_is_set_aside_and_stops_nothing(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_bytes(content)
    path.chmod(0o600)
    assert records(path) == []
    commit(path, Batch(1, [A]))
    assert records(path) == [A]
    aside = list(path.parent.glob("*.aside-*"))
    assert [file.read_bytes() for file in aside] == ([content] if content else [])
    assert ("set aside" in caplog.text) == bool(content)


def test_of_a_file_that_is_damaged_further_on_the_readable_part_is_kept(path: Path) -> None:
    many = [Record(number, number.to_bytes(16), os.urandom(300), 1, None) for number in range(500)]
    commit(path, Batch(1, many))
    content = bytearray(path.read_bytes())
    content[-9 * 4096 : -8 * 4096] = b"\xff" * 4096
    path.write_bytes(content)
    kept = records(path)
    assert {record.key for record in kept} <= {record.key for record in many}
    assert records(path) == kept, "the next start reads the same from the new file"


def test_a_database_of_somebody_else_is_set_aside(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE precious (x)")
    other.close()
    path.chmod(0o600)
    assert records(path) == []
    (aside,) = path.parent.glob("*.aside-*")
    with sqlite3.connect(aside) as kept:
        assert kept.execute("SELECT name FROM sqlite_master").fetchall() == [("precious",)]
    kept.close()


def test_what_others_can_write_is_not_used(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"")
    path.chmod(0o666)
    commit(path, Batch(1, [A]))
    assert len(list(path.parent.glob("*.aside-*"))) == 1
    link = path.with_name("link")
    link.symlink_to(path)
    assert records(link) == []
    assert records(path) == [A]


def test_a_file_in_use_leaves_decisions_in_memory(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = load(path, "commit")
    assert first is not None
    assert load(path, "commit") == (None, [])
    assert "in use" in caplog.text
    first.close()
    assert not list(path.parent.glob("*.aside-*"))


def test_where_no_directory_can_be_made_decisions_are_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert load(tmp_path / "file" / "decisions", "commit") == (None, [])
    assert "not kept" in caplog.text


def test_batches_that_wait_together_are_committed_together_and_reported_in_order(path: Path) -> None:
    database, _ = load(path, "commit")
    assert database is not None
    first, go_on, woken = threading.Event(), threading.Event(), threading.Semaphore(0)
    commits: list[int] = []
    really = database.commit

    def slowly(batches: list[Batch]) -> None:
        first.set()
        go_on.wait(10)
        commits.append(len(batches))
        really(batches)

    database.commit = slowly  # type: ignore[method-assign, assignment]
    committer = Committer(database, woken.release, "full")
    committer.submit(Batch(1, [A]))
    assert committer.commit() == []
    assert first.wait(10)
    for number in range(2, 6):
        committer.submit(Batch(number, [B], deleted=[B.sequence]))
        committer.commit()
    go_on.set()
    assert woken.acquire(timeout=10)
    assert woken.acquire(timeout=10)
    assert [(batch.number, why) for batch, why in committer.commit()] == [(n, "") for n in range(1, 6)]
    assert commits == [1, 4]
    committer.close()
    assert records(path) == [A, B]


def numbered(*sequences: int) -> list[Record]:
    return [Record(number, number.to_bytes(16), b"v%d" % number, number, None) for number in sequences]


def rows(path: Path) -> int:
    connection = sqlite3.connect(path)
    (count,) = connection.execute("SELECT count(*) FROM records").fetchone()
    connection.close()
    return int(count)


def test_what_was_added_together_is_one_row_until_some_of_it_leaves(path: Path) -> None:
    commit(path, Batch(1, numbered(1, 2, 3, 4, 5)), Batch(2, numbered(6)), Batch(3, numbered(8, 9)))
    assert rows(path) == 3
    assert records(path) == numbered(1, 2, 3, 4, 5, 6, 8, 9)
    commit(path, Batch(4, deleted=[2, 6]))
    assert rows(path) == 3  # 1 alone, 3 to 5 together, 8 and 9 together
    commit(path, Batch(5, numbered(10, 11), deleted=[1, 4, 8, 9]))
    assert records(path) == numbered(3, 5, 10, 11)
    assert rows(path) == 3
    large = Record(13, b"large" + bytes(11), b"x" * 40_000, 1, None)
    commit(path, Batch(6, [*numbered(12), large, Record(14, b"k" * 16, b"x" * 40_000, 1, None)]))
    assert rows(path) == 5  # 12 and 13 together; with 14 it would be too much


def test_one_commit_may_add_and_take_apart_and_fail_without_a_trace(path: Path) -> None:
    database, _ = load(path, "commit")
    assert database is not None
    database.commit([Batch(1, numbered(1, 2, 3))])
    database.commit([Batch(2, numbered(4, 5, 6)), Batch(3, deleted=[2, 5])])
    with pytest.raises(sqlite3.Error):
        database.commit([Batch(4, numbered(7, 8)), Batch(5, numbered(1), deleted=[7])])  # 1 is there
    database.commit([Batch(6, numbered(7, 8, 9)), Batch(7, deleted=[4, 8])])
    database.close()
    assert records(path) == numbered(1, 3, 6, 7, 9)


def test_a_file_that_churned_holds_what_a_dictionary_holds(path: Path) -> None:
    random, held, number = Random(7), dict[int, Record](), 0
    for _ in range(20):
        database, kept = load(path, "commit")
        assert database is not None
        assert kept == list(held.values())
        for _ in range(20):
            made = numbered(*range(number + 1, number + random.choice((1, 1, 2, 9, 64)) + 1))
            number = made[-1].sequence
            gone = random.sample(sorted(held), min(len(held), random.choice((0, 0, 1, 5, 40))))
            batches = [Batch(1, deleted=gone), Batch(2, made)]
            database.commit(batches if random.random() < 0.5 else [Batch(1, made, gone)])
            held = {n: r for n, r in held.items() if n not in gone} | {r.sequence: r for r in made}
        database.close()


class Seen:
    """A database whose commits and checkpoints tell on which thread they run, and wait to be let on."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.database, _ = load(path, "commit")
        assert self.database is not None
        self.threads: list[tuple[str, bool]] = []
        self.checkpointing, self.go_on = threading.Event(), threading.Event()
        commit, checkpoint = self.database.commit, self.database.checkpoint

        def note(what: str) -> None:
            self.threads.append((what, threading.current_thread() is threading.main_thread()))

        def noted_commit(batches: Any) -> None:
            note("commit")
            commit(batches)

        def noted_checkpoint() -> None:
            note("checkpoint")
            self.checkpointing.set()
            assert self.go_on.wait(10)
            checkpoint()

        monkeypatch.setattr(self.database, "commit", noted_commit)
        monkeypatch.setattr(self.database, "checkpoint", noted_checkpoint)


def test_a_small_commit_is_made_at_once_and_a_checkpoint_keeps_nobody(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the checkpoint has ended the thread commits too, and all is reported in its order."""
    monkeypatch.setattr(db, "CHECKPOINT_PAGES", 2)
    seen, woken = Seen(path, monkeypatch), threading.Semaphore(0)
    assert seen.database is not None
    committer = Committer(seen.database, woken.release, "commit")
    for number in (1, 2):
        committer.submit(Batch(number, numbered(number)))
        assert [batch.number for batch, _ in committer.commit()] == [number]
    assert seen.checkpointing.wait(10)
    committer.submit(Batch(3, numbered(3)))
    assert committer.commit() == []
    assert seen.threads == [("commit", True), ("commit", True), ("checkpoint", False)]
    seen.go_on.set()
    assert woken.acquire(timeout=10)
    assert [batch.number for batch, _ in committer.commit()] == [3]
    assert seen.threads[3] == ("commit", False)
    committer.close()
    assert records(path) == numbered(1, 2, 3)


@pytest.mark.parametrize("why", ["full", "large", "slow"])
def test_what_could_wait_for_the_disk_is_committed_by_the_thread(
    path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    seen, woken = Seen(path, monkeypatch), threading.Semaphore(0)
    seen.go_on.set()
    assert seen.database is not None
    committer = Committer(seen.database, woken.release, "full" if why == "full" else "commit")
    if why == "slow":
        monkeypatch.setattr(db, "_SLOW_S", 0.0)
        committer.submit(Batch(1, numbered(1)))
        assert len(committer.commit()) == 1
        seen.threads.clear()
    value = b"x" * (1 << 20 if why == "large" else 1)
    committer.submit(Batch(2, [Record(2, b"k" * 16, value, 1, None)]))
    assert committer.commit() == []
    assert woken.acquire(timeout=10)
    assert [batch.number for batch, _ in committer.commit()] == [2]
    assert seen.threads[0] == ("commit", False)
    committer.close()


@pytest.mark.parametrize("why", ["full", "large", "slow", "busy", "waiting", "unsaid"])
def test_at_once_is_committed_only_what_waits_for_nobody_and_for_no_disk(
    path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    seen, woken = Seen(path, monkeypatch), threading.Semaphore(0)
    assert seen.database is not None
    committer = Committer(seen.database, woken.release, "full" if why == "full" else "commit")
    if why == "slow":
        monkeypatch.setattr(db, "_SLOW_S", 0.0)
    if why not in ("full", "large"):
        if why == "busy":
            monkeypatch.setattr(db, "CHECKPOINT_PAGES", 1)
        assert committer.commit_at_once(Batch(1, numbered(1))) == ""
        assert seen.threads[0] == ("commit", True)
    if why == "busy":
        assert seen.checkpointing.wait(10)
    if why in ("waiting", "unsaid"):
        committer.submit(Batch(2, [Record(2, b"k" * 16, b"x" * (1 << 20), 1, None)]))
    if why == "unsaid":
        committer.commit()
        assert woken.acquire(timeout=10)
    value = b"x" * (1 << 20 if why == "large" else 1)
    assert committer.commit_at_once(Batch(3, [Record(3, b"k" * 16, value, 1, None)])) is None
    seen.go_on.set()
    committer.close()


def test_a_commit_at_once_that_fails_says_why(path: Path) -> None:
    database, _ = load(path, "commit")
    assert database is not None
    committer = Committer(database, lambda: None, "commit")
    assert committer.commit_at_once(Batch(1, numbered(1))) == ""
    assert "UNIQUE" in (committer.commit_at_once(Batch(2, numbered(1))) or "")
    assert committer.commit_at_once(Batch(3, numbered(2))) == ""
    committer.close()
    assert records(path) == numbered(1, 2)


def test_removing_takes_the_log_and_what_was_set_aside(path: Path) -> None:
    commit(path, Batch(1, [A]))
    for suffix in ("-wal", ".aside-1", ".aside-1-wal"):
        path.with_name(path.name + suffix).write_bytes(b"")
    path.with_name(path.name + "x").write_bytes(b"")
    assert len(db.remove(path)) == 4
    assert [file.name for file in path.parent.iterdir()] == [path.name + "x"]


def test_the_default_is_in_the_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert db.default_path("ns") == tmp_path / "shmcache" / "decisions.ns.sqlite3"
    assert isinstance(Database, type)
