"""Where does the system and tool part of a chat end?

    this chat       <|im_start|>system … tools …<|im_end|> <|im_start|>user  What is …
    a fixed chat    <|im_start|>system … tools …<|im_end|> <|im_start|>user  ␂shmcache
                    └────────────── common prefix = the head ─────────────┘

The fixed chat is this one's system messages and tools with one user message that nobody writes. Its text is
remembered per template, system and tools; a prompt's head is as many of its tokens as spell that text.

Owner: one SharedLlama. Readers: the same.
Leans on: a chat handler made from a formatter renders first and then asks its model to tokenise: a stand-in
model that stops there learns the text. Handlers that are objects (images) do other work first and are not
asked: their chats have no head.
Leaves out: rounding, and whether a head is worth a row (policy).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from inspect import isfunction
from typing import Any, NoReturn

USER_TEXT = "\x02shmcache"
_SYSTEM_ROLES = ("system", "developer")
_REMEMBERED = 64  # distinct system and tool parts that one worker meets
_RENDERED_FROM = ("functions", "function_call", "tools", "tool_choice")


class Heads:
    """Fixed chats, the ones used last."""

    def __init__(self) -> None:
        self._chats: OrderedDict[str, FixedChat | None] = OrderedDict()

    def fixed_chat(
        self, handler: Callable[..., Any], template: str, call: Mapping[str, Any]
    ) -> FixedChat | None:
        """Return the fixed chat that belongs to this call, None where there is none.

        Args:
            handler: what renders and answers the chat.
            template: a name that says which handler this is.
            call: the arguments of create_chat_completion by name.
        """
        arguments = {name: call.get(name) for name in _RENDERED_FROM}
        arguments["messages"] = [*_system_part(call["messages"]), {"role": "user", "content": USER_TEXT}]
        name = json.dumps([template, arguments], default=repr)
        if name in self._chats:
            self._chats.move_to_end(name)
        else:
            text = _text_of(handler, arguments)
            self._chats[name] = FixedChat(text) if text is not None else None
            if len(self._chats) > _REMEMBERED:
                self._chats.popitem(last=False)
        return self._chats[name]


class FixedChat:
    """The text of a fixed chat, and how the prompts that begin with it are tokenised."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self._known: list[int] = []  # the head's tokens as the last prompt had them
        self._known_bytes = 0  # of the text that they spell

    def head_tokens(self, tokens: Sequence[int], piece_of: Callable[[int], bytes]) -> int:
        """How many of the prompt's first tokens spell the beginning of this text.

        A token that the text does not spell, like a BOS that only the tokenizer adds, is passed over at the
        very beginning; a space that a SentencePiece vocabulary puts before the first word, too.
        """
        known = len(self._known)
        if tokens[:known] != self._known:
            known = self._known_bytes = 0
        at, end = self._known_bytes, known
        for index in range(known, len(tokens)):
            piece = piece_of(tokens[index])
            if at == 0 and not self.text.startswith(piece):
                piece = _without_what_tokenizers_add(piece, index)
            if not self.text.startswith(piece, at):
                break
            at, end = at + len(piece), index + 1
        self._known, self._known_bytes = list(tokens[:end]), at
        return end


def _without_what_tokenizers_add(piece: bytes, index: int) -> bytes:
    if piece.startswith(b" "):
        return piece[1:]
    return b"" if index == 0 else piece


def _system_part(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    others = (index for index, message in enumerate(messages) if message.get("role") not in _SYSTEM_ROLES)
    return list(messages[: next(others, len(messages))])


def _text_of(handler: Callable[..., Any], arguments: Mapping[str, Any]) -> bytes | None:
    if not isfunction(handler):
        return None
    try:
        handler(llama=_Listener(), **arguments)
    except _Heard as heard:
        return heard.text
    except Exception:  # a template may refuse such a chat in any way it likes
        return None
    return None


class _Heard(Exception):
    """Not an error: it carries the text out of the handler."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        super().__init__()


class _Listener:
    """A stand-in for the model: what a handler gives it first is the rendered chat."""

    verbose = False

    def tokenize(self, text: bytes, *_: Any, **__: Any) -> NoReturn:
        raise _Heard(text)

    def create_completion(self, prompt: str, *_: Any, **__: Any) -> NoReturn:
        raise _Heard(prompt.encode("utf-8"))
