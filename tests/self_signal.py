"""The command line as a program that signals itself at a given decode or output line."""

from __future__ import annotations

import sys
from pathlib import Path

PROGRAM = """
import os, signal, sys
from pathlib import Path
from llama_cpp import llama_cpp as C
import llamabranch.native.context  # first: the compiled core steps aside for another llama_decode
from llamabranch.cli import main

count, path, *arguments = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background would ignore it
real, n_decodes, is_sent = C.llama_decode, 0, False

def is_time():
    if not path:
        return n_decodes >= int(count)
    return os.path.exists(path) and Path(path).read_bytes().count(b"\\n") >= int(count)

def decode(ctx, batch):
    global n_decodes, is_sent
    n_decodes += 1
    if not is_sent and is_time():
        is_sent = True
        os.kill(os.getpid(), signal.SIGINT)
    return real(ctx, batch)

C.llama_decode = decode
sys.argv = ["llamabranch", *arguments]
main()
"""


def signalled(number: int, path: Path | str = "") -> list[str]:
    """Return a command, without its arguments, that gets SIGINT in its decode of this number.

    With ``path``: at the first decode after this file has so many lines.
    """
    return [sys.executable, "-c", PROGRAM, str(number), str(path)]
