"""Two models on one text, in llama-perplexity's chunks: a report of how much they differ.

The first model reads a chunk and its rows are kept in memory, then the second one reads it. So no file of
logits is needed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..branch import Branch
from ..context import Context
from ..context.logits import LogitsRow
from ..model import Model
from ..sampling import SamplingParams
from .divergence import KLDivergence
from .pair import Number, Span, compared, same_vocabulary, spans, totals
from .perplexity import Perplexity, text_chunks, with_bos

__all__ = ["Comparison", "Token", "compare_models"]

_N_WORST = 10
_N_FORKS, _FORK_TOKENS, _FORK_PROMPT = 8, 64, 128
_EARLY = 16  # tokens; greedy texts that part sooner clearly differ
_AROUND = 8  # tokens reported before and after a token


class Token(NamedTuple):
    """A token of the text, and its figures under both models; ``kind`` as in `Comparison.by_kind`."""

    kl: float
    klr: float
    quarter: int
    kind: str
    before: str
    text: str
    after: str
    top_a: str
    top_b: str


@dataclass
class Comparison:
    """The result of a comparison, or of the part that is done.

    Attributes:
        models: name, file type, bytes and K/V type of A and B.
        divergence: llama-perplexity's numbers, with A as the base; None for different tokenizers.
        tokens: all tokens that were compared.
        forks: for each place the number of tokens that the greedy texts of both models have in common.
        n_forks: the number of places.
        spans: for different tokenizers: the stretches of all chunks that can be compared.
    """

    models: list[dict[str, object]]
    n_chunks: int = 0
    divergence: KLDivergence | None = None
    tokens: list[Token] = field(default_factory=list)
    forks: list[int] = field(default_factory=list)
    n_forks: int = 0
    spans: list[Span] = field(default_factory=list)

    @property
    def worst(self) -> list[Token]:
        """The tokens with the largest divergence."""
        return sorted(self.tokens, key=lambda token: -token.kl)[:_N_WORST]

    @property
    def median_fork(self) -> float | None:
        """The median of the forks."""
        return statistics.median(self.forks) if self.forks else None

    @property
    def reverse(self) -> float:
        """The mean of KL(B, A), nats."""
        return _mean([token.klr for token in self.tokens])

    def by(self, key: Callable[[Token], object]) -> dict[str, tuple[int, float]]:
        """Return the number of tokens and their mean divergence, by ``key``."""
        groups: dict[str, list[float]] = {}
        for token in self.tokens:
            groups.setdefault(str(key(token)), []).append(token.kl)
        return {name: (len(kls), _mean(kls)) for name, kls in sorted(groups.items())}

    @property
    def totals(self) -> dict[str, Number]:
        """The totals for different tokenizers."""
        return totals(self.spans)

    @property
    def advice(self) -> str:
        """One sentence about what the divergence means for someone who uses B instead of A."""
        if self.divergence is None:
            return (
                "the models have different tokenizers: the model with fewer bits per byte "
                "predicts this text better"
            )
        stats = self.divergence.statistics
        mean, share_same = stats.mean.value, stats.same_top.value
        if mean == 0:
            return "both give the same distributions"
        if mean < 0.01 and share_same >= 0.9:
            if self.median_fork is not None and self.median_fork < _EARLY:
                return (
                    "the probabilities are close, but greedy texts part early: compare some answers"
                )
            return "the difference is hard to notice"
        if share_same < 0.9:
            return "greedy texts part after about a sentence: use B only if nothing larger fits"
        if mean < 0.1:
            return "the difference shows in some long texts"
        return "the difference shows: compare answers before you replace A by B"

    def as_dict(self) -> dict[str, object]:
        """Return JSON types."""
        report: dict[str, object] = {"models": self.models, "chunks": self.n_chunks}
        if self.divergence is None:
            return report | {"totals": self.totals, "advice": self.advice}
        numbers = {k: v for k, v in self.divergence.as_dict().items() if k != "rows"}
        return report | numbers | {
            "reverse_kl": self.reverse, "worst": [token._asdict() for token in self.worst],
            "by_quarter": self.by(lambda t: t.quarter), "by_kind": self.by(lambda t: t.kind),
            "forks": self.forks, "median_fork": self.median_fork,
            "advice": self.advice,
        }  # fmt: skip


def compare_models(
    a: Context,
    b: Context,
    text: str,
    window: int = 512,
    chunks: int | None = 8,
    *,
    progress: Callable[[Comparison], None] = lambda _: None,
) -> Comparison:
    """Compare B with A on a text.

    Args:
        a, b: contexts that a window fits into.
        text: the text, at least two windows long.
        window, chunks: as for `llamabranch.eval.perplexity`.
        progress: called after each chunk and after each comparison of greedy texts.

    Raises:
        ConfigError: the text is too short. CacheFullError, DecodeError.
    """
    tokens, parts = text_chunks(a, text, window, chunks)
    comparison = Comparison([_about(ctx) for ctx in (a, b)])
    if not same_vocabulary(a.model, b.model):
        for part in parts:
            comparison.spans += spans((a, b), part)
            comparison.n_chunks += 1
            progress(comparison)
        return comparison
    comparison.divergence = KLDivergence.begun(a, tokens, window, len(parts))
    for number, part in enumerate(with_bos(a.model, parts)):
        _read(comparison, (a, b), part, parts[number])
        progress(comparison)
    prompts = _places(parts)
    comparison.n_forks = len(prompts)
    room = min(a.n_ctx_seq, b.n_ctx_seq) - max(map(len, prompts))
    for prompt in prompts:
        progress(comparison)
        comparison.forks.append(_until_they_part((a, b), prompt, min(_FORK_TOKENS, room)))
    return comparison


def _places(parts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Return prompts from the text, as far apart as possible; no two end at the same token."""
    chosen = [i * len(parts) // _N_FORKS for i in range(_N_FORKS)]
    prompts = []
    for chunk in dict.fromkeys(chosen):
        part, n = parts[chunk], chosen.count(chunk)
        longest = min(_FORK_PROMPT, len(part) // 2)
        ends = sorted({max(1, len(part) * (i + 1) // (n + 1)) for i in range(n)})
        prompts += [part[max(0, end - longest) : end] for end in ends]
    return prompts


def _about(ctx: Context) -> dict[str, object]:
    model = ctx.model
    return {
        "name": model.name, "type": model.file_type, "bytes": model.size_bytes,
        "n_vocab": model.n_vocab, "kv_type": ctx.kv_type,
    }  # fmt: skip


def _read(
    comparison: Comparison,
    pair: tuple[Context, Context],
    part: list[int],
    tokens: list[int],
) -> None:
    """Let both models read a chunk, and record the figures of its second half."""
    a, b = pair
    first = len(part) // 2
    base: list[npt.NDArray[np.float32]] = []

    def hold(_chunk: int, _i: int, _token: int, row: LogitsRow) -> float:
        base.append(row.array.copy())
        return 0.0

    Perplexity(len(part), 1, "", "").read(a, [part], hold)

    def compare(_chunk: int, i: int, token: int, row: LogitsRow) -> tuple[float, ...]:
        place = compared((a.model, b.model), (LogitsRow(base[i - first]), row), token, None, top=1)
        score, other = place.score, place.other
        change = math.exp(other.logprob) - math.exp(score.logprob)
        numbers = -other.logprob, -score.logprob, place.kl, change, float(place.same)
        around = tokens[max(0, i + 1 - _AROUND) : i + 1], tokens[i + 2 : i + 2 + _AROUND]
        before, after = (_text(a.model, ids) for ids in around)
        tops = [_text(a.model, [s.alternatives[0].token]) for s in (score, other)]
        quarter = 1 + 4 * (i - first) // (len(part) - 1 - first)
        text = _text(a.model, [token])
        comparison.tokens.append(
            Token(numbers[2], place.klr, quarter, _kind(text), before, text, after, *tops)
        )
        return numbers

    numbers = KLDivergence(len(part), 1, "", "").read(b, [part], compare)
    if comparison.divergence is not None:
        comparison.divergence.rows.extend(numbers.rows)
    comparison.n_chunks += 1


def _until_they_part(pair: tuple[Context, Context], prompt: Sequence[int], n: int) -> int:
    """Generate greedily with both for at most ``n`` tokens; return how many tokens are equal."""
    greedy = SamplingParams(temperature=0.0, logprobs=False)
    with (
        Branch.start(pair[0], prompt, sampling=greedy) as a,
        Branch.start(pair[1], prompt, sampling=greedy) as b,
    ):
        n_same = 0
        for x, y in zip(a.generate(n), b.generate(n), strict=False):
            if x.token != y.token:
                break
            n_same += 1
        return n_same


def _text(model: Model, ids: Sequence[int]) -> str:
    return b"".join(map(model.piece, ids)).decode("utf-8", "replace")


def _kind(text: str) -> str:
    if "\n" in text:
        return "newline"
    bare = text.strip()
    if any(c.isdigit() for c in bare):
        return "digit"
    if bare and not any(c.isalnum() for c in bare):
        return "punctuation"
    return "word start" if text[:1].isspace() or not bare else "inside"


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
