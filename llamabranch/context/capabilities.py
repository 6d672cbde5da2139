"""What a context's memory can do, determined by short trials when the context is created.

`Capabilities` is the report; what callers do with a memory they ask of the `Memory` that fits it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ..errors import UnsupportedError
from ..model import Model
from ..native import ContextHandle, StateLayout
from .batch import decode_run
from .exactness import measured_exactness
from .memory import MOST_WITH_WINDOW, Memory, NonUnified, States, Windowed
from .params import INVARIANT_KV_TYPES, ContextParams
from .runner import Runner

__all__ = ["Capabilities", "Probed", "probe", "probe_sharing_head"]


@dataclass(frozen=True)
class Capabilities:
    """What this context's memory can do; determined when it is created.

    Args:
        can_truncate: the tail of a sequence can be dropped, of any length. (A sequence restored from a
            snapshot has only the end of a sliding window: a branch that drops more is decoded again.)
        can_share: sequences can share cells; otherwise (``kv_unified=False``) a fork copies them.
        sliding_window: size of the attention window in tokens, 0 if there is none.
        recurrent: some of the memory is a state instead of cells.
        batch_invariant: a token's logits do not depend, to the bit, on what else is in the batch or the
            cache. (One exception, reported by ``usage().in_order``: the cache ran full while raw
            sequences or an unfinished prompt prevented compaction, see ``compaction.py``.)
        batch_invariant_reason: why, or why not.
        exact_rows: the most rows of a decode of which each has, to the bit, the logits it has alone, as
            measured; ``n_batch`` where no size was found that differs, 0 where it was not measured.
            With a sliding window this is all that is known: cells that are used again may change order.
        total_variation: the largest, as measured, between the distributions of the next token of a row
            in a batch and alone: 0.0 where they are equal, None where it was not measured.
    """

    can_truncate: bool
    can_share: bool
    sliding_window: int
    recurrent: bool
    batch_invariant: bool
    batch_invariant_reason: str
    exact_rows: int = 0
    total_variation: float | None = None


class Probed(NamedTuple):
    """What the trials have found: the report, and the memory, empty."""

    capabilities: Capabilities
    memory: Memory


def probe(
    handle: ContextHandle, model: Model, params: ContextParams, *, is_head: bool = False
) -> Probed:
    """Run short trials on the empty context and leave it empty.

    Args:
        params: what the context was created with, resolved.
        is_head: the context computes a head, not the model's trunk.
    """
    n_seq_max = params.native().n_seq_max
    # A head has attention only, whatever the trunk has whose file it is in.
    recurrent = model.memory_type in ("recurrent", "hybrid") and not is_head
    # llama.cpp reports a removal as done although cells that the window needs are gone already, and
    # later decodes would attend to an incomplete window. They stay where the cache has them
    # (``swa_full``) and can hold them (``Windowed``).
    window = model.n_swa if model.memory_type == "sliding-window" else 0
    memory = Memory(handle, n_seq_max) if handle.kv_unified else NonUnified(handle, n_seq_max)
    runner = Runner(handle, memory)
    decode_run(runner, _tokens(model, 2), 0, "none")
    layout = StateLayout.learn(handle.state(0), n_tokens=2)
    can_truncate = memory.drop(0, 1)
    if layout is not None and layout.is_cells_only:
        window = 0  # no layer uses it
    if window:
        can_truncate &= params.swa_full and n_seq_max <= MOST_WITH_WINDOW
        can_truncate &= layout is not None and layout.has_window
    memory.clear()
    exactness = _exactness(runner, model, params, is_head=is_head)
    n_ubatch = params.n_ubatch or handle.n_batch
    invariant = exactness.rows >= n_ubatch and model.memory_type == "attention"
    if not handle.kv_unified:
        _check_copies(layout)
        memory = NonUnified(handle, n_seq_max, layout)
    elif not can_truncate:
        memory = States(handle, n_seq_max, layout, has_cells_only=not recurrent)
    elif window:
        memory = Windowed(handle, n_seq_max, layout, window)
    else:
        memory = Memory(handle, n_seq_max, layout, keeps_order=invariant and not is_head)
    found = Capabilities(
        can_truncate=can_truncate,
        can_share=handle.kv_unified,
        sliding_window=window,
        recurrent=recurrent,
        batch_invariant=invariant,
        batch_invariant_reason=exactness.reason,
        exact_rows=exactness.rows,
        total_variation=exactness.variation,
    )
    return Probed(found, memory)


class _Exactness(NamedTuple):
    """In how many rows batches are exact, why, and by how much others are off, see `Capabilities`."""

    rows: int
    reason: str
    variation: float | None = None


def _exactness(runner: Runner, model: Model, params: ContextParams, *, is_head: bool) -> _Exactness:
    """Return what is asked for, excluded by a rule, or measured on the empty context."""
    if params.batch_invariant is False:
        return _Exactness(0, "not asked for")
    n_ubatch = params.n_ubatch or runner.handle.n_batch
    reason = _why_not_invariant(model, params)
    if is_head:
        reason = reason or "not measured for a head, which needs the states of its target"
    slides, limit = model.memory_type == "sliding-window", ""
    if params.kv_type not in INVARIANT_KV_TYPES:  # f16 differs only after 500 tokens
        limit = f"the K/V type is {params.kv_type}, not bf16 or q8_0"
    elif slides:
        limit = "cells of a sliding window may be used in another order"
    if reason or (limit and not slides):
        return _Exactness(0, reason or limit)
    ask = params.batch_invariant is True
    setting = f"K/V {params.kv_type}, {params.n_threads} threads"
    measured = measured_exactness(runner, model, n_ubatch, setting=setting, ask=ask)
    rows, variation = (0, None) if measured is None else measured
    if measured is None:
        reason = "not measured: it would take more than 2 s (batch_invariant=True asks for it)"
    elif rows >= n_ubatch:
        reason = "measured: the logits of batches are equal to the bit"
    else:
        size = f"more than {rows}" if rows > 1 else "two"
        reason = (
            f"measured: logits of batches of {size} tokens differ, "
            f"probabilities by a total variation of up to {variation:.2g}"
        )
    if limit:
        reason = f"{limit}; {reason}"
        rows = rows if params.kv_type in INVARIANT_KV_TYPES else 0
    return _Exactness(rows, reason, variation)


def probe_sharing_head(handle: ContextHandle, target: Capabilities, n_seq_max: int) -> Probed:
    """Return what a head can do that reads the memory of its target: it has none to try out."""
    if not handle.kv_unified:
        _check_copies(None)
    found = replace(
        target,
        can_truncate=False,
        batch_invariant=False,
        exact_rows=0,
        total_variation=None,
        batch_invariant_reason="not established for a head that reads the K/V of its target",
    )
    return Probed(found, States(handle, n_seq_max))


def _check_copies(layout: StateLayout | None) -> None:
    """Raise UnsupportedError where the cells of a sequence of non-unified KV cannot be copied."""
    if layout is None or not layout.is_cells_only:
        raise UnsupportedError(
            "kv_unified=False: llama.cpp writes K/V in an unknown form, so forks cannot copy it"
        )


def _tokens(model: Model, n: int) -> list[int]:
    return [(7 * i + 3) % model.n_vocab for i in range(n)]


def _why_not_invariant(model: Model, params: ContextParams) -> str:
    """Return the rule that excludes exact batches, "" if none does and measuring tells."""
    if model.on_gpu:
        return "layers may run on a GPU"
    if model.memory_type not in ("attention", "sliding-window"):
        return f"not established for {model.memory_type} memory"
    if params.flash_attention is False:
        return "flash attention is off"
    return ""
