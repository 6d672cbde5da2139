"""Twenty tasks of two steps for agents: each needs two functions, the second with the first one's result.

A task is done if the answer contains what the question asks for and both functions were called.

    python -m benchmarks.agent_tasks --target a.gguf --threads 2
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import llamabranch as lb

from .report import Settings, emit, number, parser, table, title

K = TypeVar("K")
V = TypeVar("V")
SYSTEM = (
    "Use the functions, one call at a time, without explaining. First call the function that takes what "
    "the question names. Then call the other one with its result. Then answer in one short sentence."
)


def city_of(person: str) -> str:
    """Tell in which city a person lives."""
    return _known({"Ann": "Oslo", "Ben": "Lima", "Carl": "Quito"}, person)


def weather(city: str) -> str:
    """Tell the weather in a city."""
    return _known({"Oslo": "snow", "Lima": "fog", "Quito": "hail"}, city)


def account_of(name: str) -> int:
    """Tell the number of a person's account."""
    return _known({"Carla Diaz": 4417, "Tom Berg": 2093}, name)


def balance(account: int) -> str:
    """Tell how much money an account has."""
    return _known({4417: "318 euros", 2093: "77 euros"}, account)


def price(item: str) -> float:
    """Tell the price of an item, in euros."""
    return _known({"lamp": 40.0, "chair": 65.0}, item)


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


def author_of(book: str) -> str:
    """Tell who wrote a book."""
    return _known({"The Salt Road": "Ida Holm", "Nine Lanterns": "Per Quist"}, book)


def birth_year(person: str) -> int:
    """Tell in which year a person was born."""
    return _known({"Ida Holm": 1931, "Per Quist": 1958}, person)


def manager_of(person: str) -> str:
    """Tell who manages a person."""
    return _known({"Lena": "Omar", "Mia": "Ruth"}, person)


def phone_of(person: str) -> str:
    """Tell a person's phone number."""
    return _known({"Omar": "555-0142", "Ruth": "555-0177", "Lena": "555-0101"}, person)


def room_of(event: str) -> str:
    """Tell in which room an event is."""
    return _known({"chess evening": "B12", "choir": "A03"}, event)


def seats(room: str) -> int:
    """Tell how many seats a room has."""
    return _known({"B12": 34, "A03": 120}, room)


def last_order(customer: str) -> int:
    """Tell the number of a customer's last order."""
    return _known({"Novak": 8801, "Silva": 8807}, customer)


def status_of(order: int) -> str:
    """Tell the status of an order."""
    return _known({8801: "delayed", 8807: "delivered"}, order)


def spice_of(dish: str) -> str:
    """Tell the main spice of a dish."""
    return _known({"paella": "saffron", "goulash": "paprika"}, dish)


def jars_of(spice: str) -> int:
    """Tell how many jars of a spice are in the cupboard."""
    return _known({"saffron": 3, "paprika": 11}, spice)


def train_to(city: str) -> str:
    """Tell the name of the next train to a city."""
    return _known({"Basel": "IC 61", "Trieste": "RE 9"}, city)


def platform_of(train: str) -> int:
    """Tell from which platform a train leaves."""
    return _known({"IC 61": 14, "RE 9": 2}, train)


def _known(table: Mapping[K, V], key: object) -> V:
    """Return the value of a key in a table, in upper or lower case."""
    for name, value in table.items():
        if str(name).lower() == str(key).strip().lower():
            return value
    raise lb.errors.ToolError(f"{key!r} is not known; known are {', '.join(map(str, table))}")


class Task(NamedTuple):
    """A task.

    Attributes:
        question: what is asked.
        tools: the two functions.
        answer: a regular expression that must match somewhere in the answer.
    """

    question: str
    tools: tuple[Callable[..., object], Callable[..., object]]
    answer: str


TASKS = (
    Task("What is the weather like where Ann lives?", (city_of, weather), "snow"),
    Task("What is the weather like where Ben lives?", (city_of, weather), "fog"),
    Task("How much money does Carla Diaz have in her account?", (account_of, balance), r"\b318\b"),
    Task("How much money does Tom Berg have in his account?", (account_of, balance), r"\b77\b"),
    Task("What does the lamp cost in yen?", (price, in_yen), r"\b6,?400\b"),
    Task("What does the chair cost in yen?", (price, in_yen), r"\b10,?400\b"),
    Task("How many hours is it from Bergen to Oslo at 80 km per hour?", (distance, hours), r"5\.75"),
    Task("How many hours is it from Paris to Lyon at 120 km per hour?", (distance, hours), r"3\.25"),
    Task("In which year was the author of The Salt Road born?", (author_of, birth_year), r"\b1931\b"),
    Task("In which year was the author of Nine Lanterns born?", (author_of, birth_year), r"\b1958\b"),
    Task("What is the phone number of Lena's manager?", (manager_of, phone_of), "555-0142"),
    Task("What is the phone number of Mia's manager?", (manager_of, phone_of), "555-0177"),
    Task("How many seats has the room of the chess evening?", (room_of, seats), r"\b34\b"),
    Task("How many seats has the room of the choir?", (room_of, seats), r"\b120\b"),
    Task("What is the status of the last order of Novak?", (last_order, status_of), "delayed"),
    Task("What is the status of the last order of Silva?", (last_order, status_of), "delivered"),
    Task("How many jars of the main spice of paella are there?", (spice_of, jars_of), r"\b(3|three)\b"),
    Task(
        "How many jars of the main spice of goulash are there?", (spice_of, jars_of), r"\b(11|eleven)\b"
    ),
    Task("From which platform does the next train to Basel leave?", (train_to, platform_of), r"\b14\b"),
    Task("From which platform does the next train to Trieste leave?", (train_to, platform_of), r"\b2\b"),
)  # fmt: skip


def is_done(task: Task, report: lb.agents.Report) -> bool:
    """Return whether a report has the answer, and both functions were called."""
    called = {call.name for call in report.calls}
    asked = {tool.__name__ for tool in task.tools}
    return called >= asked and re.search(task.answer, report.text, re.IGNORECASE) is not None


async def run_all(ctx: lb.Context, tasks: Sequence[Task], parallel: int) -> list[lb.agents.Report]:
    """Run the tasks, ``parallel`` at a time, and print a line when each ends."""
    free = asyncio.Semaphore(parallel)

    async def run_task(engine: lb.AsyncEngine, number: int, task: Task) -> lb.agents.Report:
        agent = lb.Agent(
            engine, SYSTEM, task.tools, parallel_calls=False, max_turns=4, max_tokens=250,
            temperature=0, seed=1,
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
    described.add_argument("--parallel", type=int, default=4, help="tasks at a time")
    args = described.parse_args()
    settings = Settings.of(args)
    tasks = TASKS[: 2 if settings.quick else None]
    with settings.context(settings.target, n_ctx=8192) as ctx:
        begun = time.perf_counter()
        reports = asyncio.run(run_all(ctx, tasks, args.parallel))
        seconds = time.perf_counter() - begun
        n_done = sum(is_done(task, report) for task, report in zip(tasks, reports, strict=True))
        n_tokens = sum(report.stats.generated for report in reports)
        table(
            f"{title(ctx.model)}, temperature 0, {args.parallel} at a time",
            ("done", "of", "tokens", "seconds"),
            [(str(n_done), str(len(tasks)), str(n_tokens), number(seconds, 0))],
        )
        results = {"done": n_done, "of": len(tasks), "n_tokens": n_tokens, "seconds": seconds}
        emit("agent_tasks", settings, {"target": ctx.model}, results)


if __name__ == "__main__":
    main()
