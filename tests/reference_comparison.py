"""Do the same in a context and in a reference in plain Python, and compare them.

After each step usage, tokens, parents and children must equal the reference's, and the ledger llama.cpp's
positions. A branch must equal its replay in a clean context: to the bit where the context is
batch-invariant and its cells are in order, up to rounding elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant
from reference_cache import (
    Exhausted,
    Full,
    ReferenceBranch,
    ReferenceSnapshot,
    ReferenceWorld,
)

import llamabranch as lb
from llamabranch import Branch, BranchStore, Context, SamplingParams
from llamabranch.errors import (
    BranchStateError,
    CacheFullError,
    CapacityError,
    SequencesExhaustedError,
)

N_CELLS = 256
N_SEQ = 6
N_BATCH = 32  # a longer prompt takes several decodes
CLOSE = 1.0  # logits: rounding differences are far smaller, a wrong token's are larger

SAMPLINGS = (
    SamplingParams(temperature=0.0, seed=5),
    SamplingParams(temperature=0.9, seed=5),
    SamplingParams(
        temperature=0.9, repeat_penalty=1.3, presence_penalty=0.2, penalty_last_n=12,
        dry_multiplier=0.8, dry_allowed_length=1, xtc_probability=0.3, seed=5,
    ),
)  # fmt: skip


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
    foreign: ClassVar[Branch]
    exact: ClassVar[bool]
    close: ClassVar[float]
    tally: ClassVar[Tally]

    def __init__(self) -> None:
        super().__init__()
        self.ctx = Context(
            self.model, n_ctx=N_CELLS, n_seq_max=N_SEQ, n_batch=N_BATCH, n_threads=1,
            batch_invariant=self.exact,
        )  # fmt: skip
        self.store = BranchStore(self.ctx)
        self.world = ReferenceWorld(N_CELLS, N_SEQ)
        self.cache = self.world.cache
        self.real: dict[ReferenceBranch, Branch] = {}
        self.pruned: Branch | None = None
        self.is_sound = True
        self.snapshots: list[tuple[ReferenceSnapshot, lb.Snapshot]] = []
        compact, usage = self.ctx.compact, self.ctx.usage

        def watched() -> bool:
            lengths = usage().sequences
            done = compact()
            if done:
                self.cache.compacted.append(lengths)
                self.tally.n_compacted += 1
            return done

        self.ctx.compact = watched  # type: ignore[method-assign]

    # -- context and reference -----------------------------------------------------------------------

    def both(self, real: Callable[[], object], reference: Callable[[], object]) -> bool:
        """Do it in the context and the reference; False if both report that there is no room."""
        refused: type[CapacityError] | None = None
        expected: type[CapacityError] | None = None
        try:
            real()
        except CapacityError as error:
            assert error.hint
            refused = type(error)
        try:
            reference()
        except Full:
            expected = CacheFullError
        except Exhausted:
            expected = SequencesExhaustedError
        assert refused is expected, (refused, expected)
        assert not self.cache.compacted
        self.tally.n_full += refused is CacheFullError
        self.tally.n_exhausted += refused is SequencesExhaustedError
        return refused is None

    def count(self, name: str) -> None:
        self.tally.steps[name] += 1
        self.is_sound = False  # until ``check`` has passed

    def need_branch(self) -> None:
        """Create an empty branch if there is none; raw calls leave a sequence for it."""
        if not self.world.branches:
            self.add_branch(
                lambda: Branch.create(self.ctx, self.settings(1, 5)),
                lambda: self.world.create(1, 5),
            )

    def branch(self, who: int) -> ReferenceBranch:
        self.need_branch()
        return self.world.branches[who % len(self.world.branches)]

    def some(self, mask: int) -> list[ReferenceBranch]:
        self.need_branch()
        return [b for i, b in enumerate(self.world.branches) if (mask >> i) & 1]

    def raw_seqs(self) -> list[int]:
        """Return the sequences that raw rules may use: the lower half, where no branch is."""
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
        known = set(self.world.branches)
        if self.both(lambda: new.append(real()), reference):
            (expected,) = set(self.world.branches) - known
            self.real[expected] = new[0]

    def drop_pruned(self) -> None:
        """Drop the branches that the reference has removed; they must be pruned."""
        for expected in [expected for expected in self.real if expected not in self.world.branches]:
            self.pruned = self.real.pop(expected)
            assert self.pruned.state == "pruned"

    # -- what must hold ----------------------------------------------------------------------------

    def compare(self, expected: ReferenceBranch) -> None:
        """A branch equals a fresh one after the same tokens."""
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
        usage, uses = self.ctx.usage(), self.cache.uses()
        assert usage.sequences == self.cache.lengths()
        assert usage.cells_used == len(uses)
        assert usage.cells_shared == sum(n > 1 for n in uses.values())
        assert usage.cells_total == N_CELLS
        assert usage.cells_used + usage.cells_reserved <= N_CELLS
        assert self.ctx.n_seq_free == len(self.world.free_seqs())
        self.ctx.audit()
        assert len(self.real) == len(self.world.branches)
        for expected, branch in self.real.items():
            assert branch.tokens == expected.tokens
            assert branch.position == len(expected.tokens)
            assert branch.n_prompt == expected.n_prompt
            assert branch.seq_id == expected.seq
            assert branch.seed == expected.seed
            assert branch.parent is (
                None if expected.parent is None else self.real[expected.parent]
            )
            ready = "finished" if expected.is_finished else "ready"
            assert branch.state == (ready if expected.tokens else "empty")
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
            self.cache.remove(seq)
        self.check()
        free = self.ctx.usage().cells_free
        if free:
            self.ctx.decode([2] * free, 0, logits="none")
        with pytest.raises(CacheFullError):
            self.ctx.decode([2], free)
        self.ctx.kv_cache_clear()
        assert self.ctx.usage().cells_used == 0
        self.ctx.audit()
