"""The tree that a search grows from a branch, its cost, and its observer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import perf_counter

from ..branch import Branch
from ..branch.scorer import Wanted, read
from ..context.logits import LogitsRow
from ..errors import DecodeInterruptedError, SequencesExhaustedError
from ..generation.text import Text
from .node import SearchNode
from .result import SearchStats

__all__ = ["OnStep", "SearchObserver", "SearchTree"]

OnStep = Callable[[SearchStats], bool | None]


class SearchObserver(ABC):
    """An ``on_step`` function that sees the tree of a search. Subclasses implement ``__call__``.

    Attributes:
        root: the root of the tree, set when the search begins. The tree grows in the search's thread,
            which waits while ``__call__`` runs.
        effective_sizes: only for ``smc``: the sizes of the steps so far; see `SearchResult`.
    """

    root: SearchNode | None = None
    effective_sizes: Sequence[float] = ()

    @abstractmethod
    def __call__(self, stats: SearchStats) -> bool | None:
        """Take the statistics so far; a true result ends the search."""


class SearchTree:
    """The tree of one search. The branch keeps its sequence meanwhile, and does not change.

    Args:
        branch: has read the prompt.
        on_step: called after each step with the statistics so far; a true result ends the search.

    Raises:
        BranchStateError: the branch is pruned or empty. SequencesExhaustedError: no sequence is free.

    Attributes:
        branch, root: the branch and its node.
        ctx: its context.
        stats: the cost of the search so far.
        capacity: how many sequences were free for it.
        is_cancelled: whether ``on_step`` has ended the search.
        observer: ``on_step``, if it is a `SearchObserver`; otherwise None.
    """

    def __init__(self, branch: Branch, on_step: OnStep | None = None) -> None:
        self.branch = branch
        self.ctx = branch.ctx
        self.stats = SearchStats()
        self.is_cancelled = False
        with self.ctx.lock:
            branch.sequence.logits_row()
            self.root = SearchNode(None, (), 0.0, branch.text, branch.sequence.incomplete)
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
        self._start = perf_counter()

    def __enter__(self) -> SearchTree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Note how long the search took."""
        self.stats.elapsed_s = perf_counter() - self._start

    # -- nodes -------------------------------------------------------------------------------------

    def child(
        self, parent: SearchNode, tokens: Sequence[int], logprobs: Sequence[float]
    ) -> SearchNode:
        """Add a node that continues ``parent``; ``logprobs`` has log p of each token, nats."""
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

    def add_given(
        self, start: SearchNode, after: Text, texts: Sequence[Sequence[int]], n_held: int = 0
    ) -> tuple[list[list[SearchNode]], list[list[float]]]:
        """Add given texts after ``start`` as nodes of one token each; return the nodes and log p of each.

        Common beginnings share nodes. ``after`` is the text at ``start``; ``n_held``: how many
        sequences the search holds.

        Raises:
            SequencesExhaustedError, CacheFullError, DecodeError.
        """
        before = self.stats.tokens_decoded
        logprobs = self.logprobs([Wanted(after, text) for text in texts], n_held)
        known: dict[tuple[SearchNode, int], SearchNode] = {}
        paths = []
        for text, token_logprobs in zip(texts, logprobs, strict=True):
            path = [start]
            for token, logprob in zip(text, token_logprobs, strict=True):
                key = path[-1], token
                if key not in known:
                    known[key] = self.child(path[-1], [token], [logprob])
                path.append(known[key])
            paths.append(path[1:])
        n_inner = len({parent for parent, _ in known} - {start})
        self.stats.tokens_redecoded += self.stats.tokens_decoded - before - n_inner
        return paths, logprobs

    def logprobs(self, wanted: Sequence[Wanted], n_held: int = 0) -> list[list[float]]:
        """Return, for each text, log p of its tokens to score, nats."""
        result: list[list[float]] = [[] for _ in wanted]
        stats, before = self.stats, self.ctx.decoder.n_decodes

        def visit(number: int, i: int, row: LogitsRow) -> None:
            result[number].append(row.logprob(wanted[number].tokens[i]))

        cost = read(self.ctx, wanted, visit)
        stats.decodes += self.ctx.decoder.n_decodes - before
        stats.tokens_decoded += cost.n_tokens
        stats.peak_sequences = max(stats.peak_sequences, n_held + cost.n_sequences)
        return result

    # -- steps -------------------------------------------------------------------------------------

    def end_step(self) -> bool:
        """Count a step and report it; return whether the search should end."""
        self.stats.steps += 1
        return self.report()

    def report(self) -> bool:
        """Report the cost so far; return whether the search should end."""
        self.stats.elapsed_s = perf_counter() - self._start
        if self._on_step is not None and self._on_step(self.stats):
            self.is_cancelled = True
        return self.is_cancelled

    def was_cancelled(self, error: DecodeInterruptedError) -> bool:
        """After an interrupted decode, return True if ``on_step`` ends the search; otherwise raise."""
        if self._on_step is None or not self._on_step(self.stats):
            raise error
        self.is_cancelled = True
        return True
