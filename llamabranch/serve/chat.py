"""``/v1/chat/completions``: conversations by the model's template, tools, structured answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing

import msgspec

from ..engine import Request
from .errors import HttpError
from .exchange import Exchange
from .fields import TextFields, limit_of
from .generation import (
    Choice,
    Update,
    all_choices,
    begun,
    detail,
    finish_reason,
    stop_reason,
    total_timings,
    updates,
    usage,
)
from .requests import requests_of
from .service import Service
from .tools import CallParser, Tools

__all__ = ["TemplateFields", "chat", "conversation", "input_tokens"]

_MOST_LOGPROBS = 20
_REFUSED = ("functions", "function_call", "audio", "web_search_options")


class TemplateFields(TextFields, kw_only=True):
    """The body of a request: what the prompt is made from, and what is asked for."""

    messages: list[dict[str, object]]
    tools: list[dict[str, object]] | None = None
    tool_choice: str | dict[str, object] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: list[str] | None = None
    functions: object = None
    function_call: object = None
    audio: object = None
    web_search_options: object = None


_decode = msgspec.json.Decoder(TemplateFields).decode


async def chat(call: Exchange, service: Service) -> None:
    """Answer a request."""
    fields = await call.json(_decode)
    for name in _REFUSED:
        if getattr(fields, name) is not None:
            raise HttpError(400, f"{name} is not supported", param=name)
    if fields.modalities not in (None, ["text"]):
        raise HttpError(400, "only text is generated", param="modalities")
    n = 1 if fields.n is None else fields.n
    if n < 1:
        raise HttpError(400, f"n must be at least 1, not {n}", param="n")
    top = fields.top_logprobs or 0
    if not 0 <= top <= _MOST_LOGPROBS:
        raise HttpError(400, f"top_logprobs must be 0 to {_MOST_LOGPROBS}", param="top_logprobs")
    if fields.top_logprobs and not fields.logprobs:
        raise HttpError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    tools = Tools(fields.tools or (), fields.tool_choice)
    tokens = await service.in_thread(lambda: conversation(service, fields, tools))
    limit = (
        fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    )
    given = fields.n_predict if limit is None else limit
    max_tokens = service.settings.max_tokens if given is None else limit_of(given)
    requests = await requests_of(
        service,
        fields,
        [tokens],
        n=n,
        max_tokens=max_tokens,
        top_logprobs=top if fields.logprobs else None,
        grammar=tools.schema() if tools.forced else None,
    )
    answer = _Answer(service, fields, tools)
    if fields.stream:
        await _stream(call, answer, requests)
        return
    choices = await all_choices(service, requests)
    body: dict[str, object] = {
        **service.head("chatcmpl", "chat.completion"),
        "choices": [answer.choice(choice) for choice in choices],
        "usage": usage(choices),
        "timings": total_timings(choices),
    }
    if fields.verbose:
        body["__verbose"] = {"prompt": service.model.detokenize(tokens, special=True)}
    await call.reply(body)


def conversation(service: Service, fields: TemplateFields, tools: Tools) -> list[int]:
    """Return the tokens of a conversation; a last message of the assistant is continued."""
    messages: Sequence[Mapping[str, object]] = fields.messages
    model = service.model
    prefill = ""
    if fields.continue_final_message is not False and fields.add_generation_prompt:
        ends = [message.get("role") == "assistant" for message in messages[-2:]]
        if ends == [True, True]:
            raise HttpError(400, "the conversation ends with two answers", param="messages")
        if ends[-1:] == [True] and not messages[-1].get("tool_calls"):
            content = messages[-1].get("content")
            prefill = _text(content)
            messages = messages[:-1]
    variables = dict(fields.chat_template_kwargs or {})
    if set(variables) & {"messages", "tools", "add_generation_prompt"}:
        raise HttpError(
            400, "chat_template_kwargs holds other variables", param="chat_template_kwargs"
        )
    knows_tools = "tools" in (model.chat_template or "")
    if tools.is_used and not knows_tools:
        messages = tools.told(messages)
    tokens = model.chat_tokens(
        messages,
        tools=tools.given if tools.is_used and knows_tools else None,
        add_generation_prompt=fields.add_generation_prompt,
        **variables,
    )
    return tokens + model.tokenize(prefill, add_special=False) if prefill else tokens


def _text(content: object) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


async def input_tokens(call: Exchange, service: Service) -> None:
    """Count the tokens of a conversation."""
    fields = await call.json(_decode)
    tools = Tools(fields.tools or (), fields.tool_choice)
    tokens = await service.in_thread(lambda: conversation(service, fields, tools))
    await call.reply({"object": "response.input_tokens", "input_tokens": len(tokens)})


async def _stream(call: Exchange, answer: _Answer, requests: Sequence[Request]) -> None:
    service, fields = answer.service, answer.fields
    head = service.head("chatcmpl", "chat.completion.chunk")
    parsers: dict[int, CallParser] = {}
    ended: list[Choice] = []
    async with aclosing(await begun(updates(service, requests))) as steps:
        await call.start_stream()
        async for step in steps:
            events = []
            for update in step:
                index = update.choice.index
                if index not in parsers:
                    parsers[index] = CallParser(answer.tools)
                    role: dict[str, object] = {"role": "assistant", "content": None}
                    events.append({**head, "choices": [_chunk(index, role, None)]})
                events += [{**head, **each} for each in answer.chunks(update, parsers[index])]
                if update.result is not None:
                    ended.append(update.choice)
            await call.event(*events)
        options = fields.stream_options
        if options is not None and options.include_usage:
            end = {"choices": [], "usage": usage(ended), "timings": total_timings(ended)}
            await call.event({**head, **end})
        await call.end_stream()


def _chunk(
    index: int, delta: dict[str, object], reason: str | None, logprobs: object = None
) -> dict[str, object]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


class _Answer:
    """Writes texts as OpenAI's messages."""

    def __init__(self, service: Service, fields: TemplateFields, tools: Tools) -> None:
        self.service = service
        self.fields = fields
        self.tools = tools

    def _logprobs(self, update: Update) -> dict[str, object] | None:
        if not self.fields.logprobs:
            return None
        details = map(detail, update.tokens)
        more = bool(self.fields.token_details)
        return {"content": self.service.vocabulary.chat_logprobs(details, more=more)}

    def choice(self, choice: Choice) -> dict[str, object]:
        """Return the JSON of a text."""
        update = choice.whole
        parser = CallParser(self.tools)
        content, parts = parser.feed(update.text, last=True)
        message: dict[str, object] = {"role": "assistant", "content": content or None}
        if not parts:
            message["content"] = content
        else:
            message["tool_calls"] = _joined(parts)
        reason = "tool_calls" if parser.n_calls else finish_reason(update.result)
        found = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(update),
            "finish_reason": reason,
            "stop_reason": stop_reason(update.result),
        }
        if self.fields.return_token_ids:
            found["token_ids"] = [token.token for token in update.tokens]
            found["prompt_token_ids"] = list(choice.request.prompt)
        return found

    def chunks(self, update: Update, parser: CallParser) -> list[dict[str, object]]:
        """Return the chunks of what a step has brought for a text."""
        index, result = update.choice.index, update.result
        logprobs = self._logprobs(update) if update.tokens else None
        content, parts = parser.feed(update.text, last=result is not None)
        deltas: list[dict[str, object]] = [{"tool_calls": [part]} for part in parts]
        if content or (logprobs is not None and not parts):
            deltas.insert(0, {"content": content})
        found: list[dict[str, object]] = []
        for i, delta in enumerate(deltas):
            chunk = _chunk(index, delta, None, logprobs if i == 0 else None)
            if self.fields.return_token_ids and i == 0:
                chunk["token_ids"] = [token.token for token in update.tokens]
            found.append({"choices": [chunk]})
        if result is not None:
            reason = "tool_calls" if parser.n_calls else finish_reason(result)
            last = _chunk(index, {}, reason)
            last["stop_reason"] = stop_reason(result)
            end: dict[str, object] = {"choices": [last]}
            if self.fields.timings_per_token:
                end["timings"] = total_timings([update.choice])
            found.append(end)
        return found


def _joined(parts: Sequence[dict[str, object]]) -> list[dict[str, object]]:
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
