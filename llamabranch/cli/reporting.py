"""How a command ends: exceptions become one line on standard error and an exit code."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import typer

from llamabranch import (
    ConfigError,
    DecodeInterruptedError,
    GrammarError,
    LlamaBranchError,
    LlamaBranchWarning,
    startup,
)

from .console import Console, leave_standard_output, print_json_error
from .interrupts import raising_on_ctrl_c

__all__ = ["EXIT_FAILURE", "EXIT_INTERRUPTED", "EXIT_USAGE", "reporting_errors"]

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = startup.EXIT_INTERRUPTED


@contextmanager
def reporting_errors(console: Console, *, debug: bool, as_json: bool = False) -> Iterator[None]:
    """Turn exceptions into one line on standard error and an exit code.

    A wrong name, file or setting exits with 2, any other failure with 1, Ctrl-C with 130.
    ``debug`` prints the traceback too, ``as_json`` the error as a JSON object to standard output.
    Warnings of the library become one line each.
    """

    def fail(error: BaseException, message: str, hint: str | None, code: int) -> typer.Exit:
        _trace(debug)
        is_noted = debug and f"hint: {hint}" in getattr(error, "__notes__", ())  # in the traceback
        console.error(message, None if is_noted else hint)
        if as_json:
            print_json_error(error, message, hint)
        return typer.Exit(code)

    try:
        with raising_on_ctrl_c(), warnings.catch_warnings():
            _show_warnings(console)
            yield
    except (KeyboardInterrupt, DecodeInterruptedError) as error:
        _trace(debug)
        console.note("interrupted")
        if as_json:
            print_json_error(error, "interrupted", None)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except LlamaBranchError as error:
        is_usage = isinstance(error, (ConfigError, GrammarError))
        code = EXIT_USAGE if is_usage else EXIT_FAILURE
        raise fail(error, error.message, error.hint, code) from None
    except BrokenPipeError:
        # The reader closed the pipe, as `| head` does: no output can reach it.
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


def _show_warnings(console: Console) -> None:
    """Print this library's warnings as lines of ``console``, until the filters are restored."""
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
            console.note(f"warning: {message}")
        else:
            inner(message, category, filename, lineno, file, line)

    warnings.showwarning = show


def _trace(debug: bool) -> None:
    if debug:
        traceback.print_exc()
