"""A cache with branches in plain Python: the reference for the state machine.

Nothing here is imported from the library. A cell is a number that is never used twice, a sequence maps
positions to cells, a fork copies the map. `Full` and `Exhausted` are raised where the library must raise
``CacheFullError`` and ``SequencesExhaustedError``; a call that raises them has changed nothing, except
that a branch whose last token had to be decoded again may be left without it (see `need_row`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

END = 1 << 31


class Full(Exception):
    """No cell is free."""


class Exhausted(Exception):
    """No sequence is free."""


class ReferenceCache:
    """Cells by position, for each sequence."""

    def __init__(self, n_cells: int, n_seq: int) -> None:
        self.n_cells = n_cells
        self.held: list[dict[int, int]] = [{} for _ in range(n_seq)]
        self.compacted: list[dict[int, int]] = []  # lengths at each compaction that was observed
        self._names = itertools.count()

    def end(self, seq: int) -> int:
        """Return where the next token goes."""
        return max(self.held[seq], default=-1) + 1

    def lengths(self) -> dict[int, int]:
        return {seq: len(cells) for seq, cells in enumerate(self.held) if cells}

    def uses(self) -> Counter[int]:
        """Count for each cell in use how many sequences use it."""
        found: Counter[int] = Counter()
        for cells in self.held:
            found.update(cells.values())
        return found

    def remove(self, seq: int, start: int = 0, end: int = END) -> None:
        held = self.held[seq]
        self.held[seq] = {p: cell for p, cell in held.items() if not start <= p < end}

    def share(self, source: int, target: int) -> None:
        self.held[target] = dict(self.held[source])

    def append(self, lengths: Mapping[int, int], texts: Mapping[int, Sequence[int]]) -> None:
        """Give each sequence this many more cells, or change none of them.

        ``texts`` are the tokens of branches; they are needed if the cache was compacted.
        """
        if self.compacted and self.compacted[0] == self.lengths():
            del self.compacted[0]
            self._compact(texts)
        if len(self.uses()) + sum(lengths.values()) > self.n_cells:
            raise Full
        for seq, n in lengths.items():
            start = self.end(seq)
            self.held[seq].update((start + i, next(self._names)) for i in range(n))

    def _compact(self, texts: Mapping[int, Sequence[int]]) -> None:
        """Hold every common prefix once: the result is a trie of the texts."""
        nodes: dict[tuple[int, int], int] = {}  # (cell before, token) -> cell
        for seq, length in self.lengths().items():
            before = -1
            for position, token in enumerate(texts[seq][:length]):
                if (before, token) not in nodes:
                    nodes[before, token] = next(self._names)
                before = self.held[seq][position] = nodes[before, token]


@dataclass(eq=False)
class ReferenceBranch:
    """The expected state of a branch."""

    seq: int
    sampling: int
    seed: int
    parent: ReferenceBranch | None = None
    tokens: list[int] = field(default_factory=list)
    n_prompt: int = 0
    has_row: bool = False
    is_finished: bool = False


@dataclass(frozen=True)
class ReferenceSnapshot:
    sampling: int
    seed: int
    tokens: tuple[int, ...]
    n_prompt: int
    is_finished: bool


class ReferenceWorld:
    """Branches over a cache."""

    def __init__(self, n_cells: int, n_seq: int) -> None:
        self.cache = ReferenceCache(n_cells, n_seq)
        self.branches: list[ReferenceBranch] = []

    def texts(self) -> dict[int, list[int]]:
        return {branch.seq: branch.tokens for branch in self.branches}

    def children(self, branch: ReferenceBranch) -> list[ReferenceBranch]:
        return [other for other in self.branches if other.parent is branch]

    def free_seqs(self) -> list[int]:
        leased = {branch.seq for branch in self.branches}
        held = self.cache.held
        return [seq for seq in range(len(held)) if seq not in leased and not held[seq]]

    def raw_seqs(self) -> list[int]:
        leased = {branch.seq for branch in self.branches}
        return [seq for seq in range(len(self.cache.held)) if seq not in leased]

    def create(self, sampling: int, seed: int) -> ReferenceBranch:
        """Take the highest free sequence."""
        free = self.free_seqs()
        if not free:
            raise Exhausted
        branch = ReferenceBranch(free[-1], sampling, seed)
        self.branches.append(branch)
        return branch

    def fork(self, parent: ReferenceBranch) -> ReferenceBranch:
        child = self.create(parent.sampling, parent.seed)
        child.parent, child.tokens = parent, list(parent.tokens)
        child.n_prompt, child.has_row = parent.n_prompt, parent.has_row
        self.cache.share(parent.seq, child.seq)
        return child

    def need_row(self, branch: ReferenceBranch) -> None:
        """Decode the last token again if its logits are invalid; without a free cell it stays dropped."""
        if not branch.has_row:
            self.cache.remove(branch.seq, len(branch.tokens) - 1)
            self.cache.append({branch.seq: 1}, self.texts())
            branch.has_row = True

    def catch_up(self, branch: ReferenceBranch) -> None:
        if self.cache.end(branch.seq) < len(branch.tokens):
            self.need_row(branch)

    def prefill(self, prompts: Mapping[ReferenceBranch, Sequence[int]]) -> None:
        for branch in prompts:
            self.catch_up(branch)
        self.cache.append({b.seq: len(tokens) for b, tokens in prompts.items()}, self.texts())
        for branch, tokens in prompts.items():
            branch.tokens += tokens
            branch.n_prompt = len(branch.tokens)
            branch.has_row = True
            branch.is_finished = False

    def commit(self, appended: Mapping[ReferenceBranch, Sequence[int]]) -> None:
        for branch in appended:
            if branch.tokens:
                self.need_row(branch)
        self.cache.append({b.seq: len(tokens) for b, tokens in appended.items()}, self.texts())
        for branch, tokens in appended.items():
            branch.tokens += tokens
            branch.has_row = True
            branch.is_finished = False

    def rewind(self, branch: ReferenceBranch, position: int) -> None:
        if position < len(branch.tokens):
            self.cache.remove(branch.seq, position)
            del branch.tokens[position:]
            branch.n_prompt = min(branch.n_prompt, position)
            branch.has_row = branch.is_finished = False

    def prune(self, branch: ReferenceBranch) -> None:
        """Remove the branch and its descendants."""
        for child in self.children(branch):
            self.prune(child)
        self.branches.remove(branch)
        self.cache.remove(branch.seq)

    def promote(self, branch: ReferenceBranch) -> None:
        parent = branch.parent
        assert parent is not None
        branch.parent = parent.parent
        self.prune(parent)

    def retain_only(self, winner: ReferenceBranch) -> None:
        self.branches = [winner, *(b for b in self.branches if b is not winner)]
        for branch in self.branches[1:]:
            self.cache.remove(branch.seq)
        self.branches = [winner]
        winner.parent = None

    def snapshot(self, branch: ReferenceBranch) -> ReferenceSnapshot:
        if branch.tokens:
            self.need_row(branch)
        b = branch
        return ReferenceSnapshot(b.sampling, b.seed, tuple(b.tokens), b.n_prompt, b.is_finished)

    def restore(self, saved: ReferenceSnapshot) -> ReferenceBranch:
        branch = self.create(saved.sampling, saved.seed)
        try:
            self.cache.append({branch.seq: len(saved.tokens)}, self.texts())
        except Full:
            self.branches.remove(branch)
            raise
        branch.tokens, branch.n_prompt = list(saved.tokens), saved.n_prompt
        branch.has_row, branch.is_finished = bool(saved.tokens), saved.is_finished
        return branch
