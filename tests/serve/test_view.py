"""The records of requests: as JSON, in the log, and who may see them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest
from serving import Serving, post, serving
from viewing import everywhere, made_up

from llamabranch import Request

PRIVATE, FILES = "/requests", ["/", "/app/view.js", "/app/view.css", "/app/dom.js", "/app/base.css"]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(allow_origins=("*",)) as running:
        yield running


def ask(server: Serving, path: str, /, body: str | None = None, **headers: str) -> Any:
    """Send just these headers (their names with _ for -); return the answer and its body."""
    connection = HTTPConnection("127.0.0.1", server.server.port, timeout=60)
    connection.putrequest("GET" if body is None else "POST", path, skip_host=True)
    every = {"Host": f"127.0.0.1:{server.server.port}", **headers}
    if body is not None:
        every["Content-Length"] = str(len(body))
    for name, value in every.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders(body.encode() if body else None)
    answer = connection.getresponse()
    answer.text = answer.read().decode()  # type: ignore[attr-defined]
    connection.close()
    return answer


def bearer(server: Serving) -> str:
    return f"Bearer {server.server.page.key}"


def listed(server: Serving, query: str = "") -> Any:
    """Return the answer with the key of the page."""
    with server.client(headers={"Authorization": bearer(server)}) as api:
        answer = api.get(f"/requests{query}")
        assert answer.status_code == 200, answer.text
        return answer.json()


def test_each_request_leaves_a_record_and_a_line_of_the_log(server: Serving) -> None:
    before = len(listed(server)["requests"])
    server.lines.clear()
    prompt = "Once upon a time there was a fox who lived in a wood"
    with server.client(headers={"X-Session-Id": "tale"}) as api:
        for more in ("", " and a bear"):
            post(api, prompt=prompt + more, max_tokens=4)
    told = listed(server)["requests"][before:]
    assert [each["num_prompt_tokens"] for each in told] == [
        each.get("cached", 0) + each["evaluated"] for each in told
    ]
    assert told[1]["cached"] > 0
    assert {each["door"] for each in told} == {"completions"}
    records = server.ctx.requests[before:]
    assert server.lines == [record.line() for record in records]
    assert "tale" in server.lines[0]


def test_a_line_has_no_control_characters(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    service = server.server.service
    assert service is not None
    monkeypatch.setattr(service, "log", lines.append)
    job = service.engine.engine.prepare(Request("x"))

    async def end() -> None:
        service.log_ends([job])
        assert job.on_record is not None
        job.on_record(next(everywhere("\x1b[31m\u202e\n\x00red")))
        await asyncio.sleep(0)

    asyncio.run(end())
    assert len(lines) == 1
    assert lines[0].isprintable()


def test_a_client_that_leaves_has_a_line_with_what_was_done_for_it(server: Serving) -> None:
    """Before, the line said that nothing was generated, and that the whole prompt was read."""
    before, body = len(listed(server)["requests"]), {"prompt": "The fox", "max_tokens": 900}
    server.lines.clear()
    with (
        server.client() as api,
        api.stream(
            "POST", "/v1/completions", json={**body, "stream": True, "ignore_eos": True}
        ) as answer,
    ):
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
    while not server.lines:
        time.sleep(0.005)
    record = server.ctx.requests[before]
    assert record.finish_reason == "cancelled" and 900 > record.generated > 0 < record.write_s
    assert server.lines == [record.line()] and server.lines[0].endswith("  cancelled")


def test_a_refused_request_leaves_a_line(server: Serving) -> None:
    server.lines.clear()
    with server.client() as api:
        assert api.get("/chat/completions").status_code == 404
        post(api, 400, prompt="Once", max_tokens=-8)
    wrong, bad = server.lines
    assert wrong == "GET /chat/completions: 404, Not Found"
    assert bad.startswith("POST /v1/completions: 400, ") and "max_tokens" in bad


def test_no_line_without_the_setting() -> None:
    with serving(log_requests=False) as server, server.client() as api:
        post(api, prompt="Once", max_tokens=1)
        post(api, 400, prompt="Once", max_tokens=-8)
        assert server.lines == []


@pytest.fixture
def day(server: Serving, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The server tells made-up records."""
    records = made_up(1e9)
    monkeypatch.setattr(type(server.ctx), "requests", property(lambda _: records))
    return records


def test_totals_and_what_came_later(server: Serving, day: list[Any]) -> None:
    totals, requests = listed(server)["totals"], listed(server)["requests"]
    assert [each["number"] for each in requests] == [*range(len(day))]
    assert totals["num_prompt_tokens"] == sum(each.num_prompt_tokens for each in day)
    assert totals["num_prompt_tokens"] == totals["cached"] + totals["evaluated"]
    assert totals["reread"] == sum(each.reread for each in day) > 0
    assert sum(totals["causes"].values()) == totals["evaluated"]
    last = day[-1].number
    assert not day[-1].finish_reason
    for after, numbers in ((last - 2, [last - 1, last]), (last, [last]), (last + 9, [last])):
        assert [each["number"] for each in listed(server, f"?after={after}")["requests"]] == numbers
    for wrong in ("x", "1.5", "9" * 5000):
        assert ask(server, f"/requests?after={wrong}", Authorization=bearer(server)).status == 400


def test_since_is_the_first_record_that_is_kept(server: Serving, day: list[Any]) -> None:
    assert server.server.service is not None
    assert listed(server)["totals"]["since"] == server.server.service.created
    del day[:3]
    assert listed(server)["totals"]["since"] == day[0].time


# -- who may see them ------------------------------------------------------------------------------


def test_records_need_a_key_and_the_pages_files_tell_nothing(server: Serving) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": "lb-1=wrong"}):
        assert ask(server, PRIVATE, **headers).status == 401
        assert [ask(server, path, **headers).status for path in FILES] == [200] * len(FILES)
    for path in ("/app/nothing.js", "/app/../view.py", "/app/%2e%2e/view.py", "/app/main.js"):
        assert ask(server, path).status == 404


def test_an_api_key_or_the_pages_key_shows_the_records() -> None:
    with serving(api_keys=("one", "two")) as server:
        for key in ("one", "two", server.server.page.key):
            assert ask(server, PRIVATE, Authorization=f"Bearer {key}").status == 200
        assert ask(server, PRIVATE, x_api_key="two").status == 200
        assert ask(server, PRIVATE, Authorization="Bearer three").status == 401
        assert ask(server, "/v1/models", Authorization=bearer(server)).status == 401


def test_a_key_begins_a_session_again_and_again() -> None:
    with serving(api_keys=("one",)) as server:
        here = f"http://127.0.0.1:{server.server.port}"
        for token, status in (("one", 204), ("one", 204), ("two", 401), ("\u00f6\u2603", 401)):
            body = json.dumps({"token": token})
            assert ask(server, "/session", body, Origin=here).status == status


def test_a_link_works_once(server: Serving) -> None:
    here = f"http://127.0.0.1:{server.server.port}"
    body = f'{{"token": "{server.server.page.link()}"}}'
    answer = ask(server, "/session", body, Origin=here)
    assert answer.status == 204
    cookie, *marks = answer.getheader("set-cookie").split("; ")
    assert marks == ["HttpOnly", "SameSite=Strict", "Path=/"]
    assert ask(server, PRIVATE, Cookie=cookie).status == 200
    assert ask(server, "/session", body, Origin=here).status == 401
    assert ask(server, "/session", body).status == 403  # it must say its origin


@pytest.mark.parametrize(
    ("name", "value"),
    [("Host", "example.org"), ("Host", "127.0.0.1"), ("Host", "192.168.1.7:8080"), ("Origin", "null"),
     ("Origin", "http://example.org"), ("Origin", "http://localhost:3000"),
     ("Sec_Fetch_Site", "cross-site"), ("Sec_Fetch_Site", "same-site")],
)  # fmt: skip
def test_no_other_origin_reads_them_even_if_the_api_allows_all(
    server: Serving, name: str, value: str
) -> None:
    headers = {"Authorization": bearer(server), name: value}
    for path in (PRIVATE, *FILES):
        assert ask(server, path, **headers).status == 403
    assert ask(server, "/session", "{}", **headers).status == 403


def test_the_policy_is_the_pages_and_the_api_stays_as_it_is(server: Serving) -> None:
    for path, status in ((PRIVATE, 200), (PRIVATE, 401), ("/", 200), ("/session", 403)):
        headers = {"Authorization": bearer(server)} if status == 200 else {}
        answer = ask(server, path, *["{}"] * (path == "/session"), **headers)
        assert answer.status == status
        policy = answer.getheader("content-security-policy")
        assert {"default-src 'none'", "script-src 'self'", "trusted-types 'none'"} <= {
            *policy.split("; ")
        }
        assert answer.getheader("cache-control") == "no-store"
    assert ask(server, "/v1/models").getheader("content-security-policy") is None
    assert ask(server, "/v1/models").status == 200
