"""Who proposes tokens.

A *drafter* is shared by all requests; a *line* is one request's draft state. A line sees the tokens that
stand and proposes what may follow; it is told how much of that stood and forgets the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from ..branch import Branch
from ..context import Context
from ..errors import CapacityError, VocabularyMismatchError
from ..model import Model
from ..sampling import SamplingParams
from .length import DraftLength

__all__ = ["Draft", "DraftLine", "Drafter", "ModelDrafter", "NullDrafter"]


@dataclass
class Draft:
    """What a line proposes.

    ``entropies`` (nats) are those of the draft's own distributions, one for each step that was
    thought about, drawn or not. ``seconds`` and ``n_decodes`` are what it cost.
    """

    tokens: list[int] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    seconds: float = 0.0
    n_decodes: int = 0


class DraftLine(Protocol):
    """One request's draft state."""

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        """Return at most ``limit`` tokens that may follow ``tokens``.

        ``tokens`` begin with everything this line was told before. ``length`` is asked before each
        token is drawn, never after.
        """

    def observe(self, n_tokens: int) -> None:
        """Learn that exactly the first ``n_tokens`` of tokens and proposal stand."""

    def fork(self) -> DraftLine:
        """Return a line in the same state that goes its own way."""

    def close(self) -> None:
        """Give back what the line holds."""


class Drafter(Protocol):
    """Where lines come from."""

    @property
    def name(self) -> str:
        """What statistics call it."""

    def check(self, target: Model) -> None:
        """Raise VocabularyMismatchError if it cannot draft for ``target``."""

    def line(self, target: Branch) -> DraftLine:
        """Return a new line that drafts for ``target`` from where it stands."""


class NullDrafter:
    """Proposes nothing: plain decoding through the same loop."""

    name = "none"

    def check(self, target: Model) -> None:
        """Accept any target."""

    def line(self, target: Branch) -> DraftLine:
        """Return a line that never proposes."""
        return _NullLine()


class _NullLine:
    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        return Draft()

    def observe(self, n_tokens: int) -> None:
        return None

    def fork(self) -> DraftLine:
        return self

    def close(self) -> None:
        return None


class ModelDrafter:
    """Drafts with a small model of the same vocabulary.

    Args:
        ctx: a context of the draft model; each line takes one of its sequences.
        sampling: its own settings, None = the request's. At equal settings and seed the draft draws
            with the target's noise, which is what makes the two agree so often.
    """

    def __init__(self, ctx: Context, sampling: SamplingParams | None = None) -> None:
        self.ctx = ctx
        self.sampling = sampling

    @property
    def name(self) -> str:
        """The draft model's name."""
        return self.ctx.model.name

    def check(self, target: Model) -> None:
        """Raise VocabularyMismatchError unless both models speak the same tokens."""
        report = target.compatibility(self.ctx.model)
        if not report:
            raise VocabularyMismatchError(
                f"{self.name} cannot draft for {target.name}: {report.reason}",
                hint="use a draft model of the target's family; see `llamabranch inspect`",
            )

    def line(self, target: Branch) -> DraftLine:
        """Return a new line; takes a sequence of the draft context."""
        params = (self.sampling or target.sampling).but(seed=target.seed)
        return _ModelLine(Branch.create(self.ctx, params, target.grammar), target.n_prompt)


class _ModelLine:
    """A branch of the draft model that follows the target's line."""

    def __init__(self, branch: Branch, n_prompt: int) -> None:
        self._branch = branch
        self._n_prompt = n_prompt
        self._ahead: Branch | None = None  # where it drafts if its memory cannot be truncated

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        draft = Draft()
        if limit <= 0 or not length.wants_draft(len(tokens) - self._branch.position):
            return draft
        start = perf_counter()
        decodes = self._branch.ctx.decoder.n_decodes
        with contextlib.suppress(CapacityError):  # no room to draft is no reason to stop
            self._draft(draft, tokens, length, limit)
        draft.n_decodes = self._branch.ctx.decoder.n_decodes - decodes
        draft.seconds = perf_counter() - start
        return draft

    def _draft(self, draft: Draft, tokens: Sequence[int], length: DraftLength, limit: int) -> None:
        branch = self._branch
        if branch.position < self._n_prompt:
            branch.prefill(tokens[branch.position : self._n_prompt])
        branch.follow(tokens[branch.position :])  # everything it has not seen, in one decode
        if not branch.ctx.capabilities.can_truncate:
            branch = self._ahead = branch.fork()
        while len(draft.tokens) < limit:
            entropy = branch.entropy()
            draft.entropies.append(entropy)
            if not length.goes_on(len(draft.tokens), entropy):
                break
            produced = branch.produce()
            draft.tokens.append(produced.token)
            if produced.is_stop or len(draft.tokens) == limit:
                break  # the last one is decoded with the next round's catch-up, if it stands
            branch.commit(produced.token)

    def observe(self, n_tokens: int) -> None:
        if self._ahead is not None:
            self._ahead.prune()
            self._ahead = None
        if n_tokens < self._branch.position:
            self._branch.rewind(n_tokens)

    def fork(self) -> DraftLine:
        return _ModelLine(self._branch.fork(), self._n_prompt)

    def close(self) -> None:
        if not self._branch.ctx.closed:
            self._branch.prune_subtree()
