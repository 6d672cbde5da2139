"""Drafters and acceptance rules from functions, on the bundled pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from drafts import Knowing

import llamabranch as lb
from llamabranch import ConfigError, SpeculativeConfig
from llamabranch.errors import TokenizeError
from llamabranch.generation.drafter import NullState

PROMPT = "Once upon a time there was a king"
FIXED = SpeculativeConfig(draft_k=4)
SEEDED = lb.SamplingParams(temperature=0.8, seed=3)
Target = Callable[[int], lb.Distribution]


def generate(
    ctx: lb.Context, drafter: lb.Drafter | None, config: SpeculativeConfig = FIXED
) -> lb.speculative.Generation:
    speculator = lb.Speculator(ctx, drafter, config)
    generation = speculator.generate(PROMPT, max_tokens=32, sampling=SEEDED)
    generation.finish()
    return generation


# -- a drafter -------------------------------------------------------------------------------------


def test_function_drafts_and_the_text_stays_the_same(ctx: lb.Context) -> None:
    plain = generate(ctx, None).tokens
    whole = [*ctx.tokenize(PROMPT), *plain]

    def oracle(tokens: list[int], k: int) -> list[int]:
        assert 0 < k <= 4
        n = len(tokens)
        assert tokens == whole[:n]
        tokens.clear()  # the list is the function's own
        return whole[n : n + k]

    generation = generate(ctx, lb.FunctionDrafter(oracle))
    assert generation.tokens == plain
    stats = generation.stats
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 20
    assert stats.num_drafts < 10
    assert stats.draft_time_s > 0
    # A state of one's own may propose NumPy's integers.
    knowing = Knowing(lambda tokens, k: [*np.array(whole[len(tokens) :][:k], dtype=np.int64)])
    drafted = generate(ctx, knowing)
    assert drafted.tokens == plain and {type(token) for token in drafted.tokens} == {int}
    assert drafted.stats.num_accepted_tokens > 20


@pytest.mark.parametrize("guess", [["a"], "text", [10**9], 5, [1.5]])
def test_what_are_no_tokens_is_a_typed_error(guess: object, ctx: lb.Context) -> None:
    drafter = lb.FunctionDrafter(lambda tokens, k: guess)  # type: ignore[arg-type,return-value]
    with pytest.raises(TokenizeError):
        generate(ctx, drafter)
    assert ctx.usage().cells_used == 0
    with pytest.raises(ConfigError, match="function"):
        lb.FunctionDrafter("suffix")  # type: ignore[arg-type]


def test_what_is_no_draft_names_the_drafter(ctx: lb.Context) -> None:
    def guesses(tokens: list[int], k: int) -> None: ...

    class Nothing(NullState):
        def propose(self, *_: object) -> None: ...  # type: ignore[override]

    class Mine(lb.speculative.NullDrafter):
        def start(self, target: lb.speculative.Text, rule: str) -> Any:
            return Nothing()

    with pytest.raises(TokenizeError, match=r"the drafter guesses: .* not None"):
        generate(ctx, lb.FunctionDrafter(guesses))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Nothing.propose returns must be a Draft, not None"):
        generate(ctx, lb.ChainDrafter([Mine()]))
    with pytest.raises(ConfigError) as caught:
        lb.Engine(ctx, guesses)  # type: ignore[arg-type]
    assert "FunctionDrafter(f)" in str(caught.value.hint)
    assert ctx.usage().cells_used == 0


# -- a rule ----------------------------------------------------------------------------------------


def test_rule_as_a_function_is_used(ctx: lb.Context) -> None:
    calls = []

    def mine(
        drafted: Sequence[int],
        sources: Sequence[lb.Distribution],
        target: Target,
        rng: lb.speculative.RandomSource,
    ) -> lb.speculative.Acceptance:
        calls.append(list(drafted))
        return lb.speculative.token_rule(drafted, sources, target, rng)

    drafter = lb.SuffixDrafter()
    built_in = generate(ctx, drafter, SpeculativeConfig(draft_k=4, rule="token"))
    generation = generate(ctx, lb.SuffixDrafter(), SpeculativeConfig(draft_k=4, rule=mine))
    assert generation.tokens == built_in.tokens
    assert len(calls) == generation.stats.num_drafts > 0
    engine = lb.Engine(ctx, lb.SuffixDrafter(), SpeculativeConfig(draft_k=4, rule=mine))
    (result,) = engine.generate([lb.Request(PROMPT, max_tokens=32, sampling=SEEDED)])
    assert result.finish_reason in ("length", "stop")


@pytest.mark.parametrize("answer", [None, 3, (99, 1), (-1, 1), (0, "a"), (0, 1, 2)])
def test_rule_that_returns_no_acceptance_is_refused(answer: object, ctx: lb.Context) -> None:
    config = SpeculativeConfig(draft_k=4, rule=lambda *arguments: answer)  # type: ignore[arg-type]
    drafter = lb.FunctionDrafter(lambda tokens, k: [7] * k)
    with pytest.raises(ConfigError, match="Acceptance"):
        generate(ctx, drafter, config)
    assert ctx.usage().cells_used == 0
