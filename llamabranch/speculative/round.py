"""What one stream of tokens knows about its rounds: its draft, its pending token, what is accepted.

A stream always holds one token that is emitted but not yet decoded: the *pending* one. It is decoded
together with the draft that follows it, so a round costs one target decode, however much of the draft is
accepted. `joint` runs the rounds, of one stream or of many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import NamedTuple, TypeVar

from ..branch import Branch, Produced
from ..branch.sequence import TokenSequence
from ..branch.verification import TargetDistributions, Verification
from ..context.logits import LogitsRow
from ..errors import CapacityError, ConfigError, DecodeError, GrammarError
from ..model import token_list
from ..sampling import Distribution
from .drafters.base import NO_DRAFT, Draft, DraftRequest, DraftState
from .length.base import DraftLength, RoundReport
from .rules import DraftTree, Noise, Rule, apply_rule, match_draws, tree_rule
from .stats import SpeculativeStats

__all__ = ["RoundTrace", "Stream", "finish_at"]

T = TypeVar("T")

_MOST_PLAIN = 64  # plain steps that are reported together


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """What a round with a draft has done; for ``Request.on_round``.

    Attributes:
        position: that of the first drafted token in the text, prompt included.
        draft: the drafted ids; of a tree parents first.
        logprobs: the target's log-probabilities, nats, of the tokens that were accepted, in their order,
            and then of those that were rejected after them: one at most, but of a tree.
        n_accepted, n_rejected: of the draft; the others were never judged.
        following: the token after them: the target's own, or an accepted one that ends the text.
        drafter: what drafted.
        draft_s, verify_s: seconds of the draft, and of the decode or this text's share of it.
    """

    position: int
    draft: tuple[int, ...]
    logprobs: tuple[float, ...]
    n_accepted: int
    n_rejected: int
    following: Produced | None = None
    drafter: str = ""
    draft_s: float = 0.0
    verify_s: float = 0.0


class _DeadEnd(Exception):
    """The target has no distribution after entry ``at`` of a plan; the cause holds the error."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at

    @property
    def reason(self) -> BaseException:
        return self.__cause__ or self


class _Unreported(NamedTuple):
    """A round that is accepted and not yet reported; times in seconds."""

    n_accepted: int
    n_verified: int
    n_rows: int
    verify_s: float
    overhead_s: float


class Stream:
    """A branch being continued, the state that drafts for it, and its pending token.

    Attributes:
        sequence: that of the branch.
        pending: the last emitted token, which is not yet decoded; None before the first.
        on_round: called after each round with a draft; None = nobody looks.
    """

    def __init__(
        self,
        branch: Branch,
        state: DraftState,
        length: DraftLength,
        rule: Rule,
        stats: SpeculativeStats,
        n_alternatives: int = 0,
    ) -> None:
        self.branch = branch
        self.sequence: TokenSequence = branch.sequence
        self.state = state
        self.length = length
        self.stats = stats
        self.pending: Produced | None = None
        self.rule = rule
        self.on_round: Callable[[RoundTrace], None] | None = None
        self._n_alternatives = n_alternatives
        self._trace: RoundTrace | None = None
        self._draft = NO_DRAFT
        # Tokens the draft state has been given; it gets the others with its next call.
        self._n_seen = 0
        self._n_plain_left = 0  # plain steps to take before it is called again
        self._plain_s: list[tuple[float, float]] = []  # of those taken: of the decode, of the rest
        # Not yet reported to the draft state and the length.
        self._unreported: _Unreported | None = None
        self._verification: Verification | None = None  # decoded, but not yet accepted or abandoned

    def begin(self) -> Produced:
        """Emit the first token. It needs no decode: the branch has the logits already."""
        branch = self.branch
        with branch.ctx.lock:
            self.pending = self._plain()
        return self.pending

    def skips_draft(self) -> bool:
        """Return whether the length has asked for a plain step now; count it."""
        self._n_plain_left -= 1
        return self._n_plain_left >= 0

    def conclude(self) -> None:
        """Report the round to the draft state and the length. Call it without the target's lock."""
        outcome, self._unreported = self._unreported, None
        if outcome is None:
            if len(self._plain_s) >= _MOST_PLAIN:
                self.report()
            return
        start = perf_counter()
        self.state.observe(self.branch.position)
        rollback_s = perf_counter() - start
        self.stats.sample_time_s += outcome.overhead_s
        self.stats.rollback_time_s += rollback_s
        self._count(outcome, outcome.overhead_s + rollback_s)

    def report(self) -> None:
        """Report the plain steps in which the drafter was not called."""
        if self._plain_s:
            verify_s, overhead_s = zip(*self._plain_s, strict=True)
            n = len(self._plain_s)
            self._plain_s.clear()
            self.stats.count_plain(n, sum(verify_s), sum(overhead_s), NO_DRAFT.stopped)
            self.length.learn(RoundReport.plain(n, median(verify_s), median(overhead_s)))

    def close(self) -> None:
        """Report its last steps and free the draft state."""
        try:
            self.report()
        finally:  # also if the length fails, which may be a user's
            self.state.close()

    def request(self, limit: int) -> DraftRequest | None:
        """Return the request for a draft of at most ``limit`` tokens; None if this round has none."""
        pending = self.pending or self.begin()
        limit = min(limit, self.length.limit)
        if limit <= 0:
            return None
        self.report()
        n_tokens = self.branch.position + 1
        n_plain = self.length.plain_steps(n_tokens - self._n_seen)
        if n_plain:
            self._n_plain_left = n_plain - 1  # without this one
            return None
        self._n_seen = n_tokens
        tokens = self.branch.tokens
        tokens.append(pending.token)
        return DraftRequest(self.state, tokens, self.length, limit)

    def set_draft(self, draft: Draft) -> None:
        """Use as much of ``draft`` in this round as can be verified."""
        self._draft = draft
        if draft is not NO_DRAFT:
            n_steps = max(draft.n_decodes, len(draft.tokens))
            self.stats.record_steps(n_steps, draft.n_read, draft.seconds)
            draft.cut(self._fitting(draft))
            self._cut_refused(draft)
            self.stats.draft_forward_passes += draft.n_decodes

    def _cut_refused(self, draft: Draft) -> None:
        """Drop the tokens from the first one on that the branch's grammar refuses.

        Not those that were drawn at random for a rule that compares distributions: which of them are
        dropped would depend on what was drawn, and bias the text. The rule rejects them.
        """
        sampler = self.branch.sequence.sampler
        drawn = bool(draft.sources) and self.rule != "seeded"
        if sampler.grammar is not None and draft.parents is None and not drawn:
            draft.cut(max(0, sampler.count_allowed(self.plan) - 1))

    def _fitting(self, draft: Draft) -> int:
        """Return how many of the draft's tokens the target can verify in one decode."""
        ctx = self.branch.ctx
        draft.tokens = token_list(draft.tokens)
        ctx.model.check_tokens(draft.tokens)
        return ctx.fits(self.branch.seq_id, len(draft.tokens), draft.parents)

    @property
    def plan(self) -> list[int]:
        """The tokens to decode in this round: the pending one and the draft."""
        pending = self.pending or self.begin()
        return [pending.token, *self._draft.tokens]

    @property
    def has_tree(self) -> bool:
        """Whether the draft of this round is a tree."""
        return self._draft.parents is not None

    @property
    def n_drafted(self) -> int:
        """How many tokens the draft of this round has."""
        return len(self._draft.tokens)

    def drop_draft(self) -> None:
        """Go back to before the draft, which could not be decoded."""
        self.abandon()
        self._draft = NO_DRAFT
        self.state.observe(self.branch.position)

    def abandon(self) -> None:
        """Return the sequences that ``decode`` has leased; safe to call at any time."""
        verification, self._verification = self._verification, None
        if verification is not None:
            verification.abandon()

    def decode(self) -> Sequence[LogitsRow]:
        """Decode the plan by itself; return what ``accept`` needs.

        Trees, and memory that cannot drop a tail, need sequences of their own for it. Without a draft
        the compiled core draws the next token in the same call.
        """
        pending = self.pending or self.begin()
        if not self._draft.tokens:
            self.sequence.commit(pending.token, draws_next=True)
            return ()
        self._verification = self._verification_of(self.plan)
        return self._verification.decode()

    def _verification_of(self, plan: Sequence[int], rows: Sequence[LogitsRow] = ()) -> Verification:
        parents = None if self._draft.parents is None else self._plan_parents()
        return Verification(self.branch.sequence, plan, parents, rows)

    def _plan_parents(self) -> list[int]:
        return [-1, *(parent + 1 for parent in self._draft.parents or ())]

    def accept(self, rows: Sequence[LogitsRow], verify_s: float, n_rows: int = 0) -> list[Produced]:
        """Apply the rule to the plan whose logits are ``rows``; return the tokens that are emitted.

        These are the accepted tokens and the one that follows them. ``conclude`` must follow, once the
        target's lock is free.

        Args:
            rows: what ``decode`` returned, or those of the plan in a decode of several streams.
            verify_s: seconds of the decode, or this stream's share of them.
            n_rows: of the decode, where no other stream shared it; more than the plan's if it was filled.
        """
        start = perf_counter()
        branch, draft = self.branch, self._draft
        if self.pending is None:
            raise RuntimeError("call begin before accept")
        if not draft.tokens:
            if rows:
                branch.sequence.append(self.pending.token, -self.pending.logprob, rows[0])
            self.pending = self._plain()
            overhead_s = perf_counter() - start
            if draft is NO_DRAFT:
                self._plain_s.append((verify_s, overhead_s))
            else:
                self._unreported = _Unreported(0, 1, n_rows, verify_s, overhead_s)
            return [self.pending]
        plan = self.plan
        verification = self._verification or self._verification_of(plan, rows)
        path, following = self._choose(plan, verification.targets)
        n, chosen = len(path), [*path]
        is_eog = branch.ctx.model.is_eog
        is_dead_end = following is None
        if following is None:  # the last accepted token waits; the next round raises the error
            following = plan[path.pop()]
        ends = [at for at, i in enumerate(path) if is_eog(plan[i])]
        if self.on_round is not None:
            accepted = path[: ends[0] + 1] if ends else chosen
            self._trace = self._traced(plan, accepted, rows, is_end=bool(ends) or is_dead_end)
        if ends:  # the text ends at an accepted EOG token, whatever the draft proposed after it
            n, following = ends[0] + 1, plan[path[ends[0]]]
            del path[ends[0] :]
        kept = [0, *path]
        kept_rows = [rows[i] for i in kept]
        texts = verification.accept(kept, -self.pending.logprob)
        self._verification = None
        emitted = []
        for i, row, text in zip(path, kept_rows, texts[1:], strict=False):
            token, logprob, entropy = plan[i], math.nan, math.nan
            if branch.sequence.sampler.params.logprobs:
                logprob, entropy = row.logprob(token), row.entropy()
            is_forced = bool(draft.forced) and draft.forced[i - 1]
            self.stats.num_forced_tokens += is_forced
            source = "forced" if is_forced else "drafted"
            described = Produced(token, text, False, logprob, entropy, source)
            emitted.append(self._emitted(described, row, source))
        if draft.parents is None:
            is_complete = n == len(draft.tokens)
        else:
            is_complete = kept[-1] not in self._plan_parents()
        source = "drafted" if is_dead_end else "bonus" if is_complete else "corrected"
        last = kept_rows[-1]
        self.pending = self._emitted(branch.sequence.describe(following, last), last, source)
        emitted.append(self.pending)
        self._unreported = _Unreported(n, len(plan), n_rows, verify_s, perf_counter() - start)
        return emitted

    def _choose(
        self, plan: list[int], targets: TargetDistributions
    ) -> tuple[list[int], int | None]:
        """Return which entries of the plan are accepted after the pending one, and the next token.

        The next token is None where the target can draw none: for instance if the grammar is complete,
        but a logit bias forbids the EOG token.

        Raises:
            GrammarError, ConfigError: the target can draw none right after the pending token.
        """
        branch, draft = self.branch, self._draft
        is_eog = branch.ctx.model.is_eog

        def after(i: int, found: Callable[[int], T], nothing: Callable[[int], T]) -> T:
            if i and is_eog(plan[i]):  # nothing follows an EOG token: this draw is not emitted
                return nothing(plan[i])
            try:
                return found(i)
            except (ConfigError, GrammarError) as error:
                raise _DeadEnd(i) from error

        def target(i: int) -> Distribution:
            return after(i, targets.distribution, Distribution.point)

        def drawn(i: int) -> int:
            return after(i, targets.draw, int)

        seed, first = branch.seed, branch.position + 1
        if draft.parents is not None:
            tree = DraftTree(draft.tokens, draft.parents)
            try:
                found = tree_rule(tree, lambda node: target(node + 1), Noise(seed, first))
            except _DeadEnd as dead_end:
                if dead_end.at == 0:
                    raise dead_end.reason from None
                return [node + 1 for node in tree.path(dead_end.at - 1)], None
            return [node + 1 for node in found.path], found.token
        sources = draft.sources
        if not sources and self.rule != "seeded":
            sources = [Distribution.point(token) for token in draft.tokens]
        n = len(draft.tokens)
        # Nothing follows an EOG token, which the block rule would look beyond. The compiled core has the
        # rules that have names.
        looks_beyond = self.rule == "block" and any(map(is_eog, draft.tokens[:-1]))
        if isinstance(self.rule, str) and not looks_beyond:
            found_at_once = targets.accepted(self.rule, draft.sources)
            if found_at_once is not None:
                return list(range(1, found_at_once[0] + 1)), found_at_once[1]
        while True:
            try:
                if self.rule == "seeded":
                    acceptance = match_draws(draft.tokens[:n], drawn)
                else:
                    acceptance = apply_rule(
                        self.rule, draft.tokens[:n], sources[:n], target, seed=seed, position=first
                    )
                return list(range(1, acceptance.n_accepted + 1)), acceptance.token
            except _DeadEnd as dead_end:
                if dead_end.at == 0:
                    raise dead_end.reason from None
                if dead_end.at == n:  # all n tokens are accepted; the rule needs the next one
                    return list(range(1, n + 1)), None
                # The block rule looks ahead before it decides: apply it to the draft up to there.
                n = dead_end.at

    def _plain(self) -> Produced:
        """Draw the next token from the logits after the branch's last one."""
        sequence = self.branch.sequence
        with self.branch.ctx.lock:
            produced = sequence.produce()
            if not self._n_alternatives:
                return produced
            return self._emitted(produced, sequence.logits_row(), "plain")

    def _emitted(self, token: Produced, row: LogitsRow, source: str) -> Produced:
        if not self._n_alternatives:
            return Produced(*token[:5], source)
        alternatives = row.alternatives(self.branch.ctx.model, self._n_alternatives)
        return Produced(*token[:5], source, alternatives, row.rank(token.token))

    def _traced(
        self, plan: list[int], accepted: list[int], rows: Sequence[LogitsRow], *, is_end: bool
    ) -> RoundTrace:
        """Return what ``on_round`` is told, while the logits are there; times follow later.

        ``is_end``: nothing was judged after the last accepted token.
        """
        last, draft = (accepted or [0])[-1], self._draft
        parents = self._plan_parents() if draft.parents is not None else range(-1, len(plan) - 1)
        rejected = [] if is_end else [i for i, parent in enumerate(parents) if parent == last]
        pairs = [*zip([0, *accepted], accepted, strict=False), *((last, i) for i in rejected)]
        logprobs = tuple(rows[parent].logprob(plan[i]) for parent, i in pairs)
        return RoundTrace(
            self.branch.position + 1, tuple(draft.tokens), logprobs, len(accepted), len(rejected),
            drafter=draft.drafter, draft_s=draft.seconds,
        )  # fmt: skip

    def _count(self, outcome: _Unreported, overhead_s: float) -> None:
        n_accepted, n_verified, n_rows, verify_s, _ = outcome
        stats, draft = self.stats, self._draft
        trace, self._trace = self._trace, None
        if self.on_round is not None and trace is not None:
            self.on_round(replace(trace, following=self.pending, verify_s=verify_s))
        stats.count_decode(n_rows or n_verified, verify_s)
        n_steps = draft.n_steps
        if draft.tokens:
            stats.record_draft(len(draft.tokens), n_steps, n_accepted)
            stats.verify_time_s += verify_s
        else:
            stats.num_plain_steps += 1
            stats.plain_time_s += verify_s
        stats.count_stop(draft.stopped)
        self.length.learn(
            RoundReport(
                drafter=draft.drafter,
                drafter_called=draft.stopped != "off",
                entropies=draft.entropies,
                n_steps=n_steps,
                n_accepted=n_accepted,
                n_verified=n_verified,
                draft_s=draft.seconds,
                verify_s=verify_s,
                overhead_s=overhead_s,
                n_read=draft.n_read,
                n_rows=n_rows,
                followed=self._followed(n_accepted),
            )
        )

    def _followed(self, n_accepted: int) -> bool | None:
        following, pending = self._draft.following, self.pending
        if following is None or pending is None or n_accepted < len(self._draft.tokens):
            return None
        return pending.token == following


def finish_at(branch: Branch, position: int, pending: Produced | None) -> None:
    """Leave the branch with exactly its first ``position`` tokens, the pending one included.

    If no cell is free to decode that one, the branch holds it all the same, and decodes it when its
    logits are needed.
    """
    if branch.state == "pruned":
        return
    if branch.position > position:
        branch.rewind(position)
    elif pending is not None and branch.position == position - 1:
        try:
            branch.commit(pending.token)
        except (CapacityError, DecodeError, KeyboardInterrupt) as error:
            with branch.ctx.lock:
                if branch.position < position:
                    branch.sequence.append(pending.token, -pending.logprob, None)
            if not isinstance(error, CapacityError):
                raise
