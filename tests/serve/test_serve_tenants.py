"""Keys, tenants and models: who may ask, and whose rows are used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from model import tiny
from serve.served import Served, chat, prompt
from support import eventually

from shmcache.tools.clean import remove
from shmcache.tools.demo import CoordinatorProcess

A1, A2, B = "sk-tenant-a-first-key", "sk-tenant-a-other-key", "sk-tenant-b-only-key"
ASKED: dict[str, Any] = {"max_tokens": 2, "temperature": 0.0}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The key file of the server."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"# of the tests\n{A1} a\n{A2} a\n\n{B} b\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def served(keys: Path, tiny_model: Path) -> Iterator[Served]:
    """Two models, two tenants, two workers."""
    folder = keys.parent
    settings = folder / "serve.toml"
    other = tiny.build("llama", folder, seed=2)
    settings.write_text(
        f'workers = 2\napi-keys = "{keys}"\n'
        f'[models.other]\npath = "{other}"\nn_ctx = 1024\nlogits_all = true\n'
        "n_threads = 1\nn_threads_batch = 1\n"
        "gates = { min_tokens = 64, cold_min_tokens = 64, boundary_align_tokens = 64 }\n"
    )
    name = f"tenants-{os.getpid()}"
    coordinator = CoordinatorProcess(f"--namespace={name}", "--ram-file-bytes=128M", "--max-rows=1024")
    try:
        with Served(name, f"--model=tiny={tiny_model}", f"--config={settings}", workers=2, key=A1) as server:
            yield server
    finally:
        coordinator.stop()
        remove(name)


def cached_tokens(server: Served, key: str, messages: list[Any], **changes: Any) -> int:
    """Of one request, as the answer says."""
    asked = {"model": "tiny", "messages": messages, **ASKED, **changes}
    usage = server.client(key).chat.completions.create(**asked).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None
    return usage.prompt_tokens_details.cached_tokens


def reusable_tokens(server: Served, key: str, messages: list[Any]) -> int:
    """What the server would tell a router."""
    answer = httpx.post(
        f"{server.url}/v1/cache/lookup",
        json={"model": "tiny", "messages": messages},
        headers={"Authorization": f"Bearer {key}"},
    )
    return int(answer.json()["reusable_tokens"])


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer nobodys-key-at-all", f"Basic {A1}", f"Bearer {A1}x"]
)
def test_without_a_key_of_this_server_nothing_is_told(served: Served, header: str | None) -> None:
    headers = {"Authorization": header} if header is not None else {}
    body = {"model": "tiny", "prompt": "x"}
    for answer in (
        httpx.get(f"{served.url}/v1/models", headers=headers),
        httpx.get(f"{served.url}/metrics", headers=headers),
        httpx.post(f"{served.url}/v1/completions", json=body, headers=headers),
        httpx.post(f"{served.url}/v1/cache/lookup", json=body, headers=headers),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert httpx.get(f"{served.url}/healthz").status_code == 200


def test_case_e09_no_tenant_finds_what_another_has_asked(served: Served) -> None:
    messages = chat("a secret of a")
    assert cached_tokens(served, A1, messages) == 0
    assert eventually(lambda: reusable_tokens(served, A2, messages)) > 64
    assert reusable_tokens(served, B, messages) == 0
    for _ in range(4):  # whichever worker: neither rows nor what a worker has in its cells
        assert cached_tokens(served, A2, messages) > 64
    assert cached_tokens(served, B, messages) == 0
    assert cached_tokens(served, B, messages) > 64


def test_case_e09_no_field_and_no_header_sets_a_tenant(served: Served) -> None:
    messages = chat("another secret of a")
    cached_tokens(served, A1, messages)
    eventually(lambda: reusable_tokens(served, A1, messages))
    pretended = {"user": "a", "extra_body": {"tenant": "a", "api_key": A1, "namespace": "x", "cache": None}}
    headers = {"X-Tenant": "a", "X-Api-Key": A1, "OpenAI-Organization": "a", "OpenAI-Project": "a"}
    assert cached_tokens(served, B, messages, **pretended, extra_headers=headers) == 0


def test_case_e09_no_tenant_gets_what_was_decided_for_another(served: Served) -> None:
    body = {"state": "a letter", "questions": {"sad": {"type": "noul", "instructions": "Is it sad?"}}}

    def is_cached(key: str) -> bool:
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.post(f"{served.url}/v1/decisions", json=body, headers=headers, timeout=60)
        return bool(answer.json()["cached"])

    assert [is_cached(key) for key in (A1, A2, B, B)] == [False, True, False, True]


def test_each_model_answers_by_its_name_and_has_rows_of_its_own(served: Served) -> None:
    client = served.client(A1)
    assert [model.id for model in client.models.list()] == ["tiny", "other"]
    asked = {"prompt": prompt("both models"), "max_tokens": 12, "temperature": 0.0}
    texts = {}
    for model in ("tiny", "other", "tiny", "other"):
        answer = client.completions.create(model=model, **asked)  # type: ignore[call-overload]
        assert answer.model == model
        details = answer.usage.prompt_tokens_details
        assert (details.cached_tokens > 0) == (model in texts)
        assert texts.setdefault(model, answer.choices[0].text) == answer.choices[0].text
    assert texts["tiny"] != texts["other"]
    with pytest.raises(openai.NotFoundError, match="there is no model 'third'"):
        client.completions.create(model="third", prompt="x")


def test_log_probabilities_are_told_where_the_model_keeps_its_logits(served: Served) -> None:
    asked: dict[str, Any] = {"model": "other", "messages": chat("logits", words=5), **ASKED}
    answer = served.client(A1).chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    assert answer.choices[0].logprobs is not None
    first, second = answer.choices[0].logprobs.content or ()
    assert len(first.top_logprobs) == len(second.top_logprobs) == 3
    assert first.logprob == max(top.logprob for top in first.top_logprobs)


def test_keys_can_be_changed_while_the_server_runs(served: Served, keys: Path) -> None:
    """Last in this file: from here on there are other keys."""
    new = "sk-tenant-b-newer-key"
    keys.write_text(f"{A1} a\nthis line is wrong here\n")
    served.reload()
    assert "the keys from before go on" in served.log()
    assert served.client(B).models.list().data
    keys.write_text(f"{A1} a\n{new} b\n")
    served.reload()

    def is_refused(key: str) -> bool:
        try:
            served.client(key).models.list()
        except openai.AuthenticationError:
            return True
        return False

    eventually(lambda: is_refused(B))
    assert not is_refused(new)
    assert not is_refused(A1)
