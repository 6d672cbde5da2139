"""The options that commands share: the fields of `Given`, which has their values.

`with_options` lists the ones that a command has. `Given` turns their values into options of
`llamabranch.load`, settings and a grammar.
NumPy and llama.cpp are imported when an option needs them, so that --help is fast.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, get_type_hints

import typer

import llamabranch as lb
from llamabranch import ConfigError, SamplingParams, hub

from ..arguments import choice, nearest, token_key
from .console import Console
from .files import read_text
from .interrupts import reporting_errors

# The headings of --help.
TEXT, SAMPLING, MODEL, OUTPUT = "Text", "Sampling", "Model", "Output"
DEFAULTS = SamplingParams()
MOST_CELLS = 8192  # cells of the cache, unless -c is given or the model was trained for less
_SWITCH = {"on": True, "1": True, "off": False, "0": False, "auto": None}
_REQUEST = {"n", "top_logprobs", "min_tokens", "stop"}  # fields of `Request` that -S sets


def option(names: str, text: str, panel: str, **more: Any) -> Any:
    """Return a `typer.Option` with these names, separated by spaces."""
    return typer.Option(*names.split(), help=text, rich_help_panel=panel, **more)


def unless_minus_one(value: int | None) -> int | None:
    """Return a value, or None for llama.cpp's -1 (no limit, or a random seed)."""
    return None if value == -1 else value


Prompts = Annotated[
    list[str] | None,
    typer.Argument(metavar="PROMPT", help="What to continue; - reads standard input."),
]
MorePrompts = Annotated[
    list[str] | None,
    option("-p --prompt --prompts", "What to continue, too.", TEXT, metavar="TEXT"),
]
SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "seed", "settings")
MODEL_OPTIONS = ("model", "n_ctx", "threads", "gpu_layers", "kv_type", "flash_attn")
DRAFT_OPTIONS = ("model", "draft", "draft_max", *MODEL_OPTIONS[1:])
FOLDER_OPTIONS = ("cache_dir", "cache_size")
OUTPUT_OPTIONS = ("as_json", "verbose")


def shared(default: object, names: str, text: str, panel: str, **more: Any) -> Any:
    """Return a field of `Given`: its value in commands that lack the option, and the option."""
    return field(default=default, metadata={"option": option(names, text, panel, **more)})


@dataclass(frozen=True)
class Given:
    """The values of the shared options."""

    max_tokens: int | None = shared(
        None, "-n --n-predict --predict --max-tokens", "Tokens at most; -1: no limit.", TEXT,
        metavar="N", callback=unless_minus_one,
    )  # fmt: skip
    grammar: str | None = shared(
        None, "--grammar --grammar-file", "A grammar, or its file.", TEXT,
        metavar="GBNF|FILE|/REGEX/",
    )  # fmt: skip
    schema: str | None = shared(
        None, "-j --json-schema --json-schema-file -jf", "A JSON schema.", TEXT, metavar="JSON|FILE"
    )
    chat: bool = shared(False, "--chat", "The prompt is a message, to answer.", TEXT)
    system: str | None = shared(
        None, "-sys --system-prompt", "The system message.", TEXT, metavar="TEXT"
    )
    temperature: float = shared(
        DEFAULTS.temperature, "--temp --temperature", "0: the most probable token.", SAMPLING,
        metavar="T", callback=lambda value: max(value, 0.0),
    )  # fmt: skip
    top_k: int = shared(
        DEFAULTS.top_k, "--top-k", "Keep the k best; 0: all.", SAMPLING, metavar="K"
    )
    top_p: float = shared(
        DEFAULTS.top_p, "--top-p", "Nucleus sampling; 1: off.", SAMPLING, metavar="P"
    )
    min_p: float = shared(
        DEFAULTS.min_p, "--min-p", "Share of the best; 0: off.", SAMPLING, metavar="P"
    )
    seed: int | None = shared(
        None, "-s --seed", "With --exact: same seed, same text.", SAMPLING, metavar="N",
        callback=unless_minus_one,
    )  # fmt: skip
    settings: list[str] | None = shared(
        None, "-S --set", "Any other setting, by its Python name.", SAMPLING, metavar="NAME=VALUE"
    )
    model: str | None = shared(
        None, "-m --model --target --target-model -hf -hfr --hf-repo",
        "A file, a name, user/repo[:tag].", MODEL, metavar="MODEL",
    )  # fmt: skip
    draft: str | None = shared(
        None, "-md --draft --draft-model --model-draft -d -hfd --hf-repo-draft",
        "Its drafter; suffix, mtp, none, auto.", MODEL, metavar="MODEL",
    )  # fmt: skip
    draft_max: str = shared(
        "auto", "-k --draft-max --draft-length --gamma", "Tokens a draft, or auto.", MODEL,
        metavar="N",
    )  # fmt: skip
    n_ctx: int | None = shared(
        None, "-c --ctx-size --n-ctx", "Context; 0: what it was trained for.", MODEL, metavar="N", min=0
    )  # fmt: skip
    threads: int | None = shared(None, "-t --threads", "CPU threads.", MODEL, metavar="N", min=1)
    gpu_layers: int | None = shared(
        None, "-ngl --gpu-layers --n-gpu-layers", "Layers on the GPU; all by default.", MODEL,
        metavar="N|all", parser=lambda value: -1 if value in ("auto", "all") else int(value),
    )  # fmt: skip
    kv_type: str | None = shared(
        None, "-ctk --kv-type --cache-type-k", "K/V: f16, bf16, q8_0, ...", MODEL, metavar="TYPE"
    )
    flash_attn: str = shared(
        "auto", "-fa --flash-attn", "Flash attention.", MODEL, metavar="on|off|auto"
    )
    chat_template: str | None = shared(
        None, "--chat-template --chat-template-file", "A chat template instead of the model's.", MODEL,
        metavar="FILE|NAME",
    )  # fmt: skip
    cache_dir: str | None = shared(
        None, "--cache-dir", "What was read is kept here.", MODEL, metavar="DIR"
    )
    cache_size: str | None = shared(
        None, "--cache-size", "Its most bytes; 8GiB by default.", MODEL, metavar="SIZE"
    )
    as_json: bool = shared(False, "--json", "Print one JSON object and nothing else.", OUTPUT)
    verbose: bool = shared(
        False, "-v --debug --verbose", "llama.cpp's log, and tracebacks of errors.", OUTPUT
    )

    # -- settings by name --------------------------------------------------------------------------

    def set(self, kind: Literal["sampling", "drafting", "load", "request"]) -> dict[str, Any]:
        """Return the settings of ``-S`` of one kind, by name; ConfigError for an unknown name."""
        kinds, values = _setting_names(), dict[str, Any]()
        for name, value in named_values("-S", self.settings, set().union(*kinds.values())):
            if name in kinds[kind]:
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

    def parse_grammar(self) -> lb.Grammar | None:
        """Return the grammar or the schema, if any; GrammarError if it is invalid."""
        grammar = self.grammar
        if grammar is not None and self.schema is not None:
            raise typer.BadParameter("--grammar and --json-schema exclude each other")
        if (schema := self.schema) is not None:
            is_text = schema.lstrip().startswith("{")
            return lb.Grammar.from_json_schema(schema if is_text else read_text(Path(schema)))
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
        options = self.load_options() | more | self.set("load")
        if not options.get("n_ctx"):
            trained = trained_length(name) or MOST_CELLS
            n_texts = min(n_texts, options.get("n_seq_max", n_texts))
            is_whole = options.get("n_ctx") == 0
            options["n_ctx"] = trained if is_whole else min(MOST_CELLS, trained * n_texts)
        return load(name, console, **options)


def with_options(*names: str, **defaults: object) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that adds these shared options, or all, to a command's own, as a `Given`.

    The function is called with the `Given`, a console, and the values of its own options. Errors end
    the command with one line and an exit code.
    """
    types, known = get_type_hints(Given), {field.name: field for field in fields(Given)}
    names = names or tuple(n for n in known if n not in (*FOLDER_OPTIONS, "chat_template"))

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def run(**values: Any) -> None:
            given = Given(**{name: values.pop(name) for name in names})
            console = Console(silent=given.as_json, verbose=given.verbose)
            with reporting_errors(console), console.resources:
                function(given, console, **values)

        own = [*signature(function, eval_str=True).parameters.values()][2:]
        shared = [
            Parameter(
                name, Parameter.KEYWORD_ONLY, default=defaults.get(name, known[name].default),
                annotation=Annotated[types[name], known[name].metadata["option"]],
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
