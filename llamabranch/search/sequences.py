"""The candidates of a search and the sequences that hold them: one shared decode for each step.

A candidate is a node of the tree. As long as there are enough sequences, each candidate that may be
continued has a branch; the first child of a node gets its branch, the others are forks. Where there
are more candidates than sequences, or than cells, they are decoded in waves: a candidate without a branch
is decoded again, from its nearest ancestor that has one, in the same decode as its new tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from time import perf_counter
from typing import TypeVar

from ..branch import Branch, BranchStore
from ..branch.scorer import Wanted, read
from ..context.logits import LogitsRow
from ..errors import CacheFullError, ConfigError, DecodeInterruptedError, SequencesExhaustedError
from ..generation.text import Text
from .node import SearchNode
from .result import SearchStats

__all__ = ["OnStep", "SearchObserver", "SearchSequences"]

T = TypeVar("T")
OnStep = Callable[[SearchStats], bool | None]


class SearchObserver(ABC):
    """An ``on_step`` of any search that can look at its tree: a subclass has ``__call__``.

    Attributes:
        root: the tree, from the beginning of the search on; it grows in the search's thread, which waits
            while ``__call__`` runs.
        effective_sizes: of ``smc``: see `SearchResult`, those of the steps so far.
    """

    root: SearchNode | None = None
    effective_sizes: Sequence[float] = ()

    @abstractmethod
    def __call__(self, stats: SearchStats) -> bool | None:
        """Take the statistics so far; a true result ends the search."""


class SearchSequences:
    """The sequences of one search, all forked from ``branch``, which is left as it is.

    Use it as a context manager: at its end, and after any error, every sequence is returned.

    Args:
        branch: has read the prompt.
        on_step: called after each step with the statistics so far; a true result ends the search.

    Raises:
        BranchStateError: the branch is pruned or empty. SequencesExhaustedError: no sequence is free.

    Attributes:
        branch, root: the branch and its node.
        stats: what the search has cost so far.
        is_cancelled: whether ``on_step`` has asked for the end.
        observer: looks at the tree; None where nobody does.
    """

    def __init__(self, branch: Branch, on_step: OnStep | None = None) -> None:
        self.branch = branch
        self.ctx = branch.ctx
        self.stats = SearchStats()
        self.is_cancelled = False
        with self.ctx.lock:
            branch.sequence.logits_row()
            self.root = SearchNode(None, (), 0.0, branch.text, branch.sequence.incomplete)
            self.ctx.sequences.use(branch.seq_id, self)
            self.capacity = self.ctx.n_seq_free
        if self.capacity < 1:
            raise SequencesExhaustedError(
                "a search needs a sequence beside that of the prompt; "
                f"all {self.ctx.n_seq_max} are taken",
                hint="prune a branch, or create the context with a larger n_seq_max",
            )
        self.observer = on_step if isinstance(on_step, SearchObserver) else None
        if self.observer is not None:
            self.observer.root = self.root
        self._on_step = on_step
        self._store = BranchStore(self.ctx)
        self._held: dict[SearchNode, Branch] = {}  # least recently used first
        self._in_transit: list[Branch] = []  # branches on the way from one node to the next
        self._start = perf_counter()

    def __enter__(self) -> SearchSequences:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Return every sequence. Idempotent."""
        self.stats.elapsed_s = perf_counter() - self._start
        self.ctx.sequences.end_use(self)
        for branch in [*self._in_transit, *self._held.values()]:
            if not self.ctx.closed:
                branch.prune()
        self._held.clear()
        self._in_transit.clear()

    def child(
        self, parent: SearchNode, tokens: Sequence[int], logprobs: Sequence[float]
    ) -> SearchNode:
        """Add a node that continues ``parent``; ``logprobs`` are those of ``tokens``, nats."""
        pending, model = parent.pending, self.ctx.model
        pieces = []
        for token, logprob in zip(tokens, logprobs, strict=True):
            piece = ""
            if not model.is_eog(token):
                piece, pending = model.text_after(token, pending)
            pieces.append((piece, logprob))
        text = "".join(piece for piece, _ in pieces)
        logprob = parent.logprob + sum(logprobs)
        kept = tuple(pieces) if len(pieces) > 1 else ()
        return SearchNode(parent, tuple(tokens), logprob, text, pending, kept)

    def follow(self, parent: SearchNode, token: int, logprob: float) -> SearchNode:
        """Return the node that continues ``parent`` by ``token``, a new one if it does not exist yet."""
        key = (token,)
        node = next((child for child in parent.children if child.tokens == key), None)
        return self.child(parent, key, [logprob]) if node is None else node

    def end_step(self) -> bool:
        """Count a step and report it; return whether the search should end."""
        self.stats.steps += 1
        return self.report()

    def report(self) -> bool:
        """Report what the search has cost so far; return whether it should end."""
        self.stats.elapsed_s = perf_counter() - self._start
        if self._on_step is not None and self._on_step(self.stats):
            self.is_cancelled = True
        return self.is_cancelled

    def was_cancelled(self, error: DecodeInterruptedError) -> bool:
        """Return whether ``on_step`` asks for the end, after a decode was interrupted; else raise."""
        if self._on_step is None or not self._on_step(self.stats):
            raise error
        self.is_cancelled = True
        return True

    # -- sequences ---------------------------------------------------------------------------------

    def sequence(self, node: SearchNode) -> Text | None:
        """Return the sequence that holds ``node``; None if it has none now."""
        branch = self.branch if node is self.root else self._held.get(node)
        return None if branch is None else branch.sequence

    def retain(self, nodes: Iterable[SearchNode]) -> None:
        """Return the sequences of all other nodes."""
        kept = set(nodes)
        for node in [node for node in self._held if node not in kept]:
            self.release(node)

    def release(self, node: SearchNode) -> None:
        """Return the sequence of ``node``, if it has one; it can be decoded again."""
        branch = self._held.pop(node, None)
        if branch is not None:
            branch.prune()

    def hold(self, node: SearchNode, branch: Branch) -> None:
        """Keep ``branch``, which was taken with ``take``, as that of ``node``."""
        self._held[node] = branch
        self._in_transit.remove(branch)

    def discard(self, branch: Branch) -> None:
        """Return the sequence of a branch that was taken with ``take``."""
        if not branch.ctx.closed:
            branch.prune()
        self._in_transit.remove(branch)

    @property
    def n_held(self) -> int:
        """The number of sequences in use."""
        return len(self._held) + len(self._in_transit)

    def take(
        self,
        node: SearchNode,
        *,
        reuse: bool,
        protected: Collection[SearchNode] = (),
        wanted: Collection[SearchNode] = (),
    ) -> tuple[Branch, list[int]] | None:
        """Return a branch for a continuation of ``node`` and the tokens that it lacks; None = no room.

        Args:
            node: what is continued.
            reuse: its own branch may be taken over; else the branch is a fork.
            protected: nodes whose branches must not be taken away.
            wanted: nodes whose branches are taken away last.
        """
        if reuse and node in self._held:
            branch = self._held.pop(node)
            self._in_transit.append(branch)
            return branch, []
        if not self.make_room(1, {node, *protected}, wanted):
            return None
        missing: list[tuple[int, ...]] = []
        at = node
        while at.parent is not None and at not in self._held:
            missing.append(at.tokens)
            at = at.parent
        source = self.branch if at.parent is None else self._held[at]
        branch = source.fork()
        self._in_transit.append(branch)
        branch.detach()
        if at.parent is not None:  # it was used now
            self._held[at] = self._held.pop(at)
        self.stats.tokens_shared += branch.position
        self.stats.peak_sequences = max(self.stats.peak_sequences, self.n_held)
        lacking = [token for tokens in reversed(missing) for token in tokens]
        self.stats.tokens_redecoded += len(lacking)
        return branch, lacking

    def part(self, branch: Branch, position: int) -> Branch | None:
        """Return a fork of a branch that was taken, of its tokens up to a position; None = no room.

        Nothing is decoded: the next token is known.
        """
        if not self.make_room(1, ()):
            return None
        with self.ctx.lock:
            other = Branch(self.ctx, branch.sequence.sampler.clone(), branch.seed, branch)
            self._in_transit.append(other)
            other.rewind(position)
            other.detach()
        self.stats.tokens_shared += position
        self.stats.peak_sequences = max(self.stats.peak_sequences, self.n_held)
        return other

    def make_room(
        self, n: int, protected: Collection[SearchNode], wanted: Collection[SearchNode] = ()
    ) -> bool:
        """Make ``n`` sequences available, if need be by taking those of nodes; False if impossible."""
        while self.n_held + n > self.capacity:
            free = [node for node in self._held if node not in protected]
            if not free:
                return False
            self.release(next((node for node in free if node not in wanted), free[0]))
        return True

    # -- given texts -------------------------------------------------------------------------------

    def add_given(
        self, start: SearchNode, texts: Sequence[Sequence[int]]
    ) -> tuple[list[list[SearchNode]], list[list[float]]]:
        """Add given texts after ``start`` as nodes of one token each; return the nodes and log p of each.

        Common beginnings are the same nodes. Afterwards ``start`` is held, the new nodes are not.

        Raises:
            SequencesExhaustedError, CacheFullError, DecodeError.
        """
        with self.ctx.lock:
            if self.sequence(start) is None:
                taken = self.take(start, reuse=False)
                if taken is None:
                    raise SequencesExhaustedError("no sequence is left for texts that are scored")
                branch, lacking = taken
                self.append({branch: lacking})
                self.hold(start, branch)
            self.make_room(min(len(texts), self.capacity - (start is not self.root)), {start})
            after = self.sequence(start)
            before = self.stats.tokens_decoded
            logprobs = self.logprobs([Wanted(after, text) for text in texts])
        known: dict[tuple[SearchNode, int], SearchNode] = {}
        paths = []
        for text, its in zip(texts, logprobs, strict=True):
            path = [start]
            for token, logprob in zip(text, its, strict=True):
                key = path[-1], token
                if key not in known:
                    known[key] = self.child(path[-1], [token], [logprob])
                path.append(known[key])
            paths.append(path[1:])
        n_inner = len({parent for parent, _ in known} - {start})
        self.stats.tokens_redecoded += self.stats.tokens_decoded - before - n_inner
        return paths, logprobs

    def logprobs(self, wanted: Sequence[Wanted]) -> list[list[float]]:
        """Return log p of the tokens of given texts that are wanted, nats."""
        found: list[list[float]] = [[] for _ in wanted]
        stats, before = self.stats, self.ctx.decoder.n_decodes

        def visit(number: int, i: int, row: LogitsRow) -> None:
            found[number].append(row.logprob(wanted[number].tokens[i]))

        cost = read(self.ctx, wanted, visit)
        stats.decodes += self.ctx.decoder.n_decodes - before
        stats.tokens_decoded += cost.n_tokens
        stats.peak_sequences = max(stats.peak_sequences, self.n_held + cost.n_sequences)
        return found

    # -- decoding ----------------------------------------------------------------------------------

    def append(self, texts: dict[Branch, list[int]]) -> None:
        """Append tokens to branches that were taken, in one decode if they fit into a batch."""
        with self.ctx.lock:
            before = self.ctx.decoder.n_decodes
            self._store.append_unscored(texts)
            self.stats.decodes += self.ctx.decoder.n_decodes - before
            self.stats.tokens_decoded += sum(map(len, texts.values()))

    def advance(
        self,
        nodes: Sequence[SearchNode],
        read: Callable[[SearchNode, Text], T],
        *,
        keep: bool = False,
    ) -> list[T]:
        """Decode the tokens of ``nodes``, whose parents were decoded before; return what is read.

        Args:
            nodes: new nodes, not finished ones.
            read: called for each node with the sequence that holds it, while its logits are valid.
            keep: keep the branches of other nodes, as far as there are sequences; otherwise only the
                new nodes have branches afterwards.

        Raises:
            CacheFullError: there are not even cells for a single candidate. DecodeError.
        """
        if not keep:
            self.retain({node.parent for node in nodes if node.parent is not None})
        # Candidates whose parent has a branch come first: later it may be needed by others.
        order = sorted(range(len(nodes)), key=lambda i: nodes[i].parent not in self._held)
        found: dict[int, T] = {}
        at = 0
        while at < len(order):
            wave = order[at : at + self.capacity]
            later = {nodes[i].parent for i in order[at + len(wave) :]}
            wanted = set(self._held) if keep else {node for node in later if node is not None}
            with self.ctx.lock:
                try:
                    self._decode([nodes[i] for i in wave], wanted)
                except CacheFullError:
                    if len(wave) == 1 and not self._held:
                        raise
                    self.retain(())
                    self.capacity = max(1, len(wave) // 2)
                    continue
                for i in wave:
                    found[i] = read(nodes[i], self._held[nodes[i]].sequence)
            at += len(wave)
        return [found[i] for i in range(len(nodes))]

    def _decode(self, wave: Sequence[SearchNode], wanted: Collection[SearchNode]) -> None:
        """Decode the tokens of at most ``capacity`` nodes together; each has a branch afterwards."""
        left = Counter(node.parent for node in wave)
        work: list[tuple[SearchNode, Branch, list[int]]] = []
        try:
            for node in wave:
                parent = node.parent
                if parent is None:
                    raise ConfigError("the root of a search is decoded already")
                left[parent] -= 1
                protected = [other for other, n in left.items() if n and other is not None]
                taken = None
                if left[parent] or parent in wanted or parent not in self._held:
                    taken = self.take(parent, reuse=False, protected=protected, wanted=wanted)
                if taken is None:
                    taken = self.take(parent, reuse=True, protected=protected)
                if taken is None:  # impossible: a wave has at most as many nodes as sequences
                    raise SequencesExhaustedError("no sequence is left for a candidate")
                branch, lacking = taken
                work.append((node, branch, [*lacking, *node.tokens]))
            self.append({branch: tokens for _, branch, tokens in work})
        except BaseException:
            for _, branch, _ in work:
                self.discard(branch)
            raise
        for node, branch, _ in work:
            self.hold(node, branch)
