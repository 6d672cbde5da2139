"""The steps of an agent, and its report."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Generic, cast

import msgspec
from typing_extensions import TypeVar

from ..errors import LlamaBranchError, ParseError
from ..model import NO_TOKEN
from ..model.tools import ToolCall
from ..request.record import Record, per_second
from ..sampling.grammar import Grammar

T = TypeVar("T", default=object, covariant=True)
S = TypeVar("S")


class Step(msgspec.Struct, frozen=True, omit_defaults=True, eq=False):
    """A step of an agent.

    Attributes:
        kind: "prompt": tokens were added to the agent's conversation; "thought", "text": text of the
            model (in a stream it comes in pieces); "call": a call of a function; "result": its result;
            "end": the end of the agent.
        text: the text of the model, a call's arguments as JSON, a function's complete result, or how the
            agent ended.
        token, logprob: in a stream, the id and the model's log-probability (nats) of the token that
            completed a piece of text or thought. -1 and nan in all other steps.
        agent: the agent's name.
        path: identifies the run: "0.1" is the second sample of the first task, "0.1/2.0" is a sub-agent
            that the first call of its third turn started. Numbers count from 0.
        turn: the turn, from 0.
        name, call: for a call or a result: the function's name, and the call's id.
        error: for a result: "told" = the model was told that the call failed, "raised" = the function
            raised an exception that ends the agent. For an end: the error, as text.
        seconds: the time of a turn or a call, or of the whole agent.
        report: for an end: the report of the agent.
    """

    kind: str
    text: str = ""
    agent: str = "agent"
    path: str = "0.0"
    turn: int = 0
    name: str = ""
    call: str = ""
    error: str = ""
    seconds: float = 0.0
    report: Report | None = None
    token: int = NO_TOKEN
    logprob: float = math.nan


@dataclass
class Report(Generic[T]):
    """How an agent's run ended, with all its steps.

    As with a `Result`, limits do not raise an exception, but ``parsed`` does.

    Attributes:
        text: the answer; with ``output`` its JSON.
        finish_reason: "stop": the text is its answer; "cancelled"; "error"; or the ``limit`` that ended
            it before an answer.
        limit: the limit that it reached: "turns" (``max_turns``), "length" (``max_tokens``), "time"
            (``max_seconds``), "capacity" (the context is full), "repeats" (it only repeated calls for
            three turns). If ``finish_reason`` is "stop", it answered in a last turn without calls. None
            = no limit.
        error: the error that ended it, if any. If a tool raised an exception, it is a `ToolError` whose
            ``__cause__`` is that exception.
        calls: all calls of functions, in order.
        messages: the conversation in OpenAI's format, from the agent's own messages on.
        tokens: its token ids; ``Branch.start(ctx, report.tokens)`` makes a branch of it.
        steps: its steps and the steps of its sub-agents and forks, in order of time.
        seed: the seed of its turns.
        choices: the reports of all samples of the task, including this one.
        requests: the cost of each turn, including the turns of sub-agents and forks, and why tokens of
            its prompt were read; ``requests[0].line()`` says it in a line.
        seconds: from the beginning of the run to its end.
        grammar: the grammar of the answer, if the agent has ``output``.
        exact: whether all turns were made in an exact context: then the same seed gives the same
            text again, whatever else runs.
    """

    text: str
    finish_reason: str
    messages: list[dict[str, object]] = field(repr=False)
    tokens: list[int] = field(repr=False)
    seed: int
    limit: str | None = None
    error: LlamaBranchError | None = None
    calls: list[ToolCall] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list, repr=False)
    requests: list[Record] = field(default_factory=list, repr=False)
    seconds: float = 0.0
    choices: list[Report[T]] = field(default_factory=list, repr=False)
    grammar: Grammar | None = field(default=None, repr=False)
    exact: bool = False
    agent: object = field(default=None, repr=False)  # the agent that made it, and may continue it

    @property
    def evaluated(self) -> int:
        """How many tokens of all prompts were read: all but those that were ``cached``."""
        return sum(record.evaluated for record in self.requests)

    @property
    def cached(self) -> int:
        """How many tokens of all prompts were in the cache already."""
        return sum(record.cached for record in self.requests)

    @property
    def reread(self) -> int:
        """How many of ``evaluated`` had been read or generated before; ``requests`` has the reasons."""
        return sum(record.reread for record in self.requests)

    @property
    def generated(self) -> int:
        """How many tokens were generated, in all turns."""
        return sum(record.generated for record in self.requests)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second after the first token of each turn."""
        n = sum(max(0, record.generated - 1) for record in self.requests)
        return per_second(n, sum(record.write_s for record in self.requests))

    @property
    def parsed(self) -> T:
        """The answer as an instance of the agent's ``output``; None without one.

        Raises:
            ParseError: there is no answer (``finish_reason`` says why), or the type refuses it.
        """
        if self.grammar is None:
            return cast(T, None)
        if self.finish_reason != "stop":
            raise ParseError(
                f"there is no answer of this type: the agent ended with {self.finish_reason!r}",
                text=self.text,
                hint="parsed_or(None) does not raise",
            ) from self.error
        return cast(T, self.grammar.parse(self.text))

    def parsed_or(self, default: S) -> T | S:
        """Return ``parsed``, or ``default`` if it raises."""
        try:
            return self.parsed
        except ParseError:
            return default
