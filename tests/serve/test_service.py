"""The service of docs/service.md: eight clients, of which two leave, and what is left after them."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from decodes import hooked
from serving import TARGET, WAIT_S, httpx
from toys import CHAT_TEMPLATE

import llamabranch as lb

pytest.importorskip("fastapi", reason="fastapi is not installed")
uvicorn: Any = pytest.importorskip("uvicorn", reason="needs the extra serve")

PAGE = Path(__file__).parents[2] / "docs" / "service.md"
(PROGRAM,) = re.findall(r"^```py\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
N, N_LEAVING = 8, 2


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, lb.AsyncEngine]]:
    """Run the program as uvicorn does, with the bundled model; yield its address and its engine."""
    load = lb.load

    def load_bundled(_: str, **options: Any) -> lb.Context:
        return load(TARGET, chat_template=CHAT_TEMPLATE, n_threads=1, **options)

    def endless(ctx: lb.Context, **options: Any) -> lb.AsyncEngine:
        sampling = lb.SamplingParams(logit_bias=dict.fromkeys(ctx.model.eog_tokens, -1e9))
        return lb.engine.AsyncEngine(ctx, sampling=sampling, **{**options, "max_tokens": 128})

    monkeypatch.setattr(lb, "load", load_bundled)
    monkeypatch.setattr(lb, "AsyncEngine", endless)
    module = ModuleType("service")
    exec(compile(PROGRAM, str(PAGE), "exec"), module.__dict__)
    app = module.__dict__["app"]
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    ready = threading.Event()
    started: Callable[..., Any] = server.startup

    async def startup(*arguments: Any, **named: Any) -> None:
        await started(*arguments, **named)
        ready.set()

    server.startup = startup
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert ready.wait(WAIT_S)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", app.state.engine
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
    assert not thread.is_alive() and app.state.engine.engine.target.closed


class Gate:
    """Holds the engine's decodes after a hundred, until the clients that leave have been noticed.

    So nothing depends on which of the threads is fast.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: lb.AsyncEngine) -> None:
        self._n_decodes, self._n_aborted, self._opens = 0, 0, threading.Event()
        self._engine, self._abort = engine.engine, engine.engine.abort
        monkeypatch.setattr(engine.engine, "abort", self.abort)

    def decode(self, decode: Callable[[int], int], n: int) -> int:
        while len(self._engine.client.jobs) < N_LEAVING and not self._opens.is_set():
            time.sleep(0.001)
        self._n_decodes += 1
        if self._n_decodes > 100:
            self._opens.wait(WAIT_S)
        return decode(n)

    def abort(self, name: str) -> None:
        self._abort(name)
        self._n_aborted += 1
        if self._n_aborted == N_LEAVING:
            self._opens.set()


async def ask(url: str, engine: lb.AsyncEngine) -> list[str]:
    """Eight clients ask at once, two of them leave; return what the other six have read."""
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as api:
        read, there = asyncio.Semaphore(0), asyncio.Event()

        async def leave(i: int) -> None:
            question = {"text": f"Tell me of king {i}, and of all that he did."}
            async with api.stream("POST", "/answer", json=question) as answer:
                pieces = answer.aiter_text()  # to drop it would end the answer
                assert await anext(pieces)
                read.release()
                await there.wait()

        async def stay(i: int) -> str:
            question = {"text": f"Tell me of queen {i}."}
            return str((await api.post("/answer", json=question)).raise_for_status().text)

        leaving = [asyncio.ensure_future(leave(i)) for i in range(N_LEAVING)]
        for _ in leaving:
            await read.acquire()
        staying = [asyncio.ensure_future(stay(i)) for i in range(N - N_LEAVING)]
        while len(engine.engine.client.jobs) < N:
            await asyncio.sleep(0.001)
        there.set()
        texts = await asyncio.gather(*staying)
        await asyncio.gather(*leaving)
        return texts


def test_eight_clients_ask_and_two_leave(
    service: tuple[str, lb.AsyncEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(PROGRAM.strip().splitlines()) <= 36
    url, engine = service
    ctx, gate = engine.engine.target, Gate(monkeypatch, engine)
    assert ctx.usage().cells_used == 0
    with hooked(ctx, gate.decode):
        texts = asyncio.run(ask(url, engine))
    assert all(texts)
    ended = [record.finish_reason for record in ctx.requests]
    assert len(ended) == N and ended.count("cancelled") == N_LEAVING
    usage = ctx.usage()  # what is cached gives its cells to whoever needs them
    assert (ctx.n_seq_free, usage.cells_used) == (ctx.n_seq_max, 0) != (0, usage.cells_cached)
    assert not engine.engine.has_unfinished()
    ctx.audit()
    refused = httpx.post(f"{url}/answer", json={"text": "word " * 20_000}, timeout=WAIT_S)
    assert refused.status_code == 400 and "n_ctx" in refused.json()["hint"]
