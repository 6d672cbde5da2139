"""``llamabranch speculate``: speculative decoding, streamed, with its statistics."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import typer

from llamabranch import (
    Branch,
    ConfigError,
    Context,
    Divergence,
    Generation,
    Grammar,
    NullDrafter,
    SamplingParams,
    SpeculativeConfig,
    Speculator,
    first_divergence,
)
from llamabranch.bench import Machine
from llamabranch.startup import EXIT_INTERRUPTED

from . import options
from .compare import Comparison, compare, run
from .drafting import drafting_contexts, drafting_models, has_model, make_drafter, tree_sequences
from .render import Interruption, Screen, print_json, reporting
from .report import Outcome
from .setup import (
    choose_models,
    loading_options,
    open_context,
    parse_grammar,
    parse_length,
    read_standard_input,
    wrap_in_template,
)

DEFAULT_PROMPT = "Once upon a time"
DEFAULTS = SamplingParams()
N_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Job:
    """A prompt and everything that decides what is generated from it."""

    prompt: str | list[int]
    max_tokens: int
    sampling: SamplingParams
    stop: Sequence[str]
    grammar: Grammar | None
    top_logprobs: int = 0

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
        """Return where the two texts part."""
        prompt = self.prompt
        return first_divergence(
            context,
            context.tokenize(prompt) if isinstance(prompt, str) else prompt,
            compared.plain.tokens,
            compared.speculative.tokens,
            self.sampling,
            seed=compared.plain.seed,
            grammar=self.grammar,
        )


def speculate(
    prompt: options.Prompt = DEFAULT_PROMPT,
    target: options.Target = None,
    draft: options.Draft = None,
    draft_length: options.DraftLength = "4",
    draft_width: options.DraftWidth = 1,
    rule: options.Rule = "auto",
    entropy_stop: options.EntropyStop = None,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = DEFAULTS.temperature,
    top_k: options.TopK = DEFAULTS.top_k,
    top_p: options.TopP = DEFAULTS.top_p,
    min_p: options.MinP = DEFAULTS.min_p,
    repeat_penalty: options.RepeatPenalty = DEFAULTS.repeat_penalty,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_end: options.IgnoreEnd = False,
    grammar: options.GrammarFile = None,
    json_schema: options.JsonSchema = None,
    chat: options.Chat = False,
    n_ctx: options.NCtx = None,
    threads: options.Threads = None,
    gpu_layers: options.GpuLayers = None,
    kv_type: options.KvType = None,
    compare_plain: options.Compare = False,
    explain: options.Explain = False,
    top_logprobs: options.TopLogprobs = 0,
    as_json: options.Json = False,
    no_color: options.NoColor = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> None:
    """Generate text with a draft model and show what the drafting did.

    With no options the bundled pair tells a tale. The draft proposes several tokens, the target
    checks them in one pass; what comes out is the target's own text.
    """
    screen = Screen(color=not no_color)
    with reporting(screen, debug=debug, as_json=as_json), ExitStack() as stack:
        loading = loading_options(n_ctx, threads, gpu_layers, kv_type)
        if compare_plain and seed is None:
            seed = secrets.randbits(31)
        # Everything that can be wrong in the arguments is found before a model loads.
        config = SpeculativeConfig(
            draft_k=parse_length(draft_length),
            entropy_stop=entropy_stop,
            rule=_rule_for_width(rule, draft_width),
        )
        if top_logprobs and not as_json:
            raise typer.BadParameter("is printed with --json only", param_hint="--top-logprobs")
        sampling = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repeat_penalty=repeat_penalty,
            seed=seed,
        )
        limits = parse_grammar(grammar, json_schema)
        if prompt == "-":
            prompt = read_standard_input()
        target_name, parts = choose_models(target, draft)
        if draft_width > 1 and not has_model(parts):
            raise ConfigError("a token tree needs a draft model", hint="name one with --draft")

        n_target, n_draft = tree_sequences(config, draft_width) if draft_width > 1 else (0, 0)
        open_model = partial(open_context, screen, stack, loading, verbose)
        context = open_model(n_target, target_name)
        drafter = make_drafter(parts, partial(open_model, n_draft), draft_width)
        for model in drafting_models(drafter):
            if context.model.compatibility(model).path == "text":
                screen.note(f"{model.name} has another vocabulary: it drafts through the text")
        if ignore_end:
            ends = dict.fromkeys(context.model.end_tokens, -math.inf)
            sampling = replace(sampling, logit_bias=ends)
        job = Job(
            prompt=wrap_in_template(context, prompt) if chat else prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=tuple(stop or ()),
            grammar=limits,
            top_logprobs=top_logprobs,
        )
        speculator = Speculator(context, drafter, config)
        plain = Speculator(context, NullDrafter(), config)
        rule = _rule_in_effect(speculator, sampling)
        same_text_expected = not parts or rule == "seeded" or temperature == 0
        machine = Machine.now()
        with Interruption([context, *drafting_contexts(drafter)]) as interruption:
            # The first decodes of a context are slower than the rest, whoever makes them.
            # They teach the draft length nothing: hence a speculator of their own.
            cold = Speculator(context, drafter, replace(config, draft_k=2))
            run(lambda: job.start(cold, N_WARM_UP_TOKENS), None, interruption)
            if compare_plain:
                run(lambda: job.start(plain, N_WARM_UP_TOKENS), None, interruption)
            if not as_json:
                if parts:
                    screen.legend()
                screen.write(prompt, "dim")
            show = None if as_json else screen.emit
            first = run(lambda: job.start(speculator), show, interruption)
            explanation = speculator.explain()
            if not as_json:
                screen.line("\n")
            comparison = divergence = None
            if compare_plain and not first.interrupted:
                comparison = compare(
                    first, lambda: job.start(speculator), lambda: job.start(plain), interruption
                )
            if comparison is not None and same_text_expected:
                divergence = job.divergence(context, comparison)
        outcome = Outcome(
            model=context.model,
            first=first,
            drafted=bool(parts),
            rule=rule,
            explanation=explanation,
            batch_invariant=context.capabilities.batch_invariant,
            batch_invariant_reason=context.capabilities.batch_invariant_reason,
            same_text_expected=same_text_expected,
            comparison=comparison,
            divergence=divergence,
            with_logprobs=top_logprobs > 0,
            machine=machine,
            n_threads=context.n_threads,
        )
        if as_json:
            print_json(outcome.as_json())
        else:
            outcome.print(screen, explain=explain)
        if interruption.asked:
            screen.note("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED)


def _rule_for_width(rule: str, width: int) -> str:
    if width == 1:
        return rule
    if rule not in ("auto", "seeded"):
        raise ConfigError(f"token trees need the rule seeded, not {rule!r}")
    return "seeded"


def _rule_in_effect(speculator: Speculator, sampling: SamplingParams) -> str:
    with Branch.create(speculator.target, sampling) as branch:
        return speculator.rule_for(branch)
