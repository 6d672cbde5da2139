"""Conversations with tools: what a template is given, and the functions that a model may call."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..arguments import placed, shown
from ..errors import ConfigError
from .call_form import ToolCall
from .chat import Message, chat_messages
from .functions import function_tool
from .turn_format import Turn, TurnEvent, TurnFormat, TurnReader, call_id

if TYPE_CHECKING:
    from .model import Model

__all__ = [
    "Conversation", "Tool", "ToolCall", "Tools", "conversation", "openai_call", "openai_deltas",
    "written_history",
]  # fmt: skip

Tool = Mapping[str, object] | Callable[..., object]

_RESERVED = {"messages", "tools", "add_generation_prompt"}
_SAYS_MORE = ("$ref", "allOf", "anyOf", "oneOf", "const", "enum")
_PROMPT = (
    "You may call functions. They are described by JSON schemas:\n{tools}\nTo call one, answer with "
    'nothing but {{"name": NAME, "arguments": ARGUMENTS}}, where ARGUMENTS follows its schema.'
)
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


class Tools:
    """The tools of a request, and whether one has to be called.

    Args:
        given: OpenAI's ``tools``, or Python functions with annotated parameters.
        choice: OpenAI's ``tool_choice``: None and "auto" = as the model likes.
        turns: the form in which the model writes calls; None = bare JSON.
        parallel: OpenAI's ``parallel_tool_calls``: whether a turn may hold several calls.

    Raises:
        ConfigError: one is no function, or the choice names none of them.

    Attributes:
        given: OpenAI's tool objects.
        names: those of all functions.
        schemas: the JSON schema of the arguments of each function, by name.
        forced: the names of those of which one must be called; empty where none must.
        is_named: whether the choice names one function.
        is_used: whether the model is told of them.
    """

    def __init__(
        self,
        given: Sequence[Tool],
        choice: object = None,
        turns: TurnFormat | None = None,
        *,
        parallel: bool | None = None,
    ) -> None:
        is_list = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
        if not is_list:
            raise ConfigError(
                "tools must be a list of functions with names",
                hint='{"type": "function", "function": {"name": ..., "parameters": SCHEMA}}',
            )
        self.turns, self.parallel = turns or TurnFormat(), parallel is not False
        self.given: list[Mapping[str, object]] = []
        self.schemas: dict[str, object] = {}
        for index, tool in enumerate(given):
            with placed(f"tools[{index}]"):
                made = function_tool(tool) if callable(tool) else tool
                function = made.get("function") if isinstance(made, Mapping) else None
                name = function.get("name") if isinstance(function, Mapping) else None
                if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
                    raise ConfigError(
                        "tools must be a list of functions with names",
                        hint='{"type": "function", "function": {"name": ..., "parameters": SCHEMA}}',
                    )
            self.given.append(made)
            self.schemas[name] = _parameters(function.get("parameters"))
        self.names = frozenset(self.schemas)
        self.is_used = bool(given) and choice != "none"
        self.forced: list[str] = []
        self.is_named = False
        if choice == "required":
            self.forced = list(self.schemas)
        elif isinstance(choice, Mapping):
            function = choice.get("function")
            name = function.get("name") if isinstance(function, Mapping) else None
            self.forced, self.is_named = [name] if isinstance(name, str) else [], True
        elif choice not in (None, "auto", "none"):
            raise ConfigError("tool_choice is auto, none, required or a function")
        if (self.is_named or choice == "required") and not self.names & set(self.forced):
            raise ConfigError("tool_choice names no function of tools")

    def reader(
        self, *, in_thought: bool | None = False, eager: bool = False, salt: str = ""
    ) -> TurnReader:
        """Return a reader of a turn that may call these tools."""
        known = self.given if self.is_used else ()
        return TurnReader(
            self.turns, known, in_thought=in_thought, eager=eager, salt=salt, calls=self.is_used
        )

    def read(self, text: str, *, in_thought: bool | None = False) -> Turn:
        """Return the thought, the content and the calls of a whole text."""
        reader = self.reader(in_thought=in_thought)
        reader.feed(text)
        reader.finish()
        return reader.turn

    def calls(self, text: str) -> list[ToolCall]:
        """Return the calls in a whole text; one that was cut is none."""
        return self.read(text).calls


def _parameters(given: object) -> object:
    """Return the schema of a function's arguments: an object that names no properties has none."""
    schema = given or {"type": "object"}
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        return schema
    is_plain = not any(name in schema for name in _SAYS_MORE)
    return {"properties": {}, **schema} if is_plain else schema


def openai_call(call: ToolCall) -> dict[str, object]:
    """Return a call as OpenAI's messages hold it."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": call.id, "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }  # fmt: skip


def openai_deltas(events: Sequence[TurnEvent]) -> list[dict[str, object]]:
    """Return what OpenAI's streams call deltas: of thoughts, content and calls, in order."""
    deltas: list[dict[str, object]] = []
    for event in events:
        if event.kind == "thought":
            deltas.append({"reasoning_content": event.text})
        elif event.kind == "content":
            deltas.append({"content": event.text})
        elif event.kind == "name":
            function = {"name": event.text, "arguments": ""}
            call = {"index": event.call, "id": event.id, "type": "function", "function": function}
            deltas.append({"tool_calls": [call]})
        elif event.kind == "arguments":
            call = {"index": event.call, "function": {"arguments": event.text}}
            deltas.append({"tool_calls": [call]})
    return deltas


# -- conversations ---------------------------------------------------------------------------------


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
) -> Conversation:
    """Return what the template of ``model`` is given for messages and tools.

    A template that ignores tools gets them described in a message.

    Args:
        model, messages, tools, variables: the template's, the conversation's, and what else it is given.
        continues: whether a last message of the assistant is the beginning of the answer; None = yes,
            unless ``generates`` is False.
        generates: whether an answer begins after the messages; None = yes.

    Raises:
        ConfigError: invalid messages or variables, two answers at the end, or options that exclude
            each other.
        UnsupportedError: there is no template.
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
    options["add_generation_prompt"] = generates is not False
    if tools.is_used and model.turn_format.parts.takes_tools:
        options["tools"] = tools.given
    elif tools.is_used:
        chat = _described(chat, tools.given, model.turn_format)
    return Conversation(chat, options, begun)


def _described(
    messages: list[dict[str, object]], tools: Sequence[Mapping[str, object]], turns: TurnFormat
) -> list[dict[str, object]]:
    """Return messages that describe the tools, for a template that does not."""
    text = _PROMPT.format(tools=json.dumps(tools, ensure_ascii=False))
    role = "system" if "system" in turns.parts.roles else "user"
    for index, message in enumerate(messages[:1] if role == "system" else messages):
        if message.get("role") in (role, "developer"):
            own = str(message.get("content") or "")
            joined = f"{own}\n\n{text}" if role == "system" else f"{text}\n\n{own}"
            return [
                *messages[:index],
                {**message, "content": joined.strip()},
                *messages[index + 1 :],
            ]
    return [{"role": role, "content": text}, *messages]


# -- earlier messages ------------------------------------------------------------------------------


def written_history(
    messages: Sequence[dict[str, object]], turns: TurnFormat
) -> list[dict[str, object]]:
    """Return messages as the template takes them: roles, calls and results of tools in its form.

    OpenAI's arguments, which are JSON texts, become objects; calls and results that the template does
    not write become text. Messages without such are returned as they are.

    Raises:
        ConfigError: a call has no name, or arguments that are no JSON object.
    """
    roles, parts = turns.parts.roles, turns.parts
    found: list[dict[str, object]] = []
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
            given = str(message.get("tool_call_id") or "")
            if "tool" in roles:
                changed["tool_call_id"] = ids.get(given, given)
                changed.setdefault("name", names.get(given, ""))
            else:
                name = message.get("name") or names.get(given) or "the function"
                changed = {"role": "user", "content": f"Result of {name}:\n{message['content']}"}
                if (
                    found
                    and found[-1].get("role") == "user"
                    and "role" in messages[index - 1]
                    and (messages[index - 1]["role"] in ("tool", "function"))
                ):
                    before = found.pop()
                    changed["content"] = f"{before['content']}\n\n{changed['content']}"
        elif (
            role == "user"
            and index
            and messages[index - 1]["role"] in ("tool", "function")
            and "tool" not in roles
        ):
            before = found.pop()  # templates refuse two messages of the user in a row
            changed["content"] = f"{before['content']}\n\n{message['content']}"
        if role == "assistant" and parts.thought_end and "reasoning_content" not in changed:
            changed = _with_thought(changed, turns)
        found.append(changed)
    return found


def _with_thought(message: dict[str, object], turns: TurnFormat) -> dict[str, object]:
    """Return an answer whose thought is no part of its content."""
    start, end = turns.thought_start or "", turns.thought_end or ""
    content = message.get("content")
    if not isinstance(content, str) or not start or not content.lstrip().startswith(start):
        return message
    if not turns.parts.takes_thoughts:
        return message
    thought, tag, rest = content.lstrip()[len(start) :].partition(end)
    if not tag:
        return message
    return {**message, "reasoning_content": thought.strip(), "content": rest.lstrip()}


def _with_calls(
    message: dict[str, object],
    calls: object,
    turns: TurnFormat,
    ids: dict[str, str],
    names: dict[str, str],
) -> dict[str, object]:
    """Return an answer with its calls as the template takes them."""
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise ConfigError(f"tool_calls must be a list, not {shown(calls)}")
    parts, made = turns.parts, []
    for index, given in enumerate(calls):
        with placed(f"tool_calls[{index}]"):
            call = _call_of(given)
        own = call.id or call_id(str(len(ids)), index, call.name)
        if parts.calls is not None and parts.calls.name_in_id:
            before, after = parts.calls.name_in_id
            own = own if call.name in own else f"{before}{call.name}{after}{index}"
        elif parts.short_ids and not _SHORT_ID.fullmatch(own):
            own = call_id(own, index, call.name)
        ids[call.id], names[call.id] = own, call.name
        made.append(call._replace(id=own))
    if parts.calls is None:
        plain = {key: value for key, value in message.items() if key != "tool_calls"}
        texts = [str(plain.get("content") or ""), turns.write(made)]
        return {**plain, "content": "\n".join(filter(None, texts))}
    written = []
    for call in made:
        arguments: object = call.arguments
        if parts.arguments_as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": call.name, "arguments": arguments}
        written.append({"id": call.id, "type": "function", "function": function})
    content = message.get("content")
    return {**message, "content": "" if content is None else content, "tool_calls": written}


def _call_of(given: object) -> ToolCall:
    """Return a call of a message, its arguments as an object."""
    function = given.get("function", given) if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(function, Mapping) or not name:
        raise ConfigError(f"a call must have a function with a name, not {shown(given)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the arguments of {name} are not JSON: {error}") from None
    if arguments is None or arguments == "":
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"the arguments of {name} must be a JSON object, not {shown(arguments)}")
    return ToolCall(str(name), dict(arguments), str(given.get("id") or ""))
