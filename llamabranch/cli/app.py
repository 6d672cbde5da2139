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
from .options import PANELS

# The commands in the order of --help, with the first sentence of each help. A command's function
# and module have its name; only ``speculate`` has no module of its own.
COMMANDS = {
    "demo": "Show forks, drafts and JSON in half a minute.",
    "generate": "Generate text from one prompt or many.",
    "speculate": "Generate text with drafts, and say how well they worked.",
    "chat": "Talk with a model; retry, edit, fork and save turns.",
    "agent": "Do a task with a model that calls your Python functions.",
    "open": "Branch and see texts in the browser.",
    "serve": "Serve a model over HTTP, with OpenAI's and Anthropic's API.",
    "score": "Score a text: log-probabilities, perplexity, KL divergence.",
    "bench": "Measure which settings are fastest on this machine.",
    "models": "List known models, download one, or show what a file is.",
    "doctor": "Test the installation, and say what is wrong or slow.",
}
# Short forms: the option that a command must have for each, and the arguments that replace it.
# Arguments after --prompts are prompts anyway; --auto-regressive is the name used in papers.
_SHORT = {
    "--exact": ("-S", ["-S", "exact=true"]),
    "--auto-regressive": ("--draft", ["--draft", "none"]),
    "--prompts": ("--prompts", []),
}


def _write_help(self: Any, ctx: Any, formatter: Any) -> None:
    """Write a help of one screen: a sentence, two examples, the options, and what else matters."""
    sentence, examples, *more = cleandoc(self.help).split("\n\n")
    lines = [sentence, "", *(f"  {line}" for line in examples.split("\n")), ""]
    commands = getattr(self, "commands", {}).values()
    told = [f"  {command.name:<10} {command.help}" for command in commands]
    lines += ["Commands:", *told] if told else help_lines(self.params)
    formatter.write("\n".join([*lines, *(line for part in more for line in ("", part))]) + "\n")


class Command(TyperCommand):
    """A command: its help, and the short forms of its options."""

    format_help = _write_help

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
    """Return a line for each argument and option, under headings in the order of use."""
    rows = {panel: list[tuple[str, str]]() for panel in PANELS}
    for param in params:
        if param.name != "help":
            rows[param.rich_help_panel].append(_row(param))
    width = max(len(names) for panel in rows.values() for names, _ in panel)
    lines: list[str] = []
    for panel, told in rows.items():
        lines += [f"{panel}:"] * bool(told)
        lines += [f"  {names:<{width}}  {text}" for names, text in told]
    return lines


def _row(param: Any) -> tuple[str, str]:
    """Return the names of an option, one short and one long, or of an argument; and its help."""
    if param.param_type_name == "argument":
        return param.metavar, param.help
    short = [name for name in param.opts if not name.startswith("--")][:1]
    long = [name for name in param.opts if name.startswith("--")][:1]
    names = ", ".join(short + long) if short else "    " + long[0]
    value = "" if param.is_flag else f" {param.metavar}"
    default = param.default
    is_plain = default is not None and not isinstance(default, (bool, list, tuple))
    shown = is_plain and "[default: " not in param.help
    return names + value, param.help + (f" [default: {default}]" if shown else "")


class _Commands(TyperGroup):
    """Lists the subcommands without importing them."""

    format_help = _write_help

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
    help="""Run GGUF models in branches: texts that fork, drafts, agents, a server.

llamabranch demo
llamabranch generate -m model.gguf -p "Once upon a time" -n 64

llamabranch COMMAND -h lists the options of a command; --version prints the
version, and --install-completion completes names in your shell.""",
    no_args_is_help=True,
    rich_markup_mode=None,
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
