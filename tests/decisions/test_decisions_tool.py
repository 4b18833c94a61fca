"""`shmcache decisions`: look, pre-warm, hand over, forget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import Namespace

from shmcache.decisions import DecisionCache
from shmcache.decisions.shared import SharedStore
from shmcache.tools.main import main

QUESTIONS = {"q": {"type": "noul"}}


@pytest.fixture
def running(space: Namespace) -> Namespace:
    space.start()
    return space


def decide(space: Namespace, *states: Any) -> None:
    with DecisionCache(namespace=space.name) as cache:
        for state in states:
            cache.get_or_compute("m", state, QUESTIONS, lambda state, q: {"q": 0.5})


def said(capsys: pytest.CaptureFixture[str], space: Namespace, *arguments: str) -> Any:
    assert main(["decisions", "--namespace", space.name, "--json", *arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_what_is_decided_is_shown_and_counted(running: Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    decide(running, "a", "b")
    shown = said(capsys, running, "show")
    assert [line["result"] for line in shown] == [{"q": 0.5}] * 2
    assert said(capsys, running, "show", shown[0]["key"][:8]) == [shown[0]]
    (figures,) = said(capsys, running, "stat")
    assert (figures["rows"], figures["stored"], figures["durability"]) == (2, 2, 1)
    assert main(["decisions", "--namespace", running.name, "stat"]) == 0
    assert "survives any kill" in capsys.readouterr().out
    assert main(["decisions", "--namespace", running.name, "show", "ffffffffff"]) in (0, 1)
    assert main(["decisions", "--namespace", running.name, "show", "xyz"]) == 2


def test_an_export_is_imported_where_the_first_decision_wins(
    running: Namespace, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    decide(running, "a", "b")
    file = tmp_path / "decisions.jsonl"
    assert said(capsys, running, "export", str(file)) == [{"exported": 2}]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[0]["result"] = {"q": 0.9}
    lines.append(lines[1] | {"key": "00" * 16})
    lines.append(lines[1] | {"key": "short"})
    lines.append(lines[1] | {"key": "11" * 16, "expires": 1.0})
    file.write_text("\n".join(map(json.dumps, lines)))
    assert said(capsys, running, "import", str(file)) == [{"added": 1, "known": 1, "held": 1, "refused": 2}]
    assert said(capsys, running, "show", "00") == [
        lines[1] | {"key": "00" * 16, "written": said(capsys, running, "show", "00")[0]["written"]}
    ]
    assert main(["decisions", "--namespace", running.name, "import", str(tmp_path / "none")]) == 2
    file.write_text("{")
    assert main(["decisions", "--namespace", running.name, "import", str(file)]) == 2


def test_requests_are_computed_ahead_once(
    running: Namespace, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "answering.py").write_text("def answer(state, questions):\n    return {'q': 1 / state}\n")
    requests = tmp_path / "requests.jsonl"
    requests.write_text("".join(json.dumps({"state": n, "questions": QUESTIONS}) + "\n" for n in (1, 2, 1)))
    warm = ["warm", str(requests), "--with", "answering:answer"]
    assert said(capsys, running, *warm) == [{"computed": 2, "known": 1, "failed": 0, "not_kept": 0}]
    assert said(capsys, running, *warm) == [{"computed": 0, "known": 3, "failed": 0, "not_kept": 0}]
    requests.write_text(json.dumps({"state": 0, "questions": QUESTIONS}))
    assert main(["decisions", "--namespace", running.name, *warm]) == 1
    assert main(["decisions", "--namespace", running.name, *warm[:-1], "answering:nothing"]) == 2


def test_what_is_not_kept_is_no_success(
    running: Namespace, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that its question does not allow; and a coordinator that does not run at all."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unkept.py").write_text("def answer(state, questions):\n    return {'q': 'perhaps'}\n")
    requests = tmp_path / "requests.jsonl"
    requests.write_text(json.dumps({"state": 1, "questions": QUESTIONS}))
    warm = ["decisions", "warm", str(requests), "--with", "unkept:answer", "--namespace", running.name]
    assert main([*warm, "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"computed": 1, "known": 0, "failed": 0, "not_kept": 1}
    running.stop()
    assert main(warm) == 1
    assert "start shmcache-coordinator" in capsys.readouterr().err


def test_a_namespace_may_stand_behind_the_action(
    running: Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    decide(running, "a")
    assert main(["decisions", "stat", "--namespace", running.name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 1
    assert main(["decisions", "--namespace", running.name, "--json", "stat"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 1


def test_a_model_that_is_not_there_is_named(
    running: Namespace, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    requests = tmp_path / "requests.jsonl"
    requests.write_text(json.dumps({"state": 1, "questions": QUESTIONS}))
    warm = ["decisions", "warm", str(requests), "--namespace", running.name, "--with"]
    assert main([*warm, str(tmp_path / "none.gguf")]) == 2
    assert "none.gguf" in capsys.readouterr().err


def test_deleting_and_pruning(running: Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    decide(running, "a", "b")
    (first, _second) = said(capsys, running, "show")
    assert said(capsys, running, "delete", first["key"]) == [{"deleted": 1}]
    store = SharedStore(running.name)
    store.renew(bytes.fromhex(_second["key"]), 0)
    assert said(capsys, running, "prune") == [{"pruned": 0}]
    assert len(store) == 0
    store.close()


def test_without_a_coordinator_it_says_so(space: Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decisions", "--namespace", space.name, "stat"]) == 1
    assert "no coordinator" in capsys.readouterr().err
