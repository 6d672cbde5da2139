"""Runs commands of the command line: in this process, on one thread; or in a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from typing import Any

from typer.testing import CliRunner, Result

import llamabranch as lb
from llamabranch.cli import app

COMMAND = [sys.executable, "-m", "llamabranch.cli"]
# No text of the bundled target ends, whose EOG token is 0.
ENDLESS = ("-S", 'logit_bias={"0": -Infinity}')
_THREADS = {"generate", "speculate", "chat", "search", "score", "bench", "demo", "doctor"}


def run(*arguments: object, stdin: str | None = None, **environment: str) -> Result:
    """Run a command; ``environment`` is added to that of the process."""
    words = list(map(str, arguments))
    if words[:1] and words[0] in _THREADS and "-t" not in words:
        words += ["-t", "1"]  # fastest for models this small
    try:
        return CliRunner().invoke(app, words, input=stdin, env=environment)
    finally:
        if "-v" in words:  # -v shows llama.cpp's log for the rest of the process
            lb.set_log_level("none")


def answer(*arguments: object, stdin: str | None = None, **environment: str) -> dict[str, Any]:
    """Run a command that succeeds with ``--json``; return what it prints."""
    result = run(*arguments, "--json", stdin=stdin, **environment)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert isinstance(report, dict)
    return report


def said_by(*arguments: object, **environment: str) -> str:
    """Run a command; return its standard error as one line."""
    return " ".join(run(*arguments, **environment).stderr.replace("│", " ").split())


def texts(report: dict[str, Any]) -> dict[str, str]:
    """Return the texts in the answer of ``generate`` by their ids and samples."""
    return {f"{record['id']}.{record['sample']}": record["text"] for record in report["results"]}


def on_terminal(command: list[str], columns: int, **streams: int) -> tuple[str, bytes]:
    """Run a program in a terminal, except for ``streams``; return the terminal's text and the output."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    ends: Any = {**dict.fromkeys(("stdin", "stdout", "stderr"), follower), **streams}
    with subprocess.Popen(command, env=environment, **ends) as process:
        os.close(follower)
        shown = b""
        with contextlib.suppress(OSError):  # once the other side is closed
            while part := os.read(leader, 1 << 16):
                shown += part
        output = process.stdout.read() if process.stdout else b""
    os.close(leader)
    assert process.returncode == 0, shown
    return shown.decode().replace("\r\n", "\n"), output
