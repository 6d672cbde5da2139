"""What ``generate`` shows: results as they end, progress, totals as a table or one JSON object."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

import rich.progress
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

from llamabranch import Engine, Event, NullDrafter, Request, Result

from .console import Console
from .formats import batch_invariance, cut_text, number, reasons_text
from .job_survey import JobSurvey
from .options import TextOutputOptions
from .results import ResultFile

__all__ = ["GenerateReport", "Progress"]


class GenerateReport:
    """The results of a job and what is printed of them.

    Args:
        engine: what runs the job.
        job: what the requests are.
        console: where results, progress and totals go.
        file: where results are appended instead, if anywhere.
        output: with ``as_json`` neither results nor their errors are printed, with ``display_prompt``
            prompts before the texts; None = on a terminal only, where each text has the
            id of its request before it. A pipe gets the texts alone, in the order of the prompts.
        in_order: keep results back until those of all earlier texts are there.
        stats: add the statistics of drafting to each result.
        chat: prompts are questions: print them on lines of their own.

    Attributes:
        done: the texts (id, sample) that the file had before.
        n_failed: how many texts have an error and no token.
    """

    def __init__(
        self,
        engine: Engine,
        job: JobSurvey,
        console: Console,
        file: ResultFile | None,
        output: TextOutputOptions,
        *,
        in_order: bool = False,
        stats: bool = False,
        chat: bool = False,
    ) -> None:
        quiet, display_prompt = output.as_json, output.display_prompt
        self.engine = engine
        self.job = job
        self.console = console
        self.file = file
        self.quiet = quiet
        self.results: list[Result] = []
        self.n_failed = 0
        self._finish_reasons: Counter[str] = Counter()
        self._begun: dict[str, tuple[Request, int]] = {}  # with the number of texts to come
        self.done = set() if file is None else file.done
        self._stats = stats
        self._chat = chat
        self._held: dict[tuple[str, int], Result] = {}
        on_terminal = console.out.is_terminal
        if not on_terminal and file is None and not quiet:
            in_order = True
        self._order: deque[tuple[str, int]] | None = deque() if in_order else None
        self._has_shown = False
        self._with_id = on_terminal or bool(display_prompt)
        self._with_prompt = on_terminal if display_prompt is None else display_prompt

    def begin(self, request: Request) -> None:
        """Note a request, as it was given, whose results will come."""
        texts = [(str(request.id), i) for i in range(request.n)]
        texts = [text for text in texts if text not in self.done]
        if texts:
            self._begun[str(request.id)] = request, len(texts)
        if self._order is not None:
            self._order += texts

    def add(self, result: Result) -> None:
        """Give a result, or keep it back until those before it are there.

        One that an interruption has cut is printed if it has a token, and not written to a file, which
        --resume completes.
        """
        if result.finish_reason == "cancelled" and (self.file is not None or not result.tokens):
            return
        if self._order is None:
            self._give(result)
            return
        self._held[result.id, result.sample] = result
        while self._order and self._order[0] in self._held:
            self._give(self._held.pop(self._order.popleft()))

    def flush(self) -> None:
        """Give what is still kept back: the job was interrupted, and earlier texts have not ended."""
        for text in self._order or ():
            if text in self._held:
                self._give(self._held.pop(text))

    def _give(self, result: Result) -> None:
        """Write a result to the file, or print it, or keep it for the JSON object."""
        request, n_left = self._begun.pop(result.id)
        if n_left > 1:
            self._begun[result.id] = request, n_left - 1
        result.prompt = request.prompt  # the given one, without the chat template
        self.n_failed += result.error is not None and not result.tokens
        self._finish_reasons[result.finish_reason] += 1
        if self.file is not None:
            self.file.write(result, request)
        else:
            self.results.append(result)
            if not self.quiet:
                self._show(result)
        if result.error is not None and not self.quiet:
            self.console.error(f"{_label(result)}: {result.error.message}", result.error.hint)
        if result.grammar is not None and result.finish_reason in ("length", "capacity"):
            self.console.note(f"warning: {_label(result)}: {cut_text(result.finish_reason)}")

    def _show(self, result: Result) -> None:
        if result.error is not None and not result.tokens:
            return
        if self._with_id:
            self.console.write(f"[{_label(result)}] ", "bold")
        elif self._has_shown:
            self.console.write("\n")  # an empty line between two texts
        self._has_shown = True
        if self._with_prompt and isinstance(result.prompt, str):
            self.console.write(result.prompt + "\n" * self._chat, "dim")
        elif self._with_prompt and isinstance(result.prompt[-1], Mapping):
            self.console.write(f"{result.prompt[-1]['content']}\n", "dim")
        self.console.write(result.text + "\n" + "\n" * self._with_id)

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Show the progress of the job on standard error while it is entered."""
        console = self.console
        # Where results are shown as they end, they are the progress.
        shown = console.err.is_terminal and (
            self.file is not None or self.quiet or not console.out.is_terminal
        )
        columns = (
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
        )
        with rich.progress.Progress(
            *columns, console=console.err, transient=True, disable=not shown
        ) as bar:
            yield Progress(bar, self.job.n_texts, len(self.done))

    def as_json(self, interrupted: bool) -> dict[str, object]:
        """Return the totals, and the results unless a file has them."""
        answer: dict[str, object] = {
            "requests": self.job.n_requests,
            "skipped": len(self.done),
            "failed": self.n_failed,
            "interrupted": interrupted,
            "seed": self.engine.seed,
            "batch_invariant": self.engine.target.capabilities.batch_invariant,
            "explain": self.engine.explain(),
            "stats": self.engine.stats.as_dict(),
        }
        if self.file is None:
            answer["results"] = [result.as_dict(stats=self._stats) for result in self.results]
        return answer

    def print(self, *, explain: bool) -> None:
        """Print the totals as a table: on a pipe to standard error."""
        console = self.console.beside
        stats = self.engine.stats
        drafting = stats.speculative
        rows = [("requests", str(self.job.n_requests))]
        if self.done:
            rows.append(("texts in the file already", str(len(self.done))))
        if self.n_failed:
            rows.append(("failed", str(self.n_failed)))
        if self._finish_reasons:
            rows.append(("finish reason", reasons_text(self._finish_reasons)))
        rows += [
            ("tokens", str(stats.generated_tokens)),
            ("tokens a second", number(stats.tokens_per_s, 1)),
        ]
        if not isinstance(self.engine.drafter, NullDrafter):
            rows += [
                ("drafted", str(drafting.num_draft_tokens)),
                ("accepted", str(drafting.num_accepted_tokens)),
                ("accept rate", number(100 * drafting.draft_acceptance_rate, 1, " %")),
            ]
            if drafting.stop_reasons:
                rows.append(("drafts ended by", reasons_text(drafting.stop_reasons)))
        rows.append(("target forward passes", str(stats.target_forward_passes)))
        if stats.draft_forward_passes:
            rows.append(("draft forward passes", str(stats.draft_forward_passes)))
        if stats.shared_prompt_tokens:
            rows.append(("prompt tokens shared", str(stats.shared_prompt_tokens)))
        if stats.preemptions:
            rows.append(("preemptions", str(stats.preemptions)))
        rows.append(("seed", str(self.engine.seed)))
        rows.append(("K/V type", self.engine.target.kv_type))
        rows.append(("batch-invariant", batch_invariance(self.engine.target.capabilities)))
        console.table(("", "total"), rows)
        if explain:
            console.line()
            console.line(self.engine.explain())


class Progress:
    """A bar with the texts done, tokens a second and the accept rate."""

    def __init__(self, bar: rich.progress.Progress, n_texts: int, n_done: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=n_texts, completed=n_done)
        self._start = perf_counter()
        self._n_tokens = self._n_drafted = self._n_accepted = 0

    def update(self, event: Event) -> None:
        """Show what an event changes."""
        self._n_tokens += event.emitted is not None
        if event.result is None and self._n_tokens % 16:
            return
        if event.result is not None:
            self._n_drafted += event.result.stats.num_draft_tokens
            self._n_accepted += event.result.stats.num_accepted_tokens
        speed = self._n_tokens / max(perf_counter() - self._start, 1e-9)
        status = f"{speed:.0f} tokens/s"
        if self._n_drafted:
            status += f", {self._n_accepted / self._n_drafted:.0%} accepted"
        advance = event.result is not None
        self._bar.update(self._task, advance=advance, description=status)


def _label(result: Result) -> str:
    return result.id if result.sample == 0 else f"{result.id}, sample {result.sample}"
