"""Time llama.cpp's attention alone, on one thread of the CPU, without a model."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from time import get_clock_info, perf_counter, thread_time
from typing import Any, NamedTuple

from llama_cpp import llama_cpp as C

from .context import KV_TYPES

__all__ = ["AttentionShape", "attention_seconds"]

_F32, _F16 = 0, 1  # ggml_type
_MASK_ROWS = 64  # the mask has at least this many rows
_BYTES = 1 << 20  # for the descriptions of tensors and graph
_TURNS = 8  # the most turns of a setting
_HOPELESS = 1.6  # a setting that takes this many times as long as the fastest gets only one turn
_EVICTED = 4 << 20  # bytes of K/V that one measurement reads: too many to stay in a core's cache
_P, _I32, _I64, _SIZE, _FLOAT = (
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_int64,
    ctypes.c_size_t,
    ctypes.c_float,
)
_BYTES_OF = {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 34 / 32}  # for each number


class _InitParams(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("buffer", _P), ("no_alloc", ctypes.c_bool))


_FUNCTIONS: dict[str, tuple[Any, ...]] = {  # the result, and the arguments
    "init": (_P, _InitParams),
    "free": (None, _P),
    "new_tensor_4d": (_P, _P, _I32, _I64, _I64, _I64, _I64),
    "row_size": (_SIZE, _I32, _I64),
    "view_2d": (_P, _P, _P, _I64, _I64, _SIZE, _SIZE),
    "permute": (_P, _P, _P, _I32, _I32, _I32, _I32),
    "cont": (_P, _P, _P),
    "mul_mat": (_P, _P, _P, _P),
    "mul_mat_set_prec": (None, _P, _I32),
    "soft_max_ext": (_P, _P, _P, _P, _FLOAT, _FLOAT),
    "flash_attn_ext": (_P, _P, _P, _P, _P, _P, _FLOAT, _FLOAT, _FLOAT),
    "flash_attn_ext_set_prec": (None, _P, _I32),
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
# Time that other programs take from the core does not count, if the system's clock is fine enough.
_clock = thread_time if get_clock_info("thread_time").resolution < 1e-5 else perf_counter
_PREC_F32 = 10  # ggml_prec: llama.cpp asks for it in attention


class AttentionShape(NamedTuple):
    """The attention of one layer.

    Args:
        head_size: numbers of a head.
        n_heads: heads that share one K/V head.
        n_kv_heads: K/V heads whose numbers lie side by side in the cache.
    """

    head_size: int
    n_heads: int
    n_kv_heads: int


@cache
def _ggml() -> dict[str, Any]:
    return {
        name: ctypes.CFUNCTYPE(*types)((f"ggml_{name}", C._lib))
        for name, types in _FUNCTIONS.items()
    }


def attention_seconds(
    settings: Sequence[tuple[str, bool]],
    shape: AttentionShape,
    n_rows: int,
    n_cells: int,
    most_s: float,
) -> list[float]:
    """Return for each setting the shortest time, in seconds, of attention: ``n_rows`` to ``n_cells``.

    It is the time of one K/V head and the heads that share it. The settings take turns, two to eight
    each, so that another program slows down all of them. A setting that is clearly slower than the
    fastest one in the first turn is not timed again. The time is inf if this build of llama.cpp lacks a
    function, or if memory is short.

    Args:
        settings: pairs of K/V type ("f32", "f16", "bf16" or "q8_0") and whether flash attention is used.
        shape: of the model's attention.
        n_rows, n_cells: tokens that are decoded, and those in the cache.
        most_s: no turn begins after this many seconds.
    """
    least = [math.inf] * len(settings)
    with ExitStack() as stack:
        try:
            graphs = [
                stack.enter_context(_graph(kv_type, flash, shape, n_rows, n_cells))
                for kv_type, flash in settings
            ]
        except (AttributeError, MemoryError):
            return least
        spent = 0.0
        for turn in range(_TURNS):
            if turn >= 2 and spent > most_s:
                break
            most = _HOPELESS * min(least) if turn else math.inf
            for i, (compute, n_computed) in enumerate(graphs):
                if least[i] > most < math.inf:
                    continue
                start = _clock()
                compute()
                seconds = _clock() - start
                least[i], spent = min(least[i], seconds / n_computed), spent + seconds
    return least


@contextmanager
def _graph(
    kv_type: str, flash: bool, shape: AttentionShape, n_rows: int, n_cells: int
) -> Iterator[tuple[Any, int]]:
    """Yield a function that computes the attention, and how many times it does, each with other K/V."""
    ggml, size = _ggml(), shape.head_size
    width = size * shape.n_kv_heads
    n_bytes = 2 * n_cells * size * _BYTES_OF[kv_type]
    n = max(1, min(16, int(_EVICTED / n_bytes / n_rows)))
    with ExitStack() as stack:
        backend = ggml["backend_cpu_init"]()
        stack.callback(ggml["backend_free"], backend)
        ggml["backend_cpu_set_n_threads"](backend, 1)
        tensors = ggml["init"](_InitParams(_BYTES, None, True))
        stack.callback(ggml["free"], tensors)
        make = partial(ggml["new_tensor_4d"], tensors)
        graph, scale, kind = ggml["new_graph"](tensors), 1 / math.sqrt(size), KV_TYPES[kv_type][0]
        mask = make(_F16 if flash else _F32, n_cells, max(n_rows, _MASK_ROWS), 1, 1)
        row = ggml["row_size"](kind, width)
        for _ in range(n):
            q = ggml["permute"](tensors, make(_F32, size, shape.n_heads, n_rows, 1), 0, 2, 1, 3)
            # The cells of one head, with the strides that they have in a cache of all heads.
            k = ggml["view_2d"](tensors, make(kind, width, n_cells, 1, 1), size, n_cells, row, 0)
            if flash:
                v = make(kind, width, n_cells, 1, 1)
                v = ggml["view_2d"](tensors, v, size, n_cells, row, 0)
                result = ggml["flash_attn_ext"](tensors, q, k, v, mask, scale, 0.0, 0.0)
                ggml["flash_attn_ext_set_prec"](result, _PREC_F32)
            else:
                v = make(kind, n_cells, size, 1, 1)  # in the cache V is transposed
                weights = ggml["mul_mat"](tensors, k, q)
                ggml["mul_mat_set_prec"](weights, _PREC_F32)
                weights = ggml["soft_max_ext"](tensors, weights, mask, scale, 0.0)
                result = ggml["mul_mat"](tensors, v, weights)
                result = ggml["cont"](tensors, ggml["permute"](tensors, result, 0, 2, 1, 3))
            ggml["build_forward_expand"](graph, result)
        buffer = ggml["backend_alloc_ctx_tensors"](tensors, backend)
        if not buffer:
            raise MemoryError
        stack.callback(ggml["backend_buffer_free"], buffer)
        ggml["backend_buffer_clear"](buffer, 0)
        yield partial(ggml["backend_graph_compute"], backend, graph), n
