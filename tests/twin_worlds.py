"""A context beside a reference in plain Python: doing the same in both, and comparing them.

After each step accounts, tokens and family must be what the reference says, and the ledger what
llama.cpp says. A branch must be what its replay in a clean context is: to the bit where the context is
batch-invariant and its cells are in order, close elsewhere.
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
CLOSE = 1.0  # logits: what rounding moves is far below, a wrong token moves more

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
    """What all runs of one machine did together."""

    steps: Counter[str]
    n_full: int = 0
    n_exhausted: int = 0
    n_rewritten: int = 0
    n_exact: int = 0
    n_close: int = 0

    @property
    def n_steps(self) -> int:
        return sum(self.steps.values())


class TwinWorlds(RuleBasedStateMachine):
    """A context and its reference: the rules are in `state_machine`."""

    model: ClassVar[lb.Model]
    clean: ClassVar[Context]
    stranger: ClassVar[Branch]
    exact: ClassVar[bool]
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
        self.dead: Branch | None = None
        self.is_sound = True
        self.snapshots: list[tuple[ReferenceSnapshot, lb.Snapshot]] = []
        compact, usage = self.ctx.compact, self.ctx.usage

        def watched() -> bool:
            lengths = usage().sequences
            done = compact()
            if done:
                self.cache.rewritten.append(lengths)
                self.tally.n_rewritten += 1
            return done

        self.ctx.compact = watched  # type: ignore[method-assign]

    # -- both worlds -------------------------------------------------------------------------------

    def both(self, real: Callable[[], object], reference: Callable[[], object]) -> bool:
        """Do it here and there; False if both say that there is no room."""
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
        assert not self.cache.rewritten
        self.tally.n_full += refused is CacheFullError
        self.tally.n_exhausted += refused is SequencesExhaustedError
        return refused is None

    def count(self, name: str) -> None:
        self.tally.steps[name] += 1
        self.is_sound = False  # until ``check`` has said so

    def need_branch(self) -> None:
        """Make an empty branch if there is none; raw calls leave a sequence for it."""
        if not self.world.branches:
            self.born(
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

    def born(self, real: Callable[[], Branch], reference: Callable[[], ReferenceBranch]) -> None:
        """Add the branch that both worlds make, if they can."""
        new: list[Branch] = []
        known = set(self.world.branches)
        if self.both(lambda: new.append(real()), reference):
            (twin,) = set(self.world.branches) - known
            self.real[twin] = new[0]

    def bury(self) -> None:
        """Forget the branches that the reference has no more; they must be pruned."""
        for twin in [twin for twin in self.real if twin not in self.world.branches]:
            self.dead = self.real.pop(twin)
            assert self.dead.state == "pruned"

    # -- what must hold ----------------------------------------------------------------------------

    def compare(self, twin: ReferenceBranch) -> None:
        """A branch is what a fresh one is after the same tokens."""
        branch = self.real[twin]
        if not twin.tokens:
            with pytest.raises(BranchStateError, match="empty"):
                branch.produce()
            return
        if not self.both(branch.produce, lambda: self.world.need_row(twin)):
            return
        with Branch.create(self.clean, self.settings(twin.sampling, twin.seed)) as again:
            if twin.n_prompt:
                again.prefill(twin.tokens[: twin.n_prompt])
            if twin.tokens[twin.n_prompt :]:
                again.extend(twin.tokens[twin.n_prompt :], logits="last")
            assert branch.text == again.text
            if self.exact and self.ctx.usage().in_order:
                self.tally.n_exact += 1
                assert np.array_equal(branch.logits, again.logits)
                assert branch.produce() == again.produce()
                assert branch.log_likelihood() == again.log_likelihood()
            else:
                self.tally.n_close += 1
                assert np.abs(branch.logits - again.logits).max() < CLOSE

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
        for twin, branch in self.real.items():
            assert branch.tokens == twin.tokens
            assert branch.position == len(twin.tokens)
            assert branch.n_prompt == twin.n_prompt
            assert branch.seq_id == twin.seq
            assert branch.seed == twin.seed
            assert branch.parent is (None if twin.parent is None else self.real[twin.parent])
            ready = "finished" if twin.is_finished else "ready"
            assert branch.state == (ready if twin.tokens else "empty")
        self.is_sound = True

    def teardown(self) -> None:
        """Compare everybody; then exactly as many tokens fit as are said to be free."""
        try:
            if self.is_sound:
                self.end()
        finally:
            self.ctx.close()

    def end(self) -> None:
        for twin in list(self.world.branches):
            self.compare(twin)
        for twin in [b for b in self.world.branches if b.parent is None]:
            self.real[twin].prune_subtree()
            self.world.prune(twin)
        self.bury()
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
