"""Sample several texts and keep the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from ..arguments import function, real, whole
from ..branch import Branch
from ..errors import ConfigError
from ..model import stop_strings
from ..model.thoughts import answer_in
from ..request.result import EngineStats, Result
from .result import SearchResult
from .samples import hypothesis, logprobs, sample
from .start import MOST_TEXTS, check_start, first_seed, token_limit


def best_of_n(
    branch: Branch,
    n: int = 8,
    max_tokens: int | None = 128,
    *,
    reward: Callable[[str], float] | None = None,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
) -> SearchResult:
    """Sample ``n`` texts with the settings of ``branch`` and return all of them, best first.

    They share the prompt and every decode. ``branch.generate`` gives the first text. Each text
    depends only on the seed and on its number.

    Args:
        branch: a branch that has read the prompt; it does not change.
        n: how many texts.
        max_tokens: the token limit of each; None = until the model ends it or the cache is full.
        reward: a function of the text that returns its score; None = the mean log-probability of its
            tokens under the model itself, before any sampling settings.
        stop: strings that end a text.
        seed: the seed of the draws; None = the branch's.

    Raises:
        ConfigError: a value is out of range. BranchStateError, CapacityError, DecodeError, and errors
        of ``reward``: the search has freed its sequences.
    """
    n = whole("n", n, 1, MOST_TEXTS)
    max_tokens = token_limit(max_tokens)
    if reward is not None:
        function("reward", reward)
    stop = stop_strings(stop)

    def score_of(text: Result) -> float:
        if reward is None:
            return fmean(logprobs(text) or [0.0])
        number = real("what reward returns", reward(answer_in(branch.ctx.model, text.text)))
        if number != number:
            raise ConfigError("reward returned NaN")
        return number

    check_start(branch)
    seed, stats = first_seed(branch, seed), EngineStats()
    texts = sample(branch, stats, n, seed, max_tokens, stop)
    hypotheses = [hypothesis(text, score_of(text)) for text in texts]
    hypotheses.sort(key=lambda h: -h.score)  # among equal scores, the earlier text comes first
    return SearchResult(hypotheses, stats)
