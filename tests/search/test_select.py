"""select: every method by hand, shared beginnings, waves, counted decodes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import toys
from failing import check_every_failure

import llamabranch as lb
from llamabranch import Branch, Context, search
from llamabranch.errors import ConfigError

PROMPT = "The king's daughter was very"
CHOICES = [
    " beautiful and good",
    " beautiful",
    " unhappy",
    " telephone wires",
    " beautiful and bad",
]


def by_hand(root: Branch, choice: str) -> list[float]:
    """Return log p of the tokens of ``choice``, decoded one by one."""
    found = []
    with root.fork() as branch:
        for token in root.ctx.tokenize(choice, add_special=False):
            found.append(-branch.surprisal(token))
            branch.commit(token)
    return found


def without_prompt(ctx: Context, choice: str) -> list[float]:
    first, *rest = ctx.tokenize(choice, add_special=False)
    with Branch.start(ctx, [first]) as branch:
        found = [0.0]
        for token in rest:
            found.append(-branch.surprisal(token))
            branch.commit(token)
    return found


def test_log_probabilities_are_those_of_single_decodes(ctx: Context) -> None:
    with Branch.start(ctx, PROMPT) as root:
        found = search.select(root, CHOICES)
        for choice, logprobs in zip(CHOICES, found.logprobs, strict=True):
            assert logprobs == by_hand(root, choice)


@pytest.mark.parametrize("method", ["mean", "sum", "bytes", "contrast"])
def test_scores_are_those_of_the_method(ctx: Context, method: str) -> None:
    with Branch.start(ctx, PROMPT) as root:
        found = search.select(root, CHOICES, method=method)
        for choice, score in zip(CHOICES, found.scores, strict=True):
            logprobs = by_hand(root, choice)
            if method == "contrast":
                alone = without_prompt(ctx, choice)
                expected = math.fsum(a - b for a, b in zip(logprobs, alone, strict=True))
                expected /= len(logprobs)
            else:
                divisor = {"mean": len(logprobs), "sum": 1, "bytes": len(choice)}[method]
                expected = math.fsum(logprobs) / divisor
            assert score == pytest.approx(expected, abs=1e-12)
        assert found.index == max(range(5), key=lambda i: found.scores[i])
        assert found.choice == CHOICES[found.index]


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
        found = search.select(root, CHOICES, method="greedy")
    assert found.index == greedy_reference(found.logprobs)
    assert found.scores[found.index] == max(found.scores)


def test_equal_choices_have_equal_scores_and_the_first_is_taken(ctx: Context) -> None:
    with Branch.start(ctx, PROMPT) as root:
        found = search.select(root, [" good", " good"])
    assert found.scores[0] == found.scores[1]
    assert found.index == 0


def test_all_choices_are_one_decode_and_common_beginnings_are_decoded_once(ctx: Context) -> None:
    with Branch.start(ctx, PROMPT) as root:
        before = ctx.decoder.n_decodes
        found = search.select(root, CHOICES)
        assert found.stats.decodes == ctx.decoder.n_decodes - before == 1
        inner = {tuple(t[:n]) for t in found.tokens for n in range(1, len(t))}
        assert found.stats.tokens_decoded == len(inner)
        assert sum(len(t) for t in found.tokens) > len(inner)
        one = [ctx.detokenize([300]), ctx.detokenize([400])]
        if all(len(ctx.tokenize(c, add_special=False)) == 1 for c in one):
            assert search.select(root, one).stats.decodes == 0  # the logits are there already


@pytest.mark.parametrize(("n_seq_max", "n_batch"), [(2, 64), (3, 64), (8, 8), (4, 4)])
def test_few_sequences_and_small_batches_give_the_same(
    target: lb.Model, ctx: Context, n_seq_max: int, n_batch: int
) -> None:
    choices = [*CHOICES, " good and kind and fair and young, and she had a golden ball", " be"]
    with Branch.start(ctx, PROMPT) as root:
        expected = search.select(root, choices)
    with (
        Context(
            target,
            n_ctx=256,
            n_seq_max=n_seq_max,
            n_batch=n_batch,
            n_threads=1,
            batch_invariant=True,
        ) as small,
        Branch.start(small, PROMPT) as root,
    ):
        assert search.select(root, choices).logprobs == expected.logprobs
        small.audit()
        assert small.n_seq_free == n_seq_max - 1


def test_recurrent_memory_selects_too(tmp_path: Path) -> None:
    with (
        lb.Model(toys.write_lfm2(tmp_path / "lfm2.gguf", vocab="bytes")) as model,
        Context(model, n_ctx=256, n_seq_max=4, n_threads=1) as ctx,
        Branch.start(ctx, "abc") as root,
    ):
        found = search.select(root, ["de", "dx", "fgh"])
        for choice, logprobs in zip(["de", "dx", "fgh"], found.logprobs, strict=True):
            assert logprobs == pytest.approx(by_hand(root, choice), abs=1e-3)
        ctx.audit()


@pytest.mark.parametrize("method", ["mean", "contrast"])
def test_a_failed_decode_leaves_nothing_behind(
    ctx: Context, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    with Branch.start(ctx, PROMPT) as root:

        def chosen() -> list[float]:
            return search.select(root, CHOICES, method=method).scores

        assert check_every_failure(root, chosen, monkeypatch) >= 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"choices": []},
        {"choices": "yes"},
        {"choices": ["yes", ""]},
        {"choices": ["yes", 3]},
        {"choices": None},
        {"choices": ["yes"], "method": "best"},
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(ctx: Context, wrong: dict[str, Any]) -> None:
    with Branch.start(ctx, PROMPT) as root:
        with pytest.raises(ConfigError):
            search.select(root, **wrong)
        assert ctx.n_seq_free == 7
