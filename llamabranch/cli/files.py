"""The files of commands: functions that read prompts, and a check that no file is overwritten."""

from __future__ import annotations

import contextlib
import errno
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import llamabranch as lb
from llamabranch import ConfigError

from ..files import check_writable
from .console import OutputError


def check_new_file(path: Path) -> None:
    """Raise ConfigError unless a file can be written at ``path`` without replacing another.

    Commands call this before a model loads. An empty file, a device or a pipe may exist there.
    """
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder", hint="name a file in it")
        if path.is_file() and path.stat().st_size:
            raise ConfigError(f"{path} already exists", hint="name another file, or delete it")
        if path.is_symlink() and not path.exists():
            message = f"{path} is a link to a file that does not exist"
            raise ConfigError(message, hint="name the file itself")
        if not path.exists():
            check_writable(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise OutputError if writing ``path`` fails. For a full disk the hint is to free space."""
    try:
        yield
    except OSError as error:
        hint = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
        raise OutputError(f"cannot write {path}: {error.strerror or error}", hint=hint) from None


def read_text(path: Path, errors: str = "strict", newline: str | None = None) -> str:
    """Return the text of a file, without a byte order mark; ConfigError if it cannot be read as UTF-8.

    All line ends become ``\\n``; with ``newline=""`` the text is unchanged.
    """
    try:
        with path.open(encoding="utf-8-sig", errors=errors, newline=newline) as file:
            return file.read()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read {path!s:.80}: {why}") from None


def text_lines(text: str) -> list[str]:
    """Return the lines of a text that was read in text mode, which turns \\r\\n and \\r into \\n.

    `str.splitlines` would also end lines at form feeds, U+2028 and five other characters, which
    texts contain.
    """
    return text.split("\n")


def load_functions(path: Path) -> list[Callable[..., object]]:
    """Return the functions that a Python file defines, except those whose names begin with "_".

    Raises:
        ConfigError: the file cannot be run, or defines no functions.
    """
    functions = [
        value
        for name, value in _run_file(path).items()
        if isinstance(value, FunctionType) and value.__module__ == path.stem and name[0] != "_"
    ]
    if not functions:
        raise ConfigError(
            f"{path} defines no function",
            hint="def weather(city: str) -> str: ..., with a docstring",
        )
    return list(dict.fromkeys(functions))


def _run_file(path: Path) -> dict[str, Any]:
    """Run a Python file and return its global variables.

    Raises:
        ConfigError: the file cannot be read or run.
    """
    names: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    try:
        # What the file prints is not part of the answer.
        with contextlib.redirect_stdout(sys.stderr):
            exec(compile(read_text(path), str(path), "exec"), names)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path} cannot be run: {error!r}") from error
    return names


def schema_text(given: str) -> str:
    """Return the text of a JSON schema, given as text or as the name of a file."""
    return given if given.lstrip().startswith("{") else read_text(Path(given))


def read_prompt_file(path: Path) -> str:
    """Return the text of a file to continue or to score, read as llama.cpp reads it.

    The last newline is left out; carriage returns stay in the text.
    """
    return read_text(path, newline="").removesuffix("\n")


def read_standard_input(errors: str = "strict", newline: str | None = None) -> str:
    """Return all of standard input; ConfigError if it is not UTF-8.

    All line ends become ``\\n``; with ``newline=""`` the text is unchanged.
    """
    if sys.stdin is None:  # None means that it was closed when the process started
        hint = "pipe the prompt in, or pass it as an argument"
        raise ConfigError("standard input is closed", hint=hint)
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig", errors)
    except (OSError, UnicodeDecodeError) as error:
        hint = "it must be text in UTF-8"
        raise ConfigError(f"cannot read standard input: {error}", hint=hint) from None
    return text if newline == "" else text.replace("\r\n", "\n").replace("\r", "\n")


def read_piped_text() -> str | None:
    """Return the text that is piped in, without its last newline; None if nothing is piped in."""
    if sys.stdin is None or sys.stdin.isatty():
        return None
    return read_standard_input(newline="").removesuffix("\n") or None


def piped_or_read(words: Sequence[str]) -> list[str]:
    """Return prompts, with standard input for -; without any, the text that is piped in, if any."""
    prompts = [read_standard_input() if word == "-" else word for word in words]
    for prompt in prompts:
        if not is_unicode(prompt):
            raise ConfigError(f"the prompt {prompt!r:.60} is not UTF-8")
    piped = None if prompts else read_piped_text()
    return prompts if piped is None else [piped]


def read_requests(path: Path, sampling: lb.SamplingParams, *, first: int = 0) -> list[lb.Request]:
    """Return a request for each line of a file, a JSON object; `Request.from_json` lists its keys.

    ``sampling`` has the settings that a line leaves out. A request without an id gets its number as
    id, counted from ``first``. Empty lines are skipped.

    Raises:
        ConfigError: the file cannot be read, or a line is invalid; the message has its number.
    """
    requests = list[lb.Request]()
    for number, line in enumerate(text_lines(read_text(path)), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            if not isinstance(data, dict):
                raise ConfigError(f"a request must be an object, not {data!r:.60}")
            requests.append(lb.Request.from_json(data, str(first + len(requests)), sampling))
        except (lb.LlamaBranchError, ValueError, TypeError, RecursionError) as error:
            reason = str(error)[:300]
            hint = getattr(error, "hint", None)
            raise ConfigError(f"line {number}: invalid request: {reason}", hint=hint) from None
    return requests


def is_unicode(text: str) -> bool:
    """Return whether a text can be written as UTF-8: it has no half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
