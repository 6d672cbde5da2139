"""Conversations as prompts: checking and normalising messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeGuard

from ..arguments import nearest, placed
from ..errors import ConfigError, UnsupportedError
from .text import TokenIds

Message = Mapping[str, object] | tuple[str, str]
# Keys that a message may have with a built-in template, which ignores all but role and content.
_LEFT_OUT = {
    "role", "content", "name", "reasoning_content", "reasoning", "thinking", "refusal", "annotations",
    "tool_call_id", "audio",
}  # fmt: skip
_MAY_BE_NULL = ("assistant", "tool", "function")  # roles for which programs may send null content
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
Prompt = str | TokenIds | Sequence[Message]  # the input of a generation


def is_chat(prompt: object) -> TypeGuard[Sequence[Message]]:
    """Return whether a prompt is a conversation: a list that begins with a message."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes, bytearray, memoryview)):
        return False
    first = prompt[0] if len(prompt) else None
    is_pair = isinstance(first, tuple) and len(first) == 2 and isinstance(first[0], str)
    return is_pair or isinstance(first, Mapping)


def chat_messages(messages: Iterable[Message], name: str = "messages") -> list[dict[str, object]]:
    """Check messages, and return them as dictionaries with at least ``role`` and ``content``.

    A message is a mapping, or a pair of role and content. If the content is a list of parts of type
    "text", as in OpenAI's API, the parts are joined. Errors name the argument by ``name``.

    Raises:
        ConfigError: there are no messages, or one is invalid; the message names its index.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise ConfigError(
            f"{name} must be a list of role and content, not {messages!r:.40}",
            hint='for example [{"role": "user", "content": "Hello"}]',
        )
    checked = []
    for index, message in enumerate(messages):
        with placed(f"{name}[{index}]"):
            checked.append(_message(message))
    if not checked:
        raise ConfigError(f"{name} must hold at least one message")
    return checked


def check_roles(
    messages: Iterable[Mapping[str, object]], template: str, name: str = "messages"
) -> None:
    """Raise ConfigError for a role that is neither a common one nor a word in the template's source.

    With such a role, a template omits the message, or writes a role that the model has never seen.
    """
    for index, message in enumerate(messages):
        role = str(message["role"])
        if role not in _ROLES and not (
            role and re.search(rf"(?<!\w){re.escape(role)}(?!\w)", template)
        ):
            raise ConfigError(
                f"{name}[{index}]: unknown role {role!r}", hint=nearest(role, _ROLES, "roles")
            )


def _message(message: Message) -> dict[str, object]:
    if isinstance(message, tuple) and len(message) == 2:
        message = {"role": message[0], "content": message[1]}
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ConfigError(
            f"a message must have a role and a content, not {message!r:.60}",
            hint='for example {"role": "user", "content": "Hello"}',
        )
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        content = "".join(map(_part, content))
    if content is None and message["role"] in _MAY_BE_NULL and not message.get("tool_calls"):
        content = ""
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise ConfigError(f"the content of a message must be text, not {content!r:.40}")
    try:
        for text in (message["role"], content):
            str(text).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"a message is not valid Unicode: {error}") from None
    more = {key: value for key, value in message.items() if value is not None}  # as OpenAI's client
    return {**more, "content": content}


def _part(part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise ConfigError(
            f"a part of a message's content must be text, not {part!r:.40}",
            hint="images and sounds are not supported",
        )
    return text


def plain_messages(messages: Iterable[Mapping[str, object]]) -> list[tuple[str, str]]:
    """Return messages as pairs of role and content, for llama.cpp's built-in templates.

    Raises:
        UnsupportedError: a message has other keys, which the built-in templates would leave out.
    """
    pairs = []
    for message in messages:
        role, content = message["role"], message["content"]
        more = sorted(set(message) - _LEFT_OUT)
        if more or not isinstance(role, str) or not isinstance(content, str):
            raise UnsupportedError(
                f"llama.cpp's built-in chat templates support only role and content, not {more}"
            )
        if "\0" in role + content:
            raise UnsupportedError("llama.cpp's built-in chat templates end at a NUL character")
        pairs.append((role, content))
    return pairs
