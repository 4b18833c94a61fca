"""The figures of a namespace, with and without its coordinator."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from importlib.metadata import version

import pytest

from shmcache import server
from shmcache.observe import Observation, TierFigures, WorkerFigures, observe
from shmcache.page import COUNTERS
from shmcache.tools.demo import CoordinatorProcess
from shmcache.tools.main import USAGE_ERROR, main, make_parser
from shmcache.tools.stat import report

NO_COUNTS = dict.fromkeys(COUNTERS, 0)


def observation(**changes: object) -> Observation:
    """Figures of a small cache in use."""
    values: dict[str, object] = {
        "namespace": "n",
        "coordinator_running": True,
        "coordinator_pid": 7,
        "epoch": "00000000000000ff",
        "started_unix_s": 1_000,
        "rows": 3,
        "max_rows": 1024,
        "tiers": {"ram_file": TierFigures(3, 96 << 20, 32 << 20, 256 << 20, is_down=False)},
        "hits": {"exact": 2, "partial": 1},
        "misses": 1,
        "saves": {"cold": 2, "continued": 0, "finish": 1, "evict": 0, "shutdown": 0},
        "dropped": {"queue_full": 4},
        "evictions": 5,
        "corrupt_rows": 1,
        "tier_faults": 6,
        "counters": {**NO_COUNTS, "reused_tokens": 900, "prefilled_tokens": 100, "uncached": 2},
        "decisions": {"rows": 2, "max_rows": 16, "durability": 0, "is_down": 0},
        "workers": [WorkerFigures("a" * 16, 2**31 - 1, 1 << 20, 0, 0, {**NO_COUNTS, "hit_exact": 2})],
    }
    return Observation(**{**values, **changes})  # type: ignore[arg-type]


def test_the_report_says_what_is_held_and_what_it_saved() -> None:
    text = "\n".join(report(observation(), now_unix_s=4_661.0))
    assert "running for 1:01:01, pid 7" in text
    assert "3 of 1,024" in text
    assert "ram_file     3  96 MiB    32 MiB  256 MiB   50%" in text
    assert "2 exact, 1 partial, 1 cold, 2 uncached" in text
    assert "900 reused (90% of all), 100 prefilled" in text
    assert "2 cold, 0 continued, 1 finish" in text
    assert "4 queue full" in text
    assert "decisions    2 of 16; memory: it may decide again after a crash" in text
    assert "tier faults  6" in text
    assert "1 worker attached" in text


def test_a_tier_that_is_down_is_shown_so() -> None:
    down = TierFigures(3, 96 << 20, 32 << 20, 256 << 20, is_down=True)
    text = "\n".join(report(observation(tiers={"disk": down}), now_unix_s=4_661.0))
    (line,) = [line for line in text.splitlines() if line.startswith("disk")]
    assert line.split()[-1] == "down"


def test_a_worker_whose_pid_is_not_of_this_container_is_shown_all_the_same() -> None:
    (line,) = [line for line in report(observation(), 4_661.0) if line.startswith("a" * 16)]
    assert line.split()[1:3] == [str(2**31 - 1), "unknown"]


def test_stat_answers_while_the_coordinator_runs_and_after_it_was_killed(
    namespace: str, coordinator: CoordinatorProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stat", "--namespace", namespace, "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["coordinator_running"]
    assert seen["tiers"]["ram_file"] == {
        "rows": 0,
        "used_bytes": 0,
        "charged_bytes": 0,
        "budget_bytes": 256 << 20,
        "is_down": False,
    }
    coordinator.kill()
    assert main(["stat", "--namespace", namespace]) == 0
    assert "not running; workers go on reading" in capsys.readouterr().out


def test_stat_of_a_stopped_namespace_has_nothing_to_count(
    namespace: str, coordinator: CoordinatorProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert coordinator.stop() == 0
    assert main(["stat", "--namespace", namespace]) == 0
    assert capsys.readouterr().out == f"namespace    {namespace}\ncoordinator  not running\n"


def test_observing_sends_no_message(namespace: str, coordinator: CoordinatorProcess) -> None:
    """The coordinator is stopped by a signal, so that nothing could be answered."""
    coordinator.suspend()
    assert observe(namespace).coordinator_running
    coordinator.resume()


@pytest.mark.parametrize("command", ["stat", "check"])
def test_a_namespace_that_never_was_is_an_error_with_the_remedy(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--namespace", "never-was"]) == 1
    assert "start shmcache-coordinator --namespace never-was" in capsys.readouterr().err


def test_a_wrong_namespace_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stat", "--namespace", "../etc"]) == USAGE_ERROR
    assert "must match" in capsys.readouterr().err


@pytest.mark.parametrize("parser", [make_parser, server.arguments])
def test_both_commands_say_which_version_they_are(
    parser: Callable[[], argparse.ArgumentParser], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        parser().parse_args(["--version"])
    assert capsys.readouterr().out == f"shmcache {version('shmcache')}\n"
