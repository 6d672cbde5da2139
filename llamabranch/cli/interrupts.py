"""Ctrl-C while a command runs: it raises KeyboardInterrupt, or ends the running decode."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from llamabranch import startup

if TYPE_CHECKING:
    from llamabranch import Context

__all__ = ["InterruptHandler", "raising_on_ctrl_c"]

_interrupted = False  # whether the running command got a Ctrl-C that raises


@contextmanager
def raising_on_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt at a Ctrl-C, at the latest at the end of the block.

    Python only prints exceptions raised in a finalizer or in a callback from C; the end of the block
    raises again.
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

    def on_unraisable(caught: sys.UnraisableHookArgs) -> None:
        if not issubclass(caught.exc_type, KeyboardInterrupt):
            hook(caught)

    hook, sys.unraisablehook = sys.unraisablehook, on_unraisable
    previous = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
        if _interrupted:
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, previous)
        sys.unraisablehook = hook


class InterruptHandler:
    """Ends the running decode at the first Ctrl-C (DecodeInterruptedError); the second one raises.

    An immediate KeyboardInterrupt could leave a line of output half written.

    Attributes:
        requested: whether there was a Ctrl-C.
    """

    def __init__(self, contexts: Sequence[Context] = ()) -> None:
        self.requested = False
        self._contexts = contexts

    def __enter__(self) -> InterruptHandler:
        self.requested = _interrupted  # one that Python only printed, as in a finalizer
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
