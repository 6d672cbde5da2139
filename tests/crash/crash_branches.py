"""Misuse of branches and of what is closed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

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
    rewind_beyond=lambda w: w.root.rewind(11),
    rewind_huge=lambda w: w.root.rewind(1 << 40),
    extend_without_rows=lambda w: w.root.extend([60], logits="none"),
    generate_with_an_empty_stop=lambda w: w.root.generate(5, stop=[""]),
    generate_with_a_number_as_stop=lambda w: w.root.generate(5, stop=5),  # type: ignore[arg-type]
    perplexity_since_birth=lambda w: w.root.perplexity("birth"),
    likelihood_since_birth=lambda w: w.root.log_likelihood("birth"),
    reseed_text=lambda w: w.root.reseed("one"),  # type: ignore[arg-type]
)
refuses(
    "branch",
    BranchStateError,
    empty_produce=lambda w: _empty(w).produce(),
    empty_commit=lambda w: _empty(w).commit(60),
    empty_logits=lambda w: _empty(w).logits,
    empty_entropy=lambda w: _empty(w).entropy(),
    empty_distribution=lambda w: _empty(w).distribution(),
    empty_step=lambda w: _empty(w).step(),
    promote_a_root=lambda w: w.root.promote(),
)
refuses("branch", SequencesExhaustedError, fork_too_often=lambda w: w.root.fork_many(20))
refuses("branch", CacheFullError, prompt_too_long=lambda w: Branch.start(w.ctx, [60] * 300))


def _empty(w: World) -> Branch:
    return Branch.create(w.ctx)


@case("branch", is_quick=True)
def pruned_branch(w: World) -> None:
    with w.branch() as branch:
        branch.prune()
        branch.prune()
        for call in (
            branch.produce,
            branch.step,
            branch.fork,
            branch.promote,
            branch.entropy,
            branch.distribution,
            lambda: branch.fork_many(2),
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
        assert branch.text.endswith("ab")  # what it was can still be read


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
        lambda: Branch.create(ctx),
        lambda: branch.logits,
        lambda: branch.save("/nowhere/closed.branch"),
    ]


@case("lifetime", is_quick=True)
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


@case("lifetime", is_quick=True)
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
