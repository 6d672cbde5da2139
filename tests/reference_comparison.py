"""Do the same in a context and in a reference in plain Python, and compare them.

After each step the usage, tokens, parents and children must equal the reference's, and the table of cells
must equal llama.cpp's positions. A branch must equal its replay in a clean context: to the bit if the
context is exact and its cells are in order, otherwise up to rounding.

In the reference a cell is a number that is never used twice. A sequence maps positions to cells, and a
fork copies the map. The reference raises `Full` and `Exhausted` where the library must raise
``CacheFullError`` and ``SequencesExhaustedError``. A call that raises them has changed nothing, with one
exception: a branch whose last token had to be decoded again may be left without it (see `need_row`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant

import llamabranch as lb
from llamabranch import Branch, Context, SamplingParams
from llamabranch.errors import BranchStateError, CacheFullError, SequencesExhaustedError

N_CELLS = 256
N_SEQ = 6
N_BATCH = 32  # a longer prompt takes several decodes
CLOSE = 1.0  # in logits: rounding differences are far smaller, those of a wrong token are larger
END = 1 << 31

SAMPLINGS = (
    SamplingParams(temperature=0.0, seed=5),
    SamplingParams(temperature=0.9, seed=5),
    SamplingParams(
        temperature=0.9, repeat_penalty=1.3, presence_penalty=0.2, penalty_last_n=12,
        dry_multiplier=0.8, dry_allowed_length=1, xtc_probability=0.3, seed=5,
    ),
)  # fmt: skip


class Full(Exception):
    """No cell is free."""


class Exhausted(Exception):
    """No sequence is free."""


@dataclass(eq=False)
class ReferenceBranch:
    """The expected state of a branch; a copy without a parent is that of a snapshot."""

    seq: int
    sampling: int
    seed: int
    parent: ReferenceBranch | None = None
    tokens: list[int] = field(default_factory=list)
    n_prompt: int = 0
    has_row: bool = False
    is_finished: bool = False


class ReferenceWorld:
    """Branches, and for each sequence its cells by position. It uses nothing of the library."""

    def __init__(self, n_cells: int, n_seq: int) -> None:
        self.n_cells = n_cells
        self.held: list[dict[int, int]] = [{} for _ in range(n_seq)]
        self.compacted: list[dict[int, int]] = []  # lengths at each compaction that was observed
        self.branches: list[ReferenceBranch] = []
        self._names = itertools.count()

    # -- cells -------------------------------------------------------------------------------------

    def end(self, seq: int) -> int:
        """Return where the next token goes."""
        return max(self.held[seq], default=-1) + 1

    def lengths(self) -> dict[int, int]:
        return {seq: len(cells) for seq, cells in enumerate(self.held) if cells}

    def uses(self) -> Counter[int]:
        """Count for each cell in use how many sequences use it."""
        return Counter(cell for cells in self.held for cell in cells.values())

    def remove(self, seq: int, start: int = 0, end: int = END) -> None:
        cells = self.held[seq]
        self.held[seq] = {p: cell for p, cell in cells.items() if not start <= p < end}

    def share(self, source: int, target: int) -> None:
        self.held[target] = dict(self.held[source])

    def append(self, lengths: Mapping[int, int]) -> None:
        """Give each sequence this many more cells, or change none of them."""
        if self.compacted and self.compacted[0] == self.lengths():
            del self.compacted[0]
            self._compact()
        if len(self.uses()) + sum(lengths.values()) > self.n_cells:
            raise Full
        for seq, n in lengths.items():
            start = self.end(seq)
            self.held[seq].update((start + i, next(self._names)) for i in range(n))

    def _compact(self) -> None:
        """Store every common prefix once: the result is a trie of the texts."""
        texts = {branch.seq: branch.tokens for branch in self.branches}
        nodes: dict[tuple[int, int], int] = {}  # (cell before, token) -> cell
        for seq, length in self.lengths().items():
            before = -1
            for position, token in enumerate(texts[seq][:length]):
                if (before, token) not in nodes:
                    nodes[before, token] = next(self._names)
                before = self.held[seq][position] = nodes[before, token]

    # -- branches ----------------------------------------------------------------------------------

    def children(self, branch: ReferenceBranch) -> list[ReferenceBranch]:
        return [other for other in self.branches if other.parent is branch]

    def raw_seqs(self) -> list[int]:
        leased = {branch.seq for branch in self.branches}
        return [seq for seq in range(len(self.held)) if seq not in leased]

    def free_seqs(self) -> list[int]:
        return [seq for seq in self.raw_seqs() if not self.held[seq]]

    def create(self, sampling: int, seed: int) -> ReferenceBranch:
        """Take the highest free sequence."""
        free = self.free_seqs()
        if not free:
            raise Exhausted
        branch = ReferenceBranch(free[-1], sampling, seed)
        self.branches.append(branch)
        return branch

    def start(self, sampling: int, seed: int, tokens: Sequence[int]) -> ReferenceBranch:
        """Create a branch of these tokens, or none."""
        branch = self.create(sampling, seed)
        try:
            self.append({branch.seq: len(tokens)})
        except Full:
            self.branches.remove(branch)
            raise
        branch.tokens, branch.n_prompt, branch.has_row = list(tokens), len(tokens), bool(tokens)
        return branch

    def fork(self, parent: ReferenceBranch) -> ReferenceBranch:
        self.settle(parent)
        child = self.create(parent.sampling, parent.seed)
        child.parent, child.tokens = parent, list(parent.tokens)
        child.n_prompt, child.has_row = parent.n_prompt, parent.has_row
        self.share(parent.seq, child.seq)
        return child

    def settle(self, branch: ReferenceBranch) -> None:
        """Decode tokens again that an error has dropped, if there is room."""
        if self.end(branch.seq) < len(branch.tokens):
            with suppress(Full):
                self.need_row(branch)

    def need_row(self, branch: ReferenceBranch) -> None:
        """Decode the last token again if its logits are invalid; without a free cell it stays dropped."""
        if branch.tokens and not branch.has_row:
            self.remove(branch.seq, len(branch.tokens) - 1)
            self.append({branch.seq: 1})
            branch.has_row = True

    def grow(
        self, appended: Mapping[ReferenceBranch, Sequence[int]], is_prompt: bool = False
    ) -> None:
        """Append tokens. Before tokens of a prompt, only tokens dropped by an error are decoded again."""
        for branch in appended:
            if not is_prompt or self.end(branch.seq) < len(branch.tokens):
                self.need_row(branch)
        self.append({branch.seq: len(tokens) for branch, tokens in appended.items()})
        for branch, tokens in appended.items():
            branch.tokens += tokens
            branch.has_row, branch.is_finished = True, False
            branch.n_prompt = len(branch.tokens) if is_prompt else branch.n_prompt

    def rewind(self, branch: ReferenceBranch, position: int) -> None:
        if position < len(branch.tokens):
            self.remove(branch.seq, position)
            del branch.tokens[position:]
            branch.n_prompt = min(branch.n_prompt, position)
            branch.has_row = branch.is_finished = False

    def prune(self, branch: ReferenceBranch) -> None:
        """Remove the branch and its descendants."""
        for child in self.children(branch):
            self.prune(child)
        self.branches.remove(branch)
        self.remove(branch.seq)

    def promote(self, branch: ReferenceBranch) -> None:
        parent = branch.parent
        assert parent is not None
        branch.parent = parent.parent
        self.prune(parent)

    def snapshot(self, branch: ReferenceBranch) -> ReferenceBranch:
        self.need_row(branch)
        return replace(branch, parent=None, tokens=list(branch.tokens))

    def restore(self, saved: ReferenceBranch) -> ReferenceBranch:
        branch = self.start(saved.sampling, saved.seed, saved.tokens)
        branch.n_prompt, branch.is_finished = saved.n_prompt, saved.is_finished
        return branch


@dataclass
class Tally:
    """Counts over all runs of one machine."""

    steps: Counter[str]
    n_full: int = 0
    n_exhausted: int = 0
    n_compacted: int = 0
    n_exact: int = 0
    n_close: int = 0

    @property
    def n_steps(self) -> int:
        return sum(self.steps.values())


class ReferenceComparison(RuleBasedStateMachine):
    """A context and its reference: the rules are in `state_machine`."""

    model: ClassVar[lb.Model]
    clean: ClassVar[Context]
    exact: ClassVar[bool]
    close: ClassVar[float]
    tally: ClassVar[Tally]

    def __init__(self) -> None:
        super().__init__()
        self.ctx = Context(
            self.model, n_ctx=N_CELLS, n_seq_max=N_SEQ, n_batch=N_BATCH, n_threads=1,
            exact=self.exact,
        )  # fmt: skip
        self.world = ReferenceWorld(N_CELLS, N_SEQ)
        self.real: dict[ReferenceBranch, Branch] = {}
        self.pruned: Branch | None = None
        self.is_sound = True
        self.snapshots: list[tuple[ReferenceBranch, lb.Snapshot]] = []
        compact, usage = self.ctx.kv_cache.compact, self.ctx.usage

        def watched() -> bool:
            lengths = usage().sequences
            done = compact()
            if done:
                self.world.compacted.append(lengths)
                self.tally.n_compacted += 1
            return done

        self.ctx.kv_cache.compact = watched

    # -- context and reference -----------------------------------------------------------------------

    def both(self, real: Callable[[], object], reference: Callable[[], object]) -> bool:
        """Do it in the context and the reference; False if both report that there is no room."""
        refused = expected = ""
        try:
            real()
        except (CacheFullError, SequencesExhaustedError) as error:
            assert error.hint
            refused = "Full" if isinstance(error, CacheFullError) else "Exhausted"
        try:
            reference()
        except (Full, Exhausted) as error:
            expected = type(error).__name__
        assert refused == expected, (refused, expected)
        assert not self.world.compacted
        self.tally.n_full += refused == "Full"
        self.tally.n_exhausted += refused == "Exhausted"
        return not refused

    def count(self, name: str) -> None:
        self.tally.steps[name] += 1
        self.is_sound = False  # until ``check`` has passed

    def some(self, mask: int) -> list[ReferenceBranch]:
        """Return the branches of a mask; an empty one is created if there is none."""
        if not self.world.branches:  # raw calls leave one sequence free for it
            self.add_branch(
                lambda: Branch.create(self.ctx, self.settings(1, 5)),
                lambda: self.world.create(1, 5),
            )
        return [b for i, b in enumerate(self.world.branches) if (mask >> i) & 1]

    def pick(self, who: int) -> tuple[ReferenceBranch, Branch]:
        """Return a branch as the reference has it, and as the context has it."""
        everyone = self.some(-1)
        expected = everyone[who % len(everyone)]
        return expected, self.real[expected]

    def raw_seqs(self) -> list[int]:
        """Return the sequences that raw rules may use: those of the lower half without a branch."""
        return [seq for seq in self.world.raw_seqs() if seq < N_SEQ // 2]

    def raw(self, which: int) -> int:
        free = self.raw_seqs()
        return free[which % len(free)]

    def tokens(self, a: int, n: int) -> list[int]:
        return [(a * 7919 + i * i * 31 + 1) % self.model.n_vocab for i in range(n)]

    def settings(self, sampling: int, seed: int) -> SamplingParams:
        return SAMPLINGS[sampling].replace(seed=seed)

    def add_branch(
        self, real: Callable[[], Branch], reference: Callable[[], ReferenceBranch]
    ) -> None:
        """Add the branch that context and reference create, if there is room."""
        new: list[Branch] = []
        expected: list[ReferenceBranch] = []
        if self.both(lambda: new.append(real()), lambda: expected.append(reference())):
            self.real[expected[0]] = new[0]

    def drop_pruned(self) -> None:
        """Drop the branches that the reference has removed; the library must have pruned them."""
        for expected in [expected for expected in self.real if expected not in self.world.branches]:
            self.pruned = self.real.pop(expected)
            assert self.pruned.state == "pruned"

    # -- what must hold ----------------------------------------------------------------------------

    def compare(self, expected: ReferenceBranch) -> None:
        """Assert that a branch equals a new one after the same tokens."""
        branch = self.real[expected]
        if not expected.tokens:
            with pytest.raises(BranchStateError, match="empty"):
                branch.produce()
            return
        if not self.both(branch.produce, lambda: self.world.need_row(expected)):
            return
        with Branch.create(self.clean, self.settings(expected.sampling, expected.seed)) as again:
            if expected.n_prompt:
                again.prefill(expected.tokens[: expected.n_prompt])
            if expected.tokens[expected.n_prompt :]:
                again.extend(expected.tokens[expected.n_prompt :], logits="last")
            assert branch.text == again.text
            if self.exact and self.ctx.usage().in_order:
                self.tally.n_exact += 1
                assert np.array_equal(branch.logits, again.logits)
                assert branch.produce() == again.produce()
                assert branch.log_likelihood() == again.log_likelihood()
            else:
                self.tally.n_close += 1
                assert np.abs(branch.logits - again.logits).max() < self.close

    @invariant()
    def check(self) -> None:
        usage, uses = self.ctx.usage(), self.world.uses()
        assert usage.sequences == self.world.lengths()
        assert usage.cells_used == len(uses)
        assert usage.cells_shared == sum(n > 1 for n in uses.values())
        assert usage.cells_total == N_CELLS
        assert usage.cells_used + usage.cells_reserved <= N_CELLS
        assert self.ctx.n_seq_free == len(self.world.free_seqs())
        self.ctx.audit()
        assert len(self.real) == len(self.world.branches)
        for expected, branch in self.real.items():
            ready = "finished" if expected.is_finished else "ready"
            assert branch.tokens == expected.tokens
            assert (
                branch.position, branch.n_prompt, branch.seq_id, branch.seed, branch.parent, branch.state
            ) == (
                len(expected.tokens), expected.n_prompt, expected.seq, expected.seed,
                None if expected.parent is None else self.real[expected.parent],
                ready if expected.tokens else "empty",
            )  # fmt: skip
        self.is_sound = True

    def teardown(self) -> None:
        """Compare all branches; then exactly as many tokens fit as are reported free."""
        try:
            if self.is_sound:
                self.end()
        finally:
            self.ctx.close()

    def end(self) -> None:
        for expected in list(self.world.branches):
            self.compare(expected)
        for expected in [b for b in self.world.branches if b.parent is None]:
            self.real[expected].prune_subtree()
            self.world.prune(expected)
        self.drop_pruned()
        for seq in (0, 1):
            self.ctx.kv_cache_remove(seq)
            self.world.remove(seq)
        self.check()
        free = self.ctx.usage().cells_free
        if free:
            self.ctx.decode([2] * free, 0, logits="none")
        with pytest.raises(CacheFullError):
            self.ctx.decode([2], free)
        self.ctx.kv_cache_clear()
        usage = self.ctx.usage()
        assert (usage.cells_used, usage.cells_reserved, usage.in_order) == (0, 0, True)
        self.ctx.audit()
