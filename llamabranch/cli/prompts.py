"""Where prompts come from: the command line, files, standard input."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import llamabranch as lb
from llamabranch import ConfigError

from .jsonl import is_unicode, read_requests, read_text

if TYPE_CHECKING:
    from llamabranch import Model, Request, SamplingParams

_INVALID = "surrogateescape"  # bytes that are not UTF-8 make one line invalid, not the file

__all__ = [
    "PromptSource",
    "digest",
    "read_prompt_file",
    "read_prompts",
    "read_standard_input",
    "trained_length",
]


def trained_length(model: Model) -> int | None:
    """Return the context length that a model was trained for; None if its file does not tell."""
    found = model.metadata.get(f"{model.architecture}.context_length", "")
    return int(found) if found.isdigit() and int(found) else None


def read_prompt_file(path: Path) -> str:
    """Return the text of a file that is one prompt, without its last newline, as llama.cpp reads ``-f``.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    text = read_text(path)
    return text[:-1] if text.endswith("\n") else text


@dataclass(frozen=True)
class PromptSource:
    """Where a job's prompts come from: those of the command line, and the lines of a file.

    The file is read anew by each ``requests``, line by line.
    """

    prompts: tuple[str, ...]
    file: _LineFile | None = None
    json_lines: bool = False

    def requests(
        self,
        sampling: SamplingParams,
        on_invalid: Callable[[ConfigError], None] | None = None,
    ) -> Iterator[Request]:
        """Yield a request for each prompt; ``sampling`` is used where a line has none.

        What has no id gets its place in the order. ``on_invalid`` is that of `read_requests`.

        Raises:
            ConfigError: an invalid request, with its line number; or the file cannot be read.
        """
        for i, prompt in enumerate(self.prompts):
            if not is_unicode(prompt):
                raise ConfigError(f"the prompt {prompt!r:.60} is not UTF-8")
            yield lb.Request(prompt, id=str(i), sampling=sampling)
        lines = iter(()) if self.file is None else self.file.lines()
        yield from read_requests(
            lines,
            json_lines=self.json_lines,
            sampling=sampling,
            first=len(self.prompts),
            on_invalid=on_invalid,
        )


class _LineFile:
    """A file of lines in UTF-8 that can be read several times.

    Args:
        path: the file; None for standard input, which is copied to a temporary file at once.

    Raises:
        ConfigError: standard input cannot be read.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._copy: IO[str] | None = None
        if path is None:
            self._copy = tempfile.TemporaryFile(  # noqa: SIM115  (deleted with this object)
                "w+", encoding="utf-8", errors=_INVALID, newline="\n"
            )
            weakref.finalize(self, self._copy.close)
            with _standard_input(_INVALID) as text:
                shutil.copyfileobj(text, self._copy)

    def lines(self) -> Iterator[str]:
        """Yield the lines, without a byte order mark; bytes that are not UTF-8 become surrogates.

        Raises:
            ConfigError: the file cannot be read.
        """
        if self._copy is not None:
            self._copy.seek(0)
            yield from iter(
                self._copy.readline, ""
            )  # of the file itself, the end of this would close it
            return
        if self._path is None:
            return
        try:
            with self._path.open(encoding="utf-8-sig", errors=_INVALID, newline="\n") as file:
                yield from file
        except OSError as error:
            raise ConfigError(f"cannot read {self._path}: {error}") from None

    def begins_with_object(self) -> bool:
        """Return whether the first character that is not blank is a brace."""
        first = next((line for line in self.lines() if line.strip()), "")
        return first.lstrip().startswith("{")


def digest(value: object) -> str:
    """Return the first 16 hex digits of the SHA-256 of ``value`` as JSON."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def read_prompts(prompts: Sequence[str], input_file: str | None) -> PromptSource:
    """Return the prompts that were given, and those of a file, one a line or JSON objects (.jsonl)."""
    if input_file is None:
        return PromptSource(tuple(prompts))
    if input_file == "-":
        file = _LineFile(None)
        return PromptSource(tuple(prompts), file, file.begins_with_object())
    json_lines = Path(input_file).suffix in (".jsonl", ".ndjson")
    return PromptSource(tuple(prompts), _LineFile(Path(input_file)), json_lines)


def read_standard_input() -> str:
    """Return all of standard input, as UTF-8.

    Raises:
        ConfigError: it is closed, or not UTF-8.
    """
    with _standard_input() as text:
        return text.read()


@contextmanager
def _standard_input(errors: str = "strict") -> Iterator[IO[str]]:
    """Open standard input as UTF-8, each line ended by a newline.

    Raises:
        ConfigError: it is closed, or not UTF-8.
    """
    if sys.stdin is None:  # None means that it was closed when the process started
        raise ConfigError(
            "standard input is closed", hint="pipe the prompt in, or give it as an argument"
        )
    text = io.TextIOWrapper(sys.stdin.buffer, "utf-8-sig", errors, newline=None)
    try:
        yield text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read standard input: {error}", hint="it must be text in UTF-8"
        ) from None
    finally:
        text.detach()  # standard input stays open
