"""Steps of any number of texts, and what may be done with a text between two of its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

import llamabranch as lb
from llamabranch import Branch, Context, SamplingParams, SpeculativeConfig, SpeculativeStats
from llamabranch.context.logits import LogitsRow
from llamabranch.generation.drafter import FixedLength
from llamabranch.generation.loop import Loop, RunningText
from llamabranch.generation.text import Text

PROMPTS = ("Once upon a time", "The king", "In the wood there was a wolf")
WARM = SamplingParams(temperature=0.8, seed=4)


class Prompt:
    """A text that steps read."""

    wants_rows = False

    def __init__(self, branch: Branch, tokens: list[int]) -> None:
        self.text: Text = branch.sequence
        self.tokens = tokens
        self.n_chunks = 0
        self.n_decoded = 0
        self.error: lb.LlamaBranchError | None = None

    def unread(self) -> list[int]:
        return self.tokens

    def read(self, tokens: Sequence[int], rows: Sequence[LogitsRow]) -> None:
        self.n_chunks += 1
        del self.tokens[: len(tokens)]
        self.text.append_prompt(tokens, rows[-1] if rows else None)


def begun(loop: Loop, branches: Sequence[Branch]) -> list[RunningText]:
    """Return the texts of branches, each with its first token."""
    running = [loop.open(branch.sequence, "seeded", SpeculativeStats()) for branch in branches]
    for each in running:
        each.draw()
    return running


def plain(ctx: Context, prompt: str, n: int) -> list[int]:
    with Branch.start(ctx, prompt, sampling=WARM) as branch:
        return [one.token for one in branch.generate(n)]


@pytest.mark.parametrize("drafts", [False, True])
def test_texts_go_on_as_if_alone_while_another_is_read(
    ctx: Context, draft_ctx: Context, drafts: bool
) -> None:
    drafter = lb.ModelDrafter(draft_ctx) if drafts else None
    loop = Loop(ctx, FixedLength(3), drafter)
    branches = [Branch.start(ctx, prompt, sampling=WARM) for prompt in PROMPTS]
    running = begun(loop, branches)
    texts = [branch.tokens[-1:] for branch in branches]
    reader = Branch.create(ctx, WARM)
    late = Prompt(reader, ctx.model.prompt_tokens(PROMPTS[0] * 9))
    expected = list(late.tokens)
    n_steps = 0
    while min(map(len, texts)) < 20:
        readers = [late] if late.tokens else []
        step = loop.step([(each, 8) for each in running], readers)
        n_steps += 1
        assert step.no_room is None
        n_read = sum(reader.n_decoded for reader in readers)
        assert step.n_tokens == n_read + sum(each.n_decoded for each in running)
        for tokens, each in zip(texts, running, strict=True):
            assert each.error is None
            tokens += [one.token for one in each.emitted]
    assert late.n_chunks == 1
    assert (n_steps < 19) == drafts
    assert reader.tokens == expected
    for prompt, tokens, branch in zip(PROMPTS, texts, branches, strict=True):
        assert tokens == plain(ctx, prompt, len(tokens))
        assert branch.tokens[-len(tokens) :] == tokens
    for each in running:
        each.close()
    with Branch.start(ctx, expected, sampling=WARM) as other:
        assert [t.token for t in reader.generate(5)] == [t.token for t in other.generate(5)]


def test_without_room_nothing_changes_and_the_result_says_so(target: lb.Model) -> None:
    with Context(target, n_ctx=256, n_seq_max=4, n_threads=1) as ctx:
        loop = Loop(ctx, FixedLength(3), lb.speculative.PromptLookupDrafter())
        full = [5, 6, 7] * 42
        branches = [Branch.start(ctx, full, sampling=WARM) for _ in range(2)]
        branches[1].extend([9] * (ctx.usage().cells_free - 1))
        running = begun(loop, branches)
        before = [branch.tokens for branch in branches]
        step = loop.step([(each, 8) for each in running])
        assert step.no_room is not None and step.n_tokens == 0
        assert [branch.tokens for branch in branches] == before
        assert all(each.emitted == [] for each in running)
        ctx.audit()
        branches[1].prune()  # somebody gives way: it goes on
        loop.step([(running[0], 8)])
        assert running[0].emitted and running[0].error is None


def test_cells_of_their_own_that_are_full_are_told_by_name(toy: lb.Model) -> None:
    no_end = WARM.replace(logit_bias={1: -math.inf})
    with Context(toy, n_ctx=512, n_seq_max=2, n_threads=1, kv_unified=False) as ctx:
        loop = Loop(ctx, FixedLength(0))
        branches = [Branch.start(ctx, [5] * n, sampling=no_end) for n in (9, ctx.n_ctx_seq)]
        running = begun(loop, branches)
        step = loop.step([(each, 8) for each in running])
        assert step.no_room is None
        assert [each.error is None for each in running] == [True, False]
        loop.step([(running[0], 8)])
        assert len(running[0].emitted) == 1


# -- what may happen to a text between two of its tokens --------------------------------------------


@pytest.mark.parametrize("drafts", [False, True])
def test_last_token_is_not_decoded_until_it_is_needed(
    ctx: Context, draft_ctx: Context, drafts: bool
) -> None:
    drafter = lb.ModelDrafter(draft_ctx) if drafts else None
    config = SpeculativeConfig(draft_k=4, rule="seeded")
    with Branch.start(ctx, PROMPTS[0], sampling=WARM) as branch:
        start, given = branch.position, []
        for one in branch.generate(12, drafter=drafter, config=config):
            given.append(one.token)
            assert branch.tokens[start:] == given and branch.position == start + len(given)
            assert branch.text.endswith(one.text)
        assert branch.sequence.n_cached == branch.position  # at the end it is
        for one in branch.generate(5, drafter=drafter, config=config):
            given.append(one.token)
            break
        n_lacking = branch.position - branch.sequence.n_cached
        assert n_lacking == 1 and branch.tokens[start:] == given
        with branch.fork() as child:  # decoded once, for both
            for each in (branch, child):
                assert each.sequence.n_cached == each.position == start + len(given)
        ctx.audit()


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("act", ["read", "fork", "commit", "rewind", "append", "engine"])
def test_branch_may_be_used_between_two_tokens(
    ctx: Context, draft_ctx: Context, act: str, drafts: bool
) -> None:
    """Whatever is done, the text goes on from what it finds: as another does that was made so."""
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


def test_forks_share_what_is_learned_about_a_drafter(ctx: Context, draft_ctx: Context) -> None:
    drafter = lb.ModelDrafter(draft_ctx)
    with Branch.start(ctx, PROMPTS[2], sampling=WARM) as branch:
        first = branch.generate(20, drafter=drafter, config=SpeculativeConfig(draft_k=3))
        first.finish()
        n_read = draft_ctx.usage().cells_used
        assert n_read > branch.n_prompt
        with branch.fork() as child:
            again = child.generate(20, drafter=drafter, config=SpeculativeConfig(draft_k=3))
            assert again.drafting is first.drafting
            again.finish()
        assert again.drafting.stats.num_emitted_tokens == len(first.tokens) + len(again.tokens)
        assert draft_ctx.usage().cells_used < 2 * n_read  # the beginning was read once


def test_state_of_a_text_that_was_changed_at_the_end_is_not_kept(
    ctx: Context, draft_ctx: Context
) -> None:
    """It would draft for other tokens: the next generation has drafts as good as a new text's."""
    drafter, config = lb.ModelDrafter(draft_ctx), SpeculativeConfig(draft_k=3, rule="seeded")
    with Branch.start(ctx, PROMPTS[0], sampling=WARM) as branch:
        for n, _ in enumerate(branch.generate(drafter=drafter, config=config), 1):
            if n == 12:
                branch.rewind(branch.position - 6)
                branch.extend([99, 98, 97])
                break
        with Branch.start(ctx, branch.tokens, sampling=WARM) as other:
            alone = other.generate(20, drafter=drafter, config=config).finish()
        found = branch.generate(20, drafter=drafter, config=config).finish()
        assert found.tokens == alone.tokens
        assert found.stats.num_accepted_tokens == alone.stats.num_accepted_tokens


def test_a_drafter_for_each_call_takes_no_more_sequences_than_one(
    ctx: Context, draft_ctx: Context
) -> None:
    config = SpeculativeConfig(draft_k=3)
    with Branch.start(ctx, PROMPTS[0], sampling=WARM) as branch:
        for _ in range(12):
            found = branch.generate(5, drafter=lb.ModelDrafter(draft_ctx), config=config).finish()
            assert found.stats.num_drafts > 0
            assert draft_ctx.n_seq_free >= 7
            branch.rewind(branch.n_prompt)
