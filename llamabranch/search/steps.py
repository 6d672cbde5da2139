"""Search step by step, guided by a reward: the best texts so far are continued."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..arguments import bounded, finite, function, whole
from ..branch import Branch
from ..errors import ConfigError
from ..generation.output import SegmentEnd
from ..model import stop_strings
from ..speculative import Drafter
from .checks import MOST_STEPS, MOST_TEXTS, check_start, first_seed, token_limit
from .result import SearchResult
from .samples import Sample, Samples
from .tree import OnStep, SearchTree

__all__ = ["step_search"]

Scored = list[tuple[Sample, float]]


def step_search(
    branch: Branch,
    reward: Callable[[str], float],
    n: int = 4,
    *,
    beam_width: int = 4,
    max_steps: int = 40,
    step: str | int = "\n\n",
    entropy: float | None = None,
    max_tokens: int | None = 512,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
    drafter: Drafter | None = None,
    on_step: OnStep | None = None,
) -> SearchResult:
    """Sample texts step by step; after each step a reward decides which are continued.

    In each iteration ``n`` texts are sampled up to the next boundary, in shared decodes, and ``reward``
    is called for each. The best ``n / beam_width`` texts are continued, each ``beam_width`` times. The
    last iteration samples to the end.

    Args:
        branch: a branch that has read the prompt; it does not change.
        reward: a function of a text without the prompt, finished or not; higher is better.
        n: how many texts are sampled in each iteration.
        beam_width: how often each of the best texts is continued; it must divide ``n``.
        max_steps: the most iterations.
        step: where a step ends: after a token that completes this string, or after N tokens.
        entropy: instead of ``step``: a step ends before a token whose distribution under the model has
            more entropy than this, nats, so that texts part where the model is uncertain (Li et al.
            2025, 2503.21961).
        max_tokens: the most tokens of a text.
        stop, seed, drafter, on_step: as for ``best_of_n``. With ``n=1`` the text equals that of
            ``branch.generate``.

    Returns:
        the finished texts, best reward first; ``score`` is the reward.

    Raises:
        ConfigError: a value is out of range, or a reward is not a finite number. Errors of ``reward``;
        BranchStateError, CapacityError, DecodeError: the search frees its sequences.
    """
    check_start(branch, on_step, drafter)
    function("reward", reward)
    n = whole("n", n, 1, MOST_TEXTS)
    stop, seed = stop_strings(stop), first_seed(branch, seed)
    beam_width = whole("beam_width", beam_width, 1, MOST_TEXTS)
    if n % beam_width:
        raise ConfigError(
            f"n ({n}) must be a multiple of beam_width ({beam_width})",
            hint="n / beam_width texts are continued after each step",
        )
    max_tokens = token_limit(max_tokens)
    max_steps = whole("max_steps", max_steps, 1, MOST_STEPS)
    boundary = (
        SegmentEnd.of(step)
        if entropy is None
        else SegmentEnd(entropy=bounded("entropy", entropy, 0.0, math.inf))
    )

    def score_of(line: Sample) -> float:
        score = finite("what reward returns", reward(line.output.text))
        line.node.score = score
        return score

    with Samples(branch, on_step, seed, max_tokens, stop, drafter) as texts:
        group = [texts.start(number) for number in range(n)]
        done: Scored = []
        for iteration in range(max_steps):
            running = [line for line in group if not line.is_finished]
            texts.run(running, None if iteration + 1 == max_steps else boundary)
            scored = [(line, score_of(line)) for line in group]
            if texts.tree.is_cancelled or all(line.is_finished for line in group):
                done += scored
                break
            done += [pair for pair in scored if pair[0].is_finished]
            best = [pair for pair in scored if not pair[0].is_finished]
            best = sorted(best, key=lambda pair: -pair[1])[: n // beam_width]
            at = (iteration + 1) * n  # the number of the next draw
            going_on = [line for line, _ in best]
            for line in group:
                if not line.is_finished and line not in going_on:
                    texts.end(line, "rejected")
            group = []
            for i, line in enumerate(going_on):
                n_copies = n // len(best) + (i < n % len(best)) - 1
                first = at + len(group) + 1
                group += [line, *(texts.fork(line, first + k) for k in range(n_copies))]
            if not group:
                break
    return _result(texts.tree, done)


def _result(tree: SearchTree, done: Scored) -> SearchResult:
    hypotheses = [line.hypothesis(score) for line, score in done]
    hypotheses.sort(key=lambda h: -h.score)  # among equals, the one that finished first
    chosen_nodes = {h.node for h in hypotheses}
    for node in tree.root.walk():
        if node is not tree.root and not node.children:
            node.status = "finished" if node in chosen_nodes else "pruned"
    tree.root.prune_open()
    return SearchResult(hypotheses, tree.stats, tree.root)
