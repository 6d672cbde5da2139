"""How arguments are read: llama.cpp's options refused by name, several prompts, wrong usage as JSON."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from inspect import Parameter, Signature
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .console import Console, begin_answer, leave_standard_output, print_json_error
from .reporting import EXIT_FAILURE, EXIT_INTERRUPTED

__all__ = [
    "LLAMA_CPP_OPTIONS",
    "Command",
    "CommandGroup",
    "PromptsCommand",
    "reopen_closed_streams",
    "repeat_prompts_option",
]

# Typer brings a Click of its own, or uses the one that is installed: this is the class of either.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

_KV_TYPE = "--kv-type sets the type of both K and V"
_HUB = "`llamabranch pull user/repo:Q8_0` downloads a model; speculate, generate and bench take -hf"
_HUB_FILE = "name the file after the repository: user/repo/file.gguf"
_TOKEN = "set HF_TOKEN"
_URL = "-hf takes user/repo[:tag] or user/repo/file.gguf of the Hugging Face hub"
_BATCHED = "`llamabranch generate --parallel N` decodes several texts at a time"
_MANY_THREADS = "--threads is used for prompts too"
_LAYERS = "-ngl is used for target and draft"
_CHAT = "--chat wraps a prompt in the chat template"
# Options of llama.cpp's tools that Click would read as a short option with text behind it, as it reads
# -n128: -hf as -h, -ctk as "-c tk". An empty text: no counterpart here.
LLAMA_CPP_OPTIONS: dict[str, str] = {
    **dict.fromkeys(("-hf", "-hfr", "-hfd"), _HUB),
    **dict.fromkeys(("-hfrd",), "-hfd names the draft"),
    **dict.fromkeys(("-hff", "-hfv"), _HUB_FILE),
    **dict.fromkeys(("-mu", "-dr"), _URL),
    "-hft": _TOKEN,
    **dict.fromkeys(("-ctk", "-ctv", "-ctkd", "-ctvd"), _KV_TYPE),
    **dict.fromkeys(("-np", "-ns", "-cb", "-nocb"), _BATCHED),
    **dict.fromkeys(("-tb", "-td", "-tbd"), _MANY_THREADS),
    **dict.fromkeys(("-ngld",), _LAYERS),
    **dict.fromkeys(("-cnv", "-no-cnv", "-st", "-sys", "-sysf"), _CHAT),
    "-cd": "-c is used for target and draft",
    "-fa": "flash attention is used where the model can",
    "-kvu": "the KV cache is always unified",
    **dict.fromkeys(
        (
            "-ag", "-bf", "-bs", "-Cr", "-Crb", "-cl", "-cmoe", "-cmoed", "-co", "-cram", "-ctxcp",
            "-dev", "-devd", "-dio", "-dkvc", "-dt", "-fit", "-fitc", "-fitt", "-gan", "-gaw", "-if",
            "-ins", "-lcd", "-lcs", "-lm", "-lv", "-mg", "-mli", "-mm", "-mmu", "-mv", "-ncmoe",
            "-ncmoed", "-ndio", "-nkvo", "-nopo", "-npl", "-npp", "-nr", "-ntg", "-ofreq", "-ot",
            "-otd", "-pps", "-ps", "-ptc", "-rea", "-sm", "-sp", "-sps", "-to", "-tps", "-ts", "-ub",
        ),
        "",
    ),
}  # fmt: skip


class Command(TyperCommand):
    """A command that takes options by llama.cpp's names too, and refuses those that it lacks by name.

    Without that, Click would read an option of llama.cpp's tools as a short one with text behind it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        others = [name for param in self.params for name in param.opts if name not in _shown(param)]
        if others:
            self.epilog = "Other names of these options: " + ", ".join(others)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, with one long name for each option and the others at the end."""
        names = [(param, param.opts) for param in self.params]
        try:
            for param in self.params:
                param.opts = _shown(param)
            super().format_help(ctx, formatter)
        finally:
            for param, opts in names:
                param.opts = opts

    def get_params(self, ctx: typer.Context) -> list[Any]:  # type: ignore[override]
        """Return its own parameters and the hidden ones whose error names what to use instead."""
        own = super().get_params(ctx)
        known = {name for param in own for name in param.opts}
        return [*own, *(option for option in _refused_options() if option.opts[0] not in known)]


def _shown(param: Any) -> list[str]:
    """Return an option's first name and its names of one dash."""
    return [name for i, name in enumerate(param.opts) if i == 0 or not name.startswith("--")]


@cache
def _refused_options() -> list[Any]:
    # Typer makes them, from the signature of a command that does nothing: the names of Click's own
    # classes differ from version to version.
    def nothing() -> None:
        pass

    known = {
        f"refused_{name.strip('-').replace('-', '_')}": Annotated[
            bool,
            typer.Option(name, hidden=True, expose_value=False, callback=_refuse(name, instead)),
        ]
        for name, instead in LLAMA_CPP_OPTIONS.items()
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


def _refuse(name: str, instead: str) -> Callable[..., None]:
    def refuse(ctx: typer.Context, value: bool) -> None:
        if value:
            raise UsageError(f"No such option: {name}" + (f" ({instead})" if instead else ""), ctx)

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
            return super().parse_args(ctx, args)

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
