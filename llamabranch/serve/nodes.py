"""Branches as immutable nodes.

A node is a list of token ids with the settings to continue it. Whether its K/V is in the cache is a matter
of time only: what was evicted is decoded again when it is needed, and since batches are exact, no result
depends on that. So there are no locks, and sequences cannot run out. A node keeps the tokens that it adds
to its parent's; a tree that nobody uses is deleted after a while.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic

import msgspec

from ..engine import Request
from ..errors import ConfigError
from ..sampling import SamplingParams
from ..sampling.grammar import Grammar
from .errors import HttpError

__all__ = ["Branches", "Node"]

_FILE = "branches.json"


@dataclass(eq=False)
class Node:
    """A text that can be continued.

    Attributes:
        id: its name.
        parent: the node whose first ``start`` tokens it begins with; None for a root.
        own: its tokens after those.
        n_read: tokens that were read, not generated: the grammar begins after them.
        sampling: settings, with a seed.
        finish_reason: how its generation ended; None where none did.
        used: when it, or a node below it, was last used.
        children: the nodes that begin with it.
        next: entropy and the most probable tokens after it, once they are known.
    """

    id: str
    parent: Node | None
    start: int
    own: array[int]
    n_read: int
    sampling: SamplingParams
    grammar: Grammar | None = None
    finish_reason: str | None = None
    used: float = 0.0
    children: list[Node] = field(default_factory=list)
    next: dict[str, object] | None = None

    @property
    def position(self) -> int:
        """How many tokens it has."""
        return self.start + len(self.own)

    @property
    def tokens(self) -> list[int]:
        """All its token ids."""
        parts: list[array[int]] = []
        node: Node | None = self
        end = self.position
        while node is not None:
            parts.append(node.own[: max(0, end - node.start)])
            end = min(end, node.start)
            node = node.parent
        return [token for part in reversed(parts) for token in part]

    @property
    def root(self) -> Node:
        """The node without a parent that it comes from."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def subtree(self) -> Iterator[Node]:
        """Yield it and all nodes below."""
        left = [self]
        while left:
            node = left.pop()
            yield node
            left += node.children

    def request(self, tokens: Sequence[int] | None = None, **more: object) -> Request:
        """Return a request that continues it, or ``tokens`` of it."""
        prompt = self.tokens if tokens is None else list(tokens)
        continues = max(0, min(len(prompt) - self.n_read, len(prompt) - 1))
        given = {"sampling": self.sampling, "grammar": self.grammar, "continues": continues, **more}
        return Request(prompt, **given)  # type: ignore[arg-type]


class Branches:
    """The nodes of a server.

    Args:
        most: how many there may be.
        ttl_s: a tree that nobody has used for as long is deleted.
        folder: where they are kept while the server does not run; None = nowhere.
        fingerprint: of the model: nodes of another one are not read.
    """

    def __init__(self, most: int, ttl_s: float, folder: Path | None, fingerprint: str) -> None:
        self._most = most
        self._ttl_s = ttl_s
        self._file = None if folder is None else folder / _FILE
        self._fingerprint = fingerprint
        self._nodes: dict[str, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __getitem__(self, name: str) -> Node:
        node = self._nodes.get(name)
        if node is None:
            raise HttpError(
                404,
                f"there is no branch {name[:100]!r}: it was deleted, or {self._ttl_s:g} s without use",
                param="id",
            )
        self._touch(node)
        return node

    def _touch(self, node: Node) -> None:
        now = monotonic()
        above: Node | None = node
        while above is not None:
            above.used = now
            above = above.parent

    def all(self) -> list[Node]:
        """Return all nodes, oldest first."""
        self._expire()
        return list(self._nodes.values())

    def check_quota(self, n: int) -> None:
        """Raise unless ``n`` nodes more may be made.

        Raises:
            HttpError: they may not.
        """
        if len(self._nodes) + n > self._most:
            self._expire()
        if len(self._nodes) + n > self._most:
            raise HttpError(
                429,
                f"there are {len(self._nodes)} branches, {self._most} may exist: delete some, or wait "
                f"until some have not been used for {self._ttl_s:g} s",
                kind="branch_quota_exceeded",
                more={
                    "branches": len(self._nodes),
                    "max_branches": self._most,
                    "ttl_s": self._ttl_s,
                },
            )

    def _expire(self) -> None:
        oldest = monotonic() - self._ttl_s
        for node in [node for node in self._nodes.values() if node.used < oldest]:
            self._remove(node)

    def add(self, node: Node) -> Node:
        """Keep a new node; return it."""
        self._nodes[node.id] = node
        if node.parent is not None:
            node.parent.children.append(node)
        self._touch(node)
        return node

    def delete(self, node: Node, *, subtree: bool) -> int:
        """Delete a node, with all below if asked for; return how many.

        Raises:
            HttpError: others begin with it.
        """
        if node.children and not subtree:
            raise HttpError(
                409, f"{len(node.children)} branches begin with it: ?subtree=true deletes them too"
            )
        gone = list(node.subtree())
        for each in reversed(gone):
            self._remove(each)
        return len(gone)

    def _remove(self, node: Node) -> None:
        self._nodes.pop(node.id, None)
        if node.parent is not None and node in node.parent.children:
            node.parent.children.remove(node)

    # -- while the server does not run -----------------------------------------------------------------

    def save(self) -> None:
        """Write them to the folder, if there is one."""
        if self._file is None:
            return
        nodes = [
            {
                "id": node.id,
                "parent": None if node.parent is None else node.parent.id,
                "start": node.start,
                "own": list(node.own),
                "n_read": node.n_read,
                "sampling": {
                    **asdict(node.sampling), "logit_bias": list(node.sampling.logit_bias.items()),
                },
                "grammar": None if node.grammar is None else node.grammar.as_dict(),
                "finish_reason": node.finish_reason,
            }
            for node in self.all()
        ]  # fmt: skip
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps({"fingerprint": self._fingerprint, "nodes": nodes}), "utf-8")
        os.replace(new, self._file)

    def load(self) -> int:
        """Read those of the folder; return how many.

        Raises:
            ConfigError: the file is not one that a server wrote.
        """
        if self._file is None or not self._file.exists():
            return 0
        try:
            found = json.loads(self._file.read_text("utf-8"))
            if found["fingerprint"] != self._fingerprint:
                return 0
            for given in found["nodes"]:
                self.add(self._read(given))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{self._file} cannot be read: {error}", hint="delete it, or name another folder"
            ) from None
        return len(found["nodes"])

    def _read(self, given: dict[str, object]) -> Node:
        sampling = dict(msgspec.convert(given["sampling"], dict[str, object]))
        bias = msgspec.convert(sampling.pop("logit_bias"), list[tuple[int, float]])
        grammar = msgspec.convert(given["grammar"], str | dict[str, object] | None)
        parent = given["parent"]
        return Node(
            str(given["id"]),
            None if parent is None else self._nodes[str(parent)],
            msgspec.convert(given["start"], int),
            array("i", msgspec.convert(given["own"], list[int])),
            msgspec.convert(given["n_read"], int),
            SamplingParams(logit_bias=dict(bias)).replace(**sampling),
            None if grammar is None else Grammar.from_dict(grammar),
            None if given["finish_reason"] is None else str(given["finish_reason"]),
        )
