"""Tool calls: forced ones follow a JSON schema, others are found in what the model has written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from uuid import uuid4

from .errors import HttpError

__all__ = ["CallParser", "Tools", "whole_calls", "without_calls"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PROMPT = (
    "You may call functions. They are described by JSON schemas:\n{tools}\nTo call one, answer with "
    'nothing but {{"name": NAME, "arguments": ARGUMENTS}}, where ARGUMENTS follows its schema.'
)


class Tools:
    """The tools of a request, and whether one has to be called.

    Args:
        given: OpenAI's ``tools``.
        choice: OpenAI's ``tool_choice``.

    Raises:
        HttpError: one is no function, or the choice names none of them.

    Attributes:
        forced: the names of those of which one must be called; empty where none must.
    """

    def __init__(self, given: Sequence[Mapping[str, object]], choice: object) -> None:
        self.given = list(given)
        self._schemas: dict[str, object] = {}
        for tool in given:
            function = tool.get("function")
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
                raise HttpError(400, "a tool must be a function with a name", param="tools")
            self._schemas[name] = function.get("parameters") or {"type": "object"}
        self.is_used = bool(given) and choice != "none"
        self.forced: list[str] = []
        self.is_named = False
        if choice == "required":
            self.forced = list(self._schemas)
        elif isinstance(choice, Mapping):
            function = choice.get("function")
            name = function.get("name") if isinstance(function, Mapping) else None
            self.forced, self.is_named = [str(name)], True
        elif choice not in (None, "auto", "none"):
            raise HttpError(
                400, "tool_choice is auto, none, required or a function", param="tool_choice"
            )
        if (self.is_named or choice == "required") and not set(self.forced) & set(self._schemas):
            raise HttpError(400, "tool_choice names no function of tools", param="tool_choice")

    def schema(self) -> dict[str, object]:
        """Return the schema of a call of one of the forced tools."""
        calls: list[object] = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": self._schemas[name]},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name in self.forced
        ]
        return {"anyOf": calls}

    def told(self, messages: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
        """Return messages that describe the tools, for a template that does not."""
        text = _PROMPT.format(tools=json.dumps(self.given, ensure_ascii=False))
        if messages and messages[0].get("role") == "system":
            first, *rest = messages
            return [{**first, "content": f"{first.get('content') or ''}\n\n{text}"}, *rest]
        return [{"role": "system", "content": text}, *messages]


def without_calls(message: Mapping[str, object]) -> Mapping[str, object]:
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

    Args:
        tools: those of the request.

    Attributes:
        n_calls: how many calls there were so far.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._held = ""
        self._is_content = not tools.is_used
        self._name: str | None = None  # of the forced call that is being written
        self.n_calls = 0

    def feed(self, text: str, *, last: bool) -> tuple[str, list[dict[str, object]]]:
        """Return the content and the parts of calls that ``text`` adds, as in OpenAI's streams."""
        if self._is_content:
            return text, []
        self._held += text
        if self._tools.forced:
            return "", self._forced(last=last)
        start = self._held.lstrip()
        may_call = start.startswith("{") or _OPEN.startswith(start[: len(_OPEN)])
        if start and not may_call:
            self._is_content = True
        elif not last:
            return "", []
        held, self._held = self._held, ""
        calls = [] if self._is_content else self._found(held)
        return ("", calls) if calls else (held, [])

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

    def _found(self, text: str) -> list[dict[str, object]]:
        parts = re.findall(rf"{_OPEN}(.*?)(?:{_CLOSE}|$)", text, re.DOTALL) or [text]
        calls: list[dict[str, object]] = []
        for part in parts:
            try:
                found = json.loads(part)
            except (ValueError, RecursionError):
                return []
            name = found.get("name") if isinstance(found, dict) else None
            arguments = found.get("arguments", found.get("parameters")) if name else None
            if not isinstance(name, str) or arguments is None:
                return []
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            calls.append(_call(name, text, len(calls)))
        self.n_calls = len(calls)
        return calls
