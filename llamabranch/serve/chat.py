"""``/v1/chat/completions``: conversations by the model's template, tools, structured answers."""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Sequence
from datetime import date

from ..engine.openai import called, chat_choice
from ..model.tools import CallParser, Conversation, Tools, conversation
from .counters import timings
from .errors import HttpError
from .exchange import Exchange
from .fields import TextFields, check_top, engine_requests, limit_of
from .generation import Choice, Update, answer, usage
from .service import Service

__all__ = ["ChatFields", "chat", "input_tokens"]

_DATES = {"date_string": "%d %b %Y", "datetime": "%b %d %Y"}  # what llama.cpp tells templates


class ChatFields(TextFields, kw_only=True):
    """The body of a request."""

    messages: list[dict[str, object]]
    tools: list[dict[str, object]] | None = None
    tool_choice: str | dict[str, object] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: list[str] | None = None


async def chat(call: Exchange, service: Service) -> None:
    """Answer a request."""
    fields = await call.json(ChatFields)
    if fields.modalities not in (None, [], ["text"]):
        raise HttpError(400, "modalities other than text are not supported", param="modalities")
    top = check_top(fields.top_logprobs)
    if top and not fields.logprobs:
        raise HttpError(400, "top_logprobs needs logprobs", param="top_logprobs")
    tools = Tools(fields.tools or (), fields.tool_choice)
    tokens = await to_thread(lambda: _conversation(service, fields, tools).tokens(service.model))
    limits = [fields.max_completion_tokens, fields.max_tokens, fields.n_predict]
    asked = next((limit for limit in limits if limit is not None), service.settings.max_tokens)
    requests = await engine_requests(
        service, fields, [tokens], n=fields.n,
        max_tokens=limit_of(asked), top_logprobs=(top or 0) if fields.logprobs else None,
        schema=tools.schema() if tools.forced else None,
    )  # fmt: skip
    await answer(
        call, service, requests, _Writer(service, fields, tools), stream=bool(fields.stream)
    )


def _conversation(service: Service, fields: ChatFields, tools: Tools) -> Conversation:
    """Return what the template is given; a last message of the assistant is continued."""
    return conversation(
        service.model, fields.messages, tools, _variables(service, fields),
        continues=fields.continue_final_message, generates=fields.add_generation_prompt,
        describes=True,
    )  # fmt: skip


def _variables(service: Service, fields: ChatFields) -> dict[str, object]:
    """Return the template's variables: those of the request, else the date if it asks for one."""
    template, today = service.model.chat_template or "", date.today()
    dates = {name: today.strftime(form) for name, form in _DATES.items() if name in template}
    return {**dates, **(fields.chat_template_kwargs or {})}


async def input_tokens(call: Exchange, service: Service) -> None:
    """Count the tokens of a conversation, and write it as a prompt (``/apply-template``)."""
    fields = await call.json(ChatFields)
    tools = Tools(fields.tools or (), fields.tool_choice)

    def written() -> tuple[list[int], str]:
        found = _conversation(service, fields, tools)
        return found.tokens(service.model), found.text(service.model)

    tokens, text = await to_thread(written)
    await call.reply({"input_tokens": len(tokens), "prompt": text, "tokens": tokens})


class _Writer:
    """Writes texts as OpenAI's messages."""

    def __init__(self, service: Service, fields: ChatFields, tools: Tools) -> None:
        self._service = service
        self._fields = fields
        self._tools = tools
        kind = "chat.completion.chunk" if fields.stream else "chat.completion"
        self._head = service.head("chatcmpl", kind)
        self._parsers: dict[int, CallParser] = {}

    def body(self, choices: Sequence[Choice]) -> object:
        """Return all messages."""
        found = {
            **self._head,
            "choices": [self._message(choice.whole) for choice in choices],
            **usage(choices),
        }
        if self._fields.verbose:
            prompt = self._service.vocabulary.joined(choices[0].prompt)
            found["__verbose"] = {"prompt": prompt}
        return found

    def events(self, update: Update) -> list[dict[str, object]]:
        """Return chunks: the role first, then content or calls, then the reason of the end."""
        index, result = update.choice.index, update.result
        parser = self._parsers.get(index)
        deltas: list[dict[str, object]] = []
        if parser is None:
            parser = self._parsers[index] = CallParser(self._tools)
            deltas.append({"role": "assistant", "content": None})
        content, parts = parser.feed(update.text, last=result is not None)
        rated = self._logprobs(update) if update.tokens else None
        logprobs = None if rated is None else {"content": rated}
        n_before = len(deltas)
        if content or (logprobs is not None and not parts):
            deltas.append({"content": content})
        deltas += [{"tool_calls": [part]} for part in parts]
        chunks: list[dict[str, object]] = [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for delta in deltas
        ]
        if len(chunks) > n_before:
            chunks[n_before] |= {"logprobs": logprobs, **self._ids(update, with_prompt=False)}
        if result is not None:
            end = called(update.end) if parser.n_calls else update.end
            chunks.append({"index": index, "delta": {}, "logprobs": None, **end})
        events: list[dict[str, object]] = [{**self._head, "choices": [each]} for each in chunks]
        if self._fields.timings_per_token and result is not None:
            events[-1]["timings"] = timings(result)
        return events

    def last_events(self, choices: Sequence[Choice]) -> list[dict[str, object]]:
        """Return the usage, if it is asked for."""
        event = {**self._head, "choices": [], **usage(choices)}
        return [event] if self._fields.includes_usage else []

    def _message(self, update: Update) -> dict[str, object]:
        index, logprobs = update.choice.index, self._logprobs(update)
        choice = chat_choice(index, update.text, self._tools, update.end, logprobs)
        return choice | self._ids(update, with_prompt=True)

    def _ids(self, update: Update, *, with_prompt: bool) -> dict[str, object]:
        if not self._fields.return_token_ids:
            return {}
        found: dict[str, object] = {"token_ids": [token.token for token in update.tokens]}
        return found | ({"prompt_token_ids": update.choice.prompt} if with_prompt else {})

    def _logprobs(self, update: Update) -> list[dict[str, object]] | None:
        if not self._fields.logprobs:
            return None
        more = bool(self._fields.token_details)
        return self._service.vocabulary.chat_logprobs(update.tokens, more=more)
