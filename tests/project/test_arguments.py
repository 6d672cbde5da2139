"""Numbers of any type are accepted as numbers; anything else raises a typed error."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest

import llamabranch as lb
from llamabranch.arguments import finite, function, real, whole
from llamabranch.errors import ConfigError, GrammarError, TokenizeError

STORY = "Once upon a time there was a king who had"
INTEGERS = [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64]


class Three(IntEnum):
    THREE = 3


# -- the checks ------------------------------------------------------------------------------------

HUGE = 10**400
ENDLESS = 10**5000  # Python does not write it
TAKEN: list[tuple[Callable[[str, object], object], list[object], object]] = [
    (whole, [3, np.int64(3), np.uint8(3), np.array(3), Three.THREE], 3),
    (real, [3, np.int64(3), Three.THREE], 3),
    (real, [0.5, np.float16(0.5), np.float32(0.5), np.float64(0.5), Fraction(1, 2)], 0.5),
    (real, [math.inf, HUGE, Fraction(HUGE)], math.inf),
    (real, [-math.inf, -HUGE, Fraction(-HUGE)], -math.inf),
    (real, [np.longdouble(2)], 2.0),
]
# Wrong values for integers, numbers, finite numbers and functions.
NO_INTEGERS = [True, np.True_, 2.0, "2", b"2", None, [2], np.array([2]), np.array(True), 2j]
NO_NUMBERS = [True, np.True_, "0.5", None, [0.5], np.array([0.5]), Decimal("0.5"), 1j]
NOT_FINITE = [math.inf, -math.inf, math.nan, HUGE, -ENDLESS, "1", None, True]


REFUSED: list[tuple[Callable[[str, object], object], list[object], str]] = [
    (whole, NO_INTEGERS, "^n must be an integer, not "),
    (real, NO_NUMBERS, "^n must be a number, not "),
    (finite, NOT_FINITE, "^n must be "),
    (function, ["len", None], "^n must be a function"),
    (lambda name, x: whole(name, x, 5), [4], "^n must be at least 5, not 4$"),
    (lambda name, x: whole(name, x, None, 5), [6], "^n must be at most 5, not 6$"),
    (lambda name, x: whole(name, x, 1, 5), [0, 6], "^n must be from 1 to 5, not [06]$"),
    (lambda name, x: whole(name, x, 0, 5), [ENDLESS, -ENDLESS], "^n must be from 0 to 5"),
]


def test_numbers_of_any_kind_are_plain_ones_and_others_refused() -> None:
    for check, values, plain in TAKEN:
        for value in values:
            assert check("n", value) == plain
            assert type(check("n", value)) is type(plain)
    assert math.isnan(real("x", np.float32("nan")))
    assert whole("n", 5, 5, 5) == 5
    function("n", len)
    for check, values, message in REFUSED:
        for value in values:
            with pytest.raises(ConfigError, match=message):
                check("n", value)


# -- counts ----------------------------------------------------------------------------------------

Call = Callable[[lb.Context, lb.Branch, Any], object]
COUNTS: dict[str, Call] = {
    "generate": lambda ctx, b, n: b.generate(n),
    "fork_many": lambda ctx, b, n: b.fork_many(n),
    "rewind": lambda ctx, b, n: b.rewind(n),
    "speculator": lambda ctx, b, n: lb.Speculator(ctx).generate(STORY, max_tokens=n),
    "speculator of a branch": lambda ctx, b, n: lb.Speculator(ctx).generate(b, max_tokens=n),
    "top_logprobs": lambda ctx, b, n: lb.Speculator(ctx).generate(STORY, top_logprobs=n),
    "session": lambda ctx, b, n: lb.InferenceSession(ctx, STORY, max_tokens=n).close(),
    "engine": lambda ctx, b, n: lb.Engine(ctx, max_tokens=n),
    "request": lambda ctx, b, n: lb.Request(STORY, max_tokens=n),
    "texts of a request": lambda ctx, b, n: lb.Request(STORY, n=n),
    "draft_k": lambda ctx, b, n: lb.SpeculativeConfig(draft_k=n),
    "max_draft_tokens": lambda ctx, b, n: lb.SpeculativeConfig(max_draft_tokens=n),
    "min_match": lambda ctx, b, n: lb.SuffixDrafter(min_match=n),
    "most probable": lambda ctx, b, n: b.distribution().top(n),
    "top_k": lambda ctx, b, n: lb.SamplingParams(top_k=n),
    "min_keep": lambda ctx, b, n: lb.SamplingParams(min_keep=n),
    "start of a range": lambda ctx, b, n: ctx.kv_cache_remove(0, n),
    "end of a range": lambda ctx, b, n: ctx.kv_cache_remove(0, 0, n),
}
NO_COUNTS = [2.5, 2.0, math.nan, math.inf, True, "3", np.float64(3.0), np.True_, [3], -3]


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_integers(name: str, ctx: lb.Context) -> None:
    branch = lb.Branch.start(ctx, STORY, temperature=0.0)
    before = branch.tokens, ctx.usage(), ctx.n_seq_free
    for value in NO_COUNTS:
        with pytest.raises(ConfigError, match=r"must be|invalid range"):
            COUNTS[name](ctx, branch, value)
        assert (branch.tokens, ctx.usage(), ctx.n_seq_free) == before
        assert branch.children == []
    for kind in (int, *INTEGERS):
        with lb.Branch.start(ctx, STORY, temperature=0.0) as other:
            COUNTS[name](ctx, other, kind(3))


# -- NumPy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", INTEGERS)
def test_numpy_integers_are_token_ids(kind: Any, toy: lb.Model) -> None:
    plain = [5, 7, 9, 11]
    listed = [kind(t) for t in plain]
    arrays: list[Any] = [np.array(plain, dtype=kind), listed, tuple(listed), range(5, 12, 2)]
    with lb.Context(toy, n_ctx=256, n_threads=1) as ctx, lb.Branch.start(ctx, plain) as expected:
        engine = lb.Engine(ctx, max_tokens=kind(4), seed=kind(4))
        assert type(engine.seed) is int
        for tokens in arrays:
            with lb.Branch.start(ctx, tokens) as started, lb.Branch.create(ctx) as filled:
                filled.prefill(tokens)
                longer, committed = started.fork(), started.fork()
                longer.extend(tokens)
                for token in tokens:
                    committed.commit(token)
                for branch, n in ((started, 1), (filled, 1), (longer, 2), (committed, 2)):
                    assert all(type(token) is int for token in branch.tokens)
                    assert branch.tokens == plain * n
                np.testing.assert_array_equal(started.logits, expected.logits)
                assert started.surprisal(tokens[0]) == expected.surprisal(plain[0])
                started.prune_subtree()
            assert toy.detokenize(tokens) == toy.detokenize(plain)
            assert [toy.piece(token) for token in tokens] == [toy.piece(t) for t in plain]
            assert "".join(map(lb.model.TextDecoder(toy).feed, tokens)) == toy.detokenize(plain)
            ctx.decode(tokens, kind(0), seq_id=kind(1))
            np.testing.assert_array_equal(ctx.logits(kind(0)), expected.logits)
            assert ctx.model_surprisal(tokens[0]) == expected.surprisal(plain[0])
            ctx.kv_cache_remove(kind(1))
            for result in engine.generate([lb.Request(tokens, n=kind(2))]):
                assert json.loads(json.dumps(result.as_dict()))["prompt"] == plain
                assert len(result.tokens) <= 4
        ctx.audit()


NO_TOKEN = [5.0, np.float32(5), True, "5", b"5", None, [5], np.array([5]), np.int64(-1), ENDLESS]
NO_TOKENS: list[Any] = [
    np.array([5.0, 7.0]), np.array([True, False]), np.array([[5, 7]]), np.array(5), [5, np.float64(7)],
    [5, True], [5, np.True_], [5, "7"], [5, None], "57", b"57", bytearray(b"5"), memoryview(b"5"), 5,
    None, np.array([5, 1 << 40]), np.array([5, -1]), np.array(["5"]),
]  # fmt: skip


def test_what_is_no_token_is_refused(ctx: lb.Context) -> None:
    branch = lb.Branch.start(ctx, STORY, temperature=0.0)
    before = branch.tokens, ctx.usage()
    decoder = lb.model.TextDecoder(ctx.model)
    sampler = lb.sampling.Sampler(ctx.model, branch.sampling)
    calls: list[Callable[[Any], object]] = [
        branch.extend, branch.prefill, ctx.detokenize, ctx.model.detokenize,
        lambda t: ctx.decode(t, 0),
    ]  # fmt: skip
    for tokens in NO_TOKENS:
        for call in calls:
            with pytest.raises(TokenizeError) as caught:
                call(tokens)
            assert not isinstance(tokens, str | bytes | bytearray | memoryview) or caught.value.hint
        if isinstance(tokens, bytes | bytearray | memoryview):
            with pytest.raises(TokenizeError):
                ctx.model.check_tokens(tokens)
    calls = [
        branch.commit, branch.surprisal, decoder.feed, sampler.accept, sampler.allows,
        ctx.model_surprisal,
    ]  # fmt: skip
    for token, call in product(NO_TOKEN, calls):
        with pytest.raises(TokenizeError, match="vocabulary"):
            call(token)
    assert (branch.tokens, ctx.usage()) == before


def test_numpy_numbers_are_settings() -> None:
    plain = lb.SamplingParams(
        temperature=0.75, top_k=30, seed=5, logit_bias={7: -1.5}, penalty_last_n=8,
        repeat_penalty=1.25,
    )  # fmt: skip
    converted = lb.SamplingParams(
        temperature=np.float32(0.75), top_k=np.int32(30), seed=np.uint64(5),
        logit_bias={np.int64(7): np.float16(-1.5)}, penalty_last_n=np.int8(8),
        repeat_penalty=np.float64(1.25),
    )  # fmt: skip
    assert converted == plain
    assert repr(converted) == repr(plain)  # no NumPy type is left
    for bad in ({"temperature": "1"}, {"top_k": 2.0}, {"seed": 1.5}, {"top_p": np.True_},
                {"logit_bias": {True: 1.0}}, {"logit_bias": {1.0: 1.0}}, {"logit_bias": {1: True}},
                {"logit_bias": {1: "1"}}, {"logit_bias": {1: np.float32("nan")}}):  # fmt: skip
        with pytest.raises(ConfigError):
            lb.SamplingParams(**bad)


# -- other kinds -----------------------------------------------------------------------------------

KINDS: dict[str, Call] = {
    # Text is a prompt. Bytes are not, although they are iterable.
    "prompt of start": lambda ctx, b, x: lb.Branch.start(ctx, x),
    "prompt of a speculator": lambda ctx, b, x: lb.Speculator(ctx).generate(x),
    "prompt of a session": lambda ctx, b, x: lb.InferenceSession(ctx, x),
    "prompt of a request": lambda ctx, b, x: lb.Request(x),
    "prompt of an engine": lambda ctx, b, x: lb.Engine(ctx).generate([x]),
    "prompts of an engine": lambda ctx, b, x: lb.Engine(ctx).generate(x),
    "prompts of a stream": lambda ctx, b, x: lb.Engine(ctx).stream(x),
    "logit_bias": lambda ctx, b, x: lb.SamplingParams(logit_bias=x),
    "dry_sequence_breakers": lambda ctx, b, x: lb.SamplingParams(dry_sequence_breakers=x),
    "from_dict": lambda ctx, b, x: lb.SamplingParams.from_dict(x),
    "steer": lambda ctx, b, x: b.steer(x),
    "resample": lambda ctx, b, x: b.resample(x),
    "sampling of start": lambda ctx, b, x: lb.Branch.start(ctx, STORY, sampling=x),
    "sampling of create": lambda ctx, b, x: lb.Branch.create(ctx, x),
    "sampling of complete": lambda ctx, b, x: ctx.complete(STORY, sampling=x),
    "sampling of a request": lambda ctx, b, x: lb.Request(STORY, sampling=x),
    "sampling of an engine": lambda ctx, b, x: lb.Engine(ctx, sampling=x),
    "sampling of a context": lambda ctx, b, x: ctx.sample(x),
    "grammar": lambda ctx, b, x: lb.Branch.start(ctx, STORY, grammar=x),
    "choices": lambda ctx, b, x: lb.Grammar.from_choices(x),
    "config of a speculator": lambda ctx, b, x: lb.Speculator(ctx, config=x),
    "config of an engine": lambda ctx, b, x: lb.Engine(ctx, config=x),
    "drafters of a chain": lambda ctx, b, x: lb.ChainDrafter(x),
    "values of a grammar drafter": lambda ctx, b, x: lb.GrammarDrafter(x),
    "kv_type": lambda ctx, b, x: lb.Context(ctx.model, kv_type=x),
    "rope_scaling": lambda ctx, b, x: lb.Context(ctx.model, rope_scaling=x),
    "base": lambda ctx, b, x: b.entropy(x),
    "context": lambda ctx, b, x: lb.Branch.restore(x, b.snapshot()),
    "snapshot": lambda ctx, b, x: lb.Branch.restore(ctx, x),
    "path of a snapshot": lambda ctx, b, x: b.save(x),
    "path of a saved branch": lambda ctx, b, x: lb.Branch.load(ctx, x),
    "probabilities": lambda ctx, b, x: lb.Distribution.from_probs(x),
    "logits": lambda ctx, b, x: lb.Distribution.from_logits(x),
    "entropy of logits": lambda ctx, b, x: ctx.model_entropy(logits=x),
    "a point": lambda ctx, b, x: lb.Distribution.point(x),
    "another distribution": lambda ctx, b, x: b.distribution().residual(x),
    "path of a model": lambda ctx, b, x: lb.Model(x),
    "name of a model": lambda ctx, b, x: lb.hub.resolve(x),
    "progress": lambda ctx, b, x: lb.Model(ctx.model.path, progress=x),
    "draft model": lambda ctx, b, x: ctx.model.compatibility(x),
    "token": lambda ctx, b, x: ctx.model.entry(x),
    "log level": lambda ctx, b, x: lb.set_log_level(x),
    "text of a request": lambda ctx, b, x: lb.Engine(ctx).abort(x),
    "minimum": lambda ctx, b, x: lb.Request(STORY, min_tokens=x),
}
BYTES = (b"ab", bytearray(b"ab"), memoryview(b"ab"))
NO_KIND = (None, -1, 2.5, "ab", b"ab", [None], [[1, 2]], [("a", 1)], {"a": 1}, object(), [1])
MAY_BE_NONE = (
    "sampling of", "grammar", "config", "values", "rope", "progress", "entropy of logits",
)  # fmt: skip
TEXTS = ("grammar", "path", "name", "text")


@pytest.mark.parametrize("name", KINDS)
def test_a_value_of_another_kind_is_a_typed_error(name: str, ctx: lb.Context) -> None:
    branch = lb.Branch.start(ctx, STORY, temperature=0.0)
    before = branch.tokens, branch.sampling, ctx.usage(), ctx.n_seq_free
    for value in (*BYTES, 5, None) if name.startswith("prompt") else NO_KIND:
        if value is None and name.startswith(MAY_BE_NONE):
            continue
        if isinstance(value, str) and name.startswith(TEXTS):
            continue
        if name in ("probabilities", "logits") and value == [1]:
            continue
        with pytest.raises((ConfigError, TokenizeError, GrammarError)) as caught:
            KINDS[name](ctx, branch, value)
        assert caught.value.hint or not (name.startswith("prompt ") and value in BYTES)
        assert (branch.tokens, branch.sampling, ctx.usage(), ctx.n_seq_free) == before
