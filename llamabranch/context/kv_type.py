"""The K/V type of a context whose batches are not exact with any: the faster one, measured once.

Which of f16 and bf16 is faster depends on the processor, on the size of the model's heads, and on whether
prompts are read or tokens generated: with AVX-512, f16 takes four times as long as bf16 to generate with
heads of 64, and half as long with heads of 128. So attention alone is timed for both, on one thread.
"""

from __future__ import annotations

import math
from functools import cache

from ..model import Model
from ..native import attention_seconds, system_info
from ..profile import is_off, machine_key, read_entry, write_entries

__all__ = ["faster_kv_type"]

_CELLS = 512
_ROWS = (8, 64)  # of decodes that generate, and that read
_TIMES = 5  # each; together 0.02 to 0.1 s
_MOST_HEADS = 8
_WORTH = 0.9  # bf16 must take less than this share of f16's time
_SECTION = "K/V type"


def faster_kv_type(model: Model) -> str:
    """Return "bf16" or "f16", whichever reads a token and generates one in less time.

    "f16" where nothing is measured: with layers on a GPU, or ``LLAMABRANCH_PROFILE=0``.
    """
    number = model.handle.number
    n_heads, n_shared = number("n_head"), number("n_head_kv")
    if is_off() or model.on_gpu or not 0 < n_shared <= n_heads:
        return "f16"
    given = model.metadata.get(f"{model.architecture}.attention.key_length", "")
    size = int(given) if given.isdigit() else number("n_embd") // n_heads
    group = min(n_heads // n_shared, _MOST_HEADS)
    key = f"{machine_key()}, {system_info()}, {group} heads of {size}"
    bf16, f16 = (_seconds(kv_type, key, size, group) for kv_type in ("bf16", "f16"))
    return "bf16" if bf16 < _WORTH * f16 else "f16"


@cache
def _seconds(kv_type: str, key: str, head_size: int, n_heads: int) -> float:
    """Return how long attention takes for a token read and one generated, stored or measured."""
    kept = read_entry(_SECTION, key) or {}
    seconds = kept.get(kv_type)
    if isinstance(seconds, (int, float)) and seconds > 0:
        return seconds
    found = sum(
        attention_seconds(kv_type, head_size, n_heads, n, _CELLS, _TIMES) / n for n in _ROWS
    )
    if found < math.inf:
        write_entries([(_SECTION, key, {**kept, kv_type: found})])
    return found
