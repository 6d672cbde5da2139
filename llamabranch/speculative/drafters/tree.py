"""Drafting a token tree: which nodes are grown, for draft models and for heads.

At each level the most probable nodes are followed, all in one decode. A node's candidates are the tokens
with the largest keys log q + g, where g is the noise with which the target will draw, so the first of
them is the token that a chain would have drafted; at temperature 0 the keys are log q. Nodes are ranked
by the product of the keys' softmax along their path; the best ``width`` of a level are expanded and the
best limit * width overall kept, as EAGLE-2 does with q (Li et al. 2024, 2406.16858).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from ...arguments import whole
from ...context import Context
from ...errors import ConfigError, GrammarError
from ...generation.drafter import Draft, DraftLength
from ...sampling import Distribution, SamplingParams
from ...sampling.noise import gumbel_noise

__all__ = ["TreeMemory", "check_rule", "grow_tree", "tree_settings", "tree_width"]

N = TypeVar("N")


class TreeMemory(Protocol[N]):
    """The sequences of a tree while it grows; a node is whatever holds the logits after its text.

    Attributes:
        ctx: has the sequences.
    """

    ctx: Context

    def entropy(self, node: N) -> float:
        """Return the entropy of the distribution after a node, nats."""

    def distribution(self, node: N) -> Distribution:
        """Return the distribution after a node; GrammarError where the grammar allows no token."""

    def position(self, node: N) -> int:
        """Return the position of the token that follows a node."""

    def fork(self, node: N) -> N:
        """Return a node with the same text."""

    def free(self, node: N) -> None:
        """Free what a node holds."""

    def decode(self, nodes: Sequence[N], tokens: Sequence[int]) -> None:
        """Append one token to each node, in one decode."""


def tree_width(width: object) -> int:
    """Return a number of candidates, 1 to 16; ConfigError for any other."""
    return whole("width", width, 1, 16)


def check_rule(width: int, rule: str) -> None:
    """Raise ConfigError unless drafts of this width can be accepted by the rule."""
    if width > 1 and rule != "seeded":
        raise ConfigError(f"token trees need the seeded rule, not {rule!r}")


def tree_settings(params: SamplingParams) -> SamplingParams:
    """Return the settings that rank a tree's candidates: greedy ones would leave a single token."""
    return params.replace(temperature=1.0) if params.temperature == 0.0 else params


def grow_tree(
    draft: Draft,
    memory: TreeMemory[N],
    root: N,
    *,
    width: int,
    length: DraftLength,
    limit: int,
    seed: int | None,
    is_eog: Callable[[int], bool],
) -> None:
    """Write a tree of at most ``limit`` levels and limit * width nodes into ``draft``.

    Args:
        root: the text so far; it is kept, all other nodes are freed, whatever is raised.
        width: candidates per node, and nodes of a level that are expanded.
        length: asked before each level.
        seed: of the target's draws; None = rank without noise.
        is_eog: whether a token ends the text: nothing is drafted after it.
    """
    nodes: list[tuple[float, int, int]] = []  # value, token, parent
    level: list[tuple[N, int, float]] = [(root, -1, 0.0)]
    held: list[N] = []  # what has to be freed
    try:
        for depth in range(limit):
            entropy = memory.entropy(level[0][0]) if length.reads_entropy else math.nan
            draft.entropies.append(entropy)
            if not length.goes_on(depth, entropy):
                draft.stopped = length.reason
                break
            found = []
            for node, number, value in level:
                for token, logprob in _candidates(memory, node, width, seed):
                    nodes.append((value + logprob, token, number))
                    if not is_eog(token):
                        found.append((value + logprob, len(nodes) - 1, token, node))
            if not found:
                draft.stopped = "end"
            if depth + 1 == limit or not found:
                break
            found.sort(key=lambda f: (-f[0], f[1]))
            chosen, level = found[:width], []
            followed = {id(node) for *_, node in chosen}
            for node in [node for node in held if id(node) not in followed]:
                memory.free(node)
                held.remove(node)
            left = {id(node) for node in held}  # a node itself goes on as the first of its children
            if len(chosen) - len(left) > memory.ctx.n_seq_free:
                draft.stopped = "capacity"  # to fork would search for garbage, in each round
                break
            for value, number, _, node in chosen:
                if id(node) in left:
                    left.remove(id(node))
                    level.append((node, number, value))
                else:
                    held.append(memory.fork(node))
                    level.append((held[-1], number, value))
            memory.decode([node for node, _, _ in level], [token for _, _, token, _ in chosen])
    finally:
        for node in held:
            memory.free(node)
        _keep_best(draft, nodes, limit * width)


def _candidates(
    memory: TreeMemory[N], node: N, width: int, seed: int | None
) -> list[tuple[int, float]]:
    """Return the tokens the target is most likely to draw, with their log-probabilities."""
    try:
        choices = memory.distribution(node)
    except GrammarError:  # a dead end of the grammar: the target raises it if it gets there
        return []
    if seed is None:
        return choices.top(width)
    keys = choices.logprobs + gumbel_noise(seed, memory.position(node), choices.ids)
    best = np.argsort(-keys, kind="stable")[:width]
    ranked = Distribution.from_logits(keys[best], choices.ids[best])
    return list(zip(ranked.ids.tolist(), ranked.logprobs.tolist(), strict=True))


def _keep_best(draft: Draft, nodes: list[tuple[float, int, int]], most: int) -> None:
    """Write the ``most`` best nodes into the draft, best first; a parent never ranks below its child."""
    best = sorted(range(len(nodes)), key=lambda i: (-nodes[i][0], i))[:most]
    number = {-1: -1} | {node: i for i, node in enumerate(best)}
    draft.tokens = [nodes[i][1] for i in best]
    draft.parents = [number[nodes[i][2]] for i in best]
