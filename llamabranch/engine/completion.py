"""One call of `complete` or `chat`, also of their asynchronous forms: its requests and its answer.

A call is checked completely before anything is decoded. Then ``Context`` queues its jobs with a client
of their own, and ``AsyncEngine`` with the engine's client. The K/V of the texts stays in the context's
prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Generic, cast

from typing_extensions import TypeVar

from ..arguments import placed, plain_int
from ..context import Context
from ..context.context import text_context
from ..errors import CacheFullError, ConfigError, DecodeInterruptedError
from ..model import Message, chat_messages, is_chat
from ..request.request import (
    AnyRequest,
    ChatOptions,
    Request,
    TextOptions,
    as_request,
)
from ..request.result import EngineStats, Event, Result
from ..run.client import Client
from ..run.drafting import Drafting
from ..run.job import Job
from ..sampling import SamplingParams
from ..sampling.noise import random_seed
from ..sampling.params import check_names
from ..speculative import Drafter
from ..speculative.combined import DrafterChoice, auto_drafter

Messages = Sequence[Message]
Conversations = Sequence[Sequence[Message]]
Prompts = list[str] | tuple[str, ...] | Sequence[Sequence[int]] | Conversations
Events = Generator[Event, None, None]
_MAX_TOKENS = 128  # for a call that sets no limit
_ONLY_CHAT = ChatOptions.__annotations__.keys() - TextOptions.__annotations__.keys()
T = TypeVar("T", default=object)  # the type of parsed values


class TextCallOptions(TextOptions[T], Generic[T], total=False):
    """The options of ``Context.complete``."""

    drafter: DrafterChoice


class ChatCallOptions(ChatOptions[T], Generic[T], total=False):
    """The options of ``Context.chat``."""

    drafter: DrafterChoice


class Call:
    """A checked call, and its results so far.

    Args:
        ctx: the context that generates.
        prompt: a prompt, or a list of prompts.
        base: the settings if there is no option ``sampling``.
        options: the options of ``complete`` or ``chat``.
        chats: whether the prompts are conversations.

    Raises:
        ConfigError, GrammarError: an argument is invalid.

    Attributes:
        requests: one for each prompt.
        jobs: the jobs of these requests.
        drafter: the drafter that the user passed.
        found: for each prompt the first result that arrived; its ``choices`` has all of them.
    """

    def __init__(
        self,
        ctx: Context,
        prompt: object,
        base: SamplingParams | None,
        options: Mapping[str, object],
        *,
        chats: bool,
    ) -> None:
        self._ctx = text_context("ctx", ctx)
        prompts, self._is_list = _conversations(prompt) if chats else _prompts(prompt)
        own = {"show_schema": True, "continue_final_message": None} if chats else {}
        given = {**own, **options}
        if not chats:
            check_names(
                {name: 0 for name in given if name in _ONLY_CHAT}, ChatOptions.__annotations__
            )
        self.drafter = cast(DrafterChoice, given.pop("drafter", "auto"))
        if "max_tokens" in given and given["max_tokens"] is None:
            given["max_tokens"] = ctx.n_ctx_seq
        common = Request.of("", base, **cast(ChatOptions, given))
        top = common.top_logprobs
        self._scores = top is not None or bool(given.get("logprobs"))
        if top is None and common.sampling is not None and common.sampling.logprobs:
            common = common.replace(top_logprobs=0)
        self.requests: list[Request] = []
        for index, each in enumerate(prompts):
            with placed(self._place(index, len(prompts))):
                one = chat_messages(cast(Messages, each)) if chats else each
                self.requests.append(common.of_prompt(one))
        self.jobs: list[Job] = []
        self.found: dict[int, Result] = {}

    @staticmethod
    def _place(index: int, n: int) -> str:
        return f"prompts[{index}]" if n > 1 else ""

    def prepare(self, make: Callable[[int, Request], Job]) -> list[Job]:
        """Make a job of each request with ``make``; return the jobs.

        Raises:
            ConfigError, UnsupportedError, GrammarError, TokenizeError, CacheFullError: a prompt is
                invalid or too long.
        """
        most = self._ctx.n_ctx_seq
        for index, request in enumerate(self.requests):
            with placed(self._place(index, len(self.requests))):
                self.jobs.append(job := make(index, request))
                if len(job.prompt) > most:
                    raise CacheFullError.of_prompt(len(job.prompt), most)
        return self.jobs

    def events(self, client: Client) -> Events:
        """Queue the jobs, which belong to ``client``, and yield their events.

        Raises:
            LlamaBranchError: at the end, the reason why no text has a token.
        """
        for job in self.jobs:
            client.queue(job)
        for event in client.run():
            self.note(int(event.id), event)
            yield event
        self.check()

    def note(self, number: int, event: Event) -> None:
        """Keep the result in an event of prompt ``number``, if it has one."""
        result = event.result
        if result is not None:
            result.id = str(number)
            if not self._scores:
                result.pieces = {}
            self.found[number] = result.choices[0]

    def check(self) -> None:
        """Raise the error that ended the texts, if none of them has a token."""
        found = [text for number in sorted(self.found) for text in self.found[number].choices]
        if any(text.tokens for text in found):
            return
        for text in found:
            if text.error is not None:
                raise text.error

    def results(self) -> list[Result]:
        """Return the first results of the prompts that have any."""
        return [self.found[number] for number in sorted(self.found)]

    def answer(self) -> Result | list[Result]:
        """Return the first result of each prompt; its ``choices`` are all results of that prompt.

        Raises:
            LlamaBranchError: the reason why no text has a token.
        """
        self.check()
        return self.results() if self._is_list else self.found[0]


def _prompts(prompt: object) -> tuple[Sequence[object], bool]:
    """Return the prompts, and whether the argument was a list."""
    is_list = isinstance(prompt, (list, tuple)) and not is_chat(prompt)
    several = cast(Sequence[object], prompt) if is_list else ()
    if not is_list or (several and plain_int(several[0]) is not None):
        return [prompt], False
    for each in several:
        is_nested = isinstance(each, (list, tuple)) and each and not is_chat(each)
        if is_nested and isinstance(cast(Sequence[object], each)[0], (str, list, tuple)):
            raise ConfigError(
                f"a prompt must be text, a list of token ids or messages, not {each!r:.40}",
                hint="pass texts, conversations or lists of ids in one list",
            )
    return list(several), True


def _conversations(messages: object) -> tuple[Sequence[object], bool]:
    """Return the conversations, and whether the argument was a list of them."""
    first = messages[0] if isinstance(messages, (list, tuple)) and messages else None
    is_list = isinstance(first, list) or is_chat(first)
    return cast(Sequence[object], messages) if is_list else [messages], is_list


def run(
    ctx: Context, call: Call, drafters: dict[bool, Drafter], *, stream: bool
) -> Result | list[Result] | Events:
    """Generate the texts of a call.

    Args:
        ctx: the context that generates.
        call: the checked call.
        drafters: keeps the "auto" drafters: one for texts without a grammar (key False), and one
            for texts with a grammar (key True).
        stream: return an iterator of events.

    Raises:
        LlamaBranchError: the reason why no text has a token; with ``stream`` after the last event.
    """
    client, seed = _client(ctx, call.drafter, drafters, call.requests), random_seed()
    call.prepare(
        lambda number, request: Job(request, str(number), client, seed, reports_tokens=stream)
    )
    events = call.events(client)
    if stream:
        return events
    try:
        for _ in events:
            pass
    except DecodeInterruptedError as error:
        error.results = call.results()
        raise
    return call.answer()


def submit(ctx: Context, request: AnyRequest, drafters: dict[bool, Drafter]) -> Job:
    """Ask for the texts of one request; see ``Context.submit``."""
    return _client(ctx, "auto", drafters, [as_request(request)]).submit(request, random_seed())


def _client(
    ctx: Context,
    drafter: DrafterChoice,
    drafters: dict[bool, Drafter],
    requests: Sequence[Request],
) -> Client:
    """Return the client that queues the requests; for ``drafters`` see ``run``."""
    with ctx.lock:
        ctx.decoder.check_open()
        ctx.keep_prefixes()
        if drafter == "auto":
            structured = any(request.grammar or request.tools for request in requests)
            if structured not in drafters:
                drafters[structured] = auto_drafter(ctx, structured=structured)
            drafter = drafters[structured]
    drafting = Drafting(ctx, drafter, batched=True)
    return Client(drafting, EngineStats(), wait_s=0.5, max_tokens=_MAX_TOKENS)
