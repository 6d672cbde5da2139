"""Conversations with tools: forced calls follow a JSON schema, others are found in the model's text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from uuid import uuid4

from ..errors import ConfigError, GrammarError, UnsupportedError
from .chat import Message, chat_messages
from .model import Model

__all__ = ["CallParser", "Conversation", "ToolCall", "Tools", "conversation", "whole_calls"]

_RESERVED = {"messages", "tools", "add_generation_prompt"}
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum", "default", "examples")  # no schemas
_SAYS_MORE = ("$ref", "allOf", "anyOf", "oneOf", "const", "enum")
_PROMPT = (
    "You may call functions. They are described by JSON schemas:\n{tools}\nTo call one, answer with "
    'nothing but {{"name": NAME, "arguments": ARGUMENTS}}, where ARGUMENTS follows its schema.'
)


class ToolCall(NamedTuple):
    """A call of a function, as a model has written it.

    Attributes:
        name: the function's.
        arguments: a JSON value, of most functions a dict.
        id: to name the call in the message that answers it, as ``tool_call_id``.
    """

    name: str
    arguments: object
    id: str


class Tools:
    """The tools of a request, and whether one has to be called.

    Args:
        given: OpenAI's ``tools``.
        choice: OpenAI's ``tool_choice``: None and "auto" = as the model likes.

    Raises:
        ConfigError: one is no function, or the choice names none of them.

    Attributes:
        names: those of all functions.
        forced: the names of those of which one must be called; empty where none must.
    """

    def __init__(self, given: Sequence[Mapping[str, object]], choice: object) -> None:
        is_list = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
        self.given = list(given) if is_list else []
        self._schemas: dict[str, object] = {}
        for tool in self.given if is_list else [None]:
            function = tool.get("function") if isinstance(tool, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
                raise ConfigError(
                    "tools must be a list of functions with names",
                    hint='{"type": "function", "function": {"name": ..., "parameters": SCHEMA}}',
                )
            self._schemas[name] = _parameters(function.get("parameters"))
        self.names = frozenset(self._schemas)
        self.is_used = bool(given) and choice != "none"
        self.forced: list[str] = []
        self.is_named = False
        if choice == "required":
            self.forced = list(self._schemas)
        elif isinstance(choice, Mapping):
            function = choice.get("function")
            name = function.get("name") if isinstance(function, Mapping) else None
            self.forced, self.is_named = [name] if isinstance(name, str) else [], True
        elif choice not in (None, "auto", "none"):
            raise ConfigError("tool_choice is auto, none, required or a function")
        if (self.is_named or choice == "required") and not self.names & set(self.forced):
            raise ConfigError("tool_choice names no function of tools")

    def schema(self) -> dict[str, object]:
        """Return the schema of a call of one of the forced tools.

        Raises:
            GrammarError: the schema of a tool is nested too deep.
        """
        calls: list[object] = []
        for i, name in enumerate(self.forced):
            place = f"#/anyOf/{i}/properties/arguments"
            try:
                arguments = _moved(self._schemas[name], place)
            except RecursionError:
                raise GrammarError("the JSON schema is nested too deep") from None
            call = {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            calls.append(call)
        return {"anyOf": calls}

    def read(self, text: str) -> tuple[str, list[dict[str, object]]]:
        """Return the content of a whole text, and its calls as OpenAI writes them."""
        content, parts = CallParser(self).feed(text, last=True)
        return content, whole_calls(parts)

    def calls(self, text: str) -> list[ToolCall]:
        """Return the calls in a whole text; one that was cut is none."""
        found = []
        for call in self.read(text)[1]:
            function = call["function"]
            if isinstance(function, dict):
                try:
                    arguments = json.loads(function["arguments"])
                except (ValueError, RecursionError):
                    continue
                found.append(ToolCall(function["name"], arguments, str(call["id"])))
        return found


def _parameters(given: object) -> object:
    """Return the schema of a function's arguments: an object that names no properties has none."""
    schema = given or {"type": "object"}
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        return schema
    is_plain = not any(name in schema for name in _SAYS_MORE)
    return {"properties": {}, **schema} if is_plain else schema


def _moved(schema: object, place: str) -> object:
    """Return a schema as it is written at ``place`` of another: what it refers to has moved with it."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, Mapping) or "$id" in schema:  # references are relative to an id
        return schema
    found: dict[str, object] = {}
    for name, value in schema.items():
        if name == "$ref" and isinstance(value, str) and (value == "#" or value[:2] == "#/"):
            found[name] = place + value[1:]
        elif name in _BY_NAME and isinstance(value, Mapping):
            found[name] = {key: _moved(part, place) for key, part in value.items()}
        else:
            found[name] = value if name in _VALUES else _moved(value, place)
    return found


class Conversation(NamedTuple):
    """What a chat template is given.

    Attributes:
        messages: without an answer that is begun.
        options: arguments of ``Model.chat_tokens``.
        begun: the beginning of the answer, if it is given.
    """

    messages: list[dict[str, object]]
    options: dict[str, object]
    begun: str

    def tokens(self, model: Model) -> list[int]:
        """Return its token ids."""
        tokens = model.chat_tokens(self.messages, **self.options)  # type: ignore[arg-type]
        return tokens + model.tokenize(self.begun, add_special=False) if self.begun else tokens

    def text(self, model: Model) -> str:
        """Return its text."""
        text = model.apply_chat_template(self.messages, **self.options)  # type: ignore[arg-type]
        return text + self.begun


def conversation(
    model: Model,
    messages: Sequence[Message],
    tools: Tools,
    variables: Mapping[str, object] | None = None,
    *,
    continues: bool | None = None,
    generates: bool | None = None,
    describes: bool = False,
) -> Conversation:
    """Return what the template of ``model`` is given for messages and tools.

    Args:
        model, messages, tools, variables: the template's, the conversation's, and what else it is given.
        continues: whether a last message of the assistant is the beginning of the answer; None = yes,
            unless ``generates`` is False.
        generates: whether an answer begins after the messages; None = yes.
        describes: whether a template that ignores tools gets them in a system message.

    Raises:
        ConfigError: invalid messages or variables, two answers at the end, or options that exclude
            each other.
        UnsupportedError: the template ignores the tools, or there is none.
    """
    if generates and continues:
        raise ConfigError("add_generation_prompt and continue_final_message exclude each other")
    if set(variables or {}) & _RESERVED:
        raise ConfigError(f"chat_template_kwargs must not hold {', '.join(sorted(_RESERVED))}")
    chat, begun, options = chat_messages(messages), "", dict(variables or {})
    if continues or (continues is None and generates is not False):
        ends = [message["role"] == "assistant" for message in chat[-2:]]
        if ends == [True, True]:
            raise ConfigError("the conversation ends with two answers")
        if ends[-1] and not chat[-1].get("tool_calls"):
            begun, generates = str(chat.pop()["content"]), True
    if "tool_calls" not in (model.chat_template or ""):
        chat = [_without_calls(message) for message in chat]
    options["add_generation_prompt"] = generates is not False
    if tools.is_used and _reads_tools(model, chat, tools.given, options):
        options["tools"] = tools.given
    elif tools.is_used and describes:
        chat = _described(chat, tools.given)
    elif tools.is_used:
        raise UnsupportedError(
            f"the chat template of {model.name} ignores tools",
            hint="give one that writes them: load(..., chat_template=...); or describe them in a message",
        )
    return Conversation(chat, options, begun)


def _reads_tools(
    model: Model,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, object]],
    options: Mapping[str, object],
) -> bool:
    """Return whether the template writes tools into the conversation."""
    if model.chat_template is not None and "tools" not in model.chat_template:
        return False
    plain = model.apply_chat_template(messages, **options)  # type: ignore[arg-type]
    return plain != model.apply_chat_template(messages, tools=tools, **options)  # type: ignore[arg-type]


def _described(
    messages: Sequence[dict[str, object]], tools: Sequence[Mapping[str, object]]
) -> list[dict[str, object]]:
    """Return messages that describe the tools, for a template that does not."""
    text = _PROMPT.format(tools=json.dumps(tools, ensure_ascii=False))
    if messages and messages[0].get("role") == "system":
        first, *rest = messages
        return [{**first, "content": f"{first.get('content') or ''}\n\n{text}"}, *rest]
    return [{"role": "system", "content": text}, *messages]


def _without_calls(message: dict[str, object]) -> dict[str, object]:
    """Return a message with its calls as text, for a template that does not write them."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**plain, "content": plain.get("content") or json.dumps(calls, ensure_ascii=False)}


def _call(name: str, arguments: str, index: int) -> dict[str, object]:
    function = {"name": name, "arguments": arguments}
    return {
        "index": index, "id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function,
    }  # fmt: skip


def whole_calls(parts: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Return whole calls from the parts of a stream."""
    calls: list[dict[str, object]] = []
    for part in parts:
        if "id" in part:
            calls.append({key: value for key, value in part.items() if key != "index"})
            continue
        function, more = calls[-1]["function"], part["function"]
        if isinstance(function, dict) and isinstance(more, dict):
            function["arguments"] += more["arguments"]
    return calls


class CallParser:
    """Tells the calls in a text from the rest, as the text comes.

    A text that is a call, and calls between ``<tool_call>`` and ``</tool_call>``, are calls. All else is
    content, but for white space that a text begins with before a call, or that follows one.

    Args:
        tools: those of the request.

    Attributes:
        n_calls: how many calls there were so far.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._held = ""
        self._space = ""  # held back where content would begin: there is none if a call follows
        self._is_first = True  # there was no content, and no call
        self._begins = True  # there was no content since the last call
        self._name: str | None = None  # of the forced call that is being written
        self.n_calls = 0

    def feed(self, text: str, *, last: bool) -> tuple[str, list[dict[str, object]]]:
        """Return the content and the parts of calls that ``text`` adds, as in OpenAI's streams."""
        if not self._tools.is_used:
            return text, []
        self._held += text
        if self._tools.forced:
            return "", self._forced(last=last)
        if self._is_first and self._held.lstrip()[:1] in ("", "{"):
            if not last:
                return "", []
            if call := self._call(self._held):
                return "", [call]
        self._is_first = False
        return self._found(last=last)

    def _forced(self, *, last: bool) -> list[dict[str, object]]:
        """Return parts of the one call that the grammar allows: its name, then its arguments."""
        parts: list[dict[str, object]] = []
        if self._name is None:
            head = re.match(r'\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ', self._held)
            if head is None:
                return []
            self._name = str(json.loads(head[1]))
            self._held = self._held[head.end() :]
            self.n_calls = 1
            parts.append(_call(self._name, "", 0))
        # The last character closes the object around the arguments.
        more, self._held = self._held[:-1], self._held[-1:]
        if last and self._held != "}":
            more += self._held
        if more:
            parts.append({"index": 0, "function": {"arguments": more}})
        return parts

    def _found(self, *, last: bool) -> tuple[str, list[dict[str, object]]]:
        """Return content, and the calls in tags, as far as what comes cannot change them."""
        content, calls = "", []
        while True:
            before, tag, after = self._held.partition(_OPEN)
            inner, end, rest = after.partition(_CLOSE)
            if not tag:
                n_tag = 0 if last else _begun(before)
                content += self._content(before[: len(before) - n_tag])
                self._held = before[len(before) - n_tag :]
                break
            content += self._content(before)
            if not end and not last and inner.lstrip()[:1] in ("", "{"):
                self._held = tag + after
                break
            call = self._call(inner)
            if call is None:
                content += self._content(tag)
                self._held = after
            else:
                calls.append(call)
                self._held, self._space, self._begins = rest, "", True
        if last and not self.n_calls:
            content += self._space
        return content, calls

    def _content(self, text: str) -> str:
        """Return what can be shown of the content, if ``text`` comes next."""
        if not self._begins:
            return text
        self._space += text
        if not self._space.strip():
            return ""
        self._begins, text, self._space = False, self._space, ""
        return text

    def _call(self, text: str) -> dict[str, object] | None:
        """Return the call that a text is; None if it is none."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        name = found.get("name") if isinstance(found, dict) else None
        if not isinstance(name, str) or name not in self._tools.names:
            return None
        arguments = found.get("arguments", found.get("parameters"))
        if arguments is None:
            return None
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
        self.n_calls += 1
        return _call(name, written, self.n_calls - 1)


def _begun(text: str) -> int:
    """Return how many characters at the end of ``text`` may begin a tag."""
    return next(n for n in reversed(range(len(_OPEN))) if text.endswith(_OPEN[:n]))
