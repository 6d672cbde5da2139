"""``llamabranch bench``: which draft length and rule is the fastest for a pair, on this machine."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import typer

from llamabranch import ConfigError, Context, Drafter, LlamaBranchError
from llamabranch.bench import (
    Machine,
    PairBench,
    Sweep,
    load_average,
    profile_in_use,
    profile_problem,
)
from llamabranch.model import Prompt

from .bench_report import FILES, BenchReport
from .bundles import option, with_bundles
from .console import Console, print_json
from .drafters import MTP, drafting_models, is_model, make_drafter, note_translation
from .files import check_new_file
from .interrupts import InterruptHandler
from .options import (
    DRAFTING,
    REQUESTS,
    ChatOptions,
    ModelOptions,
    OutputOptions,
    PromptOptions,
    RuntimeOptions,
    SamplingOptions,
)
from .reporting import EXIT_INTERRUPTED

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

    panel: ClassVar[str] = REQUESTS

    max_tokens: int | None = option(
        None,
        "Tokens for each prompt. Default: 64.",
        "--max-tokens",
        "--predict",
        "--n-predict",
        "-n",
        min=1,
    )
    runs: int | None = option(
        None,
        "How often everything is measured. Default: 3.",
        "--runs",
        "--repetitions",
        "-r",
        min=1,
    )
    quick: bool = option(
        False,
        "One prompt, one run, 16 tokens, lengths 1, 2 and auto: does it run? The times mean "
        "little.",
        "--quick",
    )
    longest: int | None = option(
        None, "The longest draft of the sweep. Default: 8.", min=1, max=64, rich_help_panel=DRAFTING
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


@dataclass(frozen=True)
class BenchOutput(OutputOptions):
    """Where the results go."""

    folder: Path | None = option(
        None,
        "Write bench.json, speed.png and acceptance.png into this folder.",
        "--output",
        "-o",
        metavar="DIR",
    )

    def check(self) -> None:
        """Make the folder; raise ConfigError for what cannot be written or is there already."""
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"cannot write into {self.folder}: {error}") from None
            for name in FILES:
                check_new_file(self.folder / name)

    def show(self, report: BenchReport, console: Console) -> None:
        """Write the files and print the report; what the files raise is raised after that."""
        files: list[Path] = []
        failure: LlamaBranchError | None = None
        try:
            if self.folder is not None:
                for path in report.write(self.folder, console):
                    files.append(path)
        except LlamaBranchError as error:
            failure = error
        if self.as_json:
            print_json(report.as_json() | {"files": [str(path) for path in files]})
        else:
            report.print(console)
            for path in files:
                console.note(f"wrote {path}")
        if failure is not None:
            raise failure


@with_bundles
def bench(
    *,
    models: ModelOptions,
    prompts: PromptOptions,
    chat: ChatOptions,
    size: SizeOptions,
    sampling: SamplingOptions,
    runtime: RuntimeOptions,
    output: BenchOutput,
) -> None:
    """Measure a pair: what drafting costs and brings here, and the best setting to use.

    Plain and speculative decoding take turns on the same prompts with the same seeds; figures are
    medians of the runs. A best setting is named only where a 95 % interval of its speedup lies above
    1. Costs, and what "auto" learns, are kept in the profile of the machine. Four prompts are used
    unless others are given; -m tale-target measures the bundled pair.
    """
    with output.console() as console, ExitStack() as stack:
        # Everything that can be wrong in the arguments is found before a model loads.
        params, sweep = sampling.params(), size.sweep()
        if any(text.isdecimal() for text in prompts.given):
            raise ConfigError(
                "-p is a text to continue, not llama-bench's number of prompt tokens",
                hint="leave it out to measure drafting on four prompts; -n sets the generated tokens, "
                "--file a long prompt",
            )
        given = [request.prompt for request in prompts.read().requests(params)]
        if prompts.input_file is not None and not given:
            raise ConfigError(f"{prompts.input_file} has no prompts")
        texts = given or list(PROMPTS[:1] if size.quick else PROMPTS)
        output.check()
        if problem := profile_problem():
            console.note(
                f"{profile_in_use()} cannot be written ({problem}): no later run knows these times"
            )
        target_name, drafters = models.resolve(console)

        context = runtime.open(
            target_name, console, stack, load_mtp=MTP in drafters, chat_template=chat.template
        )
        # Each run gets a new drafter, over the same contexts.
        contexts: dict[str, Context] = {
            name: runtime.open_draft(name, context, console, stack)
            for name in drafters
            if is_model(name)
        }

        def new_drafter() -> Drafter:
            return make_drafter(drafters, contexts.__getitem__, width=1)

        note_translation(new_drafter(), context.model, console)
        params = sampling.without_eog(params, context.model)
        machine = Machine.now()
        with InterruptHandler([context, *contexts.values()]) as interrupts:
            measured = PairBench(
                context,
                new_drafter if drafters else None,
                [_tokens(context, text, chat) for text in texts],
                params,
                sweep,
                progress=console.progress,
                stop=lambda: interrupts.requested,
            ).run()
        console.progress("")
        report = BenchReport(
            report=measured,
            machine=machine,
            load_after=load_average(),
            target=context,
            target_name=target_name,
            drafters=drafters,
            draft_models=drafting_models(new_drafter()),
            temperature=params.temperature,
            n_prompts=len(texts),
            n_tokens=sweep.n_tokens,
            n_runs=sweep.n_runs,
            options=[*sampling.temperature_arguments(), *runtime.as_arguments()],
            profile=profile_in_use(),
        )
        output.show(report, console)
        if interrupts.requested:
            console.note("interrupted: this is what was measured until then")
            raise typer.Exit(EXIT_INTERRUPTED)


def _tokens(context: Context, prompt: Prompt, chat: ChatOptions) -> list[int]:
    if isinstance(prompt, str):
        return chat.prompt_tokens(context.model, prompt)
    return context.model.prompt_tokens(prompt)
