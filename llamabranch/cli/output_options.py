"""What every command takes: how its output is printed; and the headings of --help.

It imports neither NumPy nor llama.cpp: commands that only look something up begin at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer

from .console import Console
from .reporting import reporting_errors

__all__ = [
    "DRAFTING",
    "MODELS",
    "OUTPUT",
    "REQUESTS",
    "RUNTIME",
    "SAMPLING",
    "OutputOptions",
]

# The headings of --help.
MODELS = "Models"
REQUESTS = "Requests"
DRAFTING = "Drafting"
SAMPLING = "Sampling"
RUNTIME = "Runtime"
OUTPUT = "Output"


@dataclass(frozen=True)
class OutputOptions:
    """How a command prints its output."""

    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one JSON object and nothing else.", rich_help_panel=OUTPUT
        ),
    ] = False
    no_color: Annotated[
        bool, typer.Option("--no-color", help="No colours.", rich_help_panel=OUTPUT)
    ] = False
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks.", rich_help_panel=OUTPUT)
    ] = False

    @contextmanager
    def console(self) -> Iterator[Console]:
        """Yield the console of a command; errors end the command with one line and an exit code."""
        console = Console(color=not self.no_color)
        with reporting_errors(console, debug=self.debug, as_json=self.as_json):
            yield console
