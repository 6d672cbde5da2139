"""Drafting with MTP layers (DeepSeek-V3, 2412.19437).

At position P the pair is (token P, state P - 1): see :mod:`.head`. Several layers form a chain: each
drafts one token, and reads the states that the layers before it made of the draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from ...arguments import instance
from ...context import Context
from ...context.logits import LogitsRow
from ...context.runner import Batch
from ...sampling import SamplingParams
from .head import MOST_ROWS, HeadDrafter, HeadState, States

__all__ = ["MTPDrafter"]


class MTPDrafter(HeadDrafter):
    """Drafts with the MTP layers of the target itself, or with those of a file of their own.

    For the target's own it opens a context; ``close`` frees it, and so does closing the target. Several
    layers draft one token each, so a draft has at most as many tokens as there are layers.

    Args:
        target: the context that generates, of a model loaded with ``load_mtp=True``; or a context of
            MTP layers that is open already: ``Context(model, target=ctx)``.
        sampling: the settings of the draws; None = the request's.

    Raises:
        ConfigError: not a context.
        UnsupportedError: the target has no MTP layers that can be computed, with the reason.
    """

    ahead = 0

    def __init__(self, target: Context, sampling: SamplingParams | None = None) -> None:
        instance(
            "target", target, Context, "give the context that generates, for example lb.load()"
        )
        is_open = target.target is not None and not target.model.target_layers
        super().__init__(target if is_open else Context(target.model, target=target), sampling)

    @property
    def n_layers(self) -> int:
        """How many MTP layers there are; of several, each drafts one token.

        1 for layers that read the target's K/V: llama.cpp computes all of them for each token.
        """
        return 1 if self.ctx.model.shares_memory else self.ctx.model.n_mtp_layers

    @property
    def name(self) -> str:
        """The name of the file's model, and "MTP"."""
        return f"{self.ctx.model.name} MTP"

    def draw(self, states: Sequence[HeadState]) -> None:
        """Finish the drafts; several layers draft in turn, one decode for each.

        It reads what it has not read of the text, and the draft. A layer that did not draft, because the
        draft ended before, is behind in the text until it drafts.
        """
        if self.n_layers == 1:
            return super().draw(states)
        for layer in range(1, self.n_layers):
            behind = [state for state in states if layer < state.limit]
            behind = [state for state in behind if len(state.behind(layer)[0]) > MOST_ROWS]
            if behind:
                self._read_text(behind, layer)
        if states:
            self.decode(states)
        made: dict[HeadState, list[States]] = {state: [] for state in states}
        for layer in range(1, self.n_layers + 1):
            for state in states:
                state.draw()
            states = [state for state in states if not state.is_done]
            if not states:
                break
            for state in states:
                made[state].append(state.inputs())
            found = self._read_text(states, layer, made)
            for state, (row, hidden) in zip(states, found, strict=True):
                state.note_read(row, hidden)
        return None

    def _read_text(
        self,
        states: Sequence[HeadState],
        layer: int,
        made: Mapping[HeadState, Sequence[States]] = MappingProxyType({}),
    ) -> list[tuple[LogitsRow, States]]:
        """Let a layer read what it has not read of the text, and the draft with the states ``made``."""
        unread, inputs = [], []
        for state in states:
            tokens, features = state.behind(layer)
            drafted = made.get(state, ())
            unread.append(tokens + state.draft.tokens[: len(drafted)])
            inputs += [features, *drafted]
        decoder = self.ctx.decoder
        decoder.use_mtp_layer(layer)
        try:
            return self.read(states, unread, np.concatenate(inputs), layer)
        finally:
            decoder.use_mtp_layer(0)

    def decode(self, states: Sequence[HeadState]) -> None:
        """Decode what is unread of each state, together.

        Layers that attend to the target's K/V compute the last token of each text or draft: all tokens of
        a draft have one position, that of the text's last token, which the target has not decoded yet.
        The lock of this context is the target's, so the K/V that is read does not change.
        """
        if not self.ctx.model.shares_memory:
            return super().decode(states)
        decoder = self.ctx.decoder
        batch = Batch()
        for state in states:
            batch.add(state.target.seq_id, state.unread[-1:], position=len(state.text) - 1)
        rows = batch.decode(
            decoder, states=np.concatenate([state.inputs()[-1:] for state in states])
        )
        hidden = decoder.output_states(len(states))
        for state, (row,), its in zip(states, rows, hidden, strict=True):
            state.note_read(row, its)
        return None

    def close(self) -> None:
        """Free the context of the MTP layers."""
        self.ctx.close()
