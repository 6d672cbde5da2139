"""Runs Python programs in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from subprocess import CompletedProcess

# Crashes are reported in one line, and modules next to the tests can be imported.
TESTS = Path(__file__).parent
IMPORTED = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])


def run_python(
    *arguments: object, code: int | None = 0, stdin: str | None = None, **environment: str
) -> CompletedProcess[str]:
    """Run the interpreter with these arguments; fail unless it ends with ``code`` (None = with any)."""
    shared = {"GGML_NO_BACKTRACE": "1", "PYTHONPATH": IMPORTED.rstrip(os.pathsep)}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, **shared, **environment},
        timeout=600,
        check=False,
    )
    assert code in (None, done.returncode), f"ended with {done.returncode}: {done.stderr[-4000:]}"
    return done


def run_code(source: str, *arguments: object, code: int | None = 0, **environment: str) -> str:
    """Run a program from its text; return its output."""
    program = textwrap.dedent(source)
    return run_python("-c", program, *arguments, code=code, **environment).stdout
