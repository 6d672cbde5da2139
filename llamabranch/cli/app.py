"""The ``llamabranch`` command: its subcommands and its version.

A subcommand is imported only when it is used, because all of them together load NumPy, llama.cpp
and most of the package.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Annotated, cast

import typer
from typer.core import TyperCommand

from llamabranch import __version__
from llamabranch.startup import quit_interrupted, quit_on_ctrl_c

from .command import Command, CommandGroup, UsageError, reopen_closed_streams
from .console import Console, print_json_error
from .interrupts import EXIT_FAILURE

# Each command in the order of --help, with the first sentence of its help. The function of a command and
# its module have the same name as the command. To add a command, add a line here and its module.
COMMANDS = {
    "demo": "Show in half a minute what llamabranch does: forks, drafts, JSON and scores.",
    "generate": "Generate text from one prompt or many, and show what drafting did.",
    "chat": "Talk with a model in the terminal; turns can be retried, edited, forked and saved.",
    "agent": "Do a task with a model that may call the functions of a Python file.",
    "open": "Branch, see and compare texts in the browser.",
    "serve": "Serve a model over HTTP: OpenAI's API, scores of texts, and branches.",
    "search": "Search for the best continuation: beams, samples, votes, particles, steps, or a tree.",
    "score": "Score a text: log-probabilities of its tokens, perplexity, or the best of several.",
    "bench": "Measure drafting with a pair of models here, and name the best draft length.",
    "models": "List the known models, download one, or show what a file is.",
    "doctor": "Report versions, processor, build, memory and caches, test the installation, and advise.",
}
HIDDEN = {"speculate": "generate"}  # names of commands that --help does not list
# Names that are no commands here, and what to use instead: llama.cpp's programs, common guesses,
# and the command ``compare`` of version 0.3.
MOVED = {
    "cli": "chat",
    "run": "chat",
    "complete": "generate",
    "completion": "generate",
    "server": "serve",
}


@cache
def load_command(name: str) -> TyperCommand:
    """Import a subcommand and return it."""
    holder, module = typer.Typer(add_completion=False), HIDDEN.get(name, name)
    function = getattr(import_module(f".{module}", __package__), module)
    holder.command(name, cls=Command)(function)
    command = cast(Command, typer.main.get_command(holder))
    command.first = function.first
    return command


class _Commands(CommandGroup):
    """Lists the subcommands without importing them."""

    def resolve_command(  # type: ignore[override]
        self, ctx: typer.Context, args: list[str]
    ) -> tuple[str | None, TyperCommand | None, list[str]]:
        """Import the subcommand that is named; return its name, itself, and its arguments."""
        meant = MOVED.get(args[0]) if args else None
        if meant is not None:
            raise UsageError(f"No such command '{args[0]}'. Use 'llamabranch {meant}'", ctx)
        name, listed, rest = super().resolve_command(ctx, args)
        if listed is None:
            return name, None, rest
        try:
            return name, load_command(listed.name), rest
        # These are raised if llama.cpp's library cannot be loaded.
        except (ImportError, OSError, RuntimeError) as error:
            message = f"{name} cannot be loaded: {error}"
            hint = "`llamabranch doctor` shows what is installed"
            Console().error(message, hint)
            if "--json" in args:
                print_json_error(error, message, hint)
            raise typer.Exit(EXIT_FAILURE) from None


app = typer.Typer(
    name="llamabranch",
    cls=_Commands,
    help="Branches and speculative decoding on llama.cpp.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"llamabranch {__version__}")
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


def _listed() -> None:
    pass


for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(_listed)
for _name in HIDDEN:
    app.command(_name, hidden=True)(_listed)


def main() -> None:
    """Run the command line and exit: 0 done, 1 failure, 2 wrong usage, 130 interrupted."""
    quit_on_ctrl_c()  # while no command is running
    reopen_closed_streams()
    if sys.stdout is not None:  # None means that it was closed when the process started
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        app()
    except KeyboardInterrupt:
        quit_interrupted()
