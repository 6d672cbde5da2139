"""The result of every search: hypotheses, and their cost."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import UsageError
from ..request.result import EngineStats


@dataclass(frozen=True)
class Hypothesis:
    """A text found by a search.

    Attributes:
        tokens: the generated ids, including the tokens of a stop string, but not EOG tokens.
        text: their text, without the stop string that ended it.
        logprob: the sum of their log-probabilities under the model's own distribution, nats; an EOG
            token that ended the text counts too.
        score: the number that the hypotheses are sorted by.
        finish_reason: "stop" (EOG token or stop string), "length", "capacity" (the cache is full),
            or "decided" (the vote was decided before it ended).
    """

    tokens: list[int]
    text: str
    logprob: float
    score: float
    finish_reason: str


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        hypotheses: best first; empty if nothing could be generated.
        stats: the cost: decodes, and tokens of all texts, also of those that were dropped.
        votes: only from ``vote``: how many texts gave each answer, the most frequent answer first.
    """

    hypotheses: list[Hypothesis]
    stats: EngineStats
    votes: Mapping[str | float, int] = field(default_factory=dict)

    @property
    def best(self) -> Hypothesis:
        """The best hypothesis.

        Raises:
            UsageError: the search found no text.
        """
        if not self.hypotheses:
            raise UsageError(
                "the search found no text",
                hint="raise max_tokens, or allow shorter texts in the grammar",
            )
        return self.hypotheses[0]

    @property
    def answer(self) -> str | float | None:
        """The most frequent answer of a ``vote``; None without any answer, and for other searches."""
        return next(iter(self.votes), None)

    @property
    def text(self) -> str:
        """The text of the best hypothesis, or "" without hypotheses."""
        return self.hypotheses[0].text if self.hypotheses else ""

    def __repr__(self) -> str:
        n = len(self.hypotheses)
        best = f", best {self.best.score:.3f}: {reprlib.repr(self.text)}" if n else ""
        return f"<SearchResult {n} {'hypothesis' if n == 1 else 'hypotheses'}{best}>"
