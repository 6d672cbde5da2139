"""What an engine drafts with, and what it learns from its steps."""

from __future__ import annotations

from ..branch import Branch
from ..context import Context
from ..speculative import Drafter, GrammarDrafter, NullDrafter
from ..speculative.config import SpeculativeConfig
from ..speculative.joint import Joint
from ..speculative.length.auto import draft_length
from ..speculative.profile import PairProfile
from .concurrency import Concurrency

__all__ = ["Learning"]


class Learning:
    """The drafter, the draft length and the number of texts at a time, for all requests of an engine.

    Args:
        target: the context that generates.
        drafter: asked for; None = texts that have a grammar are drafted from it, the others are not.
        config: how much to draft.

    Attributes:
        joint: runs the streams.
        concurrency: chooses how many texts run at a time; None = as many as can.
    """

    def __init__(self, target: Context, drafter: Drafter | None, config: SpeculativeConfig) -> None:
        self._target = target
        self._config = config
        self._profile: PairProfile | None = None
        self.joint = Joint(target, draft_length(config))
        self.concurrency: Concurrency | None = None
        memory = target.kv_cache
        self._grammars_only = drafter is None and memory.can_draft
        if drafter is not None and not isinstance(drafter, NullDrafter) and memory.can_draft:
            self._draft_with(drafter)
        elif target.capabilities.batch_invariant and memory.can_pad:
            self._draft_with(None)
            # It goes by measured times, so which texts share a batch differs from run to run: only where
            # that changes no text.
            self.concurrency = Concurrency(self.joint.curve)

    def _draft_with(self, drafter: Drafter | None) -> None:
        length, self._profile = PairProfile.open(
            self._target, drafter or NullDrafter(), self._config, batched=True
        )
        self.joint.use(length, drafter)
        self.concurrency = None

    def drafts_for(self, branch: Branch) -> bool:
        """Return whether the text of ``branch`` is drafted; the first grammar makes the drafter."""
        if not self._grammars_only:
            return self.joint.drafter is not None
        if branch.grammar is not None and self.joint.drafter is None:
            self._draft_with(GrammarDrafter.copying())
        return branch.grammar is not None

    def measure(self) -> bool:
        """Time one decode of the target, while nobody waits; False if enough of them are known."""
        return self._profile is not None and self._profile.measure(self.joint.length)

    def end_measuring(self) -> None:
        """Stop that decode, since somebody waits. From any thread."""
        if self._profile is not None:
            self._profile.end_measuring()

    def save(self, *, at_once: bool = False) -> None:
        """Keep what was learned about drafts for later runs; at most once in some seconds."""
        if self._profile is not None:
            self._profile.save(self.joint.length, at_once=at_once)
