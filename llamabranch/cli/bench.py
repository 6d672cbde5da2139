"""``llamabranch bench``: which draft length and rule is the fastest for a pair, on this machine."""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import typer

from llamabranch import ConfigError, Context, Drafter, SamplingParams
from llamabranch.bench import Machine, PairBench, load_average
from llamabranch.startup import EXIT_INTERRUPTED

from . import options
from .bench_report import BenchReport
from .drafting import COPYING, drafting_models, make_drafter
from .render import Interruption, Screen, print_json, reporting
from .setup import (
    choose_models,
    loading_options,
    open_context,
    read_prompts,
    wrap_in_template,
)

DEFAULTS = SamplingParams()
# A tale, instructions, a program, a dialogue: acceptance depends on what is written.
PROMPTS = (
    "Once upon a time there was a miller who had nothing left but his mill and one grey goose.",
    "The best way to learn a new language is",
    'def is_prime(n: int) -> bool:\n    """Return True if n is a prime number."""\n',
    'One winter night somebody knocked. "Who is there?" asked the old woman.',
)


def bench(
    target: options.Target = None,
    draft: options.Draft = None,
    prompts: options.BenchPrompts = None,
    input_file: options.Input = None,
    max_tokens: options.BenchTokens = None,
    runs: options.Runs = None,
    quick: options.Quick = False,
    longest: options.Longest = None,
    temperature: options.Temperature = DEFAULTS.temperature,
    top_k: options.TopK = DEFAULTS.top_k,
    top_p: options.TopP = DEFAULTS.top_p,
    min_p: options.MinP = DEFAULTS.min_p,
    repeat_penalty: options.RepeatPenalty = DEFAULTS.repeat_penalty,
    ignore_end: options.IgnoreEnd = False,
    chat: options.Chat = False,
    n_ctx: options.NCtx = None,
    threads: options.Threads = None,
    gpu_layers: options.GpuLayers = None,
    kv_type: options.KvType = None,
    output: options.OutputFolder = None,
    as_json: options.Json = False,
    no_color: options.NoColor = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> None:
    """Measure a pair: what drafting costs and brings here, and the best setting to use.

    Plain and speculative decoding take turns on the same prompts with the same seeds; figures are
    medians of the runs. A best setting is named only where a 95 % interval of its speedup lies above
    1. With no options the bundled pair is measured.
    """
    screen = Screen(color=not no_color)
    with reporting(screen, debug=debug, as_json=as_json), ExitStack() as stack:
        # Everything that can be wrong in the arguments is found before a model loads.
        sampling = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repeat_penalty=repeat_penalty,
        )
        source = read_prompts(prompts or (), input_file)
        given = [request.prompt for request in source.requests(sampling)]
        if input_file is not None and not given:
            raise ConfigError(f"{input_file} has no prompts")
        texts = given or list(PROMPTS[:1] if quick else PROMPTS)
        if output is not None:
            _make_folder(output)
        target_name, parts = choose_models(target, draft)

        loading = loading_options(n_ctx, threads, gpu_layers, kv_type)
        open_model = partial(open_context, screen, stack, loading, verbose, 0)
        context = open_model(target_name)
        # A drafter is made anew for each run, over the same contexts.
        contexts: dict[str, Context] = {
            part: open_model(part) for part in parts if part not in COPYING
        }

        def new_drafter() -> Drafter:
            return make_drafter(parts, contexts.__getitem__, 1)

        models = drafting_models(new_drafter())
        for model in models:
            if context.model.compatibility(model).path == "text":
                screen.note(f"{model.name} has another vocabulary: it drafts through the text")
        if ignore_end:
            ends = dict.fromkeys(context.model.end_tokens, -math.inf)
            sampling = sampling.replace(logit_bias=ends)
        read = partial(wrap_in_template, context) if chat else context.tokenize
        n_tokens = max_tokens or (16 if quick else 64)
        n_runs = runs or (1 if quick else 3)
        machine = Machine.now()
        with Interruption([context, *contexts.values()]) as interruption:
            report = PairBench(
                context,
                new_drafter if parts else None,
                [read(text) if isinstance(text, str) else list(text) for text in texts],
                sampling,
                lengths=(*range(1, (longest or (2 if quick else 8)) + 1), "auto"),
                n_tokens=n_tokens,
                n_runs=n_runs,
                n_pairs=1 if quick else 12,
                verify_s=0.0 if quick else 2.0,
                progress=screen.progress,
                stop=lambda: interruption.asked,
            ).run()
        screen.progress("")
        told = BenchReport(
            report=report,
            machine=machine,
            load_after=load_average(),
            target=context,
            target_name=target_name,
            drafters=parts,
            draft_models=models,
            temperature=temperature,
            n_prompts=len(texts),
            n_tokens=n_tokens,
            n_runs=n_runs,
            options=_pasted(n_ctx, threads, gpu_layers, kv_type, temperature),
        )
        files = [] if output is None else told.write(output, screen)
        if as_json:
            print_json(told.as_json() | {"files": [str(path) for path in files]})
        else:
            told.print(screen)
            for path in files:
                screen.note(f"wrote {path}")
        if interruption.asked:
            screen.note("interrupted: this is what was measured until then")
            raise typer.Exit(EXIT_INTERRUPTED)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write into {path}: {error}") from None


def _pasted(
    n_ctx: int | None,
    threads: int | None,
    gpu_layers: int | None,
    kv_type: str | None,
    temperature: float,
) -> list[str]:
    """Return the options that the measured speed depends on, for a command line."""
    known = {
        "--temperature": None if temperature == DEFAULTS.temperature else f"{temperature:g}",
        "--n-ctx": n_ctx,
        "--threads": threads,
        "--gpu-layers": gpu_layers,
        "--kv-type": kv_type,
    }
    return [
        word for name, value in known.items() if value is not None for word in (name, str(value))
    ]
