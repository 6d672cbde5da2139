"""``llamabranch compare``: how far one model is from another, on one text."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from llamabranch import ConfigError, pictures

from ..files import atomic_write
from .bundles import option, with_bundles
from .console import Console, decimal_size, number
from .eval import divergence_tables, open_for_chunks
from .files import check_new_file, read_prompt_file
from .interrupts import EXIT_FAILURE
from .options import OUTPUT, TEXT, ModelOptions, OutputOptions

if TYPE_CHECKING:
    from llamabranch.eval.comparison import Comparison

Rows = list[tuple[str, ...]]
_HEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>Two models compared</title>
<style>body { max-width: 60em; margin: 2em auto; padding: 0 1em; font-family: sans-serif }
td { text-align: right; padding: 0 1em 0 0; font-family: monospace; white-space: pre-wrap }
td:first-child { text-align: left; opacity: .65 }</style>
<h1>Two models compared</h1>
"""


@dataclass(frozen=True)
class CompareOptions:
    """What is compared, and what fails it."""

    panel: ClassVar[str] = TEXT

    text: Path | None = option(None, "The text, UTF-8.")
    window: int = option(512, "Tokens a chunk.", min=8)
    chunks: int = option(8, "Chunks at most.", min=1)
    coded: bool = option(False, "Through llama-perplexity's 16 bits.", "--coded")
    report: Path | None = option(None, "Write HTML.", "--output -o", rich_help_panel=OUTPUT)
    fail_kl: float | None = option(None, "Exit 1 above this mean, nats.", min=0)
    fail_top: float | None = option(None, "Exit 1 below this agreement.", min=0, max=1)


@with_bundles
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="The base model.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The model that is compared with it.")],
    *,
    asked: CompareOptions,
    models: ModelOptions,
    output: OutputOptions,
) -> None:
    """Compare two models on a text.

    KL divergence both ways, perplexities, where they part, and what it means. The numbers are those of
    llama-perplexity --kl-divergence; with --coded to its last digit.
    """
    with output.console() as console:
        from llamabranch.eval.comparison import compare_models

        if asked.text is None:
            raise ConfigError("compare needs a text", hint="--text FILE, of at least two windows")
        if asked.report is not None:
            check_new_file(asked.report)
        text, window = read_prompt_file(asked.text), asked.window
        both = [open_for_chunks(name, models, window, console) for name in (a, b)]
        found: list[Comparison] = []

        def note(done: Comparison) -> None:
            found[:] = [done]
            if done.n_forks:
                console.progress(f"greedy texts at place {len(done.forks) + 1} of {done.n_forks}")
            else:
                console.progress(f"{done.n_chunks} of {asked.chunks} chunks")

        try:
            compare_models(
                both[0], both[1], text, window, asked.chunks, coded=asked.coded, progress=note
            )
        finally:  # what is done is printed also when it is interrupted
            console.progress("")
            if found:
                _report(console, asked, found[0])
        divergence = found[0].divergence
        if divergence is None and (asked.fail_kl is not None or asked.fail_top is not None):
            raise ConfigError("--fail-kl and --fail-top need models with one tokenizer")
        if divergence is not None:
            its = divergence.statistics
            too_far = asked.fail_kl is not None and not its.mean.value <= asked.fail_kl
            if too_far or (asked.fail_top is not None and not its.same_top.value >= asked.fail_top):
                console.note("the models are further apart than --fail-kl or --fail-top allows")
                raise typer.Exit(EXIT_FAILURE)


def _report(console: Console, asked: CompareOptions, found: Comparison) -> None:
    tables = list(_tables(found))
    if asked.report is not None:
        with atomic_write(asked.report) as file:
            file.write(_page([*tables, (found.advice, [])]).encode())
    for _, rows in tables:
        console.table(rows[0], [tuple(map(pictures.visible, row)) for row in rows[1:]])
        console.line()
    console.line(found.advice)
    console.answer(found.as_dict())


def _page(tables: Sequence[tuple[str, Rows]]) -> str:
    """Return the tables as a page that is light or dark as the reader's browser is."""

    def shown(text: str) -> str:
        return html.escape(pictures.visible(text))

    parts = []
    for title, rows in tables:
        lines = ["<tr>" + "".join(f"<td>{shown(cell)}" for cell in row) for row in rows]
        parts.append(f"<h2>{shown(title)}</h2>\n<table>{''.join(lines)}</table>")
    return _HEAD + "\n".join(parts) + "\n"


def _tables(found: Comparison) -> Iterator[tuple[str, Rows]]:
    """Yield the tables of the report, each with a title and a first row of names."""
    yield "Models", [
        ("", "name", "type", "size", "vocabulary", "K/V"),
        *(
            (side, str(m["name"]), str(m["type"]), decimal_size(float(str(m["bytes"]))),
             str(m["n_vocab"]), str(m["kv_type"]))
            for side, m in zip("AB", found.models, strict=True)
        ),
    ]  # fmt: skip
    if found.divergence is None:
        t = {name: math.nan if x is None else x for name, x in found.totals.items()}
        yield "Different tokenizers: bits", [
            ("", "bits", "bits per byte"),
            *((s, number(t[f"bits{s}"], 1), number(t[f"bpb{s}"], 4)) for s in "AB"),
            ("bytes", number(t["bytes"], 0), ""),
            ("greedy next texts agree, %", number(100 * t["agreement"], 1), ""),
        ]  # fmt: skip
        return
    (names, *numbers), percentiles = divergence_tables(found.divergence)
    reverse = ("mean KL(B, A), nats", number(found.reverse, 6), "")
    yield (
        "Numbers, KL(A, B): of B from A, the base",
        [("A is the base", *names[1:]), *numbers, reverse],
    )
    yield "Percentiles", percentiles
    yield "The worst tokens", [
        ("KL", "before", "token", "after", "A's top", "B's top"),
        *((number(t.kl, 3), t.before, t.text, t.after, t.top_a, t.top_b) for t in found.worst),
    ]  # fmt: skip
    groups = [*found.by(lambda t: f"quarter {t.quarter}").items()]
    groups += found.by(lambda t: t.kind).items()
    yield "Where", [
        ("", "tokens", "mean KL(A, B)"), *((name, str(n), number(kl, 5)) for name, (n, kl) in groups)
    ]  # fmt: skip
    if found.forks:
        yield "Greedy texts", [
            ("", "tokens until they part"), ("median", f"{found.median_fork:g}"),
            ("each", ", ".join(map(str, found.forks))),
        ]  # fmt: skip
