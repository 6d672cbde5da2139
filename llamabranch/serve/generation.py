"""The texts of one HTTP request: engine requests, one for each prompt, and the answer made of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count

from ..branch import Produced
from ..engine import Request, Result
from ..engine.openai import End, end_reason
from ..engine.openai import usage as usage_of
from .errors import HttpError, http_error
from .exchange import Exchange
from .fields import TextFields
from .service import Service, seconds

__all__ = ["Choice", "Update", "Writer", "all_choices", "answer", "timings", "usage"]

_numbers = count()  # of requests to the engine, for their ids


@dataclass
class Update:
    """What has come of a text; or all of it.

    Attributes:
        choice: the text.
        text: of the text.
        tokens: of the text, without one that ends it.
        result: where the text ends with it.
    """

    choice: Choice
    is_first: bool = False
    text: str = ""
    tokens: list[Produced] = field(default_factory=list)
    result: Result | None = None

    @property
    def end(self) -> End:
        """How the text has ended; None before."""
        if self.result is None:
            return {"finish_reason": None, "stop_reason": None}
        return end_reason(self.result.finish_reason, self.result.stop_reason)


@dataclass
class Choice:
    """One text of a request: its number, its prompt and settings, and how it ended."""

    index: int
    request: Request
    is_begun: bool = False
    ended: Result | None = None

    @cached_property
    def prompt(self) -> list[int]:
        """The prompt's token ids: made once, for every event of a stream asks for them."""
        return [token for token in self.request.prompt if isinstance(token, int)]

    @property
    def result(self) -> Result:
        """How it ended, and all of it."""
        if self.ended is None:
            raise HttpError(500, "internal error: a text without an end")
        return self.ended

    @property
    def whole(self) -> Update:
        """All of it, once it has ended."""
        result = self.result
        return Update(self, True, result.text, list(result.emitted), result)


class Writer(ABC):
    """Writes texts in the form that an endpoint has; this one the ends of OpenAI's.

    Args:
        service, fields: the model, and the request.
        prefix, kind: of the answer's id, and what it is called.
    """

    def __init__(self, service: Service, fields: TextFields, prefix: str, kind: str) -> None:
        self.service = service
        self.fields = fields
        self.words = service.vocabulary
        self.head = service.head(prefix, kind)

    @abstractmethod
    def part(self, update: Update, index: int) -> dict[str, object]:
        """Return what has come of a text, or all of it, as one of the ``choices``."""

    def body(self, choices: Sequence[Choice]) -> object:
        """Return an answer in one piece."""
        parts = [self.part(each.whole, index) for index, each in enumerate(choices)]
        return {**self.head, "choices": parts, **usage(choices)}

    def parts(self, update: Update) -> list[dict[str, object]]:
        """Return the ``choices`` of events, one of each, for what a step has brought."""
        return [self.part(update, update.choice.index)]

    def events(self, update: Update) -> list[dict[str, object]]:
        """Return the events of a stream for what a step has brought."""
        events: list[dict[str, object]] = [
            {**self.head, "choices": [part]} for part in self.parts(update)
        ]
        if self.fields.timings_per_token and update.result is not None:
            events[-1]["timings"] = timings(update.result)
        return events

    def last_events(self, choices: Sequence[Choice]) -> list[dict[str, object]]:
        """Return the events that end a stream."""
        event = {**self.head, "choices": [], **usage(choices)}
        return [event] if self.fields.includes_usage else []


async def answer(
    call: Exchange, service: Service, requests: Sequence[Request], writer: Writer, *, stream: bool
) -> None:
    """Generate the texts of requests and send them, as they come or in one piece.

    A stream begins with its first text: what is refused before is an answer with a status of its own.

    Raises:
        HttpError, LlamaBranchError: a request is refused, or a text failed.
    """
    if not stream:
        await call.reply(writer.body(await all_choices(service, requests)))
        return
    choices = _choices(requests)
    async with aclosing(_updates(service, requests, choices, reports_tokens=True)) as steps:
        async for updates in steps:
            await call.event([event for update in updates for event in writer.events(update)])
    await call.event(writer.last_events(choices))
    await call.end_stream()


async def all_choices(service: Service, requests: Sequence[Request]) -> list[Choice]:
    """Return all texts of requests once they have ended, in order."""
    choices = _choices(requests)
    async with aclosing(_updates(service, requests, choices, reports_tokens=False)) as steps:
        async for _ in steps:
            pass
    return choices


def _choices(requests: Sequence[Request]) -> list[Choice]:
    of_each = [request for request in requests for _ in range(request.n)]
    return [Choice(i, request) for i, request in enumerate(of_each)]


async def _updates(
    service: Service,
    requests: Sequence[Request],
    choices: Sequence[Choice],
    *,
    reports_tokens: bool,
) -> AsyncGenerator[list[Update], None]:
    """Yield what has come of requests, the changes of each text together."""
    first_of: dict[str, int] = {}
    named = []
    for request in requests:
        named.append(replace(request, id=f"http-{next(_numbers)}"))
        first_of[f"{named[-1].id}"] = sum(before.n for before in named[:-1])
    left = len(choices)
    service.n_texts += left
    try:
        async with aclosing(service.engine.steps(*named, reports_tokens=reports_tokens)) as steps:
            async for events in steps:
                changed: dict[int, Update] = {}
                for event in events:
                    index = first_of[event.id] + event.sample
                    choice, update = choices[index], changed.get(index)
                    if update is None:
                        update = Update(choice, not choice.is_begun)
                        changed[index], choice.is_begun = update, True
                    one = event.emitted
                    if one is not None:
                        update.text += one.text
                        if one.token >= 0 and not one.is_stop:
                            update.tokens.append(one)
                    if event.result is not None:
                        left -= 1
                        service.n_texts -= 1
                        service.counters.add(event.result)
                        choice.ended = update.result = _checked(event.result)
                yield list(changed.values())
    finally:
        service.n_texts -= left


def _checked(result: Result) -> Result:
    """Return a result; raise if the text has failed, or found no room for its prompt."""
    if result.finish_reason in ("error", "cancelled"):
        raise http_error(result.error or HttpError(503, "the server is shutting down"))
    if result.error is not None and not result.tokens:
        raise http_error(result.error)
    return result


def usage(choices: Sequence[Choice]) -> dict[str, object]:
    """Return OpenAI's ``usage``, and llama-server's ``timings`` of the first text."""
    results = [choice.result for choice in choices]
    prompts = [result for result in results if result.sample == 0]
    n_prompt = sum(result.num_prompt_tokens for result in prompts)
    n_completion = sum(len(result.tokens) for result in results)
    n_cached = sum(result.num_cached_tokens for result in prompts)
    return {"usage": usage_of(n_prompt, n_completion, n_cached), "timings": timings(results[0])}


def timings(result: Result) -> dict[str, object]:
    """Return llama-server's ``timings`` of a text.

    The first token comes from the last decode of the prompt: rates are over the others.
    """
    n_cached, n, stats = result.num_cached_tokens, len(result.tokens), result.stats
    n_prompt = result.num_prompt_tokens - n_cached
    prompt_s, predicted_s = seconds(result)
    per_token = predicted_s / (n - 1) if n > 1 else 0.0
    found: dict[str, object] = {
        "cache_n": n_cached,
        "prompt_n": n_prompt,
        "prompt_ms": 1e3 * prompt_s,
        "prompt_per_token_ms": 1e3 * prompt_s / n_prompt if n_prompt else 0.0,
        "prompt_per_second": n_prompt / prompt_s if prompt_s else 0.0,
        "predicted_n": n,
        "predicted_ms": 1e3 * predicted_s,
        "predicted_per_token_ms": 1e3 * per_token,
        "predicted_per_second": 1 / per_token if per_token else 0.0,
    }
    if stats.num_draft_tokens:
        found |= {"draft_n": stats.num_draft_tokens, "draft_n_accepted": stats.num_accepted_tokens}
    return found
