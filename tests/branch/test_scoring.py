"""Scores of tokens equal those that NumPy computes from the raw logits, and scoring changes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

import llamabranch as lb
from llamabranch import Branch, Context, SamplingParams
from llamabranch.branch.scorer import Wanted
from llamabranch.branch.scorer import score as score_all
from llamabranch.context import TokenScore
from llamabranch.errors import (
    CacheFullError,
)

WARM = SamplingParams(temperature=0.8, seed=42)


def random_tokens(rng: np.random.Generator, n: int, n_vocab: int = 4000) -> list[int]:
    return [int(t) for t in rng.integers(2, n_vocab, n)]


def by_numpy(
    clean: Context, prompt: Sequence[int], tokens: Sequence[int]
) -> list[npt.NDArray[np.float64]]:
    """Return the log-probabilities before each token, from raw logits."""
    with Branch.start(clean, prompt) as branch:
        rows = [branch.logits]
        if len(tokens) > 1:
            rows += branch.extend(tokens[:-1], logits="all")
    wide = [row.astype(np.float64) for row in rows]
    return [row - row.max() - math.log(np.exp(row - row.max()).sum()) for row in wide]


def check(
    clean: Context,
    prompt: Sequence[int],
    tokens: Sequence[int],
    scores: Sequence[TokenScore],
    top: int = 0,
) -> None:
    assert [score.token for score in scores] == list(tokens)
    for logp, token, score in zip(by_numpy(clean, prompt, tokens), tokens, scores, strict=True):
        assert score.logprob == pytest.approx(logp[token], abs=1e-4)
        assert score.rank == 1 + int((logp > logp[token]).sum())
        assert score.entropy == pytest.approx(-(np.exp(logp) * logp).sum(), abs=1e-3)
        best = np.argsort(-logp, kind="stable")[:top]
        assert [t for t, _ in score.alternatives] == list(best)


@pytest.mark.parametrize("n", [1, 2, 40, 300])
def test_scores_are_those_of_the_raw_logits(n: int, ctx: Context, other_ctx: Context) -> None:
    """300 tokens take several decodes: at most 256 rows come from one."""
    rng = np.random.default_rng(n)
    prompt, tokens = random_tokens(rng, 20), random_tokens(rng, n)
    branch = Branch.start(ctx, prompt)
    scores = branch.score(tokens, top=3)
    check(other_ctx, prompt, tokens, scores, top=3)
    total = sum(score.logprob for score in scores)
    branch.extend(tokens)
    assert total == pytest.approx(branch.log_likelihood(), abs=1e-3)


def test_scoring_changes_nothing(ctx: Context) -> None:
    rng = np.random.default_rng(0)
    branch = Branch.start(ctx, random_tokens(rng, 30), sampling=WARM)
    twin = branch.fork()
    twin.step()
    before = branch.tokens, branch.logits, branch.produce(), ctx.usage().sequences
    branch.score(random_tokens(rng, 50))
    assert branch.tokens == before[0]
    assert np.array_equal(branch.logits, before[1])
    assert branch.produce() == before[2]
    assert ctx.usage().sequences == before[3]
    assert branch.step().token == before[2].token
    ctx.audit()


def scored(
    ctx: Context, work: dict[Branch, list[list[int]]], top: int = 0
) -> dict[Branch, list[list[TokenScore]]]:
    """Score many continuations of many branches together."""
    with ctx.lock:
        every = [Wanted(branch.sequence, text) for branch, texts in work.items() for text in texts]
        scores = iter(score_all(ctx, every, top=top))
        return {branch: [next(scores) for _ in texts] for branch, texts in work.items()}


def test_a_grammar_does_not_matter(ctx: Context) -> None:
    plain = Branch.start(ctx, "The king")
    bound = Branch.start(ctx, "The king", grammar='root ::= "x"')
    tokens = ctx.tokenize(" said", add_special=False)
    assert bound.score(tokens) == plain.score(tokens) == plain.score(" said")


@pytest.mark.parametrize("n_guests", [0, 5, 6])
def test_many_continuations_of_many_branches(
    n_guests: int, ctx: Context, other_ctx: Context
) -> None:
    """With few free sequences too. If none is free, they are decoded in the branch's own sequence."""
    rng = np.random.default_rng(1)
    prompts = [random_tokens(rng, 15) for _ in range(2)]
    branches = [Branch.start(ctx, prompt) for prompt in prompts]
    guests = [Branch.create(ctx) for _ in range(n_guests)]
    work = {b: [random_tokens(rng, int(rng.integers(1, 40))) for _ in range(9)] for b in branches}
    n_before = ctx.decoder.n_decodes
    all_scores = scored(ctx, work, top=1)
    if not n_guests:
        assert ctx.decoder.n_decodes - n_before <= 5
    for branch, prompt in zip(branches, prompts, strict=True):
        for tokens, scores in zip(work[branch], all_scores[branch], strict=True):
            check(other_ctx, prompt, tokens, scores, top=1)
            assert scores == branch.score(tokens, top=1)
    assert ctx.n_seq_free == 6 - n_guests
    assert ctx.usage().sequences == {b.seq_id: 15 for b in branches}
    assert len(guests) == n_guests


def test_continuations_that_do_not_fit_together_are_rated_in_turn(
    target: lb.Model, other_ctx: Context
) -> None:
    rng = np.random.default_rng(2)
    with Context(target, n_ctx=256, n_seq_max=8, n_threads=1, exact=True) as ctx:
        prompt = random_tokens(rng, 50)
        branch = Branch.start(ctx, prompt)
        work = {branch: [random_tokens(rng, 150) for _ in range(4)]}
        for tokens, scores in zip(work[branch], scored(ctx, work)[branch], strict=True):
            check(other_ctx, prompt, tokens, scores)
        usage = ctx.usage()
        assert (usage.cells_used, usage.cells_reserved, usage.in_order) == (50, 0, True)
        with pytest.raises(CacheFullError):
            branch.score(random_tokens(rng, 250))
        assert ctx.usage().cells_used == 50
        assert branch.step()
        ctx.audit()


def test_common_beginnings_are_decoded_once_and_change_no_score(ctx: Context) -> None:
    """Two branches with the same tokens share nothing: the texts are read after each of them."""
    rng = np.random.default_rng(4)
    prompt, shared = random_tokens(rng, 12), random_tokens(rng, 20)
    first, second = Branch.start(ctx, prompt), Branch.start(ctx, prompt)
    texts = [[*shared, 5, 6], [*shared, 7, 8, 9], shared, shared[:7]]
    n_before = ctx.decoder.n_decodes
    scores = scored(ctx, {first: texts, second: texts[:1]})
    assert ctx.decoder.n_decodes == n_before + 1
    assert scores[first] == [second.score(text) for text in texts]
    assert scores[second] == scores[first][:1]
    ctx.audit()
