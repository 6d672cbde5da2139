"""Answers of a small model at equal compute: votes, samples, power sampling, constraints.

    python -m benchmarks.answers --target smollm2-135m:Q8_0 --threads 1 --out FILE [--minutes 60]

The four tasks are in `answer_tasks`. First a pilot makes a plan, with items that are not used later: the
level of each task (one sample should be right in 30 to 60 % of the items), and the number of particles
of power sampling, which should decode as many tokens as a vote of eight.

The plan is the first thing in FILE and does not change. Then all methods answer the same items with the
same seeds, in turn. If the time was too short, a later call continues with the plan in FILE. Files of
different tasks (``--only``) can be joined. ``--minutes 0`` only shows the tables.

Each item is asked once. The tokens are those decoded after the prompt. Intervals are bootstrapped over
items. Paired tests are exact (McNemar), and the planned ones are adjusted together (Holm).
"""

from __future__ import annotations

import json
import math
import runpy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from time import monotonic, perf_counter, process_time
from typing import Any, NamedTuple

import numpy as np

import llamabranch as lb
from llamabranch import search

from .answer_tasks import LEVELS, TASKS, Item, item
from .paired import holm, interval, mcnemar
from .report import Settings, emit, number, parser, table, title

ANSWERS = ("problems", "dates", "records")  # without a rule that the answer must follow
N, MOST = 8, 32  # texts of the vote, and the most of power sampling
PILOT_SEED = 1_000_000
GOAL = (0.30, 0.60)
COLD, WARM = (lb.SamplingParams(temperature=t) for t in (0.0, 0.7))
WHOLE = lb.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


EXAMPLE = Path(__file__).parents[1] / "examples" / "power_sampling.py"
power_sampling = runpy.run_path(str(EXAMPLE))["power_sampling"]

JSON = dict[str, Any]


class Outcome(NamedTuple):
    """The result of a method for an item."""

    text: str
    answer: object
    logprob: float  # the mean of its tokens, nats
    tokens: int  # decoded
    also: Mapping[str, JSON] = {}  # results of other methods that use the same texts


Run = Callable[[lb.Branch, Item, int, int], Outcome]


@contextmanager
def _as(root: lb.Branch, sampling: lb.SamplingParams, seed: int) -> Iterator[lb.Branch]:
    with root.fork() as branch:
        branch.resample(sampling.replace(seed=seed))
        yield branch


def _stop(task: Item) -> Sequence[str]:
    return () if task.schema else ("\n",)


def _mean(text: search.Hypothesis) -> float:
    return text.logprob / max(1, len(text.tokens))


def _of(task: Item, text: search.Hypothesis) -> JSON:
    return {
        "right": task.is_right(text.text),
        "valid": task.is_valid(text.text),
        "logprob": _mean(text),
        "text": text.text,
    }


def _greedy(root: lb.Branch, task: Item, seed: int, n: int) -> Outcome:
    with _as(root, COLD, seed) as branch:
        result = search.best_of_n(branch, 1, task.max_tokens, stop=_stop(task))
    return Outcome(
        result.text, task.read(result.text), _mean(result.best), result.stats.tokens_decoded
    )


def _vote(root: lb.Branch, task: Item, seed: int, n: int) -> Outcome:
    with _as(root, WARM, seed) as branch:
        result = search.vote(branch, task.read, n, task.max_tokens, stop=_stop(task))
    best = max(result.hypotheses, key=_mean)
    also = {"best_of_n": _of(task, best), "one sample": _one(task, result.hypotheses)}
    mean, tokens = _mean(result.best), result.stats.tokens_decoded
    return Outcome(result.text, result.answer, mean, tokens, also)


def _one(task: Item, texts: Sequence[search.Hypothesis]) -> JSON:
    """Return the average result of a single sample."""
    samples = [_of(task, text) for text in texts]
    return {
        name: fmean(sample[name] for sample in samples) for name in ("right", "valid", "logprob")
    }


def _powered(root: lb.Branch, task: Item, seed: int, n: int) -> Outcome:
    """Draw particles by power sampling, and weigh their answers."""
    before = root.ctx.decoder.n_decodes  # of one token each
    with _as(root, WHOLE, seed) as branch:
        found = power_sampling(
            branch, n, task.max_tokens, "\n" if _stop(task) else "\0", np.random.default_rng(seed)
        )
    shares: defaultdict[str, float] = defaultdict(float)
    for text, _, share in found:
        answer = task.read(text)
        if answer is not None:
            shares[answer] += share
    best = max(shares, key=lambda answer: shares[answer], default=None)
    text, logprob, _ = max(found, key=lambda each: each[2])
    mean = logprob / max(1, len(root.ctx.tokenize(text, add_special=False)))
    return Outcome(text, best, mean, root.ctx.decoder.n_decodes - before)


def _constrained(root: lb.Branch, task: Item, seed: int, n: int) -> Outcome:
    with _as(root, COLD, seed) as branch:
        text = branch.generate(task.max_tokens, _stop(task), constraint=task.constraint).finish()
        mean = branch.log_likelihood() / max(1, len(text.tokens))
    return Outcome(text.text, task.read(text.text), mean, text.stats.target_forward_passes)


@dataclass(frozen=True)
class Method:
    """A method, its tasks, and its number of texts; 0 = the number of equal compute."""

    run: Run
    tasks: Sequence[str]
    n: int = 0


VOTE, GREEDY, POWER, RULE = "vote of 8", "greedy", "power 4", "greedy, constraint"
METHODS: Mapping[str, Method] = {
    GREEDY: Method(_greedy, tuple(TASKS), 1),
    VOTE: Method(_vote, ANSWERS, N),
    POWER: Method(_powered, ANSWERS),
    RULE: Method(_constrained, ("records", "orders"), 1),
}
PLANNED: Sequence[tuple[str, str, Sequence[str]]] = (
    (VOTE, GREEDY, ANSWERS),
    (POWER, VOTE, ANSWERS),
    ("best_of_n", VOTE, ANSWERS),
    (RULE, GREEDY, ("records", "orders")),
)


def main() -> None:
    """Make or read the plan, answer items while there is time, show the tables."""
    described = parser("answers")
    described.add_argument("--out", type=Path, help="the file of the plan and all answers")
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
        records = Records(args.out)
        for task in args.only:
            levels = LEVELS[task][:1] if settings.quick else LEVELS[task]
            if task not in records.plan:
                records.add({"plan": task, **_calibrated(ctx, task, levels, n_pilot)})
        for i in range(n_items):
            for task in args.only:
                if monotonic() < end and (task, i) not in records.done:
                    records.add(_answered(ctx, task, i, records.plan[task]))
        emit("answers", settings, {"target": ctx.model}, _shown(ctx, settings, records))


@dataclass
class Records:
    """The lines of a file: first the plan of each task, then one line for each item.

    Attributes:
        plan: for each task its level, the pilot's result and the numbers of texts.
        items: the methods' results, by task and number of the item.
    """

    path: Path | None
    plan: dict[str, JSON] = field(default_factory=dict)
    items: dict[str, dict[int, dict[str, JSON]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            for line in self.path.read_text("utf-8").splitlines():
                self._take(json.loads(line))

    def add(self, record: JSON) -> None:
        """Append a line."""
        self._take(record)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def _take(self, record: JSON) -> None:
        if "plan" in record:
            self.plan[record["plan"]] = record
        else:
            self.items.setdefault(record["task"], {})[record["item"]] = record["methods"]

    @property
    def done(self) -> set[tuple[str, int]]:
        """The tasks and numbers of the items that have been answered."""
        return {(task, i) for task, answered in self.items.items() for i in answered}


# -- the pilot -----------------------------------------------------------------------------------------


def _calibrated(ctx: lb.Context, task: str, levels: Sequence[int], n: int) -> JSON:
    """Return the level of a task, its pilot, and the numbers of texts of equal compute."""
    tried: dict[int, JSON] = {}
    for level in levels:
        tried[level] = _piloted(ctx, task, level, n)
        if tried[level]["share"] <= GOAL[1]:
            break
    level = min(tried, key=lambda tried_level: abs(tried[tried_level]["share"] - sum(GOAL) / 2))
    n_power = _matched(ctx, task, level, max(1, n // 4)) if task in ANSWERS else 0
    return {"level": level, "pilot": tried, "n": {POWER: n_power}}


def _piloted(ctx: lb.Context, task: str, level: int, n: int) -> JSON:
    """Sample eight texts for each item; return the share that is right."""
    right: list[list[bool]] = []
    for i in range(n):
        asked = item(task, PILOT_SEED + i, level)
        result = ctx.complete(
            asked.prompt, n=N, max_tokens=asked.max_tokens, stop=_stop(asked), drafter=None,
            json_schema=asked.schema, sampling=WARM, seed=1000 * i + 7,
        )  # fmt: skip
        right.append([asked.is_right(choice.text) for choice in result.choices])
    share = fmean(verdict for verdicts in right for verdict in verdicts)
    return {"share": share, "items": n}


def _matched(ctx: lb.Context, task: str, level: int, n_items: int) -> int:
    """Return the number of particles with which power sampling decodes as many tokens as the vote."""
    goal = _mean_tokens(ctx, task, level, n_items, VOTE, N)
    tokens: dict[int, float] = {}
    n = N
    while n not in tokens and len(tokens) < 3:
        tokens[n] = _mean_tokens(ctx, task, level, n_items, POWER, n)
        n = max(1, min(MOST, round(n * goal / max(1.0, tokens[n]))))
    return min(tokens, key=lambda tried: abs(tokens[tried] - goal))


def _mean_tokens(ctx: lb.Context, task: str, level: int, n_items: int, name: str, n: int) -> float:
    counts = []
    for i in range(n_items):
        asked = item(task, PILOT_SEED + i, level)
        with _root(ctx, asked) as root:
            counts.append(METHODS[name].run(root, asked, 1000 * i + 7, n).tokens)
    return fmean(counts)


def _root(ctx: lb.Context, asked: Item) -> lb.Branch:
    grammar = None if asked.schema is None else lb.Grammar.from_json_schema(asked.schema)
    return lb.Branch.start(ctx, asked.prompt, grammar=grammar)


# -- answers -------------------------------------------------------------------------------------------


def _answered(ctx: lb.Context, task: str, i: int, plan: JSON) -> JSON:
    """Answer an item by all methods of its task."""
    asked = item(task, i, plan["level"])
    results: dict[str, JSON] = {}
    names = [name for name, method in METHODS.items() if task in method.tasks]
    with _root(ctx, asked) as root:
        for name in names[:: 1 if i % 2 else -1]:
            method = METHODS[name]
            start, cpu = perf_counter(), process_time()
            outcome = method.run(root, asked, 1000 * i + 1, method.n or plan["n"][name])
            used = {"cpu_s": process_time() - cpu, "s": perf_counter() - start}
            right = asked.judge(outcome.answer)
            results[name] = {
                "right": right,
                "valid": asked.is_valid(outcome.text),
                "logprob": outcome.logprob,
                "text": outcome.text,
                "answer": outcome.answer,
                "tokens": outcome.tokens,
                **used,
            }
            for other, other_result in outcome.also.items():
                n_texts = N if other == "one sample" else 1
                results[other] = {**other_result, "tokens": outcome.tokens / n_texts}
    return {"task": task, "item": i, "methods": results}


def _shown(ctx: lb.Context, settings: Settings, records: Records) -> JSON:
    """Show the tables; return their figures."""
    results: JSON = {}
    columns = ("", "right, % (95 %)", "valid, %", "log p a token", "tokens", "CPU s", "texts")
    for task, items in records.items.items():
        plan = records.plan[task]
        counts = {name: method.n or plan["n"].get(name) for name, method in METHODS.items()}
        counts |= {"one sample": 1, "best_of_n": N}
        known = {name for by_method in items.values() for name in by_method}
        summaries = {
            name: _summary([by_method[name] for by_method in items.values()], n_texts)
            for name, n_texts in counts.items()
            if name in known
        }
        results[task] = {"level": plan["level"], "pilot": plan["pilot"], "methods": summaries}
        level = f"{task}, level {plan['level']}, {len(items)} items"
        table(
            f"{level}. {title(ctx.model)}, {settings.threads} threads",
            columns,
            [
                (
                    name, _range(x["right"], x["low"], x["high"]), number(100 * x["valid"], 0),
                    number(x["logprob"]), number(x["tokens"], 1), number(x["cpu_s"]),
                    str(x["texts"]),
                )
                for name, x in summaries.items()
            ],
        )  # fmt: skip
    results["planned"] = _compared(records)
    return results


def _summary(results: Sequence[JSON], n_texts: int) -> JSON:
    """Return the means of a method's results."""
    right = [float(r["right"]) for r in results]
    low, high = interval(right)
    means = {
        key: _known_mean(r.get(key, math.nan) for r in results)
        for key in ("right", "valid", "logprob", "tokens", "cpu_s", "s")
    }
    return {**means, "low": low, "high": high, "n": len(results), "texts": n_texts}


def _known_mean(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan


def _range(value: float, low: float, high: float) -> str:
    return f"{100 * value:.1f} ({100 * low:.0f} to {100 * high:.0f})"


def _compared(records: Records) -> list[JSON]:
    """Compare the methods as planned, over all items of their tasks."""
    comparisons: list[JSON] = []
    for name, other, tasks in PLANNED:
        pairs = [
            (by_method[name]["right"], by_method[other]["right"])
            for task in tasks
            for by_method in records.items.get(task, {}).values()
        ]
        gained = sum(a and not b for a, b in pairs)
        lost = sum(b and not a for a, b in pairs)
        low, high = interval([a - b for a, b in pairs])
        comparisons.append(
            {
                "method": name, "over": other, "n": len(pairs), "gained": gained, "lost": lost,
                "low": low, "high": high, "p": mcnemar(gained, lost),
            }
        )  # fmt: skip
    for c, p in zip(comparisons, holm([c["p"] for c in comparisons]), strict=True):
        c["p_holm"] = p
    table(
        "Planned comparisons, items of all their tasks together",
        (
            "", "over", "items", "only the first right", "only the second",
            "difference, % (95 %)", "p, Holm",
        ),
        [
            (
                x["method"], x["over"], str(x["n"]), str(x["gained"]), str(x["lost"]),
                _range((x["gained"] - x["lost"]) / max(1, x["n"]), x["low"], x["high"]),
                number(x["p_holm"], 3),
            )
            for x in comparisons
        ],
    )  # fmt: skip
    return comparisons


if __name__ == "__main__":
    main()
