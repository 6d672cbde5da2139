"""Why two texts part: every difference that rounding makes is traced to what decided, others are not.

The draws of one row of logits and of a slightly different one are compared over many seeds and settings.
The rows are a real model's and the samplers llama.cpp's; how they differ is given, so that the
test does not depend on how a processor rounds.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import toys
from divergence import Divergence, Logits, _Decision, first_divergence

import llamabranch as lb
from llamabranch import Branch, Context, SamplingParams
from llamabranch.errors import GrammarError
from llamabranch.sampling import Sampler

OPEN = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy, penalties": SamplingParams(temperature=0.0, repeat_penalty=1.3),
    "greedy, typical": SamplingParams(temperature=0.0, typical_p=0.5),
    "greedy, bias": SamplingParams(temperature=0.0, logit_bias={5: 2.0}),
    "default": SamplingParams(),
    "hot": SamplingParams(temperature=1.5),
    "cold": SamplingParams(temperature=0.05),
    "open": SamplingParams(temperature=1.0).replace(**OPEN),
    "top-k": SamplingParams(temperature=1.5).replace(**OPEN | {"top_k": 5}),
    "top-p": SamplingParams(temperature=1.5).replace(**OPEN | {"top_p": 0.9}),
    "min-p": SamplingParams(temperature=2.0).replace(**OPEN | {"min_p": 0.1}),
    "top-k and p": SamplingParams(temperature=2.0).replace(**OPEN | {"top_k": 20, "top_p": 0.8}),
    "typical": SamplingParams(temperature=1.0, typical_p=0.3).replace(**OPEN),
    "sigma": SamplingParams(temperature=1.5, top_n_sigma=1.0).replace(**OPEN),
    "xtc": SamplingParams(temperature=0.8, xtc_probability=0.9, xtc_threshold=0.05),
    "dynamic": SamplingParams(temperature=1.2, dynatemp_range=1.0).replace(**OPEN),
    "penalties": SamplingParams(temperature=0.8, repeat_penalty=1.2, frequency_penalty=0.3),
    "dry": SamplingParams(temperature=0.7, dry_multiplier=0.8),
}


def _divergence(
    model: lb.Model,
    params: SamplingParams,
    rows: list[Logits],
    tokens: tuple[int, int],
    seed: int,
    context: tuple[list[int], list[int]] = ([2, 3, 4], [5, 6]),
) -> Divergence:
    """Return what decided between ``tokens`` by rows of logits as decodes of several kinds gave them."""
    prompt, prefix = context

    def make(chosen: SamplingParams) -> Sampler:
        return Sampler(model, chosen).replay(prompt, prefix)

    found = _Decision(make, params, rows, len(prompt) + len(prefix), seed)
    gap, decided_by = max(map(found.turn, tokens))
    return Divergence(len(prefix), tokens, gap, found.difference, decided_by)


@pytest.mark.parametrize("scale", [0.003, 0.1])
def test_every_difference_that_small_changes_make_is_explained(toy: lb.Model, scale: float) -> None:
    """What is drawn from a row and from one that was moved by noise, in hundreds of draws.

    In 0.1 the gap of the scores was all that was told: far from a tie wherever a truncation decided.
    """
    context = list(range(2, 22)), [40, 41, 42]
    position = sum(map(len, context))
    with (
        Context(toy, n_ctx=256, n_threads=1) as ctx,
        Branch.start(ctx, [*context[0], *context[1]]) as branch,
    ):
        row = branch.logits
    rng = np.random.default_rng(5)

    def moved() -> Logits:
        noise = scale * rng.standard_normal(len(row))
        return (row + noise).astype(np.float32)

    rows = [row, *(moved() for _ in range(4))]
    deciders: Counter[str] = Counter()
    for name, params in SETTINGS.items():
        sampler = Sampler(toy, params).replay(*context)

        def drawn(row: Logits, seed: int, sampler: Sampler = sampler) -> int:
            return sampler.distribution(row, position, seed).draw(seed, position)

        found = 0
        for seed in range(400):
            tokens = (
                drawn(row, seed),
                drawn(moved(), seed),
            )  # a row that is not among those measured
            if tokens[0] != tokens[1] and found < 4:
                found += 1
                why = _divergence(toy, params, rows, tokens, seed, context)
                assert why.explained, (name, seed, why)
                assert why.gap > 0
                deciders[why.decided_by] += 1
    if scale == 0.1:
        assert deciders["scores"] > 5
        assert {"top_k", "top_p", "min_p", "typical_p", "top_n_sigma"} <= set(deciders)


def test_what_another_seed_draws_is_not_explained(toy: lb.Model) -> None:
    """The negative control. By chance two scores lie closer than 0.04 once in some fifty draws."""
    with Context(toy, n_ctx=256, n_threads=1) as ctx, Branch.start(ctx, [2, 3, 4, 5, 6]) as branch:
        row = branch.logits
    rng = np.random.default_rng(5)
    rows = [row, (row + 0.003 * rng.standard_normal(len(row))).astype(np.float32)]
    params = SETTINGS["open"]
    sampler = Sampler(toy, params)
    explained = n = 0
    for seed in range(60):
        one, other = (sampler.distribution(row, 5, s).draw(s, 5) for s in (seed, seed + 1000))
        if one != other:
            n += 1
            explained += _divergence(toy, params, rows, (one, other), seed).explained
    assert n > 40
    assert explained < n / 10


# -- one boundary at a time --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "logits", "tokens", "decided_by"),
    [
        # Tokens 2, 3, ... with their logits, the others far below; the two tokens move by 2e-3.
        ({"top_k": 2}, (3.0, 1.0, 0.999), (3, 4), "top_k"),
        ({"min_p": 0.1}, (3.0, 3.0 + math.log(0.1) - 1e-3), (2, 3), "min_p"),
        ({"top_p": 0.6}, (math.log(0.6003), math.log(0.3997)), (2, 3), "top_p"),
        ({}, (2.0, 1.0), (2, 3), "scores"),
        ({"temperature": 0.0}, (2.0, 1.999, 1.0), (2, 3), "logits"),
    ],
    ids=["top_k", "min_p", "top_p", "scores", "logits"],
)
def test_what_decided_is_named(
    small_toy: lb.Model,
    changes: dict[str, float],
    logits: tuple[float, ...],
    tokens: tuple[int, int],
    decided_by: str,
) -> None:
    """A token next to a boundary, and noise that favours it: the scores themselves are no near-tie."""
    params = SamplingParams(temperature=1.0).replace(**OPEN | changes)
    row = np.full(small_toy.n_vocab, -30.0, dtype=np.float32)
    row[2 : 2 + len(logits)] = logits
    other = row.copy()
    other[tokens[0]] -= 1e-3
    other[tokens[1]] += 1e-3
    sampler = Sampler(small_toy, params)
    for seed in range(20_000):
        drawn = tuple(sampler.distribution(each, 5, seed).draw(seed, 5) for each in (row, other))
        if set(drawn) == set(tokens):
            break
    else:
        pytest.fail("no seed turns this draw")
    found = _divergence(small_toy, params, [row, other], tokens, seed)
    assert found.decided_by == decided_by
    assert found.explained
    assert 0 < found.gap < 0.01
    assert found.difference == pytest.approx(2e-3, rel=0.01)


def test_dynamic_temperature_is_named(small_toy: lb.Model) -> None:
    """The two tokens' own logits stay; one far below moves the entropy, and with it the temperature."""
    params = SamplingParams(temperature=1.0, dynatemp_range=0.9).replace(**OPEN)
    row = np.full(small_toy.n_vocab, -1.0, dtype=np.float32)
    row[2:4] = 4.0, 1.0
    other = row.copy()
    other[4:] += 0.01
    sampler = Sampler(small_toy, params)
    for seed in range(50_000):
        one, two = (sampler.distribution(each, 5, seed).draw(seed, 5) for each in (row, other))
        if {one, two} == {2, 3}:
            break
    else:
        pytest.fail("no seed turns this draw")
    found = _divergence(small_toy, params, [row, other], (one, two), seed)
    assert found.explained
    assert found.decided_by in ("temperature", "scores")
    assert found.gap < 0.02


# -- in contexts -------------------------------------------------------------------------------------


def test_where_batches_are_exact_nothing_is_explained_by_rounding(ctx: Context) -> None:
    prompt = ctx.tokenize("Once upon a time")
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=3)):
        with Branch.start(ctx, prompt, sampling=params) as branch:
            text = [t.token for t in branch.generate(6)]
        for position in (0, 4):
            other = [*text[:position], (text[position] + 1) % 4096]
            found = first_divergence(ctx, prompt, text, other, params, params.seed or 0)
            assert found is not None
            assert found.position == position
            assert found.difference == 0.0
            assert not found.explained
            assert "not explained" in str(found)
    assert ctx.usage().cells_used == 0


def test_a_grammar_is_part_of_what_decides(ctx: Context) -> None:
    grammar = 'root ::= ("yes" | "no") " " [a-z]+'
    prompt = ctx.tokenize("Is it?")
    params = SamplingParams(temperature=0.8, seed=3)
    with Branch.start(ctx, prompt, sampling=params, grammar=grammar) as branch:
        text = [t.token for t in branch.generate(5)]
        allowed = branch.ctx.tokenize("zoo")[0]
    at = len(text) - 1

    def divergence(token: int, grammar: str | None) -> Divergence:
        other = [*text[:at], token]
        found = first_divergence(ctx, prompt, text, other, params, 3, grammar)
        assert found is not None
        assert found.position == at
        return found

    assert math.isfinite(divergence(allowed, grammar).gap)
    forbidden = ctx.tokenize("?")[0]
    found = divergence(forbidden, grammar)
    assert (found.gap, found.decided_by, found.explained) == (math.inf, "nothing", False)
    assert math.isfinite(divergence(forbidden, None).gap)
    with pytest.raises(GrammarError):
        first_divergence(ctx, prompt, [forbidden, *text], [forbidden], params, 3, grammar)
    assert ctx.usage().cells_used == 0


@pytest.mark.parametrize("architecture", ["llama", "mamba", "gemma3"])
@pytest.mark.parametrize("n_seq_max", [1, 3])
def test_any_memory_and_a_single_sequence_will_do(
    architecture: str, n_seq_max: int, tmp_path: Path
) -> None:
    path = toys.write_toy(tmp_path / "toy.gguf", architecture, vocab="bytes", weights="f16")
    params = SamplingParams(temperature=0.8, seed=1)
    with (
        lb.Model(path) as model,
        Context(model, n_ctx=256, n_seq_max=n_seq_max, n_threads=1) as ctx,
    ):
        for prompt in ([5], [5, 6, 7, 8]):
            with Branch.start(ctx, prompt, sampling=params) as branch:
                text = [t.token for t in branch.generate(6)]
            for left, right in ((text, [200]), (text[:3], text), ([], text)):
                found = first_divergence(ctx, prompt, left, right, params, 1)
                assert found is not None
                assert found.gap > 0
                assert math.isfinite(found.difference)
        assert ctx.usage().cells_used == 0
        ctx.audit()


def test_a_text_that_ended_is_compared_with_its_end(toy: lb.Model) -> None:
    """The gap is that of the end token; a text cut short elsewhere is far from ending."""
    params = SamplingParams(temperature=0.0)
    (end,) = toy.eog_tokens
    with Context(toy, n_ctx=256, n_threads=1) as ctx:
        with Branch.start(ctx, [5, 6], sampling=params) as branch:
            best = branch.sequence.logits_row().best
            gap = float(branch.logits[best] - branch.logits[end])
        assert best != end
        found = first_divergence(ctx, [5, 6], [best], [], params)
        assert found is not None
        assert found.tokens == (best, None)
        assert found.gap == pytest.approx(gap, rel=0.01)
        assert found.decided_by == "logits"
