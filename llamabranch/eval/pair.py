"""Compare two models on one text, token by token, or by stretches if their tokenizers differ.

A is the base. If the vocabularies are equal, distributions are compared over the whole vocabulary, in 64
bits. (One may have additional ids at its end; these are cut, and the rest is renormalised.) If they
differ, only the bits of stretches between common boundaries can be compared.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import Raw

from ..branch import Branch
from ..context import Context, TokenScore
from ..context.logits import LogitsRow
from ..context.progress import OnPromptProgress
from ..model import Model
from ..sampling import SamplingParams
from ..sampling.sampler import Sampler

__all__ = [
    "Number", "PairScore", "Span", "compared", "mean_kl", "read_pair", "same_vocabulary", "short",
    "spans", "totals", "write_pair",
]  # fmt: skip

Number = float | None
_STRETCH = 32  # tokens that the models read in turn
_TOP = 10


def short(x: float) -> Number:
    """Return a number as its shortest float32 decimal; None for NaN and infinity."""
    return float(str(np.float32(x))) if math.isfinite(x) else None


def same_vocabulary(a: Model, b: Model) -> bool:
    """Return whether all ids that both models have mean the same tokens."""
    report = a.compatibility(b)
    return a.vocab_type == b.vocab_type and report.first_difference is None


def mean_kl(data: Raw) -> tuple[float, float] | None:
    """Return the mean and the largest KL divergence of a comparison; None if nothing was compared."""
    kls = msgspec.json.decode(data, type=dict[str, object]).get("kl")
    known = [float(x) for x in kls if x is not None] if isinstance(kls, list) else []
    return (round(sum(known) / len(known), 5), round(max(known), 5)) if known else None


class PairScore(NamedTuple):
    """The figures of one token under both models.

    Attributes:
        token: its id.
        score: A's score, with the most probable tokens.
        kl, klr: KL(A, B) and KL(B, A), nats.
        other: B's score.
        same: whether both have the same most probable token.
        draw: the token that B would draw at this place; None if nothing is drawn.
    """

    token: int
    score: TokenScore
    kl: float
    klr: float
    other: TokenScore
    same: bool
    draw: int | None = None


def compared(
    models: tuple[Model, Model],
    rows: tuple[LogitsRow, LogitsRow],
    token: int,
    draw: int | None,
    top: int = _TOP,
) -> PairScore:
    """Compare two rows of logits, which are the two models' distributions of ``token``."""
    n = min(len(row.array) for row in rows)
    logs = [row.log_probs()[:n] for row in rows]
    if len(rows[0].array) != len(rows[1].array):
        logs = [log - np.log(np.exp(log).sum()) for log in logs]
    difference = logs[0] - logs[1]
    kl, klr = (
        float(np.sum(np.exp(log) * change, where=log > -np.inf))
        for log, change in zip(logs, (difference, -difference), strict=True)
    )
    a, b = (row.score(token, model, top) for row, model in zip(rows, models, strict=True))
    return PairScore(token, a, kl, klr, b, rows[0].best == rows[1].best, draw)


def read_pair(
    pair: tuple[Context, Context],
    tokens: Sequence[int],
    start: int,
    params: SamplingParams | None,
    report: Callable[[int, list[PairScore]], bool],
    on_prompt_progress: OnPromptProgress | None = None,
) -> None:
    """Let both models read a text; report the figures of its tokens, beginning at ``start``.

    Args:
        pair: contexts of A and B.
        tokens: token ids. The first one is never compared.
        start: the first token to compare, at least 1.
        params: settings with the seed with which B would draw; None = nothing is drawn.
        report: called with a position and the results that begin there; if it returns true, the reading
            ends.
        on_prompt_progress: called while B reads the first ``start`` tokens.
    """
    models = pair[0].model, pair[1].model
    draws = None if params is None else Sampler(models[1], params, None)
    seed = 0 if params is None else params.drawn_seed(0)
    if draws is not None:
        draws.accept_prompt(tokens[:start])
    with (
        Branch.start(pair[0], tokens[:start]) as a,
        Branch.start(pair[1], tokens[:start], on_prompt_progress=on_prompt_progress) as b,
    ):
        last = [LogitsRow(branch.logits) for branch in (a, b)]
        for at in range(start, len(tokens), _STRETCH):
            part = list(tokens[at : at + _STRETCH])
            rows = [
                [row, *map(LogitsRow, branch.extend(part, logits="all"))]
                for row, branch in zip(last, (a, b), strict=True)
            ]
            scores = []
            for i, token in enumerate(part):
                draw = None
                if draws is not None and params is not None:
                    draw = rows[1][i].draw(draws, seed, at + i)
                    draws.accept(token)
                scores.append(compared(models, (rows[0][i], rows[1][i]), token, draw))
            if report(at, scores):
                return
            last = [rows[0][-1], rows[1][-1]]


def write_pair(
    pair: tuple[Context, Context],
    tokens: Sequence[int],
    params: SamplingParams,
    max_tokens: int,
    writer: int,
    report: Callable[[PairScore], bool],
    parted: Callable[[int], bool] | None = None,
    on_prompt_progress: OnPromptProgress | None = None,
) -> None:
    """Let one model write and the other read each of its tokens, in lockstep.

    Args:
        pair: contexts of A and B.
        tokens: the text before.
        params: settings, with the seed; both draw with it.
        max_tokens: the most tokens.
        writer: 0 = A writes, 1 = B does.
        report: called with each token; if it returns true, the writing ends.
        parted: called with each token that B writes by itself, after the first place where it draws
            another token than A; if it returns true, the writing ends. None = B only reads.
        on_prompt_progress: called while B reads ``tokens``.
    """
    models = pair[0].model, pair[1].model
    with (
        Branch.start(pair[0], tokens, sampling=params) as a,
        Branch.start(pair[1], tokens, sampling=params, on_prompt_progress=on_prompt_progress) as b,
    ):
        both = a, b
        other: Branch | None = None
        for n_left in range(max_tokens, 0, -1):
            drawn = a.produce(), b.produce()
            chosen = drawn[writer]
            if parted is not None and other is None and drawn[0].token != drawn[1].token:
                other = b.fork()
                n_other = n_left
            if chosen.is_stop:
                break
            rows = LogitsRow(a.logits), LogitsRow(b.logits)
            if report(compared(models, rows, chosen.token, drawn[1].token)):
                break
            for branch in both:
                branch.extend([chosen.token])
        if other is not None and parted is not None:
            with other:
                for _ in range(n_other):
                    step = other.produce()
                    if step.is_stop or parted(step.token):
                        break
                    other.commit(step.token)


class Span(NamedTuple):
    """A stretch of a text between boundaries that two tokenizers have in common.

    Attributes:
        tokens: the range of A's tokens.
        at, end: the range of bytes.
        bits: the bits under A and B; None if a model does not score its first token.
        agree: whether the most probable next texts at its end agree; None if one is not known.
    """

    tokens: tuple[int, int]
    at: int
    end: int
    bits: tuple[Number, Number]
    agree: bool | None


def totals(parts: Sequence[Span]) -> dict[str, Number]:
    """Return the bytes and bits that both models score, bits per byte, and the share that agrees."""
    known = [span for span in parts if None not in span.bits]
    n = sum(span.end - span.at for span in known)
    sums: dict[str, Number] = {"bytes": n}
    for name, i in (("A", 0), ("B", 1)):
        bits = math.fsum(span.bits[i] or 0.0 for span in known)
        sums |= {f"bits{name}": short(bits), f"bpb{name}": short(bits / n) if n else None}
    agree = [span.agree for span in parts if span.agree is not None]
    return sums | {"agreement": short(sum(agree) / len(agree)) if agree else None}


def spans(pair: tuple[Context, Context], tokens: Sequence[int]) -> list[Span]:
    """Compare two models with different tokenizers on a text, which is passed as tokens of A."""
    text = b"".join(map(pair[0].model.piece, tokens)).decode("utf-8", "replace")
    sides = [_Side(pair[0], tokens), _Side(pair[1], pair[1].model.prompt_tokens(text))]
    stretches: list[Span] = []
    start, before = 0, [0, 0]
    for end in sorted({*sides[0].ends} & {*sides[1].ends}):
        after = [bisect_right(side.ends, end) for side in sides]
        if end > start:
            a, b = (side.bits(i, j) for side, i, j in zip(sides, before, after, strict=True))
            tops = [side.next(j) for side, j in zip(sides, after, strict=True)]
            agree = tops[0].startswith(tops[1]) or tops[1].startswith(tops[0])
            whole = (before[0], after[0])
            stretches.append(Span(whole, start, end, (a, b), agree if all(tops) else None))
        start, before = end, after
    return stretches


class _Side:
    """A text under one model; the part that does not fit is cut at a common boundary."""

    def __init__(self, ctx: Context, ids: Sequence[int]) -> None:
        ids = ids[: ctx.n_ctx_seq]
        self._model = ctx.model
        self.ends = [*accumulate(len(ctx.model.piece(token)) for token in ids)]
        with Branch.start(ctx, ids[:1]) as branch:
            scores = branch.score(ids[1:], 1) if len(ids) > 1 else []
        self._scores: list[TokenScore | None] = [None, *scores]

    def bits(self, i: int, j: int) -> Number:
        known = [score.logprob for score in self._scores[i:j] if score is not None]
        return short(-math.fsum(known) / math.log(2)) if len(known) == j - i else None

    def next(self, at: int) -> bytes:
        score = self._scores[at] if at < len(self._scores) else None
        return b"" if score is None else self._model.piece(score.alternatives[0].token)
