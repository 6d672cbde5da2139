"""One generation of a text, round by round: streaming, limits, stop strings, the output so far.

Branches, sessions and the engine all emit through its `OutputBuffer`.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from copy import copy
from time import perf_counter

from ..arguments import whole
from ..errors import CapacityError, ClosedError, ConstraintError, LlamaBranchError
from ..model import NO_TOKEN, StopStrings
from ..sampling.constraint import ConstraintState
from .drafter import SpeculativeStats
from .drafting import Drafting
from .loop import RunningText
from .output import Produced
from .text import Text

__all__ = ["Generation", "OutputBuffer", "Solo"]


class OutputBuffer:
    """The tokens and the text of one generation so far.

    Args:
        max_tokens: the most tokens to emit; None = until the model ends.
        stop: strings that end the text. ``text`` does not include them; ``tokens`` includes their
            tokens.
        stop_tokens: ids that end the text, and are part of it.
        min_tokens: the stop strings are ignored until there are this many tokens.

    Raises:
        ConfigError: a limit is negative or not an integer, or a stop string is empty.

    Attributes:
        tokens: ids, including those of a stop string, but no EOG tokens.
        texts: the text emitted with each token; joined they are the text, without the stop string.
        emitted: a `Produced` for each of ``tokens``.
        eog: the EOG token that ended the text; None before that.
        finish_reason: "stop" (EOG token or stop string), "length", None while it continues, or the
            reason passed to ``break_off``. Only this class sets it.
        is_stuck: whether the generation cannot continue for now, but may later. Meanwhile ``text``
            includes the text that is held back as a possible beginning of a stop string.
        elapsed_s: seconds so far, if the caller counts them.
    """

    def __init__(
        self,
        max_tokens: int | None,
        stop: str | Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        if max_tokens is not None:
            max_tokens = whole("max_tokens", max_tokens, 0)
        self._max_tokens = max_tokens
        self._stops = StopStrings(stop)
        self._stop_tokens = frozenset(stop_tokens)
        self.min_tokens = min_tokens
        self.tokens: list[int] = []
        self.texts: list[str] = []
        self.emitted: list[Produced] = []
        self.eog: Produced | None = None
        self.finish_reason: str | None = "length" if max_tokens == 0 else None
        self.is_stuck = False
        self.elapsed_s = 0.0

    def copied(self) -> OutputBuffer:
        """Return another buffer with the same tokens, which continues by itself."""
        other = copy(self)
        other.tokens, other.texts, other.emitted = [*self.tokens], [*self.texts], [*self.emitted]
        other._stops = copy(self._stops)
        return other

    @property
    def text(self) -> str:
        """The emitted text."""
        return "".join(self.texts) + (self._stops.held if self.is_stuck else "")

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended the text; None if neither did."""
        if self._stops.found is not None or not self.tokens:
            return self._stops.found
        return self.tokens[-1] if self.tokens[-1] in self._stop_tokens else None

    @property
    def draft_limit(self) -> int:
        """The longest draft with which a round passes neither ``min_tokens`` nor ``max_tokens``."""
        n = len(self.tokens)
        limit = 1 << 30 if self._max_tokens is None else self._max_tokens
        return (min(limit, self.min_tokens) if n < self.min_tokens else limit) - n - 1

    def add(self, emitted: Produced) -> Produced | None:
        """Add the next token. Return it with the text to emit, or None if there is nothing to emit.

        An EOG token is emitted only if it carries text that was held back for a stop string.
        """
        self.is_stuck = False
        if emitted.is_stop:
            self.finish_reason, self.eog = "stop", emitted
            pending = self._stops.flush()
            if not pending:
                return None
            self.texts.append(pending)
            return emitted._replace(text=pending)
        n = len(self.tokens) + 1
        is_end = emitted.token in self._stop_tokens
        last = self._max_tokens is not None and n >= self._max_tokens
        text, reason = emitted.text, "length" if last else None
        if n > self.min_tokens:
            text = self._stops.show(text, last=last or is_end)
        if is_end or self._stops.found is not None:
            reason = "stop"
        # No function is called from here on, so a signal handler raises before or after all of
        # these changes.
        self.tokens += (emitted.token,)
        self.emitted += (emitted,)
        self.texts += (text,)
        self.finish_reason = reason
        # A part may be held back for a stop string.
        return emitted if text == emitted.text else emitted._replace(text=text)

    def break_off(self, reason: str | None = None) -> Produced | None:
        """End the text without an EOG token; return the text that was held back, if any.

        After a regular end, or on a second call, there is no such text.

        Args:
            reason: why it cannot continue, such as "capacity" or "cancelled"; None if it may
                continue or has already ended.
        """
        self.finish_reason = reason or self.finish_reason
        pending = self._stops.flush()
        if not pending:
            return None
        self.texts.append(pending)
        return Produced(NO_TOKEN, pending, True, math.nan, math.nan)


class Solo:
    """Generates one text by itself, without an engine, and gives out one token at a time.

    Between two tokens other code may change the text; the output then continues after the change.

    Args:
        text: a text that has read its prompt; the output continues it.
        output: takes the tokens.
        stats: counts the rounds.
        n_alternatives: how many of the most probable tokens are reported with each token.
        constraint: applies to the text after the last token that was read.
        keeps: whether the text may be continued later. If not, the end neither trims its tokens nor
            keeps its draft state.
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
        self._version: int | None = None  # of the text, as this object left it; None: not begun
        self._start = 0  # the position in the text where the output begins
        self._running: dict[Drafting, RunningText] = {}

    def next(self, drafting: Drafting) -> Produced | None:
        """Give out the next token; return None if there is nothing to emit for it.

        If no token of the last round is left, another round runs, with drafts from ``drafting``.
        """
        text, output = self._text, self._output
        if text.version != self._version:
            self._follow()
        try:
            if not text.held:
                running = self._running.get(drafting) or self._open(drafting)
                running.limit = output.draft_limit
                text.held = drafting.loop.round(running)
            shown = output.add(text.held[0])
            del text.held[0]
        except BaseException:
            self._version = text.version  # all changes since then are this round's own
            self.end(decodes=False)
            raise
        self._version = text.version
        return shown

    def _follow(self) -> None:
        """Continue after other code has changed the text."""
        text = self._text
        text.held = []
        self._close(is_changed=True)
        self._start = text.position - len(self._output.tokens)
        if self._constraint is not None:
            text.constrain(self._constraint)
        self._version = text.version

    def _open(self, drafting: Drafting) -> RunningText:
        running = drafting.open(self._text, self._stats, self._n_alternatives)
        self._running[drafting] = running
        return running

    def _close(self, *, is_changed: bool) -> None:
        while self._running:
            drafting, running = self._running.popitem()
            drafting.close(running, keep=self._keeps, is_changed=is_changed)

    def end(self, *, decodes: bool) -> None:
        """Leave the text with exactly the tokens that were given out; ``next`` may continue it.

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


class Generation:
    """A running generation: an iterator of :class:`Produced`, with the text and tokens so far.

    Attributes:
        drafting: the drafter and what was learned about it.
        stats: counts and times; complete at the end.
        seed: the seed of its draws.
    """

    def __init__(
        self,
        drafting: Drafting,
        text: Text,
        output: OutputBuffer,
        n_alternatives: int = 0,
        *,
        constraint: ConstraintState | None = None,
        owner: object = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        """Begin a generation, for ``Branch.generate`` and similar calls.

        Args:
            drafting: the drafter and its settings.
            text: has read its prompt.
            output: holds the limits and takes the tokens.
            n_alternatives: how many of the most probable tokens are reported with each token.
            constraint: applies to the text after the last token that was read.
            owner: the object that holds the text's sequence; it is kept alive until the generation
                ends.
            release: called at the end, to free a text that nobody else will continue.
        """
        self.seed = text.seed
        self.drafting = drafting
        self.stats = SpeculativeStats()
        self._output = output
        # The loop holds no reference to this object, so dropping a generation ends it at once.
        self._events = _run(
            drafting, text, output, n_alternatives, constraint, self.stats, owner, release
        )

    @property
    def text(self) -> str:
        """The text of the yielded tokens, without the stop string that ended it.

        After ``close`` it includes text that was held back as a possible beginning of a stop
        string.
        """
        return self._output.text

    @property
    def tokens(self) -> list[int]:
        """The ids of the yielded tokens, a copy. Includes those of a stop string, but no EOG tokens."""
        return list(self._output.tokens)

    @property
    def finish_reason(self) -> str | None:
        """Why it ended; None while it runs.

        It is "stop" (EOG token or stop string), "length", "capacity" (no room) or "constraint" (no
        token is allowed).
        """
        return self._output.finish_reason

    @property
    def elapsed_s(self) -> float:
        """Seconds spent generating, without the prompt's prefill and the caller's time between tokens."""
        return self._output.elapsed_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of ``elapsed_s``; nan before the first token."""
        n = len(self._output.tokens)
        return n / self.elapsed_s if self.elapsed_s > 0 else float("nan")

    @property
    def emitted(self) -> list[Produced]:
        """A copy of the yielded tokens, each with its text, log-probability, entropy and source."""
        return list(self._output.emitted)

    def __repr__(self) -> str:
        ended = self.finish_reason or "running"
        return f"<Generation {reprlib.repr(self.text)}, {len(self.tokens)} tokens, {ended}>"

    def __iter__(self) -> Iterator[Produced]:
        return self

    def __next__(self) -> Produced:
        start = perf_counter()
        try:
            return next(self._events)
        finally:
            self._output.elapsed_s += perf_counter() - start

    def finish(self) -> Generation:
        """Run to the end; return itself."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """Stop here. A branch you passed keeps exactly the yielded tokens. Idempotent."""
        self._events.close()


def _run(
    drafting: Drafting,
    text: Text,
    output: OutputBuffer,
    n_alternatives: int,
    constraint: ConstraintState | None,
    stats: SpeculativeStats,
    owner: object,
    release: Callable[[], None] | None,
) -> Generator[Produced, None, None]:
    with text.generating():
        is_consumed = True
        text.finish_reason = output.finish_reason
        solo = Solo(text, output, stats, n_alternatives, constraint, keeps=release is None)
        try:
            try:
                while output.finish_reason is None:
                    shown = solo.next(drafting)
                    text.finish_reason = output.finish_reason
                    if shown is not None:
                        is_consumed = False
                        yield shown
                        is_consumed = True
            finally:
                solo.end(decodes=output.finish_reason is not None)
        except LlamaBranchError as error:
            is_dead_end = isinstance(error, ConstraintError)
            reason = "capacity" if isinstance(error, CapacityError) else None
            pending = output.break_off("constraint" if is_dead_end else reason)
            text.finish_reason = output.finish_reason if is_dead_end else text.finish_reason
            # A generator that is being closed may not yield.
            if pending is not None and is_consumed:
                yield pending
            if not is_dead_end:
                raise
        finally:
            output.break_off()
            if constraint is not None:
                stats.count_constraint(constraint.calls)
                with suppress(ClosedError):
                    text.constrain(None)
            stats.num_emitted_tokens = len(output.tokens)
            drafting.add_stats(stats)
            if release is not None and not text.ctx.closed:
                release()
