"""Repeat a run from its journal, with the recorded results instead of the functions."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from msgspec.structs import replace

from ..arguments import whole
from ..context import Context
from ..context.context import text_context
from ..context.prefix_cache import n_common
from ..engine import AsyncEngine
from ..errors import ConfigError, LlamaBranchError, ParseError
from ..files import path_of
from ..sampling import SamplingParams
from .agent import Agent, conduct
from .journal import Recorded, read
from .report import AgentStats, Report, Step
from .threads import event_loop
from .tools import Tool

__all__ = ["replay"]


def replay(
    path: str | os.PathLike[str], target: Context | AsyncEngine, *, run: int = -1
) -> Iterator[Step]:
    """Repeat a run from its journal, with the recorded results, and yield its steps.

    A journal that was cut gives the steps up to the cut.

    Args:
        path: the journal.
        target: as for `Agent`, of the same model.
        run: which of the runs in the file, counted from 0; -1 is the last.

    Yields:
        The steps of the journal, once the run has ended. In a context that is not batch-invariant, a
        path whose tokens differ ends there, with a step "differs".

    Raises:
        ConfigError: the file cannot be read, or is of another model.
        ParseError: it is no journal, or is damaged; or, in a batch-invariant context, a token differs.
    """
    context = target.engine.target if isinstance(target, AsyncEngine) else target
    text_context("target", context)
    try:
        data = path_of(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    runs = read(data, path)
    recorded = runs[whole("run", run, -len(runs), len(runs) - 1)]
    if recorded.head.get("fingerprint") != context.model.fingerprint:
        raise ConfigError(
            f"{path} is of another model: {recorded.head.get('model')!r:.80}, not {context.model.name!r}",
            hint="open the context with that model",
        )
    steps = _again(recorded, target, context)
    return iter(steps)


class _Differs(Exception):
    """A step differs from the recorded one."""


def _agent(target: Context | AsyncEngine, description: object) -> Agent:
    """Return the agent that a head describes. Its functions have names but cannot be called."""
    arguments = dict(cast("dict[str, object]", description))
    tools: list[object] = []
    for tool in cast("list[dict[str, dict[str, object]]]", arguments.pop("tools")):
        is_agent = "agent" in tool
        tools.append(_agent(target, tool["agent"]) if is_agent else Tool(tool["function"]))
    sampling = SamplingParams.from_dict(cast("dict[str, object]", arguments["sampling"]))
    # The journal shows where a path ran out of time, so no clock is needed.
    arguments |= {"tools": tools, "sampling": sampling, "max_seconds": None}
    return Agent(target, **arguments)  # type: ignore[arg-type]


def _again(recorded: Recorded, target: Context | AsyncEngine, context: Context) -> list[Step]:
    head = recorded.head
    try:
        agent = _agent(target, head["agent"])
        after = _report(head.get("after"), agent)
        tasks, n = cast("list[str]", head["tasks"]), cast(int, head["n"])
        seed = whole("seed", head["seed"])
    except (KeyError, TypeError, ValueError, AttributeError, LlamaBranchError) as error:
        raise ParseError(f"the head of the journal is damaged: {error}") from None
    is_same = head.get("kv_type") == context.kv_type and head.get("exact") is True
    is_exact = is_same and context.capabilities.batch_invariant
    repeated: list[Step] = []
    left = {name: deque(steps) for name, steps in recorded.steps.items()}
    differs: set[str] = set()

    def listen(step: Step) -> None:
        expected = left.get(step.path)
        if any(step.path == path or step.path.startswith(f"{path}/") for path in differs):
            return
        if not expected:
            return  # a step after the end of the journal
        if step.kind == "end" and step.text == "cut" and all(s.kind == "result" for s in expected):
            repeated.extend(expected)  # the results before the missing one
            expected.clear()
            return
        known = expected.popleft()
        if _same(step, known):
            repeated.append(known)
            return
        where = f"the {known.kind} of turn {known.turn} of path {known.path}"
        at = n_common(step.tokens, known.tokens)
        is_cut = at == min(len(step.tokens), len(known.tokens))
        text = f"{where} differs" + ("" if is_cut else f" from its token {at} on")
        if is_exact:
            raise _Differs(text, step.text)
        differs.add(step.path)
        repeated.append(Step("differs", text, step.agent, step.path, step.turn))

    try:
        with event_loop() as call:
            call(conduct(agent, tasks, n, after, listen, seed=seed, recorded=recorded.steps))
    except _Differs as error:
        raise ParseError(error.args[0], text=error.args[1]) from None
    return repeated


def _same(step: Step, known: Step) -> bool:
    if known.kind == "end" and known.text in ("time", "cancelled"):
        return step.kind == "end"
    return replace(step, error="") == replace(known, error="")


def _report(description: object, agent: Agent) -> Report | None:
    """Return the parts of a report that a run needs to continue after it."""
    if not isinstance(description, Mapping):
        return None
    messages = cast("list[dict[str, object]]", description.get("messages"))
    tokens = cast("Sequence[int]", description.get("tokens"))
    reason = str(description.get("finish_reason"))
    return Report("", reason, messages, list(tokens), 0, AgentStats(), agent=agent)
