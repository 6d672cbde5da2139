"""The shared library itself: loading it, its log, its version."""

from __future__ import annotations

import atexit
import ctypes
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp import llama_cpp as C

from ..arguments import choice
from . import core
from .handle import forkable_lock

# ggml_log_level of ggml.h: none, debug, info, warn, error, continue. (llama-cpp-python's own table is
# from an older ggml.h, where the number of errors meant debug.)
_SEVERITY = {0: 4, 1: 0, 2: 1, 3: 2, 4: 3, 5: -1}
_WARNING, _ERROR = 2, 3
_THRESHOLDS = {"debug": 0, "info": 1, "warn": 2, "warning": 2, "error": 3, "none": 5}

# While nothing is recorded or shown, the callback is C's own abs, which gets the level. A Python
# callback would lose a KeyboardInterrupt, and llama.cpp logs whenever a decode was interrupted.
libc = ctypes.CDLL("ucrtbase" if sys.platform == "win32" else None)
_ignore = ctypes.cast(libc.abs, C.llama_log_callback)
_threshold = _THRESHOLDS["none"]
_n_recording = 0
_last_severity = 0
_recent: deque[tuple[int, str]] = deque(maxlen=16)
_recent_lock = forkable_lock()


@C.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes | None, _user_data: Any) -> None:
    global _last_severity
    severity = _SEVERITY.get(level, 1)
    if severity < 0:  # continues the previous line
        severity = _last_severity
    _last_severity = severity
    if severity < _WARNING and severity < _threshold:
        return
    line = (text or b"").decode("utf-8", "replace")
    if severity >= _WARNING and line.strip():
        with _recent_lock:
            _recent.append((severity, line.strip()))
    if severity >= _threshold:
        sys.stderr.write(line)


def set_log_level(level: str) -> None:
    """Show llama.cpp's log of ``level`` and above on standard error: debug, info, warn, error or none.

    The environment variable LLAMABRANCH_LOG sets it at import; the default is "none".

    Raises:
        ConfigError: unknown level.
    """
    global _threshold
    level = level.lower() if isinstance(level, str) else level
    choice("log level", level, _THRESHOLDS)
    _threshold = _THRESHOLDS[level]
    _choose_callback()


def logged_reason() -> str:
    """Return why a call just failed: llama.cpp's last three errors, or else its last warnings."""
    with _recent_lock:
        recent = list(_recent)
    errors = [line for severity, line in recent if severity >= _ERROR]
    return "; ".join((errors or [line for _, line in recent])[-3:]) or "no reason given"


@contextmanager
def recorded_log() -> Iterator[None]:
    """Record llama.cpp's warnings and errors of this block for `logged_reason`, and drop earlier ones."""
    global _n_recording
    with _recent_lock:
        _recent.clear()
        _n_recording += 1
        _choose_callback()
    try:
        yield
    finally:
        with _recent_lock:
            _n_recording -= 1
            _choose_callback()


def _choose_callback() -> None:
    is_heard = _n_recording or _threshold < _THRESHOLDS["none"]
    C.llama_log_set(_on_log if is_heard else _ignore, ctypes.c_void_p(0))


def engine_versions() -> dict[str, str]:
    """Return the versions of llama-cpp-python and of its llama.cpp."""
    version = C.llama_version() if hasattr(C, "llama_version") else b""
    return {
        "llama_cpp_python": str(llama_cpp.__version__),
        "llama_cpp": (version or b"").decode("utf-8", "replace"),
    }


def system_info() -> str:
    """Return llama.cpp's description of the instruction sets that this build uses.

    The end says whether the compiled core or NumPy measures logits and draws, and why.
    """
    engine = (C.llama_print_system_info() or b"").decode("utf-8", "replace")
    return f"{engine.rstrip(' |')} | llamabranch core: {core.description}"


def uses_amx() -> bool:
    """Return True if this build can repack weights for Intel's AMX."""
    return "AMX_INT8 = 1" in system_info()


@cache
def amx_works() -> bool:
    """Return True if this build's AMX kernels do not crash, by decoding two tokens in another process."""
    probe = "import sys, llama_cpp; llama_cpp.Llama(sys.argv[1], n_ctx=64).eval([1, 2])"  # repacks
    model = Path(__file__).parents[1] / "data" / "tale-draft-q8_0.gguf"
    if getattr(sys, "frozen", False) or not sys.executable:  # no Python to run it
        return False
    return not subprocess.run([sys.executable, "-c", probe, model], capture_output=True).returncode


def max_sequences() -> int:
    """Return the largest number of sequences that one context can hold."""
    return int(C.llama_max_parallel_sequences())


_CPUS = "/sys/devices/system/cpu"


def available_cores() -> int:
    """Return how many physical cores this process may use; more threads would wait for each other."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:  # all processors of a core have the same list
            cores.add(Path(f"{_CPUS}/cpu{cpu}/topology/thread_siblings_list").read_text("ascii"))
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def address_of(pointer: Any) -> int:
    """Return the address of a function, or of the target of a pointer."""
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def supports_gpu_offload() -> bool:
    """Return True if this build can put layers on a GPU and finds one."""
    return bool(C.llama_supports_gpu_offload())


set_log_level(os.environ.get("LLAMABRANCH_LOG") or "none")
C.llama_backend_init()
# llama.cpp may still log while Python exits. So the last thing to do, after the handles are freed, is
# to install a callback that calls no Python (atexit runs in reverse order of registration).
atexit.register(C.llama_log_set, _ignore, ctypes.c_void_p(0))
