"""Agents: turns, calls and results, refused input, limits, and what is left after a run."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import re
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import pytest
import toys
from pydantic import AfterValidator, Field
from scripts import call
from stages import (
    CONTROL,
    RELEASED,
    Number,
    Sum,
    add,
    assert_left_alone,
    fails,
    gives,
    hangs,
    long,
    name,
    sleeps,
)

import llamabranch as lb
from llamabranch import Agent, AsyncEngine, Context
from llamabranch.agents import Report, Step
from llamabranch.agents.agent import conduct
from llamabranch.agents.threads import event_loop
from llamabranch.agents.tools import Refused, tool_of
from llamabranch.errors import (
    CacheFullError,
    ClosedError,
    ConfigError,
    ParseError,
    ToolError,
    UnsupportedError,
)


def kinds(steps: Iterable[Step]) -> str:
    return " ".join(step.kind for step in steps)


def results(report: Report) -> list[str]:
    """The result that the model read for each call."""
    return [str(m["content"]) for m in report.messages if m["role"] == "tool"]


def above_five(b: int) -> int:
    if b <= 5:
        raise ValueError("it must be above 5")
    return b


def read_by(ctx: Context, report: Report) -> str:
    return ctx.detokenize(report.tokens, special=True)


CALLED = "prompt text call result prompt text end"


@pytest.fixture
def small(scripted: lb.Model) -> Iterator[Context]:
    """A context of that model with little room."""
    with lb.Context(scripted, n_ctx=1024, n_threads=1, exact=True) as ctx:
        yield ctx


# -- a run -----------------------------------------------------------------------------------------


def test_a_call_is_made_and_its_result_is_read(stage: Context) -> None:
    agent = Agent(stage, "Add numbers.", [add], seed=1)
    report = agent.run("one: what is 1 + 2?")
    assert report.text == "It is three." and report.finish_reason == "stop"
    assert [(c.name, c.arguments) for c in report.calls] == [("add", {"a": 1, "b": 2})]
    assert kinds(report.steps) == CALLED
    roles = [str(message["role"]) for message in report.messages]
    assert " ".join(roles) == "system user assistant tool assistant"
    assert "<|tool|>3<|end|>" in read_by(stage, report)
    assert report.seed == 1 and report.limit is None and report.error is None
    assert report.choices == [report] and report.exact
    assert len(report.calls[0].id) == 9


def test_calls_of_a_turn_run_together_and_results_keep_their_order(stage: Context) -> None:
    """The first call returns only after the second has begun."""
    begun = threading.Event()

    def add(a: int, b: int) -> int:
        """Add."""
        assert begun.wait(30)
        return a + b

    async def name() -> str:
        """Tell a name."""
        begun.set()
        return "Ida"

    report = Agent(stage, tools=[add, name]).run("two: go")
    assert results(report) == ["3", "Ida"]
    assert report.messages[1]["content"] == "Let me see."
    assert report.text == "Both are here."


def test_a_bound_method_and_the_callers_context_variables(stage: Context) -> None:
    from contextvars import ContextVar

    user = ContextVar("user", default="nobody")

    class Shop:
        def __init__(self) -> None:
            self.seen: list[tuple[int, str]] = []

        def add(self, a: int, b: int = 7) -> int:
            """Add."""
            self.seen.append((a, user.get()))
            return a + b

    shop = Shop()
    user.set("Ida")
    report = Agent(stage, tools=[shop.add]).run("one: go")
    assert shop.seen == [(1, "Ida")] and results(report) == ["3"]


def test_tasks_are_a_list_and_samples_are_choices(stage: Context) -> None:
    agent = Agent(stage, tools=[add, name], seed=5)
    first, second = agent.run(["one: go", "plain: go"], n=2)
    assert first.text == "It is three." and second.text == "No call is needed."
    paths = [[r.steps[0].path for r in report.choices] for report in (first, second)]
    assert paths == [["0.0", "0.1"], ["1.0", "1.1"]]
    seeds = [r.seed for report in (first, second) for r in report.choices]
    assert seeds[0] == 5 and len({*seeds}) == 4
    assert [r.seed for r in agent.run(["one: go", "plain: go"])] == [seeds[0], seeds[2]]


def test_a_run_goes_on_after_a_report(stage: Context) -> None:
    agent = Agent(stage, "sys", [add])
    first = agent.run("plain: hello")
    second = agent.run("and again?", history=first)
    assert second.text == "And again."
    assert second.tokens[: len(first.tokens)] == first.tokens
    assert second.reread == 0
    asked = [m["content"] for m in second.messages if m["role"] == "user"]
    assert asked == ["plain: hello", "and again?"]


def test_a_history_is_a_report_of_any_agent_or_messages(stage: Context) -> None:
    """The K/V that is still cached is not read again, and the requests say why the rest was."""
    first = Agent(stage, "sys", [add]).run("plain: hello")
    kept = json.loads(json.dumps(first.messages))  # as from a file
    agent = Agent(stage, "sys", [add])
    runs: list[Callable[[Any], Report]] = [
        lambda history: agent.run("and again?", history=history),
        lambda history: list(agent.stream("and again?", history=history))[-1].report or first,
        lambda history: asyncio.run(agent.arun("and again?", history=history)),
    ]
    seen: list[str] = []
    for history, run in itertools.product((first, kept, kept[1:]), runs):
        report = run(history)
        assert (report.text, report.messages[:3]) == ("And again.", first.messages)
        causes = [cause.kind for cause in report.requests[0].causes if cause.is_again]
        assert report.cached > 0 and bool(causes) == (report.reread > 0)
        seen += causes
    assert seen == ["retokenized"]  # once: the tokenizer never gives what the model wrote
    assert stage.prefix_cache is not None
    stage.prefix_cache.clear()
    assert agent.run("and again?", history=kept).reread > 0
    other = Agent(stage, [("system", "other"), ("user", "the document")]).run("x", history=first)
    assert [m["content"] for m in other.messages[:2]] == ["other", "the document\n\nplain: hello"]
    assert (other.text, other.requests[0].causes[0].kind) == ("And again.", "first")
    again = Agent(stage, [("user", "the document")]).run("x", history=other.messages[1:])
    assert again.messages[0] == other.messages[1]  # it begins with the agent's own messages
    both = agent.run(["one", "two"], history=[("user", "plain: a"), ("assistant", "b")])
    assert [m["content"] for m in both[1].messages] == ["sys", "plain: a", "b", "two", "And again."]
    assert agent.run("plain: hello", history=None).messages == first.messages
    user = {"role": "user", "content": "a"}
    for bad, why in (
        ("text", "history must be a list"), (7, "history must be a list"), (user, "history must be"),
        ([user, 3], r"history\[1\]: a message must have a role"),
        ([{"content": "a"}], r"history\[0\]: a message must have a role"),
        ([user, {"role": "usr", "content": "a"}], r"history\[1\]: unknown role 'usr'"),
        ([{"role": "user"}], r"history\[0\]: the content of a message must be text"),
        ([user, {"role": "assistant", "tool_calls": "x"}], "tool_calls must be a list"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            agent.run("x", history=cast(Any, bad))


def test_a_run_goes_on_after_one_that_ended_before_its_json(
    stage: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conversation ends with the question for JSON, and the next task is added to it."""
    now = [0.0]
    monkeypatch.setattr("llamabranch.agents.run.perf_counter", lambda: now[0])
    agent = Agent(stage, output=Number, max_seconds=5, seed=1)

    def listen(step: Step) -> None:
        if step.kind == "text":
            now[0] = 10.0

    (first,) = asyncio.run(conduct(agent, ["typed: go"], 1, (), listen))
    assert first.finish_reason == "time" and first.messages[-1]["role"] == "user"
    second = agent.run("and again?", history=first)
    assert "and again?" in read_by(stage, second)
    assert read_by(stage, second).count("<|assistant|>") == sum(
        message["role"] == "assistant" for message in second.messages
    )


def test_a_task_is_joined_to_a_trunk_that_ends_with_a_user(stage: Context) -> None:
    agent = Agent(stage, [("user", "plain: the document")])
    report = agent.run("What is it?")
    assert report.messages[0]["content"] == "plain: the document\n\nWhat is it?"


def test_an_agent_runs_where_a_loop_runs_and_on_a_running_engine(stage: Context) -> None:
    async def main() -> None:
        assert Agent(stage, tools=[add]).run("one: go").text == "It is three."  # as in a notebook
        async with AsyncEngine(stage) as engine:
            agent = Agent(engine, tools=[add])
            reports = await asyncio.gather(*(agent.arun("one: go") for _ in range(3)))
            assert {report.text for report in reports} == {"It is three."}
            assert (await agent.arun("plain: go")).text == "No call is needed."

    asyncio.run(main())


def test_an_agent_does_not_change(stage: Context) -> None:
    agent = Agent(stage, name="solver")
    with pytest.raises(AttributeError, match="cannot be changed"):
        agent.name = agent.name
    assert repr(agent) == "<Agent 'solver' with 'scripts': no tools>"


def test_many_threads_use_one_agent(stage: Context) -> None:
    agent = Agent(stage, tools=[add, name], seed=1)
    with ThreadPoolExecutor(4) as pool:
        reports = [*pool.map(agent.run, ["two: go"] * 4)]
    assert [report.text for report in reports] == ["Both are here."] * 4


# -- the table of what can go wrong with a call -------------------------------------------------------


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function under the name that a script calls."""
    function.__name__ = name
    return function


def endless() -> Iterator[int]:
    yield from itertools.count()


async def endless_later() -> AsyncIterator[int]:
    for number in endless():
        yield number


def awaitable() -> object:
    return name()


async def awaitable_later() -> object:
    return name()


def halves() -> object:
    return {"half \ud800": ["\udfff", Sum(number=1, why="x")]}


class Mute(Exception):
    """An exception that cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError


def raising(name: str, error: BaseException, *, is_async: bool = False) -> Callable[..., Any]:
    """Return a function that raises."""

    def raises() -> str:
        raise error

    async def raises_later() -> str:
        await asyncio.sleep(0)
        raise error

    return named(name, raises_later if is_async else raises)


MADE = "error: made already; its result is above"
SUM = '{"number":1,"why":"x"}'
READ = "I have read it."
LATE = "It takes long."
NONE = "There is no such function."
LAST = "That was the last call. Use the results to answer the question."
FENCED = '```jsonobj\n{ "name": "add",\n "arguments" {"a": 1}\n```'
ALL_FAILED = "all calls of 3 turns failed; the last: "
NOPE = "error: no function nope; there are add"
TURNS = ("turns", "turns")
# A task, the functions, other options; the results that the model reads, and its answer or the error.
# Where it does not end by itself: also the reason and the limit.
TOLD: list[tuple[Any, ...]] = [
    ("plain", [], {}, [], "No call is needed."),
    ("unknown", [], {}, [], '{"name": "nope", "arguments": {}}'),
    ("unknown", [add, name], {}, ["error: no function nope; there are add, name"], NONE),
    ("told", [fails], {}, ["error: it is not there"], "It says no."),
    ("lookup", [fails], {"tell": (LookupError, OSError)}, ["error: no such key"], "It says no."),
    ("calls", [raising("called", Mute())], {"tell": Mute}, ["error: Mute"], READ),
    # Its type is told where its message says nothing.
    *(
        ("calls", [raising("called", error)], {"tell": LookupError}, [f"error: {told}"], READ)
        for error, told in (
            (KeyError(12345), "KeyError: 12345"), (KeyError("no such city"), "KeyError: 'no such city'"),
            (IndexError("7"), "IndexError: 7"), (IndexError(), "IndexError"),
            (IndexError("the list has no such item"), "the list has no such item"),
        )
    ),
    ("calls", [raising("called", ToolError("half \ud800"))], {}, ["error: half ?"], READ),
    ("calls", [raising("called", ToolError(""))], {}, ["error: ToolError"], READ),
    ("calls", [raising("called", ToolError(CONTROL))], {}, [f"error: {CONTROL}"], READ),
    ("calls", [named("called", awaitable)], {}, ["Ida"], READ),
    ("calls", [named("called", awaitable_later)], {}, ["Ida"], READ),
    ("calls", [named("called", halves)], {}, [f'{{"half ?":["?",{SUM}]}}'], READ),
    ("half", [gives], {}, ["half ?"], READ),
    ("gives", [gives], {}, ['"abc"', "NaN", CONTROL, SUM, "null"], READ),
    ("hangs", [hangs], {"tool_seconds": 0.2}, ["error: no result after 0.2 s"], LATE),
    ("sleeps", [sleeps], {"tool_seconds": 0.2}, ["error: no result after 0.2 s"], LATE),
    ("again", [name], {}, ["Ida"] * 3 + [MADE] * 2, "Enough."),
    ("again", [name], {"max_tokens": 10}, ["Ida"] * 3 + [MADE] * 2, "Enough."),
    ("manyforks", [name], {"forks": True},
     ["error: fork must be the only call of its turn", "Ida"], "I cannot."),
    ("one", [add, name], {"tool_choice": "none"}, [], call("add", a=1, b=2)),
    # A forced call is in the first turn only.
    ("plain", [add, name], {"tool_choice": "name", "max_turns": 3}, ["Ida"], "And again."),
    # The last turn. The model is told so, a long task is not repeated, and calls are no answer.
    ("again", [name], {"max_turns": 3}, ["Ida", f"Ida\n{LAST} again: go"], "", *TURNS),
    (f"again: {'go ' * 200}", [name], {"max_turns": 3}, ["Ida", f"Ida\n{LAST}"], "", *TURNS),
    *((task, [add, name], {"max_turns": 1}, [], said, *TURNS) for task, said in
      (("one", ""), ("two", "Let me see."), ("unknown", ""), ("again", ""))),
    ("fenced", [add], {"max_turns": 1}, [], FENCED, *TURNS),
    ("fenced", [add], {"max_turns": 2}, [], "looks like a call, but cannot be read", "error", None),
    # Only repeated calls, and only failures.
    ("loops", [name], {}, ["Ida"] * 3 + [MADE] * 2 + [f"{MADE}\n{LAST} loops: go"], "It is Ida.",
     "stop", "repeats"),
    ("again", [name], {"repeats": 0}, ["Ida", MADE, MADE, f"{MADE}\n{LAST} again: go"], "",
     "repeats", "repeats"),
    ("fails", [fails], {}, ["error: it is not there"] * 3, f"{ALL_FAILED}error: it is not there",
     "error", None),
    ("unknowns", [add], {}, [NOPE] * 3, ALL_FAILED + NOPE, "error", None),
]  # fmt: skip


@pytest.mark.parametrize("row", [(*row, "stop", None)[:7] for row in TOLD], ids=range(len(TOLD)))
def test_results_are_told_to_the_model(stage: Context, row: tuple[Any, ...]) -> None:
    task, tools, options, told, text, reason, limit = row
    agent = Agent(stage, tools=tools, **options)
    report = agent.run(task if ":" in task else f"{task}: go")
    made = [step for step in report.steps if step.kind == "result"]
    assert (report.finish_reason, report.limit) == (reason, limit)
    assert reason in ("stop", "error", limit)  # where a limit has ended it, both name it
    if reason == "error":  # the last results are not read
        assert isinstance(report.error, ToolError) and text in report.error.message
        assert [step.text for step in made] == told
    else:
        assert (results(report), report.text, report.error) == (told, text, None)
    assert len(report.calls) == len(told) == kinds(report.steps).split().count("call")
    assert [bool(step.error) for step in made] == [result.startswith("error:") for result in told]
    if reason == "turns":
        assert not agent.turns.first.read(report.text).calls and "<call>" not in report.text
    assert "jsonobj" not in str(report.messages)  # the next run does not imitate it


def key(value: object) -> object:
    raise KeyError("nope")


def unusual(value: object) -> object:
    raise Odd("odd")


def mute(value: object) -> object:
    raise Mute


VALIDATED: list[tuple[Any, str]] = [
    (Annotated[int, AfterValidator(key)], "error: a: KeyError: 'nope'"),
    (Annotated[int, AfterValidator(mute)], "error: a: Mute"),
    (Annotated[int, AfterValidator(lambda value: value + None)], "error: a: unsupported operand"),
    (Annotated[int, AfterValidator(unusual)], "error: a: Odd: odd"),
    (
        Annotated[int, Field(description="odd"), AfterValidator(above_five)],
        "error: a: Value error, ",
    ),
]


@pytest.mark.parametrize(("kind", "told"), VALIDATED, ids=range(len(VALIDATED)))
def test_what_a_validator_raises_is_told_and_other_tasks_go_on(
    stage: Context, kind: Any, told: str
) -> None:
    def add(a: Any, b: int) -> int:
        """Add."""
        raise AssertionError("it must not be called")

    add.__annotations__["a"] = kind
    first, second = Agent(stage, tools=[add]).run(["one: go", "plain: go"])
    (text,) = results(first)
    assert text.startswith(told) and len(text) < 320 and first.text == "It is three."
    assert second.text == "No call is needed."


@pytest.mark.parametrize("check", [key, mute, unusual])
def test_what_a_validator_of_the_output_raises_ends_only_its_agent(
    stage: Context, check: Any
) -> None:
    kind: Any = Annotated[int, AfterValidator(check)]
    agent: Agent[Any] = Agent(stage, output=kind)
    reports = agent.run(["typed: go", "typed: go"])
    assert all("This was refused" in str(report.messages) for report in reports)


def test_what_a_logits_processor_raises_is_in_the_report(stage: Context) -> None:
    def broken(tokens: Any, logits: Any) -> Any:
        raise KeyError("nope")

    report = Agent(stage, logits_processor=broken).run("plain: go")
    assert report.finish_reason == "error" and report.error is not None


class Odd(BaseException):
    """An exception that is not a subclass of Exception."""


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "kind",
    [SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration, StopAsyncIteration,
     asyncio.CancelledError, MemoryError, RecursionError, Odd, ZeroDivisionError, LookupError, Mute],
)  # fmt: skip
def test_whatever_a_function_raises_ends_its_agent_only(
    stage: Context, kind: type[BaseException], is_async: bool
) -> None:
    agent = Agent(stage, tools=[raising("ends", kind(), is_async=is_async), add, name], output=Sum)
    report, other = agent.run(["ends: go", "two: go"])
    assert report.finish_reason == "error" and isinstance(report.error, ToolError)
    told = rf"ends raised ({kind.__name__}$|RuntimeError: )"
    assert re.match(told, report.error.message)
    assert isinstance(report.error.__cause__, (kind, RuntimeError))
    assert isinstance(other.parsed, Sum)
    with pytest.raises(ParseError):
        _ = report.parsed
    assert_left_alone(stage)


def test_a_function_that_cancels_everything_ends_the_run(stage: Context) -> None:
    async def called() -> None:
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(0)

    agent = Agent(stage, tools=[called, add])
    with pytest.raises(ClosedError, match="cancelled the tasks"):
        agent.run("calls: go")
    with pytest.raises(ClosedError, match="cancelled the tasks"):
        list(agent.stream("calls: go"))
    assert agent.run("one: go").text == "It is three."


def test_a_call_into_an_event_loop_that_ends_is_an_error() -> None:
    """The loop ends after it has cancelled everything, and before it has run the call."""
    may_end = threading.Event()

    async def ended() -> None:
        asyncio.get_running_loop().run_in_executor(None, may_end.wait)  # the loop waits for it
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(0)

    async def endless() -> None:
        may_end.set()
        await asyncio.Event().wait()

    with event_loop() as call:
        for function in (ended, endless, endless):
            with pytest.raises(ClosedError, match="cancelled the tasks"):
                call(function())


def test_an_event_loop_that_cannot_be_made_is_an_error(
    stage: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop needs files, of which a process may have no more."""

    def run(main: Coroutine[None, None, None]) -> None:
        main.close()
        raise OSError(24, "Too many open files")

    agent = Agent(stage, tools=[add])
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "run", run)
        with pytest.raises(OSError, match="open files"):
            agent.run("one: go")
    assert agent.run("one: go").text == "It is three."


def test_a_function_may_use_its_context_and_other_agents(stage: Context) -> None:
    async def called() -> str:
        own = stage.tokenize("abc", add_special=False)
        inner = await Agent(stage, tools=[add]).arun("one: go")
        return f"{len(own)} tokens. {inner.text}"

    report = Agent(stage, tools=[called]).run("calls: go")
    assert results(report) == ["3 tokens. It is three."]


def test_a_context_that_a_function_closes_ends_the_agent(small: Context) -> None:
    def called() -> None:
        small.close()

    report = Agent(small, tools=[called]).run("calls: go")
    assert report.finish_reason in ("cancelled", "error") and report.error is not None


def test_functions_that_hang_take_no_thread_from_others(stage: Context) -> None:
    agent = Agent(stage, tools=[hangs, add], tool_seconds=0.2)
    hung = agent.run(["hangs: go"] * 40)
    assert {r.text for r in hung} == {"It takes long."}
    assert agent.run("one: go").text == "It is three."
    RELEASED.set()  # wakes those that wait
    RELEASED.clear()  # and later tests hang again


# -- results ---------------------------------------------------------------------------------------


def test_result_of_fifty_kilobytes_is_shortened_and_told(stage: Context) -> None:
    report = Agent(stage, tools=[long], result_tokens=200).run("long: go")
    (text,) = results(report)
    first, note, last = text.split("\n")
    assert note == "[49800 of 50000 tokens left out]"
    assert first == long(50_000)[:150] and last == long(50_000)[-50:]
    (step,) = (s for s in report.steps if s.kind == "result")
    assert step.text == long(50_000)
    assert report.text == "That was long."


def test_text_of_control_tokens_in_a_result_stays_text(stage: Context) -> None:
    """Law 6: no id of a control token comes from a result."""
    report = Agent(stage, tools=[gives]).run("gives: go")
    entry = stage.model.entry
    control = {t for t in range(stage.model.n_vocab) if entry(t)[1]}
    names = {t: stage.detokenize([t], special=True) for t in control}
    n_results = len(results(report))
    seen = [names[t] for t in report.tokens if t in control]
    assert seen.count("<|user|>") == 1 and seen.count("<|tool|>") == n_results
    assert seen.count("<|assistant|>") == n_results + 1 and "<|one0|>" not in seen
    assert CONTROL in read_by(stage, report)


@pytest.mark.parametrize(
    ("task", "tool"),
    [("object", gives), ("raw", gives), ("calls", endless), ("calls", endless_later)],
)
def test_result_that_has_no_json_ends_the_agent(
    stage: Context, task: str, tool: Callable[..., Any]
) -> None:
    tool = tool if tool is gives else named("called", tool)
    report = Agent(stage, tools=[tool]).run(f"{task}: go")
    assert report.finish_reason == "error" and report.error is not None
    assert "cannot be written as JSON" in report.error.message


# -- limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_turns", [1, 2, 3])
def test_last_turn_that_calls_is_asked_without_the_functions(
    stage: Context, max_turns: int
) -> None:
    report = Agent(stage, tools=[name], max_turns=max_turns).run("lastly: go")
    assert (report.text, report.finish_reason, report.limit) == ("It is Ida.", "stop", "turns")
    assert len(report.calls) == max_turns - 1 and "Tell a name" not in read_by(stage, report)
    assert kinds(report.steps).count("call") == max_turns - 1
    assert (report.reread > 0) == (max_turns > 1)
    assert report.messages[-1]["content"] == "It is Ida."


def test_tokens_that_run_out_end_a_text(stage: Context) -> None:
    free = Agent(
        stage, sampling=lb.SamplingParams(logit_bias=dict.fromkeys(stage.model.eog_tokens, -1e9))
    )
    report = free.run("plain: go")  # this script never ends by itself
    assert report.finish_reason == report.limit == "length" and report.generated == 2048


def test_cells_that_run_out_shorten_results_and_make_the_last_turn(small: Context) -> None:
    report = Agent(small, tools=[long], result_tokens=5000).run("long: go")
    assert report.text == "That was long." and len(report.tokens) < 1024
    report = Agent(small, tools=[name, long], max_tokens=8000, max_turns=90).run("again: go")
    assert report.finish_reason == "stop" and report.text == "Enough."
    report = Agent(small, "x" * 600, tools=[name], max_tokens=2048).run("again: go")
    assert report.limit == "capacity" and len(report.calls) == 2


def test_trunk_that_does_not_fit_is_refused_before_anything_runs(stage: Context) -> None:
    agent = Agent(stage, [("user", "x" * 5000)])
    with pytest.raises(CacheFullError, match="room for 4096"):
        agent.run("plain: go")
    short = Agent(stage)
    with pytest.raises(CacheFullError):
        short.run(["plain: go", "x" * 5000])
    assert stage.usage().cells_used == 0  # the first task has not run either


def test_seconds_that_run_out_keep_what_was_written(stage: Context) -> None:
    bias = dict.fromkeys(stage.model.eog_tokens, -1e9)
    agent = Agent(stage, max_seconds=0.3, max_tokens=100_000, logit_bias=bias)
    steps = [*agent.stream("plain: go")]
    report = steps[-1].report
    assert report is not None and report.finish_reason == report.limit == "time"
    assert "".join(s.text for s in steps if s.kind == "text").strip() == report.text
    report = Agent(stage, tools=[sleeps], max_seconds=0.3).run("sleeps: go")
    assert report.finish_reason == "time"


# -- output ----------------------------------------------------------------------------------------


def test_output_is_asked_for_after_the_answer(stage: Context) -> None:
    report = Agent(stage, output=Number).run("typed: go")
    assert report.parsed == Number(3) and report.text == "3"
    assert [m["content"] for m in report.messages][1] == "It is three."
    assert report.reread == 0
    other = Agent(stage, output=Sum).run("plain: go")
    assert isinstance(other.parsed, Sum)
    asked = str(other.messages[-2]["content"])
    assert '"why"' in asked  # the schema
    assert Agent(stage).run("plain: go").parsed is None


def test_what_a_validator_refuses_is_told_once(stage: Context) -> None:
    report = Agent(stage, output=Number).run("refused: go")
    assert report.parsed == Number(3)
    assert "must not be negative" in str(report.messages[-2]["content"])
    report = Agent(stage, output=Number).run("stubborn: go")
    with pytest.raises(ParseError, match="negative"):
        _ = report.parsed
    assert report.parsed_or(None) is None
    assert sum(m["role"] == "user" for m in report.messages) == 3


# -- sub-agents and forks --------------------------------------------------------------------------


def test_another_agent_is_a_function_that_takes_a_task(stage: Context) -> None:
    helper = Agent(stage, "Help.", [add], name="helper", about="Adds numbers.")
    report = Agent(stage, "Ask.", [helper]).run("asks: go")
    assert results(report) == ["It is three."] and report.text == "The helper has added."
    inner = [s for s in report.steps if s.path == "0.0/0.0"]
    assert kinds(inner) == CALLED
    assert {s.agent for s in inner} == {"helper"}
    end = next(s for s in inner if s.kind == "end")
    assert end.report is not None and end.report.seed != report.seed
    assert report.generated == 2 + end.report.generated


def test_forks_go_on_from_the_callers_tokens(stage: Context) -> None:
    """The script of a fork is that of its caller's task: the second answer."""
    agent = Agent(stage, "sys", [add], forks=True)
    report = agent.run("forks: go")
    assert results(report) == ["Fork 1: Both forks are done.\nFork 2: Both forks are done."]
    ends = {s.path: s.report for s in report.steps if s.kind == "end"}
    assert list(ends) == ["0.0/0.0.0", "0.0/0.0.1", "0.0"]
    for k in (0, 1):
        fork = ends[f"0.0/0.0.{k}"]
        assert fork is not None and fork.reread == 0
        tool_messages = [m for m in fork.messages if m["role"] == "tool"]
        assert f"fork {k + 1} of 2" in str(tool_messages[0]["content"])
        assert fork.tokens[:20] == report.tokens[:20]
        assert fork.cached > 0.8 * fork.evaluated


def test_a_fork_that_forks_is_told(stage: Context) -> None:
    report = Agent(stage, tools=[name], forks=True).run("nested: go")
    fork = next(s.report for s in report.steps if s.kind == "end" and "/" in s.path)
    assert fork is not None
    assert [str(m["content"]) for m in fork.messages if m["role"] == "tool"][-1] == (
        "error: a fork cannot fork: do it yourself"
    )


# -- parameters ------------------------------------------------------------------------------------


@dataclass
class Place:
    name: str
    floor: int = 2


class Color(Enum):
    RED = "red"


def takes(
    place: Place,
    color: Color,
    day: date,
    path: Path = Path("a.txt"),
    kind: Literal["a", 1] | None = None,
    _x: int = 3,
    schema: str = "y",
    model_config: str = "z",
    unnamed: object = RELEASED,
    *,
    copy: bool = False,
) -> str:
    """Take parameters of all types, with names that pydantic reserves."""
    return (
        f"{place.name}{place.floor} {color.name} {day.year} {path.name} {kind} {_x} {schema} {copy}"
    )


def test_parameters_of_any_type_name_and_default() -> None:
    tool = tool_of(takes)
    schema = cast(Any, tool.described["function"])["parameters"]
    assert list(schema["properties"]) == list(inspect.signature(takes).parameters)
    assert schema["required"] == ["place", "color", "day"]
    assert schema["properties"]["_x"] == {"type": "integer", "default": 3}
    lb.Grammar.from_json_schema(json.dumps(schema))
    arguments: dict[str, object] = {"color": "red", "day": "2027-03-01", "kind": "a"}
    arguments |= {"copy": True, "place": {"name": "hall"}}
    assert takes(**cast(Any, tool.check(arguments))) == "hall2 RED 2027 a.txt a 3 y True"
    refused: list[object] = [[], "x", {"place": {}, "color": "red"}]
    for bad in [*refused, {**arguments, "color": "blue"}, {**arguments, "x": 1}]:
        with pytest.raises(Refused):
            tool.check(bad)


class Adder:
    """A class without annotations of its own; its instances have no name."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __call__(self, second: int) -> int:
        return self.first + second


# -- bad input -------------------------------------------------------------------------------------


def keywords(**a: int) -> str:
    return str(a)


def positional(a: int, /) -> str:
    return str(a)


def odd(a: threading.Thread) -> str:
    return str(a)


BAD_TOOLS: list[object] = [
    [keywords], [positional], [odd], [Adder], [Adder(1)],
    [partial(add, a=1)], [Adder.__call__], [print], [int], [add, add], [1], ["add"], "add",
    add, {"add": add}, [None], [[add]],
]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"name": ""}, {"name": "two words"}, {"about": 3}, {"tool_choice": "nope"}, {"tool_choice": 3},
        {"parallel_tool_calls": 1}, {"max_turns": 0}, {"max_turns": 1.5}, {"max_tokens": 0},
        {"max_seconds": 0}, {"max_seconds": "x"}, {"tool_seconds": -1}, {"tool_seconds": float("nan")},
        {"result_tokens": 0}, {"thinking": "x"}, {"thinking": -1}, {"forks": 1}, {"tell": int},
        {"tell": ValueError("x")}, {"repeats": -1},
        {"sampling": 3}, {"temperature": -1}, {"nonsense": 1},
        {"messages": [3]}, {"messages": 3}, {"messages": b"x"}, {"output": int.__add__},
        {"messages": [("user", 3)]}, {"output": 3}, *({"tools": tools} for tools in BAD_TOOLS),
    ],
    ids=lambda options: str(*options),  # no addresses: ids must not differ
)  # fmt: skip
def test_bad_options_are_refused(stage: Context, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Agent(stage, **options)


@pytest.mark.parametrize(
    "arguments", [("",), ([],), ([""],), (3,), (b"x",), ({"a": 1},), ("x", 0), ("x", "y"), ("x", 1, "r")],
    ids=repr,
)  # fmt: skip
def test_bad_tasks_are_refused(stage: Context, arguments: tuple[Any, ...]) -> None:
    agent = Agent(stage)
    for way in (agent.run, lambda *a: list(agent.stream(*a))):
        with pytest.raises(ConfigError):
            cast(Callable[..., object], way)(*arguments)


def test_no_template_another_context_and_a_closed_one(
    small: Context, stage: Context, target: lb.Model
) -> None:
    with (
        lb.Context(target, n_ctx=256, n_threads=1, exact=True) as ctx,
        pytest.raises(UnsupportedError, match="template"),
    ):
        Agent(ctx)
    with pytest.raises(ConfigError, match="target"):
        Agent(cast(Any, "a.gguf"))
    with pytest.raises(ConfigError, match="another context"):
        Agent(small, tools=[Agent(stage, name="helper")])
    agent = Agent(small)
    small.close()
    with pytest.raises(ClosedError):
        agent.run("plain: go")
    with pytest.raises(ClosedError):
        Agent(small)


def test_closed_engine_and_a_context_closed_while_it_runs(stage: Context) -> None:
    async def main() -> None:
        engine = AsyncEngine(stage)
        begun = asyncio.Event()

        async def sleeps() -> str:
            """Take a long time."""
            begun.set()
            await asyncio.Event().wait()
            return "never"

        agent = Agent(engine, tools=[sleeps])
        running = asyncio.ensure_future(agent.arun("sleeps: go"))
        await begun.wait()
        await engine.close()
        with pytest.raises(ClosedError):
            await agent.arun("plain: go")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())


def test_engine_that_is_closed_cancels_what_runs(stage: Context) -> None:
    bias = dict.fromkeys(stage.model.eog_tokens, -1e9)

    async def main() -> Report:
        engine = AsyncEngine(stage)
        agent = Agent(engine, logit_bias=bias, max_tokens=100_000)
        running = asyncio.ensure_future(agent.arun("plain: go"))
        while not stage.usage().cells_used:
            await asyncio.sleep(0.01)
        await engine.close()
        return await running

    assert asyncio.run(main()).finish_reason == "cancelled"


def test_context_keeps_prefixes_unless_it_was_told_not_to(
    scripted: lb.Model, tmp_path: Path
) -> None:
    with lb.Context(scripted, n_ctx=1024, n_threads=1, prefix_cache=False) as ctx:
        report = Agent(ctx, tools=[add]).run("one: go")
        assert (report.text, report.cached) == ("It is three.", 0) and report.reread > 0
    path = toys.write_mamba(tmp_path / "mamba.gguf")  # of memory that cannot be cut, too
    with lb.Model(path, chat_template="chatml") as model, lb.Context(model, n_threads=1) as ctx:
        assert Agent(ctx) and ctx.prefix_cache is not None


def test_template_that_refuses_the_trunk(stage: Context) -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + (stage.model.chat_template or "")
    )
    with (
        lb.Model(stage.model.path, chat_template=template) as model,
        lb.Context(model, n_ctx=512, n_threads=1) as ctx,
    ):
        with pytest.raises(ConfigError, match="no system"):
            Agent(ctx, "sys")
        assert Agent(ctx).run("plain: go").text == "No call is needed."


def test_thoughts_are_steps_of_their_own_and_no_part_of_the_text(target: lb.Model) -> None:
    """A template with tags, a model that was not trained to think: the budget ends its thought."""
    template = (
        "{% for m in messages %}[{{ m.role }}] {% if m.reasoning_content %}<think>\n"
        "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    with (
        lb.Model(target.path, chat_template=template) as model,
        lb.Context(model, n_ctx=1024, n_threads=1, n_seq_max=4) as ctx,
    ):
        agent = Agent(ctx, thinking=8, max_tokens=40, seed=1, max_turns=2)
        steps = [*agent.stream("Why did the bear leave?")]
        report = steps[-1].report
        assert report is not None
        (thought,) = [s.text for s in report.steps if s.kind == "thought"]
        assert thought and "think>" not in thought + report.text
        assert "".join(s.text for s in steps if s.kind == "thought").strip() == thought.strip()
        assert report.messages[-1]["content"]
        silent = Agent(ctx, thinking=False, max_tokens=20, seed=1).run("Why did the bear leave?")
        assert not [s for s in silent.steps if s.kind == "thought"]
    with (
        lb.Context(target, n_ctx=256, n_threads=1, exact=True) as ctx,
        pytest.raises(UnsupportedError),
    ):
        Agent(ctx, thinking=True)
