"""Branches: sequences of a context that can be forked, extended, rewound, pruned and saved."""

from ..generation.output import Produced
from .branch import Branch
from .snapshot import Snapshot
from .store import BranchStore

__all__ = [
    "Branch",
    "BranchStore",
    "Produced",
    "Snapshot",
]
