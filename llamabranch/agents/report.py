"""The steps of an agent, and its report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, cast

import msgspec
from typing_extensions import TypeVar

from ..errors import LlamaBranchError, ParseError
from ..model.tools import ToolCall
from ..sampling.grammar import Grammar

T = TypeVar("T", default=object, covariant=True)
S = TypeVar("S")


class Step(msgspec.Struct, frozen=True, omit_defaults=True, eq=False):
    """A step of an agent.

    Attributes:
        kind: "prompt": tokens were added to the agent's conversation; "reread": ``n`` of its tokens must
            be processed again, because the template now writes them differently; "thought", "text": text
            of the model (in a stream it comes in pieces); "call": a call of a function; "result": its
            result; "end": the end of the agent.
        text: the text of the model, a call's arguments as JSON, a function's complete result, or how the
            agent ended.
        agent: the agent's name.
        path: identifies the run: "0.1" is the second sample of the first task, "0.1/2.0" is a sub-agent
            that the first call of its third turn started. Numbers count from 0.
        turn: the turn, from 0.
        name, call: for a call or a result: the function's name, and the call's id.
        error: for a result: "told" = the model was told that the call failed, "raised" = the function
            raised an exception that ends the agent. For an end: the error, as text.
        n: how many tokens are processed again.
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
    n: int = 0
    seconds: float = 0.0
    report: Report | None = None


@dataclass
class AgentStats:
    """The cost of a run, including its sub-agents and forks.

    Attributes:
        evaluated: prompt tokens that were processed.
        cached: prompt tokens that were in the cache already.
        reread: how many of ``evaluated`` had been processed or generated before. Others have
            needed their cells since, or the template now writes them differently.
        generated: tokens that were generated.
        seconds: from the beginning of the run to its end.
    """

    evaluated: int = 0
    cached: int = 0
    reread: int = 0
    generated: int = 0
    seconds: float = 0.0

    def add(self, other: AgentStats) -> None:
        """Add the tokens of another run."""
        for name in ("evaluated", "cached", "reread", "generated"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Report(Generic[T]):
    """How an agent's run ended, with all its steps.

    As with a `Result`, limits do not raise an exception, but ``parsed`` does.

    Attributes:
        text: the answer; with ``output`` its JSON.
        finish_reason: "stop"; "length": ``max_tokens``; "turns": ``max_turns``; "time": ``max_seconds``;
            "capacity": the context is full; "cancelled"; "error".
        limit: the limit that made this turn the last one, in which the agent must not call:
            "turns", "length", "capacity", or "repeats" if it only repeated calls for three turns.
            None if the agent ended by itself.
        error: the error that ended it, if any. If a tool raised an exception, it is a `ToolError` whose
            ``__cause__`` is that exception.
        calls: all calls of functions, in order.
        messages: the conversation in OpenAI's format, including the trunk.
        tokens: its token ids; ``Branch.start(ctx, report.tokens)`` makes a branch of it.
        steps: its steps and the steps of its sub-agents and forks, in order of time.
        seed: the seed of its turns.
        choices: the reports of all samples of the task, including this one.
        stats: its cost.
        grammar: the grammar of the answer, if the agent has ``output``.
        exact: whether all turns were made in an exact context: then the same seed gives the same
            text again, whatever else runs.
    """

    text: str
    finish_reason: str
    messages: list[dict[str, object]] = field(repr=False)
    tokens: list[int] = field(repr=False)
    seed: int
    stats: AgentStats
    limit: str | None = None
    error: LlamaBranchError | None = None
    calls: list[ToolCall] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list, repr=False)
    choices: list[Report[T]] = field(default_factory=list, repr=False)
    grammar: Grammar | None = field(default=None, repr=False)
    exact: bool = False
    agent: object = field(default=None, repr=False)  # the agent that made it, and may continue it

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
