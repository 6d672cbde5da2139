"""Branches: sequences of a context that can be forked, extended, rewound, pruned and saved."""

from .branch import Branch
from .snapshot import Snapshot
from .store import BranchStore
from .token import Produced

__all__ = [
    "Branch",
    "BranchStore",
    "Produced",
    "Snapshot",
]
