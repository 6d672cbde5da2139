"""Text that a branch reads after it has generated some, such as the next message of a conversation.

The laws: a branch with appended text equals, to the bit, a branch that has read the same tokens from the
start. Rewinding, forking and saving it work as without the append.
"""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import llamabranch as lb
from llamabranch import Branch, Context

STORY = "The king's daughter was very"
NEXT = " The king said:"
WORDS = 'root ::= " " [a-z]{2,9} "."'


def answer(branch: Branch, n: int = 8) -> str:
    return "".join(token.text for token in branch.generate(n))


def test_appended_tokens_are_not_generated_and_have_no_score(ctx: Context) -> None:
    branch = Branch.start(ctx, STORY, temperature=0.8, seed=1)
    first, second = list(branch.generate(5)), []
    n = branch.position
    added = ctx.tokenize(NEXT, add_special=False)
    branch.append(NEXT)
    assert branch.tokens[n:] == added
    assert branch.generated_tokens == [t.token for t in first]
    assert branch.perplexity() == pytest.approx(
        math.exp(-sum(t.logprob for t in first) / len(first))
    )
    fork = branch.fork()
    second = list(fork.generate(5))
    assert fork.generated_tokens == [t.token for t in first + second]
    assert fork.log_likelihood() == pytest.approx(sum(t.logprob for t in first + second))
    assert fork.log_likelihood("fork") == pytest.approx(sum(t.logprob for t in second))
    assert NEXT in fork.text and fork.n_prompt == branch.n_prompt


def test_it_continues_after_an_end(small_toy: lb.Model) -> None:
    with Context(small_toy, n_ctx=128, n_threads=1, exact=True) as ctx:
        end = min(ctx.model.eog_tokens)
        branch = Branch.start(ctx, [3, 4], seed=1, logit_bias={end: 100.0})
        assert list(branch.generate(5)) == [] and branch.is_stop
        branch.append([end, 5])
        assert (branch.state, branch.is_stop, branch.finish_reason) == ("ready", False, None)
        assert branch.tokens == [3, 4, end, 5] and branch.n_prompt == 4
        branch.steer({end: -math.inf})
        assert len(list(branch.generate(5))) == 5


def test_a_grammar_holds_for_each_answer(ctx: Context, other_ctx: Context, tmp_path: Path) -> None:
    branch = Branch.start(ctx, STORY, grammar=WORDS, seed=2, repeat_penalty=1.2)
    first = answer(branch, 40)
    assert first.endswith(".") and branch.is_stop
    branch.append(NEXT)
    again = Branch.start(other_ctx, branch.tokens, grammar=WORDS, sampling=branch.sampling)
    branch.save(tmp_path / "a.branch")
    second = answer(branch, 40)
    assert second == answer(again, 40)
    assert second.startswith(" ") and second.endswith(".")
    restored = Branch.load(other_ctx, tmp_path / "a.branch")  # it knows what was appended
    assert restored.generated_tokens == ctx.tokenize(first, add_special=False)
    assert answer(restored, 40) == second
    restored.rewind(restored.n_prompt)
    assert restored.generated_tokens == []
    assert branch.text == STORY + first + NEXT + second
    branch.resample(branch.sampling.replace(temperature=0.5))  # replays the tokens


def test_rewinding_through_appended_text(ctx: Context) -> None:
    branch = Branch.start(ctx, STORY, grammar=WORDS, seed=2)
    answer(branch, 2)
    states = []
    for _ in range(2):
        branch.append(NEXT)
        answer(branch, 3)
    expected = branch.tokens
    for position in range(branch.position, branch.n_prompt - 1, -1):
        branch.rewind(position)
        states.append((branch.generated_tokens, branch.log_likelihood(), branch.produce()))
    for generated, log_likelihood, _ in states:
        assert len(generated) <= 8 and log_likelihood <= 0.0
    assert branch.generated_tokens == [] and branch.sequence.appended == []
    answer(branch, 2)
    branch.append(NEXT)
    cut = branch.position - 1  # inside what was appended
    branch.rewind(cut)
    assert branch.generated_tokens == states[-3][0]
    branch.append(expected[cut : cut + 1])  # joins it
    assert len(branch.sequence.appended) == 1
    answer(branch, 3)
    branch.append(NEXT)
    answer(branch, 3)
    assert branch.tokens == expected
    assert (branch.generated_tokens, branch.log_likelihood()) == states[0][:2]


def test_many_tokens_take_the_memory_of_few(target: lb.Model) -> None:
    """`extend` kept all rows of logits in memory before it returned any."""
    tokens = [int(t) for t in np.random.default_rng(3).integers(10, 4000, 450)]
    with Context(target, n_ctx=1024, n_batch=64, n_threads=1, exact=True) as ctx:
        branch = Branch.start(ctx, STORY)
        plain = branch.fork()
        tracemalloc.start()
        (row,) = branch.extend(tokens, logits="last")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100 * ctx.n_vocab * 4
        rows = plain.extend(tokens, logits="all")
        assert len(rows) == 450 and np.array_equal(rows[-1], row)
        assert np.array_equal(branch.logits, row) and not np.shares_memory(rows[0], rows[1])
        assert plain.log_likelihood() == branch.log_likelihood()
