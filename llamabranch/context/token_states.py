"""The hidden states of a sequence's tokens; tokens without kept states are decoded again."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..arguments import whole
from ..errors import SequencesExhaustedError, UnsupportedError
from .context import Context
from .runner import decode_run

States = npt.NDArray[np.float32]


class _Reading:
    """Holds a sequence while tokens are decoded in it again for their hidden states."""


def kept_states(ctx: Context, seq_id: int, tokens: list[int], start: int) -> States:
    """Return a copy of the hidden states of a sequence's tokens from ``start`` on, float32 (n, width).

    The context must keep hidden states. If states are missing, because their tokens were decoded
    earlier, these tokens are decoded again in another sequence.

    Raises:
        CapacityError: no sequence or no cells are free for that.
    """
    with ctx.lock:
        ctx.decoder.check_open()
        hidden = ctx.kv_cache.hidden
        if hidden is None:
            raise UnsupportedError("the context keeps no hidden states: no head reads them")
        states = hidden.of(seq_id, start, len(tokens))
        if any(row is None for row in states):
            holder = _Reading()
            if not ctx.n_seq_free:  # to allocate one would run the garbage collector in every round
                raise SequencesExhaustedError(
                    "no sequence is free to decode the tokens once more", hint="prune a branch"
                )
            other = ctx.sequences.allocate(holder)
            try:
                decode_run(ctx.decoder, tokens, other, "none")
                hidden.set_all(seq_id, hidden.of(other))
            finally:
                ctx.sequences.free(other)
            states = hidden.of(seq_id, start, len(tokens))
        rows = [row for row in states if row is not None]
        return np.stack(rows) if rows else np.empty((0, hidden.width), dtype=np.float32)


def layer_states(ctx: Context, seq_id: int, tokens: list[int], layer: int, start: int) -> States:
    """Return one layer's hidden states for a sequence's tokens from ``start`` on; see `Branch`.

    Raises:
        ConfigError: no such layer.
        UnsupportedError: llama.cpp does not provide this layer's states, or a head reads other layers.
        CapacityError: no sequence or no cells are free to decode the tokens again.
    """
    with ctx.lock:
        ctx.decoder.check_open()
        n_layer = ctx.model.n_layer
        layer = whole("layer", layer, -n_layer - 1, n_layer) % (n_layer + 1)
        if layer == n_layer:
            return _final_states(ctx, seq_id, tokens, start)
        hidden = ctx.kv_cache.hidden
        if hidden is None or layer not in hidden.layers:
            if hidden is not None and hidden.is_for_head and hidden.is_read():
                raise UnsupportedError(
                    f"a head drafts for this context and reads the layers {hidden.layers}; the "
                    "context keeps no others",
                    hint="close the context of the head first",
                )
            known = () if hidden is None or hidden.is_for_head else hidden.layers
            hidden = ctx.decoder.watch_hidden(sorted({layer, *known}), None)
        rows = kept_states(ctx, seq_id, tokens, start)
        return np.array(rows[:, hidden.columns(layer)])


def _final_states(ctx: Context, seq_id: int, tokens: list[int], start: int) -> States:
    """Return the states after the output norm, for which llama.cpp has to decode with embeddings on."""
    holder = _Reading()
    other = ctx.sequences.allocate(holder)
    try:
        first = ctx.kv_cache.fork(seq_id, other, start)
        return ctx.decoder.final_states(tokens[first:], other)[start - first :]
    finally:
        ctx.sequences.free(other)
