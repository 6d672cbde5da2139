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
from .workloads import draft_cost, never, plain, speculative, verify_times

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
        t = self.t
        return {n: seconds / t[1] for n, seconds in t.items()}

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
        lengths = [cell.length for cell in self.fixed if isinstance(cell.length, int)]
        return [(k, self._speedup(self.a, k, self.c)) for k in lengths]

    def _speedup(self, a: float, k: int, c: float) -> float:
        v = self.v.get(k + 1, math.nan)
        return math.nan if math.isnan(a + c + v) else theory.speedup(a, k, c, v)

    @property
    def candidate(self) -> Cell | None:
        """The setting with the highest measured speedup; None if no setting drafted anything.

        A setting with the rule "seeded" is preferred if it is nearly as fast as the best.
        """
        cells = [cell for cell in (*self.lengths, *self.rules) if cell.drafts]
        most = max((cell.speedup.median for cell in cells), default=math.nan)
        seeded = [cell for cell in cells if cell.rule == "seeded"]
        for group in (seeded, cells):
            top = max(group, key=lambda cell: cell.speedup.median, default=None)
            if top is not None and top.speedup.median >= _NEARLY * most:
                return top
        return None

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
        if self.confirmed is None or not self.confirmed.drafts:
            return "inconclusive"
        return self.confirmed.interval.verdict

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

    def __init__(
        self,
        target: Context,
        drafter: Callable[[], Drafter] | None,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        sweep: Sweep | None = None,
        *,
        progress: Callable[[str], None] = lambda text: None,
        stop: Callable[[], bool] = never,
    ) -> None:
        self._target, self._drafter, self._prompts = target, drafter, prompts
        self._sampling, self._sweep = sampling, sweep or Sweep()
        self._progress, self._stop = progress, stop

    def run(self) -> PairReport:
        """Measure v(n), all lengths, the rules at the best length and at "auto"; then the best one again.

        Raises:
            CapacityError: a prompt with its tokens does not fit into the context.
        """
        report = PairReport()
        try:
            report.times = self._verify_times()
            self._warm_up()
        except (Stopped, DecodeInterruptedError):
            report.stopped = True
            return report
        sweep = [(k, "seeded") for k in self._sweep.lengths] if self._drafter else []
        report.plain, report.lengths = self._measure("draft lengths", sweep)
        if self._sampling.temperature > 0 and report.fixed and not self._stop():
            k = max(report.fixed, key=lambda cell: cell.speedup.median).length
            chosen = [k] if "auto" not in self._sweep.lengths else [k, "auto"]
            settings = [(length, rule) for length in chosen for rule in RULES]
            _, report.rules = self._measure("rules", settings)
        candidate = report.candidate
        if candidate is not None and not self._stop():
            report.confirmed = self._confirm(candidate)
        report.stopped = self._stop()
        return report

    def _confirm(self, candidate: Cell) -> Cell | None:
        """Measure a setting again, with seeds that were not used to choose it."""
        n_runs = max(self._sweep.n_runs, math.ceil(self._sweep.n_pairs / len(self._prompts)))
        setting = (candidate.length, candidate.rule)
        _, cells = self._measure(
            "the fastest", [setting], n_runs=n_runs, first_run=self._sweep.n_runs
        )
        return cells[0] if cells else None

    @property
    def _longest(self) -> int:
        return max((k for k in self._sweep.lengths if isinstance(k, int)), default=1)

    def _verify_times(self) -> dict[int, list[float]]:
        target, longest = self._target, self._longest
        if not target.kv_cache.can_draft:
            return {}
        self._progress(f"a target decode of 1 to {longest + 1} tokens")
        n_prefix = max(1, min(128, target.n_ctx_seq - longest - 2))
        return verify_times(
            target, range(1, longest + 2), n_prefix=n_prefix, repeats=_N_REPEATS,
            least_s=self._sweep.verify_s, stop=self._stop,
        )  # fmt: skip

    def _warm_up(self) -> None:
        self._progress("warming up")
        for maker in self._makers([(self._longest, "seeded")] if self._drafter else [], 8).values():
            maker(-1)(0)

    def _measure(
        self,
        what: str,
        settings: Sequence[tuple[int | str, str]],
        n_runs: int | None = None,
        first_run: int = 0,
    ) -> tuple[Series, list[Cell]]:
        makers = self._makers(settings, self._sweep.n_tokens)
        found = interleave(
            makers,
            first_run=first_run,
            n_runs=self._sweep.n_runs if n_runs is None else n_runs,
            n_items=len(self._prompts),
            progress=lambda text: self._progress(f"{what}: {text}" if text else ""),
        )
        base = found.pop(_PLAIN)
        cells = [
            Cell(length, rule, series, base)
            for (length, rule), series in zip(settings, found.values(), strict=True)
        ]
        return base, cells if base.runs else []

    def _makers(self, settings: Sequence[tuple[int | str, str]], n_tokens: int) -> dict[str, Maker]:
        target, prompts, sampling, stop = self._target, self._prompts, self._sampling, self._stop
        makers = {_PLAIN: plain(target, prompts, n_tokens, sampling, stop=stop)}
        for length, rule in settings:
            if self._drafter is not None:
                config = SpeculativeConfig(draft_k=length, rule=rule)
                makers[f"{length}, {rule}"] = speculative(
                    target, prompts, n_tokens, sampling, self._drafter, config, stop=stop
                )
        return makers
