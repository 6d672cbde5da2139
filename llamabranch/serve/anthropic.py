"""Anthropic's Messages API: a request is turned into a chat request, and its text into a message."""

from __future__ import annotations

from asyncio import to_thread
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct

from ..arguments import placed
from ..errors import ConfigError
from ..model import TurnEvent
from ..request.fields import ResponseFormat
from ..request.result import Result
from .completions import ChatFields, chat_jobs, chat_options
from .errors import HttpError
from .fields import HttpFields, call_of
from .generation import Update, Writer, answer
from .messages import json_of, reply
from .service import Service

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

_SIGNATURE = "llamabranch"  # clients send thoughts back only with a signature; it is not checked


# -- requests --------------------------------------------------------------------------------------


class TextBlock(Struct, tag="text"):
    """A piece of text."""

    text: str


class ThinkingBlock(Struct, tag="thinking"):
    """An earlier thought of the model."""

    thinking: str


class RedactedBlock(Struct, tag="redacted_thinking"):
    """An encrypted thought of Anthropic's models; it is left out."""


class ToolUseBlock(Struct, tag="tool_use"):
    """An earlier call of a function."""

    id: str
    name: str
    input: dict[str, object]


class ToolResultBlock(Struct, tag="tool_result"):
    """What a function returned."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None

    @property
    def text(self) -> str:
        """The result as the model reads it."""
        parts = [self.content] if isinstance(self.content, str) else _texts(self.content or ())
        return ("Error: " if self.is_error else "") + "\n".join(parts)


Block = TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock


class SentMessage(Struct):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    def blocks(self) -> list[Block]:
        """Return its blocks.

        Raises:
            ConfigError: messages of this role have no such blocks.
        """
        if isinstance(self.content, str):
            return [TextBlock(self.content)]
        for block in self.content:
            is_answer = isinstance(block, (ThinkingBlock, RedactedBlock, ToolUseBlock))
            is_asked = isinstance(block, ToolResultBlock)
            if (is_answer and self.role != "assistant") or (is_asked and self.role != "user"):
                kind = type(block).__struct_config__.tag
                raise ConfigError(f"a message of the {self.role} cannot have a {kind} block")
        return self.content


def _texts(blocks: Iterable[Block]) -> list[str]:
    """Return the text of each text block."""
    return [block.text for block in blocks if isinstance(block, TextBlock)]


class SentTool(Struct):
    """A function that the model may call."""

    name: str
    description: str = ""  # there is always one, because some templates need it
    input_schema: dict[str, object] | None = None
    type: str | None = None
    strict: bool | None = None

    def function(self) -> dict[str, object]:
        """Return it as OpenAI describes a function.

        Raises:
            ConfigError: it is one of Anthropic's own tools, which clients send without a schema.
        """
        if self.input_schema is None:
            raise ConfigError(
                f"{self.name} has no input_schema: Anthropic's own tools"
                f" ({self.type or 'such as web_search_20250305'}) are not supported"
            )
        function: dict[str, object] = {
            "name": self.name, "description": self.description, "parameters": self.input_schema,
        }  # fmt: skip
        strict = {"strict": True} if self.strict else {}
        return {"type": "function", "function": function | strict}


class ToolChoice(Struct):
    """Which function the model has to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Struct):
    """Whether the model thinks; ``adaptive`` and ``between_tools`` = as the chat template does."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=0)] | None = None


class OutputConfig(Struct):
    """The form of the answer, and how much the model thinks, if its template supports that."""

    format: ResponseFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class MessagesFields(HttpFields, kw_only=True):
    """The body of a request; besides Anthropic's fields it may have our sampling settings."""

    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    messages: Annotated[list[SentMessage], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[SentTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    stop_sequences: list[str] | None = None
    output_config: OutputConfig | None = None
    output_format: ResponseFormat | None = None  # from older clients
    thread: dict[str, object] | None = None
    compaction: dict[str, object] | None = None
    mcp_servers: list[object] | None = None

    def chat(self) -> ChatFields:
        """Convert the request into one of the chat endpoint.

        Raises:
            HttpError, ConfigError: a field, a block or a tool is not supported; the message names it.
        """
        if self.thread:  # with these details the client sends the whole conversation again
            message = "thread is not supported: send the whole conversation"
            details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            raise HttpError(400, message, param="thread", details=details)
        for name in ("compaction", "mcp_servers"):
            if getattr(self, name):
                raise ConfigError(f"{name} is not supported")
        fields = ChatFields(messages=self._conversation())
        for name in HttpFields.__struct_fields__:
            setattr(fields, name, getattr(self, name))
        fields.n, fields.stop = None, self.stop_sequences
        fields.tools = []
        for index, tool in enumerate(self.tools or ()):
            with placed(f"tools[{index}]"):
                fields.tools.append(tool.function())
        choice, thinking = self.tool_choice, self.thinking
        output = self.output_config or OutputConfig()
        if choice is not None:
            fields.tool_choice = "required" if choice.type == "any" else choice.type
            if choice.type == "tool":
                fields.tool_choice = {"type": "function", "function": {"name": choice.name}}
            fields.parallel_tool_calls = not choice.disable_parallel_tool_use
        if thinking is not None and thinking.type in ("enabled", "disabled"):
            budget = True if thinking.budget_tokens is None else thinking.budget_tokens
            fields.thinking = thinking.type == "enabled" and budget
        fields.reasoning_effort = "high" if output.effort in ("xhigh", "max") else output.effort
        fields.response_format = output.format or self.output_format or self.response_format
        return fields

    def _conversation(self) -> list[dict[str, object]]:
        """Return OpenAI's messages.

        Consecutive messages of one role become one message, because templates expect roles to
        alternate. A system message that is not the first one is read as the user's, because many
        templates refuse it.
        """
        system = self.system
        text = system if isinstance(system, str) else "\n".join(_texts(system or ()))
        said: list[tuple[str, list[Block]]] = [("system", [TextBlock(text)])] if text else []
        for index, message in enumerate(self.messages):
            is_late = message.role == "system" and any(role != "system" for role, _ in said)
            with placed(f"messages[{index}]"):
                said.append(("user" if is_late else message.role, message.blocks()))
        chat: list[dict[str, object]] = []
        for role, group in groupby(said, key=lambda each: each[0]):
            blocks = [block for _, own in group for block in own]
            chat += _answered(blocks) if role == "assistant" else _asked(role, blocks)
        return chat


def _answered(blocks: Sequence[Block]) -> list[dict[str, object]]:
    """Return the blocks of an answer as one message: text, thoughts and calls."""
    message: dict[str, object] = {"role": "assistant", "content": "".join(_texts(blocks))}
    thought = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.input},
        }
        for call in blocks
        if isinstance(call, ToolUseBlock)
    ]
    if thought:
        message["reasoning_content"] = thought
    return [{**message, "tool_calls": calls} if calls else message]


def _asked(role: str, blocks: Sequence[Block]) -> list[dict[str, object]]:
    """Return the results of the calls in the answer before, and then the text."""
    chat: list[dict[str, object]] = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text}
        for block in blocks
        if isinstance(block, ToolResultBlock)
    ]
    texts = _texts(blocks)
    return [*chat, {"role": role, "content": "\n\n".join(texts)}] if texts or not chat else chat


async def messages(call: HttpRequest, service: Service) -> Response:
    """Answer a request."""
    sent = await json_of(call, MessagesFields)
    if sent.max_tokens is None:
        raise HttpError(400, "max_tokens is missing", param="max_tokens")
    fields = sent.chat()
    jobs = await chat_jobs(call, service, fields, prompt_progress=bool(fields.stream))
    return await answer(_MessageWriter(service, fields), jobs)


async def count_tokens(call: HttpRequest, service: Service) -> Response:
    """Return how many tokens the prompt of a request has."""
    fields = (await json_of(call, MessagesFields)).chat()
    options = await chat_options(call, service, fields)

    def count() -> int:
        chat, _ = call_of(service, fields.messages, options, chats=True)
        return len(chat.requests[0].plan(service.model).tokens)

    return reply({"input_tokens": await to_thread(count)})


# -- answers ---------------------------------------------------------------------------------------


class _MessageWriter(Writer[ChatFields]):
    """Writes a text as Anthropic's message.

    Args:
        service, fields: the model, and the request.
    """

    door = "messages"

    def __init__(self, service: Service, fields: ChatFields) -> None:
        super().__init__(service, fields, "msg", "message")
        self._head = {"type": "message", "role": "assistant"} | {
            name: self.head[name] for name in ("id", "model", "exact") if name in self.head
        }
        self._kind = ""  # of the open block; "" = no block is open
        self._index = 0  # of the open block, or the next one

    def part(self, update: Update) -> dict[str, object]:
        """Return a complete message."""
        result = update.result
        turn, content = result.turn, list[dict[str, object]]()
        if turn.thought:
            content.append({"type": "thinking", "thinking": turn.thought, "signature": _SIGNATURE})
        if turn.content:
            content.append({"type": "text", "text": turn.content})
        for each in turn.calls:
            named = {"id": each.id, "name": each.name, "input": each.arguments}
            content.append({"type": "tool_use", **named})
        return {**self._head, "content": content, **_stop(result), **_usage(result)}

    def body(self, texts: Sequence[Update]) -> object:
        """Return the one message."""
        return self.part(texts[0])

    def events(self, update: Update) -> list[dict[str, object]]:
        """Return the events for the new text of a step.

        The message begins when its prompt is first read; each further part of the prompt sends a ping.
        """
        events: list[dict[str, object]] = []
        if update.is_first:
            cached = 0 if update.progress is None else update.progress.n_cached
            counts = _counts(len(update.prompt), cached, 0)
            begun: dict[str, object] = {"content": [], "stop_reason": None, "stop_sequence": None}
            message = {**self._head, **begun, **counts}
            events.append({"type": "message_start", "message": message})
        if update.progress is not None:
            events.append({"type": "ping"})
        for piece in update.turn:
            events += self._written(piece)
        if update.ended is not None:
            end = {"delta": _stop(update.ended), **_usage(update.ended)}
            events += [*self._close(), {"type": "message_delta", **end}, {"type": "message_stop"}]
        return events

    def last_events(self, texts: Sequence[Update]) -> list[dict[str, object]]:
        """Return nothing: the last step has ended the message."""
        return []

    def _written(self, piece: TurnEvent) -> list[dict[str, object]]:
        """Return the events for a piece of a turn."""
        match piece.kind:
            case "thought":
                delta = {"type": "thinking_delta", "thinking": piece.text}
                return [*self._open("thinking", thinking="", signature=""), self._delta(delta)]
            case "content":
                delta = {"type": "text_delta", "text": piece.text}
                return [*self._open("text", text=""), self._delta(delta)]
            case "name":
                closed = self._close()
                return [*closed, *self._open("tool_use", id=piece.id, name=piece.text, input={})]
            case "arguments":
                return [self._delta({"type": "input_json_delta", "partial_json": piece.text})]
        return self._close()  # what looked like a call follows as text

    def _open(self, kind: str, **block: object) -> list[dict[str, object]]:
        """Return the events that begin a block, unless one of its kind is open."""
        if self._kind == kind:
            return []
        closed, self._kind = self._close(), kind
        start = {"type": "content_block_start", "index": self._index}
        return [*closed, {**start, "content_block": {"type": kind, **block}}]

    def _close(self) -> list[dict[str, object]]:
        """Return the events that end the open block, if there is one."""
        if not self._kind:
            return []
        signed = {"type": "signature_delta", "signature": _SIGNATURE}
        events = [self._delta(signed)] if self._kind == "thinking" else []
        events.append({"type": "content_block_stop", "index": self._index})
        self._kind, self._index = "", self._index + 1
        return events

    def _delta(self, delta: dict[str, str]) -> dict[str, object]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _stop(result: Result) -> dict[str, object]:
    """Return why a text has ended."""
    stop, reason = result.stop_reason, "max_tokens"
    if result.finish_reason == "tool_calls":
        reason = "tool_use"
    elif result.finish_reason == "stop":
        reason = "stop_sequence" if isinstance(stop, str) else "end_turn"
    return {"stop_reason": reason, "stop_sequence": stop if reason == "stop_sequence" else None}


def _usage(result: Result) -> dict[str, object]:
    """Return the counts of tokens of a text."""
    return _counts(result.num_prompt_tokens, result.cached, result.generated)


def _counts(n_prompt: int, n_cached: int, n_generated: int) -> dict[str, object]:
    """Return Anthropic's ``usage``; its input tokens are those that were not cached."""
    counts = {
        "input_tokens": n_prompt - n_cached, "cache_read_input_tokens": n_cached,
        "cache_creation_input_tokens": 0, "output_tokens": n_generated,
    }  # fmt: skip
    return {"usage": counts}
