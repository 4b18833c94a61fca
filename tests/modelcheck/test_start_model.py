"""The start of a coordinator in every order, killed anywhere; and that the server starts as the model."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from explorer import explore
from start_model import EPOCH_STEPS, STEPS, StartModel
from support import Namespace

from shmcache import control, coordinator, index, mq, server, shm
from shmcache.config import CoordinatorConfig
from shmcache.control import Word
from shmcache.server import Server


@pytest.mark.parametrize(
    ("options", "floor"),
    [({"starts": 3, "workers": 1, "looks": 3}, 5_000), ({"starts": 2, "looks": 1}, 5_000)],
    ids=["killed twice", "two workers"],
)
def test_an_epoch_leads_to_a_complete_index_whoever_is_killed_when(
    options: dict[str, Any], floor: int
) -> None:
    found = explore(StartModel(**options))
    assert found.counterexample is None, str(found.counterexample)
    assert found.states > floor


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("epoch before the index is built", "E1"),
        ("epoch before the layout", "E2"),
        ("older removed before the epoch", "E3"),
    ],
)
def test_a_planted_fault_is_found(fault: str, what: str) -> None:
    found = explore(StartModel(faults=[fault]))
    assert found.counterexample is not None
    assert found.counterexample.why.startswith(what)


def test_the_server_starts_in_the_order_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = re.search(r"^ {4}start +(.+)$", server.__doc__ or "", re.MULTILINE)
    assert drawn is not None
    assert tuple(drawn[1].split(" → ")) == STEPS

    taken: list[str] = []

    def note(owner: Any, name: str, step: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def noted(*args: Any, **options: Any) -> Any:
            if not taken or taken[-1] != step:
                taken.append(step)
            return inner(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    with Namespace() as space:
        make_directory = shm.make_directory

        def directory(path: Any) -> None:
            # The namespace's own comes before its lock: the lock lies in it.
            if path == space.names.pages:
                taken.append("directories")
            make_directory(path)

        monkeypatch.setattr(shm, "make_directory", directory)
        note(control.OwnedControlPage, "acquire", "lock")
        note(server, "_budgets", "budget")
        note(index.IndexWriter, "create", "index")
        note(coordinator.Coordinator, "adopt", "adopt")
        note(mq.ServerQueue, "receive", "drain the queue")
        note(control.OwnedControlPage, "open_epoch", "epoch")
        note(server.Clients, "wake_all", "wake")
        note(Server, "_remove_older", "remove older")
        settings = CoordinatorConfig(namespace=space.name, ram_file_bytes=1 << 20, max_rows=64)
        with Server(settings) as started:
            assert started.ready
            steps = [step for step in taken if step in STEPS]
            assert steps == list(STEPS[:-1])
            assert taken[-3:] == ["epoch", "wake", "remove older"]


def test_the_epoch_is_stored_last_as_in_the_model() -> None:
    stored: list[str] = []

    class Words(dict[int, int]):
        def __missing__(self, word: int) -> int:
            return 0

        def __setitem__(self, word: int, value: int) -> None:
            stored.append("epoch 0" if word == Word.EPOCH and not value else Word(word).name.lower())

    page = object.__new__(control.OwnedControlPage)
    page.words = Words()  # type: ignore[assignment]
    page.open_epoch(5, 6, 7)
    assert [step for step in stored if step in EPOCH_STEPS] == list(EPOCH_STEPS)
    assert stored[0] == EPOCH_STEPS[0]
    assert stored[-1] == EPOCH_STEPS[-1]
