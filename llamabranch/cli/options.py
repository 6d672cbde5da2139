"""The options that commands share, in bundles that convert them to arguments of the library.

Options that only one command has are in that command's file. NumPy and llama.cpp are imported when an
option needs them, so commands that only look something up start at once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import typer

import llamabranch as lb
from llamabranch import ConfigError, SamplingParams, hub

from ..arguments import choice, nearest, token_key
from .bundles import argument, option
from .console import Console
from .files import (
    read_piped_text,
    read_prompt_file,
    read_standard_input,
    read_text,
    schema_text,
)
from .interrupts import reporting_errors

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from llamabranch.model import Prompt

    from ..loading import LoadOptions

# The headings of --help.
TEXT, SAMPLING, DRAFTING, OUTPUT, MODEL = "Text", "Sampling", "Drafting", "Output", "Model"

LENGTH = "--n-predict --max-tokens --predict -n"  # the names of the option for the number of tokens

DEFAULTS = SamplingParams()
DEFAULT_PROMPT = "Once upon a time"
_SWITCH = {"on": True, "1": True, "off": False, "0": False, "auto": None}
_NOT_SETTINGS = {"logprobs", "logits_processor"}

Threads = Annotated[
    int | None, typer.Option("--threads", "-t", min=1, help="CPU threads.", rich_help_panel=MODEL)
]


def limit(value: int | None) -> int | None:
    """Return the limit of tokens; llama.cpp's -1 and -2 become None: until the context is full."""
    if value in (None, -1, -2):
        return None
    if value < 1:
        raise typer.BadParameter(f"{value} is not at least 1, nor -1 for no limit")
    return value


def vocabulary(name: str, **more: Any) -> lb.Model:
    """Open a model's vocabulary and metadata, without its weights."""
    return lb.Model(hub.resolve(name, download=None), vocab_only=True, **more)


def trained_length(model: lb.Model | str) -> int | None:
    """Return the context length that a model was trained for; None if its file does not say."""
    if isinstance(model, str):
        with vocabulary(model) as opened:
            return trained_length(opened)
    length = model.metadata.get(f"{model.architecture}.context_length", "")
    return int(length) if length.isdigit() and int(length) else None


def setting_value(text: str) -> Any:
    """Return a setting's value: a number, true, none, a JSON list or object, or the text itself."""
    if text.lower() in ("none", "null", ""):
        return None
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text


def setting_names() -> dict[str, set[str]]:
    """Return the names of the settings of ``-S``, by their kind."""
    from ..loading import LoadOptions

    return {
        "sampling": {f.name for f in fields(SamplingParams)} - _NOT_SETTINGS,
        "drafting": {f.name for f in fields(lb.SpeculativeConfig)},
        "load": set(LoadOptions.__annotations__),
    }


def template_option(**more: Any) -> str | None:
    """Return the field of a bundle for the option of a chat template."""
    return option(
        None,
        "A chat template that replaces the model's: its text, a file, or the name of one of "
        "llama.cpp's own, such as chatml.",
        "--chat-template --chat-template-file",
        metavar="JINJA|FILE|NAME",
        **more,
    )


def read_template(given: str | None) -> str | None:
    """Return a chat template as `llamabranch.load` takes it; ConfigError if its file cannot be read."""
    if given is None or "{" in given or not os.path.isfile(given):
        return given
    return read_text(Path(given))


def _load(name: str, console: Console, **options: Any) -> lb.Context:
    """Load a model and create a context for it; the end of the command closes both."""
    with console.opening(name) as (progress, on_measuring):
        context = lb.load(
            name, progress=progress, on_measuring=on_measuring, verbose=console.verbose, **options
        )
        return console.resources.enter_context(context)


@dataclass(frozen=True)
class ModelFlags:
    """The model, and how it is loaded."""

    panel: ClassVar[str] = MODEL
    first: ClassVar[str] = "target n_ctx"

    target: str | None = option(
        None,
        "A GGUF file, a name from `llamabranch models`, or user/repo[:tag] on the Hugging Face "
        "hub. Default: smollm2-135m if it is installed, else tale-target.",
        "--model -m --target --target-model --hf-repo -hf -hfr",
    )
    n_ctx: int | None = option(
        None,
        "Context size in tokens; 0 is the length the model was trained for.",
        "--ctx-size --n-ctx -c",
        min=0,
    )
    threads: Threads = None
    gpu_layers: int | None = option(
        None,
        "Layers to put on the GPU; -1, auto or all mean all of them.",
        "--gpu-layers --n-gpu-layers -ngl",
        metavar="N|auto|all",
        parser=lambda value: -1 if value in ("auto", "all") else int(value),
    )
    kv_types: list[str] | None = option(
        None,
        "Type of the K/V cache: f16, bf16, q8_0, ... Default: exact if that costs at most a tenth, "
        "else the fastest.",
        "--kv-type --cache-type-k --cache-type-v -ctk -ctv",
        metavar="TYPE",
    )
    flash_attn: str = option(
        "auto",
        "Flash attention; auto turns it on unless it was measured to be slower.",
        "--flash-attn -fa",
        metavar="on|off|auto",
    )
    settings: list[str] | None = option(
        None,
        "Any other setting of SamplingParams, SpeculativeConfig or llamabranch.load by its name, "
        "such as typical_p=0.9, rule=block or n_batch=256; may be repeated. --exact is "
        "batch_invariant=true: texts do not depend on drafts or on what else is in a batch.",
        "--set -S",
        metavar="NAME=VALUE",
        rich_help_panel=SAMPLING,
    )

    @property
    def kv_type(self) -> str | None:
        """The type of K/V that the user set."""
        kv_types = {*(self.kv_types or ())}
        if len(kv_types) > 1:
            raise ConfigError(
                "K and V must have the same type: set -ctk and -ctv alike",
                hint="--kv-type q8_0/f16 is the one pair of two types: K in q8_0, V in f16",
            )
        return next(iter(kv_types), None)

    def announce(self, console: Console) -> str:
        """Return the name of the model; a default is named on standard error, unless with --json."""
        if self.target is None and not console.silent:
            console.note(f"model: {hub.default_model()} (the default; -m names another)")
        return hub.default_model() if self.target is None else self.target

    def set(self, kind: Literal["sampling", "drafting", "load"]) -> dict[str, Any]:
        """Return the settings of ``-S`` of one kind, by name.

        Raises:
            ConfigError: an unknown name.
        """
        kinds, values = setting_names(), dict[str, Any]()
        for text in self.settings or ():
            name, equals, value = text.partition("=")
            if not (name and equals):
                raise ConfigError(f"-S takes NAME=VALUE, such as typical_p=0.9, not {text!r}")
            name = name.strip().replace("-", "_")
            names = set().union(*kinds.values())
            if name not in names:
                hint = nearest(name, sorted(names), "settings")
                raise ConfigError(f"-S has no setting {name!r}", hint=hint)
            if name in kinds[kind]:
                values[name] = setting_value(value)
        if isinstance(values.get("logit_bias"), dict):
            values["logit_bias"] = {
                token_key("logit_bias", k): float(v) for k, v in values["logit_bias"].items()
            }
        if isinstance(values.get("dry_sequence_breakers"), list):
            values["dry_sequence_breakers"] = tuple(values["dry_sequence_breakers"])
        return values

    def load_options(self) -> LoadOptions:
        """Return the options that were set, by their names in `llamabranch.load`."""
        choice("--flash-attn", self.flash_attn, _SWITCH)
        flags: dict[str, Any] = {
            "n_gpu_layers": self.gpu_layers,
            "n_ctx": self.n_ctx,
            "n_threads": self.threads,
            "n_threads_batch": self.threads,
            "kv_type": self.kv_type,
            "flash_attention": _SWITCH[self.flash_attn],
        }
        options = {name: value for name, value in flags.items() if value is not None}
        return cast("LoadOptions", options | self.set("load"))

    def open(self, name: str, console: Console, **more: Unpack[LoadOptions]) -> lb.Context:
        """Load a model and create a context for it; the end of the command closes both.

        ``more`` are options that override the user's, except ``-S``.
        """
        options = {**self.load_options(), **more, **self.set("load")}
        if options.get("n_ctx") == 0:
            options["n_ctx"] = trained_length(name)
            if options["n_ctx"] is None:
                message = f"{name} does not say what length it was trained for"
                raise ConfigError(message, hint="-c N sets one")
        return _load(name, console, **options)


@dataclass(frozen=True)
class DraftFlags(ModelFlags):
    """The model, its drafter, and how much to draft."""

    first: ClassVar[str] = "draft"

    draft: str | None = option(
        None,
        "A draft model, an EAGLE-3 head or a file of MTP layers as for -m; `mtp`, `lookup`, "
        "`suffix`, `grammar`, a chain such as `suffix+NAME`, `auto` or `none`. Default: auto, "
        "which chooses a drafter; with a grammar, grammar+suffix.",
        "--draft --draft-model --model-draft --spec-draft-model --hf-repo-draft -d -md -hfd -hfrd",
        rich_help_panel=DRAFTING,
    )
    draft_length: str | None = option(
        None,
        "Tokens to draft per round; auto drafts as many as raise throughput, possibly none. "
        "[default: auto; 4 for speculate]",
        "--draft-max --draft-length --gamma --num-speculative-tokens --spec-draft-n-max -k",
        metavar="N|auto",
        rich_help_panel=DRAFTING,
    )

    def config(self) -> lb.SpeculativeConfig:
        """Return the settings of drafting; ConfigError for a value out of range."""
        length = setting_value("auto" if self.draft_length is None else self.draft_length)
        try:
            lb.SpeculativeConfig(draft_k=length)
        except ConfigError as error:
            message = error.message.removeprefix("draft_k ")
            raise ConfigError(f"--draft-max: {message}", hint=error.hint) from None
        return lb.SpeculativeConfig(**{"draft_k": length, **self.set("drafting")})

    def resolve(
        self, console: Console, *, has_grammar: bool = False, always: bool = False
    ) -> tuple[str, tuple[str, ...]]:
        """Return the names of the target and of its drafters; see `drafters.choose_drafters`.

        ``always`` is the choice of ``speculate``; see `drafters.always_drafting`.
        """
        from .drafters import always_drafting, choose_drafters  # need NumPy and llama.cpp

        if always and self.draft in (None, "auto"):
            return always_drafting(self.target, console, has_grammar=has_grammar)
        target = self.announce(console)
        return target, choose_drafters(target, self.draft, console, has_grammar=has_grammar)

    def open_pair(
        self,
        names: tuple[str, tuple[str, ...]],
        console: Console,
        of_target: LoadOptions,
        of_drafts: LoadOptions,
    ) -> tuple[lb.Context, lb.Drafter]:
        """Open a target and its drafters. `resolve` returns their ``names``.

        ``of_target`` and ``of_drafts`` are options that override the user's.
        """
        from .drafters import MTP, make_drafter

        target, drafters = names
        options: LoadOptions = {"load_mtp": MTP in drafters}
        options.update(of_target)
        context = self.open(target, console, **options)
        drafter = make_drafter(
            drafters, lambda name: self.open_draft(name, context, console, of_drafts)
        )
        for other in (draft.model for draft in drafter.contexts):
            if context.model.compatibility(other).path == "text":
                console.note(f"{other.name} has another vocabulary: it drafts through the text")
        return context, drafter

    def open_draft(
        self, name: str, target: lb.Context, console: Console, more: LoadOptions
    ) -> lb.Context:
        """Open a drafter for ``target``: a draft model, a head in a separate file, or ``mtp``."""
        if name == "mtp":
            return console.resources.enter_context(lb.Context(target.model, target=target))
        options = self.load_options()
        options.update(more)
        if self.n_ctx == 0:
            options["n_ctx"] = target.n_ctx
        is_head = lb.Model.is_head(hub.resolve(name, download=None))
        return _load(name, console, target=target if is_head else None, **options)


@dataclass(frozen=True)
class PromptFlags:
    """Prompts of the command line and of files."""

    panel: ClassVar[str] = TEXT
    first: ClassVar[str] = "prompts files"

    texts: list[str] | None = argument(
        "What to continue; - reads standard input.", metavar="PROMPT"
    )
    prompts: list[str] | None = option(
        None,
        "What to continue: one text or more; may be repeated.",
        "--prompt --prompts -p",
        metavar="TEXT...",
    )
    files: list[Path] | None = option(
        None,
        "A file whose whole text is a prompt, without its last newline; may be repeated.",
        "--file -f",
    )

    @property
    def given(self) -> list[str]:
        """The texts of the command line and of ``--file``; ConfigError if one cannot be read."""
        texts = [*(self.texts or ()), *(self.prompts or ())]
        if "-" in (self.texts or ()):
            texts[texts.index("-")] = read_standard_input()
        if any(r"\n" in text for text in texts):
            Console().note(r"\n is two characters here; in a shell $'...\n...' writes a new line")
        return [*texts, *map(read_prompt_file, self.files or ())]

    def one(self) -> str:
        """Return the only prompt, the text that is piped in, or the default; ConfigError for several."""
        texts = self.given
        if len(texts) > 1:
            hint = "`llamabranch generate` takes several prompts"
            raise ConfigError("more than one prompt was given", hint=hint)
        return texts[0] if texts else read_piped_text() or DEFAULT_PROMPT


@dataclass(frozen=True)
class ManyPrompts(PromptFlags):
    """Prompts from the command line, and from the lines of a file."""

    first: ClassVar[str] = "input_file"

    input_file: str | None = option(
        None,
        "A file of prompts, one per line, or of JSON objects (.jsonl); - is standard input.",
        "--input -i",
        metavar="FILE|-",
    )

    def requests(self, sampling: SamplingParams) -> list[lb.Request]:
        """Return requests for all prompts, first for the command line's; see `job_requests`."""
        from .jsonl import job_requests  # needs NumPy and llama.cpp

        return job_requests(self.given, self.input_file, sampling)


@dataclass(frozen=True)
class ChatFlags:
    """How a prompt becomes tokens: as it is, or as a message of a conversation."""

    panel: ClassVar[str] = TEXT
    first: ClassVar[str] = "chat"

    chat: bool = option(
        False,
        "Wrap the prompt in the model's chat template; -sys and --chat-template turn it on.",
        "--chat",
    )
    conversation: bool = option(
        False, "Like --chat, if the model has a template.", "--conversation -cnv", hidden=True
    )
    system: str | None = option(
        None, "The system message before the prompt.", "--system-prompt -sys"
    )
    chat_template: str | None = template_option()

    def decided(self, name: str) -> ChatFlags:
        """Return the options; ``--conversation`` becomes ``--chat`` if the model has a template."""
        if not self.conversation or self.is_on:
            return self
        with vocabulary(name) as model:
            return replace(self, chat=model.chat_template is not None)

    @property
    def template(self) -> str | None:
        """The chat template that the user set, in the form for `llamabranch.load`, or None."""
        return read_template(self.chat_template)

    @property
    def is_on(self) -> bool:
        """Whether prompts get the chat template: by ``--chat``, or by an option that implies it."""
        return self.chat or self.system is not None or self.chat_template is not None

    def prompt_tokens(self, model: lb.Model, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt; in chat mode a text becomes a user's turn in the chat template.

        Raises:
            ConfigError, UnsupportedError: the template is missing, fails, or refuses the messages.
        """
        if not self.is_on or not isinstance(prompt, str):
            return model.prompt_tokens(prompt)
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return model.prompt_tokens([*before, {"role": "user", "content": prompt}])


@dataclass(frozen=True)
class DrawFlags:
    """The two settings of sampling that every command has that samples."""

    panel: ClassVar[str] = SAMPLING
    first: ClassVar[str] = "temperature seed"

    temperature: float = option(
        DEFAULTS.temperature,
        "0 or less always takes the most probable token.",
        "--temp --temperature",
        callback=lambda value: max(value, 0.0),
    )
    seed: int | None = option(
        None,
        "With --exact the same seed gives the same text, with drafts or without; -1 takes a random one.",
        "--seed -s",
        callback=lambda value: None if value == -1 else value,
    )


@dataclass(frozen=True)
class SamplingFlags(DrawFlags):
    """How tokens are drawn: the settings of `llamabranch.SamplingParams` by the same names."""

    top_k: int = option(DEFAULTS.top_k, "Keep the k most probable; 0 keeps all.")
    top_p: float = option(DEFAULTS.top_p, "Nucleus sampling; 1 is off.")
    min_p: float = option(
        DEFAULTS.min_p,
        "Drop tokens less probable than this share of the most probable one; 0 is off.",
    )
    repeat_penalty: float = option(DEFAULTS.repeat_penalty, "Penalise recent tokens; 1 is off.")
    ignore_eos: bool = option(
        False, "Never sample a token that ends the text.", "--ignore-eos --ignore-end"
    )

    def params(self, models: ModelFlags, seed: int | None = None) -> SamplingParams:
        """Return the settings except ``--ignore-eos``; ConfigError for a value out of range."""
        names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")
        flags = {name: getattr(self, name) for name in names}
        lb.SamplingParams(seed=self.seed)  # raises now where the engine gets the seed
        settings = {**flags, "seed": seed, **models.set("sampling")}
        return DEFAULTS.replace(**cast("lb.sampling.SamplingSettings", settings))

    def without_eog(self, params: SamplingParams, model: lb.Model) -> SamplingParams:
        """Return ``params`` without the model's EOG tokens if ``--ignore-eos`` was given."""
        if not self.ignore_eos:
            return params
        banned = dict.fromkeys(model.eog_tokens, -math.inf)
        return params.replace(logit_bias={**params.logit_bias, **banned})


@dataclass(frozen=True)
class TextFlags(SamplingFlags):
    """Everything that determines a text: length, stop strings, structure, sampling."""

    first: ClassVar[str] = "max_tokens json_schema"

    max_tokens: int | None = option(
        128,
        "Tokens to generate; -1: until the model ends the text or the context is full.",
        LENGTH,
        callback=limit,
        rich_help_panel=TEXT,
    )
    stop: list[str] | None = option(
        None, "End before this string; may be repeated.", "--stop", rich_help_panel=TEXT
    )
    grammar: str | None = option(
        None,
        "A GBNF grammar or a file that contains one, or a /regular expression/ for the whole text.",
        "--grammar --grammar-file",
        metavar="GBNF|FILE|/REGEX/",
        rich_help_panel=TEXT,
    )
    json_schema: str | None = option(
        None,
        "A JSON schema, or a file that contains one.",
        "--json-schema --json-schema-file -j -jf",
        metavar="JSON|FILE",
        rich_help_panel=TEXT,
    )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings that end the text."""
        return tuple(self.stop or ())

    def parse_grammar(self) -> lb.Grammar | None:
        """Return the grammar of these options, if any; GrammarError if it is invalid."""
        grammar = self.grammar
        if grammar is not None and self.json_schema is not None:
            raise typer.BadParameter("--grammar and --json-schema exclude each other")
        if self.json_schema is not None:
            return lb.Grammar.from_json_schema(schema_text(self.json_schema))
        if grammar is None:
            return None
        if len(grammar) > 1 and grammar.startswith("/") and grammar.endswith("/"):
            return lb.Grammar.from_regex(grammar[1:-1])
        inline = "::=" in grammar and not os.path.isfile(grammar)
        return lb.Grammar(grammar if inline else read_text(Path(grammar)))


@dataclass(frozen=True)
class OutputFlags:
    """How a command prints its output."""

    panel: ClassVar[str] = OUTPUT
    first: ClassVar[str] = "as_json"

    as_json: bool = option(False, "Print one JSON object and nothing else.", "--json")
    verbose: bool = option(
        False,
        "Show llama.cpp's log, what drafting did, and tracebacks of errors.",
        "--verbose --log-verbose --debug -v",
    )

    @contextmanager
    def console(self) -> Iterator[Console]:
        """Yield the console of a command; errors end the command with one line and an exit code."""
        console = Console(silent=self.as_json, verbose=self.verbose)
        with reporting_errors(console), console.resources:
            yield console
