"""Texts that are sampled together: jobs of one scheduler, which continue one branch.

A text depends only on its seed and on the text before it. So it does not matter which texts share a
decode, which of them had to wait, or whether they are drafted. The acceptance rule is always "seeded".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from ..branch import Branch
from ..errors import CapacityError
from ..native.interrupts import HeldInterrupts
from ..request.request import EngineStats, Request
from ..run.core import EngineCore
from ..run.job import Job, State, Submission
from ..run.loop import Loop
from ..speculative import Drafter, SpeculativeConfig
from .result import Hypothesis, SearchStats

__all__ = ["hypothesis", "logprobs", "sample"]


def logprobs(job: Job) -> list[float]:
    """Return log p of the tokens of a text, with that of an EOG token that ended it, nats."""
    eog = job.output.eog
    return [produced.logprob for produced in (*job.output.emitted, *([] if eog is None else [eog]))]


def hypothesis(job: Job, score: float) -> Hypothesis:
    """Return a finished text as a result."""
    output = job.output
    return Hypothesis(
        list(output.tokens), output.text, math.fsum(logprobs(job)), score, str(output.finish_reason)
    )


def sample(
    branch: Branch,
    stats: SearchStats,
    n: int,
    seed: int,
    max_tokens: int | None,
    stop: Sequence[str],
    drafter: Drafter | None,
    *,
    parallel: int | None = None,
    is_decided: Callable[[list[Job]], bool] = lambda _: False,
) -> list[Job]:
    """Sample ``n`` texts from a branch until all have ended, or the search is decided.

    Args:
        stats: the cost; it is counted here.
        seed: the seed of text number 0; the seeds of other texts are derived from it.
        n, max_tokens, stop, drafter: as for `best_of_n`.
        parallel: the most texts that run at a time; None = as many as there are sequences.
        is_decided: called after each step with all texts; a true result ends the sampling and leaves
            the texts as they are.

    Raises:
        DecodeError, and errors of ``is_decided``: all sequences are freed.
    """
    loop = Loop(branch.ctx, drafter, SpeculativeConfig(rule="seeded"), batched=True)
    counted = EngineStats()
    core = EngineCore(loop, counted, parallel)
    beginning = loop.beginning(branch.sequence)
    submission = Submission(
        Request("", stop=stop), "", 0, loop, branch.sampling.replace(seed=seed), max_tokens, seed,
        (), reports_tokens=False, beginning=beginning,
    )  # fmt: skip
    jobs = [submission.job(number) for number in range(n)]
    for job in jobs:
        core.scheduler.add_job(job)
    # Each step holds interrupts. Around all of them this costs little: only the outermost block
    # changes the handler, which takes as long as other work of a step.
    try:
        with HeldInterrupts() as held:
            running = jobs
            while running and held.caught is None:
                core.step()
                stats.decodes = counted.target_forward_passes
                stats.tokens_decoded = core.n_decoded
                for job in running:
                    if job.error is not None and not isinstance(job.error, CapacityError):
                        raise job.error
                if held.let(partial(is_decided, jobs)):
                    break
                running = [job for job in running if job.state is not State.ENDED]
    finally:
        core.close()
        beginning.close()
    return jobs
