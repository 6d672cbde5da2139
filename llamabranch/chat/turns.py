"""The branches that a chat keeps: one where a prompt ends, one where an answer ends.

They are a cache. A new prompt takes the branch with the longest common prefix: it is forked, the fork is
cut after that prefix (if the memory can be cut), and it processes the rest of the prompt. When sequences
or cells run out, the least recently used branches are pruned; their tokens are evaluated again when they
are needed. If any other text in the context needs a sequence, in any thread, all but the most recently
used branch can be evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeVar

from ..branch import Branch
from ..context import Context
from ..context.prefix_cache import n_common
from ..context.progress import OnPromptProgress, Reading
from ..errors import CapacityError, SequencesExhaustedError
from ..sampling import SamplingParams

__all__ = ["TurnBranches"]

T = TypeVar("T")


class TurnBranches:
    """Branches at the ends of turns, the least recently used first.

    Args:
        ctx: the context that holds them.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._branches: list[Branch] = []

    def read(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        on_prompt_progress: OnPromptProgress | None = None,
        *,
        n_next: int = 0,
    ) -> tuple[Branch, int]:
        """Return a kept branch with exactly these tokens, and how many of them were evaluated.

        ``on_prompt_progress``: as for ``Branch.append``. ``n_next``: how many of these tokens the prompt
        of the next turn will probably begin with; memory that cannot be cut everywhere keeps a checkpoint
        there.

        Raises:
            CapacityError, DecodeError: the tokens cannot be processed. Only branches that were pruned
            are lost.
        """
        best, n = self._nearest(tokens)
        if best is not None and best.position == n == len(tokens):
            return best, 0
        if best is None:
            branch = self.with_room(lambda: Branch.create(self._ctx, sampling))
            n = branch.sequence.take_cached(tokens[:-1])
        else:
            branch = self.fork(best)
        try:
            branch.rewind(n)
            report = on_prompt_progress
            if report is not None and n < n_next < len(tokens):  # two parts, shown as one prompt
                report = Reading(n, len(tokens)).relayed(report)
            for part in (tokens[n:n_next], tokens[max(n, n_next) :]):
                if part:
                    append = partial(branch.append, part, on_prompt_progress=report)
                    self.with_room(append, branch)
            branch.sequence.keep_cached()
        except BaseException:
            self._drop(branch)
            raise
        self.keep(branch)
        return branch, len(tokens) - n

    def _nearest(self, tokens: Sequence[int]) -> tuple[Branch | None, int]:
        """Return the branch to begin from, now marked as in use, and the length of the common prefix."""
        best, most = None, 0
        with self._ctx.lock:  # so that no other thread evicts the branch before it counts as used
            for branch in self.living():
                n = n_common(branch.sequence.tokens, tokens)
                if not n == branch.position == len(tokens):
                    n = min(n, len(tokens) - 1)  # the last token's logits are needed
                if n < branch.position:
                    n = self._ctx.kv_cache.usable(branch.seq_id, n)
                if n > most or (n and n == most and branch.position == n):
                    best, most = branch, n
            if best is not None:
                self.keep(best)
        return best, most

    def living(self) -> list[Branch]:
        """Return the kept branches without those that were pruned elsewhere."""
        return [branch for branch in self._branches if branch.state != "pruned"]

    def evictable(self) -> list[int]:
        """Return the sequences that may be taken: all but that of the most recently used branch."""
        return [branch.seq_id for branch in self.living()[:-1]]

    def evict(self, used: Collection[int]) -> bool:
        """Prune one of these for another text, see `Evictable`."""
        return self._prune_of(self.living()[:-1], used)

    def keep(self, branch: Branch) -> None:
        """Keep a branch as the most recently used one."""
        with self._ctx.lock:
            self._branches = [kept for kept in self.living() if kept is not branch] + [branch]
            self._ctx.sequences.evict_last(self)

    def fork(self, branch: Branch) -> Branch:
        """Return a fork of a kept branch or, if there is no free sequence, a branch that replaces it."""
        try:
            return self.with_room(branch.fork, branch)
        except SequencesExhaustedError:
            with self._ctx.lock:
                return branch.transfer_text()

    def with_room(self, act: Callable[[], T], used: Branch | None = None) -> T:
        """Return the result of ``act``; prune branches other than ``used`` until it succeeds."""
        while True:
            try:
                return act()
            except CapacityError:
                if not self.prune_one(used):
                    raise

    def prune_one(self, used: Branch | None = None) -> bool:
        """Prune the least recently used branch; False if only ``used`` is left."""
        with self._ctx.lock:
            return self._prune_of(self.living(), () if used is None else (used.seq_id,))

    def _prune_of(self, branches: list[Branch], used: Collection[int]) -> bool:
        least_recent = next((branch for branch in branches if branch.seq_id not in used), None)
        if least_recent is not None:
            self._drop(least_recent)
        return least_recent is not None

    def _drop(self, branch: Branch) -> None:
        with self._ctx.lock:
            for child in branch.children:
                child.detach()
            branch.prune()

    def close(self) -> None:
        """Prune all of them."""
        while self.prune_one():
            pass
