"""A user's function on the logits: with and without drafts, the text is that of a loop by hand.

Contexts are exact, so texts are compared with ==.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafts import FIXED
from llama_cpp import LogitsProcessorList

import llamabranch as lb
from llamabranch import Branch, Context, Request, SamplingParams, SpeculativeConfig
from llamabranch.errors import ConfigError, UnsupportedError

PROMPT = "The wolf said: let me in, let me in. The pig said: no, no. The wolf said: let me in"
GRAMMAR = lb.Grammar.from_regex(r"[a-zA-Z ,.]{40} The end\.")


def alternates(ids: Any, logits: Any) -> Any:
    """Prefer even tokens after odd ones and the reverse, more strongly as the text grows; in place."""
    logits[ids[-1] % 2 :: 2] = -math.inf
    logits *= 1.0 + len(ids) / 400
    return logits


def prefers(ids: Any, logits: Any) -> Any:
    """The same as ``alternates``, but the other tokens stay possible."""
    return logits - 4.0 * (np.arange(len(logits)) % 2 == ids[-1] % 2)


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 4},
    "untruncated": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 2},
    "penalties": {"temperature": 0.7, "repeat_penalty": 1.2, "seed": 3, "logit_bias": {65: 2.0}},
    "xtc": {"temperature": 1.2, "xtc_probability": 0.5, "seed": 5},
    "cold": {"temperature": 1e-30, "seed": 6},
}


def by_hand(ctx: Context, n: int, grammar: lb.Grammar | None = None, **settings: Any) -> list[int]:
    """Return the text by the definition: the function's logits, then the sampler, then the draw."""
    function = alternates if grammar is None else prefers
    params = SamplingParams(**settings)
    generated: list[int] = []
    with Branch.start(ctx, PROMPT, sampling=params) as branch:
        prompt = branch.tokens
        for _ in range(n):
            sampler = lb.sampling.Sampler(ctx.model, params, grammar).replay(prompt, generated)
            logits = function(np.array(branch.tokens, dtype=np.intc), branch.logits)
            distribution = sampler.distribution(logits, branch.position, params.seed or 0)
            token = distribution.draw(params.seed or 0, branch.position)
            if ctx.model.is_eog(token):
                break
            generated.append(token)
            branch.commit(token)
    return generated


@pytest.mark.parametrize("name", SETTINGS)
def test_text_is_that_of_a_loop_by_hand(name: str, ctx: Context, draft_ctx: Context) -> None:
    settings = SETTINGS[name]
    params = SamplingParams(**settings, logits_processor=alternates)
    expected = by_hand(ctx, 40, **settings)
    assert all(a % 2 != b % 2 for a, b in itertools.pairwise(expected))
    with Branch.start(ctx, PROMPT, sampling=params) as branch:
        assert [t.token for t in branch.generate(40)] == expected
        branch.rewind(branch.position - 15)
        with branch.fork() as child:
            assert [t.token for t in child.generate(15)] == expected[-15:]
    assert ctx.complete(PROMPT, max_tokens=40, sampling=params).tokens == expected
    drafters: list[lb.Drafter] = [
        lb.ModelDrafter(draft_ctx),
        lb.SuffixDrafter(min_match=1),
    ]
    for drafter in drafters:
        config = SpeculativeConfig(draft_k=4, rule="seeded")
        text = lb.Speculator(ctx, drafter, config).generate(PROMPT, sampling=params, max_tokens=40)
        assert text.finish().tokens == expected
        assert text.stats.num_draft_tokens > 0
        engine = lb.Engine(ctx, drafter, config)
        requests = [Request(PROMPT, sampling=params, max_tokens=n) for n in (40, 20)]
        first, second = engine.generate([*requests, "The king"])[:2]
        assert (first.tokens, second.tokens) == (expected, expected[:20])


def test_grammar_holds_beside_it(ctx: Context) -> None:
    settings = SETTINGS["seeded"]
    expected = by_hand(ctx, 80, GRAMMAR, **settings)
    for drafter in ("auto", None):
        result = ctx.complete(
            PROMPT, grammar=GRAMMAR, max_tokens=80, drafter=drafter, **settings,
            logits_processor=prefers,
        )  # fmt: skip
        assert result.tokens == expected
    engine = lb.Engine(ctx, config=FIXED)
    params = SamplingParams(**settings, logits_processor=prefers)
    (written,) = engine.generate([Request(PROMPT, grammar=GRAMMAR, sampling=params, max_tokens=80)])
    assert written.tokens == expected


@pytest.mark.parametrize("rule", ["token", "block"])
def test_rules_of_distributions_keep_to_it(rule: str, ctx: Context, draft_ctx: Context) -> None:
    params = SamplingParams(temperature=1.0, logits_processor=alternates)
    config = SpeculativeConfig(draft_k=4, rule=rule)
    speculator = lb.Speculator(ctx, lb.ModelDrafter(draft_ctx), config)
    text = speculator.generate(PROMPT, sampling=params, max_tokens=80).finish()
    ids = [ctx.tokenize(PROMPT)[-1], *text.tokens]
    assert all(a % 2 != b % 2 for a, b in itertools.pairwise(ids))
    assert text.stats.num_accepted_tokens > 0


def test_it_gets_all_tokens_and_a_copy_of_the_logits(ctx: Context) -> None:
    seen: list[tuple[list[int], Any]] = []

    def sees(ids: Any, logits: Any) -> Any:
        assert (ids.dtype, logits.dtype) == (np.intc, np.float32)
        seen.append((ids.tolist(), logits.copy()))
        logits[:] = 0.0  # the model's own logits are not changed
        return [float(i == 70 + len(ids) % 7) for i in range(len(logits))]

    with Branch.start(ctx, PROMPT, temperature=0.0, logits_processor=sees) as branch:
        for _ in range(5):
            row = branch.logits
            token = branch.produce()
            assert seen[-1][0] == branch.tokens and np.array_equal(seen[-1][1], row)
            assert token.token == 70 + branch.position % 7
            assert token.logprob == pytest.approx(branch.log_probs()[token.token])
            branch.step()
        branch.append(" The king")
        branch.step()
        assert seen[-1][0] == branch.tokens[:-1]
        branch.resample(branch.sampling.replace(logits_processor=None))
        n = len(seen)
        branch.step()
        assert len(seen) == n
        branch.resample(branch.sampling.replace(logits_processor=sees))
        branch.steer({9: 100.0})
        assert branch.step().token == 9
        assert seen[-1][0] == branch.tokens[:-1]


def test_searches_keep_to_it(ctx: Context) -> None:
    params = SamplingParams(**SETTINGS["untruncated"], logits_processor=alternates)
    with Branch.start(ctx, PROMPT, sampling=params) as branch:
        hypotheses = lb.search.beam_search(branch, 3, 20).hypotheses
        hypotheses += lb.search.best_of_n(branch, 3, 20, seed=2).hypotheses
        last = branch.tokens[-1]
        for hypothesis in hypotheses:
            ids = [last, *hypothesis.tokens]
            assert all(a % 2 != b % 2 for a, b in itertools.pairwise(ids))


def raises(ids: Any, logits: Any) -> Any:
    raise KeyError("no such token")


BAD: dict[str, tuple[Any, str]] = {
    "raises": (raises, "logits_processor raised KeyError"),
    "nothing": (lambda ids, logits: None, "must return logits of shape"),
    "shape": (lambda ids, logits: logits[:-1], "must return logits of shape"),
    "rows": (lambda ids, logits: logits[None], "must return logits of shape"),
    "text": (lambda ids, logits: np.full(logits.shape, "a"), "must return logits of shape"),
    "nan": (lambda ids, logits: logits * math.nan, "returned is nan"),
    "no token": (lambda ids, logits: logits * 0 - math.inf, "returned is -inf"),
    "infinite": (lambda ids, logits: logits.astype(np.float64) + 1e300, "returned is inf"),
    "arguments": (lambda logits: logits, "raised TypeError"),
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", BAD)
def test_one_that_fails_ends_its_text_only(
    name: str, temperature: float, ctx: Context, draft_ctx: Context
) -> None:
    bad, message = BAD[name]

    def later(ids: Any, logits: Any) -> Any:
        return logits if len(ids) < n_prompt + 6 else bad(ids, logits)

    n_prompt = len(ctx.tokenize(PROMPT))
    params = SamplingParams(temperature=temperature, seed=1)
    expected = ctx.complete(PROMPT, max_tokens=20, sampling=params).tokens
    for drafter in (None, lb.ModelDrafter(draft_ctx), lb.SuffixDrafter(min_match=1)):
        engine = lb.Engine(ctx, drafter, FIXED, sampling=params)
        requests = [
            Request(PROMPT, sampling=params.replace(logits_processor=processor), max_tokens=20)
            for processor in (None, bad, later)
        ]
        plain, ended, ended_later = engine.generate(requests)
        assert plain.tokens == expected
        for result, n in ((ended, 0), (ended_later, 6)):
            assert (result.finish_reason, result.tokens) == ("error", expected[:n])
            assert isinstance(result.error, ConfigError) and message in str(result.error)
    with Branch.start(ctx, PROMPT, sampling=params.replace(logits_processor=later)) as branch:
        with pytest.raises(ConfigError, match=message):
            list(branch.generate(20))
        assert branch.generated_tokens == expected[:6]
        branch.resample(params)
        assert [t.token for t in branch.generate(14)] == expected[6:]
    with pytest.raises(ConfigError, match=message):
        ctx.complete(PROMPT, logits_processor=bad, sampling=params)


def test_it_is_a_function_and_cannot_be_saved(ctx: Context, tmp_path: Path) -> None:
    for bad in ([alternates], "f", 5):
        with pytest.raises(ConfigError, match="logits_processor must be a function") as caught:
            SamplingParams(logits_processor=bad)  # type: ignore[arg-type]
        assert "combine several functions into one" in (caught.value.hint or "")
    settings = SETTINGS["seeded"]
    expected = by_hand(ctx, 20, **settings)
    several: Any = LogitsProcessorList([alternates])
    result = ctx.complete(PROMPT, max_tokens=20, logits_processor=several, **settings)
    assert result.tokens == expected
    with Branch.start(ctx, PROMPT, logits_processor=alternates, **settings) as branch:
        assert [t.token for t in branch.generate(8)] == expected[:8]
        with pytest.raises(UnsupportedError, match="cannot be saved"):
            branch.save(tmp_path / "branch")
        assert not list(tmp_path.iterdir())
        with Branch.restore(ctx, branch.snapshot()) as copy:  # in memory nothing is written
            assert [t.token for t in copy.generate(12)] == expected[8:]
    ctx.kv_cache_clear()
    ctx.decode([5, 6], 0)
    with pytest.raises(UnsupportedError, match="logits processor"):
        ctx.sample(SamplingParams(logits_processor=alternates))
    ctx.kv_cache_clear()
