"""How arguments are read: several prompts, two screens of help, hints, wrong usage as JSON."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from .console import Console, begin_answer, leave_standard_output, print_json_error
from .interrupts import EXIT_FAILURE, EXIT_INTERRUPTED

# Typer brings a Click of its own, or uses the one that is installed: this is the class of either.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

_PROMPTS = {"--prompts", "--prompt", "-p"}
# Flags of llama.cpp, vLLM and of earlier versions, and what to use.
HINTS = {
    "-b --batch-size -ub --ubatch-size": "-S n_batch=N, -S n_ubatch=N",
    "--mlock --no-mmap --mmap -lm": "-S use_mlock=true, -S use_mmap=false",
    "--fast": "-S batch_invariant=false takes what is fastest; --exact asks for exact batches",
    "-kvu --kv-unified --no-kv-unified -no-kvu": "-S kv_unified=true or false",
    "-cram --cache-ram --prefix-cache": "-S cache_ram=BYTES, -S prefix_cache=true",
    "--rule --entropy-stop --spec-draft-p-min --draft-p-min": "-S rule=NAME, -S entropy_stop=NATS",
    "--regex --choice": "--grammar '/one|another/'",
    "-e --escape --no-escape": "in a shell $'a\\nb' holds a new line",
    "-sysf --system-prompt-file": 'use -sys "$(cat FILE)"',
    "-ts -sm -mg -dev -ot -ncmoe -cmoe": "llama.cpp divides a model by itself; -ngl sets how much",
    "-tb -td -tbd --threads-batch --threads-draft": "-t is used for prompts and drafts too",
    "-ngld -ctkd -ctvd -cd": "-ngl, -ctk and -c are for target and draft",
    "--draft-min --spec-draft-n-min --spec-type": "--draft-max N or auto; -md names what drafts",
    "--draft-width --spec-draft-p-split": "drafts are chains of tokens; --draft-max sets how many",
    "-l --logit-bias": "-S 'logit_bias={\"15043\": 1.5}'",
    "--mirostat --mirostat-lr --mirostat-ent --adaptive-target": "-S dynatemp_range=X instead",
    "--samplers --sampler-seq --sampling-seq": "samplers run in llama.cpp's default order",
    "-cnv --conversation -no-cnv -st -i -if --interactive": "`llamabranch chat`, or --chat",
    "-r --reverse-prompt": "--stop ends the text at a string",
    "-mm --mmproj --image --audio --lora --lora-scaled --control-vector": "it is not supported",
    "--host --port --api-key -a --alias --metrics": "an option of `llamabranch serve`",
    "-hff --hf-file": "-m user/repo/file.gguf",
    "-hft --hf-token": "set the environment variable HF_TOKEN",
    "--download --no-download --offline": "LLAMABRANCH_DOWNLOAD=1 or 0, HF_HUB_OFFLINE=1",
    "--no-color --color -co": "colours are used on a terminal only; NO_COLOR=1 turns them off",
    "--display-prompt --no-display-prompt": "the prompt is shown on a terminal only",
    "--explain --log-disable -lv --verbosity": "-v shows how drafts went, and llama.cpp's log",
    "-ns --sequences": "--samples N gives several texts for a prompt",
    "--keep --context-shift --prompt-cache --slot-save-path -ctxcp": "there is nothing like it here",
}
_HINTS = {name: hint for names, hint in HINTS.items() for name in names.split()}
# Options of llama-server that say what is so anyway.
_TRUE_ANYWAY = {"--jinja", "-cb", "--cont-batching", "--cache-prompt", "--no-ui", "--no-webui"}


class Command(TyperCommand):
    """A command with a short --help and a whole --help-all, and hints at options that it lacks.

    ``first`` holds the names of the parameters that --help shows.
    """

    first: frozenset[str] = frozenset()

    def get_help(self, ctx: typer.Context) -> str:  # type: ignore[override]
        """Return the help: all options, with their other names at the end, or the first of them."""
        shown: Any = copy.copy(self)
        shown.params = list(map(copy.copy, self.params))
        options = [p for p in shown.params if p.param_type_name == "option" and not p.hidden]
        others = [name for p in options for name in p.opts[1:] if name.startswith("--")]
        more = [p for p in options if self.first and p.name not in self.first]
        if ctx.meta.get(_ALL):
            more = []
            shown.epilog = others and "Other names of these options: " + ", ".join(others)
        elif more:
            shown.epilog = f"{len(more)} more options: {ctx.command_path} --help-all"
        for param in options:
            param.opts = [name for name in param.opts if name not in others]
            param.hidden = param in more
        return TyperCommand.get_help(shown, ctx)

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the arguments; an unknown option gets a hint."""
        params: list[Any] = list(self.params)
        options = {n: p for p in params for n in (*p.opts, *p.secondary_opts) if n.startswith("-")}
        if "--help-all" in args:
            ctx.meta[_ALL] = True
            args = ["--help"]
        if any(name in options for name in _PROMPTS):
            args = spread_out(args, options)
        return super().parse_args(ctx, self._known(args, options))

    def _known(self, args: Sequence[str], options: dict[str, Any]) -> list[str]:
        """Return the arguments without those that change nothing; refuse unknown ones that have a hint.

        Click would read an unknown option of one dash as a short one with text behind it.
        """
        found, takes_value = list[str](), False
        for i, each in enumerate(args):
            if each == "--" and not takes_value:
                return [*found, *args[i:]]
            name = each.partition("=")[0]
            is_value, param = takes_value, options.get(name)
            takes_value = not is_value and param is not None and name == each and not param.is_flag
            is_unknown = not is_value and param is None
            if is_unknown and each == _EXACT and "--set" in options:
                found += ["--set", "batch_invariant=true"]
                continue
            if is_unknown and name in _HINTS:
                raise UsageError(f"No such option: {name} ({_HINTS[name]})")
            if not (is_unknown and self.name == "serve" and each in _TRUE_ANYWAY):
                found.append(each)
        return found


_ALL = "llamabranch.help_all"
_EXACT = "--exact"  # a short form of a setting, which is no option of its own


def spread_out(arguments: Sequence[str], options: Collection[str]) -> list[str]:
    """Return the arguments with ``--prompts`` before every prompt, and names of ``options`` with dashes.

    A prompt that begins with a dash is given as ``--prompts=-...``. ``--auto-regressive``, the name of
    the papers, is ``--draft none``.
    """
    found: list[str] = []
    in_prompts, n_prompts = False, 0
    for argument in arguments:
        if argument.startswith("-") and argument != "-":
            if in_prompts and n_prompts == 0:
                break
            name, equals, value = argument.partition("=")
            dashed = name.replace("_", "-")
            if dashed in options:
                name = dashed
            in_prompts, n_prompts = name in _PROMPTS, len(equals)
            if dashed == "--auto-regressive" and "--draft" in options:
                found += ["--draft", "none"]
            elif not in_prompts or equals:
                found.append(name + equals + value)
        elif in_prompts:
            found += ["--prompts" if "--prompts" in options else "--prompt", argument]
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
