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
from .rules import DraftTree, Noise, Rule, apply_rule, seeded_rule, tree_rule
from .text import Text

__all__ = ["RoundTrace", "Verdict", "trace", "verify"]

T = TypeVar("T")


class Verdict(NamedTuple):
    """What becomes of a draft.

    Attributes:
        accepted: the numbers of the drafted tokens that are accepted, in order.
        path: those that the text takes: without the last one where that ends the text, or nothing can be
            drawn after it.
        token: what follows them.
        source: whose that token is: "bonus", "corrected", or "drafted" where it is of the draft itself.
        sampler: one that has accepted those of ``path``.
    """

    accepted: list[int]
    path: list[int]
    token: int
    source: str
    sampler: Sampler


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
    """The target has no distribution after drafted token ``at``, -1 = the text; the cause says why."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at

    @property
    def reason(self) -> BaseException:
        return self.__cause__ or self


def verify(text: Text, draft: Draft, rule: Rule, rows: Sequence[LogitsRow]) -> Verdict:
    """Apply ``rule`` to a draft of at least one token.

    Args:
        text: what the draft follows.
        draft: a chain, or a tree: then the rule is that of trees.
        rule: how drafted tokens are accepted.
        rows: the logits after the text, and after each drafted token.

    Raises:
        GrammarError, ConstraintError, ConfigError: the target can draw nothing right after the text.
    """
    targets = _Targets(text, draft, rows)
    is_eog = text.ctx.model.is_eog
    accepted, following = (_chain if draft.parents is None else _tree)(targets, rule)
    is_dead_end = following is None
    # The text ends at an accepted EOG token, whatever the draft proposed after it.
    end = next((n for n, i in enumerate(accepted, 1) if is_eog(draft.tokens[i])), None)
    path = accepted = accepted[:end]
    if end or following is None:
        # After a dead end the last token waits; the next round raises the error.
        path, following = accepted[:-1], draft.tokens[accepted[-1]]
    last = path[-1] if path else -1
    if draft.parents is None:
        is_complete = len(accepted) == len(draft.tokens)
    else:
        is_complete = last not in draft.parents
    source = "drafted" if is_dead_end else "bonus" if is_complete else "corrected"
    return Verdict(accepted, path, following, source, targets.sampler(last))


def trace(draft: Draft, verdict: Verdict, rows: Sequence[LogitsRow], position: int) -> RoundTrace:
    """Return what ``on_round`` is told, while the logits are there; times follow later."""
    accepted, parents = verdict.accepted, draft.parents or range(-1, len(draft.tokens) - 1)
    last = accepted[-1] if accepted else -1
    is_end = len(verdict.path) < len(accepted)  # nothing was judged after the last one
    rejected = [] if is_end else [i for i, parent in enumerate(parents) if parent == last]
    pairs = [*zip([-1, *accepted], accepted, strict=False), *((last, i) for i in rejected)]
    logprobs = tuple(rows[parent + 1].logprob(draft.tokens[i]) for parent, i in pairs)
    return RoundTrace(
        position, tuple(draft.tokens), logprobs, len(accepted), len(rejected),
        drafter=draft.drafter, draft_s=draft.seconds,
    )  # fmt: skip


class _Targets:
    """The distributions that the text draws from along a draft, computed on request.

    That after token i, -1 = the text, assumes that token i and all before it are accepted: a copy of a
    sampler with state accepts them.
    """

    def __init__(self, text: Text, draft: Draft, rows: Sequence[LogitsRow]) -> None:
        self.draft = draft
        self.seed = text.seed
        self.position = len(text.tokens)  # of the first drafted token
        self._tokens = tokens = draft.tokens
        self._parents = range(-1, len(tokens) - 1) if draft.parents is None else draft.parents
        self._rows = rows
        self.is_eog = text.ctx.model.is_eog
        self._samplers = {-1: text.sampler}
        self._positions = {-1: self.position}

    def sampler(self, i: int) -> Sampler:
        """Return the sampler that has accepted token i and all before it."""
        found = self._samplers.get(i)
        if found is None:
            found = self.sampler(self._parents[i])
            if not found.is_stateless:
                found = found.clone()
                found.accept(self._tokens[i])
            self._samplers[i] = found
        return found

    def distribution(self, i: int) -> Distribution:
        """Return the distribution of the token after token i."""
        return self._after(i, self._distribution, Distribution.point)

    def draw(self, i: int) -> int:
        """Return the token that plain decoding draws after token i."""
        return self._after(i, self._draw, int)

    def _after(self, i: int, found: Callable[[int], T], nothing: Callable[[int], T]) -> T:
        if i >= 0 and self.is_eog(self._tokens[i]):  # nothing follows it: this is not emitted
            return nothing(self._tokens[i])
        try:
            return found(i)
        except (ConfigError, ConstraintError, GrammarError) as error:
            raise _DeadEnd(i) from error

    def _distribution(self, i: int) -> Distribution:
        row = self._rows[i + 1]
        return self.sampler(i).distribution(row.array, self._position(i), self.seed)

    def _draw(self, i: int) -> int:
        sampler = self.sampler(i)
        wanted = sampler.params.logprobs
        return self._rows[i + 1].draw(sampler, self.seed, self._position(i), measured=wanted)

    def _position(self, i: int) -> int:
        """Return the position of the token after token i."""
        found = self._positions.get(i)
        if found is None:
            found = self._positions[i] = self._position(self._parents[i]) + 1
        return found


# The next two return which tokens are accepted, and what follows them: None where the target can draw
# nothing there, for instance if the grammar is complete, but a logit bias forbids the EOG token.


def _tree(targets: _Targets, _: Rule) -> tuple[list[int], int | None]:
    draft = targets.draft
    tree = DraftTree(draft.tokens, draft.parents or ())
    try:
        found = tree_rule(tree, targets.distribution, Noise(targets.seed, targets.position))
    except _DeadEnd as dead_end:
        if dead_end.at < 0:
            raise dead_end.reason from None
        return tree.path(dead_end.at), None
    return found.path, found.token


def _chain(targets: _Targets, rule: Rule) -> tuple[list[int], int | None]:
    drafted, sources = targets.draft.tokens, targets.draft.sources
    n = len(drafted)
    if not sources and rule != "seeded":
        sources = [Distribution.point(token) for token in drafted]
    seed, position = targets.seed, targets.position
    while True:
        try:
            if rule == "seeded":
                accepted = seeded_rule(drafted[:n], lambda i: targets.draw(i - 1))
            else:
                accepted = apply_rule(
                    rule,
                    drafted[:n],
                    sources[:n],
                    lambda i: targets.distribution(i - 1),
                    seed=seed,
                    position=position,
                )
            return list(range(accepted.n_accepted)), accepted.token
        except _DeadEnd as dead_end:
            n_before = dead_end.at + 1
            if not n_before:
                raise dead_end.reason from None
            if n_before == n:  # all n tokens are accepted; the rule needs the next one
                return list(range(n)), None
            # The block rule looks ahead before it decides: apply it to the draft up to there.
            n = n_before
