"""The result of every search: hypotheses, statistics, and the tree of all texts."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from ..errors import UsageError
from ..sampling.constraint import ConstraintStats
from .node import SearchNode

__all__ = ["Hypothesis", "SearchResult", "SearchStats"]


@dataclass(frozen=True)
class Hypothesis:
    """A text found by a search.

    Attributes:
        tokens: the generated ids, including the tokens of a stop string, but not EOG tokens.
        text: their text, without the stop string that ended it.
        logprob: the sum of their log-probabilities under the model's own distribution, nats, including
            that of an EOG token that ended the text.
        score: the hypotheses are ordered by it.
        finish_reason: "stop" (EOG token or stop string), "length", "capacity" (the cache is full),
            "rejected" (dropped because others were better), "decided" (the vote was decided before it
            ended) or "cancelled".
        node: the node of the tree where it ends.
    """

    tokens: list[int]
    text: str
    logprob: float
    score: float
    finish_reason: str
    node: SearchNode = field(repr=False, compare=False)

    def as_dict(self) -> dict[str, object]:
        """Return JSON types, without the node."""
        return {
            "tokens": self.tokens,
            "text": self.text,
            "logprob": self.logprob,
            "score": self.score,
            "finish_reason": self.finish_reason,
        }


@dataclass
class SearchStats(ConstraintStats):
    """The cost of a search; for ``smc`` and ``rejection`` also the cost of the constraint.

    Attributes:
        decodes: calls of llama_decode.
        tokens_decoded: the tokens in these decodes.
        tokens_redecoded: how many of these were decoded before, because there were fewer sequences
            or cells than candidates.
        tokens_shared: tokens that candidates share with others, or with the prompt, by a fork.
        peak_sequences: the most sequences held at a time, not counting the branch's own.
        steps: rounds of the search: tokens of a beam, steps of a step search, ...
        elapsed_s: seconds.
    """

    decodes: int = 0
    tokens_decoded: int = 0
    tokens_redecoded: int = 0
    tokens_shared: int = 0
    peak_sequences: int = 0
    steps: int = 0
    elapsed_s: float = 0.0

    def as_dict(self) -> dict[str, object]:
        """Return all counts and the time."""
        return asdict(self)


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        hypotheses: best first; empty if nothing could be generated.
        stats: the cost.
        tree: the node of the prompt; all texts of the search are below it.
        log_evidence: only from ``smc``: the logarithm of the estimated normalising constant.
        effective_sizes: only from ``smc``: the effective number of particles after each step, before
            resampling. It is 1 / sum(w^2) over the particles' shares w of the total weight: N if all
            weights are equal, 1 if one particle has all the weight, 0 if no weight is left.
        valid_mass: only from ``rejection``: bounds for the probability that a text is valid.
        votes: only from ``vote``: the number of texts for each answer, the most frequent first.
        answer_forms: only from ``vote``: for each answer its spellings and their counts.
    """

    hypotheses: list[Hypothesis]
    stats: SearchStats
    tree: SearchNode = field(repr=False)
    log_evidence: float | None = None
    effective_sizes: tuple[float, ...] = ()
    valid_mass: tuple[float, float] | None = None
    votes: Mapping[str | float, int] = field(default_factory=dict)
    answer_forms: Mapping[str | float, Mapping[str, int]] = field(default_factory=dict)

    @property
    def best(self) -> Hypothesis:
        """The best hypothesis.

        Raises:
            UsageError: the search found no text.
        """
        if not self.hypotheses:
            raise UsageError(
                "the search found no text",
                hint="raise max_tokens, allow shorter texts in the grammar, or use more particles",
            )
        return self.hypotheses[0]

    @property
    def answer(self) -> str | float | None:
        """The most frequent answer of a ``vote``; None if no text has one, and for other searches."""
        return next(iter(self.votes), None)

    @property
    def text(self) -> str:
        """The text of the best hypothesis, or "" without one."""
        return self.hypotheses[0].text if self.hypotheses else ""

    def __repr__(self) -> str:
        n = len(self.hypotheses)
        best = f", best {self.best.score:.3f}: {reprlib.repr(self.text)}" if n else ""
        return f"<SearchResult {n} {'hypothesis' if n == 1 else 'hypotheses'}{best}>"

    def as_dict(self, *, tree: bool = False) -> dict[str, object]:
        """Return JSON types; with ``tree`` also the whole tree."""
        record: dict[str, object] = {
            "hypotheses": [hypothesis.as_dict() for hypothesis in self.hypotheses],
            "stats": self.stats.as_dict(),
        }
        if self.log_evidence is not None:
            record["log_evidence"] = self.log_evidence
            record["effective_sizes"] = list(self.effective_sizes)
        if self.valid_mass is not None:
            record["valid_mass"] = list(self.valid_mass)
        if self.votes:
            record["votes"] = {str(name): n for name, n in self.votes.items()}
            record["answer_forms"] = {str(name): dict(f) for name, f in self.answer_forms.items()}
        if tree:
            record["tree"] = self.tree.as_dict()
        return record
