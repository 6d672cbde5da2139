"""Answers of a small model at equal compute: votes, samples, power sampling, constraints.

    python -m benchmarks.answers --target smollm2-135m:Q8_0 --threads 1 --out FILE [--minutes 60]

Five tasks of generated items (`answer_tasks`). A pilot of other items chooses the level of each task,
so that one sample is right in 30 to 60 %, and for each method the number of texts that decodes as many
tokens as the reference: a vote of eight, or, where a rule is asked for, eight samples and the rule as a
filter. What it chooses comes first in FILE and does not change. Then all methods answer the same items
with the same seeds, in turn; a later call goes on where the time ended, with the plan of the file. Files
of several tasks (``--only``) may be joined; with ``--minutes 0`` only the tables are shown. Each
item is asked once. Tokens are those decoded after the prompt; intervals are bootstrapped over items;
paired tests are exact (McNemar), and those that were planned are adjusted together (Holm).
"""

from __future__ import annotations

import json
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from time import monotonic, perf_counter, process_time
from typing import Any, NamedTuple

import llamabranch as lb
from llamabranch import search

from .answer_tasks import LEVELS, TASKS, Item, item
from .paired import holm, interval, mcnemar
from .report import Settings, emit, number, parser, table, title

ANSWERS, RULES = ("problems", "dates", "records"), ("letters", "orders")
N, MOST = 8, 32  # texts of the reference, and of any method
PILOT_SEED = 1_000_000
POWER = 4.0
GOAL = (0.30, 0.60)
COLD, COOL, WARM = (lb.SamplingParams(temperature=t) for t in (0.0, 0.25, 0.7))
WHOLE = lb.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


JSON = dict[str, Any]


class Found(NamedTuple):
    """What a method gives for an item."""

    text: str
    answer: object
    logprob: float  # the mean of a token, nats
    tokens: int  # decoded
    also: Mapping[str, JSON] = {}  # of other methods that use the same texts


Run = Callable[[lb.Branch, Item, int, int], Found]


@contextmanager
def _as(root: lb.Branch, sampling: lb.SamplingParams, seed: int) -> Iterator[lb.Branch]:
    with root.fork() as branch:
        branch.resample(sampling.replace(seed=seed))
        yield branch


def _stop(task: Item) -> Sequence[str]:
    return () if task.schema else ("\n",)


def _mean(found: search.Hypothesis) -> float:
    return found.logprob / max(1, len(found.node.path_tokens))


def _of(task: Item, found: search.Hypothesis) -> JSON:
    return {
        "right": task.is_right(found.text),
        "valid": task.is_valid(found.text),
        "logprob": _mean(found),
        "text": found.text,
    }


def _greedy(root: lb.Branch, task: Item, seed: int, n: int) -> Found:
    with _as(root, COLD, seed) as branch:
        found = search.best_of_n(branch, 1, task.max_tokens, stop=_stop(task))
    return Found(found.text, task.read(found.text), _mean(found.best), found.stats.tokens_decoded)


def _vote(sampling: lb.SamplingParams, **options: Any) -> Run:
    def run(root: lb.Branch, task: Item, seed: int, n: int) -> Found:
        with _as(root, sampling, seed) as branch:
            found = search.vote(branch, task.read, n, task.max_tokens, stop=_stop(task), **options)
        also = {}
        if sampling is WARM and not options and n == N:  # the reference
            best = max(found.hypotheses, key=_mean)
            also = {"best_of_n": _of(task, best), "one sample": _one(task, found.hypotheses)}
        return Found(found.text, found.answer, _mean(found.best), found.stats.tokens_decoded, also)

    return run


def _one(task: Item, texts: Sequence[search.Hypothesis]) -> JSON:
    """Return what one of the samples is worth on average."""
    each = [_of(task, text) for text in texts]
    return {name: fmean(one[name] for one in each) for name in ("right", "valid", "logprob")}


def _weighted(power: float = 1.0) -> Run:
    """Particles whose answers are weighted, under the constraint where there is no power."""

    def run(root: lb.Branch, task: Item, seed: int, n: int) -> Found:
        with _as(root, WHOLE, seed) as branch:
            found = search.smc(
                branch, n, task.max_tokens, stop=_stop(task), power=power,
                ramp=0 if power == 1.0 else task.max_tokens // 4,
                constraint=task.constraint if power == 1.0 else None,
            )  # fmt: skip
        if not found.hypotheses:
            return Found("", None, math.nan, found.stats.tokens_decoded)
        shares: defaultdict[str, float] = defaultdict(float)
        for text in found.hypotheses:
            answer = task.read(text.text)
            if answer is not None:
                shares[answer] += math.exp(text.score)
        best = max(shares, key=lambda each: shares[each], default=None)
        return Found(found.text, best, _mean(found.best), found.stats.tokens_decoded)

    return run


def _filtered(root: lb.Branch, task: Item, seed: int, n: int) -> Found:
    """The most probable of several samples that keep the rule, or else of all."""
    with _as(root, WARM, seed) as branch:
        found = search.best_of_n(branch, n, task.max_tokens, stop=_stop(task))
    texts = found.hypotheses
    best = next((text for text in texts if task.is_valid(text.text)), texts[0])
    also = {"one sample": _one(task, texts)}
    return Found(best.text, task.read(best.text), _mean(best), found.stats.tokens_decoded, also)


def _drawn(sampling: lb.SamplingParams) -> Run:
    """Texts under the constraint, token by token: of several the most probable one that keeps it."""

    def run(root: lb.Branch, task: Item, seed: int, n: int) -> Found:
        texts, tokens = [], 0
        for i in range(n):
            with _as(root, sampling, seed + i) as branch:
                made = branch.generate(task.max_tokens, _stop(task), constraint=task.constraint)
                made.finish()
                tokens += made.stats.target_forward_passes
                mean = branch.log_likelihood() / max(1, len(made.tokens))
                texts.append((task.is_valid(made.text), mean, made.text))
        _, mean, text = max(texts)
        return Found(text, task.read(text), mean, tokens)

    return run


def _rejected(root: lb.Branch, task: Item, seed: int, n: int) -> Found:
    if task.constraint is None or task.schema is not None:  # it has no grammar
        return Found("", None, math.nan, 0)
    with _as(root, WARM, seed) as branch:
        found = search.rejection(
            branch, task.constraint, 1, task.max_tokens, stop=_stop(task), max_draws=256
        )
    mean = _mean(found.best) if found.hypotheses else math.nan
    return Found(found.text, task.read(found.text), mean, found.stats.tokens_decoded)


@dataclass(frozen=True)
class Method:
    """A method, the tasks that it is for, and its number of texts: 0 = that of equal compute."""

    run: Run
    tasks: Sequence[str]
    n: int = 0


VOTE, FILTER, GREEDY = "vote of 8", "8 samples, filtered", "greedy"
METHODS: Mapping[str, Method] = {
    GREEDY: Method(_greedy, tuple(TASKS), 1),
    VOTE: Method(_vote(WARM), ANSWERS, N),
    "vote of 8, lossless stop": Method(_vote(WARM, confidence=1.0), ANSWERS, N),
    "vote, T = 0.25": Method(_vote(COOL), ANSWERS),
    "smc, power 4": Method(_weighted(POWER), ANSWERS),
    "greedy, constraint": Method(_drawn(COLD), ("records", *RULES), 1),
    FILTER: Method(_filtered, RULES, N),
    "1 sample, constraint": Method(_drawn(WARM), RULES, 1),
    "samples, constraint": Method(_drawn(WARM), RULES),
    "smc, constraint": Method(_weighted(), RULES),
    "rejection": Method(_rejected, ("letters",), 1),
}
PLANNED: Sequence[tuple[str, str, Sequence[str]]] = (
    (VOTE, GREEDY, ANSWERS),
    ("vote, T = 0.25", VOTE, ANSWERS),
    ("smc, power 4", VOTE, ANSWERS),
    ("best_of_n", VOTE, ANSWERS),
    ("greedy, constraint", GREEDY, ("records", "orders")),
    ("samples, constraint", FILTER, ("orders",)),
    ("smc, constraint", FILTER, ("orders",)),
)


def reference(task: str) -> str:
    """Return the method whose tokens are the compute of a task."""
    return VOTE if task in ANSWERS else FILTER


def main() -> None:
    """Make or read the plan, answer items while there is time, show the tables."""
    described = parser("answers", runs=1, prompts=1, tokens=1)
    described.add_argument("--out", type=Path, help="the file of the plan and all answers")
    described.add_argument("--minutes", type=float, default=60.0, help="after which it stops")
    described.add_argument("--items", type=int, default=600, help="of each task, at most")
    described.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    described.add_argument("--pilot", type=int, default=60, help="items to choose a level by")
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
    """The lines of a file: the plan of each task, then an item each.

    Attributes:
        plan: of each task level, pilot and the numbers of texts.
        items: of each task, by their numbers: the methods' results.
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
        """The items that were answered."""
        return {(task, i) for task, its in self.items.items() for i in its}


# -- the pilot -----------------------------------------------------------------------------------------


def _calibrated(ctx: lb.Context, task: str, levels: Sequence[int], n: int) -> JSON:
    """Return the level of a task, its pilot, and the numbers of texts of equal compute."""
    tried: dict[int, JSON] = {}
    for level in levels:
        tried[level] = _piloted(ctx, task, level, n)
        if tried[level]["share"] <= GOAL[1]:
            break
    level = min(tried, key=lambda each: abs(tried[each]["share"] - sum(GOAL) / 2))
    counts = _matched(ctx, task, level, max(1, n // 4))
    return {"level": level, "pilot": tried, "n": counts}


def _piloted(ctx: lb.Context, task: str, level: int, n: int) -> JSON:
    """Sample eight texts of each item; return how many are right."""
    right: list[list[bool]] = []
    for i in range(n):
        asked = item(task, PILOT_SEED + i, level)
        found = ctx.complete(
            asked.prompt, n=N, max_tokens=asked.max_tokens, stop=_stop(asked), drafter=None,
            json_schema=asked.schema, sampling=WARM, seed=1000 * i + 7,
        )  # fmt: skip
        right.append([asked.is_right(each.text) for each in found.choices])
    share = fmean(each for its in right for each in its)
    return {"share": share, "items": n}


def _matched(ctx: lb.Context, task: str, level: int, n_items: int) -> dict[str, int]:
    """Return for each method the number of texts that decodes as many tokens as the reference."""
    free = [name for name, method in METHODS.items() if task in method.tasks and not method.n]
    counts = {name: METHODS[name].n or N for name in (*free, reference(task))}
    goal = _mean_tokens(ctx, task, level, n_items, reference(task), N)
    for name in free:
        seen: dict[int, float] = {}
        while counts[name] not in seen and len(seen) < 3:
            n = counts[name]
            seen[n] = _mean_tokens(ctx, task, level, n_items, name, n)
            counts[name] = max(1, min(MOST, round(n * goal / max(1.0, seen[n]))))
        counts[name] = min(seen, key=lambda each: abs(seen[each] - goal))
    return counts


def _mean_tokens(ctx: lb.Context, task: str, level: int, n_items: int, name: str, n: int) -> float:
    found = []
    for i in range(n_items):
        asked = item(task, PILOT_SEED + i, level)
        with _root(ctx, asked) as root:
            found.append(METHODS[name].run(root, asked, 1000 * i + 7, n).tokens)
    return fmean(found)


def _root(ctx: lb.Context, asked: Item) -> lb.Branch:
    grammar = None if asked.schema is None else lb.Grammar.from_json_schema(asked.schema)
    return lb.Branch.start(ctx, asked.prompt, grammar=grammar)


# -- answers -------------------------------------------------------------------------------------------


def _answered(ctx: lb.Context, task: str, i: int, plan: JSON) -> JSON:
    """Answer an item by all methods of its task."""
    asked = item(task, i, plan["level"])
    found: dict[str, JSON] = {}
    names = [name for name, method in METHODS.items() if task in method.tasks]
    with _root(ctx, asked) as root:
        for name in names[:: 1 if i % 2 else -1]:
            method = METHODS[name]
            start, cpu = perf_counter(), process_time()
            its = method.run(root, asked, 1000 * i + 1, method.n or plan["n"][name])
            used = {"cpu_s": process_time() - cpu, "s": perf_counter() - start}
            right = asked.judge(its.answer) if asked.answer else asked.is_valid(its.text)
            found[name] = {
                "right": right,
                "valid": asked.is_valid(its.text),
                "logprob": its.logprob,
                "text": its.text,
                "answer": its.answer,
                "tokens": its.tokens,
                **used,
            }
            for other, its_own in its.also.items():
                n_texts = N if other == "one sample" else 1
                found[other] = {**its_own, "tokens": its.tokens / n_texts}
    return {"task": task, "item": i, "methods": found}


def _shown(ctx: lb.Context, settings: Settings, records: Records) -> JSON:
    """Show the tables; return what they say."""
    results: JSON = {}
    columns = ("", "right, % (95 %)", "valid, %", "log p a token", "tokens", "CPU s", "texts")
    for task, items in records.items.items():
        plan = records.plan[task]
        counts = {name: method.n or plan["n"].get(name) for name, method in METHODS.items()}
        counts |= {"one sample": 1, "best_of_n": N}
        known = {name for its in items.values() for name in its}
        found = {
            name: _summary([its[name] for its in items.values()], n_texts)
            for name, n_texts in counts.items()
            if name in known
        }
        results[task] = {"level": plan["level"], "pilot": plan["pilot"], "methods": found}
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
                for name, x in found.items()
            ],
        )  # fmt: skip
    results["planned"] = _compared(records)
    return results


def _summary(each: Sequence[JSON], n_texts: int) -> JSON:
    """Return the means of a method's results."""
    right = [float(one["right"]) for one in each]
    low, high = interval(right)
    means = {
        key: _known_mean(one.get(key, math.nan) for one in each)
        for key in ("right", "valid", "logprob", "tokens", "cpu_s", "s")
    }
    return {**means, "low": low, "high": high, "n": len(each), "texts": n_texts}


def _known_mean(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan


def _range(value: float, low: float, high: float) -> str:
    return f"{100 * value:.1f} ({100 * low:.0f} to {100 * high:.0f})"


def _compared(records: Records) -> list[JSON]:
    """Compare the methods as planned, over all items of their tasks."""
    found: list[JSON] = []
    for name, other, tasks in PLANNED:
        pairs = [
            (its[name]["right"], its[other]["right"])
            for task in tasks
            for its in records.items.get(task, {}).values()
        ]
        gained = sum(a and not b for a, b in pairs)
        lost = sum(b and not a for a, b in pairs)
        low, high = interval([a - b for a, b in pairs])
        found.append(
            {
                "method": name, "over": other, "n": len(pairs), "gained": gained, "lost": lost,
                "low": low, "high": high, "p": mcnemar(gained, lost),
            }
        )  # fmt: skip
    for each, p in zip(found, holm([each["p"] for each in found]), strict=True):
        each["p_holm"] = p
    table(
        "Planned comparisons, items of all their tasks together",
        ("", "over", "items", "only it right", "only the other", "difference, % (95 %)", "p, Holm"),
        [
            (
                x["method"], x["over"], str(x["n"]), str(x["gained"]), str(x["lost"]),
                _range((x["gained"] - x["lost"]) / max(1, x["n"]), x["low"], x["high"]),
                number(x["p_holm"], 3),
            )
            for x in found
        ],
    )  # fmt: skip
    return found


if __name__ == "__main__":
    main()
