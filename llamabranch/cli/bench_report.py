"""What ``bench`` prints at the end: tables, the setting to use, one JSON object."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from llamabranch import Context, Model
from llamabranch.bench import Cell, Machine, PairReport

from .console import Console, finite
from .formats import base_name, interval_text, machine_text, number, spread_text

__all__ = ["BenchReport"]


@dataclass(frozen=True)
class BenchReport:
    """The measurements of a pair, and the settings and machine they were made with.

    ``machine`` is its state before the measurement, ``load_after`` the load average after it, ``profile``
    the path of the profile in use.
    """

    report: PairReport
    machine: Machine
    load_after: float | None
    target: Context
    target_name: str
    drafters: Sequence[str]
    draft_models: Sequence[Model]
    temperature: float
    n_prompts: int
    n_tokens: int
    n_runs: int
    options: Sequence[str]
    profile: str | None = None

    # -- the setting to use ------------------------------------------------------------------------

    def command(self) -> str | None:
        """Return the command line of the setting to use, None where none is established."""
        report = self.report
        arguments = ["llamabranch", "generate", "-m", self.target_name]
        if report.best is not None:
            arguments += ["--draft", "+".join(self.drafters)]
            arguments += ["--draft-max", str(report.best.length)]
            if self.temperature > 0:
                arguments += ["-S", f"rule={report.best.rule}"]
        elif report.verdict == "slower":
            arguments += ["--draft", "none"]
        else:
            return None
        return shlex.join([*arguments, *self.options])

    def _advice(self) -> str:
        report = self.report
        best, verdict = report.best, report.verdict
        if not self.drafters:
            return "There is no drafter, so there is nothing to choose."
        if verdict == "nothing compared":
            return "Nothing was compared."
        if verdict == "nothing drafted":
            return (
                "Inconclusive: nothing was drafted, so all settings are plain decoding and differ by "
                "noise. Give prompts that the drafter can continue, or another --draft."
            )
        if best is None:
            return self._no_best(report.confirmed)
        rule = f" and rule {best.rule}" if self.temperature > 0 else ""
        same = ", with exactly the text of plain decoding" if best.rule == "seeded" else ""
        return (
            f"Best: draft length {best.length}{rule}, {_measured(best)} times plain "
            f"decoding{same}. Use"
        )

    def _no_best(self, found: Cell | None) -> str:
        if found is None:
            return (
                f"Inconclusive: the {self._superlative} setting was not measured again before the "
                "interruption."
            )
        setting = f"draft length {found.length} and rule {found.rule}"
        if not found.drafts:
            return (
                f"Inconclusive: {setting} seemed the fastest, but drafted nothing when it was measured "
                "again. Give prompts that the drafter can continue, or another --draft."
            )
        if self.report.verdict == "slower":
            return (
                f"Drafting does not pay here: at best, with {setting}, it is {_measured(found)} times "
                "plain decoding. Use"
            )
        n = found.interval.n
        more = max(4 * self.n_runs, math.ceil(12 / self.n_prompts))
        complaint = self.machine.complaint(self.n_threads)
        return (
            f"Inconclusive: with {setting}, the {self._superlative} here, drafting is "
            f"{_measured(found)} times plain decoding, by {n} {'pair' if n == 1 else 'pairs'} of texts: "
            f"no setting is named unless all of the interval lies above 1. To decide it, "
            f"measure more: --runs {more}, longer texts (-n), more prompts"
            + (f"; {complaint}." if complaint else ", nothing else running on the machine.")
            + " Until then plain decoding (--draft none) is the safe choice."
        )

    @property
    def _superlative(self) -> str:
        """What to call the setting that was chosen: one that is slower than plain is not the fastest."""
        found = self.report.confirmed or self.report.candidate
        return "least slow" if found is not None and found.speedup.median < 1 else "fastest"

    @property
    def n_threads(self) -> int:
        """The threads that the target decodes with."""
        return self.target.n_threads

    # -- text --------------------------------------------------------------------------------------

    def print(self, console: Console) -> None:
        """Print everything that was measured."""
        report = self.report
        console.line(self._heading())
        console.line()
        console.line(machine_text(self.machine, self.load_after, self.n_threads))
        if self.drafters and self.profile is not None:
            console.line(f'"auto" begins with the profile {self.profile}.')
        elif self.drafters:
            console.line('"auto" uses no profile.')
        if report.t:
            console.line()
            console.line(
                f"v(n): a target decode of n tokens over one of 1, which takes "
                f"{1e3 * report.t[1]:.3f} ms"
            )
            intervals = report.v_intervals
            rows = [("v(n)", *(f"{v:.2f}" for v in report.v.values()))]
            for name in ("low", "high"):
                ends = [number(getattr(each, name), 2) for each in intervals.values()]
                rows.append((f"95 % {name}", "", *ends))
            console.table(("n", *map(str, report.v)), rows)
        if report.plain.runs:
            console.line()
            console.line(f"Plain decoding: {spread_text(report.plain.rate, 1)} tokens a second")
        if report.lengths:
            console.line(
                f"A drafted token costs c = {number(report.c, 3)} of a target step and is accepted "
                f"with probability a = {number(report.a, 2)} when it is tested."
            )
            rule = " (rule seeded)" if self.temperature > 0 else ""
            self._table(console, f"Draft lengths{rule}:", report.lengths, "length")
            self._positions(console)
        if report.rules:
            self._table(console, "Rules:", report.rules, "length, rule")
        if report.confirmed is not None:
            self._table(
                console,
                f"The {self._superlative}, measured again:",
                [report.confirmed],
                "length, rule",
            )
        console.line()
        console.line(self._advice())
        command = self.command()
        if command is not None:
            console.line()
            console.write(f"  {command}\n")

    def _heading(self) -> str:
        model = self.target.model
        drafters = " + ".join(map(base_name, self.drafters)) or "none"
        place = "GPU" if model.on_gpu else "CPU"
        return (
            f"target {model.name} ({model.n_params / 1e6:.1f}M, {model.file_type}), drafter "
            f"{drafters}; temperature {self.temperature:g}, {place}, threads {self.n_threads}, "
            f"{self.n_prompts} prompts x {self.n_tokens} tokens, medians of {self.n_runs} runs "
            "(lowest to highest)"
        )

    def _table(self, console: Console, title: str, cells: Sequence[Cell], first: str) -> None:
        best, candidate = self.report.best, self.report.candidate
        rows = []
        for cell in cells:
            name = f"{cell.length}" if first == "length" else f"{cell.length}, {cell.rule}"
            stats = cell.stats
            rows.append(
                (
                    name,
                    spread_text(cell.series.rate, 1),
                    spread_text(cell.speedup, 2),
                    interval_text(cell.interval),
                    number(self.report.predicted(cell), 2),
                    number(100 * stats.draft_acceptance_rate, 1, " %"),
                    number(stats.mean_acceptance_length, 2),
                    "best" if cell is best else self._superlative if cell is candidate else "",
                )
            )
        console.line()
        console.line(title)
        columns = (
            first, "tokens a second", "x plain", "95 %", "theory", "accepted / drafted",
            "tokens a round", "",
        )  # fmt: skip
        console.table(columns, rows)

    def _positions(self, console: Console) -> None:
        rates = self._longest_rates()
        if rates:
            console.line()
            console.line(
                "Acceptance rate by position in the draft, of the tokens that were tested:"
            )
            columns = ("position", *(str(i + 1) for i in range(len(rates))))
            console.table(columns, [("accepted", *(number(rate, 2) for rate in rates))])

    def _longest_rates(self) -> list[float]:
        fixed = self.report.fixed
        return fixed[-1].stats.conditional_rates_per_pos if fixed else []

    # -- JSON --------------------------------------------------------------------------------------

    def as_json(self) -> dict[str, object]:
        """Return everything, ready for JSON; null for what does not exist."""
        report, best = self.report, self.report.best
        answer: dict[str, object] = {
            "target": _described(self.target.model),
            "drafters": list(self.drafters),
            "draft_models": [_described(model) for model in self.draft_models],
            "temperature": self.temperature,
            "n_threads": self.n_threads,
            "machine": self.machine.as_dict() | {"load_after": self.load_after},
            "profile": self.profile,
            "n_prompts": self.n_prompts,
            "n_tokens": self.n_tokens,
            "n_runs": self.n_runs,
            "batch_invariant": self.target.capabilities.batch_invariant,
            "interrupted": report.stopped,
            "t1_s": report.t.get(1),
            "v": report.v,
            "v_interval": {n: each.as_dict() for n, each in report.v_intervals.items()},
            "c": report.c,
            "a": report.a,
            "plain": {"tokens_per_s": report.plain.rate.as_dict()} if report.plain.runs else None,
            "lengths": [self._cell(cell) for cell in report.lengths],
            "rules": [self._cell(cell) for cell in report.rules],
            "theory": [{"draft_length": k, "speedup": gain} for k, gain in report.curve()],
            "confirmed": None if report.confirmed is None else self._cell(report.confirmed),
            "verdict": report.verdict,
            "best": None if best is None else self._cell(best),
            "command": self.command(),
        }
        return {key: finite(value) for key, value in answer.items()}

    def _cell(self, cell: Cell) -> dict[str, object]:
        same, compared = cell.series.same_texts(cell.base)
        return {
            "draft_length": cell.length,
            "rule": cell.rule,
            "tokens_per_s": cell.series.rate.as_dict(),
            "speedup": cell.speedup.as_dict(),
            "speedup_interval": cell.interval.as_dict(),
            "theory": self.report.predicted(cell),
            "same_text": same,
            "compared_text": compared,
            "stats": cell.stats.as_dict(),
        }


def _described(model: Model) -> dict[str, object]:
    return {
        "name": model.name,
        "file": model.path.name,
        "n_params": model.n_params,
        "file_type": model.file_type,
        "bytes": model.size_bytes,
    }


def _measured(cell: Cell) -> str:
    """Return the speedup with its interval."""
    interval = cell.interval
    open_range = (
        "no 95 % interval from so few" if math.isnan(interval.low) else interval_text(interval)
    )
    return f"{interval.median:.2f} ({open_range})"
