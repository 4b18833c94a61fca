"""`shmcache serve --explain-saves --audit-rate`: what its workers say, and what they look at again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from serve.served import NO_END, Served, prompt
from support import eventually

from shmcache.observe import observe
from shmcache.tools.demo import CoordinatorProcess


def test_a_server_explains_and_audits_where_it_is_told_to(
    coordinator: CoordinatorProcess, namespace: str, tiny_model: Path
) -> None:
    with Served(
        namespace, f"--model=tiny={tiny_model}", "--explain-saves", "--audit-rate=1", workers=1
    ) as server:
        client = server.client()
        options: dict[str, Any] = {
            "model": "tiny",
            "max_tokens": 4,
            "temperature": 0.0,
            "extra_body": {"logit_bias": NO_END},
        }
        for text in ("short", prompt("one"), prompt("another"), prompt("one")):
            client.completions.create(prompt=text, **options)
        assert eventually(lambda: "not saved: the prompt: its 6 tokens" in server.log())
        counters = observe(namespace).counters
        assert counters["audits"] == 1, "only what came out of the cache"
        assert counters["audits_differed"] == 0
