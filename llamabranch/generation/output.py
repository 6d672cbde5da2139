"""A token as branches, generations, sessions and engines emit it."""

from __future__ import annotations

from typing import NamedTuple

from ..context.logits import Alternative

__all__ = ["Produced"]


class Produced(NamedTuple):
    """A token that a branch, a generation or an engine emits.

    Attributes:
        token: its id.
        text: the text it completes (a character split over several tokens comes with its last one).
        is_stop: whether it is an EOG (end of generation) token, which ends the generation. It is not part
            of the tokens, but may carry text that was held back for a stop string. If an error ends
            the text, the id is -1 and the numbers are NaN.
        logprob, entropy: of the model's own distribution at this position, nats, before any sampling
            setting; NaN with ``SamplingParams(logprobs=False)``.
        source: "drafted" (proposed and accepted), "forced" (also proposed and accepted, but the
            grammar allowed no other text), "bonus" (the target's own token after a draft that was
            accepted whole), "corrected" (the target's own token in place of a rejected one) or
            "plain".
        alternatives: the requested number of most probable tokens, best first: pairs (token,
            log-probability) with an attribute ``text``.
        rank: 1 + how many tokens the model finds more probable; 0 if no alternatives were
            requested.
        is_thought: whether it belongs to the thought before the answer; ``text`` then has no tags.
    """

    token: int
    text: str
    is_stop: bool
    logprob: float
    entropy: float
    source: str = "plain"
    alternatives: tuple[Alternative, ...] = ()
    rank: int = 0
    is_thought: bool = False
