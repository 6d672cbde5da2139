"""What ``speculate`` prints at the end: a table with explanations, or one JSON object."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from llamabranch import Capabilities, Model, Produced
from llamabranch.bench import Divergence, Machine, load_average

from ..pictures import page, table, tokens_picture
from .compare import LEAST_PAIRS, MOST_PAIRS, Comparison, Run, round_cost
from .console import Console
from .formats import batch_invariance, cut_text, interval_text, machine_text, number, reasons_text

__all__ = ["SpeculateReport"]


@dataclass(frozen=True)
class SpeculateReport:
    """A finished run with the data to explain it.

    Attributes:
        model: the target.
        first: the run whose text was shown.
        drafted: whether there was a drafter.
        rule: the rule in effect.
        explanation: text on how it drafted, why, and what was accepted.
        length_explanation: text on how long drafts are and why.
        capabilities, kv_type: those of the target's context.
        same_text_expected: the rule guarantees the text of plain decoding, not only its distribution.
        machine: as it was before the run.
        n_threads: threads of the target.
        has_grammar: whether a grammar constrains the text.
        comparison: with plain decoding, if requested.
        divergence: the first difference of texts that should be the same, or None.
        with_logprobs: whether the JSON lists every token.
    """

    model: Model
    first: Run
    drafted: bool
    rule: str
    explanation: str
    length_explanation: str
    capabilities: Capabilities
    kv_type: str
    same_text_expected: bool
    machine: Machine
    n_threads: int
    has_grammar: bool
    comparison: Comparison | None = None
    divergence: Divergence | None = None
    with_logprobs: bool = False

    def as_json(self) -> dict[str, object]:
        """Return everything, ready for JSON."""
        first, comparison = self.first, self.comparison
        speed = first.sample.rate
        if comparison is not None:
            speed = comparison.speculative_tokens_per_s
        answer: dict[str, object] = {
            "text": first.text,
            "tokens": first.tokens,
            "finish_reason": first.finish_reason,
            "tokens_per_s": speed,
            "seed": first.seed,
            "rule": self.rule,
            "explain": self.explanation,
            "stats": first.stats.as_dict(),
        }
        if self.with_logprobs:
            answer["logprobs"] = [self._logprobs(emitted) for emitted in first.emitted]
        if comparison is not None:
            answer["plain"] = {
                "text": comparison.plain.text,
                "tokens": comparison.plain.tokens,
                "tokens_per_s": comparison.plain_tokens_per_s,
            }
            answer["speedup"] = comparison.speedup
            answer["speedup_interval"] = comparison.interval.as_dict()
            answer["speedup_verdict"] = comparison.verdict
            answer["machine"] = self.machine.as_dict() | {"load_after": load_average()}
            answer["n_threads"] = self.n_threads
            answer["same_text"] = comparison.same_text
            answer["same_text_expected"] = self.same_text_expected
            answer["batch_invariant"] = self.capabilities.batch_invariant
            answer["batch_invariant_reason"] = self.capabilities.batch_invariant_reason
            answer["divergence"] = self._divergence()
        return answer

    def _logprobs(self, emitted: Produced) -> dict[str, object]:
        return {
            "token": emitted.token,
            "text": self._piece(emitted.token),
            "source": emitted.source,
            "logprob": emitted.logprob,
            "entropy": emitted.entropy,
            "top": [
                {"token": token, "text": self._piece(token), "logprob": logprob}
                for token, logprob in emitted.alternatives
            ],
        }

    def _divergence(self) -> dict[str, object] | None:
        if self.divergence is None:
            return None
        facts = asdict(self.divergence) | {"explained": self.divergence.explained}
        if not math.isfinite(self.divergence.gap):  # JSON has no infinity
            facts["gap"] = None
        return facts

    def _piece(self, token: int) -> str:
        return self.model.piece(token).decode(errors="replace")

    def as_html(self, prompt: str) -> str:
        """Return a page: the text with its tokens coloured, the table, the explanation."""
        if self.comparison is None:
            rows = [*self._rows(), ("tokens a second", number(self.first.sample.rate, 1))]
            rows.append(("seed", str(self.first.seed)))
            listed: list[tuple[str, ...]] = [*rows]
        else:
            listed = [("", "speculative", "plain"), *self._compared(self.comparison)]
        return page(
            self.model.name,
            tokens_picture(self.first.emitted, prompt=prompt),
            "<hr>",
            table(listed),
            table((line,) for line in self.explanation.splitlines()),
        )

    def print(self, console: Console, *, explain: bool) -> None:
        """Print the table, and explanations under it."""
        first, comparison = self.first, self.comparison
        if comparison is None:
            rows = [*self._rows(), ("tokens a second", number(first.sample.rate, 1))]
            rows.append(("seed", str(first.seed)))
            console.table(("", "speculative" if self.drafted else "plain"), rows)
        else:
            console.table(("", "speculative", "plain"), self._compared(comparison))
        if self.has_grammar and first.finish_reason in ("length", "capacity"):
            console.note(f"warning: {cut_text(first.finish_reason)}")
        elif first.finish_reason == "capacity":
            console.note("the context is full: raise --n-ctx to go on")
        paragraphs = []
        if explain:
            paragraphs.append(self.explanation)
        elif self.drafted:
            paragraphs.append(self.length_explanation.partition("\n")[0])
        if comparison is not None:
            paragraphs += [self._about_the_texts(comparison), self._about_the_speed(comparison)]
            paragraphs.append(machine_text(self.machine, load_average(), self.n_threads))
        for paragraph in filter(None, paragraphs):
            console.line()
            console.line(paragraph)

    def _rows(self) -> list[tuple[str, str]]:
        stats = self.first.stats
        rows = []
        if self.drafted:
            rows = [
                ("iterations", str(stats.num_drafts)),
                ("drafted", str(stats.num_draft_tokens)),
                ("accepted", str(stats.num_accepted_tokens)),
                ("accept rate", number(100 * stats.draft_acceptance_rate, 1, " %")),
                ("tokens a drafted round", number(stats.mean_acceptance_length, 2)),
                ("plain steps", str(stats.num_plain_steps)),
            ]
            if stats.stop_reasons:
                rows.append(("drafts ended by", reasons_text(stats.stop_reasons)))
            if self.same_text_expected:  # on this condition
                rows.append(("batch-invariant", batch_invariance(self.capabilities)))
        rows.append(("K/V type", self.kv_type))
        rows.append(("finish reason", self.first.finish_reason or "interrupted"))
        return [*rows, ("tokens", str(len(self.first.tokens)))]

    def _compared(self, comparison: Comparison) -> list[tuple[str, str, str]]:
        plain = comparison.plain
        fast, slow = comparison.speculative_tokens_per_s, comparison.plain_tokens_per_s
        rows = [(label, value, "") for label, value in self._rows()[:-1]]
        rows += [
            ("tokens", str(len(self.first.tokens)), str(len(plain.tokens))),
            ("tokens a second", number(fast, 1), number(slow, 1)),
            ("speedup", number(comparison.speedup, 2), "1"),
            ("95 % interval", interval_text(comparison.interval), ""),
        ]
        if self.same_text_expected:
            rows.append(("same text", "yes" if comparison.same_text else "no", ""))
        return [*rows, ("seed", str(self.first.seed), str(plain.seed))]

    def _about_the_texts(self, comparison: Comparison) -> str:
        if not self.same_text_expected:
            return f"same text: not expected (rule {self.rule} is lossless in distribution)"
        if comparison.same_text:
            return ""
        parts = ["The texts differ."]
        reason = self.capabilities.batch_invariant_reason
        if self.divergence is not None:
            plain, drafted = map(self._quoted, self.divergence.tokens)
            parts.append(
                f"First difference at token {self.divergence.position}: plain decoding generated "
                f"{plain}, speculative decoding {drafted}. {_decided(self.divergence)}"
            )
        if self.capabilities.batch_invariant:
            parts.append(
                f"This context is batch-invariant ({reason}), so they "
                "should be the same: this is a bug in llamabranch."
            )
        elif self.divergence is not None and not self.divergence.explained:
            parts.append(
                f"This context is not batch-invariant ({reason}), but rounding of "
                "this size does not explain it: this is a bug in llamabranch."
            )
        else:
            parts.append(
                f"This context is not batch-invariant ({reason}): how logits are rounded depends on how "
                "many tokens are decoded at once, drafts are verified several at a time, and "
                "here that changed the token."
            )
        return " ".join(parts)

    def _quoted(self, token: int | None) -> str:
        return "nothing" if token is None else repr(self._piece(token))

    def _about_the_speed(self, comparison: Comparison) -> str:
        verdict = comparison.verdict
        if not self.drafted:
            return ""
        parts = []
        if verdict == "inconclusive":
            parts.append(_inconclusive(comparison))
        elif verdict == "nothing drafted":
            parts.append(
                "Inconclusive: nothing was drafted, so both are plain decoding and differ by noise and "
                "by the time spent looking for drafts."
            )
        elif verdict == "slower":
            parts.append("Slower than plain decoding here.")
        if comparison.speedup < 1:
            parts += self._why_no_faster(comparison)
        return " ".join(parts)

    def _why_no_faster(self, comparison: Comparison) -> list[str]:
        stats, parts = self.first.stats, []
        if stats.num_plain_steps > stats.num_drafts / 8:  # the last round of a text is often one
            n_rounds = stats.num_drafts + stats.num_plain_steps
            parts.append(
                f"Of {n_rounds} rounds {stats.num_plain_steps} were plain steps without a draft."
            )
        cost = round_cost(stats, comparison.plain.stats)
        if cost is not None:
            parts.append(cost.explain())
        else:
            parts.append(
                f"Looking for drafts took {1e3 * stats.draft_time_s:.2f} of "
                f"{1e3 * self.first.elapsed_s:.2f} ms."
            )
        return parts


_DECIDERS = {
    "logits": "The order of the two largest logits decided",
    "scores": "Log-probability plus noise decided",
    "temperature": "The dynamic temperature decided",
}


def _decided(found: Divergence) -> str:
    by = _DECIDERS.get(found.decided_by, f"The boundary of {found.decided_by} decided")
    if math.isinf(found.gap):
        return "No small change of the logits changes one token into the other."
    return (
        f"{by}: to change the token, logits must change by {found.gap:.3g} relative to each other "
        f"(a factor of {math.exp(min(found.gap, 700.0)):.3g} in probability); between decodes here they "
        f"change by {found.difference:.3g}."
    )


def _inconclusive(comparison: Comparison) -> str:
    interval = comparison.interval
    pairs = "1 pair of runs was" if interval.n == 1 else f"{interval.n} pairs of runs were"
    if math.isnan(interval.low):
        found = "fewer than 3 have no interval"
    else:
        found = f"their 95 % interval is {interval_text(interval)}"
    text = f"Inconclusive: {pairs} timed, and {found}."
    if interval.n < MOST_PAIRS:  # the time was over
        n = LEAST_PAIRS if interval.n < LEAST_PAIRS else MOST_PAIRS
        seconds = math.ceil(1.1 * n * comparison.pair_s)  # the times vary
        return (
            f"{text} For {n} pairs give more time (--compare-time {seconds}) or generate less "
            "(--max-tokens)."
        )
    return (
        f"{text} The difference is smaller than the noise. To see it, stop other programs on the "
        "machine, generate more (--max-tokens), or measure several prompts with `llamabranch bench`."
    )
