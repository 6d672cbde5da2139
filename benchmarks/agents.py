"""A recorded day of an agent, replayed to `llamabranch serve` and to llama-server: tokens read, seconds.

    python -m benchmarks.agents --target MODEL.gguf --threads 2 [--peers FOLDER] [--session 12000]

A main session of ten turns grows from half of --session tokens to all of them. Before its fifth turn
three sub-agents fork it, and run beside this turn for three turns each (--waiting: the main session waits
for them). After seven turns the server is started again; in the end the session is compacted and goes on
from the summary. What the agents read are documents of llamabranch. Answers are recorded, too: a server
generates --tokens tokens, but the next prompt has the recorded answer, so all sides get equal prompts.

*Distinct* tokens are those of all prompts that no earlier prompt began with: nobody can read fewer. The
sides take turns after each phase, and the other one is stopped meanwhile. llama-server has one cache for
all slots and keeps prompts in memory. Ours keeps in a folder what it has read; llama-server's slots are
saved to one before it ends, and restored when it starts. --ours and --theirs are more options.

--changing: each request has another first line, as agents do. --ours="--drop-line ^cch=" leaves it out.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import llamabranch as lb

from .report import Settings, emit, parser, pm, table, title
from .servers import OURS, THEIRS, Served, ToolError, alone, request, start_ours, start_theirs
from .timing import Spread

SUB_AGENTS = 3
RESTART = "restart and turn 8"
BEST = "-kvu", "--cache-ram", 8192, "--no-cache-idle-slots"  # what reads the fewest tokens
_DOCS = Path(__file__).parents[1] / "docs"

Message = dict[str, str]
Prompt = list[Message]


class Phase(NamedTuple):
    """A part of the day: conversations that are held at the same time, each with its prompts in turn."""

    name: str
    talks: list[list[Prompt]]


class Session:
    """A session that begins with ``messages``; ``text`` gives what is said in it, in parts of the day."""

    def __init__(self, messages: Prompt, text: Callable[[float], str]) -> None:
        self._messages, self._text = messages, text

    def fork(self) -> Session:
        """Return a session that begins with all messages so far."""
        return Session(self._messages, self._text)

    def turn(self, said: str, size: float = 0.045, answer: float = 0.005) -> Prompt:
        """Return the prompt of a turn; the prompts of later ones have its answer, too."""
        prompt = [*self._messages, {"role": "user", "content": f"{said}\n{self._text(size)}"}]
        self._messages = [*prompt, {"role": "assistant", "content": self._text(answer)}]
        return prompt

    def results(self, *numbers: int) -> list[Prompt]:
        """Return the prompts of turns that get results of calls."""
        return [self.turn(f"Result of call {i}:") for i in numbers]


def day(
    model: lb.Model, n_tokens: int, *, waiting: bool = False, changing: bool = False
) -> list[Phase]:
    """Return the phases of a day whose longest prompt has about ``n_tokens`` tokens."""
    tokens = model.tokenize("\n".join(path.read_text() for path in sorted(_DOCS.glob("*.md"))))
    at = 0

    def text(size: float) -> str:
        nonlocal at
        at += (n := round(size * n_tokens))
        return model.detokenize(tokens[at - n : at])

    system = {"role": "system", "content": f"You work on a project. Its rules:\n{text(0.3)}"}
    main = Session([system], text)
    before = [main.turn("The task, and what is known:", 0.2), *main.results(2, 3, 4)]
    forks = [main.fork() for _ in range(SUB_AGENTS)]
    subs = [
        [fork.turn(f"You are sub-agent {i}:", 0.01), *fork.results(1, 2)]
        for i, fork in enumerate(forks, 1)
    ]
    fifth = main.results(5)
    phases = [
        Phase("turns 1 to 4", [before]),
        Phase("three sub-agents", subs if waiting else [fifth, *subs]),
        Phase("turns to 7", [[*(fifth if waiting else ()), *main.results(6, 7)]]),
        Phase(RESTART, [main.results(8)]),
        Phase("turns 9 and 10", [main.results(9, 10)]),
        Phase("compaction", [[main.turn("Summarise what was done.", 0, 0.05)]]),
    ]  # fmt: skip
    main = Session([system], text)
    after = [main.turn("The summary of the session so far:", 0.05), *main.results(11, 12)]
    phases.append(Phase("three turns after it", [after]))
    if changing:
        for i, prompt in enumerate(_prompts(phases), 1):
            prompt[0] = {**system, "content": f"cch={7919 * i:05x};\n{system['content']}"}
    return phases


def _prompts(phases: Sequence[Phase]) -> Iterator[Prompt]:
    return (prompt for phase in phases for talk in phase.talks for prompt in talk)


def distinct(phases: Sequence[Phase], model: lb.Model) -> list[int]:
    """Return by how many nodes each phase lets the trie of all prompts grow."""
    trie: dict[tuple[int, int], int] = {}
    sizes = []
    for phase in phases:
        for prompt in _prompts([phase]):
            node = 0
            for token in model.chat_tokens(prompt):
                node = trie.setdefault((node, token), len(trie) + 1)
        sizes.append(len(trie))
    return [size - before for before, size in pairwise([0, *sizes])]


class Figures(NamedTuple):
    """What a phase took on a side: prompt tokens, those that were read, and seconds."""

    n_asked: int
    n_read: int
    seconds: float


class Side:
    """A server that can be started again; with ``n_slots``, llama-server's slots are kept meanwhile."""

    def __init__(self, start: Callable[[], Served], n_slots: int = 0) -> None:
        self._start, self._n_slots = start, n_slots
        self.open()

    def open(self) -> None:
        """Start the server, let it answer a short request, and restore its slots."""
        self.served = self._start()
        asyncio.run(self.served.stream({"prompt": "Once upon a time", "max_tokens": 8}))
        self._slots("restore")

    def close(self) -> None:
        """Save the slots, and end the server."""
        self._slots("save")
        self.served.close()

    def _slots(self, action: str) -> None:
        for i in range(self._n_slots):
            path, body = f"/slots/{i}?action={action}", {"filename": f"{i}.bin"}
            asyncio.run(request(self.served.port, "POST", path, body))

    def replay(self, phase: Phase, n_tokens: int) -> Figures:
        """Let the server answer all prompts of a phase."""
        begun = perf_counter()
        if phase.name == RESTART:
            self.close()
            self.open()
        n_asked, n_read = asyncio.run(self._hold(phase.talks, n_tokens))
        return Figures(n_asked, n_read, perf_counter() - begun)

    async def _hold(self, talks: Sequence[Sequence[Prompt]], n_tokens: int) -> tuple[int, int]:
        n_asked = n_cached = 0

        async def hold(talk: Sequence[Prompt]) -> None:
            nonlocal n_asked, n_cached
            for prompt in talk:
                body = {
                    "messages": prompt, "max_tokens": n_tokens, "temperature": 0.0, "ignore_eos": True,
                }  # fmt: skip
                status, data = await request(self.served.port, "POST", "/v1/chat/completions", body)
                if status != 200:
                    raise ToolError(f"the server refuses: {data[:300]!r}")
                used = json.loads(data)["usage"]
                n_asked += used["prompt_tokens"]
                n_cached += used["prompt_tokens_details"]["cached_tokens"]

        await asyncio.gather(*map(hold, talks))
        return n_asked, n_asked - n_cached


def replay(
    sides: Mapping[str, Side], phases: Sequence[Phase], n_tokens: int
) -> dict[str, list[Figures]]:
    """Return the figures of each phase. The sides' order is turned around for every other one."""
    figures: dict[str, list[Figures]] = {name: [] for name in sides}
    for i, phase in enumerate(phases):
        for name in list(sides)[:: 1 if i % 2 == 0 else -1]:
            with alone(name, {name: side.served for name, side in sides.items()}):
                figures[name].append(sides[name].replay(phase, n_tokens))
            print(f"{phase.name}, {name}: {figures[name][-1]}", file=sys.stderr, flush=True)
    return figures


def main() -> None:
    """Replay the day on both sides, and tell what each has read."""
    described = parser("agents", runs=1, tokens=16, target="smollm2-135m:Q8_0")
    described.add_argument("--session", type=int, default=7500, help="tokens of the longest prompt")
    described.add_argument("--waiting", action="store_true", help="main waits for its sub-agents")
    described.add_argument("--changing", action="store_true", help="a first line that changes")
    described.add_argument("--ours", type=shlex.split, default=[], help="more options")
    described.add_argument("--theirs", type=shlex.split, default=[], help="more options")
    args = described.parse_args()
    settings = Settings.of(args)
    n_session = 600 if settings.quick else args.session
    shared = "-np", SUB_AGENTS + 1, "-c", (SUB_AGENTS + 1) * (n_session + 512)
    with lb.Model(lb.hub.resolve(settings.target)) as model:
        phases = day(model, n_session, waiting=args.waiting, changing=args.changing)
        n_distinct = distinct(phases, model)
        runs: list[dict[str, list[Figures]]] = []
        for _ in range(settings.runs):
            with ExitStack() as stack:
                kept, saved = (
                    (option, stack.enter_context(tempfile.TemporaryDirectory()))
                    for option in ("--cache-dir", "--slot-save-path")
                )
                ours = partial(start_ours, settings, model.path, *shared, *kept, *args.ours)
                sides = {OURS: Side(ours)}
                stack.callback(sides[OURS].close)
                if settings.peers:
                    theirs = partial(
                        start_theirs, settings, model.path, *shared, *BEST, *saved, *args.theirs
                    )
                    sides[THEIRS] = Side(theirs, SUB_AGENTS + 1)
                    stack.callback(sides[THEIRS].close)
                runs.append(replay(sides, phases, settings.tokens))
        caption = f"{title(model)}, {settings.threads} threads, sessions of {n_session:,} tokens"
        results = report(caption, [phase.name for phase in phases], n_distinct, runs)
        emit("agents", settings, {"target": model}, results)


def report(
    caption: str,
    names: Sequence[str],
    n_distinct: Sequence[int],
    runs: Sequence[Mapping[str, Sequence[Figures]]],
) -> dict[str, object]:
    """Show each phase and the whole day: the most tokens that a run has read, and median seconds."""
    sides, rows, results = list(runs[0]), [], dict[str, object]()
    parts = {name: [i] for i, name in enumerate(names)}
    for name, part in {**parts, "the day": range(len(names))}.items():
        of_run = [{side: [run[side][i] for i in part] for side in sides} for run in runs]
        n_read = {side: max(sum(x.n_read for x in run[side]) for run in of_run) for side in sides}
        times = {side: [sum(x.seconds for x in run[side]) for run in of_run] for side in sides}
        n_asked = [sum(x.n_asked for x in of_run[0][side]) for side in sides]
        n_least = sum(n_distinct[i] for i in part)
        seconds = {side: Spread.of(times[side]) for side in sides}
        results[name] = {
            "asked": dict(zip(sides, n_asked, strict=True)), "distinct": n_least, "read": n_read,
            "seconds": {side: seconds[side].as_dict() for side in sides},
        }  # fmt: skip
        rows.append((
            name, f"{n_asked[0]:,}", f"{n_least:,}", *(f"{n_read[side]:,}" for side in sides),
            *(pm(seconds[side], 1) for side in sides),
        ))  # fmt: skip
    columns = (f"{what}: {side}" for what in ("read", "seconds") for side in sides)
    table(caption, ("", "prompt tokens", "distinct", *columns), rows)
    print(f"\nRead: {n_read[OURS] / n_least:.3f} of the distinct tokens", end="")
    if THEIRS in sides:
        ratio = Spread.of([a / b for a, b in zip(times[OURS], times[THEIRS], strict=True)])
        print(f", {n_read[OURS] / n_read[THEIRS]:.2f} of what llama-server reads, in", end=" ")
        print(f"{pm(ratio)} of its time", end="")
    print(".")
    return results


if __name__ == "__main__":
    main()
