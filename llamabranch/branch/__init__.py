"""One line of thought on a context: fork, produce, commit, rewind, prune, save."""

from .branch import Branch
from .sequence import Produced
from .snapshot import Snapshot
from .store import BranchStore

__all__ = [
    "Branch",
    "BranchStore",
    "Produced",
    "Snapshot",
]
