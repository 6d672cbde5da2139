"""The only door to llama.cpp: handles with lifetimes, NumPy batches, return codes as errors.

Nothing above this package imports ``llama_cpp``. Callers validate with what this package tells them
(sizes, ranges) before they call in, because llama.cpp answers most misuse with ``abort()``.
"""

from .context import ContextHandle, NativeContextParams
from .handle import forkable_lock
from .library import (
    engine_versions,
    last_log_lines,
    max_sequences,
    set_log_level,
    supports_gpu_offload,
    system_info,
    uses_amx,
)
from .model import ModelHandle
from .sampler import CandidateBuffer, GrammarHandle, SamplerHandle
from .state_layout import StateLayout

__all__ = [
    "CandidateBuffer",
    "ContextHandle",
    "GrammarHandle",
    "ModelHandle",
    "NativeContextParams",
    "SamplerHandle",
    "StateLayout",
    "engine_versions",
    "forkable_lock",
    "last_log_lines",
    "max_sequences",
    "set_log_level",
    "supports_gpu_offload",
    "system_info",
    "uses_amx",
]
