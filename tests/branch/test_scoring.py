"""Scores of tokens equal those that NumPy computes from the raw logits, and scoring changes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from llamabranch import Branch, Context
from llamabranch.context import TokenScore
from llamabranch.errors import CacheFullError


def random_tokens(rng: np.random.Generator, n: int) -> list[int]:
    return [int(t) for t in rng.integers(2, 4000, n)]


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


@pytest.mark.parametrize("n_guests", [0, 6, 7])
@pytest.mark.parametrize("n", [1, 2, 40, 300])
def test_scores_are_those_of_the_raw_logits(
    n: int, n_guests: int, ctx: Context, other_ctx: Context
) -> None:
    """300 tokens take several decodes. If no sequence is free, they are decoded in the branch's own."""
    rng = np.random.default_rng(n)
    prompt, tokens = random_tokens(rng, 20), random_tokens(rng, n)
    branch = Branch.start(ctx, prompt)
    guests = [Branch.create(ctx) for _ in range(n_guests)]
    scores = branch.score(tokens, top=3)
    check(other_ctx, prompt, tokens, scores, top=3)
    assert ctx.n_seq_free == 7 - len(guests)
    with pytest.raises(CacheFullError):
        branch.score(random_tokens(rng, 1020))
    usage = ctx.usage()
    assert usage.sequences == {branch.seq_id: 20}
    assert (usage.cells_used, usage.cells_reserved, usage.in_order) == (20, 0, True)
    assert branch.step()
    branch.rewind(20)
    ctx.audit()
    branch.extend(tokens)
    total = sum(score.logprob for score in scores)
    assert total == pytest.approx(branch.log_likelihood(), abs=1e-3)


def test_a_grammar_does_not_matter(ctx: Context) -> None:
    plain = Branch.start(ctx, "The king")
    bound = Branch.start(ctx, "The king", grammar='root ::= "x"')
    tokens = ctx.tokenize(" said", add_special=False)
    assert bound.score(tokens) == plain.score(tokens) == plain.score(" said")
