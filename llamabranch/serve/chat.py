"""``/v1/chat/completions``: conversations by the model's template, tools, structured answers."""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Sequence
from datetime import date

from ..engine.openai import called, chat_choice
from ..model.tools import CallParser, Conversation, Tools, conversation
from .errors import HttpError
from .exchange import Exchange
from .fields import Limit, TextFields, Top, engine_requests, limit_of
from .generation import Update, Writer, answer
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
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    modalities: list[str] | None = None


async def chat(call: Exchange, service: Service) -> None:
    """Answer a request."""
    fields = await call.json(ChatFields)
    if fields.modalities not in (None, [], ["text"]):
        raise HttpError(400, "modalities other than text are not supported", param="modalities")
    if fields.top_logprobs and not fields.logprobs:
        raise HttpError(400, "top_logprobs needs logprobs", param="top_logprobs")
    tools = Tools(fields.tools or (), fields.tool_choice)
    tokens = await to_thread(lambda: _conversation(service, fields, tools).tokens(service.model))
    limit = limit_of(
        fields.max_completion_tokens, fields.max_tokens, fields.n_predict,
        service.settings.max_tokens,
    )  # fmt: skip
    requests = await engine_requests(
        service, fields, [tokens], n=fields.n, max_tokens=limit,
        top_logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        schema=tools.schema() if tools.forced else None,
    )  # fmt: skip
    writer = _Writer(service, fields, tools)
    await answer(call, service, requests, writer, stream=bool(fields.stream))


def _conversation(service: Service, fields: ChatFields, tools: Tools) -> Conversation:
    """Return what the template is given; a last message of the assistant is continued.

    A template that asks for the date gets that of today, unless the request gives one.
    """
    template, today = service.model.chat_template or "", date.today()
    dates = {name: today.strftime(form) for name, form in _DATES.items() if name in template}
    return conversation(
        service.model, fields.messages, tools, {**dates, **(fields.chat_template_kwargs or {})},
        continues=fields.continue_final_message, generates=fields.add_generation_prompt,
        describes=True,
    )  # fmt: skip


async def input_tokens(call: Exchange, service: Service) -> None:
    """Count the tokens of a conversation, and write it as a prompt (``/apply-template``)."""
    fields = await call.json(ChatFields)
    tools = Tools(fields.tools or (), fields.tool_choice)

    def written() -> tuple[list[int], str]:
        found = _conversation(service, fields, tools)
        return found.tokens(service.model), found.text(service.model)

    tokens, text = await to_thread(written)
    await call.reply({"input_tokens": len(tokens), "prompt": text, "tokens": tokens})


class _Writer(Writer[ChatFields]):
    """Writes texts as OpenAI's messages."""

    def __init__(self, service: Service, fields: ChatFields, tools: Tools) -> None:
        kind = "chat.completion.chunk" if fields.stream else "chat.completion"
        super().__init__(service, fields, "chatcmpl", kind)
        self._tools = tools
        self._parsers: dict[int, CallParser] = {}

    def body(self, texts: Sequence[Update]) -> object:
        """Return all messages."""
        if self.fields.verbose:
            self.head["__verbose"] = {"prompt": self.words.joined(texts[0].prompt)}
        return super().body(texts)

    def part(self, update: Update) -> dict[str, object]:
        """Return a whole message."""
        scored, end = self._scored(update), update.end
        choice = chat_choice(update.index, update.text, self._tools, end, scored)
        return choice | self._ids(update, prompt_token_ids=update.prompt)

    def parts(self, update: Update) -> list[dict[str, object]]:
        """Return changes: the role first, then content or calls, then the reason of the end."""
        index, result = update.index, update.ended
        parser = self._parsers.get(index)
        deltas: list[dict[str, object]] = []
        if parser is None:
            parser = self._parsers[index] = CallParser(self._tools)
            deltas.append({"role": "assistant", "content": None})
        content, calls = parser.feed(update.text, last=result is not None)
        scored = self._scored(update) if update.tokens else None
        logprobs = None if scored is None else {"content": scored}
        n_before = len(deltas)
        if content or (logprobs is not None and not calls):
            deltas.append({"content": content})
        deltas += [{"tool_calls": [call]} for call in calls]
        chunks: list[dict[str, object]] = [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for delta in deltas
        ]
        if len(chunks) > n_before:
            chunks[n_before] |= {"logprobs": logprobs, **self._ids(update)}
        if result is not None:
            end = called(update.end) if parser.n_calls else update.end
            chunks.append({"index": index, "delta": {}, "logprobs": None, **end})
        return chunks

    def _ids(self, update: Update, **more: object) -> dict[str, object]:
        ids = [token.token for token in update.tokens]
        return {"token_ids": ids, **more} if self.fields.return_token_ids else {}

    def _scored(self, update: Update) -> list[dict[str, object]] | None:
        if not self.fields.logprobs:
            return None
        return self.words.chat_logprobs(update.tokens, more=bool(self.fields.token_details))
