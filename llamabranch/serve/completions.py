"""OpenAI's completions and chat completions."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from ..branch import Produced
from ..context import TokenScore
from ..model.thoughts import ThinkingChoice, thinking_variables
from ..model.tools import openai_deltas
from ..request.openai import chat_choice, completion_choice
from ..request.request import TextOptions
from ..run.job import Job
from .errors import HttpError
from .fields import HttpFields, Prompt, Top, prepared, prompt_tokens
from .generation import Update, Writer, answer
from .messages import json_of
from .service import Service

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

_DEFAULT_TOKENS = 16


# -- completions -----------------------------------------------------------------------------------


class CompletionFields(HttpFields, kw_only=True):
    """The body of a request."""

    prompt: Prompt | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: Top | None = None
    parse_special: bool | None = None

    async def tokens(self, service: Service, *, add_special: bool = True) -> list[list[int]]:
        """Return the token ids of the prompts."""
        if self.prompt is None:
            raise HttpError(400, "prompt is missing", param="prompt")
        parse = self.parse_special is not False
        return await prompt_tokens(
            service, self.prompt, add_special=add_special, parse_special=parse
        )


async def completions(call: HttpRequest, service: Service) -> Response:
    """Answer a request for completions."""
    fields = await json_of(call, CompletionFields)
    if fields.best_of not in (None, fields.n or 1):
        raise HttpError(400, "best_of is not supported, only n", param="best_of")
    top = fields.logprobs
    prompts, n_added = await fields.tokens(service), [0]
    if fields.echo:
        bare = await fields.tokens(service, add_special=False)
        n_added = [len(all_) - len(own) for all_, own in zip(prompts, bare, strict=True)]
        if fields.stream and top is not None:
            raise HttpError(400, "echo with logprobs cannot be streamed", param="stream")
    options = await fields.options(call, service, fields.limit(_DEFAULT_TOKENS), top)
    options["prompt_logprobs"] = top if fields.echo else None
    jobs = await prepared(service, prompts, options, param="prompt", reports_tokens=fields.stream)
    return await answer(_CompletionWriter(service, fields, n_added), jobs)


class _Offsets:
    """The offsets of tokens in a growing text; a character of several tokens counts for the last one.

    Args:
        start: the offset of the first token.
    """

    def __init__(self, start: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._end = start

    def of(self, pieces: Iterable[bytes]) -> list[int]:
        """Return the offsets of the next tokens, whose bytes are ``pieces``."""
        offsets = []
        for piece in pieces:
            offsets.append(self._end)
            self._end += len(self._decoder.decode(piece))
        return offsets


class _CompletionWriter(Writer[CompletionFields]):
    """Writes texts as OpenAI's choices.

    Args:
        service, fields: the model, and the request.
        n_added: how many tokens at the beginning of each prompt were added by the server; an echo leaves
            out the names of control tokens among them.
    """

    door = "completions"

    def __init__(self, service: Service, fields: CompletionFields, n_added: Sequence[int]) -> None:
        super().__init__(service, fields, "cmpl", "text_completion")
        self._n_added = n_added
        self._offsets: dict[int, _Offsets] = {}  # of each text

    def part(self, update: Update) -> dict[str, object]:
        """Return the new part of a text, or all of it, with the prompt if the client asked for it."""
        fields, index, prompt = self.fields, update.index, update.prompt
        piece = self.service.model.piece
        echoed: list[bytes] = []
        if update.is_first and fields.echo:
            n = self._n_added[index // (fields.n or 1)]
            echoed = [*map(piece, prompt[:n]), *(self.words.entry(t)[0] for t in prompt[n:])]
        echo = b"".join(echoed).decode("utf-8", "replace")
        if update.is_first:
            self._offsets[index] = _Offsets(len(echo))
        choice = completion_choice(index, echo + update.text, update.end, None)
        if fields.logprobs is not None:
            scored: list[tuple[int, Produced | TokenScore | None]]
            scored = [(token.token, token) for token in update.tokens]
            offsets = self._offsets[index].of(piece(token.token) for token in update.tokens)
            if fields.echo:
                scores = update.result.prompt_logprobs or ()
                scored = [*zip(prompt, scores, strict=True), *scored]
                offsets = [*_Offsets().of(echoed), *offsets]
            choice["logprobs"] = self.words.completion_logprobs(
                scored, offsets, fields.logprobs, more=bool(fields.token_details)
            )
        return choice


# -- conversations ---------------------------------------------------------------------------------


class ChatFields(HttpFields, kw_only=True):
    """The body of a request."""

    messages: list[dict[str, object]]
    tools: list[dict[str, object]] | None = None
    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    show_schema: bool | None = None
    reasoning_effort: str | None = None
    thinking: bool | Annotated[int, Meta(ge=0)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    modalities: list[str] | None = None

    @property
    def thinks(self) -> ThinkingChoice:
        """Whether to think: None = as the template does, False = no, a number = the token limit."""
        variables = self.chat_template_kwargs or {}
        if self.reasoning_effort == "none" or variables.get("enable_thinking") is False:
            return False
        return self.thinking

    def chat_options(self, service: Service, options: TextOptions) -> dict[str, object]:
        """Return the options of ``Context.chat``.

        A last message of the assistant is continued. A template that asks for the date gets today's,
        unless the request sets one.
        """
        model, choice = service.model, self.thinks
        variables = service.dates() | thinking_variables(model.turn_format, choice)
        if self.reasoning_effort and "reasoning_effort" in (model.chat_template or ""):
            variables["reasoning_effort"] = self.reasoning_effort
        if model.turn_format.thought_end is None:  # like llama-server and vLLM
            choice = None
        names = (
            "tools", "tool_choice", "parallel_tool_calls", "continue_final_message",
            "add_generation_prompt",
        )  # fmt: skip
        return {
            **options, **{name: getattr(self, name) for name in names}, "thinking": choice,
            "chat_template_kwargs": {**variables, **(self.chat_template_kwargs or {})},
            "show_schema": self.show_schema is not False,
        }  # fmt: skip


async def chat(call: HttpRequest, service: Service) -> Response:
    """Answer a request."""
    fields = await json_of(call, ChatFields)
    if fields.top_logprobs and not fields.logprobs:
        raise HttpError(400, "top_logprobs needs logprobs", param="top_logprobs")
    if fields.modalities not in (None, [], ["text"]):
        raise HttpError(400, "modalities other than text are not supported", param="modalities")
    jobs = await chat_jobs(call, service, fields)
    return await answer(_ChatWriter(service, fields), jobs)


async def chat_options(
    call: HttpRequest, service: Service, fields: ChatFields
) -> dict[str, object]:
    """Return the options of ``Context.chat`` for a request.

    Raises:
        LlamaBranchError: a value is out of range, or the grammar is invalid.
    """
    top_logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    limit = fields.limit(service.settings.max_tokens)
    options = await fields.options(call, service, limit, top_logprobs)
    return fields.chat_options(service, options)


async def chat_jobs(
    call: HttpRequest, service: Service, fields: ChatFields, **more: object
) -> list[Job]:
    """Return the engine's requests for a conversation, with ``more`` options.

    Raises:
        HttpError, LlamaBranchError: see `prepared`.
    """
    options = await chat_options(call, service, fields) | more
    return await prepared(
        service, fields.messages, options, param="messages", reports_tokens=fields.stream
    )


class _ChatWriter(Writer[ChatFields]):
    """Writes texts as OpenAI's messages.

    Args:
        service, fields: the model, and the request.
    """

    door = "chat"

    def __init__(self, service: Service, fields: ChatFields) -> None:
        kind = "chat.completion.chunk" if fields.stream else "chat.completion"
        super().__init__(service, fields, "chatcmpl", kind)

    def part(self, update: Update) -> dict[str, object]:
        """Return a complete message."""
        return chat_choice(update.index, update.result.turn, update.end, self._scored(update))

    def parts(self, update: Update) -> list[dict[str, object]]:
        """Return deltas: the role first, then content or calls, then the finish reason."""
        scored = self._scored(update) if update.tokens else None
        deltas = openai_deltas(update.turn)
        if scored is not None and not deltas:
            deltas.append({"content": ""})
        common: dict[str, object] = {"index": update.index, "logprobs": None}
        chunks = [{**common, "delta": delta, "finish_reason": None} for delta in deltas]
        if chunks:
            chunks[0]["logprobs"] = None if scored is None else {"content": scored}
        if update.is_first:
            chunks.insert(0, _begin(update))
        if update.ended is not None:
            chunks.append({**common, "delta": {}, **update.end})
        return chunks

    def _scored(self, update: Update) -> list[dict[str, object]] | None:
        if not self.fields.logprobs:
            return None
        return self.words.chat_logprobs(update.tokens, more=bool(self.fields.token_details))


def _begin(update: Update) -> dict[str, object]:
    """Return the delta that begins a message."""
    first = {"role": "assistant", "content": None}
    return {"index": update.index, "logprobs": None, "delta": first, "finish_reason": None}
