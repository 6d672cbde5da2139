"""Branches as immutable nodes.

A node is a list of token ids with the settings to continue it. If its K/V is not in the cache, it is
decoded again when it is needed. That takes time, and changes no result if batches are exact. So
there are no locks, and sequences cannot run out. A tree that is not used is deleted after a while.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from uuid import uuid4

from ..sampling import SamplingParams
from ..sampling.grammar import Grammar
from .errors import HttpError

__all__ = ["BranchNode", "Branches"]


@dataclass(eq=False)
class BranchNode:
    """A text that can be continued.

    Attributes:
        tokens: all its token ids.
        n_read: tokens that were not generated; the grammar begins after them.
        sampling: settings, with a seed.
        parent: the node that it shares its first ``fork_position`` tokens with; None for a root.
        finish_reason: how its generation ended; None if it was not generated.
        next: entropy and the most probable next tokens, if they are known.
        used: when it, or a node below it, was last used.
    """

    tokens: list[int]
    n_read: int
    sampling: SamplingParams
    grammar: Grammar | None = None
    parent: BranchNode | None = None
    fork_position: int = 0
    finish_reason: str | None = None
    id: str = field(default_factory=lambda: f"br-{uuid4().hex}")
    children: list[BranchNode] = field(default_factory=list)
    next: dict[str, object] | None = None
    used: float = 0.0

    @property
    def position(self) -> int:
        """The number of its tokens."""
        return len(self.tokens)

    @property
    def continues(self) -> int:
        """The number of generated tokens at its end."""
        return max(0, min(self.position - self.n_read, self.position - 1))

    def use(self) -> None:
        """Mark it and its ancestors as used now."""
        node: BranchNode | None = self
        while node is not None:
            node.used = monotonic()
            node = node.parent

    def subtree(self) -> list[BranchNode]:
        """Return it and all nodes below it, parents first."""
        nodes = [self]
        for node in nodes:  # the list grows in the loop
            nodes += node.children
        return nodes


class Branches:
    """The nodes of a server.

    Args:
        most: the most nodes.
        ttl_s: a tree that was not used for this many seconds is deleted.
    """

    def __init__(self, most: int, ttl_s: float) -> None:
        self._most, self._ttl_s = most, ttl_s
        self._nodes: dict[str, BranchNode] = {}
        self._n_promised = 0

    def __getitem__(self, name: str) -> BranchNode:
        node = self._nodes.get(name)
        if node is None:
            text = f"there is no branch {name[:100]!r}: it was deleted, or not used for {self._ttl_s:g} s"
            raise HttpError(404, text, param="id")
        node.use()
        return node

    def all(self) -> list[BranchNode]:
        """Return all nodes, oldest first."""
        oldest = monotonic() - self._ttl_s
        for node in [node for node in self._nodes.values() if node.used < oldest]:
            self._remove(node)
        return list(self._nodes.values())

    @contextmanager
    def room_for(self, n: int) -> Iterator[None]:
        """Reserve places for ``n`` nodes that are added inside the block.

        Raises:
            HttpError: there are too many, counting reserved places.
        """
        n_branches = len(self.all()) + self._n_promised
        if n_branches + n > self._most:
            message = (
                f"there are {n_branches} branches, {self._most} may exist: delete some, or wait until "
                f"some have not been used for {self._ttl_s:g} s"
            )
            raise HttpError(
                429, message, kind="branch_quota_exceeded", branches=n_branches, max_branches=self._most,
                ttl_s=self._ttl_s,
            )  # fmt: skip
        self._n_promised += n
        try:
            yield
        finally:
            self._n_promised -= n

    def add(self, node: BranchNode) -> None:
        """Keep a new node; if its parent was deleted meanwhile, it becomes a root."""
        if node.parent is not None and node.parent.id not in self._nodes:
            node.parent, node.fork_position = None, 0
        self._nodes[node.id] = node
        if node.parent is not None:
            node.parent.children.append(node)
        node.use()

    def delete(self, node: BranchNode, *, subtree: bool) -> int:
        """Delete a node, with ``subtree`` also the nodes below it; return how many were deleted."""
        if node.children and not subtree:
            message = f"{len(node.children)} branches begin with it: ?subtree=true deletes them too"
            raise HttpError(409, message)
        nodes = node.subtree()
        for below in nodes:
            self._remove(below)
        return len(nodes)

    def _remove(self, node: BranchNode) -> None:
        self._nodes.pop(node.id, None)
        if node.parent is not None and node in node.parent.children:
            node.parent.children.remove(node)
