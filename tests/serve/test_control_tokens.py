"""The text of a control token that was generated is no content, in the library and over HTTP."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from serving import Serving, bundled_engine
from toys import CHAT_TEMPLATE, write_toy

import llamabranch as lb

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "book", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["plain", "tools"])
def test_control_token_is_no_content(tmp_path: Path, tools: Any) -> None:
    path = write_toy(tmp_path / "toy.gguf", vocab="bytes")
    with lb.Model(path) as model:
        token = model.bos
        assert token is not None and model.entry(token)[1] and not model.is_eog(token)
    body: dict[str, Any] = {"max_tokens": 3, "logit_bias": {token: 100.0}, "temperature": 0.0}
    with Serving(partial(bundled_engine, model=path)) as server:
        with server.client() as api:
            sent = {**body, "messages": MESSAGES, **({"tools": tools} if tools else {})}
            answer = api.post("/v1/chat/completions", json={**sent, "return_token_ids": True})
            (choice,) = answer.json()["choices"]
            assert choice["token_ids"] == [token] * 3
            assert not choice["message"]["content"]
            with api.stream("POST", "/v1/chat/completions", json={**sent, "stream": True}) as lines:
                data = [line[6:] for line in lines.iter_lines() if line.startswith("data: {")]
            deltas = [choice["delta"] for each in data for choice in json.loads(each)["choices"]]
            assert not any(delta.get("content") for delta in deltas)
            (choice,) = api.post("/v1/completions", json={**body, "prompt": "a"}).json()["choices"]
            assert choice["text"] == ""
        with lb.load(path, n_ctx=512, n_threads=1, chat_template=CHAT_TEMPLATE) as ctx:
            result = ctx.chat(MESSAGES, tools=tools, **body)
            assert (result.tokens, result.text, result.turn.content) == ([token] * 3, "", "")
            assert ctx.complete("a", **body).text == ""
            params = lb.SamplingParams(temperature=0.0, logit_bias={token: 100.0})
            request = lb.Request("a", max_tokens=3, sampling=params)
            assert [one.text for one in lb.Engine(ctx).generate([request])] == [""]
            engine = lb.AsyncEngine(ctx)
            assert asyncio.run(_text(engine, request)) == ""


async def _text(engine: lb.AsyncEngine, request: lb.Request) -> str:
    async with engine:
        events = [event async for event in engine.generate(request)]
    return "".join(event.text for event in events)
