"""``llamabranch bench``: measure which draft length is the fastest for a pair of models."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import llamabranch as lb
from llamabranch.bench.machine import Machine
from llamabranch.bench.pair import Cell, PairBench, PairReport

from . import options as opt
from .console import Console, base_name, interval_text, number, spread_text
from .drafters import is_model, make_drafter
from .files import piped_or_read
from .interrupts import EXIT_INTERRUPTED, InterruptHandler
from .options import MODEL_OPTIONS, OUTPUT_OPTIONS, TEXT, Given, option, with_options

# A story, instructions, a program and a dialogue, because acceptance depends on the kind of text.
PROMPTS = (
    "Once upon a time there was a miller who had nothing left but his mill and one grey goose.",
    "The best way to learn a new language is",
    'def is_prime(n: int) -> bool:\n    """Return True if n is a prime number."""\n',
    'One winter night somebody knocked. "Who is there?" asked the old woman.',
)
COLUMNS = ("draft length", "tokens a second", "x plain", "95 %", "accept rate", "tokens a pass")


@with_options(
    *("max_tokens", "chat", "system", "temperature", "settings"),
    "model",
    "draft",
    *MODEL_OPTIONS[1:],
    *OUTPUT_OPTIONS,
    max_tokens=64,
)
def bench(
    given: Given,
    console: Console,
    texts: opt.Prompts = None,
    prompts: opt.MorePrompts = None,
    runs: Annotated[
        int, option("-r --runs", "How often everything is measured.", TEXT, metavar="N", min=1)
    ] = 3,
    longest: Annotated[
        int, option("--longest", "The longest draft.", TEXT, metavar="N", min=1, max=64)
    ] = 8,
) -> None:
    """Measure drafting with a pair of models here, and name the best draft length.

    llamabranch bench -m qwen3-4b -md qwen3-0.6b
    llamabranch bench -m tale-target -p "Once upon a time" -n 32 -r 1 --longest 4

    Plain decoding and drafts take turns. A length is named as the best only if
    the whole 95 % interval of its speed-up is above 1.
    """
    params, config = given.params(), given.config()
    named = piped_or_read([*(texts or ()), *(prompts or ())]) or PROMPTS
    names = given.resolve(console)
    context, drafter = given.open_pair(names, console)
    contexts = dict(zip(filter(is_model, names[1]), drafter.contexts, strict=True))

    def new_drafter() -> lb.Drafter:
        """Return a new drafter, which each run needs, with the same contexts."""
        return make_drafter(names[1], contexts.__getitem__)

    machine = Machine.now()
    with InterruptHandler([context, *drafter.contexts]) as interrupts:
        report = PairBench(
            context,
            new_drafter if names[1] else None,
            [
                context.model.prompt_tokens(given.prompt(context.model, text)) for text in named
            ],
            given.without_eog(params, context.model),
            config,
            n_tokens=given.max_tokens or 64, n_runs=runs, lengths=(*range(1, longest + 1), "auto"),
            progress=console.progress,
            stop=lambda: interrupts.requested,
        ).run()  # fmt: skip
    console.progress("")
    console.line(machine.describe(context.n_threads))
    console.line(f"plain decoding: {spread_text(report.plain.rate, 1)} tokens a second")
    if report.lengths:
        console.line()
        console.table(COLUMNS, list(map(_row, report.lengths)), wide=("tokens a pass",))
        console.line()
    console.line(_advice(report, names[1]))
    console.answer(
        {
            "target": names[0],
            "drafters": list(names[1]),
            "machine": machine.as_dict(),
            "n_threads": context.n_threads,
            "interrupted": report.stopped,
            "plain": {"tokens_a_second": report.plain.rate.as_dict()},
            "lengths": list(map(_cell, report.lengths)),
            "confirmed": report.confirmed and _cell(report.confirmed),
            "verdict": report.verdict,
            "best": report.best and report.best.length,
        }
    )
    if interrupts.requested:
        console.note("interrupted: these are the measurements so far")
        raise typer.Exit(EXIT_INTERRUPTED)


def _advice(report: PairReport, drafters: tuple[str, ...]) -> str:
    """Return what the measurement says, in one sentence."""
    confirmed = report.confirmed
    if not report.lengths:
        return "Nothing was compared." if drafters else "There is no drafter to compare."
    if report.candidate is None or (confirmed is not None and not confirmed.drafts):
        return "Nothing was drafted: try prompts that the drafter can continue, or another -md."
    if confirmed is None:
        return "Interrupted before the best length was measured again."
    interval = confirmed.series.interval(confirmed.base)
    name = "+".join(map(base_name, drafters))
    gain = f"{interval.median:.2f} ({interval_text(interval)}) times plain decoding"
    found = f"Draft length {confirmed.length} with {name}: {gain}."
    if report.verdict == "faster":
        return f"{found} Fastest here: -md {'+'.join(drafters)} -k {confirmed.length}"
    if report.verdict == "slower":
        return f"{found} Fastest here: -md none"
    return f"{found} Too close to tell: measure more with -r, -n or more prompts."


def _row(cell: Cell) -> tuple[object, ...]:
    stats = cell.series.stats
    return (
        cell.length,
        spread_text(cell.series.rate, 1),
        spread_text(cell.series.ratio(cell.base), 2),
        interval_text(cell.series.interval(cell.base)),
        number(100 * stats.draft_acceptance_rate, 1, " %"),
        number(stats.mean_acceptance_length, 2),
    )


def _cell(cell: Cell) -> dict[str, Any]:
    interval = cell.series.interval(cell.base)
    return {
        "draft_length": cell.length,
        "tokens_a_second": cell.series.rate.as_dict(),
        "speed_up": interval.median,
        "speed_up_range": [interval.low, interval.high],
        "accept_rate": cell.series.stats.draft_acceptance_rate,
        "stats": cell.series.stats.as_dict(),
    }
