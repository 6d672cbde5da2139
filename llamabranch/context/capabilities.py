"""What a context's memory can do, determined by short trials when the context is created.

`Capabilities` is the report; what callers do with a memory they ask of the `Memory` that fits it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import UnsupportedError
from ..model import Model
from ..native import ContextHandle, StateLayout
from .exactness import exactness_of
from .memory import MOST_WITH_WINDOW, Memory, NonUnified, States, Windowed
from .params import ContextParams
from .runner import Runner, decode_run

__all__ = ["Capabilities", "probe", "probe_sharing_head"]


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


def probe(
    handle: ContextHandle, model: Model, params: ContextParams, *, is_head: bool = False
) -> tuple[Capabilities, Memory]:
    """Find out what an empty context can do, by short trials; return that, and its memory, empty.

    Args:
        params: what the context was created with, resolved.
        is_head: the context computes a head, not the model's trunk.
    """
    # A head has attention only, whatever the trunk has whose file it is in.
    recurrent = model.memory_type in ("recurrent", "hybrid") and not is_head
    # llama.cpp reports a removal as done although cells that the window needs are gone already, and
    # later decodes would attend to an incomplete window. They stay where the cache has them
    # (``swa_full``) and can hold them (``Windowed``).
    window = model.n_swa if model.memory_type == "sliding-window" else 0
    memory = Memory(handle) if handle.kv_unified else NonUnified(handle)
    runner = Runner(handle, memory)
    decode_run(runner, [3 % model.n_vocab, 10 % model.n_vocab], 0, "none")
    layout = StateLayout.learn(handle.state(0), n_tokens=2)
    can_truncate = memory.drop(0, 1)
    if layout is not None and layout.is_cells_only:
        window = 0  # no layer uses it
    if window:
        can_truncate &= params.swa_full and handle.n_seq_max <= MOST_WITH_WINDOW
        can_truncate &= layout is not None and layout.has_window
    memory.clear()
    exactness = exactness_of(runner, model, params, is_head=is_head)
    n_ubatch = params.n_ubatch or handle.n_batch
    invariant = exactness.rows >= n_ubatch and model.memory_type == "attention"
    if not handle.kv_unified:
        _check_copies(layout)
        memory = NonUnified(handle, layout)
    elif not can_truncate:
        memory = States(handle, layout)
        if recurrent:
            memory.spare_seq_ids = range(0)  # cells alone can belong to others than the context's
    elif window:
        memory = Windowed(handle, layout, window)
    else:
        memory = Memory(handle, layout, keeps_order=invariant and not is_head)
    found = Capabilities(
        can_truncate=can_truncate,
        can_share=handle.kv_unified,
        sliding_window=window,
        recurrent=recurrent,
        batch_invariant=invariant,
        batch_invariant_reason=exactness.reason,
        exact_rows=exactness.rows,
        total_variation=exactness.total_variation,
    )
    return found, memory


def probe_sharing_head(handle: ContextHandle, target: Capabilities) -> tuple[Capabilities, Memory]:
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
    return found, States(handle)


def _check_copies(layout: StateLayout | None) -> None:
    """Raise UnsupportedError where the cells of a sequence of non-unified KV cannot be copied."""
    if layout is None or not layout.is_cells_only:
        raise UnsupportedError(
            "kv_unified=False: llama.cpp writes K/V in an unknown form, so forks cannot copy it"
        )
