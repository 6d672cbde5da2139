"""Every name of a setting changes that setting, at each path that takes it; what others send."""

from __future__ import annotations

import math
from datetime import date
from typing import Any

import msgspec
import pytest
from serving import Serving, post, serving

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


SERVE = {"sampling": lb.SamplingParams(seed=7, top_k=9)}


@pytest.fixture
def reached(server: Serving, api: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sends a body, and returns the settings that the engine gets."""
    asked: list[lb.Request] = []
    steps = server.engine.steps

    def noted(*requests: lb.Request, **more: Any) -> Any:
        asked.extend(requests)
        return steps(*requests, **more)

    monkeypatch.setattr(server.engine, "steps", noted)

    def send(path: str, **body: Any) -> lb.SamplingParams:
        post(api, 200, path, **body)
        params = asked[-1].sampling
        assert params is not None
        return params

    return send


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
        assert (plain.seed, plain.top_k) == (7, 9)
        assert reached(path, **rest, **{name: value}) == plain.replace(**changed) != plain


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ignore_eos"])
def test_a_line_of_a_file_has_the_same_names(server: Serving, name: str) -> None:
    line = lb.Request.from_json({"prompt": "a", name: SENT[name]}, "0")
    assert line.sampling == lb.SamplingParams().replace(**expected(server, name))
    based = lb.Request.from_json({"prompt": "a"}, "0", lb.SamplingParams(top_k=3))
    assert based.sampling == lb.SamplingParams(top_k=3)
    assert lb.Request.from_json({"prompt": "a"}, "0").sampling is None  # the engine's
    with pytest.raises(lb.ConfigError, match="max_tokens"):  # it would be the engine's limit
        lb.Request.from_json({"prompt": "a", "max_tokens": -1}, "0")


@pytest.mark.parametrize("path", PATHS)
def test_names_of_other_programs_that_would_change_a_text_are_refused(api: Any, path: str) -> None:
    """Those that ask for nothing are not, nor fields that llama-server's clients always send."""
    habits = {"samplers": ["top_k", "temperature"], "lora": [], "t_max_predict_ms": 0}
    habits |= {"n": 2, "best_of": 2, "modalities": ["text"]}
    nothings: list[Any] = [None, False, "", [], {}]
    for nothing in nothings:
        post(api, 200, path, **dict.fromkeys(_REFUSED, nothing), **habits, **PATHS[path])
    for name, instead in _REFUSED.items():
        for value in (2, ["x"]):
            error = post(api, 400, path, **{name: value}, **PATHS[path])["error"]
            assert (error["code"], error["param"]) == (400, name)
            assert instead in error["message"]
        with pytest.raises(lb.ConfigError, match=rf"{name} .*{instead}"):
            lb.Request.from_json({"prompt": "a", name: 2}, "0")


@pytest.mark.parametrize("digits", ["99999999999", "9999999999", "-1", "9" * 40, "9" * 5000])
def test_a_number_that_is_no_token_is_refused_by_name(api: Any, digits: str) -> None:
    for path, rest in PATHS.items():
        for bias in ({digits: 1}, [[digits, 1]]):
            error = post(api, 400, path, **rest, logit_bias=bias)["error"]
            assert digits[:40] in error["message"]
    for key in ("1_0", " 5", "\u0663", "five", ""):
        with pytest.raises(lb.errors.ConfigError, match="a key of logit_bias"):
            lb.Request.from_json({"prompt": "a", "logit_bias": {key: 1}}, "a")


# -- the server's own ------------------------------------------------------------------------------


def test_seed_of_the_server_is_that_of_requests_without_one(api: Any) -> None:
    body: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.5}
    texts = [
        post(api, **body, **more)["choices"][0]["text"]
        for more in ({}, {}, {"seed": 7}, {"seed": 8}, {"seed": -1}, {"seed": -1})
    ]
    assert texts[0] == texts[1] == texts[2]
    assert len(set(texts)) == 4


def test_templates_that_ask_for_the_date_are_told_it_and_answers_where_batches_are_not_exact() -> (
    None
):
    template = (
        "{% if messages[0]['content'] != date_string ~ strftime_now('|%Y') %}"
        "{{ raise_exception('another day') }}{% endif %}Hi"
    )
    engine = {"chat_template": template, "exact": False}
    with serving(engine) as server, server.client() as api:
        for more, day in (({}, date.today().strftime("%d %b %Y")), ({"date_string": "x"}, "x")):
            messages = [{"role": "user", "content": f"{day}|{date.today().year}"}]
            body = {"messages": messages, "chat_template_kwargs": more, "max_tokens": 1}
            assert post(api, 200, "/v1/chat/completions", **body)["exact"] is False
        messages = [{"role": "user", "content": "yesterday"}]
        post(api, 400, "/v1/chat/completions", messages=messages, max_tokens=1)
