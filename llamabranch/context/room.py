"""Whether the machine has enough memory for a context, checked before llama.cpp allocates it.

llama.cpp writes to the whole cache when it creates it. With a cache that was far too large, this took a
minute and a half and pushed all other programs out of memory. The size computed here is a lower bound.
"""

from __future__ import annotations

import os

from ..errors import ConfigError
from ..model import Model
from ..native.context import KV_TYPES
from ..native.gguf_reader import type_bytes
from .params import ContextParams

# For each cell, llama.cpp stores at least a position, a shift, and a bit for each of 256 sequences.
BYTES_OF_CELL = 40
BYTES_OF_NUMBER = 4  # bytes of a number in a state: llama.cpp keeps states as float32
_STEP = 256  # llama.cpp rounds a cache up to whole steps


def check_room(model: Model, params: ContextParams, *, is_head: bool = False) -> None:
    """Raise ConfigError if a context needs more memory than the machine has.

    Args:
        params: resolved for the model.
        is_head: the context computes only the layers that draft for another context.
    """
    limit = memory_bytes()
    of_cells = cell_bytes(model, params, is_head=is_head)
    of_states = least_state_bytes(model, params)
    least = of_cells + of_states
    if limit is None or least <= limit:
        return
    memory_text = f"and this machine has {limit / 1e9:,.1f} GB of memory"
    if of_states > of_cells:
        n_seq_max, n_rs_seq = params.n_seq_max or 1, int(params.n_rs_seq)
        raise ConfigError(
            f"n_seq_max={n_seq_max} with n_rs_seq={n_rs_seq} needs at least {least / 1e9:,.1f} GB "
            f"({of_states / n_seq_max / 1e6:,.1f} MB for the states of each sequence), {memory_text}",
            hint=f"at most n_seq_max={max(0, limit - of_cells) * n_seq_max // of_states} could fit, "
            "if nothing else used memory"
            + ("; n_rs_seq=0 keeps one state of each" if n_rs_seq else ""),
        )
    n_ctx = params.n_ctx or 0
    raise ConfigError(
        f"n_ctx={n_ctx:,} needs at least {least / 1e9:,.1f} GB for its cells, {memory_text}",
        hint=f"at most n_ctx={int(n_ctx * limit / least) // _STEP * _STEP:,} could fit, if nothing "
        "else used memory; kv_type='q8_0' takes half as much as f16",
    )


def cell_bytes(model: Model, params: ContextParams, *, is_head: bool = False) -> int:
    """Return the fewest bytes that the cells of a context can take; 0 if that is not known."""
    windowed = ("sliding-window",) if params.swa_full else ()
    if model.memory_type not in ("attention", "hybrid", *windowed):
        return 0
    on_gpu = model.on_gpu and params.offload_kqv
    numbers = 0 if on_gpu or is_head else model.kv_numbers
    of_number = sum(map(type_bytes, KV_TYPES.get(params.kv_type, ()))) / 2
    of_cell = BYTES_OF_CELL + numbers * of_number
    return int((params.n_ctx or 0) * of_cell)


def least_state_bytes(model: Model, params: ContextParams) -> int:
    """Return the bytes of all sequences' states, including those kept for undoing; 0 = unknown."""
    if model.on_gpu and params.offload_kqv:
        return 0
    n_states = (params.n_seq_max or 1) * (1 + int(params.n_rs_seq))
    return n_states * model.state_numbers * BYTES_OF_NUMBER


def memory_bytes() -> int | None:
    """Return the memory of this machine in bytes, without swap; None if it is not known."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # AttributeError: Windows
        return None
