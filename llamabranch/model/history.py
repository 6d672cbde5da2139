"""Earlier messages in the form that a template expects: roles, function calls and their results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ..arguments import placed, shown
from ..errors import ConfigError
from .call_form import ToolCall
from .turn_format import TurnFormat, call_id

_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


def written_history(
    messages: Sequence[dict[str, object]], turns: TurnFormat
) -> list[dict[str, object]]:
    """Return messages with their roles, calls and tool results in the form that the template expects.

    OpenAI's arguments, which are JSON texts, become objects. A text that is not a JSON object stays as
    it is, because a model may have written it that way. Calls and results that the template cannot
    write become text. Other messages do not change.

    Raises:
        ConfigError: a call has no name.
    """
    roles = turns.roles
    written: list[dict[str, object]] = []
    ids: dict[str, str] = {}
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        role, calls = message["role"], message.get("tool_calls")
        changed = dict(message)
        if role == "developer" and role not in roles:
            changed["role"] = "system"
        elif role == "assistant" and calls:
            with placed(f"messages[{index}]"):
                changed = _with_calls(changed, calls, turns, ids, names)
        elif role in ("tool", "function"):
            answered_id = str(message.get("tool_call_id") or "")
            if "tool" in roles:
                changed["tool_call_id"] = ids.get(answered_id, answered_id)
                changed.setdefault("name", names.get(answered_id, ""))
            else:
                name = message.get("name") or names.get(answered_id) or "the function"
                changed = {"role": "user", "content": f"Result of {name}:\n{message['content']}"}
        follows_result = index > 0 and messages[index - 1]["role"] in ("tool", "function")
        is_apart = "tool" in roles and turns.asks_after_results
        if changed["role"] == "user" and follows_result and not is_apart:
            before = written.pop()  # templates refuse two user messages in a row
            changed = {**before, "content": f"{before['content']}\n\n{changed['content']}"}
        if role == "assistant" and turns.thought_end and "reasoning_content" not in changed:
            changed = _with_thought(changed, turns)
        written.append(changed)
    return written


def _with_thought(message: dict[str, object], turns: TurnFormat) -> dict[str, object]:
    """Separate an answer's thought from its content."""
    start, end = turns.thought_start or "", turns.thought_end or ""
    content = str(message.get("content") or "").lstrip()
    thought, tag, rest = content.removeprefix(start).partition(end)
    if not (start and tag and turns.takes_thoughts and content.startswith(start)):
        return message
    return {**message, "reasoning_content": thought.strip(), "content": rest.lstrip()}


def _with_calls(
    message: dict[str, object],
    calls: object,
    turns: TurnFormat,
    ids: dict[str, str],
    names: dict[str, str],
) -> dict[str, object]:
    """Return an answer with its calls in the form that the template expects."""
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise ConfigError(f"tool_calls must be a list, not {shown(calls)}")
    own_calls: list[ToolCall] = []
    for index, item in enumerate(calls):
        with placed(f"tool_calls[{index}]"):
            call = _call_of(item)
        own = call.id or call_id(str(len(ids)), index, call.name)
        if turns.calls is not None and turns.calls.name_in_id:
            before, after = turns.calls.name_in_id
            own = own if call.name in own else f"{before}{call.name}{after}{index}"
        elif turns.short_ids and not _SHORT_ID.fullmatch(own):
            own = call_id(own, index, call.name)
        ids[call.id], names[call.id] = own, call.name
        own_calls.append(call._replace(id=own))
    if turns.calls is None:
        plain = {key: value for key, value in message.items() if key != "tool_calls"}
        texts = [str(plain.get("content") or ""), turns.write(own_calls)]
        return {**plain, "content": "\n".join(filter(None, texts))}
    written = []
    for call in own_calls:
        arguments: object = call.arguments
        if turns.arguments_as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif turns.form.tags is not None and not isinstance(arguments, Mapping):
            arguments = {"arguments": arguments}  # the template writes names and values
        function = {"name": call.name, "arguments": arguments}
        written.append({"id": call.id, "type": "function", "function": function})
    content = message.get("content")
    return {**message, "content": "" if content is None else content, "tool_calls": written}


def _call_of(call: object) -> ToolCall:
    """Return a call of a message with its arguments as an object; broken ones stay unchanged."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not name:
        raise ConfigError(f"a call must have a function with a name, not {shown(call)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(arguments)
            arguments = value if isinstance(value, Mapping) else arguments
    elif arguments is not None and not isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    return ToolCall(str(name), arguments, str(call.get("id") or ""))
