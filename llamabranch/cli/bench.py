"""``llamabranch bench``: which draft length and rule is the fastest for a pair, on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import typer

import llamabranch as lb
from llamabranch import ConfigError
from llamabranch.bench import (
    Machine,
    PairBench,
    Sweep,
    profile_in_use,
    profile_problem,
)
from llamabranch.model import Prompt

from ..loading import LoadOptions
from .bench_report import BenchReport
from .bundles import option, with_bundles
from .drafters import MTP, is_model, make_drafter, note_translation
from .interrupts import EXIT_INTERRUPTED, InterruptHandler
from .options import ChatOptions, DraftOptions, ManyPrompts, OutputOptions, SamplingOptions

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

    max_tokens: int | None = option(
        None,
        "Tokens for each prompt.  [default: 64]",
        *("--n-predict", "--max-tokens", "--predict", "-n"),
        min=1,
        first=True,
    )
    runs: int | None = option(
        None,
        "How often everything is measured.  [default: 3]",
        *("--runs", "--repetitions", "-r"),
        min=1,
        first=True,
    )
    quick: bool = option(
        False,
        "One prompt, one run, 16 tokens, lengths 1, 2 and auto: does it run? The times mean little.",
        "--quick",
        first=True,
    )
    longest: int | None = option(
        None, "The longest draft of the sweep.  [default: 8]", min=1, max=64, first=True
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
    with output.console() as console, ExitStack() as stack:
        # Everything that can be wrong in the arguments is found before a model loads.
        params, sweep = sampling.params(models), size.sweep()
        texts = _prompts(prompts, params) or PROMPTS[: 1 if size.quick else None]
        if problem := profile_problem():
            console.note(
                f"{profile_in_use()} cannot be written ({problem}): threads and exactness are "
                "measured in every run"
            )
        target_name, drafters = models.resolve(console)
        of_target = LoadOptions(load_mtp=MTP in drafters, chat_template=chat.template)
        context = models.open(target_name, console, stack, **of_target)
        # Each run gets a new drafter, over the same contexts.
        contexts = {
            name: models.open_draft(name, context, console, stack, {})
            for name in filter(is_model, drafters)
        }

        def new_drafter() -> lb.Drafter:
            return make_drafter(drafters, contexts.__getitem__)

        note_translation(new_drafter(), context.model, console)
        params = sampling.without_eog(params, context.model)
        machine = Machine.now()
        with InterruptHandler([context, *contexts.values()]) as interrupts:
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
            report=measured,
            machine=machine,
            target=context,
            target_name=target_name,
            drafters=drafters,
            draft_models=[each.model for each in new_drafter().contexts],
            temperature=params.temperature,
            n_prompts=len(texts),
            n_tokens=sweep.n_tokens,
            n_runs=sweep.n_runs,
            options=_arguments(sampling, models),
        )
        report.print(console)
        console.answer(report.as_json())
        if interrupts.requested:
            console.note("interrupted: this is what was measured until then")
            raise typer.Exit(EXIT_INTERRUPTED)


def _prompts(prompts: ManyPrompts, params: lb.SamplingParams) -> Sequence[Prompt]:
    """Return the prompts that were given."""
    if any(text.isdecimal() for text in (*(prompts.texts or ()), *(prompts.prompts or ()))):
        raise ConfigError(
            "-p is a text to continue, not llama-bench's number of prompt tokens",
            hint="leave it out to measure drafting on four prompts; -n sets the generated tokens, "
            "--file a long prompt",
        )
    found = [request.prompt for request in prompts.requests(params)]
    if prompts.input_file is not None and not found:
        raise ConfigError(f"{prompts.input_file} has no prompts")
    return found


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
