"""`shmcache warm` fills the cache ahead of traffic; `evict --prefix` reads what rows hold."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
from msgspec.structs import replace
from support import PIECES, Namespace, identity, meta

from shmcache import kvc
from shmcache.client import Cache, SavePlan
from shmcache.config import Gates
from shmcache.identity import fingerprint
from shmcache.key import row_address
from shmcache.tools.explain import Prompt
from shmcache.tools.main import USAGE_ERROR, main
from shmcache.workers import SharedLlama

PROMPT = "".join(f"Tool {number} multiplies by {number * 7}. " for number in range(16))
CHAT = [{"role": "system", "content": PROMPT}, {"role": "user", "content": "What does tool 3 do?"}]
SMALL = ["--llama=n_ctx=512", "--llama=n_threads=1", "--llama=n_threads_batch=1"]
GATES = ["--gate=min_tokens=32", "--gate=cold_min_tokens=32"]


@pytest.fixture
def filled(space: Namespace) -> Cache:
    """A cache with a coordinator behind it."""
    space.start("--ram-file-bytes=64M")
    return space.cache()


def test_a_worker_finds_what_was_warmed_and_warming_twice_computes_once(
    space: Namespace, filled: Cache, smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt, chat = tmp_path / "prompt", tmp_path / "chat.json"
    prompt.write_text(PROMPT)
    chat.write_text(json.dumps({"messages": CHAT}))
    command = ["warm", f"--namespace={space.name}", f"--model={smollm2}", *SMALL, *GATES]
    command += [f"--prompt={prompt}", f"--chat={chat}"]
    assert main([*command, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert [Path(one["file"]).name for one in first] == ["prompt", "chat.json"]
    assert first[0]["reused_tokens"] == 0
    assert first[0]["prefilled_tokens"] == first[0]["prompt_tokens"] > 32
    assert main(command) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in table] == ["computed", "1", "1"]
    gates = Gates(min_tokens=32, cold_min_tokens=32)
    llama = SharedLlama(
        str(smollm2), cache=space.name, gates=gates, n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False
    )
    try:
        llama.create_completion(PROMPT + "And now?", max_tokens=1)
        assert llama.last_report.reused_tokens > 32
    finally:
        llama.close()


@pytest.mark.parametrize(
    "what",
    [
        [],
        ["--prompt=/nowhere"],
        ["--chat=/nowhere"],
        ["--chat=NOT_JSON"],
        ["--chat=NO_MESSAGES"],
    ],
)
def test_warm_says_what_it_cannot_compute(
    space: Namespace, filled: Cache, smollm2: Path, tmp_path: Path, what: list[str]
) -> None:
    (tmp_path / "NOT_JSON").write_text("{")
    (tmp_path / "NO_MESSAGES").write_text("{}")
    options = [option.replace("=N", f"={tmp_path}/N") for option in what]
    assert main(["warm", f"--namespace={space.name}", f"--model={smollm2}", *options]) == USAGE_ERROR


def test_warm_says_why_something_was_not_saved_if_it_is_asked(
    space: Namespace, filled: Cache, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "prompt").write_text("short")
    command = [sys.executable, "-m", "shmcache.tools.main", "warm", f"--namespace={space.name}"]
    command += [f"--model={tiny_models['llama']}", f"--prompt={tmp_path / 'prompt'}", *SMALL]
    silent, said = (
        subprocess.run([*command, *more], capture_output=True, text=True, check=True).stderr
        for more in ([], ["--explain-saves"])
    )
    assert "not saved" not in silent
    assert "not saved: the prompt: its 6 tokens are not above min_tokens (512)" in said


def test_warm_needs_a_coordinator(
    space: Namespace, smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt").write_text(PROMPT)
    command = ["warm", f"--namespace={space.name}", f"--model={smollm2}", f"--prompt={tmp_path / 'prompt'}"]
    assert main(command) == 1
    assert "start shmcache-coordinator" in capsys.readouterr().err


def put(cache: Cache, model: Path, prompt: str) -> bytes:
    """A row with the real tokens of a prompt and no state worth the name; its key."""
    text = Prompt(model, prompt).text
    who = replace(identity(), model_fp=fingerprint(model))
    address = row_address(who.seed, bytes(text.text))
    piece = replace(PIECES[0], length=len(text.tokens))
    offset = kvc.head_bytes(len(text.tokens), 1)
    plan = SavePlan(address=address, text_bytes=len(text.text), payload_offset=offset, payload_bytes=64)
    (slab,) = cache.reserve([plan], None, cache.forget).slabs
    assert slab is not None
    slab.payload(64)[:] = bytes(64)
    about = meta(who, bytes(text.text), token_count=len(text.tokens))
    slab.save(about, (piece,), memoryview(array("I", text.tokens)).cast("B"))
    assert slab.wait(20_000)
    return address.key


def test_rows_whose_text_begins_with_a_file_are_forgotten(
    space: Namespace, filled: Cache, smollm2: Path, tmp_path: Path
) -> None:
    begins = [put(filled, smollm2, text) for text in ("My secret is 4711.", "My secret is 4711, you know.")]
    stays = [put(filled, smollm2, text) for text in ("My sec", "Your secret is 4711.", "1. My secret is 4")]
    (tmp_path / "prefix").write_text("My secret is 47\n")
    command = ["evict", f"--namespace={space.name}", f"--prefix={tmp_path / 'prefix'}"]
    assert main(command) == USAGE_ERROR, "whose vocabulary?"
    assert main([*command, f"--model={smollm2}"]) == 0
    assert [filled.get(key) is not None for key in begins] == [False, False]
    assert [filled.get(key) is not None for key in stays] == [True] * 3
    (tmp_path / "prefix").write_text("\n")
    assert main([*command, f"--model={smollm2}"]) == USAGE_ERROR, "everything begins with nothing"
