"""The options that commands share: the fields of `Given`, which has their values.

`with_options` lists the ones that a command has. `Given` turns their values into options of
`llamabranch.load`, settings and a grammar.
NumPy and llama.cpp are imported when an option needs them, so that --help is fast.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path, PurePath
from typing import Any, Literal, get_type_hints

import typer

import llamabranch as lb
from llamabranch import ConfigError, SamplingParams, hub

from ..arguments import choice, nearest, token_key
from .console import Console
from .files import read_text
from .interrupts import reporting_errors

# The headings of --help, in the order of use.
PANELS = ("Model", "Text", "Server", "Page", "Sampling", "Memory and speed", "Output")
MODEL, TEXT, SERVER, PAGE, SAMPLING, MEMORY, OUTPUT = PANELS
DEFAULTS = SamplingParams()
MOST_CELLS = 8192  # cells of the cache, unless -c is given or the model was trained for less
_SWITCH = {"on": True, "1": True, "off": False, "0": False, "auto": None}
# What -S sets of a `Request`, and of an `Agent`.
_REQUEST = {"n", "top_logprobs", "min_tokens", "stop", "thinking"}
_AGENT = {
    *("tool_choice", "parallel_tool_calls", "thinking", "max_seconds", "tool_seconds"),
    *("result_tokens", "repeats", "forks"),
}


def option(panel: str, names: str, text: str, default: object = None, **more: Any) -> Any:
    """Return a `typer.Option`. Its names are separated by spaces; what it takes may come last."""
    words = names.split()
    taken = None if words[-1].startswith("-") else words.pop()
    return typer.Option(default, *words, help=text, rich_help_panel=panel, metavar=taken, **more)


def argument(metavar: str, text: str, panel: str = "Text") -> Any:
    """Return a `typer.Argument`."""
    return typer.Argument(None, metavar=metavar, help=text, rich_help_panel=panel)


def unless_minus_one(value: int | None) -> int | None:
    """Return a value, or None for llama.cpp's -1 (no limit, or a random seed)."""
    return None if value == -1 else value


PROMPT = "-p --prompt --prompts TEXT", "A text to continue; several are allowed."
# Fields of `Given` that many commands have.
SAMPLING_OPTIONS = "temperature top_k top_p min_p seed settings"
MEMORY_OPTIONS = "n_ctx threads gpu_layers kv_type flash_attn"
FOLDER_OPTIONS = "cache_dir cache_size"
DRAFT_OPTIONS = f"model draft draft_max {MEMORY_OPTIONS}"
GENERATION_OPTIONS = (
    f"{DRAFT_OPTIONS} chat system max_tokens schema grammar {SAMPLING_OPTIONS} as_json verbose"
)
# The shared options by their fields in `Given`: panel, names and value, help.
_SHARED = {
    "model": (MODEL, "-m --model --target --target-model -hf -hfr --hf-repo MODEL",
              "A file, a name, user/repo[:tag]."),
    "draft": (MODEL, "-md --draft --draft-model --model-draft -d -hfd --hf-repo-draft MODEL",
              "A model, suffix, mtp or none. [default: auto]"),
    "draft_max": (MODEL, "-k --draft-max --draft-length --gamma N", "Tokens per draft, or auto."),
    "chat_template": (MODEL, "--chat-template --chat-template-file FILE|NAME",
                      "A chat template for it."),
    "chat": (TEXT, "--chat", "The prompt is a message, to be answered."),
    "system": (TEXT, "-sys --system-prompt TEXT", "The system message."),
    "max_tokens": (TEXT, "-n --n-predict --predict --max-tokens N", "Tokens at most; -1: no limit."),
    "schema": (TEXT, "-j --json-schema --json-schema-file -jf JSON|FILE", "Write JSON of this schema."),
    "grammar": (TEXT, "--grammar --grammar-file GBNF|FILE|/REGEX/", "Write what this grammar allows."),
    "temperature": (SAMPLING, "--temp --temperature T", "0: the most probable token."),
    "top_k": (SAMPLING, "--top-k K", "Draw among the best K; 0: all."),
    "top_p": (SAMPLING, "--top-p P", "Nucleus sampling; 1: off."),
    "min_p": (SAMPLING, "--min-p P", "Share of the best; 0: off."),
    "seed": (SAMPLING, "-s --seed N", "With --exact: same seed, same text."),
    "settings": (SAMPLING, "-S --set NAME=VALUE", "Any other setting, by its Python name."),
    "n_ctx": (MEMORY, "-c --ctx-size --n-ctx N", "Context; 0: what it was trained for."),
    "threads": (MEMORY, "-t --threads N", "CPU threads. [default: one a core]"),
    "gpu_layers": (MEMORY, "-ngl --gpu-layers --n-gpu-layers N|all", "Layers on the GPU. [default: all]"),
    "kv_type": (MEMORY, "-ctk --kv-type --cache-type-k TYPE", "K/V: f16, bf16, q8_0, ..."),
    "flash_attn": (MEMORY, "-fa --flash-attn on|off|auto", "Flash attention."),
    "cache_dir": (MEMORY, "--cache-dir DIR", "Keeps what was read, also for later."),
    "cache_size": (MEMORY, "--cache-size SIZE", "Its most bytes. [default: 8GiB]"),
    "as_json": (OUTPUT, "--json", "Print one JSON object and nothing else."),
    "verbose": (OUTPUT, "-v --debug --verbose", "llama.cpp's log, the build, tracebacks."),
}  # fmt: skip
_CHECKS: dict[str, dict[str, Any]] = {
    "max_tokens": {"callback": unless_minus_one},
    "seed": {"callback": unless_minus_one},
    "temperature": {"callback": lambda value: max(value, 0.0)},
    "n_ctx": {"min": 0},
    "threads": {"min": 1, "max": 512},
    "gpu_layers": {"parser": lambda value: -1 if value in ("auto", "all") else int(value)},
}


@dataclass(frozen=True)
class Given:
    """The values of the shared options; a command that lacks one has its default."""

    model: str | None = None
    draft: str | None = None
    draft_max: str = "auto"
    chat_template: str | None = None
    chat: bool = False
    system: str | None = None
    max_tokens: int | None = None
    schema: str | None = None
    grammar: str | None = None
    temperature: float = DEFAULTS.temperature
    top_k: int = DEFAULTS.top_k
    top_p: float = DEFAULTS.top_p
    min_p: float = DEFAULTS.min_p
    seed: int | None = None
    settings: list[str] | None = None
    n_ctx: int | None = None
    threads: int | None = None
    gpu_layers: int | None = None
    kv_type: str | None = None
    flash_attn: str = "auto"
    cache_dir: str | None = None
    cache_size: str | None = None
    as_json: bool = False
    verbose: bool = False
    kinds: Collection[str] = ()  # of the settings that the command has

    # -- settings by name --------------------------------------------------------------------------

    def set(
        self, kind: Literal["sampling", "drafting", "load", "request", "agent", "chat"]
    ) -> dict[str, Any]:
        """Return the settings of ``-S`` of one kind, by name; ConfigError for an unknown name."""
        known, values = _setting_names(), dict[str, Any]()
        names = set().union(*(known[kind] for kind in self.kinds))
        for name, value in named_values("-S", self.settings, names):
            if name in known[kind]:
                values[name] = value if name == "stop" else setting_value(value)
        if isinstance(bias := values.get("logit_bias"), dict):
            values["logit_bias"] = {token_key("logit_bias", key): bias[key] for key in bias}
        if isinstance(template := values.get("chat_template"), str):
            values["chat_template"] = template_source(template)
        return values

    def params(self, seed: int | None = None) -> SamplingParams:
        """Return the settings of sampling; ConfigError for a value out of range."""
        names = ("temperature", "top_k", "top_p", "min_p")
        flags = {name: getattr(self, name) for name in names}
        SamplingParams(seed=self.seed)  # checked here, also if the engine gets it
        settings: Any = {**flags, "seed": seed, **self.set("sampling")}
        return DEFAULTS.replace(**settings)

    def config(self) -> lb.SpeculativeConfig:
        """Return the settings of drafting; ConfigError for a value out of range."""
        options = {"draft_k": setting_value(self.draft_max), **self.set("drafting")}
        return lb.SpeculativeConfig(**options)

    @property
    def schema_text(self) -> Any:
        """The text of the JSON schema, if any."""
        if self.schema is None or self.schema.lstrip().startswith("{"):
            return self.schema
        return read_text(Path(self.schema))

    def parse_grammar(self) -> lb.Grammar | None:
        """Return the grammar or the schema, if any; GrammarError if it is invalid."""
        grammar = self.grammar
        if grammar is not None and self.schema is not None:
            raise typer.BadParameter("--grammar and --json-schema exclude each other")
        if (schema := self.schema_text) is not None:
            return lb.Grammar.from_json_schema(schema)
        if grammar is None:
            return None
        if len(grammar) > 1 and grammar.startswith("/") and grammar.endswith("/"):
            return lb.Grammar.from_regex(grammar[1:-1])
        inline = "::=" in grammar and not os.path.isfile(grammar)
        return lb.Grammar(grammar if inline else read_text(Path(grammar)))

    @property
    def is_chat(self) -> bool:
        """Whether prompts are messages: by ``--chat``, or by an option that implies it."""
        return self.chat or self.system is not None or "chat_template" in self.set("load")

    def prompt(self, prompt: Any) -> Any:
        """Return a prompt for the engine; if `is_chat`, a text becomes the messages of a chat."""
        if not self.is_chat or not isinstance(prompt, str):
            return prompt
        before = [] if self.system is None else [("system", self.system)]
        return [*before, ("user", prompt)]

    # -- models ------------------------------------------------------------------------------------

    def load_options(self) -> dict[str, Any]:
        """Return the options that were set, by their names in `llamabranch.load`."""
        choice("--flash-attn", self.flash_attn, _SWITCH)
        flags = {
            "n_gpu_layers": self.gpu_layers,
            "n_ctx": self.n_ctx,
            "n_threads": self.threads,
            "n_threads_batch": self.threads,
            "kv_type": self.kv_type,
            "flash_attention": _SWITCH[self.flash_attn],
            "cache_dir": self.cache_dir,
            "cache_size": self.cache_size,
            "chat_template": self.chat_template and template_source(self.chat_template),
        }
        options = {name: value for name, value in flags.items() if value is not None}
        return options | self.set("load")

    def announce(self, console: Console) -> str:
        """Return the name of the model; a default is named on standard error, unless with --json."""
        if self.model is None and not console.silent:
            console.note(f"model: {hub.default_model()} (the default; -m names another)")
        return hub.default_model() if self.model is None else self.model

    def open(self, name: str, console: Console, *, n_texts: int = 1, **more: Any) -> lb.Context:
        """Load a model and create a context for it; the end of the command closes both.

        Without -c its cache has room for ``n_texts`` texts of the length that the model was trained
        for, but at most `MOST_CELLS`. ``more`` overrides the user's options, except ``-S``.
        """
        if console.verbose:
            from ..bench.machine import Machine

            console.note("\n".join(Machine.now().describe()))
        options = self.load_options() | more | self.set("load")
        if not options.get("n_ctx"):
            trained = trained_length(name) or MOST_CELLS
            n_texts = min(n_texts, options.get("n_seq_max", n_texts))
            is_whole = options.get("n_ctx") == 0
            options["n_ctx"] = trained if is_whole else min(MOST_CELLS, trained * n_texts)
        return load(name, console, **options)


def with_options(
    listed: str, kind: str = "load", **defaults: object
) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that adds these shared options to a command's own, as a `Given`.

    ``-S`` sets settings of this kind, and of loading; of sampling, drafting and requests if the
    command has the options for them. The function is called with the `Given`, a console, and the
    values of its own options. Errors end the command with one line and an exit code.
    """
    types, known, names = get_type_hints(Given), vars(Given), listed.split()
    has = {"sampling": "temperature", "drafting": "draft", "request": "grammar"}
    kinds = {"load", kind} | {each for each, name in has.items() if name in names}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def run(**values: Any) -> None:
            given = Given(**{name: values.pop(name) for name in names}, kinds=kinds)
            console = Console(silent=given.as_json, verbose=given.verbose)
            with reporting_errors(console), console.resources:
                function(given, console, **values)

        own = [*signature(function, eval_str=True).parameters.values()][2:]
        shared = [
            Parameter(
                name, Parameter.KEYWORD_ONLY, annotation=types[name],
                default=option(
                    *_SHARED[name], defaults.get(name, known[name]), **_CHECKS.get(name, {})
                ),
            )
            for name in names
        ]  # fmt: skip
        parameters = [*(p.replace(kind=Parameter.KEYWORD_ONLY) for p in own), *shared]
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def load(name: str, console: Console, **options: Any) -> lb.Context:
    """Load a model and create a context for it; the end of the command closes both."""
    try:
        context = lb.load(name, progress=console.loading(name), verbose=console.verbose, **options)
    finally:
        console.progress("")
    return console.resources.enter_context(context)


def template_source(template: str) -> str:
    """Return a chat template by its file; its source, or the name of one of llama.cpp's, as it is.

    Raises:
        ConfigError: the file cannot be read.
    """
    is_file = os.path.isfile(template) or PurePath(template).name != template or "." in template
    return read_text(Path(template)) if is_file and "{" not in template else template


def _setting_names() -> dict[str, set[str]]:
    """Return the names of the settings of ``-S``, by their kind."""
    from ..loading import LoadOptions

    return {
        "sampling": {f.name for f in fields(SamplingParams)} - {"logprobs", "logits_processor"},
        "drafting": {f.name for f in fields(lb.SpeculativeConfig)},
        "load": {*LoadOptions.__annotations__},
        "request": _REQUEST,
        "agent": _AGENT,
        "chat": {"thinking"},
    }


def named_values(
    option: str, texts: Sequence[str] | None, names: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield name and value of each ``NAME=VALUE``; ConfigError for another form or an unknown name."""
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ConfigError(f"{option} takes NAME=VALUE, not {text!r}")
        name = name.strip().replace("-", "_")
        if name not in names:
            hint = nearest(name, sorted(names), "settings")
            raise ConfigError(f"{option} has no setting {name!r}", hint=hint)
        yield name, value


def setting_value(text: str) -> Any:
    """Return a setting's value: a number, true, none, a JSON list or object, or the text itself."""
    if text.lower() in ("none", "null", ""):
        return None
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text


def trained_length(name: str) -> int | None:
    """Return the context length that a model was trained for; None if its file does not say."""
    with lb.Model(hub.resolve(name, download=None), vocab_only=True) as model:
        length = model.metadata.get(f"{model.architecture}.context_length", "")
    return int(length) if length.isdigit() and int(length) else None
