"""The ``llamabranch`` command: its subcommands, their help on one screen, and its version.

A subcommand is imported only when it is used, because all of them together load NumPy, llama.cpp
and most of the package.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from inspect import cleandoc
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from llamabranch import __version__
from llamabranch.startup import quit_interrupted, quit_on_ctrl_c

from .console import Console, leave_standard_output
from .interrupts import EXIT_FAILURE

# The commands in the order of --help, with the first sentence of each help. A command's function
# and module have its name; only ``speculate`` has no module of its own.
COMMANDS = {
    "demo": "Show in half a minute what llamabranch does: forks, drafts and JSON.",
    "generate": "Generate text from one prompt or many.",
    "speculate": "Generate text with drafts, and say how well they worked.",
    "chat": "Talk with a model in the terminal; retry, edit, fork and save turns.",
    "agent": "Do a task with a model that may call the functions of a Python file.",
    "open": "Branch and see texts in the browser.",
    "serve": "Serve a model over HTTP: OpenAI's and Anthropic's API, and scores of texts.",
    "score": "Score a text or a file: perplexity, and the KL divergence of two models.",
    "bench": "Measure reading and generating with the settings that exist here.",
    "models": "List the known models, download one, or show what a file is.",
    "doctor": "Report what is installed on which machine, test it, and advise.",
}
# Short forms: the option that a command must have for each, and the arguments that replace it.
# Arguments after --prompts are prompts anyway; --auto-regressive is the name used in papers.
_SHORT = {
    "--exact": ("-S", ["-S", "exact=true"]),
    "--auto-regressive": ("--draft", ["--draft", "none"]),
    "--prompts": ("--prompts", []),
}


class Command(TyperCommand):
    """A command whose --help fits on one screen: a sentence, examples, and a line for each option."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help: usage, the docstring as it is, the options under their headings."""
        self.format_usage(ctx, formatter)
        formatter.write("\n" + cleandoc(self.help or "") + "\n")
        formatter.write("".join(f"{line}\n" for line in help_lines(cast(Any, self).params)))

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the arguments; short forms are written out, and ``_`` in names means ``-``."""
        names = {name for param in cast(Any, self).params for name in param.opts}
        words: list[str] = []
        for i, word in enumerate(args):
            if word == "--":
                return super().parse_args(ctx, words + args[i:])
            needed, long = _SHORT.get(word.replace("_", "-"), ("", []))
            words += long if needed in names else [word]
        return super().parse_args(ctx, words)


def help_lines(params: Sequence[Any]) -> list[str]:
    """Return the lines of --help for options, under their headings; Output is the last."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for param in params:
        if param.param_type_name == "option" and param.rich_help_panel:
            panels.setdefault(param.rich_help_panel, []).append(_row(param))
    panels["Output"] = panels.pop("Output")
    width = max(len(names) for rows in panels.values() for names, _ in rows)
    lines: list[str] = []
    for panel, rows in panels.items():
        lines += [f"{panel}:", *(f"  {names:<{width}}  {text}" for names, text in rows)]
    return lines


def _row(param: Any) -> tuple[str, str]:
    """Return the names of an option and its help. Only the first two names are shown."""
    short = [name for name in param.opts if not name.startswith("--")][:1]
    long = [name for name in param.opts if name.startswith("--")][:1]
    names = ", ".join(short + long) if short else "    " + long[0]
    value = "" if param.is_flag else f" {param.metavar}"
    default = param.default
    shown = default is not None and not isinstance(default, (bool, list, tuple))
    return names + value, param.help + (f" [default: {default}]" if shown else "")


class _Commands(TyperGroup):
    """Lists the subcommands without importing them."""

    def resolve_command(  # type: ignore[override]
        self, ctx: typer.Context, args: list[str]
    ) -> tuple[str | None, TyperCommand | None, list[str]]:
        """Import the subcommand that is named; return its name, itself, and its arguments."""
        name, listed, rest = super().resolve_command(ctx, args)
        if listed is None:
            return name, None, rest
        try:
            return name, load_command(listed.name), rest
        # These are raised if llama.cpp's library cannot be loaded.
        except (ImportError, OSError, RuntimeError) as error:
            hint = "`llamabranch doctor` shows what is installed"
            Console().error(f"{name} cannot be loaded: {error}", hint)
            raise typer.Exit(EXIT_FAILURE) from None


@cache
def load_command(name: str) -> TyperCommand:
    """Import a subcommand and return it."""
    holder = typer.Typer(add_completion=False, rich_markup_mode=None)
    module = import_module("." + ("generate" if name == "speculate" else name), __package__)
    settings = {"token_normalize_func": lambda name: name.replace("_", "-")}
    holder.command(name, cls=Command, context_settings=settings)(getattr(module, name))
    return cast(Command, typer.main.get_command(holder))


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


for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(lambda: None)


def main() -> None:
    """Run the command line and exit: 0 done, 1 failure, 2 wrong usage, 130 interrupted."""
    quit_on_ctrl_c()  # while no command is running
    _reopen_closed_streams()
    if sys.stdout is not None:  # None means that it was closed when the process started
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        app()
    except KeyboardInterrupt:
        quit_interrupted()
    except OSError as error:  # the help or the version could not be printed
        leave_standard_output()
        Console().error(f"cannot write to standard output: {error.strerror or error}")
        sys.exit(EXIT_FAILURE)


def _reopen_closed_streams() -> None:
    """Open standard input, output and error on the null device if they are closed.

    Otherwise the next file to be opened would get the number of a closed stream, and its output.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
