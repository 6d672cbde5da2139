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
from ...generation.drafter import Draft, DraftRequest
from ...sampling import SamplingParams
from .head import MOST_ROWS, HeadDrafter, HeadDrafting, HeadRun, States

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

    def draft_together(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return the drafts for these requests."""
        if self.ctx.model.shares_memory:
            return _SharingDrafting(self, requests).run()
        chain = self.n_layers > 1
        return (_ChainDrafting if chain else HeadDrafting)(self, requests).run()

    def close(self) -> None:
        """Free the context of the MTP layers."""
        self.ctx.close()


class _ChainDrafting(HeadDrafting):
    """Drafts of several MTP layers in turn: one decode for each, of what it has not read and the draft.

    A layer that did not draft, because the draft ended before, is behind in the text until it drafts.
    """

    def __init__(self, drafter: MTPDrafter, requests: Sequence[DraftRequest]) -> None:
        self.n_layers = n = drafter.n_layers
        super().__init__(drafter, [r._replace(limit=min(r.limit, n)) for r in requests])

    def draft(self, runs: list[HeadRun]) -> None:
        for layer in range(1, self.n_layers):
            behind = [run for run in runs if layer < run.limit]
            behind = [run for run in behind if len(run.behind(layer)[0]) > MOST_ROWS]
            if behind:
                self._read_text(behind, layer)
        if runs:
            self.decode(runs)
        made: dict[HeadRun, list[States]] = {run: [] for run in runs}
        for layer in range(1, self.n_layers + 1):
            for run in runs:
                run.draw()
            runs = [run for run in runs if not run.is_done]
            if not runs:
                return
            for run in runs:
                made[run].append(run.states())
            found = self._read_text(runs, layer, made)
            for run, (row, hidden) in zip(runs, found, strict=True):
                run.note_read(row, hidden)

    def _read_text(
        self,
        runs: Sequence[HeadRun],
        layer: int,
        made: Mapping[HeadRun, Sequence[States]] = MappingProxyType({}),
    ) -> list[tuple[LogitsRow, States]]:
        """Let a layer read what it has not read of the text, and the draft with the states ``made``."""
        unread, states = [], []
        for run in runs:
            tokens, features = run.behind(layer)
            drafted = made.get(run, ())
            unread.append(tokens + run.draft.tokens[: len(drafted)])
            states += [features, *drafted]
        decoder = self.ctx.decoder
        decoder.use_mtp_layer(layer)
        try:
            return self.read(runs, unread, np.concatenate(states), layer)
        finally:
            decoder.use_mtp_layer(0)


class _SharingDrafting(HeadDrafting):
    """Drafts of MTP layers that attend to the target's K/V: all tokens of a draft have one position.

    That is the position of the text's last token, which the target has not decoded yet. The lock of this
    context is the target's, so the K/V that is read does not change.
    """

    def decode(self, runs: Sequence[HeadRun]) -> None:
        """Compute the layers for the last token of each text or draft."""
        decoder = self.ctx.decoder
        rows = decoder.decode(
            [run.unread[-1] for run in runs],
            [run.state.target.seq_id for run in runs],
            [True] * len(runs),
            states=np.concatenate([run.states()[-1:] for run in runs]),
            positions=[len(run.text) - 1 for run in runs],
        )
        for run, row, hidden in zip(runs, rows, decoder.output_states(len(runs)), strict=True):
            run.note_read(row, hidden)
