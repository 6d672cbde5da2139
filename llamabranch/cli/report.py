"""What ``speculate`` says at the end: a table and what it means, or one JSON object."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from llamabranch import Divergence, Model, Produced
from llamabranch.bench import Interval, Machine, load_average

from .compare import Comparison, Run, round_cost
from .render import Screen, number


@dataclass(frozen=True)
class Outcome:
    """A finished run, and what is needed to explain it.

    ``same_text_expected``: the rule promises the very text of plain decoding, not only its
    distribution. ``divergence`` is None also where the texts are equal or need not be. ``machine`` is
    as it was before.
    """

    model: Model
    first: Run
    drafted: bool
    rule: str
    explanation: str
    batch_invariant: bool
    batch_invariant_reason: str
    same_text_expected: bool
    comparison: Comparison | None = None
    divergence: Divergence | None = None
    with_logprobs: bool = False
    machine: Machine | None = None
    n_threads: int = 1

    def as_json(self) -> dict[str, object]:
        """Return everything, ready for JSON."""
        first, comparison = self.first, self.comparison
        speed = first.tokens_per_s if comparison is None else comparison.speculative_tokens_per_s
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
            if self.machine is not None:
                load = {"load_after": load_average()}
                answer["machine"] = self.machine.as_dict() | load
                answer["n_threads"] = self.n_threads
            answer["same_text"] = comparison.same_text
            answer["same_text_expected"] = self.same_text_expected
            answer["batch_invariant"] = self.batch_invariant
            answer["batch_invariant_reason"] = self.batch_invariant_reason
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
        if not math.isfinite(self.divergence.gap):  # JSON knows no infinity
            facts["gap"] = None
        return facts

    def _piece(self, token: int) -> str:
        return self.model.piece(token).decode(errors="replace")

    def print(self, screen: Screen, *, explain: bool) -> None:
        """Print the table, and under it what needs words."""
        first, comparison = self.first, self.comparison
        if comparison is None:
            rows = [*self._rows(), ("tokens a second", f"{first.tokens_per_s:.1f}")]
            rows.append(("seed", str(first.seed)))
            screen.table(("", "speculative" if self.drafted else "plain"), rows)
        else:
            screen.table(("", "speculative", "plain"), self._compared(comparison))
        if first.finish_reason == "capacity":
            screen.note("the context is full: raise --n-ctx to go on")
        paragraphs = []
        if explain or (comparison is not None and self.drafted):
            paragraphs.append(self.explanation)
        if comparison is not None:
            paragraphs += [self._about_the_texts(comparison), self._about_the_speed(comparison)]
            paragraphs.append(self._about_the_machine())
        for paragraph in filter(None, paragraphs):
            screen.line()
            screen.line(paragraph)

    def _rows(self) -> list[tuple[str, str]]:
        stats = self.first.stats
        rows = []
        if self.drafted:
            rows = [
                ("iterations", str(stats.num_drafts)),
                ("drafted", str(stats.num_draft_tokens)),
                ("accepted", str(stats.num_accepted_tokens)),
                ("accept rate", number(100 * stats.draft_acceptance_rate, 1, " %")),
                ("tokens a round", number(stats.mean_acceptance_length, 2)),
            ]
        return [*rows, ("tokens", str(len(self.first.tokens)))]

    def _compared(self, comparison: Comparison) -> list[tuple[str, str, str]]:
        plain = comparison.plain
        fast, slow = comparison.speculative_tokens_per_s, comparison.plain_tokens_per_s
        rows = [(label, value, "") for label, value in self._rows()[:-1]]
        rows += [
            ("tokens", str(len(self.first.tokens)), str(len(plain.tokens))),
            ("tokens a second", f"{fast:.1f}", f"{slow:.1f}"),
            ("speedup", f"{comparison.speedup:.2f}", "1"),
            ("95 % interval", _between(comparison.interval), ""),
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
        if self.divergence is not None:
            plain, drafted = map(self._quoted, self.divergence.tokens)
            parts.append(
                f"First difference at token {self.divergence.position}: plain decoding said {plain}, "
                f"speculative decoding {drafted}. {_decided(self.divergence)}"
            )
        if self.batch_invariant:
            parts.append(
                f"This context is batch-invariant ({self.batch_invariant_reason}), so they "
                "should be the same: this is a bug in llamabranch."
            )
        elif self.divergence is not None and not self.divergence.explained:
            parts.append(
                f"This context is not batch-invariant ({self.batch_invariant_reason}), but rounding of "
                "this size does not explain it: this is a bug in llamabranch."
            )
        else:
            parts.append(
                f"This context is not batch-invariant ({self.batch_invariant_reason}): logits "
                "change a little with what shares the batch, which decides where so little is enough."
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
            parts.append(_inconclusive(comparison.interval))
        elif verdict == "nothing drafted":
            parts.append(
                "Inconclusive: nothing was drafted, so both decoded plainly and differ by noise and by "
                "the time it takes to ask."
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
                f"Looking for something to draft took {1e3 * stats.draft_time_s:.2f} of "
                f"{1e3 * self.first.elapsed_s:.2f} ms."
            )
        return parts

    def _about_the_machine(self) -> str:
        if self.machine is None:
            return ""
        load = load_average()
        after = "unknown" if load is None else f"{load:.2f}"
        text = f"Machine: {self.machine.describe(self.n_threads)}; load {after} after."
        complaint = self.machine.complaint(self.n_threads)
        return f"{text} The times are noisy: {complaint}." if complaint else text


def _between(interval: Interval) -> str:
    if math.isnan(interval.low):
        return "-"
    return f"{interval.low:.2f} to {interval.high:.2f}"


_DECIDERS = {
    "logits": "The two largest logits decided",
    "scores": "Log-probability plus noise decided",
    "temperature": "The dynamic temperature decided",
}


def _decided(found: Divergence) -> str:
    by = _DECIDERS.get(found.decided_by, f"The boundary of {found.decided_by} decided")
    if math.isinf(found.gap):
        return "No small change of the logits turns the one into the other."
    return (
        f"{by}: logits must move by {found.gap:.3g} against each other to turn it, and move by "
        f"{found.difference:.3g} between decodes here."
    )


def _inconclusive(interval: Interval) -> str:
    pairs = "1 pair of runs was" if interval.n == 1 else f"{interval.n} pairs of runs were"
    found = "fewer than 6 have no interval"
    if not math.isnan(interval.low):
        found = f"their 95 % interval is {_between(interval)}"
    return (
        f"Inconclusive: {pairs} timed, and {found}. To decide whether drafting is faster, "
        "let nothing else run on the machine, generate more (--max-tokens), or measure with "
        "`llamabranch bench`."
    )
