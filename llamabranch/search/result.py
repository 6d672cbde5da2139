"""What every search returns: hypotheses, statistics, and the tree it has looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

from ..pictures import Node, Token, tree

__all__ = ["Hypothesis", "SearchNode", "SearchResult", "SearchStats"]

MOST_DRAWN = 32  # hypotheses in a picture


class SearchNode:
    """A node of the tree of a search: a text that continues that of its parent by some tokens.

    Attributes:
        parent: the node it continues; None for the root, which is the prompt.
        tokens: the ids by which it continues its parent; empty for the root.
        text: the text that these tokens complete.
        logprob: log p of all tokens from the root to here, nats, under the model's own distribution;
            that of an EOG token included.
        score: what the search compares: a score, a reward or a log-weight; NaN where there is none.
        n_visits: how often a tree search went through it.
        status: "open" (it may be continued), "finished" (a hypothesis ends here) or "pruned".
        children: the nodes that continue it.
    """

    __slots__ = (
        "children", "logprob", "n_visits", "parent", "pending", "score", "status", "text", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        parent: SearchNode | None,
        tokens: tuple[int, ...],
        logprob: float,
        text: str = "",
        pending: bytes = b"",
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.logprob = logprob
        self.text = text
        self.pending = pending  # the bytes of a character that is incomplete at its end
        self.score = float("nan")
        self.n_visits = 0
        self.status = "open"
        self.children: list[SearchNode] = []
        if parent is not None:
            parent.children.append(self)

    def __repr__(self) -> str:
        return f"<SearchNode {self.text!r}, {self.status}, {len(self.children)} children>"

    @property
    def path(self) -> list[SearchNode]:
        """The nodes from the root, which is left out, to this one."""
        found: list[SearchNode] = []
        node: SearchNode | None = self
        while node is not None and node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

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
        """Set the status of all nodes below that lead to no finished one to "pruned"."""
        nodes = list(self.walk())
        for node in reversed(nodes):
            if node.status == "open" and node is not self:
                leads = any(child.status != "pruned" for child in node.children)
                node.status = "open" if leads else "pruned"

    def as_dict(self) -> dict[str, object]:
        """Return the tree below this node as JSON types."""
        made: dict[int, dict[str, object]] = {}
        for node in reversed(list(self.walk())):  # no recursion: a beam of 2,000 tokens is as deep
            made[id(node)] = {
                "tokens": list(node.tokens),
                "text": node.text,
                "logprob": node.logprob,
                "score": node.score if node.score == node.score else None,
                "visits": node.n_visits,
                "status": node.status,
                "children": [made.pop(id(child)) for child in node.children],
            }
        return made[id(self)]


@dataclass(frozen=True)
class Hypothesis:
    """One text that a search has found.

    Attributes:
        tokens: the generated ids, those of a stop string included, EOG tokens not.
        text: their text, without the stop string that ended it.
        logprob: the sum of their log-probabilities under the model's own distribution, nats; that of
            the EOG token that ended the text included.
        score: what the hypotheses are ordered by.
        finish_reason: "stop" (EOG token or stop string), "length", "capacity" (no room in the cache),
            "rejected" (given up while others were better) or "cancelled".
        node: where it ends in the tree.
    """

    tokens: list[int]
    text: str
    logprob: float
    score: float
    finish_reason: str
    node: SearchNode = field(repr=False, compare=False)

    def as_dict(self) -> dict[str, object]:
        """Return JSON types, without the node."""
        return {
            "tokens": self.tokens,
            "text": self.text,
            "logprob": self.logprob,
            "score": self.score,
            "finish_reason": self.finish_reason,
        }


@dataclass
class SearchStats:
    """The cost of a search.

    Attributes:
        decodes: calls of llama_decode.
        tokens_decoded: tokens in them.
        tokens_redecoded: how many of those had been decoded before, because there were fewer sequences
            or cells than candidates.
        tokens_shared: tokens that candidates took over from others, or from the prompt, by a fork.
        peak_sequences: the most sequences held at a time, that of the given branch not counted.
        steps: rounds of the search: tokens of a beam, steps of a step search, ...
        elapsed_s: seconds.
    """

    decodes: int = 0
    tokens_decoded: int = 0
    tokens_redecoded: int = 0
    tokens_shared: int = 0
    peak_sequences: int = 0
    steps: int = 0
    elapsed_s: float = 0.0

    def as_dict(self) -> dict[str, object]:
        """Return all counts and the time."""
        return asdict(self)


@dataclass(frozen=True)
class SearchResult:
    """What a search has found.

    Attributes:
        hypotheses: best first; empty if nothing could be generated.
        stats: what it has cost.
        tree: the prompt; all that was looked at is below it.
        log_evidence: of ``smc``: the logarithm of the estimated normalising constant; None elsewhere.
        votes: of ``vote``: the number of texts for each answer, most first; empty elsewhere.
    """

    hypotheses: list[Hypothesis]
    stats: SearchStats
    tree: SearchNode = field(repr=False)
    log_evidence: float | None = None
    votes: Mapping[str, int] = field(default_factory=dict)

    @property
    def best(self) -> Hypothesis:
        """The best hypothesis.

        Raises:
            IndexError: there is none.
        """
        return self.hypotheses[0]

    @property
    def text(self) -> str:
        """The text of the best hypothesis, "" if there is none."""
        return self.hypotheses[0].text if self.hypotheses else ""

    def _repr_html_(self) -> str:
        shown = self.hypotheses[:MOST_DRAWN]
        ends: dict[int, list[str]] = {}
        kept: dict[
            int, list[SearchNode]
        ] = {}  # by parent: what leads to a hypothesis, the best first
        known: set[int] = set()
        for rank, each in enumerate(shown, start=1):
            caption = f"{rank}. score {each.score:.3f}, {each.finish_reason}:"
            ends.setdefault(id(each.node), []).append(caption)
            for node in each.node.path:
                if id(node) not in known:
                    known.add(id(node))
                    kept.setdefault(id(node.parent), []).append(node)

        def drawn(node: SearchNode) -> Node:
            tokens = [_token(node)]
            while id(node) not in ends and len(kept[id(node)]) == 1:
                (node,) = kept[id(node)]
                tokens.append(_token(node))
            children = [drawn(child) for child in kept.get(id(node), ())]
            return Node(" ".join(ends.get(id(node), ())), tokens, children)

        roots = [drawn(child) for child in kept.get(id(self.tree), ())]
        if id(self.tree) in ends:  # a hypothesis without tokens
            roots.append(Node(" ".join(ends[id(self.tree)]), ()))
        stats = self.stats
        count = f"{len(self.hypotheses)} hypotheses" + (
            f", the best {MOST_DRAWN} shown" if len(self.hypotheses) > MOST_DRAWN else ""
        )
        cost = (
            f"{stats.tokens_decoded:,} tokens in {stats.decodes:,} decodes, {stats.elapsed_s:.2f} s"
        )
        return tree(roots, caption=f"{count}; {cost}")

    def as_dict(self, *, tree: bool = False) -> dict[str, object]:
        """Return JSON types; with ``tree`` also the whole tree."""
        record: dict[str, object] = {
            "hypotheses": [hypothesis.as_dict() for hypothesis in self.hypotheses],
            "stats": self.stats.as_dict(),
        }
        if self.log_evidence is not None:
            record["log_evidence"] = self.log_evidence
        if self.votes:
            record["votes"] = dict(self.votes)
        if tree:
            record["tree"] = self.tree.as_dict()
        return record


def _token(node: SearchNode) -> Token:
    """Return a node's text for a picture, with the mean log-probability of its tokens."""
    before = 0.0 if node.parent is None else node.parent.logprob
    return Token(node.text, (node.logprob - before) / max(1, len(node.tokens)))
