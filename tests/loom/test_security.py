"""Who may call the page: hosts, origins, links, cookies, keys; its policy; and what it does not tell."""

from __future__ import annotations

from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from paging import Paged

GET = [
    "/loom/doc", "/loom/tokens?node=n1", "/loom/find?q=a", "/loom/events", "/loom/export",
    "/v1/models", "/health", "/loom/nothing", "/requests",
    "/app/nothing.js", "/app/../document.py", "/app/%2e%2e/document.py", "/favicon.ico",
]  # fmt: skip
POST = ["/loom/do", "/loom/import", "/v1/completions"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Paged]:
    with Paged(tmp_path_factory.mktemp("page")) as running:
        yield running


@pytest.fixture
def key(page: Paged) -> str:
    return f"Bearer {page.loom.guard.key}"


def ask(page: Paged, path: str, body: str | None = None, **headers: str) -> Any:
    """Send just these headers (their names with _ for -), POST a body; return the answer."""
    connection = HTTPConnection("127.0.0.1", page.server.port, timeout=60)
    all_headers = {"Host": page.url.removeprefix("http://"), **headers}
    connection.putrequest(
        "GET" if body is None else "POST", path, skip_host=True, skip_accept_encoding=True
    )
    for name, value in all_headers.items():
        connection.putheader(name.replace("_", "-"), value)
    if body is not None:
        connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body.encode() if body else None)
    answer = connection.getresponse()
    if not path.startswith("/loom/events") or answer.status != 200:
        answer.read()
    connection.close()
    return answer


def session(page: Paged, token: str = "", **headers: str) -> Any:
    token = token or page.loom.guard.link()
    return ask(page, "/session", f'{{"token": "{token}"}}', **headers)


@pytest.mark.parametrize("path", sorted({*GET, *POST}))
def test_nothing_is_told_or_done_without_a_session(page: Paged, path: str) -> None:
    wrong = {"Authorization": "Bearer wrong"}, {"Cookie": f"lb-{page.server.port}=wrong"}
    headers: dict[str, str]
    for headers in ({}, *wrong):
        if path in GET:
            assert ask(page, path, **headers).status == 401
        if path in POST:
            assert ask(page, path, "{}", Origin=page.url, **headers).status == 401


def test_a_link_works_once_and_for_five_minutes(
    page: Paged, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = page.loom.guard.link()
    answer = session(page, token, Origin=page.url)
    assert answer.status == 204
    cookie, *marks = answer.getheader("set-cookie").split("; ")
    assert cookie.startswith(f"lb-{page.server.port}=")
    assert marks == ["HttpOnly", "SameSite=Strict", "Path=/"]
    assert session(page, token, Origin=page.url).status == 401
    for path in ("/loom/doc", "/v1/models"):
        assert ask(page, path, Cookie=cookie).status == 200
    assert ask(page, "/loom/do", "{}", Cookie=cookie).status == 403  # it must say its origin
    now = 0.0
    monkeypatch.setattr("llamabranch.serve.page.monotonic", lambda: now)
    tokens = [page.loom.guard.link() for _ in range(2)]
    for token, now, status in zip(tokens, (299.9, 300.1), (204, 401), strict=True):  # noqa: B007
        assert session(page, token, Origin=page.url).status == status


HOSTS = [
    "", "example.org", "127.0.0.1", "127.0.0.1:1", "localhost", "127.0.0.1.example.org:{port}",
    "LOCALHOST:{port}", "[::1]:{port}", "127.1:{port}", "0.0.0.0:{port}",
]  # fmt: skip
ORIGINS = [
    "null", "http://example.org", "https://127.0.0.1:{port}", "http://127.0.0.1",
    "http://localhost:{port}", "http://127.0.0.1:{port}.example.org", "http://127.0.0.1:{port}/",
]  # fmt: skip
SITES = ["cross-site", "same-site", "none", "nonsense"]
OTHERS = {"Host": HOSTS, "Origin": ORIGINS, "Sec_Fetch_Site": SITES}


@pytest.mark.parametrize(("name", "value"), [(name, v) for name in OTHERS for v in OTHERS[name]])
def test_requests_of_others_are_refused(page: Paged, key: str, name: str, value: str) -> None:
    headers = {"Authorization": key, name: value.format(port=page.server.port)}
    for path in ("/", "/app/main.js", "/loom/doc", "/v1/models"):
        status = ask(page, path, **headers).status
        assert status == (200 if value == "none" else 403)  # none: a person typed the address
    for path in ("/loom/do", "/v1/completions"):
        assert ask(page, path, "{}", **{"Origin": page.url, **headers}).status == 403
    assert session(page, **{"Origin": page.url, **headers}).status == 403


def test_a_session_begins_where_its_page_is(page: Paged) -> None:
    assert session(page).status == 403  # it must say its origin
    name = f"localhost:{page.server.port}"
    assert session(page, Origin=f"http://{name}", Host=name).status == 204


@pytest.mark.parametrize(
    "path",
    ["/", "/view", "/app/main.js", "/app/view.js", "/requests", "/loom/doc", "/v1/models",
     "/loom/nothing", "/v1/nothing"],
)  # fmt: skip
def test_every_answer_has_the_policy(page: Paged, key: str, path: str) -> None:
    answer = ask(page, path, Authorization=key)
    policy = answer.getheader("content-security-policy")
    assert {
        "default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "base-uri 'none'",
        "form-action 'none'", "require-trusted-types-for 'script'", "trusted-types 'none'",
    } <= {*policy.split("; ")}  # fmt: skip
    assert "unsafe" not in policy
    for name, value in {
        "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
        "cache-control": "no-store", "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin", "access-control-allow-origin": None,
    }.items():  # fmt: skip
        assert answer.getheader(name) == value


def test_the_page_is_there_before_the_model(tmp_path: Path) -> None:
    with Paged(tmp_path, waits=False) as page:
        assert ask(page, "/").status == 200
        doc = page.doc()
        assert doc["loading"] and doc["model"] is None and doc["nodes"]["id"] == []
        error = page.do("type", 503, text="A king")["error"]
        assert error["type"] == "unavailable_error"
        assert page.api.get("/v1/models").status_code == 503


@pytest.mark.parametrize(
    "body",
    ["", "{", "[]", "null", '{"op": "type"}', '{"op": 1, "cid": "a"}', '{"op": "type", "cid": ""}',
     '{"op": "nothing", "cid": "b"}', '{"op": "continue", "cid": "c"}',
     '{"op": "continue", "cid": "d", "node": "n999"}', '{"op": "fork", "cid": "e", "node": "../x"}',
     "[" * 100_000, '{"op": "type", "cid": "g", "text": 3}',
     '{"op": "type", "cid": "' + "x" * 65 + '", "text": "a"}'],
    ids=range(14),
)  # fmt: skip
def test_bad_requests_are_told_and_change_nothing(page: Paged, body: str) -> None:
    before = page.doc()["nodes"]
    answer = page.api.post("/loom/do", content=body.encode())
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["message"]
    assert page.doc()["nodes"] == before
