"""The texts of one HTTP request: engine requests, one for each prompt, and the answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from ..branch import Produced
from ..engine import Request, Result
from ..generation.thought import token_text
from ..request.openai import End, end_reason
from ..request.openai import usage as usage_of
from .errors import HttpError, http_error
from .fields import HttpFields
from .messages import event_stream, reply
from .service import Service

if TYPE_CHECKING:
    from starlette.responses import Response

__all__ = ["Update", "Writer", "all_texts", "answer", "updates", "usage"]

F = TypeVar("F", bound=HttpFields)
_numbers = count()  # of requests to the engine, for their ids


@dataclass
class Update:
    """New text of a request, or a complete text.

    Attributes:
        index: the number of the text in the request.
        request: its prompt and settings.
        is_first: whether it is the first update of its text.
        text: the new text.
        written: the same with the names of control tokens.
        tokens: the new tokens, without one that ends the text.
        thought, thoughts: text and tokens of the thought before the answer.
        ended: the event that ended the text, if it has ended.
        ended_thought: all tokens of the thought, as the result will have them, if it has just ended.
    """

    index: int
    request: Request
    is_first: bool = False
    text: str = ""
    written: str = ""
    tokens: list[Produced] = field(default_factory=list)
    thought: str = ""
    thoughts: list[Produced] = field(default_factory=list)
    ended: Result | None = None
    ended_thought: list[Produced] = field(default_factory=list)

    @property
    def prompt(self) -> Sequence[int]:
        """The prompt's token ids."""
        return cast(Sequence[int], self.request.prompt)

    @property
    def result(self) -> Result:
        """The complete result."""
        return cast(Result, self.ended)

    @property
    def end(self) -> End:
        """The finish reason; None while it runs."""
        if self.ended is None:
            return {"finish_reason": None, "stop_reason": None}
        return end_reason(self.ended.finish_reason, self.ended.stop_reason)


class Writer(ABC, Generic[F]):
    """Writes texts in the format of an endpoint; this class writes OpenAI's last events.

    Args:
        service, fields: the model, and the request.
        prefix, kind: the prefix of the answer's id, and the name of its kind.
    """

    def __init__(self, service: Service, fields: F, prefix: str, kind: str) -> None:
        self.service = service
        self.fields = fields
        self.words = service.vocabulary
        self.head = service.head(prefix, kind)

    @abstractmethod
    def part(self, update: Update) -> dict[str, object]:
        """Return new text, or a complete text, as one of the ``choices``."""

    def body(self, texts: Sequence[Update]) -> object:
        """Return an answer in one piece."""
        return {**self.head, "choices": [*map(self.part, texts)], **usage(texts)}

    def parts(self, update: Update) -> list[dict[str, object]]:
        """Return the ``choices`` for the new text of a step, one for each event."""
        return [self.part(update)]

    def events(self, update: Update) -> list[dict[str, object]]:
        """Return the events of a stream for the new text of a step."""
        return [{**self.head, "choices": [part]} for part in self.parts(update)]

    def last_events(self, texts: Sequence[Update]) -> list[dict[str, object]]:
        """Return the events that end a stream."""
        event = {**self.head, "choices": [], **usage(texts)}
        options = self.fields.stream_options
        return [event] if options is not None and options.include_usage else []


async def answer(writer: Writer[F], requests: Sequence[Request]) -> Response:
    """Return the texts of requests, as a stream or in one piece.

    A stream begins only with its first text, so that earlier errors get an HTTP status of their own.

    Raises:
        HttpError, LlamaBranchError: a request is refused, or a text failed.
    """
    if writer.fields.stream:
        return await event_stream(_frames(writer, requests))
    return reply(writer.body(await all_texts(writer.service, requests)))


async def _frames(
    writer: Writer[F], requests: Sequence[Request]
) -> AsyncGenerator[list[dict[str, object]], None]:
    ended: dict[int, Update] = {}
    async with aclosing(updates(writer.service, requests)) as steps:
        async for changed in steps:
            _note_ends(ended, changed)
            yield [event for update in changed for event in writer.events(update)]
    yield writer.last_events([ended[index] for index in sorted(ended)])


async def all_texts(service: Service, requests: Sequence[Request]) -> list[Update]:
    """Return all texts of requests, in order, after they ended.

    Raises:
        HttpError, LlamaBranchError: a request is refused, or a text failed.
    """
    ended: dict[int, Update] = {}
    async with aclosing(updates(service, requests, reports_tokens=False)) as steps:
        async for changed in steps:
            _note_ends(ended, changed)
    return [ended[index] for index in sorted(ended)]


def _note_ends(ended: dict[int, Update], changed: Iterable[Update]) -> None:
    """Keep the texts that have ended, by their numbers; raise if one has failed."""
    for update in changed:
        if update.ended is not None:
            result, at = update.ended, update.index
            n, emitted = result.n_thought_tokens, [*result.emitted]
            ended[at] = Update(
                at, update.request, True, result.text, result.text, emitted[n:],
                result.thought, emitted[:n], result,
            )  # fmt: skip
            _check(result)


async def updates(
    service: Service, requests: Sequence[Request], *, reports_tokens: bool = True
) -> AsyncGenerator[list[Update], None]:
    """Yield the updates of each step, one for each text; count the texts.

    With ``reports_tokens=False`` only the ends of texts are yielded. Requests without an id get one.

    Raises:
        HttpError, LlamaBranchError: a request is refused.
    """
    named = [replace(request, id=request.id or f"http-{next(_numbers)}") for request in requests]
    texts = [(request, sample) for request in named for sample in range(request.n)]
    places = {(request.id, sample): index for index, (request, sample) in enumerate(texts)}
    started: set[int] = set()
    n_left = len(texts)
    service.n_texts += n_left
    try:
        async with aclosing(service.engine.steps(*named, reports_tokens=reports_tokens)) as steps:
            async for events in steps:
                changed: dict[int, Update] = {}
                for event in events:
                    index, token = places[event.id, event.sample], event.emitted
                    if index not in changed:
                        changed[index] = Update(index, texts[index][0], index not in started)
                        started.add(index)
                    update = changed[index]
                    update.text += event.text
                    update.thought += event.thought
                    update.written += event.text
                    if token is not None and token.token >= 0 and not token.is_stop:
                        if not event.is_thought and not event.text:
                            update.written += token_text(service.model, token)
                        (update.thoughts if event.is_thought else update.tokens).append(token)
                    if event.ended_thought:
                        update.ended_thought = [*event.ended_thought]
                    if event.result is not None:
                        n_left -= 1
                        service.n_texts -= 1
                        update.ended = event.result
                yield [*changed.values()]
    finally:
        service.n_texts -= n_left


def _check(result: Result) -> None:
    """Raise if a text failed, or its prompt did not fit."""
    if result.finish_reason in ("error", "cancelled"):
        raise http_error(result.error or HttpError(503, "the server is shutting down"))
    if result.error is not None and not result.tokens:
        raise http_error(result.error)


def usage(texts: Sequence[Update]) -> dict[str, object]:
    """Return OpenAI's ``usage``."""
    results = [text.result for text in texts]
    prompts = [result for result in results if result.sample == 0]
    n_prompt = sum(result.num_prompt_tokens for result in prompts)
    n_completion = sum(len(result.tokens) for result in results)
    n_cached = sum(result.num_cached_tokens for result in prompts)
    n_thought = sum(result.n_thought_tokens for result in results)
    return {"usage": usage_of(n_prompt, n_completion, n_cached, n_thought)}
