"""Two models on one text: how far apart they are, token by token or by what their tokens have in common.

A is the base. Where the vocabularies are equal (but for ids at the end of one, which are cut and the rest
renormalised), distributions are compared over the whole vocabulary, in 64 bits. Where they are not, only
bits of the stretches between common boundaries can be compared.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Raw

from ..branch import Branch
from ..context import Context, TokenScore
from ..context.logits import LogitsRow
from ..model import Model
from ..sampling import SamplingParams
from ..sampling.sampler import Sampler
from .document import Number, short

__all__ = [
    "Place", "Spans", "compared", "mean_kl", "read_pair", "same_vocabulary", "spans",
    "vocabulary_hash", "write_pair",
]  # fmt: skip

_STRETCH = 32  # tokens that both models read in turn
_TOP = 10
_BITS = math.log2(math.e)


def same_vocabulary(a: Model, b: Model) -> bool:
    """Return whether all ids that both models have mean the same tokens."""
    report = a.compatibility(b)
    return a.vocab_type == b.vocab_type and report.first_difference is None


def vocabulary_hash(model: Model) -> str:
    """Return a hash of all tokens and their kinds."""
    found = hashlib.sha256()
    for token in range(model.n_vocab):
        text, is_control = model.entry(token)
        found.update(b"%d %d " % (len(text), is_control) + text)
    return found.hexdigest()[:16]


def mean_kl(data: Raw) -> tuple[float, float] | None:
    """Return the mean and the largest KL divergence of a comparison; None where there is none."""
    found = msgspec.json.decode(data, type=dict[str, object]).get("kl")
    known = [float(x) for x in found if x is not None] if isinstance(found, list) else []
    return (round(sum(known) / len(known), 5), round(max(known), 5)) if known else None


@dataclass(slots=True)
class Place:
    """What both models find of one token.

    Attributes:
        token: its id.
        score: A's rating of it, with the most probable tokens.
        kl, klr: KL(A, B) and KL(B, A), nats.
        other: B's rating.
        same: whether both find the same token most probable.
        draw: what B would draw there; None where that was not asked for.
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
) -> Place:
    """Compare the distributions of two rows, before ``token``."""
    n = min(len(row.array) for row in rows)
    log_a, log_b = (_log_probs(row, n) for row in rows)
    difference = log_a - log_b
    kl = float(np.sum(np.exp(log_a) * difference, where=log_a > -np.inf))
    klr = float(np.sum(np.exp(log_b) * -difference, where=log_b > -np.inf))
    a, b = (row.score(token, model, top) for row, model in zip(rows, models, strict=True))
    return Place(token, a, kl, klr, b, rows[0].best == rows[1].best, draw)


def _log_probs(row: LogitsRow, n: int) -> npt.NDArray[np.float64]:
    found = row.log_probs()
    if n == len(found):
        return found
    found = found[:n]
    found -= np.log(np.exp(found).sum())
    return found


def read_pair(
    pair: tuple[Context, Context],
    tokens: Sequence[int],
    start: int,
    params: SamplingParams | None,
    tell: Callable[[int, list[Place]], bool],
) -> None:
    """Let both models read a text; tell what they find of its tokens from ``start`` on.

    Args:
        pair: contexts of A and B.
        tokens: ids, of which at least the first one is not compared.
        start: where to begin, at least 1.
        params: settings with the seed for what B would draw; None = nothing is drawn.
        tell: called with a position and what was found from there on; a true result ends it.
    """
    models = pair[0].model, pair[1].model
    draws = None if params is None else Sampler(models[1], params, None)
    if draws is not None:
        draws.accept_prompt(tokens[:start])
    with Branch.start(pair[0], tokens[:start]) as a, Branch.start(pair[1], tokens[:start]) as b:
        last = [LogitsRow(branch.logits) for branch in (a, b)]
        for at in range(start, len(tokens), _STRETCH):
            part = list(tokens[at : at + _STRETCH])
            rows = [
                [row, *map(LogitsRow, branch.extend(part, logits="all"))]
                for row, branch in zip(last, (a, b), strict=True)
            ]
            found = []
            for i, token in enumerate(part):
                draw = None
                if draws is not None and params is not None:
                    draw = rows[1][i].draw(draws, params.seed or 0, at + i)
                    draws.accept(token)
                found.append(compared(models, (rows[0][i], rows[1][i]), token, draw))
            if tell(at, found):
                return
            last = [rows[0][-1], rows[1][-1]]


def write_pair(
    pair: tuple[Context, Context],
    tokens: Sequence[int],
    params: SamplingParams,
    max_tokens: int,
    writer: int,
    tell: Callable[[Place], bool],
    parted: Callable[[int], bool] | None = None,
) -> None:
    """Let one model write and the other read the same tokens in the same steps.

    Args:
        pair: contexts of A and B.
        tokens: the text before.
        params: settings, with the seed; both draw with it.
        max_tokens: the most tokens.
        writer: 0 = A writes, 1 = B does.
        tell: called with each token; a true result ends it.
        parted: called with each token that B writes by itself, from the first place on where it draws
            another one; a true result ends it. None = it goes on reading.
    """
    models = pair[0].model, pair[1].model
    with (
        Branch.start(pair[0], tokens, sampling=params) as a,
        Branch.start(pair[1], tokens, sampling=params) as b,
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
            if tell(compared(models, rows, chosen.token, drawn[1].token)):
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


@dataclass
class Spans:
    """Stretches of a text between the boundaries that two tokenizers have in common.

    Attributes:
        spans: of each: its tokens of A (from, to), its bytes, the bits under A and B (None where a model
            does not rate its first token), and whether the next texts agree where it ends.
    """

    spans: list[tuple[int, int, int, int, Number, Number, bool | None]] = field(
        default_factory=list
    )

    @property
    def totals(self) -> dict[str, Number]:
        """Bytes, bits and bits per byte of all spans that both models rate."""
        known = [(e - s, a, b) for _, _, s, e, a, b, _ in self.spans if None not in (a, b)]
        n = sum(size for size, _, _ in known)
        bits = [sum(float(each[i] or 0) for each in known) for i in (1, 2)]
        per = [short(x / n) if n else None for x in bits]
        return {
            "bytes": n, "bitsA": short(bits[0]), "bitsB": short(bits[1]), "bpbA": per[0],
            "bpbB": per[1],
        }  # fmt: skip


def spans(pair: tuple[Context, Context], tokens: Sequence[int]) -> Spans:
    """Compare two models with different tokenizers on a text, given as tokens of A."""
    model_a, model_b = pair[0].model, pair[1].model
    data = b"".join(map(model_a.piece, tokens))
    sides = []
    for ctx, ids in ((pair[0], [*tokens]), (pair[1], model_b.prompt_tokens(_text(data)))):
        ids = ids[: ctx.n_ctx_seq]  # what has no room is behind the last common boundary
        pieces = [ctx.model.piece(token) for token in ids]
        ends = [*accumulate(map(len, pieces))]
        sides.append((ids, ends, _rated(ctx, ids), ctx.model))
    common = sorted(set(sides[0][1]) & set(sides[1][1]))
    cuts = [list(_cuts(ends, common)) for _, ends, _, _ in sides]
    found = Spans()
    start = 0
    for end, (a0, a1), (b0, b1) in zip(common, *cuts, strict=True):
        if end > start:
            pairs = [*zip(sides, ((a0, a1), (b0, b1)), strict=True)]
            bits = [_bits(rated[i:j]) for (_, _, rated, _), (i, j) in pairs]
            tops = [_next(rated, j, model) for (_, _, rated, model), (_, j) in pairs]
            agree = None
            if tops[0] and tops[1]:
                agree = tops[0].startswith(tops[1]) or tops[1].startswith(tops[0])
            found.spans.append((a0, a1, start, end, *bits, agree))
        start = end
    return found


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _cuts(ends: Sequence[int], common: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield which tokens lie between each two common boundaries."""
    i = 0
    for boundary in common:
        j = i
        while j < len(ends) and ends[j] <= boundary:
            j += 1
        yield i, j
        i = j


def _rated(ctx: Context, ids: Sequence[int]) -> list[TokenScore | None]:
    with Branch.start(ctx, ids[:1]) as branch:
        return [None, *(branch.score(ids[1:], 1) if len(ids) > 1 else [])]


def _bits(rated: Sequence[TokenScore | None]) -> Number:
    known = [one.logprob for one in rated if one is not None]
    return short(-sum(known) * _BITS) if len(known) == len(rated) else None


def _next(rated: Sequence[TokenScore | None], at: int, model: Model) -> bytes:
    one = rated[at] if at < len(rated) else None
    return b"" if one is None else model.piece(one.alternatives[0].token)
