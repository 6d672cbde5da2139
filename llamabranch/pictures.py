"""The parts of a drawn text or tree, for the terminal, plain text and the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# The sources of tokens other than plain decoding, with their labels.
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
    """A line of a drawn tree of texts.

    Attributes:
        tokens: its text, with the probabilities of the tokens.
        figures: short text next to it, such as a score.
        children: the lines that continue it, in the order in which they are drawn.
        status: "finished" (a result ends here), "pruned" or "".
        n_hidden: how many pruned branches of this line are not in ``children``.
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
        """The probability of its first token; NaN if it is not known, as for a prompt."""
        logprob = self.tokens[0].logprob if self.tokens else math.nan
        return logprob if math.isnan(logprob) else math.exp(min(0.0, logprob))


def visible(text: str) -> str:
    """Return the text with invisible characters, and those that change the direction, as codes."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def last_words(text: str, n: int) -> str:
    """Return at most the last ``n`` characters of a text, beginning at a word."""
    if len(text) <= n:
        return text
    tail = text[-n:]
    space = tail.find(" ", 0, n // 2)
    return "..." + (tail[space + 1 :] if space >= 0 else tail)
