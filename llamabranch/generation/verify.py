"""Which drafted tokens a text accepts, and the token that follows them, from the logits of one decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from ..context.logits import LogitsRow
from ..errors import ConfigError, ConstraintError, GrammarError
from ..sampling import Distribution, Sampler
from .drafter import Draft
from .output import Produced
from .rules import Rule, apply_rule, seeded_rule
from .text import Text

__all__ = ["RoundTrace", "Verdict", "trace", "verify"]

T = TypeVar("T")


class Verdict(NamedTuple):
    """What becomes of a draft.

    Attributes:
        n_accepted: how many of the drafted tokens are accepted.
        n_kept: how many the text takes: without the last one where that ends the text, or nothing can be
            drawn after it.
        token: what follows them.
        source: whose that token is: "bonus", "corrected", or "drafted" where it is of the draft itself.
        sampler: one that has accepted those that the text takes.
    """

    n_accepted: int
    n_kept: int
    token: int
    source: str
    sampler: Sampler


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """What a round with a draft has done; for ``Request.on_round``.

    Attributes:
        position: that of the first drafted token in the text, prompt included.
        draft: the drafted ids.
        logprobs: the target's log-probabilities, nats, of the tokens that were accepted, in their order,
            and then of the one that was rejected after them, if any.
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
    """The target has no distribution after the first ``n`` drafted tokens; the cause says why."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.n = n

    @property
    def reason(self) -> BaseException:
        return self.__cause__ or self


def verify(text: Text, draft: Draft, rule: Rule, rows: Sequence[LogitsRow]) -> Verdict:
    """Apply ``rule`` to a draft of at least one token.

    Args:
        text: what the draft follows.
        draft: the tokens.
        rule: how drafted tokens are accepted.
        rows: the logits after the text, and after each drafted token.

    Raises:
        GrammarError, ConstraintError, ConfigError: the target can draw nothing right after the text.
    """
    targets, tokens, is_eog = _Targets(text, draft, rows), draft.tokens, text.ctx.model.is_eog
    n, following = _judge(targets, rule)
    is_dead_end = following is None
    # The text ends at an accepted EOG token, whatever the draft proposed after it.
    end = next((i for i, token in enumerate(tokens[:n], 1) if is_eog(token)), None)
    n_kept = n = end or n
    if end or following is None:
        # After a dead end the last token waits; the next round raises the error.
        n_kept, following = n - 1, tokens[n - 1]
    source = "drafted" if is_dead_end else "bonus" if n == len(tokens) else "corrected"
    return Verdict(n, n_kept, following, source, targets.sampler(n_kept))


def trace(draft: Draft, verdict: Verdict, rows: Sequence[LogitsRow], position: int) -> RoundTrace:
    """Return what ``on_round`` gets, while the logits are there; times follow later."""
    tokens, n = tuple(draft.tokens), verdict.n_accepted
    # After a token that ends the text nothing was judged.
    n_judged = n if verdict.n_kept < n else min(n + 1, len(tokens))
    logprobs = tuple(rows[i].logprob(tokens[i]) for i in range(n_judged))
    return RoundTrace(
        position, tokens, logprobs, n, n_judged - n, drafter=draft.drafter, draft_s=draft.seconds
    )


class _Targets:
    """The distributions that the text draws from along a draft, computed on request.

    That after n drafted tokens assumes that these are accepted: a copy of a sampler with state accepts
    them.
    """

    def __init__(self, text: Text, draft: Draft, rows: Sequence[LogitsRow]) -> None:
        self.draft = draft
        self.seed = text.seed
        self.position = len(text.tokens)  # of the first drafted token
        self._rows = rows
        self._is_eog = text.ctx.model.is_eog
        self._samplers = [text.sampler]

    def sampler(self, n: int) -> Sampler:
        """Return the sampler that has accepted the first ``n`` tokens."""
        samplers = self._samplers
        while len(samplers) <= n:
            last = samplers[-1]
            if not last.is_stateless:
                last = last.clone()
                last.accept(self.draft.tokens[len(samplers) - 1])
            samplers.append(last)
        return samplers[n]

    def distribution(self, n: int) -> Distribution:
        """Return the distribution of the token after ``n`` tokens."""
        return self._after(n, self._distribution, Distribution.point)

    def draw(self, n: int) -> int:
        """Return the token that plain decoding draws after ``n`` tokens."""
        return self._after(n, self._draw, int)

    def _after(self, n: int, found: Callable[[int], T], nothing: Callable[[int], T]) -> T:
        if n and self._is_eog(self.draft.tokens[n - 1]):  # nothing follows it: this is not emitted
            return nothing(self.draft.tokens[n - 1])
        try:
            return found(n)
        except (ConfigError, ConstraintError, GrammarError) as error:
            raise _DeadEnd(n) from error

    def _distribution(self, n: int) -> Distribution:
        return self.sampler(n).distribution(self._rows[n].array, self.position + n, self.seed)

    def _draw(self, n: int) -> int:
        sampler = self.sampler(n)
        wanted = sampler.params.logprobs
        return self._rows[n].draw(sampler, self.seed, self.position + n, measured=wanted)


def _judge(targets: _Targets, rule: Rule) -> tuple[int, int | None]:
    """Return how many tokens are accepted, and what follows them.

    None where the target can draw nothing there, for instance if the grammar is complete, but a logit
    bias forbids the EOG token.
    """
    drafted, sources = targets.draft.tokens, targets.draft.sources
    n = len(drafted)
    if not sources and rule != "seeded":
        sources = [Distribution.point(token) for token in drafted]
    seed, position = targets.seed, targets.position
    while True:
        try:
            if rule == "seeded":
                return seeded_rule(drafted[:n], targets.draw)
            target = targets.distribution
            return apply_rule(rule, drafted[:n], sources[:n], target, seed=seed, position=position)
        except _DeadEnd as dead_end:
            if not dead_end.n:
                raise dead_end.reason from None
            if dead_end.n == n:  # all n tokens are accepted; the rule needs the next one
                return n, None
            # The block rule looks ahead before it decides: apply it to the draft up to there.
            n = dead_end.n
