"""Every name of a sampling setting changes that setting, at each path that takes it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from serving import Serving, serving

import llamabranch as lb
from llamabranch.request.fields import _REFUSED, SamplingFields
from llamabranch.serve.completions import ChatFields, CompletionFields

# A value for each name of a setting, then what other names and values become.
SENT: dict[str, Any] = {
    "temperature": 0.25, "dynatemp_range": 0.125, "dynatemp_exponent": 1.5, "top_k": 7, "top_p": 0.5,
    "min_p": 0.25, "typical_p": 0.75, "top_n_sigma": 2.0, "xtc_probability": 0.5, "xtc_threshold": 0.25,
    "repeat_penalty": 1.75, "frequency_penalty": 0.5, "presence_penalty": 0.25, "penalty_last_n": 9,
    "dry_multiplier": 0.5, "dry_base": 2.0, "dry_allowed_length": 3, "dry_penalty_last_n": 11,
    "dry_sequence_breakers": ["x"], "min_keep": 2, "seed": 5, "logit_bias": {"9": 1.5},
    "ignore_eos": True,
}  # fmt: skip
PATHS = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1, "logprobs": 1},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "logprobs": True,
    },
}  # fmt: skip
NAMES = [
    field.name
    for field in msgspec.structs.fields(SamplingFields)
    if field.name not in _REFUSED
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(sampling=lb.SamplingParams(seed=3)) as running:
        yield running


@pytest.fixture
def reached(server: Serving, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that sends a body, and returns the settings that the engine gets."""
    asked: list[lb.Request] = []
    steps = server.engine.steps

    def noted(*requests: lb.Request, **more: Any) -> Any:
        asked.extend(requests)
        return steps(*requests, **more)

    monkeypatch.setattr(server.engine, "steps", noted)
    with server.client() as client:

        def send(path: str, **body: Any) -> lb.SamplingParams:
            answer = client.post(path, json=body)
            assert answer.status_code < 300, answer.text
            params = asked[-1].sampling
            assert params is not None
            return params

        yield send


def expected(server: Serving, name: str) -> dict[str, Any]:
    """Return the settings that ``name`` changes."""
    value = SENT[name]
    if name == "ignore_eos":
        eog = server.ctx.model.eog_tokens
        return {"logit_bias": dict.fromkeys(eog, -math.inf)}
    if name == "logit_bias":
        value = {int(token): bias for token, bias in value.items()}
    return {name: tuple(value) if isinstance(value, list) else value}


def test_each_name_has_a_value_here_and_each_setting_a_name() -> None:
    assert {*NAMES} == {*SENT}
    settings = {*lb.SamplingParams.__dataclass_fields__} - {"logprobs", "logits_processor"}
    assert settings == {*SENT} - {"ignore_eos"}
    for fields in (CompletionFields, ChatFields):
        assert {field.name for field in msgspec.structs.fields(fields)} >= {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_each_name_changes_its_setting_at_each_path(
    server: Serving, reached: Any, name: str
) -> None:
    changed, value = expected(server, name), SENT[name]
    for path, rest in PATHS.items():
        plain = reached(path, **rest)
        assert reached(path, **rest, **{name: value}) == plain.replace(**changed) != plain


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ignore_eos"])
def test_a_line_of_a_file_has_the_same_names(server: Serving, name: str) -> None:
    line = lb.Request.from_json({"prompt": "a", name: SENT[name]}, "0")
    assert line.sampling == lb.SamplingParams().replace(**expected(server, name))
    based = lb.Request.from_json({"prompt": "a"}, "0", lb.SamplingParams(top_k=3))
    assert based.sampling == lb.SamplingParams(top_k=3)
    assert lb.Request.from_json({"prompt": "a"}, "0").sampling is None  # the engine's


@pytest.mark.parametrize("name", _REFUSED)
def test_names_of_other_programs_that_would_change_a_text_are_refused(
    server: Serving, name: str
) -> None:
    with server.client() as client:
        for path, rest in PATHS.items():
            error = client.post(path, json={**rest, name: 2}).json()["error"]
            assert (error["code"], error["param"]) == (400, name)
            assert _REFUSED[name] in error["message"]
            assert client.post(path, json={**rest, name: None}).status_code == 200
    with pytest.raises(lb.ConfigError, match=rf"{name} .*{_REFUSED[name]}"):
        lb.Request.from_json({"prompt": "a", name: 2}, "0")


@pytest.mark.parametrize("digits", ["99999999999", "9999999999", "-1", "9" * 40, "9" * 5000])
def test_a_number_that_is_no_token_is_refused_by_name(server: Serving, digits: str) -> None:
    shown = digits[:40]
    with server.client() as client:
        for path, rest in PATHS.items():
            for bias in ({digits: 1}, [[digits, 1]]):
                answer = client.post(path, json={**rest, "logit_bias": bias})
                assert answer.status_code == 400
                assert shown in answer.json()["error"]["message"]
    for key in ("1_0", " 5", "\u0663", "five", ""):
        with pytest.raises(lb.errors.ConfigError, match="a key of logit_bias"):
            lb.Request.from_json({"prompt": "a", "logit_bias": {key: 1}}, "a")
