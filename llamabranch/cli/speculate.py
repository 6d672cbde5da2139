"""``llamabranch speculate``: speculative decoding, streamed, with its statistics."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import typer

from llamabranch import (
    Branch,
    ConfigError,
    Context,
    Generation,
    Grammar,
    NullDrafter,
    SamplingParams,
    SpeculativeConfig,
    Speculator,
)
from llamabranch.bench import Divergence, Machine, first_divergence

from ..loading import LoadOptions
from .bundles import option, with_bundles
from .compare import Comparison, compare, run
from .console import Console, print_json
from .drafters import has_model, tree_sequences
from .files import check_new_file, write_new_file
from .interrupts import InterruptHandler
from .opening import open_pair
from .options import (
    DRAFTING,
    OUTPUT,
    ChatOptions,
    DraftedOptions,
    Explain,
    PromptArgument,
    RuntimeOptions,
    TextOutputOptions,
    TextSettings,
)
from .reporting import EXIT_INTERRUPTED
from .speculate_report import SpeculateReport

N_WARM_UP_TOKENS = 8
N_SEQ_MAX = 8  # every context has as many by default; trees need more


@dataclass(frozen=True)
class TreeModels(DraftedOptions):
    """The models, and how they draft: texts or trees."""

    panel: ClassVar[str] = DRAFTING

    draft_width: int = option(
        1, "Candidates at each position of a draft; above 1 the draft is a tree.", min=1, max=16
    )

    def config(self) -> SpeculativeConfig:
        """As in the base class; a tree needs the rule seeded."""
        config = super().config()
        if self.draft_width == 1:
            return config
        if config.rule not in ("auto", "seeded"):
            raise ConfigError(f"token trees need the rule seeded, not {config.rule!r}")
        return replace(config, rule="seeded")

    def contexts(
        self, config: SpeculativeConfig, chat_template: str | None
    ) -> tuple[LoadOptions, LoadOptions]:
        """Return the options of both contexts, with as many sequences as trees need."""
        is_tree = self.draft_width > 1
        both = tree_sequences(config, self.draft_width) if is_tree else (0, 0)
        target, draft = (LoadOptions(n_seq_max=n) if n > N_SEQ_MAX else LoadOptions() for n in both)
        target["chat_template"] = chat_template
        return target, draft


@dataclass(frozen=True)
class SpeculateOutput(TextOutputOptions):
    """What is printed besides the text."""

    panel: ClassVar[str] = OUTPUT

    compare_plain: bool = option(
        False,
        "Also decode plainly, in turn: tokens a second, speedup, and whether the text is the same.",
        "--compare",
    )
    compare_time: float = option(
        60.0,
        "No pair of runs begins for --compare that would end later than this.",
        min=0,
        metavar="SECONDS",
    )
    explain: Explain = False
    top_logprobs: int = option(
        0, "With --json: list each token with this many alternatives.", min=0
    )
    html: Path | None = option(
        None, "Also write a page: tokens by source, probability and entropy.", metavar="FILE"
    )

    def check(self) -> None:
        """Raise for what cannot be written or is not printed."""
        if self.html is not None:
            check_new_file(self.html)
        if self.top_logprobs and not self.as_json:
            raise typer.BadParameter("is printed with --json only", param_hint="--top-logprobs")

    def show(self, report: SpeculateReport, prompt: str, console: Console) -> None:
        """Print a report, then write the page."""
        page = None if self.html is None else report.as_html(prompt)
        if self.as_json:
            print_json(report.as_json())
        else:
            report.print(console.beside, explain=self.explain)
        if self.html is not None and page is not None:
            write_new_file(self.html, page)


@with_bundles
def speculate(
    *,
    given: PromptArgument,
    chat: ChatOptions,
    models: TreeModels,
    text: TextSettings,
    runtime: RuntimeOptions,
    output: SpeculateOutput,
) -> None:
    """Generate text with a draft model and show what the drafting did.

    With -m tale-target the bundled pair generates a story. The draft proposes several tokens, the target
    checks them in one pass; the text has the target's distribution. With a seed or at temperature 0 it is
    the text of plain decoding where the context is batch-invariant; elsewhere rounding can change it.
    On a pipe standard output is the text alone.
    """
    with output.console() as console, ExitStack() as stack:
        # Everything that can be wrong in the arguments is found before a model loads.
        config = models.config()
        output.check()
        seed = secrets.randbits(31) if output.compare_plain and text.seed is None else text.seed
        params, grammar, prompt = text.params(seed), text.parse_grammar(), given.read()
        target, drafters = names = models.resolve(console, has_grammar=grammar is not None)
        if models.draft_width > 1 and not has_model(drafters):
            raise ConfigError("a token tree needs a draft model", hint="name one with --draft")
        runtime = runtime.with_room(target, prompt, text.max_tokens, chat)
        opened, width = models.contexts(config, chat.template), models.draft_width
        context, drafter = open_pair(runtime, names, console, stack, *opened, width=width)
        params = text.without_eog(params, context.model)
        request = _Request(
            chat.prompt_tokens(context.model, prompt), text.max_tokens, params, text.stop_strings,
            grammar, output.top_logprobs,
        )  # fmt: skip
        speculator = Speculator(context, drafter, config)
        rule = _rule_in_effect(speculator, params)
        same_text_expected = not drafters or rule == "seeded" or params.temperature == 0
        machine = Machine.now()
        with InterruptHandler([context, *drafter.contexts]) as interrupts:
            _warm_up(request, speculator, output.compare_plain, interrupts)
            if drafters and not output.as_json:
                console.legend()
            if output.shows_prompt(console) and not output.as_json:
                console.write(chat.shown_prompt(prompt), "dim")
            show = None if output.as_json else console.emit
            first = run(lambda: request.start(speculator), show, interrupts)
            explanation, length = speculator.explain(), speculator.length.explain()
            if not output.as_json:
                console.line("\n" * console.out.is_terminal)
            comparison = divergence = None
            if output.compare_plain and not first.interrupted:
                plain = Speculator(context, NullDrafter(), config)
                comparison = compare(
                    first, lambda: request.start(speculator), lambda: request.start(plain),
                    interrupts, output.compare_time, console.progress,
                )  # fmt: skip
            if comparison is not None and same_text_expected:
                divergence = request.divergence(context, comparison)
        report = SpeculateReport(
            model=context.model,
            first=first,
            drafted=bool(drafters),
            rule=rule,
            explanation=explanation,
            length_explanation=length,
            capabilities=context.capabilities,
            kv_type=context.kv_type,
            same_text_expected=same_text_expected,
            comparison=comparison,
            divergence=divergence,
            with_logprobs=output.top_logprobs > 0,
            machine=machine,
            n_threads=context.n_threads,
            has_grammar=grammar is not None,
        )
        output.show(report, prompt, console)
        if interrupts.requested:
            console.note("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED)


@dataclass(frozen=True)
class _Request:
    """A prompt and everything that determines what is generated from it."""

    prompt: list[int]
    max_tokens: int | None
    sampling: SamplingParams
    stop: Sequence[str]
    grammar: Grammar | None
    top_logprobs: int

    def start(self, speculator: Speculator, max_tokens: int | None = None) -> Generation:
        """Begin the generation."""
        return speculator.generate(
            self.prompt,
            max_tokens=self.max_tokens if max_tokens is None else max_tokens,
            sampling=self.sampling,
            stop=self.stop,
            grammar=self.grammar,
            top_logprobs=self.top_logprobs,
        )

    def divergence(self, context: Context, compared: Comparison) -> Divergence | None:
        """Return the first difference of the two texts."""
        return first_divergence(
            context,
            self.prompt,
            compared.plain.tokens,
            compared.speculative.tokens,
            self.sampling,
            seed=compared.plain.seed,
            grammar=self.grammar,
        )


def _warm_up(
    request: _Request, speculator: Speculator, plain: bool, interrupts: InterruptHandler
) -> None:
    """Decode some tokens: the first decodes of a context are slower than later ones.

    Separate speculators run them, so that they do not influence the draft length.
    """
    config = speculator.config
    contestants = [Speculator(speculator.target, speculator.drafter, replace(config, draft_k=2))]
    if plain:
        contestants.append(Speculator(speculator.target, NullDrafter(), config))
    for each in contestants:
        run(partial(request.start, each, N_WARM_UP_TOKENS), None, interrupts)


def _rule_in_effect(speculator: Speculator, sampling: SamplingParams) -> str:
    with Branch.create(speculator.target, sampling) as branch:
        return speculator.rule_for(branch)
