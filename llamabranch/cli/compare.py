"""``llamabranch compare``: how far one model is from another, on one text."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from rich.console import Console as RichConsole

from llamabranch import ConfigError

from ..files import atomic_write
from .bundles import option, with_bundles
from .console import Console, tables_of
from .eval import open_for_chunks
from .files import check_new_file, read_prompt_file
from .interrupts import EXIT_FAILURE
from .options import OUTPUT, TEXT, ModelOptions, OutputOptions

if TYPE_CHECKING:
    from llamabranch.loom.report import Comparison

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<title>Two models compared</title><pre>{code}</pre></html>
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
        from llamabranch.loom.report import compare_models

        if asked.text is None:
            raise ConfigError("compare needs a text", hint="--text FILE, of at least two windows")
        if asked.report is not None:
            check_new_file(asked.report)
        text, window = read_prompt_file(asked.text), asked.window
        both = [open_for_chunks(name, models, window, console) for name in (a, b)]
        found: list[Comparison] = []

        def note(done: Comparison) -> None:
            found[:] = [done]
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
    answer = found.as_dict()
    console.report(answer)
    if asked.report is not None:
        page = RichConsole(record=True, file=io.StringIO(), width=200)
        for table in tables_of(answer):
            page.print(table)
            page.print()
        with atomic_write(asked.report) as file:
            file.write(page.export_html(code_format=_PAGE, inline_styles=True).encode())
