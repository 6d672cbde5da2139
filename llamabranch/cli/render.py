"""What the commands print: styles, tables, JSON, progress, errors, and how a Ctrl-C is taken.

Standard output carries the answer, standard error everything about it. Colours are used on a
terminal only, and neither with ``--no-color`` nor when ``NO_COLOR`` is set.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Literal, TextIO

import typer
from rich.color import ColorSystem
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.style import Style
from rich.table import Table
from rich.text import Text

from llamabranch import (
    ConfigError,
    Context,
    DecodeInterruptedError,
    Emitted,
    LlamaBranchError,
    LlamaBranchWarning,
)

SOURCE_STYLES = {"drafted": "green", "bonus": "bold cyan", "corrected": "yellow", "plain": ""}
SOURCE_LABELS = {
    "drafted": "drafted and accepted",
    "bonus": "bonus",
    "corrected": "corrected by the target",
}

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


class Screen:
    """Standard output and standard error, with or without colour."""

    def __init__(self, *, color: bool = True) -> None:
        color = color and not os.environ.get("NO_COLOR")
        self.out = Console(highlight=False, color_system="auto" if color else None)
        self.err = Console(stderr=True, highlight=False, color_system="auto" if color else None)
        if not self.out.is_terminal:
            self.out.width = 10_000  # a pipe has no width, and names must stay whole
        self.colored = self.out.color_system not in (None, "windows")

    def write(self, text: str, style: str = "") -> None:
        """Write text as it is, at once, and styled if the screen has colours."""
        if self.colored and style:
            text = _styled(text, style)
        self.out.file.write(text)
        self.out.file.flush()

    def emit(self, token: Emitted) -> None:
        """Write one generated token in the colour of its source."""
        self.write(token.text, SOURCE_STYLES[token.source])

    def legend(self) -> None:
        """Say what the colours mean; nothing on a screen without colours."""
        if self.colored:
            line = Text()
            for source, label in SOURCE_LABELS.items():
                line.append("■ ", style=SOURCE_STYLES[source]).append(label + "   ")
            self.out.print(line)

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        left: Sequence[str] = (),
    ) -> None:
        """Print rows under headings; the first column and those of ``left`` are left-aligned."""
        table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 3), header_style="bold")
        for index, column in enumerate(columns):
            aligned_left = index == 0 or column in left
            justify: Literal["left", "right"] = "left" if aligned_left else "right"
            table.add_column(column, justify=justify, overflow="fold")
        for row in rows:
            table.add_row(*row)
        with self.out.capture() as capture:
            self.out.print(table)
        self.write("".join(line.rstrip() + "\n" for line in capture.get().splitlines()))

    def line(self, text: str = "", style: str = "") -> None:
        """Print a line of text."""
        self.out.print(Text(text, style=style))

    def note(self, text: str) -> None:
        """Print a remark to standard error."""
        self.err.print(Text(text, style="dim"), soft_wrap=not self.err.is_terminal)

    def error(self, message: str, hint: str | None = None) -> None:
        """Print an error as one line, and its hint, to standard error."""
        head = Text("error: ", style="bold red").append(" ".join(message.split()), style="not bold")
        self.err.print(head, soft_wrap=True)
        if hint:
            self.err.print(
                Text("hint: ", style="bold").append(hint, style="not bold"), soft_wrap=True
            )

    def progress(self, text: str) -> None:
        """Write what is being done over the last such line, "" to clear it; nothing to a pipe.

        No thread draws it: it may be used while something is timed.
        """
        if self.err.is_terminal:
            self.err.file.write(f"\r\x1b[2K{text}")
            self.err.file.flush()

    @contextmanager
    def loading(self, name: str) -> Iterator[Callable[[float], None] | None]:
        """Show a progress bar while a model loads; nothing when nobody watches."""
        if not self.err.is_terminal:
            yield None
            return
        columns = (TextColumn("loading {task.description}"), BarColumn(), TaskProgressColumn())
        with Progress(*columns, console=self.err, transient=True) as bar:
            task = bar.add_task(name, total=1.0)
            yield lambda fraction: bar.update(task, completed=fraction)


def _styled(text: str, style: str) -> str:
    # Line by line, so that no colour runs over the end of a line.
    drawn = Style.parse(style)
    return "\n".join(
        drawn.render(line, color_system=ColorSystem.STANDARD) for line in text.split("\n")
    )


def print_json(value: Mapping[str, object]) -> None:
    """Print one JSON object and nothing else."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def number(value: float, digits: int, unit: str = "") -> str:
    """Format a number, or a dash for one that does not exist (nan)."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}{unit}"


def decimal_size(n_bytes: float) -> str:
    """Format a number of bytes in decimal units."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.2f} {unit}"
    return f"{n_bytes:.0f} B"


@contextmanager
def reporting(screen: Screen, *, debug: bool) -> Iterator[None]:
    """Turn exceptions into one line on standard error and an exit code.

    A wrong name, file or setting exits with 2, any other failure with 1, Ctrl-C with 130.
    ``debug`` prints the traceback too. Warnings of the library become one line each.
    """
    try:
        with warnings.catch_warnings():
            _show_warnings(screen)
            yield
    except (KeyboardInterrupt, DecodeInterruptedError):
        _trace(debug)
        screen.note("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except LlamaBranchError as error:
        _trace(debug)
        screen.error(error.message, error.hint)
        raise typer.Exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE) from None
    except BrokenPipeError:
        # The reader went away, as `| head` does: there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_FAILURE) from None
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        _trace(debug)
        screen.error(
            f"unexpected {type(error).__name__}: {error}",
            None if debug else "this is a bug in llamabranch; --debug shows where",
        )
        raise typer.Exit(EXIT_FAILURE) from None


def _show_warnings(screen: Screen) -> None:
    """Print this library's warnings as lines of ``screen``, until the filters are restored."""
    inner = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, LlamaBranchWarning):
            screen.note(f"warning: {message}")
        else:
            inner(message, category, filename, lineno, file, line)

    warnings.showwarning = show


def _trace(debug: bool) -> None:
    if debug:
        traceback.print_exc()


class Interruption:
    """Lets the first Ctrl-C end the decode under way, in a DecodeInterruptedError; the second raises.

    A KeyboardInterrupt might come in the middle of a line that is being written.
    """

    def __init__(self, contexts: Sequence[Context] = ()) -> None:
        self.asked = False
        self._contexts = contexts

    def __enter__(self) -> Interruption:
        self._listening = threading.current_thread() is threading.main_thread()
        if self._listening:
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._listening:
            signal.signal(signal.SIGINT, self._previous)

    def check(self) -> None:
        """Raise KeyboardInterrupt if it was asked for already."""
        if self.asked:
            raise KeyboardInterrupt

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.check()
        self.asked = True
        for context in self._contexts:
            context.interrupt()
