"""A real server with the bundled model: in a thread of this process, or as a command of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from toys import CHAT_TEMPLATE

import llamabranch as lb
from llamabranch.serve import ServeSettings

for name in ("starlette", "uvicorn", "msgspec"):
    pytest.importorskip(name, reason="needs the extra serve")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from llamabranch.serve.server import Server  # noqa: E402

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "TARGET", "WAIT_S", "Command", "Serving", "bundled_engine", "frames", "httpx", "post",
    "record_schema", "serving",
]  # fmt: skip

TARGET = Path(lb.__file__).parent / "data" / "tale-target-q8_0.gguf"
WAIT_S = 120


def record_schema(age: dict[str, Any], most: int) -> dict[str, Any]:
    """Return a schema of records: an age, and a name of at most so many characters."""
    name = {"type": "string", "maxLength": most}
    schema = {"type": "object", "properties": {"name": name, "age": age}}
    return {**schema, "required": ["name", "age"], "additionalProperties": False}


def bundled_engine(
    *,
    n_ctx: int = 1024,
    parallel: int = 4,
    n_seq_max: int | None = None,
    drafter: Callable[[], lb.Drafter | None] = lambda: None,
    config: lb.SpeculativeConfig | None = None,
    max_waiting: int | None = 256,
    kv_unified: bool = True,
    model: Path = TARGET,
    chat_template: str | None = CHAT_TEMPLATE,
    exact: bool = True,
    **more: Any,
) -> lb.AsyncEngine:
    """Return an engine on the bundled target: exact, with a prefix cache, on one thread."""
    ctx = lb.load(
        model, n_ctx=n_ctx, n_seq_max=n_seq_max or parallel, n_threads=1, prefix_cache=True,
        chat_template=chat_template, kv_unified=kv_unified, exact=exact, **more,
    )  # fmt: skip
    return lb.AsyncEngine(
        ctx, drafter(), config, max_tokens=None, max_waiting=max_waiting, parallel=parallel
    )


class Serving:
    """A running server. Leaving the block ends it, closes its contexts and checks what is left."""

    def __init__(self, open_engine: Callable[[], lb.AsyncEngine], **settings: Any) -> None:
        self.lines: list[str] = []
        self.contexts: list[lb.Context] = []
        self.failure: BaseException | None = None
        self._ready = threading.Event()
        self.settings = ServeSettings(port=0, **{"shutdown_timeout_s": 0.0, **settings})
        self.server = Server(open_engine, self.settings, self.loaded, self.lines.append)
        self.url = self.server.url
        self.thread = threading.Thread(target=self._run, name="serving")

    def loaded(self, *_: object) -> None:
        """Note that the model is there."""
        self.contexts.append(self.ctx)
        self._ready.set()

    def _run(self) -> None:
        try:
            self.server.run()
        except BaseException as error:
            self.failure = error
        self._ready.set()

    @property
    def engine(self) -> lb.AsyncEngine:
        service = self.server.service
        assert service is not None
        return service.engine

    @property
    def ctx(self) -> lb.Context:
        return self.engine.engine.target

    def client(self, **more: Any) -> Any:
        return httpx.Client(base_url=self.url, timeout=WAIT_S, **more)

    def wait_ready(self) -> None:
        """Wait until the model is there; raise what loading it has raised."""
        assert self._ready.wait(WAIT_S)
        if self.failure is not None:
            raise self.failure

    def __enter__(self) -> Self:
        self.thread.start()
        self.wait_ready()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.server.stop()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        for ctx in self.contexts:
            assert ctx.n_seq_free == ctx.n_seq_max
            ctx.audit()
            ctx.close()
        if kind is None and self.failure is not None:
            raise self.failure


@contextmanager
def serving(engine: Any = None, **settings: Any) -> Iterator[Serving]:
    """Run a server on the bundled model; ``engine``: options of the engine."""
    with Serving(partial(bundled_engine, **(engine or {})), **settings) as running:
        yield running


def post(api: Any, status: int = 200, path: str = "/v1/completions", /, **body: Any) -> Any:
    """Send a body; return the answer, which has this status."""
    answer = api.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def frames(api: Any, path: str = "/v1/completions", /, **body: Any) -> list[Any]:
    """Return the events of a stream."""
    with api.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines]


class Command:
    """A command that serves, in another process. Leaving the block ends it.

    ``said`` is its first line, as JSON.
    """

    def __init__(self, name: str, *arguments: object, **environment: str) -> None:
        command = [sys.executable, "-m", "llamabranch.cli", name, "--json", "--port", "0"]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command, *map(str, arguments)], env={**os.environ, **environment},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.said = json.loads(self.process.stdout.readline() or "{}")
        self.url: str = self.said.get("url", "")

    def end(self, number: int | None = None) -> tuple[int, str]:
        """Send a signal; return the exit code and standard error."""
        if number is not None:
            self.process.send_signal(number)
        self.process.communicate(timeout=WAIT_S)
        with self._errors as file:
            file.seek(0)
            return self.process.returncode, file.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._errors.closed:
            self.process.terminate()
            self.end()
