"""``llamabranch bench``: measure which draft length is the fastest for a pair of models."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import typer

import llamabranch as lb
from llamabranch import ConfigError, hub
from llamabranch.bench.machine import Machine
from llamabranch.bench.pair import Cell, PairBench, PairReport
from llamabranch.model import Prompt
from llamabranch.profile import profile_path

from ..loading import LoadOptions
from .bundles import option, with_bundles
from .console import Console, base_name, interval_text, number, spread_text
from .drafters import is_model, make_drafter
from .interrupts import EXIT_INTERRUPTED, InterruptHandler
from .options import LENGTH, ChatFlags, DraftFlags, ManyPrompts, OutputFlags, SamplingFlags

# A story, instructions, a program and a dialogue, because acceptance depends on the kind of text.
PROMPTS = (
    "Once upon a time there was a miller who had nothing left but his mill and one grey goose.",
    "The best way to learn a new language is",
    'def is_prime(n: int) -> bool:\n    """Return True if n is a prime number."""\n',
    'One winter night somebody knocked. "Who is there?" asked the old woman.',
)
COLUMNS = (
    "draft length", "tokens a second", "x plain", "95 %", "accepted", "tokens a round"
)  # fmt: skip


@dataclass(frozen=True)
class SizeFlags:
    """How many prompts, tokens and runs are measured."""

    panel: ClassVar[str] = "Measurement"
    first: ClassVar[str] = "max_tokens runs quick longest"

    max_tokens: int | None = option(None, "Tokens for each prompt.  [default: 64]", LENGTH, min=1)
    runs: int | None = option(
        None, "How often everything is measured.  [default: 3]", "--runs --repetitions -r", min=1
    )
    quick: bool = option(
        False,
        "Only check that it runs: one prompt, one run, 16 tokens, lengths 1, 2 and auto.",
        "--quick",
    )
    longest: int | None = option(None, "The longest draft to measure.  [default: 8]", min=1, max=64)

    def settings(self) -> dict[str, Any]:
        """Return the settings by their names in `PairBench`."""
        longest = self.longest or (2 if self.quick else 8)
        flags = {"n_tokens": self.max_tokens, "n_runs": self.runs}
        quick = {"n_tokens": 16, "n_runs": 1, "n_pairs": 1} if self.quick else {}
        settings = quick | {name: value for name, value in flags.items() if value is not None}
        return {**settings, "lengths": (*range(1, longest + 1), "auto")}


@with_bundles
def bench(
    *,
    prompts: ManyPrompts,
    chat: ChatFlags,
    size: SizeFlags,
    sampling: SamplingFlags,
    models: DraftFlags,
    output: OutputFlags,
) -> None:
    """Measure drafting with a pair of models here, and name the best draft length.

    Plain and speculative decoding take turns on the same prompts with the same seeds; figures are
    medians of the runs. A best length is named only if the whole 95 % interval of its speedup is above
    1. Without prompts, four built-in ones are used; -m tale-target measures the bundled pair.
    """
    with output.console() as console:
        # All arguments are checked before a model loads.
        params, config = sampling.params(models), models.config()
        texts = _prompts(prompts, params) or PROMPTS[: 1 if size.quick else None]
        target_name, drafters = names = models.resolve(console)
        chat = chat.decided(models.target or hub.default_model())
        of_target = LoadOptions(chat_template=chat.template)
        context, drafter = models.open_pair(names, console, of_target, {})
        contexts = dict(zip(filter(is_model, drafters), drafter.contexts, strict=True))

        def new_drafter() -> lb.Drafter:
            """Return a new drafter, which each run needs, with the same contexts."""
            return make_drafter(drafters, contexts.__getitem__)

        params, machine = sampling.without_eog(params, context.model), Machine.now()
        with InterruptHandler([context, *drafter.contexts]) as interrupts:
            measuring = PairBench(
                context,
                new_drafter if drafters else None,
                [chat.prompt_tokens(context.model, text) for text in texts],
                params,
                config,
                **size.settings(),
                progress=console.progress,
                stop=lambda: interrupts.requested,
            )
            measured = measuring.run()
        console.progress("")
        options = _arguments(sampling, models)
        report = BenchReport(
            measured, measuring, machine, (target_name, *drafters), drafter.contexts, options
        )
        report.print(console)
        if interrupts.requested:
            console.note("interrupted: these are the measurements so far")
            raise typer.Exit(EXIT_INTERRUPTED)


def _prompts(prompts: ManyPrompts, params: lb.SamplingParams) -> Sequence[Prompt]:
    """Return the prompts of the command line and of its files."""
    if any(text.isdecimal() for text in (*(prompts.texts or ()), *(prompts.prompts or ()))):
        raise ConfigError(
            "-p is a text to continue, not llama-bench's number of prompt tokens",
            hint="leave it out to measure drafting on four prompts; -n sets the generated tokens, "
            "--file a long prompt",
        )
    texts = [request.prompt for request in prompts.requests(params)]
    if prompts.input_file is not None and not texts:
        raise ConfigError(f"{prompts.input_file} has no prompts")
    return texts


def _arguments(sampling: SamplingFlags, models: DraftFlags) -> list[str]:
    """Return the options of this measurement, for the suggested command line."""
    temperature = sampling.temperature
    values = {
        "--temp": None if temperature == lb.SamplingParams().temperature else f"{temperature:g}",
        "--ctx-size": models.n_ctx,
        "--threads": models.threads,
        "--gpu-layers": models.gpu_layers,
        "--kv-type": models.kv_type,
        "--flash-attn": None if models.flash_attn == "auto" else models.flash_attn,
    }
    arguments = [arg for name, v in values.items() if v is not None for arg in (name, str(v))]
    return [*arguments, *(arg for text in models.settings or () for arg in ("-S", text))]


# -- the report -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class BenchReport:
    """The measurements, and how they were made.

    ``machine`` is the machine's state before the measurement. ``names`` has the name of the target
    and then the names of the drafters. ``drafts`` has the contexts of the draft models. ``options``
    are options for the suggested command line.
    """

    report: PairReport
    bench: PairBench
    machine: Machine
    names: Sequence[str]
    drafts: Sequence[lb.context.Context]
    options: Sequence[str]

    def command(self) -> str | None:
        """Return the command line with the best draft length; None if none is known to be best."""
        target, *drafters = self.names
        best, arguments = self.report.best, ["llamabranch", "generate", "-m", target]
        if best is not None:
            arguments += ["--draft", "+".join(drafters), "--draft-max", str(best.length)]
        elif self.report.verdict == "slower":
            arguments += ["--draft", "none"]
        else:
            return None
        return shlex.join([*arguments, *self.options])

    def _advice(self) -> str:
        report, bench, confirmed = self.report, self.bench, self.report.confirmed
        if not report.lengths:
            drafters = self.names[1:]
            return "Nothing was compared." if drafters else "There is no drafter to compare."
        advice = "Try prompts that the drafter can continue, or another --draft."
        if report.candidate is None:
            return f"Nothing was drafted in the timed runs, so all are plain decoding. {advice}"
        if confirmed is not None and not confirmed.drafts:
            return (
                f"Inconclusive: draft length {confirmed.length} was the fastest above, but nothing was "
                f"drafted when it was measured once more, with other seeds. {advice}"
            )
        if confirmed is None:
            return "Inconclusive: interrupted before the best length was measured again."
        interval = confirmed.series.interval(confirmed.base)
        n, length = interval.n, f"draft length {confirmed.length}"
        ends = interval_text(interval).replace("-", "no 95 % interval from so few")
        gain = f"{interval.median:.2f} ({ends}) times plain decoding"
        if report.verdict == "faster":
            return f"Best: {length}, {gain}. Use"
        if report.verdict == "slower":
            return f"Drafting does not pay here: the best, with {length}, is {gain}. Use"
        more = max(4 * bench.n_runs, math.ceil(12 / len(bench.prompts)))
        quiet = self.machine.complaint(bench.target.n_threads) or "nothing else running"
        return (
            f"Inconclusive: with {length} drafting is {gain}, by {n} pair{'s' * (n != 1)} of texts. To "
            f"decide it, measure more: --runs {more}, longer texts (-n), more prompts; {quiet}. Until "
            "then plain decoding (--draft none) is the safe choice."
        )

    def print(self, console: Console) -> None:
        """Print everything that was measured, or the JSON object."""
        report, bench, model = self.report, self.bench, self.bench.target.model
        facts = [
            ("target", f"{model.name}, {model.n_params / 1e6:.1f}M, {model.file_type}"),
            ("runs on", "a GPU" if model.on_gpu else "the CPU"),
            ("drafter", " + ".join(map(base_name, self.names[1:])) or "none"),
            ("temperature", f"{bench.sampling.temperature:g}"),
            ("prompts", f"{len(bench.prompts)}, {bench.n_tokens} tokens each, {bench.n_runs} runs"),
            ("plain, tokens a second", spread_text(report.plain.rate, 1)),
        ]
        console.table(("", ""), facts, left=("",))
        console.line()
        console.line(self.machine.describe(bench.target.n_threads))
        console.line()
        if report.lengths:
            rows = list(map(self._row, report.lengths))
            console.table(COLUMNS, rows, wide=("tokens a round",))
            console.line()
        console.line(self._advice())
        if command := self.command():
            console.line()
            console.write(f"  {command}\n")
        console.answer(self.as_json())

    def _row(self, cell: Cell) -> tuple[object, ...]:
        stats = cell.series.stats
        return (
            cell.length,
            spread_text(cell.series.rate, 1),
            spread_text(cell.series.ratio(cell.base), 2),
            interval_text(cell.series.interval(cell.base)),
            number(100 * stats.draft_acceptance_rate, 1, " %"),
            number(stats.mean_acceptance_length, 2),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the whole report in JSON types."""
        report, bench, profile = self.report, self.bench, profile_path()
        return {
            "target": _described(bench.target.model),
            "drafters": list(self.names[1:]),
            "draft_models": [_described(context.model) for context in self.drafts],
            "temperature": bench.sampling.temperature,
            "n_prompts": len(bench.prompts),
            "n_tokens": bench.n_tokens,
            "n_runs": bench.n_runs,
            "n_threads": bench.target.n_threads,
            "machine": self.machine.as_dict(),
            "profile": profile and str(profile),
            "batch_invariant": bench.target.capabilities.batch_invariant,
            "interrupted": report.stopped,
            "plain": {"tokens_per_s": report.plain.rate.as_dict()} if report.plain.runs else None,
            "lengths": [self._cell(cell) for cell in report.lengths],
            "confirmed": self._cell(report.confirmed),
            "verdict": report.verdict,
            "best": self._cell(report.best),
            "command": self.command(),
        }

    def _cell(self, cell: Cell | None) -> dict[str, Any] | None:
        if cell is None:
            return None
        same, compared = cell.series.same_texts(cell.base)
        return {
            "draft_length": cell.length,
            "rule": str(self.bench.config.rule),
            "tokens_per_s": cell.series.rate.as_dict(),
            "speedup": cell.series.ratio(cell.base).as_dict(),
            "speedup_interval": cell.series.interval(cell.base).as_dict(),
            "same_text": same,
            "compared_text": compared,
            "accept_rate": cell.series.stats.draft_acceptance_rate,
            "stats": cell.series.stats.as_dict(),
        }


def _described(model: lb.Model) -> dict[str, Any]:
    about = {name: getattr(model, name) for name in ("name", "n_params", "file_type")}
    return {**about, "file": model.path.name, "bytes": model.size_bytes}
