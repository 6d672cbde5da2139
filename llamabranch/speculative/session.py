"""Generate one token per call, with or without a drafter, chosen at every call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from ..branch import Branch, Produced
from ..branch.output import OutputBuffer
from ..context import Context
from ..errors import ClosedError, LlamaBranchError
from ..model import Prompt
from ..sampling import SamplingParams
from ..sampling.grammar import Grammar
from .config import SpeculativeConfig
from .drafters.base import Drafter, NullDrafter
from .round import finish_at
from .speculator import Speculator, start_or_continue
from .stats import SpeculativeStats

__all__ = ["InferenceSession"]


class InferenceSession:
    """Generates one token per call; each call may use a drafter, another one, or none.

    Args:
        target: the context that generates.
        prompt: text, token ids, messages, or a branch to continue.
        sampling, grammar, parse_special: as for ``Branch.start``.
        config: how much to draft when ``next_token`` is given a drafter.
        max_tokens: the most tokens to generate; None = until the model ends the text or the cache is
            full.
        stop: strings that end the text. ``text`` leaves them out, ``tokens`` include their tokens.

    Attributes:
        branch: the branch being continued; it holds the tokens of all finished rounds.
        stats: counts and times so far.
    """

    def __init__(
        self,
        target: Context,
        prompt: Prompt | Branch,
        *,
        sampling: SamplingParams | None = None,
        grammar: Grammar | str | None = None,
        config: SpeculativeConfig | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        parse_special: bool = True,
    ) -> None:
        self.stats = SpeculativeStats()
        self._output = OutputBuffer(max_tokens, stop)
        self._target = target
        self._config = config
        # By identity, since a drafter need not be hashable; the speculator keeps it alive.
        self._speculators: dict[int, Speculator] = {}
        self.branch = start_or_continue(target, prompt, sampling, grammar, parse_special)
        self._owned = self.branch is not prompt
        self._base = self.branch.position
        self._emitted: list[Produced] = []  # by the last round, not yet returned
        self._pending: Produced | None = None
        self._closed = False
        self._generating = ExitStack()  # until it is closed or forgotten
        self._generating.enter_context(self.branch.sequence.generating())

    @property
    def tokens(self) -> list[int]:
        """The ids that ``next_token`` has returned, a copy; those of a stop string included."""
        return list(self._output.tokens)

    @property
    def text(self) -> str:
        """Their text, without the stop string that ended it.

        Text that was held back as a possible beginning of a stop string is included after an error and
        after ``close``.
        """
        return self._output.text

    @property
    def finish_reason(self) -> str | None:
        """ "stop", "length", or None while it goes on."""
        return self._output.finish_reason

    def next_token(self, drafter: Drafter | None = None) -> Produced | None:
        """Return the next token, None at the end.

        With a ``drafter`` a round is run, and the other tokens it emits are returned by the next calls,
        before another round is run; without one the target decodes plainly. Under the rule "seeded",
        which "auto" means for a given seed, the text does not depend on which calls had a drafter. An
        EOG token is returned only to carry text that was held back as a possible beginning of a stop
        string.

        Raises:
            ClosedError: after ``close``. VocabularyMismatchError, CapacityError, DecodeError.
        """
        if self._closed:
            raise ClosedError("the session is closed")
        if self.finish_reason is not None:
            return None
        if not self._emitted:
            try:
                self._emitted = self._round(drafter)
            except LlamaBranchError:  # a later call may succeed, once there is room again
                self._output.is_stuck = True
                raise
        shown = self._output.add(self._emitted.pop(0))
        self.stats.num_emitted_tokens = len(self.tokens)
        return shown

    def _round(self, drafter: Drafter | None) -> list[Produced]:
        speculator = self._speculator(drafter)
        stream = speculator.open_stream(self.branch, self.stats)
        try:
            stream.pending = self._pending
            emitted = speculator.joint.round(stream, self._output.draft_limit)
            self._pending = stream.pending
        finally:
            speculator.close_stream(stream, keep=True)
        return emitted

    def _speculator(self, drafter: Drafter | None) -> Speculator:
        found = self._speculators.get(id(drafter))
        if found is None:
            found = Speculator(self._target, drafter or NullDrafter(), self._config)
            self._speculators[id(drafter)] = found
        return found

    def close(self) -> None:
        """End here. A branch that was given keeps exactly the returned tokens. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._generating.close()
        self._output.break_off()
        for speculator in self._speculators.values():
            speculator.forget(self.branch)
            speculator.save_profile()
        if self.branch.ctx.closed:
            return
        if self._owned:
            self.branch.prune()
        else:
            finish_at(self.branch, self._base + len(self.tokens), self._pending)

    def __enter__(self) -> InferenceSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
