"""What the commands print: styles, tables, JSON, progress, errors, and how a Ctrl-C is taken.

Standard output carries the answer, standard error everything about it. Colours are used on a
terminal only, and neither with ``--no-color`` nor when ``NO_COLOR`` is set.
"""

from __future__ import annotations

import contextlib
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
from typing import IO, Literal, TextIO

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
    GrammarError,
    LlamaBranchError,
    LlamaBranchWarning,
    Produced,
    startup,
)

SOURCE_STYLES = {"drafted": "green", "bonus": "bold cyan", "corrected": "yellow", "plain": ""}
SOURCE_LABELS = {
    "drafted": "drafted and accepted",
    "bonus": "bonus",
    "corrected": "corrected by the target",
}

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = startup.EXIT_INTERRUPTED


class OutputError(LlamaBranchError):
    """What was to be written cannot be: the disk is full, or standard output is closed."""


class Screen:
    """Standard output and standard error, with or without colour."""

    def __init__(self, *, color: bool = True) -> None:
        color = color and not os.environ.get("NO_COLOR")
        self.out = Console(highlight=False, color_system="auto" if color else None)
        self.err = Console(stderr=True, highlight=False, color_system="auto" if color else None)
        if not self.out.is_terminal:
            self.out.width = 10_000  # a pipe has no width, and names must stay whole
        self.colored = self.out.color_system not in (None, "windows")
        self._said_escaped = False

    def write(self, text: str, style: str = "") -> None:
        """Write text as it is, at once, and styled if the screen has colours.

        Characters that the encoding of standard output lacks are written as escapes.

        Raises:
            OutputError: standard output is closed, or its disk is full.
        """
        if self.colored and style:
            text = _styled(text, style)
        encoding = getattr(self.out.file, "encoding", None) or "utf-8"
        if not _fits(text, encoding):
            text = text.encode(encoding, "backslashreplace").decode(encoding)
            if not self._said_escaped:
                self._said_escaped = True
                self.note(
                    f"standard output is {encoding}: characters it lacks are written as escapes; "
                    "PYTHONIOENCODING=utf-8 writes them as they are"
                )
        _write(self.out.file, text)

    def emit(self, token: Produced) -> None:
        """Write one generated token in the colour of its source."""
        self.write(token.text, SOURCE_STYLES[token.source])

    def legend(self) -> None:
        """Say what the colours mean; nothing on a screen without colours."""
        if self.colored:
            line = Text()
            for source, label in SOURCE_LABELS.items():
                line.append("■ ", style=SOURCE_STYLES[source]).append(label + "   ")
            self._print(line)

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
        with _failures_of_standard_output(), self.out.capture() as capture:
            self.out.print(table)
        self.write("".join(line.rstrip() + "\n" for line in capture.get().splitlines()))

    def line(self, text: str = "", style: str = "") -> None:
        """Print a line of text."""
        self._print(Text(text, style=style))

    def _print(self, text: Text) -> None:
        # Everything on standard output goes through ``write``.
        # Rich writes the empty rest when it ends.
        with _failures_of_standard_output(), self.out.capture() as capture:
            self.out.print(text)
        self.write(capture.get())

    def note(self, text: str) -> None:
        """Print a remark to standard error."""
        with contextlib.suppress(OSError):
            self.err.print(Text(text, style="dim"), soft_wrap=not self.err.is_terminal)

    def error(self, message: str, hint: str | None = None) -> None:
        """Print an error as one line, and its hint, to standard error."""
        head = Text("error: ", style="bold red").append(" ".join(message.split()), style="not bold")
        with contextlib.suppress(OSError):  # there is nowhere else to say it
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


def _fits(text: str, encoding: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def _write(file: IO[str], text: str) -> None:
    if sys.stdout is None:  # Python's way to say that it was closed when the process began
        raise OutputError("standard output is closed", hint="send it to a file or a pipe")
    with _failures_of_standard_output():
        file.write(text)
        file.flush()


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
            hint="free some space, or send it elsewhere",
        ) from None


def leave_standard_output() -> None:
    """Send what is still in its buffer nowhere: the interpreter would fail on it when it ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_answered = False  # whether the command under way has printed its JSON object


def print_json(value: Mapping[str, object]) -> None:
    """Print one JSON object and nothing else: null for numbers that do not exist.

    Raises:
        OutputError: standard output is closed, or its disk is full.
    """
    global _answered
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)
    # JSON can spell every character in ASCII, also half a surrogate pair.
    if not _fits(text, getattr(sys.stdout, "encoding", None) or "utf-8"):
        text = json.dumps(json.loads(text))
    _write(sys.stdout, text + "\n")
    _answered = True


def begin_answer() -> None:
    """Note that a command begins: it has printed no JSON object yet."""
    global _answered
    _answered = False


def print_json_error(error: BaseException, message: str, hint: str | None) -> None:
    """Print the JSON object of a command that failed, unless it has printed its answer."""
    if _answered or isinstance(error, OutputError):
        return
    described = {"type": type(error).__name__, "message": message, "hint": hint}
    with contextlib.suppress(OutputError, BrokenPipeError):
        print_json({"error": described})


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value


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
def reporting(screen: Screen, *, debug: bool, as_json: bool = False) -> Iterator[None]:
    """Turn exceptions into one line on standard error and an exit code.

    A wrong name, file or setting exits with 2, any other failure with 1, Ctrl-C with 130.
    ``debug`` prints the traceback too, ``as_json`` the error as a JSON object to standard output.
    Warnings of the library become one line each.
    """

    def fail(error: BaseException, message: str, hint: str | None, code: int) -> typer.Exit:
        _trace(debug)
        screen.error(message, hint)
        if as_json:
            print_json_error(error, message, hint)
        return typer.Exit(code)

    try:
        with _raising_on_ctrl_c(), warnings.catch_warnings():
            _show_warnings(screen)
            yield
    except (KeyboardInterrupt, DecodeInterruptedError) as error:
        _trace(debug)
        screen.note("interrupted")
        if as_json:
            print_json_error(error, "interrupted", None)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except LlamaBranchError as error:
        is_usage = isinstance(error, (ConfigError, GrammarError))
        code = EXIT_USAGE if is_usage else EXIT_FAILURE
        raise fail(error, error.message, error.hint, code) from None
    except BrokenPipeError:
        # The reader went away, as `| head` does: there is nobody left to tell.
        leave_standard_output()
        raise typer.Exit(EXIT_FAILURE) from None
    except OSError as error:
        what = "" if error.filename is None else f"{error.filename}: "
        message = f"{what}{error.strerror or error}"
        raise fail(error, message, None if debug else "--debug shows where", EXIT_FAILURE) from None
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        raise fail(
            error,
            f"unexpected {type(error).__name__}: {error}",
            None if debug else "this is a bug in llamabranch; --debug shows where",
            EXIT_FAILURE,
        ) from None


_interrupted = False  # whether the command under way has got a Ctrl-C that raises


@contextmanager
def _raising_on_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt at a Ctrl-C, at the latest at the end.

    Python prints and forgets what is raised in a finalizer, or in a callback that C calls.
    """
    global _interrupted
    _interrupted = False

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        global _interrupted
        _interrupted = True
        raise KeyboardInterrupt

    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(
        signal.SIGINT
    ) in (signal.default_int_handler, startup.quit_interrupted)
    if not ours:
        yield
        return

    def on_lost(lost: sys.UnraisableHookArgs) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            hook(lost)

    hook, sys.unraisablehook = sys.unraisablehook, on_lost
    previous = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
        if _interrupted:
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, previous)
        sys.unraisablehook = hook


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
        self.asked = _interrupted  # one that Python lost, as in a finalizer
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
