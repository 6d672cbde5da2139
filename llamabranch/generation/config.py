"""The settings of speculative decoding, and the draft length that they choose."""

from __future__ import annotations

from dataclasses import dataclass

from ..arguments import real, whole
from ..context import Context
from ..errors import ConfigError
from .drafter import Drafter, DraftLength, FixedLength
from .length import AutoLength
from .verify import RULES, Rule


@dataclass(frozen=True)
class SpeculativeConfig:
    """The settings of speculative decoding.

    Args:
        draft_k: tokens to draft in each round, 0 to 256. "auto" measures as it runs and drafts the
            number of tokens with the highest throughput, or none if drafting does not pay. With
            ``max_tokens=2`` nothing is drafted, because the first token comes from the prompt's logits
            and the last one needs no draft.
        max_draft_tokens: the maximum number of tokens that "auto" may draft in a round, 1 to 256.
        entropy_stop: end a draft before a token whose distribution has more than this entropy, in
            nats; None = never. The decision does not depend on the drawn token, so it is lossless.
        rule: how drafted tokens are accepted: "seeded", "token" or "block". All three are lossless:
            they keep the target's distribution. Under "seeded" the text also equals the text of
            plain decoding with the same seed. At temperature 0 this holds for all three. With a
            draft model and a temperature above 0, "block" accepts the most tokens. You may pass your
            own rule, a function with the arguments of `token_rule`; `rule_error` checks by enumeration
            whether it is lossless.

    Raises:
        ConfigError: a value out of range.
    """

    draft_k: int | str = "auto"
    max_draft_tokens: int = 16
    entropy_stop: float | None = None
    rule: Rule = "seeded"

    def __post_init__(self) -> None:
        limit = whole("max_draft_tokens", self.max_draft_tokens, 1, 256)
        object.__setattr__(self, "max_draft_tokens", limit)
        if not isinstance(self.draft_k, str):
            object.__setattr__(self, "draft_k", whole("draft_k", self.draft_k, 0, 256))
        elif self.draft_k != "auto":
            raise ConfigError(f"draft_k must be 'auto' or from 0 to 256, not {self.draft_k!r}")
        if self.rule not in RULES and not callable(self.rule):
            raise ConfigError(f"unknown rule {self.rule!r}: use one of {', '.join(RULES)}")
        if self.entropy_stop is not None:
            stop = real("entropy_stop", self.entropy_stop)
            if not stop >= 0:
                raise ConfigError(f"entropy_stop must be None or at least 0 nats, not {stop!r}")
            object.__setattr__(self, "entropy_stop", stop)


def draft_length(
    config: SpeculativeConfig, drafter: Drafter | None = None, ctx: Context | None = None
) -> DraftLength:
    """Return the draft length for ``config``. "auto" begins with earlier averages of ``ctx``."""
    if isinstance(config.draft_k, int):
        return FixedLength(config.draft_k, config.entropy_stop)
    return AutoLength(config.max_draft_tokens, config.entropy_stop, drafter, ctx)
