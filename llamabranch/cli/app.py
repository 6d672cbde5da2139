"""The ``llamabranch`` command: its subcommands and its version."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from llamabranch.startup import quit_interrupted, quit_on_ctrl_c

from .bench import bench
from .demo import demo
from .doctor import doctor
from .generate import generate
from .inspect import inspect
from .models import models
from .parsing import Command, CommandGroup, PromptsCommand, reopen_closed_streams
from .plan import plan
from .pull import pull
from .score import score
from .search import search
from .select import select
from .speculate import speculate
from .theory import theory

__all__ = ["app", "main"]

app = typer.Typer(
    name="llamabranch",
    cls=CommandGroup,
    help="Branches and speculative decoding on llama.cpp.",
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


app.command(cls=Command)(demo)
app.command(cls=Command)(speculate)
app.command(cls=PromptsCommand)(generate)
app.command(cls=PromptsCommand)(bench)
app.command(cls=Command)(search)
app.command(cls=Command)(select)
app.command(cls=Command)(score)
app.command(cls=Command)(inspect)
app.command(cls=Command)(models)
app.command(cls=Command)(pull)
app.command(cls=Command)(theory)
app.command(cls=Command)(plan)
app.command(cls=Command)(doctor)


def main() -> None:
    """Run the command line and exit: 0 done, 1 failure, 2 wrong usage, 130 interrupted."""
    quit_on_ctrl_c()  # until a command begins, and after it has ended
    reopen_closed_streams()
    try:
        app()
    except KeyboardInterrupt:
        quit_interrupted()
