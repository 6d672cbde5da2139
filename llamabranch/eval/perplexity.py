"""Perplexity of a text: llama-perplexity's number, and the strided one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from ..arguments import instance, whole
from ..context import Context
from ..errors import ConfigError
from ..model import TokenIds
from .chunks import Floats, Visit, about, check_same, read_chunks, text_tokens, with_bos

__all__ = ["Perplexity", "exp", "measure", "perplexity", "prepare", "strided_perplexity"]

Progress = Callable[["Perplexity"], None]
_SAME = ("method", "window", "text", "model")  # in a run that is continued


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of a text, or of as much of it as is done.

    Attributes:
        method: "chunked", llama-perplexity's, or "strided".
        window: tokens that the model sees at most.
        n_chunks: how many chunks the whole text has.
        losses: of each chunk that is done -log p of its scored tokens, nats, float64.
        text: a hash of the text's tokens.
        model: the fingerprint of the model, and the K/V type.
    """

    method: str
    window: int
    n_chunks: int
    text: str
    model: str
    losses: list[Floats] = field(default_factory=list)

    def __repr__(self) -> str:
        of = f"{self.n_done} of {self.n_chunks} chunks of {self.window} tokens"
        return f"<Perplexity {self.value:.4f} ± {self.stderr:.4f}, {self.method}, {of}>"

    @property
    def n_done(self) -> int:
        """How many chunks are done."""
        return len(self.losses)

    @property
    def n_tokens(self) -> int:
        """How many tokens are scored so far."""
        return sum(map(len, self.losses))

    @property
    def value(self) -> float:
        """The perplexity: exp of the mean loss; NaN without a token, infinite where it overflows."""
        return exp(float(np.mean(np.concatenate(self.losses)))) if self.losses else math.nan

    @property
    def stderr(self) -> float:
        """Its standard error as llama-perplexity computes it: the value times that of the mean loss."""
        if self.n_tokens < 2:
            return math.nan
        losses = np.concatenate(self.losses)
        variance = float(np.mean(losses**2) - np.mean(losses) ** 2)
        return self.value * math.sqrt(max(0.0, variance) / (len(losses) - 1))

    @property
    def by_chunk(self) -> list[float]:
        """The perplexity of each chunk alone."""
        return [exp(float(np.mean(losses))) for losses in self.losses]

    @property
    def running(self) -> list[float]:
        """The perplexity of the text up to the end of each chunk, which llama-perplexity prints."""
        sums = np.cumsum([losses.sum() for losses in self.losses])
        counts = np.cumsum([len(losses) for losses in self.losses])
        return [exp(float(total / n)) for total, n in zip(sums, counts, strict=True)]

    def as_dict(self) -> dict[str, object]:
        """Return JSON types; `from_dict` takes them."""
        return {
            "perplexity": self.value,
            "stderr": self.stderr,
            **{name: getattr(self, name) for name in (*_SAME, "n_chunks", "n_done", "n_tokens")},
            "losses": [losses.tolist() for losses in self.losses],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Perplexity:
        """Return what ``as_dict`` was called on. Raises ConfigError if it is something else."""
        try:
            window, n_chunks = whole("window", data["window"]), whole("n_chunks", data["n_chunks"])
            given = cast(Sequence[Sequence[float]], data["losses"])
            losses = [np.array(each, dtype=np.float64).reshape(-1) for each in given]
            text, model = str(data["text"]), str(data["model"])
            return cls(str(data["method"]), window, n_chunks, text, model, losses)
        except (KeyError, TypeError, ValueError):
            raise ConfigError("this is no saved perplexity") from None


def perplexity(
    ctx: Context,
    text: str | TokenIds,
    window: int = 512,
    *,
    chunks: int | None = None,
    progress: Progress | None = None,
    resume: Perplexity | None = None,
) -> Perplexity:
    """Return the perplexity of a text as llama-perplexity computes it.

    The tokens are cut into chunks of ``window`` tokens, each read by itself, the first token of each
    replaced by BOS if the model begins texts with it; the tokens of the second half of a chunk are
    scored, but for its first. llama-perplexity's K/V is f16: open the context with ``kv_type="f16"`` to
    compare. The logits in memory at a time are ``n_outputs_max`` rows of the context.

    Args:
        ctx: has room for a window; other branches of it are not touched.
        text: text, in which control tokens are read as text, or token ids; of at least two windows.
        window: tokens a chunk, at least 4.
        chunks: how many chunks at most; None = all.
        progress: called after each decode with what is done so far.
        resume: what ``progress`` got in an earlier call for the same text and model: its chunks are not
            computed again.

    Raises:
        ConfigError: the text is shorter than two windows, or ``resume`` is of something else.
        CacheFullError: the context is smaller than a window. TokenizeError, DecodeError.
    """
    parts, begun = prepare(ctx, text, window, chunks, resume)
    return measure(ctx, with_bos(ctx.model, parts), [window // 2] * len(parts), begun, progress)


def prepare(
    ctx: Context, text: str | TokenIds, window: int, chunks: int | None, resume: Perplexity | None
) -> tuple[list[list[int]], Perplexity]:
    """Return a text's chunks and what is done of them; arguments and errors are those of `perplexity`."""
    window = whole("window", window, 4)
    tokens = text_tokens(ctx, text, window)
    n = len(tokens) // window
    if n < 2:
        raise ConfigError(
            f"a text of {len(tokens)} tokens is too short: a window of {window} needs {2 * window}",
            hint="give a longer text, or a smaller window",
        )
    n = n if chunks is None else min(n, whole("chunks", chunks, 1))
    parts = [tokens[i * window : (i + 1) * window] for i in range(n)]
    begun = Perplexity("chunked", window, n, *about(ctx, tokens))
    return parts, _resumed(begun, resume)


def strided_perplexity(
    ctx: Context,
    text: str | TokenIds,
    window: int = 512,
    stride: int = 256,
    *,
    progress: Progress | None = None,
    resume: Perplexity | None = None,
) -> Perplexity:
    """Return the perplexity of a text by sliding windows, as the documentation of Transformers has it.

    Each window begins ``stride`` tokens after the one before it and scores the tokens that are new in it,
    so every token but the first of the text is scored once, and has at least ``window - stride`` tokens
    before it, as far as there are so many. The numbers are lower than those of `perplexity` and cannot be
    compared with them.

    Args:
        ctx, text, progress, resume: as for `perplexity`; the text has at least two tokens.
        window: tokens a window.
        stride: how many of them are new, at most ``window - 1``.

    Raises:
        ConfigError: a text of one token, or ``resume`` is of something else. CacheFullError,
            TokenizeError, DecodeError.
    """
    window = whole("window", window, 2)
    stride = whole("stride", stride, 1, window - 1)
    tokens = text_tokens(ctx, text, window)
    if len(tokens) < 2:
        raise ConfigError("a text of one token has nothing that can be scored")
    starts = range(0, max(1, len(tokens) - window + stride), stride)
    parts = [tokens[start : start + window] for start in starts]
    firsts = [0, *[window - stride - 1] * (len(parts) - 1)]
    method = f"strided, {stride}"
    begun = Perplexity(method, window, len(parts), *about(ctx, tokens))
    return measure(ctx, parts, firsts, _resumed(begun, resume), progress)


def _resumed(begun: Perplexity, earlier: Perplexity | None) -> Perplexity:
    if earlier is not None:
        check_same(begun, instance("resume", earlier, Perplexity), _SAME)
        begun.losses.extend(earlier.losses[: begun.n_chunks])
    return begun


def measure(
    ctx: Context,
    parts: Sequence[list[int]],
    firsts: Sequence[int],
    begun: Perplexity,
    progress: Progress | None,
    also: Visit | None = None,
) -> Perplexity:
    """Score the tokens after index ``firsts`` of each part, from where ``begun`` ends; it is returned."""
    while begun.n_done < len(parts):
        begun.losses.extend(read_chunks(ctx, parts, firsts, begun.n_done, also))
        if progress is not None:
            progress(begun)
    return begun


def exp(value: float) -> float:
    """Return e to the power ``value``; infinite where it overflows."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
