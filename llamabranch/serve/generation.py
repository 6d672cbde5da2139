"""The texts of one HTTP request: engine requests, one for each prompt, and the answer made of them."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from ..branch import Produced
from ..engine import Request, Result
from ..engine.async_engine import merged
from ..engine.openai import End, end_reason
from ..engine.openai import usage as usage_of
from .counters import timings
from .errors import HttpError, http_error
from .exchange import Exchange
from .service import Service

__all__ = ["Choice", "Update", "Writer", "all_choices", "answer", "usage"]


@dataclass
class Update:
    """What a step has brought for a text; or all of it.

    Attributes:
        choice: the text; it may be ahead of the update.
        offset: characters of the text before it; 0 for the first.
        fresh: tokens, and pieces of text without one.
        result: where the text ends with it.
    """

    choice: Choice
    offset: int = 0
    fresh: list[Produced] = field(default_factory=list)
    result: Result | None = None
    is_first: bool = False

    @property
    def text(self) -> str:
        """Its text."""
        return "".join(one.text for one in self.fresh)

    @property
    def tokens(self) -> list[Produced]:
        """Its tokens."""
        return [one for one in self.fresh if one.token >= 0 and not one.is_stop]

    @property
    def end(self) -> End:
        """How the text has ended; None before."""
        if self.result is None:
            return {"finish_reason": None, "stop_reason": None}
        return end_reason(self.result.finish_reason, self.result.stop_reason)


@dataclass
class Choice:
    """One text of a request: its number, its prompt and settings, what was emitted, how it ended."""

    index: int
    request: Request
    emitted: list[Produced] = field(default_factory=list)
    result: Result | None = None

    @property
    def prompt(self) -> list[int]:
        """The prompt's token ids."""
        return [token for token in self.request.prompt if isinstance(token, int)]

    @property
    def whole(self) -> Update:
        """All of it, once it has ended."""
        return Update(self, 0, self.emitted, self.result, True)

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of its tokens."""
        tokens = self.whole.tokens
        return math.fsum(token.logprob for token in tokens) / max(1, len(tokens))


class Writer(Protocol):
    """Writes texts in the form that an endpoint has."""

    def body(self, choices: Sequence[Choice]) -> object:
        """Return an answer in one piece."""

    def events(self, update: Update) -> list[dict[str, object]]:
        """Return the events of a stream for what a step has brought."""

    def last_events(self, choices: Sequence[Choice]) -> list[dict[str, object]]:
        """Return the events that end a stream."""


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
    ended: dict[int, Choice] = {}
    async with aclosing(_updates(service, requests)) as steps:
        async for step in steps:
            if not call.status:
                await call.start_stream()
            await call.event([event for update in step for event in writer.events(update)])
            ended |= {u.choice.index: u.choice for u in step if u.result is not None}
    await call.event(writer.last_events([ended[index] for index in sorted(ended)]))
    await call.end_stream()


async def all_choices(service: Service, requests: Sequence[Request]) -> list[Choice]:
    """Return all texts of requests once they have ended, in order."""
    found: dict[int, Choice] = {}
    async with aclosing(_updates(service, requests)) as steps:
        async for step in steps:
            found |= {update.choice.index: update.choice for update in step}
    return [found[index] for index in sorted(found)]


async def _updates(
    service: Service, requests: Sequence[Request]
) -> AsyncGenerator[list[Update], None]:
    """Yield what comes of requests, for each step, or several, the changes of each text together."""
    sources = [
        _of_one(service, request, sum(before.n for before in requests[:i]))
        for i, request in enumerate(requests)
    ]
    async with aclosing(merged(sources)) as found:
        async for each in found:
            yield each


async def _of_one(
    service: Service, request: Request, first: int
) -> AsyncGenerator[list[Update], None]:
    choices = [Choice(first + i, request) for i in range(request.n)]
    offsets = [0] * request.n
    async with aclosing(service.steps(request)) as steps:
        async for events in steps:
            changed: dict[int, Update] = {}
            for event in events:
                n, choice = event.sample, choices[event.sample]
                if n not in changed:
                    is_first = not choice.emitted
                    changed[n] = Update(choice, offsets[n], is_first=is_first)
                if event.emitted is not None:
                    choice.emitted.append(event.emitted)
                    changed[n].fresh.append(event.emitted)
                    offsets[n] += len(event.emitted.text)
                if event.result is not None:
                    _check(event.result)
                    choice.result = changed[n].result = event.result
            yield list(changed.values())


def _check(result: Result) -> None:
    """Raise if a text has failed, or found no room for its prompt."""
    if result.finish_reason in ("error", "cancelled"):
        raise http_error(result.error or HttpError(503, "the server is shutting down"))
    if result.error is not None and not result.tokens:
        raise http_error(result.error)


def usage(choices: Iterable[Choice]) -> dict[str, object]:
    """Return OpenAI's ``usage``, and llama-server's ``timings`` of the first text."""
    results = [(choice, choice.result) for choice in choices if choice.result is not None]
    prompts = {id(choice.request): found.num_prompt_tokens for choice, found in results}
    n_completion = sum(len(found.tokens) for _, found in results)
    n_cached = sum(found.num_cached_tokens for _, found in results if found.sample == 0)
    return {
        "usage": usage_of(sum(prompts.values()), n_completion, n_cached),
        "timings": timings(results[0][1]) if results else {},
    }
