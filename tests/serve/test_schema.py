"""Right and wrong requests, generated from the types of all fields: none makes the server fail."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from serving import httpx

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
msgspec = pytest.importorskip("msgspec")

from llamabranch.serve import anthropic, completions, utilities  # noqa: E402

SERVE = {"max_tokens": 8, "max_choices": 4}
BODIES = {
    "/v1/completions": completions.CompletionFields,
    "/v1/chat/completions": completions.ChatFields,
    "/v1/messages": anthropic.MessagesFields,
    "/v1/messages/count_tokens": anthropic.MessagesFields,
    "/tokenize": utilities.TokenizeFields,
}


def openapi() -> dict[str, Any]:
    """Return a description of the server made from the types of its requests."""

    def hook(kind: object) -> dict[str, Any]:
        return {"description": "anything"}  # of ``object``

    schemas, parts = msgspec.json.schema_components(
        BODIES.values(), schema_hook=hook, ref_template="#/components/schemas/{name}"
    )
    paths = {
        path: {"post": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
            "responses": {"default": {"description": "an answer"}},
        }}
        for path, schema in zip(BODIES, schemas, strict=True)
    }  # fmt: skip
    about = {"title": "llamabranch", "version": "1"}
    return {"openapi": "3.1.0", "info": about, "paths": paths, "components": {"schemas": parts}}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", sorted(BODIES))
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_no_request_fails_the_server(api: Any, path: str, mode: str) -> None:
    schema = schemathesis.openapi.from_dict(openapi())
    operation = schema[path]["POST"]
    cases = operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode))

    @settings(
        max_examples=150, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],
    )  # fmt: skip
    @given(case=cases)
    def try_all(case: Any) -> None:
        body = case.body
        if isinstance(body, dict) and mode == "positive":
            body = {**body, "max_tokens": 2} if "max_tokens" in body else body
        try:
            answer = api.post(path, json=body)
        except (TypeError, ValueError, UnicodeEncodeError):  # it is no JSON
            return
        except httpx.HTTPError as error:
            raise AssertionError(f"no answer to {body!r}") from error
        assert answer.status_code < 500 or answer.status_code == 501, (body, answer.text)

    try_all()
