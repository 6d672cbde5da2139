"""Conversations as prompts: messages, and the chat templates that turn them into text.

Templates are Jinja programs from the GGUF, which anybody may have made. They run in Jinja's immutable
sandbox, with the names that Hugging Face's templates use and nothing else. Jinja is imported when the
first template is rendered.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, TypeGuard

from ..errors import ConfigError, UnsupportedError
from .text import TokenIds

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["ChatTemplate", "Message", "Prompt", "chat_messages", "is_chat", "plain_messages"]

Message = Mapping[str, object] | tuple[str, str]
Prompt = str | TokenIds | Sequence[Mapping[str, object]]  # what a text is generated from

_LONGEST = 1 << 24  # characters that a template may repeat a text to


def is_chat(prompt: object) -> TypeGuard[Sequence[Mapping[str, object]]]:
    """Return whether a prompt is a conversation: a list that begins with a message."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, (str, bytes, bytearray, memoryview))
        and len(prompt) > 0
        and isinstance(prompt[0], Mapping)
    )


def chat_messages(messages: Iterable[Message]) -> list[dict[str, object]]:
    """Return messages as dictionaries with at least ``role`` and ``content``, checked.

    A message is a mapping, or a pair of role and content. A content in parts of type "text", as OpenAI's
    API has it, is joined.

    Raises:
        ConfigError: no messages, or one that is no message.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise ConfigError(
            f"messages must be a list of role and content, not {messages!r:.40}",
            hint='for example [{"role": "user", "content": "Hello"}]',
        )
    found = [_message(message) for message in messages]
    if not found:
        raise ConfigError("messages must hold at least one message")
    return found


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
    has_calls = bool(message.get("tool_calls"))
    if not isinstance(content, str) and not (content is None and has_calls):
        raise ConfigError(f"the content of a message must be text, not {content!r:.40}")
    _check_unicode([message["role"], content])
    return {**message, "content": content}


def _part(part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise ConfigError(
            f"a part of a message's content must be text, not {part!r:.40}",
            hint="images and sounds are not supported",
        )
    return text


def _check_unicode(values: Iterable[object]) -> None:
    for value in values:
        try:
            str(value).encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(f"a message is not valid Unicode: {error}") from None


def plain_messages(messages: Iterable[Mapping[str, object]]) -> list[tuple[str, str]]:
    """Return messages as pairs of role and content, for llama.cpp's built-in templates.

    Raises:
        UnsupportedError: a message has more than that, which the built-in templates would leave out.
    """
    found = []
    for message in messages:
        role, content = message["role"], message["content"]
        more = sorted(set(message) - {"role", "content"})
        if more or not isinstance(role, str) or not isinstance(content, str):
            raise UnsupportedError(
                f"llama.cpp's built-in chat templates take role and content only, not {more}"
            )
        if "\0" in role + content:
            raise UnsupportedError("llama.cpp's built-in chat templates end at a NUL character")
        found.append((role, content))
    return found


class _Refused(Exception):
    """What a template raised itself: its reason not to take the messages."""


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: its Jinja source.
        special: texts of special tokens by the names that templates use: ``bos_token``, ...

    Raises:
        UnsupportedError: Jinja is not installed, or the source is no valid template.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self._template = _compiled(source)
        self._special = dict(special)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> str:
        """Return the text of a conversation.

        Raises:
            ConfigError: the template refuses the messages, with its reason.
            UnsupportedError: it failed, or did what the sandbox forbids.
        """
        try:
            return self._template.render(
                {
                    **self._special,
                    "messages": [dict(message) for message in messages],
                    "add_generation_prompt": add_generation_prompt,
                    **variables,
                }
            )
        except _Refused as error:
            raise ConfigError(f"the model's chat template refuses the messages: {error}") from None
        except Exception as error:  # whatever the program in the file does wrong
            raise UnsupportedError(
                f"the model's chat template failed: {type(error).__name__}: {error}"
            ) from error


def _compiled(source: str) -> Template:
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.exceptions import SecurityError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise UnsupportedError("chat templates need Jinja", hint="pip install jinja2") from None

    class Generation(Extension):
        """``{% generation %}``, which marks the assistant's text for training: rendered as it is."""

        tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: object, operator: str, left: object, right: object) -> object:
            sized = [len(x) for x in (left, right) if isinstance(x, (str, list, tuple))]
            times = [x for x in (left, right) if isinstance(x, int)]
            if operator == "**" or (sized and times and sized[0] * times[0] > _LONGEST):
                raise SecurityError(f"{operator} could fill the memory")
            return left * right  # type: ignore[operator]

    def raise_exception(message: str) -> None:
        raise _Refused(message)

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=raise_exception,
        strftime_now=lambda form: datetime.now().strftime(form),
    )
    try:
        return environment.from_string(source)
    except (TemplateError, RecursionError) as error:
        raise UnsupportedError(f"the model's chat template is not valid Jinja: {error}") from None


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes < and > for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
