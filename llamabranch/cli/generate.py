"""``llamabranch generate``: any number of prompts, batched, with a draft model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import typer

from llamabranch import ConfigError, DecodeInterruptedError, Engine, Grammar, Request

from ..loading import LoadOptions
from .bundles import option, with_bundles
from .console import Console, print_json
from .drafters import has_model
from .generate_report import GenerateReport
from .interrupts import InterruptHandler
from .job_survey import JobSurvey
from .jsonl import InvalidLines
from .opening import open_pair
from .options import (
    DRAFTING,
    REQUESTS,
    RUNTIME,
    ChatOptions,
    DraftedOptions,
    Explain,
    PromptOptions,
    RuntimeOptions,
    SharedOptions,
    TextOutputOptions,
    TextSettings,
)
from .prompts import PromptSource, digest
from .ray_jobs import RayOptions, finish_job, job_paths
from .reporting import EXIT_FAILURE, EXIT_INTERRUPTED
from .results import JobSettings, ResultFile

if TYPE_CHECKING:
    from llamabranch.scale import JobReport

_CELLS_PER_TEXT = 512  # of the cache, unless --n-ctx is given
_LEAST_CELLS = 2048
_SKIP_HINT = "correct what is invalid, or leave it out with --skip-invalid"


@dataclass(frozen=True)
class JobOptions(RayOptions):
    """What is generated for each prompt, and where the results go."""

    panel: ClassVar[str] = REQUESTS

    output_file: Path | None = option(
        None,
        "Append each result to this file as it ends, one JSON object a line.",
        "--output",
        "-o",
    )
    resume: bool = option(False, "Skip the texts that are in --output already.", "--resume")
    skip_invalid: bool = option(
        False,
        "Leave out lines of --input that are no requests; they are named on standard error.",
        "--skip-invalid",
    )
    in_order: bool = option(
        False, "Give the results in the order of the prompts, not as they end.", "--in-order"
    )
    stats: bool = option(False, "Add the statistics of drafting to each result.", "--stats")
    samples: int = option(1, "Texts for each prompt, from one prefill.", min=1)
    top_logprobs: int | None = option(
        None, "Give each token with its log-probability and the N most probable ones.", min=0
    )
    prompt_logprobs: int | None = option(
        None, "Score the prompts' tokens, with the N most probable ones.", min=0
    )

    def requests(
        self,
        source: PromptSource,
        text: TextSettings,
        grammar: Grammar | None,
        invalid: InvalidLines,
    ) -> Iterator[Request]:
        """Yield the requests of a source, with the settings of the command line."""
        for request in source.requests(text.params(), invalid.add):
            yield replace(
                request,
                stop=request.stop or text.stop_strings,
                grammar=request.grammar or grammar,
                n=max(request.n, self.samples),
                top_logprobs=_either(request.top_logprobs, self.top_logprobs),
                prompt_logprobs=_either(request.prompt_logprobs, self.prompt_logprobs),
            )

    def settings(
        self, text: TextSettings, chat: ChatOptions, models: DraftedOptions, runtime: RuntimeOptions
    ) -> JobSettings:
        """Return what --resume compares; how to sample and when to stop as a digest."""
        grammar = text.parse_grammar()
        options = {
            "sampling": asdict(text.params()),
            "grammar": None if grammar is None else grammar.as_dict(),
            "max_tokens": text.max_tokens,
            "stop": list(text.stop_strings),
            "ignore_end": text.ignore_eos,
            "chat": chat.is_on,
        }
        # Not in the digests of older files, where these were not given.
        if not chat.parse_special:
            options["parse_special"] = False
        if chat.system is not None:
            options["system"] = chat.system
        if chat.template is not None:
            options["chat_template"] = chat.template
        return JobSettings(
            sampling=digest(options),
            samples=self.samples,
            rule=models.rule,
            kv_type=runtime.kv_type or ("auto" if runtime.exact else "fast"),
            seed=text.seed,
            seed_given=text.seed is not None,
        )


@dataclass(frozen=True)
class BatchModels(DraftedOptions):
    """The models, and whether one drafts."""

    panel: ClassVar[str] = DRAFTING

    auto_regressive: bool = option(
        False, "Decode plainly, without a draft: the same as --draft none.", "--auto-regressive"
    )

    def resolve(
        self, console: Console, *, has_grammar: bool = False
    ) -> tuple[str, tuple[str, ...]]:
        """As in the base class; no drafters with ``--auto-regressive``."""
        models = replace(self, draft="none") if self.auto_regressive else self
        return super(BatchModels, models).resolve(console, has_grammar=has_grammar)


@dataclass(frozen=True)
class BatchOptions(SharedOptions):
    """The context of many texts at a time."""

    panel: ClassVar[str] = RUNTIME

    prefix_cache: bool = option(
        False, "Keep the K/V of finished texts for prompts that begin like them.", "--prefix-cache"
    )

    def sized(self, job: JobSurvey, drafters: tuple[str, ...]) -> BatchOptions:
        """Return them with the size and the layout of the cache that the job needs, unless given."""
        n_ctx, kv_unified, n_own = self.n_ctx, self.kv_unified, None
        if kv_unified is False:
            n_own = job.most_cells_per_text(self.parallel)
        elif kv_unified is None:
            if n_ctx is None and not has_model(drafters):
                n_own = job.cells_per_text(self.parallel)
            kv_unified = None if n_own else True
        if n_ctx is None and (self.parallel > 1 or job.n_ctx > _LEAST_CELLS):
            per_text = max(_CELLS_PER_TEXT, n_own or 0)
            n_ctx = max(_LEAST_CELLS, per_text * self.parallel, job.n_ctx)
        return replace(self, n_ctx=n_ctx, kv_unified=kv_unified)

    def contexts(self, chat_template: str | None) -> tuple[LoadOptions, LoadOptions]:
        """Return the options of the target's context and of those that draft for it."""
        keeps = self.prefix_cache or self.cache_ram > 0
        draft = LoadOptions(n_seq_max=self.parallel, prefix_cache=keeps)
        target = LoadOptions(
            **draft,
            cache_ram=self.cache_ram << 20,
            kv_unified="auto" if self.kv_unified is None else self.kv_unified,
            chat_template=chat_template,
        )
        return target, draft


@dataclass(frozen=True)
class BatchOutput(TextOutputOptions):
    """How the results are shown."""

    explain: Explain = False

    def show(self, report: GenerateReport, interrupted: bool) -> None:
        """Print the totals; exit as they ask for."""
        if self.as_json:
            print_json(report.as_json(interrupted))
        else:
            report.print(explain=self.explain)
        if interrupted:
            more = "" if report.file is None else "; --resume continues from here"
            report.console.note("interrupted" + more)
            raise typer.Exit(EXIT_INTERRUPTED)
        if report.n_failed:
            raise typer.Exit(EXIT_FAILURE)


@with_bundles
def generate(
    *,
    prompts: PromptOptions,
    chat: ChatOptions,
    job: JobOptions,
    models: BatchModels,
    text: TextSettings,
    runtime: BatchOptions,
    output: BatchOutput,
) -> None:
    """Generate text from a prompt, or from many together, with a draft model.

    All texts share one decode a step. With a seed, or at temperature 0, each is the one its prompt has
    alone where the context is batch-invariant; elsewhere rounding can change it. A text is printed, or
    written to --output, as soon as it ends. On a pipe standard output is the texts alone, in the order of
    the prompts.
    """
    with output.console() as console, ExitStack() as stack:
        # Everything that can be wrong in the arguments is found before a model loads.
        config, params, grammar = models.config(), text.params(), text.parse_grammar()
        if job.resume and job.output_file is None:
            raise typer.BadParameter("needs --output", param_hint="--resume")
        if job.ray is not None:
            report = _generate_on_ray(console, prompts, chat, job, models, text, runtime)
            finish_job(console, report, as_json=output.as_json)
            return
        source, invalid = prompts.read(), InvalidLines()
        with_grammar: list[Request] = []

        def read() -> Iterator[Request]:
            for request in job.requests(source, text, grammar, invalid):
                if request.grammar is not None and not with_grammar:
                    with_grammar.append(request)
                yield request

        survey = JobSurvey.of(read, text.max_tokens)
        invalid.report(console, skip=job.skip_invalid, hint=_SKIP_HINT)
        if not survey.n_requests:
            raise ConfigError("there is no prompt", hint="give --prompts or --input")
        settings = job.settings(text, chat, models, runtime)
        file = None
        if job.output_file is not None:
            file = ResultFile(
                job.output_file, settings, survey.requests(), resume=job.resume, stats=job.stats
            )
            settings = stack.enter_context(file).job
        names = models.resolve(console, has_grammar=bool(with_grammar))
        survey = survey.measured(models.find(names[0]), runtime.n_ctx)
        runtime = runtime.sized(survey, names[1])
        opened = runtime.contexts(chat.template)
        context, drafter = open_pair(runtime, names, console, stack, *opened)
        seed = settings.seed if settings.seed_given else None
        engine = Engine(
            context, drafter, config, sampling=params, max_tokens=text.max_tokens, seed=seed
        )
        # One seed for all requests, also if none was given: a resumed job continues with the one that was
        # picked for it.
        engine.seed = engine.seed if settings.seed is None else settings.seed
        if file is not None:
            file.open(context.model, engine.seed)
        shown = GenerateReport(
            engine,
            survey,
            console,
            file,
            output,
            in_order=job.in_order,
            stats=job.stats,
            chat=chat.is_on,
        )
        interrupted = _run(shown, text, chat)
        output.show(shown, interrupted)


def _generate_on_ray(
    console: Console,
    prompts: PromptOptions,
    chat: ChatOptions,
    job: JobOptions,
    models: BatchModels,
    text: TextSettings,
    runtime: BatchOptions,
) -> JobReport:
    from llamabranch import scale

    refused = {
        "--top-logprobs": job.top_logprobs is not None,
        "--prompt-logprobs": job.prompt_logprobs is not None,
        "--ignore-eos": text.ignore_eos,
        "--skip-invalid": job.skip_invalid,
        "--system-prompt": chat.system is not None,
        "--n-ctx 0": runtime.n_ctx == 0,
    }
    for name, is_given in refused.items():
        if is_given:
            raise ConfigError(f"a job on Ray has no {name}")
    inputs, folder = job_paths(prompts.input_file, job.output_file, prompts.given)
    options = job.options(console, resume=job.resume, streams=runtime.parallel)
    options["draft"] = None if models.draft == "none" else models.draft
    load = runtime.options()
    if chat.template is not None:
        load["chat_template"] = chat.template
    return scale.generate(
        inputs,
        folder,
        model=models.announce(console),
        max_tokens=text.max_tokens,
        seed=text.seed,
        sampling=text.params(),
        stop=text.stop_strings,
        grammar=text.parse_grammar(),
        n=job.samples,
        chat=chat.is_on,
        parse_special=chat.parse_special,
        load=load,
        **options,
    )


def _either(given: int | None, default: int | None) -> int | None:
    return default if given is None else given


def _run(report: GenerateReport, options: TextSettings, chat: ChatOptions) -> bool:
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
    contexts = [engine.target, *engine.drafter.contexts]
    with InterruptHandler(contexts) as interrupts, report.progress() as progress:
        try:
            if interrupts.requested:  # before there was a decode to stop
                engine.target.interrupt()
            for event in stream:  # the last ones after a Ctrl-C are what unfinished texts have
                progress.update(event)
                if event.result is not None:
                    report.add(event.result)
        except DecodeInterruptedError:
            if not interrupts.requested:
                raise
        finally:
            stream.close()
            report.flush()
    return interrupts.requested
