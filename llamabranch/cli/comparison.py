"""``--compare``: time the same requests with and without drafts, and compare the times."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import llamabranch as lb
from llamabranch import Engine, Request, Result
from llamabranch.bench.timing import Interval, Maker, Series, Stopped, Timing, interleave

from .console import Console, interval_text
from .interrupts import InterruptHandler

NOTHING_DRAFTED = (
    "Inconclusive: nothing was drafted in the timed runs, so all of them are plain decoding."
)
MOST_PAIRS = 9  # with fewer pairs a single outlier would widen the 95 % interval


@dataclass(frozen=True)
class DraftComparison:
    """A comparison of decoding with and without drafts, for the same requests and seed.

    Attributes:
        drafted, plain: the timed runs with and without drafts.
        results, plain_results: the texts of the first run with and without drafts.
    """

    drafted: Series
    plain: Series
    results: Sequence[Result]
    plain_results: Sequence[Result]

    @property
    def speedup(self) -> float:
        """The median speed with drafts divided by that without; nan if no token was generated."""
        return self.drafted.rate.median / self.plain.rate.median

    @property
    def interval(self) -> Interval:
        """The 95 % interval of the speedup, from pairs of consecutive runs."""
        return self.drafted.interval(self.plain)

    @property
    def verdict(self) -> str:
        """ "faster", "slower" or "inconclusive"; "nothing drafted" if both were plain decoding."""
        drafts = any(result.stats.num_draft_tokens for result in self.results)
        return self.interval.verdict if drafts else "nothing drafted"

    @property
    def same_text(self) -> bool:
        """Whether the texts with and without drafts have the same tokens."""
        pairs = zip(self.results, self.plain_results, strict=True)
        return all(drafted.tokens == plain.tokens for drafted, plain in pairs)

    def as_dict(self) -> dict[str, object]:
        """Return the figures in JSON types."""
        return {
            "speedup": self.speedup,
            "speedup_interval": self.interval.as_dict(),
            "speedup_verdict": self.verdict,
            "same_text": self.same_text,
        }

    def print(self, console: Console) -> None:
        """Print the figures of the timed runs as a table."""
        n = self.interval.n
        console.line(f"timed again, {n} pair{'s' * (n != 1)} of runs")
        console.figures(
            {
                "tokens_per_s": self.drafted.rate.median,
                "plain_tokens_per_s": self.plain.rate.median,
                "speedup": self.speedup,
                "speedup, 95 % interval": interval_text(self.interval),
                "speedup_verdict": self.verdict,
                "same_text": self.same_text,
            }
        )

    def explain(self, shorter: str = ": generate less (-n)") -> str:
        """Return the speedup and what the verdict means. If drafting does not pay, advise.

        ``shorter`` is advice for runs that take too long to be repeated often enough.
        """
        interval, verdict = self.interval, self.verdict
        fast = f"drafting is {self.speedup:.2f} times as fast as plain decoding here"
        if verdict == "nothing drafted":
            return NOTHING_DRAFTED
        if verdict == "faster":
            return f"{fast.capitalize()}."
        if verdict == "slower":
            return f"{fast.capitalize()}: it does not pay; --draft-max auto, the default, stops it."
        why = f"the 95 % interval of {interval.n} pairs of runs is {interval_text(interval)}"
        if math.isnan(interval.low):
            why = f"fewer than 6 pairs of runs ({interval.n}) have no interval{shorter}"
        return (
            f"Inconclusive: {fast}, but {why}. Stop other programs on the machine, or measure "
            "several prompts with `llamabranch bench`."
        )


def compare(
    drafting: Engine,
    plain: Engine,
    requests: Sequence[Request],
    interrupts: InterruptHandler,
    *,
    budget_s: float = 60.0,
    progress: Callable[[str], None] = lambda text: None,
) -> DraftComparison | None:
    """Time decoding with and without drafts; return None if interrupted. The caller warms up.

    There are at most 9 pairs of runs; no pair begins after ``budget_s`` seconds.
    """
    results: dict[Engine, Sequence[Result]] = {}

    def maker(engine: Engine) -> Maker:
        def work(_: int) -> Timing:
            if interrupts.requested:
                raise Stopped
            before = engine.stats.elapsed_s
            texts = engine.generate(requests)
            results.setdefault(engine, texts)
            n_tokens = sum(len(result.tokens) for result in texts)
            return Timing(n_tokens, engine.stats.elapsed_s - before)

        return lambda _: work

    timings = interleave(
        {"drafted": maker(drafting), "plain": maker(plain)},
        n_runs=MOST_PAIRS, n_items=1, budget_s=budget_s,
        progress=lambda text: progress(text and f"comparing: {text.partition(',')[0]}"),
    )  # fmt: skip
    if interrupts.requested or not timings["plain"].runs:
        return None
    return DraftComparison(timings["drafted"], timings["plain"], results[drafting], results[plain])


def first_difference(
    ctx: lb.Context, found: DraftComparison, requests: Sequence[Request]
) -> dict[str, object] | None:
    """Return the first difference between a plain text and the drafted one; None if all are equal.

    ``position`` counts generated tokens from 0. ``tokens`` has the two tokens at that position: the
    one of plain decoding, then the drafted one. It has None for a text that has ended before.
    ``logprobs`` has the model's log-probabilities of these tokens in nats, or None if they cannot
    be computed, for example because the text does not fit into the context.
    """
    for plain, drafted in zip(found.plain_results, found.results, strict=True):
        for position, pair in enumerate(zip_longest(plain.tokens, drafted.tokens)):
            if pair[0] == pair[1]:
                continue
            request = next(request for request in requests if str(request.id) == plain.id)
            logprobs: list[float | None] = [None, None]
            with contextlib.suppress(lb.LlamaBranchError):  # no room, or Ctrl-C
                prompt = ctx.model.prompt_tokens(
                    request.prompt, parse_special=request.parse_special
                )
                with lb.Branch.start(ctx, [*prompt, *plain.tokens[:position]]) as branch:
                    row = branch.log_probs()
                logprobs = [None if token is None else float(row[token]) for token in pair]
            return {"position": position, "tokens": list(pair), "logprobs": logprobs}
    return None
