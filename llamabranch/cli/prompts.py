"""Where prompts come from: the command line, files, standard input; and the chat template."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import llamabranch as lb
from llamabranch import ConfigError

from .jsonl import read_requests

if TYPE_CHECKING:
    from llamabranch import Context, Request, SamplingParams

__all__ = [
    "PromptSource",
    "apply_template",
    "digest",
    "read_prompts",
    "read_standard_input",
    "read_text",
]


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
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
        """Yield a request for each prompt; ``sampling`` is used where a line has none.

        Raises:
            ConfigError: an invalid request, with its line number.
        """
        yield from (lb.Request(prompt, sampling=sampling) for prompt in self.prompts)
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
        text = read_text(Path(input_file))
        json_lines = Path(input_file).suffix in (".jsonl", ".ndjson")
    return PromptSource(tuple(prompts), tuple(text.split("\n")), json_lines)


def read_standard_input() -> str:
    """Return all of standard input, as UTF-8.

    Raises:
        ConfigError: it is closed, or not UTF-8.
    """
    if sys.stdin is None:  # None means that it was closed when the process started
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


def apply_template(context: Context, prompt: str) -> list[int]:
    """Return the tokens of ``prompt`` as a user's turn in the model's chat template."""
    text = context.model.apply_chat_template([("user", prompt)])
    # The template writes the special tokens itself, the first one included.
    return context.model.tokenize(text, add_special=False, parse_special=True)
