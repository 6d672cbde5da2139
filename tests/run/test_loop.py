"""What may be done with a text between two tokens, and what is kept for the next generation."""

from __future__ import annotations

import numpy as np
import pytest

import llamabranch as lb
from llamabranch import Branch, Context, SamplingParams, SpeculativeConfig

PROMPTS = ("Once upon a time", "The king", "In the wood there was a wolf")
WARM = SamplingParams(temperature=0.8, seed=4)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("act", ["read", "fork", "commit", "rewind", "append", "engine"])
def test_branch_may_be_used_between_two_tokens(
    ctx: Context, draft_ctx: Context, act: str, drafts: bool
) -> None:
    """Whatever is done to a text, it continues like a text that was made that way."""
    drafter = lb.ModelDrafter(draft_ctx) if drafts else None
    config = SpeculativeConfig(draft_k=4, rule="seeded")

    def use(branch: Branch) -> None:
        if act == "read":
            assert branch.entropy() >= 0 and branch.produce() == branch.produce()
        elif act == "fork":
            with branch.fork() as child:
                assert child.tokens == branch.tokens
                child.generate_text(3)
        elif act == "commit":
            branch.commit(99)
        elif act == "rewind":
            branch.rewind(branch.position - 2)
        elif act == "append":
            branch.append([98, 97])
        else:
            lb.Engine(ctx, seed=3).generate(["The fox"])

    with (
        Branch.start(ctx, PROMPTS[1], sampling=WARM) as branch,
        Branch.start(ctx, PROMPTS[1], sampling=WARM) as other,
    ):
        n = 0
        for n, _ in enumerate(branch.generate(16, drafter=drafter, config=config), 1):
            if n in (4, 9):
                use(branch)
        assert n == 16
        for size in (4, 5, 7):
            assert sum(1 for _ in other.generate(size)) == size
            if size != 7:
                use(other)
        assert branch.tokens == other.tokens
        assert np.array_equal(branch.logits, other.logits)
        ctx.audit()


def test_state_of_a_text_that_was_changed_at_the_end_is_not_kept(
    ctx: Context, draft_ctx: Context
) -> None:
    """The state would draft for other tokens. The next generation drafts as well as a new text."""
    drafter, config = lb.ModelDrafter(draft_ctx), SpeculativeConfig(draft_k=3, rule="seeded")
    with Branch.start(ctx, PROMPTS[0], sampling=WARM) as branch:
        for n, _ in enumerate(branch.generate(drafter=drafter, config=config), 1):
            if n == 12:
                branch.rewind(branch.position - 6)
                branch.extend([99, 98, 97])
                break
        with Branch.start(ctx, branch.tokens, sampling=WARM) as other:
            alone = other.generate(20, drafter=drafter, config=config).finish()
        generation = branch.generate(20, drafter=drafter, config=config).finish()
        assert generation.tokens == alone.tokens
        assert generation.stats.num_accepted_tokens == alone.stats.num_accepted_tokens


def test_draft_state_is_freed_with_its_text_and_by_another_drafter(
    ctx: Context, draft_ctx: Context
) -> None:
    config, n_free = SpeculativeConfig(draft_k=3), draft_ctx.n_seq_free
    with Branch.start(ctx, PROMPTS[0], sampling=WARM) as root:
        children = root.fork_many(2)
        for child in children:
            child.generate(6, drafter=lb.ModelDrafter(draft_ctx), config=config).finish()
        assert draft_ctx.n_seq_free == n_free - 2
        children[0].prune()
        assert draft_ctx.n_seq_free == n_free - 1
        children[1].generate(6, drafter=lb.SuffixDrafter(), config=config).finish()
        assert draft_ctx.n_seq_free == n_free
        children[1].prune()
