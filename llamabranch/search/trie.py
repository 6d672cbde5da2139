"""Given texts as a tree of tokens, scored in as few decodes as possible."""

from __future__ import annotations

from collections.abc import Sequence

from ..branch import Branch
from ..branch.verification import Verification
from ..context.logits import LogitsRow
from ..errors import SequencesExhaustedError
from .node import SearchNode
from .scores import log_softmax
from .sequences import SearchSequences

__all__ = ["Trie"]


class Trie:
    """Texts that continue ``start``, as nodes of one token each; common beginnings are one.

    Attributes:
        paths: of each text, its nodes.
    """

    def __init__(
        self, sequences: SearchSequences, start: SearchNode, texts: Sequence[Sequence[int]]
    ) -> None:
        self._sequences = sequences
        self._start = start
        self._read_nodes: set[SearchNode] = set()
        self._mine: dict[SearchNode, list[SearchNode]] = {start: []}
        self.paths: list[list[SearchNode]] = []
        known: dict[tuple[SearchNode, int], SearchNode] = {}
        for text in texts:
            node, path = start, []
            for token in text:
                found = known.get((node, token))
                if found is None:
                    found = known[node, token] = sequences.child(node, [token], [0.0])
                    self._mine[node].append(found)
                    self._mine[found] = []
                path.append(found)
                node = found
            self.paths.append(path)

    def logprobs(self) -> list[list[float]]:
        """Return log p of every token of every text, nats; call ``score`` before."""
        return [
            [b.logprob - a.logprob for a, b in zip([self._start, *path], path, strict=False)]
            for path in self.paths
        ]

    def score(self) -> None:
        """Set ``logprob`` of all nodes; decode those that have children here, after ``start``."""
        sequences = self._sequences
        with sequences.ctx.lock:
            self._read_start()
            most = sequences.ctx.n_outputs_max
            # A start that is not the root takes a sequence of its own.
            room = sequences.capacity - (self._start is not sequences.root)
            batch: list[SearchNode] = []
            n_leaves = 0
            # Depth first, so that what is decoded together shares as much as possible.
            for node in self._inner():
                if len(batch) >= most or n_leaves == max(1, room):
                    self._decode(batch)
                    batch, n_leaves = self._above(node), 0
                batch.append(node)
                n_leaves += not any(self._mine[child] for child in self._mine[node])
            if batch:
                self._decode(batch)

    def _inner(self) -> list[SearchNode]:
        """Return the nodes that must be decoded: all that have children, parents first."""
        found, waiting = [], [*reversed(self._mine[self._start])]
        while waiting:
            node = waiting.pop()
            if self._mine[node]:
                found.append(node)
                waiting += reversed(self._mine[node])
        return found

    def _above(self, node: SearchNode) -> list[SearchNode]:
        """Return the nodes between the start and ``node``, parents first."""
        found = []
        while node.parent is not None and node.parent is not self._start:
            node = node.parent
            found.append(node)
        return found[::-1]

    def _read_start(self) -> None:
        sequences = self._sequences
        sequence = sequences.sequence(self._start)
        if sequence is None:
            branch, lacking = self._take()
            sequences.append({branch: lacking})
            sequences.hold(self._start, branch)
            sequence = branch.sequence
        self._read(self._start, sequence.logits_row())

    def _take(self) -> tuple[Branch, list[int]]:
        taken = self._sequences.take(self._start, reuse=False)
        if taken is None:
            raise SequencesExhaustedError("no sequence is left for a text that is scored")
        return taken

    def _decode(self, nodes: list[SearchNode]) -> None:
        """Decode ``nodes``, parents first, after the start; score their children."""
        ctx = self._sequences.ctx
        number = {node: i for i, node in enumerate(nodes)}
        parents = [-1 if node.parent is None else number.get(node.parent, -1) for node in nodes]
        is_chain = parents == list(range(-1, len(nodes) - 1))
        n_leaves = len(set(range(len(nodes))) - set(parents))
        stats = self._sequences.stats
        stats.tokens_redecoded += sum(node in self._read_nodes for node in nodes)
        stats.tokens_decoded += len(nodes)
        before = ctx.decoder.n_decodes
        fits = len(nodes) <= ctx.n_outputs_max and not ctx.kv_cache.tree_needs
        sequence = self._sequences.sequence(self._start)
        if is_chain:
            self._decode_chain(nodes)
        elif fits and sequence is not None and self._sequences.make_room(n_leaves, {self._start}):
            verification = Verification(sequence, [node.tokens[0] for node in nodes], parents)
            try:
                for node, row in zip(nodes, verification.decode(), strict=True):
                    self._read(node, row)
            finally:
                verification.abandon()
            peak = self._sequences.n_held + n_leaves
            stats.peak_sequences = max(stats.peak_sequences, peak)
        else:  # each text for itself
            inner = {node.parent for node in nodes}
            for node in nodes:
                if node not in inner:
                    self._decode_chain([*self._above(node), node])
        stats.decodes += ctx.decoder.n_decodes - before

    def _decode_chain(self, nodes: list[SearchNode]) -> None:
        sequences = self._sequences
        branch, lacking = self._take()
        try:
            if lacking:
                sequences.append({branch: lacking})
            tokens = [node.tokens[0] for node in nodes]
            for node, row in zip(nodes, branch.sequence.decode_run(tokens, "all"), strict=True):
                self._read(node, row)
        finally:
            sequences.discard(branch)

    def _read(self, node: SearchNode, row: LogitsRow) -> None:
        children = self._mine[node]
        if children and node not in self._read_nodes:
            self._read_nodes.add(node)
            logprobs = log_softmax(row.array)
            for child in children:
                child.logprob = node.logprob + float(logprobs[child.tokens[0]])
