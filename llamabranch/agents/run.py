"""One call of an agent: its paths, each a loop of turns, calls and results."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from time import perf_counter
from typing import NamedTuple, cast

from ..context.prefix_cache import n_common
from ..engine import AsyncEngine, Event, Request, Result
from ..engine.openai import answer_message
from ..errors import (
    CacheFullError,
    ClosedError,
    LlamaBranchError,
    ParseError,
    ToolError,
)
from ..generation.thought import token_text
from ..model.thoughts import Thinking, ThinkingChoice, plan_thinking
from ..model.tools import ToolCall, Tools
from ..model.turn_format import Turn, TurnEvent, TurnReader
from ..sampling.grammar import Grammar
from ..sampling.noise import derive_seed, seed_from_text
from .report import AgentStats, Report, Step
from .threads import all_done, threaded
from .tools import FORK, Refused, Tool, shortened, text_of
from .turns import Messages, Plan

__all__ = ["Session", "asked", "starts"]

_LAST = "That was the last call. Use the results to answer the question."
_ROOM = 256  # tokens and cells that the last turn has, or an eighth of max_tokens
_MOST_FAILED = 3  # turns in a row in which all calls failed
_AROUND = 64  # tokens that a template writes around a result
_MOST_SCHEMA = 400  # tokens of a schema that is shown
_AS_JSON = "Give your answer as JSON."
_FOLLOWS = "Give your answer as JSON that follows this schema:\n{schema}"
_NAMED = re.compile(r'"name"\s*:\s*"([^"\\]{1,64})"')
_numbers = count()
_LEAVE_S = 1.0  # that an async tool has to end when it is cancelled


def asked(messages: Messages, task: str) -> list[dict[str, object]]:
    """Return a conversation with a task, which is joined to a user's message at its end."""
    found = [dict(one) for one in messages]
    if found and found[-1]["role"] == "user":  # templates refuse two in a row
        found[-1]["content"] = f"{found[-1]['content']}\n\n{task}"
        return found
    return [*found, {"role": "user", "content": task}]


@dataclass
class Start:
    """Where a path begins.

    Attributes:
        plan: the agent's.
        path, seed: its name, and the seed of its turns.
        task: what is shown of its first prompt.
        messages: the conversation, up to the message that is answered first.
        prompt: its tokens.
        own: the tokens that the agent had before.
        n_lost: how many of them the prompt does not keep.
        turn, n_generated: those that it has made already, of a fork.
        is_fork: whether another path has forked it.
    """

    plan: Plan
    path: str
    seed: int
    task: str
    messages: list[dict[str, object]]
    prompt: list[int]
    own: Sequence[int] = ()
    n_lost: int = 0
    turn: int = 0
    n_generated: int = 0
    is_fork: bool = False


def seed_of(seed: int, path: str) -> int:
    """Return the seed of a path, where that of path "0.0" is ``seed``."""
    return seed if path == "0.0" else derive_seed(seed, seed_from_text(path))


def starts(
    plan: Plan, tasks: Sequence[str], n: int, after: Report | None, seed: int
) -> list[Start]:
    """Return where the paths of a call begin: ``n`` of each task.

    Raises:
        LlamaBranchError: the template refuses a task, or it does not fit into the context.
    """
    found = []
    for i, task in enumerate(tasks):
        before = plan.messages if after is None else after.messages
        own = () if after is None else after.tokens
        messages = asked(before, task)
        if after is not None and after.finish_reason == "stop":
            new = messages[len(before) :]  # the tokens of others are not all of their messages
            prompt, n_lost = plan.turns.following(own, before, new, is_turn=False)
        else:
            prompt, n_lost = plan.turns.whole(own, messages)
        if len(prompt) >= plan.context.n_ctx_seq:
            raise CacheFullError.of_prompt(len(prompt), plan.context.n_ctx_seq)
        for j in range(n):
            path = f"{i}.{j}"
            found.append(
                Start(plan, path, seed_of(seed, path), task, messages, prompt, own, n_lost)
            )
    return found


class Session:
    """What the paths of one call share.

    Args:
        engine: runs their requests.
        seed: of path "0.0"; those of others are derived from it.
        listen: gets every step; of texts their pieces, where it ``streams``.
        keep: gets every step as the journal has it.
        streams: whether texts are told in pieces, as they are written.
        recorded: of a replay the steps of each path: results come from there, and a path ends with them.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        seed: int,
        *,
        listen: Callable[[Step], None] | None = None,
        keep: Callable[[Step], None] | None = None,
        streams: bool = False,
        recorded: Mapping[str, Sequence[Step]] | None = None,
    ) -> None:
        self.engine, self.seed, self.streams = engine, seed, streams
        self._listen, self._keep = listen or (lambda _: None), keep or (lambda _: None)
        self.steps: list[Step] = []
        self.stats: dict[str, AgentStats] = {}
        self.number = (
            f"agent-{next(_numbers)}"  # requests of a run that was cancelled may end later
        )
        self.recorded = recorded

    def tell(self, step: Step, *, is_piece: bool = False) -> None:
        """Pass a step on, and keep it; a piece of a text is passed on only."""
        if not is_piece:
            self.steps.append(step)
            self._keep(step)
        if is_piece or not (self.streams and step.kind in ("thought", "text")):
            self._listen(step)

    async def run(self, starts: Sequence[Start]) -> list[Report]:
        """Run paths together and return their reports, in order."""
        return await all_done([_Path(self, start).run() for start in starts])


class _Made(NamedTuple):
    """The result of a call, whether it is an error (see `Step`), and how long it took."""

    text: str
    error: str
    seconds: float


class _Raised(Exception):
    """A function has raised what ends the agent."""


class _Ended(Exception):
    """The path has ended, with this reason."""

    def __init__(self, reason: str, error: LlamaBranchError | None = None) -> None:
        super().__init__(reason)
        self.reason, self.error = reason, error


class _Path:
    """A path: an agent's conversation while it runs.

    Args:
        session: that of the call.
        start: where it begins.
    """

    def __init__(self, session: Session, start: Start) -> None:
        self._session, self._start = session, start
        self._plan = plan = start.plan
        self._turns = plan.turns
        self._engine, self._context = session.engine, plan.context
        self._messages = list(start.messages)
        self._tokens = list(start.own)
        self._n_evaluated = len(self._tokens)  # that the model has read, from the first on
        self._turn = start.turn
        self._room = min(_ROOM, plan.max_tokens // 8)
        self._stats = session.stats.setdefault(start.path, AgentStats())
        self._begun = perf_counter()
        self._calls: list[ToolCall] = []
        self._made: Counter[str] = Counter()
        self._n_failed = 0
        self._text = ""
        self._limit: str | None = None
        self._exact = True

    async def run(self) -> Report:
        """Run it to its end.

        Raises:
            Exception: what neither this library nor a tool has raised, but for instance a user's drafter.
        """
        error: LlamaBranchError | None = None
        try:
            self._add(self._start.prompt, self._start.n_lost, self._start.task)
            await self._loop()
            if self._plan.grammar is not None:
                await self._answer_typed(self._plan.grammar)
            reason = "stop"
        except _Ended as ended:
            reason, error = ended.reason, ended.error
        except asyncio.CancelledError:
            self._end("cancelled", None)
            raise
        except ClosedError as closed:
            if not self._stats.generated:
                raise
            reason, error = "cancelled", closed
        except LlamaBranchError as raised:
            reason, error = "error", raised
        return self._end(reason, error)

    def _end(self, reason: str, error: LlamaBranchError | None) -> Report:
        start, session = self._start, self._session
        self._stats.seconds = perf_counter() - self._begun
        stats = replace(self._stats)
        inside = f"{start.path}/"
        for path, other in session.stats.items():
            if path.startswith(inside):
                stats.add(other)
        report: Report = Report(
            self._text, reason, self._messages, self._tokens, start.seed, stats, self._limit, error,
            self._calls, grammar=self._plan.grammar, exact=self._exact, plan=self._plan,
        )  # fmt: skip
        report.choices = [report]
        self._tell("end", reason, error=str(error or ""), seconds=stats.seconds, report=report)
        report.steps = [
            s for s in session.steps if s.path == start.path or s.path.startswith(inside)
        ]
        return report

    def _tell(self, kind: str, text: str = "", *, is_piece: bool = False, **more: object) -> None:
        start = self._start
        step = Step(kind, text, self._plan.name, start.path, self._turn, **more)  # type: ignore[arg-type]
        self._session.tell(step, is_piece=is_piece)

    @property
    def _n_left(self) -> int:
        """How many tokens may still be generated."""
        return self._plan.max_tokens - self._start.n_generated - self._stats.generated

    # -- turns ---------------------------------------------------------------------------------------

    async def _loop(self) -> None:
        """Run turns until one has no call.

        Raises:
            _Ended: a limit or an error has ended it before.
        """
        is_first = not self._start.is_fork
        if self._plan.max_turns - self._turn <= 1 and not (is_first and self._turns.forced):
            self._limit = "turns" if self._turns.others.is_used else None
        while True:
            turn = await self._take_turn(is_first=is_first)
            is_first = False
            if not turn.calls:
                self._messages.append(_answer(turn))
                return
            if self._limit is not None:  # a form without a grammar: nothing keeps it from calling
                raise _Ended(self._limit)
            self._calls += turn.calls
            made = await self._call_all(turn)
            self._continue(turn, made)

    async def _take_turn(self, *, is_first: bool) -> Turn:
        """Let the model write a turn, and tell what it wrote."""
        turns = self._turns
        forced = turns.forced if is_first else None
        grammar = forced or (turns.last if self._limit else turns.free)
        tools = turns.first if forced is not None else turns.others
        salt = f"{self._start.path}/{self._turn}"
        # If the grammar allows no calls, no text is read as one.
        calls = tools.is_used and not (self._limit is not None and grammar is not None)
        reader = tools.reader(salt=salt) if calls else None
        thinking = self._begin_thought(self._plan.think, calls=calls)
        result, seconds = await self._generate(grammar, reader, thinking)
        if calls:
            result.note_written(self._context.model)
        turn = result.turn_with(tools if calls else None, salt)
        if calls and not turn.calls:
            turn = self._unknown_calls(turn, salt)
        if turn.thought:
            self._tell("thought", turn.thought)
        self._tell_text(turn.content, result, seconds)
        self._text = turn.content.strip()
        if result.finish_reason != "stop":
            self._messages.append({"role": "assistant", "content": turn.content})
            raise _Ended(self._reason(result), result.error)
        for call in turn.calls:
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            self._tell("call", arguments, name=call.name, call=call.id)
        return turn

    def _begin_thought(self, think: ThinkingChoice, *, calls: bool) -> Thinking | None:
        """Open or close a thought at the end of the prompt; return how the answer begins."""
        model, tokens = self._context.model, self._tokens
        prompt, thinking = plan_thinking(model, tokens, think, has_calls=calls)
        if len(prompt) > len(tokens):
            self._add(prompt, 0)
        return thinking

    def _unknown_calls(self, turn: Turn, salt: str) -> Turn:
        """Return a turn that is nothing but calls of unknown functions with these calls."""
        unknown = set(_NAMED.findall(turn.content)) - self._plan.tools.keys()
        named = [{"type": "function", "function": {"name": name}} for name in sorted(unknown)]
        if not named:
            return turn
        known = Tools([*self._turns.others.given, *named], turns=self._turns.form)
        other = known.read(turn.content, salt=salt)
        if not other.calls or other.content.strip():
            return turn
        return Turn(turn.thought, "", other.calls)

    def _tell_text(self, text: str, result: Result, seconds: float) -> None:
        tokens, seed = result.tokens, self._start.seed
        self._tell("text", text, tokens=tokens, seed=seed, seconds=seconds)

    def _reason(self, result: Result) -> str:
        """Return how the path ends, by how a request has ended."""
        if result.finish_reason == "cancelled" and self._seconds_left() <= 0:
            return "time"
        return "error" if result.finish_reason == "constraint" else result.finish_reason

    def _seconds_left(self) -> float:
        most = self._plan.max_seconds
        return float("inf") if most is None else most - (perf_counter() - self._begun)

    async def _generate(
        self, grammar: Grammar | None, reader: TurnReader | None, thinking: Thinking | None
    ) -> tuple[Result, float]:
        """Continue the tokens, and return what was generated and the seconds it took."""
        start, session, prompt = self._start, self._session, self._tokens
        if len(prompt) >= self._context.n_ctx_seq:
            raise _Ended("capacity", CacheFullError.of_prompt(len(prompt), self._context.n_ctx_seq))
        if self._seconds_left() <= 0:
            raise _Ended("time")
        name = f"{session.number}/{start.path}/{self._turn}"
        most = self._n_left
        if session.recorded is not None:
            most = min(most, self._recorded_tokens(most))
        request = Request(
            prompt,
            id=name,
            max_tokens=most,
            grammar=grammar,
            sampling=self._plan.sampling.replace(seed=start.seed),
            priority=-self._turn,
            thinking=thinking,
        )
        begun, streams, timer = perf_counter(), session.streams, None
        if self._plan.max_seconds is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(max(0.0, self._seconds_left()), self._engine.abort, name)
        result: Result | None = None
        try:
            async with aclosing(self._engine.steps(request, reports_tokens=streams)) as steps:
                async for events in steps:
                    for event in events:
                        result = event.result or result
                        if streams:
                            self._tell_event(event, reader)
        finally:
            if timer is not None:
                timer.cancel()
        if result is None:
            raise _Ended("cancelled")
        if reader is not None and streams:
            self._tell_pieces(reader.finish())
        self._count(result, len(prompt))
        return result, perf_counter() - begun

    def _tell_event(self, event: Event, reader: TurnReader | None) -> None:
        """Tell the piece of a text that an event has."""
        one = event.emitted
        if event.is_thought:
            if event.thought:
                self._tell("thought", event.thought, is_piece=True)
        elif one is not None and reader is not None:
            text = one.text if one.is_stop else token_text(self._context.model, one)
            self._tell_pieces(reader.feed(text))
        elif event.text:
            self._tell("text", event.text, is_piece=True)

    def _tell_pieces(self, events: Sequence[TurnEvent]) -> None:
        for event in events:
            if event.kind in ("content", "thought"):
                kind = "text" if event.kind == "content" else "thought"
                self._tell(kind, event.text, is_piece=True)

    def _count(self, result: Result, n_prompt: int) -> None:
        self._tokens = [*self._tokens, *result.tokens]
        self._exact = self._exact and result.exact
        cached = result.num_cached_tokens
        self._stats.evaluated += n_prompt - cached
        self._stats.cached += cached
        self._stats.reread += max(0, min(self._n_evaluated, n_prompt) - cached)
        self._stats.generated += len(result.tokens)
        self._stats.preemptions += result.num_preemptions
        self._n_evaluated = len(self._tokens) - (result.finish_reason != "stop")

    def _add(self, prompt: Sequence[int], n_lost: int, text: str = "") -> None:
        """Make ``prompt`` the tokens of the path."""
        kept = n_common(self._tokens, prompt)
        if n_lost > 0:
            self._tell("reread", n=n_lost)
        self._n_evaluated = min(self._n_evaluated, kept)
        self._tokens = list(prompt)
        self._tell("prompt", text, tokens=self._tokens[kept:], n=kept, seed=self._start.seed)

    # -- calls ---------------------------------------------------------------------------------------

    async def _call_all(self, turn: Turn) -> list[_Made]:
        """Make the calls of a turn together; return their results in the order of the calls."""
        calls = turn.calls
        try:
            made = await all_done(
                [self._call(turn, call, number) for number, call in enumerate(calls)]
            )
        except _Raised as raised:
            name, error = raised.args
            self._tell("result", str(error), name=name, error="raised")
            told = ToolError(f"{name} raised {type(error).__name__}: {error}")
            told.__cause__ = error
            raise _Ended("error", told) from error
        for call, one in zip(calls, made, strict=True):
            text, error, seconds = one
            self._tell("result", text, name=call.name, call=call.id, error=error, seconds=seconds)
        self._n_failed = self._n_failed + 1 if all(one.error for one in made) else 0
        if self._n_failed >= _MOST_FAILED:
            raise _Ended(
                "error",
                ToolError(
                    f"all calls of {_MOST_FAILED} turns failed; the last: {made[-1].text}",
                    hint="report.steps has all of them",
                ),
            )
        if self._seconds_left() <= 0:
            raise _Ended("time")
        return made

    async def _call(self, turn: Turn, call: ToolCall, number: int) -> _Made:
        """Make one call.

        Raises:
            _Raised: the function raised what the model is not told.
        """
        begun, error = perf_counter(), ""
        try:
            text = await self._result(turn, call, number)
        except Refused as refused:
            text, error = f"error: {refused}", "told"
        return _Made(text, error, perf_counter() - begun)

    async def _result(self, turn: Turn, call: ToolCall, number: int) -> str:
        """Return the result of a call as text; `Refused`: why it failed, for the model to read."""
        tool = self._plan.tools.get(call.name)
        if tool is None:
            raise Refused(f"no function {call.name}; there are {', '.join(self._plan.tools)}")
        key = json.dumps([call.name, call.arguments], sort_keys=True)
        self._made[key] += 1
        if self._made[key] > 1 + self._plan.repeats:
            raise Refused("made already; its result is above")
        arguments = tool.check(call.arguments)
        path = f"{self._start.path}/{self._turn}.{number}"
        if tool.agent is not None:
            return await self._run_agent(cast(Plan, tool.agent), str(arguments["task"]), path)
        if tool.name == FORK and self._plan.forks:
            return await self._run_forks(turn, call, cast("list[str]", arguments["tasks"]), path)
        if self._session.recorded is not None:
            return self._recorded_result(call)
        return await self._run_function(tool, arguments)

    async def _run_function(self, tool: Tool, arguments: Mapping[str, object]) -> str:
        seconds = min(self._plan.tool_seconds, max(0.0, self._seconds_left()))
        function = cast(Callable[..., object], tool.function)

        async def invoke() -> str:
            try:
                if inspect.iscoroutinefunction(function):
                    value = await function(**arguments)
                else:
                    value = await threaded(partial(_listed, function, **arguments))
                    if inspect.isasyncgen(value):
                        value = [item async for item in value]
                    elif inspect.isawaitable(value):
                        value = await cast(Awaitable[object], value)
                if isinstance(value, str):
                    return text_of(value)
                return await threaded(partial(text_of, value))  # it may run an object's own methods
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # an event loop would end with SystemExit, for instance
                if isinstance(error, self._plan.tell):
                    raise Refused(getattr(error, "message", str(error))) from error
                raise _Raised(tool.name, error) from error

        waiting = asyncio.ensure_future(invoke())
        try:
            await asyncio.wait({waiting}, timeout=seconds)
            if not waiting.done():
                raise Refused(f"no result after {seconds:g} s")
        finally:
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait({waiting}, timeout=_LEAVE_S)
        if waiting.cancelled():
            raise _Raised(tool.name, RuntimeError("the function was cancelled"))
        return waiting.result()

    async def _run_agent(self, plan: Plan, task: str, path: str) -> str:
        """Run another agent and return its answer."""
        session, own = self._session, plan.sampling.seed
        seed = seed_of(session.seed if own is None else own, path)
        try:
            messages = asked(plan.messages, task)
            prompt = plan.turns.prompt(messages)
            report = await _Path(session, Start(plan, path, seed, task, messages, prompt)).run()
        except ClosedError:
            raise
        except LlamaBranchError as error:  # the template refuses the task
            raise Refused(error.message) from None
        return self._told(report, plan.name)

    async def _run_forks(self, turn: Turn, call: ToolCall, tasks: Sequence[str], path: str) -> str:
        """Let copies of this path do tasks; return their answers."""
        if self._start.is_fork:
            raise Refused("a fork cannot fork: do it yourself")
        if len(turn.calls) > 1:
            raise Refused(f"{FORK} must be the only call of its turn")
        before, starts = [*self._messages, _answer(turn)], []
        for k, task in enumerate(tasks):
            told = f"You are fork {k + 1} of {len(tasks)}. Do only this: {task}"
            new = [_result(call, told)]
            prompt, n_lost = self._turns.following(self._tokens, before, new, is_turn=True)
            name = f"{path}.{k}"
            starts.append(
                Start(
                    self._plan, name, seed_of(self._session.seed, name), task, [*before, *new], prompt,
                    self._tokens, n_lost, self._turn + 1, self._plan.max_tokens - self._n_left, True,
                )
            )  # fmt: skip
        reports = await self._session.run(starts)
        texts = [
            self._told(report, f"fork {k + 1}", raises=False) for k, report in enumerate(reports)
        ]
        return "\n".join(f"Fork {k + 1}: {text}" for k, text in enumerate(texts))

    @staticmethod
    def _told(report: Report, name: str, *, raises: bool = True) -> str:
        """Return what an agent hears of another one's run."""
        if report.finish_reason in ("stop", "length", "time", "turns") and report.text:
            return report.text
        why = report.error.message if report.error is not None else report.finish_reason
        if raises:
            raise Refused(f"{name} has no answer: {why}")
        return f"no answer: {why}"

    # -- what follows --------------------------------------------------------------------------------

    def _continue(self, turn: Turn, made: Sequence[_Made]) -> None:
        """Add a turn and the results of its calls to the conversation, and begin the next turn."""
        calls, model = turn.calls, self._context.model
        cells = self._context.n_ctx_seq - len(self._tokens) - self._room
        most = min(self._plan.result_tokens, max(16, cells // len(calls) - _AROUND))
        texts = [shortened(model, one.text, most) for one in made]
        before, own = [*self._messages, _answer(turn)], self._tokens

        def following() -> tuple[list[dict[str, object]], list[int], int]:
            new = [_result(call, text) for call, text in zip(calls, texts, strict=True)]
            return [*before, *new], *self._turns.following(own, before, new, is_turn=True)

        if self._turn + 2 >= self._plan.max_turns:
            self._limit = "turns"
        elif self._n_left < self._room:
            self._limit = "length"
        last = f"{texts[-1]}\n{_LAST}"
        texts[-1] = last if self._limit is not None else texts[-1]
        messages, prompt, n_lost = following()
        if self._limit is None and self._context.n_ctx_seq - len(prompt) < self._room:
            self._limit, texts[-1] = "capacity", last
            messages, prompt, n_lost = following()
        self._messages = messages
        self._turn += 1
        if self._n_left < 1:
            raise _Ended("length")
        if self._turn >= self._plan.max_turns:
            raise _Ended("turns")
        self._add(prompt, n_lost)

    async def _answer_typed(self, grammar: Grammar) -> None:
        """Ask for the answer as JSON; once more where the type refuses it."""
        question = _AS_JSON
        schema = json.dumps(json.loads(grammar.source), ensure_ascii=False)
        model = self._context.model
        if len(model.tokenize(schema, add_special=False)) < _MOST_SCHEMA:
            question = _FOLLOWS.format(schema=schema)
        for _ in range(2):
            new: list[dict[str, object]] = [{"role": "user", "content": question}]
            prompt, n_lost = self._turns.following(self._tokens, self._messages, new, is_turn=False)
            self._messages += new
            self._turn += 1
            if self._n_left < 1:
                raise _Ended("length")
            self._add(prompt, n_lost, question)
            thinking = self._begin_thought(False, calls=False)
            result, seconds = await self._generate(grammar, None, thinking)
            self._tell_text(result.text, result, seconds)
            self._text = result.text
            self._messages.append({"role": "assistant", "content": result.text})
            if result.finish_reason != "stop":
                raise _Ended(self._reason(result), result.error)
            refused = self._refused(grammar, result.text)
            if not refused:
                return
            question = refused

    def _refused(self, grammar: Grammar, text: str) -> str:
        """Return what is said of a JSON text that the type refuses; "" if it takes it."""
        if self._session.recorded is not None:  # the journal has no type, but what was said
            later = (s for s in self._recorded() if s.turn > self._turn and s.kind == "prompt")
            return next((s.text for s in later), "")
        try:
            grammar.parse(text)
        except ParseError as error:
            return f"This was refused: {error.message}\nGive the JSON again."
        return ""

    # -- a replay ------------------------------------------------------------------------------------

    def _recorded(self) -> Sequence[Step]:
        return (self._session.recorded or {}).get(self._start.path, ())

    def _recorded_tokens(self, most: int) -> int:
        """Return how many tokens the turn has in the journal, where it was cut."""
        texts = [s for s in self._recorded() if s.kind == "text" and s.turn == self._turn]
        if not texts:
            raise _Ended("cut")
        is_last = not any(
            s.turn > self._turn or s.kind in ("call", "result") for s in self._recorded()
            if s.turn >= self._turn
        )  # fmt: skip
        ends = [s.text for s in self._recorded() if s.kind == "end"]
        return len(texts[0].tokens) if is_last and ends[:1] in (["time"], ["cancelled"]) else most

    def _recorded_result(self, call: ToolCall) -> str:
        for step in self._recorded():
            if step.kind != "result" or step.turn != self._turn:
                continue
            if step.error == "raised":  # the results of others of this turn are not known
                if step.name == call.name:
                    raise _Raised(call.name, RuntimeError(step.text))
                return ""
            if step.call == call.id:
                if step.error:
                    raise Refused(step.text.removeprefix("error: "))
                return step.text
        raise _Ended("cut")


def _listed(function: Callable[..., object], **arguments: object) -> object:
    """Call a function and return its result; of a generator a list."""
    value = function(**arguments)
    return list(value) if inspect.isgenerator(value) else value


def _result(call: ToolCall, text: str) -> dict[str, object]:
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}


def _answer(turn: Turn) -> dict[str, object]:
    """Return a turn as a message; the arguments of its calls are objects, as templates take them."""
    calls = [c if isinstance(c.arguments, dict) else c._replace(arguments={}) for c in turn.calls]
    return answer_message(turn._replace(calls=calls))
