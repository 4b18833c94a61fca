"""ls, show, evict, pin and unpin: rows as people see and change them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import PIECES, TOKEN_IDS, Namespace, eventually, identity, meta, payload_of, plan, prompt, save

from shmcache.check import check
from shmcache.client import Cache
from shmcache.identity import tenant_hash
from shmcache.key import PrefixWalk, row_address
from shmcache.kvc import HEAD_DETAIL, Reason
from shmcache.tools import evict, text
from shmcache.tools.main import USAGE_ERROR, main

WHO, OTHER_WHO = identity(), identity("another model")
A, B, C = (prompt(500, name) for name in "abc")
OLD_UNIX_S = 1_700_000_000  # what support.meta says of every row

Run = Callable[..., tuple[int, str, str]]


def key_of(row: bytes) -> str:
    return row_address(WHO.seed, row).key.hex()


@pytest.fixture
def cache(space: Namespace) -> Cache:
    """A cache with a coordinator behind it."""
    space.start()
    return space.cache()


@pytest.fixture
def run(space: Namespace, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """A command, its exit code and what it printed."""

    def command(name: str, *arguments: str) -> tuple[int, str, str]:
        code = main([name, "--namespace", space.name, *arguments])
        output = capsys.readouterr()
        return code, output.out, output.err

    yield command


def listed(run: Run, *arguments: str) -> list[dict[str, Any]]:
    code, output, _ = run("ls", "--json", *arguments)
    assert code == 0
    rows: list[dict[str, Any]] = json.loads(output)
    return rows


def keys(run: Run) -> set[str]:
    return {row["key"] for row in listed(run)}


@pytest.fixture
def aside(cache: Cache) -> str:
    """The key of a row that was found wrong."""
    assert save(cache, WHO, A, b"a" * 64)
    [hit] = cache.candidates(PrefixWalk(WHO.seed, A), len(A))
    cache.quarantine(hit, "its state differs")
    assert eventually(lambda: cache.get(row_address(WHO.seed, A).key) is None)
    return key_of(A)


# ---- looking


def test_what_was_set_aside_is_told_and_evicted(space: Namespace, aside: str, run: Run) -> None:
    def is_told() -> bool:
        return [(row["key"], row["is_aside"]) for row in listed(run)] == [(aside, True)]

    assert eventually(is_told)
    assert "set aside" in run("ls")[1]
    [finding] = check(space.name)
    assert (finding.kind, finding.name) == ("aside", aside)
    assert Path(finding.detail.split(": ")[1].split(" is kept")[0]).is_file()
    code, output, _ = run("evict", "--json", "--key", aside[:12])
    assert (code, json.loads(output)["forgotten"]) == (0, 1)
    assert listed(run) == []
    assert check(space.name) == []


def test_what_was_set_aside_is_found_by_what_it_is(aside: str, run: Run) -> None:
    for chosen in (["--model", "unnamed"], ["--older-than", "1h"], ["--all"]):
        code, output, _ = run("evict", "--json", "--dry-run", *chosen)
        assert (code, [row["key"] for row in json.loads(output)["rows"]]) == (0, [aside]), chosen


def test_what_was_set_aside_on_disk_is_told_and_evicted(space: Namespace, tmp_path: Path, run: Run) -> None:
    tmp_path.chmod(0o700)
    space.start(f"--disk-dir={tmp_path}")
    cache = space.cache(tier="disk")
    assert save(cache, WHO, A, b"a" * 64)
    [hit] = cache.candidates(PrefixWalk(WHO.seed, A), len(A))
    cache.quarantine(hit, "its state differs")
    hit.close()
    assert eventually(lambda: [(row["tier"], row["is_aside"]) for row in listed(run)] == [("disk", True)])
    space.kill()
    space.start(f"--disk-dir={tmp_path}")
    assert [(row["key"], row["is_aside"]) for row in listed(run)] == [(key_of(A), True)], (
        "after a restart too"
    )
    assert run("evict", "--all")[0] == 0
    assert not list(tmp_path.rglob("*.aside"))
    assert listed(run) == []


def test_ls_says_what_each_row_is(cache: Cache, run: Run) -> None:
    assert save(cache, WHO, A, b"a" * 64, model_name="small", reason_detail=HEAD_DETAIL, hit_count=3)
    assert save(cache, OTHER_WHO, B, b"b" * 64, tenant_hash=tenant_hash("one"), save_reason=Reason.FINISH)
    head, reply = sorted(listed(run), key=lambda row: row["model"])
    assert (head["model"], head["tier"], head["tokens"], head["hits"]) == ("small", "ram_file", 100, 3)
    assert (head["key"], head["is_head"], head["tenant"]) == (key_of(A), True, None)
    assert (reply["model"], reply["reason"]) == ("unnamed", "finish")
    assert reply["tenant"] == tenant_hash("one").hex()
    code, output, _ = run("ls")
    assert code == 0
    assert output.splitlines()[-1].startswith("2 rows, ")
    assert key_of(A)[:16] in output


def test_ls_of_one_tier_in_the_order_that_is_asked_for(space: Namespace, tmp_path: Path, run: Run) -> None:
    tmp_path.chmod(0o700)
    space.start(f"--disk-dir={tmp_path}")
    assert save(space.cache(), WHO, A, b"a" * 64)
    assert save(space.cache(tier="disk"), WHO, B, b"b" * 640)
    assert [row["key"] for row in listed(run, "--tier", "disk")] == [key_of(B)]
    assert [row["key"] for row in listed(run, "--sort", "bytes")] == [key_of(B), key_of(A)]


def test_ls_of_nothing_is_nothing(cache: Cache, run: Run) -> None:
    assert listed(run) == []
    assert run("ls")[1] == "0 rows, 0 MiB\n"


def test_ls_works_while_the_coordinator_is_down(space: Namespace, cache: Cache, run: Run) -> None:
    assert save(cache, WHO, A, b"a" * 64)
    space.kill()
    assert keys(run) == {key_of(A)}


def test_show_says_everything_by_the_beginning_of_a_key(cache: Cache, run: Run) -> None:
    assert save(cache, WHO, A, b"a" * 64)
    base = row_address(WHO.seed, A).key
    assert save(cache, WHO, A + B, b"b" * 64, base=base)
    code, output, _ = run("show", "--json", row_address(WHO.seed, A + B).key.hex()[:12])
    assert code == 0
    shown = json.loads(output)
    assert shown["row"]["made_from"] == base.hex()
    assert shown["split"] == [{"length": 100, "repeats": 1, "n_ubatch": 512, "n_threads": 1}]
    assert Path(shown["path"]).is_file()
    code, output, _ = run("show", key_of(A))
    assert code == 0
    assert "made from    nothing" in output


@pytest.mark.parametrize("key", ["abc", "xyzw", "0000000000"])
def test_a_key_that_no_row_has_is_a_usage_error(cache: Cache, run: Run, key: str) -> None:
    for command in (("show", key), ("pin", key)):
        code, _, error = run(*command)
        assert code == USAGE_ERROR
        assert key in error


# ---- pins


def test_a_pin_shows_and_goes_again(cache: Cache, run: Run) -> None:
    assert save(cache, WHO, A, b"a" * 64)
    code, output, _ = run("pin", key_of(A)[:16])
    assert code == 0
    assert "is pinned" in output
    assert listed(run)[0]["is_pinned"]
    code, output, _ = run("unpin", "--json", key_of(A))
    assert code == 0
    assert json.loads(output)["done"]
    assert not listed(run)[0]["is_pinned"]


def test_what_changes_something_needs_a_coordinator(space: Namespace, cache: Cache, run: Run) -> None:
    assert save(cache, WHO, A, b"a" * 64)
    space.kill()
    for command in (("pin", key_of(A)), ("evict", "--all")):
        code, _, error = run(*command)
        assert code == 1
        assert "start shmcache-coordinator" in error
    assert keys(run) == {key_of(A)}


# ---- forgetting


@pytest.fixture
def filled(cache: Cache) -> Cache:
    """A row of one model, one of another's tenant, and a young one."""
    assert save(cache, WHO, A, b"a" * 64, model_name="small")
    assert save(cache, OTHER_WHO, B, b"b" * 64, model_name="large", tenant_hash=tenant_hash("one"))
    assert save(cache, WHO, C, b"c" * 64, model_name="small", created_unix_s=OLD_UNIX_S + 10_000_000_000)
    return cache


@pytest.mark.parametrize(
    ("conditions", "stays"),
    [
        (["--key", key_of(A)], "BC"),
        (["--key", key_of(A)[:10], "--key", key_of(C)[:10]], "B"),
        (["--model", "small"], "B"),
        (["--model", OTHER_WHO.model_fp.hex()[:12]], "AC"),
        (["--tenant", "one"], "AC"),
        (["--tenant", "two"], "ABC"),
        (["--older-than", "30d"], "C"),
        (["--model", "small", "--older-than", "1h"], "BC"),
        (["--model", "small", "--tenant", "one"], "ABC"),
        (["--all"], ""),
    ],
    ids=" ".join,
)
def test_rows_that_meet_all_conditions_are_forgotten(
    filled: Cache, run: Run, conditions: list[str], stays: str
) -> None:
    before = keys(run)
    code, output, _ = run("evict", "--dry-run", "--json", *conditions)
    assert code == 0
    would = json.loads(output)
    assert (would["dry_run"], would["forgotten"], len(would["rows"])) == (True, 0, 3 - len(stays))
    assert keys(run) == before
    forget = filled.forget
    code, output, _ = run("evict", "--json", *conditions)
    assert code == 0
    done = json.loads(output)
    assert done["forgotten"] == len(done["rows"]) == 3 - len(stays)
    assert filled.forget > forget, "also where no row is there yet: a save of it may be under way"
    there = [name for name, row in (("A", A), ("C", C)) if payload_of(filled, WHO, row) is not None]
    there += ["B"] * (payload_of(filled, OTHER_WHO, B) is not None)
    assert "".join(sorted(there)) == stays
    eventually(lambda: check(filled.connection.names.namespace) == [])


def test_what_is_published_between_the_look_and_the_message_goes_as_well(
    filled: Cache, space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that was made from a forgotten one, by a sequence that began before."""
    real = evict._ask
    late = [B + C]

    def slow(connection: Any, keys: list[bytes]) -> Any:
        for row in late:
            assert save(filled, WHO, row, b"l" * 64, model_name="small")
        late.clear()
        return real(connection, keys)

    monkeypatch.setattr(evict, "_ask", slow)
    result = evict.forget(space.name, [evict._is_of_model("small")])
    assert (result.forgotten, len(result.rows)) == (3, 3)
    assert payload_of(filled, WHO, B + C) is None


def test_a_save_in_flight_is_refused_though_no_row_matched(filled: Cache, run: Run) -> None:
    (slab,) = filled.reserve([plan(WHO, A + B, 64)], None, filled.forget).slabs
    assert slab is not None
    assert run("evict", "--tenant", "nobody")[0] == 0
    slab.payload(64)[:] = b"z" * 64
    slab.save(meta(WHO, A + B), PIECES, TOKEN_IDS)
    assert not slab.wait(10_000)
    assert payload_of(filled, WHO, A + B) is None


def test_more_rows_than_a_message_holds_go_all(
    cache: Cache, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evict, "MAX_EVICTED", 3)
    for number in range(8):
        assert save(cache, WHO, prompt(300, str(number)), b"x" * 64)
    assert json.loads(run("evict", "--all", "--json")[1])["forgotten"] == 8
    assert keys(run) == set()


@pytest.mark.parametrize(
    "conditions",
    [
        [],
        ["--all", "--model", "small"],
        ["--older-than", "a while"],
        ["--key", "nothex"],
        ["--prefix", "/nowhere"],
        ["--prefix", "/nowhere", "--model", "small"],
    ],
)
def test_conditions_that_choose_nothing_clear_are_refused(
    filled: Cache, run: Run, conditions: list[str]
) -> None:
    before = keys(run)
    assert run("evict", *conditions)[0] == USAGE_ERROR
    assert keys(run) == before


def test_the_report_names_the_rows(filled: Cache, run: Run) -> None:
    assert "would forget 1 row, " in run("evict", "--dry-run", "--tenant", "one")[1]
    code, output, _ = run("evict", "--tenant", "one")
    assert code == 0
    assert "large" in output
    assert "forgotten: 1 rows" in output


# ---- how figures look


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0s"), (-5, "0s"), (59.9, "59s"), (60, "1m 0s"), (3_725, "1h 2m"), (200_000, "2d 7h")],
)
def test_an_age_is_told_in_its_two_largest_units(seconds: float, shown: str) -> None:
    assert text.age(seconds) == shown


def test_a_bar_is_drawn_for_somebody_who_looks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with text.bar(10, "rows") as show:
        show(5)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with text.bar(10, "rows") as show:
        show(5)
    assert "[###############...............] 5 of 10 rows" in capsys.readouterr().err
