"""Many branches of one context in one decode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import SupportsIndex

from ..arguments import whole
from ..context import Context, TokenScore
from ..context.logits import LogitsRow
from ..errors import BranchStateError, ConfigError
from ..model import TokenIds, token_list
from ..pictures import tree
from .branch import Branch
from .scoring import score_all
from .token import Produced
from .tree import DEFAULT_COLUMNS, BranchTree, tree_lines

__all__ = ["BranchStore"]


class BranchStore:
    """Advances branches of one context together: one llama.cpp decode for all of them.

    Every call is a transaction: all branches change, or an error is raised and none has changed.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx

    def prefill(self, prompts: Mapping[Branch, TokenIds]) -> None:
        """Prefill each branch; all prompts are packed into as few decodes as possible.

        Raises:
            ConfigError: a branch of another context, or no tokens for one.
            BranchStateError, TokenizeError, CacheFullError, DecodeError: no branch has changed.
        """
        with self._ctx.lock:
            work = {branch: token_list(tokens) for branch, tokens in prompts.items()}
            for branch, tokens in work.items():
                self._check(branch)
                branch.sequence.check_prefill(tokens)
            rows = self._decode(work)
            for branch, tokens in work.items():
                branch.sequence.append_prompt(tokens, rows[branch])

    def append(self, texts: Mapping[Branch, TokenIds]) -> None:
        """Append tokens that each branch reads, as `Branch.append`, in as few decodes as possible.

        Raises:
            ConfigError: a branch of another context, or no tokens for one.
            BranchStateError, TokenizeError, CacheFullError, DecodeError: no branch has changed.
        """
        with self._ctx.lock:
            work = {branch: token_list(tokens) for branch, tokens in texts.items()}
            for branch, tokens in work.items():
                self._check(branch)
                branch.sequence.check_read(tokens)
            rows = self._decode(work)
            for branch, tokens in work.items():
                branch.sequence.append_prompt(tokens, rows[branch])

    def read(
        self,
        texts: Mapping[Branch, TokenIds],
        visit: Callable[[Branch, int, LogitsRow], None],
        first_rows: Mapping[Branch, int],
    ) -> None:
        """Append tokens that each branch reads, as ``append``, and show their logits to ``visit``.

        No logits are kept, so the memory it takes is that of one decode's rows (``n_outputs_max``),
        however many tokens there are. ``Branch.logits`` decodes the last token again if it is asked.

        Args:
            texts: for each branch its tokens.
            visit: called with a branch, the index of one of its tokens here, and the logits after it: an
                object with ``array``, float32 (V,), ``logprob(token)`` and ``entropy()`` in nats,
                ``best`` and ``rank(token)``, valid until the call returns.
            first_rows: for each branch the index of the first token whose logits are shown; those of all
                later ones are, too. A branch that is not in it shows none.

        Raises:
            ConfigError: a branch of another context, no tokens for one, or an index below 0.
            BranchStateError, TokenizeError, CacheFullError, DecodeError, and what ``visit`` raises: no
            branch has changed.
        """
        with self._ctx.lock:
            work = {branch: token_list(tokens) for branch, tokens in texts.items()}
            for branch, tokens in work.items():
                self._check(branch)
                branch.sequence.check_read(tokens)
            first = {branch: whole("a first row", i, 0) for branch, i in first_rows.items()}
            packed = [
                (branch, i, token, i >= first.get(branch, len(tokens)))
                for branch, tokens in work.items()
                for i, token in enumerate(tokens)
            ]
            starts = {branch.seq_id: branch.position for branch in work}
            decoder, cache = self._ctx.decoder, self._ctx.kv_cache
            decoder.make_room(len(packed))
            try:
                for pack in _pieces(packed, self._ctx.n_batch, self._ctx.n_outputs_max):
                    seqs = [branch.seq_id for branch, _, _, _ in pack]
                    rows = decoder.decode([t for _, _, t, _ in pack], seqs, [w for *_, w in pack])
                    shown = ((branch, i) for branch, i, _, wanted in pack if wanted)
                    for (branch, i), row in zip(shown, rows, strict=True):
                        visit(branch, i, row)
            except BaseException:
                for seq_id, start in starts.items():
                    if cache.next_position(seq_id) > start:
                        cache.cut(seq_id, start)
                raise
            for branch, tokens in work.items():
                branch.sequence.append_prompt(tokens, None)

    def append_unscored(self, texts: Mapping[Branch, Sequence[int]]) -> None:
        """Append tokens to each branch without surprisals, in as few decodes as possible.

        For drafters, whose branches follow the target's. Raises the errors of ``commit``.
        """
        with self._ctx.lock:
            work = {branch: token_list(tokens) for branch, tokens in texts.items() if tokens}
            for branch in work:
                self._check(branch)
            rows = self._decode(work)
            for branch, tokens in work.items():
                branch.sequence.append_unscored(tokens, rows[branch])

    def commit(self, tokens: Mapping[Branch, SupportsIndex]) -> None:
        """Append one token to each branch.

        Raises:
            ConfigError, BranchStateError, TokenizeError, GrammarError, CacheFullError, DecodeError:
                no branch has changed.
        """
        with self._ctx.lock:
            given: dict[Branch, int] = {}
            surprisals = {}
            for branch, value in tokens.items():
                self._check(branch)
                given[branch] = token = self._ctx.model.token_id(value)
                surprisals[branch] = branch.sequence.check_commit(token)
            rows = self._decode({branch: [token] for branch, token in given.items()})
            for branch, token in given.items():
                branch.sequence.append(token, surprisals[branch], rows[branch])

    def step(self, branches: Iterable[Branch]) -> dict[Branch, Produced]:
        """Produce and commit one token for each branch; a branch that drew an EOG token does not change.

        Raises:
            ConfigError: the same branch twice. And the errors of ``commit``.
        """
        with self._ctx.lock:
            listed = list(branches)
            if len(set(listed)) != len(listed):
                raise ConfigError("duplicate branch in one step")
            for branch in listed:
                self._check(branch)
            produced = {branch: branch.produce() for branch in listed}
            self.commit({b: p.token for b, p in produced.items() if not p.is_stop})
            for branch, token in produced.items():
                if token.is_stop:
                    branch.sequence.finish_reason = "stop"
            return produced

    def score(
        self, work: Mapping[Branch, Sequence[TokenIds]], top: int = 0
    ) -> dict[Branch, list[list[TokenScore]]]:
        """Rate given continuations of branches, as ``Branch.score``, many in one decode.

        Args:
            work: for each branch its continuations, each of at least one token.
            top: how many of the most probable tokens to give for each token.

        Raises:
            ConfigError: a branch of another context, or no tokens.
            BranchStateError, TokenizeError, CacheFullError, DecodeError: no branch has changed.
        """
        with self._ctx.lock:
            items: list[tuple[Branch, list[int]]] = []
            for branch, continuations in work.items():
                self._check(branch)
                items += [(branch, token_list(tokens)) for tokens in continuations]
            for _, tokens in items:
                if not tokens:
                    raise ConfigError("nothing to score: no tokens")
                self._ctx.model.check_tokens(tokens)
            pairs = [(branch.sequence, tokens) for branch, tokens in items]
            scores = score_all(self._ctx, pairs, whole("top", top, 0))
            found: dict[Branch, list[list[TokenScore]]] = {branch: [] for branch in work}
            for (branch, _), its in zip(items, scores, strict=True):
                found[branch].append(its)
            return found

    def retain_only(self, winner: Branch) -> None:
        """Prune every branch of the context but ``winner``, which becomes a root."""
        with self._ctx.lock:
            self._check(winner)
            roots = {self._root(branch) for branch in self._branches()}
            winner.detach()
            for child in winner.children:
                child.prune_subtree()
            for root in roots:
                if root is not winner:
                    root.prune_subtree()

    def tree(self, columns: Sequence[str] = DEFAULT_COLUMNS) -> BranchTree:
        """Return the branches that are not pruned as a tree, for printing.

        Each branch has a line: the text since its fork, and figures since its fork.

        Args:
            columns: which figures: "fork" (where it was forked), "logprob" (nats), "perplexity",
                "position", "seed", "seq_id", "state", "tokens".

        Returns:
            an object whose ``str`` is the tree; its ``print()`` colours it on a terminal, and its
            ``to_dot()`` returns it for Graphviz.

        Raises:
            ConfigError: an unknown column.
        """
        with self._ctx.lock:
            return BranchTree(tree_lines(self._roots(), columns))

    def _repr_html_(self) -> str:
        with self._ctx.lock:
            if self._ctx.closed:
                return tree((), caption="the context is closed")
            used = self._ctx.usage()
            caption = (
                f"{used.cells_used} of {used.cells_total} cells used, {used.cells_shared} shared"
            )
            return tree(tree_lines(self._roots(), DEFAULT_COLUMNS), caption=caption)

    def _roots(self) -> list[Branch]:
        return [b for b in self._branches() if b.parent is None or b.parent.state == "pruned"]

    def _branches(self) -> list[Branch]:
        return [holder for holder in self._ctx.holders() if isinstance(holder, Branch)]

    @staticmethod
    def _root(branch: Branch) -> Branch:
        while branch.parent is not None and branch.parent.state != "pruned":
            branch = branch.parent
        return branch

    def _check(self, branch: Branch) -> None:
        if branch.ctx is not self._ctx:
            raise ConfigError("the branch belongs to another context")
        if branch.state == "pruned":
            raise BranchStateError("the branch is pruned")

    def _decode(self, work: Mapping[Branch, Sequence[int]]) -> dict[Branch, LogitsRow]:
        """Decode all tokens, packed to n_batch; return each branch's last row."""
        if not work:
            return {}
        decoder, cache = self._ctx.decoder, self._ctx.kv_cache
        size = self._ctx.n_batch
        starts = {branch.seq_id: branch.position for branch in work}
        packed = list(
            chain.from_iterable(
                ((branch, token, i == len(tokens) - 1) for i, token in enumerate(tokens))
                for branch, tokens in work.items()
            )
        )
        expiring = [row for branch in work for row in branch.sequence.expiring_rows()]
        rows: dict[Branch, LogitsRow] = {}
        if len(packed) > size:
            decoder.make_room(len(packed))
        try:
            for low in range(0, len(packed), size):
                for row in rows.values():
                    row.detach()
                pack = packed[low : low + size]
                new = decoder.decode(
                    [token for _, token, _ in pack],
                    [branch.seq_id for branch, _, _ in pack],
                    [last for _, _, last in pack],
                    expiring if len(packed) <= size else (),
                )
                rows.update(zip((b for b, _, last in pack if last), new, strict=True))
        except BaseException:
            for seq_id, start in starts.items():
                if cache.next_position(seq_id) > start:
                    cache.cut(seq_id, start)
            raise
        return rows


_Token = tuple[
    Branch, int, int, bool
]  # of a branch its i-th token, and whether its logits are wanted


def _pieces(packed: Sequence[_Token], most: int, most_rows: int) -> Iterator[Sequence[_Token]]:
    """Yield decodes of at most ``most`` tokens, of which at most ``most_rows`` want their logits."""
    low = n_rows = 0
    for i, (*_, wanted) in enumerate(packed):
        if i - low == most or n_rows + wanted > most_rows:
            yield packed[low:i]
            low, n_rows = i, 0
        n_rows += wanted
    if packed:
        yield packed[low:]
