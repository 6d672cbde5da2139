"""Perplexity of a text, as llama-perplexity computes it, and reading texts in chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from ..arguments import whole
from ..branch.scorer import read_alone
from ..context import Context
from ..context.context import text_context
from ..context.logits import LogitsRow
from ..errors import CacheFullError, ConfigError
from ..model import Model, TokenIds, token_list

Floats = npt.NDArray[np.float64]
# Called with the index of a token in its chunk, the next token, and the logits for that token, which are
# valid until it returns. Its result is kept.
Value = Callable[[int, int, LogitsRow], float | tuple[float, ...]]


class Uncertain(NamedTuple):
    """A value and its standard error."""

    value: float
    stderr: float


@dataclass(frozen=True)
class Chunked:
    """The result of reading a text in chunks, or of the chunks that are done.

    Attributes:
        window: tokens of a chunk.
        n_chunks: how many chunks are read in all.
        rows: for each finished chunk the numbers of its scored tokens, float64.
    """

    window: int
    n_chunks: int
    rows: list[Floats] = field(default_factory=list, repr=False)

    _SHAPE: ClassVar[tuple[int, ...]]  # the shape of a token's numbers

    @property
    def n_done(self) -> int:
        """The number of finished chunks."""
        return len(self.rows)

    @property
    def n_tokens(self) -> int:
        """The number of tokens scored so far."""
        return sum(map(len, self.rows))

    def read(
        self,
        ctx: Context,
        chunks: Sequence[list[int]],
        value: Value,
        progress: Callable[[Self], None] | None = None,
    ) -> Self:
        """Read chunks and score the second half of each except its first token; return this object.

        Args:
            ctx: a context that a chunk fits into, see `check_room`. Its other branches are not touched.
            chunks: token ids, ``window`` each.
            value: called for each scored token. The order of chunks in one decode is not defined.
            progress: called after each decode.
        """
        first = self.window // 2
        while (low := self.n_done) < len(chunks):
            n = min(ctx.n_seq_free, min(ctx.usage().cells_free, ctx.n_batch) // self.window)
            # Results in f16 depend on which cells a text has.
            n = max(1, n) if ctx.kv_cache.is_placement_exact else 1
            group = chunks[low : low + n]
            rows = np.empty((len(group), self.window - 1 - first, *self._SHAPE))

            def show(
                text: int, i: int, row: LogitsRow, low: int = low, rows: Floats = rows
            ) -> None:
                rows[text, i - 1 - first] = value(i - 1, chunks[low + text][i], row)

            read_alone(ctx, group, first + 1, show)
            self.rows.extend(rows)
            if progress is not None:
                progress(self)
        return self


@dataclass(frozen=True)
class Perplexity(Chunked):
    """The perplexity of a text, or of the part measured so far.

    ``rows`` has -log p of each token, nats.
    """

    _SHAPE = ()

    @property
    def value(self) -> float:
        """The perplexity: exp of the mean loss; NaN without a token, infinite if it overflows."""
        return self._estimate.value

    @property
    def stderr(self) -> float:
        """The standard error of ``value`` in llama-perplexity: ``value`` x the mean loss's."""
        return self._estimate.stderr

    @property
    def _estimate(self) -> Uncertain:
        return exp(mean(np.concatenate(self.rows) if self.rows else np.empty(0)))


def perplexity(
    ctx: Context,
    text: str | TokenIds,
    window: int = 512,
    *,
    chunks: int | None = None,
    progress: Callable[[Perplexity], None] | None = None,
) -> Perplexity:
    """Return the perplexity of a text as llama-perplexity computes it.

    The tokens are cut into chunks of ``window`` tokens, and each chunk is read by itself. If the model
    begins texts with BOS, it replaces the first token of each chunk. The second half of a chunk is
    scored, except for its first token. llama-perplexity uses f16 K/V; to compare, open the context with
    ``kv_type="f16"``. At most ``n_outputs_max`` rows of logits are in memory at a time.

    Args:
        ctx: a context that a window fits into; its other branches are not touched.
        text: text, in which control tokens stay text, or token ids; at least two windows long.
        window: tokens per chunk, at least 4.
        chunks: the most chunks; None = all.
        progress: called after each decode with the result so far, which you can keep if it is
            interrupted.

    Raises:
        ConfigError: the text is too short. CacheFullError: the context is smaller than a window.
        TokenizeError, DecodeError.
    """
    parts = text_chunks(ctx, text, window, chunks)
    result = Perplexity(len(parts[0]), len(parts))
    return result.read(ctx, with_bos(ctx.model, parts), _loss, progress)


def _loss(_i: int, token: int, row: LogitsRow) -> float:
    """Return -log p of a token, nats."""
    return -row.logprob(token)


def text_chunks(
    ctx: Context, text: str | TokenIds, window: int, most: int | None
) -> list[list[int]]:
    """Return at most ``most`` chunks of a text's tokens; control tokens stay text.

    Raises:
        ConfigError: the text has fewer than two chunks.
        CacheFullError: a window does not fit into ``ctx``.
        TokenizeError: an id that is not in the vocabulary.
    """
    model, window = text_context("ctx", ctx).model, whole("window", window, 4)
    if window - 1 > ctx.n_ctx_seq:
        raise CacheFullError(
            f"a window of {window} tokens does not fit into a context of {ctx.n_ctx_seq}",
            hint="open the context with a larger n_ctx, or choose a smaller window",
        )
    if isinstance(text, str):
        tokens = model.tokenize(text) if text else []
    else:
        tokens = token_list(text)
        model.check_tokens(tokens)
    if not tokens:
        raise ConfigError("the text is empty: there is nothing to score")
    n = len(tokens) // window
    if n < 2:
        raise ConfigError(
            f"a text of {len(tokens)} tokens is too short: a window of {window} needs {2 * window}",
            hint="use a longer text, or a smaller window",
        )
    n = n if most is None else min(n, whole("chunks", most, 1))
    return [tokens[i * window : (i + 1) * window] for i in range(n)]


def with_bos(model: Model, chunks: Sequence[list[int]]) -> Sequence[list[int]]:
    """Return chunks whose first token is replaced by BOS, if the model begins every text with it."""
    begin = model.tokenize("")[:1]
    return [[*begin, *chunk[1:]] for chunk in chunks] if begin == [model.bos] else chunks


def mean(values: Floats) -> Uncertain:
    """Return the mean; NaN without a value, and its error is NaN with fewer than two."""
    n = len(values)
    if not n:
        return Uncertain(math.nan, math.nan)
    average = float(values.mean())
    variance = max(0.0, float(np.mean(values**2)) - average**2)
    return Uncertain(average, math.sqrt(variance / (n - 1)) if n > 1 else math.nan)


def exp(log: Uncertain) -> Uncertain:
    """Return e to the power ``log``; infinite if it overflows."""
    try:
        value = math.exp(log.value)
    except OverflowError:
        value = math.inf
    return Uncertain(value, value * log.stderr)
