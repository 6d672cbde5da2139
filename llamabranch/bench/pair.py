"""Find the draft length that is fastest for a target with its drafter on this machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from time import perf_counter

from ..context import Context
from ..sampling import SamplingParams
from ..speculative import Drafter, SpeculativeConfig, Speculator
from .timing import Maker, Series, Stopped, Timing, Work, interleave

Stop = Callable[[], bool]  # called between tokens; True ends the measurement
_PLAIN = "plain"


def seed_of(run: int, item: int) -> int:
    """Return the seed of a prompt in a run: the same for all methods, different in each run."""
    return 1 + 1000 * (run + 1) + item


def speculative(
    ctx: Context,
    prompts: Sequence[Sequence[int]],
    n: int,
    sampling: SamplingParams,
    drafter: Callable[[], Drafter | None] = lambda: None,
    config: SpeculativeConfig | None = None,
    *,
    stop: Stop = lambda: False,
) -> Maker:
    """Return a method that decodes with a new drafter in every run, or plainly without a drafter.

    A drafter kept between runs would copy the text of the previous run. The draft length "auto"
    keeps in the context what it has learned, as it does in ordinary use. Each run sets its own
    seed. The time in which a draft model processes the prompt is included.
    """

    def make(run: int) -> Work:
        speculator = Speculator(ctx, drafter(), config)

        def work(item: int) -> Timing:
            seeded = sampling.replace(seed=seed_of(run, item))
            generation = speculator.generate(prompts[item], max_tokens=n, sampling=seeded)
            with closing(generation):
                start = perf_counter()
                for _ in generation:
                    if stop():
                        raise Stopped
                seconds = perf_counter() - start
            tokens = tuple(generation.tokens)
            return Timing(len(tokens), seconds, tokens, generation.stats)

        return work

    return make


@dataclass(frozen=True)
class Cell:
    """The measurements of one draft length, and of plain decoding in the same runs."""

    length: int | str
    series: Series
    base: Series

    @property
    def drafts(self) -> bool:
        """True if any token was drafted; otherwise both are plain decoding and differ by noise."""
        return self.series.stats.num_draft_tokens > 0


@dataclass
class PairReport:
    """The results; after an interruption, only those measured before it.

    ``lengths`` has a cell for each draft length. ``confirmed`` is the fastest of them, measured once
    more against plain decoding only. This second measurement is needed because the maximum of many
    noisy figures is biased upwards.
    """

    plain: Series = field(default_factory=Series)
    lengths: list[Cell] = field(default_factory=list)
    confirmed: Cell | None = None
    stopped: bool = False

    @property
    def candidate(self) -> Cell | None:
        """The cell with the highest measured speedup, the first in a tie; None without drafts."""
        cells = (cell for cell in self.lengths if cell.drafts)
        return max(cells, key=lambda cell: cell.series.ratio(cell.base).median, default=None)

    @property
    def verdict(self) -> str:
        """How the best length compares with plain decoding: "faster", "slower" or "inconclusive".

        "faster" and "slower" require that the whole interval of ``confirmed`` is above or below 1.
        It is "nothing compared" if no length was measured, and "nothing drafted" if no length
        drafted.
        """
        if not self.lengths:
            return "nothing compared"
        if self.candidate is None:
            return "nothing drafted"
        confirmed = self.confirmed
        if confirmed is None or not confirmed.drafts:
            return "inconclusive"
        return confirmed.series.interval(confirmed.base).verdict

    @property
    def best(self) -> Cell | None:
        """The cell of the length to use if it is faster than plain decoding; otherwise None."""
        return self.confirmed if self.verdict == "faster" else None


@dataclass(frozen=True)
class PairBench:
    """Compares speculative with plain decoding over several prompts, in interleaved runs.

    Args:
        target: the context of the target model.
        drafter: returns a new drafter; None = measure the target only.
        prompts: token ids of each prompt.
        sampling, config: the settings. They are used with another seed in each run, and with each
            of the draft lengths.
        lengths: draft lengths to compare: numbers and "auto".
        n_tokens: how many tokens to generate for each prompt.
        n_runs: how often everything is measured.
        n_pairs: the final comparison with plain decoding uses at least this many texts.
        progress: called with a description of the current step.
        stop: called between tokens; True ends the measurement.
    """

    target: Context
    drafter: Callable[[], Drafter] | None
    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    config: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    lengths: Sequence[int | str] = (*range(1, 9), "auto")
    n_tokens: int = 64
    n_runs: int = 3
    n_pairs: int = 12
    progress: Callable[[str], None] = lambda text: None
    stop: Stop = lambda: False

    def run(self) -> PairReport:
        """Measure all draft lengths, then measure the best length again.

        Raises:
            CapacityError: a prompt and its ``n_tokens`` new tokens do not fit into the context.
        """
        report, lengths = PairReport(), self.lengths if self.drafter else ()
        longest = max((k for k in self.lengths if isinstance(k, int)), default=1)
        n = len(self.prompts)
        self._measure("warming up", lengths and [longest], 1, 1, first_run=-1)
        report.plain, report.lengths = self._measure("draft lengths", lengths, self.n_runs, n)
        best = report.candidate
        if best is not None and not self.stop():  # measure it again, with new seeds
            n_runs = max(self.n_runs, math.ceil(self.n_pairs / n))
            _, cells = self._measure("the fastest", [best.length], n_runs, n, self.n_runs)
            report.confirmed = cells[0] if cells else None
        report.stopped = self.stop()
        return report

    def _measure(
        self,
        label: str,
        lengths: Sequence[int | str],
        n_runs: int,
        n_items: int,
        first_run: int = 0,
    ) -> tuple[Series, list[Cell]]:
        """Return the runs of plain decoding, and a cell for each length."""
        arguments = self.target, self.prompts, self.n_tokens, self.sampling
        drafter: Callable[[], Drafter | None] = self.drafter or (lambda: None)
        makers = {_PLAIN: speculative(*arguments, stop=self.stop)}
        for length in lengths:
            config = replace(self.config, draft_k=length)
            makers[str(length)] = speculative(*arguments, drafter, config, stop=self.stop)
        series_by_name = interleave(
            makers, n_runs=n_runs, n_items=n_items, first_run=first_run,
            progress=lambda text: self.progress(text and f"{label}: {text}"),
        )  # fmt: skip
        base = series_by_name.pop(_PLAIN)
        pairs = zip(lengths, series_by_name.values(), strict=True)
        return base, [Cell(k, series, base) for k, series in pairs] if base.runs else []
