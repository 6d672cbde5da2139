"""``llamabranch generate``: any number of prompts, batched, with a draft model."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from time import perf_counter

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from llamabranch import (
    ConfigError,
    DecodeInterruptedError,
    Engine,
    Event,
    Grammar,
    Request,
    Result,
    SamplingParams,
    SpeculativeConfig,
)
from llamabranch.startup import EXIT_INTERRUPTED

from . import options
from .commands import Command
from .drafting import drafting_contexts, drafting_models, make_drafter
from .render import (
    EXIT_FAILURE,
    Interruption,
    Screen,
    number,
    print_json,
    reporting,
)
from .results import JobSettings, ResultFile
from .setup import (
    choose_models,
    digest,
    loading_options,
    open_context,
    parse_grammar,
    parse_length,
    read_prompts,
    wrap_in_template,
)

DEFAULTS = SamplingParams()
_CELLS_PER_TEXT = 512  # of the cache, unless --n-ctx says otherwise
_LEAST_CELLS = 2048


class ManyPrompts(Command):
    """Takes several prompts after one ``--prompts``, and ``_`` for ``-`` in the names of options."""

    def parse_args(  # type: ignore[override]  # typer has a click of its own, or not
        self, ctx: typer.Context, args: list[str]
    ) -> list[str]:
        """Parse what ``spread`` makes of the arguments."""
        known = {name for param in self.params for name in param.opts}
        return super().parse_args(ctx, spread(args, known))


def spread(arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """Return the arguments with ``--prompts`` before every prompt, and ``known`` options spelt right.

    A prompt that begins with a dash is given as ``--prompts=-...``.
    """
    names = {"--prompts", "--prompt", "-p"}
    found: list[str] = []
    reading, n_read = False, 0
    for argument in arguments:
        if argument.startswith("-") and argument != "-":
            if reading and n_read == 0:
                break
            name, equals, value = argument.partition("=")
            if name.replace("_", "-") in known:
                name = name.replace("_", "-")
            reading, n_read = name in names, len(equals)
            if not reading or equals:
                found.append(name + equals + value)
        elif reading:
            found += ["--prompts", argument]
            n_read += 1
        else:
            found.append(argument)
    if reading and n_read == 0:
        raise typer.BadParameter("needs at least one prompt", param_hint="--prompts")
    return found


def generate(
    prompts: options.Prompts = None,
    input_file: options.Input = None,
    output: options.OutputFile = None,
    resume: options.Resume = False,
    samples: options.Samples = 1,
    target: options.TargetModel = None,
    draft: options.DraftModel = None,
    gamma: options.Gamma = "auto",
    auto_regressive: options.AutoRegressive = False,
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
    parallel: options.Parallel = 8,
    n_ctx: options.NCtx = None,
    threads: options.Threads = None,
    gpu_layers: options.GpuLayers = None,
    kv_type: options.KvType = None,
    explain: options.Explain = False,
    as_json: options.Json = False,
    no_color: options.NoColor = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> None:
    """Continue any number of prompts together, with a draft model.

    All texts share one cache and one decode a step. With a seed, or at temperature 0, each is the one
    its prompt has alone. What ends is printed, or written to --output, at once.
    """
    screen = Screen(color=not no_color)
    with reporting(screen, debug=debug, as_json=as_json), ExitStack() as stack:
        # Everything that can be wrong in the arguments is found before a model loads.
        config = SpeculativeConfig(
            draft_k=parse_length(gamma), entropy_stop=entropy_stop, rule=rule
        )
        sampling = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repeat_penalty=repeat_penalty,
        )
        limits = parse_grammar(grammar, json_schema)
        if resume and output is None:
            raise typer.BadParameter("needs --output", param_hint="--resume")
        source = read_prompts(prompts or (), input_file)
        requests = [
            replace(
                request,
                id=str(i) if request.id is None else request.id,
                stop=request.stop or tuple(stop or ()),
                grammar=request.grammar or limits,
                n=max(request.n, samples),
            )
            for i, request in enumerate(source.requests(sampling))
        ]
        if not requests:
            raise ConfigError("there is nothing to continue", hint="give --prompts or --input")
        settings = JobSettings(
            prompts=source.digest,
            sampling=_sampling_digest(
                sampling, limits, max_tokens=max_tokens, stop=stop, end=ignore_end, chat=chat
            ),
            samples=samples,
            rule=rule,
            kv_type=kv_type or "auto",
            seed=seed,
            seed_given=seed is not None,
        )
        file = None
        if output is not None:
            file = stack.enter_context(ResultFile(output, settings, requests, resume=resume))
            settings = file.job
        target_name, parts = choose_models(target, "none" if auto_regressive else draft)

        cells = n_ctx
        if cells is None and parallel > 1:  # for one text the library's default will do
            cells = max(_LEAST_CELLS, _CELLS_PER_TEXT * parallel)
        loading = loading_options(cells, threads, gpu_layers, kv_type)
        loading["n_seq_max"] = parallel
        open_model = partial(open_context, screen, stack, loading, verbose, 0)
        context = open_model(target_name)
        drafter = make_drafter(parts, open_model, 1)
        for model in drafting_models(drafter):
            if context.model.compatibility(model).path == "text":
                screen.note(f"{model.name} has another vocabulary: it drafts through the text")
        engine = Engine(
            context,
            drafter if parts else None,
            config,
            sampling=sampling,
            max_tokens=max_tokens,
            seed=settings.seed if settings.seed_given else None,
        )
        if settings.seed is not None:  # a resumed job goes on with the seed that was picked for it
            engine.seed = settings.seed
        if file is not None:
            file.open(context.model.fingerprint, engine.seed)
        job = _Job(engine, requests, screen, file, quiet=as_json)
        interrupted = job.run(ignore_end=ignore_end, chat=chat)
        if as_json:
            print_json(job.as_json(interrupted))
        else:
            job.print(explain=explain)
        if interrupted:
            screen.note("interrupted" + ("" if file is None else "; --resume goes on from here"))
            raise typer.Exit(EXIT_INTERRUPTED)
        if job.n_failed:
            raise typer.Exit(EXIT_FAILURE)


def _sampling_digest(
    sampling: SamplingParams,
    grammar: Grammar | None,
    *,
    max_tokens: int,
    stop: Sequence[str] | None,
    end: bool,
    chat: bool,
) -> str:
    """Return a digest of everything on the command line that says how to draw and when to stop."""
    return digest(
        {
            "sampling": asdict(sampling),
            "grammar": None if grammar is None else grammar.gbnf,
            "max_tokens": max_tokens,
            "stop": list(stop or ()),
            "ignore_end": end,
            "chat": chat,
        }
    )


# -- the job ---------------------------------------------------------------------------------------


@dataclass
class _Job:
    """A run of the engine: what it shows, writes and sums up."""

    engine: Engine
    requests: Sequence[Request]
    screen: Screen
    file: ResultFile | None
    quiet: bool
    results: list[Result] = field(default_factory=list)
    n_failed: int = 0

    def __post_init__(self) -> None:
        self.prompts = {str(request.id): request.prompt for request in self.requests}
        self.done = set() if self.file is None else self.file.done

    def run(self, *, ignore_end: bool, chat: bool) -> bool:
        """Run all requests; return whether it was interrupted."""
        asked = [self._prepared(request, ignore_end, chat) for request in self.requests]
        stream = self.engine.stream(asked, skip=self.done)
        contexts = [self.engine.target, *drafting_contexts(self.engine.drafter)]
        with Interruption(contexts) as interruption, self._progress() as progress:
            try:
                for event in stream:
                    progress.take(event)
                    if event.result is not None:
                        self._keep(event.result)
                    if interruption.asked:
                        break
            except DecodeInterruptedError:
                if not interruption.asked:
                    raise
            finally:
                stream.close()
        return interruption.asked

    def _prepared(self, request: Request, ignore_end: bool, chat: bool) -> Request:
        context = self.engine.target
        if ignore_end and request.sampling is not None:
            ends = dict.fromkeys(context.model.end_tokens, -math.inf)
            bias = {**request.sampling.logit_bias, **ends}
            request = replace(request, sampling=request.sampling.replace(logit_bias=bias))
        if chat and isinstance(request.prompt, str):
            request = replace(request, prompt=wrap_in_template(context, request.prompt))
        return request

    def _keep(self, result: Result) -> None:
        result.prompt = self.prompts[result.id]  # not what a chat template made of it
        self.n_failed += result.error is not None and not result.tokens
        if self.file is not None:
            self.file.write(result)
        else:
            self.results.append(result)
            if not self.quiet:
                self._show(result)
        if result.error is not None and not self.quiet:
            self.screen.error(f"{_label(result)}: {result.error.message}", result.error.hint)

    def _show(self, result: Result) -> None:
        if result.error is not None and not result.tokens:
            return
        self.screen.write(f"[{_label(result)}] ", "bold")
        if isinstance(result.prompt, str):
            self.screen.write(result.prompt, "dim")
        self.screen.write(result.text + "\n\n")

    @contextmanager
    def _progress(self) -> Iterator[_Progress]:
        n_texts = sum(request.n for request in self.requests)
        screen = self.screen
        # Where results are shown as they end, they are the progress.
        shown = screen.err.is_terminal and (
            self.file is not None or self.quiet or not screen.out.is_terminal
        )
        columns = (
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=screen.err, transient=True, disable=not shown) as bar:
            yield _Progress(bar, n_texts, len(self.done))

    def as_json(self, interrupted: bool) -> dict[str, object]:
        """Return the totals, and the results unless a file has them."""
        answer: dict[str, object] = {
            "requests": len(self.requests),
            "skipped": len(self.done),
            "failed": self.n_failed,
            "interrupted": interrupted,
            "seed": self.engine.seed,
            "batch_invariant": self.engine.target.capabilities.batch_invariant,
            "explain": self.engine.explain(),
            "stats": self.engine.stats.as_dict(),
        }
        if self.file is None:
            answer["results"] = [result.as_dict() for result in self.results]
        return answer

    def print(self, *, explain: bool) -> None:
        """Print the totals as a table."""
        stats = self.engine.stats
        drafting = stats.speculative
        rows = [("requests", str(len(self.requests)))]
        if self.done:
            rows.append(("texts there already", str(len(self.done))))
        if self.n_failed:
            rows.append(("failed", str(self.n_failed)))
        rows += [
            ("tokens", str(stats.generated_tokens)),
            ("tokens a second", number(stats.tokens_per_s, 1)),
        ]
        if drafting.num_drafts:
            rows += [
                ("drafted", str(drafting.num_draft_tokens)),
                ("accepted", str(drafting.num_accepted_tokens)),
                ("accept rate", number(100 * drafting.draft_acceptance_rate, 1, " %")),
            ]
        rows.append(("target forward passes", str(stats.target_forward_passes)))
        if stats.draft_forward_passes:
            rows.append(("draft forward passes", str(stats.draft_forward_passes)))
        if stats.shared_prompt_tokens:
            rows.append(("prompt tokens shared", str(stats.shared_prompt_tokens)))
        if stats.preemptions:
            rows.append(("preemptions", str(stats.preemptions)))
        rows.append(("seed", str(self.engine.seed)))
        self.screen.table(("", "total"), rows)
        if explain:
            self.screen.line()
            self.screen.line(self.engine.explain())


class _Progress:
    """Requests done, tokens a second, accept rate."""

    def __init__(self, bar: Progress, n_texts: int, n_done: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=n_texts, completed=n_done)
        self._start = perf_counter()
        self._n_tokens = self._n_drafted = self._n_accepted = 0

    def take(self, event: Event) -> None:
        """Show what an event changes."""
        self._n_tokens += event.emitted is not None
        if event.result is None and self._n_tokens % 16:
            return
        if event.result is not None:
            self._n_drafted += event.result.stats.num_draft_tokens
            self._n_accepted += event.result.stats.num_accepted_tokens
        speed = self._n_tokens / max(perf_counter() - self._start, 1e-9)
        words = f"{speed:.0f} tokens/s"
        if self._n_drafted:
            words += f", {self._n_accepted / self._n_drafted:.0%} accepted"
        advance = event.result is not None
        self._bar.update(self._task, advance=advance, description=words)


def _label(result: Result) -> str:
    return result.id if result.sample == 0 else f"{result.id}, sample {result.sample}"
