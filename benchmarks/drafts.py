"""Drafts without a draft model beside plain decoding: five texts, and JSON under two schemas.

    python -m benchmarks.drafts --target smollm2-135m:BF16 --threads 1 [--only edit json people]

``edit``, ``extract``, ``quote``, ``translate`` and ``free`` draft by copying. ``json`` (five fields from
one text) and ``people`` (eight fields from each of five texts) draft what the grammar forces, too. In
each task these take turns: plain decoding, and drafts of the length "auto" and of fixed lengths. A text
ends where the model ends it, or after --tokens. The targets smollm2-135m, smollm2-135m:Q8_0, :BF16 and
:Q4_0 are one model in several types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

import llamabranch as lb
from llamabranch.cli.demo import PERSON, SCHEMA

from .prompts import PEOPLE, PEOPLE_SCHEMA, TASKS
from .report import (
    Settings,
    emit,
    number,
    parser,
    percent,
    pm,
    series_json,
    table,
    title,
)
from .timing import Maker, Series, Timing, Work, interleave

PLAIN, AUTO = "plain", "auto"


class Task(NamedTuple):
    """The prompts of a task, what ends their texts, and the schema of the texts, if they are JSON."""

    prompts: Sequence[str]
    stop: Sequence[str] = ()
    schema: Mapping[str, object] | None = None


def _json_prompts(texts: Sequence[str]) -> list[str]:
    return [f"Text: {text}\nThe same as JSON: " for text in texts]


ALL: dict[str, Task] = {
    **{name: Task([text]) for name, text in TASKS.items()},
    "edit": Task([TASKS["edit"]], ("\n\n", "\n```")),
    "json": Task(_json_prompts([PERSON]), schema=SCHEMA),
    "people": Task(_json_prompts(PEOPLE), schema=PEOPLE_SCHEMA),
}


def main() -> None:
    """Measure every task."""
    described = parser("drafts without a model", runs=3, tokens=160, target="smollm2-135m")
    add = described.add_argument
    add("--only", nargs="+", choices=ALL, default=list(ALL), help="default: all tasks")
    add("--temperatures", type=float, nargs="+", default=[0.0], help="default: 0")
    add("--lengths", type=int, nargs="+", default=[3, 7, 15], help="fixed draft lengths")
    args = described.parse_args()
    settings = Settings.of(args)
    with settings.context(settings.target) as ctx:
        results = {
            f"{name}, T = {temperature:g}": _measure(
                name, ctx, settings, temperature, [AUTO, *args.lengths]
            )
            for temperature in args.temperatures
            for name in args.only
        }
        emit("drafts", settings, {"target": ctx.model}, results)


def _measure(
    name: str, ctx: lb.Context, settings: Settings, temperature: float, lengths: Sequence[int | str]
) -> Mapping[str, object]:
    task = ALL[name]
    if settings.quick:
        task = task._replace(prompts=task.prompts[:1])
    makers = {PLAIN: _ours(ctx, task, settings.tokens, temperature, 0)}
    for length in lengths:
        label = length if isinstance(length, str) else f"fixed {length}"
        makers[label] = _ours(ctx, task, settings.tokens, temperature, length)
    compared = interleave(makers, n_runs=settings.runs, n_items=len(task.prompts))
    fixed = [label for label in compared if label.startswith("fixed")]
    best = max(fixed, key=lambda label: compared[label].rate.median)
    over = {other: compared[AUTO].ratio(compared[other]) for other in (PLAIN, best)}
    _show(f"{name}, T = {temperature:g}. {title(ctx.model)}", settings, compared)
    table(f"{name}: auto over", tuple(over), [tuple(pm(ratio) for ratio in over.values())])
    return {
        "compared": {
            label: series_json(series, compared[PLAIN]) for label, series in compared.items()
        },
        "best_fixed": best,
        "auto_over": {label: ratio.as_dict() for label, ratio in over.items()},
        "same_texts": compared[AUTO].same_texts(compared[PLAIN]),
    }


def _ours(
    ctx: lb.Context, task: Task, n_tokens: int, temperature: float, length: int | str
) -> Maker:
    """Return a method that decodes with a new drafter in every run; length 0: plainly.

    A drafter kept between runs would copy the text of the run before.
    """

    def make(run: int) -> Work:
        grammar = None if task.schema is None else lb.Grammar.from_json_schema(task.schema)
        drafter: lb.Drafter | None = None
        if length:
            drafter = lb.SuffixDrafter() if grammar is None else lb.GrammarDrafter.copying()
        config = lb.SpeculativeConfig(draft_k=length) if length else None
        speculator = lb.Speculator(ctx, drafter, config)

        def work(item: int) -> Timing:
            sampling = lb.SamplingParams(temperature=temperature, seed=1000 * (run + 1) + item)
            with closing(
                speculator.generate(
                    task.prompts[item], max_tokens=n_tokens, sampling=sampling, stop=task.stop,
                    grammar=grammar,
                )
            ) as text:  # fmt: skip
                text.finish()
            tokens = tuple(text.tokens)
            return Timing(len(tokens), text.elapsed_s, tokens, text.stats)

        return work

    return make


def _show(caption: str, settings: Settings, compared: Mapping[str, Series]) -> None:
    rows = []
    for label, series in compared.items():
        stats, n_texts = series.stats, len(series.timings)
        same, of = series.same_texts(compared[PLAIN])
        rows.append(
            (
                label,
                pm(series.rate, 1),
                pm(series.ratio(compared[PLAIN])),
                number(stats.num_rounds / max(1, n_texts), 1) if of else "-",
                percent(stats.draft_acceptance_rate),
                f"{same} of {of}" if of else "-",
            )
        )
    table(
        f"{caption}: {settings.threads} threads, at most {settings.tokens} tokens, medians of "
        f"{settings.runs} runs (lowest to highest)",
        ("", "tokens/s", "x plain", "decodes a text", "accepted / drafted", "same text"),
        rows,
    )


if __name__ == "__main__":
    main()
