"""The texts of one HTTP request: engine requests, one for each prompt, and what comes of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from ..branch import Produced
from ..engine import Event, Request, Result
from .counters import timings
from .errors import HttpError, http_error
from .service import Service
from .vocabulary import Detail

__all__ = [
    "Choice",
    "Update",
    "all_choices",
    "begun",
    "detail",
    "finish_reason",
    "stop_reason",
    "total_timings",
    "updates",
    "usage",
]


@dataclass
class Choice:
    """One text of a request.

    Attributes:
        index: its number among those of the request.
        request: its prompt and settings.
        emitted: its tokens so far, and pieces of text without one.
        result: once it has ended.
    """

    index: int
    request: Request
    emitted: list[Produced] = field(default_factory=list)
    text: str = ""
    result: Result | None = None

    def add(self, event: Event) -> Produced | None:
        """Add what an event brings; return it if it has a token or a text.

        Raises:
            HttpError: the text failed.
        """
        if event.emitted is not None:
            self.text += event.emitted.text
            self.emitted.append(event.emitted)
            return event.emitted
        self.result = event.result
        result = event.result
        if result is not None and result.finish_reason in ("error", "cancelled"):
            raise http_error(result.error or HttpError(503, "the server is shutting down"))
        if result is not None and result.error is not None and not result.tokens:
            raise http_error(result.error)  # the prompt did not fit beside others
        return None

    @property
    def whole(self) -> Update:
        """All of it, once it has ended."""
        return Update(self, 0, self.emitted, self.result)

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of its tokens."""
        tokens = self.whole.tokens
        return math.fsum(token.logprob for token in tokens) / max(1, len(tokens))


@dataclass
class Update:
    """What a step has brought for a text. The text itself may be ahead of it.

    Attributes:
        choice: the text.
        offset: characters of the text before it.
        fresh: tokens, and pieces of text without one.
        result: where the text ended with it.
    """

    choice: Choice
    offset: int = 0
    fresh: list[Produced] = field(default_factory=list)
    result: Result | None = None

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(one.text for one in self.fresh)

    @property
    def tokens(self) -> list[Produced]:
        """The new tokens."""
        return [one for one in self.fresh if one.token >= 0 and not one.is_stop]


async def updates(
    service: Service, requests: Sequence[Request]
) -> AsyncGenerator[list[Update], None]:
    """Yield what comes of requests, for each step, or several, the changes of each text together.

    Raises:
        HttpError, LlamaBranchError: a request is refused, or a text failed.
    """
    n_before = 0
    sources = []
    for request in requests:
        sources.append(_of_one(service, request, n_before))
        n_before += request.n
    source = sources[0] if len(sources) == 1 else _merged(sources)
    async with aclosing(source) as found:
        async for each in found:
            yield each


async def _of_one(
    service: Service, request: Request, first: int
) -> AsyncGenerator[list[Update], None]:
    choices = [Choice(first + i, request) for i in range(request.n)]
    async with aclosing(service.steps(request)) as steps:
        async for events in steps:
            changed: dict[int, Update] = {}
            for event in events:
                choice = choices[event.sample]
                update = changed.setdefault(event.sample, Update(choice, len(choice.text)))
                emitted = choice.add(event)
                if emitted is not None:
                    update.fresh.append(emitted)
                update.result = choice.result
            yield list(changed.values())


async def _merged(
    sources: Sequence[AsyncGenerator[list[Update], None]],
) -> AsyncGenerator[list[Update], None]:
    """Yield what several sources yield, as it comes; none runs ahead of the reader."""
    queue: asyncio.Queue[list[Update] | BaseException | None] = asyncio.Queue(len(sources))

    async def pump(source: AsyncGenerator[list[Update], None]) -> None:
        try:
            async with aclosing(source):
                async for each in source:
                    await queue.put(each)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.ensure_future(pump(source)) for source in sources]
    n_left = len(sources)
    try:
        while n_left:
            found = await queue.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                n_left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def all_choices(service: Service, requests: Sequence[Request]) -> list[Choice]:
    """Return all texts of requests once they have ended, in order."""
    found: dict[int, Choice] = {}
    async with aclosing(updates(service, requests)) as steps:
        async for step in steps:
            for update in step:
                found[update.choice.index] = update.choice
    return [found[index] for index in sorted(found)]


async def begun(
    steps: AsyncGenerator[list[Update], None],
) -> AsyncGenerator[list[Update], None]:
    """Wait for the first step and return an iterator that begins with it.

    So whatever is wrong with a request is known before the answer begins.
    """
    first = await anext(steps, None)

    async def chained() -> AsyncGenerator[list[Update], None]:
        async with aclosing(steps):
            if first is not None:
                yield first
            async for step in steps:
                yield step

    return chained()


def finish_reason(result: Result | None) -> str | None:
    """Return OpenAI's reason for an end, "stop" or "length"; None before the end."""
    if result is None:
        return None
    return "stop" if result.finish_reason == "stop" else "length"


def stop_reason(result: Result | None) -> str | int | None:
    """Return vLLM's: the stop string or token; "capacity" where the cache could hold no more."""
    if result is None:
        return None
    return "capacity" if result.finish_reason == "capacity" else result.stop_reason


def detail(token: Produced) -> Detail:
    """Return a token with what is told about it."""
    return Detail(token.token, token.logprob, token.entropy, token.source, token.alternatives)


def usage(choices: Iterable[Choice]) -> dict[str, object]:
    """Return OpenAI's ``usage`` of texts that have ended."""
    n_completion, prompts, n_cached = 0, {}, {}
    for choice in choices:
        result = choice.result
        if result is not None:
            n_completion += len(result.tokens)
            prompts[id(choice.request)] = result.num_prompt_tokens
            if result.sample == 0:
                n_cached[id(choice.request)] = result.num_cached_tokens
    n_prompt = sum(prompts.values())
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_completion,
        "total_tokens": n_prompt + n_completion,
        "prompt_tokens_details": {"cached_tokens": sum(n_cached.values())},
    }


def total_timings(choices: Iterable[Choice]) -> Mapping[str, object]:
    """Return llama-server's ``timings``, of the first text; there are none before its end."""
    for choice in choices:
        if choice.result is not None:
            return timings(choice.result)
    return {}
