"""The state machine over Context and Branch.

Its rules make every call that a program may make, in any order, in a cache so small that it becomes full
and sequences run out. (Wrong calls are in crash/.) `reference_comparison` checks the state after each
step.
"""

from __future__ import annotations

import gc
import os
import tempfile
import weakref
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import together
import toys
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from reference_comparison import CLOSE, N_SEQ, ReferenceBranch, ReferenceComparison, Tally

import llamabranch as lb
from llamabranch import Branch, Context
from llamabranch.errors import BranchStateError, SequencesExhaustedError

WHO = st.integers(0, N_SEQ - 1)  # picks a branch or a sequence: the index modulo their number
ANY = st.integers(0, 999)
MANY = st.integers(1, 120)
MASK = st.integers(1, 63)


class Machine(ReferenceComparison):
    """The rules; `machine` makes a class of them for a model."""

    # -- beginnings and growth ---------------------------------------------------------------------

    @rule(a=ANY, n=st.integers(0, 60), sampling=st.integers(0, 2))
    def start(self, a: int, n: int, sampling: int) -> None:
        self.count("start")
        params, tokens = self.settings(sampling, a), self.tokens(a, n)
        create = partial(Branch.create, self.ctx, params)
        real = partial(Branch.start, self.ctx, tokens, sampling=params) if n else create
        self.add_branch(real, lambda: self.world.start(sampling, a, tokens))

    @rule(who=WHO, a=ANY, n=MANY)
    def prefill(self, who: int, a: int, n: int) -> None:
        self.count("prefill")
        (expected, branch), tokens = self.pick(who), self.tokens(a, n)
        if len(expected.tokens) > expected.n_prompt:
            with pytest.raises(BranchStateError, match="prefill comes before"):
                branch.prefill(tokens)
            return
        self.both(
            lambda: branch.prefill(tokens),
            lambda: self.world.grow({expected: tokens}, is_prompt=True),
        )

    @rule(who=WHO, a=ANY)
    def commit(self, who: int, a: int) -> None:
        self.count("commit")
        (expected, branch), tokens = self.pick(who), self.tokens(a, 1)
        if not expected.tokens:
            with pytest.raises(BranchStateError, match="empty"):
                branch.commit(tokens[0])
            return
        self.both(lambda: branch.commit(tokens[0]), lambda: self.world.grow({expected: tokens}))

    @rule(who=WHO, a=ANY, n=MANY, every=st.booleans())
    def extend(self, who: int, a: int, n: int, every: bool) -> None:
        self.count("extend")
        (expected, branch), tokens = self.pick(who), self.tokens(a, n)
        rows: list[object] = []
        if self.both(
            lambda: rows.extend(branch.extend(tokens, "all" if every else "last")),
            lambda: self.world.grow({expected: tokens}),
        ):
            assert len(rows) == (n if every else 1)

    @rule(mask=MASK)
    def step(self, mask: int) -> None:
        """Step one branch alone, or several in one decode."""
        self.count("step")
        several = {self.real[b]: b for b in self.some(mask) if b.tokens}
        produced: dict[Branch, lb.Produced] = {}

        def real() -> None:
            if len(several) == 1:
                produced.update((branch, branch.step()) for branch in several)
            else:
                produced.update(together.step(self.ctx, iter(several)))

        def reference() -> (
            None
        ):  # a refused step produces nothing, because every branch would have grown
            for expected in several.values():
                self.world.need_row(expected)
            pairs = [(expected, produced.get(branch)) for branch, expected in several.items()]
            self.world.grow({b: [p.token if p else 0] for b, p in pairs if not (p and p.is_stop)})
            for expected, p in pairs:
                expected.is_finished |= bool(p and p.is_stop)

        self.both(real, reference)

    @rule(mask=MASK, a=ANY, n=st.integers(1, 30))
    def prefill_together(self, mask: int, a: int, n: int) -> None:
        self.count("prefill_together")
        several = [b for b in self.some(mask) if len(b.tokens) == b.n_prompt]
        prompts = {expected: self.tokens(a + i, n + i) for i, expected in enumerate(several)}
        self.both(
            lambda: together.prefill(
                self.ctx, {self.real[b]: tokens for b, tokens in prompts.items()}
            ),
            lambda: self.world.grow(prompts, is_prompt=True),
        )

    # -- branching ---------------------------------------------------------------------------------

    @rule(who=WHO)
    def fork(self, who: int) -> None:
        self.count("fork")
        expected, branch = self.pick(who)
        self.add_branch(branch.fork, lambda: self.world.fork(expected))

    @rule(who=WHO, n=st.integers(0, 4))
    def fork_many(self, who: int, n: int) -> None:
        self.count("fork_many")
        expected, branch = self.pick(who)
        if n > len(self.world.free_seqs()):
            with pytest.raises(SequencesExhaustedError):
                branch.fork_many(n)
            self.world.settle(expected)
            return
        children = branch.fork_many(n)
        for child in children:
            reference = self.world.fork(expected)
            reference.seed = child.seed
            self.real[reference] = child
        assert len({child.seed for child in children}) == n

    @rule(who=WHO, a=ANY)
    def rewind(self, who: int, a: int) -> None:
        self.count("rewind")
        expected, branch = self.pick(who)
        position = a % (len(expected.tokens) + 1)
        self.both(lambda: branch.rewind(position), lambda: self.world.rewind(expected, position))

    @rule(who=WHO, a=ANY)
    def reseed(self, who: int, a: int) -> None:
        self.count("reseed")
        expected, branch = self.pick(who)
        branch.reseed(a)
        expected.seed = a

    # -- endings -----------------------------------------------------------------------------------

    @rule(who=WHO, how=st.integers(0, 5))
    def prune(self, who: int, how: int) -> None:
        expected, branch = self.pick(who)
        has_children = bool(self.world.children(expected))
        if how == 0 and not has_children:
            del branch
            self.forget(expected)
            return
        self.count("prune")
        if has_children and how != 1:
            with pytest.raises(BranchStateError, match="children"):
                branch.prune()
            return
        (branch.prune_subtree if how == 1 else branch.prune)()
        self.world.prune(expected)
        self.drop_pruned()

    def forget(self, expected: ReferenceBranch) -> None:
        """Drop the last reference to a branch; garbage collection returns its sequence."""
        self.count("forget")
        self.pruned = None  # a pruned child keeps its parent alive
        left = weakref.ref(self.real.pop(expected))
        self.world.prune(expected)
        if left() is not None:  # a traceback may refer to it
            gc.collect()
        assert left() is None

    @rule(who=WHO)
    def promote(self, who: int) -> None:
        """Replace the parent."""
        expected, branch = self.pick(who)
        self.count("promote")
        if expected.parent is None:
            with pytest.raises(BranchStateError, match="root"):
                branch.promote()
            return
        branch.promote()
        self.world.promote(expected)
        self.drop_pruned()

    # -- snapshots ---------------------------------------------------------------------------------

    @rule(who=WHO)
    def snapshot(self, who: int) -> None:
        expected, branch = self.pick(who)
        if len(expected.tokens) > self.ctx.capabilities.sliding_window > 0:
            return  # a rewind would decode it again, into other cells
        self.count("snapshot")
        saved: list[lb.Snapshot] = []
        references: list[ReferenceBranch] = []
        if self.both(
            lambda: saved.append(branch.snapshot()),
            lambda: references.append(self.world.snapshot(expected)),
        ):
            self.snapshots = [*self.snapshots[-2:], (references[0], saved[0])]

    @precondition(lambda self: self.snapshots)
    @rule(which=st.integers(0, 2), by_file=st.integers(0, 9))
    def restore(self, which: int, by_file: int) -> None:
        self.count("restore")
        reference, saved = self.snapshots[which % len(self.snapshots)]

        def real() -> Branch:
            if by_file:
                return Branch.restore(self.ctx, saved)
            with tempfile.TemporaryDirectory() as folder:
                saved.write(Path(folder, "saved.branch"))
                return Branch.load(self.ctx, Path(folder, "saved.branch"))

        self.add_branch(real, lambda: self.world.restore(reference))

    # -- raw calls on sequences that are not leased -------------------------------------------------

    @precondition(lambda self: self.raw_seqs())
    @rule(which=WHO, a=ANY, n=MANY)
    def raw_decode(self, which: int, a: int, n: int) -> None:
        self.count("raw_decode")
        seq = self.raw(which)
        end = self.world.end(seq)
        self.both(
            lambda: self.ctx.decode(self.tokens(a, n), end, seq_id=seq),
            lambda: self.world.append({seq: n}),
        )

    @precondition(lambda self: any(self.world.held[seq] for seq in self.raw_seqs()))
    @rule(how=st.integers(0, 9), which=WHO, a=st.integers(0, 99), n=st.integers(-1, 99))
    def raw_change(self, how: int, which: int, a: int, n: int) -> None:
        seq = self.raw(which)
        self.count(f"raw {('copy', 'remove', 'keep', 'clear')[(how > 2) + (how > 7) + (how > 8)]}")
        if how < 3:
            target = self.raw(a)
            self.ctx.kv_seq_copy(seq, target)
            self.world.share(seq, target)
        elif how < 8:
            self.ctx.kv_cache_remove(seq, a, -1 if n < 0 else a + n)
            self.world.remove(seq, a, *(() if n < 0 else (a + n,)))
        elif how == 9 and self.world.branches:
            with pytest.raises(BranchStateError, match="still use the cache"):
                self.ctx.kv_cache_clear()
        else:
            self.ctx.kv_seq_keep(seq) if how == 8 else self.ctx.kv_cache_clear()
            for other in self.world.raw_seqs():
                if how == 9 or other != seq:
                    self.world.remove(other)

    @rule(who=WHO)
    def replay(self, who: int) -> None:
        self.count("replay")
        self.compare(self.pick(who)[0])


def tiny(path: Path, weights: str = "q8_0") -> Path:
    """Write the smallest model that the machine runs on; a step takes about a millisecond."""
    return toys.write_llama(path, weights=weights, n_layer=1, n_embd=32, n_head=1, n_ff=32)


def tiny_window(path: Path) -> Path:
    """Write one with a sliding window of 32 tokens in the first of two layers."""
    return toys.write_gemma3(path, weights="f32", n_layer=2, n_embd=32, n_head=1, n_ff=32)


def machine(
    model: lb.Model, clean: Context, *, exact: bool, name: str, close: float = CLOSE
) -> type[Machine]:
    """Return the machine for a model; ``clean`` is a context of it for replays.

    ``close``: how much logits may differ where they are not exact.
    """
    members = {"model": model, "clean": clean, "exact": exact, "close": close}
    return type(name, (Machine,), {**members, "tally": Tally(Counter())})


def long_settings(n_runs: int, n_steps: int) -> settings:
    """Return settings for ``n_runs`` runs of ``n_steps`` steps; the steps are the same every time.

    SOAK=20 in the environment makes twenty times as many runs, with other steps each time, or with those
    of pytest's option --hypothesis-seed. A failure is reported at once.
    """
    soak = int(os.environ.get("SOAK", "0"))
    return settings(
        max_examples=n_runs * max(soak, 1), stateful_step_count=n_steps, derandomize=not soak,
        deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,) if soak else (Phase.generate, Phase.shrink),
    )  # fmt: skip
