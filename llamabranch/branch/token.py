"""The one type for tokens that are produced and emitted."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Produced"]


class Produced(NamedTuple):
    """A token that a branch, a generation or an engine emits.

    Attributes:
        token: its id.
        text: what it completes (a character split over several tokens comes with its last one).
        is_stop: whether it ends the generation: an EOG (end of generation) token. Then it is no token of
            the text, but may carry text that was held back for a stop string; where an error ends the
            text, its id is -1 and its numbers are NaN.
        logprob, entropy: of the model's own distribution at this place, nats, before any sampling
            setting.
        source: "drafted" (proposed and accepted), "bonus" (the target's own after a draft that was
            accepted whole), "corrected" (the target's own where a draft was rejected) or "plain".
        alternatives: the most probable tokens that were asked for: (token, log-probability), best first.
    """

    token: int
    text: str
    is_stop: bool
    logprob: float
    entropy: float
    source: str = "plain"
    alternatives: tuple[tuple[int, float], ...] = ()

    def with_text(self, text: str) -> Produced:
        """Return it with another text: a part may be held back for a stop string."""
        return self if text == self.text else self._replace(text=text)
