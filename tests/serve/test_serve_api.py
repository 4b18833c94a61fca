"""Every endpoint, asked by the openai package itself."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from serve.served import NO_END, Served, chat, prompt
from support import eventually

MODEL = "tiny"
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
SAME = {"temperature": 0.0, "seed": 1}


def test_models_are_listed_and_found_by_name(server: Served) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="there is no model 'other', but tiny"):
        client.models.retrieve("other")


def test_a_completion_counts_its_tokens(server: Served) -> None:
    answer = server.client().completions.create(
        model=MODEL, prompt=prompt("count"), max_tokens=7, logit_bias=NO_END, **SAME
    )
    assert answer.model == MODEL
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7


def test_a_prompt_of_token_ids_is_taken_as_it_is(server: Served) -> None:
    client = server.client()
    ids = list(b"abcd" * 20)
    answer = client.completions.create(model=MODEL, prompt=ids, max_tokens=1, **SAME)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)
    with pytest.raises(openai.BadRequestError, match="no such token"):
        client.completions.create(model=MODEL, prompt=[1, 999_999], max_tokens=1)


def test_a_streamed_completion_says_the_same_as_a_whole_one(server: Served) -> None:
    client = server.client()
    asked: dict[str, Any] = {"model": MODEL, "prompt": prompt("stream"), "max_tokens": 20, **SAME}
    whole = client.completions.create(**asked)
    *parts, usage = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert usage.usage is not None
    assert whole.usage is not None
    assert usage.usage.completion_tokens == whole.usage.completion_tokens
    assert usage.choices == []


def test_a_streamed_chat_says_the_same_as_a_whole_one(server: Served) -> None:
    client = server.client()
    asked: dict[str, Any] = {"model": MODEL, "messages": chat("chat"), "max_completion_tokens": 20, **SAME}
    whole = client.chat.completions.create(**asked)
    parts = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    assert whole.choices[0].message.role == parts[0].choices[0].delta.role == "assistant"


def test_a_prompt_that_was_seen_before_is_cached_whichever_worker_answers(server: Served) -> None:
    client = server.client()
    asked: dict[str, Any] = {"model": MODEL, "messages": chat("again"), "max_tokens": 4, **SAME}
    first = client.chat.completions.create(**asked)
    assert first.usage is not None
    assert first.usage.prompt_tokens_details is not None
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    for _ in range(4):
        again = client.chat.completions.create(**asked)
        assert again.usage is not None
        assert again.usage.prompt_tokens_details is not None
        assert again.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens - 1
        assert again.choices[0].message.content == first.choices[0].message.content


def test_a_decision_is_made_once_for_all_workers(server: Served) -> None:
    questions = {
        "kind": {"type": "choice", "instructions": "What is asked?", "criteria": ["refund", "other"]},
        "angry": {"type": "noul", "instructions": "Is the writer angry?"},
    }
    body = {"state": "I want my money back.", "questions": questions}
    url = f"{server.url}/v1/decisions"
    first = httpx.post(url, json=body, timeout=60).json()
    assert first["cached"] is False
    assert set(first["answers"]) == {"kind", "angry"}
    for _ in range(4):
        assert httpx.post(url, json=body).json() == {**first, "cached": True}
    for wrong in ({}, {"state": 1, "questions": {}}, {"state": 1, "questions": {"q": {"type": "poem"}}}):
        answer = httpx.post(url, json=wrong)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_next_turn_may_say_which_reply_it_goes_on_from(server: Served) -> None:
    client = server.client()
    messages = chat("parent")
    for _ in range(3):
        asked: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 6, "logit_bias": NO_END}
        first = client.chat.completions.create(**asked, **SAME)
        report: Any = first.model_extra
        messages = [
            *messages,
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "and then?"},
        ]
        hints = {"shmcache": {"parent_key": report["shmcache"]["finish_key"], "wait_ms": 2000}}
        following = client.chat.completions.create(
            **{**asked, "messages": messages}, **SAME, extra_body=hints
        )
        assert following.usage is not None
        assert following.usage.prompt_tokens_details is not None
        assert first.usage is not None
        assert (following.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens


def test_a_lookup_says_what_a_request_will_find(server: Served) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": chat("lookup")}
    asked = httpx.post(f"{server.url}/v1/cache/lookup", json=body).json()
    answer = server.client().chat.completions.create(**body, max_tokens=2, **SAME)
    assert answer.usage is not None
    assert asked == {
        "object": "cache.lookup",
        "model": MODEL,
        "prompt_tokens": answer.usage.prompt_tokens,
        "reusable_tokens": 0,
    }

    def reusable(**changes: Any) -> int:
        return int(httpx.post(f"{server.url}/v1/cache/lookup", json=body | changes).json()["reusable_tokens"])

    assert eventually(reusable) == answer.usage.prompt_tokens - 1
    longer = reusable(messages=[*body["messages"], {"role": "user", "content": "more"}])
    assert answer.usage.prompt_tokens // 2 < longer < answer.usage.prompt_tokens
    assert reusable(messages=chat("never asked")) == 0


def test_a_lookup_takes_the_prompt_of_a_completion_too(server: Served) -> None:
    text = prompt("bare lookup")
    server.client().completions.create(model=MODEL, prompt=text, max_tokens=2, **SAME)
    url = f"{server.url}/v1/cache/lookup"
    found = eventually(lambda: httpx.post(url, json={"prompt": text}).json()["reusable_tokens"])
    assert found == len(text)  # a byte a token, a BOS before them, and the last one is left to decode
    assert httpx.post(url, json={"prompt": 3}).status_code == 400


@pytest.mark.parametrize("choice", [{"type": "function", "function": {"name": "weather"}}, "required"])
def test_a_tool_that_is_chosen_is_called_with_arguments_of_its_schema(server: Served, choice: Any) -> None:
    answer = server.client().chat.completions.create(
        model=MODEL, messages=chat("tool"), tools=TOOLS, tool_choice=choice, max_tokens=60
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")


def test_a_tool_call_is_streamed(server: Served) -> None:
    parts = list(
        server.client().chat.completions.create(
            model=MODEL,
            messages=chat("tool"),
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "weather"}},
            max_tokens=60,
            stream=True,
        )
    )
    calls = [call for part in parts for call in part.choices[0].delta.tool_calls or ()]
    assert {call.function.name for call in calls if call.function and call.function.name} == {"weather"}
    arguments = "".join(call.function.arguments or "" for call in calls if call.function)
    assert json.loads(arguments)["city"] in ("Oslo", "Rome")
    assert parts[-1].choices[0].finish_reason == "tool_calls"


def test_a_conversation_with_a_tools_result_goes_on(server: Served) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages: list[Any] = [
        *chat("tools result"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "user", "content": [{"type": "text", "text": "and "}, {"type": "text", "text": "now?"}]},
    ]
    client = server.client()
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, max_tokens=3, **SAME)
    messages[-1]["content"] = "and now?"
    plain = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, max_tokens=3, **SAME)
    assert answer.choices[0].message.content == plain.choices[0].message.content


@pytest.mark.parametrize(
    "asked",
    [
        {"type": "json_schema", "json_schema": {"name": "answer", "schema": CITY}},
        {"type": "json_object", "schema": CITY},
    ],
)
def test_an_answer_keeps_to_its_schema(server: Served, asked: Any) -> None:
    answer = server.client().chat.completions.create(
        model=MODEL, messages=chat("format"), response_format=asked, max_tokens=60
    )
    assert json.loads(answer.choices[0].message.content or "")["city"] in ("Oslo", "Rome")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"messages": []}, "length >= 1"),
        ({"messages": [{"content": "x"}]}, "each message has a role"),
        ({"messages": [{"role": "user", "content": 5}]}, "string or a list of parts"),
        ({"n": 2}, "n must be 1"),
        ({"max_tokens": 0}, ">= 1"),
        ({"temperature": -1}, ">= 0"),
        ({"logprobs": True, "top_logprobs": 2}, "logits_all"),
        ({"logit_bias": {"x": 1}}, "token ids"),
        ({"logit_bias": {"70000": 1}}, "no such token"),
        ({"messages": chat("long", words=800)}, "exceed context window"),
        ({"tool_choice": "required"}, "exactly one tool"),
        ({"extra_body": {"grammar": "root ::= ((("}}, "grammar cannot be parsed"),
        ({"tools": [{"type": "function", "function": {}}]}, "name"),
        ({"extra_body": {"shmcache": {"parent_key": "no key"}}}, "parent_key"),
    ],
)
def test_a_wrong_request_is_refused_with_its_reason(
    server: Served, changes: dict[str, Any], message: str
) -> None:
    pids = [worker.pid for worker in server.workers()]
    asked: dict[str, Any] = {"model": MODEL, "messages": chat("wrong"), "max_tokens": 2}
    with pytest.raises(openai.BadRequestError) as refused:
        server.client().chat.completions.create(**asked | changes)
    assert message in str(refused.value)
    with pytest.raises(openai.BadRequestError):
        list(server.client().chat.completions.create(**asked | changes, stream=True))
    assert [worker.pid for worker in server.workers()] == pids


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": "\xff"}', b"[" * 100_000, b"null"])
def test_a_body_that_is_no_request_is_refused(server: Served, body: bytes) -> None:
    for path in ("completions", "chat/completions", "cache/lookup"):
        answer = httpx.post(f"{server.url}/v1/{path}", content=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_body_over_the_limit_is_refused_whether_it_says_so_or_not(server: Served) -> None:
    body = b'{"prompt": "' + b"x" * (16 << 20) + b'"}'
    assert httpx.post(f"{server.url}/v1/completions", content=body).status_code == 413
    assert httpx.post(f"{server.url}/v1/completions", content=iter([body])).status_code == 413


def test_a_prompt_larger_than_a_sockets_buffer_reaches_the_model_whole(server: Served) -> None:
    with pytest.raises(openai.BadRequestError, match=r"Requested tokens \(400001\) exceed context window"):
        server.client().completions.create(model=MODEL, prompt="x" * 400_000)


def test_paths_and_methods_that_do_not_exist_are_told_as_openai_does(server: Served) -> None:
    for answer in (httpx.get(f"{server.url}/v1/nothing"), httpx.get(f"{server.url}/v1/completions")):
        assert answer.status_code in (404, 405)
        assert answer.json()["error"]["message"]


def test_a_hundred_requests_at_once_are_all_answered_and_alike_ones_alike(server: Served) -> None:
    async def ask() -> list[tuple[str, str]]:
        async with server.async_client() as client:

            async def one(number: int) -> tuple[str, str]:
                name = f"crowd{number % 5}"
                answer = await client.chat.completions.create(
                    model=MODEL, messages=chat(name), max_tokens=5, **SAME
                )
                return name, answer.choices[0].message.content or ""

            return await asyncio.gather(*(one(number) for number in range(100)))

    replies = asyncio.run(ask())
    assert len(replies) == 100
    assert len(set(replies)) == 5
    eventually(server.is_idle)


def test_the_metrics_add_up_whichever_worker_is_asked(server: Served) -> None:
    before = server.metrics()
    client = server.client()
    for _ in range(6):
        answer = client.completions.create(model=MODEL, prompt=prompt("metrics"), max_tokens=3, **SAME)
    assert answer.usage is not None
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt="x", max_tokens=0)

    def difference(name: str) -> float:
        return server.metric(name) - before[name]

    assert difference("shmcache_serve_requests_total.answered") == 6
    assert difference("shmcache_serve_requests_total.refused") == 1
    assert difference("shmcache_serve_request_seconds_count") == 6
    assert difference("shmcache_serve_first_token_seconds_count") == 6
    assert difference("shmcache_serve_tokens_total.prompt") == 6 * answer.usage.prompt_tokens
    assert difference("shmcache_serve_tokens_total.reused") >= 5 * (answer.usage.prompt_tokens - 1)
    metrics = server.metrics()
    assert metrics["shmcache_coordinator_up"] == 1
    assert metrics["shmcache_rows.ram_file"] > 0
