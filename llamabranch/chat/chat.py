"""A conversation with a model: sending messages, retrying, editing, forking and saving.

A turn is one request, as in `Context.chat`. Its K/V stays in the context's prefix cache.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import nan
from typing import TYPE_CHECKING, cast
from uuid import uuid4

from ..agents.tools import text_of
from ..arguments import whole
from ..context.context import text_context
from ..engine import Engine
from ..engine.completion import Call
from ..engine.context import Context
from ..errors import (
    BranchStateError,
    CacheFullError,
    ConfigError,
    DecodeInterruptedError,
    LlamaBranchError,
    UsageError,
)
from ..generation.text import Text
from ..model import stop_strings
from ..model.text import n_common
from ..model.tools import ToolCall
from ..native.handle import forkable_lock, is_held
from ..request.request import ChatOptions
from ..request.result import Event, Result
from ..run.job import Job
from ..sampling import Sampler, SamplingParams, SamplingSettings
from ..sampling.noise import derive_seed, random_seed
from ..sampling.params import settings_of
from ..speculative import SpeculativeConfig
from ..speculative.combined import DrafterChoice
from .conversation import Exchange, drawn, exchanges_of, messages_of
from .saved import read_chat, write_chat

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

# Fractions of the context that must be free: for an answer, and after turns were cut.
_LEAST_ROOM, _MORE_ROOM = 8, 4


class Chat:
    """A conversation that can be undone, edited, forked and saved; only new tokens are evaluated.

    The model's chat template writes the conversation. A message stays text, even if it spells control
    tokens. In an exact context each answer has the text of a branch with the same prompt tokens,
    settings and seed; in other contexts rounding can change it.

    A chat belongs to one thread at a time. A call that would change it while another thread uses it, or
    while an answer calls a function of yours, raises BranchStateError and changes nothing.

    Args:
        ctx: the context that answers. The chat opens its prefix cache, even with ``prefix_cache=False``.
        system: the system message.
        drafter, config: as for `Engine`.
        options: the options of `Context.chat` for every answer: sampling settings, ``max_tokens`` (None =
            until the model ends it or the context is full), ``stop``, ``tools``, ``thinking``, and so on.
            Without a seed a random one is used.

    Raises:
        UnsupportedError: the model has no chat template, or one that cannot be run.
        ConfigError: an unknown option, or the template refuses a system message.
        VocabularyMismatchError: the drafter cannot draft for the model.

    Attributes:
        ctx, engine: the context, and what runs the answers.
        sampling, options: the settings of the next answer; `set` changes them.
        current: the number of the current branch.
        stats: the cost so far, as the engine counts it.
    """

    def __init__(
        self,
        ctx: Context,
        system: str | None = None,
        *,
        drafter: DrafterChoice = "auto",
        config: SpeculativeConfig | None = None,
        **options: Unpack[ChatOptions],
    ) -> None:
        self.ctx = cast(Context, text_context("ctx", ctx))
        self.sampling, self.options = settings_of(None), ChatOptions(max_tokens=None)
        self.current = 1
        self._lock = forkable_lock()
        self._system = system
        self._heads = {1: Exchange(None, "")}  # the last exchange of each branch
        self._id = uuid4().hex  # a chat that is loaded keeps it
        self._answer: Answer | None = None
        self.engine = Engine(ctx, drafter, config, max_tokens=None)
        self.client, self.stats = self.engine.new_client(), self.engine.stats
        seed = settings_of(options.get("sampling")).seed
        self.set(**cast(ChatOptions, {"seed": seed, **options}))
        ctx.keep_prefixes(always=True)

    # -- properties --------------------------------------------------------------------------------

    def __repr__(self) -> str:
        n = len(self.exchanges)
        return f"<Chat with {self.ctx.model.name!r}: {n} answers, branch {self.current}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End a running answer, as its ``close`` does.

        The K/V stays in the prefix cache until the cells are needed.
        """
        with self.held():
            if self._answer is not None:
                self._answer.end()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Prevent all other calls from changing the chat in the ``with`` block.

        Raises:
            BranchStateError: another thread is changing it, or a call that has not returned yet.
        """
        is_ours = is_held(self._lock)
        if is_ours or not self._lock.acquire(blocking=False):
            who = "a call that has not returned" if is_ours else "another thread"
            raise BranchStateError(
                f"the chat is in use by {who}", hint="a chat belongs to one call at a time"
            )
        try:
            yield
        finally:
            self._lock.release()

    @property
    def exchanges(self) -> list[Exchange]:
        """The messages of the current branch with their answers, in order."""
        return self._heads[self.current].path[1:]

    @property
    def messages(self) -> list[dict[str, object]]:
        """The messages of the current branch, as dictionaries with role and content."""
        return messages_of(self.system, self.exchanges)

    @property
    def system(self) -> str | None:
        """The system message of all branches, or None. You can set it."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        with self.held():
            self._plan(text, [Exchange(None, "x")])  # the template may refuse it
            self._end_answer()
            self._system = text

    def set(self, **changes: Unpack[ChatOptions]) -> None:
        """Change options of the next answers, by the names of `Context.chat`; ``seed=None`` is random.

        Raises:
            ConfigError: an unknown option or a bad value; nothing is changed.
        """
        with self.held():
            if changes.get("seed", 0) in (None, -1):
                changes["seed"] = random_seed()
            options = cast(ChatOptions, {**self.options, **changes})
            probe = messages_of(self.system, [Exchange(None, "x")])
            (request,) = self._asked(probe, self.sampling, options).requests
            of_sampling = {"sampling", *SamplingSettings.__annotations__}
            others = {name: value for name, value in options.items() if name not in of_sampling}
            self.sampling = settings_of(request.sampling)
            self.options = cast(ChatOptions, others)

    @property
    def n_cut(self) -> int:
        """How many exchanges the last answer did not see, because the context was full."""
        return self._heads[self.current].n_cut

    def tree(self) -> str:
        """Return a drawing of all branches: a line for each message and its answer."""
        return drawn(self._heads, self.current)

    # -- answers -----------------------------------------------------------------------------------

    def send(self, text: str) -> Answer:
        """Send a message and return its answer, which is generated while you iterate over it.

        If less than an eighth of the context is left for the answer, the oldest exchanges are left out of
        the prompt until a quarter is free; `n_cut` is their number. A running answer is ended first. If
        an earlier answer was never read, its message stays without an answer.

        Raises:
            CacheFullError: the message is too long, even alone. ConfigError: it is not text, or the
                template refuses it. The conversation is as before.
        """
        with self.held():
            return self._begin(self.current, Exchange(self._heads[self.current], _text(text)))

    def results(self, *results: object) -> Answer:
        """Pass the results of the functions that the last answer called, in order, and return the answer.

        Text is used as it is, other values as JSON.

        Raises:
            UsageError: the last answer has no calls, or another number of calls. ConfigError: a value is
                not JSON. It also raises the errors of `send`.
        """
        with self.held():
            self._end_answer()
            head = self._heads[self.current]
            n = len(head.calls)
            if not n or n != len(results):
                raise UsageError(
                    f"the last answer calls {n} functions, and there are {len(results)} results"
                )
            try:
                texts = [*map(text_of, results)]
            except TypeError as error:
                raise ConfigError(str(error)) from None
            return self._begin(self.current, Exchange(head, "", results=texts))

    def retry(self) -> Answer:
        """Answer the last message once more, with another seed, on a new branch.

        Raises:
            UsageError: there is no message. It also raises the errors of `send`.
        """
        with self.held():
            last = self._exchange(len(self.exchanges))
            return self._begin(0, Exchange(last.parent, last.user, results=last.results))

    def edit(self, n: int, text: str) -> Answer:
        """Replace the user's ``n``-th message of the current branch, on a new branch.

        The first is 1, the last is -1; answers and the system message are not counted. Its answer gets
        a seed that no other answer to the same text at this place had.

        Raises:
            UsageError: there is no such message. It also raises the errors of `send`.
        """
        with self.held():
            return self._begin(0, Exchange(self._exchange(n).parent, _text(text)))

    def _exchange(self, n: int) -> Exchange:
        exchanges, n = self.exchanges, whole("the number of a message", n)
        if not 1 <= abs(n) <= len(exchanges):
            if exchanges:
                hint = f"yours are numbered from 1 to {len(exchanges)}; answers are not counted"
                raise UsageError(f"there is no message {n}", hint=hint)
            raise UsageError("there is no message yet", hint="send one first")
        return exchanges[n - 1 if n > 0 else n]

    def _begin(self, number: int, question: Exchange) -> Answer:
        """Plan an answer on a branch (0: on a new one), and then change the conversation."""
        self._end_answer()
        question.seed = self.sampling.drawn_seed()
        if not number:
            number = max(self._heads) + 1
            asked = question.parent, question.user, question.results
            n = sum((e.parent, e.user, e.results) == asked for e in exchanges_of(self._heads))
            question.seed = derive_seed(question.seed, n) if n else question.seed
        plan = self._fitting(question)
        n_read = 0 if self.ctx.kv_cache.can_draft else self._read(question, plan)
        self._answer = Answer(self, question, plan, n_read)
        self._before = self._heads, self.current
        self._heads, self.current = {**self._heads, number: question}, number
        return self._answer

    def take_back(self) -> None:
        """Undo the last answer, which has no token. `Answer` calls this."""
        self._heads, self.current = self._before

    def _plan(self, system: str | None, exchanges: Sequence[Exchange]) -> Call:
        params = self.sampling.replace(seed=exchanges[-1].seed)
        return self._asked(messages_of(system, exchanges), params, self.options)

    def _asked(self, messages: object, sampling: SamplingParams, options: ChatOptions) -> Call:
        """Return the call for an answer, with its prompt checked."""
        call, client = Call(self.ctx, messages, sampling, options, chats=True), self.client
        call.prepare(lambda _, request: Job(request, "0", client, 0))
        return call

    def _fitting(self, question: Exchange) -> Call:
        """Return the call of a turn, and note how many exchanges are left out because it is too long.

        At least the exchanges that the last answer did not see are left out, because the rest is cached.
        """
        (_, *path), size = question.path, self.ctx.n_ctx_seq
        n_cut = question.path[-2].n_cut
        limit = self.options.get("max_tokens")
        room = least = min(size // _LEAST_ROOM, size if limit is None else limit)
        while True:
            is_last = n_cut >= len(path) - 1
            try:
                plan = self._plan(self.system, path[n_cut:])
                n_free = size - len(_tokens(plan))
                if n_free >= room or (is_last and n_free > 0):
                    question.n_cut = n_cut
                    return plan
                if is_last:
                    raise CacheFullError.of_prompt(size - n_free, size)
            except CacheFullError:
                if is_last:
                    raise
            room = max(least, size // _MORE_ROOM)
            n_cut += 1
            while n_cut < len(path) - 1 and path[n_cut].results:  # their calls are left out
                n_cut += 1

    def _read(self, question: Exchange, plan: Call) -> int:
        """Read all but a prompt's last token, so that memory that cannot be cut has a state there.

        Return how many tokens were read.

        A state is also kept where the next prompt will probably differ: many templates leave the
        reasoning out of earlier answers, or write the last answer differently.
        """
        answered, tokens = replace(question, answer="x", n_tokens=1), _tokens(plan)
        n_next = last = len(tokens) - 1
        with suppress(LlamaBranchError):  # the template may refuse another turn
            path = question.path[1 + question.n_cut : -1]
            exchanges = [*path, answered, Exchange(answered, "x")]
            n_next = min(last, n_common(tokens, _tokens(self._plan(self.system, exchanges))))
        progress, stats = self.options.get("on_prompt_progress"), self.stats
        sampler = Sampler(self.ctx.model, self.sampling)
        with self.ctx.lock:
            text = Text(self.ctx, None, sampler, 0, beginning=tokens[:last])
            try:
                n = text.take_cached(tokens[:last])
                for part in (tokens[n:n_next], tokens[max(n, n_next) : last]):
                    if part:
                        text.read(part, as_prompt=True, report=progress)
            finally:
                text.keep_cached(is_last=True)
                text.release()
        stats.evaluated += last - n
        stats.cached -= last - n
        return last - n

    def _end_answer(self) -> None:
        """End a running answer. Its message stays, and so does the text so far."""
        if self._answer is not None:
            self._answer.end(keeps_message=True)
            self._answer = None

    # -- branches ----------------------------------------------------------------------------------

    def undo(self) -> str:
        """Remove the last message and its answer, and return the message.

        Raises:
            UsageError: the branch has no message.
        """
        with self.held():
            self._end_answer()
            last = self._exchange(len(self.exchanges))
            self._heads[self.current] = last.path[-2]
            return last.user

    def fork(self) -> int:
        """Continue on a new branch, which starts as a copy of the current one; return its number."""
        with self.held():
            self._end_answer()
            number = max(self._heads) + 1
            self._heads[number] = self._heads[self.current]
            self.current = number
            return number

    def switch(self, number: int) -> None:
        """Continue on another branch; nothing is evaluated before its next message.

        Raises:
            UsageError: there is no such branch.
        """
        with self.held():
            number = whole("the number of a branch", number)
            if number not in self._heads:
                known = ", ".join(map(str, self._heads))
                raise UsageError(f"there is no branch {number}", hint=f"branches: {known}")
            self._end_answer()
            self.current = number

    # -- saving ------------------------------------------------------------------------------------

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the conversation to a JSON file; see `load`. An earlier save of this chat is replaced.

        Raises:
            SnapshotError: it cannot be written, or the file exists and is not a save of this chat.
        """
        with self.held():
            self._end_answer()
            limit, stop = self.options.get("max_tokens"), stop_strings(self.options.get("stop", ()))
            write_chat(
                file, self._id, self.ctx.model, self.system, self._heads, self.current,
                self.sampling, limit, stop,
            )  # fmt: skip

    @classmethod
    def load(
        cls,
        ctx: Context,
        file: str | os.PathLike[str],
        drafter: DrafterChoice = "auto",
        config: SpeculativeConfig | None = None,
    ) -> Chat:
        """Return the conversation that ``save`` wrote; it continues as if it had never ended.

        Its text is read again with the next message, unless the prefix cache of the context has it.

        Args:
            ctx: the context in which it continues, of the same model; see `saved_model`.
            file: the file.
            drafter, config: as for a new chat.

        Raises:
            SnapshotError: the file is not a saved chat, is damaged, or is from another model.
            UnsupportedError: there is no chat template.
            ConfigError: the template refuses its system message.
        """
        text_context("ctx", ctx)
        saved = read_chat(file, ctx.model)
        chat = cls(
            ctx, saved.system, drafter=drafter, config=config,
            sampling=SamplingParams.from_dict(saved.sampling),
            max_tokens=saved.max_tokens, stop=saved.stop,
        )  # fmt: skip
        chat._id, chat._heads, chat.current = saved.id, saved.linked(), saved.current
        return chat


class Answer:
    """An answer: an iterator of `Event`, as from ``ctx.chat(messages, stream=True)``.

    Attributes:
        exchange: the message and its answer, as the chat keeps them.
        result: the result, once it has ended.
        prompt: the token ids of the prompt, written by the chat template.
            ``Branch.start(ctx, answer.prompt + answer.tokens)`` is a branch of it.
        tokens: the token ids so far, the thought's first.
    """

    def __init__(self, chat: Chat, exchange: Exchange, plan: Call, n_read: int) -> None:
        self.exchange, self.prompt = exchange, _tokens(plan)
        self.tokens: list[int] = []
        self.result: Result | None = None
        self._chat, self._n_read = chat, n_read
        self._events = plan.events(chat.client)
        self._is_begun = self._has_ended = False

    def __repr__(self) -> str:
        text, n = self.exchange.answer, len(self.tokens)
        return f"<Answer {text!r:.40}, {n} tokens, {self.finish_reason or 'not complete'}>"

    @property
    def text(self) -> str:
        """The text without the stop string. If you have not iterated, this generates all of it."""
        return self._read().answer

    @property
    def thought(self) -> str:
        """The thought before the answer. If you have not iterated, this generates all of it."""
        return self._read().thought

    def _read(self) -> Exchange:
        if not self._is_begun:
            self.finish()
        return self.exchange

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls of functions in the answer, once it has ended."""
        return self.exchange.calls

    @property
    def finish_reason(self) -> str | None:
        """ "stop", "tool_calls", "length" or "capacity" (the context is full); None = not ended."""
        return self.exchange.finish_reason

    @property
    def evaluated(self) -> int:
        """How many tokens of the prompt were read, once it has ended."""
        return self._n_read + (0 if self.result is None else self.result.evaluated)

    @property
    def cached(self) -> int:
        """How many tokens of the prompt were in the cache already, once it has ended."""
        return 0 if self.result is None else self.result.cached - self._n_read

    @property
    def generated(self) -> int:
        """How many tokens were generated so far, thought and answer together."""
        return len(self.tokens)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second after the first token, once it has ended; nan before."""
        return nan if self.result is None else self.result.tokens_per_second

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        with self._chat.held():
            return self._next()

    def _next(self) -> Event:
        self._is_begun = True
        try:
            event = next(self._events)
            self._note(event)
        except BaseException:  # StopIteration too
            self.end()
            raise
        return event

    def _note(self, event: Event) -> None:
        """Write an event into the conversation."""
        exchange, token = self.exchange, event.emitted
        if event.ended_thought:
            self.tokens = [token.token for token in event.ended_thought]
        if token is not None:
            exchange.thought += event.thought
            exchange.answer += event.text
            if not token.is_stop:
                self.tokens.append(token.token)
        if (result := event.result) is not None:
            self.result = result
            turn, self.tokens = result.turn, result.tokens
            exchange.thought, exchange.answer = turn.thought, turn.content
            exchange.calls = [*turn.calls]
            is_cut = result.finish_reason in ("cancelled", "error")
            exchange.finish_reason = None if is_cut else result.finish_reason
        exchange.n_tokens = len(self.tokens)

    def finish(self) -> Answer:
        """Run to the end; return itself."""
        with self._chat.held(), suppress(StopIteration):
            while True:
                self._next()
        return self

    def close(self) -> None:
        """End it here. The text so far stays; without text the message is removed.

        A second call does nothing.
        """
        with self._chat.held():
            self.end()

    def end(self, *, keeps_message: bool = False) -> None:
        """End it in a call that holds the chat. With ``keeps_message`` the message always stays."""
        if self._has_ended:
            return
        is_running = inspect.getgeneratorstate(self._events) == inspect.GEN_SUSPENDED
        self._is_begun = self._has_ended = True
        try:
            if is_running and not self._chat.ctx.closed:
                self._chat.client.abort_all()
                with suppress(DecodeInterruptedError):  # the last events come before the exception
                    for event in self._events:
                        self._note(event)
        finally:
            if not (keeps_message or self.exchange.is_answered):
                self._chat.take_back()
            self._events.close()


def _text(text: object) -> str:
    if not isinstance(text, str):
        raise ConfigError(f"a message must be text, not {text!r:.40}")
    return text


def _tokens(plan: Call) -> list[int]:
    return [*plan.jobs[0].prompt]
