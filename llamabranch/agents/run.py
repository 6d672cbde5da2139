"""One call of an agent: its paths, each a loop of turns, calls and results."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from itertools import count, dropwhile
from time import perf_counter
from typing import cast

from ..engine import AsyncEngine, Event, Request, Result
from ..errors import CacheFullError, ClosedError, LlamaBranchError, ToolError, said, told
from ..generation.thought import token_text
from ..model import Message, chat_messages
from ..model.chat import check_roles
from ..model.shape import asking
from ..model.thoughts import Thinking, ThinkingChoice, plan_thinking
from ..model.tools import ToolCall, Tools
from ..model.turn_format import Turn, TurnEvent, TurnReader
from ..request.openai import answer_message
from ..request.record import Record
from ..sampling.grammar import Grammar
from ..sampling.noise import derive_seed, seed_from_text
from .report import Report, Step
from .threads import all_done, threaded
from .tools import MOST_FORKS, Refused, Settings, Tool, fork, shortened, text_of
from .turns import Messages

_LAST = "That was the last call. Use the results to answer the question."
_LONG_TASK = 200  # a task with more characters is not repeated before the last turn
_ROOM = 256  # tokens and cells kept for the last turn, or an eighth of max_tokens if that is less
_MOST_FAILED = 3  # turns in a row in which all calls failed
_REPEATED = "made already; its result is above"
_AROUND = 64  # tokens that a template writes around a result
_NAMED = re.compile(r'"name"\s*:\s*"([^"\\]{1,64})"')
_numbers = count()
_LEAVE_S = 1.0  # how long a cancelled async tool may take to end


def asked(messages: Messages, task: str) -> list[dict[str, object]]:
    """Return a conversation with a task, which is joined to a user's message at its end."""
    conversation = [dict(message) for message in messages]
    if conversation and conversation[-1]["role"] == "user":  # templates refuse two in a row
        conversation[-1]["content"] = f"{conversation[-1]['content']}\n\n{task}"
        return conversation
    return [*conversation, {"role": "user", "content": task}]


def seed_of(seed: int, path: str) -> int:
    """Return the seed of a path; path "0.0" has ``seed`` itself."""
    return seed if path == "0.0" else derive_seed(seed, seed_from_text(path))


def paths(
    agent: Settings,
    tasks: Sequence[str],
    n: int,
    history: Sequence[Message] | Report | None,
    seed: int,
) -> list[AgentPath]:
    """Return the paths of a call: ``n`` for each task. For ``history`` see `Agent.run`.

    Raises:
        LlamaBranchError: the template refuses a task, or it does not fit into the context.
    """
    agent_paths = []
    most = agent.context.n_ctx_seq
    before, own = _continued(agent, history)
    for i, task in enumerate(tasks):
        messages = asked(before, task)
        prompt = agent.turns.prompt(messages)
        if own:
            prompt = agent.turns.following(own, before, messages[len(before) :], is_turn=False)
        if len(prompt) >= most:
            raise CacheFullError.of_prompt(len(prompt), most)
        for name in (f"{i}.{j}" for j in range(n)):
            agent_paths.append(AgentPath(agent, name, seed_of(seed, name), task, messages, prompt))
    return agent_paths


def _continued(
    agent: Settings, history: Sequence[Message] | Report | None
) -> tuple[list[dict[str, object]], Sequence[int]]:
    """Return the conversation before a task, and its tokens if they are known as the model wrote them.

    Raises:
        ConfigError: ``history`` is neither messages nor a report.
    """
    report = history if isinstance(history, Report) else None
    given = report.messages if report is not None else cast("Sequence[Message]", history)
    checked = [] if given in (None, (), []) else chat_messages(given, "history")
    check_roles(checked, agent.context.model.chat_template or "", "history")
    before = _after(agent.messages, checked)
    # After a limit some messages may not be in a report's tokens.
    if report is None or report.finish_reason != "stop" or before != report.messages:
        return before, ()
    is_ours = cast(Settings, report.agent).context.model is agent.context.model
    return before, report.tokens if is_ours else ()


def _after(
    trunk: list[dict[str, object]], messages: list[dict[str, object]]
) -> list[dict[str, object]]:
    """Return messages with an agent's own before them, unless they begin with these already."""
    if not trunk or not messages:
        return messages or trunk
    (*before, last), n = trunk, len(trunk)
    same = messages[n - 1] if messages[: n - 1] == before and len(messages) >= n else {}
    begins = f"{same.get('content')}".startswith(f"{last['content']}\n\n")
    if same == last or (same.get("role") == last["role"] == "user" and begins):
        return messages
    rest = [*dropwhile(lambda message: message["role"] == "system", messages)]
    if rest and rest[0]["role"] == "user":
        return [*asked(trunk, str(rest[0]["content"])), *rest[1:]]
    return [*trunk, *rest]


@dataclass(eq=False)
class Session:
    """The state that the paths of one call share.

    Attributes:
        engine: the engine that runs their requests.
        seed: the seed of path "0.0"; the seeds of other paths are derived from it.
        listen: gets every step; texts come in pieces.
        steps: all steps so far.
        requests: what each turn so far has cost.
        number: identifies the requests. After a run is cancelled, its requests may end later.
    """

    engine: AsyncEngine
    seed: int
    listen: Callable[[Step], None] | None = None
    steps: list[Step] = field(default_factory=list)
    requests: list[Record] = field(default_factory=list)
    number: str = field(default_factory=lambda: f"agent-{next(_numbers)}")

    def tell(self, step: Step) -> None:
        """Keep a step, and pass it on unless its text has been passed on in pieces."""
        self.steps.append(step)
        if self.listen is not None and step.kind not in ("thought", "text"):
            self.listen(step)

    async def run(self, paths: Sequence[AgentPath]) -> list[Report]:
        """Run paths together and return their reports, in order."""
        return await all_done([path.run(self) for path in paths])


class _Raised(Exception):
    """A function has raised an exception that ends the agent."""


class _Ended(Exception):
    """The path has ended, with this reason."""

    def __init__(self, reason: str, error: LlamaBranchError | None = None) -> None:
        super().__init__(reason)
        self.reason, self.error = reason, error


class AgentPath:
    """An agent's conversation: one sample of a task, a task of a sub-agent, or a fork.

    Args:
        agent: the agent that has the conversation.
        name, seed: its name, and the seed of its turns.
        task: the text that is shown for its first prompt.
        messages: the conversation, up to the message that is answered first.
        prompt: its tokens.
        caller: the path that this one is a fork of.
    """

    def __init__(
        self,
        agent: Settings,
        name: str,
        seed: int,
        task: str,
        messages: Messages,
        prompt: list[int],
        caller: AgentPath | None = None,
    ) -> None:
        self._agent, self._name, self._seed = agent, name, seed
        self._begin = partial(self._add, prompt, task)
        is_long = len(task) > _LONG_TASK
        self._last_words = _LAST if is_long else f"{_LAST} {task}"
        self._turns, self._context = agent.turns, agent.context
        self._messages, self._tokens = [dict(message) for message in messages], list[int]()
        self._is_fork = caller is not None
        self._turn: int = 0 if caller is None else caller._turn + 1
        self._n_left: int = agent.max_tokens if caller is None else caller._n_left
        self._room = min(_ROOM, agent.max_tokens // 8)
        self._calls: list[ToolCall] = []
        self._made: Counter[str] = Counter()
        self._n_failed = 0
        self._text = ""
        self._limit: str | None = None
        self._exact = True

    async def run(self, session: Session) -> Report:
        """Run to the end. If the user's code raises, only this path ends, with "error"."""
        self._session, self._begun = session, perf_counter()
        error: LlamaBranchError | None = None
        try:
            self._begin()
            await self._loop()
            if self._agent.grammar is not None:
                await self._answer_typed(self._agent.grammar)
            reason = "stop"
        except _Ended as ended:
            reason, error = ended.reason, ended.error
        except asyncio.CancelledError:
            self._end("cancelled", None)
            raise
        except ClosedError as closed:
            if not any(record.generated for record in self._requests()):
                raise
            reason, error = "cancelled", closed
        except LlamaBranchError as raised:
            reason, error = "error", raised
        except Exception as raised:  # for example of a user's drafter or logits processor
            reason, error = "error", ToolError(f"{type(raised).__name__}: {said(raised)}")
            error.__cause__ = raised
        return self._end(reason, error)

    def _end(self, reason: str, error: LlamaBranchError | None) -> Report:
        limit = self._limit if reason in ("stop", "cancelled", "error") else reason
        report: Report = Report(
            self._text, reason, self._messages, self._tokens, self._seed, limit, error, self._calls,
            requests=self._requests(), seconds=perf_counter() - self._begun,
            grammar=self._agent.grammar, exact=self._exact, agent=self._agent,
        )  # fmt: skip
        report.choices = [report]
        self._tell("end", reason, error=str(error or ""), seconds=report.seconds, report=report)
        report.steps = [s for s in self._session.steps if f"{s.path}/".startswith(f"{self._name}/")]
        return report

    def _requests(self) -> list[Record]:
        """Return the records of this path, and of the paths inside it."""
        name = f"{self._session.number}/{self._name}/"
        return [record for record in self._session.requests if record.id.startswith(name)]

    def _step(self, kind: str, text: str = "", **more: object) -> Step:
        return Step(kind, text, self._agent.name, self._name, self._turn, **more)  # type: ignore[arg-type]

    def _tell(self, kind: str, text: str = "", **more: object) -> None:
        self._session.tell(self._step(kind, text, **more))

    def _tell_piece(self, kind: str, text: str, event: Event | None) -> None:
        if text and self._session.listen is not None:
            of = {} if event is None else {"token": event.token, "logprob": event.logprob}
            self._session.listen(self._step(kind, text, **of))

    # -- turns ---------------------------------------------------------------------------------------

    async def _loop(self) -> None:
        """Run turns until one has no call.

        Raises:
            _Ended: a limit or an error has ended it before.
        """
        turns, is_first = self._turns, not self._is_fork
        if self._agent.max_turns - self._turn <= 1 and not (is_first and turns.forced):
            self._limit = "turns" if turns.others.is_used else None
        while self._limit is None:
            forced = turns.forced if is_first else None
            tools = turns.first if forced is not None else turns.others
            turn = await self._write(
                forced or turns.free, tools if tools.is_used else None, self._agent.thinking
            )
            is_first = False
            if not turn.calls and tools.is_used and turns.looks_like_call(turn.content):
                raise _Ended("error", ToolError("the answer looks like a call, but cannot be read"))
            self._messages.append(_answer(turn))
            if not turn.calls:
                return
            for call in turn.calls:
                arguments = json.dumps(call.arguments, ensure_ascii=False)
                self._tell("call", arguments, name=call.name, call=call.id)
            self._calls += turn.calls
            self._continue(turn.calls, await self._call_all(turn.calls))
        await self._answer_last()

    async def _answer_last(self) -> None:
        """Let the model write the last turn, and make sure that no call counts as the answer.

        No grammar forbids calls, because it would bend a call into an answer that looks like one.
        If the model calls anyway, it writes the turn again, with a prompt without the functions, as
        for ``tool_choice="none"``. If the first turn is the last, it has that prompt from the start.

        Raises:
            _Ended: the model calls with that prompt too.
        """
        for has_tools in (True, False) if self._turn else (False,):
            if not has_tools:
                self._add(self._turns.prompt(self._messages, has_tools=False))
            turn = await self._write(None, self._turns.others, self._agent.thinking)
            if not turn.calls and not self._turns.looks_like_call(turn.content):
                self._messages.append(_answer(turn))
                return
            if self._n_left < 1:
                raise _Ended("length")
        raise _Ended(self._limit or "turns")

    async def _write(
        self, grammar: Grammar | None, tools: Tools | None, thinking: ThinkingChoice
    ) -> Turn:
        """Let the model write a turn, and report its parts.

        Args:
            grammar: the grammar of the turn.
            tools: the tools that it may call; None = no text is read as a call.
            thinking: see `Agent`.
        """
        model, salt = self._context.model, f"{self._name}/{self._turn}"
        prompt, plan = plan_thinking(model, self._tokens, thinking, has_calls=tools is not None)
        if len(prompt) > len(self._tokens):  # a thought is opened or closed
            self._add(prompt)
        reader = None if tools is None else tools.reader(salt=salt)
        result, seconds = await self._generate(grammar, reader, plan)
        if tools is not None:
            result.note_written(model)
        turn = result.turn_with(tools, salt)
        if tools is not None and not turn.calls:
            turn = self._unknown_calls(turn, salt)
        if turn.thought:
            self._tell("thought", turn.thought)
        self._tell("text", turn.content, seconds=seconds)
        self._text = turn.content.strip()
        if result.finish_reason != "stop":
            self._messages.append({"role": "assistant", "content": turn.content})
            raise _Ended(self._reason(result), result.error)
        return turn

    def _unknown_calls(self, turn: Turn, salt: str) -> Turn:
        """Return the turn. If its text has only calls of unknown functions, add these calls."""
        unknown = set(_NAMED.findall(turn.content)) - self._agent.tools.keys()
        named = [{"type": "function", "function": {"name": name}} for name in sorted(unknown)]
        if not named:
            return turn
        known = Tools([*self._turns.others.given, *named], turns=self._turns.form)
        other = known.read(turn.content, salt=salt)
        if not other.calls or other.content.strip():
            return turn
        return Turn(turn.thought, "", other.calls)

    def _reason(self, result: Result) -> str:
        """Return why the path ends, from the result of its last request."""
        if result.finish_reason == "cancelled" and self._seconds_left() <= 0:
            return "time"
        return "error" if result.finish_reason == "constraint" else result.finish_reason

    def _seconds_left(self) -> float:
        most = self._agent.max_seconds
        return float("inf") if most is None else most - (perf_counter() - self._begun)

    async def _generate(
        self, grammar: Grammar | None, reader: TurnReader | None, thinking: Thinking | None
    ) -> tuple[Result, float]:
        """Continue the tokens; return the result and the seconds that it took."""
        session, prompt, n_cells = self._session, self._tokens, self._context.n_ctx_seq
        if len(prompt) >= n_cells:
            raise _Ended("capacity", CacheFullError.of_prompt(len(prompt), n_cells))
        if self._seconds_left() <= 0:
            raise _Ended("time")
        name = f"{session.number}/{self._name}/{self._turn}"
        request = Request(
            prompt,
            id=name,
            max_tokens=self._n_left,
            grammar=grammar,
            sampling=self._agent.sampling.replace(seed=self._seed),
            priority=-self._turn,
            thinking=thinking,
            session_id=f"{session.number}/{self._name}",
        )
        begun, timer, engine = perf_counter(), None, session.engine
        streams = session.listen is not None
        if self._agent.max_seconds is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(max(0.0, self._seconds_left()), engine.abort, name)
        result: Result | None = None
        try:
            async with aclosing(engine.steps(request, reports_tokens=streams)) as steps:
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
        self._count(result)
        return result, perf_counter() - begun

    def _tell_event(self, event: Event, reader: TurnReader | None) -> None:
        """Report the piece of text in an event."""
        produced = event.emitted
        if event.is_thought:
            self._tell_piece("thought", event.thought, event)
        elif produced is not None and reader is not None:
            text = produced.text if produced.is_stop else token_text(self._context.model, produced)
            self._tell_pieces(reader.feed(text), event)
        else:
            self._tell_piece("text", event.text, event)

    def _tell_pieces(self, pieces: Sequence[TurnEvent], event: Event | None = None) -> None:
        for piece in pieces:
            if piece.kind in ("content", "thought"):
                self._tell_piece(
                    "text" if piece.kind == "content" else "thought", piece.text, event
                )

    def _count(self, result: Result) -> None:
        self._tokens = [*self._tokens, *result.tokens]
        self._exact = self._exact and result.exact
        self._n_left -= result.generated
        if result.record is not None:
            self._session.requests.append(result.record)

    def _add(self, prompt: Sequence[int], text: str = "") -> None:
        """Make ``prompt`` the tokens of the path."""
        self._tokens = list(prompt)
        self._tell("prompt", text)

    # -- calls ---------------------------------------------------------------------------------------

    async def _call_all(self, calls: Sequence[ToolCall]) -> list[Step]:
        """Make the calls of a turn together; return their results in the order of the calls."""
        try:
            results = await all_done(
                [self._call(calls, call, number) for number, call in enumerate(calls)]
            )
        except _Raised as raised:
            name, error = raised.args
            text = said(error)
            self._tell("result", text, name=name, error="raised")
            tool_error = ToolError(
                ": ".join(filter(None, (f"{name} raised {type(error).__name__}", text)))
            )
            tool_error.__cause__ = error
            raise _Ended("error", tool_error) from error
        for step in results:
            self._session.tell(step)
        self._n_failed = self._n_failed + 1 if all(step.error for step in results) else 0
        if self._n_failed >= _MOST_FAILED:
            if any(step.text != f"error: {_REPEATED}" for step in results):
                why = f"all calls of {_MOST_FAILED} turns failed; the last: {results[-1].text}"
                raise _Ended("error", ToolError(why, hint="report.steps has all of them"))
            self._limit = "repeats"  # it has the results already, so the next turn is the last
        return results

    async def _call(self, calls: Sequence[ToolCall], call: ToolCall, number: int) -> Step:
        """Make one call, and return its result.

        Raises:
            _Raised: the function raised an exception that the model does not see.
        """
        begun, error = perf_counter(), ""
        try:
            text = await self._result(calls, call, number)
        except Refused as refused:
            text, error = f"error: {refused}", "told"
        seconds = perf_counter() - begun
        return self._step(
            "result", text, name=call.name, call=call.id, error=error, seconds=seconds
        )

    async def _result(self, calls: Sequence[ToolCall], call: ToolCall, number: int) -> str:
        """Return the result of a call as text; `Refused`: why it failed, for the model to read."""
        agent, tool = self._agent, self._agent.tools.get(call.name)
        if tool is None:
            raise Refused(f"no function {call.name}; there are {', '.join(agent.tools)}")
        key = json.dumps([call.name, call.arguments], sort_keys=True)
        self._made[key] += 1
        if self._made[key] > 1 + agent.repeats:
            raise Refused(_REPEATED)
        arguments = tool.check(call.arguments)
        path = f"{self._name}/{self._turn}.{number}"
        if tool.agent is not None:
            return await self._run_agent(tool.agent, str(arguments["task"]), path)
        if agent.forks and call.name == fork.__name__:
            if len(calls) > 1:
                raise Refused(f"{call.name} must be the only call of its turn")
            return await self._run_forks(call, cast("list[str]", arguments["tasks"]), path)
        return await self._run_function(tool, arguments)

    async def _run_function(self, tool: Tool, arguments: Mapping[str, object]) -> str:
        seconds = min(self._agent.tool_seconds, max(0.0, self._seconds_left()))
        function = tool.function

        async def invoke() -> str:
            try:
                if inspect.iscoroutinefunction(function):
                    value = await function(**arguments)
                else:
                    value = await threaded(partial(function, **arguments))
                while inspect.isawaitable(value):
                    value = await value
                return await threaded(partial(text_of, value))
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # an event loop would end with SystemExit, for instance
                if isinstance(error, self._agent.tell):
                    raise Refused(told(error)) from error
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

    async def _run_agent(self, agent: Settings, task: str, path: str) -> str:
        """Run another agent and return its answer."""
        session = self._session
        seed = seed_of(agent.sampling.drawn_seed(session.seed), path)
        try:
            messages = asked(agent.messages, task)
            prompt = agent.turns.prompt(messages)
            report = await AgentPath(agent, path, seed, task, messages, prompt).run(session)
        except ClosedError:
            raise
        except LlamaBranchError as error:  # the template refuses the task
            raise Refused(error.message) from None
        return self._told(report, agent.name)

    async def _run_forks(self, call: ToolCall, tasks: Sequence[str], path: str) -> str:
        """Let copies of this path do tasks; return their answers."""
        if self._is_fork:
            raise Refused("a fork cannot fork: do it yourself")
        if not isinstance(tasks, list) or not 1 <= len(tasks) <= MOST_FORKS:
            raise Refused(f"tasks must be a list of 1 to {MOST_FORKS} texts")
        forks = []
        for k, task in enumerate(tasks):
            new = [_result(call, f"You are fork {k + 1} of {len(tasks)}. Do only this: {task}")]
            prompt = self._turns.following(self._tokens, self._messages, new, is_turn=True)
            name, messages = f"{path}.{k}", [*self._messages, *new]
            seed = seed_of(self._session.seed, name)
            forks.append(AgentPath(self._agent, name, seed, task, messages, prompt, self))
        reports = await self._session.run(forks)
        texts = [
            self._told(report, f"fork {k + 1}", raises=False) for k, report in enumerate(reports)
        ]
        return "\n".join(f"Fork {k + 1}: {text}" for k, text in enumerate(texts))

    @staticmethod
    def _told(report: Report, name: str, *, raises: bool = True) -> str:
        """Return the result of a run as text for the agent that called it."""
        if report.finish_reason in ("stop", "length", "time", "turns", "repeats") and report.text:
            return report.text
        why = report.error.message if report.error is not None else report.finish_reason
        if raises:
            raise Refused(f"{name} has no answer: {why}")
        return f"no answer: {why}"

    # -- the next turn -----------------------------------------------------------------------------

    def _continue(self, calls: Sequence[ToolCall], results: Sequence[Step]) -> None:
        """Add the results of calls to the conversation, and begin the next turn."""
        n_cells = self._context.n_ctx_seq
        cells = n_cells - len(self._tokens) - self._room
        most = min(self._agent.result_tokens, max(16, cells // len(calls) - _AROUND))
        texts = [shortened(self._context.model, step.text, most) for step in results]

        def following() -> tuple[list[dict[str, object]], list[int]]:
            new = [_result(call, text) for call, text in zip(calls, texts, strict=True)]
            return new, self._turns.following(self._tokens, self._messages, new, is_turn=True)

        if self._turn + 2 >= self._agent.max_turns:
            self._limit = "turns"
        elif self._n_left < self._room:
            self._limit = "length"
        last = f"{texts[-1]}\n{self._last_words}"
        texts[-1] = last if self._limit is not None else texts[-1]
        new, prompt = following()
        if self._limit is None and n_cells - len(prompt) < self._room:
            self._limit, texts[-1] = "capacity", last
            new, prompt = following()
        self._messages += new
        self._turn += 1
        if self._n_left < 1:
            raise _Ended("length")
        if self._turn >= self._agent.max_turns:
            raise _Ended("turns")
        self._add(prompt)

    async def _answer_typed(self, grammar: Grammar) -> None:
        """Ask for the answer as JSON, and ask again if the type refuses it."""
        question = asking(json.loads(grammar.source))
        for _ in range(2):
            new: list[dict[str, object]] = [{"role": "user", "content": question}]
            prompt = self._turns.following(self._tokens, self._messages, new, is_turn=False)
            self._messages += new
            self._turn += 1
            if self._n_left < 1:
                raise _Ended("length")
            self._add(prompt, question)
            turn = await self._write(grammar, None, False)
            self._messages.append(_answer(turn))
            refused = _refused(grammar, turn.content)
            if not refused:
                return
            question = refused


def _refused(grammar: Grammar, text: str) -> str:
    """Return the message for a JSON text that the type refuses, or "" if it accepts the text."""
    try:
        grammar.parse(text)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a validator may raise SystemExit
        return f"This was refused: {told(error)}\nGive the JSON again."
    return ""


def _result(call: ToolCall, text: str) -> dict[str, object]:
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}


def _answer(turn: Turn) -> dict[str, object]:
    """Return a turn as a message; the arguments of its calls are objects, as templates take them."""
    calls = [c if isinstance(c.arguments, dict) else c._replace(arguments={}) for c in turn.calls]
    return answer_message(turn._replace(calls=calls))
