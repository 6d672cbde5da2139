"""llama.cpp's flash attention alone, timed on one thread of the CPU, without a model."""

from __future__ import annotations

import ctypes
import math
from time import perf_counter
from typing import Any

from llama_cpp import llama_cpp as C

from .context import KV_TYPES

_F32, _F16 = 0, 1  # ggml_type
_MASK_ROWS = 64  # rows of the mask that are there at least
_BYTES = 1 << 20  # for what describes the tensors and the graph
_P, _I32, _I64, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class _InitParams(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("buffer", _P), ("no_alloc", ctypes.c_bool))


_FUNCTIONS: dict[str, tuple[Any, ...]] = {  # the result, and the arguments
    "init": (_P, _InitParams),
    "free": (None, _P),
    "new_tensor_4d": (_P, _P, _I32, _I64, _I64, _I64, _I64),
    "flash_attn_ext": (_P, _P, _P, _P, _P, _P, _FLOAT, _FLOAT, _FLOAT),
    "new_graph": (_P, _P),
    "build_forward_expand": (None, _P, _P),
    "backend_cpu_init": (_P,),
    "backend_cpu_set_n_threads": (None, _P, _I32),
    "backend_free": (None, _P),
    "backend_alloc_ctx_tensors": (_P, _P, _P),
    "backend_buffer_clear": (None, _P, ctypes.c_uint8),
    "backend_buffer_free": (None, _P),
    "backend_graph_compute": (_I32, _P, _P),
}


def attention_seconds(
    kv_type: str, head_size: int, n_heads: int, n_rows: int, n_cells: int, n_times: int
) -> float:
    """Return the least seconds that ``n_rows`` tokens took that each attend to ``n_cells`` others.

    It is computed ``n_times``, for ``n_heads`` heads that share one K/V head. inf if this build of
    llama.cpp does not show its functions, or memory is short.
    """
    try:
        ggml = {
            name: ctypes.CFUNCTYPE(*types)((f"ggml_{name}", C._lib))
            for name, types in _FUNCTIONS.items()
        }
    except AttributeError:
        return math.inf
    backend, tensors = ggml["backend_cpu_init"](), ggml["init"](_InitParams(_BYTES, None, True))
    ggml["backend_cpu_set_n_threads"](backend, 1)
    q, k, v, mask = (
        ggml["new_tensor_4d"](tensors, ggml_type, *shape, 1)
        for ggml_type, *shape in (
            (_F32, head_size, n_rows, n_heads),
            (KV_TYPES[kv_type], head_size, n_cells, 1),
            (KV_TYPES[kv_type], head_size, n_cells, 1),
            (_F16, n_cells, max(n_rows, _MASK_ROWS), 1),
        )
    )
    graph, scale = ggml["new_graph"](tensors), 1 / math.sqrt(head_size)
    attention = ggml["flash_attn_ext"](tensors, q, k, v, mask, scale, 0.0, 0.0)
    ggml["build_forward_expand"](graph, attention)
    least = math.inf
    if buffer := ggml["backend_alloc_ctx_tensors"](tensors, backend):
        ggml["backend_buffer_clear"](buffer, 0)
        for _ in range(n_times):
            start = perf_counter()
            ggml["backend_graph_compute"](backend, graph)
            least = min(least, perf_counter() - start)
        ggml["backend_buffer_free"](buffer)
    ggml["free"](tensors)
    ggml["backend_free"](backend)
    return least
