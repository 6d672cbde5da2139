"""Tokens that are given out: their type, limits, EOG tokens, stop strings, and the output so far.

Branches, sessions and the engine all emit through it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..arguments import whole
from ..context.logits import Alternative
from ..model import NO_TOKEN, StopStrings

__all__ = ["OutputBuffer", "Produced"]


class Produced(NamedTuple):
    """A token that a branch, a generation or an engine emits.

    Attributes:
        token: its id.
        text: the text it completes (a character split over several tokens comes with its last one).
        is_stop: whether it is an EOG (end of generation) token, which ends the generation. It is not part
            of the tokens, but may carry text that was held back for a stop string; where an error ends
            the text, its id is -1 and its numbers are NaN.
        logprob, entropy: of the model's own distribution at this position, nats, before any sampling
            setting; NaN with ``SamplingParams(logprobs=False)``.
        source: "drafted" (proposed and accepted), "forced" (the same, where the grammar allowed no other
            text), "bonus" (the target's own after a draft that was
            accepted whole), "corrected" (the target's own where a draft was rejected) or "plain".
        alternatives: the requested number of most probable tokens, best first: pairs (token,
            log-probability) with an attribute ``text``.
        rank: 1 + how many tokens the model finds more probable; 0 where no alternatives were asked for.
    """

    token: int
    text: str
    is_stop: bool
    logprob: float
    entropy: float
    source: str = "plain"
    alternatives: tuple[Alternative, ...] = ()
    rank: int = 0

    def with_text(self, text: str) -> Produced:
        """Return it with another text: a part may be held back for a stop string."""
        return self if text == self.text else self._replace(text=text)


class OutputBuffer:
    """The tokens and the text of one generation so far.

    Args:
        max_tokens: the most tokens to emit; None = until the model ends.
        stop: strings that end the text; ``text`` leaves them out, ``tokens`` includes theirs.
        stop_tokens: ids that end the text, and are part of it.
        min_tokens: the stop strings are looked for after this many tokens.

    Raises:
        ConfigError: a limit that is no integer or negative, or an empty stop string.

    Attributes:
        tokens: ids, those of a stop string included; EOG tokens are not among them.
        texts: the text emitted with each token; joined they are the text, without the stop string.
        emitted: each of ``tokens`` with all that is known of it.
        finish_reason: "stop" (EOG token or stop string), "length", None while it continues, or what
            ``break_off`` was given. Nobody else sets it.
        is_stuck: it cannot continue for now, but may later: meanwhile ``text`` includes the text held
            back for a stop string.
        elapsed_s: seconds so far, if the caller counts them.
    """

    def __init__(
        self,
        max_tokens: int | None,
        stop: str | Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        if max_tokens is not None:
            max_tokens = whole("max_tokens", max_tokens, 0)
        self._max_tokens = max_tokens
        self._stops = StopStrings(stop)
        self._stop_tokens = frozenset(stop_tokens)
        self.min_tokens = min_tokens
        self.tokens: list[int] = []
        self.texts: list[str] = []
        self.emitted: list[Produced] = []
        self.finish_reason: str | None = "length" if max_tokens == 0 else None
        self.is_stuck = False
        self.elapsed_s = 0.0

    @property
    def text(self) -> str:
        """The emitted text."""
        return "".join(self.texts) + (self._stops.held if self.is_stuck else "")

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string, or else the stop token, that has ended the text; None if neither has."""
        if self._stops.found is not None or not self.tokens:
            return self._stops.found
        return self.tokens[-1] if self.tokens[-1] in self._stop_tokens else None

    @property
    def draft_limit(self) -> int:
        """The most tokens a draft may have so that the round overruns neither limit."""
        n = len(self.tokens)
        limit = 1 << 30 if self._max_tokens is None else self._max_tokens
        return (min(limit, self.min_tokens) if n < self.min_tokens else limit) - n - 1

    def add(self, emitted: Produced) -> Produced | None:
        """Add the next token; return it with the text to emit, None if there is nothing to emit.

        An EOG token is emitted only to carry text that was held back for a stop string.
        """
        self.is_stuck = False
        if emitted.is_stop:
            self.finish_reason = "stop"
            held = self._stops.flush()
            if not held:
                return None
            self.texts.append(held)
            return emitted.with_text(held)
        n = len(self.tokens) + 1
        is_end = emitted.token in self._stop_tokens
        last = self._max_tokens is not None and n >= self._max_tokens
        text, reason = emitted.text, "length" if last else None
        if n > self.min_tokens:
            text = self._stops.show(text, last=last or is_end)
        if is_end or self._stops.found is not None:
            reason = "stop"
        # Nothing is called from here on: what the handler of a signal raises comes before or after.
        self.tokens += (emitted.token,)
        self.emitted += (emitted,)
        self.texts += (text,)
        self.finish_reason = reason
        return emitted.with_text(text)

    def break_off(self, reason: str | None = None) -> Produced | None:
        """End the text without an EOG token; return the held-back text as an item, None if there is none.

        After a regular end, and on a second call, no text is held back.

        Args:
            reason: why it cannot go on, as "capacity" or "cancelled"; None: it may, or has ended
        """
        self.finish_reason = reason or self.finish_reason
        held = self._stops.flush()
        if not held:
            return None
        self.texts.append(held)
        return Produced(NO_TOKEN, held, True, math.nan, math.nan)
