"""What the server says about itself."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from functools import partial
from typing import Any

import pytest
from serving import Serving, bundled_engine, serving

import llamabranch as lb


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(alias="king", sampling=lb.SamplingParams(seed=7, top_k=9)) as running:
        yield running


@pytest.fixture
def api(server: Serving) -> Iterator[Any]:
    with server.client() as client:
        yield client


def test_models(api: Any, server: Serving) -> None:
    (model,) = api.get("/v1/models").json()["data"]
    assert model["id"] == "king"
    assert api.get("/v1/models/king").json()["meta"]["n_vocab"] == server.ctx.model.n_vocab
    assert api.get("/v1/models/wolf").status_code == 404


def test_templates_that_ask_for_the_date_are_told_it() -> None:
    template = "{{ date_string }}|{{ strftime_now('%Y') }}|{{ messages[0]['content'] }}"
    open_engine = partial(bundled_engine, chat_template=template)
    with Serving(open_engine) as server, server.client() as api:
        for more, day in (({}, date.today().strftime("%d %b %Y")), ({"date_string": "x"}, "x")):
            body = {
                "messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": more,
                "max_tokens": 1, "return_token_ids": True,
            }  # fmt: skip
            (choice,) = api.post("/v1/chat/completions", json=body).json()["choices"]
            prompt = server.ctx.model.detokenize(choice["prompt_token_ids"])
            assert prompt.endswith(f"{day}|{date.today().year}|Hi")


def test_seed_of_the_server_is_that_of_requests_without_one(api: Any) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 9, "temperature": 1.2}
    texts = [
        api.post("/v1/completions", json={**body, **more}).json()["choices"][0]["text"]
        for more in ({}, {}, {"seed": 7}, {"seed": 8}, {"seed": -1})
    ]
    assert texts[0] == texts[1] == texts[2]
    assert len(set(texts)) == 3


def test_answers_tell_where_batches_are_not_exact() -> None:
    open_engine = partial(bundled_engine, exact=False)
    with Serving(open_engine) as server, server.client() as api:
        answer = api.post("/v1/completions", json={"prompt": "Once", "max_tokens": 2})
        assert answer.json()["exact"] is False
