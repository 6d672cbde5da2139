"""Compare a model with saved log-probabilities of another one: llama.cpp's ``--kl-divergence``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..context import Context
from ..context.context import text_context
from ..context.logits import LogitsRow
from ..errors import VocabularyMismatchError
from .logits_file import Coded, LogitsFile
from .perplexity import Chunked, Floats, check_room, exp, with_bos

_FLOOR = np.float32(-16.0)  # nats: less probable tokens of the base are left out of the sum
KL_FRACTIONS = (1.0, 0.999, 0.99, 0.95, 0.9, 0.5, 0.1, 0.05, 0.01, 0.001, 0.0)
P_FRACTIONS = (1.0, 0.999, 0.99, 0.95, 0.9, 0.75, 0.5, 0.25, 0.1, 0.05, 0.01, 0.001, 0.0)


class Uncertain(NamedTuple):
    """A value and its standard error."""

    value: float
    stderr: float


class KLStatistics(NamedTuple):
    """The statistics of llama-perplexity's KL divergence, with standard errors.

    Attributes:
        mean: the mean KL divergence of the base's distribution from the model's, nats.
        perplexity, base_perplexity: the perplexities of the model and of the base.
        log_ratio, ratio, difference: the logarithm of the ratio, the ratio and the difference of the two
            perplexities.
        p_change, p_change_rms: the mean change of the probability of the token in the text, and the root
            of its mean square.
        same_top: the share of tokens at which both have the same most probable token.
        correlation: the correlation of the losses, -1 to 1.
    """

    mean: Uncertain
    perplexity: Uncertain
    base_perplexity: Uncertain
    log_ratio: Uncertain
    ratio: Uncertain
    difference: Uncertain
    p_change: Uncertain
    p_change_rms: Uncertain
    same_top: Uncertain
    correlation: float


@dataclass(frozen=True)
class KLDivergence(Chunked):
    """How a model's next-token distributions differ from saved ones, in the text or in a part of it.

    ``rows`` has five numbers for each token: the loss -log p of the token in the text under the model and
    under the base, KL(base || model), all nats; the change of that token's probability; and 1 if both
    have the same most probable token, else 0.
    """

    _KEY = "rows"
    _SHAPE = (5,)

    def _columns(self) -> Floats:
        return np.concatenate(self.rows).T if self.rows else np.empty((5, 0))

    @property
    def statistics(self) -> KLStatistics:
        """The statistics so far, computed at each call; NaN without a token."""
        loss, base, kl, change, same_top = self._columns()
        n, a, b, covariance = len(loss), _mean(loss), _mean(base), 0.0
        if n >= 10:
            covariance = float(np.mean(loss * base) - loss.mean() * base.mean()) / (n - 1)
        p, p_base, log_ratio = _exp(a), _exp(b), _difference(a, b, covariance)
        square, share, product = _mean(change**2), _mean(same_top).value, a.stderr * b.stderr
        root = math.sqrt(square.value)
        share_stderr = math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else math.nan
        return KLStatistics(
            mean=_mean(kl),
            perplexity=p,
            base_perplexity=p_base,
            log_ratio=log_ratio,
            ratio=_exp(log_ratio),
            difference=_difference(p, p_base, p.value * p_base.value * covariance),
            p_change=_mean(change),
            p_change_rms=Uncertain(root, 0.5 / root * square.stderr if root else 0.0),
            same_top=Uncertain(share, share_stderr),
            correlation=covariance / product if product else math.nan,
        )

    def percentile(self, fraction: float) -> float:
        """Return the KL divergence that ``fraction`` of the tokens do not exceed."""
        return self._quantile(2, fraction)

    def p_change_percentile(self, fraction: float) -> float:
        """Return the change of probability that ``fraction`` of the tokens do not exceed."""
        return self._quantile(3, fraction)

    def _quantile(self, column: int, fraction: float) -> float:
        values = self._columns()[column]
        if not len(values):
            return math.nan
        ordered = np.sort(values.astype(np.float32))
        # In 32 bits like llama-perplexity, which rounds the index.
        place = np.float32(min(1.0, max(0.0, fraction))) * np.float32(len(values) - 1)
        below = int(place)
        part = place - np.float32(below)
        above = ordered[min(below + 1, len(values) - 1)]
        return float((np.float32(1) - part) * ordered[below] + part * above)

    def as_dict(self) -> dict[str, object]:
        """Return JSON types, with every statistic."""
        report: dict[str, object] = {
            name: value._asdict() if isinstance(value, Uncertain) else value
            for name, value in self.statistics._asdict().items()
        }
        report["kl_percentiles"] = {f"{100 * f:g}": self.percentile(f) for f in KL_FRACTIONS}
        report["p_change_percentiles"] = {
            f"{100 * f:g}": self.p_change_percentile(f) for f in P_FRACTIONS
        }
        return {**report, **super().as_dict()}


def divergence(
    ctx: Context,
    path: str | os.PathLike[str],
    *,
    progress: Callable[[KLDivergence], None] | None = None,
) -> KLDivergence:
    """Compare a model with saved log-probabilities: KL divergence, perplexities, agreement.

    The file contains the text. It is read row by row.

    Args:
        ctx: a context of the model, which has the base's vocabulary; the file's window must fit into it.
        path: a file of `perplexity` (``save_to``) or of ``llama-perplexity --kl-divergence-base``.
        progress: called after each decode with the result so far, which you can keep if it is
            interrupted.

    Raises:
        ConfigError: the file cannot be read, is of another kind, or is incomplete.
        VocabularyMismatchError: it is from a model with another vocabulary. CacheFullError, DecodeError.
    """
    text_context("ctx", ctx)
    with LogitsFile.open(path) as file:
        if file.n_vocab != ctx.n_vocab:
            raise VocabularyMismatchError(
                f"{path} is from a model with {file.n_vocab} tokens, {ctx.model.name} has {ctx.n_vocab}",
                hint="compare quantisations of one model, or models with one vocabulary",
            )
        check_room(ctx, file.window)
        flat = [token for chunk in file.chunks for token in chunk]
        ctx.model.check_tokens(flat)
        result = KLDivergence.begun(ctx, flat, file.window, len(file.chunks))

        def compare(chunk: int, i: int, token: int, row: LogitsRow) -> tuple[float, ...]:
            return _compared(row, file.read(chunk, i), token)

        return result.read(ctx, with_bos(ctx.model, file.chunks), compare, progress)


def _compared(row: LogitsRow, base: Coded, token: int) -> tuple[float, ...]:
    """Return the numbers of one token, with llama-perplexity's arithmetic: 32 bits, sums in 64."""
    logits, codes = row.array, base.codes
    largest = np.float32(logits.max())
    log_total = np.float32(np.log(np.exp(logits - largest).sum(dtype=np.float64)))
    loss = np.float32(largest + log_total - logits[token])
    logs = base.scale * codes.astype(np.float32) + base.smallest
    terms = np.exp(logs) * (logs - logits + np.float32(largest + log_total))
    kl = float(terms.sum(dtype=np.float64, where=logs > _FLOOR))
    change = np.exp(-loss) - np.exp(logs[token])
    same_top = int(logits.argmax()) == int(codes.argmax())
    return float(loss), float(-logs[token]), kl, float(change), float(same_top)


def _mean(values: Floats) -> Uncertain:
    n = len(values)
    if not n:
        return Uncertain(math.nan, math.nan)
    mean = float(values.mean())
    variance = float(np.mean(values**2)) - mean * mean
    return Uncertain(mean, math.sqrt(variance / (n - 1)) if variance > 0 and n > 10 else 0.0)


def _difference(a: Uncertain, b: Uncertain, covariance: float) -> Uncertain:
    variance = a.stderr**2 + b.stderr**2 - 2 * covariance
    return Uncertain(a.value - b.value, math.sqrt(max(0.0, variance)))


def _exp(log: Uncertain) -> Uncertain:
    value = exp(log.value)
    return Uncertain(value, value * log.stderr)
