"""The generation of one text, as an iterator over its tokens."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from time import perf_counter

from ..errors import CapacityError, ClosedError, ConstraintError, LlamaBranchError
from ..generation.drafter import SpeculativeStats
from ..generation.output import OutputBuffer, Produced
from ..generation.text import Text
from ..run.drafting import Drafting
from ..run.solo import Solo
from ..sampling.constraint import ConstraintState


class Generation:
    """A running generation: an iterator of :class:`Produced`, with the text and tokens so far.

    Attributes:
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
            drafting: how to draft.
            text: the text, which has read its prompt.
            output: sets the limits and receives the tokens.
            n_alternatives: how many of the most probable tokens to report with each token.
            constraint: applies to the text after the last token that was read, not generated.
            owner: the object, such as a branch, that frees the text's sequence when it is deleted. It
                is kept alive until the generation ends.
            release: called at the end, to free a text that no one else will continue.
        """
        self.seed = text.seed
        self.stats = SpeculativeStats()
        self._output = output
        # The generator has no reference to this object, so deleting this object ends the generator at
        # once.
        self._tokens = _tokens(
            drafting, text, output, n_alternatives, constraint, self.stats, owner, release
        )

    @property
    def text(self) -> str:
        """The text of the yielded tokens, without the stop string that ended it.

        After ``close``, it includes text that was held back because a stop string might begin there.
        """
        return self._output.text

    @property
    def tokens(self) -> list[int]:
        """A copy of the yielded ids, including a stop string's tokens, but no EOG token."""
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
        """Seconds spent generating, not counting the prompt and the time between calls."""
        return self._output.elapsed_s

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens divided by ``elapsed_s``; nan before the first token."""
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
            return next(self._tokens)
        finally:
            self._output.elapsed_s += perf_counter() - start

    def finish(self) -> Generation:
        """Run to the end; return itself."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """Stop here. If you passed a branch, it keeps exactly the yielded tokens. Idempotent."""
        self._tokens.close()


def _tokens(
    drafting: Drafting,
    text: Text,
    output: OutputBuffer,
    n_alternatives: int,
    constraint: ConstraintState | None,
    stats: SpeculativeStats,
    owner: object,
    release: Callable[[], None] | None,
) -> Generator[Produced, None, None]:
    """Yield the tokens of a generation; at the end, free its draft states and add up its counts."""
    with text.generating():
        is_consumed = True  # False while a token is yielded: the generator may be closed there
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
            # A generator must not yield while it is being closed.
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
