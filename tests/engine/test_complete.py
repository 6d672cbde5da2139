"""`Context.complete` and `chat`: one call, with the text that a branch generates."""

from __future__ import annotations

import asyncio
import enum
import gc
import weakref
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import toys
from typing_extensions import TypedDict, assert_type

import llamabranch as lb
from llamabranch import Branch, Context, Event, Request, Result
from llamabranch.errors import (
    CacheFullError,
    ClosedError,
    ConfigError,
    GrammarError,
    GrammarWarning,
    LlamaBranchError,
    SequencesExhaustedError,
    TokenizeError,
    UnsupportedError,
)
from llamabranch.model.tools import Tools
from llamabranch.sampling.grammar import turn_grammar

PROMPTS = ["Once upon a time", "The wolf and the wolf and the wolf", "In the forest there stood"]
HELLO = [{"role": "user", "content": "Tell me of a king."}]
WARM: dict[str, Any] = {"temperature": 0.8, "seed": 42}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [7, 70]}},
    "required": ["name", "age"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("marry", "crown")
]
# Writes tools, if there are any.
TEMPLATE = "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}" + toys.CHAT_TEMPLATE


def plain(
    ctx: Context, prompt: Any, n: int, stop: Any = (), **settings: Any
) -> tuple[str, list[int]]:
    """Return what a branch generates by itself."""
    with Branch.start(ctx, prompt, **{**WARM, **settings}) as branch:
        found = list(branch.generate(n, stop))
        return "".join(token.text for token in found), [t.token for t in found if not t.is_stop]


def same(result: Result, expected: tuple[str, list[int]]) -> bool:
    return (result.text, result.tokens) == expected


@pytest.fixture
def chatting(target: lb.Model) -> Any:
    with lb.load(target.path, n_ctx=1024, n_threads=1, chat_template=TEMPLATE) as ctx:
        yield ctx


@pytest.mark.parametrize("n_seq_max", [1, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_is_that_of_a_branch(target: lb.Model, n_seq_max: int, temperature: float) -> None:
    options: dict[str, Any] = {**WARM, "temperature": temperature, "max_tokens": 40}
    settings = {**WARM, "temperature": temperature}
    with (
        Context(target, n_ctx=512, n_seq_max=n_seq_max, n_threads=1, exact=True) as ctx,
        Context(target, n_ctx=512, n_threads=1, exact=True) as twin,
    ):
        expected = [plain(ctx, prompt, 40, **settings) for prompt in PROMPTS]
        many = ctx.complete(PROMPTS, **options)
        assert all(map(same, many, expected))
        for drafter in (None, None, lb.SuffixDrafter(), lb.ModelDrafter(twin)):
            one = [ctx.complete(prompt, drafter=drafter, **options) for prompt in PROMPTS]
            assert all(map(same, one, expected))
        if n_seq_max > 1:  # threads share a context
            with ThreadPoolExecutor(3) as pool:
                found = [*pool.map(lambda p: ctx.complete(p, **options), PROMPTS * 3)]
            assert all(map(same, found, expected * 3))
        assert [result.id for result in many] == ["0", "1", "2"]
        ids = ctx.complete(ctx.tokenize(PROMPTS[0]), **options)
        assert ids.text == expected[0][0] and ids.prompt == ctx.tokenize(PROMPTS[0])
        assert many[0].prompt == PROMPTS[0] and many[0].finish_reason == "length"
        details = many[0].logprobs
        assert details is not None and [t.token for t in details] == many[0].tokens
        assert all(token.logprob < 0 for token in details)
        assert ctx.n_seq_free == n_seq_max
        ctx.audit()
        twin.audit()


def test_several_texts_of_a_prompt(ctx: Context) -> None:
    (request,) = [Request(PROMPTS[0], n=3, sampling=lb.SamplingParams(**WARM), max_tokens=12)]
    expected = [result.text for result in lb.Engine(ctx).generate([request])]
    result = ctx.complete(PROMPTS[0], n=3, max_tokens=12, **WARM)
    assert result.choices[0] is result
    assert [each.text for each in result.choices] == expected
    events = list(ctx.complete(PROMPTS[0], n=3, max_tokens=12, stream=True, **WARM))
    last = [event.result for event in events if event.result is not None]
    assert [each.text for each in last[-1].choices] == expected
    one = ctx.complete(PROMPTS[0], max_tokens=12)
    again = ctx.complete(PROMPTS[0], max_tokens=12, seed=one.seed)
    assert again.tokens == one.tokens  # also without a seed


def test_a_prompt_is_read_once_and_branches_go_on(ctx: Context) -> None:
    long = "Once upon a time there was a king who had three daughters. " * 8
    n = len(ctx.tokenize(long))
    with Branch.start(ctx, "The wolf", **WARM) as branch, Branch.start(ctx, "The fox", seed=1):
        before = branch.tokens
        first = ctx.complete(long, max_tokens=8, **WARM)
        second = ctx.complete(long + first.text, max_tokens=8, **WARM)
        assert first.cached == 0 and second.cached >= n
        third = ctx.complete(long, max_tokens=8, **WARM)
        assert (first.evaluated, first.generated) == (n, len(first.tokens))
        assert (third.cached, third.evaluated, third.generated) == (n - 1, 1, len(third.tokens))
        assert branch.tokens == before and ctx.n_seq_free == ctx.n_seq_max - 2
        text = "".join(token.text for token in branch.generate(12))
    ctx.kv_cache_clear()
    assert ctx.usage().cells_used == 0
    assert text == plain(ctx, "The wolf", 12)[0]
    with Context(ctx.model, n_ctx=512, n_threads=1, prefix_cache=False, exact=True) as fresh:
        fresh.complete(long, max_tokens=4)
        assert fresh.prefix_cache is None and fresh.usage().cells_used == 0


def test_a_stream_yields_the_text(ctx: Context) -> None:
    stop = plain(ctx, PROMPTS[0], 40)[0][30:36]
    whole = ctx.complete(PROMPTS[0], max_tokens=40, stop=[stop], **WARM)
    assert whole.finish_reason == "stop" and whole.stop_reason == stop
    assert whole.text == plain(ctx, PROMPTS[0], 40, [stop])[0]
    events = list(ctx.complete(PROMPTS[0], max_tokens=40, stop=stop, stream=True, **WARM))
    assert "".join(event.text for event in events) == whole.text
    last = events[-1].result
    assert last is not None and same(last, (whole.text, whole.tokens))
    texts = dict.fromkeys("012", "")
    for event in ctx.complete(PROMPTS, max_tokens=12, stream=True, **WARM):
        texts[event.id] += event.text
    assert list(texts.values()) == [plain(ctx, prompt, 12)[0] for prompt in PROMPTS]
    stream = ctx.complete(PROMPTS, max_tokens=200, stream=True)
    next(stream)
    stream.close()
    assert ctx.n_seq_free == ctx.n_seq_max


def test_structured_texts_have_values(ctx: Context) -> None:
    result = ctx.complete("The hero: ", json_schema=SCHEMA, max_tokens=80, **WARM)
    assert isinstance(result.parsed, dict) and result.parsed["age"] in (7, 70)
    assert result.stats.num_forced_tokens > 0
    with Branch.start(
        ctx, "The hero: ", grammar=lb.Grammar.from_json_schema(SCHEMA), **WARM
    ) as branch:
        assert [t.token for t in branch.generate(80) if not t.is_stop] == result.tokens
    assert ctx.complete("A colour:", choices=[" red", " blue"]).parsed in (" red", " blue")
    assert ctx.complete("A year: ", regex="1[0-9]{3}").text.startswith("1")
    assert ctx.complete("Yes?", grammar='root ::= " yes"').parsed == " yes"
    assert ctx.complete([], max_tokens=3) == []


def test_chat_is_the_branchs_text(chatting: Context) -> None:
    ctx = chatting
    result = ctx.chat(HELLO, max_tokens=16, **WARM)
    assert same(result, plain(ctx, HELLO, 16)) and result.prompt == HELLO
    pairs = ctx.chat([("user", "Tell me of a king.")], max_tokens=16, **WARM)
    for each in (pairs, *ctx.chat([HELLO, HELLO], max_tokens=16, **WARM)):
        assert each.tokens == result.tokens and each.prompt == HELLO
    begun = [*HELLO, {"role": "assistant", "content": "The king was"}]
    tokens = ctx.model.chat_tokens(HELLO) + ctx.tokenize("The king was", add_special=False)
    assert same(ctx.chat(begun, max_tokens=16, **WARM), plain(ctx, tokens, 16))
    events = list(ctx.chat(HELLO, max_tokens=16, stream=True, **WARM))
    assert "".join(event.text for event in events) == result.text


def takes(model: lb.Model, parameters: list[Any], name: str, arguments: str) -> bool:
    """Return whether a forced call may be this one; each tool is named by its index."""
    functions = [{"name": str(i), "parameters": each} for i, each in enumerate(parameters)]
    tools = Tools([{"type": "function", "function": each} for each in functions], "required")
    grammar = turn_grammar(model, tools)
    sampler = lb.sampling.Sampler(model, lb.SamplingParams(temperature=1.0, top_k=0), grammar)
    text = f'{{"name": "{name}", "arguments": {arguments}}}'
    tokens = [*model.tokenize(text, add_special=False), 1]
    return sampler.count_allowed(tokens) == len(tokens)


def test_schemas_of_tools_refer_to_their_own_parts(toy: lb.Model) -> None:
    """Functions without parameters get none."""
    pydantic = pytest.importorskip("pydantic")
    units = [enum.Enum("Unit", {value: value for value in values}) for values in ("ab", "cd")]
    places = [pydantic.create_model("Place", u=(unit, ...)).model_json_schema() for unit in units]
    assert all("Unit" in place["$defs"] for place in places)
    tree = {"type": "object", "properties": {"$ref": {"$ref": "#"}, "n": {"type": "integer"}}}
    value = {"properties": {"v": {"const": {"$ref": "#/x"}}}, "type": "object"}
    own = {**places[0], "$id": "https://example.com/own"}  # references are relative to it
    given: list[Any] = [*places, tree, value, own]
    cases: list[tuple[list[Any], str, str, bool]] = [
        (given, "0", '{"u": "a"}', True), (given, "0", '{"u": "c"}', False),
        (given, "1", '{"u": "d"}', True), (given, "1", '{"u": "a"}', False),
        (given, "2", '{"$ref": {"$ref": {"n": 1}, "n": 2}}', True), (given, "2", '{"$ref": 1}', False),
        (given, "3", '{"v": {"$ref": "#/x"}}', True),
        (given, "4", '{"u": "b"}', True), (given, "4", '{"u": "c"}', False),
    ]  # fmt: skip
    for nothing in (None, {}, {"type": "object"}, {"type": "object", "properties": {}}):
        cases += [([nothing], "0", "{}", True), ([nothing], "0", '{"x": 1}', False)]
    more: list[dict[str, Any]] = [
        {"additionalProperties": True}, {"patternProperties": {"x": True}}, {"const": {"x": 1}},
        {"anyOf": [SCHEMA, {"properties": {"x": {}}, "required": ["x"]}]},
    ]  # fmt: skip
    cases += [([{"type": "object", **each}], "0", '{"x": 1}', True) for each in more]
    for parameters, name, arguments, fits in cases:
        assert takes(toy, parameters, name, arguments) == fits, (name, arguments)
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"items": deep}
    with pytest.warns(GrammarWarning, match="too deep"):  # so the arguments are free
        assert not takes(toy, [deep], "0", "[]")


def test_openais_shapes_have_the_logprobs_that_were_asked_for(chatting: Context) -> None:
    types = pytest.importorskip("openai.types", reason="openai is not installed")
    chat_types = pytest.importorskip("openai.types.chat", reason="openai is not installed")
    ctx = chatting
    (asked,) = lb.Engine(ctx).generate([Request("The king", top_logprobs=0, max_tokens=3)])
    bodies: list[Any] = [asked.to_openai()]
    for call, given in ((ctx.complete, "The king"), (ctx.chat, HELLO)):
        run: Any = call
        for more in ({"logprobs": True}, {"top_logprobs": 0}, {"top_logprobs": 2}):
            bodies.append(run(given, **more, max_tokens=3, **WARM).to_openai())
        for none in ({}, {"logprobs": False}):
            assert run(given, **none, max_tokens=3).to_openai()["choices"][0]["logprobs"] is None
    for body in bodies:
        is_chat = body["object"] == "chat.completion"
        shape = chat_types.ChatCompletion if is_chat else types.Completion
        (choice,) = shape.model_validate(body).choices
        assert len(choice.logprobs.content if is_chat else choice.logprobs.tokens) == 3
        assert (choice.finish_reason, body["usage"]["completion_tokens"]) == ("length", 3)


def test_async_twins(chatting: Context) -> None:
    ctx = chatting
    expected = [plain(ctx, prompt, 12)[0] for prompt in PROMPTS]
    talk = ctx.chat(HELLO, max_tokens=12, **WARM)

    async def main() -> None:
        async with lb.AsyncEngine(ctx, sampling=lb.SamplingParams(**WARM), max_tokens=12) as engine:
            assert (await engine.complete(PROMPTS[0])).text == expected[0]
            found = await engine.complete(PROMPTS)
            assert [(each.id, each.text) for each in found] == list(
                zip("012", expected, strict=True)
            )
            assert (await engine.chat(HELLO)).text == talk.text
            texts = dict.fromkeys("012", "")
            async for event in engine.complete(PROMPTS, stream=True):
                texts[event.id] += event.text
            assert list(texts.values()) == expected
            call: Any = engine.complete
            for bad in ({"n": 0}, {"drafter": None}, {"temprature": 1.0}):
                with pytest.raises(ConfigError, match=next(iter(bad))):
                    await call(PROMPTS[0], **bad)
                with pytest.raises(ConfigError):  # at the call, as `Context.complete`
                    call(PROMPTS[0], stream=True, **bad)
            with pytest.raises(ConfigError):
                engine.chat([], stream=True)
            async for event in engine.chat(HELLO, stream=True):
                assert event.text or event.result
                break
            waiting = asyncio.ensure_future(engine.complete(PROMPTS, max_tokens=None))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(main())
    assert ctx.n_seq_free == ctx.n_seq_max
    ctx.audit()


def test_types_are_known(chatting: Context) -> None:
    """What mypy makes of each call; run, they are true."""
    ctx, n = chatting, 2
    one = [
        assert_type(ctx.complete("The king", max_tokens=n), Result),
        assert_type(ctx.complete([5, 6], max_tokens=n), Result),
        assert_type(ctx.complete(HELLO, max_tokens=n), Result),
        assert_type(ctx.chat(HELLO, max_tokens=n), Result),
        assert_type(ctx.chat([("user", "Hello")], max_tokens=n), Result),
        assert_type(ctx.chat((("user", "a"),), max_tokens=n), Result),
    ]
    assert all(isinstance(each, Result) for each in one)
    talks = [[("user", text)] for text in ("a", "b")]
    many = [
        *assert_type(ctx.complete(["The king"], max_tokens=n), list[Result]),
        *assert_type(ctx.complete([[5, 6]], max_tokens=n), list[Result]),
        *assert_type(ctx.complete([HELLO], max_tokens=n), list[Result]),
        *assert_type(ctx.complete(("The king", "The fox"), max_tokens=n), list[Result]),
        *assert_type(ctx.chat([HELLO], max_tokens=n), list[Result]),
        *assert_type(ctx.chat([[("user", "a")], [("user", "b")]], max_tokens=n), list[Result]),
        *assert_type(ctx.chat(talks, max_tokens=n), list[Result]),
        *assert_type(ctx.chat((HELLO, HELLO), max_tokens=n), list[Result]),
        *assert_type(ctx.chat((talks[0], tuple(talks[1])), max_tokens=n), list[Result]),
    ]
    assert len(many) == 14
    any_of = Result | list[Result] | Generator[Event, None, None]
    flags: list[bool] = [False, True]
    for flag in flags:
        assert_type(ctx.complete("The king", stream=flag, max_tokens=n), any_of)
        assert_type(ctx.chat(HELLO, stream=flag, max_tokens=n), any_of)
    streams = [
        assert_type(ctx.complete("A", stream=True, max_tokens=n), Generator[Event, None, None]),
        assert_type(ctx.chat(HELLO, stream=True, max_tokens=n), Generator[Event, None, None]),
    ]
    assert all(list(stream)[-1].result for stream in streams)


def test_types_of_values_are_known(chatting: Context) -> None:
    pytest.importorskip("pydantic")
    ctx, few = chatting, 60

    @dataclass
    class Hero:
        kind: Literal["king", "wolf"]

    class Wolf(TypedDict):
        is_big: bool

    hero = assert_type(ctx.complete("A: ", json_schema=Hero, max_tokens=few), Result[Hero])
    assert hero.parsed.kind in ("king", "wolf") and isinstance(hero.parsed, Hero)
    assert_type(hero.parsed_or(None), Hero | None)
    for each in ctx.complete(PROMPTS, json_schema=Hero, max_tokens=few):
        assert each.choices[0].parsed.kind == each.parsed.kind
    for wolf in ctx.chat([HELLO], json_schema=Wolf, max_tokens=few):
        assert assert_type(wolf.parsed, Wolf)["is_big"] in (True, False)
    several = ctx.chat(HELLO, json_schema=list[Hero], max_tokens=few)
    assert_type(several.parsed_or([]), list[Hero])
    value = ctx.complete("The hero: ", json_schema={"type": "boolean"}, max_tokens=few)
    assert assert_type(value.parsed, object) in (True, False)

    async def main() -> None:
        async with lb.AsyncEngine(ctx, max_tokens=few) as engine:
            assert_type(await engine.complete("The king"), Result)
            assert_type(await engine.complete(["The king"]), list[Result])
            assert_type(await engine.chat(HELLO), Result)
            async for event in engine.complete("The king", stream=True):
                assert_type(event, Event)
            result = await engine.complete("The hero: ", json_schema=Hero)
            assert assert_type(result.parsed, Hero).kind in ("king", "wolf")
            assert_type(await engine.chat([HELLO], json_schema=Wolf), list[Result[Wolf]])

    asyncio.run(main())


# -- what is refused -------------------------------------------------------------------------------


class Plain:
    name: str


class Picky(lb.speculative.NullDrafter):
    def check(self, target: lb.Model) -> None:
        raise lb.errors.VocabularyMismatchError("not this one")


LONG = "a " * 3000
USER = ("user", "Hello")
WRONG: list[dict[str, Any]] = [
    {"max_tokens": -1}, {"n": 0}, {"stop": 5}, {"temperature": -1.0}, {"drafter": 5},
    {"json_schema": {}, "stop": "}"}, {"json_schema": {}, "stop_tokens": [5]},
    {"regex": "a", "choices": ["b"]},
]  # fmt: skip
HABITS: list[tuple[str, Any, str]] = [
    ("logprobs", 3, "top_logprobs=3"), ("max_new_tokens", 5, "max_tokens"),
    ("max_completion_tokens", 5, "max_tokens"), ("response_format", {"type": "x"}, "json_schema"),
    ("stop_sequences", ["a"], "stop here"), ("tools", [], "chat"),
    ("functions", [], "tools here, an argument of chat"), ("temp", 1.0, "temperature here"),
    ("num_predict", 5, "max_tokens here"), ("format", "json", "json_schema here"),
    ("stopping_criteria", [], "stop here"), ("logits_processors", [], "logits_processor here"),
    ("options", {}, "by its name"), ("temprature", 1.0, "did you mean temperature?"),
    ("nonsense", 1, "arguments: max_tokens, stop, "),
]  # fmt: skip
# The prompt, options, the error, what its message begins with and what its hint has.
BAD: list[tuple[Any, dict[str, Any], type[Exception], str, str]] = [
    *((prompt, {}, ConfigError, "", "") for prompt in (b"x", 5, ["a", 5])),
    ([1, 1 << 40], {}, TokenizeError, "", ""),
    (LONG, {}, CacheFullError, "the prompt has", ""),
    (["a", LONG], {}, CacheFullError, "prompts[1]: the prompt has", ""),
    (["a", b"x"], {}, ConfigError, "prompts[1]: a prompt must be", ""),
    ([["a"], ["b"]], {}, ConfigError, "", "in one list"),
    *(("a", options, ConfigError, "", "") for options in WRONG),
    ("a", {"stop_tokens": [1 << 40]}, TokenizeError, "", ""),
    ("a", {"grammar": "root ="}, GrammarError, "", ""),
    ("a", {"json_schema": {"not": {}}}, GrammarError, "", ""),
    ("a", {"drafter": Picky()}, lb.errors.VocabularyMismatchError, "not this one", ""),
    *(("a", {"json_schema": schema}, LlamaBranchError, "", "pydantic model")
      for schema in (Plain, Plain(), list[Plain], 5)),
    # Habits from elsewhere get the argument of here.
    *(("a", {name: value}, ConfigError, "", hint) for name, value, hint in HABITS),
]  # fmt: skip
BAD_OPTIONS: list[dict[str, Any]] = [
        {"tools": [{}]}, {"tools": 5}, {"tools": TOOLS, "tool_choice": "sometimes"},
        {"tools": TOOLS, "tool_choice": {}}, {"tools": TOOLS, "tool_choice": {"function": {}}},
        {"tool_choice": "required"}, {"chat_template_kwargs": {"messages": []}},
        {"tools": TOOLS, "tool_choice": "required", "regex": "a"},
        *({"share": x} for x in ("thoughts", 1, True)),
        *({"thinking": x} for x in (-1, "on", 1.5, [1])),
        *({"tools": TOOLS, "parallel_tool_calls": x} for x in ("no", 1, [False])),
]  # fmt: skip
BAD_CHATS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    *((HELLO, options, ConfigError, "") for options in BAD_OPTIONS),
    (HELLO, {"tools": TOOLS[0]}, ConfigError, "tools must be a list of functions"),
    ([], {}, ConfigError, ""),
    ("Hello", {}, ConfigError, ""),
    ([{}], {}, ConfigError, ""),
    ([5], {}, ConfigError, ""),
    ([HELLO, [("user", LONG)]], {}, CacheFullError, "prompts[1]: the prompt has"),
    ([("user", LONG)], {}, CacheFullError, "the prompt has"),
    ([USER, ("assistant", None), ("user", None)], {}, ConfigError, "messages[2]: "),
    ([[USER], [("usr", "Hello")]], {}, ConfigError, "prompts[1]: messages[0]: unknown role 'usr'"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused(ctx: Context, stream: bool) -> None:
    call: Any = ctx.complete
    for prompt, options, kind, words, hint in BAD:
        with pytest.raises(kind) as caught:
            call(prompt, stream=stream, **options)
        told = str(caught.value)
        assert told.startswith(words) and "\n" not in told, options
        assert hint in (getattr(caught.value, "hint", "") or ""), options
        assert ctx.usage().cells_used == 0 and ctx.n_seq_free == ctx.n_seq_max


def test_what_chat_refuses(chatting: Context, ctx: Context) -> None:
    with pytest.raises(UnsupportedError, match="no chat template") as none:
        ctx.chat(HELLO)
    assert "smollm2-135m" in (none.value.hint or "")
    call: Any = chatting.chat
    for messages, options, kind, words in BAD_CHATS:
        with pytest.raises(kind) as caught:
            call(messages, **options)
        assert str(caught.value).startswith(words)


def test_tools_are_described_where_the_template_ignores_them(ctx: Context) -> None:
    for template in (toys.CHAT_TEMPLATE, toys.CHAT_TEMPLATE + "{# no tools #}", "chatml"):
        with lb.load(ctx.model.path, n_ctx=1024, n_threads=1, chat_template=template) as other:
            forced: Any = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 80}
            result = other.chat(HELLO, **forced, **WARM)
            (call,) = result.tool_calls
            assert call.name in ("marry", "crown")
            described: list[Any] = [("system", "crown"), *HELLO]
            assert result.num_prompt_tokens > len(other.model.chat_tokens(described))


# -- the rest --------------------------------------------------------------------------------------


def test_pairs_are_messages_wherever_a_prompt_is_taken(chatting: Context) -> None:
    ctx, pairs, n = chatting, [("user", "Tell me of a king.")], 8
    expected = plain(ctx, HELLO, n)
    assert plain(ctx, pairs, n) == expected
    assert same(ctx.complete(pairs, max_tokens=n, **WARM), expected)
    engine = lb.Engine(ctx, sampling=lb.SamplingParams(**WARM), max_tokens=n)
    results = [*ctx.complete([pairs, pairs], max_tokens=n, **WARM), *engine.generate(pairs)]
    results += engine.generate([pairs, Request(pairs)])
    assert len(results) == 5 and all(same(result, expected) for result in results)
    run = lb.Speculator(ctx).generate(pairs, max_tokens=n, sampling=lb.SamplingParams(**WARM))
    assert run.finish().text == expected[0]


def test_held_sequences_and_closed_contexts_raise(target: lb.Model) -> None:
    with Context(target, n_ctx=256, n_seq_max=1, n_threads=1, exact=True) as ctx:
        with Branch.start(ctx, "The fox", **WARM), pytest.raises(SequencesExhaustedError):
            ctx.complete("The king")
        full = ctx.complete("The king", max_tokens=None, logit_bias={ctx.model.eos or 0: -1e9})
        assert full.finish_reason == "capacity" and len(full.tokens) > 200
        assert ctx.complete("The king", max_tokens=2).tokens
    with pytest.raises(ClosedError):
        ctx.complete("The king")
    dropped = Context(target, n_ctx=256, n_threads=1, exact=True)
    dropped.complete("The king", max_tokens=2)
    gone = weakref.ref(dropped)
    del dropped
    gc.collect()
    assert gone() is None  # the engine that stays with it does not keep it


def test_mtp_layers_draft_by_themselves(tmp_path: Path) -> None:
    path = toys.write_toy(tmp_path / "mtp.gguf", "glm4moe", vocab="bytes", weights="f32")
    with lb.load(path, n_ctx=512, n_threads=1, load_mtp=True) as ctx:
        expected = plain(ctx, "abcabc", 24)
        ctx.kv_cache_clear()
        assert same(ctx.complete("abcabc", max_tokens=24, **WARM), expected)
        assert isinstance(ctx.mtp_head(), lb.context.Context)
        ctx.audit()
