"""The nodes of a search's tree."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["SearchNode"]


class SearchNode:
    """A node of a search's tree. Its text continues its parent's text by some tokens.

    Attributes:
        parent: the node it continues; None for the root, which is the prompt.
        tokens: the ids by which it continues its parent; empty for the root.
        text: the text that these tokens complete; for the root, the prompt.
        pieces: for each of its tokens, the text that it completes and its log p, nats.
        logprob: the sum of log p of all tokens from the root to here, including an EOG token, nats, under
            the model's own distribution.
        score: the score, reward or log-weight that the search compares; NaN if it does not compare this
            node.
        n_visits: how often a tree search went through it.
        status: "open" (it may be continued), "finished" (a hypothesis ends here) or "pruned".
        children: the nodes that continue it.
    """

    __slots__ = (
        "_pieces", "children", "logprob", "n_visits", "parent", "pending", "score", "status", "text",
        "tokens",
    )  # fmt: skip

    def __init__(
        self,
        parent: SearchNode | None,
        tokens: tuple[int, ...],
        logprob: float,
        text: str = "",
        pending: bytes = b"",
        pieces: tuple[tuple[str, float], ...] = (),
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.logprob = logprob
        self.text = text
        self.pending = pending  # the bytes of an incomplete character at its end
        self._pieces = pieces
        self.score = float("nan")
        self.n_visits = 0
        self.status = "open"
        self.children: list[SearchNode] = []
        if parent is not None:
            parent.children.append(self)

    def __repr__(self) -> str:
        return f"<SearchNode {self.text!r}, {self.status}, {len(self.children)} children>"

    @property
    def pieces(self) -> tuple[tuple[str, float], ...]:
        if len(self.tokens) > 1 and self._pieces:
            return self._pieces
        above = 0.0 if self.parent is None else self.parent.logprob
        return ((self.text, self.logprob - above),) if self.tokens else ()

    @property
    def path(self) -> list[SearchNode]:
        """The nodes from the root to this one, without the root."""
        nodes: list[SearchNode] = []
        node: SearchNode | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def path_tokens(self) -> list[int]:
        """The ids of all tokens from the root to here."""
        return [token for node in self.path for token in node.tokens]

    @property
    def path_text(self) -> str:
        """The text from the root to here, without characters that are still incomplete."""
        return "".join(node.text for node in self.path)

    def walk(self) -> Iterator[SearchNode]:
        """Yield this node and all nodes below it, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += reversed(node.children)

    def prune_open(self) -> None:
        """Set the status of open nodes below to "pruned", unless a finished node follows them."""
        nodes = list(self.walk())
        for node in reversed(nodes):
            if node.status == "open" and node is not self:
                leads = any(child.status != "pruned" for child in node.children)
                node.status = "open" if leads else "pruned"

    def as_dict(self) -> dict[str, object]:
        """Return the tree below this node as JSON types."""
        records: dict[int, dict[str, object]] = {}
        for node in reversed(list(self.walk())):  # no recursion: a beam of 2,000 tokens is as deep
            records[id(node)] = {
                "tokens": list(node.tokens),
                "text": node.text,
                "logprob": node.logprob,
                "score": node.score if node.score == node.score else None,
                "visits": node.n_visits,
                "status": node.status,
                "children": [records.pop(id(child)) for child in node.children],
            }
        return records[id(self)]
