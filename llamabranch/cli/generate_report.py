"""What ``generate`` shows: texts as they come, progress, statistics as a table or one JSON object."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from time import perf_counter

import rich.progress
import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

from llamabranch import Engine, Event, NullDrafter, Request, Result
from llamabranch.bench import Divergence, Machine, load_average

from .comparison import Comparison
from .console import Console, print_json
from .formats import batch_invariance, cut_text, interval_text, machine_text, number, reasons_text
from .interrupts import EXIT_FAILURE, EXIT_INTERRUPTED
from .options import OutputOptions
from .results import ResultFile

__all__ = ["GenerateReport"]


class GenerateReport:
    """The results of a job and what is printed of them.

    Args:
        engine: what runs the job.
        requests: all of them, as they were given.
        console: where results, progress and totals go.
        file: where results are appended instead, if anywhere.
        output: with ``as_json`` results are not printed as they end.
        chat: prompts are questions: print them on lines of their own.
        is_flat: the JSON object is that of the only text, as ``speculate`` prints it.
        seed_given: the texts have seeds that were given.

    Attributes:
        done: the texts (id, sample) that the file had before.
        comparison: with plain decoding, if requested.
        divergence: the first difference of texts that should be the same.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        console: Console,
        file: ResultFile | None,
        output: OutputOptions,
        *,
        chat: bool = False,
        is_flat: bool = False,
        seed_given: bool = False,
    ) -> None:
        self.engine = engine
        self._requests = {str(request.id): request for request in requests}
        self._n_texts = sum(request.n for request in requests)
        self.done = set() if file is None else file.done
        self.comparison: Comparison | None = None
        self.divergence: Divergence | None = None
        self._console = console
        self._file = file
        self._quiet = output.as_json
        self._chat = chat
        self._is_flat = is_flat
        self._seed_given = seed_given
        self._results: list[Result] = []
        self._n_failed = 0
        self._finish_reasons: Counter[str] = Counter()
        self._held: dict[tuple[str, int], Result] = {}
        self._on_terminal = console.out.is_terminal
        # A pipe gets the texts in the order of the prompts, a terminal as they end.
        in_order = not self._on_terminal and file is None and not output.as_json
        self._order: deque[tuple[str, int]] | None = deque() if in_order else None
        self._streams = self._n_texts == 1 and file is None and not output.as_json
        self._has_shown = False
        self._machine = Machine.now()
        self._rate = math.nan
        self._total_rows: list[tuple[str, str]] = []
        self._counted: tuple[dict[str, object], str] = {}, ""

    # -- texts -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Note which texts will come."""
        for name, request in self._requests.items():
            texts = [(name, i) for i in range(request.n) if (name, i) not in self.done]
            if self._order is not None:
                self._order += texts
            if self._streams and self._on_terminal:
                if not isinstance(self.engine.drafter, NullDrafter):
                    self._console.legend()
                self._console.write(self._prompt(request), "dim")

    def show(self, event: Event) -> None:
        """Print a token of the only text, or what is known of a text that has ended.

        A text that an interruption has cut is printed if it has a token, and not written to a file, which
        --resume completes.
        """
        result = event.result
        if event.emitted is not None and self._streams:
            self._console.emit(event.emitted)
        if result is None:
            return
        if result.finish_reason == "cancelled" and (self._file is not None or not result.tokens):
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
        request = self._requests[result.id]
        result.prompt = request.prompt  # the given one, without the chat template
        self._n_failed += result.error is not None and not result.tokens
        self._finish_reasons[result.finish_reason] += 1
        if self._file is not None:
            self._file.write(result, request)
        else:
            self._results.append(result)
            if not self._quiet:
                self._print(result, request)
        if result.error is not None and not self._quiet:
            self._console.error(f"{_label(result)}: {result.error.message}", result.error.hint)
        if result.grammar is not None and result.finish_reason in ("length", "capacity"):
            self._console.note(f"warning: {_label(result)}: {cut_text(result.finish_reason)}")

    def _print(self, result: Result, request: Request) -> None:
        if result.error is not None and not result.tokens:
            return
        if self._streams:
            self._console.write("\n\n" if self._on_terminal else "\n")
            return
        if self._on_terminal:
            self._console.write(f"[{_label(result)}] ", "bold")
            self._console.write(self._prompt(request), "dim")
        elif self._has_shown:
            self._console.write("\n")  # an empty line between two texts
        self._has_shown = True
        self._console.write(result.text + "\n" + "\n" * self._on_terminal)

    def _prompt(self, request: Request) -> str:
        prompt = request.prompt
        if isinstance(prompt, str):
            return prompt + "\n" * self._chat
        return f"{prompt[-1]['content']}\n" if isinstance(prompt[-1], Mapping) else ""

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Show the progress of the job on standard error while it is entered."""
        # Where results are shown as they end, they are the progress.
        shown = (
            self._console.err.is_terminal
            and not self._streams
            and (self._file is not None or self._quiet or not self._on_terminal)
        )
        columns = (
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
        )
        with rich.progress.Progress(
            *columns, console=self._console.err, transient=True, disable=not shown
        ) as bar:
            yield Progress(bar, self._n_texts, len(self.done))
        # Now, before a comparison adds to them.
        stats = self.engine.stats
        self._rate, self._total_rows = stats.tokens_per_s, self._rows()
        drafter, told = self.engine.drafter, self.engine.explain()
        if not isinstance(drafter, NullDrafter):
            told = f"drafter: {drafter.name}; {told}"
        self._counted = stats.as_dict(), told

    # -- totals ----------------------------------------------------------------------------------------

    @property
    def rule(self) -> str:
        """The acceptance rule in effect."""
        given = self.engine.config.rule
        if given != "auto":
            return str(given)
        is_fixed = self.engine.sampling.temperature == 0 or self._seed_given
        return "seeded" if is_fixed else "block"

    @property
    def expects_same_text(self) -> bool:
        """Whether the rule promises the text of plain decoding, not only its distribution."""
        engine = self.engine
        is_plain = isinstance(engine.drafter, NullDrafter)
        return is_plain or self.rule == "seeded" or engine.sampling.temperature == 0

    def finish(self, *, interrupted: bool) -> None:
        """Print the totals, and exit as the job asks for."""
        if self._quiet:
            print_json(self._as_json(interrupted))
        else:
            self._print_totals(self._console.beside)
        if interrupted:
            more = "" if self._file is None else "; --resume continues from here"
            self._console.note("interrupted" + more)
            raise typer.Exit(EXIT_INTERRUPTED)
        if self._n_failed:
            raise typer.Exit(EXIT_FAILURE)

    def _as_json(self, interrupted: bool) -> dict[str, object]:
        """Return the totals, and the results unless a file has them."""
        stats, explanation = self._counted
        if self._is_flat:
            return {**self._flat(explanation), **self._compared_json()}
        answer: dict[str, object] = {
            "requests": len(self._requests),
            "skipped": len(self.done),
            "failed": self._n_failed,
            "interrupted": interrupted,
            "seed": self.engine.seed,
            "batch_invariant": self.engine.target.capabilities.batch_invariant,
            "explain": explanation,
            "stats": stats,
        }
        if self._file is None:
            answer["results"] = [result.as_dict(stats=False) for result in self._results]
        return {**answer, **self._compared_json()}

    def _flat(self, explanation: str) -> dict[str, object]:
        """Return what ``speculate`` prints of its only text."""
        if not self._results:  # it was interrupted before the first token, or failed
            return {"text": "", "tokens": [], "finish_reason": None, "explain": explanation}
        (result,) = self._results
        speed = self._rate
        if self.comparison is not None:
            speed = self.comparison.drafted_tokens_per_s
        return {
            "text": result.text,
            "tokens": result.tokens,
            "finish_reason": None if result.finish_reason == "cancelled" else result.finish_reason,
            "tokens_per_s": speed,
            "seed": result.seed,
            "rule": self.rule,
            "explain": explanation,
            "stats": result.stats.as_dict(),
        }

    def _compared_json(self) -> dict[str, object]:
        found = self.comparison
        if found is None:
            return {}
        results = found.plain[0].results
        plain: dict[str, object] = {"tokens_per_s": found.plain_tokens_per_s}
        if self._is_flat:
            plain |= {"text": results[0].text, "tokens": results[0].tokens}
        else:
            plain["results"] = [result.as_dict(stats=False) for result in results]
        can, where = self.engine.target.capabilities, self.divergence
        facts = None if where is None else asdict(where) | {"explained": where.explained}
        if facts is not None and where is not None and not math.isfinite(where.gap):
            facts["gap"] = None  # JSON has no infinity
        return {
            "plain": plain,
            "speedup": found.speedup,
            "speedup_interval": found.interval.as_dict(),
            "speedup_verdict": found.verdict,
            "machine": self._machine.as_dict() | {"load_after": load_average()},
            "n_threads": self.engine.target.n_threads,
            "same_text": found.same_text,
            "same_text_expected": self.expects_same_text,
            "batch_invariant": can.batch_invariant,
            "batch_invariant_reason": can.batch_invariant_reason,
            "divergence": facts,
        }

    def _rows(self) -> list[tuple[str, str]]:
        stats, engine = self.engine.stats, self.engine
        drafting = stats.speculative
        rows = [("requests", str(len(self._requests)))]
        if self.done:
            rows.append(("texts in the file already", str(len(self.done))))
        if self._n_failed:
            rows.append(("failed", str(self._n_failed)))
        if self._finish_reasons:
            rows.append(("finish reason", reasons_text(self._finish_reasons)))
        if not isinstance(engine.drafter, NullDrafter):
            rows += [
                ("iterations", str(drafting.num_drafts)),
                ("drafted", str(drafting.num_draft_tokens)),
                ("accepted", str(drafting.num_accepted_tokens)),
                ("accept rate", number(100 * drafting.draft_acceptance_rate, 1, " %")),
                ("tokens a drafted round", number(drafting.mean_acceptance_length, 2)),
                ("plain steps", str(drafting.num_plain_steps)),
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
        seed = self._results[0].seed if self._is_flat and self._results else engine.seed
        return [
            *rows,
            ("seed", str(seed)),
            ("K/V type", engine.target.kv_type),
            ("batch-invariant", batch_invariance(engine.target.capabilities)),
            ("tokens", str(stats.generated_tokens)),
        ]

    def _print_totals(self, console: Console) -> None:
        """Print the totals as a table: on a pipe to standard error."""
        compared = self.comparison
        if compared is None:
            rate = ("tokens a second", number(self._rate, 1))
            console.table(("", "total"), [*self._total_rows, rate])
        else:
            fast, slow = compared.drafted_tokens_per_s, compared.plain_tokens_per_s
            rows = [(name, value, "") for name, value in self._total_rows]
            rows += [
                ("tokens a second", number(fast, 1), number(slow, 1)),
                ("speedup", number(compared.speedup, 2), "1"),
                ("95 % interval", interval_text(compared.interval), ""),
                ("same text", "yes" if compared.same_text else "no", ""),
            ]
            console.table(("", "drafted", "plain"), rows)
        paragraphs = [self._counted[1] if self._console.verbose else ""]
        if "capacity" in self._finish_reasons:
            self._console.note("the context is full: raise --ctx-size to go on")
        if compared is not None:
            paragraphs += [self._about_the_texts(compared), compared.explain()]
            n_threads = self.engine.target.n_threads
            paragraphs.append(machine_text(self._machine, load_average(), n_threads))
        for paragraph in filter(None, paragraphs):
            console.line()
            console.line(paragraph)

    def _about_the_texts(self, compared: Comparison) -> str:
        if not self.expects_same_text:
            return f"same text: not expected (rule {self.rule} is lossless in distribution)"
        if compared.same_text:
            return ""
        can, found = self.engine.target.capabilities, self.divergence
        told = "The texts differ."
        if found is not None:
            plain, drafted = (self._quoted(token) for token in found.tokens)
            told += (
                f" First difference at token {found.position}: plain decoding generated {plain}, with "
                f"drafts {drafted} (logits must change by {found.gap:.3g} for that; between decodes here "
                f"they change by {found.difference:.3g})."
            )
        reason = can.batch_invariant_reason
        if can.batch_invariant:
            return (
                f"{told} This context is batch-invariant ({reason}): this is a bug in llamabranch."
            )
        if found is not None and not found.explained:
            return (
                f"{told} This context is not batch-invariant ({reason}), but rounding of this size does "
                "not explain it: this is a bug in llamabranch."
            )
        return (
            f"{told} This context is not batch-invariant ({reason}): how logits are rounded depends on "
            "how many tokens are decoded at once, and drafts are verified several at a time."
        )

    def _quoted(self, token: int | None) -> str:
        if token is None:
            return "nothing"
        return repr(self.engine.target.model.piece(token).decode(errors="replace"))


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
