"""Every setting does what llama.cpp's documentation says, compared with a simple NumPy version."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import toys

import llamabranch as lb
from llamabranch import Branch, Context, Grammar, SamplingParams
from llamabranch.errors import BranchStateError, ConfigError
from llamabranch.sampling import Sampler
from llamabranch.sampling.noise import MIXTURE, uniform

Floats = npt.NDArray[np.float64]
Row = npt.NDArray[np.float32]

OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
BREAKERS = b'\n:"*'


# -- the reference: dense arrays, -inf for what is gone ----------------------------------------------


def _softmax(x: Floats) -> Floats:
    weights = np.exp(x - x.max())
    return np.asarray(weights / weights.sum())


def _keep(x: Floats, kept: npt.NDArray[np.int64]) -> Floats:
    left = np.full_like(x, -math.inf)
    left[kept] = x[kept]
    return left


def _penalised(x: Floats, p: SamplingParams, history: Sequence[int]) -> Floats:
    x, n = x.copy(), p.penalty_last_n
    window = history if n == -1 else history[max(0, len(history) - n) :]
    for token, count in Counter(window).items():
        x[token] = x[token] / p.repeat_penalty if x[token] > 0 else x[token] * p.repeat_penalty
        x[token] -= count * p.frequency_penalty + p.presence_penalty
    return x


def _dry(x: Floats, p: SamplingParams, history: Sequence[int], breakers: set[int]) -> Floats:
    if p.dry_penalty_last_n != -1:
        history = history[max(0, len(history) - p.dry_penalty_last_n) :]
    since_breaker = next(
        (i for i, token in enumerate(reversed(history)) if token in breakers), len(history)
    )
    repeats: dict[int, int] = {}
    for j in range(1, len(history)):  # what if history[j] came again now?
        length = 0
        while length < min(j, since_breaker) and history[j - 1 - length] == history[-1 - length]:
            length += 1
        if length >= p.dry_allowed_length and history[j] not in breakers:
            repeats[history[j]] = max(length, repeats.get(history[j], 0))
    for token, length in repeats.items():
        x[token] -= p.dry_multiplier * p.dry_base ** (length - p.dry_allowed_length)
    return x


def _cut(x: Floats, p: SamplingParams) -> Floats:
    if p.top_n_sigma > 0:
        live = x[x > -math.inf]
        x = _keep(x, np.flatnonzero(x >= live.max() - p.top_n_sigma * live.std()))
    if 0 < p.top_k < len(x):
        x = _keep(x, np.argsort(-x, kind="stable")[: p.top_k])
    if p.typical_p < 1:
        probs = _softmax(x)
        live_ids = np.flatnonzero(probs)
        surprise = -np.log(probs[live_ids])  # tokens of probability 0 add nothing
        entropy = float((probs[live_ids] * surprise).sum())
        order = live_ids[np.argsort(np.abs(surprise - entropy), kind="stable")]
        n = int(np.searchsorted(np.cumsum(probs[order]), p.typical_p, side="right")) + 1
        x = _keep(x, order[: max(n, p.min_keep)])
    if p.top_p < 1:
        probs = _softmax(x)
        order = np.argsort(-probs, kind="stable")
        n = int(np.searchsorted(np.cumsum(probs[order]), p.top_p)) + 1
        x = _keep(x, order[: max(n, p.min_keep)])
    if p.min_p > 0:
        enough = max(int((x >= x.max() + math.log(p.min_p)).sum()), p.min_keep)
        x = _keep(x, np.argsort(-x, kind="stable")[:enough])
    return x


def _heated(x: Floats, p: SamplingParams) -> Floats:
    temperature = p.temperature
    if p.dynatemp_range > 0:
        probs = _softmax(x)
        live = probs[x > -math.inf]
        if len(live) > 1:
            entropy = float(-(live * np.log(live)).sum()) / math.log(len(live))
            low = max(0.0, temperature - p.dynatemp_range)
            high = temperature + p.dynatemp_range
            temperature = low + (high - low) * entropy**p.dynatemp_exponent
        else:
            temperature = 1.0
    if temperature <= 0:
        return _keep(x, np.array([x.argmax()]))
    with np.errstate(over="ignore"):
        return np.asarray((x - x.max()) / temperature)


def reference(
    logits: Row,
    p: SamplingParams,
    history: Sequence[int] = (),
    breakers: frozenset[int] = frozenset(),
    xtc: bool = False,
) -> Floats:
    """Return the probabilities of all tokens, computed as simply as possible."""
    x = logits.astype(np.float64)
    for token, bias in p.logit_bias.items():
        x[token] += bias
    x = _penalised(x, p, history)
    if p.dry_multiplier > 0:
        x = _dry(x, p, history, set(breakers))
    x = _cut(x, p)
    probs = _softmax(x)
    above = int(((probs >= p.xtc_threshold) & (x > -math.inf)).sum())
    if xtc and above >= 2:
        x = _keep(x, np.argsort(-probs, kind="stable")[above - 1 :])
    return _softmax(_heated(x, p))


def _rows(n_vocab: int, n: int = 6) -> list[Row]:
    rng = np.random.default_rng(11)
    spreads = [0.5, 1.0, 2.0, 3.0, 5.0, 8.0]
    return [(rng.normal(0, spreads[i % 6], n_vocab)).astype(np.float32) for i in range(n)]


def _same(choice: lb.Distribution, expected: Floats) -> None:
    dense = choice.dense(len(expected))
    assert set(np.flatnonzero(dense).tolist()) == set(np.flatnonzero(expected).tolist())
    np.testing.assert_allclose(dense, expected, rtol=2e-4, atol=1e-9)


# -- settings ------------------------------------------------------------------------------------

ALONE: list[dict[str, Any]] = [
    {},
    *({"temperature": t} for t in (0.0, 0.3, 2.5)),
    {"temperature": 0.8, "dynatemp_range": 0.5},
    {"temperature": 0.5, "dynatemp_range": 0.5, "dynatemp_exponent": 2.0},
    {"temperature": 0.5, "dynatemp_range": 0.8, "dynatemp_exponent": 0.5, "top_k": 5},
    {"temperature": 0.5, "dynatemp_range": 0.8, "top_k": 1},
    *({"top_k": k} for k in (1, 40, 100_000)),
    *({"top_p": p} for p in (0.1, 0.9)),
    {"top_p": 0.3, "min_keep": 7},
    *({"min_p": p} for p in (0.05, 0.6, 1.0)),
    {"min_p": 0.9, "min_keep": 4},
    *({"typical_p": p} for p in (0.2, 0.9)),
    {"typical_p": 0.1, "min_keep": 5},
    *({"top_n_sigma": n} for n in (0.0, 0.5, 1.0)),
    {"logit_bias": {3: 4.0, 5: -4.0, 7: -math.inf}},
    {"temperature": 0.0, "logit_bias": {3: 100.0}},
]
TOGETHER: list[dict[str, Any]] = [
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 0.7, "top_k": 100, "typical_p": 0.8, "top_p": 0.9},
    {"temperature": 1.3, "top_n_sigma": 2.0, "top_k": 30, "min_p": 0.02},
    {"temperature": 0.0, "top_k": 20, "top_p": 0.5, "typical_p": 0.3},
    {"typical_p": 0.2, "logit_bias": {3: -math.inf}},
    {"typical_p": 0.9, "logit_bias": {3: -200.0}},
    {"typical_p": 0.9, "top_n_sigma": 2.0},
    {"temperature": 0.6, "dynatemp_range": 0.3, "top_k": 20, "logit_bias": {9: 2.0, 1: -math.inf}},
    # masked tokens do not count for the dynamic temperature
    {"temperature": 0.8, "dynatemp_range": 0.5, "logit_bias": dict.fromkeys(range(9), -math.inf)},
    {"temperature": 0.8, "dynatemp_range": 0.5, "top_n_sigma": 1.0},
    {"temperature": 0.8, "dynatemp_range": 0.7, "dynatemp_exponent": 2.0, "top_n_sigma": 2.0},
]
# Settings in range whose intermediate results overflow 32-bit floats.
EXTREME: list[dict[str, Any]] = [
    *({"temperature": t} for t in (1e-30, 1e-36, 1e-38, 1e-39, 1e-40, 1e-44, 1e-60, 5e-324)),
    {"temperature": 1e-39, "top_k": 7, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 1e-39, "logit_bias": {3: -math.inf}},
    {"temperature": 1e-39, "dynatemp_range": 1e-40},
    # the temperature ends close to zero
    *({"temperature": 0.5, "dynatemp_range": 0.5, "dynatemp_exponent": e} for e in (1e3, 4e3, 1e4)),
    *({"logit_bias": {3: b}} for b in (1e30, 3e38, 3.4e38, -3e38, -3.4e38)),
    *({"temperature": 0.1, "logit_bias": {3: b}} for b in (1e38, 3.4e38, -3.4e38)),
    {"temperature": 1e-20, "logit_bias": {3: 1e29, 4: 1e29}},
    {"temperature": 0.7, "top_n_sigma": 1.0, "logit_bias": {3: 3.4e38, 4: 3.4e38}},
    {"temperature": 0.7, "typical_p": 0.9, "top_p": 0.9, "logit_bias": {3: 3.4e38}},
]


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("penalty", [1e-30, 1e-37, 4e-39, 1e-40, 1e-50, 5e-324, 1e4])
def test_repeat_penalty_close_to_zero_repeats_the_most_probable_generated(
    penalty: float, temperature: float, toy: lb.Model
) -> None:
    settings = {**OFF, "temperature": temperature, "repeat_penalty": penalty}
    sampler = Sampler(toy, SamplingParams(**settings))
    sampler.accept_prompt([5, 7, 9])
    for row in _rows(toy.n_vocab):
        row[[5, 7, 9]] = 1.0, 2.0, -3.0
        choice = sampler.distribution(row)
        if penalty < 1.0:
            assert choice.argmax() == 7
            assert choice.prob(7) == 1.0
        else:
            assert choice.prob(9) == 0.0


def test_penalties_beyond_measure_leave_the_only_token_a_grammar_allows(toy: lb.Model) -> None:
    """DRY pushed the last candidate's logit to -inf, so that no token was left to draw."""
    a = toy.tokenize("a", add_special=False)[0]
    for multiplier in (1.0, 1e4):
        params = SamplingParams(
            temperature=0.5, dry_multiplier=multiplier, dry_base=1e4, dry_sequence_breakers=()
        )
        sampler = Sampler(toy, params, Grammar('root ::= "a"{60}'))
        for position in range(60):
            choice = sampler.distribution(_rows(toy.n_vocab)[position % 6])
            assert choice.ids.tolist() == [a]
            sampler.accept(a)


@pytest.mark.parametrize(
    "settings",
    [{}, {"repeat_penalty": 1.1}, {"logit_bias": {3: -1.0}}, {"typical_p": 0.9}],
    ids=str,
)
def test_greedy_takes_the_lowest_of_equal_tokens(settings: dict[str, Any], toy: lb.Model) -> None:
    row = np.zeros(toy.n_vocab, dtype=np.float32)
    row[[9, 70, 200]] = 5.0
    sampler = Sampler(toy, SamplingParams(**{**OFF, "temperature": 0.0, **settings}))
    assert sampler.distribution(row).ids.tolist() == [9]


@pytest.fixture(scope="module")
def wide_toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lb.Model]:
    """A random model of 20,000 tokens, where top-k looks at only a few logits."""
    path = tmp_path_factory.mktemp("wide") / "wide.gguf"
    with lb.Model(toys.write_llama(path, vocab=20_000, n_layer=1)) as model:
        yield model


@pytest.mark.parametrize("settings", [*ALONE, *TOGETHER, *EXTREME], ids=str)
def test_settings_do_what_they_say(
    settings: dict[str, Any], toy: lb.Model, target: lb.Model, wide_toy: lb.Model
) -> None:
    params = SamplingParams(**{**OFF, **settings})
    for model in (toy, target, *([wide_toy] if "top_k" in settings else [])):
        sampler = Sampler(model, params)
        for row in _rows(model.n_vocab):
            for x in (row, row - np.float32(100)):  # all logits below zero: a division ends at -inf
                _same(sampler.distribution(x), reference(x, params))


HISTORY = [5, 9, 5, 7, 30, 9, 5, 9, 100, 7, 5, 9, 5, 7, 40, 41, 5, 9, 5]
PENALTIES: list[dict[str, Any]] = [
    *({"repeat_penalty": p} for p in (0.7, 1.3)),
    *({"frequency_penalty": p} for p in (-0.5, 0.5)),
    {"presence_penalty": 1.5},
    {"repeat_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.4, "top_k": 50},
    *({"repeat_penalty": 1.3, "penalty_last_n": n} for n in (-1, 0, 4)),
    {"temperature": 0.0, "presence_penalty": 9.0},
    {"dry_multiplier": 0.8},
    {"dry_multiplier": 0.5, "dry_base": 1.2, "dry_allowed_length": 1},
    {"dry_multiplier": 0.8, "dry_allowed_length": 4},
    *({"dry_multiplier": 0.8, "dry_penalty_last_n": n} for n in (0, 9)),
    {"dry_multiplier": 0.8, "dry_base": 1.0, "repeat_penalty": 1.1},
]


@pytest.mark.parametrize("settings", PENALTIES, ids=str)
def test_penalties_count_prompt_and_generated_tokens(
    settings: dict[str, Any], toy: lb.Model
) -> None:
    """DRY is tried with histories that repeat themselves, with breakers and without."""
    params = SamplingParams(**{**OFF, **settings})
    breakers = {toy.tokenize(chr(b), add_special=False)[0] for b in BREAKERS}
    histories = [(HISTORY, n) for n in (0, 7, len(HISTORY))]
    for seed in range(6):
        alphabet = [40, 41, 42, 43] + ([min(breakers)] if seed % 2 else [])
        histories.append((np.random.default_rng(seed).choice(alphabet, 40).tolist(), 11))
    for history, n_prompt in histories:
        sampler = Sampler(toy, params)
        sampler.accept_prompt(history[:n_prompt])
        for token in history[n_prompt:]:
            sampler.accept(token)
        for row in _rows(toy.n_vocab):
            expected = reference(row, params, history, frozenset(breakers))
            _same(sampler.distribution(row), expected)


XTC: list[dict[str, Any]] = [
    {}, {"top_k": 20}, {"min_keep": 3}, {"temperature": 0.0}, {"top_n_sigma": 1.0},
    {"top_n_sigma": 0.5, "top_p": 0.9},
    # masked tokens do not count
    *({"logit_bias": {3: -math.inf}, **more} for more in (
        {}, {"temperature": 0.0}, {"temperature": 0.7, "dynatemp_range": 0.3})),
    {"logit_bias": dict.fromkeys(range(100), -math.inf), "temperature": 0.7},
    # of fewer candidates than min_keep it takes none
    {"logit_bias": dict.fromkeys(range(254), -math.inf), "min_keep": 8},
]  # fmt: skip


@pytest.mark.parametrize("settings", XTC, ids=lambda s: str(s)[:60])
@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.08])
def test_xtc_drops_the_likely_tokens_or_does_nothing(
    threshold: float, settings: dict[str, Any], toy: lb.Model
) -> None:
    changed = {"xtc_probability": 0.5, "xtc_threshold": threshold, "seed": 1, **settings}
    params = SamplingParams(**{**OFF, **changed})
    sampler, n_applied = Sampler(toy, params), 0
    for i, row in enumerate(_rows(toy.n_vocab)):
        for position in range(20 * i, 20 * i + 20):
            applies = uniform(1, position, MIXTURE) < 0.5
            n_applied += applies
            choice = sampler.distribution(row, position, 1)
            if params.min_keep == 3:
                assert len(choice) >= 3
            else:
                _same(choice, reference(row, params, xtc=applies and params.min_keep == 1))
    assert 30 < n_applied < 90  # of 120, each with probability 1/2; the seed is fixed


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_without_a_token_to_draw_are_errors(
    temperature: float, small_toy: lb.Model, wide_toy: lb.Model
) -> None:
    nothing = dict.fromkeys(range(small_toy.n_vocab), -math.inf)
    for value, bias in ((0.0, nothing), (math.nan, {})):
        sampler = Sampler(small_toy, SamplingParams(temperature=temperature, logit_bias=bias))
        with pytest.raises(ConfigError):
            sampler.distribution(np.full(16, value, dtype=np.float32))
    row = _rows(wide_toy.n_vocab)[2]
    row[7] = math.nan
    with pytest.raises(ConfigError):
        Sampler(wide_toy, SamplingParams(temperature=temperature)).distribution(row)
    for token in (-1, 16):
        with pytest.raises(ConfigError, match="logit_bias"):
            Sampler(small_toy, SamplingParams(logit_bias={token: 1.0}))


# -- values --------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.1, math.nan, math.inf, "hot", True),
    "dynatemp_range": (-1.0,),
    "dynatemp_exponent": (-1.0,),
    "top_k": (-2, 2.5, 2**31),
    "top_p": (0.0, 1.1),
    "min_p": (-0.1, 1.1),
    "typical_p": (0.0,),
    "top_n_sigma": (-2.0,),
    "xtc_probability": (1.5,),
    "xtc_threshold": (-0.1,),
    "repeat_penalty": (0.0,),
    "frequency_penalty": (math.nan,),
    "presence_penalty": (None,),
    "penalty_last_n": (-2,),
    "dry_multiplier": (-1.0,),
    "dry_base": (0.5,),
    "dry_allowed_length": (0,),
    "dry_penalty_last_n": (-2,),
    "dry_sequence_breakers": ("ab", ("",), (1,)),
    "min_keep": (0,),
    "seed": (1.5, True),
    "logit_bias": (
        {"a": 1.0}, {1: "b"}, {1: math.nan}, {1: math.inf}, {1: 3.5e38}, {1: 10**400},
        {"5": 1.0}, {" the": 1.0},
    ),
    "logprobs": (5,),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_values_out_of_range_are_refused(name: str) -> None:
    for value in REFUSED[name]:
        for make in (SamplingParams, SamplingParams().replace):
            with pytest.raises(ConfigError, match=name) as caught:
                make(**{name: value})
            is_text = isinstance(value, dict) and isinstance(next(iter(value)), str)
            assert not is_text or "an id of tokenize)" in str(caught.value)


# -- without log-probabilities ----------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_without_logprobs_the_text_is_the_same(
    temperature: float, ctx: Context, draft_ctx: Context, tmp_path: Path
) -> None:
    scored = SamplingParams(temperature=temperature, seed=4)
    bare = scored.replace(logprobs=False)
    speculator = lb.Speculator(ctx, lb.ModelDrafter(draft_ctx), lb.SpeculativeConfig(draft_k=4))
    texts = []
    for params in (scored, bare):
        drafted = list(speculator.generate("Once upon a time", max_tokens=24, sampling=params))
        with Branch.start(ctx, "Once upon a time", sampling=params) as branch:
            tokens = list(branch.generate(24))
            branch.save(tmp_path / f"{params.logprobs}.branch")
            if not params.logprobs:
                with pytest.raises(BranchStateError, match="no surprisal"):
                    branch.perplexity()
                # Measurements of the current row, which was not measured before.
                assert branch.surprisal(7) > 0
        texts.append([token.text for token in tokens])
        assert [token.token for token in tokens] == [token.token for token in drafted]
        numbers = [x for token in (*tokens, *drafted) for x in (token.logprob, token.entropy)]
        assert all(math.isnan(x) is not params.logprobs for x in numbers)
        with Branch.load(ctx, tmp_path / f"{params.logprobs}.branch") as loaded:
            assert loaded.sampling == params
    assert texts[0] == texts[1]
    assert b"logprobs" not in (tmp_path / "True.branch").read_bytes()  # 0.1 reads it as well


# -- scores that are neither truncated nor normalised --------------------------------------------------


def test_processed_scores_are_those_after_bias_grammar_and_penalties(small_toy: lb.Model) -> None:
    row = np.linspace(-3.0, 3.0, small_toy.n_vocab).astype(np.float32)
    bias: dict[int, float] = {4: 1.5, 5: -math.inf}
    settings = OFF | {"top_k": 2, "temperature": 0.3, "logit_bias": bias}
    settings |= {"repeat_penalty": 1.5, "penalty_last_n": 8}
    params = SamplingParams(**settings)
    free, bound = Sampler(small_toy, params), Sampler(small_toy, params, Grammar("root ::= [bcd]+"))
    for sampler in (free, bound):
        sampler.accept_prompt([3, 4])
    expected = row.astype(np.float64)
    expected[4] += 1.5
    expected[5] = -math.inf
    expected = _penalised(expected, params, [3, 4])
    allowed = (free, [t for t in range(16) if t != 5]), (bound, [3, 4])
    for sampler, tokens in allowed:
        ids, scores = sampler.processed(row)
        assert sorted(ids) == tokens
        assert np.allclose(scores, expected[ids], atol=1e-6)
    again, _ = bound.processed(row)
    assert again.tolist() == ids.tolist()
    with pytest.raises(ConfigError):
        free.processed(row[:3])


# -- seeds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [-2, 2**64, 1 << 200, 1.5, True, "7"])
def test_other_seeds_are_refused_by_name_at_every_door(ctx: lb.Context, seed: Any) -> None:
    line = {"prompt": "x", "seed": seed}
    with lb.Branch.start(ctx, "x") as branch:
        for door in (
            lambda: lb.SamplingParams(seed=seed),
            lambda: lb.Engine(ctx, seed=seed),
            lambda: branch.reseed(seed),
            lambda: lb.search.best_of_n(branch, n=1, seed=seed),
            lambda: lb.Request.from_json(line, "0"),
        ):
            with pytest.raises(ConfigError, match="seed must be an integer from 0 to 2"):
                door()


def test_largest_seed_is_taken(ctx: lb.Context) -> None:
    assert ctx.complete("x", seed=2**64 - 1, max_tokens=1).seed == 2**64 - 1


def test_seed_of_minus_one_is_a_random_one_at_every_door(ctx: lb.Context) -> None:
    params = lb.SamplingParams(seed=-1)
    with lb.Branch.start(ctx, "x", sampling=params) as branch:
        seeds = [branch.seed]
        branch.reseed(-1)
        seeds.append(branch.seed)
        branch.resample(params)
        seeds.append(branch.seed)
    seeds += [lb.Engine(ctx, seed=-1).seed for _ in range(2)]
    seeds += [result.seed for result in ctx.complete(["x", "x"], seed=-1, max_tokens=1)]
    line = lb.Request.from_json({"prompt": "x", "seed": -1, "max_tokens": 1}, "0")
    for _ in range(2):  # the engine's own seed is fixed, the request's is not
        seeds.append(lb.Engine(ctx, seed=1).generate([line])[0].seed)
    assert len({*seeds}) == len(seeds) and min(seeds) >= 0
