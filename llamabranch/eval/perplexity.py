"""Perplexity of a text, llama-perplexity's number and the strided one; how a text is read in chunks."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar, cast

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from ..arguments import instance, whole
from ..branch.scorer import Wanted, read
from ..context import Context
from ..context.context import text_context
from ..context.logits import LogitsRow
from ..errors import CacheFullError, ConfigError
from ..model import Model, TokenIds, token_list
from .logits_file import LogitsFile

Floats = npt.NDArray[np.float64]
# Called with the number of a chunk, the index of one of its tokens, the token after that, and the logits
# that it is scored by, which are valid until it returns; what it returns is kept.
Value = Callable[[int, int, int, LogitsRow], float | tuple[float, ...]]


@dataclass(frozen=True)
class Chunked:
    """What is known of a text that is read in chunks, or of as many of them as are done.

    Attributes:
        window: tokens that the model sees at most.
        n_chunks: how many chunks the whole text has.
        text: a hash of the text's tokens.
        model: the fingerprint of the model, and the K/V type.
        rows: of each chunk that is done the numbers of its scored tokens, float64.
        method: how the text is cut: "chunked" is llama-perplexity's way.
    """

    window: int
    n_chunks: int
    text: str
    model: str
    rows: list[Floats] = field(default_factory=list, repr=False)
    method: str = "chunked"

    _KEY: ClassVar[str]  # of the rows in JSON
    _SHAPE: ClassVar[tuple[int, ...]]  # of the numbers of a token

    @classmethod
    def begun(
        cls,
        ctx: Context,
        tokens: Sequence[int],
        window: int,
        n_chunks: int,
        method: str = "chunked",
    ) -> Self:
        """Return what is known of a text of which nothing was read."""
        text = hashlib.sha256(np.asarray(tokens, dtype="<i4").tobytes()).hexdigest()[:16]
        model = f"{ctx.model.fingerprint} {ctx.kv_type}"
        return cls(window, n_chunks, text, model, method=method)

    def resumed(self, earlier: Self | None) -> Self:
        """Add the chunks that are done in ``earlier``; ConfigError if it is of something else."""
        if earlier is None:
            return self
        instance("resume", earlier, type(self))
        for name in ("method", "window", "text", "model"):
            ours, theirs = getattr(self, name), getattr(earlier, name)
            if ours != theirs:
                raise ConfigError(
                    f"what is to be resumed has another {name}: {theirs}, not {ours}",
                    hint="resume with the same text, model and settings",
                )
        self.rows.extend(earlier.rows[: self.n_chunks])
        return self

    @property
    def n_done(self) -> int:
        """How many chunks are done."""
        return len(self.rows)

    @property
    def n_tokens(self) -> int:
        """How many tokens are scored so far."""
        return sum(map(len, self.rows))

    def as_dict(self) -> dict[str, object]:
        """Return JSON types; `from_dict` takes them."""
        names = ("window", "n_chunks", "text", "model", "n_done", "n_tokens")
        found: dict[str, object] = {name: getattr(self, name) for name in names}
        return {**found, self._KEY: [rows.tolist() for rows in self.rows]}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Return what ``as_dict`` was called on. Raises ConfigError if it is something else."""
        try:
            window, n_chunks = whole("window", data["window"]), whole("n_chunks", data["n_chunks"])
            given = cast(Sequence[object], data[cls._KEY])
            rows = [np.array(its, dtype=np.float64).reshape(-1, *cls._SHAPE) for its in given]
            names = str(data["text"]), str(data["model"])
            return cls(window, n_chunks, *names, rows, str(data.get("method", "chunked")))
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"this is no saved {cls.__name__}") from None


Found = TypeVar("Found", bound=Chunked)


def text_tokens(ctx: Context, text: str | TokenIds, window: int) -> list[int]:
    """Return the tokens of a text as llama-perplexity has them, control tokens in it read as text.

    Raises:
        ConfigError: there are none.
        CacheFullError: ``ctx`` has no room for a window.
        TokenizeError: an id that is not in the vocabulary.
    """
    model = text_context("ctx", ctx).model
    check_room(ctx, window)
    if isinstance(text, str):
        tokens = model.tokenize(text) if text else []
    else:
        tokens = token_list(text)
        model.check_tokens(tokens)
    if not tokens:
        raise ConfigError("the text is empty: there is nothing to score")
    return tokens


def with_bos(model: Model, chunks: Sequence[list[int]]) -> Sequence[list[int]]:
    """Return chunks whose first token is replaced by BOS, if the model begins every text with it."""
    begin = model.tokenize("")[:1]
    return [[*begin, *chunk[1:]] for chunk in chunks] if begin == [model.bos] else chunks


def check_room(ctx: Context, window: int) -> None:
    """Raise CacheFullError if a sequence of ``ctx`` has no room for a window."""
    if window - 1 > ctx.n_ctx_seq:
        raise CacheFullError(
            f"a window of {window} tokens does not fit into a context of {ctx.n_ctx_seq}",
            hint="open the context with a larger n_ctx, or choose a smaller window",
        )


def read_chunks(
    ctx: Context,
    found: Found,
    chunks: Sequence[list[int]],
    firsts: Sequence[int],
    value: Value,
    progress: Callable[[Found], None] | None,
) -> Found:
    """Read the chunks that are not done, and return ``found`` with what ``value`` returns.

    Args:
        ctx: has room for a chunk, see `check_room`. Other branches of it are not touched.
        found: what is known so far.
        chunks: token ids; none is longer than those before it.
        firsts: for each chunk the index of the token before the first one that is scored.
        value: of each token that is scored; in any order of the chunks of a decode.
        progress: called after each decode.
    """
    is_apart = not ctx.kv_cache.is_placement_exact
    while found.n_done < len(chunks):
        size = len(chunks[found.n_done])
        n = min(ctx.n_seq_free, ctx.usage().cells_free // size, ctx.n_batch // size)
        # What is computed in f16 depends on which cells a text has.
        low, n = found.n_done, 1 if is_apart else max(1, n)
        numbers = range(low, min(low + n, len(chunks)))
        rows = [np.empty((len(chunks[i]) - 1 - firsts[i], *found._SHAPE)) for i in numbers]

        def show(
            text: int,
            i: int,
            row: LogitsRow,
            rows: list[Floats] = rows,
            numbers: range = numbers,
        ) -> None:
            chunk = numbers[text]
            its = value(chunk, i - 1, chunks[chunk][i], row)
            rows[text][i - 1 - firsts[chunk]] = its

        read(ctx, [Wanted(None, chunks[i], firsts[i] + 1) for i in numbers], show)
        found.rows.extend(rows)
        if progress is not None:
            progress(found)
    return found


Progress = Callable[["Perplexity"], None]


@dataclass(frozen=True)
class Perplexity(Chunked):
    """The perplexity of a text, or of as much of it as is done; ``method`` is "chunked" or "strided"."""

    _KEY = "losses"
    _SHAPE = ()

    def __repr__(self) -> str:
        of = f"{self.n_done} of {self.n_chunks} chunks of {self.window} tokens"
        return f"<Perplexity {self.value:.4f} ± {self.stderr:.4f}, {self.method}, {of}>"

    @property
    def losses(self) -> list[Floats]:
        """Of each chunk that is done -log p of its scored tokens, nats, float64."""
        return self.rows

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
        its = {"perplexity": self.value, "stderr": self.stderr, "method": self.method}
        return {**its, **super().as_dict()}


def perplexity(
    ctx: Context,
    text: str | TokenIds,
    window: int = 512,
    *,
    chunks: int | None = None,
    stride: int | None = None,
    save_to: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    resume: Perplexity | None = None,
) -> Perplexity:
    """Return the perplexity of a text as llama-perplexity computes it.

    The tokens are cut into chunks of ``window`` tokens, each read by itself, the first token of each
    replaced by BOS if the model begins texts with it; the tokens of the second half of a chunk are
    scored, but for its first. llama-perplexity's K/V is f16: open the context with ``kv_type="f16"`` to
    compare. The logits in memory at a time are ``n_outputs_max`` rows of the context.

    With ``stride`` it is that of sliding windows, as the documentation of Transformers has it: each
    begins ``stride`` tokens after the one before it and scores the tokens that are new in it, so every
    token but the first is scored once, with ``window - stride`` tokens before it, or all if there are
    fewer. These numbers are lower and cannot be compared with the others.

    Args:
        ctx: has room for a window; other branches of it are not touched.
        text: text, in which control tokens are read as text, or token ids; of at least two windows, with
            ``stride`` two tokens.
        window: tokens a chunk, at least 4.
        chunks: how many chunks at most; None = all.
        stride: at most ``window - 1``; goes with neither ``chunks`` nor ``save_to``.
        save_to: a file for the log-probabilities, which `divergence` and llama-perplexity's
            ``--kl-divergence`` read; one that is there is written over. It takes two bytes for each token
            of the vocabulary and each scored token of the text: 25 MB a chunk of 512 with a vocabulary
            of 49,152.
        progress: called after each decode with what is done so far.
        resume: what ``progress`` got in an earlier call for the same text, model and file: its chunks
            are not computed again.

    Raises:
        ConfigError: the text is too short, ``resume`` is of something else, or a file that cannot be
            written. CacheFullError: the context is smaller than a window. TokenizeError, DecodeError.
            OSError: the disk is full.
    """
    window = whole("window", window, 4)
    tokens = text_tokens(ctx, text, window)
    if stride is None:
        parts, method = cut_chunks(tokens, window, chunks), "chunked"
        firsts, given = [window // 2] * len(parts), with_bos(ctx.model, parts)
    else:
        stride, method = whole("stride", stride, 1, window - 1), f"strided, {stride}"
        if len(tokens) < 2 or chunks is not None or save_to is not None:
            raise ConfigError("stride needs two tokens, and goes with neither chunks nor save_to")
        starts = range(0, max(1, len(tokens) - window + stride), stride)
        parts = given = [tokens[start : start + window] for start in starts]
        firsts = [0, *[window - stride - 1] * (len(parts) - 1)]
    found = Perplexity.begun(ctx, tokens, window, len(parts), method).resumed(resume)
    if save_to is None:
        return read_chunks(ctx, found, given, firsts, _loss, progress)
    with LogitsFile.create(save_to, ctx.n_vocab, parts, found.n_done) as file:

        def write(chunk: int, i: int, token: int, row: LogitsRow) -> float:
            file.write(chunk, i, row.array)
            return _loss(chunk, i, token, row)

        return read_chunks(ctx, found, given, firsts, write, progress)


def _loss(_chunk: int, _i: int, token: int, row: LogitsRow) -> float:
    """Return -log p of a token, nats."""
    return -row.logprob(token)


def cut_chunks(tokens: list[int], window: int, most: int | None) -> Sequence[list[int]]:
    """Return the chunks of a text, ``most`` of them at most; ConfigError if there are not two."""
    n = len(tokens) // window
    if n < 2:
        raise ConfigError(
            f"a text of {len(tokens)} tokens is too short: a window of {window} needs {2 * window}",
            hint="give a longer text, or a smaller window",
        )
    n = n if most is None else min(n, whole("chunks", most, 1))
    return [tokens[i * window : (i + 1) * window] for i in range(n)]


def exp(value: float) -> float:
    """Return e to the power ``value``; infinite where it overflows."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
