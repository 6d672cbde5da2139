"""``llamabranch bench``: which draft length and rule is the fastest for a pair, on this machine."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import typer

import llamabranch as lb
from llamabranch import ConfigError
from llamabranch.bench.machine import Machine, profile_in_use, profile_problem
from llamabranch.bench.pair import Cell, PairBench, PairReport, Sweep

from ..loading import LoadOptions
from .bundles import option, with_bundles
from .comparison import NOTHING_DRAFTED
from .console import Console, interval_text
from .drafters import is_model, make_drafter
from .interrupts import EXIT_INTERRUPTED, InterruptHandler
from .options import LENGTH, ChatOptions, DraftOptions, ManyPrompts, OutputOptions, SamplingOptions

# A story, instructions, a program, a dialogue: acceptance depends on the kind of text.
PROMPTS = (
    "Once upon a time there was a miller who had nothing left but his mill and one grey goose.",
    "The best way to learn a new language is",
    'def is_prime(n: int) -> bool:\n    """Return True if n is a prime number."""\n',
    'One winter night somebody knocked. "Who is there?" asked the old woman.',
)


@dataclass(frozen=True)
class SizeOptions:
    """How much is measured."""

    panel: ClassVar[str] = "Measurement"
    first: ClassVar[str] = "max_tokens runs quick longest"

    max_tokens: int | None = option(None, "Tokens for each prompt.  [default: 64]", LENGTH, min=1)
    runs: int | None = option(
        None, "How often everything is measured.  [default: 3]", "--runs --repetitions -r", min=1
    )
    quick: bool = option(
        False,
        "One prompt, one run, 16 tokens, lengths 1, 2 and auto: does it run? The times mean little.",
        "--quick",
    )
    longest: int | None = option(
        None, "The longest draft of the sweep.  [default: 8]", min=1, max=64
    )

    def sweep(self) -> Sweep:
        """Return what is compared, and how often."""
        quick = self.quick
        return Sweep(
            lengths=(*range(1, (self.longest or (2 if quick else 8)) + 1), "auto"),
            n_tokens=self.max_tokens or (16 if quick else 64),
            n_runs=self.runs or (1 if quick else 3),
            n_pairs=1 if quick else 12,
            verify_s=0.0 if quick else 2.0,
        )


@with_bundles
def bench(
    *,
    prompts: ManyPrompts,
    chat: ChatOptions,
    size: SizeOptions,
    sampling: SamplingOptions,
    models: DraftOptions,
    output: OutputOptions,
) -> None:
    """Measure drafting with a pair of models here, and name the best setting.

    Plain and speculative decoding take turns on the same prompts with the same seeds; figures are
    medians of the runs. A best setting is named only where a 95 % interval of its speedup lies above
    1. Four prompts are used unless others are given; -m tale-target measures the bundled pair.
    """
    with output.console() as console:
        # Everything that can be wrong in the arguments is found before a model loads.
        params, sweep = sampling.params(models), size.sweep()
        texts = [request.prompt for request in prompts.requests(params)]
        if prompts.input_file is not None and not texts:
            raise ConfigError(f"{prompts.input_file} has no prompts")
        texts = texts or [*PROMPTS[: 1 if size.quick else None]]
        if problem := profile_problem():
            console.note(
                f"{profile_in_use()} cannot be written ({problem}): threads and exactness are "
                "measured in every run"
            )
        target_name, drafters = names = models.resolve(console)
        of_target = LoadOptions(chat_template=chat.template)
        context, drafter = models.open_pair(names, console, of_target, {})
        contexts = dict(zip(filter(is_model, drafters), drafter.contexts, strict=True))

        def new_drafter() -> lb.Drafter:
            """Return what each run gets, over the same contexts."""
            return make_drafter(drafters, contexts.__getitem__)

        params, machine = sampling.without_eog(params, context.model), Machine.now()
        with InterruptHandler([context, *drafter.contexts]) as interrupts:
            measured = PairBench(
                context,
                new_drafter if drafters else None,
                [chat.prompt_tokens(context.model, text) for text in texts],
                params,
                sweep,
                progress=console.progress,
                stop=lambda: interrupts.requested,
            ).run()
        console.progress("")
        report = BenchReport(
            measured, machine, context, drafter, (target_name, *drafters), params.temperature,
            len(texts), sweep, _arguments(sampling, models),
        )  # fmt: skip
        report.print(console)
        if interrupts.requested:
            console.note("interrupted: this is what was measured until then")
            raise typer.Exit(EXIT_INTERRUPTED)


def _arguments(sampling: SamplingOptions, models: DraftOptions) -> list[str]:
    """Return the options that the setting was measured with, for the command line to use."""
    temperature = sampling.temperature
    given = {
        "--temp": None if temperature == lb.SamplingParams().temperature else f"{temperature:g}",
        "--ctx-size": models.n_ctx,
        "--threads": models.threads,
        "--gpu-layers": models.gpu_layers,
        "--kv-type": models.kv_type,
        "--flash-attn": None if models.flash_attn == "auto" else models.flash_attn,
    }
    found = [arg for name, v in given.items() if v is not None for arg in (name, str(v))]
    return [*found, *(arg for text in models.settings or () for arg in ("-S", text))]


# -- what is printed at the end -----------------------------------------------------------------------


@dataclass(frozen=True)
class BenchReport:
    """The measurements of a pair, and the settings and machine they were made with.

    ``machine`` is its state before the measurement, ``names`` are those of the target and of what drafts,
    ``options`` those of the command line for the setting to use.
    """

    report: PairReport
    machine: Machine
    target: lb.Context
    drafter: lb.Drafter
    names: Sequence[str]
    temperature: float
    n_prompts: int
    sweep: Sweep
    options: Sequence[str]

    def command(self) -> str | None:
        """Return the command line of the setting to use, None where none is established."""
        target, *drafters = self.names
        best, arguments = self.report.best, ["llamabranch", "generate", "-m", target]
        if best is not None:
            arguments += ["--draft", "+".join(drafters), "--draft-max", str(best.length)]
            arguments += ["-S", f"rule={best.rule}"] if self.temperature > 0 else []
        elif self.report.verdict == "slower":
            arguments += ["--draft", "none"]
        else:
            return None
        return shlex.join([*arguments, *self.options])

    def _advice(self) -> str:
        report, found = self.report, self.report.confirmed
        if not self.names[1:]:
            return "There is no drafter, so there is nothing to choose."
        if report.verdict == "nothing drafted" or (found is not None and not found.drafts):
            return f"{NOTHING_DRAFTED} Give prompts that it can continue, or another --draft."
        if found is None:
            return "Inconclusive: it was interrupted before the best setting was measured again."
        n, setting = found.interval.n, f"draft length {found.length} and rule {found.rule}"
        ends = interval_text(found.interval).replace("-", "no 95 % interval from so few")
        gain = f"{found.interval.median:.2f} ({ends}) times plain decoding"
        if report.verdict == "faster":
            return f"Best: {setting}, {gain}. Use"
        if report.verdict == "slower":
            return f"Drafting does not pay here: at best, with {setting}, it is {gain}. Use"
        more = max(4 * self.sweep.n_runs, math.ceil(12 / self.n_prompts))
        quiet = self.machine.complaint(self.target.n_threads) or "nothing else running"
        return (
            f"Inconclusive: with {setting} drafting is {gain}, by {n} pair{'s' * (n != 1)} of texts. To "
            f"decide it, measure more: --runs {more}, longer texts (-n), more prompts; {quiet}. Until "
            "then plain decoding (--draft none) is the safe choice."
        )

    def print(self, console: Console) -> None:
        """Print everything that was measured, or the JSON object."""
        console.line(self.machine.describe(self.target.n_threads))
        console.line()
        console.report(self.as_json(), hidden=("machine", "stats", "best", "command"))
        console.line(self._advice())
        if command := self.command():
            console.write(f"\n  {command}\n")

    def as_json(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        report, best, confirmed = self.report, self.report.best, self.report.confirmed
        return {
            "target": _described(self.target.model),
            "drafters": list(self.names[1:]),
            "draft_models": [_described(each.model) for each in self.drafter.contexts],
            "temperature": self.temperature,
            "n_prompts": self.n_prompts,
            "n_tokens": self.sweep.n_tokens,
            "n_runs": self.sweep.n_runs,
            "n_threads": self.target.n_threads,
            "machine": self.machine.as_dict(),
            "profile": profile_in_use(),
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
            "theory": [{"draft_length": k, "speedup": gain} for k, gain in report.theory()],
            "confirmed": None if confirmed is None else self._cell(confirmed),
            "verdict": report.verdict,
            "best": None if best is None else self._cell(best),
            "command": self.command(),
        }

    def _cell(self, cell: Cell) -> dict[str, Any]:
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
            "accept_rate": cell.stats.draft_acceptance_rate,
            "stats": cell.stats.as_dict(),
        }


def _described(model: lb.Model) -> dict[str, Any]:
    names = ("name", "n_params", "file_type")
    about = {name: getattr(model, name) for name in names}
    return {**about, "file": model.path.name, "bytes": model.size_bytes}
