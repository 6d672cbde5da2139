"""Which draft length and rule is the fastest for a target with its drafter on this machine, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .. import theory
from ..context import Context
from ..errors import DecodeInterruptedError
from ..sampling import SamplingParams
from ..speculative import Drafter, SpeculativeConfig, SpeculativeStats
from .timing import Interval, Maker, Series, Spread, Stopped, interleave
from .workloads import draft_cost, plain, speculative, verify_times

RULES = ("seeded", "token", "block")
_PLAIN = "plain"
_N_REPEATS = 6  # decodes of each size for v(n): fewer have no confidence interval
# Share of the best speed from which "seeded", which keeps the plain text, is preferred.
_NEARLY = 0.98


@dataclass(frozen=True)
class Cell:
    """One setting, measured together with plain decoding in the same runs."""

    length: int | str
    rule: str
    series: Series
    base: Series

    @property
    def stats(self) -> SpeculativeStats:
        """Counts and times of all its runs."""
        return self.series.stats

    @property
    def speedup(self) -> Spread:
        """Tokens a second divided by those of plain decoding, within each run."""
        return self.series.ratio(self.base)

    @property
    def interval(self) -> Interval:
        """The speedup from pairs of texts, with its confidence interval."""
        return self.series.interval(self.base)

    @property
    def drafts(self) -> bool:
        """True if any token was drafted; otherwise it is plain decoding, and any difference is noise."""
        return self.stats.num_draft_tokens > 0


@dataclass
class PairReport:
    """The results, or those measured before an interruption.

    ``times`` are the seconds of target decodes of n tokens, empty where the memory cannot be truncated.
    ``lengths`` are the cells of the different draft lengths, all with the rule "seeded"; ``rules`` are
    those of the different rules, empty at temperature 0, where all rules give the same text.
    ``confirmed`` is the fastest setting, measured once more against plain decoding only: the maximum
    of many noisy figures is biased upwards, so it does not show that the setting is faster.
    """

    times: dict[int, list[float]] = field(default_factory=dict)
    plain: Series = field(default_factory=Series)
    lengths: list[Cell] = field(default_factory=list)
    rules: list[Cell] = field(default_factory=list)
    confirmed: Cell | None = None
    stopped: bool = False

    @property
    def t(self) -> dict[int, float]:
        """t(n): median seconds of a target decode of n tokens."""
        return {n: Spread.of(seconds).median for n, seconds in self.times.items()}

    @property
    def v(self) -> dict[int, float]:
        """v(n): the time of a target decode of n tokens divided by that of one."""
        return {n: seconds / self.t[1] for n, seconds in self.t.items()}

    @property
    def v_intervals(self) -> dict[int, Interval]:
        """v(n) from the ratios within each turn, with confidence intervals."""
        return {
            n: Interval.of([mine / one for mine, one in zip(seconds, self.times[1], strict=True)])
            for n, seconds in self.times.items()
            if n > 1
        }

    @property
    def fixed(self) -> list[Cell]:
        """The cells with a fixed draft length."""
        return [cell for cell in self.lengths if cell.length != "auto"]

    @property
    def pooled(self) -> SpeculativeStats:
        """Counts and times of all fixed lengths."""
        total = SpeculativeStats()
        for cell in self.fixed:
            total.add(cell.stats)
        return total

    @property
    def c(self) -> float:
        """The time of a drafted token divided by that of a plain one; nan without drafts."""
        return draft_cost(self.pooled, self.plain.step_s)

    @property
    def a(self) -> float:
        """The probability that a drafted token is accepted when it is tested; nan without drafts."""
        return self.pooled.alpha_hat

    def predicted(self, cell: Cell) -> float:
        """Return the speedup predicted from the cell's own acceptance and cost; nan if unknown."""
        if not isinstance(cell.length, int):
            return math.nan
        stats = cell.stats
        return self._speedup(stats.alpha_hat, cell.length, draft_cost(stats, cell.base.step_s))

    def theory(self) -> list[tuple[int, float]]:
        """Return the speedup predicted from one a, one c and v for every measured length."""
        lengths = (cell.length for cell in self.fixed)
        return [(k, self._speedup(self.a, k, self.c)) for k in lengths if isinstance(k, int)]

    def _speedup(self, a: float, k: int, c: float) -> float:
        v = self.v.get(k + 1, math.nan)
        return math.nan if math.isnan(a + c + v) else theory.speedup(a, k, c, v)

    @property
    def candidate(self) -> Cell | None:
        """The setting with the highest measured speedup; None if no setting drafted anything.

        A setting with the rule "seeded" is preferred if it is nearly as fast as the best.
        """
        cells = [cell for cell in (*self.lengths, *self.rules) if cell.drafts]
        cells.sort(key=lambda cell: -cell.speedup.median)  # in a tie the first
        least = _NEARLY * cells[0].speedup.median if cells else math.nan
        nearly = (c for c in cells if c.rule == "seeded" and c.speedup.median >= least)
        return next(nearly, cells[0] if cells else None)

    @property
    def verdict(self) -> str:
        """Whether the best setting is "faster" or "slower" than plain decoding, or "inconclusive".

        "faster" and "slower" require that the whole interval of ``confirmed`` is above or below 1.
        Otherwise "nothing compared" or "nothing drafted", if there is nothing to compare.
        """
        if not self.lengths:
            return "nothing compared"
        if self.candidate is None:
            return "nothing drafted"
        found = self.confirmed
        return found.interval.verdict if found and found.drafts else "inconclusive"

    @property
    def best(self) -> Cell | None:
        """The setting to use, if ``confirmed`` is faster than plain decoding; otherwise None."""
        return self.confirmed if self.verdict == "faster" else None


@dataclass(frozen=True)
class Sweep:
    """What is compared, and how often.

    Args:
        lengths: draft lengths: numbers and "auto".
        n_tokens: tokens for each prompt.
        n_runs: how often everything is measured.
        n_pairs: the smallest number of texts for the final comparison with plain decoding.
        verify_s: the smallest number of seconds for measuring v(n).
    """

    lengths: Sequence[int | str] = (*range(1, 9), "auto")
    n_tokens: int = 64
    n_runs: int = 3
    n_pairs: int = 12
    verify_s: float = 2.0


@dataclass(frozen=True)
class PairBench:
    """Compares speculative with plain decoding over several prompts, in interleaved runs.

    Args:
        target: the context of the target model.
        drafter: returns a new drafter; None = measure the target only.
        prompts: token ids of each prompt.
        sampling: the settings; each run sets its own seed.
        sweep: what is compared, and how often.
        progress: called with a description of the current step.
        stop: called between tokens; True ends the measurement.
    """

    target: Context
    drafter: Callable[[], Drafter] | None
    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    sweep: Sweep = Sweep()
    progress: Callable[[str], None] = lambda text: None
    stop: Callable[[], bool] = lambda: False

    def run(self) -> PairReport:
        """Measure v(n), all lengths, the rules at the best length and at "auto"; then the best one again.

        Raises:
            CapacityError: a prompt with its tokens does not fit into the context.
        """
        report, sweep = PairReport(), self.sweep
        longest = max((k for k in sweep.lengths if isinstance(k, int)), default=1)
        lengths = [(k, "seeded") for k in sweep.lengths] if self.drafter else []
        try:
            report.times = self._verify_times(longest)
            self.progress("warming up")
            for maker in self._makers([(longest, "seeded")] if self.drafter else [], 8).values():
                maker(-1)(0)
        except (Stopped, DecodeInterruptedError):
            report.stopped = True
            return report
        report.plain, report.lengths = self._measure("draft lengths", lengths)
        if self.sampling.temperature > 0 and report.fixed and not self.stop():
            k = max(report.fixed, key=lambda cell: cell.speedup.median).length
            chosen = [k] if "auto" not in sweep.lengths else [k, "auto"]
            settings = [(length, rule) for length in chosen for rule in RULES]
            _, report.rules = self._measure("rules", settings)
        best = report.candidate
        if best is not None and not self.stop():  # again, with seeds that did not choose it
            n_runs = max(sweep.n_runs, math.ceil(sweep.n_pairs / len(self.prompts)))
            _, cells = self._measure(
                "the fastest", [(best.length, best.rule)], n_runs, sweep.n_runs
            )
            report.confirmed = cells[0] if cells else None
        report.stopped = self.stop()
        return report

    def _verify_times(self, longest: int) -> dict[int, list[float]]:
        if not self.target.kv_cache.can_draft:
            return {}
        self.progress(f"a target decode of 1 to {longest + 1} tokens")
        return verify_times(
            self.target, range(1, longest + 2),
            n_prefix=max(1, min(128, self.target.n_ctx_seq - longest - 2)),
            repeats=_N_REPEATS, least_s=self.sweep.verify_s, stop=self.stop,
        )  # fmt: skip

    def _measure(
        self,
        what: str,
        settings: Sequence[tuple[int | str, str]],
        n_runs: int | None = None,
        first_run: int = 0,
    ) -> tuple[Series, list[Cell]]:
        found = interleave(
            self._makers(settings, self.sweep.n_tokens),
            first_run=first_run,
            n_runs=n_runs or self.sweep.n_runs,
            n_items=len(self.prompts),
            progress=lambda text: self.progress(text and f"{what}: {text}"),
        )
        base = found.pop(_PLAIN)
        pairs = zip(settings, found.values(), strict=True)
        cells = [Cell(length, rule, series, base) for (length, rule), series in pairs]
        return base, cells if base.runs else []

    def _makers(self, settings: Sequence[tuple[int | str, str]], n_tokens: int) -> dict[str, Maker]:
        given = self.target, self.prompts, n_tokens, self.sampling
        drafter: Callable[[], Drafter | None] = self.drafter or (lambda: None)
        makers = {_PLAIN: plain(*given, stop=self.stop)}
        for length, rule in settings:
            config = SpeculativeConfig(draft_k=length, rule=rule)
            makers[f"{length}, {rule}"] = speculative(*given, drafter, config, stop=self.stop)
        return makers
