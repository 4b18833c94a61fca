"""What the README says about serving, done as it says."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serve.served import Process, prompt
from support import eventually
from test_docs import README, code_blocks

from shmcache.observe import observe
from shmcache.tools.demo import CoordinatorProcess

SERVING = README.partition("## Serve it")[2].partition("\n## ")[0]


def free_port() -> int:
    """One that nobody has at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def test_ten_lines_lead_from_nothing_to_an_answer(namespace: str, tiny_model: Path) -> None:
    shell, _ = code_blocks(SERVING, "sh")
    python = code_blocks(SERVING, "python")[0]
    assert len(shell.splitlines()) + len(python.strip().splitlines()) <= 10
    port = free_port()

    def here(text: str) -> str:
        text = text.replace("make setup\n", "").replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        text = text.replace(
            "serve --model", f"serve --port {port} --llama n_threads=1 --llama n_ctx=128 --model"
        )
        text = re.sub(r"\$HOME/\S+\.gguf", str(tiny_model), text)
        return text.replace(".venv/bin/shmcache", f"{Path(sys.executable).parent}/shmcache")

    script = subprocess.Popen(
        ["bash", "-ec", here(shell) + "\necho\nwait"],
        env={**os.environ, "SHMCACHE_NAMESPACE": namespace},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert script.stdout is not None
        lines = iter(script.stdout.readline, "")
        assert any('"choices"' in line for line in lines)
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(here(python), "README.md", "exec"), {})
        assert output.getvalue().strip()
    finally:
        os.killpg(script.pid, signal.SIGTERM)
        script.communicate(timeout=60)


@pytest.fixture
def own_server(tmp_path: Path, namespace: str, tiny_model: Path) -> Any:
    """llama-cpp-python's own server, started by the README's file."""
    (recipe,) = (block for block in code_blocks(SERVING, "python") if "shared_server.py" in block)
    file = tmp_path / "shared_server.py"
    # Smaller gates, because the tiny model's prompts are short.
    gates = "gates=Gates(min_tokens=64, cold_min_tokens=64, boundary_align_tokens=64)"
    file.write_text(
        "from shmcache.config import Gates\n" + recipe.replace('"default")', f'"{namespace}", {gates})')
    )
    options = {"model": tiny_model, "port": free_port(), "n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1}
    with Process([str(file), *(f"--{name}={value}" for name, value in options.items())]) as process:
        process.url = f"http://127.0.0.1:{options['port']}"
        eventually(lambda: is_up(process), within_s=60)
        yield process


def is_up(process: Process) -> bool:
    assert process.process.poll() is None, process.log()
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{process.url}/v1/models").status_code == 200
    return False


def test_llama_cpp_pythons_own_server_shares_by_the_recipe(
    coordinator: CoordinatorProcess, own_server: Process, namespace: str
) -> None:
    client = openai.OpenAI(base_url=f"{own_server.url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "any", "prompt": prompt("recipe"), "max_tokens": 6, "temperature": 0.0}

    def hits() -> dict[str, int]:
        client.completions.create(**asked)
        return observe(namespace).hits

    assert hits() == {"exact": 0, "partial": 0}
    assert hits() == {"exact": 1, "partial": 0}
    client.completions.create(**{**asked, "prompt": prompt("something else")})
    assert hits() == {"exact": 2, "partial": 0}
    parts = client.completions.create(**asked, stream=True)
    assert "".join(part.choices[0].text for part in parts)
    own_server.stop()
    eventually(lambda: not observe(namespace).workers)
