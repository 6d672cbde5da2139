"""The options that commands share, in bundles that convert them to what the library takes.

Options that only one command has are in that command's file. NumPy and llama.cpp are imported when an
option needs them: commands that only look something up begin at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import llamabranch as lb
from llamabranch import SamplingParams, hub

from .console import Console
from .prompts import PromptSource, read_prompts, read_text
from .reporting import reporting_errors

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from llamabranch import Context, Grammar, Model, SpeculativeConfig

    from ..loading import LoadOptions

__all__ = [
    "DRAFTING",
    "MODELS",
    "OUTPUT",
    "REQUESTS",
    "RUNTIME",
    "DraftOptions",
    "Explain",
    "HubOptions",
    "LoadingOptions",
    "ModelOptions",
    "OutputOptions",
    "PromptOptions",
    "RuntimeOptions",
    "SamplingOptions",
    "TextOptions",
    "Threads",
]

# The headings of --help.
MODELS = "Models"
REQUESTS = "Requests"
DRAFTING = "Drafting"
SAMPLING = "Sampling"
RUNTIME = "Runtime"
OUTPUT = "Output"

DEFAULTS = SamplingParams()

Explain = Annotated[
    bool,
    typer.Option(
        "--explain",
        help="Explain how it drafted, what was accepted, and why drafts ended.",
        rich_help_panel=OUTPUT,
    ),
]

Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="CPU threads.", rich_help_panel=RUNTIME)
]


@dataclass(frozen=True)
class HubOptions:
    """Whether a model that is not on this machine may be downloaded."""

    download: Annotated[
        bool | None,
        typer.Option(
            "--download/--no-download",
            help="Download a model that is not on this machine, or never do so. "
            "Default: only where a terminal shows its size.",
            rich_help_panel=MODELS,
        ),
    ] = None
    offline: Annotated[
        bool,
        typer.Option("--offline", help="Use no network.", rich_help_panel=MODELS),
    ] = False

    def find(self, name: str) -> Path:
        """Return the file of a model, downloaded if it must be and may be.

        Raises:
            ConfigError, DownloadError, UnsupportedError: as `llamabranch.hub.obtain`.
        """
        return hub.obtain(name, download=self.download, offline=True if self.offline else None)


@dataclass(frozen=True)
class ModelOptions(HubOptions):
    """The target and what drafts for it."""

    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "--target-model",
            "-t",
            "-m",
            "-hf",
            "-hfr",
            help="A GGUF path, a name from `llamabranch models`, or user/repo[:tag] on the Hugging Face "
            "hub. Default: the bundled target.",
            rich_help_panel=MODELS,
        ),
    ] = None
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            "--draft-model",
            "-d",
            "-md",
            "-hfd",
            help="A model as for --target, `auto` (one that fits), `lookup`, `suffix`, a chain such as "
            "`suffix+NAME`, or `none`. Default: the draft listed with the target, else auto.",
            rich_help_panel=MODELS,
        ),
    ] = None

    def resolve(self, console: Console) -> tuple[str, tuple[str, ...]]:
        """Return the name of the target and those of its drafters, all found before any is loaded.

        What ``--draft auto`` found is told on standard error.

        Raises:
            ConfigError: a model that is not on this machine and may not be downloaded.
            ModelLoadError: the target is no model.
            DownloadError, UnsupportedError: a model cannot be downloaded.
        """
        from .candidates import choose_draft  # these two need NumPy and llama.cpp
        from .drafters import parse_draft

        target = hub.BUNDLED_TARGET if self.target is None else self.target
        self.find(target)
        draft = self._default_draft(target) if self.draft is None else self.draft
        if draft == "auto":
            found = choose_draft(target, self.find)
            draft = "suffix" if found is None else found
            if found is None:
                console.note(f"no model here drafts for {target}: copying from the text (suffix)")
            else:
                console.note(f"draft: {draft}")
        return target, parse_draft(draft, self.find)

    @staticmethod
    def _default_draft(target: str) -> str:
        """Return the draft that models.txt lists for the target if it is here, else "auto"."""
        listed = hub.draft_for(target)
        is_here = listed is not None and isinstance(hub.look_up(listed), Path)
        return listed if listed is not None and is_here else "auto"


@dataclass(frozen=True)
class PromptOptions:
    """Prompts of the command line and of a file."""

    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompts",
            "--prompt",
            "-p",
            metavar="P1 P2 ...",
            help="What to continue: one or more texts; may be repeated.",
            rich_help_panel=REQUESTS,
        ),
    ] = None
    input_file: Annotated[
        str | None,
        typer.Option(
            "--input",
            "-i",
            metavar="FILE|-",
            help="A file of prompts, one a line, or of JSON objects (.jsonl); - is standard input.",
            rich_help_panel=REQUESTS,
        ),
    ] = None

    def read(self) -> PromptSource:
        """Return all prompts, first those of the command line.

        Raises:
            ConfigError: the file cannot be read.
        """
        return read_prompts(self.prompts or (), self.input_file)


@dataclass(frozen=True)
class DraftOptions:
    """How long to draft, and how drafted tokens are accepted."""

    draft_length: Annotated[
        str,
        typer.Option(
            "--draft-length",
            "--gamma",
            "-k",
            metavar="N|auto",
            help="Tokens to draft a round; auto drafts as many as pay, and none where none pays.",
            rich_help_panel=DRAFTING,
        ),
    ] = "auto"
    rule: Annotated[
        str,
        typer.Option(
            metavar="auto|seeded|token|block",
            help="How drafted tokens are accepted; auto is seeded with a seed, at temperature 0 and "
            "for trees, else block.",
            rich_help_panel=DRAFTING,
        ),
    ] = "auto"
    entropy_stop: Annotated[
        float | None,
        typer.Option(
            help="End a draft where the draft model's entropy exceeds this many nats.",
            rich_help_panel=DRAFTING,
        ),
    ] = None

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
class SamplingOptions:
    """How tokens are drawn, and how a prompt is wrapped."""

    temperature: Annotated[
        float, typer.Option(help="0 takes the most probable token.", rich_help_panel=SAMPLING)
    ] = DEFAULTS.temperature
    top_k: Annotated[
        int, typer.Option(help="Keep the k most probable; 0 keeps all.", rich_help_panel=SAMPLING)
    ] = DEFAULTS.top_k
    top_p: Annotated[
        float, typer.Option(help="Nucleus sampling; 1 is off.", rich_help_panel=SAMPLING)
    ] = DEFAULTS.top_p
    min_p: Annotated[
        float,
        typer.Option(
            help="Drop tokens less probable than this share of the most probable one; 0 is off.",
            rich_help_panel=SAMPLING,
        ),
    ] = DEFAULTS.min_p
    repeat_penalty: Annotated[
        float, typer.Option(help="Penalise recent tokens; 1 is off.", rich_help_panel=SAMPLING)
    ] = DEFAULTS.repeat_penalty
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            "--ignore-end",
            help="Never sample an EOG (end of generation) token.",
            rich_help_panel=SAMPLING,
        ),
    ] = False
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Wrap the prompt in the target's chat template.",
            rich_help_panel=SAMPLING,
        ),
    ] = False

    def params(self, seed: int | None = None) -> SamplingParams:
        """Return the settings as the library takes them; `without_eog` adds ``--ignore-eos``.

        Raises:
            ConfigError: a value out of range.
        """
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repeat_penalty=self.repeat_penalty,
            seed=seed,
        )

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


@dataclass(frozen=True)
class TextOptions:
    """What determines a text besides the sampling settings: length, seed, stop strings, grammar."""

    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens", "-n", min=1, help="Tokens to generate.", rich_help_panel=SAMPLING
        ),
    ] = 128
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            "-s",
            help="With a seed the text is that of plain decoding, whatever the draft.",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End at this text; may be repeated.", rich_help_panel=SAMPLING),
    ] = None
    grammar: Annotated[
        Path | None, typer.Option(help="A file with a GBNF grammar.", rich_help_panel=SAMPLING)
    ] = None
    json_schema: Annotated[
        str | None,
        typer.Option(help="A JSON schema: a file, or the JSON itself.", rich_help_panel=SAMPLING),
    ] = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Where to end the text."""
        return tuple(self.stop or ())

    def parse_grammar(self) -> Grammar | None:
        """Return the grammar that a file or a JSON schema describes, None if there is neither.

        Raises:
            ConfigError, GrammarError: the file cannot be read, or the grammar is invalid.
        """
        if self.grammar is not None and self.json_schema is not None:
            raise typer.BadParameter("--grammar and --json-schema exclude each other")
        if self.grammar is not None:
            return lb.Grammar(read_text(self.grammar))
        if self.json_schema is not None:
            inline = self.json_schema.lstrip().startswith("{")
            text = self.json_schema if inline else read_text(Path(self.json_schema))
            return lb.Grammar.from_json_schema(text)
        return None


@dataclass(frozen=True)
class LoadingOptions:
    """How a model is loaded."""

    gpu_layers: Annotated[
        int | None,
        typer.Option(
            "--gpu-layers",
            "-ngl",
            help="Layers to put on the GPU; -1 is all.",
            rich_help_panel=RUNTIME,
        ),
    ] = None
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Show llama.cpp's log.", rich_help_panel=OUTPUT),
    ] = False

    def options(self) -> LoadOptions:
        """Return what was given, by the names of `llamabranch.load`."""
        return {} if self.gpu_layers is None else {"n_gpu_layers": self.gpu_layers}

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


@dataclass(frozen=True)
class RuntimeOptions(LoadingOptions):
    """How models are loaded and their contexts created."""

    n_ctx: Annotated[
        int | None,
        typer.Option("--n-ctx", "-c", help="Context size in tokens.", rich_help_panel=RUNTIME),
    ] = None
    threads: Threads = None
    kv_type: Annotated[
        str | None,
        typer.Option(help="Type of the KV cache: f16, bf16, q8_0, ...", rich_help_panel=RUNTIME),
    ] = None

    def options(self) -> LoadOptions:
        """Return what was given, by the names of `llamabranch.load`."""
        options = super().options()
        if self.n_ctx is not None:
            options["n_ctx"] = self.n_ctx
        if self.threads is not None:
            options["n_threads"] = self.threads
            options["n_threads_batch"] = self.threads
        if self.kv_type is not None:
            options["kv_type"] = self.kv_type
        return options

    def as_arguments(self) -> list[str]:
        """Return the given options as command-line arguments."""
        given = {
            "--n-ctx": self.n_ctx,
            "--threads": self.threads,
            "--gpu-layers": self.gpu_layers,
            "--kv-type": self.kv_type,
        }
        return [arg for name, v in given.items() if v is not None for arg in (name, str(v))]


@dataclass(frozen=True)
class OutputOptions:
    """How a command prints its output."""

    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one JSON object and nothing else.", rich_help_panel=OUTPUT
        ),
    ] = False
    no_color: Annotated[
        bool, typer.Option("--no-color", help="No colours.", rich_help_panel=OUTPUT)
    ] = False
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks.", rich_help_panel=OUTPUT)
    ] = False

    @contextmanager
    def console(self) -> Iterator[Console]:
        """Yield the console of a command; errors end the command with one line and an exit code."""
        console = Console(color=not self.no_color)
        with reporting_errors(console, debug=self.debug, as_json=self.as_json):
            yield console


def _parse_length(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is neither a number nor auto", param_hint="--draft-length"
        ) from None
