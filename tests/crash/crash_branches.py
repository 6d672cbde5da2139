"""Misuse of branches and of closed objects."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

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

LAYERS: list[tuple[Any, Any]] = [(3, 0), (-4, 0), ("1", 0), (1, -1), (1, 10), (1, 2.0)]


class NoPrefix:
    """Has only one of the two methods of a constraint."""

    def complete(self, text: str) -> bool:
        return True


NO_CONSTRAINTS: list[Any] = [5, "no e", [str.isalpha], NoPrefix, NoPrefix(), object()]


def _empty(w: World) -> Branch:
    return Branch.create(w.ctx)


def _pruned(w: World) -> Branch:
    branch = Branch.start(w.ctx, "ab")
    branch.prune()
    return branch


def _spoken(w: World) -> Branch:
    branch = Branch.start(w.ctx, "ab", seed=1)
    branch.commit(60)
    return branch


refuses(
    "branch",
    TokenizeError,
    commit_n_vocab=lambda w: w.root.commit(258),
    extend_n_vocab=lambda w: w.root.extend([60, 258]),
    surprisal_n_vocab=lambda w: w.root.surprisal(258),
    start_n_vocab=lambda w: Branch.start(w.ctx, [258]),
    append_huge=lambda w: w.root.append([1 << 40]),
    append_bytes=lambda w: w.root.append(b"abc"),
    append_number=lambda w: w.root.append(5),  # type: ignore[arg-type]
    score_n_vocab=lambda w: w.root.score([258]),
)
refuses(
    "branch",
    ConfigError,
    prefill_nothing=lambda w: w.root.prefill([]),
    extend_nothing=lambda w: w.root.extend([]),
    append_nothing=lambda w: w.root.append([]),
    append_no_text=lambda w: w.root.append(""),
    score_nothing=("no tokens", lambda w: w.root.score([])),
    score_no_text=("no tokens", lambda w: w.root.score("")),
    score_top=("top", lambda w: w.root.score([60], top=-1)),
    rewind_beyond=lambda w: w.root.rewind(11),
    extend_without_rows=lambda w: w.root.extend([60], logits="none"),
    generate_with_an_empty_stop=lambda w: w.root.generate(5, stop=[""]),
    generate_with_a_number_as_stop=lambda w: w.root.generate(5, stop=5),  # type: ignore[arg-type]
    perplexity_since_birth=("since", lambda w: w.root.perplexity("birth")),
    likelihood_since_birth=("since", lambda w: w.root.log_likelihood("birth")),
    likelihood_in_dits=("base", lambda w: w.root.log_likelihood(base="dits")),
    reseed_text=lambda w: w.root.reseed("one"),  # type: ignore[arg-type]
    **{
        f"hidden_states_{layer}_{start}": lambda w, i=layer, n=start: w.root.hidden_states(i, n)
        for layer, start in LAYERS
    },
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
    empty_score=("empty", lambda w: _empty(w).score([60])),
    empty_hidden_state=("empty", lambda w: _empty(w).hidden_state()),
    promote_a_root=("root", lambda w: w.root.promote()),
    perplexity_of_nothing=("no token was generated", lambda w: w.root.perplexity()),
    prefill_after_generating=("prefill comes before", lambda w: _spoken(w).prefill([60])),
    prefill_says_append=("append", lambda w: _spoken(w).prefill([60])),
)
refuses(
    "branch",
    SequencesExhaustedError,
    fork_too_often=(
        "20 forks need 20 free sequences, but 3 are free",
        lambda w: w.root.fork_many(20),
    ),
    fork_says_how_many=("n_seq_max=21", lambda w: w.root.fork_many(20)),
)
refuses(
    "branch",
    CacheFullError,
    prompt_too_long=(
        "has 300 tokens, the context has room for 256",
        lambda w: Branch.start(w.ctx, [60] * 300),
    ),
    append_too_long=lambda w: w.root.append([60] * 300),
    score_too_long=lambda w: w.root.score([60] * 300),
)


@case("branch", is_quick=True)
def pruned_branch(w: World) -> None:
    branch = _pruned(w)
    branch.prune()
    calls: list[Callable[[], object]] = [
        branch.produce, branch.step, branch.fork, branch.promote, branch.entropy,
        branch.distribution, branch.hidden_state, lambda: branch.fork_many(2),
        lambda: branch.commit(60), lambda: branch.extend([60]), lambda: branch.prefill([60]),
        lambda: branch.append([60]), lambda: branch.score([60]), lambda: branch.rewind(0),
        lambda: branch.logits, lambda: branch.surprisal(60), lambda: branch.steer({60: 1.0}),
        lambda: branch.reseed(5), lambda: list(branch.generate(max_tokens=2)),
        lambda: branch.save(w.folder / "pruned.branch"),
    ]  # fmt: skip
    for call in calls:
        assert "pruned" in must_raise(BranchStateError, call)
    assert branch.text.endswith("ab")  # what it was can still be read


@case("branch", is_quick=True)
def no_constraint(w: World) -> None:
    n_decodes = w.ctx.decoder.n_decodes
    for wrong in NO_CONSTRAINTS:
        for call in (
            lambda wrong=wrong: w.root.generate(4, constraint=wrong),
            lambda wrong=wrong: w.ctx.complete("The", max_tokens=4, constraint=wrong),
        ):
            assert not must_raise(ConfigError, call).endswith("None")  # it has a hint
    assert w.ctx.decoder.n_decodes == n_decodes


# -- lifetimes -------------------------------------------------------------------------------------


def _closed_calls(ctx: Context, branch: Branch) -> list[Callable[[], object]]:
    return [
        ctx.kv_cache_clear, ctx.logits, ctx.sample, ctx.model_entropy, ctx.usage, ctx.audit,
        branch.produce, branch.step, branch.fork, branch.distribution, lambda: ctx.decode([60], 0),
        lambda: ctx.kv_seq_copy(0, 1), lambda: ctx.kv_cache_remove(0), lambda: ctx.kv_seq_keep(0),
        lambda: ctx.kv_cache_size(0), lambda: ctx.complete("a"), lambda: branch.commit(60),
        lambda: branch.extend([60, 61]), lambda: branch.rewind(1),
        lambda: list(branch.generate(max_tokens=2)),
        lambda: Branch.start(ctx, [60]), lambda: Branch.create(ctx), lambda: branch.logits,
        lambda: branch.save("/nowhere/closed.branch"),
    ]  # fmt: skip


@case("lifetime", is_quick=True)
def context_closed_first(w: World) -> None:
    ctx = Context(Model(w.path), n_ctx=256, n_threads=1, owns_model=True)
    branch = Branch.start(ctx, [60, 61])
    child = branch.fork()
    ctx.close()
    ctx.close()
    for call in (*_closed_calls(ctx, branch), lambda: branch.text, lambda: ctx.tokenize("a")):
        assert "the context is closed" in must_raise(ClosedError, call)
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
    calls: list[Callable[[], object]] = [
        *_closed_calls(ctx, branch), sampler.clone, lambda: model.tokenize("a"),
        lambda: model.detokenize([200]), lambda: model.piece(201),
        lambda: model.text_decoder().feed(202),
        lambda: model.apply_chat_template([("user", "a")]), lambda: Context(model),
        lambda: Sampler(model, SamplingParams(top_k=3), Grammar(ABC)),
        lambda: sampler.distribution(w.logits), lambda: sampler.accept(60),
    ]  # fmt: skip
    for call in calls:
        must_raise(ClosedError, call)
    assert "the model is closed" in must_raise(ClosedError, lambda: ctx.tokenize("a"))
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
def progress_that_raises(w: World) -> None:
    def stop(share: float) -> None:
        raise KeyError(share)

    with suppress(KeyError, ModelLoadError):
        Model(w.path, progress=stop)
