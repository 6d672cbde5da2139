"""What is known before a run, and what a run has found out: exchanged with the profile of the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .acceptance import AcceptanceCounts

__all__ = ["DrafterFindings", "Findings", "Known", "KnownDrafter"]


@dataclass(frozen=True)
class KnownDrafter:
    """A drafter's costs and acceptance, and where they come from.

    ``cost`` is c, the seconds of a draft step over those of a plain target step; 0 = not known.
    """

    counts: AcceptanceCounts
    cost: float
    source: str


@dataclass(frozen=True)
class Known:
    """Seconds of target decodes by their number of tokens, drafters by name, and the times' source."""

    target_s: Mapping[int, float] = field(default_factory=dict)
    source: str = ""
    drafters: Mapping[str, KnownDrafter] = field(default_factory=dict)


@dataclass(frozen=True)
class DrafterFindings:
    """A drafter's acceptance with what was known before, and its cost c, measured in ``n_drafts``."""

    counts: AcceptanceCounts
    cost: float
    n_drafts: int


@dataclass(frozen=True)
class Findings:
    """What a run has measured so far.

    ``target_s`` are seconds by number of tokens, with t(1) always among them; ``n_decodes`` of that many
    decodes, for the sizes that this run has measured itself.
    """

    target_s: Mapping[int, float]
    n_decodes: Mapping[int, int]
    drafters: Mapping[str, DrafterFindings]

    @property
    def n_drafts(self) -> int:
        """Drafts of all drafters."""
        return sum(drafter.n_drafts for drafter in self.drafters.values())
