"""Misuse of branches and of what is closed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from crash_harness import ABC, World, case, must_raise, refuses

from llamabranch import Branch, Context, Grammar, Model, SamplingParams
from llamabranch.errors import (
    BranchStateError,
    CacheFullError,
    ClosedError,
    ConfigError,
    ModelLoadError,
    SequencesExhaustedError,
    TokenizeError,
)
from llamabranch.sampling import Sampler

# -- branches --------------------------------------------------------------------------------------

refuses(
    "branch",
    TokenizeError,
    commit_minus_one=lambda w: w.root.commit(-1),
    commit_n_vocab=lambda w: w.root.commit(258),
    commit_huge=lambda w: w.root.commit(1 << 40),
    commit_text=lambda w: w.root.commit("a"),  # type: ignore[arg-type]
    commit_fraction=lambda w: w.root.commit(5.5),  # type: ignore[arg-type]
    extend_n_vocab=lambda w: w.root.extend([60, 258]),
    prefill_minus_one=lambda w: w.root.prefill([60, -1]),
    surprisal_n_vocab=lambda w: w.root.surprisal(258),
    start_n_vocab=lambda w: Branch.start(w.ctx, [258]),
)
refuses(
    "branch",
    ConfigError,
    prefill_nothing=lambda w: w.root.prefill([]),
    extend_nothing=lambda w: w.root.extend([]),
    rewind_negative=lambda w: w.root.rewind(-1),
    rewind_beyond=lambda w: w.root.rewind(11),
    rewind_huge=lambda w: w.root.rewind(1 << 40),
    rewind_text=lambda w: w.root.rewind("5"),  # type: ignore[arg-type]
    generate_negative=lambda w: list(w.root.generate(max_tokens=-1)),
    fork_negative=lambda w: w.root.fork_many(-1),
    reseed_text=lambda w: w.root.reseed("one"),  # type: ignore[arg-type]
)
refuses(
    "branch",
    BranchStateError,
    empty_produce=lambda w: _empty(w).produce(),
    empty_commit=lambda w: _empty(w).commit(60),
    empty_logits=lambda w: _empty(w).logits,
    promote_a_root=lambda w: w.root.promote(),
)
refuses("branch", SequencesExhaustedError, fork_too_often=lambda w: w.root.fork_many(20))
refuses("branch", CacheFullError, prompt_too_long=lambda w: Branch.start(w.ctx, [60] * 300))


def _empty(w: World) -> Branch:
    return Branch.create(w.ctx)


@case("branch")
def pruned_branch(w: World) -> None:
    with w.branch() as branch:
        branch.prune()
        branch.prune()
        for call in (
            branch.produce,
            branch.step,
            branch.fork,
            branch.entropy,
            branch.distribution,
            lambda: branch.commit(60),
            lambda: branch.extend([60]),
            lambda: branch.prefill([60]),
            lambda: branch.rewind(0),
            lambda: branch.logits,
            lambda: branch.surprisal(60),
            lambda: branch.steer({60: 1.0}),
            lambda: branch.reseed(5),
            lambda: list(branch.generate(max_tokens=2)),
            lambda: branch.save(w.folder / "pruned.branch"),
        ):
            must_raise(BranchStateError, call)


@case("branch")
def prune_with_children(w: World) -> None:
    with w.branch() as branch:
        child = branch.fork()
        must_raise(BranchStateError, branch.prune)
        child.step()
        child.promote()
        must_raise(BranchStateError, branch.step)
        child.step()
        child.prune()


@case("branch")
def forgotten_branches(w: World) -> None:
    for _ in range(50):
        Branch.start(w.ctx, "forgotten").fork().step()


@case("branch")
def cache_full_leaves_the_branch(w: World) -> None:
    with w.branch() as branch:
        branch.extend([60] * 200)
        before = branch.logits
        must_raise(CacheFullError, lambda: branch.extend([61] * 60))
        must_raise(CacheFullError, lambda: branch.fork().extend([61] * 60))
        assert branch.position == 203
        np.testing.assert_array_equal(branch.logits, before)
        branch.ctx.audit()
        while w.ctx.usage().cells_free:
            branch.commit(62)
        must_raise(CacheFullError, lambda: branch.commit(62))
        must_raise(CacheFullError, lambda: list(branch.generate(max_tokens=5)))
        branch.rewind(10)
        branch.step()


# -- lifetimes -------------------------------------------------------------------------------------


def _closed_calls(ctx: Context, branch: Branch) -> list[Callable[[], object]]:
    return [
        lambda: ctx.decode([60], 0),
        lambda: ctx.kv_seq_copy(0, 1),
        lambda: ctx.kv_cache_remove(0),
        lambda: ctx.kv_seq_keep(0),
        lambda: ctx.kv_cache_size(0),
        ctx.kv_cache_clear,
        ctx.logits,
        ctx.sample,
        ctx.model_entropy,
        ctx.usage,
        ctx.audit,
        branch.produce,
        branch.step,
        branch.fork,
        branch.distribution,
        lambda: branch.commit(60),
        lambda: branch.extend([60, 61]),
        lambda: branch.rewind(1),
        lambda: list(branch.generate(max_tokens=2)),
        lambda: Branch.start(ctx, [60]),
        lambda: branch.save("/nowhere/closed.branch"),
    ]


@case("lifetime")
def context_closed_first(w: World) -> None:
    ctx = w.context()
    branch = Branch.start(ctx, "abc")
    child = branch.fork()
    ctx.close()
    ctx.close()
    for call in _closed_calls(ctx, branch):
        must_raise(ClosedError, call)
    assert branch.tokens == child.tokens
    child.prune()
    branch.prune()
    repr((ctx, branch))


@case("lifetime")
def model_closed_first(w: World) -> None:
    model = Model(w.path)
    ctx = Context(model, n_ctx=256, n_threads=1)
    branch = Branch.start(ctx, "abc", grammar=Grammar(ABC), dry_multiplier=0.5)
    sampler = Sampler(model, SamplingParams(repeat_penalty=1.1), Grammar(ABC))
    model.close()
    model.close()
    for call in _closed_calls(ctx, branch):
        must_raise(ClosedError, call)
    for call in (
        lambda: model.tokenize("a"),
        lambda: model.detokenize([200]),
        lambda: model.piece(201),
        lambda: model.text_decoder().feed(202),
        lambda: model.apply_chat_template([("user", "a")]),
        lambda: model.n_params,
        lambda: Context(model),
        lambda: Sampler(model, SamplingParams(top_k=3), Grammar(ABC)),
        lambda: sampler.distribution(w.logits),
        lambda: sampler.accept(60),
        sampler.clone,
    ):
        must_raise(ClosedError, call)
    repr((model, ctx, branch))
    ctx.close()


@case("lifetime")
def everything_dropped_in_any_order(w: World) -> None:
    import gc

    for order in ("mcb", "cbm", "bmc", "bcm", "mbc", "cmb"):
        model = Model(w.path)
        ctx = Context(model, n_ctx=256, n_threads=1)
        branch = Branch.start(ctx, "abc", grammar=Grammar(ABC))
        held: dict[str, Any] = {"m": model, "c": ctx, "b": branch}
        del model, ctx, branch
        for name in order:
            del held[name]
            gc.collect()
            if "b" in held:
                held["b"].fork()


@case("lifetime")
def rows_outlive_the_context(w: World) -> None:
    ctx = w.context()
    ctx.decode([60, 61], 0)
    row = ctx.logits()
    branch_row = Branch.start(ctx, "abc").logits
    total = row.sum() + branch_row.sum()
    ctx.close()
    assert row.sum() + branch_row.sum() == total


@case("lifetime")
def closed_while_generating(w: World) -> None:
    ctx = w.context()
    branch = Branch.start(ctx, "abc", seed=1)
    stream = branch.generate(max_tokens=50)
    next(stream)
    ctx.close()
    must_raise(ClosedError, lambda: next(stream))


@case("lifetime")
def progress_that_raises(w: World) -> None:
    def stop(share: float) -> None:
        raise KeyError(share)

    with suppress(KeyError, ModelLoadError):
        Model(w.path, progress=stop)
