"""What commands read: texts, functions, requests."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import llamabranch as lb
from llamabranch import ConfigError


def read_text(path: Path, newline: str | None = None) -> str:
    """Return the text of a file, without a byte order mark; ConfigError if it cannot be read as UTF-8.

    All line ends become ``\\n``; with ``newline=""`` the text is unchanged. Split lines at ``\\n``:
    `str.splitlines` would also end them at form feeds, U+2028 and five other characters.
    """
    try:
        with path.open(encoding="utf-8-sig", newline=newline) as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {str(path)[-80:]}: {_why(error)}") from None


def _why(error: OSError | ValueError) -> str:
    why = getattr(error, "strerror", None) or str(error)
    return "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else why


def load_functions(path: Path) -> list[Callable[..., object]]:
    """Return the functions that a Python file defines, except those whose names begin with "_".

    Raises:
        ConfigError: the file cannot be run, or defines no functions.
    """
    source = read_text(path)
    names: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    try:
        # What the file prints is not part of the answer.
        with contextlib.redirect_stdout(sys.stderr):
            exec(compile(source, str(path), "exec"), names)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    functions = [
        value
        for name, value in names.items()
        if isinstance(value, FunctionType) and value.__module__ == path.stem and name[0] != "_"
    ]
    if not functions:
        hint = "def weather(city: str) -> str: ..., with a docstring"
        raise ConfigError(f"{path} defines no function", hint=hint)
    return list(dict.fromkeys(functions))


def read_standard_input() -> str:
    """Return all of standard input without its last newline; ConfigError if it is not UTF-8."""
    if sys.stdin is None:  # None means that it was closed when the process started
        hint = "pipe the prompt in, or pass it as an argument"
        raise ConfigError("standard input is closed", hint=hint)
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read standard input: {_why(error)}") from None


def piped_or_read(words: Sequence[str]) -> list[str]:
    """Return the prompts, with standard input for "-"; without prompts, return the piped text."""
    if words:
        return [read_standard_input() if word == "-" else word for word in words]
    is_piped = sys.stdin is not None and not sys.stdin.isatty()
    return [text for text in [read_standard_input()] if text] if is_piped else []


def read_requests(path: Path, sampling: lb.SamplingParams, *, first: int = 0) -> list[lb.Request]:
    """Return a request for each line of a file, a JSON object; `Request.from_json` lists its keys.

    ``sampling`` has the settings that a line leaves out. A request without an id gets its number as
    id, counted from ``first``. Empty lines are skipped.

    Raises:
        ConfigError: the file cannot be read, or a line is invalid; the message has its number.
    """
    requests = list[lb.Request]()
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            if not isinstance(data, dict):
                raise ConfigError(f"a request must be an object, not {data!r:.60}")
            requests.append(lb.Request.from_json(data, str(first + len(requests)), sampling))
        except (lb.LlamaBranchError, ValueError, TypeError, RecursionError) as error:
            message = f"line {number}: invalid request: {str(error)[:300]}"
            raise ConfigError(message, hint=getattr(error, "hint", None)) from None
    return requests
