"""Scores of tokens equal those that NumPy computes from the raw logits, and scoring changes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

import llamabranch as lb
from llamabranch import Branch, Context, SamplingParams
from llamabranch.context import TokenScore
from llamabranch.errors import CacheFullError

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


def test_a_grammar_does_not_matter(ctx: Context) -> None:
    plain = Branch.start(ctx, "The king")
    bound = Branch.start(ctx, "The king", grammar='root ::= "x"')
    tokens = ctx.tokenize(" said", add_special=False)
    assert bound.score(tokens) == plain.score(tokens) == plain.score(" said")


def test_a_text_that_does_not_fit_is_refused_and_leaves_nothing(
    target: lb.Model, other_ctx: Context
) -> None:
    rng = np.random.default_rng(2)
    with Context(target, n_ctx=256, n_seq_max=8, n_threads=1, exact=True) as ctx:
        prompt = random_tokens(rng, 50)
        branch = Branch.start(ctx, prompt)
        guests = [Branch.create(ctx) for _ in range(7)]  # it needs no sequence of its own
        for _ in range(4):
            tokens = random_tokens(rng, 150)
            check(other_ctx, prompt, tokens, branch.score(tokens))
        usage = ctx.usage()
        assert (usage.cells_used, usage.cells_reserved, usage.in_order) == (50, 0, True)
        with pytest.raises(CacheFullError):
            branch.score(random_tokens(rng, 250))
        assert ctx.usage().cells_used == 50
        assert branch.step()
        assert len(guests) == 7
        ctx.audit()
