"""Looms with the server as their back end: the requests that they send, and the fields that they read.

The requests are those that the programs build: mikupad, Tapestry Loom, logitloom, loomsidian.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serving import serving

PROMPT = "Once upon a time there was a little"
ORIGIN = "https://lmg-anon.github.io"
MIKUPAD: dict[str, Any] = {
    "model": "", "prompt": PROMPT, "seed": 5, "temperature": 0.7, "repeat_penalty": 1.1,
    "repeat_last_n": 256, "penalize_nl": False, "ignore_eos": False, "presence_penalty": 0,
    "frequency_penalty": 0, "top_p": 0.95, "top_k": 40, "typical_p": 1, "min_p": 0.05,
    "max_tokens": 12, "logprobs": 10, "stream": True,
}  # fmt: skip
TAPESTRY: dict[str, Any] = {
    "model": "tale", "prompt": PROMPT, "temperature": 1, "max_tokens": 10, "logprobs": 20,
    "stream": False,
}  # fmt: skip
LOGITLOOM: dict[str, Any] = {
    "model": "tale", "prompt": PROMPT, "logprobs": 5, "max_tokens": 6, "temperature": 0.0,
}  # fmt: skip
LOOMSIDIAN: dict[str, Any] = {
    "prompt": PROMPT, "model": "tale", "max_tokens": 12, "n": 3, "temperature": 1, "top_p": 1,
    "frequency_penalty": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module")
def api() -> Iterator[Any]:
    with serving(alias="tale", allow_origins=[ORIGIN]) as running, running.client() as opened:
        yield opened


def post(api: Any, path: str, body: dict[str, Any], **headers: str) -> Any:
    answer = api.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(api: Any, path: str, body: dict[str, Any]) -> list[Any]:
    with api.stream("POST", path, json=body, headers={"Origin": ORIGIN}) as answer:
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_mikupad_reads_each_token_with_its_alternatives(api: Any) -> None:
    for choice in (chunk["choices"][0] for chunk in streamed(api, "/v1/completions", MIKUPAD)):
        assert not choice.get("text") or isinstance(choice["logprobs"]["top_logprobs"][0], dict)


def test_tapestry_reads_probabilities_of_the_prompt_too(api: Any) -> None:
    (choice,) = post(api, "/v1/completions", TAPESTRY)["choices"]
    (echoed,) = post(api, "/v1/completions", {**TAPESTRY, "echo": True, "max_tokens": 1})["choices"]
    for answer in (choice, echoed):
        places = answer["logprobs"]
        assert len(places["tokens"]) == len(places["top_logprobs"]) == len(places["token_logprobs"])
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert echoed["text"].startswith(PROMPT)
    scored = echoed["logprobs"]["token_logprobs"]
    assert scored[0] is None and all(lp <= 0 for lp in scored[1:]) and len(scored) > 8
    assert all(len(top) >= 20 for top in echoed["logprobs"]["top_logprobs"][1:])


def test_logitloom_and_loomsidian_read_what_they_need(api: Any) -> None:
    (choice,) = post(api, "/v1/completions", LOGITLOOM)["choices"]
    places = choice["logprobs"]
    assert len(places["tokens"]) == 6
    for token, top in zip(places["tokens"], places["top_logprobs"], strict=True):
        assert max(top, key=top.__getitem__) == token  # it follows the most probable token
    assert choice["finish_reason"] == "length"
    made = post(api, "/v1/completions", LOOMSIDIAN)["choices"]
    assert len({choice["text"] for choice in made}) == len(made) == 3
