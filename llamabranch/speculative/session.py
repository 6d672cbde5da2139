"""Generate one token per call, with or without a drafter, chosen at every call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from ..branch import Branch, Produced
from ..context import Context
from ..errors import ClosedError, LlamaBranchError
from ..generation.config import SpeculativeConfig
from ..generation.drafter import Drafter
from ..generation.drafting import Drafting
from ..generation.generation import Emission
from ..generation.output import OutputBuffer
from ..generation.stats import SpeculativeStats
from ..model import Prompt
from ..sampling import SamplingParams
from ..sampling.grammar import Grammar
from .speculator import start_or_continue

__all__ = ["InferenceSession"]


class InferenceSession:
    """Generates one token per call; each call may use a drafter, another one, or none.

    Args:
        target: the context that generates.
        prompt: text, token ids, messages, or a branch to continue.
        sampling, grammar, parse_special: as for ``Branch.start``.
        config: how much to draft when ``next_token`` is given a drafter.
        max_tokens, stop: as for ``Branch.generate``.

    Attributes:
        branch: the branch being continued; it holds the tokens that were returned.
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
        # By identity, since a drafter need not be hashable; its value keeps it alive.
        self._draftings: dict[int, Drafting] = {}
        self.branch = start_or_continue(target, prompt, sampling, grammar, parse_special)
        self._owned = self.branch is not prompt
        self._text = self.branch.sequence
        self._emission = Emission(self._text, self._output)
        self._closed = False
        self._generating = ExitStack()  # until it is closed or forgotten
        self._generating.enter_context(self._text.generating())

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
        self._emission.resume()
        try:
            shown = self._emission.next(partial(self._round, drafter))
        except BaseException as error:
            self._emission.end(decodes=False)
            # A later call may succeed, once there is room again.
            self._output.is_stuck = isinstance(error, LlamaBranchError)
            raise
        self.stats.num_emitted_tokens = len(self._output.tokens)
        return shown

    def _round(self, drafter: Drafter | None) -> list[Produced]:
        found = self._draftings.get(id(drafter))
        if found is None:
            found = self._draftings[id(drafter)] = Drafting(self._target, drafter, self._config)
        running = found.open(self._text, self.stats)
        try:
            return found.loop.round(running, self._output)
        finally:
            found.close(running, keep=True)

    def close(self) -> None:
        """End here. A branch that was given keeps exactly the returned tokens. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._generating.close()
        self._output.break_off()
        for drafting in self._draftings.values():
            drafting.forget(self._text)
        if self.branch.ctx.closed:
            return
        if self._owned:
            self.branch.prune()
        else:
            self._emission.resume()
            self._emission.end(decodes=True)

    def __enter__(self) -> InferenceSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
