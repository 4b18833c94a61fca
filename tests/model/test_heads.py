"""The end of the system and tool part, found without knowing the template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llama_cpp import llama_chat_format
from model.conftest import MakeLlama

from shmcache.workers.heads import FixedChat, Heads

SYSTEM = {"role": "system", "content": "You are a careful assistant."}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]

CHATML_WITH_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if loop.first and tools %}{{ tools | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
)


def handler_of(template: str) -> Any:
    return llama_chat_format.Jinja2ChatFormatter(template, eos_token="", bos_token="").to_chat_handler()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def characters(text: str) -> list[int]:
    return [ord(character) for character in text]


def spelled(token: int) -> bytes:
    return chr(token).encode()


def test_the_head_ends_where_the_users_text_begins() -> None:
    fixed = Heads().fixed_chat(
        handler_of(CHATML_WITH_TOOLS), "t", {"messages": [SYSTEM, user("Hi")], "tools": TOOLS}
    )
    assert fixed is not None
    prompt = fixed.text.decode().replace("\x02shmcache", "Hi there")
    assert "look_up" in prompt
    assert fixed.head_tokens(characters(prompt), spelled) == prompt.index("Hi there")


def test_the_head_depends_on_system_and_tools_and_not_on_the_turns() -> None:
    heads, handler = Heads(), handler_of(CHATML_WITH_TOOLS)

    def fixed(*messages: dict[str, str], tools: Any = None) -> FixedChat | None:
        return heads.fixed_chat(handler, "t", {"messages": messages, "tools": tools})

    one = fixed(SYSTEM, user("Hi"))
    assert fixed(SYSTEM, user("Ho"), {"role": "assistant", "content": "?"}, user("Ha")) == one
    assert fixed(SYSTEM, user("Hi"), tools=TOOLS) != one
    assert fixed({"role": "system", "content": "Other."}, user("Hi")) != one


def test_a_fixed_chat_is_rendered_once() -> None:
    rendered = 0

    def handler(llama: Any, **_: Any) -> None:
        nonlocal rendered
        rendered += 1
        llama.tokenize(b"text", add_bos=True)

    heads = Heads()
    for _ in range(3):
        fixed = heads.fixed_chat(handler, "t", {"messages": [SYSTEM]})
        assert fixed is not None
        assert fixed.text == b"text"
    assert rendered == 1


@pytest.mark.parametrize("fault", [ValueError("roles must alternate"), KeyError("content")])
def test_a_template_that_refuses_the_fixed_chat_gives_no_head(fault: Exception) -> None:
    def handler(**_: Any) -> None:
        raise fault

    assert Heads().fixed_chat(handler, "t", {"messages": [SYSTEM]}) is None


def test_a_handler_that_is_an_object_is_not_asked() -> None:
    class LoadsAnImageModel:
        def __call__(self, **_: Any) -> None:
            raise AssertionError("was called")

    assert Heads().fixed_chat(LoadsAnImageModel(), "t", {"messages": [SYSTEM]}) is None


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"<s>", b"Hel", b"lo", b" you"], 3),  # BOS is the tokenizer's, not the text's
        ([b"<s>", b" Hel", b"lo", b" you"], 3),  # SentencePiece puts a space before the first word
        ([b" Hel", b"lo", b" you"], 2),
        ([b"Hel", b"lo", b" w", b"x"], 3),
        ([b"Hello w", b"orld"], 2),
        ([b"Hello wo", b"w"], 1),
        ([b"<s>", b"Other"], 1),
        ([], 0),
    ],
)
def test_the_head_is_as_many_tokens_as_spell_the_fixed_chat(pieces: list[bytes], expected: int) -> None:
    fixed = FixedChat(b"Hello world")
    for _ in range(2):  # the second time it knows them
        assert fixed.head_tokens(list(range(len(pieces))), pieces.__getitem__) == expected


def test_a_head_that_is_known_is_not_taken_for_another_ones() -> None:
    fixed = FixedChat(b"Hello world")
    for prompt, expected in (
        ("Hello you", 6),
        ("Hell", 4),
        ("Hello w", 7),
        ("Hello you", 6),
        ("Help", 3),
        ("", 0),
    ):
        assert fixed.head_tokens(characters(prompt), spelled) == expected


def test_a_real_template_gives_a_head(worker: MakeLlama, smollm2: Path) -> None:
    llama = worker(smollm2)
    fixed = llama._fixed_chat({"messages": [SYSTEM, user("Hi")]})
    assert fixed is not None
    tokens = llama.tokenize(fixed.text.replace(b"\x02shmcache", b"What is new?"), add_bos=False, special=True)
    head = fixed.head_tokens(tokens, llama._renderer.plain)
    assert llama.detokenize(tokens[:head], special=True).endswith(b"<|im_start|>user\n")
