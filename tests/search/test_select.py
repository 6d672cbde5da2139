"""select: every method by hand, shared beginnings, counted decodes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import toys

import llamabranch as lb
from llamabranch import Branch, Context, search

PROMPT = "The king's daughter was very"
CHOICES = [
    " beautiful and good",
    " beautiful",
    " unhappy",
    " telephone wires",
    " beautiful and bad",
    " fräulein",
]


def by_hand(root: Branch, choice: str) -> list[float]:
    """Return log p of the tokens of ``choice``, decoded one by one."""
    logprobs = []
    with root.fork() as branch:
        for token in root.ctx.tokenize(choice, add_special=False):
            logprobs.append(-branch.surprisal(token))
            branch.commit(token)
    return logprobs


def without_prompt(ctx: Context, choice: str) -> list[float]:
    first, *rest = ctx.tokenize(choice, add_special=False)
    with Branch.start(ctx, [first]) as branch:
        return [0.0, *by_hand(branch, ctx.detokenize(rest))] if rest else [0.0]


@pytest.mark.parametrize("method", ["mean", "sum", "bytes", "contrast"])
def test_scores_are_those_of_the_method(ctx: Context, method: str) -> None:
    with Branch.start(ctx, PROMPT) as root:
        selection = search.select(root, CHOICES, method=method)
        for choice, logprobs, score in zip(
            CHOICES, selection.logprobs, selection.scores, strict=True
        ):
            assert logprobs == by_hand(root, choice)
            n = {"sum": 1, "bytes": len(choice.encode())}.get(method, len(logprobs))
            subtracted = without_prompt(ctx, choice) if method == "contrast" else [0.0]
            assert score == pytest.approx(
                (math.fsum(logprobs) - math.fsum(subtracted)) / n, abs=1e-12
            )
    assert selection.index == max(range(len(CHOICES)), key=lambda i: selection.scores[i])
    assert selection.choice == CHOICES[selection.index]


def greedy_reference(rows: list[list[float]]) -> int:
    """SGLang's greedy_token_selection, over a matrix padded with means."""
    longest = max(map(len, rows))
    matrix = [[*row, *[sum(row) / len(row)] * (longest - len(row))] for row in rows]
    left = list(range(len(rows)))
    for column in range(longest):
        best = max(matrix[i][column] for i in left)
        left = [i for i in left if matrix[i][column] == best]
        if len(left) == 1:
            break
    return left[0]


@pytest.mark.parametrize("prompt", [PROMPT, "Once upon a time there was", "He said", "In the"])
def test_greedy_drops_a_choice_at_its_first_less_probable_token(ctx: Context, prompt: str) -> None:
    with Branch.start(ctx, prompt) as root:
        selection = search.select(root, CHOICES, method="greedy")
    assert selection.index == greedy_reference(selection.logprobs)
    assert selection.scores[selection.index] == max(selection.scores)


def test_all_choices_are_one_decode_and_common_beginnings_are_decoded_once(ctx: Context) -> None:
    with Branch.start(ctx, PROMPT) as root:
        before = ctx.decoder.n_decodes
        selection = search.select(root, CHOICES)
        assert selection.stats.decodes == ctx.decoder.n_decodes - before == 1
        inner = {tuple(t[:n]) for t in selection.tokens for n in range(1, len(t))}
        assert selection.stats.tokens_decoded == len(inner) < sum(len(t) for t in selection.tokens)
        # Choices of one token are already in the logits. If choices are equal, the first one is taken.
        equal = search.select(root, [" good", " good"])
        assert [len(t) for t in equal.tokens] == [1, 1] and equal.stats.decodes == 0
        assert equal.scores[0] == equal.scores[1] and equal.index == 0


def test_recurrent_memory_selects_too(tmp_path: Path) -> None:
    with (
        lb.Model(toys.write_lfm2(tmp_path / "lfm2.gguf", vocab="bytes")) as model,
        Context(model, n_ctx=256, n_seq_max=4, n_threads=1) as ctx,
        Branch.start(ctx, "abc") as root,
    ):
        selection = search.select(root, ["de", "dx", "fgh"])
        for choice, logprobs in zip(["de", "dx", "fgh"], selection.logprobs, strict=True):
            assert logprobs == pytest.approx(by_hand(root, choice), abs=1e-3)
        ctx.audit()
