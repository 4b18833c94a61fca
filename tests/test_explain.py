"""What `shmcache explain` says of a hit, of a near miss, and of another model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmcache.config import Gates
from shmcache.tools.demo import CoordinatorProcess
from shmcache.tools.explain import explain
from shmcache.tools.main import USAGE_ERROR, main
from shmcache.workers import SharedLlama

GATES = Gates(min_tokens=32, cold_min_tokens=32)
PROMPT = "".join(f"Tool {number} multiplies by {number * 7}. " for number in range(16))


@pytest.fixture
def filled(coordinator: CoordinatorProcess, namespace: str, smollm2: Path) -> Iterator[str]:
    """A namespace that holds the rows of PROMPT."""
    llama = SharedLlama(
        str(smollm2), cache=namespace, gates=GATES, n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False
    )
    llama.create_completion(PROMPT, max_tokens=1, temperature=0)
    llama.close()
    yield namespace


def test_it_names_the_row_and_the_tokens_of_a_hit(filled: str, smollm2: Path) -> None:
    [hit] = explain(filled, smollm2, PROMPT + "And now?").hits
    assert hit.tier == "ram_file"
    assert 0 < hit.reused_tokens < hit.prompt_tokens


def test_it_shows_the_first_byte_that_differs(filled: str, smollm2: Path) -> None:
    changed = PROMPT.replace("Tool 3 multiplies", "Tool 3 divides", 1)
    explanation = explain(filled, smollm2, changed)
    assert explanation.hits == []
    [miss] = explanation.misses
    assert miss.equal_bytes == changed.index("divides")
    assert miss.prompt_goes_on.partition("▸")[2].startswith("divides by 21")
    assert miss.row_goes_on.partition("▸")[2].startswith("multiplies by 21")


def test_it_says_that_the_rows_are_of_another_model(filled: str, smollm2: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(smollm2.read_bytes()[:-1] + b"\x01")  # one weight's last byte
    explanation = explain(filled, other, PROMPT)
    assert explanation.hits == explanation.misses == []
    assert len(explanation.other_models) == 1


def test_the_command_takes_a_prompt_or_a_chat_and_answers_by_its_exit_code(
    filled: str, smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt, chat = tmp_path / "prompt", tmp_path / "chat.json"
    prompt.write_text(PROMPT + "And now?")
    chat.write_text(json.dumps([{"role": "user", "content": "another thing"}]))
    common = ["explain", f"--namespace={filled}", f"--model={smollm2}"]
    assert main([*common, "--json", f"--prompt={prompt}"]) == 0
    assert json.loads(capsys.readouterr().out)["hits"]
    assert main([*common, f"--chat={chat}"]) == 1
    assert "is nearest" in capsys.readouterr().out
    assert main([*common, f"--prompt={tmp_path / 'nowhere'}"]) == USAGE_ERROR
