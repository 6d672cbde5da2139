"""Drafted tokens after a text: decode them, apply a rule, keep the accepted ones.

Every rule here is lossless: the tokens it emits have exactly the target's distribution. A rule is a pure
function and uses no model: it calls a function for distributions and a :class:`RandomSource` for
everything random. So the tests can replace the noise by an enumeration of all outcomes, and verify the
same code that runs.

Each round needs its own noise. Under the token and block rules, drafted tokens are drawn with
:func:`draft_seed`: the block rule's decisions depend on drafted tokens that it then rejects, so drawing
them again from the same noise would bias the next round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ..arguments import plain_int, shown
from ..context.logits import LogitsRow
from ..context.runner import decode_run
from ..errors import ConfigError, ConstraintError, GrammarError
from ..sampling import Distribution, Sampler
from ..sampling.noise import derive_seed, uniform
from .drafter import Draft
from .output import Produced
from .text import Text

T = TypeVar("T")
Floats = npt.NDArray[np.float64]
Target = Callable[[int], Distribution]

RULES = ("seeded", "token", "block")


# -- rules ------------------------------------------------------------------------------------------


class RandomSource(Protocol):
    """A rule's source of randomness.

    Its values are independent of each other and of the noise that drew the draft.
    """

    def coin(self, index: int, probability: float) -> bool:
        """Return True with ``probability``; called at most once per index in a round."""

    def draw(self, distribution: Distribution, offset: int) -> int:
        """Draw a token for the ``offset``-th position of the round."""


@dataclass(frozen=True, slots=True)
class Noise:
    """The counter-based noise of a round whose first drafted token is at ``position``.

    Draws are the same as in plain decoding, because their key is (seed, absolute position). Coins
    are keyed by the position at which the round begins, so no two rounds share one.
    """

    seed: int
    position: int

    def coin(self, index: int, probability: float) -> bool:
        """Return True with ``probability``, a pure function of seed, position and index."""
        return uniform(self.seed, self.position, index=index) <= probability

    def draw(self, distribution: Distribution, offset: int) -> int:
        """Return the token that plain decoding draws at position + ``offset``."""
        return distribution.draw(self.seed, self.position + offset)


class Acceptance(NamedTuple):
    """``n_accepted`` drafted tokens are accepted; ``token`` follows them, as bonus or correction."""

    n_accepted: int
    token: int


AcceptanceRule = Callable[[Sequence[int], Sequence[Distribution], Target, RandomSource], Acceptance]
Rule = str | AcceptanceRule  # one of RULES, or a function with the arguments of `token_rule`


def token_rule(
    drafted: Sequence[int], sources: Sequence[Distribution], target: Target, rng: RandomSource
) -> Acceptance:
    """Accept token by token (Leviathan et al. 2022, 2211.17192, algorithm 1; Chen et al. 2302.01318).

    x_i is accepted with probability min(1, p_i(x_i) / q_i(x_i)); the first rejected one is replaced by
    a draw from norm(max(p_i - q_i, 0)); a draft that is accepted as a whole is followed by one more
    token from p.

    Args:
        drafted: the drafted tokens.
        sources: for each drafted token, the distribution that it was actually drawn from, or
            ``Distribution.point`` if it was not drawn at random. A point is correct for any draft, but
            fewer tokens are then accepted than with the real distribution.
        target: ``target(i)`` is the target's distribution after i drafted tokens. It is called with
            increasing i, and never after a drafted token of probability zero.
        rng: its coin i decides on ``drafted[i]``.

    Raises:
        ConfigError: a token whose source gives it probability zero.
    """
    _check_sources(drafted, sources)
    for i, token in enumerate(drafted):
        p, q = target(i), sources[i]
        if not rng.coin(i, min(1.0, p.prob(token) / q.prob(token))):
            return Acceptance(i, rng.draw(p.residual(q), i))
    n = len(drafted)
    return Acceptance(n, rng.draw(target(n), n))


def block_rule(
    drafted: Sequence[int], sources: Sequence[Distribution], target: Target, rng: RandomSource
) -> Acceptance:
    """Accept the draft as a block (Sun et al. 2024, 2403.10444, algorithm 2).

    Let gamma be the length of the draft, w_0 = 1, w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i)), and
    s_i = sum_x max(w_i p_{i+1}(x) - q_{i+1}(x), 0). For each i, a coin comes up with probability h_i =
    s_i / (s_i + 1 - w_i); h_gamma is w_gamma. The largest i whose coin comes up is the number of
    accepted tokens. The next token is drawn from norm(max(w_i p_{i+1} - q_{i+1}, 0)), or from p if the
    whole draft is accepted. On average, at least as many tokens are accepted as under the token rule.
    After a token of probability zero, w is zero, nothing longer can be accepted, and the target is not
    called again.

    Arguments and errors as for :func:`token_rule`.
    """
    _check_sources(drafted, sources)
    weight, h = 1.0, [1.0]  # w_i of the current step; h_0, h_1, ...
    excesses: list[tuple[Distribution, Floats]] = []
    for i, token in enumerate(drafted):
        p, q = target(i), sources[i]
        excess = np.maximum(weight * p.probs - q.at(p.ids), 0.0)
        excesses.append((p, excess))
        if i > 0:
            left = float(excess.sum())
            rest = left + (1.0 - weight)  # in this order, so that the ratio never rounds above 1
            h.append(left / rest if rest > 0.0 else 1.0)
        weight = min(1.0, weight * p.prob(token) / q.prob(token))
        if weight == 0.0:
            break
    else:
        h = [*h[: len(drafted)], weight]
    # Longest first, which is the same as testing all and taking the longest: the coins are independent.
    n = next((i for i in range(len(h) - 1, 0, -1) if rng.coin(i, h[i])), 0)
    if n == len(drafted):
        return Acceptance(n, rng.draw(target(n), n))
    p, excess = excesses[n]
    # An empty excess means p = q, so that a rejection has probability zero, except for rounding.
    return Acceptance(n, rng.draw(Distribution.from_probs(excess, p.ids) if excess.any() else p, n))


def seeded_rule(drafted: Sequence[int], draw: Callable[[int], int]) -> Acceptance:
    """Accept as long as the target itself draws the drafted token (Daliri et al. 2024, 2408.07978).

    ``draw(i)`` is the target's own draw after i drafted tokens. Whatever was drafted, the emitted
    tokens are the ones that plain decoding draws with the same seed; the draft only decides how many of
    them one decode yields.
    """
    for i, token in enumerate(drafted):
        choice = draw(i)
        if choice != token:
            return Acceptance(i, choice)
    return Acceptance(len(drafted), draw(len(drafted)))


def rule_name(rule: Rule) -> str:
    """Return the name of a rule; "function" if it is a function."""
    return rule if isinstance(rule, str) else "function"


def draft_seed(seed: int, position: int) -> int:
    """Return the seed for the draws of a sampled draft that begins at ``position``.

    Each round has a different seed. The block rule and the draft-length controller make decisions that
    depend on rejected tokens, so the noise that drew these must not be used again.
    """
    return derive_seed(seed, position)


def apply_rule(
    rule: Rule,
    drafted: Sequence[int],
    sources: Sequence[Distribution],
    target: Target,
    *,
    seed: int,
    position: int,
) -> Acceptance:
    """Apply a rule other than "seeded", or a function, to a draft, with the noise of (seed, position).

    Arguments as for :func:`token_rule`; ``position`` is where the first drafted token stands.

    Raises:
        ConfigError: an unknown rule, a token whose source gives it probability zero, or a function that
            does not return an `Acceptance` for this draft.
    """
    known = {"token": token_rule, "block": block_rule}
    chosen = known.get(rule) if isinstance(rule, str) else rule
    if chosen is None:
        raise ConfigError(f"unknown rule {rule!r}: use {', '.join(map(repr, RULES))}")
    found: object = chosen(drafted, sources, target, Noise(seed, position))
    if isinstance(found, tuple) and len(found) == 2:
        n_accepted, token = (plain_int(value) for value in found)
        if n_accepted is not None and token is not None and 0 <= n_accepted <= len(drafted):
            return Acceptance(n_accepted, token)
    raise ConfigError(
        f"an acceptance rule must return Acceptance(n_accepted, token) with at most {len(drafted)} "
        f"accepted tokens, not {shown(found)}"
    )


def _check_sources(drafted: Sequence[int], sources: Sequence[Distribution]) -> None:
    if len(drafted) != len(sources):
        raise ConfigError(f"{len(drafted)} drafted tokens but {len(sources)} sources")
    for token, source in zip(drafted, sources, strict=True):
        if source.prob(token) == 0.0:
            raise ConfigError(f"token {token} cannot have been drawn from {source}")


# -- a draft in a round ---------------------------------------------------------------------------


class Verdict(NamedTuple):
    """The decision about a draft.

    Attributes:
        n_accepted: how many of the drafted tokens are accepted.
        n_kept: how many the text takes. The last accepted one is left out if it ends the text, or if
            nothing can be drawn after it.
        token: the token after the kept tokens.
        source: where ``token`` comes from: "bonus", "corrected", or "drafted" if it is in the draft.
    """

    n_accepted: int
    n_kept: int
    token: int
    source: str


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """A report of a round with a draft, for ``Request.on_round``.

    Attributes:
        position: the position of the first drafted token in the text, which includes the prompt.
        draft: the drafted ids.
        logprobs: the target's log-probabilities of the accepted tokens, in order, and of the rejected
            token after them, if any, in nats.
        n_accepted, n_rejected: counts of drafted tokens; the others were not tested.
        following: the token after the accepted ones: the target's own token, or an accepted one that
            ends the text.
        drafter: the name of the drafter.
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


class Plan:
    """A draft that may follow a text: it is decoded and tested, then kept in part or dropped.

    The caller holds the context's lock, and makes and ends the plan under it.

    Args:
        text: the text before the draft. Until ``keep`` only its K/V changes.
        draft: the tokens.

    Attributes:
        tokens: the tokens to decode: the text's last one, and the drafted ones.
        rows: the logits after each of them, valid until the next decode. Set by ``decode``, or by
            the caller if a shared decode has computed them.
    """

    def __init__(self, text: Text, draft: Draft) -> None:
        if not text.is_behind:  # the drafter (user code) has read the logits after the text
            text.truncate(len(text.tokens) - 1)
        self.tokens = [*text.lacking(), *draft.tokens]
        self.rows: Sequence[LogitsRow] = ()
        self._text = text
        self._draft = draft
        self._fork: int | None = None  # the sequence for a decode that cannot be undone in place
        self._samplers = [text.sampler]  # samplers that have accepted 0, 1, ... drafted tokens

    def decode(self) -> Sequence[LogitsRow]:
        """Decode only these tokens and return their rows. Call ``keep`` or ``end`` afterwards.

        Raises:
            CapacityError, DecodeError: the text is as before.
        """
        text = self._text
        ctx = text.ctx
        text.check_usable()
        if ctx.kv_cache.undoes(len(self.tokens) - 1):
            self.rows = decode_run(ctx.decoder, self.tokens, text.seq_id, "all")
            return self.rows
        # This memory cannot drop a tail, so the tokens are decoded on a fork.
        self._fork = ctx.sequences.allocate(self)
        try:
            ctx.kv_cache.fork(text.seq_id, self._fork)
            self.rows = decode_run(ctx.decoder, self.tokens, self._fork, "all")
        except BaseException:
            self.end()
            raise
        return self.rows

    def end(self) -> None:
        """Release the sequence that it holds; safe to call at any time."""
        fork, self._fork = self._fork, None
        if fork is not None:
            self._text.ctx.sequences.free(fork)

    # -- accepting ---------------------------------------------------------------------------------

    def verify(self, rule: Rule) -> Verdict:
        """Apply ``rule`` to the draft.

        The draft has at least one token, and the text's last token was decoded together with it.

        Raises:
            GrammarError, ConstraintError, ConfigError: the target cannot draw any token right after the
                text.
        """
        tokens, is_eog = self._draft.tokens, self._text.ctx.model.is_eog
        version = self._text.version
        n, following = self._judge(rule)
        self._text.check_unchanged(version)
        is_dead_end = following is None
        # The text ends at an accepted EOG token, whatever the draft proposed after it.
        end = next((i for i, token in enumerate(tokens[:n], 1) if is_eog(token)), None)
        n_kept = n = end or n
        if end or following is None:
            # At a dead end ``following`` is the last accepted token, and the next round raises the
            # error.
            n_kept, following = n - 1, tokens[n - 1]
        source = "drafted" if is_dead_end else "bonus" if n == len(tokens) else "corrected"
        return Verdict(n, n_kept, following, source)

    def _judge(self, rule: Rule) -> tuple[int, int | None]:
        """Return how many tokens are accepted, and the token after them.

        That token is None if the target cannot draw any, for example because the grammar is complete
        but a logit bias forbids the EOG token.
        """
        drafted, sources, text = self._draft.tokens, self._draft.sources, self._text
        n, seed, position = len(drafted), text.seed, len(text.tokens)
        if not sources and rule != "seeded":
            sources = [Distribution.point(token) for token in drafted]
        while True:
            try:
                if rule == "seeded":
                    return seeded_rule(drafted[:n], self._draw)
                return apply_rule(
                    rule, drafted[:n], sources[:n], self._target, seed=seed, position=position
                )
            except _DeadEnd as dead_end:
                if not dead_end.n:
                    error = dead_end.__cause__ or dead_end
                    raise error from error.__cause__
                if dead_end.n == n:  # all n tokens are accepted; the rule needs the next one
                    return n, None
                # The block rule looks ahead before it decides, so apply it to the draft up to there.
                n = dead_end.n

    def _target(self, n: int) -> Distribution:
        """Return the distribution of the token after ``n`` drafted ones."""
        return self._after(n, self._distribution, Distribution.point)

    def _draw(self, n: int) -> int:
        """Return the token that plain decoding draws after ``n`` drafted ones."""
        return self._after(n, self._drawn, int)

    def _after(self, n: int, found: Callable[[int], T], nothing: Callable[[int], T]) -> T:
        tokens = self._draft.tokens
        if n and self._text.ctx.model.is_eog(tokens[n - 1]):  # the value is not emitted
            return nothing(tokens[n - 1])
        try:
            return found(n)
        except (ConfigError, ConstraintError, GrammarError) as error:
            raise _DeadEnd(n) from error

    def _distribution(self, n: int) -> Distribution:
        text = self._text
        row, position = self.rows[n], len(text.tokens) + n
        return self.sampler(n).distribution(row.array, position, text.seed)

    def _drawn(self, n: int) -> int:
        text, sampler = self._text, self.sampler(n)
        row, position = self.rows[n], len(text.tokens) + n
        return row.draw(sampler, text.seed, position, measured=sampler.params.logprobs)

    def sampler(self, n: int) -> Sampler:
        """Return the sampler that has accepted the first ``n`` drafted tokens."""
        samplers = self._samplers
        while len(samplers) <= n:
            last = samplers[-1]
            if not last.is_stateless:
                last = last.clone()
                last.accept(self._draft.tokens[len(samplers) - 1])
            samplers.append(last)
        return samplers[n]

    def trace(self, verdict: Verdict) -> RoundTrace:
        """Return the report for ``on_round``, before ``keep``; its times are set later."""
        draft, n = self._draft, verdict.n_accepted
        tokens = tuple(draft.tokens)
        # Nothing after a token that ends the text was judged.
        n_judged = n if verdict.n_kept < n else min(n + 1, len(tokens))
        logprobs = tuple(self.rows[i].logprob(tokens[i]) for i in range(n_judged))
        return RoundTrace(
            len(self._text.tokens),
            tokens,
            logprobs,
            n,
            n_judged - n,
            None,
            draft.drafter,
            draft.seconds,
        )

    # -- keeping -----------------------------------------------------------------------------------

    def keep(self, n: int) -> list[str]:
        """Append the first ``n`` drafted tokens to the text, and drop the others from memory.

        Returns:
            the text that each token completes.
        """
        text, cache = self._text, self._text.ctx.kv_cache
        tokens, rows = self.tokens[: 1 + n], self.rows[: 1 + n]
        sampler = self.sampler(n)
        scored, completed = sampler.params.logprobs, []
        with text.undone_on_error():
            for token, row in zip(tokens[1:], rows, strict=False):
                surprisal = -row.logprob(token) if scored else math.nan
                completed.append(text.append_accepted(token, surprisal))
            row = rows[-1]
            text.use_sampler(sampler)
            if self._fork is not None:
                row = self._keep_fork(self._fork, tokens, rows)
            elif cache.next_position(text.seq_id) > len(text.tokens):
                text.truncate(len(text.tokens))
            text.set_row(row)
        return completed

    def _keep_fork(self, fork: int, tokens: Sequence[int], rows: Sequence[LogitsRow]) -> LogitsRow:
        """Move the kept tokens into the text's own K/V; return the logits after the last one."""
        text, ctx = self._text, self._text.ctx
        try:
            if ctx.kv_cache.next_position(fork) == len(text.tokens):
                ctx.kv_cache.fork(fork, text.seq_id)
                return rows[-1]
            self.end()
            return decode_run(ctx.decoder, tokens, text.seq_id, "last")[-1]
        finally:
            self.end()
