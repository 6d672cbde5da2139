"""``llamabranch speculate``: speculative decoding, streamed, with its statistics."""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import typer

from llamabranch import (
    ConfigError,
    Context,
    Drafter,
    Generation,
    Grammar,
    ModelDrafter,
    NullDrafter,
    SamplingParams,
    SpeculativeConfig,
    Speculator,
    hub,
)

from . import options
from .compare import Comparison, Run, compare, round_cost, run
from .render import (
    EXIT_INTERRUPTED,
    Interruption,
    Screen,
    number,
    print_json,
    reporting,
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

    def start(self, speculator: Speculator, max_tokens: int | None = None) -> Generation:
        """Begin the generation."""
        return speculator.generate(
            self.prompt,
            max_tokens=self.max_tokens if max_tokens is None else max_tokens,
            sampling=self.sampling,
            stop=self.stop,
            grammar=self.grammar,
        )


def speculate(
    prompt: options.Prompt = DEFAULT_PROMPT,
    target: options.Target = None,
    draft: options.Draft = None,
    draft_length: options.DraftLength = "4",
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
    with reporting(screen, debug=debug), ExitStack() as stack:
        loading = hub.LoadOptions()
        if n_ctx is not None:
            loading["n_ctx"] = n_ctx
        if threads is not None:
            loading["n_threads"] = threads
            loading["n_threads_batch"] = threads
        if gpu_layers is not None:
            loading["n_gpu_layers"] = gpu_layers
        if kv_type is not None:
            loading["kv_type"] = kv_type
        if compare_plain and seed is None:
            seed = secrets.randbits(31)
        # Everything that can be wrong in the arguments is found before a model loads.
        config = SpeculativeConfig(draft_k=_parse_length(draft_length), entropy_stop=entropy_stop)
        sampling = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repeat_penalty=repeat_penalty,
            seed=seed,
        )
        limits = _parse_grammar(grammar, json_schema)
        if prompt == "-":
            prompt = sys.stdin.read()
        target_name, draft_name = _choose(target, draft)

        context = _open(target_name, screen, stack, loading, verbose)
        drafter: Drafter = NullDrafter()
        if draft_name is not None:
            drafter = ModelDrafter(_open(draft_name, screen, stack, loading, verbose))
        if ignore_end:
            ends = dict.fromkeys(context.model.end_tokens, -math.inf)
            sampling = replace(sampling, logit_bias=ends)
        job = Job(
            prompt=_wrap(context, prompt) if chat else prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=tuple(stop or ()),
            grammar=limits,
        )
        speculator = Speculator(context, drafter, config)
        plain = Speculator(context, NullDrafter(), config)
        with Interruption() as interruption:
            # The first decodes of a context are slower than the rest, whoever makes them.
            run(lambda: job.start(speculator, N_WARM_UP_TOKENS), None, interruption)
            if compare_plain:
                run(lambda: job.start(plain, N_WARM_UP_TOKENS), None, interruption)
            if not as_json:
                if draft_name is not None:
                    screen.legend()
                screen.write(prompt, "dim")
            show = None if as_json else screen.emit
            first = run(lambda: job.start(speculator), show, interruption)
            if not as_json:
                screen.line("\n")
            comparison = None
            if compare_plain and not first.interrupted:
                comparison = compare(
                    first, lambda: job.start(speculator), lambda: job.start(plain), interruption
                )
        if as_json:
            print_json(_as_json(first, comparison))
        else:
            _print_summary(screen, first, comparison, drafted=draft_name is not None)
        if interruption.asked:
            screen.note("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED)


def _parse_length(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is neither a number nor auto", param_hint="--draft-length"
        ) from None


def _parse_grammar(grammar: Path | None, json_schema: str | None) -> Grammar | None:
    if grammar is not None and json_schema is not None:
        raise typer.BadParameter("--grammar and --json-schema exclude each other")
    if grammar is not None:
        return Grammar(_read(grammar))
    if json_schema is not None:
        inline = json_schema.lstrip().startswith("{")
        return Grammar.from_json_schema(json_schema if inline else _read(Path(json_schema)))
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def _choose(target: str | None, draft: str | None) -> tuple[str, str | None]:
    """Return the names of the target and of the draft, None standing for no draft."""
    # Both are looked for before either is loaded.
    target_name = hub.BUNDLED_TARGET if target is None else target
    hub.resolve(target_name)
    draft_name = hub.draft_for(target_name) if draft is None else draft
    if draft_name is None:
        raise ConfigError(
            f"no draft is known for {target_name}",
            hint="name one with --draft, or decode plainly with --draft none",
        )
    if draft_name == "none":
        return target_name, None
    hub.resolve(draft_name)
    return target_name, draft_name


def _open(
    name: str, screen: Screen, stack: ExitStack, loading: hub.LoadOptions, verbose: bool
) -> Context:
    with screen.loading(name) as progress:
        return stack.enter_context(hub.load(name, progress=progress, verbose=verbose, **loading))


def _wrap(context: Context, prompt: str) -> list[int]:
    text = context.model.apply_chat_template([("user", prompt)])
    # The template writes the special tokens itself, the first one included.
    return context.model.tokenize(text, add_special=False, parse_special=True)


def _as_json(first: Run, comparison: Comparison | None) -> dict[str, object]:
    speed = first.tokens_per_s if comparison is None else comparison.speculative_tokens_per_s
    answer: dict[str, object] = {
        "text": first.text,
        "tokens": first.tokens,
        "finish_reason": first.finish_reason,
        "tokens_per_s": speed,
        "seed": first.seed,
        "stats": first.stats.as_dict(),
    }
    if comparison is not None:
        answer["plain"] = {
            "text": comparison.plain.text,
            "tokens": comparison.plain.tokens,
            "tokens_per_s": comparison.plain_tokens_per_s,
        }
        answer["speedup"] = comparison.speedup
        answer["same_text"] = comparison.same_text
    return answer


def _print_summary(
    screen: Screen, first: Run, comparison: Comparison | None, *, drafted: bool
) -> None:
    stats = first.stats
    rows: list[tuple[str, str]] = []
    if drafted:
        rows += [
            ("iterations", str(stats.num_drafts)),
            ("drafted", str(stats.num_draft_tokens)),
            ("accepted", str(stats.num_accepted_tokens)),
            ("accept rate", number(100 * stats.draft_acceptance_rate, 1, " %")),
            ("tokens a round", number(stats.mean_acceptance_length, 2)),
        ]
    rows.append(("tokens", str(len(first.tokens))))
    if comparison is None:
        rows += [("tokens a second", f"{first.tokens_per_s:.1f}"), ("seed", str(first.seed))]
        screen.table(("", "speculative" if drafted else "plain"), rows)
    else:
        fast, slow = comparison.speculative_tokens_per_s, comparison.plain_tokens_per_s
        wide = [(label, value, "") for label, value in rows[:-1]]
        wide += [
            ("tokens", str(len(first.tokens)), str(len(comparison.plain.tokens))),
            ("tokens a second", f"{fast:.1f}", f"{slow:.1f}"),
            ("speedup", f"{comparison.speedup:.2f}", "1"),
            ("same text", "yes" if comparison.same_text else "no", ""),
            ("seed", str(first.seed), str(comparison.plain.seed)),
        ]
        screen.table(("", "speculative", "plain"), wide)
    if first.finish_reason == "capacity":
        screen.note("the context is full: raise --n-ctx to go on")
    if comparison is None:
        return
    if not comparison.same_text:
        screen.line()
        screen.line(
            "The texts differ: this model's logits change a little with the batch (`llamabranch "
            "inspect` says whether it is batch-invariant), and two tokens were almost equally good."
        )
    if drafted and comparison.speedup < 1:
        cost = round_cost(first.stats, comparison.plain.stats)
        if cost is not None:
            screen.line()
            screen.line(f"Slower than plain decoding here. {cost.explain()}")
