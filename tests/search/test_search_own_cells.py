"""Searches over sequences that have cells of their own, which cannot make room for each other."""

from __future__ import annotations

import math

import pytest

import llamabranch as lb
from llamabranch import Branch, Context, SamplingParams
from llamabranch.search.continuations import slot_seed

NO_END = SamplingParams(temperature=0.9, seed=3, logit_bias={1: -math.inf})
PROMPT = [5, 6, 7, 8, 9, 5, 6, 7, 8]
N_CELLS = 256  # llama.cpp's least


@pytest.fixture
def own(toy: lb.Model) -> Context:
    return Context(toy, n_ctx=4 * N_CELLS, n_seq_max=4, n_threads=1, kv_unified=False)


def plain(ctx: Context, seed: int) -> list[int]:
    with Branch.start(ctx, PROMPT, sampling=NO_END.replace(seed=seed)) as branch:
        try:
            for _ in branch.generate():
                pass
        except lb.errors.CacheFullError:
            pass
        return branch.generated


@pytest.mark.parametrize("drafts", [False, True])
def test_full_texts_end_and_the_others_are_not_begun_again(own: Context, drafts: bool) -> None:
    drafter = lb.speculative.PromptLookupDrafter() if drafts else None
    with own, Branch.start(own, PROMPT, sampling=NO_END) as branch:
        found = lb.search.best_of_n(branch, 3, None, drafter=drafter)
        assert {h.finish_reason for h in found.hypotheses} == {"capacity"}
        assert {len(h.tokens) for h in found.hypotheses} == {N_CELLS - len(PROMPT) + 1}
        if not drafts:
            assert found.stats.tokens_decoded == 3 * (N_CELLS - len(PROMPT))
        branch.prune()
        with Branch.start(own, PROMPT, sampling=NO_END) as again:
            seeds = [slot_seed(again.seed, i) for i in range(3)]
        texts = [plain(own, seed) for seed in seeds]
        assert sorted(h.tokens[: len(texts[0])] for h in found.hypotheses) == sorted(texts)
        own.audit()


def test_select_reads_choices_that_share_a_beginning(own: Context) -> None:
    with own, Branch.start(own, PROMPT, sampling=NO_END) as branch:
        choices = ["abcd", "abxy", "yz"]
        shared = Context(own.model, n_ctx=1024, n_seq_max=4, n_threads=1)
        with shared, Branch.start(shared, PROMPT, sampling=NO_END) as other:
            expected = lb.search.select(other, choices)
        found = lb.search.select(branch, choices)
        assert found.choice == expected.choice
        assert found.scores == pytest.approx(expected.scores, abs=0.02)
        own.audit()
