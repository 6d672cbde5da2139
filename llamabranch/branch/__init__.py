"""One line of thought on a context: fork, produce, commit, rewind, prune, save."""

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
