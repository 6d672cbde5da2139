"""Branches: sequences of a context that can be forked, extended, rewound, pruned and saved."""

from ..generation.output import Produced
from .branch import Branch
from .snapshot import Snapshot

__all__ = [
    "Branch",
    "Produced",
    "Snapshot",
]
