"""One token at a time, with or without a draft model, decided anew at every call."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from ..branch import Branch, Produced
from ..branch.output import OutputBuffer
from ..context import Context
from ..errors import ClosedError, ConfigError, LlamaBranchError
from ..model import TokenIds
from ..sampling import SamplingParams
from ..sampling.grammar import Grammar
from .config import SpeculativeConfig
from .drafters.base import Drafter
from .round import finish_at
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
        stop: strings that end the text. ``text`` leaves them out, ``tokens`` hold what completed them.

    Attributes:
        branch: the line of thought; it holds the tokens of all finished rounds.
        stats: counts and times so far.
    """

    def __init__(
        self,
        target: Context,
        prompt: str | TokenIds | Branch,
        *,
        sampling: SamplingParams | None = None,
        grammar: Grammar | str | None = None,
        config: SpeculativeConfig | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        self.stats = SpeculativeStats()
        self._transcript = OutputBuffer(max_tokens, stop)
        self._target = target
        self._config = config
        # By identity: a drafter need not be hashable; the speculator keeps it alive.
        self._speculators: dict[int, Speculator] = {}
        self._owned = not isinstance(prompt, Branch)
        if isinstance(prompt, Branch):
            if sampling is not None or grammar is not None:
                raise ConfigError("a branch has its own sampling and grammar")
            if prompt.ctx is not target:
                raise ConfigError("the branch lives in another context")
            self.branch = prompt
        else:
            self.branch = Branch.start(target, prompt, grammar=grammar, sampling=sampling)
        self._base = self.branch.position
        self._said: list[Produced] = []
        self._pending: Produced | None = None
        self._closed = False

    @property
    def tokens(self) -> list[int]:
        """The ids that ``next_token`` has returned, a copy: with those of a stop string."""
        return list(self._transcript.tokens)

    @property
    def text(self) -> str:
        """Their text, without the stop string that ended it; after an error and after ``close`` with
        what was held back for a stop string."""
        return self._transcript.text

    @property
    def finish_reason(self) -> str | None:
        """ "stop", "length", or None while it goes on."""
        return self._transcript.finish_reason

    def next_token(self, drafter: Drafter | None = None) -> Produced | None:
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
        if not self._said:
            try:
                self._said = self._round(drafter)
            except LlamaBranchError:  # when there is room again, it can go on
                self._transcript.is_stuck = True
                raise
        shown = self._transcript.add(self._said.pop(0))
        self.stats.num_emitted_tokens = len(self.tokens)
        return shown

    def _round(self, drafter: Drafter | None) -> list[Produced]:
        speculator = self._speculator(drafter)
        stream = speculator.open_stream(self.branch, self.stats)
        try:
            if self._pending is None:
                said = [stream.begin()]
            else:
                stream.pending = self._pending
                said = stream.round(self._transcript.draft_limit)
            self._pending = stream.pending
        finally:
            speculator.close_stream(stream, keep=True)
        return said

    def _speculator(self, drafter: Drafter | None) -> Speculator:
        found = self._speculators.get(id(drafter))
        if found is None:
            found = Speculator(self._target, drafter, self._config)
            self._speculators[id(drafter)] = found
        return found

    def close(self) -> None:
        """End here. A branch that was given keeps exactly the tokens that were returned. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._transcript.break_off()
        for speculator in self._speculators.values():
            speculator.forget(self.branch)
        if self.branch.ctx.closed:
            return
        if self._owned:
            self.branch.prune()
        else:
            finish_at(self.branch, self._base + len(self.tokens), self._pending)

    def __enter__(self) -> InferenceSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
