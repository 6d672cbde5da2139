"""How far a model is from the one whose log-probabilities were saved: llama.cpp's ``--kl-divergence``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..arguments import instance, whole
from ..context import Context
from ..context.context import text_context
from ..context.logits import LogitsRow
from ..errors import ConfigError, VocabularyMismatchError
from ..model import TokenIds
from .chunks import check_room, cut, digest, text_tokens
from .logits_file import LogitsFile
from .perplexity import Perplexity, measure

__all__ = ["KLDivergence", "Uncertain", "divergence", "save_logits"]

_FLOOR = np.float32(
    -16.0
)  # tokens of the base that are less probable (nats) are left out of the sum
_COLUMNS = ("loss", "base_loss", "kl", "p_change", "same_top")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Uncertain:
    """A value and its standard error."""

    value: float
    stderr: float

    def as_dict(self) -> dict[str, float]:
        """Return both by name."""
        return {"value": self.value, "stderr": self.stderr}


@dataclass(frozen=True)
class KLDivergence:
    """How a model's next-token distributions differ from saved ones, or as many of them as are done.

    All numbers are llama-perplexity's, with its standard errors. Those that begin with ``p_change`` are
    about the probability of the token that is in the text, the model's less the base's.

    Attributes:
        window: tokens a chunk.
        n_chunks: how many chunks the file has.
        text: a hash of the text's tokens.
        model: the fingerprint of the model.
        rows: of each chunk that is done float64 (tokens, 5): the loss -log p of the token in the text
            under the model and under the base, KL(base || model), all nats; the change of that token's
            probability; and 1 where both find the same token most probable.
    """

    window: int
    n_chunks: int
    text: str
    model: str
    rows: list[Floats] = field(default_factory=list, repr=False)

    def _column(self, name: str) -> Floats:
        number = _COLUMNS.index(name)
        return np.concatenate([rows[:, number] for rows in self.rows] or [np.empty(0)])

    @property
    def n_done(self) -> int:
        """How many chunks are done."""
        return len(self.rows)

    @property
    def n_tokens(self) -> int:
        """How many tokens are compared so far."""
        return sum(map(len, self.rows))

    @property
    def perplexity(self) -> Uncertain:
        """The model's perplexity."""
        return _exp(_mean(self._column("loss")))

    @property
    def base_perplexity(self) -> Uncertain:
        """The perplexity of the model whose log-probabilities were saved."""
        return _exp(_mean(self._column("base_loss")))

    @property
    def log_ratio(self) -> Uncertain:
        """log(perplexity / base_perplexity)."""
        a, b = _mean(self._column("loss")), _mean(self._column("base_loss"))
        variance = a.stderr**2 + b.stderr**2 - 2 * self._covariance
        return Uncertain(a.value - b.value, math.sqrt(max(0.0, variance)))

    @property
    def ratio(self) -> Uncertain:
        """perplexity / base_perplexity."""
        return _exp(self.log_ratio)

    @property
    def difference(self) -> Uncertain:
        """perplexity - base_perplexity."""
        a, b = self.perplexity, self.base_perplexity
        variance = a.stderr**2 + b.stderr**2 - 2 * a.value * b.value * self._covariance
        return Uncertain(a.value - b.value, math.sqrt(max(0.0, variance)))

    @property
    def correlation(self) -> float:
        """The correlation of the losses."""
        product = _mean(self._column("loss")).stderr * _mean(self._column("base_loss")).stderr
        return self._covariance / product if product else math.nan

    @property
    def _covariance(self) -> float:
        a, b = self._column("loss"), self._column("base_loss")
        if len(a) < 10:
            return 0.0
        return float(np.mean(a * b) - a.mean() * b.mean()) / (len(a) - 1)

    @property
    def mean(self) -> Uncertain:
        """The mean KL divergence, nats."""
        return _mean(self._column("kl"))

    @property
    def p_change(self) -> Uncertain:
        """The mean change of the probability of the token in the text."""
        return _mean(self._column("p_change"))

    @property
    def p_change_rms(self) -> Uncertain:
        """The root of the mean square of that change."""
        square = _mean(self._column("p_change") ** 2)
        root = math.sqrt(square.value)
        return Uncertain(root, 0.5 / root * square.stderr if root else 0.0)

    @property
    def same_top(self) -> Uncertain:
        """The share of tokens where both find the same token most probable."""
        share, n = _mean(self._column("same_top")).value, self.n_tokens
        return Uncertain(share, math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else math.nan)

    def percentile(self, fraction: float) -> float:
        """Return the KL divergence that ``fraction`` of the tokens do not exceed."""
        return _percentile(self._column("kl"), fraction)

    def p_change_percentile(self, fraction: float) -> float:
        """Return the change of probability that ``fraction`` of the tokens do not exceed."""
        return _percentile(self._column("p_change"), fraction)

    def as_dict(self) -> dict[str, object]:
        """Return JSON types, with every statistic; `from_dict` takes them."""
        found: dict[str, object] = {
            "window": self.window,
            "n_chunks": self.n_chunks,
            "n_done": self.n_done,
            "n_tokens": self.n_tokens,
            "text": self.text,
            "model": self.model,
        }
        if self.rows:
            for name in _MEANS:
                found[name] = getattr(self, name).as_dict()
            found["correlation"] = self.correlation
            found["kl_percentiles"] = {f"{100 * f:g}": self.percentile(f) for f in KL_FRACTIONS}
            found["p_change_percentiles"] = {
                f"{100 * f:g}": self.p_change_percentile(f) for f in P_FRACTIONS
            }
        found["rows"] = [rows.tolist() for rows in self.rows]
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> KLDivergence:
        """Return what ``as_dict`` was called on.

        Raises:
            ConfigError: it is something else.
        """
        try:
            window, n_chunks = whole("window", data["window"]), whole("n_chunks", data["n_chunks"])
            given = data["rows"]
            if not isinstance(given, Sequence):
                raise TypeError
            rows = [np.array(each, dtype=np.float64).reshape(-1, len(_COLUMNS)) for each in given]
            return cls(window, n_chunks, str(data["text"]), str(data["model"]), rows)
        except (KeyError, TypeError, ValueError):
            raise ConfigError("this is no saved KL divergence") from None


_MEANS = (
    "mean", "perplexity", "base_perplexity", "log_ratio", "ratio", "difference", "p_change",
    "p_change_rms", "same_top",
)  # fmt: skip
KL_FRACTIONS = (1.0, 0.999, 0.99, 0.95, 0.9, 0.5, 0.1, 0.05, 0.01, 0.001, 0.0)
P_FRACTIONS = (1.0, 0.999, 0.99, 0.95, 0.9, 0.75, 0.5, 0.25, 0.1, 0.05, 0.01, 0.001, 0.0)


def save_logits(
    ctx: Context,
    text: str | TokenIds,
    path: str | os.PathLike[str],
    window: int = 512,
    *,
    chunks: int | None = None,
    progress: Callable[[Perplexity], None] | None = None,
    resume: Perplexity | None = None,
) -> Perplexity:
    """Write the log-probabilities of a text's tokens to a file, as llama-perplexity does; for
    `divergence`.

    It takes two bytes for each token of the vocabulary and each scored token of the text: 25 MB a chunk
    of 512 with a vocabulary of 49,152. llama-perplexity reads it, too (``--kl-divergence``).

    Args:
        ctx: of the base model; as for `perplexity`.
        text: as for `perplexity`.
        path: the file; one that is there is written over.
        window: tokens a chunk.
        chunks: how many chunks at most; None = all.
        progress: called with what is done so far.
        resume: what ``progress`` got in an earlier call that wrote to the same file.

    Returns:
        the perplexity, as `perplexity`.

    Raises:
        ConfigError: a text that is too short, or a file that cannot be written. CacheFullError,
        TokenizeError, DecodeError. OSError: the disk is full.
    """
    window = whole("window", window, 4)
    text_context("ctx", ctx)
    check_room(ctx, window)
    tokens = text_tokens(ctx.model, text)
    parts = cut(tokens, window, None if chunks is None else whole("chunks", chunks, 1))
    begun = Perplexity("chunked", window, len(parts), digest(tokens), ctx.model.fingerprint)
    if resume is not None:
        begun.check(instance("resume", resume, Perplexity))
        begun.losses.extend(resume.losses[: len(parts)])
    with LogitsFile.create(path, ctx.n_vocab, parts, begun.n_done) as file:

        def write(_chunk: int, _i: int, row: LogitsRow) -> None:
            file.write(file.row(row.array))

        return measure(ctx, parts, file.first, begun, progress, also=write)


def divergence(
    ctx: Context,
    path: str | os.PathLike[str],
    *,
    progress: Callable[[KLDivergence], None] | None = None,
    resume: KLDivergence | None = None,
) -> KLDivergence:
    """Compare a model with saved log-probabilities: KL divergence, perplexities, agreement.

    The file holds the text, so no text is given. It is read row by row.

    Args:
        ctx: of the model; with the base's vocabulary, and room for the file's window.
        path: a file of `save_logits` or of ``llama-perplexity --kl-divergence-base``.
        progress: called after each decode with what is done so far.
        resume: what ``progress`` got in an earlier call for the same file and model.

    Raises:
        ConfigError: the file cannot be read, or is of another kind or incomplete.
        VocabularyMismatchError: it is of a model with another vocabulary. CacheFullError, DecodeError.
    """
    text_context("ctx", ctx)
    with LogitsFile.open(Path(path)) as file:
        if file.n_vocab != ctx.n_vocab:
            raise VocabularyMismatchError(
                f"{path} is of a model with {file.n_vocab} tokens, {ctx.model.name} has {ctx.n_vocab}",
                hint="compare quantisations of one model, or models with one vocabulary",
            )
        check_room(ctx, file.window)
        flat = [token for chunk in file.chunks for token in chunk]
        ctx.model.check_tokens(flat)
        found = KLDivergence(file.window, len(file.chunks), digest(flat), ctx.model.fingerprint)
        if resume is not None:
            _check(found, instance("resume", resume, KLDivergence))
            found.rows.extend(resume.rows[: len(file.chunks)])
        rows: dict[int, Floats] = {}

        def compare(chunk: int, i: int, row: LogitsRow) -> None:
            if i == file.first:
                rows[chunk] = np.empty((file.n_rows, len(_COLUMNS)))
                file.seek(chunk)
            rows[chunk][i - file.first] = _compare(row, *file.read(), file.chunks[chunk][i + 1])

        def note(_: Perplexity) -> None:
            found.rows.extend(rows.pop(chunk) for chunk in sorted(rows))
            if progress is not None:
                progress(found)

        done = Perplexity("chunked", file.window, len(file.chunks), "", "")
        done.losses.extend(each[:, 0] for each in found.rows)
        measure(ctx, file.chunks, file.first, done, note, also=compare)
        return found


def _check(found: KLDivergence, given: KLDivergence) -> None:
    for name in ("window", "n_chunks", "text", "model"):
        if getattr(found, name) != getattr(given, name):
            raise ConfigError(
                f"what is to be resumed has another {name}: {getattr(given, name)}, not "
                f"{getattr(found, name)}",
                hint="resume with the same file and model",
            )


def _compare(
    row: LogitsRow,
    scale: np.float32,
    smallest: np.float32,
    codes: npt.NDArray[np.uint16],
    token: int,
) -> tuple[float, float, float, float, float]:
    """Return the numbers of one token, with llama-perplexity's arithmetic: 32 bits, sums in 64."""
    logits = row.array
    largest = np.float32(logits.max())
    log_total = np.float32(np.log(np.exp(logits - largest).sum(dtype=np.float64)))
    loss = np.float32(largest + log_total - logits[token])
    base = scale * codes.astype(np.float32) + smallest
    base_loss = -base[token]
    terms = np.exp(base) * (base - logits + np.float32(largest + log_total))
    kl = float(terms.sum(dtype=np.float64, where=base > _FLOOR))
    change = np.exp(-loss) - np.exp(-base_loss)
    same = int(logits.argmax()) == int(codes.argmax())
    return float(loss), float(base_loss), kl, float(change), float(same)


def _mean(values: Floats) -> Uncertain:
    n = len(values)
    if not n:
        return Uncertain(math.nan, math.nan)
    mean = float(values.mean())
    variance = float(np.mean(values**2)) - mean * mean
    return Uncertain(mean, math.sqrt(variance / (n - 1)) if variance > 0 and n > 10 else 0.0)


def _exp(log: Uncertain) -> Uncertain:
    try:
        value = math.exp(log.value)
    except OverflowError:
        value = math.inf
    return Uncertain(value, value * log.stderr)


def _percentile(values: Floats, fraction: float) -> float:
    if not len(values):
        return math.nan
    return float(np.quantile(values, min(1.0, max(0.0, fraction))))
