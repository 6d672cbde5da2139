"""One token's logits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..model import Model
from ..native import core
from ..sampling import Sampler
from ..sampling.noise import DRAW

Logits = npt.NDArray[np.float32]

_FLOOR = np.float32(-1e4)  # exp of it is 0
_NOTHING = np.empty(0, dtype=np.float32)
_UNKNOWN = math.nan  # compared by identity: a measured value may be NaN too


class _Pair(NamedTuple):
    token: int
    logprob: float


class Alternative(_Pair):
    """One of the most probable tokens at a position: a pair (token, log-probability), with its text.

    Attributes:
        token: its id.
        logprob: its log-probability, nats.
        text: the text of this token alone; bytes of an incomplete character are shown as U+FFFD.
    """

    text: str = ""

    def __new__(cls, token: int, logprob: float, text: str = "") -> Alternative:
        self = super().__new__(cls, token, logprob)
        self.text = text
        return self

    def __getnewargs__(self) -> tuple[int, float, str]:
        return (*self, self.text)

    def __repr__(self) -> str:
        return f"({self.token}, {self.logprob!r}, {self.text!r})"


class TokenScore(NamedTuple):
    """How probable a token is under a model.

    Attributes:
        token: its id.
        logprob: its log-probability, nats, under the model's own distribution.
        rank: 1 + how many tokens are more probable.
        entropy: the entropy of that distribution, nats.
        alternatives: the most probable tokens, as many as requested, best first.
    """

    token: int
    logprob: float
    rank: int
    entropy: float
    alternatives: tuple[Alternative, ...] = ()


class LogitsRow:
    """One token's logits, with cached argmax, log-sum-exp and entropy.

    ``array`` (V,) is a view into llama.cpp's buffer until the next decode. ``users`` counts the objects
    that still need it; before the next decode overwrites the buffer, a row with users is copied.
    ``seq_id`` is the sequence of the text whose last token these logits follow, or -1. If that text is
    the only user, the row need not be copied when the text gets a new one.

    Args:
        array: the logits.
        address: the address of the logits in memory; 0 = take it from ``array``.
    """

    __slots__ = (
        "_address",
        "_best",
        "_drawn",
        "_entropy",
        "_logsumexp",
        "array",
        "seq_id",
        "users",
    )

    def __init__(self, array: Logits, address: int = 0) -> None:
        self.array = array
        self.users = 0
        self.seq_id = -1
        self._address = address
        self._best = -1
        self._logsumexp: float = _UNKNOWN
        self._entropy: float = _UNKNOWN
        self._drawn: tuple[object, int, int] | None = None  # the sampler, the seed, the token

    def detach(self) -> None:
        """Copy the row out of llama.cpp's buffer."""
        if self.array.base is not None:
            self.array = self.array.copy()
            self._address = 0

    def invalidate(self) -> None:
        """Record that llama.cpp's buffer was overwritten; a detached row keeps its values."""
        if self.array.base is not None:
            self.array = _NOTHING
            self._address = 0

    @property
    def is_valid(self) -> bool:
        """False if the values were overwritten and the token must be decoded again."""
        return len(self.array) > 0

    def logprob(self, token: int) -> float:
        """Return the model's log-probability of ``token``, nats."""
        if self._logsumexp is _UNKNOWN:
            self._measure()
        return float(self.array[token]) - self._logsumexp

    def log_probs(self) -> npt.NDArray[np.float64]:
        """Return the model's log-probabilities of all tokens, nats, float64 (V,), a copy."""
        if self._logsumexp is _UNKNOWN:
            self._measure()
        log_probs: npt.NDArray[np.float64] = self.array.astype(np.float64) - self._logsumexp
        return log_probs

    def rank(self, token: int) -> int:
        """Return 1 + how many tokens have a larger logit than ``token``."""
        return 1 + int(np.count_nonzero(self.array > self.array[token]))

    def score(self, token: int, model: Model, top: int = 0) -> TokenScore:
        """Return the score of ``token`` in this row, with the ``top`` most probable tokens."""
        alternatives = self.alternatives(model, top)
        return TokenScore(
            token, self.logprob(token), self.rank(token), self.entropy(), alternatives
        )

    def entropy(self) -> float:
        """Return the entropy of softmax(logits), nats."""
        if self._entropy is _UNKNOWN:
            self._measure()
        return self._entropy

    def alternatives(self, model: Model, k: int) -> tuple[Alternative, ...]:
        """Return the ``k`` most probable tokens, best first, with their texts."""
        if not k:
            return ()
        piece = model.piece if model.has_text else lambda _: b""
        k = min(k, len(self.array))
        best = np.argpartition(-self.array, k - 1)[:k]
        order = best[np.lexsort((best, -self.array[best]))].tolist()
        return tuple(
            Alternative(t, self.logprob(t), piece(t).decode("utf-8", "replace")) for t in order
        )

    @property
    def best(self) -> int:
        """The token with the largest logit, the smallest id among equals; computed once."""
        if self._best < 0:
            self._best = int(self.array.argmax())
        return self._best

    def draw(self, sampler: Sampler, seed: int, position: int, *, measured: bool = True) -> int:
        """Return the token that ``sampler`` draws from this row, to be placed at ``position``.

        llama.cpp's samplers and NumPy draw it if the compiled core does not support a setting or cannot
        decide.

        Args:
            sampler: a sampler that has accepted all tokens before this one.
            seed: the seed of the noise.
            position: the position of the next token.
            measured: compute log-sum-exp and entropy in the same call, because the caller needs them.

        Raises:
            GrammarError, ConstraintError, ConfigError: no token can be drawn.
        """
        token = self._draw_freely(sampler, seed, position, measured)
        if sampler.constraint is None or sampler.constraint.allows(token):
            return token
        self.detach()  # the constraint is called while the logits are read, and may decode
        return sampler.draw_allowed(self.array, position, seed)

    def _draw_freely(self, sampler: Sampler, seed: int, position: int, measured: bool) -> int:
        """Draw a token without a constraint."""
        if sampler.is_argmax:
            if measured and self._logsumexp is _UNKNOWN:
                self._measure()
            token = self.best
            if self.array[token] != self.array[token]:
                raise ConfigError("no token can be drawn: the logits contain NaN")
            return token
        compiled = sampler.current_row_sampler
        if compiled is not None:
            drawn = self._drawn
            if drawn is not None and drawn[0] is compiled and drawn[1] == seed:
                return drawn[2]
            measured = measured and self._logsumexp is _UNKNOWN
            token = compiled.sample(self.address, seed, position, DRAW, measured)
            self._note(compiled, measured)
            if token >= 0:
                return token
        return sampler.distribution(self.array, position, seed).draw(seed, position)

    def note_step(self, compiled: core.RowSampler, seed: int, measured: bool) -> None:
        """Keep the results of the native step that decoded this row, including the token that it drew.

        It drew for the position after the row's token, which is the only position a row is used for.
        """
        self._note(compiled, measured)
        if compiled.choice.token >= 0:
            self._drawn = (compiled, seed, compiled.choice.token)

    def _note(self, compiled: core.RowSampler, measured: bool) -> None:
        """Keep what the compiled core has measured; ``best`` is -1 if it could not measure the row."""
        choice = compiled.choice
        if measured and choice.best >= 0:
            self._best, self._logsumexp, self._entropy = (
                choice.best, choice.logsumexp, choice.entropy,
            )  # fmt: skip

    @property
    def address(self) -> int:
        """The address of the logits in memory."""
        if self._address == 0:
            self._address, self.array = core.address_of(self.array)
        return self._address

    def _measure(self) -> None:
        if core.available and len(self.array):
            best, logsumexp, entropy = core.measure(self.address, len(self.array))
            if best >= 0:
                self._best, self._logsumexp, self._entropy = best, logsumexp, entropy
                return
        row = self.array
        top = float(row[self.best])
        shifted = row - top
        # A logit of -inf has weight 0, and 0 * -inf is NaN.
        np.maximum(shifted, _FLOOR, out=shifted)
        # Sums use 64 bits, as in the core, because the rounding of 32-bit sums depends on the
        # processor's BLAS.
        weights = np.exp(shifted).astype(np.float64)
        total = float(weights.sum())
        mean = float(np.dot(weights, shifted.astype(np.float64)))
        log_total = math.log(total) if total > 0 else math.nan
        self._logsumexp = top + log_total
        self._entropy = max(0.0, log_total - mean / total)


@contextmanager
def lent(rows: Iterable[LogitsRow]) -> Iterator[None]:
    """Keep ``rows`` valid inside the block, in which a user's function may decode on the same context."""
    rows = list(rows)
    for row in rows:
        row.users += 1
    try:
        yield
    finally:
        for row in rows:
            row.users -= 1
