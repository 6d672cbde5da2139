"""The settings of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass

from ..arguments import instance, real, whole
from ..errors import ConfigError
from .verify import RULES, Rule

__all__ = ["SpeculativeConfig", "checked_config"]


@dataclass(frozen=True)
class SpeculativeConfig:
    """How to speculate.

    Args:
        draft_k: tokens to draft in each round, 0 to 256; "auto" drafts as many as raise the throughput
            as measured while it runs, and none where drafting does not raise it. The first token comes
            from the prompt's logits and the last needs no draft: ``max_tokens=2`` drafts nothing.
        max_draft_tokens: the most tokens that "auto" may draft in a round, 1 to 256.
        entropy_stop: end a draft before a token whose distribution has more than this entropy, nats;
            None = never. The decision does not depend on the drawn token, so it is lossless.
        rule: how drafted tokens are accepted: "seeded", "token" or "block". All are lossless: they keep
            the target's distribution. Under "seeded", and at temperature 0 under all of them, the text is
            moreover the one of plain decoding with its seed. "block" accepts most of what a model drafts
            above temperature 0. A function with the arguments of `token_rule` is a rule of your own;
            `rule_error` verifies by enumeration whether it is lossless.

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


def checked_config(config: SpeculativeConfig | None) -> SpeculativeConfig:
    """Return it, or the default one where none is given; raise ConfigError for anything else."""
    return instance("config", SpeculativeConfig() if config is None else config, SpeculativeConfig)
