"""How much each stream drafts when all of them share one decode.

With many streams, a drafted token no longer competes with stopping its own round: it takes time from
everybody. The engine earns tokens at some rate; a drafted token is worth its price if the tokens it is
expected to add are at least what the engine would earn in the time it takes.
"""

from __future__ import annotations

from ..speculative.config import SpeculativeConfig
from ..speculative.length.auto import Profile, interpolate, smooth
from ..speculative.length.base import CATCH_UP, DraftLength, FixedLength, RoundReport

__all__ = ["Market", "StreamLength"]


class Market:
    """What decodes cost and what drafts yield, learned over all streams of an engine.

    Drafting is on while rounds with drafts yield more tokens a second than plain rounds of as many
    streams are measured to; else it is off, and tried again after ever longer pauses.
    """

    WARM_UP_PLAIN, TRIAL_ROUNDS = 2, 4
    PAUSE, LONGEST_PAUSE = 32, 512  # rounds
    SLACK = 0.99
    TRIAL_SHARE = 0.02
    PRIOR_K = 2

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config = config
        self.profiles: dict[str, Profile] = {}
        self._target_s: dict[int, float] = {}
        self._n_rounds = 0
        self._n_streams = 1
        self._rate = 0.0  # tokens a second the engine earns
        self._step_s = 0.0  # what one more drafted token costs the draft model
        self._on = True
        self._pause, self._until, self._trial_left = self.PAUSE, 0, self.TRIAL_ROUNDS
        self._tokens = self._seconds = self._plain_seconds = 0.0

    def length(self) -> DraftLength:
        """Return a controller for one stream."""
        if isinstance(self.config.draft_k, int):
            return FixedLength(self.config.draft_k, self.config.entropy_stop)
        return StreamLength(self)

    def time(self, n: int) -> float:
        """Return the target's time for a decode of ``n`` tokens, seconds; 0 before any was measured."""
        return interpolate(self._target_s, n) if self._target_s else 0.0

    @property
    def wants_drafts(self) -> bool:
        """True if this round should have drafts."""
        if self._n_rounds < self.WARM_UP_PLAIN:
            return False
        return self._on or (self._n_rounds >= self._until and self._can_afford_a_trial)

    @property
    def _can_afford_a_trial(self) -> bool:
        """True if the draft model reads what was said meanwhile in a small share of that time."""
        n = self._n_streams
        # Reading many tokens at once costs about a fifth of a step for each.
        return n * self._step_s / 5 < self.TRIAL_SHARE * self.time(n)

    def pays(self, profile: Profile, chance: float, n_streams: int) -> bool:
        """Return whether a token that stands with ``chance`` is worth its price."""
        if profile.n_drafts < 2 * max(1, n_streams) or self._rate == 0.0:
            return True
        n = max(1, n_streams)
        extra = (self.time(2 * n) - self.time(n)) / n + self._step_s
        return chance > self._rate * max(extra, 0.0)

    def learn(
        self, n_streams: int, n_tokens: int, n_emitted: int, verify_s: float, draft_s: float,
        n_drafted: int, n_read: int,
    ) -> None:  # fmt: skip
        """Take in a round without prompts: ``n_tokens`` decoded for ``n_streams``.

        The drafters drew ``n_drafted`` tokens, and read ``n_read`` first.
        """
        self._n_rounds += 1
        self._n_streams = n_streams
        self._target_s[n_tokens] = smooth(self._target_s.get(n_tokens, 0.0), verify_s)
        self._rate = smooth(self._rate, n_emitted / (verify_s + draft_s))
        if n_drafted and n_read <= CATCH_UP * n_streams:
            self._step_s = smooth(self._step_s, draft_s / n_drafted)
        if draft_s == 0.0 and n_drafted == 0:
            return
        self._tokens = 0.9 * self._tokens + n_emitted
        self._seconds = 0.9 * self._seconds + verify_s + draft_s
        self._plain_seconds = (
            0.9 * self._plain_seconds + n_emitted * self.time(n_streams) / n_streams
        )
        self._judge(self._is_hopeless(n_streams, n_tokens))

    def _is_hopeless(self, n_streams: int, n_tokens: int) -> bool:
        """Return whether drafts would not pay even if every token of them stood."""
        plain_s = self.time(n_streams)
        n_more = n_tokens - n_streams
        return n_more > 0 and (
            (self.time(n_tokens) - plain_s) / n_more + self._step_s >= plain_s / n_streams
        )

    def _judge(self, hopeless: bool) -> None:
        """Compare the time rounds with drafts took with what plain rounds would have taken."""
        self._trial_left -= 1
        if self._trial_left > self.TRIAL_ROUNDS - 2:  # the first also read the prompts
            return
        if self._trial_left > 0 and not hopeless:
            return
        if self._plain_seconds >= self.SLACK * self._seconds:
            self._on, self._pause = True, self.PAUSE
            return
        self._on = False
        self._until = self._n_rounds + self._pause
        self._pause = min(2 * self._pause, self.LONGEST_PAUSE)
        self._trial_left = self.TRIAL_ROUNDS
        self._tokens = self._seconds = self._plain_seconds = 0.0

    def explain(self) -> str:
        """Return in words what it does."""
        if isinstance(self.config.draft_k, int):
            return f"always {self.config.draft_k} tokens a draft: the length is fixed"
        state = "on" if self._on else f"off until round {self._until}"
        chances = ", ".join(
            f"{name} {profile.mean_chance:.2f}".strip() for name, profile in self.profiles.items()
        )
        return (
            f"drafting is {state}; the engine earns {self._rate:.0f} tokens/s; "
            f"a drafted token stands with chance {chances or 'unknown'}"
        )


class StreamLength:
    """One stream's share of the market: drafts on while the next token is worth its price."""

    reads_entropy = True

    def __init__(self, market: Market) -> None:
        self.limit = market.config.max_draft_tokens
        self.reason = "length"
        self.n_streams = 1
        self._market = market
        self._profile = Profile()
        self._reach = 1.0

    def plain_steps(self, n_behind: int) -> int:
        """Return 0 if the market has drafts this round."""
        return 0 if self._market.wants_drafts else 1

    def consider(self, drafter: str) -> bool:
        """Return True; what follows is about this drafter."""
        self._profile = self._market.profiles.setdefault(drafter, Profile())
        return True

    def goes_on(self, n_drafted: int, entropy: float) -> bool:
        """Return whether one more token is worth its price."""
        if n_drafted == 0:
            self._reach = 1.0
        stop = self._market.config.entropy_stop
        self.reason = "length"
        if n_drafted >= self.limit:
            return False
        if stop is not None and entropy > stop:
            self.reason = "entropy"
            return False
        self.reason = "goodput"
        reach = self._reach * self._profile.chance(entropy)
        if not self._market.pays(self._profile, reach, self.n_streams):
            return False
        is_new = self._profile.n_drafts < 2 * max(1, self.n_streams)
        if is_new and n_drafted >= self._market.PRIOR_K:
            return False
        self._reach = reach
        return True

    def learn(self, report: RoundReport) -> None:
        """Take in what stood; costs are learned by the engine, for all streams at once."""
        if report.asked and report.entropies:
            self._profile.learn(report)

    def learn_plain(self, n: int, verify_s: float, overhead_s: float) -> None:
        """Nothing to learn: the engine tells the market."""

    def explain(self) -> str:
        """Return what the market does."""
        return self._market.explain()
