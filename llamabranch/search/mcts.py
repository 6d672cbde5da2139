"""Monte Carlo tree search over texts, as a loop (``tree_search``) or step by step (``TreeSearch``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..arguments import bounded, choice, finite, function, whole
from ..branch import Branch
from ..errors import ConfigError, DecodeInterruptedError, UsageError
from ..generation.output import SegmentEnd
from ..model import stop_strings
from ..speculative import Drafter
from .checks import MOST_STEPS, MOST_TEXTS, check_start, first_seed, token_limit
from .node import SearchNode
from .result import SearchResult
from .samples import Sample, Samples
from .tree import OnStep

__all__ = ["Expand", "TreeSearch", "tree_search"]

Expand = Callable[[str], Sequence[str]]


class _State:
    """The record of a text in the tree."""

    def __init__(self, text: Sample, prior: float) -> None:
        self.text = text
        self.prior = prior
        self.moves: list[_State] | None = None  # None: not expanded yet
        self.total = 0.0
        self.n_values = 0
        self.waiting: list[Sample] = []  # texts from ask() without a value yet, oldest first
        self.best: tuple[float, Sample] | None = None

    @property
    def node(self) -> SearchNode:
        return self.text.node


class TreeSearch:
    """A tree search with two steps: ``ask`` for texts to evaluate, and ``tell`` it their values.

    The tree is walked down by PUCT (Silver et al. 2017): to the child with the largest
    mean value + exploration x prior x sqrt(visits of the parent) / (1 + visits). The prior of a move is
    its probability under the model, relative to its siblings. A child without values has the mean value
    of its parent. It is a context manager, which frees its sequences at its end.

    Args:
        branch: a branch that has read the prompt; it does not change.
        expand: a function that gets a text, without the prompt, and returns its moves: a list of texts
            that may follow it; [] = the text is final. Or an int N: the moves are N samples from the
            model, each up to ``step``.
        exploration: the weight of the prior relative to the values seen so far.
        prior: "model", or "uniform" = equal for all moves from a text, for example if the model finds
            good moves improbable. Sampled moves always have equal priors.
        step: where a sampled move ends: after a token that completes this string, or after N tokens.
        max_tokens: the most tokens of a text; a text of this length is final.
        rollout_tokens: the most tokens the model adds to a text before it is evaluated; 0 = none.
        stop: strings that end a text.
        seed: the seed of all draws; None = the branch's.
        drafter: proposes tokens for moves and rollouts; it changes no text.
        on_step: called after each decode of samples with the statistics so far; if it returns true, the
            search ends.

    Raises:
        ConfigError: a value out of range. BranchStateError, SequencesExhaustedError.

    Attributes:
        lines: the `SearchTree` of the search; ``lines.root`` is its root.
    """

    def __init__(
        self,
        branch: Branch,
        expand: Expand | int = 3,
        *,
        exploration: float = 1.4,
        prior: str = "model",
        step: str | int = "\n",
        max_tokens: int = 256,
        rollout_tokens: int = 0,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        drafter: Drafter | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        check_start(branch, on_step, drafter)
        if not callable(expand):
            expand = whole("expand", expand, 1, MOST_TEXTS)
        self._exploration = bounded("exploration", exploration, 0, 1e9)
        choice("prior", prior, ("model", "uniform"))
        self._is_uniform = prior == "uniform"
        self._boundary = SegmentEnd.of(step)
        self._max_tokens = whole("max_tokens", token_limit(max_tokens), 1)
        self._rollout_tokens = whole("rollout_tokens", token_limit(rollout_tokens), 0)
        self._seed = first_seed(branch, seed)
        self._expand = expand
        self._samples = Samples(
            branch, on_step, self._seed, self._max_tokens, stop_strings(stop), drafter
        )
        self.lines = self._samples.tree
        self._n_drawn = 0
        self._root = _State(self._samples.start(0), 1.0)
        self._states = {self.lines.root: self._root}

    def __enter__(self) -> TreeSearch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free every sequence. Idempotent."""
        self._samples.close()

    # -- ask and tell ------------------------------------------------------------------------------

    def ask(self, n: int = 1) -> list[tuple[SearchNode, str]]:
        """Return ``n`` texts to evaluate, each with its node for ``tell``; their rollouts share decodes.

        Each text is a leaf of the tree or a final text, with the tokens that a rollout added. Until its
        value is known it counts as a visit, so that the texts of one call differ. A final text may still
        be returned again. There are fewer texts if a decode was interrupted and ``on_step`` ended the
        search.
        """
        pairs = []
        for _ in range(whole("n", n, 1, MOST_TEXTS)):
            try:
                state = self._descend()
            except DecodeInterruptedError as error:
                self.lines.was_cancelled(error)
                break
            text = state.text
            if self._rollout_tokens and not text.is_finished and state.moves != []:
                text = self._samples.fork(text, self._next_number())
            state.waiting.append(text)
            for node in (self.lines.root, *state.node.path):
                node.n_visits += 1
            pairs.append((state, text))
        running = [text for state, text in pairs if text is not state.text]
        if running:
            self._samples.run(running, SegmentEnd(n_tokens=self._rollout_tokens))
            for text in running:
                self._samples.end(text, "length")
        return [(state.node, text.output.text) for state, text in pairs]

    def tell(self, node: SearchNode, value: float) -> None:
        """Report the value of a text from ``ask``; several texts of one node in the same order.

        Raises:
            UsageError: ``ask`` did not return this node, or all its values are known. ConfigError: the
                value is not finite.
        """
        value = finite("the value", value)
        state = self._states.get(node) if isinstance(node, SearchNode) else None
        if state is None or not state.waiting:
            raise UsageError("tell() needs a node that ask() returned, once for each time it did")
        text = state.waiting.pop(0)
        if state.best is None or value > state.best[0]:
            state.best = value, text
        for above in (self.lines.root, *node.path):
            known = self._states.get(above)
            if known is not None:
                known.total += value
                known.n_values += 1
                above.score = known.total / known.n_values

    def result(self, n: int = 1) -> SearchResult:
        """Return the ``n`` texts with the highest values; ``score`` is the value."""
        evaluated = [state.best for state in self._states.values() if state.best is not None]
        evaluated.sort(key=lambda pair: -pair[0])
        best = evaluated[: whole("n", n, 1, MOST_TEXTS)]
        hypotheses = []
        for value, text in best:
            mean = text.node.score
            hypothesis = text.hypothesis(value)
            if text.node in self._states:
                text.node.score = mean  # still the mean of all values below it
            if text.output.finish_reason is None:
                hypothesis = replace(hypothesis, finish_reason="length")
            text.node.status = "finished"
            hypotheses.append(hypothesis)
        self.lines.root.prune_open()
        return SearchResult(hypotheses, self.lines.stats, self.lines.root)

    # -- the tree ----------------------------------------------------------------------------------

    def _descend(self) -> _State:
        """Return the next text to evaluate; expand nodes that were evaluated before."""
        state = self._root
        while not state.text.is_finished:
            if state.moves is None:
                if state is not self._root and not state.node.n_visits:
                    break
                state.moves = self._grow(state)
            if not state.moves:
                break
            mean = state.total / state.n_values if state.n_values else 0.0
            visits = math.sqrt(max(1, state.node.n_visits))

            def worth(move: _State, mean: float = mean, visits: float = visits) -> float:
                value = move.total / move.n_values if move.n_values else mean
                return value + self._exploration * move.prior * visits / (1 + move.node.n_visits)

            state = max(state.moves, key=worth)  # the first, if several are equal
        return state

    def _grow(self, state: _State) -> list[_State]:
        """Return the moves from a text."""
        if callable(self._expand):
            moves = self._given(state, self._expand(state.text.output.text))
        else:
            moves = self._sampled(state, self._expand)
        for move in moves:
            self._states[move.node] = move
        return moves

    def _sampled(self, state: _State, n: int) -> list[_State]:
        """Sample ``n`` moves and merge equal ones. All have the same prior, since the model drew them."""
        texts = [self._samples.fork(state.text, self._next_number()) for _ in range(n)]
        self._samples.run(texts, self._boundary)
        different: dict[tuple[int, ...], Sample] = {}
        for text in texts:
            different.setdefault(text.node.tokens, text)
        return [_State(text, 1.0 / len(different)) for text in different.values()]

    def _given(self, state: _State, moves: Sequence[str]) -> list[_State]:
        """Score the moves that the user gives, all in one decode."""
        if (
            isinstance(moves, str)
            or not isinstance(moves, Sequence)
            or any(not isinstance(move, str) or not move for move in moves)
        ):
            raise ConfigError("expand must return a list of texts that are not empty")
        model = self.lines.ctx.model
        tokens = [model.tokenize(move, add_special=False) for move in dict.fromkeys(moves)]
        if not tokens:
            return []
        paths = self._samples.given(state.text, tokens)
        weights = [0.0 if self._is_uniform else path[-1].logprob for path in paths]
        top = max(weights)
        total = math.fsum(math.exp(weight - top) for weight in weights)
        states = []
        for path, weight in zip(paths, weights, strict=True):
            text = self._samples.fork(state.text, 0)
            text.follow(path)
            states.append(_State(text, math.exp(weight - top) / total))
        return states

    def _next_number(self) -> int:
        self._n_drawn += 1
        return self._n_drawn


def tree_search(
    branch: Branch,
    reward: Callable[[str], float],
    iterations: int = 64,
    *,
    expand: Expand | int = 3,
    n: int = 1,
    parallel: int = 4,
    enough: float | None = None,
    exploration: float = 1.4,
    prior: str = "model",
    step: str | int = "\n",
    max_tokens: int = 256,
    rollout_tokens: int = 0,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
    drafter: Drafter | None = None,
    on_step: OnStep | None = None,
) -> SearchResult:
    """Search for the text with the highest reward by Monte Carlo tree search.

    Args:
        branch: a branch that has read the prompt; it does not change.
        reward: the value of a text, without the prompt; values between 0 and 1 suit ``exploration``.
        iterations: how many texts are evaluated.
        expand, exploration, prior, step, max_tokens, rollout_tokens, stop, seed, drafter, on_step: as for
            `TreeSearch`; ``on_step`` is also called after each group of ``parallel`` rewards.
        n: how many texts to return.
        parallel: how many texts are evaluated together; their rollouts share decodes.
        enough: end as soon as a text has this reward.

    Returns:
        the texts with the highest rewards; ``score`` is the reward. In the tree, ``score`` is the mean of
        all rewards below a node and ``n_visits`` their number.

    Raises:
        ConfigError: a value out of range, or a reward that is not finite. What ``reward`` or ``expand``
        raises; BranchStateError, CapacityError, DecodeError: the search frees its sequences.
    """
    iterations = whole("iterations", iterations, 1, MOST_STEPS)
    parallel = whole("parallel", parallel, 1, MOST_TEXTS)
    n = whole("n", n, 1, MOST_TEXTS)
    enough = math.inf if enough is None else bounded("enough", enough, -math.inf, math.inf)
    function("reward", reward)
    with TreeSearch(
        branch,
        expand,
        exploration=exploration,
        prior=prior,
        step=step,
        max_tokens=max_tokens,
        rollout_tokens=rollout_tokens,
        stop=stop,
        seed=seed,
        drafter=drafter,
        on_step=on_step,
    ) as search:
        best = -math.inf
        while iterations > 0 and best < enough and not search.lines.is_cancelled:
            asked = search.ask(min(parallel, iterations))
            iterations -= len(asked)
            for node, text in asked:
                value = reward(text)
                search.tell(node, value)
                best = max(best, value)
            search.lines.report()
        return search.result(n)
