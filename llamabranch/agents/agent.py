"""An agent: its settings, and the four ways to run it."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Generic, cast, overload

from typing_extensions import TypeVar, Unpack

from ..arguments import bounded, flag, instance, items, placed, shown, whole
from ..context import Context
from ..context.context import text_context
from ..engine import AsyncEngine
from ..errors import (
    ClosedError,
    ConfigError,
    GrammarError,
    ToolError,
    UnsupportedError,
)
from ..model import Message, chat_messages
from ..model.thoughts import ThinkingChoice, plan_thinking, thinking_budget
from ..model.tools import Tools
from ..sampling import SamplingParams, SamplingSettings
from ..sampling.grammar import Grammar
from ..sampling.params import check_names, settings_of
from .report import Report, Step
from .run import Session, asked, paths
from .threads import event_loop, threaded
from .tools import Settings, Tool, agent_tool, fork_tool, tool_of
from .turns import Turns

T = TypeVar("T", default=object)
Tasks = list[str] | tuple[str, ...]
History = Sequence[Message] | Report | None
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_MOST_SAMPLES = 1000
_LEAST_S = 0.001  # a limit of seconds


class Agent(Settings, Generic[T]):
    """A model that does tasks in turns. It may call functions and read their results before it answers.

    Several tasks, samples, sub-agents and forks run together on one context; the common beginning of
    their prompts is processed once. In an exact context, with the same seed and equal results of
    the functions, a run gives the same text, whatever else is running.

    An agent never changes and keeps nothing between two runs, so any thread may use it.

    Args:
        target: a context, on which each call opens and closes an `AsyncEngine`; or a running
            `AsyncEngine`. The agent opens the context's prefix cache. If the context was loaded with
            ``prefix_cache=False``, every turn reads its conversation again.
        messages: the beginning of every conversation: messages, or a text, which is the system message.
            If it ends with a user's message, the task is appended to that, after an empty line.
        tools: functions with annotated parameters, sync or async, bound methods, and other agents. The
            name and the docstring tell the model what a function does, and ``Args:`` what its parameters
            are. An agent is a function ``name(task)``, described by its ``about``; it runs on the engine
            of its caller.
        output: the type of the answer: a pydantic model, or anything that `Grammar.from_json_schema`
            takes. After its answer the agent is asked to repeat it as JSON; ``report.parsed`` is an
            instance of the type.
        name, about: its name and description if it is a tool of another agent.
        tool_choice: for the first turn: "auto", "required", "none", or the name of a function.
        parallel_tool_calls: whether a turn may have several calls.
        max_turns: the maximum number of turns of a task. The last one has no calls.
        max_tokens: the maximum number of tokens of a task, over all its turns.
        max_seconds: the time limit of a task in seconds; None = no limit. The text so far is kept.
        tool_seconds: the time limit of a function in seconds. If it takes longer, the model reads an
            error. The function's thread cannot be stopped and continues.
        result_tokens: the limit of a result that the model reads, in tokens. A longer one is cut in its
            middle: the model reads three quarters of this from its beginning, and the rest from its end.
        thinking: False = the model does not think before it answers; True = it does; a number = the most
            tokens of a thought; None = the default of its template.
        forks: offer the model a function ``fork(tasks)``: copies of the agent continue from everything
            that it has read and do one task each, and it gets their answers.
        tell: exceptions whose text the model reads, as it does for ToolError. Any other exception of a
            function ends the agent.
        repeats: how often the same call may be repeated.
        sampling: settings. Without a seed each run has a random one.
        settings: fields of `SamplingParams` by name, which override ``sampling``.

    Raises:
        ConfigError: a bad value, two tools with the same name, or parameters that cannot be described.
        UnsupportedError: the model has no chat template.
        ClosedError: the context is closed.
    """

    def __init__(
        self,
        target: Context | AsyncEngine,
        messages: str | Sequence[Message] = (),
        tools: Sequence[Callable[..., object] | Agent] = (),
        output: type[T] | None = None,
        *,
        name: str = "agent",
        about: str = "",
        tool_choice: str = "auto",
        parallel_tool_calls: bool = True,
        max_turns: int = 8,
        max_tokens: int = 2048,
        max_seconds: float | None = None,
        tool_seconds: float = 60.0,
        result_tokens: int = 1024,
        thinking: ThinkingChoice = None,
        forks: bool = False,
        tell: type[Exception] | tuple[type[Exception], ...] = ToolError,
        repeats: int = 2,
        sampling: SamplingParams | None = None,
        **settings: Unpack[SamplingSettings],
    ) -> None:
        context = target.engine.target if isinstance(target, AsyncEngine) else target
        text_context("target", context)
        if context.closed:
            raise ClosedError("the context is closed")
        if context.model.chat_template is None:
            raise UnsupportedError(
                f"{context.model.name} has no chat template: it was not trained on conversations",
                hint='lb.load("smollm2-135m:Q8_0") has one; load(..., chat_template=...) gives one',
            )
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                f"a name has letters, digits, _ and -, at most 64, not {shown(name):.70}"
            )
        check_names(settings, _PARAMETERS)
        flag("forks", forks)
        flag("parallel_tool_calls", parallel_tool_calls)
        thinking_budget(thinking)  # a bad value is refused now
        self.target, self.context = target, context
        if isinstance(messages, str):
            messages = [("system", messages)] if messages else ()
        self.messages = [] if messages in ((), []) else chat_messages(messages)
        self.tools = _known(tools, context, forks=forks)
        self.grammar, self.name = _output(output), name
        self.about = instance("about", about, str)
        self.tool_choice, self.parallel_tool_calls = tool_choice, parallel_tool_calls
        self.max_turns = whole("max_turns", max_turns, 1)
        self.max_tokens = whole("max_tokens", max_tokens, 1)
        self.tool_seconds = bounded("tool_seconds", tool_seconds, _LEAST_S, math.inf)
        if max_seconds is not None:
            max_seconds = bounded("max_seconds", max_seconds, _LEAST_S, math.inf)
        self.max_seconds = max_seconds
        self.result_tokens = whole("result_tokens", result_tokens, 16)
        self.thinking, self.forks, self.tell = thinking, forks, _told(tell)
        self.repeats = whole("repeats", repeats, 0)
        self.sampling = settings_of(sampling, **settings)
        described, model = [tool.described for tool in self.tools.values()], context.model
        known = Tools(described, tool_choice, model.turn_format, parallel=parallel_tool_calls)
        turns = Turns(model, known, thinking)
        try:
            _ = turns.free, turns.forced
        except GrammarError as error:
            raise ConfigError(f"tools: {error.message}", hint=error.hint) from None
        prompt = turns.prompt(asked(self.messages, "x"))  # the template may refuse it
        plan_thinking(model, prompt, thinking, has_calls=bool(self.tools))
        context.keep_prefixes(always=context.params.prefix_cache is not False)
        self.turns = turns

    def __setattr__(self, name: str, value: object) -> None:
        if "turns" in self.__dict__:
            raise AttributeError(f"an Agent cannot be changed: make a new one with another {name}")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        names = ", ".join(self.tools) or "no tools"
        return f"<Agent {self.name!r} with {self.context.model.name!r}: {names}>"

    # -- four ways to run it -----------------------------------------------------------------------

    @overload
    def run(self, task: str, n: int = 1, history: History = ()) -> Report[T]: ...
    @overload
    def run(self, task: Tasks, n: int = 1, history: History = ()) -> list[Report[T]]: ...
    def run(
        self, task: str | Tasks, n: int = 1, history: History = ()
    ) -> Report[T] | list[Report[T]]:
        """Do a task, or several at the same time, and return a report, or a list of reports.

        The agent runs on an event loop in a thread of its own, so this also works inside a running event
        loop. Ctrl-C cancels it.

        Args:
            task: what to do; a list gives a list of reports.
            n: how many samples of each task, with different seeds: ``report.choices``.
            history: the conversation that the task continues: a report of any agent, or messages, such
                as the ``messages`` of a report that were kept in a file. The agent's own messages come
                first, unless the history begins with them; a system message of another agent is left
                out. Tokens that are still in the cache are not read again; ``report.requests`` says
                which ones were, and why.

        Raises:
            CacheFullError: a task does not fit into the context; nothing was run.
            ConfigError: a bad argument, or the template refuses a task.
            ClosedError: the context or the engine is closed.
            DecodeError: see `AsyncEngine.generate`.
        """
        with event_loop() as call:
            answer: Coroutine[None, None, Report[T] | list[Report[T]]] = self.arun(task, n, history)
            return call(answer)

    @overload
    async def arun(self, task: str, n: int = 1, history: History = ()) -> Report[T]: ...
    @overload
    async def arun(self, task: Tasks, n: int = 1, history: History = ()) -> list[Report[T]]: ...
    async def arun(
        self, task: str | Tasks, n: int = 1, history: History = ()
    ) -> Report[T] | list[Report[T]]:
        """Do the same as ``run``, on the running event loop.

        Cancelling it aborts its requests, cancels its async functions, and frees its sequences.

        Raises:
            LlamaBranchError: as ``run``.
        """
        reports = cast("list[Report[T]]", (await conduct(self, task, n, history))[::n])
        if isinstance(task, str):
            return reports[0]
        return reports

    def stream(self, task: str | Tasks, n: int = 1, history: History = ()) -> Iterator[Step]:
        """Do the same as ``run``, and yield steps as they happen; closing the iterator cancels it.

        Thoughts and texts come in pieces, as they are written. The step "end" of a path has its
        ``report``.

        Raises:
            LlamaBranchError: as ``run``.
        """
        steps = self.astream(task, n, history)

        async def following() -> Step | None:
            return await anext(steps, None)

        with event_loop() as call:
            while (step := call(following())) is not None:
                yield step

    async def astream(
        self, task: str | Tasks, n: int = 1, history: History = ()
    ) -> AsyncGenerator[Step, None]:
        """Do the same as ``stream``, on the running event loop.

        Raises:
            LlamaBranchError: as ``run``.
        """
        ready: asyncio.Queue[Step | None] = asyncio.Queue()
        running = asyncio.ensure_future(conduct(self, task, n, history, ready.put_nowait))
        running.add_done_callback(lambda _: ready.put_nowait(None))
        try:
            while (step := await ready.get()) is not None:
                yield step
            await running
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await running


async def conduct(
    agent: Agent[T],
    task: str | Tasks,
    n: int,
    history: History,
    listen: Callable[[Step], None] | None = None,
) -> list[Report]:
    """Run all samples of all tasks, and return their reports.

    Args:
        agent, task, n, history: as for `Agent.run`.
        listen: called with each step; texts come in pieces. None = report no steps.

    Raises:
        LlamaBranchError: see `Agent.run`.
    """
    context, target, tasks = agent.context, agent.target, _tasks(task)
    n = whole("n", n, 1, _MOST_SAMPLES)
    if context.closed:
        raise ClosedError("the context is closed")
    seed = agent.sampling.drawn_seed()
    begun = await threaded(partial(paths, agent, tasks, n, history, seed))
    async with AsyncExitStack() as opened:
        engine = target
        if isinstance(engine, Context):
            engine = await opened.enter_async_context(AsyncEngine(engine, max_tokens=None))
        reports = await Session(engine, seed, listen).run(begun)
    for at, report in enumerate(reports):
        report.choices = reports[at - at % n : at - at % n + n]
    return reports


# -- arguments ---------------------------------------------------------------------------------------


def _known(tools: object, context: Context, *, forks: bool) -> dict[str, Tool]:
    """Return tools by name.

    Raises:
        ConfigError: it is not a list of functions and agents, or two have the same name.
    """
    given: list[object] = items("tools", cast(Sequence[object], tools))
    by_name: dict[str, Tool] = {}
    for index, item in enumerate([*given, fork_tool()] if forks else given):
        with placed(f"tools[{index}]"):
            if isinstance(item, Tool):  # the fork
                tool = item
            elif isinstance(item, Agent):
                if item.context is not context:
                    raise ConfigError(
                        f"the agent {item.name!r} has another context",
                        hint="an agent among the tools runs where its caller runs: give it that target",
                    )
                tool = agent_tool(item)
            elif callable(item):
                tool = tool_of(item)
            else:
                raise ConfigError(
                    f"a tool must be a function or an Agent, not {shown(item):.60}",
                    hint="give the function itself: tools=[weather]",
                )
            if tool.name in by_name:
                hint = "forks=True adds the tool fork" if forks else None
                raise ConfigError(f"two tools have the name {tool.name!r}", hint=hint)
        by_name[tool.name] = tool
    return by_name


def _output(output: object) -> Grammar | None:
    """Return the grammar of answers of a type."""
    try:
        return None if output is None else Grammar.from_json_schema(cast(type, output))
    except GrammarError as error:
        raise ConfigError(f"output: {error.message}", hint=error.hint) from None


def _told(tell: object) -> tuple[type[BaseException], ...]:
    kinds = tell if isinstance(tell, tuple) else (tell,)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise ConfigError(
                f"tell must be a class of exceptions, or several, not {shown(tell):.60}",
                hint="tell=(ToolError, LookupError)",
            )
    return (ToolError, *cast("tuple[type[Exception], ...]", kinds))


def _tasks(task: str | Tasks) -> list[str]:
    tasks = [task] if isinstance(task, str) else items("the tasks", task)
    if not tasks or not all(isinstance(text, str) and text.strip() for text in tasks):
        raise ConfigError(f"a task must be a text that is not empty, not {shown(task):.60}")
    return tasks


_PARAMETERS = tuple(Agent.__init__.__annotations__)
