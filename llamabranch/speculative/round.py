"""One speculative round, for any branch: plan, verify in one decode, settle.

A stream always holds one token that is said but not yet decoded: the *pending* one. It goes into the
target together with the draft that follows it, so a round costs one target decode whatever stands.
Planning and settling are apart so that many streams can share that decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from ..branch import Branch, Produced
from ..distribution import Distribution
from ..errors import CapacityError
from ..rows import LogitsRow
from .drafters import Draft, DraftLine
from .length import DraftLength
from .rules import seeded_rule
from .stats import SpeculativeStats

__all__ = ["Emitted", "Stream"]


@dataclass(frozen=True)
class Emitted:
    """A token of the target's line, and where it came from.

    ``source``: "drafted" (proposed and accepted), "bonus" (the target's own after a draft that stood
    whole), "corrected" (the target's own where a draft fell), "plain" (no draft). ``logprob`` and
    ``entropy`` (nats) are those of the target's own distribution, whatever the source.
    """

    token: int
    text: str
    source: str
    is_stop: bool
    logprob: float
    entropy: float


class Stream:
    """A branch being continued, the line that drafts for it, and its pending token."""

    def __init__(
        self, branch: Branch, line: DraftLine, length: DraftLength, stats: SpeculativeStats
    ) -> None:
        self.branch = branch
        self.line = line
        self._length = length
        self.stats = stats
        self.pending: Emitted | None = None
        self._draft = Draft()

    def begin(self) -> Emitted:
        """Say the first token: it needs no decode, the branch's logits are there."""
        self.pending = _emitted(self.branch.produce(), "plain")
        return self.pending

    def round(self, limit: int) -> list[Emitted]:
        """Run one round alone; return what it says, at most ``limit`` + 1 tokens."""
        start = perf_counter()
        planned = self.plan(limit)
        ready = perf_counter()
        try:
            rows = self.branch.verify(planned)
        except CapacityError:
            if len(planned) == 1:
                raise
            planned = self.plan(0)  # no room to verify a draft: go on without one
            rows = self.branch.verify(planned)
        verified = perf_counter()
        said = self.settle(rows, verified - ready)
        self.stats.sample_time_s += perf_counter() - verified
        self.stats.sample_time_s += max(0.0, ready - start - self._draft.seconds)
        return said

    def plan(self, limit: int) -> list[int]:
        """Return what to decode: the pending token and a draft of at most ``limit`` tokens."""
        pending = self.pending
        if pending is None:
            pending = self.begin()
        draft = Draft()
        limit = min(limit, self._length.limit)
        if limit > 0:
            tokens = [*self.branch.tokens, pending.token]
            draft = self.line.propose(tokens, self._length, limit)
            known = self.branch.ctx.n_vocab
            for i, token in enumerate(draft.tokens):
                if token >= known:  # padding that only the draft's vocabulary has
                    del draft.tokens[i:]
                    break
        self._draft = draft
        self.stats.draft_time_s += draft.seconds
        self.stats.draft_forward_passes += draft.n_decodes
        return [pending.token, *draft.tokens]

    def settle(self, rows: Sequence[LogitsRow], verify_s: float) -> list[Emitted]:
        """Take what stands of the plan whose logits are ``rows``; return what is said now."""
        branch, drafted = self.branch, self._draft.tokens
        if self.pending is None:
            raise RuntimeError("settle comes after plan")
        plan = [self.pending.token, *drafted]
        judge = branch.judge(plan, rows)
        first = branch.position + 1  # of the first drafted token
        is_end = branch.ctx.model.is_end

        def target(i: int) -> Distribution:
            if i and is_end(
                drafted[i - 1]
            ):  # nothing follows an end: what is drawn here is not said
                return Distribution.point(drafted[i - 1])
            return judge.distribution(i)

        verdict = seeded_rule(drafted, target, seed=branch.seed, position=first)
        n, following = verdict.n_accepted, verdict.token
        if n and is_end(drafted[n - 1]):  # the draft was right that it ends here
            n, following = n - 1, drafted[n - 1]
        texts = branch.settle(plan[: n + 1], rows, judge.sampler(n))
        said = [
            Emitted(token, text, "drafted", False, row.logprob(token), row.entropy())
            for token, text, row in zip(drafted[:n], texts[1:], rows, strict=False)
        ]
        source = "plain" if not drafted else "bonus" if n == len(drafted) else "corrected"
        self.pending = _emitted(branch.describe(following, rows[n]), source)
        said.append(self.pending)
        self.line.observe(branch.position)
        self._count(len(drafted), verdict.n_accepted, verify_s)
        return said

    def _count(self, n_drafted: int, n_accepted: int, verify_s: float) -> None:
        stats, draft = self.stats, self._draft
        stats.target_forward_passes += 1
        if n_drafted:
            stats.record_draft(n_drafted, n_accepted)
            stats.verify_time_s += verify_s
        else:
            stats.num_plain_steps += 1
            stats.plain_time_s += verify_s
        if draft.n_decodes or n_drafted:
            self._length.learn_round(
                draft.entropies, n_drafted, n_accepted, draft.seconds, verify_s
            )
        else:
            self._length.learn_plain(verify_s)

    def finish(self, position: int) -> None:
        """Leave the branch with exactly its first ``position`` tokens, the pending one decoded."""
        if self.branch.position > position:
            self.branch.rewind(position)
        elif self.pending is not None and self.branch.position == position - 1:
            self.branch.commit(self.pending.token)
        self.pending = None


def _emitted(produced: Produced, source: str) -> Emitted:
    return Emitted(
        produced.token, produced.text, source, produced.is_stop, produced.logprob, produced.entropy
    )
