"""A conversation with a model: sending messages, retrying, editing, forking and saving."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import wraps
from threading import get_ident
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar, cast
from uuid import uuid4

from ..arguments import whole
from ..branch import Branch, Produced
from ..branch.tree import BranchTree
from ..context.context import text_context
from ..context.prefix_cache import n_common
from ..context.progress import OnPromptProgress, Reading
from ..engine.completion import tool_grammar
from ..engine.context import Context
from ..errors import (
    BranchStateError,
    CacheFullError,
    CapacityError,
    ConfigError,
    LlamaBranchError,
    PerformanceWarning,
    SnapshotError,
    UnsupportedError,
    UsageError,
    warn,
)
from ..generation.thought import ThoughtBuffer, named_text
from ..model.text import stop_strings
from ..model.thoughts import (
    Thinking,
    ThinkingChoice,
    plan_thinking,
    thinking_budget,
    thinking_variables,
)
from ..model.tools import Tool, ToolCall, Tools, conversation, openai_call
from ..native import forkable_lock
from ..pictures import TreeLine
from ..request.turns import TurnPieces, shown_pieces, written_piece
from ..sampling import Grammar, Sampler, SamplingParams, SamplingSettings
from ..sampling.noise import derive_seed, random_seed
from ..sampling.params import settings_of
from ..speculative import Generation, SpeculativeConfig, SpeculativeStats, Speculator
from ..speculative.combined import DrafterChoice, auto_drafter
from .conversation import Exchange, Line, exchanges_of, messages_of, tree_of
from .saved import SavedChat, read_chat, write_chat

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

__all__ = ["Answer", "Chat", "ChatStats"]

# Fractions of the context that must be free: for an answer, and after turns were cut.
_LEAST_ROOM, _MORE_ROOM = 8, 4


P = ParamSpec("P")
R = TypeVar("R")


def _exclusive(
    method: Callable[Concatenate[Chat, P], R],
) -> Callable[Concatenate[Chat, P], R]:
    """Let a method of `Chat` run in one thread at a time."""

    @wraps(method)
    def call(chat: Chat, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with chat.held():
            return method(chat, *args, **kwargs)

    return call


@dataclass
class ChatStats:
    """The cost of a chat so far.

    Attributes:
        num_evaluated_tokens: tokens of prompts and answers that the model has read.
        num_cached_tokens: tokens of prompts that were already in the cache.
        num_answers: number of answers, including unfinished ones.
        num_cut_exchanges: exchanges that were left out of a prompt because the context was full.
        speculative: statistics of drafts. Rejected tokens do not count in ``num_evaluated_tokens``.
    """

    num_evaluated_tokens: int
    num_cached_tokens: int
    num_answers: int
    num_cut_exchanges: int
    speculative: SpeculativeStats


class ChatSettings(SamplingSettings, total=False):
    """The settings of answers that `Chat.set` changes."""

    max_tokens: int | None
    thinking: ThinkingChoice


class Chat:
    """A conversation that can be undone, edited, forked and saved; only new tokens are evaluated.

    The model's chat template writes the conversation. A message stays text, even if it spells control
    tokens. The K/V of earlier turns stays in the context's prefix cache, so the longest known beginning
    of a prompt is not evaluated again, even after an edit or a switch.

    In a batch-invariant context each answer has the text of a branch with the same prompt tokens,
    settings and seed; in other contexts rounding can change it.

    A chat belongs to one thread at a time. A call that would change it while another thread uses it, or
    while an answer is run to its end, raises BranchStateError and changes nothing.

    Args:
        ctx: the context that answers. The chat opens its prefix cache, even with ``prefix_cache=False``.
        drafter: drafts the answers; "auto" = like `Engine`, if the memory can drop tokens; None = plain
            decoding.
        config: how much to draft.
        system: the system message.
        sampling: settings. Without a seed a random one is used.
        max_tokens: the most tokens of an answer; None = until the model ends it or the context is full.
        stop: strings that end an answer.
        thinking: whether the model thinks before it answers: None = as its template does, True, False, or
            the most tokens of a thought. Stop strings and calls apply to the answer only.
        thinking_end: last words for a thought that has used up its tokens.
        tools: functions that an answer may call: OpenAI's tool objects, or Python functions. The calls
            are in `Answer.tool_calls`; answer them with `results`.
        settings: fields of `SamplingParams` by name, which override ``sampling``.

    Raises:
        UnsupportedError: the model has no chat template, or one that cannot be run.
        ConfigError: an unknown setting, or the template refuses a system message.
        VocabularyMismatchError: the drafter cannot draft for the model.

    Attributes:
        ctx: the context.
        sampling, max_tokens, thinking: the settings of the next answer; `set` changes them.
        stop: strings that end an answer.
        on_prompt_progress: called with a `PromptProgress` while a message is processed; None = not
            called.
        speculator: generates the answers.
        current: the number of the current branch.
    """

    def __init__(
        self,
        ctx: Context,
        drafter: DrafterChoice = "auto",
        config: SpeculativeConfig | None = None,
        *,
        system: str | None = None,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        thinking: ThinkingChoice = None,
        thinking_end: str = "",
        tools: Sequence[Tool] | None = None,
        **settings: Unpack[SamplingSettings],
    ) -> None:
        text_context("ctx", ctx)
        if drafter == "auto":
            drafter = auto_drafter(ctx) if ctx.kv_cache.undoes(1) else None
        self.speculator = Speculator(ctx, drafter, config)
        self.ctx = ctx
        self._lock = forkable_lock()
        self.sampling = settings_of(sampling)
        self.max_tokens: int | None = None
        self.thinking: ThinkingChoice = None
        self.thinking_end = thinking_end
        self.stop = stop_strings(stop)
        self.on_prompt_progress: OnPromptProgress | None = None
        self.current = 1
        self._lines = {1: Line(1, system=system)}
        self._id = uuid4().hex  # a saved chat has the id of the first chat in its folder
        self._branch: Branch | None = None  # the only one that is not pruned
        self._answer: Answer | None = None
        self._stats = ChatStats(0, 0, 0, 0, self.speculator.stats)
        if ctx.model.chat_template is None:
            raise UnsupportedError(
                f"{ctx.model.name} has no chat template: it was not trained on conversations",
                hint="load(..., chat_template='chatml') sets one; Branch.append continues plain text",
            )
        changes = {"seed": self.sampling.seed, "max_tokens": max_tokens, "thinking": thinking}
        self.set(**cast(ChatSettings, {**changes, **settings}))
        self.tools = Tools(tools or (), None, ctx.model.turn_format)
        self._tokens(system, (), Exchange(None, "x"))  # raises if the template refuses it
        ctx.keep_prefixes(always=True)

    # -- properties --------------------------------------------------------------------------------

    def __repr__(self) -> str:
        n = len(self.exchanges)
        return f"<Chat with {self.ctx.model.name!r}: {n} answers, branch {self.current}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @_exclusive
    def close(self) -> None:
        """End a running answer and free its sequence. A second call does nothing.

        The K/V stays in the prefix cache until its cells are needed.
        """
        self._end_answer()
        if not self.ctx.closed:
            self._leave()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Prevent other threads from changing the chat in the ``with`` block.

        Raises:
            BranchStateError: another thread is changing it.
        """
        if not self._lock.acquire(blocking=False):
            raise BranchStateError(
                "the chat is in use by another thread",
                hint="a chat belongs to one thread at a time",
            )
        try:
            yield
        finally:
            self._lock.release()

    @property
    def _line(self) -> Line:
        return self._lines[self.current]

    @property
    def exchanges(self) -> list[Exchange]:
        """The messages of the current branch with their answers, in order."""
        return self._line.path

    @property
    def messages(self) -> list[dict[str, object]]:
        """The messages of the current branch, as dictionaries with role and content."""
        return messages_of(self.system, self.exchanges)

    @property
    def system(self) -> str | None:
        """The system message of the current branch, or None. You can set it.

        If you set it, the whole branch is processed again with its next message.
        """
        return self._line.system

    @system.setter
    @_exclusive
    def system(self, text: str | None) -> None:
        self._tokens(text, (), Exchange(None, "x"))
        self._end_answer()
        self._line.system = text

    def set(self, **changes: Unpack[ChatSettings]) -> None:
        """Change settings of the next answers: `SamplingParams`' fields, ``max_tokens``, ``thinking``.

        ``seed=None`` picks a random seed.

        Raises:
            ConfigError: an unknown setting or a bad value; nothing is changed.
        """
        limit = changes.pop("max_tokens", self.max_tokens)
        if limit is not None:
            limit = whole("max_tokens", limit, 1)
        thinking = changes.pop("thinking", self.thinking)
        if thinking:
            plan_thinking(self.ctx.model, [], thinking)  # raises if the template cannot
        thinking_budget(thinking)
        if changes.get("seed", 0) in (None, -1):
            changes["seed"] = random_seed()
        with self.held():
            self.sampling = self.sampling.replace(**cast(SamplingSettings, changes))
            self.max_tokens = limit
            self.thinking = thinking

    @property
    def n_cut(self) -> int:
        """How many exchanges the last answer did not see, because the context was full."""
        return 0 if self._line.head is None else self._line.head.n_cut

    @property
    def branches(self) -> list[int]:
        """The numbers of the branches of the conversation, oldest first."""
        return list(self._lines)

    @property
    def branch(self) -> Branch | None:
        """The branch that ends with the last answer; None before that, or once its K/V is evicted.

        It is pruned when the chat continues, but not its forks. After a switch or an undo it takes a
        sequence, and nothing is evaluated.
        """
        return None if self._line.head is None else self._revived(self._line.head)

    @property
    def stats(self) -> ChatStats:
        """The cost so far."""
        return deepcopy(self._stats)

    def tree(self) -> BranchTree:
        """Return the tree of all branches, for printing: a line for each message and its answer."""
        return BranchTree([self.outline()])

    def outline(self) -> TreeLine:
        """Return the same tree as lines, for other drawings."""
        return tree_of(self._lines.values(), self.current)

    # -- answers -----------------------------------------------------------------------------------

    @_exclusive
    def send(self, text: str) -> Answer:
        """Send a message and return its answer, which is generated while you iterate over it.

        If less than an eighth of the context is left for the answer, the oldest exchanges are left out of
        the prompt until a quarter is free; `n_cut` is their number. A running answer is ended first. If
        an earlier answer was never read, its message stays without an answer.

        Raises:
            CacheFullError: the message is too long, even alone. ConfigError: it is not text, or the
                template refuses it. DecodeError. The conversation is as before.
        """
        if not isinstance(text, str):
            raise ConfigError(f"a message must be text, not {text!r:.40}")
        self._end_answer()
        return self._begin(self._line, Exchange(self._line.head, text), self.sampling)

    @_exclusive
    def results(self, *results: object) -> Answer:
        """Pass the results of the functions that the last answer called, in order, and return the answer.

        Text is used as it is, other values as JSON.

        Raises:
            UsageError: the last answer has no calls, or another number of calls. ConfigError: a value is
                not JSON. It also raises the errors of `send`.
        """
        self._end_answer()
        head = self._line.head
        calls = [] if head is None else head.calls
        if not calls or len(calls) != len(results):
            raise UsageError(
                f"the last answer calls {len(calls)} functions, and there are {len(results)} results"
            )
        texts = []
        for index, result in enumerate(results):
            try:
                text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise ConfigError(f"results[{index}] is not JSON: {error}") from None
            texts.append(text)
        return self._begin(self._line, Exchange(head, "", results=texts), self.sampling)

    @_exclusive
    def retry(self) -> Answer:
        """Answer the last message once more, with another seed, on a new branch.

        Raises:
            UsageError: there is no message. It also raises the errors of `send`.
        """
        n = len(self.exchanges)
        return self._instead(n, self._exchange(n))

    @_exclusive
    def edit(self, n: int, text: str) -> Answer:
        """Replace the ``n``-th message of the current branch (the first is 1), on a new branch.

        Its answer gets a seed that no other answer to the same text at this place had.

        Raises:
            UsageError: there is no such message. It also raises the errors of `send`.
        """
        if not isinstance(text, str):
            raise ConfigError(f"a message must be text, not {text!r:.40}")
        return self._instead(n, Exchange(None, text))

    def _instead(self, n: int, question: Exchange) -> Answer:
        """Answer the message or results of ``question`` instead of the ``n``-th message."""
        self._end_answer()
        parent, seed = self._exchange(n).parent, self.sampling.seed or 0
        n_before = sum(
            e.parent is parent and (e.user, e.results) == (question.user, question.results)
            for e in exchanges_of(self._lines.values())
        )
        params = self.sampling.replace(seed=derive_seed(seed, n_before) if n_before else seed)
        line = replace(self._line, number=max(self._lines) + 1)
        return self._begin(line, Exchange(parent, question.user, results=question.results), params)

    def _exchange(self, n: int) -> Exchange:
        exchanges = self.exchanges
        n = whole("the number of a message", n)
        if not 1 <= n <= len(exchanges):
            raise UsageError(
                f"there is no message {n}" if exchanges else "there is no message yet",
                hint=f"messages are numbered from 1 to {len(exchanges)}"
                if exchanges
                else "send one first",
            )
        return exchanges[n - 1]

    def _begin(self, line: Line, question: Exchange, params: SamplingParams) -> Answer:
        """Process the prompt of an answer, and then change the conversation."""
        parent, model = question.parent, self.ctx.model
        tokens, n_cut = self._fitting(line, question)
        tokens, thinking = plan_thinking(
            model, tokens, self.thinking, ending=self.thinking_end, has_calls=self.tools.is_used
        )
        grammar = tool_grammar(model, self.tools, None) if self.tools.is_used else None
        before = [] if parent is None else parent.path[n_cut:]
        n_next = self._n_next(line.system, before, question, tokens)
        branch, n_new = self._read(tokens, params, n_next)
        self._branch = branch
        self._stats.num_evaluated_tokens += n_new
        self._stats.num_cached_tokens += len(tokens) - n_new
        self._stats.num_answers += 1
        self._stats.num_cut_exchanges += max(0, n_cut - self.n_cut)
        exchange = replace(question, seed=branch.seed, n_cut=n_cut, branch=branch)
        self._undo = self._lines, self.current
        line = replace(line, head=exchange)
        self._lines, self.current = {**self._lines, line.number: line}, line.number
        self._answer = Answer(self, exchange, branch, thinking, grammar)
        return self._answer

    def _read(
        self, tokens: Sequence[int], params: SamplingParams, n_next: int
    ) -> tuple[Branch, int]:
        """Return a branch with a prompt, and how many of its tokens were evaluated.

        ``n_next``: how many of these tokens the prompt of the next turn will probably begin with. Memory
        that cannot be cut everywhere keeps a checkpoint there.
        """
        self._leave()
        branch = Branch.create(self.ctx, params, beginning=tokens)
        try:
            n = branch.sequence.take_prompt(tokens)
            report = self.on_prompt_progress
            if report is not None and n < n_next < len(tokens):  # two parts, shown as one prompt
                report = Reading(n, len(tokens)).relayed(report)
            for part in (tokens[n:n_next], tokens[max(n, n_next) :]):
                if part:
                    branch.prefill(part, on_prompt_progress=report)
            branch.sequence.keep_cached(with_row=True)
        except BaseException:
            branch.leave_to_cache()  # the last turn may be in its sequence
            raise
        return branch, len(tokens) - n

    def _leave(self) -> None:
        """Leave the K/V of the last branch to the prefix cache, and free its sequence."""
        branch, self._branch = self._branch, None
        if branch is not None:
            branch.leave_to_cache()

    def _revived(self, exchange: Exchange) -> Branch | None:
        """Return the branch of an exchange, with its K/V from the prefix cache; None if it is evicted."""
        if exchange.branch is not None and exchange.branch.state == "pruned":
            with self.held():
                self._leave()
                self._branch = exchange.branch.revived()
                exchange.branch = self._branch or exchange.branch
        return (
            None
            if exchange.branch is None or exchange.branch.state == "pruned"
            else exchange.branch
        )

    def _fitting(self, line: Line, question: Exchange) -> tuple[list[int], int]:
        """Return the tokens of a prompt, and how many exchanges are left out because it is too long.

        At least the exchanges that the last answer did not see are left out, because the K/V of the rest
        exists.
        """
        parent = question.parent
        before, n_cut = ([], 0) if parent is None else (parent.path, parent.n_cut)
        size = self.ctx.n_ctx_seq
        least = size // _LEAST_ROOM
        least = least if self.max_tokens is None else min(least, self.max_tokens)
        tokens = self._tokens(line.system, before[n_cut:], question)
        if size - len(tokens) < least:
            while size - len(tokens) < max(least, size // _MORE_ROOM) and n_cut < len(before):
                n_cut += 1
                while n_cut < len(before) and before[n_cut].results:  # their calls are left out
                    n_cut += 1
                tokens = self._tokens(line.system, before[n_cut:], question)
            if len(tokens) >= size:
                raise CacheFullError.of_prompt(len(tokens), size)
        return tokens, n_cut

    def _tokens(
        self, system: str | None, before: Sequence[Exchange], question: Exchange
    ) -> list[int]:
        """Return the tokens of a prompt, written by the template."""
        model = self.ctx.model
        variables = thinking_variables(model.turn_format, self.thinking)
        messages = messages_of(system, before, question)
        return conversation(model, messages, self.tools, variables).tokens(model)

    def _n_next(
        self,
        system: str | None,
        before: Sequence[Exchange],
        question: Exchange,
        tokens: Sequence[int],
    ) -> int:
        """Return how many tokens this prompt and the next one will probably have in common.

        If the memory can drop tokens, that does not matter, and the result is all of them. Many
        templates leave the reasoning out of earlier answers, or write the last answer differently.
        """
        n = len(tokens)
        if not self.ctx.kv_cache.can_draft:
            answered = replace(question, answer="x", n_tokens=1)
            with suppress(LlamaBranchError):  # the template may refuse another turn
                later = self._tokens(system, [*before, answered], Exchange(answered, "x"))
                n = n_common(tokens, later)
        return n

    def _end_answer(self) -> None:
        """End a running answer. Its message stays, and so does the text so far."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.cut_off()

    def _conclude(self, exchange: Exchange) -> None:
        """Record an answer that has ended; an interrupted one without a token is removed."""
        self._stats.num_evaluated_tokens += exchange.n_tokens
        if self._answer is not None and not exchange.is_answered:
            n_cut = self.n_cut
            self._lines, self.current = self._undo
            self._stats.num_cut_exchanges -= max(0, n_cut - self.n_cut)
        self._answer = None

    # -- branches ----------------------------------------------------------------------------------

    @_exclusive
    def undo(self) -> str:
        """Remove the last message and its answer, and return the message.

        Raises:
            UsageError: the branch has no message.
        """
        self._end_answer()
        last = self._exchange(len(self.exchanges))
        self._lines[self.current] = replace(self._line, head=last.parent)
        return last.user

    @_exclusive
    def fork(self) -> int:
        """Continue on a new branch, which begins like the current one; return its number."""
        self._end_answer()
        number = max(self._lines) + 1
        self._lines[number] = replace(self._line, number=number)
        self.current = number
        return number

    @_exclusive
    def switch(self, number: int) -> None:
        """Continue on another branch; nothing is evaluated before its next message.

        Raises:
            UsageError: there is no such branch.
        """
        self.on(number)
        self._end_answer()
        self.current = int(number)

    def on(self, number: int) -> list[Exchange]:
        """Return the exchanges of any branch.

        Raises:
            UsageError: there is no such branch.
        """
        if whole("the number of a branch", number) not in self._lines:
            known = ", ".join(map(str, self._lines))
            raise UsageError(f"there is no branch {number}", hint=f"branches: {known}")
        return self._lines[number].path

    # -- saving ------------------------------------------------------------------------------------

    @_exclusive
    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the conversation and the K/V of its branches to a folder; see `load`.

        The folder is created. An earlier save of this chat is replaced; other files are not.

        Raises:
            SnapshotError: it cannot be written, or the folder has another chat or other files.
        """
        self._end_answer()
        lines = list(self._lines.values())
        saved = SavedChat(self._id, lines, self.current, self.sampling, self.max_tokens, self.stop)
        current_last = [*self._lines.values(), self._line]
        heads = dict.fromkeys(line.head for line in reversed(current_last) if line.head is not None)
        ends = (head for head in reversed(heads) if self._revived(head) is not None)
        write_chat(folder, self.ctx.model, saved, ends)

    @classmethod
    def load(
        cls,
        ctx: Context,
        folder: str | os.PathLike[str],
        drafter: DrafterChoice = "auto",
        config: SpeculativeConfig | None = None,
        *,
        trusted: bool = False,
    ) -> Chat:
        """Return the conversation that ``save`` wrote; it continues as if it had never ended.

        If the context has no room for some of the K/V, those tokens are evaluated again when they are
        needed. If the context has another K/V type, or another setting that K/V depends on, all of it is
        evaluated again, with a `PerformanceWarning`.

        Args:
            ctx: the context in which it continues, of the same model; see `saved_model`.
            folder: the folder.
            drafter, config: as for a new chat.
            trusted: as for ``Branch.load``.

        Raises:
            SnapshotError: the folder has no chat, or it is damaged, or of another model.
            UnsupportedError: its K/V cannot be checked and ``trusted`` is False, or there is no chat
                template.
        """
        text_context("ctx", ctx)
        saved = read_chat(folder, ctx.model)
        chat = cls(ctx, drafter, config, sampling=saved.sampling, max_tokens=saved.max_tokens,
                   stop=saved.stop)  # fmt: skip
        chat._id, chat.current = saved.id, saved.current
        chat._lines = {line.number: line for line in saved.lines}
        try:
            for path, exchange in saved.branches:  # the last one is the most recently used
                with suppress(CapacityError):  # it is evaluated again
                    exchange.branch = Branch.load(ctx, path, trusted=trusted)
                    exchange.branch.leave_to_cache()
        except SnapshotError as error:
            if error.setting is None:
                raise
            warn(f"the conversation is evaluated again: {error.message}", PerformanceWarning)
        return chat


class Answer:
    """An answer: an iterator of :class:`Produced`, with the text so far.

    Attributes:
        exchange: the message and its answer, as the chat keeps them.
        branch: the branch with the tokens of the prompt and the answer. It is pruned when the chat
            continues: fork it to keep it.
        prompt: the token ids of the prompt, written by the chat template.
    """

    def __init__(
        self,
        chat: Chat,
        exchange: Exchange,
        branch: Branch,
        thinking: Thinking | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        self.exchange = exchange
        self.branch = branch
        self.prompt = branch.tokens
        self._chat = chat
        self._thinking, self._grammar = thinking, grammar
        self._thought: list[int] = []  # tokens
        self._generation: Generation | None = None  # of the answer, after its thought
        self._pieces: TurnPieces | None = None  # if functions may be called
        if chat.tools.is_used:
            self._pieces = TurnPieces(chat.tools, str(len(exchange.path)))
        self._events = self._run()
        self._has_ended = self._was_cut_off = self._is_read = False
        self._reader = 0  # the thread that iterates; 0 = none yet

    def __repr__(self) -> str:
        text, n = self.exchange.answer, self.exchange.n_tokens
        return f"<Answer {text!r:.40}, {n} tokens, {self.finish_reason or 'not complete'}>"

    @property
    def text(self) -> str:
        """The text without the stop string. If nobody iterates, reading it generates all of it."""
        self._begin_unread()
        return self.exchange.answer

    @property
    def thought(self) -> str:
        """The thought before the answer. If nobody iterates, reading it generates all of it."""
        self._begin_unread()
        return self.exchange.thought

    def _begin_unread(self) -> None:
        if inspect.getgeneratorstate(self._events) == inspect.GEN_CREATED:
            self.finish()

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls of functions in the answer, once it has ended."""
        return [
            ToolCall(f["name"], json.loads(f["arguments"]), str(call["id"]))
            for call in self.exchange.calls
            if isinstance(f := call["function"], dict)
        ]

    @property
    def tokens(self) -> list[int]:
        """The token ids so far, the thought's first; a copy."""
        return self._thought + ([] if self._generation is None else self._generation.tokens)

    @property
    def finish_reason(self) -> str | None:
        """ "stop", "length" or "capacity" (the context is full); None: running, or interrupted."""
        return self.exchange.finish_reason

    def __iter__(self) -> Iterator[Produced]:
        return self

    def __next__(self) -> Produced:
        with self._chat.held():
            self._check_thread()
            try:
                event = next(self._events)
            except BaseException:  # StopIteration too
                self.close()
                raise
            self._note()
            return event

    def _check_thread(self) -> None:
        """Raise BranchStateError in the thread that reads the answer if another thread ended it."""
        self._reader = self._reader or get_ident()
        if self._was_cut_off and self._reader == get_ident():
            raise BranchStateError(
                "the answer was ended by another thread that used the chat",
                hint="a chat belongs to one thread at a time",
            )

    def _note(self) -> None:
        """Write the answer so far into the conversation."""
        if self._generation is not None and not self._is_read:
            pieces, text = self._pieces, self._generation.text
            self.exchange.answer = text if pieces is None else pieces.content
        self.exchange.n_tokens = len(self.tokens)

    def _run(self) -> Generator[Produced, None, None]:
        chat, limit = self._chat, self._chat.max_tokens
        if self._thinking is not None:
            yield from self._think(self._thinking, limit)
        if self._grammar is not None:
            text, model = self.branch.sequence, chat.ctx.model
            sampler = Sampler(model, text.sampler.params, self._grammar)
            text.begin_anew(len(text.tokens), sampler)
        if self.finish_reason is None:
            left = None if limit is None else max(0, limit - len(self.tokens))
            self._generation = chat.speculator.generate(
                self.branch, max_tokens=left, stop=chat.stop
            )
            yield from self._until_full(self._generation)
        self._note()
        yield from self._read_calls()

    def _until_full(self, generation: Generation) -> Generator[Produced, None, None]:
        """Yield the tokens of a generation; note why it ended."""
        try:
            for token in generation:
                yield from [token] if self._pieces is None else self._shown(self._pieces, token)
        except CapacityError:
            self.exchange.finish_reason = "capacity"
        else:
            self.exchange.finish_reason = generation.finish_reason

    def _shown(self, pieces: TurnPieces, token: Produced) -> list[Produced]:
        """Return a token with the thought or the content that it completes."""
        written = "" if token.is_thought else written_piece(self._chat.ctx.model, token)
        return shown_pieces(token, pieces.feed(token.text if token.is_thought else "", written))

    def _think(self, thinking: Thinking, limit: int | None) -> Generator[Produced, None, None]:
        """Yield the tokens of the thought. Afterwards the branch ends where the answer begins."""
        chat, text, start = self._chat, self.branch.sequence, self.branch.position
        buffer = ThoughtBuffer(chat.ctx.model, thinking, limit)
        self._thought = buffer.tokens
        generation = Generation(chat.speculator.loop, text, buffer, owner=self.branch)
        for shown in self._until_full(generation):
            for token in buffer.emit(shown):
                self.exchange.thought += token.text
                yield token
        ended, self.exchange.thought = buffer.ended, buffer.thought
        if ended is None or self.finish_reason == "capacity":
            yield from buffer.withheld
            return
        self.exchange.thought, n_kept, forced = ended
        self._thought = buffer.tokens[:n_kept] + forced
        self.exchange.finish_reason = None
        self.branch.rewind(start + n_kept)
        if forced:
            self.branch.append(forced)

    def _read_calls(self) -> Generator[Produced, None, None]:
        """Separate the calls of functions from the answer; yield text that was held back."""
        chat, exchange, pieces = self._chat, self.exchange, self._pieces
        if pieces is None:
            return
        salt, generation = str(len(exchange.path)), self._generation
        is_cut = self.finish_reason != "stop"
        if generation is None:  # a thought may end with a call
            turn = chat.tools.read(exchange.thought, in_thought=True, salt=salt)
            exchange.thought = turn.thought
        else:
            is_stopped = bool(chat.stop) and not is_cut
            written = named_text(
                chat.ctx.model, generation.text, generation.tokens, is_cut=is_stopped
            )
            turn = chat.tools.read(written, salt=salt, is_cut=is_cut)
            exchange.answer = turn.content
        self._is_read = True
        if turn.calls:
            exchange.calls = [openai_call(call) for call in turn.calls]
            exchange.finish_reason = "tool_calls" if not is_cut else exchange.finish_reason
        thought = turn._replace(thought=exchange.thought)
        yield from shown_pieces(None, pieces.finish(thought, is_cut=is_cut))

    def finish(self) -> Answer:
        """Run to the end; return itself."""
        with self._chat.held():
            for _ in self:
                pass
        return self

    def cut_off(self) -> None:
        """End it because the chat continues; a thread that reads it gets an error."""
        self._was_cut_off = not self._has_ended and self._reader not in (0, get_ident())
        self.close()

    def close(self) -> None:
        """End it here. The text so far stays; without text the message is removed.

        A second call does nothing.
        """
        with self._chat.held():
            self._close()

    def _close(self) -> None:
        if self._has_ended:
            return
        if inspect.getgeneratorstate(self._events) == inspect.GEN_RUNNING:
            raise BranchStateError(
                "the answer is being generated", hint="it can be ended between two of its tokens"
            )
        self._has_ended = True
        try:
            self._events.close()
        finally:
            self._note()
            self._chat._conclude(self.exchange)
