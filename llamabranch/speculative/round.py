"""One speculative round, for any branch: plan, verify in one decode, accept.

A stream always holds one token that is emitted but not yet decoded: the *pending* one. It goes into the
target together with the draft that follows it, so a round costs one target decode, however much of the
draft is accepted. Planning and accepting are apart so that many streams can share that decode.

A drafter may work on a context that another thread's text is decoded on, while this text's context
drafts for that one. So what needs the target's lock (decode, ``accept``) and what may need the
drafter's (``plan``, ``conclude``) never overlap: no thread waits for one while it holds the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import NamedTuple

from ..branch import Branch, Produced
from ..branch.verification import TargetDistributions, Verification
from ..context.logits import LogitsRow
from ..errors import CapacityError, ConfigError, DecodeError, GrammarError
from ..model import token_list
from ..sampling import Distribution
from .drafters.base import NO_DRAFT, Draft, DraftState, propose
from .length.base import DraftLength, RoundReport
from .rules import DraftTree, verify, verify_tree
from .stats import SpeculativeStats

__all__ = ["Stream", "finish_at"]

_MOST_RESTED = 64  # plain steps that are counted together


class _DeadEnd(Exception):
    """The target has no distribution after entry ``at`` of a plan; the cause says why."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at

    @property
    def reason(self) -> BaseException:
        return self.__cause__ or self


class _Outcome(NamedTuple):
    """A round that has ended and is not yet counted; times in seconds."""

    n_accepted: int
    n_verified: int
    verify_s: float
    overhead_s: float


class Stream:
    """A branch being continued, the state that drafts for it, and its pending token."""

    def __init__(
        self,
        branch: Branch,
        state: DraftState,
        length: DraftLength,
        rule: str,
        stats: SpeculativeStats,
        n_alternatives: int = 0,
    ) -> None:
        self.branch = branch
        self.state = state
        self.length = length
        self.stats = stats
        self.pending: Produced | None = None
        self.rule = rule
        self._n_alternatives = n_alternatives
        self._draft = Draft()
        self._n_told = 0  # what the state has read; it catches up when it is asked next
        self._n_resting = 0  # plain steps to come before it is asked
        self._rested: list[tuple[float, float]] = []  # seconds of those that came: decode, the rest
        self._outcome: _Outcome | None = None  # what the state and the length are still to be told
        self._verification: Verification | None = None  # decoded, nothing of it accepted yet

    def begin(self) -> Produced:
        """Emit the first token: it needs no decode, the branch's logits are there."""
        branch = self.branch
        with branch.ctx.lock:
            self.pending = self._plain()
        return self.pending

    def round(self, limit: int) -> list[Produced]:
        """Run one round alone; return what it emits, at most ``limit`` + 1 tokens."""
        if self._n_resting:
            self._n_resting -= 1
            emitted = self._step()
        else:
            planned = self.plan(limit)
            accepted = self._verify(planned) if len(planned) > 1 else None
            emitted = self._step() if accepted is None else accepted
        self.conclude()
        return emitted

    def _verify(self, planned: Sequence[int]) -> list[Produced] | None:
        """Decode a plan with a draft and accept what fits; None if there is no room for it."""
        try:
            with self.branch.ctx.lock:  # its rows are valid until anybody else decodes
                start = perf_counter()
                self._verification = self._proposal(planned)
                rows = self._verification.decode()
                return self.accept(rows, perf_counter() - start)
        except CapacityError:
            self.stats.count_stop("no room to verify")
            self._draft, self._verification = NO_DRAFT, None
            self.state.observe(self.branch.position + 1)
            return None
        except BaseException:
            if self._verification is not None:
                self._verification.abandon()
                self._verification = None
            raise

    def _step(self) -> list[Produced]:
        """Run a round without a draft: the same as accepting an empty draft, and quicker."""
        branch = self.branch
        with branch.ctx.lock:
            pending = self.pending or self.begin()
            start = perf_counter()
            branch.commit(pending.token)
            verified = perf_counter()
            return self._end_plain(verified - start, verified)

    def _end_plain(self, verify_s: float, since: float) -> list[Produced]:
        """End a round without a draft that took ``verify_s`` for its decode, and was at it ``since``."""
        self.pending = emitted = self._plain()
        overhead_s = perf_counter() - since
        if self._draft is NO_DRAFT:
            self._rested.append((verify_s, overhead_s))
        else:
            self._outcome = _Outcome(0, 1, verify_s, overhead_s)
        return [emitted]

    def conclude(self) -> None:
        """Tell the state and the length what became of the round; the target's lock is not held."""
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            if len(self._rested) >= _MOST_RESTED:
                self.report()
            return
        start = perf_counter()
        self.state.observe(self.branch.position)
        rollback_s = perf_counter() - start
        self.stats.sample_time_s += outcome.overhead_s
        self.stats.rollback_time_s += rollback_s
        self._count(outcome, outcome.overhead_s + rollback_s)

    def report(self) -> None:
        """Count the plain steps in which the drafter was not asked."""
        if self._rested:
            verify_s, overhead_s = zip(*self._rested, strict=True)
            n = len(self._rested)
            self._rested.clear()
            self.stats.count_plain(n, sum(verify_s), sum(overhead_s), NO_DRAFT.stopped)
            self.length.learn(RoundReport.plain(n, median(verify_s), median(overhead_s)))

    def plan(self, limit: int) -> list[int]:
        """Return what to decode: the pending token and a draft of at most ``limit`` tokens."""
        asked = self.ask(limit)
        if asked is None:
            return self.take(NO_DRAFT)
        limit = min(limit, self.length.limit)
        return self.take(propose(self.state, asked, self.length, limit))

    def ask(self, limit: int) -> list[int] | None:
        """Return the tokens the state should continue, None if there is to be no draft."""
        pending = self.pending or self.begin()
        if min(limit, self.length.limit) <= 0:
            return None
        self.report()
        n_tokens = self.branch.position + 1
        n_plain = self.length.plain_steps(n_tokens - self._n_told)
        if n_plain:
            self._n_resting = n_plain - 1  # without this one
            return None
        self._n_told = n_tokens
        tokens = self.branch.tokens
        tokens.append(pending.token)
        return tokens

    def take(self, draft: Draft) -> list[int]:
        """Use ``draft``, as far as it fits; return what to decode."""
        pending = self.pending or self.begin()
        self._draft = draft
        if draft is NO_DRAFT:
            return [pending.token]
        draft.cut(self._fitting(draft))
        self.stats.draft_time_s += draft.seconds
        self.stats.draft_forward_passes += draft.n_decodes
        return [pending.token, *draft.tokens]

    def _fitting(self, draft: Draft) -> int:
        """Return how many of the draft's tokens the target can verify."""
        ctx = self.branch.ctx
        draft.tokens = token_list(draft.tokens)
        ctx.model.check_tokens(draft.tokens)
        fits = ctx.n_outputs_max - 1
        if draft.parents is None:
            return min(fits, len(draft.tokens))
        # A chain, the tree with one leaf, takes no sequences, and any memory can verify it.
        room = max(1, ctx.n_seq_free) if ctx.capabilities.can_truncate else 1
        parents = draft.parents[:fits]
        while parents and len(set(range(len(parents))) - set(parents)) > room:
            parents = parents[:-1]
        return len(parents)

    def _proposal(self, plan: Sequence[int], rows: Sequence[LogitsRow] = ()) -> Verification:
        parents = None if self._draft.parents is None else self._plan_parents()
        return Verification(self.branch.sequence, plan, parents, rows)

    def _plan_parents(self) -> list[int]:
        return [-1, *(parent + 1 for parent in self._draft.parents or ())]

    def accept(self, rows: Sequence[LogitsRow], verify_s: float) -> list[Produced]:
        """Keep what is accepted of the plan whose logits are ``rows``; return what is emitted now.

        ``conclude`` must follow, once the target's lock is free.
        """
        start = perf_counter()
        branch, draft = self.branch, self._draft
        if self.pending is None:
            raise RuntimeError("accept comes after plan")
        if not draft.tokens:
            branch.sequence.append(self.pending.token, -self.pending.logprob, rows[0])
            return self._end_plain(verify_s, start)
        plan = [self.pending.token, *draft.tokens]
        verification = self._verification or self._proposal(plan, rows)
        path, following = self._verdict(plan, verification.targets)
        n = len(path)
        is_eog = branch.ctx.model.is_eog
        is_dead_end = following is None
        if following is None:  # the last token of the draft waits; the next round raises the reason
            following = plan[path.pop()]
        ends = [at for at, i in enumerate(path) if is_eog(plan[i])]
        if ends:  # the draft was right that it ends here, whatever it proposed to follow
            n, following = ends[0] + 1, plan[path[ends[0]]]
            del path[ends[0] :]
        kept = [0, *path]
        kept_rows = [rows[i] for i in kept]
        texts = verification.accept(kept)
        self._verification = None
        emitted = [
            self._emitted(
                Produced(plan[i], text, False, row.logprob(plan[i]), row.entropy()), row, "drafted"
            )
            for i, row, text in zip(path, kept_rows, texts[1:], strict=False)
        ]
        if draft.parents is None:
            whole = n == len(draft.tokens)
        else:
            whole = kept[-1] not in self._plan_parents()
        source = "drafted" if is_dead_end else "bonus" if whole else "corrected"
        last = kept_rows[-1]
        self.pending = self._emitted(branch.sequence.describe(following, last), last, source)
        emitted.append(self.pending)
        self._outcome = _Outcome(n, len(plan), verify_s, perf_counter() - start)
        return emitted

    def _verdict(
        self, plan: list[int], targets: TargetDistributions
    ) -> tuple[list[int], int | None]:
        """Return which entries of the plan are accepted after the pending one, and what follows them.

        None follows where the target has nothing to go on with: a grammar that is complete, say, with
        the end token biased away.

        Raises:
            GrammarError, ConfigError: that is so right after the pending token.
        """
        branch, draft = self.branch, self._draft
        is_eog = branch.ctx.model.is_eog

        def target(i: int) -> Distribution:
            if i and is_eog(plan[i]):  # nothing follows an end: what is drawn here is not emitted
                return Distribution.point(plan[i])
            try:
                return targets.distribution(i)
            except (ConfigError, GrammarError) as error:
                raise _DeadEnd(i) from error

        seed, first = branch.seed, branch.position + 1
        if draft.parents is not None:
            tree = DraftTree(draft.tokens, draft.parents)
            try:
                found = verify_tree(tree, lambda node: target(node + 1), seed=seed, position=first)
            except _DeadEnd as dead:
                if dead.at == 0:
                    raise dead.reason from None
                return [node + 1 for node in tree.path(dead.at - 1)], None
            return [node + 1 for node in found.path], found.token
        sources = draft.sources
        if not sources and self.rule != "seeded":
            sources = [Distribution.point(token) for token in draft.tokens]
        n = len(draft.tokens)
        while True:
            try:
                verdict = verify(
                    self.rule, draft.tokens[:n], sources[:n], target, seed=seed, position=first
                )
                return list(range(1, verdict.n_accepted + 1)), verdict.token
            except _DeadEnd as dead:
                if dead.at == 0:
                    raise dead.reason from None
                if dead.at == n:  # all before it are accepted, and the rule asked what follows
                    return list(range(1, n + 1)), None
                # The block rule looks before it decides: a draft that ends there is judged as a whole.
                n = dead.at

    def _plain(self) -> Produced:
        """Return what comes next on the branch, from the logits after its last token."""
        sequence = self.branch.sequence
        with self.branch.ctx.lock:
            produced = sequence.produce()
            if not self._n_alternatives:
                return produced
            return self._emitted(produced, sequence.logits_row(), "plain")

    def _emitted(self, token: Produced, row: LogitsRow, source: str) -> Produced:
        top = tuple(row.top(self._n_alternatives)) if self._n_alternatives else ()
        return token._replace(source=source, alternatives=top)

    def _count(self, outcome: _Outcome, overhead_s: float) -> None:
        n_accepted, n_verified, verify_s, _ = outcome
        stats, draft = self.stats, self._draft
        stats.count_decode(n_verified, verify_s)
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
                asked=draft.stopped != "off",
                entropies=draft.entropies,
                n_steps=n_steps,
                n_accepted=n_accepted,
                n_verified=n_verified,
                draft_s=draft.seconds,
                verify_s=verify_s,
                overhead_s=overhead_s,
                n_read=draft.n_read,
            )
        )


def finish_at(branch: Branch, position: int, pending: Produced | None) -> None:
    """Leave the branch with exactly its first ``position`` tokens, the pending one among them.

    Where that one cannot be decoded (no cell is free), the branch holds it all the same, and decodes
    it when its logits are asked for.
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
