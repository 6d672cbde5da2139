"""``llamabranch generate`` and ``speculate``, which always drafts, and prints statistics."""

from __future__ import annotations

import copy
import secrets
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

import llamabranch as lb
from llamabranch import ConfigError, Engine, Event, Request, Result
from llamabranch.speculative import NullDrafter

from . import options as opt
from .comparison import MOST_PAIRS, Pair, pairs, report
from .console import Console, base_name, plural, shortened
from .drafters import open_pair, resolve
from .files import piped_or_read, read_requests
from .interrupts import EXIT_FAILURE, InterruptHandler
from .options import TEXT, Given, argument, option, with_options

# What ended a text, if its ``finish_reason`` does not say it.
ENDS = {"length": "the limit -n", "capacity": "the full context (-c)", "cancelled": "Ctrl-C"}
N_TEXTS = 8  # texts at a time; -S n_seq_max=N changes it


@with_options(opt.GENERATION_OPTIONS, max_tokens=128)
def generate(
    given: Given,
    console: Console,
    texts: list[str] | None = argument("PROMPT", "The same as -p; - is standard input."),
    prompts: list[str] | None = option(TEXT, *opt.PROMPT),
    input_file: Path | None = option(TEXT, "-i --input FILE.jsonl", "A request per line."),
) -> None:
    """Generate text from one prompt or many.

    llamabranch generate -m model.gguf -p "Once upon a time" -n 64
    llamabranch generate -hf Qwen/Qwen3-4B-GGUF --chat "Write a haiku."
    """
    params = given.params()
    requests = _requests(given, piped_or_read([*(texts or ()), *(prompts or ())]), params)
    if input_file is not None:
        requests += read_requests(input_file, params, first=len(requests))
    if not requests:
        raise ConfigError("there is no prompt", hint="pass one, pipe it in, or use --input")
    _run(given, console, requests)


@with_options(opt.GENERATION_OPTIONS, max_tokens=128, draft_max="4")
def speculate(
    given: Given,
    console: Console,
    texts: list[str] | None = argument("PROMPT", "The same as -p; - is standard input."),
    prompts: list[str] | None = option(TEXT, *opt.PROMPT),
    compares: bool = option(opt.OUTPUT, "--compare", "Also measure without drafts.", False),
) -> None:
    """Generate text with drafts, and say how well they worked.

    llamabranch speculate "Once upon a time"
    llamabranch speculate -m qwen3-4b -md qwen3-0.6b "Once upon a time" --compare
    """
    # The seed is a setting of the text; for generate it is one of the job.
    given = replace(given, seed=secrets.randbits(31) if given.seed is None else given.seed)
    words = piped_or_read([*(texts or ()), *(prompts or ())])
    requests = _requests(given, words or ["Once upon a time"], given.params(given.seed))
    _run(given, console, requests, speculates=True, compares=compares)


def _requests(given: Given, prompts: list[str], params: lb.SamplingParams) -> list[Request]:
    """Return requests for prompts."""
    more, grammar = given.set("request"), given.parse_grammar()
    return [
        Request(prompt, id=str(i), sampling=params, grammar=grammar, **more)
        for i, prompt in enumerate(prompts)
    ]


def _run(
    given: Given,
    console: Console,
    requests: list[Request],
    *,
    speculates: bool = False,
    compares: bool = False,
) -> None:
    """Generate the texts of all requests, print them, and exit with the code of the job."""
    config = given.config()
    has_grammar = any(request.grammar is not None for request in requests)
    names = resolve(given, console, has_grammar=has_grammar, always=speculates)
    n_texts = sum(request.n for request in requests)
    context, drafter = open_pair(
        given, names, console, n_texts=n_texts, n_seq_max=N_TEXTS, prefix_cache=compares
    )
    engine, plain = (
        Engine(context, one, config, max_tokens=given.max_tokens, seed=given.seed)
        for one in (drafter, NullDrafter())
    )
    prepared = [
        request.replace(prompt=given.prompt(request.prompt), prompt_progress=True)
        for request in requests
    ]
    compared = list[Pair]()
    with InterruptHandler([context, *drafter.contexts]) as interrupts:
        printer = _Printer(console, requests, drafts=bool(names[1]), is_chat=given.is_chat)
        if compares:  # warm up: the first decodes of a context are slower than later ones
            few = [request.replace(max_tokens=8, n=1) for request in prepared]
            for each in (drafter, NullDrafter()):
                Engine(context, each, replace(config, draft_k=2)).generate(few)
        printer.run(engine, prepared, interrupts)
        stats, explanation = copy.deepcopy(engine.stats), engine.explain()
        if compares and not interrupts.requested:
            for pair in pairs(engine, plain, prepared, interrupts):
                compared.append(pair)
                console.progress(f"comparing: {len(compared)} of {MOST_PAIRS}")
    console.progress("")
    figures: dict[str, Any] = {}
    if not console.silent:
        has_rate = stats.generated > 0 and not speculates
        rate = f", {stats.tokens_per_second:.1f} tokens/s" if has_rate else ""
        console.note(f"{printer.summary()}{rate}, seed {engine.seed}")
    if speculates:
        drafters = "+".join(base_name(part).removesuffix(":1") for part in names[1])
        by = f"drafts of {config.draft_k} tokens by {drafters or 'nobody'}"
        title = shortened(f"{base_name(names[0])}, {by}", 80)
        figures = report(console, title, stats, compared)
    results = [result.as_dict(stats=False) for result in printer.results]
    only = results[0] if n_texts == len(results) == 1 else {}
    console.answer(
        {name: only[name] for name in ("text", "tokens", "finish_reason") if only}
        | {
            "results": results,
            "seed": engine.seed,
            "failed": printer.n_failed,
            "interrupted": interrupts.requested,
            "exact": context.capabilities.exact,
            "drafter": engine.drafter.name,
            "explain": explanation,
            "stats": stats.as_dict(),
        }
        | figures
    )
    interrupts.check()
    if printer.n_failed:
        raise typer.Exit(EXIT_FAILURE)


class _Printer:
    """Prints texts: one text token by token, several in the order of their prompts.

    Attributes:
        results: the texts that were printed.
        n_failed: requests that failed without a token.
    """

    def __init__(
        self, console: Console, requests: Sequence[Request], *, drafts: bool, is_chat: bool
    ) -> None:
        self._console, self._drafts, self._is_chat = console, drafts, is_chat
        self._requests = {str(request.id): request for request in requests}
        self._order = deque((str(r.id), i) for r in requests for i in range(r.n))
        self._held = dict[tuple[str, int], Result]()
        self._n_texts = len(self._order)
        self._streams = self._n_texts == 1
        self._has_begun = not console.out.is_terminal
        self.results: list[Result] = []
        self.n_failed = 0

    def run(self, engine: Engine, requests: list[Request], interrupts: InterruptHandler) -> None:
        """Generate the texts and print them; after Ctrl-C the unfinished ones are printed too."""
        stream = engine.stream(requests)
        try:
            if interrupts.requested:  # Ctrl-C came before the first decode
                engine.target.interrupt()
            for event in stream:
                self._show(event)
        except lb.DecodeInterruptedError:
            if not interrupts.requested:
                raise
        finally:
            stream.close()
            for text in filter(self._held.__contains__, self._order):
                self._give(self._held[text])

    def _show(self, event: Event) -> None:
        result, console = event.result, self._console
        if event.progress is not None:
            console.reading(event.progress)
        elif event.emitted is not None and self._streams:
            self._begin()
            console.emit(event.emitted)
        if result is not None and (result.tokens or result.finish_reason != "cancelled"):
            self._held[result.id, result.sample] = result
            while self._order and self._order[0] in self._held:
                self._give(self._held.pop(self._order.popleft()))

    def _begin(self) -> None:
        """Show the prompt of the only text on a terminal; later calls do nothing."""
        if self._has_begun:
            return
        self._has_begun = True
        if self._drafts:
            self._console.legend()
        (request,) = self._requests.values()
        if isinstance(request.prompt, str):
            self._console.write(request.prompt + "\n" * self._is_chat, "dim")

    def _give(self, result: Result) -> None:
        """Print a text."""
        prompt, console = self._requests[result.id].prompt, self._console
        result.prompt = prompt  # as the user wrote it, without the chat template
        label = result.id + (f", sample {result.sample}" if result.sample else "")
        has_text = bool(result.tokens) or result.error is None
        self.n_failed += not has_text
        self.results.append(result)
        if self._streams and has_text:
            self._begin()
            console.write("\n\n" if console.out.is_terminal else "\n")
        elif has_text:  # a heading, as `head` prints for several files
            about = f": {shortened(prompt)}" if isinstance(prompt, str) and prompt else ""
            console.write("\n" * (len(self.results) > 1) + f"==> {label}{about} <==", "bold")
            console.write(f"\n{result.text}\n")
        if result.error is not None and not console.silent:
            console.error(f"{label}: {result.error.message}", result.error.hint)

    def summary(self) -> str:
        """Return how much was generated, and what ended it."""
        is_one = self._n_texts == 1
        reasons = Counter(result.finish_reason or "" for result in self.results).most_common()
        ends = ", ".join(ENDS.get(why, why) + ("" if is_one else f" ({n})") for why, n in reasons)
        n_tokens = sum(len(result.tokens) for result in self.results)
        told = ["" if is_one else f"{len(self.results)} texts", plural(n_tokens, "token")]
        return ", ".join(filter(None, [*told, ends and f"ended by {ends}"]))
