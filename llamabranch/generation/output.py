"""Emitted tokens, and what one generation has emitted so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..arguments import whole
from ..context.logits import Alternative
from ..model import NO_TOKEN, StopStrings


class Produced(NamedTuple):
    """A token that a branch, a generation or an engine emits.

    Attributes:
        token: its id.
        text: the text it completes (a character that is split over several tokens comes with the last
            one).
        is_stop: whether it is an EOG (end of generation) token, which ends the generation. It is not
            one of the tokens, but may carry text that was held back for a stop string. If an error ends
            the text, the id is -1 and the numbers are NaN.
        logprob, entropy: of the model's own distribution at this position, nats, before any sampling
            setting; NaN with ``SamplingParams(logprobs=False)``.
        source: where it comes from. "plain": drawn without a draft. "drafted": proposed and accepted.
            "forced": proposed and accepted when the grammar allowed no other text, or read between a
            thought and its answer. "bonus": the target's own token after a fully accepted draft.
            "corrected": the target's own token instead of a rejected one.
        alternatives: the most probable tokens, as many as requested, best first: pairs (token,
            log-probability) with an attribute ``text``.
        rank: 1 + how many tokens the model finds more probable; 0 if no alternatives were
            requested.
        is_thought: whether it belongs to the thought before the answer; the tags are left out of
            ``text``.
        n_allowed: how many tokens the grammar allowed at its position; 0 without a grammar, and if no
            alternatives were requested.
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
    n_allowed: int = 0


class OutputBuffer:
    """The tokens and the text of one generation so far.

    Args:
        max_tokens: the maximum number of tokens to emit; None = until the model ends.
        stop: strings that end the text. ``text`` does not include them; ``tokens`` includes their
            tokens.
        stop_tokens: ids of tokens that end the text and are part of it.
        min_tokens: stop strings are ignored until there are this many tokens.

    Raises:
        ConfigError: a limit is negative or not an integer, or a stop string is empty.

    Attributes:
        tokens: ids, including the tokens of a stop string, but no EOG tokens.
        texts: the text emitted with each token; together they are the text without the stop string.
        emitted: a `Produced` for each of ``tokens``.
        eog: the EOG token that ended the text; None before that.
        finish_reason: "stop" (EOG token or stop string), "length", or the reason passed to
            ``break_off``; None until the text ends. Only this class sets it.
        is_stuck: whether the generation cannot continue now, but may later. Until then, ``text``
            includes text that is held back because a stop string might begin there.
        elapsed_s: seconds so far; the caller adds them.
        withheld: tokens that are not emitted yet, see ``holds``.
        holds: whether it is not clear yet if the text is a thought or an answer; its tokens are then
            withheld.
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
        self.eog: Produced | None = None
        self.finish_reason: str | None = "length" if max_tokens == 0 else None
        self.is_stuck = False
        self.elapsed_s = 0.0
        self.withheld: list[Produced] = []
        self.holds = False

    @property
    def text(self) -> str:
        """The emitted text."""
        return "".join(self.texts) + (self._stops.held if self.is_stuck else "")

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended the text, or None."""
        if self._stops.found is not None or not self.tokens:
            return self._stops.found
        return self.tokens[-1] if self.tokens[-1] in self._stop_tokens else None

    @property
    def draft_limit(self) -> int:
        """The most tokens to draft without going beyond ``min_tokens`` or ``max_tokens`` in a round."""
        n = len(self.tokens)
        limit = 1 << 30 if self._max_tokens is None else self._max_tokens
        return (min(limit, self.min_tokens) if n < self.min_tokens else limit) - n - 1

    def add(self, emitted: Produced) -> Produced | None:
        """Add the next token. Return it with the text to emit, or None if there is nothing to emit.

        An EOG token is emitted only if it carries text that was held back for a stop string.
        """
        self.is_stuck = False
        if emitted.is_stop:
            self.finish_reason, self.eog = "stop", emitted
            pending = self._stops.flush()
            if not pending:
                return None
            self.texts.append(pending)
            return emitted._replace(text=pending)
        n = len(self.tokens) + 1
        is_end = emitted.token in self._stop_tokens
        last = self._max_tokens is not None and n >= self._max_tokens
        text, reason = emitted.text, "length" if last else None
        if n > self.min_tokens:
            text = self._stops.show(text, last=last or is_end)
        if is_end or self._stops.found is not None:
            reason = "stop"
        # No function is called from here on, so a signal handler's exception comes before or after all
        # of these changes.
        self.tokens += (emitted.token,)
        self.emitted += (emitted,)
        self.texts += (text,)
        self.finish_reason = reason
        # The end of the text may be held back for a stop string.
        return emitted if text == emitted.text else emitted._replace(text=text)

    def emit(self, shown: Produced | None) -> list[Produced]:
        """Return the tokens to emit once ``add`` or ``break_off`` has returned ``shown``."""
        if shown is not None:
            self.withheld.append(shown)
        if self.holds:
            return []
        emitted, self.withheld = self.withheld, []
        return emitted

    def break_off(self, reason: str | None = None) -> Produced | None:
        """End the text without an EOG token; return the text that was held back, if any.

        After a regular end, or in a second call, there is no such text.

        Args:
            reason: why it cannot continue, such as "capacity" or "cancelled"; None = leave
                ``finish_reason`` as it is.
        """
        self.finish_reason, self.holds = reason or self.finish_reason, False
        pending = self._stops.flush()
        if not pending:
            return None
        self.texts.append(pending)
        return Produced(NO_TOKEN, pending, True, math.nan, math.nan)
