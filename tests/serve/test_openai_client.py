"""``/v1/chat/completions`` with OpenAI's own client, and how tool calls are distinguished from text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serving import Serving, record_schema

import llamabranch as lb

openai = pytest.importorskip("openai", reason="openai is not installed")

HELLO = [{"role": "user", "content": "Tell me about a king."}]
WARM: Any = {"temperature": 0.8, "seed": 42}
SCHEMA = record_schema({"enum": [7, 70]}, most=8)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "It.", "parameters": SCHEMA}}
    for name in ("marry", "crown")
]


SERVE = {"api_keys": ("secret",), "max_tokens": 32, "alias": "king"}


def ask(client: Any, messages: Any = HELLO, **more: Any) -> Any:
    return client.chat.completions.create(model="any", messages=messages, **{**WARM, **more})


def test_answer_is_the_librarys_own(client: Any, beside: lb.Context) -> None:
    answer = ask(client, max_tokens=16)
    params = lb.SamplingParams(temperature=0.8, seed=42)
    with lb.Branch.start(beside, HELLO, sampling=params) as branch:
        expected = "".join(token.text for token in branch.generate(16))
        n_prompt = branch.n_prompt
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == n_prompt
    assert ask(client).usage.completion_tokens == 32  # the server's limit


@pytest.mark.parametrize("more", [{}, {"grammar": 'root ::= "a \U0001f600 b \U0001f600 c"'}])
def test_stream_joined_is_the_message(client: Any, more: dict[str, str]) -> None:
    """Also if a token is a part of a character."""
    asked: dict[str, Any] = {"n": 2, "logprobs": True, "top_logprobs": 2, "extra_body": more}
    asked["max_tokens"] = 40 if more else 12
    whole = ask(client, **asked)
    parts = list(ask(client, **asked, stream=True, stream_options={"include_usage": True}))
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.completion_tokens == 24 or more
    for choice in whole.choices:
        changes = [c for part in parts for c in part.choices if c.index == choice.index]
        assert "".join(c.delta.content or "" for c in changes) == choice.message.content
        logprobs = [entry for c in changes if c.logprobs for entry in c.logprobs.content]
        assert logprobs == choice.logprobs.content
        assert len(logprobs) == 12 or more
        assert changes[-1].finish_reason == choice.finish_reason
    tokens = whole.choices[0].logprobs.content
    assert b"".join(bytes(t.bytes) for t in tokens).decode() == whole.choices[0].message.content
    assert all(len(t.top_logprobs) == 2 and t.logprob <= 0 for t in tokens)


def test_completions_and_models(client: Any, server: Serving) -> None:
    answer = client.completions.create(
        model="any", prompt="Once upon a time", max_tokens=6, logprobs=1, echo=True, **WARM
    )
    assert answer.choices[0].text.startswith("Once upon a time")
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    streamed = client.completions.create(
        model="any", prompt="Once upon a time", max_tokens=6, stream=True, **WARM
    )
    text = "".join(part.choices[0].text for part in streamed)
    assert answer.choices[0].text == "Once upon a time" + text
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id == "king"
    assert model.max_model_len == server.ctx.n_ctx_seq
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_structured_answers(client: Any) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Person(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        name: str = pydantic.Field(max_length=8)
        age: int = pydantic.Field(ge=1, le=99)

    answer = client.chat.completions.parse(
        model="any", messages=HELLO, response_format=Person, max_tokens=64, **WARM
    )
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person) and 1 <= person.age <= 99
    answer = ask(client, response_format={"type": "json_object", "schema": SCHEMA}, max_tokens=64)
    assert set(json.loads(answer.choices[0].message.content)) == {"name", "age"}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "crown"}}]
)
def test_forced_calls_follow_their_schema(client: Any, choice: Any) -> None:
    whole = ask(client, tools=TOOLS, tool_choice=choice, max_tokens=80)
    first_choice, n_tokens = whole.choices[0], whole.usage.completion_tokens
    (call,) = first_choice.message.tool_calls
    assert first_choice.finish_reason == "tool_calls"
    assert first_choice.message.content is None
    assert call.function.name in (["marry", "crown"] if choice == "required" else ["crown"])
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"name", "age"} and arguments["age"] in (7, 70)
    parts = list(ask(client, tools=TOOLS, tool_choice=choice, max_tokens=80, stream=True))
    deltas = [d for part in parts for d in part.choices[0].delta.tool_calls or ()]
    assert deltas[0].id and deltas[0].function.name == call.function.name
    assert "".join(d.function.arguments or "" for d in deltas) == call.function.arguments
    assert len(deltas) > 3  # they come as they are written
    assert parts[-1].choices[0].finish_reason == "tool_calls"
    cut: Any = {"tools": TOOLS, "tool_choice": choice, "max_tokens": n_tokens - 1}
    short = ask(client, **cut).choices[0]
    assert short.finish_reason == "length"
    assert short.message.content.startswith('{"name": ') and not short.message.tool_calls
    parts = list(ask(client, stream=True, **cut))
    assert [part.choices[0].finish_reason for part in parts if part.choices][-1] == "length"
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    cut |= {"tools": strict, "max_tokens": n_tokens // 2}
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="any", messages=HELLO, **cut, **WARM)
    done = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    answer = [*HELLO, first_choice.message, done]
    assert ask(client, answer, tools=TOOLS, tool_choice="none").choices[0].message.content


def test_last_answer_is_continued(client: Any, beside: lb.Context) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "The king was"}]
    continued = ask(client, begun, max_tokens=8)
    model = beside.model
    prompt = model.chat_tokens(HELLO) + model.tokenize("The king was", add_special=False)
    assert continued.usage.prompt_tokens == len(prompt)
    expected = beside.complete(prompt, max_tokens=8, **WARM).text
    assert continued.choices[0].message.content == expected
    with pytest.raises(openai.BadRequestError, match="two answers"):
        ask(client, [*begun, begun[-1]])
