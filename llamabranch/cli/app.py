"""The ``llamabranch`` command: its subcommands and its version.

A subcommand is imported when it is used: together they need NumPy, llama.cpp and most of the package.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Annotated, cast

import typer
from typer.core import TyperCommand

from llamabranch.startup import quit_interrupted, quit_on_ctrl_c, read_arguments_as_utf8

from .console import Console, print_json_error
from .llama_cpp import COMMANDS_MEANT
from .parsing import Command, CommandGroup, PromptsCommand, UsageError, reopen_closed_streams
from .reporting import EXIT_FAILURE

__all__ = ["COMMANDS", "app", "load_command", "main"]

# Each command in the order of --help, with the first sentence of its own help. It is the function of that
# name in the module of that name.
COMMANDS = {
    "demo": "Show what this is for, in half a minute: forks, drafts, JSON and scores, as you watch.",
    "chat": "Talk with a model in the terminal; turns can be retried, edited, forked and saved.",
    "speculate": "Generate text with a draft model and show what the drafting did.",
    "generate": "Generate text from a prompt, or from many together, with a draft model.",
    "bench": "Measure a pair: what drafting costs and brings here, and the best setting to use.",
    "search": "Search for the best continuation: beams, samples, votes, particles, steps, or a tree.",
    "select": "Score several texts as the continuation of a prompt and print the best.",
    "score": "Score given text: log-probabilities of its tokens, their sum, perplexity and ranks.",
    "open": "Open a page in the browser: branch texts, see every probability, compare two models.",
    "serve": "Serve a model over HTTP: OpenAI's API, scores of given text, and branches.",
    "eval": "Score a model on tasks with right answers, offline.",
    "perplexity": "Measure the perplexity of a model on a text, as llama-perplexity does.",
    "kld": "Compare a model with saved log-probabilities: KL divergence, perplexities, agreement.",
    "compare": "Compare two models on a text: KL divergence, perplexities, where they part.",
    "quants": "Compare quantisations of one model on one text, to choose a file.",
    "inspect": "Print architecture, size, vocabulary, memory type and capabilities of a model.",
    "models": "List the models of models.txt and mark those that are on this machine.",
    "pull": "Download a model if it is not on this machine, and print the path of its file.",
    "theory": "Print tokens a round, speedup and best draft length that the theory expects.",
    "plan": "Estimate the time and the cost of a job on a cluster; rates not given are measured here.",
    "doctor": "Report versions, processor, build, memory, GPU and caches, test the installation, and "
    "advise.",
}
TAKE_PROMPTS = {"generate", "bench"}


@cache
def load_command(name: str) -> TyperCommand:
    """Import a subcommand and return it."""
    holder = typer.Typer(add_completion=False)
    function = getattr(import_module(f".{name}", __package__), name)
    holder.command(cls=PromptsCommand if name in TAKE_PROMPTS else Command)(function)
    return cast(TyperCommand, typer.main.get_command(holder))


class _Commands(CommandGroup):
    """Lists the subcommands without importing them."""

    def resolve_command(  # type: ignore[override]
        self, ctx: typer.Context, args: list[str]
    ) -> tuple[str | None, TyperCommand | None, list[str]]:
        """Return the subcommand that the arguments name, imported, and the arguments after it."""
        meant = COMMANDS_MEANT.get(args[0]) if args else None
        if meant is not None:
            raise UsageError(f"No such command '{args[0]}'. Did you mean '{meant}'?", ctx)
        name, listed, rest = super().resolve_command(ctx, args)
        if listed is None:
            return name, None, rest
        try:
            return name, load_command(listed.name), rest
        except (ImportError, OSError, RuntimeError) as error:  # of llama.cpp's library
            message = f"{name} cannot be loaded: {error}"
            hint = "`llamabranch doctor` tells what is installed"
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
        from importlib.metadata import version

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


def _listed() -> None:
    pass


for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(_listed)


def main() -> None:
    """Run the command line and exit: 0 done, 1 failure, 2 wrong usage, 130 interrupted."""
    quit_on_ctrl_c()  # until a command begins, and after it has ended
    read_arguments_as_utf8()
    reopen_closed_streams()
    try:
        app()
    except KeyboardInterrupt:
        quit_interrupted()
