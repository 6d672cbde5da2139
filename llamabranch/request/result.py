"""A generated text, the events while it is generated, and an engine's totals."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Generic, cast

from typing_extensions import TypeVar

from ..context.logits import TokenScore
from ..context.progress import PromptProgress
from ..errors import LlamaBranchError, ParseError
from ..generation.drafter import SpeculativeStats
from ..generation.output import Produced
from ..generation.thought import named_text
from ..model import NO_TOKEN, Message, Model, Turn, TurnEvent, is_chat
from ..model.tools import ToolCall, Tools, begun_answer
from ..sampling.grammar import Grammar
from .openai import (
    Vocabulary,
    answer_message,
    chat_choice,
    completion_choice,
    end_reason,
    head,
    usage,
)
from .record import Record, per_second

T = TypeVar("T", default=object, covariant=True)
S = TypeVar("S")


@dataclass(repr=False)
class Result(Generic[T]):
    """One generated text of a request, and how it ended.

    ``finish_reason`` is "stop", "tool_calls" (from ``chat``: it ended after calls of functions),
    "length", "constraint" (the constraint allows no token), "capacity" (the cache cannot hold the
    text), "cancelled" or "error". In the last three cases ``text`` and
    ``tokens`` have everything generated until then, and ``error`` is the exception, if there was
    one. ``text`` ends before a stop string; ``tokens`` include the stop string, but not an EOG
    token. A thought before the answer is in ``thought`` and not in ``text``; ``tokens`` begin with
    its tokens. Calls of the functions of a ``chat`` are in ``tool_calls`` and not in ``text``.

    Attributes:
        thought: the thought before the answer, without the tags; "" if there is no thought.
        n_thought_tokens: how many of ``tokens`` come before the answer: the thought, its tags, and text
            that was written to end it.
        emitted: the tokens with their text, log-probability and other numbers.
        end: the EOG token that ended it; None if something else did.
        num_prompt_tokens: the number of tokens of the prompt.
        cached: how many of them were already in the cache when the text was first admitted, and
            were not processed again.
        unread: how many of them were not read, because the text ended before.
        num_preemptions: how often it lost its cells and was processed again.
        stop_reason: the stop string or stop token that ended it; None if an EOG token did.
        queued_s, first_token_s, last_token_s: seconds from the arrival of the request to the admission
            of this text, its first token and its last one; None if the event did not happen.
        logprobs: the tokens in detail, if the request has ``top_logprobs``.
        prompt_logprobs: a score for each prompt token, if the request asked for scores. The first
            token has no score: None.
        exact: whether the text was generated in an exact context. If so, the same seed gives
            the same tokens again, alone or together with any other texts, with or without drafts.
        grammar: the grammar of the request, for ``parsed``.
        choices: from ``complete`` and ``chat``: all texts of the prompt, including this one.
        tools: from ``chat``: the tools of the request.
        model: the model's name.
        record: what its request has cost, and why tokens of the prompt were read; None in a search.
        pieces: the bytes of the tokens in ``logprobs``, if the request asked for log-probabilities.
        written: from ``chat`` with tools: the text of the answer with the names of control tokens.
    """

    id: str
    sample: int
    prompt: str | Sequence[int] | Sequence[Message]
    text: str
    tokens: list[int]
    finish_reason: str
    seed: int
    stats: SpeculativeStats
    num_prompt_tokens: int = 0
    cached: int = 0
    unread: int = 0
    num_preemptions: int = 0
    stop_reason: str | int | None = field(default=None, compare=False)
    error: LlamaBranchError | None = None
    emitted: Sequence[Produced] = field(default=(), compare=False)
    end: Produced | None = field(default=None, repr=False, compare=False)
    queued_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    logprobs: list[Produced] | None = None
    prompt_logprobs: list[TokenScore | None] | None = None
    grammar: Grammar | None = field(default=None, repr=False, compare=False)
    choices: list[Result[T]] = field(default_factory=list, compare=False)
    tools: Tools | None = field(default=None, compare=False)
    model: str = field(default="", compare=False)
    pieces: Mapping[int, bytes] = field(default_factory=dict, compare=False)
    exact: bool = field(default=False, compare=False)
    thought: str = ""
    n_thought_tokens: int = 0
    written: str = field(default="", repr=False, compare=False)
    record: Record | None = field(default=None, repr=False, compare=False)

    def note_written(self, model: Model) -> None:
        """Keep the text of the answer with the names of control tokens, for ``turn``."""
        tokens, is_cut = self.tokens[self.n_thought_tokens :], isinstance(self.stop_reason, str)
        self.written = named_text(model, self.text, tokens, is_cut=is_cut)
        if self._is_all_thought:
            self.written = self.thought

    @property
    def evaluated(self) -> int:
        """How many tokens of the prompt were read: all but those ``cached`` and ``unread``."""
        return self.num_prompt_tokens - self.cached - self.unread

    @property
    def generated(self) -> int:
        """How many tokens were generated, thought and answer together."""
        return len(self.tokens)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second after the first token; nan for fewer than two tokens."""
        if self.first_token_s is None or self.last_token_s is None:
            return math.nan
        return per_second(self.generated - 1, self.last_token_s - self.first_token_s)

    @property
    def is_cut(self) -> bool:
        """Whether the model did not end the text itself."""
        return self.finish_reason not in ("stop", "tool_calls") or self.stop_reason is not None

    @property
    def _is_all_thought(self) -> bool:
        return 0 < len(self.tokens) == self.n_thought_tokens

    def separate_calls(self, model: Model) -> Turn:
        """Return the turn. If the text may call functions, set ``text`` to the content of the turn."""
        if self.tools is None or not self.tools.is_used:
            return self.turn
        self.note_written(model)
        turn = self.turn_with(self.tools, self._salt)
        self.text, self.thought = turn.content, turn.thought
        if turn.calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"
        return turn

    @cached_property
    def turn(self) -> Turn:
        """The thought, the content and the function calls, read by the model's turn format."""
        return self.turn_with(self.tools, self._salt)

    @property
    def _salt(self) -> str:
        return str(len(self.prompt)) if is_chat(self.prompt) else ""

    def turn_with(self, tools: Tools | None, salt: str) -> Turn:
        """Return ``turn`` for these tools; the ids of calls are derived from ``salt``."""
        if tools is None:
            return Turn(self.thought, self.text, [])
        if self._is_all_thought:  # it may end with calls
            return tools.read(self.written or self.thought, in_thought=True, salt=salt)
        begun = begun_answer(self.prompt) if tools.is_used else ""
        turn = tools.read(begun + (self.written or self.text), salt=salt, is_cut=self.is_cut)
        n_begun = len(tools.read(begun).content) if begun else 0
        return turn._replace(thought=self.thought or turn.thought, content=turn.content[n_begun:])

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The complete function calls in the text, in order; [] without tools."""
        return self.turn.calls

    @property
    def message(self) -> dict[str, object]:
        """The answer as a message in OpenAI's format, to append to the conversation."""
        return answer_message(self.turn)

    @property
    def parsed(self) -> T:
        """The text parsed with the request's grammar; None without a grammar.

        For a JSON schema it is a JSON value, or an instance of the type that the schema was made from;
        for other grammars it is the text.

        Raises:
            ParseError: the text was cut off (``finish_reason`` says why), or the type does not
                accept the value.
        """
        if self.grammar is None:
            return cast(T, None)
        calls = self.tools is not None and self.tools.is_used
        if calls and self.tool_calls:
            raise ParseError("the text calls functions: see tool_calls", text=self.text)
        if self.finish_reason != "stop":
            raise ParseError(
                f"the text is not complete: it ended with {self.finish_reason!r}",
                text=self.text,
                hint="a larger max_tokens may let it end; parsed_or(None) does not raise",
            ) from self.error
        return cast(T, self.grammar.parse(self.turn.content if calls else self.text))

    def parsed_or(self, default: S) -> T | S:
        """Return ``parsed``, or ``default`` if that raises."""
        try:
            return self.parsed
        except ParseError:
            return default

    def __repr__(self) -> str:
        ended = self.finish_reason + ("" if self.error is None else f": {self.error}")
        return (
            f"<Result {self.id!r} sample {self.sample}: {reprlib.repr(self.text)}, "
            f"{len(self.tokens)} tokens, {ended}>"
        )

    def to_openai(self) -> dict[str, object]:
        """Return the body of an OpenAI answer: a chat completion for messages, else a completion.

        It has all ``choices``, and log-probabilities if ``logprobs=True`` or ``top_logprobs``
        was given.
        """
        results = self.choices or [self]
        chat = is_chat(self.prompt)
        kind = ("chatcmpl", "chat.completion") if chat else ("cmpl", "text_completion")
        choices = []
        for i, each in enumerate(results):
            end = end_reason(each.finish_reason, each.stop_reason)
            words = Vocabulary(each.pieces.__getitem__)
            logprobs = (each.logprobs or ())[each.n_thought_tokens :]
            scored = [token for token in logprobs if token.token >= 0 and not token.is_stop]
            if chat:
                content = words.chat_logprobs(scored) if each.pieces else None
                choices.append(chat_choice(i, each.turn, end, content))
            else:
                pairs = [(token.token, token) for token in scored]
                offsets = [*accumulate((len(token.text) for token in scored), initial=0)][:-1]
                lists = words.completion_logprobs(pairs, offsets) if each.pieces else None
                choices.append(completion_choice(i, each.text, end, lists))
        n_generated = sum(each.generated for each in results)
        n_thought = sum(each.n_thought_tokens for each in results)
        counts = usage(self.num_prompt_tokens, n_generated, self.cached, n_thought)
        return {**head(*kind, self.model), "choices": choices, "usage": counts}

    def as_dict(self, *, stats: bool = True) -> dict[str, object]:
        """Return the result as JSON types.

        Times and cache counts are left out, because they differ from run to run. ``error``,
        ``logprobs`` and ``prompt_logprobs`` are included only if the result has them.

        Args:
            stats: False leaves out the drafting statistics. For a short text they take most of the
                space.
        """
        record: dict[str, object] = {
            "id": self.id,
            "sample": self.sample,
            "prompt": self.prompt if isinstance(self.prompt, str) else list(self.prompt),
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
        }
        if self.n_thought_tokens:
            record |= {"thought": self.thought, "n_thought_tokens": self.n_thought_tokens}
        if stats:
            record["stats"] = self.stats.as_dict()
        if self.logprobs is not None:
            record["logprobs"] = [_scored(one) | {"source": one.source} for one in self.logprobs]
        if self.prompt_logprobs is not None:
            record["prompt_logprobs"] = [
                None if one is None else _scored(one) | {"rank": one.rank}
                for one in self.prompt_logprobs
            ]
        if self.error is not None:
            record["error"] = str(self.error)
        return record


def _scored(token: Produced | TokenScore) -> dict[str, object]:
    return {
        "token": token.token,
        "logprob": _finite(token.logprob),
        "entropy": _finite(token.entropy),
        "alternatives": [[a.token, _finite(a.logprob), a.text] for a in token.alternatives],
    }


def _finite(number: float) -> float | None:
    """Return the number, or None for NaN and infinity, which JSON does not have."""
    return number if math.isfinite(number) else None


@dataclass(frozen=True, slots=True)
class Event:
    """A new token of a text (``emitted``), or the end of the text (``result``).

    Two other kinds are rarer. For a request with ``prompt_progress``, an event can be the progress
    of its prompt (``progress``). When a thought ends and an answer follows, ``ended_thought`` has
    all tokens of the thought as the result will have them. They can differ from the tokens reported
    before: the last ones may be replaced, and tokens may be added to end the thought.

    ``token``, ``text`` and ``logprob`` come from ``emitted``, which also has the entropy, the source and
    alternatives. An event without a token has the token -1, the text "" and the log-probability nan.

    For messages, ``turn`` has what the event adds to the turn: pieces of the thought and of the
    answer, and calls. If functions may be called, the text of a call is not in ``text``.
    """

    id: str
    sample: int
    emitted: Produced | None = None
    result: Result | None = None
    progress: PromptProgress | None = None
    ended_thought: Sequence[Produced] = ()
    turn: Sequence[TurnEvent] = ()

    @property
    def token(self) -> int:
        """The id of its token; -1 without a token."""
        return NO_TOKEN if self.emitted is None else self.emitted.token

    @property
    def logprob(self) -> float:
        """The model's log-probability of its token, nats; nan without a token."""
        return math.nan if self.emitted is None else self.emitted.logprob

    @property
    def is_thought(self) -> bool:
        """Whether its token belongs to the thought before the answer."""
        return self.emitted is not None and self.emitted.is_thought

    @property
    def text(self) -> str:
        """The text of the event's token; "" for a token of a thought, or without a token."""
        return "" if self.emitted is None or self.is_thought else self.emitted.text

    @property
    def thought(self) -> str:
        """The text of its token if it is part of a thought; otherwise ""."""
        return self.emitted.text if self.emitted is not None and self.is_thought else ""


@dataclass
class EngineStats:
    """Totals of an engine's work. Counts have the names that they have in a `Result`.

    Attributes:
        target_forward_passes, draft_forward_passes: decodes, also those that only read prompts. A
            decode that several texts share counts once.
        evaluated, cached: prompt tokens that were read, and those that were in the cache; tokens that
            a preempted text reads once more count again.
        shared: how many of ``cached`` came from a text that was still running.
        generated: tokens of all texts.
        preemptions: how often a text lost its cells.
        elapsed_s: seconds in which the engine ran.
        speculative: the sum over all requests.
    """

    target_forward_passes: int = 0
    draft_forward_passes: int = 0
    evaluated: int = 0
    cached: int = 0
    shared: int = 0
    generated: int = 0
    preemptions: int = 0
    elapsed_s: float = 0.0
    speculative: SpeculativeStats = field(default_factory=SpeculativeStats)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all texts per second of ``elapsed_s``; nan before the first run."""
        return per_second(self.generated, self.elapsed_s)

    def as_dict(self) -> dict[str, object]:
        """Return all counts and times as JSON types."""
        known = {k: v for k, v in self.__dict__.items() if k != "speculative"}
        rate = self.tokens_per_second
        return {
            **self.speculative.as_dict(),
            **known,
            "tokens_per_second": None if rate != rate else rate,
        }
