"""What a drawn text or tree consists of, whether in a terminal, as text or on the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Where a token came from, but for plain decoding, and what that is called.
SOURCES = {
    "drafted": "drafted and accepted",
    "forced": "forced by the grammar",
    "bonus": "bonus",
    "corrected": "corrected",
}


@dataclass(frozen=True)
class Token:
    """A token with its text; ``logprob`` in nats, NaN if it is not known."""

    text: str
    logprob: float = math.nan


@dataclass(frozen=True)
class TreeLine:
    """A line of a drawn tree, whether of branches or of a search.

    Attributes:
        tokens: its text, with the probabilities of the tokens.
        figures: what is written beside it.
        children: what continues it, in the order in which it is drawn.
        status: "finished" (a result ends here), "pruned" or "".
        n_hidden: how many branches were pruned along it that are not among ``children``.
    """

    tokens: Sequence[Token]
    figures: str = ""
    children: Sequence[TreeLine] = ()
    status: str = ""
    n_hidden: int = 0

    @property
    def text(self) -> str:
        """The text of its tokens."""
        return "".join(token.text for token in self.tokens)

    @property
    def probability(self) -> float:
        """That of the token it begins with; NaN if it is not known, as of a prompt."""
        logprob = self.tokens[0].logprob if self.tokens else math.nan
        return logprob if math.isnan(logprob) else math.exp(min(0.0, logprob))


def visible(text: str) -> str:
    """Return text with characters that cannot be seen, or reorder what is around them, as their code."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def last_words(text: str, n: int) -> str:
    """Return the last ``n`` characters of a text at most, from the beginning of a word on."""
    if len(text) <= n:
        return text
    tail = text[-n:]
    space = tail.find(" ", 0, n // 2)
    return "..." + (tail[space + 1 :] if space >= 0 else tail)
