"""How arguments are read: llama.cpp's options refused by name, several prompts, wrong usage as JSON."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from inspect import Parameter, Signature
from typing import Annotated, Protocol

import typer
from typer.core import TyperCommand, TyperGroup

from .console import Console, begin_answer, leave_standard_output, print_json_error
from .llama_cpp import ACCEPTED, REFUSED
from .reporting import EXIT_FAILURE, EXIT_INTERRUPTED

__all__ = [
    "Command",
    "CommandGroup",
    "PromptsCommand",
    "options_named",
    "reopen_closed_streams",
    "repeat_prompts_option",
]

# Typer brings a Click of its own, or uses the one that is installed: this is the class of either.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class _Parameter(Protocol):
    """An argument or an option of either Click."""

    opts: list[str]
    secondary_opts: list[str]


class Command(TyperCommand):
    """A command that takes options by llama.cpp's names too, and refuses those that it lacks by name.

    Without that, Click would read an option of llama.cpp's tools as a short one with text behind it.
    """

    def get_help(self, ctx: typer.Context) -> str:  # type: ignore[override]
        """Return the help, with one long name for each option and the others at the end."""
        names = [(param, param.opts) for param in self.params]
        others = [name for param, opts in names for name in opts if name not in _shown(param)]
        if others:
            self.epilog = "Other names of these options: " + ", ".join(others)
        try:
            for param in self.params:
                param.opts = _shown(param)
            return super().get_help(ctx)
        finally:
            for param, opts in names:
                param.opts = opts

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the arguments; what is suggested for an unknown option is an option of this command."""
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            own = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
            suggested = getattr(error, "possibilities", None)
            if suggested:
                error.possibilities = [n for n in suggested if n in own]  # type: ignore[attr-defined]
            raise

    def get_params(self, ctx: typer.Context) -> list[_Parameter]:  # type: ignore[override]
        """Return its own parameters and the hidden ones whose error names what to use instead."""
        own = super().get_params(ctx)
        known = {name for param in own for name in (*param.opts, *param.secondary_opts)}
        return [*own, *(option for option in _refused_options() if option.opts[0] not in known)]


def _shown(param: _Parameter) -> list[str]:
    """Return an option's first name and its names of one dash."""
    return [name for i, name in enumerate(param.opts) if i == 0 or not name.startswith("--")]


@cache
def _refused_options() -> list[_Parameter]:
    # Typer makes them, from the signature of a command that does nothing: the names of Click's own
    # classes differ from version to version.
    def nothing() -> None:
        pass

    known = {
        f"refused_{number}": Annotated[
            bool,
            typer.Option(
                name,
                hidden=True,
                expose_value=False,
                is_eager=True,  # before a value behind it is taken for an argument
                callback=_refuse(name, instead),
            ),
        ]
        for number, (name, instead) in enumerate(REFUSED.items())
    }
    nothing.__annotations__ = dict(known)
    nothing.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=kind)
            for name, kind in known.items()
        ]
    )
    holder = typer.Typer(add_completion=False)
    holder.command()(nothing)
    return list(typer.main.get_command(holder).params)


def options_named(hint: str) -> set[str]:
    """Return the options that a hint of `REFUSED` names, but for those of a command in backticks."""
    return set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", re.sub(r"`.*?`", "", hint)))


def _refuse(name: str, instead: str) -> Callable[..., None]:
    def refuse(ctx: typer.Context, value: bool) -> None:
        command = ctx.command
        if value and name not in ACCEPTED.get(command.name or "", ()):
            own = {n for param in command.params for n in (*param.opts, *param.secondary_opts)}
            own.add("--help")
            elsewhere = not own.issuperset(options_named(instead))
            hint = f"in llamabranch generate: {instead}" if elsewhere else instead
            raise UsageError(f"No such option: {name} ({hint})", ctx)

    return refuse


class PromptsCommand(Command):
    """Takes several prompts after one ``--prompts``, and ``_`` for ``-`` in the names of options."""

    def parse_args(  # type: ignore[override]  # typer has a click of its own, or not
        self, ctx: typer.Context, args: list[str]
    ) -> list[str]:
        """Parse the arguments after `repeat_prompts_option`."""
        known = {name for param in self.params for name in param.opts}
        return super().parse_args(ctx, repeat_prompts_option(args, known))


def repeat_prompts_option(arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """Return the arguments with ``--prompts`` before every prompt, and ``known`` options with dashes.

    A prompt that begins with a dash is given as ``--prompts=-...``.
    """
    names = {"--prompts", "--prompt", "-p"}
    found: list[str] = []
    in_prompts, n_prompts = False, 0
    for argument in arguments:
        if argument.startswith("-") and argument != "-":
            if in_prompts and n_prompts == 0:
                break
            name, equals, value = argument.partition("=")
            if name.replace("_", "-") in known:
                name = name.replace("_", "-")
            in_prompts, n_prompts = name in names, len(equals)
            if not in_prompts or equals:
                found.append(name + equals + value)
        elif in_prompts:
            found += ["--prompts", argument]
            n_prompts += 1
        else:
            found.append(argument)
    if in_prompts and n_prompts == 0:
        raise typer.BadParameter("needs at least one prompt", param_hint="--prompts")
    return found


class CommandGroup(TyperGroup):
    """The commands; with ``--json``, wrong usage is reported as a JSON object too."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the arguments before the name of the command."""
        self._arguments = tuple(args)
        begin_answer()
        with _answering(args):
            try:
                return super().parse_args(ctx, args)
            except UsageError as error:
                error.message += (  # type: ignore[attr-defined]
                    " (options follow a command: `llamabranch generate -m a.gguf -p ...` generates text)"
                )
                raise

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        """Parse the rest and run the command."""
        with _answering(self._arguments):
            return super().invoke(ctx)


@contextlib.contextmanager
def _answering(arguments: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        if "--json" in arguments:
            print_json_error(error, error.format_message(), None)  # type: ignore[attr-defined]
        raise
    except BrokenPipeError:
        raise
    except OSError as error:  # from what Click prints itself: help and version
        leave_standard_output()
        Console().error(f"cannot write to standard output: {error.strerror or error}")
        raise typer.Exit(EXIT_FAILURE) from None
    except KeyboardInterrupt:  # between two steps of the command line itself
        Console().note("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def reopen_closed_streams() -> None:
    """Open closed ones of standard input, output and error on the null device.

    Otherwise the next opened file would get their number, and output meant for the terminal.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
