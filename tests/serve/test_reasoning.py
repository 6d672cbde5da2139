"""Thoughts over HTTP with OpenAI's own client: separate from the answer, with a budget, switched off."""

from __future__ import annotations

from typing import Any

import pytest
from serving import Serving, post, serving

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] "
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] "
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
ASKED = [{"role": "user", "content": "Once upon a time there was a bear."}]
N = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}}
SERVE = {"engine": {"chat_template": TEMPLATE}}
BODY: dict[str, Any] = {"model": "tale", "messages": ASKED, "temperature": 0.8, "seed": 6}


def extra(**more: Any) -> dict[str, Any]:
    return {**BODY, "max_tokens": 40, "extra_body": more}


def test_a_thought_is_apart_and_counted(client: Any, server: Serving) -> None:
    answer = client.chat.completions.create(**extra(thinking=10))
    message = answer.choices[0].message
    expected = server.ctx.chat(ASKED, thinking=10, max_tokens=40, temperature=0.8, seed=6)
    assert message.reasoning_content == expected.thought != ""
    assert message.content == expected.turn.content
    n = answer.usage.completion_tokens_details.reasoning_tokens
    assert n == expected.n_thought_tokens
    assert answer.usage.completion_tokens == len(expected.tokens)


def test_streams_tell_the_thought_first(client: Any) -> None:
    whole = client.chat.completions.create(**extra(thinking=10)).choices[0].message
    thought, content = "", ""
    for chunk in client.chat.completions.create(**extra(thinking=10), stream=True):
        delta = chunk.choices[0].delta
        if piece := getattr(delta, "reasoning_content", None):
            assert not content
            thought += piece
        content += delta.content or ""
    assert (thought.strip(), content) == (whole.reasoning_content, whole.content)


@pytest.mark.parametrize(
    "how",
    [
        {"reasoning_effort": "none"},
        {"thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_thoughts_are_switched_off(client: Any, server: Serving, how: dict[str, Any]) -> None:
    answer = client.chat.completions.create(**extra(**how))
    expected = server.ctx.chat(ASKED, thinking=False, max_tokens=40, temperature=0.8, seed=6)
    assert not hasattr(answer.choices[0].message, "reasoning_content")
    assert answer.choices[0].message.content == expected.turn.content
    assert answer.usage.prompt_tokens == expected.num_prompt_tokens


def test_a_schema_binds_the_answer(client: Any) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": N}}
    asked = {**extra(thinking=10), "response_format": schema}
    message = client.chat.completions.create(**asked).choices[0].message
    assert message.reasoning_content
    assert message.content.startswith('{"n": ') or message.content == "{}"


def test_a_thought_that_takes_all_tokens_has_no_answer(client: Any) -> None:
    answer = client.chat.completions.create(**{**BODY, "max_tokens": 8})
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.reasoning_content
    assert not answer.choices[0].message.content


def test_a_model_without_thoughts_takes_the_fields() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    body = {**BODY, "max_tokens": 4, "thinking": 5, "reasoning_effort": "high"}
    with serving({"chat_template": template}) as running, running.client() as api:
        answer = post(api, 200, "/v1/chat/completions", **body)
        assert "reasoning_content" not in answer["choices"][0]["message"]
