"""The texts of one HTTP request: engine requests, one for each prompt, and the answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar, cast

from ..branch import Produced
from ..context.progress import PromptProgress
from ..engine import Request, Result
from ..model import TurnEvent
from ..request.openai import End, end_reason
from ..request.openai import usage as usage_of
from ..run.job import Job
from .errors import HttpError, http_error
from .fields import HttpFields
from .messages import event_stream, reply
from .service import Service

if TYPE_CHECKING:
    from starlette.responses import Response

F = TypeVar("F", bound=HttpFields)


@dataclass
class Update:
    """New text of a request, or a complete text.

    Attributes:
        index: the number of the text in the request.
        job: its request.
        is_first: whether it is the first update of its text.
        text: the new text.
        tokens: the new tokens, without one that ends the text.
        thought, thoughts: text and tokens of the thought before the answer.
        turn: the new parts of an answer's turn.
        ended: the event that ended the text, if it has ended.
        ended_thought: if the thought has just ended, all its tokens as the result will have them.
        progress: how much of the prompt is read, if the request asked for it and it has changed.
    """

    index: int
    job: Job
    is_first: bool = False
    text: str = ""
    tokens: list[Produced] = field(default_factory=list)
    thought: str = ""
    thoughts: list[Produced] = field(default_factory=list)
    turn: list[TurnEvent] = field(default_factory=list)
    ended: Result | None = None
    ended_thought: list[Produced] = field(default_factory=list)
    progress: PromptProgress | None = None

    @property
    def prompt(self) -> Sequence[int]:
        """The prompt's token ids."""
        return self.job.prompt

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

    Attributes:
        door: the endpoint, as in `Record`.
    """

    door: ClassVar[str]

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


async def answer(writer: Writer[F], jobs: Sequence[Job]) -> Response:
    """Return the texts of prepared requests, as a stream or in one piece.

    A stream begins only with its first text, so that earlier errors get an HTTP status of their own.

    Raises:
        HttpError, LlamaBranchError: a request is refused, or a text failed.
    """
    for job in jobs:
        job.door = writer.door
    if writer.fields.stream:
        return await event_stream(_frames(writer, jobs), writer.door)
    return reply(writer.body(await all_texts(writer.service, jobs)))


async def _frames(
    writer: Writer[F], jobs: Sequence[Job]
) -> AsyncGenerator[list[dict[str, object]], None]:
    ended: dict[int, Update] = {}
    async with aclosing(updates(writer.service, jobs)) as steps:
        async for changed in steps:
            _note_ends(ended, changed)
            yield [event for update in changed for event in writer.events(update)]
    yield writer.last_events([ended[index] for index in sorted(ended)])


async def all_texts(service: Service, requests: Sequence[Request | Job]) -> list[Update]:
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
                at, update.job, True, result.text, emitted[n:], result.thought, emitted[:n],
                ended=result,
            )  # fmt: skip
            _check(result)


async def updates(
    service: Service, requests: Sequence[Request | Job], *, reports_tokens: bool = True
) -> AsyncGenerator[list[Update], None]:
    """Yield the updates of each step, one for each text; count the texts.

    With ``reports_tokens=False`` only the ends of texts are yielded.

    Raises:
        HttpError, LlamaBranchError: a request is refused.
    """
    prepare = partial(service.engine.engine.prepare, reports_tokens=reports_tokens)
    jobs = [*map(prepare, requests)]
    texts = [(job, sample) for job in jobs for sample in range(job.request.n)]
    places = {(job.name, sample): index for index, (job, sample) in enumerate(texts)}
    started: set[int] = set()
    n_left = len(texts)
    service.n_texts += n_left
    service.log_ends(jobs)
    try:
        async with aclosing(service.engine.steps(*jobs)) as steps:
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
                    update.turn += event.turn
                    update.progress = event.progress or update.progress
                    if token is not None and token.token >= 0 and not token.is_stop:
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
    n_completion = sum(result.generated for result in results)
    n_cached = sum(result.cached for result in prompts)
    n_thought = sum(result.n_thought_tokens for result in results)
    return {"usage": usage_of(n_prompt, n_completion, n_cached, n_thought)}
