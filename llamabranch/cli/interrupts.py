"""How a command ends: Ctrl-C, errors as one line on standard error, exit codes."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import typer

import llamabranch as lb
from llamabranch import startup

from .console import Console, leave_standard_output

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = startup.EXIT_INTERRUPTED
_interrupted = False  # whether the running command got a Ctrl-C that raises


@contextmanager
def _raising_on_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt at a Ctrl-C, or at the latest at the end of the block.

    If a finalizer or a callback from C is running at a Ctrl-C, Python only prints the exception. So
    the end of the block raises it again.
    """
    global _interrupted
    _interrupted = False

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        global _interrupted
        _interrupted = True
        raise KeyboardInterrupt

    def on_unraisable(caught: sys.UnraisableHookArgs) -> None:
        if not issubclass(caught.exc_type, KeyboardInterrupt):
            hook(caught)

    previous, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or previous not in (signal.default_int_handler, startup.quit_interrupted):
        yield
        return
    sys.unraisablehook = on_unraisable
    signal.signal(signal.SIGINT, on_signal)
    try:
        yield
        if _interrupted:
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, previous)
        sys.unraisablehook = hook


class InterruptHandler:
    """Stops the running decode at the first Ctrl-C; a second one raises KeyboardInterrupt.

    The stopped decode raises DecodeInterruptedError. A KeyboardInterrupt at the first Ctrl-C could
    leave a line of output half written.

    Attributes:
        requested: whether there was a Ctrl-C.
    """

    def __init__(self, contexts: Sequence[lb.context.Context] = ()) -> None:
        self.requested = False
        self._contexts = contexts

    def __enter__(self) -> InterruptHandler:
        # A Ctrl-C may have come in a finalizer, where Python only prints it.
        self.requested = _interrupted
        self._listening = threading.current_thread() is threading.main_thread()
        if self._listening:
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._listening:
            signal.signal(signal.SIGINT, self._previous)

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was a Ctrl-C."""
        if self.requested:
            raise KeyboardInterrupt

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.check()
        self.requested = True
        for context in self._contexts:
            context.interrupt()


@contextmanager
def reporting_errors(console: Console) -> Iterator[None]:
    """Turn exceptions into one line on standard error and an exit code.

    A wrong name, file or setting exits with 2, any other failure with 1, Ctrl-C with 130. With -v
    the traceback is printed too. A warning becomes one line.
    """
    try:
        with _raising_on_ctrl_c(), warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: console.note(f"warning: {message}")
            yield
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except (KeyboardInterrupt, lb.DecodeInterruptedError):
        console.note("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        # The reader closed the pipe, as `| head` does: no output can reach it.
        leave_standard_output()
        raise typer.Exit(EXIT_FAILURE) from None
    except Exception as error:
        if console.verbose:
            traceback.print_exc()  # it may have the hint as a note
        if isinstance(error, lb.LlamaBranchError):
            console.error(error.message, None if console.verbose else error.hint)
        elif isinstance(error, OSError):
            console.error(str(error))
        else:
            hint = "this is a bug in llamabranch; -v shows where"
            console.error(f"unexpected {type(error).__name__}: {error}", hint)
        is_usage = isinstance(error, (lb.ConfigError, lb.errors.GrammarError))
        raise typer.Exit(EXIT_USAGE if is_usage else EXIT_FAILURE) from None
