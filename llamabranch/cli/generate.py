"""``llamabranch generate``: any number of prompts in one batch, with or without drafts."""

from __future__ import annotations

import copy
import math
import secrets
import warnings
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import typer

import llamabranch as lb
from llamabranch import (
    ConfigError,
    Engine,
    Event,
    Request,
    Result,
    SamplingParams,
    hub,
)
from llamabranch.bench.machine import Machine
from llamabranch.speculative import NullDrafter

from ..files import digest
from ..loading import LoadOptions
from .bundles import option, with_bundles
from .comparison import DraftComparison, compare, first_difference, print_statistics, statistics
from .console import Console, base_name, shortened
from .drafters import has_model
from .files import load_function, read_piped_text
from .interrupts import EXIT_FAILURE, EXIT_INTERRUPTED, InterruptHandler
from .job import JobLengths
from .options import (
    DEFAULT_PROMPT,
    DRAFTING,
    MODEL,
    OUTPUT,
    TEXT,
    ChatFlags,
    DraftFlags,
    ManyPrompts,
    OutputFlags,
    TextFlags,
)
from .results import ResultFile

# What can end a text before its grammar is complete, and which limit is too low then.
_CUT = {"length": ("-n", "it"), "capacity": ("the context", "--ctx-size")}


class GenerateReport:
    """The results of a job, and how they are printed.

    Args:
        engine: the engine that runs the job.
        requests: all requests, as the user wrote them.
        console: where results, progress and totals go.
        file: the file that results are appended to instead of being printed, or None.
        chat: whether prompts are messages, which are printed on separate lines.
        title: the first line of the statistics of drafts; None prints none.

    Attributes:
        done: the texts (id, sample) that the file already had.
        comparison: the comparison with plain decoding, if it was requested.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        console: Console,
        file: ResultFile | None,
        *,
        chat: bool = False,
        title: str | None = None,
    ) -> None:
        self.engine, self._console, self._file = engine, console, file
        self._requests = {str(request.id): request for request in requests}
        self.done = set() if file is None else file.done
        self.comparison: DraftComparison | None = None
        self._chat = chat
        self._is_plain = isinstance(engine.drafter, NullDrafter)
        self._results: list[Result] = []
        self._finish_reasons: Counter[str] = Counter()
        self._n_failed = self._n_printed = 0
        self._on_terminal = console.out.is_terminal
        self._has_begun = False
        texts = [(str(r.id), i) for r in requests for i in range(r.n)]
        self._n_texts, self._n_ended = len(texts), len(self.done)
        prints = file is None and not console.silent
        self._streams = len(texts) == 1 and prints
        # If each text is shown when it ends, no other progress is needed.
        shows = self._streams or (prints and self._on_terminal)
        self._counts = console.err.is_terminal and not shows
        # A pipe gets the texts in the order of the prompts. A terminal gets each one when it ends.
        self._order = deque(texts if prints and not self._on_terminal else ())
        self._held: dict[tuple[str, int], Result] = {}
        self._machine = Machine.now()
        self._title = title

    # -- texts -----------------------------------------------------------------------------------------

    def printing(self) -> AbstractContextManager[None]:
        """Hold warnings back until the only text has been printed."""
        return self._console.printing_text() if self._streams else nullcontext()

    def _begin(self) -> None:
        """Show the prompt on a terminal if there is only one text; later calls do nothing."""
        has_begun, self._has_begun = self._has_begun, True
        if self._streams and self._on_terminal and not has_begun:
            if not self._is_plain:
                self._console.legend()
            self._console.write(self._prompt(*self._requests.values()), "dim")

    def show(self, event: Event) -> None:
        """Print a token of the only text, or the result of a text that has ended.

        A text that Ctrl-C has cut is printed if it has a token. It is never written to a file,
        because --resume generates it again.
        """
        result = event.result
        if event.progress is not None:
            self._console.reading(event.progress, (event.id, event.sample))
            if not self._console.is_reading:
                self._begin()
            return
        if event.emitted is not None and self._streams:
            self._begin()
            self._console.emit(event.emitted)
        if result is None:
            return
        if result.tokens or result.finish_reason != "cancelled":
            self._begin()
        self._n_ended += 1
        self._console.end_reading((event.id, event.sample))
        if self._counts:
            self._console.progress(f"{self._n_ended} of {self._n_texts} texts")
        if result.finish_reason == "cancelled" and (self._file is not None or not result.tokens):
            return
        if not self._order:
            self._give(result)
            return
        self._held[result.id, result.sample] = result
        while self._order and self._order[0] in self._held:
            self._give(self._held.pop(self._order.popleft()))

    def end(self) -> None:
        """Write results that are still held back, as after Ctrl-C, and keep the job's figures."""
        self._console.progress("")
        for text in filter(self._held.__contains__, self._order):
            self._give(self._held[text])
        self._stats = copy.deepcopy(self.engine.stats)  # a comparison adds to the original
        self._explanation = self.engine.explain()
        if not self._is_plain:
            self._explanation = f"drafter: {self.engine.drafter.name}; {self._explanation}"

    def _give(self, result: Result) -> None:
        """Write a result to the file, or print it, or keep it for the JSON object."""
        request, error, note = self._requests[result.id], result.error, self._console.note
        result.prompt = request.prompt  # as the user wrote it, without the chat template
        self._n_failed += error is not None and not result.tokens
        self._finish_reasons[result.finish_reason] += 1
        label = result.id + (f", sample {result.sample}" if result.sample else "")
        if self._file is not None:
            self._file.write(result, request)
        else:
            self._results.append(result)
            if error is None or result.tokens:
                self._print(result, request, label)
        if error is not None and not self._console.silent:
            self._console.error(f"{label}: {error.message}", error.hint)
        if result.finish_reason == "constraint":
            message = "the constraint allows no token after it, so the text may be incomplete"
            note(f"warning: {label}: {message}")
        elif result.grammar is not None and result.finish_reason in _CUT:
            limit, more = _CUT[result.finish_reason]
            message = f"{limit} ended the text before its grammar: it may be incomplete"
            note(f"warning: {label}: {message}; raise {more}")

    def _print(self, result: Result, request: Request, label: str) -> None:
        if self._streams:
            self._console.write("\n\n" if self._on_terminal else "\n")
            return
        if self._on_terminal:
            self._console.write(f"[{label}] ", "bold")
            self._console.write(self._prompt(request), "dim")
        else:  # a heading, as `head` prints for several files
            about = shortened(self._prompt(request))
            label += f": {about}" if about else ""
            self._console.write("\n" * bool(self._n_printed) + f"==> {label} <==\n")
        self._n_printed += 1
        self._console.write(result.text + "\n" + "\n" * self._on_terminal)

    def _prompt(self, request: Request) -> str:
        prompt = request.prompt
        if isinstance(prompt, str):
            return prompt + "\n" * self._chat
        return f"{prompt[-1]['content']}\n" if isinstance(prompt[-1], Mapping) else ""

    # -- totals ----------------------------------------------------------------------------------------

    def finish(self, *, interrupted: bool) -> None:
        """Print the totals, and exit with the code of the job."""
        compared = {} if self.comparison is None else self._compared(self.comparison)
        figures = {} if self._title is None else statistics(self._stats, self.comparison)
        if not self._console.silent:
            self._console.note(self._summary())
            if self._title is not None:
                about = self._about_the_texts(compared) if compared else ""
                print_statistics(self._console.beside, self._title, figures, about)
            if self._console.verbose:
                self._console.note(self._explanation)
        if "capacity" in self._finish_reasons and not self._console.silent:
            self._console.note("the context is full: raise --ctx-size to continue")
        self._console.answer({**self._totals(interrupted), **figures, **compared})
        if interrupted:
            more = "" if self._file is None else "; --resume continues from here"
            self._console.note("interrupted" + more)
            raise typer.Exit(EXIT_INTERRUPTED)
        if self._n_failed:
            raise typer.Exit(EXIT_FAILURE)

    def _totals(self, interrupted: bool) -> dict[str, object]:
        """Return the totals, and the results unless a file has them."""
        answer: dict[str, object] = {
            "requests": len(self._requests),
            "skipped": len(self.done),
            "failed": self._n_failed,
            "interrupted": interrupted,
            "seed": self.engine.seed,
            "batch_invariant": self.engine.target.capabilities.batch_invariant,
            "explain": self._explanation,
            "stats": self._stats.as_dict(),
        }
        if self._file is None:
            answer["results"] = [result.as_dict(stats=False) for result in self._results]
        if self._n_texts == 1 and self._file is None:
            answer |= {"text": "", "tokens": [], "finish_reason": None}
            for result in self._results:  # none if it failed, or was interrupted before a token
                reason = None if result.finish_reason == "cancelled" else result.finish_reason
                answer |= {"text": result.text, "tokens": result.tokens, "finish_reason": reason}
            compared = self.comparison
            rate = compared.drafted.rate.median if compared else self._stats.tokens_per_s
            answer |= {"tokens_per_s": rate, "rule": str(self.engine.config.rule)}
        return answer

    def _compared(self, found: DraftComparison) -> dict[str, object]:
        results, engine = found.plain_results, self.engine
        can, is_exact = engine.target.capabilities, engine.sampling.temperature == 0
        plain: dict[str, object] = {"tokens_per_s": found.plain.rate.median}
        plain["results"] = [result.as_dict(stats=False) for result in results]
        if self._n_texts == 1:
            plain |= {"text": results[0].text, "tokens": results[0].tokens}
        # Whether the text itself, and not only its distribution, must equal plain decoding.
        expected = self._is_plain or is_exact or str(engine.config.rule) == "seeded"
        requests = list(self._requests.values())
        return {
            "plain": plain,
            "machine": self._machine.as_dict(),
            "n_threads": engine.target.n_threads,
            "same_text_expected": expected,
            "batch_invariant": can.batch_invariant,
            "batch_invariant_reason": can.batch_invariant_reason,
            "divergence": first_difference(engine.target, found, requests) if expected else None,
        }

    def _summary(self) -> str:
        """Return one line that says how much was generated."""
        n_texts, stats = sum(self._finish_reasons.values()), self._stats
        reasons = _counted(self._finish_reasons)
        if n_texts == 1:
            (reasons,) = self._finish_reasons
        parts = [
            f"{n_texts} texts" if n_texts != 1 else "",
            f"{len(self.done)} in the file already" if self.done else "",
            f"{self._n_failed} failed" if self._n_failed else "",
            f"{stats.generated_tokens} tokens",
            f"ended by {reasons}" if reasons else "",
            ""
            if math.isnan(stats.tokens_per_s) or self._title
            else f"{stats.tokens_per_s:.1f} a second",
            f"seed {self.engine.seed}",
        ]
        return ", ".join(filter(None, parts))

    def _about_the_texts(self, compared: Mapping[str, object]) -> str:
        """Return where the texts with and without drafts begin to differ, or why they may."""
        if not compared["same_text_expected"]:
            return f", as rule {self.engine.config.rule} keeps only the distribution"
        where = compared["divergence"]
        if not isinstance(where, dict):
            return ""
        exact = compared["batch_invariant"]
        return f", from token {where['position']} on" + (": a bug in llamabranch" if exact else "")


def _counted(reasons: Mapping[str, int]) -> str | None:
    """Return reasons with their counts, the most frequent first; None without reasons."""
    ordered = Counter(reasons).most_common()
    return ", ".join(f"{reason} {n}" for reason, n in ordered) or None


_CELLS_PER_TEXT = 512  # cells of the cache for each text, unless --n-ctx is given
_LEAST_CELLS = 2048
DRAFT_LENGTH = 4  # tokens that speculate drafts, unless told


@dataclass(frozen=True)
class BatchFlags(DraftFlags):
    """The models, and how many texts they generate at a time."""

    panel: ClassVar[str] = MODEL
    first: ClassVar[str] = "compare"

    parallel: int = option(8, "Most texts at a time.", "--parallel -np", min=1, max=255)
    compare: bool = option(
        False,
        "Also decode without drafts, in turn, and print the speedup and whether the text is the same.",
        "--compare",
        rich_help_panel=DRAFTING,
    )

    def contexts(
        self, job: JobLengths, drafters: tuple[str, ...], chat_template: str | None
    ) -> tuple[LoadOptions, LoadOptions]:
        """Return the options for the contexts of the target and the drafters that the job needs."""
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
class ResultFlags:
    """How many texts each prompt gets, with which details, and where the results go."""

    panel: ClassVar[str] = OUTPUT
    first: ClassVar[str] = "output_file"

    output_file: Path | None = option(
        None, "Append each result to this file as it ends, one JSON object per line.", "--output -o"
    )
    resume: bool = option(False, "Skip the texts that --output already has.", "--resume")
    samples: int = option(
        1, "Texts of each prompt; the prompt is processed once.", "--samples", min=1
    )
    constraint: str | None = option(
        None,
        "A Python function. It gets the text so far and returns False if no valid text starts with it.",
        metavar="FILE.py:NAME",
        rich_help_panel=TEXT,
    )
    top_logprobs: int | None = option(
        None, "Add each token with its log-probability and the N most probable ones.", min=0
    )


@with_bundles
def generate(
    *,
    call: typer.Context,
    prompts: ManyPrompts,
    chat: ChatFlags,
    text: TextFlags,
    models: BatchFlags,
    job: ResultFlags,
    output: OutputFlags,
) -> None:
    """Generate text from one prompt or many, and show what drafting did.

    One text is printed as it is generated; several are generated in one batch and printed as they end.
    With a seed, or at temperature 0, and with exact batches, each text is the one that its prompt gets
    alone and without drafts; otherwise rounding can change it. Without a prompt, the text that is piped
    in is continued. A pipe gets only the texts, in the order of the prompts; with several texts a line
    names each. `llamabranch speculate` takes the same options, always drafts, and prints how well.
    """
    with output.console() as console:
        # All arguments are checked before a model loads.
        is_speculate = call.command.name == "speculate"
        if is_speculate:
            models = replace(models, draft_length=models.draft_length or str(DRAFT_LENGTH))
            if not console.verbose:
                warnings.simplefilter("ignore", lb.errors.ExactnessWarning)
        if text.seed == -1 or (text.seed is None and (models.compare or is_speculate)):
            text = replace(text, seed=secrets.randbits(31))
        if not any((prompts.texts, prompts.prompts, prompts.files, prompts.input_file)):
            piped = read_piped_text()
            if piped is not None or is_speculate:
                prompts = replace(prompts, prompts=[DEFAULT_PROMPT if piped is None else piped])
        chat = chat.decided(models.target or hub.default_model())
        # For speculate the seed is a setting of the text, otherwise of the job.
        params = text.params(models, text.seed if is_speculate else None)
        requests = _requests(prompts, text, job, params)
        _check(requests, models, job)
        settings, file = _settings(text, params, chat, models, job), None
        if job.output_file is not None:
            file = ResultFile(job.output_file, settings, requests, resume=job.resume)
            settings = console.resources.enter_context(file).job
        has_grammar = any(request.grammar is not None for request in requests)
        names = models.resolve(console, has_grammar=has_grammar, always=is_speculate)
        lengths = JobLengths.measured(requests, text.max_tokens, names[0], models.n_ctx)
        opened = models.contexts(lengths, names[1], chat.template)
        context, drafter = models.open_pair(names, console, *opened)
        seed = settings["seed"] if settings["seed_given"] else None
        config, most = models.config(), text.max_tokens
        engine, plain = (
            Engine(context, one_drafter, config, sampling=params, max_tokens=most, seed=seed)
            for one_drafter in (drafter, NullDrafter())
        )
        # All requests have one seed. Without --seed a random one is used; a resumed job keeps it.
        engine.seed = engine.seed if settings["seed"] is None else settings["seed"]
        if file is not None:
            file.open(context.model, engine.seed)
        shown = GenerateReport(
            engine, requests, console, file, chat=chat.is_on,
            title=_title(names, config) if is_speculate or models.compare else None,
        )  # fmt: skip
        prepared = [_prepared(request, text, chat, context) for request in requests]
        with InterruptHandler([context, *drafter.contexts]) as interrupts:
            if models.compare:
                # Warm up, because the first decodes of a context are slower than later ones.
                # Separate engines do this, so that the timed ones learn nothing from it.
                few = [replace(request, max_tokens=8, n=1) for request in prepared]
                for one_drafter in (drafter, NullDrafter()):
                    Engine(context, one_drafter, replace(config, draft_k=2)).generate(few)
            _run(shown, prepared, interrupts)
            if models.compare and not interrupts.requested:
                shown.comparison = compare(
                    engine, plain, prepared, interrupts, progress=console.progress
                )
        shown.finish(interrupted=interrupts.requested)


def _title(names: tuple[str, tuple[str, ...]], config: lb.SpeculativeConfig) -> str:
    """Return the first line of the statistics: the models, and how much is drafted."""
    target, drafters = base_name(names[0]), "+".join(map(base_name, names[1]))
    return shortened(f"{target}, {config.draft_k} tokens a draft by {drafters or 'nobody'}", 80)


def _requests(
    prompts: ManyPrompts, text: TextFlags, job: ResultFlags, params: SamplingParams
) -> list[Request]:
    """Return the user's requests, completed with the settings of the command line."""
    grammar = text.parse_grammar()
    constraint = None if job.constraint is None else load_function(job.constraint)
    return [
        replace(
            request,
            stop=request.stop or text.stop_strings,
            grammar=request.grammar or grammar,
            constraint=constraint,
            n=max(request.n, job.samples),
            top_logprobs=job.top_logprobs if request.top_logprobs is None else request.top_logprobs,
        )
        for request in prompts.requests(params)
    ]


def _check(requests: list[Request], models: BatchFlags, job: ResultFlags) -> None:
    """Raise ConfigError for options that exclude each other."""
    models.config()
    if job.resume and job.output_file is None:
        raise typer.BadParameter("needs --output", param_hint="--resume")
    if not requests:
        raise ConfigError("there is no prompt", hint="pass one, pipe it in, or use --input")
    if models.compare and job.output_file is not None:
        raise ConfigError("--compare prints its results: leave out --output")


def _settings(
    text: TextFlags,
    params: SamplingParams,
    chat: ChatFlags,
    models: BatchFlags,
    job: ResultFlags,
) -> dict[str, Any]:
    """Return the settings that --resume compares; settings of a text are one digest."""
    grammar = text.parse_grammar()
    more = {"system": chat.system, "chat_template": chat.template, "constraint": job.constraint}
    options = {
        "sampling": asdict(params),
        "grammar": None if grammar is None else grammar.as_dict(),
        "max_tokens": text.max_tokens,
        "stop": list(text.stop_strings),
        "ignore_end": text.ignore_eos,
        "chat": chat.is_on,
        # Only if set, because the digests of older files do not include them.
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


def _prepared(request: Request, text: TextFlags, chat: ChatFlags, context: lb.Context) -> Request:
    """Return a request for the engine: ``chat`` and --ignore-eos are applied."""
    if request.sampling is not None:
        params = text.without_eog(request.sampling, context.model)
        request = replace(request, sampling=params)
    if chat.is_on and isinstance(request.prompt, str):
        return replace(request, prompt=chat.prompt_tokens(context.model, request.prompt))
    return request


def _run(report: GenerateReport, requests: list[Request], interrupts: InterruptHandler) -> None:
    """Run all requests, and show their texts."""
    watched = [replace(request, prompt_progress=True) for request in requests]
    with report.printing():
        stream = report.engine.stream(watched, skip=report.done)
        try:
            if interrupts.requested:  # Ctrl-C came before the first decode
                report.engine.target.interrupt()
            for event in stream:  # after a Ctrl-C the last events are the unfinished texts
                report.show(event)
        except lb.DecodeInterruptedError:
            if not interrupts.requested:
                raise
        finally:
            stream.close()
            report.end()
