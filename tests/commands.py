"""Runs commands of the command line in this process, on one thread."""

from __future__ import annotations

import json
import sys
from typing import Any

from typer.testing import CliRunner, Result

from llamabranch.cli import app

__all__ = ["COMMAND", "answer", "run", "said_by"]

COMMAND = [sys.executable, "-m", "llamabranch.cli"]
_THREADS = {"generate", "speculate", "chat", "search", "score", "eval", "bench", "demo", "doctor"}


def run(*arguments: object, stdin: str | None = None, **environment: str) -> Result:
    """Run a command; ``environment`` is added to that of the process."""
    given = list(map(str, arguments))
    if given[:1] and given[0] in _THREADS and "-t" not in given:
        given += ["-t", "1"]  # fastest for models this small
    return CliRunner().invoke(app, given, input=stdin, env=environment)


def answer(*arguments: object, stdin: str | None = None, **environment: str) -> dict[str, Any]:
    """Run a command that succeeds with ``--json``; return what it prints."""
    result = run(*arguments, "--json", stdin=stdin, **environment)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def said_by(*arguments: object, **environment: str) -> str:
    """Run a command; return what it said on standard error as one line."""
    return " ".join(run(*arguments, **environment).stderr.replace("│", " ").split())
