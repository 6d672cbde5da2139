"""Standard output and standard error: text, tables, colours, progress, one JSON object.

The answer goes to standard output, everything else to standard error. Colours are used on a
terminal only, and not when ``NO_COLOR`` is set.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.color import ColorSystem
from rich.console import Console as RichConsole
from rich.console import JustifyMethod, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

import llamabranch as lb
from llamabranch.arguments import figure
from llamabranch.pictures import SOURCES, visible

SOURCE_STYLES = {
    "drafted": "green", "forced": "magenta", "bonus": "bold cyan", "corrected": "yellow", "plain": "",
}  # fmt: skip
LONG_PROMPT = 64  # tokens; longer prompts report their progress


class OutputError(lb.LlamaBranchError):
    """Output cannot be written: the disk is full, or standard output is closed."""


class Console:
    """Standard output and standard error, with or without colour.

    Args:
        silent: print nothing but one JSON object to standard output.
        verbose: say more, and show llama.cpp's log.

    Attributes:
        resources: closed when the command ends.
        on_opening: called with the progress of opening a model, as text.
    """

    def __init__(self, *, silent: bool = False, verbose: bool = False) -> None:
        self.verbose, self.silent = verbose, silent
        system = None if os.environ.get("NO_COLOR") else "auto"
        self.out = RichConsole(highlight=False, color_system=system)  # type: ignore[arg-type]
        self.err = RichConsole(stderr=True, highlight=False, color_system=system)  # type: ignore[arg-type]
        if not self.out.is_terminal:
            self.out.width = 10_000  # a pipe has no width, and names must stay whole
        self.colored = self.out.color_system not in (None, "windows")
        self._progress = ""  # the text of the progress line, on a terminal
        self.resources = ExitStack()
        self.on_opening: Callable[[str], None] | None = None

    # -- standard output ---------------------------------------------------------------------------

    def write(self, text: str, style: str = "") -> None:
        """Write text as it is, at once, and styled if there are colours.

        Raises:
            OutputError: standard output is closed, or its disk is full.
        """
        if self.silent:
            return
        if self.colored and style:  # line by line, so that no colour runs over the end of a line
            drawn, system = Style.parse(style), ColorSystem.STANDARD
            text = "\n".join(drawn.render(line, color_system=system) for line in text.split("\n"))
        self._write(text)

    def answer(self, value: Mapping[str, object]) -> None:
        """Print one JSON object in ASCII if the user asked for one; nan and infinity become null.

        Raises:
            OutputError: standard output is closed, or its disk is full.
        """
        if self.silent:
            plain = json.loads(json.dumps(value), parse_constant=lambda _: None)
            self._write(json.dumps(plain) + "\n")

    def _write(self, text: str) -> None:
        if sys.stdout is None:  # None means that it was closed when the process started
            raise OutputError("standard output is closed", hint="send it to a file or a pipe")
        with _failures_of_standard_output():
            self.out.file.write(text)
            self.out.file.flush()

    def emit(self, token: lb.Produced) -> None:
        """Write one generated token in the colour of its source."""
        self.write(token.text, SOURCE_STYLES[token.source])

    def legend(self) -> None:
        """Print the meaning of the colours, if there are colours."""
        if self.colored:
            line = Text()
            for source, label in SOURCES.items():
                line.append("■ ", style=SOURCE_STYLES[source]).append(label + "   ")
            self.render(line)

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[object]], *, left: Sequence[str] = ()
    ) -> None:
        """Print rows under headings. The first column and the columns in ``left`` are left-aligned."""
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
        for i, name in enumerate(columns):
            side: JustifyMethod = "left" if i == 0 or name in left else "right"
            table.add_column(Text(name), justify=side, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell(value)) for value in row))
        self.render(table)

    def render(self, what: RenderableType) -> None:
        """Print anything that rich can draw, without spaces at the ends of lines."""
        with _failures_of_standard_output(), self.out.capture() as capture:
            self.out.print(what)
        # Everything on standard output goes through ``write``.
        self.write("\n".join(line.rstrip() for line in capture.get().split("\n")))

    def line(self, text: str = "", style: str = "") -> None:
        """Print a line of text."""
        self.render(Text(text, style=style))

    # -- standard error ----------------------------------------------------------------------------

    def note(self, text: str, style: str = "dim") -> None:
        """Print a remark to standard error."""
        self._remark(Text(text, style=style))

    def error(self, message: str, hint: str | None = None) -> None:
        """Print an error as one line, and its hint, to standard error."""
        line = " ".join(message.split())
        self._remark(Text("error: ", style="bold red").append(line, style="not bold"))
        if hint:
            self._remark(Text("hint: ", style="bold").append(hint, style="not bold"))

    def _remark(self, text: Text) -> None:
        if self._progress:
            self.progress("")
        with contextlib.suppress(OSError):  # it cannot be reported anywhere else
            self.err.print(text, soft_wrap=not self.err.is_terminal)

    def progress(self, text: str) -> None:
        """Replace the progress line of the terminal; "" clears it.

        This needs no thread, so it does not disturb measurements.
        """
        if self.err.is_terminal:
            if text != self._progress or not text:
                self.err.file.write(f"\r\x1b[2K{text}")
                self.err.file.flush()
            self._progress = text

    def reading(self, read: lb.context.PromptProgress) -> None:
        """Show in the progress line how much of a long prompt has been read."""
        if read.n_total - read.n_cached >= LONG_PROMPT:
            shown = f"reading the prompt: {read.n_read:,} of {read.n_total:,} tokens"
            self.progress(shown if read.n_read < read.n_total else "")

    def loading(self, name: str) -> Callable[[float], None] | None:
        """Return a function that shows the loaded fraction of a model; None if nobody would see it."""

        def show(fraction: float) -> None:
            text = f"loading {base_name(name)}: {fraction:.0%}"
            self.progress(text)
            if self.on_opening is not None:
                self.on_opening(text)

        return show if self.err.is_terminal or self.on_opening is not None else None


def cell(value: object) -> str:
    """Return a value as tables show it: "yes", "no", a dash for None and nan, others as text."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return "-" if math.isnan(value) else figure(value, 6)
    return ("yes" if value else "no") if isinstance(value, bool) else visible(str(value))


@contextmanager
def _failures_of_standard_output() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        leave_standard_output()
        raise OutputError(
            f"cannot write to standard output: {error.strerror or error}",
            hint="free some space, or send the output elsewhere",
        ) from None


def leave_standard_output() -> None:
    """Discard standard output's buffer, because Python would fail to flush it at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# -- numbers as text, the same in all tables -----------------------------------------------------------


def base_name(name: str) -> str:
    """Return the name of the file if ``name`` is a path, else ``name``."""
    path = Path(name)
    is_path = path.is_absolute() or name.startswith((".", "~")) or path.is_file()
    return path.name if is_path else name


def shortened(text: str, longest: int = 60) -> str:
    """Return a text as one line of ``longest`` characters at most."""
    text = " ".join(text.split())
    return text if len(text) <= longest else text[: longest - 3] + "..."


def percent(n: int, total: int) -> str:
    """Return a share as people say it: "57 % (13 of 23)"."""
    return f"{n / total * 100:.0f} % ({n:,} of {total:,})"


def plural(n: int, noun: str) -> str:
    """Return a number with its noun: "1 token", "2,000 tokens"."""
    return f"{n:,} {noun}{'s' * (n != 1)}"


def number(value: float, digits: int) -> str:
    """Format a number; nan becomes a dash."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"
