"""A running text: its draft, its draws, and its report of each round."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter

from ..context.logits import LogitsRow
from ..errors import LlamaBranchError
from ..generation.drafter import (
    NO_DRAFT,
    NO_STATE,
    Draft,
    DraftLength,
    DraftRequest,
    DraftState,
    Round,
    SpeculativeStats,
)
from ..generation.output import Produced
from ..generation.text import Text
from ..generation.verify import Plan, RoundTrace, Rule
from ..model import token_list
from ..sampling import Sampler
from .drafting import Drafting

PLAIN = Round(NO_DRAFT)  # the outcome of a step without a draft
_MOST_PLAIN = 64  # plain steps that are reported together


class RunningText:
    """A text and the draft state that drafts for it.

    Args:
        drafting: how it is drafted.
        text: the text; its prompt has been read.
        state: drafts for it.
        rule: how drafted tokens are accepted.
        stats: counts its rounds.
        n_alternatives: how many of the most probable tokens are reported with each token.
        alone: whether no other text shares its decodes. Then this object reports each round to
            the draft length; otherwise `Step.run` reports the rounds of all texts together.

    Attributes:
        emitted: the tokens of the last step.
        error: why it cannot continue; also set if its part of a non-unified KV cache is full.
        draft: the draft of this round.
        draft_limit: the maximum number of tokens to draft in the next step.
        state_tokens: the tokens that the draft state got with its last request.
        on_round: a function that is called after each round with a draft, or None.
        outcome: the outcome of the last step, from which the draft length learns.
    """

    def __init__(
        self,
        drafting: Drafting,
        text: Text,
        state: DraftState,
        rule: Rule,
        stats: SpeculativeStats,
        n_alternatives: int = 0,
        *,
        alone: bool = False,
    ) -> None:
        self.drafting = drafting
        self.text = text
        self.state = state
        self.length: DraftLength = drafting.length.stream()
        self.rule = rule
        self.stats = stats
        self.emitted: list[Produced] = []
        self.error: LlamaBranchError | None = None
        self.draft_limit = 0
        self.outcome = PLAIN
        self._alone = alone
        self._n_alternatives = n_alternatives
        self.state_tokens: list[int] = []
        self.draft = NO_DRAFT
        self.on_round: Callable[[RoundTrace], None] | None = None
        self._trace: RoundTrace | None = None
        self._plan: Plan | None = None
        self._n_plain_left = 0  # plain steps to take before the drafter is called again
        self._plain_s: list[tuple[float, float]] = []  # seconds of each: decode, everything else
        self._verify_s: float | None = None  # seconds of a decode that ``conclude`` must report

    @classmethod
    def alone(
        cls, drafting: Drafting, text: Text, stats: SpeculativeStats, n_alternatives: int = 0
    ) -> RunningText:
        """Return a running text for ``text`` that shares no decode. Call ``give_back`` at the end."""
        rule = drafting.config.rule if text.sampler.constraint is None else "seeded"
        state = drafting.states.take(text, rule) if drafting.drafts else NO_STATE
        return cls(drafting, text, state, rule, stats, n_alternatives, alone=True)

    def give_back(self, *, keep: bool, is_changed: bool) -> None:
        """Report the last steps. With ``keep`` the draft state is kept for the text, else freed.

        ``is_changed``: whether other code has changed the text since its last round.
        """
        self.report()
        tokens = self.state_tokens if is_changed else list(self.text.shown)
        self.drafting.states.give_back(self.text, self.state, tokens if keep else None)

    # -- plain steps -------------------------------------------------------------------------------

    def draw(self) -> Produced:
        """Draw the next token and append it, but do not decode it. An EOG token is not appended."""
        with self.text.lock:
            self.emitted = [self._draw_from(self.text.logits_row())]
        return self.emitted[0]

    def _draw_from(self, row: LogitsRow) -> Produced:
        """Draw the next token from ``row`` and append it."""
        text = self.text
        produced = self._with_alternatives(text.produce_from(row), row, text.sampler)
        if not produced.is_stop:
            text.append(produced.token, -produced.logprob, None)
        return produced

    def advance(self) -> None:
        """Decode the last token and draw the next one. The compiled core does both in one call."""
        start = perf_counter()
        row = self.text.decode_last(draws_next=True)
        decoded = perf_counter()
        self.emitted = [self._draw_from(row)]
        self._plain_s.append((decoded - start, perf_counter() - decoded))

    def skips_draft(self) -> bool:
        """Return whether the draft length has asked for a plain step now; count that step."""
        self._n_plain_left -= 1
        return self._n_plain_left >= 0

    # -- drafts ------------------------------------------------------------------------------------

    def request(self, limit: int) -> DraftRequest | None:
        """Return the request for a draft of at most ``limit`` tokens; None for a round without one."""
        limit = min(limit, self.length.limit)
        if limit <= 0:
            return None
        self.report()
        tokens = self.text.tokens
        n_plain = self.length.plain_steps(len(tokens) - len(self.state_tokens))
        if n_plain:
            self._n_plain_left = n_plain - 1  # this step is the first of them
            return None
        self.state_tokens = tokens.copy()
        return DraftRequest(self.state, self.state_tokens, self.length, limit)

    def set_draft(self, draft: Draft) -> None:
        """Use ``draft`` in this round, as far as it can be verified."""
        self.draft = draft
        if draft is not NO_DRAFT:
            n_steps = max(draft.n_decodes, len(draft.tokens))
            self.stats.record_steps(n_steps, draft.n_read, draft.seconds)
            draft.tokens = token_list(draft.tokens)
            ctx = self.text.ctx
            ctx.model.check_tokens(draft.tokens)
            draft.cut(ctx.kv_cache.fits(len(draft.tokens), ctx.sequences.count_free))
            self._cut_refused(draft)
            self.stats.draft_forward_passes += draft.n_decodes

    def _cut_refused(self, draft: Draft) -> None:
        """Drop the first token that the text's grammar rejects, and all tokens after it.

        Tokens that were drawn at random for a rule that compares distributions are kept, and the
        rule rejects them. Dropping them would depend on the drawn tokens and so bias the text.
        """
        sampler = self.text.sampler
        drawn = bool(draft.sources) and self.rule != "seeded"
        if sampler.grammar is not None and not drawn:
            draft.cut(sampler.count_allowed(draft.tokens))

    def drop_draft(self) -> None:
        """Go back to the state before the draft, which could not be decoded."""
        self.abandon()
        self.draft = NO_DRAFT
        self.state.observe(self.text.n_decoded)

    # -- rounds ------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Return the tokens to decode in this round. The context's lock is held until ``take``."""
        self._plan = Plan(self.text, self.draft)
        return self._plan

    def abandon(self) -> None:
        """Free the sequences that the plan holds. Safe to call at any time."""
        plan, self._plan = self._plan, None
        if plan is not None:
            with self.text.lock:
                plan.end()

    def take(self, rows: Sequence[LogitsRow], verify_s: float) -> None:
        """Apply the rule to the draft; append the accepted tokens and the one after them.

        Without a draft, draw and append the next token. Call ``conclude`` next, once the context's
        lock is free.

        Args:
            rows: the logits after each decoded token.
            verify_s: seconds of the decode, or this text's share of them.
        """
        start = perf_counter()
        draft, plan, n_accepted = self.draft, self._plan, 0
        if plan is not None:
            plan.rows = rows
            self.emitted, n_accepted = self._accept(draft, plan)
        else:
            self.text.set_row(rows[-1])
            self.emitted = [self._draw_from(rows[-1])]
        self._plan = None
        overhead_s = perf_counter() - start
        if draft is NO_DRAFT:
            self._plain_s.append((verify_s, overhead_s))
        else:
            self.outcome = Round(draft, n_accepted, overhead_s)
            self._verify_s = verify_s

    def _accept(self, draft: Draft, plan: Plan) -> tuple[list[Produced], int]:
        """Append the accepted tokens and the one after them; return them, and the first number."""
        text, rows = self.text, plan.rows
        verdict = plan.verify(self.rule)
        if self.on_round is not None:
            self._trace = plan.trace(verdict)
        emitted, row = [], rows[0]
        for i, piece in enumerate(plan.keep(verdict.n_kept)):
            token, logprob, entropy = draft.tokens[i], math.nan, math.nan
            if text.sampler.params.logprobs:
                logprob, entropy = row.logprob(token), row.entropy()
            is_forced = bool(draft.forced) and draft.forced[i]
            self.stats.num_forced_tokens += is_forced
            source = "forced" if is_forced else "drafted"
            produced = Produced(token, piece, False, logprob, entropy, source)
            emitted.append(self._with_alternatives(produced, row, plan.sampler(i)))
            row = rows[i + 1]
        last = text.describe(verdict.token, row)[0]._replace(source=verdict.source)
        emitted.append(self._with_alternatives(last, row, text.sampler))
        if not last.is_stop:
            text.append(last.token, -last.logprob, None)
        return emitted, verdict.n_accepted

    def _with_alternatives(self, produced: Produced, row: LogitsRow, sampler: Sampler) -> Produced:
        """Return ``produced``, with its alternatives and other numbers if they were requested."""
        if not self._n_alternatives:
            return produced
        alternatives, rank = row.alternatives(self.text.ctx.model, self._n_alternatives), row.rank
        return produced._replace(
            alternatives=alternatives, rank=rank(produced.token), n_allowed=sampler.n_allowed
        )

    def conclude(self) -> None:
        """Report the round to the draft state, length and statistics, without the context's lock."""
        verify_s, self._verify_s = self._verify_s, None
        if verify_s is None:
            if len(self._plain_s) >= _MOST_PLAIN:
                self.report()
            return
        start = perf_counter()
        self.state.observe(self.text.n_decoded)
        stats, draft, n_accepted, overhead_s = self.stats, *self.outcome
        overhead_s += perf_counter() - start
        self.outcome = self.outcome._replace(overhead_s=overhead_s)
        trace, self._trace = self._trace, None
        if self.on_round is not None and trace is not None:
            self.on_round(replace(trace, following=self.emitted[-1], verify_s=verify_s))
        stats.count_decode(1 + len(draft.tokens), verify_s)
        if draft.tokens:
            stats.record_draft(len(draft.tokens), n_accepted)
            stats.verify_time_s += verify_s
        else:
            stats.num_plain_steps += 1
            stats.plain_time_s += verify_s
        stats.count_stop(draft.stopped)
        if self._alone:
            self.length.learn([self.outcome], 1 + len(draft.tokens), verify_s)

    def report(self) -> None:
        """Report the plain steps since the last report to the statistics and the length."""
        if self._plain_s:
            verify_s, overhead_s = zip(*self._plain_s, strict=True)
            n = len(self._plain_s)
            self._plain_s.clear()
            self.stats.count_plain(n, sum(verify_s), NO_DRAFT.stopped)
            if self._alone:
                plain = PLAIN._replace(overhead_s=median(overhead_s))
                self.length.learn([plain], 1, median(verify_s), n)

    def close(self) -> None:
        """Report its last steps and free the draft state."""
        try:
            self.report()
        finally:  # also if the draft length, which may be the user's code, raises an error
            self.state.close()
