"""``llamabranch generate``: any number of prompts, batched, with what drafts for them."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import typer

import llamabranch as lb
from llamabranch import ConfigError, Engine, Request, SamplingParams
from llamabranch.speculative import NullDrafter

from ..loading import LoadOptions
from .bundles import option, with_bundles
from .comparison import compare
from .drafters import has_model
from .files import digest
from .generate_report import GenerateReport
from .interrupts import InterruptHandler
from .job import JobLengths
from .options import (
    DEFAULT_PROMPT,
    DRAFTING,
    MODEL,
    OUTPUT,
    ChatOptions,
    DraftOptions,
    ManyPrompts,
    OutputOptions,
    TextOptions,
)
from .results import ResultFile

_CELLS_PER_TEXT = 512  # of the cache, unless --n-ctx is given
_LEAST_CELLS = 2048


@dataclass(frozen=True)
class BatchOptions(DraftOptions):
    """The models, and how many texts they generate at a time."""

    panel: ClassVar[str] = MODEL
    first: ClassVar[str] = "compare"

    parallel: int = option(8, "Texts at a time at most.", "--parallel -np", min=1, max=255)
    compare: bool = option(
        False,
        "Also decode plainly, in turn: speedup, and whether the text is the same.",
        "--compare",
        rich_help_panel=DRAFTING,
    )

    def contexts(
        self, job: JobLengths, drafters: tuple[str, ...], chat_template: str | None
    ) -> tuple[LoadOptions, LoadOptions]:
        """Return the options of the target's context and of those that draft, as the job needs them."""
        kv_unified, n_own = self.set("load").get("kv_unified", "auto"), None
        if kv_unified is False:
            n_own = job.most_cells_per_text(self.parallel)
        elif kv_unified == "auto":
            if self.n_ctx is None and not has_model(drafters):
                n_own = job.cells_per_text(self.parallel)
            kv_unified = "auto" if n_own else True
        shared = LoadOptions(n_seq_max=self.parallel, prefix_cache=self.compare)
        n = self.parallel if n_own else min(self.parallel, job.n_texts)
        if self.n_ctx is None and (n > 1 or job.n_ctx > _LEAST_CELLS):
            per_text = max(_CELLS_PER_TEXT, n_own or 0)
            shared["n_ctx"] = max(_LEAST_CELLS, per_text * n, job.n_ctx)
        target = LoadOptions(**shared, kv_unified=kv_unified, chat_template=chat_template)
        return target, shared


@dataclass(frozen=True)
class ResultOptions:
    """What is generated for each prompt, and where the results go."""

    panel: ClassVar[str] = OUTPUT
    first: ClassVar[str] = "output_file"

    output_file: Path | None = option(
        None, "Append each result to this file as it ends, one JSON object a line.", "--output -o"
    )
    resume: bool = option(False, "Skip the texts that are in --output already.", "--resume")
    samples: int = option(1, "Texts for each prompt, from one prefill.", "--samples", min=1)
    top_logprobs: int | None = option(
        None, "Give each token with its log-probability and the N most probable ones.", min=0
    )


@with_bundles
def generate(
    *,
    call: typer.Context,
    prompts: ManyPrompts,
    chat: ChatOptions,
    text: TextOptions,
    models: BatchOptions,
    job: ResultOptions,
    output: OutputOptions,
) -> None:
    """Generate text from one prompt or many, and show what drafting did.

    One text is printed as it is generated, several as they end, over one batch. With a seed, or at
    temperature 0, each is the one its prompt has alone and undrafted where batches are exact; elsewhere
    rounding can change it. On a pipe standard output is the texts alone, in the order of the prompts, and
    the table of statistics goes to standard error.
    """
    with output.console() as console:
        # Everything that can be wrong in the arguments is found before a model loads.
        if models.compare and text.seed is None:
            text = replace(text, seed=secrets.randbits(31))
        is_flat = call.command.name == "speculate"
        if is_flat and not any((prompts.texts, prompts.prompts, prompts.files, prompts.input_file)):
            prompts = replace(prompts, texts=[DEFAULT_PROMPT])
        # The seed is that of the text itself, or of a job.
        params = text.params(models, text.seed if is_flat else None)
        requests = _requests(prompts, text, job, params)
        _check(requests, models, job, is_flat=is_flat)
        settings, file = _settings(text, params, chat, models, job), None
        if job.output_file is not None:
            file = ResultFile(job.output_file, settings, requests, resume=job.resume)
            settings = console.resources.enter_context(file).job
        has_grammar = any(request.grammar is not None for request in requests)
        names = models.resolve(console, has_grammar=has_grammar)
        lengths = JobLengths.measured(requests, text.max_tokens, names[0], models.n_ctx)
        opened = models.contexts(lengths, names[1], chat.template)
        context, drafter = models.open_pair(names, console, *opened)
        seed = settings["seed"] if settings["seed_given"] else None
        config, most = models.config(), text.max_tokens
        engine, plain = (
            Engine(context, each, config, sampling=params, max_tokens=most, seed=seed)
            for each in (drafter, NullDrafter())
        )
        # One seed for all requests, also if none was given: a resumed job continues with the one that was
        # picked for it.
        engine.seed = engine.seed if settings["seed"] is None else settings["seed"]
        if file is not None:
            file.open(context.model, engine.seed)
        shown = GenerateReport(engine, requests, console, file, chat=chat.is_on, is_flat=is_flat)
        prepared = [_prepared(request, text, chat, context) for request in requests]
        with InterruptHandler([context, *drafter.contexts]) as interrupts:
            if models.compare:  # the first decodes of a context are slower than later ones
                few = [replace(request, max_tokens=8, n=1) for request in prepared]
                for each in (drafter, NullDrafter()):  # engines of their own, which learn no length
                    Engine(context, each, replace(config, draft_k=2)).generate(few)
            _run(shown, prepared, interrupts)
            if models.compare and not interrupts.requested:
                shown.comparison = compare(
                    engine, plain, prepared, interrupts, progress=console.progress
                )
        shown.finish(interrupted=interrupts.requested)


def _requests(
    prompts: ManyPrompts, text: TextOptions, job: ResultOptions, params: SamplingParams
) -> list[Request]:
    """Return the requests as they were given, with the settings of the command line that they lack."""
    grammar, constraint = text.parse_grammar(), text.load_constraint()
    return [
        replace(
            request,
            constraint=constraint,
            stop=request.stop or text.stop_strings,
            grammar=request.grammar or grammar,
            n=max(request.n, job.samples),
            top_logprobs=job.top_logprobs if request.top_logprobs is None else request.top_logprobs,
        )
        for request in prompts.requests(params)
    ]


def _check(
    requests: list[Request], models: BatchOptions, job: ResultOptions, *, is_flat: bool
) -> None:
    """Raise ConfigError for what does not go together."""
    models.config()
    if job.resume and job.output_file is None:
        raise typer.BadParameter("needs --output", param_hint="--resume")
    if not requests:
        raise ConfigError("there is no prompt", hint="give one, or --input")
    if models.compare and job.output_file is not None:
        raise ConfigError("--compare prints its results: leave out --output")
    if is_flat and (len(requests) > 1 or requests[0].n > 1 or job.output_file is not None):
        raise ConfigError("speculate has one text", hint="`llamabranch generate` takes more")


def _settings(
    text: TextOptions,
    params: SamplingParams,
    chat: ChatOptions,
    models: BatchOptions,
    job: ResultOptions,
) -> dict[str, Any]:
    """Return what --resume compares; how to sample and when to stop as a digest."""
    grammar = text.parse_grammar()
    more = {"system": chat.system, "chat_template": chat.template, "constraint": text.constraint}
    options = {
        "sampling": asdict(params),
        "grammar": None if grammar is None else grammar.as_dict(),
        "max_tokens": text.max_tokens,
        "stop": list(text.stop_strings),
        "ignore_end": text.ignore_eos,
        "chat": chat.is_on,
        # The digests of older files have none of these.
        **{name: value for name, value in more.items() if value is not None},
    }
    is_fast = models.set("load").get("batch_invariant") is False
    return {
        "sampling": digest(options),
        "samples": job.samples,
        "rule": str(models.config().rule),
        "kv_type": models.kv_type or ("fast" if is_fast else "auto"),
        "seed": text.seed,
        "seed_given": text.seed is not None,
        "model": None,
    }


def _prepared(
    request: Request, text: TextOptions, chat: ChatOptions, context: lb.Context
) -> Request:
    """Return a request as the engine gets it: a message in the chat template, no end if asked for."""
    if request.sampling is not None:
        params = text.without_eog(request.sampling, context.model)
        request = replace(request, sampling=params)
    if chat.is_on and isinstance(request.prompt, str):
        return replace(request, prompt=chat.prompt_tokens(context.model, request.prompt))
    return request


def _run(report: GenerateReport, requests: list[Request], interrupts: InterruptHandler) -> None:
    """Run all requests, and show their texts."""
    report.begin()
    stream = report.engine.stream(requests, skip=report.done)
    try:
        if interrupts.requested:  # before there was a decode to stop
            report.engine.target.interrupt()
        for event in stream:  # the last ones after a Ctrl-C are what unfinished texts have
            report.show(event)
    except lb.DecodeInterruptedError:
        if not interrupts.requested:
            raise
    finally:
        stream.close()
        report.end()
