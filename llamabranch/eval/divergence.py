"""Compare two models on one text: the numbers of llama.cpp's ``--kl-divergence``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..context import Context
from ..context.context import text_context
from ..context.logits import LogitsRow
from ..errors import VocabularyMismatchError
from ..model import Model, TokenIds
from .perplexity import Chunked, Floats, Perplexity, Uncertain, exp, mean, text_chunks, with_bos

_FLOOR = np.float32(-16.0)  # nats: less probable tokens of the base are left out of the sum


class KLStatistics(NamedTuple):
    """The statistics of llama-perplexity's KL divergence, with standard errors.

    Attributes:
        mean: the mean KL divergence of the base's distribution from the model's, nats.
        perplexity, base_perplexity: the perplexities of the model and of the base.
        p_change_rms: the root mean square of the change in the probability of the text's token.
        same_top: the share of tokens at which both have the same most probable token.
    """

    mean: Uncertain
    perplexity: Uncertain
    base_perplexity: Uncertain
    p_change_rms: Uncertain
    same_top: Uncertain


@dataclass(frozen=True)
class KLDivergence(Chunked):
    """How a model's next-token distributions differ from a base's, in the text or in a part of it.

    ``rows`` has five numbers for each token: the loss -log p of the token in the text under the model and
    under the base, KL(base || model), all nats; the change of that token's probability; and 1 if both
    have the same most probable token, else 0.
    """

    _SHAPE = (5,)

    def _columns(self) -> Floats:
        return np.concatenate(self.rows).T if self.rows else np.empty((5, 0))

    @property
    def statistics(self) -> KLStatistics:
        """The statistics so far, computed at each call; NaN without a token."""
        loss, base, kl, change, same_top = self._columns()
        n, square, share = len(loss), mean(change**2), mean(same_top).value
        root = math.sqrt(square.value)
        share_stderr = math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else math.nan
        return KLStatistics(
            mean=mean(kl),
            perplexity=exp(mean(loss)),
            base_perplexity=exp(mean(base)),
            p_change_rms=Uncertain(root, 0.5 / root * square.stderr if root else 0.0),
            same_top=Uncertain(share, share_stderr),
        )


def divergence(
    base: Context,
    ctx: Context,
    text: str | TokenIds,
    window: int = 512,
    *,
    chunks: int | None = None,
    progress: Callable[[KLDivergence], None] | None = None,
) -> KLDivergence:
    """Compare a model with a base model on a text: KL divergence, perplexities, agreement.

    The base reads each chunk first, and its logits for half of it stay in memory. Then the model reads
    the chunk.

    Args:
        base, ctx: contexts of the two models, which a window fits into. Their other branches are not
            touched.
        text, window, chunks: as for `perplexity`.
        progress: called after each chunk with the result so far, which you can keep if it is
            interrupted.

    Raises:
        VocabularyMismatchError: the models have different vocabularies.
        ConfigError: the text is too short. CacheFullError, TokenizeError, DecodeError.
    """
    models = text_context("base", base).model, text_context("ctx", ctx).model
    _check_vocabularies(*models)
    parts = text_chunks(base, text, window, chunks)
    text_chunks(ctx, parts[0] * 2, window, 1)  # raises if the model has no room for a window
    result = KLDivergence(len(parts[0]), len(parts))
    first = result.window // 2
    rows: list[npt.NDArray[np.float32]] = []

    def hold(_i: int, _token: int, row: LogitsRow) -> float:
        rows.append(row.array.copy())
        return 0.0

    def compare(i: int, token: int, row: LogitsRow) -> tuple[float, ...]:
        return _compared(row.array, rows[i - first], token)

    for part in with_bos(models[0], parts):
        rows.clear()
        Perplexity(result.window, 1).read(base, [part], hold)
        result.rows.extend(KLDivergence(result.window, 1).read(ctx, [part], compare).rows)
        if progress is not None:
            progress(result)
    return result


def _check_vocabularies(base: Model, model: Model) -> None:
    difference = base.compatibility(model).first_difference
    if (
        base.n_vocab != model.n_vocab
        or base.vocab_type != model.vocab_type
        or difference is not None
    ):
        raise VocabularyMismatchError(
            f"{model.name} and {base.name} have different vocabularies, so their distributions "
            "cannot be compared",
            hint="compare quantisations of one model, or models with one vocabulary",
        )


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return log-probabilities in 32 bits, summed in 64, as llama-perplexity computes them."""
    largest = np.float32(logits.max())
    total = np.float32(np.log(np.exp(logits - largest).sum(dtype=np.float64)))
    log_probs: npt.NDArray[np.float32] = logits - np.float32(largest + total)
    return log_probs


def _compared(
    logits: npt.NDArray[np.float32], base: npt.NDArray[np.float32], token: int
) -> tuple[float, ...]:
    """Return the five numbers of one token."""
    ours, theirs = _log_softmax(logits), _log_softmax(base)
    terms = np.exp(theirs) * (theirs - ours)
    kl = float(terms.sum(dtype=np.float64, where=theirs > _FLOOR))
    change = math.exp(ours[token]) - math.exp(theirs[token])
    same_top = int(ours.argmax()) == int(theirs.argmax())
    return float(-ours[token]), float(-theirs[token]), kl, change, float(same_top)
