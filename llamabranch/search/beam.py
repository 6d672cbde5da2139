"""Beam search, token for token like Hugging Face's ``generate(num_beams=...)``."""

from __future__ import annotations

from collections.abc import Sequence

from ..arguments import bounded, whole
from ..branch import Branch
from ..errors import ConfigError, DecodeInterruptedError
from ..model import stop_strings
from .beams import Beams, Candidate
from .checks import MOST_TEXTS, check_start, token_limit
from .frontier import Frontier
from .node import SearchNode
from .result import Hypothesis, SearchResult
from .scores import BestScores, Scored
from .texts import completes_stop, hypothesis
from .tree import OnStep

__all__ = ["beam_search"]


def beam_search(
    branch: Branch,
    beams: int = 4,
    max_tokens: int = 64,
    *,
    n: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    stop: str | Sequence[str] = (),
    on_step: OnStep | None = None,
) -> SearchResult:
    """Return the most probable continuations found by a beam search.

    A beam's score is the sum of the model's log-probabilities after the branch's logit bias, grammar and
    penalties, without renormalisation; temperature and truncation are ignored. The final score is that
    sum divided by (number of tokens, including EOG) ** ``length_penalty``. If there are enough sequences,
    each token costs one decode for all beams; the first token costs none.

    Args:
        branch: a branch that has read the prompt; it does not change.
        beams: the number of beams.
        max_tokens: the most tokens of a text, including EOG; beams that reach it are finished.
        n: how many hypotheses to return, at most ``beams``.
        length_penalty: positive values favour long texts, negative ones short texts; from -32 to 32.
        early_stopping: True = end when ``beams`` texts are finished; False = end also when the best
            running beam, with its score at its present length, is no better than the worst finished text;
            "never" = end only when no running beam can become better. Textbook beam search is "never"
            with ``length_penalty`` 0.
        stop: strings that end a text, like an EOG token.
        on_step: called after each token with the statistics so far. If it returns true, the search ends
            with the best texts so far, including running beams as "cancelled".

    Raises:
        ConfigError: a value out of range. BranchStateError, SequencesExhaustedError, CacheFullError,
        DecodeError: the search frees its sequences.
    """
    check_start(branch, on_step)
    beams = whole("beams", beams, 1, MOST_TEXTS)
    max_tokens = whole("max_tokens", token_limit(max_tokens), 1)
    n = whole("n", n, 1, beams)
    # These bounds ensure that a power of a length neither overflows nor becomes 0.
    length_penalty = bounded("length_penalty", length_penalty, -32, 32)
    if not isinstance(early_stopping, (bool, str)) or early_stopping not in (True, False, "never"):
        raise ConfigError(f"early_stopping must be True, False or 'never', not {early_stopping!r}")
    stop = stop_strings(stop)
    with Frontier(branch, on_step) as frontier:
        n_eog = len(branch.ctx.model.eog_tokens)
        selection = Beams(beams, n_eog, max_tokens, length_penalty, early_stopping)
        search = _Search(frontier, selection, length_penalty, max_tokens, stop)
        search.run()
        hypotheses = search.hypotheses()[:n]
    tree = frontier.tree
    for node in tree.root.walk():
        if node.status == "finished" and all(h.node is not node for h in hypotheses):
            node.status = "pruned"
    tree.root.prune_open()
    return SearchResult(hypotheses, tree.stats, tree.root)


class _Search:
    """One beam search."""

    def __init__(
        self,
        frontier: Frontier,
        beams: Beams,
        length_penalty: float,
        max_tokens: int,
        stop: Sequence[str],
    ) -> None:
        self._frontier = frontier
        self._tree = frontier.tree
        self._beams = beams
        self._length_penalty = length_penalty
        self._max_tokens = max_tokens
        self._stop = stop
        self._best_scores = BestScores(beams.n_kept)
        self._running: list[SearchNode] = [frontier.tree.root]
        self._reasons: dict[SearchNode, str] = {}

    def run(self) -> None:
        tree = self._tree
        with tree.ctx.lock:
            continuations = [self._best_scores(tree.branch.sequence)]
        for n_tokens in range(1, self._max_tokens + 1):
            self._choose(continuations, n_tokens)
            if tree.end_step() or not self._running:
                return
            try:
                continuations = self._frontier.advance(
                    self._running, lambda _, sequence: self._best_scores(sequence)
                )
            except DecodeInterruptedError as error:
                tree.was_cancelled(error)
                return

    def _choose(self, continuations: Sequence[Scored], n_tokens: int) -> None:
        """Choose the next beams."""
        beams = self._beams
        chosen = beams.choose([scored.best for scored in continuations])
        nodes = self._nodes(continuations, chosen, n_tokens)
        stops = [self._stops(node, n_tokens) for node in nodes]
        running = beams.advance(chosen, stops, nodes)
        self._running = [] if beams.is_done else [nodes[i] for i in running]

    def _nodes(
        self, continuations: Sequence[Scored], chosen: Sequence[Candidate], n_tokens: int
    ) -> list[SearchNode]:
        nodes = []
        for score, beam, token in chosen:
            logprob = continuations[beam].logprobs[token]
            nodes.append(self._tree.child(self._running[beam], [token], [logprob]))
            nodes[-1].score = score / n_tokens**self._length_penalty
        return nodes

    def _stops(self, node: SearchNode, n_tokens: int) -> bool:
        """Return whether the text ends at ``node``, and remember why."""
        if self._tree.ctx.model.is_eog(node.tokens[0]) or completes_stop(node, self._stop):
            self._reasons[node] = "stop"
        elif n_tokens == self._max_tokens:
            self._reasons[node] = "length"
        return node in self._reasons

    def hypotheses(self) -> list[Hypothesis]:
        """Return all finished beams, best first; and those still running, if the search was cancelled."""
        ended = [(f.final, f.key) for f in self._beams.finished if isinstance(f.key, SearchNode)]
        if self._tree.is_cancelled:
            running = [(node.score, node) for node in self._running if node.tokens]
            ended += sorted(running, key=lambda pair: -pair[0])
        model = self._tree.ctx.model
        return [
            hypothesis(model, node, self._stop, score, self._reasons.get(node, "cancelled"))
            for score, node in ended
        ]
