"""What an engine drafts with, and what it learns from its steps."""

from __future__ import annotations

from ..branch import Branch
from ..context import Context
from ..generation.config import SpeculativeConfig
from ..generation.length.auto import draft_length
from ..generation.loop import Loop
from ..generation.profile import PairProfile
from ..speculative import Drafter, GrammarDrafter, NullDrafter
from .concurrency import Concurrency

__all__ = ["Learning"]


class Learning:
    """The drafter, the draft length and the number of texts at a time, for all requests of an engine.

    Args:
        target: the context that generates.
        drafter: asked for; None = texts that have a grammar are drafted from it, the others are not.
        config: how much to draft.

    Attributes:
        loop: runs the texts.
        concurrency: chooses how many texts run at a time; None = as many as can.
    """

    def __init__(self, target: Context, drafter: Drafter | None, config: SpeculativeConfig) -> None:
        self._target = target
        self._config = config
        self._profile: PairProfile | None = None
        self.loop = Loop(target, draft_length(config))
        self.concurrency: Concurrency | None = None
        capabilities = target.capabilities
        self._grammars_only = drafter is None and capabilities.can_truncate
        if (
            drafter is not None
            and not isinstance(drafter, NullDrafter)
            and capabilities.can_truncate
        ):
            self._draft_with(drafter)
        elif capabilities.batch_invariant and capabilities.can_share:
            self._draft_with(None)
            # It goes by measured times, so which texts share a batch differs from run to run: only where
            # that changes no text.
            self.concurrency = Concurrency(self.loop.curve)

    def _draft_with(self, drafter: Drafter | None) -> None:
        length, self._profile = PairProfile.open(
            self._target, drafter or NullDrafter(), self._config, batched=True
        )
        self.loop.use(length, drafter)
        self.concurrency = None

    def drafts_for(self, branch: Branch) -> bool:
        """Return whether the text of ``branch`` is drafted; the first grammar makes the drafter."""
        if not self._grammars_only:
            return self.loop.drafter is not None
        if branch.grammar is not None and self.loop.drafter is None:
            self._draft_with(GrammarDrafter.copying())
        return branch.grammar is not None

    def measure(self) -> bool:
        """Time one decode of the target, while nobody waits; False if enough of them are known."""
        return self._profile is not None and self._profile.measure(self.loop.length)

    def end_measuring(self) -> None:
        """Stop that decode, since somebody waits. From any thread."""
        if self._profile is not None:
            self._profile.end_measuring()

    def save(self, *, at_once: bool = False) -> None:
        """Keep what was learned about drafts for later runs; at most once in some seconds."""
        if self._profile is not None:
            self._profile.save(self.loop.length, at_once=at_once)
