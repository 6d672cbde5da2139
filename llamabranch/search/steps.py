"""Search step by step, guided by a reward: beams, independent trees, REBASE, particles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ..arguments import bounded, choice, finite, function, real, whole
from ..branch import Branch
from ..errors import ConfigError
from ..model import stop_strings
from ..sampling.noise import RULE, uniform
from ..speculative import Drafter
from .checks import MOST_STEPS, MOST_TEXTS, check_start, first_seed, token_limit
from .continuations import Boundary, Continuation, Continuations, numbered, slot_seed
from .resampling import ancestors
from .result import SearchResult
from .sequences import OnStep, SearchSequences

__all__ = ["STEP_METHODS", "step_search"]

STEP_METHODS = ("beam", "dvts", "rebase", "particles")
_TEMPERATURES = {"rebase": 0.2, "particles": 1.0}

Scored = list[tuple[Continuation, float]]
Counts = list[tuple[Continuation, int]]


def step_search(
    branch: Branch,
    reward: Callable[[str], float],
    n: int = 4,
    *,
    method: str = "beam",
    beam_width: int = 4,
    max_steps: int = 40,
    step: str | int = "\n\n",
    entropy: float | None = None,
    temperature: float | None = None,
    max_tokens: int | None = 512,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
    drafter: Drafter | None = None,
    on_step: OnStep | None = None,
) -> SearchResult:
    """Sample texts step by step and let a reward decide, after each step, which go on.

    In each iteration ``n`` texts are sampled up to the next boundary, in shared decodes; then ``reward``
    is asked about each. The last iteration samples to the end.

    Args:
        branch: has read the prompt; it is left as it is.
        reward: of a text, without the prompt, finished or not; higher is better.
        n: how many texts are sampled in each iteration.
        method: what goes on.
            "beam": the ``n / beam_width`` best, each as often as fits into ``n``.
            "dvts": in each of ``n / beam_width`` independent trees the best of its ``beam_width``
            (diverse verifier tree search, Beeching et al. 2024).
            "rebase": each text, as often as its share of exp(reward / ``temperature``), rounded up, best
            first; finished texts lower the width (Wu et al. 2024, 2408.00724).
            "particles": texts are resampled by weights exp(reward / ``temperature``), finished ones too
            (Puri et al. 2025, 2502.01618, with systematic resampling).
        beam_width: for "beam" and "dvts"; must divide ``n``.
        max_steps: the most iterations.
        step: where a step ends: after a token that completes this string, or after N tokens.
        entropy: instead of ``step``: a step ends before a token whose distribution under the model has
            more entropy than this, nats, so that texts part where the model is uncertain (Li et al.
            2025, 2503.21961).
        temperature: of the rewards; default 0.2 for "rebase", 1 for "particles".
        max_tokens: the most tokens of a text.
        stop, seed, drafter, on_step: as for ``best_of_n``. One text is that of ``branch.generate``.

    Returns:
        the finished texts, best reward first; ``score`` is the reward.

    Raises:
        ConfigError: a value out of range, or a reward that is no finite number. What ``reward`` raises;
        BranchStateError, CapacityError, DecodeError: all sequences are returned.
    """
    check_start(branch, on_step, drafter)
    function("reward", reward)
    n = whole("n", n, 1, MOST_TEXTS)
    stop, seed = stop_strings(stop), first_seed(branch, seed)
    chooser = _Chooser(method, n, beam_width, temperature, seed)
    max_tokens = token_limit(max_tokens)
    max_steps = whole("max_steps", max_steps, 1, MOST_STEPS)
    boundary = (
        Boundary.of(step)
        if entropy is None
        else Boundary(entropy=bounded("entropy", entropy, 0.0, math.inf))
    )

    def score_of(line: Continuation) -> float:
        found = finite("what reward returns", reward(line.output.text))
        line.node.score = found
        return found

    with SearchSequences(branch, on_step) as sequences, Continuations(sequences, drafter) as texts:
        group = numbered(sequences.root, range(n), max_tokens, stop, seed)
        done: Scored = []
        for iteration in range(max_steps):
            running = [line for line in group if not line.is_finished]
            texts.run(running, None if iteration + 1 == max_steps else boundary)
            scored = [(line, score_of(line)) for line in group]
            if sequences.is_cancelled or all(line.is_finished for line in group):
                done += scored
                break
            counts, ended = chooser.choose(scored, iteration, len(done))
            done += ended
            at = (iteration + 1) * n  # the number of the next draw
            chosen: list[Continuation] = []
            for line, count in counts:
                chosen += _copies(line, count, seed, at + len(chosen))
            group = chosen
            sequences.retain({line.node for line in group})
            if not group:
                break
    return _result(sequences, done)


class _Chooser:
    """Which texts go on after a step, and how often each; arguments and errors as for `step_search`."""

    def __init__(
        self, method: str, n: int, beam_width: int, temperature: float | None, seed: int
    ) -> None:
        choice("method", method, STEP_METHODS)
        beam_width = whole("beam_width", beam_width, 1, MOST_TEXTS)
        if method in ("beam", "dvts") and n % beam_width:
            raise ConfigError(
                f"n ({n}) must be a multiple of beam_width ({beam_width})",
                hint="n / beam_width texts go on after each step",
            )
        default = _TEMPERATURES.get(method, 1.0)
        self._temperature = real("temperature", default if temperature is None else temperature)
        if not 0 < self._temperature < math.inf:
            raise ConfigError(f"temperature must be finite and above 0, not {self._temperature!r}")
        self._method, self._n, self._beam_width, self._seed = method, n, beam_width, seed
        self._trees = [slot // beam_width for slot in range(n)]

    def choose(self, scored: Scored, iteration: int, n_done: int) -> tuple[Counts, Scored]:
        """Return how often each text goes on, and the texts that have ended."""
        if self._method == "particles":
            return _resampled(scored, self._temperature, self._seed, iteration), []
        if self._method == "dvts":
            counts, self._trees, ended = _best_of_trees(scored, self._trees, self._beam_width)
            return counts, ended
        ended = [pair for pair in scored if pair[0].is_finished]
        running = [pair for pair in scored if not pair[0].is_finished]
        if self._method == "beam":
            return _beam_counts(running, self._n, self._beam_width), ended
        return rebase_counts(running, self._n - n_done - len(ended), self._temperature), ended


def _result(sequences: SearchSequences, done: Scored) -> SearchResult:
    hypotheses = [line.hypothesis(score) for line, score in done]
    hypotheses.sort(key=lambda h: -h.score)  # of equals, the one that was finished first
    chosen_nodes = {h.node for h in hypotheses}
    for node in sequences.root.walk():
        if node is not sequences.root and not node.children:
            node.status = "finished" if node in chosen_nodes else "pruned"
    sequences.root.prune_open()
    return SearchResult(hypotheses, sequences.stats, sequences.root)


def _copies(line: Continuation, count: int, seed: int, index: int) -> list[Continuation]:
    """Return ``line``, and copies of it whose seeds are number ``index`` + 1, ... of the search."""
    return [line, *(line.fork(slot_seed(seed, index + i)) for i in range(1, count))]


def _best_of_trees(
    scored: Scored, trees: list[int], beam_width: int
) -> tuple[Counts, list[int], Scored]:
    """Return the best text of each tree that goes on, the trees of its copies, and those that ended."""
    counts: Counts = []
    kept: list[int] = []
    ended: Scored = []
    for tree in dict.fromkeys(trees):
        members = [pair for pair, of in zip(scored, trees, strict=True) if of == tree]
        best = max(members, key=lambda pair: pair[1])  # of equals, the first
        if best[0].is_finished:
            ended.append(best)
        else:
            counts.append((best[0], beam_width))
            kept += [tree] * beam_width
    return counts, kept, ended


def _beam_counts(scored: Scored, n: int, beam_width: int) -> Counts:
    """Return the best texts, and how often each goes on: in turn, until there are ``n``."""
    best = sorted(scored, key=lambda pair: -pair[1])[: n // beam_width]
    counts = [n // len(best) + (i < n % len(best)) for i in range(len(best))] if best else []
    return [(line, count) for (line, _), count in zip(best, counts, strict=True)]


def rebase_counts(scored: Scored, width: int, temperature: float) -> Counts:
    """Share ``width`` among the texts by exp(reward / temperature), each time rounded up."""
    ranked = sorted(scored, key=lambda pair: -pair[1])
    if not ranked:
        return []
    best = ranked[0][1]
    shares = [math.exp((score - best) / temperature) for _, score in ranked]
    found = []
    for i, (line, _) in enumerate(ranked):
        total = math.fsum(shares[i:])
        count = min(width, math.ceil(width * shares[i] / total)) if total > 0 else 0
        if count > 0:
            found.append((line, count))
            width -= count
    return found


def _resampled(scored: Scored, temperature: float, seed: int, iteration: int) -> Counts:
    """Resample all texts by exp(reward / temperature)."""
    scores = np.array([score for _, score in scored])
    with np.errstate(over="ignore"):  # to -inf
        weights = np.exp((scores - scores.max()) / temperature)
    weights /= weights.sum()
    chosen = ancestors("systematic", weights, lambda i: uniform(seed, iteration, RULE, i))
    return [(scored[i][0], chosen.count(i)) for i in dict.fromkeys(chosen)]
