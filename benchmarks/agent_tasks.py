"""Twenty tasks of two steps for agents: each needs two functions, the second with the first one's result.

A task is done if the answer contains what the question asks for and both functions were called.

    python -m benchmarks.agent_tasks --target a.gguf --threads 2
"""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from typing import Any, NamedTuple

import llamabranch as lb

from .report import Settings, emit, number, parser, table, title

SYSTEM = (
    "Use the functions, one call at a time, without explaining. First call the function that takes what "
    "the question names. Then call the other one with its result. Then answer in one short sentence."
)


def lookup(
    name: str, about: str, parameter: str, table: Mapping[Any, object]
) -> Callable[..., object]:
    """Return a tool that tells what a table has for the one argument, in upper or lower case."""

    def tool(**arguments: object) -> object:
        key = arguments[parameter]
        for known, value in table.items():
            if str(known).lower() == str(key).strip().lower():
                return value
        raise lb.errors.ToolError(f"{key!r} is not known; known are {', '.join(map(str, table))}")

    kind = type(next(iter(table)))
    keyword = inspect.Parameter(parameter, inspect.Parameter.KEYWORD_ONLY, annotation=kind)
    described: Any = tool
    described.__name__, described.__doc__ = name, about
    described.__annotations__ = {parameter: kind}
    described.__signature__ = inspect.Signature([keyword])
    return tool


def in_yen(euros: float) -> float:
    """Convert euros to yen."""
    return euros * 160


def distance(start: str, end: str) -> float:
    """Tell the distance between two cities, in km."""
    known = {("bergen", "oslo"): 460.0, ("paris", "lyon"): 390.0}
    pair = start.strip().lower(), end.strip().lower()
    if pair not in known and pair[::-1] not in known:
        raise lb.errors.ToolError(f"no distance from {start} to {end}")
    return known.get(pair, known.get(pair[::-1], 0.0))


def hours(km: float, km_per_hour: float) -> float:
    """Tell how many hours a way takes at a speed."""
    return km / km_per_hour


_TABLES: Sequence[tuple[str, str, str, Mapping[Any, object]]] = (
    ("city_of", "Tell in which city a person lives.", "person",
     {"Ann": "Oslo", "Ben": "Lima", "Carl": "Quito"}),
    ("weather", "Tell the weather in a city.", "city", {"Oslo": "snow", "Lima": "fog", "Quito": "hail"}),
    ("account_of", "Tell the number of a person's account.", "name",
     {"Carla Diaz": 4417, "Tom Berg": 2093}),
    ("balance", "Tell how much money an account has.", "account", {4417: "318 euros", 2093: "77 euros"}),
    ("price", "Tell the price of an item, in euros.", "item", {"lamp": 40.0, "chair": 65.0}),
    ("author_of", "Tell who wrote a book.", "book",
     {"The Salt Road": "Ida Holm", "Nine Lanterns": "Per Quist"}),
    ("birth_year", "Tell in which year a person was born.", "person",
     {"Ida Holm": 1931, "Per Quist": 1958}),
    ("manager_of", "Tell who manages a person.", "person", {"Lena": "Omar", "Mia": "Ruth"}),
    ("phone_of", "Tell a person's phone number.", "person",
     {"Omar": "555-0142", "Ruth": "555-0177", "Lena": "555-0101"}),
    ("room_of", "Tell in which room an event is.", "event", {"chess evening": "B12", "choir": "A03"}),
    ("seats", "Tell how many seats a room has.", "room", {"B12": 34, "A03": 120}),
    ("last_order", "Tell the number of a customer's last order.", "customer",
     {"Novak": 8801, "Silva": 8807}),
    ("status_of", "Tell the status of an order.", "order", {8801: "delayed", 8807: "delivered"}),
    ("spice_of", "Tell the main spice of a dish.", "dish", {"paella": "saffron", "goulash": "paprika"}),
    ("jars_of", "Tell how many jars of a spice are in the cupboard.", "spice",
     {"saffron": 3, "paprika": 11}),
    ("train_to", "Tell the name of the next train to a city.", "city",
     {"Basel": "IC 61", "Trieste": "RE 9"}),
    ("platform_of", "Tell from which platform a train leaves.", "train", {"IC 61": 14, "RE 9": 2}),
)  # fmt: skip
_FUNCTIONS: tuple[Callable[..., object], ...] = (in_yen, distance, hours)
TOOLS = {tool.__name__: tool for tool in (*_FUNCTIONS, *starmap(lookup, _TABLES))}


class Task(NamedTuple):
    """A task.

    Attributes:
        question: what is asked.
        tools: the names of the two functions.
        answer: a regular expression that must match somewhere in the answer.
    """

    question: str
    tools: tuple[str, str]
    answer: str


TASKS = tuple(starmap(Task, (
    ("What is the weather like where Ann lives?", ("city_of", "weather"), "snow"),
    ("What is the weather like where Ben lives?", ("city_of", "weather"), "fog"),
    ("How much money does Carla Diaz have in her account?", ("account_of", "balance"), r"\b318\b"),
    ("How much money does Tom Berg have in his account?", ("account_of", "balance"), r"\b77\b"),
    ("What does the lamp cost in yen?", ("price", "in_yen"), r"\b6,?400\b"),
    ("What does the chair cost in yen?", ("price", "in_yen"), r"\b10,?400\b"),
    ("How many hours is it from Bergen to Oslo at 80 km per hour?", ("distance", "hours"), r"5\.75"),
    ("How many hours is it from Paris to Lyon at 120 km per hour?", ("distance", "hours"), r"3\.25"),
    ("In which year was the author of The Salt Road born?", ("author_of", "birth_year"), r"\b1931\b"),
    ("In which year was the author of Nine Lanterns born?", ("author_of", "birth_year"), r"\b1958\b"),
    ("What is the phone number of Lena's manager?", ("manager_of", "phone_of"), "555-0142"),
    ("What is the phone number of Mia's manager?", ("manager_of", "phone_of"), "555-0177"),
    ("How many seats has the room of the chess evening?", ("room_of", "seats"), r"\b34\b"),
    ("How many seats has the room of the choir?", ("room_of", "seats"), r"\b120\b"),
    ("What is the status of the last order of Novak?", ("last_order", "status_of"), "delayed"),
    ("What is the status of the last order of Silva?", ("last_order", "status_of"), "delivered"),
    ("How many jars of the main spice of paella are there?", ("spice_of", "jars_of"), r"\b(3|three)\b"),
    ("How many jars of the main spice of goulash are there?", ("spice_of", "jars_of"),
      r"\b(11|eleven)\b"),
    ("From which platform does the next train to Basel leave?", ("train_to", "platform_of"), r"\b14\b"),
    ("From which platform does the next train to Trieste leave?", ("train_to", "platform_of"), r"\b2\b"),
)))  # fmt: skip


def is_done(task: Task, report: lb.agents.Report) -> bool:
    """Return whether a report has the answer, and both functions were called."""
    called = {call.name for call in report.calls} >= set(task.tools)
    return called and re.search(task.answer, report.text, re.IGNORECASE) is not None


async def run_all(ctx: lb.Context, tasks: Sequence[Task]) -> list[lb.agents.Report]:
    """Run the tasks, four at a time, and print a line when each ends."""
    free = asyncio.Semaphore(4)

    async def run_task(engine: lb.AsyncEngine, number: int, task: Task) -> lb.agents.Report:
        agent = lb.Agent(
            engine, SYSTEM, [TOOLS[name] for name in task.tools], parallel_tool_calls=False, max_turns=4,
            max_tokens=250, temperature=0, seed=1,
        )  # fmt: skip
        async with free:
            report = await agent.arun(task.question)
        calls = (f"{c.name}({_values(c.arguments)})" for c in report.calls)
        print(
            f"{number:2} {'done' if is_done(task, report) else 'LOST'} {report.finish_reason:6} "
            f"{' '.join(calls)} | {' '.join(report.text.split())[:100]}",
            flush=True,
        )
        return report

    async with lb.AsyncEngine(ctx) as engine:
        return await asyncio.gather(*(run_task(engine, i, task) for i, task in enumerate(tasks, 1)))


def _values(arguments: object) -> str:
    return ", ".join(map(str, arguments.values())) if isinstance(arguments, dict) else ""


def main() -> None:
    """Run all tasks and print a line for each."""
    described = parser("twenty tasks of two steps for agents", target="smollm2-135m:Q8_0")
    settings = Settings.of(described.parse_args())
    tasks = TASKS[: 2 if settings.quick else None]
    with settings.context(settings.target, n_ctx=8192) as ctx:
        begun = time.perf_counter()
        reports = asyncio.run(run_all(ctx, tasks))
        seconds = time.perf_counter() - begun
        n_done = sum(is_done(task, report) for task, report in zip(tasks, reports, strict=True))
        n_tokens = sum(report.generated for report in reports)
        table(
            f"{title(ctx.model)}, temperature 0",
            ("done", "of", "tokens", "seconds"),
            [(str(n_done), str(len(tasks)), str(n_tokens), number(seconds, 0))],
        )
        results = {"done": n_done, "of": len(tasks), "n_tokens": n_tokens, "seconds": seconds}
        emit("agent_tasks", settings, {"target": ctx.model}, results)


if __name__ == "__main__":
    main()
