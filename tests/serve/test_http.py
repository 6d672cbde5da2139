"""Who may use the server; bad requests, slow readers, signals and full queues do no harm."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import run
from serving import TARGET, Command, Serving, bundled_engine, httpx, post, serving
from toys import write_gemma3, write_toy

import llamabranch as lb
from llamabranch.serve import ServeSettings
from llamabranch.serve.server import Server

SERVE = {"max_body": 1 << 20}
KEPT = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"  # the connection is kept
ENDLESS = {"prompt": "Once upon a time", "max_tokens": -1, "ignore_eos": True, "seed": 1}


def wait_until(true: Callable[[], bool]) -> None:
    """Wait until a condition is true."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def is_idle(server: Serving) -> bool:
    service = server.server.service
    is_free = server.ctx.n_seq_free == server.ctx.n_seq_max
    return service is not None and not service.n_texts and is_free


def raw(server: Serving, data: bytes, *, ends: bool = True) -> bytes:
    """Send bytes unchanged; return all bytes up to the end of the connection."""
    with socket.create_connection(("127.0.0.1", server.server.port), 60) as connection:
        connection.sendall(data)
        if ends:
            connection.shutdown(socket.SHUT_WR)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                received += part
        return received


def head(path: str, n: int, *more: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {n}", *more]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode()


# -- bad requests ----------------------------------------------------------------------------------


NO_JSON = [
    b"", b"{", b"[]", b"5", b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}',
    b"[" * 100_000, b'{"prompt":' * 100_000, b'{"prompt": ' + b"[" * 50_000,
    b'{"prompt": {"text": 5}}',
]  # fmt: skip
WRONG = [
    b'{"prompt": "x", "temperature": 1e999}', b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "seed": 1' + b"0" * 10_000 + b"}", b'{"prompt": "x", "n": 1.5}',
    b'{"prompt": "x", "stop": {"a": 1}}', b'{"prompt": "x", "logit_bias": {"a\\u0000b": 1e400}}',
]  # fmt: skip
TEXTS = ["/v1/completions", "/v1/chat/completions"]
CASES = [(path, body) for path in TEXTS for body in NO_JSON + WRONG]
CASES += [("/tokenize", body) for body in NO_JSON]
HELLO = {"role": "user", "content": "x"}
DEEP: Any = "x"
for _ in range(600):
    DEEP = [DEEP]
SCHEMA = {"type": "object", "properties": {"x": {"enum": [DEEP]}}, "additionalProperties": DEEP}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
ASKED: list[dict[str, Any]] = [
    {"prompt": "x", "json_schema": SCHEMA}, {"messages": [{**HELLO, "more": DEEP}]},
    {"messages": [HELLO], "chat_template_kwargs": {"more": DEEP}},
    {"messages": [HELLO], "tool_choice": "required", "tools": [FUNCTION]},
    {"messages": [HELLO], "json_schema": SCHEMA},
    {"messages": [HELLO], "max_tokens": 1, "max_completion_tokens": 2},
]  # fmt: skip
CASES += [(TEXTS["messages" in body], json.dumps(body).encode()) for body in ASKED]


@pytest.mark.parametrize(("path", "body"), CASES)
def test_bodies_that_are_no_requests(api: Any, path: str, body: bytes) -> None:
    answer = api.post(path, content=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_paths_and_methods_that_do_not_exist(api: Any) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("PUT", "/v1/completions", 405),
        ("POST", "/health", 405), ("POST", "/props", 404), ("POST", "/v1/branches", 404),
        ("GET", "/v1/models/%00", 404), ("GET", "/" + "a" * 9000, 404),
    ):  # fmt: skip
        answer = api.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == status


def test_bodies_and_headers_have_limits(server: Serving, api: Any) -> None:
    text = "word " * 400_000
    assert api.post("/v1/completions", json={"prompt": text}).status_code == 413
    chunks = (b"x" * 100_000 for _ in range(30))
    assert api.post("/v1/completions", content=chunks).status_code == 413
    answer = api.get("/health", headers={"x-long": "a" * 10_000})
    assert answer.status_code == 200
    endless = head("/health", 0, method="GET")[:-2] + b"x-a: b\r\n" * 100_000
    assert b" 200 " not in raw(server, endless, ends=False)[:20]
    assert raw(server, KEPT + endless, ends=False).count(b"HTTP/1.1 200") == 1
    chunked = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    trailers, extension = b"0\r\n" + b"x-a: b\r\n" * 1_000_000, b"2;" + b"a" * 8_000_000
    for more in (trailers, extension):
        with pytest.raises(OSError, match=r"reset|pipe"):
            raw(server, chunked + b"2\r\n{}\r\n" + more, ends=False)
    assert api.get("/health").status_code == 200


def test_connections_that_say_nothing_or_half(server: Serving, api: Any) -> None:
    open_ = []
    for data in (b"", b"GET / HT", head("/v1/completions", 100)[:-10], head("/v1/completions", 99)):
        connection = socket.create_connection(("127.0.0.1", server.server.port), 60)
        connection.sendall(data)
        open_.append(connection)
    post(api, prompt="x", max_tokens=2)
    for connection in open_:
        connection.close()
    assert raw(server, b"\x16\x03\x01 not http\r\n\r\n").startswith((b"", b"HTTP/1.1 400"))
    assert b" 200 " not in raw(server, head("/v1/completions", 5) + b"{}")
    assert api.get("/health").status_code == 200


# -- who may call ----------------------------------------------------------------------------------


HOSTS = ["localhost", "localhost:1", "127.0.0.1:8080", "[::1]:8080", "192.168.1.7"]
NO_HOSTS = ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", ""]


@pytest.mark.parametrize(
    ("settings", "passing", "refused"),
    [
        ({"allow_origins": ("https://good.example",)}, ["https://good.example"],
         ["https://good.example.evil", "null", "http://localhost:3000"]),
        ({"allow_origins": ("localhost",)},
         ["http://localhost:3000", "http://127.0.0.1", "http://[::1]:5"],
         ["http://localhost.evil.example", "null", "http://["]),
        ({"allow_origins": ("*",), "allowed_hosts": ("box.example",)}, ["null"], []),
    ],
    ids=["one", "localhost", "all"],
)  # fmt: skip
def test_hosts_and_origins(settings: Any, passing: list[str], refused: list[str]) -> None:
    cases = (
        ("host", [*HOSTS, *settings.get("allowed_hosts", ())], 200), ("host", NO_HOSTS, 403),
        ("origin", passing, 200), ("origin", refused, 403),
    )  # fmt: skip
    wanted = [({name: value}, status) for name, values, status in cases for value in values]
    with serving(**settings) as server, server.client() as api:
        for headers, status in wanted:
            answer = api.get("/v1/models", headers=headers)
            assert answer.status_code == status, headers
            asks = {**headers, "access-control-request-method": "POST"}
            for shown in (answer, api.options("/v1/models", headers=asks)):
                readable = shown.headers.get("access-control-allow-origin")
                allowed = headers.get("origin") if status == 200 else None
                assert readable in ((allowed,) if allowed is None else (allowed, "*"))


def test_keys() -> None:
    with serving(api_keys=("one", "two")) as server, server.client() as api:
        assert api.get("/health").status_code == 200
        for headers, status in (
            ({}, 401), ({"authorization": "Bearer"}, 401), ({"authorization": "Bearer three"}, 401),
            ({"authorization": "Basic one"}, 401), ({"authorization": "bearer two"}, 200),
            ({"x-api-key": "one"}, 200), ({"authorization": b"Bearer \xff"}, 401),
        ):  # fmt: skip
            assert api.get("/v1/models", headers=headers).status_code == status
        assert api.get("/none", headers={"authorization": "Bearer one"}).status_code == 404


@pytest.mark.parametrize(
    "wrong",
    [{"host": "0.0.0.0"}, {"host": "192.168.1.7"}, {"port": 70_000}, {"port": -1}, {"api_keys": ("",)},
     {"max_queue": -1}, {"send_timeout_s": float("nan")}],
)  # fmt: skip
def test_settings_that_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(lb.ConfigError):
        ServeSettings(**wrong)
    assert ServeSettings(host="0.0.0.0", api_keys=("k",)).host == "0.0.0.0"


def test_address_in_use_is_refused_before_the_model_loads(server: Serving) -> None:
    def never() -> lb.AsyncEngine:
        raise AssertionError

    with pytest.raises(lb.ConfigError, match=r":\d+: Address already in use"):
        Server(never, ServeSettings(port=server.server.port))


# -- clients that go away, or do not read ----------------------------------------------------------


def roomy_engine() -> lb.AsyncEngine:
    """Its texts do not end by themselves while the test waits on a busy machine."""
    ctx = lb.load(TARGET, n_ctx=8192, n_seq_max=4, n_threads=1)
    return lb.AsyncEngine(ctx, max_tokens=None, parallel=4, buffer=16)


@pytest.mark.filterwarnings("ignore::llamabranch.errors.ContextLengthWarning")
def test_disconnect_frees_sequences_and_a_slow_reader_waits_alone_and_is_given_up() -> None:
    """Other clients are served meanwhile, and after some time its texts are cancelled."""
    with Serving(roomy_engine, send_timeout_s=1.0) as server, server.client() as api:
        ways: list[dict[str, Any]] = [{}, {"stream": True}, {"stream": True, "logprobs": 20}]
        for more in ways:
            body = json.dumps({**ENDLESS, **more, "n": 4}).encode()
            with socket.socket() as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.connect(("127.0.0.1", server.server.port))
                connection.sendall(head("/v1/completions", len(body)) + body)
                wait_until(lambda: server.ctx.n_seq_free == 0)
                if "logprobs" in more:  # it stays, and does not read
                    post(api, prompt="The wolf", max_tokens=8)
                    wait_until(lambda: is_idle(server))
            wait_until(lambda: is_idle(server))


@pytest.mark.filterwarnings("ignore::llamabranch.errors.ContextLengthWarning")
def test_full_queue_is_refused_with_a_time_to_come_back() -> None:
    def open_engine() -> lb.AsyncEngine:
        return bundled_engine(parallel=1, max_waiting=1, n_ctx=4096)

    async def main(server: Serving) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as api:
            asked = [api.post("/v1/completions", json=ENDLESS) for _ in range(5)]
            tasks = [*map(asyncio.ensure_future, asked)]
            done, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # A request may be refused before another has begun.
            await asyncio.to_thread(wait_until, lambda: server.ctx.n_seq_free == 0)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        answer = done.pop().result()
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["type"] == "rate_limit_error"

    with Serving(open_engine, parallel=1) as server:
        asyncio.run(main(server))
        wait_until(lambda: is_idle(server))


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_while_its_prompt_is_read(
    server: Serving, api: Any, path: str, stream: bool
) -> None:
    text = f"{path} {stream} " + "word " * 600
    asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 300, "ignore_eos": True}
    body = json.dumps({**asked, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", server.server.port), 60) as connection:
        connection.sendall(head(path, len(body)) + body)
        wait_until(lambda: server.ctx.n_seq_free < server.ctx.n_seq_max)
    wait_until(lambda: is_idle(server))
    post(api, prompt="The wolf", max_tokens=2)


# -- the end ---------------------------------------------------------------------------------------


COMMAND = ("serve", "-t", "1", "--draft", "none", "-c", "4096")
no_sigterm = pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM to send")


@no_sigterm
def test_texts_share_one_cache_and_what_a_schema_forces_is_drafted(tmp_path: Path) -> None:
    body = {"prompt": "a king", "max_tokens": 9, "seed": 1, "choices": ["thereoncewasaking"]}
    body |= {"logprobs": 0, "token_details": True}
    for name, write in (("llama", write_toy), ("gemma3", write_gemma3)):
        path = write(tmp_path / f"{name}.gguf", vocab="bytes")
        more = ("-m", path, "-np", "4", "-c", "2048", "--draft", "auto")
        with (
            Command(*COMMAND, *more) as command,
            httpx.Client(base_url=command.url, timeout=120) as api,
        ):
            assert api.get("/v1/models").json()["data"][0]["max_model_len"] == 2048
            answer = api.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert "forced" in answer.json()["choices"][0]["logprobs"]["sources"]


def test_the_first_four_lines_say_where_for_whom_and_what_to_paste() -> None:
    command = [sys.executable, "-m", "llamabranch.cli", *COMMAND, "-np", "4", "--port", "0"]
    command += ["-m", str(TARGET)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        process.terminate()
    where = re.match(r"tale-target\S* on (http://127\.0\.0\.1:\d+): ", lines[0])
    assert where is not None, lines
    url, texts = where[1], "4 texts of 1,024 tokens, or 1 of 4,096"
    assert lines[0].endswith(f": {texts}\n")
    assert lines[1] == f"export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY=none\n"
    assert lines[2] == f"export ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN=none\n"
    assert lines[3].startswith(f"the page: {url}/#")


@no_sigterm
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_lets_streams_end(number: int) -> None:
    command = Command(*COMMAND, "--limit", "alias=tale")
    assert command.said["model"] == "tale"
    assert command.said["link"].startswith(f"{command.url}/#")
    key = {"Authorization": f"Bearer {command.said['key']}"}
    assert httpx.get(f"{command.url}/requests", headers=key).json()["requests"] == []
    body = {"prompt": "Once", "max_tokens": 80, "ignore_eos": True, "stream": True, "seed": 1}
    with (
        httpx.Client(base_url=command.url, timeout=120) as api,
        api.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = (line for line in answer.iter_lines() if line)
        received = [next(lines)]
        command.process.send_signal(number)
        with contextlib.suppress(httpx.TransportError):  # it has ended already, or ends now
            assert httpx.get(f"{command.url}/health").status_code in (200, 503)
        received += lines
    assert received[-1] == "data: [DONE]"
    assert json.loads(received[-2][6:])["choices"][0]["finish_reason"] == "length"
    code, errors = command.end()
    assert code == 0, errors
    assert "Traceback" not in errors


@no_sigterm
def test_second_signal_ends_streams_with_an_error() -> None:
    command = Command(*COMMAND)
    body = {**ENDLESS, "n": 8, "stream": True}
    with (
        httpx.Client(base_url=command.url, timeout=120) as api,
        api.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        for _ in range(2):
            command.process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        *_, end = lines
    assert "shutting down" in end or end == "data: [DONE]"
    code, errors = command.end()
    assert code == 0, errors


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (lb.errors.CapacityError("full"), 503, "overloaded_error"),
        (ValueError(), 500, "api_error"),
    ],
)
def test_stream_that_fails_ends_with_the_error(
    server: Serving,
    api: Any,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    code: int,
    kind: str,
) -> None:
    steps = server.engine.steps

    async def failing(*requests: lb.Request, **more: Any) -> Any:
        async for events in steps(*requests, **more):
            yield events
            raise error

    monkeypatch.setattr(server.engine, "steps", failing)
    with api.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as answer:
        *_, end = (line for line in answer.iter_lines() if line)
    assert json.loads(end[6:])["error"]["code"] == code
    asked = {"messages": [HELLO], "max_tokens": 9, "stream": True}
    with api.stream("POST", "/v1/messages", json=asked) as answer:
        *_, name, end = (line for line in answer.iter_lines() if line)
    assert name == "event: error"
    assert (json.loads(end[6:])["type"], json.loads(end[6:])["error"]["type"]) == ("error", kind)


@pytest.mark.parametrize(
    ("more", "message"),
    [(("--host", "0.0.0.0"), "--api-key"), (("--limit", "max_body=much"), "max_body"),
     (("--port", "70000"), "65535"), (("-m", "none.gguf"), "none.gguf")],
)  # fmt: skip
def test_command_refuses_what_cannot_be(more: tuple[str, ...], message: str) -> None:
    result = run("serve", *more)
    assert result.exit_code == 2
    assert message in result.stderr


def test_model_that_does_not_load_ends_the_server() -> None:
    def fails() -> lb.AsyncEngine:
        raise lb.errors.ModelLoadError("no such model")

    with pytest.raises(lb.errors.ModelLoadError, match="no such model"):
        Server(fails, ServeSettings(port=0)).run()


def test_health_and_requests_wait_for_the_model() -> None:
    go = threading.Event()

    def slow() -> lb.AsyncEngine:
        go.wait(60)
        return bundled_engine()

    running = Serving(slow)
    running.thread.start()
    with httpx.Client(base_url=running.url, timeout=60) as api:
        for path in ("/health", "/v1/models"):
            answer = api.get(path)
            assert answer.status_code == 503
            assert "loaded" in answer.json()["error"]["message"]
        go.set()
        wait_until(lambda: api.get("/health").status_code == 200)
    running.__exit__(None, None, None)
