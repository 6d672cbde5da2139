"""One generation of a text, round by round: streaming, stop strings, limits, statistics."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from time import perf_counter

from ..context import Context
from ..context.context import text_context
from ..errors import CapacityError, ClosedError, ConstraintError, LlamaBranchError
from ..native import forkable_lock
from ..sampling.constraint import ConstraintState
from .config import SpeculativeConfig, checked_config
from .draft_cache import DraftCache
from .drafter import NO_STATE, Drafter, DraftLength, NullDrafter, checked_drafter
from .length import FixedLength, draft_length
from .loop import Loop, RunningText
from .output import OutputBuffer, Produced
from .stats import SpeculativeStats
from .text import Text

__all__ = ["Drafting", "Generation"]


class Drafting:
    """How texts of a context are drafted for by one drafter, and what is learned from that.

    Args:
        ctx: the context that generates.
        drafter: proposes the drafts; None = none are drafted.
        config: how much to draft.
        batched: whether texts share decodes, as in an engine. Then memory that cannot drop a tail is not
            drafted for.

    Attributes:
        loop: runs the texts.
        stats: counts and times of all generations that have ended.
    """

    def __init__(
        self,
        ctx: Context,
        drafter: Drafter | None = None,
        config: SpeculativeConfig | None = None,
        *,
        batched: bool = False,
    ) -> None:
        self.ctx = text_context("target", ctx)
        self.drafter = checked_drafter(drafter, ctx.model)
        self.config = checked_config(config)
        self.stats = SpeculativeStats()
        self._states = DraftCache(self.drafter)
        self._lock = forkable_lock()
        if isinstance(self.drafter, NullDrafter) or (batched and not ctx.kv_cache.can_draft):
            self.loop = Loop(ctx, FixedLength(0))  # without a drafter nothing is drafted
        else:
            self.loop = Loop(ctx, draft_length(self.config, self.drafter, ctx), self.drafter)

    @property
    def length(self) -> DraftLength:
        """The draft-length controller, which learns from all generations."""
        return self.loop.length

    def open(self, text: Text, stats: SpeculativeStats, n_alternatives: int = 0) -> RunningText:
        """Return a text to be run by itself; end that with ``close``."""
        rule = self.config.rule if text.sampler.constraint is None else "seeded"
        state = NO_STATE if self.loop.drafter is None else self._states.take(text, rule)
        length = self.length.stream()
        return RunningText(text, state, length, rule, stats, n_alternatives, alone=True)

    def close(self, running: RunningText, *, keep: bool) -> None:
        """Report its last steps; keep the draft state for the text's next generation, or free it."""
        running.report()
        self._states.release(running.text, running.state, running.rule, keep=keep)

    def add_stats(self, stats: SpeculativeStats) -> None:
        """Add the counts and times of a generation that has ended."""
        with self._lock:
            self.stats.add(stats)

    def explain(self) -> str:
        """Return a description of how it drafts, with the measurements behind it and the acceptance."""
        drafter = self.loop.drafter
        if drafter is None:
            return "plain decoding: there is no drafter"
        stats = SpeculativeStats()
        with self._lock:
            stats.add(self.stats)
        lines = [f"drafter: {drafter.name}; {self.length.explain()}"]
        if stats.num_drafts:
            low, high = stats.alpha_interval
            drafts = "1 draft" if stats.num_drafts == 1 else f"{stats.num_drafts} drafts"
            lines.append(
                f"{drafts}: {stats.draft_acceptance_rate:.1%} of the drafted tokens were accepted, "
                f"{stats.mean_acceptance_length:.2f} tokens a drafted round; of those tested "
                f"{stats.alpha_hat:.0%} (95 % interval {low:.0%} to {high:.0%})"
            )
        if stats.stop_reasons:
            reasons = sorted(stats.stop_reasons.items(), key=lambda item: -item[1])
            lines.append("drafts ended by: " + ", ".join(f"{why} {n}" for why, n in reasons))
        return "\n".join(lines)

    def forget(self, text: Text) -> None:
        """Free the draft state that is kept for ``text``, if there is one."""
        self._states.forget(text)

    def forget_all(self) -> None:
        """Free all draft states that are kept."""
        while self._states.forget_oldest():
            pass


class Generation:
    """A running generation: an iterator of :class:`Produced`, with the text and tokens so far.

    Attributes:
        drafting: who drafts, and what is learned about that.
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
        """Begin one, for ``Branch.generate`` and its like.

        Args:
            drafting: who drafts, and how.
            text: has read its prompt.
            output: what limits it.
            n_alternatives: how many of the most probable tokens are reported with each token.
            constraint: of the text since the last token that was read.
            owner: what holds the text's sequence, and is kept alive meanwhile.
            release: called at the end to free a text that nobody else goes on with.
        """
        self.seed = text.seed
        self.drafting = drafting
        self.stats = SpeculativeStats()
        self._output = output
        # The loop holds no reference to this object, so a generation that is dropped ends at once.
        self._events = _run(
            drafting, text, output, n_alternatives, constraint, self.stats, owner, release
        )

    @property
    def text(self) -> str:
        """The text of the yielded tokens, without the stop string that ended it.

        Text that was held back as a possible beginning of a stop string is included once it is closed.
        """
        return self._output.text

    @property
    def tokens(self) -> list[int]:
        """The ids of the yielded tokens, a copy: those of a stop string included, EOG tokens not."""
        return list(self._output.tokens)

    @property
    def finish_reason(self) -> str | None:
        """ "stop" (EOG token or stop string), "length", "capacity", "constraint" (it allows no token), or
        None while it runs.
        """
        return self._output.finish_reason

    @property
    def elapsed_s(self) -> float:
        """Seconds spent generating, without the prompt's prefill and the caller's time between tokens."""
        return self._output.elapsed_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of ``elapsed_s``; nan before the first."""
        n = len(self._output.tokens)
        return n / self.elapsed_s if self.elapsed_s > 0 else float("nan")

    @property
    def emitted(self) -> list[Produced]:
        """Each of ``tokens`` with its text, log-probability, entropy and source, a copy."""
        return list(self._output.emitted)

    def __repr__(self) -> str:
        ended = self.finish_reason or "running"
        return f"<Generation {reprlib.repr(self.text)}, {len(self.tokens)} tokens, {ended}>"

    def __iter__(self) -> Iterator[Produced]:
        return self._events

    def __next__(self) -> Produced:
        return next(self._events)

    def finish(self) -> Generation:
        """Run to the end; return itself."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """Stop here: a branch that was given keeps exactly the yielded tokens. Idempotent."""
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
        start = perf_counter()
        is_consumed = True
        text.finish_reason = output.finish_reason
        try:
            if constraint is not None:
                text.constrain(constraint)
            running = drafting.open(text, stats, n_alternatives)
            run = drafting.loop.round
            base, is_changed = text.position, False  # where the output begins
            queue: list[Produced] = []
            try:
                while output.finish_reason is None:
                    if is_changed and constraint is not None:
                        text.constrain(constraint)
                    if is_changed and not running.follows():
                        drafting.close(running, keep=False)
                        running = drafting.open(text, stats, n_alternatives)
                    is_changed = False
                    if not queue:
                        queue = run(running, output)
                    shown = output.add(queue.pop(0))
                    text.n_held = len(text.tokens) - base - len(output.tokens)
                    text.finish_reason = output.finish_reason
                    if shown is not None:
                        output.elapsed_s += perf_counter() - start
                        is_consumed, version = False, text.version
                        try:
                            yield shown
                            is_consumed = True
                        finally:
                            start = perf_counter()
                            if text.version != version:  # somebody else has changed it
                                n = len(output.tokens)
                                base, is_changed, queue = text.position - n, True, []
            finally:
                try:
                    if release is None and not text.ctx.closed:
                        # Of a text that is forgotten too, the sampler may be freed already.
                        with suppress(ClosedError):
                            is_over = output.finish_reason is not None
                            text.end_at(base + len(output.tokens), decodes=is_over)
                finally:
                    drafting.close(running, keep=release is None and not is_changed)
        except LlamaBranchError as error:
            is_dead_end = isinstance(error, ConstraintError)
            reason = "capacity" if isinstance(error, CapacityError) else None
            held = output.break_off("constraint" if is_dead_end else reason)
            text.finish_reason = output.finish_reason if is_dead_end else text.finish_reason
            if held is not None and is_consumed:  # a generator that is being closed may not yield
                output.elapsed_s += perf_counter() - start
                try:
                    yield held
                finally:
                    start = perf_counter()
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
            output.elapsed_s += perf_counter() - start
