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
    with serving(alias="tale,king", seed=7, sampling=lb.SamplingParams(top_k=9)) as running:
        yield running


@pytest.fixture
def api(server: Serving) -> Iterator[Any]:
    with server.client() as client:
        yield client


def test_models(api: Any, server: Serving) -> None:
    (model,) = api.get("/v1/models").json()["data"]
    assert (model["id"], model["aliases"]) == ("king", ["king", "tale"])
    assert api.get("/v1/models/tale").json()["meta"]["n_vocab"] == server.ctx.model.n_vocab
    assert api.get("/v1/models/wolf").status_code == 404


def test_root_tells_what_runs_here(api: Any, server: Serving) -> None:
    answer = api.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    page = answer.text
    assert "king" in page and str(server.ctx.n_ctx_seq) in page
    assert f"{api.base_url}/v1".replace("//v1", "/v1") in page
    assert page.count("\n") < 20
    for path in ("/health", "/v1/models", "/metrics"):
        assert path in page and api.get(path).status_code == 200
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert path in page and api.get(path).status_code in (200, 405)  # there is such a path
    hostile = api.get("/", headers={"Host": "localhost:1/<script>"})
    assert "<script>" not in hostile.text


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


def test_metrics_are_the_sums_of_what_the_answers_tell(api: Any) -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="needs prometheus-client")

    def read() -> dict[str, float]:
        answer = api.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        families = list(parser.text_string_to_metric_families(answer.text))
        assert all(family.type != "unknown" for family in families)
        return {s.name: s.value for family in families for s in family.samples if not s.labels}

    before = read()
    n_prompt = n_cached = n_predicted = 0
    for _ in range(2):
        body = {"prompt": "The quick brown fox jumps over the dog", "max_tokens": 5, "n": 1}
        timings = api.post("/v1/completions", json=body).json()["timings"]
        n_prompt += timings["prompt_n"]
        n_cached += timings["cache_n"]
        n_predicted += timings["predicted_n"]
    after = read()
    growth = {name: after[name] - before.get(name, 0) for name in after}
    assert growth["llamacpp:prompt_tokens_total"] == n_prompt
    assert growth["llamacpp:prompt_tokens_cached_total"] == n_cached > 0
    assert growth["llamacpp:tokens_predicted_total"] == n_predicted
    assert after["llamacpp:requests_processing"] == after["llamacpp:requests_deferred"] == 0


def test_what_is_turned_off_is_not_there() -> None:
    with serving(metrics=False) as server, server.client() as api:
        answer = api.get("/metrics")
        assert answer.status_code == 501
        assert answer.json()["error"]["type"] == "not_supported_error"


def test_answers_tell_where_batches_are_not_exact() -> None:
    open_engine = partial(bundled_engine, batch_invariant=False)
    with Serving(open_engine) as server, server.client() as api:
        answer = api.post("/v1/completions", json={"prompt": "Once", "max_tokens": 2})
        assert answer.json()["batch_invariant"] is False
        assert answer.headers["x-batch-invariant"] == "false"
