"""Requests that continue a text, score a part of their prompt, or end at chosen tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import llamabranch as lb
from llamabranch import AsyncEngine, Context, Engine, Grammar, Request, Result, SamplingParams
from llamabranch.errors import ConfigError, GrammarError, TokenizeError

WARM = SamplingParams(temperature=0.8, seed=42)
SCHEMA = Grammar.from_json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


def one(ctx: Context, request: Request, drafter: lb.Drafter | None = None) -> Result:
    (result,) = Engine(ctx, drafter).generate(request)
    return result


@pytest.fixture(params=[False, True], ids=["", "prefix cache"])
def either(request: pytest.FixtureRequest, target: lb.Model) -> Iterator[Context]:
    with Context(target, n_ctx=512, n_threads=1, prefix_cache=request.param, exact=True) as context:
        yield context
        context.audit()


@pytest.mark.parametrize("grammar", [None, SCHEMA, Grammar('root ::= [a-z ]+ "." [a-z ]+')])
def test_text_in_parts_is_the_text_in_one(either: Context, grammar: Grammar | None) -> None:
    """The same holds with drafts, and after the prefix cache was emptied."""
    prompt = either.model.prompt_tokens("Once upon a time")
    request = Request(prompt, sampling=WARM, max_tokens=20, grammar=grammar)
    whole = one(either, request)
    tokens: list[int] = []
    copying, suffix = lb.GrammarDrafter.copying(), lb.SuffixDrafter()
    for n, drafter in ((1, None), (3, copying), (2, None), (14, suffix)):
        so_far, at = [*prompt, *tokens], len(tokens)
        part = one(either, request.replace(prompt=so_far, max_tokens=n, continues=at), drafter)
        assert part.error is None
        tokens += part.tokens
        if n == 2 and either.prefix_cache is not None:
            either.prefix_cache.clear()
    assert (tokens, part.finish_reason) == (whole.tokens, whole.finish_reason)


def test_what_is_not_token_ids_of_the_grammar_cannot_be_continued(either: Context) -> None:
    for prompt_given, n in (("text", 1), ([1, 2], 2), ([{"role": "user", "content": "x"}], 1)):
        with pytest.raises(ConfigError, match="continues"):
            Request(prompt_given, continues=n)
    prompt = either.model.prompt_tokens("Once upon a time there was")
    one(either, Request(prompt, max_tokens=4, sampling=WARM))
    result = one(either, Request(prompt, grammar=SCHEMA, continues=3))
    assert isinstance(result.error, GrammarError)
    assert either.n_seq_free == either.n_seq_max


def test_a_character_is_completed_across_the_parts(toy: lb.Model) -> None:
    with lb.Context(toy, n_ctx=128, n_threads=1, exact=True) as ctx:
        grammar = Grammar('root ::= "für 媽"')
        prompt = ctx.model.prompt_tokens("x")
        whole = one(ctx, Request(prompt, sampling=WARM, grammar=grammar))
        assert whole.text == "für 媽"
        for n in range(1, len(whole.tokens)):
            request = Request(
                [*prompt, *whole.tokens[:n]], sampling=WARM, grammar=grammar, continues=n
            )
            rest = one(ctx, request)
            head = ctx.model.text_decoder()
            shown = "".join(head.feed(token) for token in whole.tokens[:n])
            assert shown + rest.text == whole.text


def test_part_of_a_prompt_is_rated_as_in_the_whole(target: lb.Model) -> None:
    with lb.Context(target, n_ctx=512, n_threads=1, prefix_cache=True, exact=True) as ctx:
        prompt = ctx.model.prompt_tokens("Once upon a time there was a king who had a daughter.")
        whole = one(ctx, Request(prompt, max_tokens=0, prompt_logprobs=2)).prompt_logprobs
        assert whole is not None
        for start in (1, 2, 9, len(prompt) - 1, len(prompt)):
            request = Request(prompt, max_tokens=0, prompt_logprobs=2, logprobs_from=start)
            result = one(ctx, request)
            assert result.prompt_logprobs == [None] * start + whole[start:]
            if start > 8:
                assert result.cached == start - 1


def test_tokens_that_end_a_text(ctx: Context) -> None:
    prompt = ctx.model.prompt_tokens("Once upon a time")
    whole = one(ctx, Request(prompt, sampling=WARM, max_tokens=20))
    end = whole.tokens[7]
    n = whole.tokens.index(end) + 1
    for drafter in (None, lb.SuffixDrafter()):
        request = Request(prompt, sampling=WARM, max_tokens=20, stop_tokens=[end])
        result = one(ctx, request, drafter)
        assert result.tokens == whole.tokens[:n]
        assert (result.finish_reason, result.stop_reason) == ("stop", end)
    assert whole.text.startswith(result.text)
    word = whole.text[3:9]
    stopped = one(ctx, Request(prompt, sampling=WARM, max_tokens=20, stop=word))
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", word)
    assert whole.stop_reason is None
    failed = one(ctx, Request(prompt, stop_tokens=[ctx.model.n_vocab]))
    assert isinstance(failed.error, TokenizeError)


@pytest.mark.parametrize("drafter", [None, lb.SuffixDrafter()], ids=["plain", "drafted"])
def test_nothing_ends_a_text_before_its_least_length(
    ctx: Context, drafter: lb.Drafter | None
) -> None:
    """EOG tokens neither: they are in the law of `test_engine_machine`."""
    least = Request("Once upon a time", sampling=WARM, max_tokens=40, min_tokens=9)
    stopped = one(ctx, least.replace(stop=" "), drafter)
    assert len(stopped.tokens) > 9 and stopped.stop_reason == " "
    end = stopped.tokens[2]
    assert end not in one(ctx, least.replace(stop_tokens=[end]), drafter).tokens[:9]
    for other in ({"grammar": SCHEMA}, {"constraint": lambda text: True}):
        with pytest.raises(ConfigError, match="min_tokens"):
            least.replace(**other)
    ends = WARM.replace(logit_bias=dict.fromkeys(ctx.model.eog_tokens, 1e9))
    assert len(one(ctx, least.replace(sampling=ends), drafter).tokens) == 9


def test_steps_are_the_events_of_generate_in_lists(ctx: Context) -> None:
    request = Request("Once upon", n=2, max_tokens=12, sampling=WARM)

    async def main() -> None:
        async with AsyncEngine(ctx, lb.SuffixDrafter()) as engine:
            lists = [events async for events in engine.steps(request)]
            alone = [event async for event in engine.generate(request)]
            endless = engine.steps(Request("A king", max_tokens=None))
            await anext(endless)
            await endless.aclose()
        assert all(lists) and len(lists) < len(alone)
        for sample in range(2):
            together = [e.text for events in lists for e in events if e.sample == sample]
            assert together == [e.text for e in alone if e.sample == sample]

    asyncio.run(main())
    assert ctx.n_seq_free == ctx.n_seq_max
