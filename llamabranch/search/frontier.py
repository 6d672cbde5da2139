"""Candidates of a search, decoded together: one decode for each step.

A candidate is a node of the tree. As long as there are enough sequences, each candidate that may be
continued has a branch; the last child of a node gets its branch, the others are forks. If there are more
candidates than sequences or cells, they are decoded in waves. If the parent of a candidate has lost its
branch, the tokens after the nearest ancestor with a branch are decoded again, in the same decode as the
candidate's new tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

from ..branch import Branch, BranchStore
from ..errors import CacheFullError, ConfigError, SequencesExhaustedError
from ..generation.text import Text
from .node import SearchNode
from .tree import OnStep, SearchTree

__all__ = ["Frontier"]

T = TypeVar("T")


class Frontier:
    """The nodes of a search that hold sequences, all forked from its branch.

    A context manager: at its end, and after any error, every sequence is freed.

    Args:
        branch, on_step: as for `SearchTree`.

    Attributes:
        tree: the tree of the search.
    """

    def __init__(self, branch: Branch, on_step: OnStep | None = None) -> None:
        self.tree = SearchTree(branch, on_step)
        self._capacity = self.tree.capacity
        self._store = BranchStore(self.tree.ctx)
        self._held: dict[SearchNode, Branch] = {}  # least recently used first

    def __enter__(self) -> Frontier:
        return self

    def __exit__(self, *_: object) -> None:
        self.tree.close()
        if not self.tree.ctx.closed:
            self.retain(())

    def retain(self, nodes: Iterable[SearchNode]) -> None:
        """Free the sequences of all other nodes."""
        kept = set(nodes)
        for node in [node for node in self._held if node not in kept]:
            self.release(node)

    def release(self, node: SearchNode) -> None:
        """Free the sequence of ``node``, if it has one; the node can be decoded again."""
        branch = self._held.pop(node, None)
        if branch is not None:
            branch.prune()

    def advance(
        self,
        nodes: Sequence[SearchNode],
        read: Callable[[SearchNode, Text], T],
        *,
        keep: bool = False,
    ) -> list[T]:
        """Decode ``nodes``, whose parents were decoded before; return the results of ``read``.

        Args:
            nodes: new nodes that are not finished.
            read: called for each node with the sequence that holds it, while its logits are valid.
            keep: True = keep the branches of other nodes while there are enough sequences. False =
                afterwards only the new nodes have branches.

        Raises:
            CacheFullError: there are not enough cells even for one candidate. DecodeError.
        """
        if not keep:
            self.retain({node.parent for node in nodes if node.parent is not None})
        # Candidates whose parent has a branch come first: others may need its sequence later.
        order = sorted(nodes, key=lambda node: node.parent not in self._held)
        results: dict[SearchNode, T] = {}
        while order:
            wave, later = order[: self._capacity], order[self._capacity :]
            wanted = {*self._held} if keep else {n.parent for n in later if n.parent is not None}
            with self.tree.ctx.lock:
                try:
                    self._decode(wave, wanted)
                except CacheFullError:
                    if len(wave) == 1 and not self._held:
                        raise
                    self.retain(())
                    self._capacity = max(1, len(wave) // 2)
                    continue
                for node in wave:
                    results[node] = read(node, self._held[node].sequence)
            order = later
        return [results[node] for node in nodes]

    def _decode(self, wave: Sequence[SearchNode], wanted: Collection[SearchNode]) -> None:
        """Decode the nodes of a wave, at most one for each sequence; each of them gets a branch."""
        left = Counter(node.parent for node in wave)
        taken: dict[SearchNode, Branch] = {}
        work: dict[Branch, list[int]] = {}
        try:
            for node in wave:
                parent = node.parent
                if parent is None:
                    raise ConfigError("the root of a search is decoded already")
                left[parent] -= 1
                lacking: list[int] = []
                if not left[parent] and parent not in wanted and parent in self._held:
                    branch = self._held.pop(parent)
                else:
                    protected = {other for other, n in left.items() if n and other is not None}
                    branch, lacking = self._forked(parent, len(taken), protected, wanted)
                taken[node] = branch
                work[branch] = [*lacking, *node.tokens]
            stats, decoder = self.tree.stats, self.tree.ctx.decoder
            before = decoder.n_decodes
            self._store.append_unscored(work)
            stats.decodes += decoder.n_decodes - before
            stats.tokens_decoded += sum(map(len, work.values()))
        except BaseException:
            for branch in taken.values():
                branch.prune()
            raise
        self._held.update(taken)

    def _forked(
        self,
        node: SearchNode,
        n_taken: int,
        protected: Collection[SearchNode],
        wanted: Collection[SearchNode],
    ) -> tuple[Branch, list[int]]:
        """Return a branch for a continuation of ``node``, and the tokens of ``node`` that it lacks.

        It is a fork of the nearest branch, of ``node`` or an ancestor. If no sequence is free for a fork,
        it is the branch of ``node`` itself.

        Args:
            node: the node to continue.
            n_taken: how many new branches this wave has so far.
            protected: nodes whose branches must not be taken away.
            wanted: nodes whose branches are taken away only if there are no others.
        """
        while len(self._held) + n_taken >= self._capacity:
            free = [other for other in self._held if other is not node and other not in protected]
            if not free and node in self._held:
                return self._held.pop(node), []
            if not free:  # impossible: a wave has at most as many nodes as sequences
                raise SequencesExhaustedError("no sequence is left for a candidate")
            self.release(next((other for other in free if other not in wanted), free[0]))
        at = node
        lacking: list[int] = []
        while at.parent is not None and at not in self._held:
            lacking[:0] = at.tokens
            at = at.parent
        if at in self._held:  # it is now the most recently used
            self._held[at] = self._held.pop(at)
        branch = self._held.get(at, self.tree.branch).fork()
        branch.detach()
        stats = self.tree.stats
        stats.tokens_shared += branch.position
        stats.tokens_redecoded += len(lacking)
        stats.peak_sequences = max(stats.peak_sequences, len(self._held) + n_taken + 1)
        return branch, lacking
