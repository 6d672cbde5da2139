"""ggml's own pool of threads, for builds of llama.cpp without OpenMP.

Such a build starts and ends its threads anew for every decode unless a pool is attached to the context.
A build with OpenMP has a pool of OpenMP's, and ignores this one's threads and its poll level.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from llama_cpp import llama_cpp as C

__all__ = ["ThreadPool"]

_MAX_THREADS = 512  # GGML_MAX_N_THREADS
# A level is 128 Ki pauses, some ms: idle threads are awake when the next token comes, then sleep.
_POLL = 1


class _Params(ctypes.Structure):
    """ggml_threadpool_params."""

    _fields_ = (
        ("cpumask", ctypes.c_bool * _MAX_THREADS),
        ("n_threads", ctypes.c_int),
        ("prio", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    )


class ThreadPool:
    """A pool of ``n_threads`` for one context; free it after the context."""

    def __init__(self, ptr: int) -> None:
        self._ptr: int | None = ptr

    @classmethod
    def attach(cls, context: Any, n_threads: int) -> ThreadPool | None:
        """Give ``context`` a pool; None where this build has another, or none is needed."""
        if n_threads == 1 or b"OPENMP = 1" in (C.llama_print_system_info() or b""):
            return None
        try:
            init = _function("ggml_threadpool_params_init", None, ctypes.c_void_p, ctypes.c_int)
            new = _function("ggml_threadpool_new", ctypes.c_void_p, ctypes.c_void_p)
            _function("ggml_threadpool_free", None, ctypes.c_void_p)
            attach = _function("llama_attach_threadpool", None, *[ctypes.c_void_p] * 3)
        except AttributeError:  # a build that does not export them
            return None
        params = _Params()
        init(ctypes.byref(params), n_threads)
        if params.n_threads != n_threads:  # not the structure this was written for
            return None
        params.poll = _POLL
        ptr = new(ctypes.byref(params))
        if not ptr:
            return None
        attach(ctypes.cast(context, ctypes.c_void_p), ptr, None)
        return cls(ptr)

    def free(self) -> None:
        """End its threads."""
        if self._ptr is not None:
            ptr, self._ptr = self._ptr, None
            _function("ggml_threadpool_free", None, ctypes.c_void_p)(ptr)


def _function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """Return a function of libllama or a library it needs; raises AttributeError if there is none."""
    return ctypes.CFUNCTYPE(result, *arguments)((name, C._lib))
