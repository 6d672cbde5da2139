"""Draft models: what ends a draft, states that follow forks, and pairs that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import toys
from drafts import FIXED, PROMPTS, WARM, plain
from llama_cpp import llama_cpp as C

import llamabranch as lb
from llamabranch import Branch, Context, ModelDrafter, SamplingParams, Speculator
from llamabranch.errors import DecodeInterruptedError, VocabularyMismatchError
from llamabranch.generation.drafter import FixedLength


@pytest.mark.parametrize("n_free", range(1, 7))
def test_full_cache_ends_a_draft(n_free: int, ctx: Context, draft_ctx: Context) -> None:
    with Branch.start(ctx, PROMPTS[0], sampling=WARM) as branch:
        state = ModelDrafter(draft_ctx).start(branch.sequence, "seeded")
        tokens = [*branch.tokens, 299]
        state.propose(tokens, FixedLength(2), 2)
        state.observe(len(tokens))
        tokens.append(300)
        expected = state.propose(tokens, FixedLength(6), 6).tokens
        state.observe(len(tokens) - 1)
        rival = Branch.create(draft_ctx)
        rival.prefill([7] * (draft_ctx.usage().cells_free - n_free))
        drafted = state.propose(tokens, FixedLength(6), 6)
        draft_ctx.audit()
        assert drafted.stopped == ("capacity" if n_free < 6 else "length")
        assert drafted.tokens == expected[: len(drafted.tokens)]
        assert len(drafted.tokens) >= min(n_free, 6)
        rival.prune()
        state.observe(len(tokens))
        assert len(state.propose([*tokens, 301], FixedLength(6), 6).tokens) == 6
        state.close()
        draft_ctx.audit()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.99])
def test_interrupted_draft_loses_nothing(share: float, ctx: Context, draft_ctx: Context) -> None:
    """llama.cpp is stopped in the middle of a graph, in the first or a later decode."""
    with Branch.start(ctx, PROMPTS[0], sampling=WARM) as branch:
        drafter = ModelDrafter(draft_ctx)
        state, tokens = drafter.start(branch.sequence, "seeded"), [*branch.tokens, 299]
        expected = state.propose(tokens, FixedLength(8), 8)
        state.close()
        state = drafter.start(branch.sequence, "seeded")
        state.propose(tokens[:-1], FixedLength(1), 1)
        state.observe(len(tokens) - 1)
        n_seen, n_most = 0, 1 << 40

        def is_asked_to_stop(_: object) -> bool:
            nonlocal n_seen
            n_seen += 1
            return n_seen > n_most

        ptr = draft_ctx.decoder.handle.ptr
        callback = C.ggml_abort_callback(is_asked_to_stop)
        C.llama_set_abort_callback(ptr, callback, None)
        state.propose(tokens, FixedLength(8), 8)
        state.observe(len(tokens) - 1)
        n_most, n_seen = int(share * n_seen), 0
        with pytest.raises(DecodeInterruptedError):
            state.propose(tokens, FixedLength(8), 8)
        n_most = 1 << 40
        draft_ctx.audit()
        state.observe(len(tokens) - 1)
        again = state.propose(tokens, FixedLength(8), 8)
        assert again.tokens == expected.tokens
        draft_ctx.audit()
        state.close()
        draft_ctx.audit()


def test_states_follow_forks_that_outlive_their_parents(ctx: Context, draft_ctx: Context) -> None:
    """The state of a fork is made from its parent's and ends with the parent. Tokens read are shared."""
    other = draft_ctx
    speculator = Speculator(ctx, ModelDrafter(other), FIXED)
    root = Branch.start(ctx, PROMPTS[0] * 8, sampling=WARM)
    speculator.generate(root, max_tokens=10).finish()
    before, child = other.usage().cells_used, root.fork()
    stats = speculator.generate(child, max_tokens=10).finish().stats
    assert stats.draft_forward_passes <= stats.num_draft_tokens + stats.num_drafts
    assert other.usage().cells_used < before + 20
    assert other.usage().cells_shared > 100
    child.promote()
    speculator.generate(PROMPTS[1], max_tokens=5, sampling=WARM).finish()  # closes ended states
    speculator.generate(child, max_tokens=10).finish()
    assert child.generated_tokens == [t.token for t in plain(ctx, PROMPTS[0] * 8, WARM, 30)]
    child.prune()
    speculator.forget(child)
    assert other.usage().cells_used == 0


# -- pairs that cannot -------------------------------------------------------------------------------


def test_pairs_that_cannot_draft_are_refused(tmp_path: Path, ctx: Context, draft: lb.Model) -> None:
    with (
        lb.Model(toys.write_llama(tmp_path / "none.gguf", vocab="none")) as mute,
        lb.Model(toys.write_renumbered(draft.path, tmp_path / "other.gguf")) as other,
        Context(mute, n_threads=1) as silent,
        Context(other, n_threads=1) as renumbered_ctx,
    ):
        assert ctx.model.compatibility(draft)
        assert not ctx.model.compatibility(mute) and not ctx.model.compatibility(other)
        assert [other.piece(t) for t in other.eog_tokens] == [
            draft.piece(t) for t in draft.eog_tokens
        ]
        renumbered = ModelDrafter(renumbered_ctx)
        chain = lb.ChainDrafter([lb.SuffixDrafter(), renumbered])
        refused: tuple[tuple[Context, lb.Drafter], ...] = (
            (ctx, renumbered), (ctx, chain), (ctx, ModelDrafter(silent)), (silent, ModelDrafter(ctx)),
        )  # fmt: skip
        for target, drafter in refused:
            with pytest.raises(VocabularyMismatchError, match="cannot draft") as caught:
                Speculator(target, drafter, FIXED)
            assert caught.value.hint


def test_models_without_text_draft_for_each_other(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.8, seed=1)
    paths = [
        toys.write_llama(tmp_path / f"{i}.gguf", vocab="none", drift=0.3 * i) for i in range(2)
    ]
    with (
        lb.Model(paths[0]) as first,
        lb.Model(paths[1]) as two,
        Context(first, n_threads=1) as ctx,
        Context(two, n_threads=1) as other,
    ):
        expected = [t.token for t in plain(ctx, [3, 4], params, 40)]
        speculator = Speculator(ctx, ModelDrafter(other), FIXED)
        generation = speculator.generate([3, 4], max_tokens=40, sampling=params).finish()
        assert generation.tokens == expected
        assert generation.stats.num_accepted_tokens > 0
