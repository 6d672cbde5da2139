"""Requests as agents send them, written after their public documentation and source."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest
from serving import Serving

from llamabranch.serve.anthropic import MessagesFields

SERVE = {"engine": {"n_ctx": 4096}}
LINES = (Path(__file__).parent / "agents.jsonl").read_text("utf-8").splitlines()
SENT: list[dict[str, Any]] = [json.loads(line) for line in LINES]
AGE = {"type": "object", "properties": {"age": {"enum": [7, 70]}}, "required": ["age"]}
CROWN = {"name": "crown", "input_schema": {**AGE, "additionalProperties": False}}
NAMES = [sent["agent"] for sent in SENT]


@pytest.mark.parametrize("sent", SENT, ids=NAMES)
def test_agents_get_an_answer(api: Any, sent: dict[str, Any]) -> None:
    body, headers = sent["body"], sent.get("headers", {})
    few = {"max_tokens": min(8, body.get("max_tokens", 8))}
    answer = api.post(sent["path"], json={**body, **few, "ignore_eos": True}, headers=headers)
    is_chat = "/chat/" in sent["path"]
    if says := sent.get("says"):
        assert (answer.status_code, answer.json()["type"]) == (400, "error")
        assert says in answer.json()["error"]["message"]
    elif "count_tokens" in sent["path"]:
        assert answer.json()["input_tokens"] > 100
    elif body.get("stream"):
        assert answer.status_code == 200, answer.text
        lines = [line for line in answer.text.splitlines() if line]
        assert "error" not in answer.text
        last = "data: [DONE]" if is_chat else 'data: {"type":"message_stop"}'
        assert lines[0].startswith("data: {" if is_chat else "event: message_start")
        assert lines[-1] == last
    else:
        assert answer.status_code == 200, answer.text
        told = answer.json()
        counted = told["usage"]["completion_tokens" if is_chat else "output_tokens"]
        assert counted == few["max_tokens"]


@pytest.mark.parametrize("sent", [sent for sent in SENT if "chat" in sent])
def test_messages_become_openais(sent: dict[str, Any]) -> None:
    fields = msgspec.convert(sent["body"], MessagesFields).chat()
    assert fields.messages == sent["chat"]


@pytest.mark.filterwarnings("ignore::llamabranch.errors.GrammarWarning")
@pytest.mark.parametrize("wrong", [None, 5, "x", [], {}, [5], [{}], {"type": "x"}], ids=repr)
def test_a_wrong_value_at_any_place_is_refused_or_ignored(api: Any, wrong: Any) -> None:
    sent = next(sent["body"] for sent in SENT if "results of two calls" in sent["agent"])
    for place in places(sent):
        body = api.post("/v1/messages/count_tokens", json=changed(sent, place, wrong))
        assert body.status_code in (200, 400), (place, body.text)
        assert body.status_code == 200 or body.json()["type"] == "error"


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the place of each value inside a value of JSON."""
    if not isinstance(value, (dict, list)):
        return
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield (key,)
        yield from ((key, *rest) for rest in places(each))


def changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """Return a copy with ``new`` at a place."""
    copied = deepcopy(value)
    at = copied
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = new
    return copied


def test_a_second_turn_reads_only_what_is_new(server: Serving, api: Any) -> None:
    """Answer, call and result are given back; the template writes them as they were."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Crown a king."}], "tools": [CROWN],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 200, "seed": 1,
    }  # fmt: skip
    first = api.post("/v1/messages", json=body).json()
    assert first["stop_reason"] == "tool_use"
    again = api.post("/v1/messages", json=body).json()
    assert again["content"] == first["content"] and again["usage"]["input_tokens"] == 1
    call = first["content"][0]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "done"}
    said = [
        *body["messages"],
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
    ]
    usage = api.post("/v1/messages", json={**body, "messages": said}).json()["usage"]
    assert usage["cache_read_input_tokens"] > first["usage"]["input_tokens"] - 8
