"""From options to what they mean: lengths, grammars, models, contexts."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import typer

from llamabranch import (
    ConfigError,
    Context,
    Grammar,
    Request,
    SamplingParams,
    hub,
    read_requests,
)

from ..load import LoadOptions, load
from .drafting import parse_draft
from .render import Screen

N_SEQ = 8  # what a context has without being asked; trees need more


def parse_length(text: str) -> int | Literal["auto"]:
    """Return the number of tokens to draft a round, or "auto"."""
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is neither a number nor auto", param_hint="--draft-length"
        ) from None


def parse_grammar(grammar: Path | None, json_schema: str | None) -> Grammar | None:
    """Return the grammar that a file or a JSON schema describes, if any is given."""
    if grammar is not None and json_schema is not None:
        raise typer.BadParameter("--grammar and --json-schema exclude each other")
    if grammar is not None:
        return Grammar(_read(grammar))
    if json_schema is not None:
        inline = json_schema.lstrip().startswith("{")
        return Grammar.from_json_schema(json_schema if inline else _read(Path(json_schema)))
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


@dataclass(frozen=True)
class PromptSource:
    """Where a job's prompts come from: those of the command line, and the lines of a file."""

    prompts: tuple[str, ...]
    lines: tuple[str, ...] = ()
    json_lines: bool = False

    def requests(self, sampling: SamplingParams) -> Iterator[Request]:
        """Yield a request for each prompt; ``sampling`` is what a line leaves open.

        Raises:
            ConfigError: a line that is no request; says which line.
        """
        yield from (Request(prompt, sampling=sampling) for prompt in self.prompts)
        yield from read_requests(self.lines, json_lines=self.json_lines, sampling=sampling)

    @property
    def digest(self) -> str:
        """SHA-256 (hex, 16 digits) of the prompts; empty lines do not count."""
        lines = [line.rstrip("\r") for line in self.lines if line.strip()]
        return digest([list(self.prompts), lines, self.json_lines])


def digest(value: object) -> str:
    """Return the first 16 hex digits of the SHA-256 of ``value`` as JSON."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def read_prompts(prompts: Sequence[str], input_file: str | None) -> PromptSource:
    """Return the prompts that were given, and those of a file, one a line or JSON objects (.jsonl)."""
    if input_file is None:
        return PromptSource(tuple(prompts))
    if input_file == "-":
        text = read_standard_input()
        json_lines = text.lstrip().startswith("{")
    else:
        text = _read(Path(input_file))
        json_lines = Path(input_file).suffix in (".jsonl", ".ndjson")
    return PromptSource(tuple(prompts), tuple(text.split("\n")), json_lines)


def read_standard_input() -> str:
    """Return all of standard input, as UTF-8.

    Raises:
        ConfigError: it is closed, or not UTF-8.
    """
    if sys.stdin is None:  # Python's way to say that it was closed when the process began
        raise ConfigError(
            "standard input is closed", hint="pipe the prompt in, or give it as an argument"
        )
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read standard input: {error}", hint="it must be text in UTF-8"
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def choose_models(target: str | None, draft: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the name of the target, and what drafts for it."""
    # All are looked for before any is loaded.
    target_name = hub.BUNDLED_TARGET if target is None else target
    hub.resolve(target_name)
    draft_name = hub.draft_for(target_name) if draft is None else draft
    if draft_name is None:
        raise ConfigError(
            f"no draft is known for {target_name}",
            hint="name one with --draft, copy from the text with --draft suffix, "
            "or decode plainly with --draft none",
        )
    return target_name, parse_draft(draft_name)


def loading_options(
    n_ctx: int | None, threads: int | None, gpu_layers: int | None, kv_type: str | None
) -> LoadOptions:
    """Return how to open contexts; what is None is left to the library."""
    loading = LoadOptions()
    if n_ctx is not None:
        loading["n_ctx"] = n_ctx
    if threads is not None:
        loading["n_threads"] = threads
        loading["n_threads_batch"] = threads
    if gpu_layers is not None:
        loading["n_gpu_layers"] = gpu_layers
    if kv_type is not None:
        loading["kv_type"] = kv_type
    return loading


def open_context(
    screen: Screen,
    stack: ExitStack,
    loading: LoadOptions,
    verbose: bool,
    n_seq_least: int,
    name: str,
) -> Context:
    """Open a model's context with at least so many sequences; ``stack`` closes it."""
    settings = loading.copy()
    if n_seq_least > N_SEQ:
        settings["n_seq_max"] = n_seq_least
    with screen.loading(name) as progress:
        return stack.enter_context(load(name, progress=progress, verbose=verbose, **settings))


def wrap_in_template(context: Context, prompt: str) -> list[int]:
    """Return the tokens of ``prompt`` as a user's turn in the model's chat template."""
    text = context.model.apply_chat_template([("user", prompt)])
    # The template writes the special tokens itself, the first one included.
    return context.model.tokenize(text, add_special=False, parse_special=True)
