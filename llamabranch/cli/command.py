"""The parser of arguments: several prompts, short and full help, hints, usage errors as JSON."""

from __future__ import annotations

import contextlib
import copy
import difflib
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from .console import Console, begin_answer, leave_standard_output, print_json_error
from .interrupts import EXIT_FAILURE, EXIT_INTERRUPTED

# Typer contains its own Click or uses the installed one. This is the class that it uses.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

_PROMPTS = {"--prompts", "--prompt", "-p"}
# Common flags of llama.cpp, vLLM and earlier versions, and what to use instead.
HINTS = {
    "--fast": "nothing is exact unless --exact asks for it, so it is not needed",
    "-kvu --kv-unified --no-kv-unified": "-S kv_unified=true or false",
    "-cram --cache-ram --prefix-cache": "-S cache_ram=BYTES, -S prefix_cache=true",
    "--rule --entropy-stop --draft-p-min": "-S rule=NAME, -S entropy_stop=NATS",
    "--regex --choice": "--grammar '/one|another/'",
    "-e --escape": "in a shell $'a\\nb' holds a new line",
    "-sysf --system-prompt-file": 'use -sys "$(cat FILE)"',
    "-ts -sm -dev": "llama.cpp divides a model among devices by itself; -ngl sets how many layers",
    "-td --threads-draft": "-t is used for prompts and drafts too",
    "-ngld -ctkd -cd": "-ngl, -ctk and -c are for target and draft",
    "--draft-min --spec-type": "use --draft-max N or auto; -md names the drafter",
    "-l --logit-bias": "-S 'logit_bias={\"15043\": 1.5}'",
    "--mirostat": "there is no mirostat; -S typical_p=P, which keeps tokens of about the expected "
    "surprise, is the nearest",
    "--typical": "-S typical_p=VALUE",
    "--top-nsigma": "-S top_n_sigma=VALUE",
    "--repeat-last-n": "-S penalty_last_n=VALUE",
    "--dry-sequence-breaker": "-S dry_sequence_breakers=VALUE",
    "--samplers": "samplers run in llama.cpp's default order",
    "-cnv --conversation -no-cnv --no-conversation": "`llamabranch generate` continues a text, and with "
    "--chat answers a message; `llamabranch chat` is a conversation",
    "-i --interactive": "`llamabranch chat` is interactive",
    "-r --reverse-prompt": "--stop ends the text at a string",
    "-mm --mmproj --image --lora --control-vector": "it is not supported",
    "--host --port --api-key": "an option of `llamabranch serve`",
    "-hff --hf-file": "-m user/repo/file.gguf",
    "-hft --hf-token": "set the environment variable HF_TOKEN",
    "--offline": "LLAMABRANCH_DOWNLOAD=1 or 0, HF_HUB_OFFLINE=1",
    "--log-file": "-v shows llama.cpp's log on standard error; 2> FILE keeps it",
    "--keep --context-shift --no-context-shift --prompt-cache": "it is not here",
}
_HINTS = {name: hint for names, hint in HINTS.items() for name in names.split()}
# Flags of llama.cpp that do not change the text are ignored. The keys are their numbers of values.
IGNORED = {
    0: "--no-color --simple-io --display-prompt --no-display-prompt --perf --no-perf --show-timings "
    "--no-show-timings --warmup --no-warmup --log-disable --log-prefix --log-timestamps --no-escape "
    "--jinja -cb --cont-batching -nocb --no-cont-batching --cache-prompt --no-cache-prompt --no-ui "
    "--no-webui --slots --no-slots -kvo --kv-offload -nkvo --no-kv-offload "
    "--op-offload --no-op-offload --no-host -st --single-turn --multiline-input -mli",
    1: "--numa --prio --prio-batch --poll --poll-batch --cpu-mask -C --cpu-range -Cr --cpu-strict "
    "--cpu-mask-batch -Cb --cpu-range-batch -Crb --cpu-strict-batch -lv --verbosity --log-verbosity "
    "--threads-http --cache-reuse --ctx-checkpoints -ctxcp --slot-prompt-similarity -sps -fit --fit "
    "--fit-target -fitt --fit-ctx -fitc -ptc --print-token-count",
}
_IGNORED = {name: n for n, names in IGNORED.items() for name in names.split()}
_SWITCHES = {"--color", "-co", "--log-colors"}  # ignored too; on, off or auto may follow
# Flags of llama.cpp that are settings of -S here; for a flag without a value the table has the value.
SETTINGS = {
    "-b --batch-size": "n_batch",
    "-ub --ubatch-size": "n_ubatch",
    "-tb --threads-batch": "n_threads_batch",
    "--exact": "exact=true",  # our own flag, because it is used often
    "--mlock": "use_mlock=true",
    "--mmap": "use_mmap=true",
    "--no-mmap": "use_mmap=false",
    "--check-tensors": "check_tensors=true",
}
_SETTINGS = {name: setting for names, setting in SETTINGS.items() for name in names.split()}
_SWITCHED = (["on"], ["off"], ["auto"])
_CHATTING, _CONTINUING = {"-cnv", "--conversation"}, {"-no-cnv", "--no-conversation"}


class Command(TyperCommand):
    """A command with a short --help, a full --help-all, and hints for options that it does not have.

    ``first`` holds the names of the parameters that --help shows.
    """

    first: frozenset[str] = frozenset()

    def get_help(self, ctx: typer.Context) -> str:  # type: ignore[override]
        """Return the help: all options, with their other names at the end, or only those in ``first``."""
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
        params: list[Any] = list(self.get_params(ctx))
        options = {n: p for p in params for n in (*p.opts, *p.secondary_opts) if n.startswith("-")}
        if "--help-all" in args:
            ctx.meta[_ALL] = True
            args = ["--help"]
        if any(name in options for name in _PROMPTS):
            args = spread_out(args, options)
        return super().parse_args(ctx, self._known(args, options))

    def _known(self, args: Sequence[str], options: dict[str, Any]) -> list[str]:
        """Replace llama.cpp's flags by our options; leave out flags that do not change the text.

        Click is not used for that, because it reads an unknown option with one dash as a short option
        with a value, and reports only the first unknown option.

        Raises:
            UsageError: there are unknown options. The message names all of them, with hints.
        """
        arguments, unknown, rest = list[str](), list[str](), list(args)
        while rest:
            argument = rest.pop(0)
            if argument == "--":
                arguments += [argument, *rest]
                break
            name, equals, value = argument.partition("=")
            param = options.get(name)
            if param is not None or not _is_option(argument) or _is_joined(argument, options):
                arguments.append(argument)
                if param is not None and not equals and not param.is_flag and rest:
                    arguments.append(rest.pop(0))  # its value, even if it looks like an option
            elif name in _SWITCHES or name in _IGNORED:
                n_values = rest[:1] in _SWITCHED if name in _SWITCHES else _IGNORED[name]
                del rest[: 0 if equals else n_values]
            elif name in _SETTINGS and "-S" in options:
                setting = _SETTINGS[name]
                if "=" not in setting:
                    setting += f"={value if equals else rest.pop(0) if rest else ''}"
                arguments += ["-S", setting]
            # 0 turns mirostat off, which is always so here.
            elif name == "--mirostat" and (value if equals else "".join(rest[:1])) == "0":
                del rest[: not equals]
            elif not self._does_anyway(name, args):
                unknown.append(f"{name} ({hint})" if (hint := _hint(name, options)) else name)
        if unknown:
            raise UsageError(f"No such option{'s' * (len(unknown) > 1)}: {'; '.join(unknown)}")
        return arguments

    def _does_anyway(self, name: str, args: Sequence[str]) -> bool:
        """Return whether a flag asks for something that this command does anyway."""
        if name in ("-e", "--escape"):
            return not any("\\" in text for text in args)  # nothing needs escaping
        if name == "--no-context-shift":
            return self.name != "chat"  # a chat does drop its first messages
        return name in (_CHATTING if self.name in ("chat", "serve") else _CONTINUING)


def _is_option(argument: str) -> bool:
    """Return whether an argument looks like an option, and not like a number or standard input."""
    return len(argument) > 1 and argument[0] == "-" and not argument[1:2].isdigit()


def _is_joined(argument: str, options: Collection[str]) -> bool:
    """Return whether an argument is a short option and its value, such as -n5."""
    return (
        argument[:2] in options
        and argument[:2] != "--"
        and not any(argument.partition("=")[0] in names for names in (_HINTS, _IGNORED, _SETTINGS))
        and argument.partition("=")[0] not in _SWITCHES | _CHATTING | _CONTINUING
    )


def _hint(name: str, options: Collection[str]) -> str:
    """Return what to use instead of an option; "" if nothing is similar."""
    if name in _HINTS:
        return _HINTS[name]
    from .options import setting_names  # imports the settings of sampling

    setting = name.lstrip("-").replace("-", "_")
    if "-S" in options and any(setting in names for names in setting_names().values()):
        return f"-S {setting}=VALUE"
    close = difflib.get_close_matches(name, options, n=1)
    return f"did you mean {close[0]}?" if close else ""


_ALL = "llamabranch.help_all"


def spread_out(arguments: Sequence[str], options: Collection[str]) -> list[str]:
    """Return the arguments with ``--prompts`` before every prompt, and dashes in names of options.

    Underscores become dashes only in the names of ``options``.

    A prompt that begins with a dash is written ``--prompts=-...``. ``--auto-regressive``, the name used
    in papers, means ``--draft none``.
    """
    spread: list[str] = []
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
                spread += ["--draft", "none"]
            elif not in_prompts or equals:
                spread.append(name + equals + value)
        elif in_prompts:
            spread += ["--prompts" if "--prompts" in options else "--prompt", argument]
            n_prompts += 1
        else:
            spread.append(argument)
    if in_prompts and n_prompts == 0:
        raise typer.BadParameter("needs at least one prompt", param_hint="--prompts")
    return spread


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
    except OSError as error:  # Click could not print the help or the version
        leave_standard_output()
        Console().error(f"cannot write to standard output: {error.strerror or error}")
        raise typer.Exit(EXIT_FAILURE) from None
    except KeyboardInterrupt:  # Ctrl-C came while no command was running
        Console().note("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def reopen_closed_streams() -> None:
    """Open standard input, output and error on the null device if they are closed.

    Otherwise the next file that is opened would get the number of a closed one, and its output.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
