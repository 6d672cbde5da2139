"""One step of any streams: each goes on as if alone, texts are read besides, no room changes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

import llamabranch as lb
from llamabranch import Branch, Context, SamplingParams, SpeculativeConfig, SpeculativeStats
from llamabranch.branch.sequence import TokenSequence
from llamabranch.context.logits import LogitsRow
from llamabranch.speculative.joint import Joint
from llamabranch.speculative.length.base import FixedLength
from llamabranch.speculative.round import Stream

PROMPTS = ("Once upon a time", "The king", "In the wood there was a wolf")
WARM = SamplingParams(temperature=0.8, seed=4)


class Text:
    """A text that steps read."""

    def __init__(self, branch: Branch, tokens: list[int]) -> None:
        self.sequence: TokenSequence = branch.sequence
        self.wants_rows = False
        self.tokens = tokens
        self.n_chunks = 0

    def unread(self) -> list[int]:
        return self.tokens

    def read(self, tokens: Sequence[int], rows: Sequence[LogitsRow]) -> None:
        self.n_chunks += 1
        del self.tokens[: len(tokens)]
        self.sequence.append_prompt(tokens, rows[-1] if rows else None)


def open_streams(joint: Joint, branches: Sequence[Branch]) -> list[Stream]:
    streams = [joint.open(branch, "seeded", SpeculativeStats()) for branch in branches]
    for stream in streams:
        stream.begin()
    return streams


def plain(ctx: Context, prompt: str, n: int) -> list[int]:
    with Branch.start(ctx, prompt, sampling=WARM) as branch:
        return [one.token for one in branch.generate(n)]


@pytest.mark.parametrize("drafts", [False, True])
def test_streams_go_on_as_if_alone_while_a_text_is_read(
    ctx: Context, draft_ctx: Context, drafts: bool
) -> None:
    drafter = lb.ModelDrafter(draft_ctx) if drafts else None
    joint = Joint(ctx, FixedLength(3), drafter)
    branches = [Branch.start(ctx, prompt, sampling=WARM) for prompt in PROMPTS]
    streams = open_streams(joint, branches)
    texts = [[stream.pending.token] for stream in streams if stream.pending is not None]
    reader = Branch.create(ctx, WARM)
    late = Text(reader, ctx.model.prompt_tokens(PROMPTS[0] * 9))
    expected = list(late.tokens)
    n_steps = 0
    while min(map(len, texts)) < 20:
        step = joint.run([(stream, 8) for stream in streams], [late] if late.tokens else [])
        n_steps += 1
        assert step.no_room is None
        assert step.n_tokens == sum(outcome.n_tokens for outcome in step.outcomes)
        for tokens, outcome in zip(texts, step.outcomes, strict=False):
            assert outcome.error is None
            tokens += [one.token for one in outcome.emitted]
    assert late.n_chunks == 1
    assert (n_steps < 19) == drafts
    assert reader.tokens == expected
    for prompt, tokens in zip(PROMPTS, texts, strict=True):
        assert tokens == plain(ctx, prompt, len(tokens))
    for stream in streams:
        stream.close()
    with Branch.start(ctx, expected, sampling=WARM) as other:
        assert [t.token for t in reader.generate(5)] == [t.token for t in other.generate(5)]


def test_without_room_nothing_changes_and_the_result_says_so(target: lb.Model) -> None:
    with Context(target, n_ctx=256, n_seq_max=4, n_threads=1) as ctx:
        joint = Joint(ctx, FixedLength(3), lb.PromptLookupDrafter())
        full = [5, 6, 7] * 42
        branches = [Branch.start(ctx, full, sampling=WARM) for _ in range(2)]
        branches[1].extend([9] * (ctx.usage().cells_free - 1))
        streams = open_streams(joint, branches)
        before = [branch.tokens for branch in branches]
        step = joint.run([(stream, 8) for stream in streams])
        assert step.no_room is not None and step.n_tokens == 0
        assert [branch.tokens for branch in branches] == before
        assert all(outcome.emitted == [] for outcome in step.outcomes)
        ctx.audit()
        branches[1].prune()  # somebody gives way: it goes on
        (outcome,) = joint.run([(streams[0], 8)]).outcomes
        assert outcome.emitted and outcome.error is None


def test_cells_of_their_own_that_are_full_are_told_by_name(toy: lb.Model) -> None:
    no_end = WARM.replace(logit_bias={1: -math.inf})
    with Context(toy, n_ctx=512, n_seq_max=2, n_threads=1, kv_unified=False) as ctx:
        joint = Joint(ctx, FixedLength(0))
        branches = [Branch.start(ctx, [5] * n, sampling=no_end) for n in (9, ctx.n_ctx_seq)]
        streams = open_streams(joint, branches)
        step = joint.run([(stream, 8) for stream in streams])
        assert step.no_room is None
        assert [outcome.error is None for outcome in step.outcomes] == [True, False]
        (outcome,) = joint.run([(streams[0], 8)]).outcomes
        assert len(outcome.emitted) == 1


def test_speculator_is_a_step_with_one_stream(ctx: Context, draft_ctx: Context) -> None:
    config = SpeculativeConfig(draft_k=3, rule="seeded")
    spec = lb.Speculator(ctx, lb.ModelDrafter(draft_ctx), config)
    found = spec.generate(PROMPTS[0], max_tokens=24, sampling=WARM).finish()
    assert found.tokens == plain(ctx, PROMPTS[0], 24)
    with Branch.start(ctx, PROMPTS[0], sampling=WARM) as branch:
        spec.generate(branch, max_tokens=24).finish()
        with Branch.start(ctx, PROMPTS[0], sampling=WARM) as other:
            list(other.generate(24))
            assert branch.perplexity() == other.perplexity()
