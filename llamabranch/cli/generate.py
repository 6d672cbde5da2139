"""``llamabranch generate``: any number of prompts, batched, with a draft model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from llamabranch import (
    ConfigError,
    Context,
    DecodeInterruptedError,
    Engine,
    Grammar,
    Request,
    SamplingParams,
)

from .bundles import with_bundles
from .console import Console, print_json
from .drafters import COPYING, MTP, drafting_contexts, make_drafter, note_translation
from .generate_report import GenerateReport
from .interrupts import InterruptHandler
from .job_survey import JobSurvey
from .jsonl import InvalidLines
from .options import (
    DRAFTING,
    REQUESTS,
    RUNTIME,
    CacheRam,
    ChatOptions,
    DraftOptions,
    Explain,
    ModelOptions,
    Parallel,
    PromptOptions,
    RuntimeOptions,
    SamplingOptions,
    TextOptions,
    TextOutputOptions,
    UnifiedCache,
)
from .prompts import PromptSource, digest
from .ray_jobs import RayOptions, finish_job, job_paths
from .reporting import EXIT_FAILURE, EXIT_INTERRUPTED
from .results import JobSettings, ResultFile

_CELLS_PER_TEXT = 512  # of the cache, unless --n-ctx is given
_LEAST_CELLS = 2048
_SKIP_HINT = "correct what is invalid, or leave it out with --skip-invalid"


@with_bundles
def generate(
    *,
    prompts: PromptOptions,
    chat: ChatOptions,
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Append each result to this file as it ends, one JSON object a line.",
            rich_help_panel=REQUESTS,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Skip the texts that are in --output already.",
            rich_help_panel=REQUESTS,
        ),
    ] = False,
    skip_invalid: Annotated[
        bool,
        typer.Option(
            "--skip-invalid",
            help="Leave out lines of --input that are no requests; they are named on standard error.",
            rich_help_panel=REQUESTS,
        ),
    ] = False,
    in_order: Annotated[
        bool,
        typer.Option(
            "--in-order",
            help="Give the results in the order of the prompts, not as they end.",
            rich_help_panel=REQUESTS,
        ),
    ] = False,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats",
            help="Add the statistics of drafting to each result.",
            rich_help_panel=REQUESTS,
        ),
    ] = False,
    samples: Annotated[
        int,
        typer.Option(
            min=1, help="Texts for each prompt, from one prefill.", rich_help_panel=REQUESTS
        ),
    ] = 1,
    models: ModelOptions,
    drafting: DraftOptions,
    auto_regressive: Annotated[
        bool,
        typer.Option(
            "--auto-regressive",
            help="Decode plainly, without a draft: the same as --draft none.",
            rich_help_panel=DRAFTING,
        ),
    ] = False,
    text: TextOptions,
    sampling: SamplingOptions,
    top_logprobs: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Give each token with its log-probability and so many of the most probable ones.",
            rich_help_panel=REQUESTS,
        ),
    ] = None,
    prompt_logprobs: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Rate the prompts' tokens, with so many of the most probable ones.",
            rich_help_panel=REQUESTS,
        ),
    ] = None,
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache",
            help="Keep the K/V of finished texts for prompts that begin like them.",
            rich_help_panel=RUNTIME,
        ),
    ] = False,
    cache_ram: CacheRam = 0,
    parallel: Parallel = 8,
    kv_unified: UnifiedCache = None,
    runtime: RuntimeOptions,
    cluster: RayOptions,
    explain: Explain = False,
    output: TextOutputOptions,
) -> None:
    """Continue any number of prompts together, with a draft model.

    All texts share one decode a step. With a seed, or at temperature 0, each is the one its prompt has
    alone where the context is batch-invariant; elsewhere rounding can change it. A text is printed, or
    written to --output, as soon as it ends. On a pipe standard output is the texts alone, in the order of
    the prompts.
    """
    with output.console() as console, ExitStack() as stack:
        # Everything that can be wrong in the arguments is found before a model loads.
        config = drafting.config()
        params = sampling.params()
        grammar = text.parse_grammar()
        if resume and output_file is None:
            raise typer.BadParameter("needs --output", param_hint="--resume")
        if cluster.ray is not None:
            refused = {
                "--top-logprobs": top_logprobs is not None,
                "--prompt-logprobs": prompt_logprobs is not None,
                "--ignore-eos": sampling.ignore_eos,
                "--skip-invalid": skip_invalid,
                "--system-prompt": chat.system is not None,
                "--n-ctx 0": runtime.n_ctx == 0,
            }
            _generate_on_ray(
                cluster, console, prompts, chat, output_file, resume, samples, models, text, sampling,
                grammar, parallel, runtime, [name for name, given in refused.items() if given],
                as_json=output.as_json,
            )  # fmt: skip
            return
        source = prompts.read()
        invalid = InvalidLines()

        has_grammar = False

        def read() -> Iterator[Request]:
            nonlocal has_grammar
            for request in _requests(source, params, text, grammar, samples, invalid):
                has_grammar |= request.grammar is not None
                yield replace(
                    request,
                    top_logprobs=_either(request.top_logprobs, top_logprobs),
                    prompt_logprobs=_either(request.prompt_logprobs, prompt_logprobs),
                )

        job = JobSurvey.of(read, text.max_tokens)
        invalid.report(console, skip=skip_invalid, hint=_SKIP_HINT)
        if not job.n_requests:
            raise ConfigError("there is no prompt", hint="give --prompts or --input")
        settings = JobSettings(
            sampling=_sampling_digest(params, grammar, text, sampling, chat),
            samples=samples,
            rule=drafting.rule,
            kv_type=runtime.kv_type or ("auto" if runtime.exact else "f16"),
            seed=text.seed,
            seed_given=text.seed is not None,
        )
        file = None
        if output_file is not None:
            results = ResultFile(output_file, settings, job.requests(), resume=resume, stats=stats)
            file = stack.enter_context(results)
            settings = file.job
        if auto_regressive:
            models = replace(models, draft="none")
        target_name, drafters = models.resolve(console, has_grammar=has_grammar)

        job = job.measured(models.find(target_name), runtime.n_ctx)
        given = runtime.n_ctx is not None
        n_own = None
        if kv_unified is False:
            n_own = job.most_cells_per_text(parallel)
        elif kv_unified is None and not given and all(name in COPYING for name in drafters):
            n_own = job.cells_per_text(parallel)
            kv_unified = n_own is None
        elif kv_unified is None:
            kv_unified = True
        if runtime.n_ctx is None and (parallel > 1 or job.n_ctx > _LEAST_CELLS):
            n_ctx = max(
                _LEAST_CELLS, _CELLS_PER_TEXT * parallel, (n_own or 0) * parallel, job.n_ctx
            )
            runtime = replace(runtime, n_ctx=n_ctx)
        context = runtime.open(
            target_name,
            console,
            stack,
            n_seq_max=parallel,
            prefix_cache=prefix_cache or cache_ram > 0,
            cache_ram=cache_ram << 20,
            kv_unified=kv_unified,
            load_mtp=MTP in drafters,
            chat_template=chat.template,
        )

        def open_draft(name: str) -> Context:
            keeps = prefix_cache or cache_ram > 0
            return runtime.open_draft(
                name, context, console, stack, n_seq_max=parallel, prefix_cache=keeps
            )

        drafter = make_drafter(drafters, open_draft, width=1)
        note_translation(drafter, context.model, console)
        engine = Engine(
            context,
            drafter,
            config,
            sampling=params,
            max_tokens=text.max_tokens,
            seed=settings.seed if settings.seed_given else None,
        )
        # One seed for all requests, also if none was given: a resumed job continues with the one that was
        # picked for it.
        engine.seed = engine.seed if settings.seed is None else settings.seed
        if file is not None:
            file.open(context.model, engine.seed)
        report = GenerateReport(
            engine,
            job,
            console,
            file,
            quiet=output.as_json,
            in_order=in_order,
            stats=stats,
            display_prompt=output.display_prompt,
            chat=chat.is_on,
        )
        interrupted = _run(report, sampling, chat)
        if output.as_json:
            print_json(report.as_json(interrupted))
        else:
            report.print(explain=explain)
        if interrupted:
            console.note("interrupted" + ("" if file is None else "; --resume continues from here"))
            raise typer.Exit(EXIT_INTERRUPTED)
        if report.n_failed:
            raise typer.Exit(EXIT_FAILURE)


def _generate_on_ray(
    cluster: RayOptions,
    console: Console,
    prompts: PromptOptions,
    chat: ChatOptions,
    output: Path | None,
    resume: bool,
    samples: int,
    models: ModelOptions,
    text: TextOptions,
    sampling: SamplingOptions,
    grammar: Grammar | None,
    parallel: int,
    runtime: RuntimeOptions,
    refused: list[str],
    *,
    as_json: bool,
) -> None:
    from llamabranch import scale

    if refused:
        raise ConfigError(f"a job on Ray has no {refused[0]}")
    inputs, folder = job_paths(prompts.input_file, output, prompts.prompts)
    options = cluster.options(console, resume=resume, streams=parallel)
    load = runtime.options()
    if chat.template is not None:
        load["chat_template"] = chat.template
    options["draft"] = None if models.draft == "none" else models.draft
    report = scale.generate(
        inputs,
        folder,
        model=models.target_name,
        max_tokens=text.max_tokens,
        seed=text.seed,
        sampling=sampling.params(),
        stop=text.stop_strings,
        grammar=grammar,
        n=samples,
        chat=chat.is_on,
        parse_special=chat.parse_special,
        load=load,
        **options,
    )
    finish_job(console, report, as_json=as_json)


def _requests(
    source: PromptSource,
    sampling: SamplingParams,
    text: TextOptions,
    grammar: Grammar | None,
    samples: int,
    invalid: InvalidLines,
) -> Iterator[Request]:
    for request in source.requests(sampling, invalid.add):
        yield replace(
            request,
            stop=request.stop or text.stop_strings,
            grammar=request.grammar or grammar,
            n=max(request.n, samples),
        )


def _either(given: int | None, default: int | None) -> int | None:
    return default if given is None else given


def _sampling_digest(
    params: SamplingParams,
    grammar: Grammar | None,
    text: TextOptions,
    sampling: SamplingOptions,
    chat: ChatOptions,
) -> str:
    """Return a digest of all command-line options that set how to sample and when to stop."""
    return digest(
        {
            "sampling": asdict(params),
            "grammar": None if grammar is None else grammar.as_dict(),
            "max_tokens": text.max_tokens,
            "stop": list(text.stop_strings),
            "ignore_end": sampling.ignore_eos,
            "chat": chat.is_on,
            **({} if chat.parse_special else {"parse_special": False}),
        }
        # Not in the digests of older files, where these were not given.
        | ({} if chat.system is None else {"system": chat.system})
        | ({} if chat.template is None else {"chat_template": chat.template})
    )


def _run(report: GenerateReport, options: SamplingOptions, chat: ChatOptions) -> bool:
    """Run all requests; return whether it was interrupted."""
    engine = report.engine

    def prepared(request: Request) -> Request:
        report.begin(request)
        if request.sampling is not None:
            params = options.without_eog(request.sampling, engine.target.model)
            request = replace(request, sampling=params)
        if chat.is_on and isinstance(request.prompt, str):
            tokens = chat.prompt_tokens(engine.target.model, request.prompt)
            return replace(request, prompt=tokens)
        return replace(request, parse_special=request.parse_special and chat.parse_special)

    requests: Iterable[Request] = map(prepared, report.job.requests())
    if report.job.kept is not None:  # a list begins in the order of priorities
        requests = list(requests)
    stream = engine.stream(requests, skip=report.done)
    contexts = [engine.target, *drafting_contexts(engine.drafter)]
    with InterruptHandler(contexts) as interrupts, report.progress() as progress:
        try:
            for event in stream:
                progress.update(event)
                if event.result is not None:
                    report.add(event.result)
                if interrupts.requested:
                    break
        except DecodeInterruptedError:
            if not interrupts.requested:
                raise
        finally:
            stream.close()
            report.flush()
    return interrupts.requested
