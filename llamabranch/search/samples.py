"""Texts that are sampled together: they continue one branch and share decodes.

A text depends only on its seed and on the text before it. So it does not matter which texts share a
decode, or which of them had to wait. Nothing is drafted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..branch import Branch
from ..errors import CapacityError
from ..request.request import Request
from ..request.result import EngineStats, Result
from ..run.client import Client
from ..run.drafting import Drafting
from ..run.job import Job
from .result import Hypothesis


def logprobs(text: Result) -> list[float]:
    """Return log p of each token of a text, including an EOG token that ended it, nats."""
    end = text.end
    return [produced.logprob for produced in (*text.emitted, *([] if end is None else [end]))]


def hypothesis(text: Result, score: float) -> Hypothesis:
    """Return a text as the result of a search."""
    return Hypothesis(text.tokens, text.text, math.fsum(logprobs(text)), score, text.finish_reason)


def sample(
    branch: Branch,
    stats: EngineStats,
    n: int,
    seed: int,
    max_tokens: int | None,
    stop: Sequence[str],
    *,
    parallel: int | None = None,
    is_decided: Callable[[Sequence[Result]], bool] = lambda _: False,
) -> list[Result]:
    """Sample ``n`` texts from a branch until all have ended, or the search is decided.

    Args:
        stats: the cost, which is counted here.
        seed: the seed of text number 0; the seeds of other texts are derived from it.
        n, max_tokens, stop: as for `best_of_n`.
        parallel: how many texts may run at a time; None = as many as there are sequences.
        is_decided: called with the texts that have ended in a step; if it returns True, the others end
            as "cancelled".

    Returns:
        the texts, in the order of their numbers.

    Raises:
        DecodeError, and errors of ``is_decided``: all sequences have been freed.
    """
    client = Client(Drafting(branch.ctx), stats, parallel, max_tokens=max_tokens)
    request = Request("", n=n, stop=stop, sampling=branch.sampling.replace(seed=seed))
    client.queue(Job(request, "", client, seed, reports_tokens=False, beginning=branch.sequence))
    texts: dict[int, Result] = {}
    is_over = False
    try:
        while client.has_unfinished:
            ended = [event.result for event in client.step() if event.result is not None]
            ended.sort(key=lambda text: text.sample)
            texts |= {text.sample: text for text in ended}
            for text in ended:
                if text.error is not None and not isinstance(text.error, CapacityError):
                    raise text.error
            if not is_over and is_decided(ended):
                client.abort("")
                is_over = True
    finally:
        client.close()
    return [texts[number] for number in sorted(texts)]
