"""Perplexity of a text: llama-perplexity's number, and the strided one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..arguments import instance, whole
from ..context import Context
from ..context.context import text_context
from ..context.logits import LogitsRow
from ..errors import ConfigError
from ..model import TokenIds
from .chunks import bos_of, check_room, check_same, cut, digest, read_chunks, text_tokens

__all__ = ["Perplexity", "perplexity", "strided_perplexity"]

Progress = Callable[["Perplexity"], None]


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of a text, or of as much of it as is done.

    Attributes:
        method: "chunked", llama-perplexity's, or "strided".
        window: tokens that the model sees at most.
        n_chunks: how many chunks the whole text has.
        losses: of each chunk that is done -log p of its scored tokens, nats, float64.
        text: a hash of the text's tokens.
        model: the fingerprint of the model.
    """

    method: str
    window: int
    n_chunks: int
    text: str
    model: str
    losses: list[npt.NDArray[np.float64]] = field(default_factory=list, repr=False)

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
        return _exp(float(np.mean(np.concatenate(self.losses)))) if self.losses else math.nan

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
        return [_exp(float(np.mean(losses))) for losses in self.losses]

    @property
    def running(self) -> list[float]:
        """The perplexity of the text up to the end of each chunk, which llama-perplexity prints."""
        sums = np.cumsum([losses.sum() for losses in self.losses])
        counts = np.cumsum([len(losses) for losses in self.losses])
        return [_exp(float(total / n)) for total, n in zip(sums, counts, strict=True)]

    def as_dict(self) -> dict[str, object]:
        """Return JSON types; `from_dict` takes them."""
        return {
            "perplexity": self.value,
            "stderr": self.stderr,
            "method": self.method,
            "window": self.window,
            "n_chunks": self.n_chunks,
            "n_done": self.n_done,
            "n_tokens": self.n_tokens,
            "text": self.text,
            "model": self.model,
            "losses": [losses.tolist() for losses in self.losses],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Perplexity:
        """Return what ``as_dict`` was called on.

        Raises:
            ConfigError: it is something else.
        """
        try:
            names = ("method", "window", "n_chunks", "text", "model")
            method, window, n_chunks, text, model = (data[name] for name in names)
            given = data["losses"]
            if not isinstance(given, Sequence):
                raise TypeError
            losses = [np.array(each, dtype=np.float64) for each in given]
            whole_numbers = whole("window", window), whole("n_chunks", n_chunks)
            return cls(str(method), *whole_numbers, str(text), str(model), losses)
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
    return measure(ctx, parts, begun.window // 2, begun, progress)


def prepare(
    ctx: Context,
    text: str | TokenIds,
    window: int,
    chunks: int | None,
    resume: Perplexity | None,
) -> tuple[list[list[int]], Perplexity]:
    """Return a text's chunks and what is done of them; arguments and errors are those of `perplexity`."""
    window = whole("window", window, 4)
    text_context("ctx", ctx)
    check_room(ctx, window)
    tokens = text_tokens(ctx.model, text)
    parts = cut(tokens, window, None if chunks is None else whole("chunks", chunks, 1))
    return parts, _begun(ctx, "chunked", window, tokens, len(parts), resume)


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
    text_context("ctx", ctx)
    check_room(ctx, window)
    tokens = text_tokens(ctx.model, text)
    if len(tokens) < 2:
        raise ConfigError("a text of one token has nothing that can be scored")
    spans = list(_spans(len(tokens), window, stride))
    begun = _begun(ctx, f"strided, {stride}", window, tokens, len(spans), resume)
    found = begun
    for start, end, first in spans[begun.n_done :]:
        one = Perplexity(begun.method, window, 1, "", "")
        part = measure(ctx, [tokens[start:end]], first - start - 1, one, None, begins=False)
        found.losses.extend(part.losses)
        if progress is not None:
            progress(found)
    return found


def _spans(n: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield where a window begins and ends, and its first token that is scored."""
    scored = 1
    for start in range(0, n, stride):
        end = min(start + window, n)
        if scored < end:
            yield start, end, scored
        scored = end
        if end == n:
            return


def _begun(
    ctx: Context,
    method: str,
    window: int,
    tokens: Sequence[int],
    n_chunks: int,
    resume: Perplexity | None,
) -> Perplexity:
    found = Perplexity(method, window, n_chunks, digest(tokens), ctx.model.fingerprint)
    if resume is not None:
        given = instance("resume", resume, Perplexity)
        check_same(found, given, ("method", "window", "text", "model"))
        found.losses.extend(resume.losses[:n_chunks])
    return found


def measure(
    ctx: Context,
    parts: Sequence[list[int]],
    first: int,
    begun: Perplexity,
    progress: Progress | None,
    *,
    begins: bool = True,
    also: Callable[[int, int, LogitsRow], None] | None = None,
) -> Perplexity:
    """Score the tokens after index ``first`` of each part, from where ``begun`` ends; it is returned.

    ``also`` is called with the index of a chunk, that of a token and the logits after it.
    """
    bos = bos_of(ctx.model) if begins else None
    skipped = begun.n_done
    left = parts[skipped:]
    read = [part if bos is None else [bos, *part[1:]] for part in left]
    losses = {i: np.empty(len(part) - 1 - first) for i, part in enumerate(left)}

    def visit(chunk: int, i: int, row: LogitsRow) -> None:
        losses[chunk][i - first] = -row.logprob(left[chunk][i + 1])
        if also is not None:
            also(skipped + chunk, i, row)

    for done in read_chunks(ctx, read, first, visit):
        begun.losses.extend(losses.pop(i) for i in range(begun.n_done - skipped, done))
        if progress is not None:
            progress(begun)
    return begun


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
