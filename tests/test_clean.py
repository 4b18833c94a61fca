"""What `shmcache clean` takes away, and what it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shmcache.shm import Names
from shmcache.tools.clean import remove
from shmcache.tools.demo import CoordinatorProcess
from shmcache.tools.main import main


def test_a_served_namespace_is_not_touched(
    namespace: str, coordinator: CoordinatorProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["clean", "--namespace", namespace]) == 1
    assert "is running already" in capsys.readouterr().err
    assert Names(namespace).control.exists()


def test_a_killed_coordinators_things_all_go(
    namespace: str, coordinator: CoordinatorProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    coordinator.kill()
    assert main(["clean", "--namespace", namespace, "--decisions", "--json"]) == 0
    removed = json.loads(capsys.readouterr().out)["removed"]
    assert len(removed) == 6  # directory, two segments, queue, decisions and their log
    assert not list(Path("/dev/shm").glob(f"*{namespace}*"))
    assert remove(namespace) == []


def test_a_namespace_whose_name_begins_alike_stays(namespace: str, coordinator: CoordinatorProcess) -> None:
    assert remove(namespace[:-1]) == []
    assert Names(namespace).control.exists()
