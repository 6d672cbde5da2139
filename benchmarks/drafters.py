"""An adversarial drafter. It shows what speculation costs if no drafted token is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import llamabranch as lb

if TYPE_CHECKING:
    from llamabranch.generation.drafter import DraftLength

__all__ = ["AdversarialDrafter"]


class AdversarialDrafter(lb.Drafter):
    """Proposes arbitrary tokens at no cost and reports entropy 0, as if it were certain of them."""

    name = "adversarial"

    def check(self, target: lb.Model) -> None:
        """Accept any target."""

    def start(self, target: lb.speculative.Text, rule: str) -> lb.speculative.DraftState:
        """Return the draft state of a stream."""
        return _AdversarialState(target.ctx.model)


class _AdversarialState:
    def __init__(self, model: lb.Model) -> None:
        self._model = model

    def propose(
        self, tokens: Sequence[int], length: DraftLength, limit: int
    ) -> lb.speculative.Draft:
        draft = lb.speculative.Draft(drafter=AdversarialDrafter.name)
        if not length.consider(draft.drafter):
            draft.stopped = "off"
            return draft
        start = perf_counter()
        while len(draft.tokens) < limit:
            draft.entropies.append(0.0)
            if not length.goes_on(len(draft.tokens), 0.0):
                draft.stopped = length.reason
                break
            draft.tokens.append(self._arbitrary(len(tokens) + len(draft.tokens)))
        draft.seconds = perf_counter() - start
        return draft

    def _arbitrary(self, position: int) -> int:
        token = (position * 2654435761 >> 7) % self._model.n_vocab
        while self._model.is_eog(token):
            token = (token + 1) % self._model.n_vocab
        return token

    def observe(self, n_tokens: int) -> None:
        return None

    def fork(self, target: lb.speculative.Text) -> lb.speculative.DraftState:
        return self

    def close(self) -> None:
        return None
