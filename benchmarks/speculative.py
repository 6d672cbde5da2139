"""Speculative and plain decoding: drafters, draft lengths, rules, and the cost where drafts do not pay.

    python -m benchmarks.speculative [--target T --draft D]

All cells of one temperature come from the same interleaved runs, with the same prompts and seeds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import llamabranch as lb
from llamabranch import theory
from llamabranch.bench.pair import speculative
from llamabranch.bench.timing import Maker, Series, Timing, Work

from .clocks import interleave, verify_costs
from .drafters import AdversarialDrafter
from .padded import cached_useless
from .prompts import PROMPTS
from .report import Settings, emit, number, parser, percent, pm, series_json, table, title

PLAIN = "plain decoding"
MODEL, AUTO = "draft model", "auto"
NEW = "draft model, auto, new for each prompt"
COLD = "draft model, auto, new for each prompt, no profile"
USELESS = "useless draft model"


def main() -> None:
    """Measure one pair."""
    described = parser(
        "speculative decoding", runs=5, prompts=20, tokens=200, temperatures=(0.0, 0.7, 1.0)
    )
    described.add_argument(
        "--longest", type=int, help="longest fixed draft length that is measured; default: 8"
    )
    described.add_argument(
        "--k", type=int, default=4, help="the fixed draft length of the other tables"
    )
    args = described.parse_args()
    settings = Settings.of(args)
    longest = args.longest or (2 if settings.quick else 8)
    with (
        settings.context(settings.target) as target,
        settings.context(settings.draft) as draft,
        settings.context(
            str(cached_useless(lb.hub.resolve(settings.draft), settings.cache))
        ) as useless,
    ):
        cells = Cells(target, draft, useless, settings, longest, args.k)
        sizes = range(1, longest + 2)
        repeats, prefix = (3, 16) if settings.quick else (15, 128)
        times = verify_costs(target, sizes, n_prefix=prefix, repeats=repeats)
        v = {n: seconds / times[1] for n, seconds in times.items()}
        _show_costs(target, v)
        results = {
            f"{temperature:g}": cells.measure(temperature, v)
            for temperature in settings.temperatures
        }
        models = {"target": target.model, "draft": draft.model}
        emit("speculative", settings, models, results, v=v, t1_s=times[1], k=args.k)


class Cells:
    """The measurements of one temperature."""

    def __init__(
        self,
        target: lb.Context,
        draft: lb.Context,
        useless: lb.Context,
        settings: Settings,
        longest: int,
        k: int,
    ) -> None:
        self._target = target
        self._settings = settings
        self._prompts = [target.tokenize(prompt) for prompt in PROMPTS[: settings.prompts]]
        self._longest = longest
        self._k = k
        self._drafters: Mapping[str, Callable[[], lb.Drafter]] = {
            MODEL: lambda: lb.ModelDrafter(draft),
            "lookup": lb.speculative.PromptLookupDrafter,
            "suffix": lb.SuffixDrafter,
            "suffix, then model": lambda: lb.ChainDrafter(
                [lb.SuffixDrafter(), lb.ModelDrafter(draft)]
            ),
            USELESS: lambda: lb.ModelDrafter(useless),
            "adversarial": AdversarialDrafter,
        }
        self._title = title(target.model, draft.model)

    def measure(self, temperature: float, v: Mapping[int, float]) -> dict[str, object]:
        """Measure and print one temperature."""
        makers = self._makers(temperature)
        cells = interleave(makers, n_runs=self._settings.runs, n_items=len(self._prompts))
        base = cells[PLAIN]
        step_s = base.step_s
        self._show_drafters(temperature, cells, step_s)
        best = self._show_sweep(temperature, cells, step_s, v)
        if temperature > 0:
            self._show_rules(temperature, cells)
        self._show_positions(temperature, cells)
        return {
            "cells": {name: self._json(series, base) for name, series in cells.items()},
            "best_fixed": best,
            "auto_over_plain": cells[self._named(MODEL, AUTO)].ratio(base).as_dict(),
            "auto_over_best_fixed": cells[self._named(MODEL, AUTO)]
            .ratio(cells[self._named(MODEL, best)])
            .as_dict(),
        }

    # -- the contestants ---------------------------------------------------------------------------

    def _named(self, drafter: str, k: int | str) -> str:
        return f"{drafter}, {k}"

    def _makers(self, temperature: float) -> dict[str, Maker]:
        ctx, prompts, n = self._target, self._prompts, self._settings.tokens
        sampling = lb.SamplingParams(temperature=temperature)

        def cell(
            drafter: Callable[[], lb.Drafter | None],
            k: int | str,
            rule: str = "seeded",
        ) -> Maker:
            config = lb.SpeculativeConfig(draft_k=k, rule=rule)
            return speculative(ctx, prompts, n, sampling, drafter, config)

        makers = {PLAIN: speculative(ctx, prompts, n, sampling)}
        for k in range(1, self._longest + 1):
            makers[self._named(MODEL, k)] = cell(self._drafters[MODEL], k)
        for name, drafter in self._drafters.items():
            makers.setdefault(self._named(name, self._k), cell(drafter, self._k))
            makers[self._named(name, AUTO)] = cell(drafter, AUTO)
        makers[NEW] = _new_for_each_prompt(cell(self._drafters[MODEL], AUTO))
        makers[COLD] = _without_profile(makers[NEW])
        if temperature > 0:  # at temperature 0 all rules give the same text
            for rule in ("token", "block"):
                makers[self._ruled(rule)] = cell(self._drafters[MODEL], self._k, rule)
        return makers

    def _ruled(self, rule: str) -> str:
        name = self._named(MODEL, self._k)
        return name if rule == "seeded" else f"{name}, {rule} rule"

    # -- tables ------------------------------------------------------------------------------------

    def _caption(self, subject: str, temperature: float) -> str:
        settings = self._settings
        return (
            f"{subject}, T = {temperature:g}. {self._title}: {settings.threads} threads, "
            f"{len(self._prompts)} prompts x {settings.tokens} tokens, medians of {settings.runs} runs "
            f"(lowest to highest)"
        )

    def _show_drafters(
        self, temperature: float, cells: Mapping[str, Series], step_s: float
    ) -> None:
        base = cells[PLAIN]
        names = [PLAIN]
        for drafter in self._drafters:
            names += [self._named(drafter, self._k), self._named(drafter, AUTO)]
        names += [NEW, COLD]
        rows = []
        for name in names:
            series, stats = cells[name], cells[name].stats
            seconds = series.total.seconds
            same, compared = series.same_texts(base)
            rows.append(
                (
                    name,
                    pm(series.rate, 0),
                    "1" if name == PLAIN else pm(series.ratio(base)),
                    percent(stats.draft_acceptance_rate),
                    number(stats.mean_acceptance_length),
                    number(stats.draft_step_s / step_s),
                    percent(stats.draft_time_s / seconds) if stats.num_drafts else "-",
                    percent((stats.verify_time_s + stats.plain_time_s) / seconds)
                    if stats.target_forward_passes
                    else "-",
                    "-" if name == PLAIN else f"{same} of {compared}",
                )
            )
        columns = (
            "drafter, length", "tokens/s", "x plain", "accepted / drafted", "tokens a round", "c",
            "time drafting", "in the target", "same text as plain",
        )  # fmt: skip
        table(self._caption("Drafters", temperature), columns, rows)

    def _show_sweep(
        self,
        temperature: float,
        cells: Mapping[str, Series],
        step_s: float,
        v: Mapping[int, float],
    ) -> int:
        base = cells[PLAIN]
        lengths = range(1, self._longest + 1)
        best = max(lengths, key=lambda k: cells[self._named(MODEL, k)].ratio(base).median)
        auto = cells[self._named(MODEL, AUTO)]
        rows = []
        for k in lengths:
            series = cells[self._named(MODEL, k)]
            stats = series.stats
            a, c = stats.alpha_hat, stats.draft_step_s / step_s
            known = not math.isnan(a + c)
            rows.append(
                (
                    f"{k}{' (best)' if k == best else ''}",
                    pm(series.rate, 0),
                    pm(series.ratio(base)),
                    number(theory.speedup(a, k, c, v[k + 1]) if known else math.nan),
                    percent(stats.draft_acceptance_rate),
                    number(stats.mean_acceptance_length),
                    number(a),
                    number(c),
                    number(v[k + 1]),
                    pm(auto.ratio(series)),
                )
            )
        mean = auto.stats.num_draft_tokens / max(1, auto.stats.num_drafts)
        rows.append(
            (
                f"auto (mean {number(mean, 1)})", pm(auto.rate, 0), pm(auto.ratio(base)), "-",
                percent(auto.stats.draft_acceptance_rate),
                number(auto.stats.mean_acceptance_length), number(auto.stats.alpha_hat),
                number(auto.stats.draft_step_s / step_s), "-", "1",
            )
        )  # fmt: skip
        columns = (
            "length", "tokens/s", "x plain", "theory", "accepted / drafted", "tokens a round", "a", "c",
            "v(length + 1)", "auto over it",
        )  # fmt: skip
        table(self._caption("Draft lengths, draft model", temperature), columns, rows)
        return best

    def _show_rules(self, temperature: float, cells: Mapping[str, Series]) -> None:
        base = cells[PLAIN]
        rows = []
        for rule in ("seeded", "token", "block"):
            series = cells[self._ruled(rule)]
            rows.append(
                (
                    rule,
                    pm(series.rate, 0),
                    pm(series.ratio(base)),
                    percent(series.stats.draft_acceptance_rate),
                    number(series.stats.mean_acceptance_length),
                )
            )
        columns = ("rule", "tokens/s", "x plain", "accepted / drafted", "tokens a round")
        table(self._caption(f"Rules, draft model, {self._k} drafted", temperature), columns, rows)

    def _show_positions(self, temperature: float, cells: Mapping[str, Series]) -> None:
        names = [self._named(MODEL, self._longest)]
        names += [self._named(drafter, self._k) for drafter in self._drafters if drafter != MODEL]
        rows = []
        for name in names:
            rates = [number(rate) for rate in cells[name].stats.conditional_rates_per_pos]
            rates += ["-"] * self._longest
            rows.append((name, *rates[: self._longest]))
        columns = ("drafter, length", *map(str, range(1, self._longest + 1)))
        caption = "Acceptance rate of the tokens that were tested at each position"
        table(self._caption(caption, temperature), columns, rows)

    def _json(self, series: Series, base: Series) -> dict[str, object]:
        same, compared = series.same_texts(base)
        return {**series_json(series, base), "same_text": same, "compared_text": compared}


def _new_for_each_prompt(maker: Maker) -> Maker:
    return lambda run: lambda item: maker(run)(item)


def _without_profile(maker: Maker) -> Maker:
    """Return ``maker`` without the profile that all other cells use and add to."""

    @contextmanager
    def off() -> Iterator[None]:
        profile = os.environ["LLAMABRANCH_PROFILE"]
        os.environ["LLAMABRANCH_PROFILE"] = "0"
        try:
            yield
        finally:
            os.environ["LLAMABRANCH_PROFILE"] = profile

    def make(run: int) -> Work:
        with off():
            work = maker(run)

        def timed(item: int) -> Timing:
            with off():
                return work(item)

        return timed

    return make


def _show_costs(target: lb.Context, v: Mapping[int, float]) -> None:
    columns = ("n", *map(str, v))
    table(
        f"v(n): one decode of n tokens over one of 1, {title(target.model)}",
        columns,
        [("v(n)", *(number(value) for value in v.values()))],
    )


if __name__ == "__main__":
    main()
