"""What a context's memory can do, determined by short trials when the context is created."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..errors import UnsupportedError
from ..model import Model
from ..native import ContextHandle, StateLayout
from .batch import decode_run
from .decoder import Decoder
from .kv_cache import MOST_WITH_WINDOW, KVCache
from .params import INVARIANT_KV_TYPES

__all__ = ["Capabilities", "of_sharing_head", "probe"]


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
    """

    can_truncate: bool
    can_share: bool
    sliding_window: int
    recurrent: bool
    batch_invariant: bool
    batch_invariant_reason: str


def probe(
    handle: ContextHandle,
    model: Model,
    n_seq_max: int,
    *,
    kv_type: str,
    flash_attention: bool | str,
    swa_full: bool,
    batch_invariant: bool | str,
    is_head: bool = False,
) -> tuple[Capabilities, StateLayout | None, int]:
    """Run short trials on the empty context and leave it empty.

    ``is_head``: the context computes a head, not the model's trunk.

    Returns:
        the capabilities, the layout of saved states (None if unknown), and the number of decodes used.

    Raises:
        UnsupportedError: ``batch_invariant`` is True and cannot hold.
    """
    # A head has attention only, whatever the trunk has whose file it is in.
    recurrent = model.memory_type in ("recurrent", "hybrid") and not is_head
    # llama.cpp reports a removal as done although cells that the window needs are gone already, and
    # later decodes would attend to an incomplete window. They stay where the cache has them
    # (``swa_full``) and can hold them (``KVCache.hold_window``).
    window = model.n_swa if model.memory_type == "sliding-window" else 0
    cache = KVCache(handle, n_seq_max)
    decoder = Decoder(handle, cache)
    decode_run(decoder, _tokens(model, 2), 0, "none")
    layout = StateLayout.learn(handle.state(0), n_tokens=2)
    can_truncate = cache.drop(0, 1)
    if layout is not None and layout.is_cells_only:
        window = 0  # no layer uses it
    if window:
        can_truncate &= swa_full and n_seq_max <= MOST_WITH_WINDOW
        can_truncate &= layout is not None and layout.has_window
    cache.clear()
    invariant, reason = False, "not asked for"
    if batch_invariant is not False:
        reason = _why_not_invariant(model, kv_type, flash_attention)
        if not reason:  # a short self-check cannot refute the rule: f16 differs after 500 tokens
            difference = _batch_difference(decoder, cache, model)
            if difference == 0.0:
                invariant, reason = True, "checked: the self-check's logits are equal to the bit"
            else:
                reason = f"self-check: logits differ by up to {difference:.2g} between batches"
        if batch_invariant is True and not invariant:
            raise UnsupportedError(
                f"this context cannot be batch-invariant: {reason}",
                hint="use Q8_0 weights on the CPU, kv_type bf16 or q8_0, and flash attention",
            )
    capabilities = Capabilities(
        can_truncate=can_truncate,
        can_share=handle.kv_unified,
        sliding_window=window,
        recurrent=recurrent,
        batch_invariant=invariant,
        batch_invariant_reason=reason,
    )
    return capabilities, layout, decoder.n_decodes


def of_sharing_head(target: Capabilities) -> Capabilities:
    """Return the capabilities of a head that reads the memory of its target and has none to try out."""
    return replace(
        target,
        can_truncate=False,
        batch_invariant=False,
        batch_invariant_reason="not established for a head that reads the K/V of its target",
    )


def _tokens(model: Model, n: int) -> list[int]:
    return [(7 * i + 3) % model.n_vocab for i in range(n)]


def _why_not_invariant(model: Model, kv_type: str, flash_attention: bool | str) -> str:
    """Return the rule that excludes exact batches, "" if none does."""
    if model.file_type != "Q8_0":
        return f"the weights are {model.file_type}, not Q8_0"
    if kv_type not in INVARIANT_KV_TYPES:
        return f"the K/V type is {kv_type}, not bf16 or q8_0"
    if flash_attention is False:
        return "flash attention is off"
    if model.on_gpu:
        return "layers may run on a GPU"
    if model.memory_type != "attention":
        return f"not established for {model.memory_type} memory"
    return ""


def _batch_difference(decoder: Decoder, cache: KVCache, model: Model) -> float:
    """Return the largest logit difference between a sequence decoded alone and in a batch."""
    if decoder.handle.n_batch < 2:
        return 0.0  # every decode is of one token
    own = _tokens(model, min(8, decoder.handle.n_batch))
    other = list(reversed(own))
    n_rows = min(len(own), decoder.handle.n_outputs_max)  # llama.cpp aborts on more in one decode
    alone = []
    for token in own:
        row = decoder.decode([token], [0], [True])[0]
        alone.append(row.array.copy())
    cache.clear()
    if cache.ledger.n_seq_max < 2 or decoder.handle.n_batch < 2 * len(own):
        tokens, seqs = own, [0] * len(own)
    else:
        tokens = [token for pair in zip(other, own, strict=True) for token in pair]
        seqs = [1, 0] * len(own)
    mine = [i for i, seq in enumerate(seqs) if seq == 0][-n_rows:]
    rows = decoder.decode(tokens, seqs, [i in mine for i in range(len(seqs))])
    together = [row.array.copy() for row in rows]
    cache.clear()
    return _largest_difference(alone[-n_rows:], together)


def _largest_difference(
    left: Sequence[npt.NDArray[np.float32]], right: Sequence[npt.NDArray[np.float32]]
) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True))
