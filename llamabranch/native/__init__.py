"""The only package that calls llama.cpp: handles with lifetimes, NumPy batches, return codes.

No other package imports ``llama_cpp``. Callers check every argument first, with the sizes and ranges
that this package reports, because llama.cpp calls ``abort()`` on most invalid arguments.
"""

from . import core, heads, staging
from .context import ContextHandle, NativeContextParams, release_threads
from .handle import forkable_lock, is_held
from .interrupts import call_in_thread
from .library import (
    amx_works,
    available_cores,
    engine_versions,
    logged_reason,
    max_sequences,
    set_log_level,
    supports_gpu_offload,
    system_info,
    uses_amx,
)
from .model import ModelHandle
from .sampler import CandidateBuffer, SamplerHandle, softmax_agrees
from .state_layout import StateLayout

__all__ = [
    "CandidateBuffer",
    "ContextHandle",
    "ModelHandle",
    "NativeContextParams",
    "SamplerHandle",
    "StateLayout",
    "amx_works",
    "available_cores",
    "call_in_thread",
    "core",
    "engine_versions",
    "forkable_lock",
    "heads",
    "is_held",
    "logged_reason",
    "max_sequences",
    "release_threads",
    "set_log_level",
    "softmax_agrees",
    "staging",
    "supports_gpu_offload",
    "system_info",
    "uses_amx",
]
