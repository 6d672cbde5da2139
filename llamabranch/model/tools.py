"""Conversations with tools: the template's input, and the functions that a model may call."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..arguments import placed, shown
from ..errors import ConfigError
from .call_form import ToolCall as ToolCall
from .chat import Message, chat_messages, is_chat
from .functions import function_tool
from .shape import asking as asked_as_json
from .thoughts import PROMPT_END
from .turn_format import FUNCTION, Turn, TurnEvent, TurnFormat, TurnReader, function_of

if TYPE_CHECKING:
    from .model import Model

Tool = Mapping[str, object] | Callable[..., object]

_RESERVED = {"messages", "tools", "add_generation_prompt"}
_SAYS_MORE = ("$ref", "allOf", "anyOf", "oneOf", "const", "enum")
_PROMPT = (
    "You may call functions. They are described by JSON schemas:\n{tools}\nTo call one, answer with "
    'nothing but {{"name": NAME, "arguments": ARGUMENTS}}, where ARGUMENTS follows its schema.'
)


class Tools:
    """The tools of a request, and whether one must be called.

    Args:
        given: OpenAI's ``tools``, or Python functions with annotated parameters.
        choice: OpenAI's ``tool_choice``, or the name of a function; None and "auto" = the model decides.
        turns: how the model writes calls; None = bare JSON.
        parallel: OpenAI's ``parallel_tool_calls``: whether a turn may have several calls.

    Raises:
        ConfigError: a tool is not a function, or the choice does not name one of them.

    Attributes:
        given: OpenAI's tool objects.
        names: the names of all functions.
        schemas: by name, the JSON schema of each function's arguments.
        strict: the functions with ``strict: true``, whose schemas must be supported.
        unchecked: by name of the function, why its arguments may be any JSON object.
        forced: one of these functions must be called; empty if no call is required.
        is_named: whether the choice names one function.
        is_used: whether the prompt describes them to the model.
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
            raise ConfigError("tools must be a list of functions with names", hint=FUNCTION)
        self.turns, self.parallel = turns or TurnFormat(), parallel is not False
        self.given: list[Mapping[str, object]] = []
        self.schemas: dict[str, object] = {}
        self.strict: set[str] = set()
        self.unchecked: dict[str, str] = {}
        for index, tool in enumerate(given):
            with placed(f"tools[{index}]"):
                described = function_tool(tool) if callable(tool) else tool
                is_object = isinstance(described, Mapping)
                name, function = function_of(described.get("function") if is_object else described)
            self.given.append(described)
            self.schemas[name] = _parameters(function.get("parameters"))
            if function.get("strict") is True:
                self.strict.add(name)
        self.names = frozenset(self.schemas)
        self.is_used = bool(given) and choice != "none"
        chosen = choice.get("function") if isinstance(choice, Mapping) else {"name": choice}
        named = chosen.get("name") if isinstance(chosen, Mapping) else None
        self.is_named = choice not in (None, "auto", "none", "required")
        self.forced = list(self.schemas) if choice == "required" else []
        if self.is_named and isinstance(named, str):
            self.forced = [named]
        if (self.is_named or choice == "required") and not self.names & set(self.forced):
            raise ConfigError(
                f"tool_choice names a function that is not in tools: {shown(choice)}",
                hint="tool_choice is auto, none, required or the name of a function",
            )

    def reader(
        self, *, in_thought: bool | None = False, eager: bool = False, salt: str = ""
    ) -> TurnReader:
        """Return a reader of a turn that may call these tools."""
        known = self.given if self.is_used else ()
        return TurnReader(
            self.turns, known, in_thought=in_thought, eager=eager, salt=salt, calls=self.is_used
        )

    def read(
        self, text: str, *, in_thought: bool | None = False, salt: str = "", is_cut: bool = False
    ) -> Turn:
        """Return the thought, the content and the calls of a text.

        ``is_cut``: see ``TurnReader.finish``.
        """
        reader = self.reader(in_thought=in_thought, salt=salt)
        reader.feed(text)
        reader.finish(is_cut=is_cut)
        return reader.turn


def _parameters(parameters: object) -> object:
    """Return the schema of a function's arguments; if it has no properties, there are no arguments."""
    schema = parameters or {"type": "object"}
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        return schema
    is_plain = not any(name in schema for name in _SAYS_MORE)
    return {"properties": {}, **schema} if is_plain else schema


def openai_call(call: ToolCall) -> dict[str, object]:
    """Return a call in the format of OpenAI's messages."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": call.id, "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }  # fmt: skip


def openai_deltas(events: Sequence[TurnEvent]) -> list[dict[str, object]]:
    """Return the deltas of an OpenAI stream for thoughts, content and calls, in order."""
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
    """The input of a chat template.

    Attributes:
        messages: the messages, without the beginning of an answer.
        options: arguments of ``Model.chat_tokens``.
        begun: the beginning of the answer, if there is one.
    """

    messages: list[dict[str, object]]
    options: dict[str, object]
    begun: str

    def tokens(self, model: Model) -> list[int]:
        """Return its token ids."""
        tokens = model.chat_tokens(self.messages, **self.options)  # type: ignore[arg-type]
        if not self.begun:
            return tokens
        end = model.detokenize(tokens[-PROMPT_END:], special=True)
        opening, begun = model.turn_format.continued(end, self.begun)
        tokens += model.tokenize(opening, add_special=False, parse_special=True) if opening else []
        return tokens + model.tokenize(begun, add_special=False)

    def text(self, model: Model) -> str:
        """Return its text."""
        text = model.apply_chat_template(self.messages, **self.options)  # type: ignore[arg-type]
        return text + "".join(model.turn_format.continued(text, self.begun)) if self.begun else text


def begun_answer(messages: object) -> str:
    """Return the beginning of an answer at the end of a conversation, or ""."""
    if not is_chat(messages):
        return ""
    last = chat_messages(messages)[-1]
    return str(last.get("content") or "") if last["role"] == "assistant" else ""


def conversation(
    model: Model,
    messages: Sequence[Message],
    tools: Tools,
    variables: Mapping[str, object] | None = None,
    *,
    continues: bool | None = None,
    generates: bool | None = None,
    schema: str = "",
) -> Conversation:
    """Return the template's input for messages and tools.

    If a template ignores tools, they are described in a message.

    Args:
        model, messages, tools, variables: the model, the conversation, and other variables of the
            template.
        continues: whether an assistant message at the end is the beginning of the answer; None = yes,
            unless ``generates`` is False.
        generates: whether an answer begins after the messages; None = yes.
        schema: the JSON schema of the answer, as text. It is described at the end of the user's last
            message, so that everything before has the same tokens with and without a schema.

    Raises:
        ConfigError: invalid messages or variables, two answers at the end, or conflicting options.
        UnsupportedError: there is no template.
    """
    if generates and continues:
        raise ConfigError("add_generation_prompt and continue_final_message exclude each other")
    if set(variables or {}) & _RESERVED:
        raise ConfigError(f"chat_template_kwargs must not hold {', '.join(sorted(_RESERVED))}")
    chat, beginning, options = chat_messages(messages), "", dict(variables or {})
    if continues or (continues is None and generates is not False):
        ends = [message["role"] == "assistant" for message in chat[-2:]]
        if ends == [True, True]:
            raise ConfigError("the conversation ends with two answers")
        if ends[-1] and not chat[-1].get("tool_calls"):
            beginning, generates = str(chat.pop()["content"]), True
    options["add_generation_prompt"] = generates is not False
    asking = next((m for m in reversed(chat) if m["role"] == "user"), None)
    if asking is not None and schema and generates is not False:
        asking["content"] = f"{asking['content']}\n\n{asked_as_json(json.loads(schema))}".lstrip()
    if tools.is_used and model.turn_format.takes_tools:
        options["tools"] = tools.given
    elif tools.is_used:
        chat = _described(chat, tools.given, model.turn_format)
    return Conversation(chat, options, beginning)


def _described(
    messages: list[dict[str, object]], tools: Sequence[Mapping[str, object]], turns: TurnFormat
) -> list[dict[str, object]]:
    """Add a description of the tools to the messages, for a template that does not write one."""
    text = _PROMPT.format(tools=json.dumps(tools, ensure_ascii=False))
    role = "system" if "system" in turns.roles else "user"
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
