"""The threads that OpenMP keeps for each thread that has computed.

A thread that calls llama.cpp with n_threads > 1 gets a team of helpers, which wait for its next call.
libgomp counts the waiting helpers of all threads: once there are more than cores, none of them spins any
longer, and every barrier of a graph takes system calls. A decode of 0.6 ms then takes 7 (two cores, one
waiting helper of another thread). So a thread that transfers work to another one releases its team.
"""

from __future__ import annotations

from llama_cpp import llama_cpp as C

__all__ = ["release"]

_pause = getattr(C._lib, "omp_pause_resource_all", None)  # missing: llama.cpp without OpenMP
_SOFT = 1


def release() -> None:
    """Release the team of this thread; its next call makes another, which takes a while."""
    if _pause is not None:
        _pause(_SOFT)
