"""The text of a control token that was generated is no content, in the library and over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from serving import frames, post, serving
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
    with serving({"model": path}) as server:
        with server.client() as api:
            sent = {**body, "messages": MESSAGES, **({"tools": tools} if tools else {})}
            where = "/v1/chat/completions"
            (choice,) = post(api, 200, where, **sent, logprobs=True)["choices"]
            assert [one["id"] for one in choice["logprobs"]["content"]] == [token] * 3
            assert not choice["message"]["content"]
            parts = [choice for part in frames(api, where, **sent) for choice in part["choices"]]
            assert not any(part["delta"].get("content") for part in parts)
            (choice,) = post(api, **body, prompt="a")["choices"]
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
