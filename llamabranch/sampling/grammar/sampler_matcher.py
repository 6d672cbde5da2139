"""Grammars that name tokens: llama.cpp's own sampler checks the whole vocabulary."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...errors import GrammarError
from ...model import Model
from ...native import CandidateBuffer, GrammarHandle

__all__ = ["SamplerMatcher"]


class SamplerMatcher:
    """The state of a GBNF grammar in llama.cpp; it has the methods of ``Matcher``.

    Args:
        model: the model whose tokens it matches.
        gbnf: a grammar that ``Gbnf`` has checked.
        token_texts, token_ids: the tokens that the grammar names by their texts, and by their ids.

    Raises:
        GrammarError: one of these is not a token of the vocabulary.
    """

    def __init__(
        self,
        model: Model,
        gbnf: str,
        token_texts: tuple[str, ...] = (),
        token_ids: tuple[int, ...] = (),
    ) -> None:
        for token in token_ids:
            if token >= model.n_vocab:
                raise GrammarError(
                    f"the grammar refers to <[{token}]>, but this vocabulary has {model.n_vocab} tokens"
                )
        for text in token_texts:
            if len(model.handle.tokenize(text.encode(), False, True)) != 1:
                raise GrammarError(
                    f"the grammar refers to {text!r}, which is not one token of this vocabulary"
                )
        self._model = model
        self._handle = GrammarHandle(model.handle, gbnf)
        self._buffer = CandidateBuffer(model.n_vocab)
        self._mask: npt.NDArray[np.uint32] | None = None
        self._is_ended = False

    def mask(self) -> npt.NDArray[np.uint32]:
        """Return which tokens may come next, one bit each; do not change it."""
        if self._mask is None:
            n_words = (self._model.n_vocab + 31) // 32
            allowed = np.zeros(32 * n_words, dtype=np.uint8)
            if not self._is_ended:
                self._buffer.fill(np.zeros(self._model.n_vocab, dtype=np.float32))
                self._handle.apply(self._buffer)
                ids, logits = self._buffer.read()
                allowed[ids[logits > -np.inf]] = 1
            self._mask = np.packbits(allowed, bitorder="little").view(np.uint32)
        return self._mask

    def allows(self, token: int) -> bool:
        """Return whether ``token`` may come next."""
        return not self._is_ended and self._handle.allows(token, self._buffer)

    def accept(self, token: int) -> None:
        """Advance by a token that is allowed."""
        self._handle.accept(token)
        self._mask = None
        self._is_ended = self._model.is_eog(token)

    def forced(self) -> list[int]:
        """Return [], because llama.cpp does not report forced tokens."""
        return []

    def clone(self) -> SamplerMatcher:
        """Return an independent copy with the same state."""
        clone = object.__new__(SamplerMatcher)
        clone.__dict__.update(self.__dict__)
        clone._handle = self._handle.clone()
        return clone
