"""What is known about a target and its drafters: kept in the profile of the machine between runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .acceptance import AcceptanceCounts

__all__ = ["Known", "KnownDrafter"]


@dataclass(frozen=True)
class KnownDrafter:
    """A drafter's acceptance and cost, and where they come from.

    ``cost`` is c, the seconds of a draft step over those of a plain target step, measured in ``n_drafts``
    drafts; 0 = not known.
    """

    counts: AcceptanceCounts
    cost: float
    source: str = ""
    n_drafts: float = 0.0


@dataclass(frozen=True)
class Known:
    """What earlier runs have found out, or what a run has so far.

    Attributes:
        target_s: seconds of target decodes by their number of tokens, with t(1) among them; empty = none.
        source: where the times come from.
        drafters: by name.
        n_decodes: how many decodes each time is the mean of.
        estimates: the drafters whose entropies are surprisals of their tokens, by their own estimate.
    """

    target_s: Mapping[int, float] = field(default_factory=dict)
    source: str = ""
    drafters: Mapping[str, KnownDrafter] = field(default_factory=dict)
    n_decodes: Mapping[int, float] = field(default_factory=dict)
    estimates: frozenset[str] = frozenset()
