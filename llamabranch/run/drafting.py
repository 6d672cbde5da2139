"""How the texts of one caller are drafted: its drafter, the lengths, the states, and the totals."""

from __future__ import annotations

from ..arguments import instance
from ..context import Context
from ..context.context import text_context
from ..generation.config import SpeculativeConfig, draft_length
from ..generation.draft_states import DraftStates
from ..generation.drafter import (
    Drafter,
    FixedLength,
    NullDrafter,
    SpeculativeStats,
    checked_drafter,
)
from ..native.handle import forkable_lock

_stats_lock = forkable_lock()  # for the totals of all callers


class Drafting:
    """Drafts for texts of one context with one drafter.

    Threads may share it if each uses its own texts.

    Args:
        ctx: the context that generates.
        drafter: proposes the drafts; None = no drafts.
        config: how much to draft.
        batched: whether texts share decodes, as in an engine. Then nothing is drafted if the
            context's memory cannot drop the last tokens of a sequence.

    Raises:
        ConfigError: an argument has the wrong type.
        UnsupportedError: ``ctx`` is the context of a head, or the drafter is a head for another model.
        VocabularyMismatchError: the drafter cannot draft for the context's vocabulary.

    Attributes:
        drafter: the drafter; a `NullDrafter` if nothing is drafted.
        drafts: whether anything is drafted.
        states: keeps draft states between generations.
        length: decides how long drafts are; it learns from all generations.
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
        config = SpeculativeConfig() if config is None else config
        self.config = instance("config", config, SpeculativeConfig)
        self.stats = SpeculativeStats()
        self.states = DraftStates(self.drafter)
        self.drafts = not isinstance(self.drafter, NullDrafter) and (
            not batched or ctx.kv_cache.undoes(1)
        )
        self.length = (
            draft_length(self.config, self.drafter, ctx) if self.drafts else FixedLength(0)
        )

    def add_stats(self, stats: SpeculativeStats) -> None:
        """Add the counts and times of a finished generation."""
        with _stats_lock:
            self.stats.add(stats)

    def total(self) -> SpeculativeStats:
        """Return a copy of ``stats``. No other thread changes the numbers while they are copied."""
        total = SpeculativeStats()
        with _stats_lock:
            total.add(self.stats)
        return total
