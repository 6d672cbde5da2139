"""One token at a time, with or without a draft model, decided anew at every call."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from ..branch import Branch
from ..context import Context
from ..errors import ClosedError, ConfigError
from ..grammar import Grammar
from ..sampling import SamplingParams
from ..stopping import StopStrings
from .config import SpeculativeConfig
from .drafters import Drafter, NullDrafter
from .round import Emitted, settle_at
from .speculator import Speculator
from .stats import SpeculativeStats

__all__ = ["InferenceSession"]


class InferenceSession:
    """A text in the making that is asked for token by token.

    Args:
        target: the context whose text it is.
        prompt: text, token ids, or a branch to continue.
        sampling, grammar: as for ``Branch.start``.
        config: how much to draft when ``next_token`` is given a drafter.
        max_tokens: the most tokens to say; None = until the model ends or the cache is full.
        stop: strings that end the text; they are not part of it.

    Attributes:
        branch: the line of thought; it holds the tokens of all finished rounds.
        tokens: ids that ``next_token`` has returned.
        text: their text.
        finish_reason: "stop", "length", or None while it goes on.
        stats: counts and times so far.
    """

    def __init__(
        self,
        target: Context,
        prompt: str | Sequence[int] | Branch,
        *,
        sampling: SamplingParams | None = None,
        grammar: Grammar | str | None = None,
        config: SpeculativeConfig | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        if max_tokens is not None and max_tokens < 0:
            raise ConfigError(f"max_tokens must not be negative, is {max_tokens}")
        self.stats = SpeculativeStats()
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self._stops = StopStrings(stop)
        self._target = target
        self._config = config
        self._max_tokens = max_tokens
        # By identity: a drafter need not be hashable; the speculator keeps it alive.
        self._speculators: dict[int, Speculator] = {}
        self._owned = not isinstance(prompt, Branch)
        if isinstance(prompt, Branch):
            self.branch = prompt
        else:
            self.branch = Branch.start(target, prompt, grammar=grammar, sampling=sampling)
        self._base = self.branch.position
        self._said: list[Emitted] = []
        self._pending: Emitted | None = None
        self._closed = False

    def next_token(self, drafter: Drafter | None = None) -> Emitted | None:
        """Return the next token, None at the end. (An end token comes only with text held back.)

        With a ``drafter`` a round is run when nothing is waiting, and its other tokens come with the next
        calls; without one the target decodes plainly. Calls may change their mind: under a seed
        the text is the same.

        Raises:
            ClosedError: after ``close``. VocabularyMismatchError, CapacityError, DecodeError.
        """
        if self._closed:
            raise ClosedError("the session is closed")
        if self.finish_reason is not None:
            return None
        if self._max_tokens is not None and len(self.tokens) >= self._max_tokens:
            self.finish_reason = "length"
            return None
        if not self._said:
            self._said = self._round(drafter)
        emitted = self._said.pop(0)
        if emitted.is_stop:
            self.finish_reason = "stop"
            held = self._stops.flush()
            self.text += held
            return emitted.with_text(held) if held else None
        self.tokens.append(emitted.token)
        shown = self._stops.show(emitted.text, last=len(self.tokens) == self._max_tokens)
        self.text += shown
        if self._stops.found is not None:
            self.finish_reason = "stop"
        self.stats.num_emitted_tokens = len(self.tokens)
        return emitted.with_text(shown)

    def _round(self, drafter: Drafter | None) -> list[Emitted]:
        speculator = self._speculator(drafter)
        stream = speculator.open_stream(self.branch, self.stats)
        try:
            if self._pending is None:
                said = [stream.begin()]
            else:
                stream.pending = self._pending
                said = stream.round(self._limit())
            self._pending = stream.pending
        finally:
            speculator.close_stream(stream, keep=True)
        return said

    def _limit(self) -> int:
        return 1 << 30 if self._max_tokens is None else self._max_tokens - len(self.tokens) - 1

    def _speculator(self, drafter: Drafter | None) -> Speculator:
        found = self._speculators.get(id(drafter))
        if found is None:
            found = Speculator(self._target, drafter or NullDrafter(), self._config)
            self._speculators[id(drafter)] = found
        return found

    def close(self) -> None:
        """End here. A branch that was given keeps exactly the tokens that were returned. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for speculator in self._speculators.values():
            speculator.forget(self.branch)
        if self.branch.ctx.closed:
            return
        if self._owned:
            self.branch.prune()
        else:
            settle_at(self.branch, self._base + len(self.tokens), self._pending)

    def __enter__(self) -> InferenceSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
