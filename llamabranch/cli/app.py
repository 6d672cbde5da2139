"""The ``llamabranch`` command: its subcommands and its version."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from .bench import bench
from .generate import ManyPrompts, generate
from .inspect import inspect
from .models import models
from .speculate import speculate
from .theory import theory

__all__ = ["app", "main"]

app = typer.Typer(
    name="llamabranch",
    help="Fork, score and rewind lines of thought on llama.cpp; speculative decoding.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"llamabranch {version('llamabranch')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


app.command()(speculate)
app.command(cls=ManyPrompts)(generate)
app.command()(bench)
app.command()(inspect)
app.command()(models)
app.command()(theory)


def main() -> None:
    """Run the command line and exit: 0 done, 1 failure, 2 wrong usage, 130 interrupted."""
    app()
