"""Calls at every door: content is content, calls are calls, however a text is read or cut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toys
from turn_shapes import SHAPES, opening_thoughts

import llamabranch as lb
from llamabranch.model import ToolCall, Turn, TurnFormat
from llamabranch.model.thoughts import plan_thinking
from llamabranch.model.tools import Tools, conversation
from llamabranch.sampling.grammar import turn_grammar

ASKED = [{"role": "user", "content": "Where?"}]
TOOLS = [
    {"type": "function", "function": {"name": "find", "parameters": {
        "type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "ping"}},
]  # fmt: skip
FIND = ToolCall("find", {"text": "a b"})
CALL = '{"name": "find", "arguments": {"text": "a b"}}'


class Script:
    """A logits processor that lets a model write a text, and then end its turn."""

    def __init__(self, model: lb.Model, text: str) -> None:
        tokens = model.tokenize(text, add_special=False, parse_special=True)
        self.tokens, self._start = [*tokens, min(model.eog_tokens)], 0

    def __call__(self, ids: Sequence[int], logits: Any) -> Any:
        if not self._start:
            self._start = len(ids)
        forced = np.full_like(logits, -1e9)
        forced[self.tokens[min(len(ids) - self._start, len(self.tokens) - 1)]] = 0
        return forced


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.write_toy(tmp_path_factory.mktemp("calls") / "toy.gguf", vocab="bytes")


def speaking(path: Path, template: str) -> lb.Context:
    return lb.load(path, chat_template=template, n_ctx=2048, n_threads=1)


@pytest.fixture(params=["tags around JSON", "one tag around several", "name, then JSON",
                        "tags for values", "Python", "bare JSON"])  # fmt: skip
def ctx(request: pytest.FixtureRequest, path: Path) -> Iterator[lb.Context]:
    with speaking(path, SHAPES[request.param]) as opened:
        yield opened


def texts_of(ctx: lb.Context) -> list[tuple[str, str]]:
    """Return what a model may write, calls in several forms, each with its content."""
    own = ctx.model.turn_format.write([FIND])
    fenced = f"```jsonobj\n{CALL}\n```"
    return [
        (own, ""), (f"I look.\n{own}", "I look."), (fenced, ""), (f"So:\n{fenced}", "So:"),
        (f"<tool_call>\n{CALL}\n</tool_call>", ""), (f"```\n[{CALL}]\n```", ""),
    ]  # fmt: skip


def test_text_and_events_of_a_call_have_only_its_content(ctx: lb.Context) -> None:
    """From a call, a stream, an asynchronous stream and a chat."""
    for text, content in texts_of(ctx):

        def asked(text: str = text) -> dict[str, Any]:
            return {"tools": TOOLS, "max_tokens": 400, "logits_processor": Script(ctx.model, text)}

        async def told(asked: Any = asked) -> list[lb.Event]:
            async with lb.AsyncEngine(ctx) as engine:
                return [event async for event in engine.chat(ASKED, **asked(), stream=True)]

        result = ctx.chat(ASKED, seed=1, drafter=None, **asked())
        results: list[lb.Result | None] = [result]
        for events in (
            [*ctx.chat(ASKED, seed=1, drafter=None, **asked(), stream=True)], asyncio.run(told())
        ):  # fmt: skip
            assert "".join(event.text for event in events) == content
            results.append(events[-1].result)
        for each in results:
            assert each is not None and [c[:2] for c in each.tool_calls] == [FIND[:2]], text
            assert (each.text, each.finish_reason) == (content, "tool_calls"), text
        body: Any = result.to_openai()
        assert body["choices"][0]["finish_reason"] == "tool_calls"
        assert body["choices"][0]["message"]["content"] == (content or None)
        with lb.Chat(ctx, drafter=None, **asked()) as chat:
            answer = chat.send("Where?")
            assert "".join(event.text for event in answer) == content
            assert (answer.text, answer.finish_reason) == (content, "tool_calls")
            assert [call[:2] for call in answer.tool_calls] == [FIND[:2]]


def test_a_text_that_is_cut_in_a_tag_or_before_arguments_has_no_call_in_its_content(
    ctx: lb.Context,
) -> None:
    """At each token; a call without a tag is content once its arguments have begun."""
    for text, content in texts_of(ctx)[:5]:
        n_tokens = len(Script(ctx.model, text).tokens)
        for n in range(1, n_tokens - 1):
            options: dict[str, Any] = {"tools": TOOLS, "seed": 1, "max_tokens": n, "drafter": None}
            options["logits_processor"] = Script(ctx.model, text)
            events = [*ctx.chat(ASKED, **options, stream=True)]
            result = events[-1].result
            assert result is not None and "".join(e.text for e in events) == result.text
            is_bare = '"arguments":' in text[:n] or '"parameters":' in text[:n]
            if result.tool_calls:  # only its closing tag was cut
                assert result.text == content
            elif not is_bare or "<" in text[: text.find("{")]:
                assert content.startswith(result.text.partition("`")[0].strip())
                assert not set("<{[") & set(result.text)


def test_a_thought_cut_in_its_tag_is_no_content(path: Path) -> None:
    with speaking(path, SHAPES["tags around JSON"]) as ctx:
        text = "<mull>\nHm.\n</mull>\n\nYes."
        for n in range(1, len(text)):
            script = Script(ctx.model, text)
            result = ctx.chat(ASKED, max_tokens=n, seed=1, drafter=None, logits_processor=script)
            if n < len("<mull>"):
                assert (result.text, result.thought) == ("", "")
            assert "Yes.".startswith(result.text) and "<" not in result.text
        script = Script(ctx.model, "<mu")
        assert ctx.chat(ASKED, seed=1, drafter=None, logits_processor=script).text == "<mu"


FENCES = ["", "json", "jsonobj", "JSON5", "c++", " tool_call"]


@pytest.mark.parametrize("word", FENCES)
@pytest.mark.parametrize("body", [CALL, f"[{CALL}]", f"[\n{CALL},\n{CALL}\n]",
                                  '{ "name" : "find",\n "arguments": {"text": "a b"} }'])  # fmt: skip
def test_every_fence_of_calls_is_calls(toy: lb.Model, word: str, body: str) -> None:
    form = TurnFormat.of(SHAPES["tags around JSON"])
    grammar = turn_grammar(toy, Tools(TOOLS, "auto", form))
    for before in ("", "So:\n\n"):
        text = f"{before}```{word}\n{body}\n```"
        turn = form.read(text, TOOLS)
        assert [call[:2] for call in turn.calls] == [FIND[:2]] * text.count('"name"')
        assert turn.content == before.strip()
        state: Any = grammar.start(toy)
        wrong: Any = grammar.start(toy)
        for token in toy.tokenize(text, add_special=False):
            assert state.allows(token)
            state.accept(token)
        other = toy.tokenize(text.replace('"a b"', "5"), add_special=False)
        assert not all(wrong.allows(token) and (wrong.accept(token), True)[1] for token in other)
    for text in ('```json\n{"no": "call"}\n```', "```python\nfind()\n```", "```\n[1, 2]\n```"):
        assert form.read(text, TOOLS) == Turn("", text, [])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("thinking", [None, True, False, 5])
def test_a_begun_answer_follows_a_closed_thought(path: Path, shape: str, thinking: Any) -> None:
    with lb.Model(path, chat_template=opening_thoughts(SHAPES[shape])) as model:
        begun = [*ASKED, {"role": "assistant", "content": "It is"}]
        talk = conversation(model, begun, Tools(()))
        tokens = talk.tokens(model)
        text = model.detokenize(tokens, special=True)
        assert text.endswith(talk.text(model)[-40:]) and text.endswith("It is")
        end = model.turn_format.thought_end
        assert end is not None and not model.turn_format.is_in_thought(text)
        assert text.rindex(end) > text.rindex("Where?")
        assert plan_thinking(model, tokens, thinking, begun=talk.begun) == (tokens, None)
        start = model.turn_format.thought_start
        thought = [*ASKED, {"role": "assistant", "content": f"{start}\nHm"}]
        talk = conversation(model, thought, Tools(()))
        assert talk.text(model).count(str(start)) == 1 and talk.text(model).endswith("Hm")
        assert model.turn_format.is_in_thought(talk.text(model))


def test_a_begun_answer_is_continued_with_a_schema_and_a_long_beginning(path: Path) -> None:
    template = opening_thoughts(SHAPES["tags around JSON"])
    with speaking(path, template) as ctx:
        for begun in ("It is", "It is " + "so " * 200):
            asked = [*ASKED, {"role": "assistant", "content": begun}]
            for thinking in (None, False, True, 5):
                script = Script(ctx.model, " here.")
                options: dict[str, Any] = {"thinking": thinking, "logits_processor": script}
                result = ctx.chat(asked, max_tokens=40, seed=1, drafter=None, **options)
                assert (result.text, result.thought) == (" here.", "")
        schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}}
        asked = [*ASKED, {"role": "assistant", "content": "So:"}]
        result = ctx.chat(asked, json_schema=schema, max_tokens=60, seed=1)
        assert result.thought == "" and isinstance(result.parsed, dict)


@pytest.mark.parametrize(
    ("begun", "written", "content", "calls"),
    [
        (CALL[:17], CALL[17:], "", [FIND[:2]]),
        (f"```json\n{CALL[:12]}", f"{CALL[12:]}\n```", "", [FIND[:2]]),
        ("The weather", " is fine.", " is fine.", []),
    ],
)
def test_a_begun_answer_may_be_half_a_call(
    ctx: lb.Context, begun: str, written: str, content: str, calls: list[Any]
) -> None:
    asked = [*ASKED, {"role": "assistant", "content": begun}]
    script = Script(ctx.model, written)
    result = ctx.chat(asked, tools=TOOLS, drafter=None, seed=1, logits_processor=script)
    assert (result.text, [call[:2] for call in result.tool_calls]) == (content, calls)


def test_a_function_is_forced_by_its_name(ctx: lb.Context) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "seed": 1}
    for choice in ("ping", {"type": "function", "function": {"name": "ping"}}):
        result = ctx.chat(ASKED, tool_choice=choice, max_tokens=200, **asked)
        assert [call.name for call in result.tool_calls] == ["ping"]
        n = len(ctx.model.chat_tokens(ASKED, tools=TOOLS))
        assert result.num_prompt_tokens == n > len(ctx.model.chat_tokens(ASKED))
        cut = ctx.chat(ASKED, tool_choice=choice, max_tokens=len(result.tokens) // 2, **asked)
        assert (cut.tool_calls, cut.finish_reason) == ([], "length")
    free = ctx.chat(ASKED, tool_choice="none", max_tokens=8, **asked)
    assert free.tool_calls == [] and free.num_prompt_tokens < n
    with pytest.raises(lb.errors.ConfigError, match="not in tools"):
        ctx.chat(ASKED, tools=TOOLS, tool_choice="sing")


@pytest.mark.parametrize("arguments", ['{"text": "Par', "[1]", "7", 7, ["x"], '{"text": "x"} y'])
def test_broken_arguments_and_missing_content_of_a_history_lose_no_request(
    ctx: lb.Context, arguments: object
) -> None:
    function = {"name": "find", "arguments": arguments}
    asked: dict[str, object] = {"role": "user", "content": "Where?"}
    history: list[dict[str, object]] = [
        asked,
        {"role": "assistant", "content": None},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": None},
    ]
    text = conversation(ctx.model, history, Tools(())).text(ctx.model)
    shown = arguments if isinstance(arguments, str) else json.dumps(arguments)
    assert shown in text.replace("\\", "") and "None" not in text
    assert len(ctx.chat(history, max_tokens=2, seed=1).tokens) == 2
