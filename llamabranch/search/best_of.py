"""Sample several texts and keep the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..arguments import function, real, whole
from ..branch import Branch
from ..errors import ConfigError
from ..model import stop_strings
from ..model.thoughts import answer_in
from ..run.job import Job
from ..speculative import Drafter
from .result import Hypothesis, SearchResult
from .samples import hypothesis, logprobs, sample
from .watch import MOST_TEXTS, OnStep, Watch, check_start, first_seed, token_limit

__all__ = ["best_of_n"]


def best_of_n(
    branch: Branch,
    n: int = 8,
    max_tokens: int | None = 128,
    *,
    score: str | Callable[[Hypothesis], float] = "mean",
    reward: Callable[[str], float] | None = None,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
    drafter: Drafter | None = None,
    on_step: OnStep | None = None,
) -> SearchResult:
    """Sample ``n`` texts with the settings of ``branch`` and return all of them, best first.

    They share the prompt and every decode. The first text equals that of ``branch.generate``. Each text
    depends only on the seed and on its number.

    Args:
        branch: a branch that has read the prompt; it does not change.
        n: how many texts.
        max_tokens: the most tokens of each; None = until the model ends it or the cache is full.
        score: "mean" = mean log-probability of the tokens, "sum" = their sum; or a function of a
            hypothesis. Log-probabilities are the model's own, before sampling settings.
        reward: a function of the text, instead of ``score``.
        stop: strings that end a text.
        seed: the seed of the draws; None = the branch's.
        drafter: proposes tokens; it changes no text.
        on_step: called after each decode with the statistics so far. If it returns true, the search ends,
            and unfinished texts are "cancelled".

    Raises:
        ConfigError: a value is out of range. Errors of ``score`` and ``reward``; BranchStateError,
        CapacityError, DecodeError: the search frees its sequences.
    """
    check_start(branch, on_step, drafter)
    n = whole("n", n, 1, MOST_TEXTS)
    max_tokens = token_limit(max_tokens)
    if not callable(score) and not (isinstance(score, str) and score in ("mean", "sum")):
        raise ConfigError(f"score must be 'mean', 'sum' or a function, not {score!r:.40}")
    if reward is not None:
        function("reward", reward)
        if score != "mean":
            raise ConfigError("use either score or reward")
    stop, seed = stop_strings(stop), first_seed(branch, seed)

    def score_of(job: Job) -> float:
        if reward is not None:
            return _number(reward(answer_in(branch.ctx.model, job.output.text)), "reward")
        if callable(score):
            return _number(score(hypothesis(job, float("nan"))), "score")
        scores = logprobs(job)
        return math.fsum(scores) / (max(1, len(scores)) if score == "mean" else 1)

    watch = Watch(branch, on_step)
    jobs = sample(branch, watch, n, seed, max_tokens, stop, drafter)
    hypotheses = [hypothesis(job, score_of(job)) for job in jobs]
    hypotheses.sort(key=lambda h: -h.score)  # among equal texts the earlier one comes first
    return SearchResult(hypotheses, watch.stats)


def _number(value: object, what: str) -> float:
    """Return the result of a user's function; ConfigError if it cannot be compared."""
    number = real(f"what {what} returns", value)
    if number != number:
        raise ConfigError(f"{what} returned NaN")
    return number
