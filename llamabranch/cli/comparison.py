"""``--compare``: the same requests with drafts and plainly, in turn, and what that tells."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

import llamabranch as lb
from llamabranch import Engine, Request, Result, SpeculativeStats
from llamabranch.bench.timing import Interval, Maker, Series, Stopped, Timing, Work, interleave

from .formats import interval_text, number
from .interrupts import InterruptHandler

Logits = npt.NDArray[np.float32]

_RUNS = (1, 2, 3, 5, 9, 17, 33)  # tokens in a decode: their number decides how logits are rounded
_SLACK = 2.0  # the decodes of the two texts may have rounded by more than those tried here
_MOVES = [2.0**i for i in range(-20, 6)]  # that are tried, in logits
# The truncations that may drop a token, and the value that switches each off.
TRUNCATIONS: dict[str, float] = {
    "top_n_sigma": -1.0, "top_k": 0, "typical_p": 1.0, "top_p": 1.0, "min_p": 0.0,
    "xtc_probability": 0.0,
}  # fmt: skip
NOTHING_DRAFTED = (
    "Inconclusive: the timed runs drafted nothing, so all is plain decoding and differs by noise."
)
MOST_PAIRS = 9  # the fewest with which one outlier on either side does not widen the 95 % interval


@dataclass(frozen=True)
class Runs:
    """The runs of one way to generate the same texts, and the texts of the first of them."""

    series: Series
    results: Sequence[Result]

    @property
    def rate(self) -> float:
        """Tokens a second: the median of the runs; nan without a token."""
        return self.series.rate.median

    @property
    def stats(self) -> SpeculativeStats:
        """The statistics of all texts together."""
        total = SpeculativeStats()
        for result in self.results:
            total.add(result.stats)
        return total


@dataclass(frozen=True)
class FirstDifference:
    """The first token in which a drafted text and the plain one differ, and what decided between them.

    Attributes:
        position: the index of that token, from 0 = the first generated one.
        tokens: what the plain and the drafted text have there; None where that text had ended.
        gap: how far logits must move relative to each other for one token to be drawn instead of the
            other; infinite if no such move was found.
        difference: how far they do move here when the text is decoded in runs of other lengths; 0 in a
            batch-invariant context.
        decided_by: "logits" (at temperature 0), "scores" (log-probability plus noise), the setting that
            drops one of the tokens, such as "top_p" (several are joined by "+"), or "nothing": no move
            that was tried decides it.
    """

    position: int
    tokens: tuple[int | None, int | None]
    gap: float
    difference: float
    decided_by: str

    @property
    def explained(self) -> bool:
        """Whether rounding explains it: the gap is at most twice the measured difference."""
        return self.gap <= _SLACK * self.difference

    def as_dict(self) -> dict[str, object]:
        """Return JSON types."""
        return {**asdict(self), "explained": self.explained}


@dataclass(frozen=True)
class Comparison:
    """Drafted against plain decoding of the same requests with the same seed.

    Attributes:
        drafted, plain: the runs of each.
        first_difference: where the first two texts that differ part, if that was asked for.
    """

    drafted: Runs
    plain: Runs
    first_difference: FirstDifference | None = None

    @property
    def speedup(self) -> float:
        """The drafted median divided by the plain one, nan without a token."""
        return self.drafted.rate / self.plain.rate

    @property
    def interval(self) -> Interval:
        """The speedup by pairs of runs, one right after the other."""
        return self.drafted.series.interval(self.plain.series)

    @property
    def verdict(self) -> str:
        """ "faster", "slower" or "inconclusive"; "nothing drafted" where both were plain decoding."""
        if self.drafted.stats.num_draft_tokens == 0:
            return "nothing drafted"
        return self.interval.verdict

    @property
    def same_text(self) -> bool:
        """Whether both gave the same tokens."""
        pairs = zip(self.drafted.results, self.plain.results, strict=True)
        return all(drafted.tokens == plain.tokens for drafted, plain in pairs)

    def rows(self) -> list[tuple[str, object, object]]:
        """Return what a table shows of it: names, the drafted and the plain figures."""
        return [
            ("tokens a second", number(self.drafted.rate, 1), number(self.plain.rate, 1)),
            ("speedup", number(self.speedup, 2), "1"),
            ("95 % interval", interval_text(self.interval), ""),
            ("same text", self.same_text, ""),
        ]

    def explain(self, shorter: str = ": generate less (-n)") -> str:
        """Return the speedup and what the verdict means; where there is none, what to do about it.

        ``shorter`` follows where a run took too long to be repeated often enough.
        """
        interval, verdict = self.interval, self.verdict
        if verdict == "nothing drafted":
            return NOTHING_DRAFTED
        fast = f"drafting is {self.speedup:.2f} times as fast as plain decoding here"
        ends = {
            "faster": ".",
            "slower": ": it does not pay; --draft-max auto, the default, stops it.",
        }
        if verdict in ends:
            return fast.capitalize() + ends[verdict]
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
    explains: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Comparison | None:
    """Time drafted against plain decoding; both have been warmed up. None if interrupted.

    There are 9 pairs of runs at most; none begins after ``budget_s`` seconds. ``explains``: whether to
    find out why two texts differ, which decodes what they have in common some times.
    """
    results: dict[Engine, Sequence[Result]] = {}

    def maker(engine: Engine) -> Maker:
        def work(_: int) -> Timing:
            if interrupts.requested:
                raise Stopped
            before = engine.stats.elapsed_s
            found = engine.generate(requests)
            results.setdefault(engine, found)
            n_tokens = sum(len(result.tokens) for result in found)
            return Timing(n_tokens, engine.stats.elapsed_s - before)

        def make(_: int) -> Work:
            return work

        return make

    found = interleave(
        {"drafted": maker(drafting), "plain": maker(plain)},
        n_runs=MOST_PAIRS, n_items=1, budget_s=budget_s,
        progress=lambda text: progress(text and f"comparing: {text.partition(',')[0]}"),
    )  # fmt: skip
    if interrupts.requested or not found["plain"].runs:
        return None
    first = None
    if explains:
        with contextlib.suppress(lb.LlamaBranchError):  # no room, or Ctrl-C: the figures stay
            first = _first_difference(plain, requests, results[plain], results[drafting])
    return Comparison(
        Runs(found["drafted"], results[drafting]), Runs(found["plain"], results[plain]), first
    )


# -- why two texts differ ------------------------------------------------------------------------------


def _first_difference(
    engine: Engine,
    requests: Sequence[Request],
    plain: Sequence[Result],
    drafted: Sequence[Result],
) -> FirstDifference | None:
    """Return where the first two texts that differ part; None where they are equal.

    Nor where a constraint draws: what decided there is not a matter of logits alone.
    """
    named = {str(request.id): request for request in requests}
    for result, other in zip(plain, drafted, strict=True):
        for position, tokens in enumerate(zip_longest(result.tokens, other.tokens)):
            if tokens[0] != tokens[1]:
                request = named[result.id]
                if request.constraint is not None:
                    return None
                return _decision(engine, request, result, position, tokens)
    return None


def _decision(
    engine: Engine,
    request: Request,
    plain: Result,
    position: int,
    tokens: tuple[int | None, int | None],
) -> FirstDifference:
    """Return what decided a token: the sampler draws again from logits that are moved."""
    ctx, params, seed = engine.target, request.sampling or engine.sampling, plain.seed
    prompt = ctx.model.prompt_tokens(request.prompt, parse_special=request.parse_special)
    prefix, n = plain.tokens[:position], len(prompt) + position
    rows = _rows(ctx, [*prompt, *prefix], len(prompt))
    row = rows[0]  # decoded token by token, as plain decoding does
    given = request.grammar
    grammar = lb.Grammar(given) if isinstance(given, str) else given

    @cache
    def sampler(**off: float) -> lb.sampling.Sampler:
        made = lb.sampling.Sampler(ctx.model, params.replace(**off), grammar)
        return made.replay(prompt, prefix)

    def could_be(logits: Logits, **off: float) -> lb.Distribution | None:
        with contextlib.suppress(lb.errors.GrammarError, lb.ConfigError):
            return sampler(**off).distribution(logits, n, seed)
        return None

    def drawn(logits: Logits) -> int | None:
        found = could_be(logits)
        return None if found is None else found.draw(seed, n)

    def has(token: int, **off: float) -> bool:
        found = could_be(row, **off)
        return found is not None and token in found.ids.tolist()

    def decided(token: int | None) -> tuple[float, str]:
        """Return how far logits must move for ``token`` (None: one that ends the text), and why."""
        wanted = ctx.model.eog_tokens if token is None else [token]
        if not wanted or drawn(row) in wanted:
            return 0.0, ""
        raised = max(wanted, key=lambda each: float(row[each]))
        direction = np.full_like(row, -1.0)
        direction[raised] = 1.0
        move = _least_move(lambda far: drawn(row + np.float32(far) * direction) in wanted)
        return 2 * move, "nothing" if move == math.inf else reason(raised)

    def reason(token: int) -> str:
        if params.temperature == 0:
            return "logits"
        if has(token):
            return "scores"
        needed = {name: off for name, off in TRUNCATIONS.items() if getattr(params, name) != off}
        for name in list(needed):  # that must be off together for it to be drawn
            fewer = {other: off for other, off in needed.items() if other != name}
            if has(token, **fewer):
                needed = fewer
        return "+".join(needed) or "scores"

    difference = max(float(np.ptp(row - other)) for other in rows)
    gap, decided_by = max(map(decided, tokens))
    return FirstDifference(position, tokens, gap, difference, decided_by)


def _least_move(wins: Callable[[float], bool]) -> float:
    """Return the least move that wins; infinite if none does that is tried."""
    high = next(filter(wins, _MOVES), math.inf)
    low = high / 2
    for _ in range(12 if high < math.inf else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high


def _rows(ctx: lb.Context, text: Sequence[int], start: int) -> list[Logits]:
    """Return the logits after a text, float32 (V,), decoded from ``start`` on in runs of each length.

    The last run is padded, as a draft is longer than what is accepted of it.
    """
    start = max(1, start if start < len(text) else len(text) - _RUNS[-1])
    rows = []
    with lb.Branch.start(ctx, text[:start]) as branch:
        row = branch.logits
        for n in (n for n in _RUNS if n == 1 or len(text) + n <= ctx.n_ctx_seq):
            branch.rewind(start)
            for i in range(start, len(text), n):
                run = text[i : i + n]
                padding = [run[-1]] * (n - len(run))
                row = branch.extend([*run, *padding], logits="all")[len(run) - 1]
            rows.append(row)
    return rows
