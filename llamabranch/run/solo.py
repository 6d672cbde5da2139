"""One text that runs by itself, without an engine: for branches, sessions and speculators."""

from __future__ import annotations

from contextlib import suppress

from ..errors import ClosedError
from ..generation.drafter import SpeculativeStats
from ..generation.output import OutputBuffer, Produced
from ..generation.text import Text
from ..sampling.constraint import ConstraintState
from .drafting import Drafting
from .running import RunningText
from .step import run_round


class Solo:
    """Generates one text by itself and gives out one token at a time.

    Other code may change the text between two tokens. The output then continues after the change.

    Args:
        text: a text that has read its prompt; the output continues it.
        output: takes the tokens.
        stats: counts the rounds.
        n_alternatives: how many of the most probable tokens are reported with each token.
        constraint: applies to the text after the last token that was read, not generated.
        keeps: whether the text may be continued later. If not, ``end`` neither drops tokens that
            were not given out nor keeps the draft state.
    """

    def __init__(
        self,
        text: Text,
        output: OutputBuffer,
        stats: SpeculativeStats,
        n_alternatives: int = 0,
        constraint: ConstraintState | None = None,
        *,
        keeps: bool = True,
    ) -> None:
        self._keeps = keeps
        self._text, self._output, self._stats = text, output, stats
        self._n_alternatives, self._constraint = n_alternatives, constraint
        self._version: int | None = None  # the text's version after the last call; None at first
        self._start = 0  # the position in the text where the output begins
        self._running: dict[
            Drafting, RunningText
        ] = {}  # a session has one for each of its drafters

    def next(self, drafting: Drafting) -> Produced | None:
        """Give out the next token; return None if there is nothing to emit for it.

        If all tokens of the last round are given out, another round is run first.
        """
        text, output = self._text, self._output
        if text.version != self._version:
            self._follow()
        try:
            if not text.held:
                running = self._running.get(drafting)
                if running is None:
                    running = RunningText.alone(drafting, text, self._stats, self._n_alternatives)
                    self._running[drafting] = running
                running.draft_limit = output.draft_limit
                text.held = run_round(running)
            shown = output.add(text.held[0])
            del text.held[0]
        except BaseException:
            self._version = text.version  # only this call has changed the text
            self.end(decodes=False)
            raise
        self._version = text.version
        return shown

    def _follow(self) -> None:
        """Start with the text as it is now: at the first token, or after other code has changed it."""
        text = self._text
        text.held = []
        self._close(is_changed=True)
        self._start = text.position - len(self._output.tokens)
        if self._constraint is not None:
            text.constrain(self._constraint)
        self._version = text.version

    def _close(self, *, is_changed: bool) -> None:
        while self._running:
            _, running = self._running.popitem()
            running.give_back(keep=self._keeps, is_changed=is_changed)

    def end(self, *, decodes: bool) -> None:
        """Drop the tokens that were not given out. ``next`` may continue the text later.

        ``decodes``: see `Text.end_at`.
        """
        text = self._text
        is_changed = text.version != self._version
        if is_changed:
            self._start = text.position - len(self._output.tokens)
        try:
            # If the context was closed, the sampler of the text may be freed already.
            with suppress(ClosedError):
                if self._keeps and not text.ctx.closed:
                    text.end_at(self._start + len(self._output.tokens), decodes=decodes)
            self._version = text.version
        finally:
            self._close(is_changed=is_changed)
