"""Exact samples of the texts that a function accepts, by rejection that never repeats a refused text."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..arguments import whole
from ..branch import Branch
from ..errors import ConfigError, DecodeInterruptedError
from ..model import stop_strings
from ..sampling import Distribution
from ..sampling.constraint import Constraint, ConstraintCalls, ConstraintState
from .checks import MOST_STEPS, MOST_TEXTS, check_start, first_seed, token_limit
from .frontier import Frontier
from .node import SearchNode
from .particles import Following, SeededDraws
from .result import Hypothesis, SearchResult
from .texts import completes_stop, hypothesis
from .tree import OnStep

__all__ = ["rejection"]

_BYTES = 1 << 27  # memory for the probabilities that are kept
_LEAST_MASS = 1e-12  # smaller masses are lost in rounding
_AT_ONCE = 16  # draw at least so many texts together; no text depends on the others
_REST = -1  # stands for all tokens but EOG


def rejection(
    branch: Branch,
    constraint: Callable[[str], bool] | Constraint,
    n: int = 8,
    max_tokens: int = 64,
    *,
    max_draws: int = 1000,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
    on_step: OnStep | None = None,
) -> SearchResult:
    """Draw ``n`` independent texts exactly from the model's distribution of valid texts.

    Texts are drawn until one is valid. A refused text is never drawn again: a tree of all texts so far
    remembers how much of the mass below each node can still be valid, and draws avoid the rest
    (constrained adaptive rejection sampling, 2510.01902). The result has the same distribution as if
    invalid texts were thrown away, with fewer draws. The mass also bounds the probability that a text is
    valid.

    Args:
        branch: a branch that has read the prompt; it does not change. It must not have a grammar.
        constraint: a function of a complete text; or an object with ``complete`` and optionally
            ``prefix``, which ends invalid texts early.
        n: how many texts.
        max_tokens: the most tokens of a text without its EOG token; a text that has not ended by then is
            not valid.
        max_draws: the most texts to draw; if they are used up, fewer than ``n`` are returned.
        stop: strings that end a text.
        seed: the seed of the draws; None = the branch's.
        on_step: called after each decode with the statistics so far; if it returns true, the search ends.

    Returns:
        the valid texts in the order of their numbers; equal texts may occur more than once. ``score`` is
        the log of a text's probability under the settings. ``valid_mass`` has bounds for the probability
        that a text is valid: the mass of the valid texts found, and one minus the refused mass.

    Raises:
        ConfigError: a value is out of range, the branch has a grammar, or the constraint fails.
        BranchStateError, CapacityError, DecodeError: the search frees its sequences.
    """
    check_start(branch, on_step)
    n = whole("n", n, 1, MOST_TEXTS)
    max_tokens = whole("max_tokens", token_limit(max_tokens), 1)
    max_draws = whole("max_draws", max_draws, 1, MOST_STEPS)
    if branch.grammar is not None:
        raise ConfigError(
            "rejection cannot be used with a grammar",
            hint="search.smc supports a grammar and a constraint",
        )
    asked = ConstraintCalls(constraint, whole_texts=True)
    stop, seed = stop_strings(stop), first_seed(branch, seed)
    ends: dict[int, tuple[SearchNode, float]] = {}
    with Frontier(branch, on_step) as frontier:
        first = ConstraintState(asked, branch.ctx.model, stop)
        most = max(n, _AT_ONCE)
        tree = _Tree(frontier, first, max_tokens, stop, SeededDraws(seed, branch.position, most))
        n_drawn = 0
        while len(ends) < n and n_drawn < max_draws and tree.valid_mass and not tree.is_over:
            wanted = [slot for slot in range(n) if slot not in ends]
            n_walks = min(max(len(wanted), _AT_ONCE), max_draws - n_drawn)
            n_drawn += n_walks
            for i, end in sorted(tree.walk(n_walks).items()):  # a slot takes its first valid text
                ends.setdefault(wanted[i % len(wanted)], end)
        frontier.tree.stats.count_constraint(asked)
    hypotheses: list[Hypothesis] = []
    least: dict[tuple[int, ...], float] = {}
    for _, (node, logprob) in sorted(ends.items()):
        hypotheses.append(hypothesis(branch.ctx.model, node, stop, logprob, "stop"))
        least[tuple(node.path_tokens)] = math.exp(logprob)
    frontier.tree.root.prune_open()
    mass = min(1.0, math.fsum(least.values())), tree.valid_mass
    return SearchResult(hypotheses, frontier.tree.stats, frontier.tree.root, valid_mass=mass)


@dataclass
class _Place:
    """The bounds for the texts below a node.

    Attributes:
        state: the state of the constraint.
        depth: how many tokens the node has.
        logprob: log p of the node's text under the settings.
        parent: the place of the parent node, and the token that leads here with its probability.
        valid: for each token after which some text is not valid, its probability and an upper bound of
            the share of valid texts after it.
        mass: an upper bound of the share of valid texts among all texts below the node.
    """

    state: ConstraintState
    depth: int
    logprob: float
    parent: tuple[_Place, int, float] | None = None
    valid: dict[int, tuple[float, float]] = field(default_factory=dict)
    mass: float = 1.0

    def refuse(self, token: int, probability: float, mass: float = 0.0) -> None:
        """Lower the bound of the texts that continue with ``token``, and the bounds above."""
        self.valid[token] = (probability, mass)
        lost = math.fsum(p * (1.0 - kept) for p, kept in self.valid.values())
        self.mass = 1.0 - lost if lost < 1.0 - _LEAST_MASS else 0.0
        if self.parent is not None:
            above, last, p = self.parent
            above.refuse(last, p, self.mass)


class _Tree:
    """The tree of all texts that were drawn so far."""

    def __init__(
        self,
        frontier: Frontier,
        state: ConstraintState,
        max_tokens: int,
        stop: Sequence[str],
        draws: SeededDraws,
    ) -> None:
        self._frontier = frontier
        self._tree = tree = frontier.tree
        self._max_tokens = max_tokens
        self._stop = stop
        self._draws = draws
        self._n_steps = 0
        self._places = {tree.root: _Place(state, 0, 0.0)}
        self._rows: OrderedDict[SearchNode, Following] = OrderedDict()
        with tree.ctx.lock:
            self._rows[tree.root] = Following(tree.branch.sequence)
        self._n_rows = max(16, _BYTES // (16 * tree.ctx.model.n_vocab))
        self._is_eog = tree.ctx.model.is_eog
        self.is_over = False

    @property
    def valid_mass(self) -> float:
        """An upper bound of the probability that a text is valid."""
        return self._places[self._tree.root].mass

    def walk(self, n: int) -> dict[int, tuple[SearchNode, float]]:
        """Draw ``n`` texts; return the last node and log p of each valid one, by its number.

        Refused texts are noted after all texts have ended. If the bounds changed during a walk, texts
        that end early would be drawn too often.
        """
        valid_ends: dict[int, tuple[SearchNode, float]] = {}
        at = dict.fromkeys(range(n), self._tree.root)
        refused: list[tuple[_Place, int, float]] = []
        while at and not self.is_over:
            following: dict[int, SearchNode] = {}
            for slot, node in at.items():
                place = self._places[node]
                token, logprob = self._draw(node, slot)
                if place.depth == self._max_tokens and not self._is_eog(token):
                    ends = map(self._rows[node].target.prob, self._tree.ctx.model.eog_tokens)
                    refused.append((place, _REST, 1.0 - math.fsum(ends)))
                    continue
                after = place.state.after(token)
                if after is None:
                    refused.append((place, token, math.exp(logprob)))
                    continue
                child = self._child(node, token, logprob, after)
                if child not in self._places:
                    valid_ends[slot] = (child, place.logprob + logprob)
                else:
                    following[slot] = child
            at = following
            self._n_steps += 1
            self._read(set(at.values()))
        for place, token, p in refused:
            place.refuse(token, p)
        return valid_ends

    def _draw(self, node: SearchNode, slot: int) -> tuple[int, float]:
        """Return the token drawn after ``node``, and its log-probability under the settings."""
        row, place = self._rows[node], self._places[node]
        self._rows.move_to_end(node)
        target = row.target
        source: Distribution | Following = row
        if place.valid:
            model = self._tree.ctx.model
            kept = np.ones(model.n_vocab)
            if _REST in place.valid:
                kept[:] = 0.0
                kept[list(model.eog_tokens)] = 1.0
            for token, (_, mass) in place.valid.items():
                if token != _REST:
                    kept[token] = mass
            source = Distribution.from_probs(target.probs * kept[target.ids], target.ids)
        token = self._draws.token(source, self._n_steps, slot)
        return token, target.logprob(token)

    def _child(
        self, node: SearchNode, token: int, logprob: float, state: ConstraintState
    ) -> SearchNode:
        """Return the node after ``token``; if the text continues there, the node gets a `_Place`."""
        place = self._places[node]
        child = self._tree.follow(node, token, self._rows[node].logprob(token))
        is_end = self._is_eog(token) or completes_stop(child, self._stop)
        if not is_end and child not in self._places:
            above = place, token, math.exp(logprob)
            self._places[child] = _Place(state, place.depth + 1, place.logprob + logprob, above)
        return child

    def _read(self, nodes: Collection[SearchNode]) -> None:
        """Compute the probabilities after ``nodes`` that are missing, in one decode if there is room."""
        lacking = [node for node in nodes if node not in self._rows]
        for node in list(self._rows)[: max(0, len(self._rows) - self._n_rows)]:
            if node not in nodes and node is not self._tree.root:
                del self._rows[node]
        if lacking:
            for node in lacking:  # a node whose row was dropped may still have a sequence
                self._frontier.release(node)
            try:
                rows = self._frontier.advance(
                    lacking, lambda _, sequence: Following(sequence), keep=True
                )
            except DecodeInterruptedError as error:
                self.is_over = self._tree.was_cancelled(error)
                return
            self._rows.update(zip(lacking, rows, strict=True))
        self.is_over = self._tree.end_step()
