"""Many branches of one context in one decode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import SupportsIndex, TypeVar

from ..arguments import instance, items, whole
from ..context import Context, TokenScore
from ..context.logits import LogitsRow
from ..context.runner import Batch
from ..errors import BranchStateError, ConfigError
from ..generation.output import Produced
from ..model import TokenIds, token_list
from .branch import Branch
from .scorer import Wanted, continuation, score
from .tree import DEFAULT_COLUMNS, BranchTree, tree_lines

__all__ = ["BranchStore"]

T = TypeVar("T")


class BranchStore:
    """Advances branches of one context together: one llama.cpp decode for all of them.

    Every call is a transaction: all branches change, or an error is raised and none of them has changed.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx

    def prefill(self, prompts: Mapping[Branch, TokenIds]) -> None:
        """Prefill each branch; all prompts are packed into as few decodes as possible.

        Raises:
            ConfigError: a branch belongs to another context, or gets no tokens.
            BranchStateError, TokenizeError, CacheFullError, DecodeError: no branch has changed.
        """
        self._read(prompts, as_prompt=True)

    def append(self, texts: Mapping[Branch, TokenIds]) -> None:
        """Append tokens to each branch as `Branch.append` does, in as few decodes as possible.

        Raises:
            ConfigError: a branch belongs to another context, or gets no tokens.
            BranchStateError, TokenizeError, CacheFullError, DecodeError: no branch has changed.
        """
        self._read(texts, as_prompt=False)

    def _read(self, texts: Mapping[Branch, TokenIds], *, as_prompt: bool) -> None:
        with self._ctx.lock:
            work = {branch: token_list(tokens) for branch, tokens in _pairs(texts)}
            for branch, tokens in work.items():
                self._check(branch)
                branch.sequence.check_read(tokens, as_prompt=as_prompt)
            rows = self._decode(work)
            for branch, tokens in work.items():
                branch.sequence.append_prompt(tokens, rows[branch])

    def append_unscored(self, texts: Mapping[Branch, Sequence[int]]) -> None:
        """Append tokens to each branch without surprisals, in as few decodes as possible.

        For searches, which have the log-probabilities already. Raises the errors of ``commit``.
        """
        with self._ctx.lock:
            work = {branch: token_list(tokens) for branch, tokens in _pairs(texts) if tokens}
            for branch in work:
                self._check(branch)
                branch.sequence.settle()
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
            token_ids: dict[Branch, int] = {}
            surprisals = {}
            for branch, value in _pairs(tokens):
                self._check(branch)
                token_ids[branch] = token = self._ctx.model.token_id(value)
                surprisals[branch] = branch.sequence.check_commit(token)
            rows = self._decode({branch: [token] for branch, token in token_ids.items()})
            for branch, token in token_ids.items():
                branch.sequence.append(token, surprisals[branch], rows[branch])

    def step(self, branches: Iterable[Branch]) -> dict[Branch, Produced]:
        """Produce and commit one token for each branch; a branch that drew an EOG token does not change.

        Raises:
            ConfigError: a branch is listed twice. It also raises the errors of ``commit``.
        """
        with self._ctx.lock:
            listed = items("branches", branches)
            for branch in listed:
                self._check(branch)
            if len(set(listed)) != len(listed):
                raise ConfigError("duplicate branch in one step")
            produced = {branch: branch.produce() for branch in listed}
            self.commit({b: p.token for b, p in produced.items() if not p.is_stop})
            for branch, token in produced.items():
                if token.is_stop:
                    branch.sequence.finish_reason = "stop"
            return produced

    def score(
        self, work: Mapping[Branch, Sequence[str | TokenIds]], top: int = 0
    ) -> dict[Branch, list[list[TokenScore]]]:
        """Score continuations of branches as ``Branch.score`` does, many in one decode.

        Args:
            work: maps each branch to its continuations, which are texts or token ids.
            top: how many of the most probable tokens to give for each token.

        Raises:
            ConfigError: a branch belongs to another context, or a continuation has no tokens.
            BranchStateError, TokenizeError, CacheFullError, DecodeError: no branch has changed.
        """
        model = self._ctx.model
        with self._ctx.lock:
            wanted: list[Wanted] = []
            n_texts: dict[Branch, int] = {}
            for branch, continuations in _pairs(work):
                self._check(branch)
                texts = items("the continuations of a branch", continuations)
                n_texts[branch] = len(texts)
                wanted += [Wanted(branch.sequence, continuation(model, text)) for text in texts]
            scores = iter(score(self._ctx, wanted, top=whole("top", top, 0)))
            return {branch: list(islice(scores, n)) for branch, n in n_texts.items()}

    def retain_only(self, winner: Branch) -> None:
        """Prune every branch of the context but ``winner``, which becomes a root."""
        with self._ctx.lock:
            self._check(winner)
            roots = self._roots()
            winner.detach()
            for child in winner.children:
                child.prune_subtree()
            for root in roots:
                if root is not winner:
                    root.prune_subtree()

    def tree(self, columns: Sequence[str] = DEFAULT_COLUMNS) -> BranchTree:
        """Return the branches that are not pruned as a tree, for printing.

        Each branch has a line with the text and the figures since its fork.

        Args:
            columns: which figures: "fork" (where it was forked), "logprob" (nats), "perplexity",
                "position", "seed", "seq_id", "state", "tokens".

        Returns:
            an object whose ``str`` is the tree; its ``print()`` colours it on a terminal.

        Raises:
            ConfigError: an unknown column.
        """
        with self._ctx.lock:
            return BranchTree(tree_lines(self._roots(), columns))

    def _roots(self) -> list[Branch]:
        living = [holder for holder in self._ctx.sequences.holders() if isinstance(holder, Branch)]
        return [b for b in living if b.parent is None or b.parent.state == "pruned"]

    def _check(self, branch: Branch) -> None:
        if instance("branch", branch, Branch).ctx is not self._ctx:
            raise ConfigError("the branch belongs to another context")
        if branch.state == "pruned":
            raise BranchStateError("the branch is pruned")

    def _decode(self, work: Mapping[Branch, Sequence[int]]) -> dict[Branch, LogitsRow]:
        """Decode all tokens; return each branch's last row."""
        if not work:
            return {}
        batch = Batch()
        for branch, tokens in work.items():
            batch.add(branch.seq_id, tokens)
        expiring = [row for branch in work for row in branch.sequence.expiring_rows()]
        rows = batch.decode(self._ctx.decoder, expiring)
        return {branch: branch_rows[-1] for branch, branch_rows in zip(work, rows, strict=True)}


def _pairs(work: Mapping[Branch, T]) -> Iterable[tuple[Branch, T]]:
    return instance("the branches", work, Mapping, "such as {branch: tokens}").items()  # type: ignore[type-abstract]
