"""What ``generate`` shows: texts as they come, progress, statistics as a table or one JSON object."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from time import monotonic

import typer

from llamabranch import Engine, Event, Request, Result
from llamabranch.bench.machine import Machine
from llamabranch.speculative import NullDrafter

from .comparison import Comparison
from .console import Console, Progress
from .formats import ROUNDING, number
from .interrupts import EXIT_FAILURE, EXIT_INTERRUPTED
from .results import ResultFile


class GenerateReport:
    """The results of a job and what is printed of them.

    Args:
        engine: what runs the job.
        requests: all of them, as they were given.
        console: where results, progress and totals go.
        file: where results are appended instead, if anywhere.
        chat: prompts are questions: print them on lines of their own.
        is_flat: the JSON object is that of the only text, as ``speculate`` prints it.

    Attributes:
        done: the texts (id, sample) that the file had before.
        comparison: with plain decoding, if requested.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        console: Console,
        file: ResultFile | None,
        *,
        chat: bool = False,
        is_flat: bool = False,
    ) -> None:
        self.engine, self._console, self._file = engine, console, file
        self._requests = {str(request.id): request for request in requests}
        self.done = set() if file is None else file.done
        self.comparison: Comparison | None = None
        self._chat, self._is_flat = chat, is_flat
        self._is_plain = isinstance(engine.drafter, NullDrafter)
        self.rule = str(engine.config.rule)
        # Whether it promises the text of plain decoding, not only its distribution.
        is_exact = self.rule == "seeded" or engine.sampling.temperature == 0
        self.expects_same_text = self._is_plain or is_exact
        self._results: list[Result] = []
        self._finish_reasons: Counter[str] = Counter()
        self._n_failed = self._n_tokens = self._n_printed = 0
        self._n_texts, self._n_ended = sum(r.n for r in requests), len(self.done)
        self._on_terminal = console.out.is_terminal
        prints = file is None and not console.silent
        self._streams = self._n_texts == 1 and prints
        # Where results are shown as they end, they are the progress.
        counts = (
            not self._streams and not (prints and self._on_terminal) and console.err.is_terminal
        )
        self._progress = Progress(console, "texts", self._n_ended) if counts else None
        # A pipe gets the texts in the order of the prompts, a terminal as they end.
        self._order: deque[tuple[str, int]] | None = None
        if prints and not self._on_terminal:
            texts = ((str(r.id), i) for r in requests for i in range(r.n))
            self._order = deque(text for text in texts if text not in self.done)
        self._held: dict[tuple[str, int], Result] = {}
        self._machine = Machine.now()
        self._counted: tuple[float, list[tuple[str, object]], dict[str, object], str]

    # -- texts -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Show the prompt of the only text on a terminal."""
        for request in self._requests.values() if self._streams and self._on_terminal else ():
            if not self._is_plain:
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
        self._n_tokens += event.emitted is not None
        self._n_ended += result is not None
        if self._progress is not None and (result or self._n_tokens % 16 == 0):
            rate = self._n_tokens / max(monotonic() - self._progress.start_s, 1e-9)
            self._progress.show(self._n_ended, self._n_texts, f"{rate:.0f} tokens/s")
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

    def end(self) -> None:
        """Give what is still kept back, if the job was interrupted; keep the figures of the job.

        A comparison adds to the engine's figures later.
        """
        self._console.progress("")
        for text in self._order or ():
            if text in self._held:
                self._give(self._held.pop(text))
        stats, message = self.engine.stats, self.engine.explain()
        if not self._is_plain:
            message = f"drafter: {self.engine.drafter.name}; {message}"
        self._counted = stats.tokens_per_s, self._rows(), stats.as_dict(), message

    def _give(self, result: Result) -> None:
        """Write a result to the file, or print it, or keep it for the JSON object."""
        request, error = self._requests[result.id], result.error
        result.prompt = request.prompt  # the given one, without the chat template
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
        cut = {"length": ("-n", "it"), "capacity": ("the context", "--ctx-size")}
        if result.finish_reason == "constraint":
            message = "the constraint allows no token there, and the text may be incomplete"
            self._console.note(f"warning: {label}: {message}")
        elif result.grammar is not None and result.finish_reason in cut:
            limit, more = cut[result.finish_reason]
            message = f"{limit} ended the text before its grammar: it may be incomplete"
            self._console.note(f"warning: {label}: {message}; raise {more}")

    def _print(self, result: Result, request: Request, label: str) -> None:
        if self._streams:
            self._console.write("\n\n" if self._on_terminal else "\n")
            return
        if self._on_terminal:
            self._console.write(f"[{label}] ", "bold")
            self._console.write(self._prompt(request), "dim")
        elif self._n_printed:
            self._console.write("\n")  # an empty line between two texts
        self._n_printed += 1
        self._console.write(result.text + "\n" + "\n" * self._on_terminal)

    def _prompt(self, request: Request) -> str:
        prompt = request.prompt
        if isinstance(prompt, str):
            return prompt + "\n" * self._chat
        return f"{prompt[-1]['content']}\n" if isinstance(prompt[-1], Mapping) else ""

    # -- totals ----------------------------------------------------------------------------------------

    def finish(self, *, interrupted: bool) -> None:
        """Print the totals, and exit as the job asks for."""
        self._print_totals(self._console.beside)
        answer = self._flat() if self._is_flat else self._totals(interrupted)
        self._console.answer({**answer, **self._compared_json()})
        if interrupted:
            more = "" if self._file is None else "; --resume continues from here"
            self._console.note("interrupted" + more)
            raise typer.Exit(EXIT_INTERRUPTED)
        if self._n_failed:
            raise typer.Exit(EXIT_FAILURE)

    def _totals(self, interrupted: bool) -> dict[str, object]:
        """Return the totals, and the results unless a file has them."""
        _, _, stats, explanation = self._counted
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
        return answer

    def _flat(self) -> dict[str, object]:
        """Return what ``speculate`` prints of its only text."""
        rate, _, _, explanation = self._counted
        if not self._results:  # it was interrupted before the first token, or failed
            return {"text": "", "tokens": [], "finish_reason": None, "explain": explanation}
        (result,) = self._results
        return {
            "text": result.text,
            "tokens": result.tokens,
            "finish_reason": None if result.finish_reason == "cancelled" else result.finish_reason,
            "tokens_per_s": self.comparison.drafted.rate if self.comparison else rate,
            "seed": result.seed,
            "rule": self.rule,
            "explain": explanation,
            "stats": result.stats.as_dict(),
        }

    def _compared_json(self) -> dict[str, object]:
        found, can = self.comparison, self.engine.target.capabilities
        if found is None:
            return {}
        results, where = found.plain.results, found.first_difference
        plain: dict[str, object] = {"tokens_per_s": found.plain.rate}
        if self._is_flat:
            plain |= {"text": results[0].text, "tokens": results[0].tokens}
        else:
            plain["results"] = [result.as_dict(stats=False) for result in results]
        return {
            "plain": plain,
            "speedup": found.speedup,
            "speedup_interval": found.interval.as_dict(),
            "speedup_verdict": found.verdict,
            "machine": self._machine.as_dict(),
            "n_threads": self.engine.target.n_threads,
            "same_text": found.same_text,
            "same_text_expected": self.expects_same_text,
            "batch_invariant": can.batch_invariant,
            "batch_invariant_reason": can.batch_invariant_reason,
            "divergence": where and where.as_dict(),
        }

    def _rows(self) -> list[tuple[str, object]]:
        stats, engine, can = self.engine.stats, self.engine, self.engine.target.capabilities
        drafting, rows = stats.speculative, dict[str, object]({"requests": len(self._requests)})
        if not self._is_plain:
            rows |= {
                "iterations": drafting.num_drafts,
                "drafted": drafting.num_draft_tokens,
                "accepted": drafting.num_accepted_tokens,
                "accept rate": number(100 * drafting.draft_acceptance_rate, 1, " %"),
                "tokens a drafted round": number(drafting.mean_acceptance_length, 2),
                "plain steps": drafting.num_plain_steps,
                "drafts ended by": _reasons(drafting.stop_reasons),
            }
        counts = {
            "texts in the file already": len(self.done),
            "failed": self._n_failed,
            "draft forward passes": stats.draft_forward_passes,
            "prompt tokens shared": stats.shared_prompt_tokens,
            "preemptions": stats.preemptions,
        }
        rows |= {
            "finish reason": _reasons(self._finish_reasons),
            "target forward passes": stats.target_forward_passes,
            **{name: n for name, n in counts.items() if n},
            "seed": self._results[0].seed if self._is_flat and self._results else engine.seed,
            "K/V type": engine.target.kv_type,
            "batch-invariant": can.batch_invariant or f"no: {can.batch_invariant_reason}",
            "tokens": stats.generated_tokens,
        }
        return [row for row in rows.items() if row[1] != ""]

    def _print_totals(self, console: Console) -> None:
        """Print the totals as a table: on a pipe to standard error."""
        rate, totals, _, explanation = self._counted
        compared, paragraphs = self.comparison, [explanation if self._console.verbose else ""]
        if compared is None:
            console.table(("", "total"), [*totals, ("tokens a second", number(rate, 1))])
        else:
            rows = [*((*row, "") for row in totals), *compared.rows()]
            console.table(("", "drafted", "plain"), rows)
            machine = self._machine.describe(self.engine.target.n_threads)
            paragraphs += [self._about_the_texts(compared), compared.explain(), machine]
        if "capacity" in self._finish_reasons and not self._console.silent:
            self._console.note("the context is full: raise --ctx-size to go on")
        for paragraph in filter(None, paragraphs):
            console.line()
            console.line(paragraph)

    def _about_the_texts(self, compared: Comparison) -> str:
        if not self.expects_same_text:
            return f"same text: not expected (rule {self.rule} is lossless in distribution)"
        if compared.same_text:
            return ""
        can, message = self.engine.target.capabilities, "The texts differ."
        if found := compared.first_difference:
            plain, drafted = map(self._piece, found.tokens)
            message += (
                f" First difference at token {found.position}: plain decoding generated {plain}, with "
                f"drafts {drafted} (decided by {found.decided_by}: logits must move by {found.gap:.3g} "
                f"for that, and between decodes here they move by {found.difference:.3g})."
            )
        why = can.batch_invariant_reason
        if can.batch_invariant:
            return (
                f"{message} This context is batch-invariant ({why}): this is a bug in llamabranch."
            )
        return f"{message} This context is not batch-invariant ({why}). {ROUNDING}"

    def _piece(self, token: int | None) -> str:
        model = self.engine.target.model
        return "nothing" if token is None else repr(model.piece(token).decode(errors="replace"))


def _reasons(counts: Mapping[str, int]) -> str:
    """Return reasons with how often each was the case, the most frequent one first."""
    reasons = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{reason} {n}" for reason, n in reasons)
