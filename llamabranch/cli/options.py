"""The options that commands share, in bundles that convert them to what the library takes.

Options that only one command has are in that command's file. NumPy and llama.cpp are imported when an
option needs them: commands that only look something up begin at once.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import typer

import llamabranch as lb
from llamabranch import ConfigError, SamplingParams, hub

from .bundles import option
from .console import Console
from .jsonl import read_text
from .prompts import (
    PromptSource,
    read_prompt_file,
    read_prompts,
    read_standard_input,
    trained_length,
)
from .reporting import reporting_errors

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from llamabranch import Context, Grammar, Model, SpeculativeConfig

    from ..loading import LoadOptions

__all__ = [
    "DRAFTING",
    "DRAFT_LENGTH_NAMES",
    "MODELS",
    "OUTPUT",
    "REQUESTS",
    "RUNTIME",
    "ChatOptions",
    "DraftOptions",
    "DraftedOptions",
    "Explain",
    "HubOptions",
    "LoadingOptions",
    "ModelOptions",
    "OutputOptions",
    "ParseSpecial",
    "PromptArgument",
    "PromptOptions",
    "RuntimeOptions",
    "SamplingOptions",
    "SharedOptions",
    "SystemOptions",
    "TargetOptions",
    "TemplateOptions",
    "TextOptions",
    "TextOutputOptions",
    "TextSettings",
    "Threads",
    "given_seed",
    "limit",
    "one_prompt",
]

_DEFAULT_N_CTX = 2048  # of the library, unless the model was trained for less
_N_CTX_STEP = 256
_TEMPLATE = 32  # tokens: a chat template's end, and what a draft may need more

# The headings of --help.
MODELS = "Models"
REQUESTS = "Requests"
DRAFTING = "Drafting"
SAMPLING = "Sampling"
RUNTIME = "Runtime"
OUTPUT = "Output"

DEFAULTS = SamplingParams()
# The second is the papers', the third vLLM's, the next two are llama.cpp's, former and present.
DRAFT_LENGTH_NAMES = (
    "--draft-length",
    "--gamma",
    "--num-speculative-tokens",
    "--draft-max",
    "--spec-draft-n-max",
    "-k",
)
DEFAULT_PROMPT = "Once upon a time"
# What --escape turns into characters, as llama.cpp's string_process_escapes.
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|[nrt'\"\\])")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}


def _unescaped(ctx: typer.Context, value: object) -> object:
    """Return a text, or each text of a list, without its escapes if ``--escape`` was given."""
    if isinstance(value, (list, tuple)):
        return [_unescaped(ctx, each) for each in value]
    if not isinstance(value, str):
        return value
    if not ctx.params.get("escape"):
        source = ctx.get_parameter_source("escape")
        if r"\n" in value and source is not None and source.name == "DEFAULT":
            Console().note(
                r"\n is two characters here; -e reads it as a new line, as llama.cpp does"
            )
        return value

    def character(found: re.Match[str]) -> str:
        name = found[1]
        return chr(int(name[1:], 16)) if name[0] == "x" else _ESCAPED.get(name, name)

    return _ESCAPE.sub(character, value)


Escape = Annotated[
    bool,
    typer.Option(
        "--escape/--no-escape",
        "-e",
        is_eager=True,  # before the texts that it is for
        help="Read \\n, \\t, \\\\ and so on in the prompts and stop strings of the command line.",
    ),
]

Explain = Annotated[
    bool,
    typer.Option(
        "--explain",
        help="Explain how it drafted, what was accepted, and why drafts ended.",
        rich_help_panel=OUTPUT,
    ),
]

ParseSpecial = Annotated[
    bool,
    typer.Option(
        "--parse-special/--no-parse-special",
        help="Parse control tokens written in a prompt, such as <|im_end|>, or read them as text.",
        rich_help_panel=REQUESTS,
    ),
]

Threads = Annotated[
    int | None,
    typer.Option("--threads", "-t", min=1, help="CPU threads.", rich_help_panel=RUNTIME),
]


@dataclass(frozen=True)
class HubOptions:
    """Whether a model that is not on this machine may be downloaded."""

    panel: ClassVar[str] = MODELS

    download: bool | None = option(
        None,
        "Download a model that is not on this machine, or never do so. "
        "Default: only where a terminal shows its size.",
        "--download/--no-download",
    )
    offline: bool = option(False, "Use no network.", "--offline")

    def find(self, name: str) -> Path:
        """Return the file of a model, downloaded if it must be and may be.

        Raises:
            ConfigError, DownloadError, UnsupportedError: as `llamabranch.hub.resolve`.
        """
        return hub.resolve(name, download=self.download, offline=True if self.offline else None)


@dataclass(frozen=True)
class TargetOptions(HubOptions):
    """The model that a text is for."""

    target: str | None = option(
        None,
        "A GGUF path, a name from `llamabranch models`, or user/repo[:tag] on the Hugging Face "
        "hub. Default: smollm2-135m where it is installed, else tale-target.",
        "--target",
        "--target-model",
        "--model",
        "-m",
        "--hf-repo",
        "-hf",
        "-hfr",
    )

    @property
    def target_name(self) -> str:
        """The model that was named, else the default."""
        return hub.default_model() if self.target is None else self.target

    def announce(self, console: Console) -> str:
        """Return the name of the model; the default is named on standard error, but for --json."""
        if self.target is None and not console.silent:
            console.note(f"model: {self.target_name}, as -m names none")
        return self.target_name


@dataclass(frozen=True)
class ModelOptions(TargetOptions):
    """The target and what drafts for it."""

    draft: str | None = option(
        None,
        "A model, an EAGLE-3 head or a file of MTP layers as for --target, `mtp` (the "
        "target's own MTP layers), `auto` (what fits), `lookup`, `suffix`, `grammar` (what the "
        "grammar forces), a chain such as `suffix+NAME` or `grammar+NAME`, or `none`. "
        "Default: auto, where the draft listed with the target comes before others; with a "
        "grammar, grammar+suffix.",
        "--draft",
        "--draft-model",
        "--model-draft",
        "--spec-draft-model",
        "--hf-repo-draft",
        "--spec-draft-hf",
        "-d",
        "-md",
        "-hfd",
        "-hfrd",
    )

    def resolve(
        self, console: Console, *, has_grammar: bool = False
    ) -> tuple[str, tuple[str, ...]]:
        """Return the name of the target and those of its drafters, all found before any is loaded.

        With ``has_grammar``, and unless ``--draft`` was given, the grammar drafts.

        What ``--draft auto`` found is printed to standard error.

        Raises:
            ConfigError: a model that is not on this machine and may not be downloaded.
            ModelLoadError: the target is no model.
            DownloadError, UnsupportedError: a model cannot be downloaded.
        """
        from .candidates import choose_draft  # these two need NumPy and llama.cpp
        from .drafters import MTP, parse_draft

        target = self.announce(console)
        path = self.find(target)
        if has_grammar and self.draft is None:
            return target, parse_draft("grammar+suffix")
        draft = self._default_draft(target) if self.draft is None else self.draft
        if self.draft in (None, "auto") and lb.Model.head_kind(path) == MTP:
            draft = MTP
            console.note("draft: mtp, the target's own MTP layers")
        elif draft == MTP and lb.Model.head_kind(path) != MTP:
            raise lb.UnsupportedError(
                f"{target} has no MTP layers that llama.cpp computes",
                hint="`llamabranch inspect` shows what a file offers; --draft FILE takes MTP layers "
                "that are in a file of their own",
            )
        elif draft == "auto":
            found = choose_draft(target, self.find)
            if found is None:
                console.note(
                    f"no smaller model here drafts for {target}: copying from the text (suffix)"
                )
                return target, ("suffix",)
            # A model that nobody has paired with this target may not pay; copying costs next to nothing.
            first = () if found == hub.draft_for(target) else ("suffix",)
            console.note(f"draft: {'+'.join((*first, found))}")
            return target, (*first, *parse_draft(found, self.find))
        return target, parse_draft(draft, self.find)

    @staticmethod
    def _default_draft(target: str) -> str:
        """Return the draft that models.txt lists for the target if it is here, else "auto"."""
        listed = hub.draft_for(target)
        for entry in hub.catalogue():
            if entry.name == listed and entry.path is not None:
                return entry.name
        return "auto"


@dataclass(frozen=True)
class PromptOptions:
    """Prompts of the command line and of files."""

    panel: ClassVar[str] = REQUESTS

    texts: Annotated[list[str] | None, typer.Argument(
        metavar="[PROMPT]...", callback=_unescaped, help="What to continue; - reads standard input.",
        show_default=False, rich_help_panel="Arguments",
    )] = None  # fmt: skip
    prompts: list[str] | None = option(
        None,
        "What to continue: one or more texts; may be repeated.",
        "--prompts",
        "--prompt",
        "-p",
        metavar="P1 P2 ...",
        callback=_unescaped,
    )
    files: list[Path] | None = option(
        None,
        "A file whose whole text is one prompt, without its last newline; may be repeated.",
        "--file",
        "-f",
    )
    input_file: str | None = option(
        None,
        "A file of prompts, one a line, or of JSON objects (.jsonl); - is standard input.",
        "--input",
        "-i",
        metavar="FILE|-",
    )
    escape: Escape = False

    @property
    def given(self) -> list[str]:
        """The texts of the command line."""
        return [*(self.texts or ()), *(self.prompts or ())]

    def read(self) -> PromptSource:
        """Return all prompts, first those of the command line.

        Raises:
            ConfigError: a file cannot be read.
        """
        texts = self.given
        if "-" in (self.texts or ()):
            texts[texts.index("-")] = read_standard_input()
        whole = [read_prompt_file(path) for path in self.files or ()]
        return read_prompts([*texts, *whole], self.input_file)


@dataclass(frozen=True)
class PromptArgument:
    """The one prompt of a command: an argument, an option as llama.cpp has it, or a file."""

    panel: ClassVar[str] = REQUESTS

    argument: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            callback=_unescaped,
            help="What to continue; - reads standard input.",
            show_default=DEFAULT_PROMPT,
            rich_help_panel="Arguments",
        ),
    ] = None
    given: str | None = option(
        None, "The prompt, in place of the argument.", "--prompt", "-p", callback=_unescaped
    )
    file: Path | None = option(
        None, "A file whose text is the prompt, without its last newline.", "--file", "-f"
    )
    escape: Escape = False

    def read(self) -> str:
        """Return the prompt.

        Raises:
            ConfigError: more than one was given, or it cannot be read.
        """
        prompt = one_prompt(self.argument, self.given, self.file)
        return DEFAULT_PROMPT if prompt is None else prompt


def one_prompt(argument: str | None, option: str | None, file: Path | None) -> str | None:
    """Return the prompt that was given in one of three ways, or None.

    Raises:
        ConfigError: more than one was given, or it cannot be read.
    """
    if sum(given is not None for given in (argument, option, file)) > 1:
        raise ConfigError(
            "more than one prompt was given",
            hint="give an argument, --prompt or --file; `generate` takes several prompts",
        )
    if file is not None:
        return read_prompt_file(file)
    prompt = argument if option is None else option
    return read_standard_input() if prompt == "-" and option is None else prompt


@dataclass(frozen=True)
class DraftOptions:
    """How long to draft, and how drafted tokens are accepted."""

    panel: ClassVar[str] = DRAFTING

    draft_length: str = option(
        "auto",
        "Tokens to draft a round; auto drafts as many as raise throughput, possibly none.",
        *DRAFT_LENGTH_NAMES,
        metavar="N|auto",
    )
    rule: str = option(
        "auto",
        "How drafted tokens are accepted; auto is seeded with a seed, at temperature 0 and "
        "for trees, else block.",
        metavar="auto|seeded|token|block",
    )
    entropy_stop: float | None = option(
        None, "End a draft where the draft model's entropy exceeds this many nats."
    )

    def config(self) -> SpeculativeConfig:
        """Return the settings as the library takes them.

        Raises:
            ConfigError: a value out of range.
        """
        return lb.SpeculativeConfig(
            draft_k=_parse_length(self.draft_length),
            entropy_stop=self.entropy_stop,
            rule=self.rule,
        )


@dataclass(frozen=True)
class TemplateOptions:
    """The chat template."""

    panel: ClassVar[str] = REQUESTS

    chat_template: str | None = option(
        None,
        "A chat template in place of the target's, or the name of one of llama.cpp's own, such "
        "as chatml.",
        metavar="JINJA|NAME",
    )
    chat_template_file: Path | None = option(
        None, "A file with a chat template, as --chat-template."
    )

    @property
    def template(self) -> str | None:
        """The chat template that was given, as `llamabranch.load` takes it, or None.

        Raises:
            ConfigError: it was given twice, or its file cannot be read.
        """
        return _either(self.chat_template, self.chat_template_file, read_text, "--chat-template")


@dataclass(frozen=True)
class SystemOptions(TemplateOptions):
    """The chat template and the system message."""

    panel: ClassVar[str] = REQUESTS

    system_prompt: str | None = option(
        None,
        "The system message before the prompt.",
        "--system-prompt",
        "-sys",
        callback=_unescaped,
    )
    system_prompt_file: Path | None = option(
        None,
        "A file whose text is the system message, without its last newline.",
        "--system-prompt-file",
        "-sysf",
    )

    @property
    def system(self) -> str | None:
        """The system message, or None.

        Raises:
            ConfigError: it was given twice, or its file cannot be read.
        """
        return _either(
            self.system_prompt, self.system_prompt_file, read_prompt_file, "--system-prompt"
        )


@dataclass(frozen=True)
class ChatOptions(SystemOptions):
    """How a prompt becomes tokens: as it is, or as a message of a conversation."""

    panel: ClassVar[str] = REQUESTS

    chat: bool = option(
        False,
        "Wrap the prompt in the target's chat template; a template or a system message turns it on.",
        "--chat",
    )
    parse_special: ParseSpecial = True

    @property
    def is_on(self) -> bool:
        """Whether prompts are wrapped: `--chat` or what implies it was given."""
        implied = (
            self.system_prompt, self.system_prompt_file, self.chat_template, self.chat_template_file,
        )  # fmt: skip
        return self.chat or any(given is not None for given in implied)

    def prompt_tokens(self, model: Model, prompt: str) -> list[int]:
        """Return the tokens of a prompt, as a user's turn in the chat template where that is on.

        Raises:
            ConfigError, UnsupportedError: the template refuses the messages, fails, or is missing.
        """
        if not self.is_on:
            return model.prompt_tokens(prompt, parse_special=self.parse_special)
        system = self.system
        before = [] if system is None else [{"role": "system", "content": system}]
        return model.prompt_tokens([*before, {"role": "user", "content": prompt}])

    def shown_prompt(self, prompt: str) -> str:
        """Return a prompt as it is printed before its text: in a chat on a line of its own."""
        return f"{prompt}\n" if self.is_on else prompt


def _either(
    text: str | None, file: Path | None, read: Callable[[Path], str], name: str
) -> str | None:
    """Return a text that is given by itself or in a file, or None."""
    if file is None:
        return text
    if text is not None:
        raise ConfigError(f"{name} and {name}-file exclude each other")
    return read(file)


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn: the settings of `llamabranch.SamplingParams` by the same names."""

    panel: ClassVar[str] = SAMPLING

    temperature: float = option(
        DEFAULTS.temperature, "0 or below takes the most probable token.", "--temperature",
        "--temp", callback=lambda value: max(value, 0.0),
    )  # fmt: skip
    top_k: int = option(DEFAULTS.top_k, "Keep the k most probable; 0 keeps all.")
    top_p: float = option(DEFAULTS.top_p, "Nucleus sampling; 1 is off.")
    min_p: float = option(
        DEFAULTS.min_p,
        "Drop tokens less probable than this share of the most probable one; 0 is off.",
    )
    typical_p: float = option(
        DEFAULTS.typical_p, "Locally typical sampling; 1 is off.", "--typical", "--typical-p"
    )
    top_n_sigma: float = option(
        DEFAULTS.top_n_sigma,
        "Keep logits within N standard deviations of the largest; -1 is off.",
        "--top-n-sigma",
        "--top-nsigma",
    )
    xtc_probability: float = option(
        DEFAULTS.xtc_probability,
        "With this probability drop the most probable tokens (XTC); 0 is off.",
    )
    xtc_threshold: float = option(
        DEFAULTS.xtc_threshold, "XTC drops all but the last token above this probability."
    )
    dynatemp_range: float = option(
        DEFAULTS.dynatemp_range,
        "Vary the temperature by up to this much with the entropy; 0 is off.",
    )
    dynatemp_exponent: float = option(
        DEFAULTS.dynatemp_exponent, "The exponent of the dynamic temperature.", "--dynatemp-exp"
    )
    repeat_penalty: float = option(DEFAULTS.repeat_penalty, "Penalise recent tokens; 1 is off.")
    presence_penalty: float = option(
        DEFAULTS.presence_penalty, "Subtracted from the logits of recent tokens; 0 is off."
    )
    frequency_penalty: float = option(
        DEFAULTS.frequency_penalty, "Subtracted for each time a token occurred recently; 0 is off."
    )
    penalty_last_n: int = option(
        DEFAULTS.penalty_last_n,
        "How many tokens are recent; 0 is off, -1 is the whole context.",
        "--repeat-last-n",
    )
    dry_multiplier: float = option(
        DEFAULTS.dry_multiplier, "Penalise repeated sequences (DRY); 0 is off."
    )
    dry_base: float = option(DEFAULTS.dry_base, "DRY: how fast the penalty grows with the length.")
    dry_allowed_length: int = option(
        DEFAULTS.dry_allowed_length, "DRY: the length up to which a repetition costs nothing."
    )
    dry_penalty_last_n: int = option(
        DEFAULTS.dry_penalty_last_n,
        "DRY: tokens that are searched; 0 is off, -1 is the whole context.",
    )
    dry_sequence_breakers: list[str] | None = option(
        None,
        "DRY: a text that ends a sequence, in place of the usual ones; may be repeated; none "
        "leaves all out.",
        "--dry-sequence-breaker",
        callback=_unescaped,
    )
    logit_bias: list[str] | None = option(
        None,
        "Add to a token's logit, such as 15043+1 or 15043-inf; may be repeated.",
        "--logit-bias",
        "-l",
        metavar="TOKEN(+|-)BIAS",
    )
    ignore_eos: bool = option(
        False, "Never sample an EOG (end of generation) token.", "--ignore-eos", "--ignore-end"
    )

    def params(self, seed: int | None = None) -> SamplingParams:
        """Return the settings as the library takes them; `without_eog` adds ``--ignore-eos``.

        Raises:
            ConfigError: a value out of range.
        """
        special = ("dry_sequence_breakers", "logit_bias", "ignore_eos")
        values = {
            f.name: getattr(self, f.name) for f in fields(SamplingOptions) if f.name not in special
        }
        if self.dry_sequence_breakers is not None:
            given = self.dry_sequence_breakers
            # As in llama.cpp: "none" forgets those before it.
            after = max((i + 1 for i, text in enumerate(given) if text == "none"), default=0)
            values["dry_sequence_breakers"] = tuple(given[after:])
        bias = dict(_parse_bias(text) for text in self.logit_bias or ())
        return DEFAULTS.replace(**values, logit_bias=bias, seed=seed)

    def without_eog(self, params: SamplingParams, model: Model) -> SamplingParams:
        """Return ``params`` without the model's EOG tokens if ``--ignore-eos`` was given."""
        if not self.ignore_eos:
            return params
        banned = dict.fromkeys(model.eog_tokens, -math.inf)
        return params.replace(logit_bias={**params.logit_bias, **banned})

    def temperature_arguments(self) -> list[str]:
        """Return the temperature as command-line arguments; nothing for the default."""
        if self.temperature == DEFAULTS.temperature:
            return []
        return ["--temperature", f"{self.temperature:g}"]


def _parse_bias(text: str) -> tuple[int, float]:
    """Return the token and the number of ``15043+1`` or ``15043-inf``, as llama.cpp reads it."""
    found = re.fullmatch(r"\s*(\d+)\s*([+-].+)", text)
    try:
        if found is not None:
            return int(found[1]), float(found[2])
    except ValueError:
        pass
    raise typer.BadParameter(
        f"{text!r} is no token id, + or -, and a number", param_hint="--logit-bias"
    )


def limit(value: int | None) -> int | None:
    """Return the number of tokens, None for llama.cpp's -1 and -2: no limit but the context's."""
    if value in (None, -1, -2):
        return None
    if value < 1:
        raise typer.BadParameter(f"{value} is not at least 1, nor -1 for no limit")
    return value


def given_seed(value: int | None) -> int | None:
    """Return the seed, None for llama.cpp's -1: a random one."""
    return None if value == -1 else value


@dataclass(frozen=True)
class TextOptions:
    """What determines a text besides the sampling settings: length, seed, stop strings, grammar."""

    panel: ClassVar[str] = SAMPLING

    max_tokens: int | None = option(
        128,
        "Tokens to generate; -1: until the model ends the text or the context is full.",
        "--max-tokens",
        "--predict",
        "--n-predict",
        "-n",
        callback=limit,
    )
    seed: int | None = option(
        None,
        "With a seed the text is that of plain decoding, whatever the draft, in a "
        "batch-invariant context; -1 is a random one.",
        "--seed",
        "-s",
        callback=given_seed,
    )
    stop: list[str] | None = option(None, "End at this text; may be repeated.", callback=_unescaped)
    grammar: str | None = option(
        None, "A GBNF grammar: a file, or the grammar itself.", "--grammar", "--grammar-file"
    )
    json_schema: str | None = option(
        None,
        "A JSON schema: a file, or the JSON itself.",
        "--json-schema",
        "--json-schema-file",
        "-j",
        "-jf",
    )
    regex: str | None = option(None, "A regular expression that the whole text matches.", "--regex")
    choice: list[str] | None = option(
        None, "A text that may be generated; repeat it for each.", "--choice"
    )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Where to end the text."""
        return tuple(self.stop or ())

    def parse_grammar(self) -> Grammar | None:
        """Return the grammar that these options describe, or None.

        Raises:
            ConfigError, GrammarError: the file cannot be read, or the grammar is invalid.
        """
        given = {
            "--grammar": self.grammar, "--json-schema": self.json_schema, "--regex": self.regex,
            "--choice": self.choice or None,
        }  # fmt: skip
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise typer.BadParameter(f"{names[0]} and {names[1]} exclude each other")
        if self.grammar is not None:
            inline = "::=" in self.grammar and not os.path.isfile(self.grammar)
            return lb.Grammar(self.grammar if inline else read_text(Path(self.grammar)))
        if self.json_schema is not None:
            inline = self.json_schema.lstrip().startswith("{")
            text = self.json_schema if inline else read_text(Path(self.json_schema))
            return lb.Grammar.from_json_schema(text)
        if self.regex is not None:
            return lb.Grammar.from_regex(self.regex)
        return lb.Grammar.from_choices(self.choice) if self.choice else None


@dataclass(frozen=True)
class DraftedOptions(ModelOptions, DraftOptions):
    """The target, what drafts for it, and how."""


@dataclass(frozen=True)
class TextSettings(TextOptions, SamplingOptions):
    """All that determines a text."""


def _layers(value: str | int) -> int:
    return -1 if value in ("auto", "all") else int(value)


@dataclass(frozen=True)
class LoadingOptions:
    """How a model is loaded."""

    panel: ClassVar[str] = RUNTIME

    gpu_layers: int | None = option(
        None, "Layers to put on the GPU; -1, auto and all are all.", "--gpu-layers",
        "--n-gpu-layers", "-ngl", metavar="N|auto|all", parser=_layers,
    )  # fmt: skip
    mlock: bool = option(
        False, "Lock the weights in memory: they are never swapped out.", "--mlock"
    )
    mmap: bool = option(
        True, "Map the file into memory, or read it as a whole.", "--mmap/--no-mmap"
    )
    verbose: bool = option(
        False, "Show llama.cpp's log.", "--verbose", "--log-verbose", "-v", rich_help_panel=OUTPUT
    )

    def options(self) -> LoadOptions:
        """Return what was given, by the names of `llamabranch.load`."""
        options: LoadOptions = {} if self.gpu_layers is None else {"n_gpu_layers": self.gpu_layers}
        if self.mlock:
            options["use_mlock"] = True
        if not self.mmap:
            options["use_mmap"] = False
        return options

    def open(
        self, name: str, console: Console, stack: ExitStack, **more: Unpack[LoadOptions]
    ) -> Context:
        """Load a model, with a progress bar, and create a context for it; ``stack`` closes both.

        Args:
            name: what `llamabranch.load` takes.
            console: shows the progress bar.
            stack: closes the context.
            more: options that take precedence over those given.
        """
        options = self.options()
        options.update(more)
        with console.loading(name) as progress:
            context = lb.load(name, progress=progress, verbose=self.verbose, **options)
            return stack.enter_context(context)

    def open_draft(
        self,
        name: str,
        target: lb.Context,
        console: Console,
        stack: ExitStack,
        **more: Unpack[LoadOptions],
    ) -> lb.Context:
        """Open what drafts for ``target``: a draft model, a head in a file of its own, or ``mtp``."""
        from .drafters import MTP

        if name == MTP:
            return stack.enter_context(lb.Context(target.model, target=target))
        if not lb.Model.is_head(hub.resolve(name)):
            return self.open(name, console, stack, **more)
        options = self.options()
        options.update(more)
        with console.loading(name) as progress:
            context = lb.load(
                name, progress=progress, verbose=self.verbose, target=target, **options
            )
            return stack.enter_context(context)


def _on_off_auto(value: str) -> str:
    value = {"1": "on", "0": "off"}.get(value, value)
    if value not in ("on", "off", "auto"):
        raise typer.BadParameter(f"{value!r} is none of on, off, auto", param_hint="--flash-attn")
    return value


def _one_type(ctx: typer.Context, value: str | None) -> str | None:
    """Return --kv-type, or the type that llama.cpp's -ctk or -ctv give, for K and V."""
    given = (value, ctx.params.get("cache_type_k"), ctx.params.get("cache_type_v"))
    types = {each for each in given if each is not None}
    if len(types) > 1:
        raise typer.BadParameter(
            "K and V have one type here: give -ctk and -ctv the same, or --kv-type alone",
            param_hint="--cache-type-k",
        )
    return types.pop() if types else None


@dataclass(frozen=True)
class RuntimeOptions(LoadingOptions):
    """How models are loaded and their contexts created."""

    panel: ClassVar[str] = RUNTIME

    n_ctx: int | None = option(
        None,
        "Context size in tokens; 0 is the length the target was trained for.",
        "--n-ctx",
        "--ctx-size",
        "-c",
        min=0,
    )
    n_batch: int | None = option(
        None, "Tokens of a decode at most.  [default: 512]", "--batch-size", "-b"
    )
    n_ubatch: int | None = option(
        None, "Tokens computed at once.  [default: --batch-size]", "--ubatch-size", "-ub"
    )
    threads: Threads = None
    cache_type_k: str | None = option(
        None, "The same: K and V have one type here.", "--cache-type-k", "-ctk", is_eager=True
    )
    cache_type_v: str | None = option(
        None, "The same: K and V have one type here.", "--cache-type-v", "-ctv", is_eager=True
    )
    kv_type: str | None = option(
        None, "Type of the KV cache: f16, as in llama.cpp, bf16, q8_0, ...", callback=_one_type
    )
    flash_attn: str = option(
        "auto",
        "Flash attention; auto is on where the model can.",
        "--flash-attn",
        "-fa",
        metavar="on|off|auto",
        callback=_on_off_auto,
    )
    exact: bool = option(
        True,
        "Texts that drafts and batches do not change, where the model allows it; or the faster "
        "type of KV cache.",
        "--exact/--fast",
    )

    def options(self) -> LoadOptions:
        """Return what was given, by the names of `llamabranch.load`."""
        options = super().options()
        if not self.exact:
            options["batch_invariant"] = False
        if self.n_ctx is not None:
            options["n_ctx"] = self.n_ctx
        if self.n_batch is not None:
            options["n_batch"] = self.n_batch
        if self.n_ubatch is not None:
            options["n_ubatch"] = self.n_ubatch
        if self.threads is not None:
            options["n_threads"] = self.threads
            options["n_threads_batch"] = self.threads
        if self.kv_type is not None:
            options["kv_type"] = self.kv_type
        if self.flash_attn != "auto":
            options["flash_attention"] = self.flash_attn == "on"
        return options

    def with_room(
        self, name: str, text: str, n_more: int | None, chat: ChatOptions
    ) -> RuntimeOptions:
        """Return these with room for a prompt and ``n_more`` tokens (None: 2,048) after it.

        Where ``--n-ctx`` was not given and the default is too short, the context gets what they need,
        up to what the model was trained for. Its vocabulary is read if the prompt may be too long.

        Raises:
            CacheFullError: the prompt alone is longer than ``--n-ctx``, or than the model's trained
                length.
        """
        n_more = _DEFAULT_N_CTX if n_more is None else n_more
        n_bytes = len(text.encode("utf-8", "replace"))  # a token has one at least
        if n_bytes + n_more + _TEMPLATE <= (self.n_ctx or _DEFAULT_N_CTX):
            return self
        path = hub.resolve(name)
        with lb.Model(path, vocab_only=True, chat_template=chat.template) as model:
            n_prompt = len(chat.prompt_tokens(model, text))
            trained = trained_length(model)
        most = self.n_ctx or trained
        if most is not None and n_prompt > most:
            told = "--n-ctx is" if self.n_ctx else "the model is made for"
            raise lb.CacheFullError(
                f"the prompt has {n_prompt:,} tokens, {told} {most:,}",
                hint="shorten the prompt, or raise --n-ctx",
            )
        needed = -(-(n_prompt + n_more + _TEMPLATE) // _N_CTX_STEP) * _N_CTX_STEP
        if self.n_ctx is not None or needed <= _DEFAULT_N_CTX:
            return self
        return replace(self, n_ctx=needed if trained is None else min(needed, trained))

    def open(
        self, name: str, console: Console, stack: ExitStack, **more: Unpack[LoadOptions]
    ) -> Context:
        """As in the base class; with ``--n-ctx 0`` the context has the model's trained length."""
        if self.n_ctx == 0 and "n_ctx" not in more:
            with lb.Model(hub.resolve(name), vocab_only=True) as model:
                trained = trained_length(model)
            if trained is None:
                raise ConfigError(
                    f"{name} does not tell the length it was trained for", hint="--n-ctx N sets one"
                )
            more["n_ctx"] = trained
        return super().open(name, console, stack, **more)

    def open_draft(
        self,
        name: str,
        target: lb.Context,
        console: Console,
        stack: ExitStack,
        **more: Unpack[LoadOptions],
    ) -> lb.Context:
        """As in the base class; with ``--n-ctx 0`` the draft's context is as long as the target's."""
        if self.n_ctx == 0:
            more["n_ctx"] = target.n_ctx
        return super().open_draft(name, target, console, stack, **more)

    def as_arguments(self) -> list[str]:
        """Return the given options as command-line arguments."""
        given = {
            "--n-ctx": self.n_ctx,
            "--batch-size": self.n_batch,
            "--ubatch-size": self.n_ubatch,
            "--threads": self.threads,
            "--gpu-layers": self.gpu_layers,
            "--kv-type": self.kv_type,
            "--flash-attn": None if self.flash_attn == "auto" else self.flash_attn,
        }
        found = [arg for name, v in given.items() if v is not None for arg in (name, str(v))]
        return found if self.exact else [*found, "--fast"]


@dataclass(frozen=True)
class SharedOptions(RuntimeOptions):
    """The context of many texts at a time."""

    panel: ClassVar[str] = RUNTIME

    cache_ram: int = option(
        0,
        "Host memory in MiB for evicted prefix K/V; turns the prefix cache on.",
        "--cache-ram",
        "-cram",
        min=0,
        metavar="MIB",
    )
    parallel: int = option(8, "Texts at a time at most.", "--parallel", "-np", min=1, max=255)
    kv_unified: bool | None = option(
        None,
        "One KV cache for all texts, or a part for each.  [default: as fits]",
        "--kv-unified/--no-kv-unified",
        "-kvu/-no-kvu",
    )


@dataclass(frozen=True)
class OutputOptions:
    """How a command prints its output."""

    panel: ClassVar[str] = OUTPUT

    as_json: bool = option(False, "Print one JSON object and nothing else.", "--json")
    no_color: bool = option(False, "No colours.", "--no-color")
    debug: bool = option(False, "Show tracebacks.", "--debug")

    @contextmanager
    def console(self) -> Iterator[Console]:
        """Yield the console of a command; errors end the command with one line and an exit code."""
        console = Console(color=not self.no_color)
        with reporting_errors(console, debug=self.debug, as_json=self.as_json):
            yield console


@dataclass(frozen=True)
class TextOutputOptions(OutputOptions):
    """How a command prints the text that it generates."""

    display_prompt: bool | None = option(
        None,
        "Print the prompt before the text. Default: on a terminal only.",
        "--display-prompt/--no-display-prompt",
    )

    def shows_prompt(self, console: Console) -> bool:
        """Return whether the prompt is printed before the text."""
        return console.out.is_terminal if self.display_prompt is None else self.display_prompt


def _parse_length(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is neither a number nor auto", param_hint="--draft-length"
        ) from None
