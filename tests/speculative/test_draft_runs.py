"""What ends a draft of a model, and its state afterwards: end tokens, a full cache, interruptions."""

from __future__ import annotations

import pytest
from llama_cpp import llama_cpp as C

import llamabranch as lb
from llamabranch import Branch, Context, ModelDrafter, SamplingParams
from llamabranch.errors import DecodeInterruptedError
from llamabranch.generation.drafter import FixedLength

TALE = "Once upon a time there was a king who had three daughters, and the youngest"
WARM = SamplingParams(seed=7)


@pytest.mark.parametrize("n_free", range(1, 7))
def test_full_cache_ends_a_draft(n_free: int, ctx: Context, draft: lb.Model) -> None:
    with (
        Context(draft, n_ctx=256, n_threads=1, exact=True) as draft_ctx,
        Branch.start(ctx, TALE, sampling=WARM) as branch,
    ):
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
def test_interrupted_draft_loses_nothing(share: float, ctx: Context, draft: lb.Model) -> None:
    """llama.cpp is stopped in the middle of a graph, in the first or a later decode."""
    with (
        Context(draft, n_ctx=256, n_threads=1, exact=True) as draft_ctx,
        Branch.start(ctx, TALE, sampling=WARM) as branch,
    ):
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
