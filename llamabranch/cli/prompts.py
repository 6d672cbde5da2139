"""Where prompts come from: the command line, files, standard input."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import llamabranch as lb
from llamabranch import ConfigError

from .files import is_unicode, read_text
from .jsonl import read_requests

if TYPE_CHECKING:
    from llamabranch import Request, SamplingParams

__all__ = ["digest", "job_requests", "read_prompt_file", "read_standard_input"]

_INVALID = "surrogateescape"  # bytes that are not UTF-8 make one line invalid, not the file


def digest(value: object) -> str:
    """Return the first 16 hex digits of the SHA-256 of ``value`` as JSON."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def read_prompt_file(path: Path) -> str:
    """Return the text of a file that is one prompt, without its last newline, as llama.cpp reads ``-f``.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    text = read_text(path)
    return text[:-1] if text.endswith("\n") else text


def read_standard_input(errors: str = "strict") -> str:
    """Return all of standard input as UTF-8, each line ended by a newline.

    Raises:
        ConfigError: it is closed, or not UTF-8.
    """
    if sys.stdin is None:  # None means that it was closed when the process started
        raise ConfigError(
            "standard input is closed", hint="pipe the prompt in, or give it as an argument"
        )
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig", errors)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read standard input: {error}", hint="it must be text in UTF-8"
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def job_requests(
    prompts: Sequence[str],
    input_file: str | None,
    sampling: SamplingParams,
    on_invalid: Callable[[ConfigError], None],
) -> Iterator[Request]:
    """Yield a request for each prompt and each line of a file, which may hold JSON objects (.jsonl).

    Args:
        prompts: those of the command line.
        input_file: the file, "-" for standard input, or None.
        sampling: the settings where a line has none.
        on_invalid: as for `read_requests`.

    Raises:
        ConfigError: a prompt that is not UTF-8, or a file that cannot be read.
    """
    for i, prompt in enumerate(prompts):
        if not is_unicode(prompt):
            raise ConfigError(f"the prompt {prompt!r:.60} is not UTF-8")
        yield lb.Request(prompt, id=str(i), sampling=sampling)
    if input_file is None:
        return
    if input_file == "-":
        text = read_standard_input(_INVALID)
        json_lines = text.lstrip().startswith("{")
    else:
        json_lines = Path(input_file).suffix in (".jsonl", ".ndjson")
        try:
            text = Path(input_file).read_bytes().decode("utf-8-sig", _INVALID)
        except OSError as error:
            raise ConfigError(f"cannot read {input_file}: {error}") from None
    yield from read_requests(
        text.split("\n"),
        json_lines=json_lines,
        sampling=sampling,
        first=len(prompts),
        on_invalid=on_invalid,
    )
