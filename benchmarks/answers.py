"""Answers of a small model at equal compute: votes, samples, power sampling, constraints.

    python -m benchmarks.answers --target smollm2-135m:Q8_0 --threads 1 [--minutes 60]

The four tasks are in `answer_tasks`. First a pilot makes a plan, with items that are not used later: the
level of each task (one sample should be right in 30 to 60 % of the items), and the number of particles
of power sampling, which should decode as many tokens as a vote of eight.

Then all methods answer the same items with the same seeds, in turn, until the time is over.

Each item is asked once. The tokens are those decoded after the prompt. Paired tests are exact (McNemar),
and the planned ones are adjusted together (Holm).
"""

from __future__ import annotations

import math
import runpy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

import llamabranch as lb
from llamabranch import search

from .answer_tasks import LEVELS, TASKS, Item, item
from .report import Settings, emit, number, parser, percent, table, title

ANSWERS = ("problems", "dates", "records")  # without a rule that the answer must follow
RULED = ("records", "orders")
N, MOST = 8, 32  # texts of the vote, and the most of power sampling
PILOT_SEED = 1_000_000
GOAL = (0.30, 0.60)
COLD, WARM = (lb.SamplingParams(temperature=t) for t in (0.0, 0.7))
WHOLE = lb.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
VOTE, BEST, ONE, GREEDY = "vote of 8", "best_of_n", "one sample", "greedy"
POWER, RULE = "power 4", "greedy, constraint"
PLANNED: Sequence[tuple[str, str, Sequence[str]]] = (
    (VOTE, GREEDY, ANSWERS), (POWER, VOTE, ANSWERS), (BEST, VOTE, ANSWERS), (RULE, GREEDY, RULED),
)  # fmt: skip

EXAMPLE = Path(__file__).parents[1] / "examples" / "power_sampling.py"
power_sampling = runpy.run_path(str(EXAMPLE))["power_sampling"]

JSON = dict[str, Any]


# -- methods -------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """The result of a method for an item: the share of right texts, and the tokens that it decoded."""

    right: float
    tokens: float


Outcomes = dict[str, Outcome]
Run = Callable[[lb.Branch, Item, int, int], Outcomes]


@contextmanager
def _as(root: lb.Branch, sampling: lb.SamplingParams, seed: int) -> Iterator[lb.Branch]:
    with root.fork() as branch:
        branch.resample(sampling.replace(seed=seed))
        yield branch


def _stop(task: Item) -> Sequence[str]:
    return () if task.schema else ("\n",)


def _mean(text: search.Hypothesis) -> float:
    return text.logprob / max(1, len(text.tokens))


def _of(task: Item, text: str, tokens: float) -> Outcome:
    return Outcome(task.is_right(text), tokens)


def _greedy(root: lb.Branch, task: Item, seed: int, n: int) -> Outcomes:
    with _as(root, COLD, seed) as branch:
        result = search.best_of_n(branch, 1, task.max_tokens, stop=_stop(task))
    return {GREEDY: _of(task, result.text, result.stats.generated)}


def _vote(root: lb.Branch, task: Item, seed: int, n: int) -> Outcomes:
    """Let texts vote; the same texts are judged as single samples, and the most probable of them."""
    with _as(root, WARM, seed) as branch:
        result = search.vote(branch, task.read, n, task.max_tokens, stop=_stop(task))
    tokens = result.stats.generated
    samples = [_of(task, text.text, tokens / n) for text in result.hypotheses]
    return {
        VOTE: Outcome(task.judge(result.answer), tokens),
        BEST: _of(task, max(result.hypotheses, key=_mean).text, tokens),
        ONE: _average(samples),
    }


def _powered(root: lb.Branch, task: Item, seed: int, n: int) -> Outcomes:
    """Draw particles by power sampling, and weigh their answers."""
    before = root.ctx.decoder.n_decodes  # of one token each
    with _as(root, WHOLE, seed) as branch:
        particles = power_sampling(
            branch, n, task.max_tokens, "\n" if _stop(task) else "\0", np.random.default_rng(seed)
        )
    shares: defaultdict[str, float] = defaultdict(float)
    for text, _, share in particles:
        answer = task.read(text)
        if answer is not None:
            shares[answer] += share
    best = max(shares, key=lambda answer: shares[answer], default=None)
    tokens = root.ctx.decoder.n_decodes - before
    return {POWER: Outcome(task.judge(best), tokens)}


def _constrained(root: lb.Branch, task: Item, seed: int, n: int) -> Outcomes:
    with _as(root, COLD, seed) as branch:
        text = branch.generate(task.max_tokens, _stop(task), constraint=task.constraint).finish()
    return {RULE: _of(task, text.text, text.stats.num_rounds)}


METHODS: Sequence[tuple[Run, Sequence[str]]] = (
    (_greedy, tuple(TASKS)), (_vote, ANSWERS), (_powered, ANSWERS), (_constrained, RULED),
)  # fmt: skip


def _average(outcomes: Sequence[Outcome]) -> Outcome:
    return Outcome(*map(fmean, zip(*outcomes, strict=True)))


# -- the plan, and answers -----------------------------------------------------------------------------


def main() -> None:
    """Make the plan, answer items while there is time, show the tables."""
    described = parser("answers")
    described.add_argument("--minutes", type=float, default=60.0, help="stop after this time")
    described.add_argument("--items", type=int, default=600, help="the most items of each task")
    described.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    described.add_argument("--pilot", type=int, default=60, help="items of the pilot")
    args = described.parse_args()
    settings = Settings.of(args)
    end = monotonic() + 60.0 * args.minutes
    n_pilot, n_items = (1, 2) if settings.quick else (args.pilot, args.items)
    warnings.simplefilter("ignore", lb.errors.LlamaBranchWarning)
    with settings.context(settings.target, n_ctx=4096, n_seq_max=MOST + 4) as ctx:
        levels = {task: LEVELS[task][: 1 if settings.quick else None] for task in args.only}
        plans = {task: _planned(ctx, task, levels[task], n_pilot) for task in args.only}
        lines = [
            _answered(ctx, task, i, plan)
            for i in range(n_items)
            for task, plan in plans.items()
            if monotonic() < end
        ]
        caption = f"{title(ctx.model)}, {settings.threads} threads"
        results: JSON = {"plans": plans, "tasks": _shown(caption, plans, lines)}
        results |= {"planned": _compared(lines), "lines": lines}
        emit("answers", settings, {"target": ctx.model}, results)


@contextmanager
def _asked(ctx: lb.Context, task: str, seed: int, level: int) -> Iterator[tuple[lb.Branch, Item]]:
    asked = item(task, seed, level)
    grammar = None if asked.schema is None else lb.Grammar.from_json_schema(asked.schema)
    with lb.Branch.start(ctx, asked.prompt, grammar=grammar) as root:
        yield root, asked


def _planned(ctx: lb.Context, task: str, levels: Sequence[int], n_items: int) -> JSON:
    """Return the level of a task, the pilot's share of right samples, and the number of particles."""

    def pilot(run: Run, level: int, n_items: int, n: int) -> Outcomes:
        outcomes = []
        for i in range(n_items):
            with _asked(ctx, task, PILOT_SEED + i, level) as (root, asked):
                outcomes.append(run(root, asked, 1000 * i + 7, n))
        return {name: _average([each[name] for each in outcomes]) for name in outcomes[0]}

    votes: dict[int, Outcomes] = {}
    for level in levels:
        votes[level] = pilot(_vote, level, n_items, N)
        if votes[level][ONE].right <= GOAL[1]:
            break
    level = min(votes, key=lambda tried: abs(votes[tried][ONE].right - sum(GOAL) / 2))
    goal, tokens, n = votes[level][VOTE].tokens, dict[int, float](), N
    while task in ANSWERS and n not in tokens and len(tokens) < 3:
        tokens[n] = pilot(_powered, level, max(1, n_items // 4), n)[POWER].tokens
        n = max(1, min(MOST, round(n * goal / max(1.0, tokens[n]))))
    particles = min(tokens, key=lambda tried: abs(tokens[tried] - goal), default=0)
    share = votes[level][ONE].right
    return {"level": level, "share": share, "particles": particles}


def _answered(ctx: lb.Context, task: str, i: int, plan: JSON) -> JSON:
    """Answer an item by all methods of its task."""
    outcomes: Outcomes = {}
    with _asked(ctx, task, i, plan["level"]) as (root, asked):
        for run, tasks in METHODS[:: 1 if i % 2 else -1]:
            if task in tasks:
                n = plan["particles"] if run is _powered else N
                outcomes |= run(root, asked, 1000 * i + 1, n)
    methods = {name: outcome._asdict() for name, outcome in outcomes.items()}
    return {"task": task, "item": i, "methods": methods}


# -- the report ----------------------------------------------------------------------------------------


def _shown(caption: str, plans: Mapping[str, JSON], lines: Sequence[JSON]) -> JSON:
    """Show a table for each task; return the figures."""
    results: JSON = {}
    for task, plan in plans.items():
        items = [line["methods"] for line in lines if line["task"] == task]
        means = {
            name: _average([Outcome(**methods[name]) for methods in items])
            for name in (items[0] if items else ())
        }
        results[task] = {name: mean._asdict() for name, mean in means.items()}
        rows = [(name, percent(mean.right), number(mean.tokens, 1)) for name, mean in means.items()]
        about = f"{task}, level {plan['level']}, {len(items)} items. {caption}"
        table(about, ("", "right", "tokens"), rows)
    return results


def _compared(lines: Sequence[JSON]) -> list[JSON]:
    """Compare the methods as planned, over all items of their tasks."""
    comparisons: list[JSON] = []
    for first, second, tasks in PLANNED:
        pairs = [
            (line["methods"][first]["right"], line["methods"][second]["right"])
            for line in lines
            if line["task"] in tasks
        ]
        gained, lost = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
        shares = {name: fmean(p[k] for p in pairs) if pairs else math.nan
                  for k, name in enumerate(("right", "right_over"))}  # fmt: skip
        comparisons.append({
            "method": first, "over": second, "n": len(pairs), **shares, "gained": gained,
            "lost": lost, "p": mcnemar(gained, lost),
        })  # fmt: skip
    for c, p in zip(comparisons, holm([c["p"] for c in comparisons]), strict=True):
        c["p_holm"] = p
    table(
        "Planned comparisons, items of all their tasks together",
        ("", "over", "items", "right", "against", "only the first", "only the second", "p, Holm"),
        [
            (
                c["method"], c["over"], str(c["n"]), percent(c["right"]), percent(c["right_over"]),
                str(c["gained"]), str(c["lost"]), number(c["p_holm"], 3),
            )
            for c in comparisons
        ],
    )  # fmt: skip
    return comparisons


def mcnemar(gained: int, lost: int) -> float:
    """Return the p-value of the exact two-sided McNemar test.

    Args:
        gained: the number of items that only the first method has right.
        lost: the number of items that only the second method has right.
    """
    n = gained + lost
    tail = sum(math.comb(n, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / (1 << n))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values of several tests, adjusted by Holm's method."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, reached = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        reached = max(reached, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = reached
    return adjusted


if __name__ == "__main__":
    main()
