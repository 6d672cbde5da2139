"""Ctrl-C before and after a command.

A Ctrl-C while the command line starts or ends gives exit code 130 at once, without a traceback. Imports
take half a second. Nothing is open then, so nothing has to be freed. A KeyboardInterrupt could be raised
in the middle of another package's import, or get lost in a callback.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from pathlib import PurePath
from types import FrameType

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as in shells


def quit_on_ctrl_c() -> None:
    """End the process at a Ctrl-C, instead of raising KeyboardInterrupt."""
    with contextlib.suppress(ValueError):  # not the main thread
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, quit_interrupted)
            # Python restores the system's handler before it frees its modules, and a Ctrl-C would then
            # end the process by the signal. The function that is registered first runs last, when
            # all work is done.
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def quit_interrupted(_number: int = 0, _frame: FrameType | None = None) -> None:
    """End the process with code 130; all output has been flushed."""
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)


def is_command() -> bool:
    """Return whether this process is the ``llamabranch`` command, not a program that imports us."""
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":  # still so while the package of the module is imported
        module = sys.orig_argv[len(sys.orig_argv) - len(sys.argv)]
        return module.removeprefix("-m") == "llamabranch.cli"
    return PurePath(program).name in ("llamabranch", "llamabranch.exe")


if is_command():
    quit_on_ctrl_c()
