"""Drafting with an EAGLE-3 head (Li et al. 2025, 2503.01840).

At position P the pair is (token P + 1, state P): see :mod:`.head`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...arguments import instance
from ...context import Context
from ...context.logits import LogitsRow
from ...errors import ConfigError
from ...sampling import Distribution, Sampler, SamplingParams
from .head import HeadDrafter, HeadState, States

__all__ = ["EagleDrafter"]


class EagleDrafter(HeadDrafter):
    """Drafts with an EAGLE-3 head, which reads the hidden states of three layers of the target.

    Args:
        ctx: a context of the head: ``Context(Model("head.gguf"), target=ctx)``. Each state holds one
            of its sequences, more for a tree.
        sampling: the settings of its draws; None = the request's.
        width: candidates per node, 1 to 16; above 1 it proposes trees, which need the seeded rule.

    Raises:
        ConfigError: not a context of a head, or an invalid width.
    """

    ahead = 1

    def __init__(
        self, ctx: Context, sampling: SamplingParams | None = None, *, width: int = 1
    ) -> None:
        instance("ctx", ctx, Context, 'EagleDrafter(Context(Model("head.gguf"), target=ctx))')
        if ctx.target is None or not ctx.model.target_layers:
            raise ConfigError(
                f"{ctx.model.name} is not open as an EAGLE-3 head",
                hint='EagleDrafter(Context(Model("head.gguf"), target=ctx))',
            )
        super().__init__(ctx, sampling, width)

    @property
    def name(self) -> str:
        """The head's name."""
        return self.ctx.model.name

    def draw(self, states: Sequence[HeadState]) -> None:
        """Finish the drafts; trees one by one: the rows of others would not outlive their decodes."""
        if self.width == 1:
            return super().draw(states)
        for state in states:
            self.decode([state])
            root = _Leaf(state.seq_ids[0], state.sampler, state.position, state.row(), state.hidden)
            state.grow(_Leaves(self.ctx, state.seed), root, self.width)
        return None


@dataclass(eq=False)
class _Leaf:
    """A node of a tree: the sequence that holds it, and what follows it.

    Attributes:
        seq_id: the sequence.
        sampler: has accepted the text up to it.
        position: of the token that follows.
        row, hidden: the logits after it, valid until the next decode, and the head's state.
    """

    seq_id: int
    sampler: Sampler
    position: int
    row: LogitsRow | None
    hidden: States | None


class _Leaves:
    """The sequences of a tree while it grows."""

    def __init__(self, ctx: Context, seed: int) -> None:
        self.ctx = ctx
        self._seed = seed
        self._decoder = ctx.decoder

    def entropy(self, node: _Leaf) -> float:
        return _row_of(node).entropy()

    def distribution(self, node: _Leaf) -> Distribution:
        return node.sampler.distribution(_row_of(node).array, node.position, self._seed)

    def position(self, node: _Leaf) -> int:
        return node.position

    def fork(self, node: _Leaf) -> _Leaf:
        fork = _Leaf(-1, node.sampler, node.position, None, node.hidden)
        fork.seq_id = self.ctx.sequences.allocate(fork)
        self.ctx.kv_cache.fork(node.seq_id, fork.seq_id)
        return fork

    def free(self, node: _Leaf) -> None:
        self.ctx.sequences.free(node.seq_id)

    def decode(self, nodes: Sequence[_Leaf], tokens: Sequence[int]) -> None:
        states = np.stack([node.hidden for node in nodes if node.hidden is not None])
        seqs = [node.seq_id for node in nodes]
        rows = self._decoder.decode(tokens, seqs, [True] * len(seqs), (), states)
        kept = self._decoder.output_states(len(seqs))
        for node, token, row, hidden in zip(nodes, tokens, rows, kept, strict=True):
            node.row, node.hidden = row, hidden
            node.position += 1
            if not node.sampler.is_stateless:
                node.sampler = node.sampler.after((token,))


def _row_of(node: _Leaf) -> LogitsRow:
    if node.row is None:
        raise RuntimeError("this node of the tree was not decoded")
    return node.row
