"""A real server on a thread of this process, with the bundled model and a chat template."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from toys import CHAT_TEMPLATE

import llamabranch as lb
from llamabranch.serve import ServeSettings

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
pytest.importorskip("msgspec", reason="needs the extra serve")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from llamabranch.serve.server import Server  # noqa: E402

__all__ = ["Serving", "bundled_engine", "serving"]

TARGET = Path(lb.__file__).parent / "data" / "tale-target-q8_0.gguf"


def bundled_engine(
    *,
    n_ctx: int = 1024,
    parallel: int = 4,
    drafter: Callable[[], lb.Drafter | None] = lambda: None,
    max_waiting: int | None = 256,
    kv_unified: bool = True,
) -> lb.AsyncEngine:
    """Return an engine on the bundled target: batch-invariant, with a prefix cache, on one thread."""
    ctx = lb.load(
        TARGET, n_ctx=n_ctx, n_seq_max=parallel, n_threads=1, prefix_cache=True,
        chat_template=CHAT_TEMPLATE, kv_unified=kv_unified,
    )  # fmt: skip
    return lb.AsyncEngine(
        ctx, drafter(), max_tokens=None, max_waiting=max_waiting, parallel=parallel
    )


class Serving:
    """A running server; leaving the block ends it, closes its model and checks what is left."""

    def __init__(self, open_engine: Callable[[], lb.AsyncEngine], **settings: Any) -> None:
        self.lines: list[str] = []
        self._ready = threading.Event()
        self.settings = ServeSettings(port=0, **{"shutdown_timeout_s": 0.0, **settings})
        self.server = Server(
            open_engine, self.settings, lambda *_: self._ready.set(), self.lines.append
        )
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="serving")

    def _run(self) -> None:
        try:
            self.server.run()
        except BaseException as error:
            self.failure = error
            self._ready.set()

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def engine(self) -> lb.AsyncEngine:
        service = self.server.service
        assert service is not None
        return service.engine

    @property
    def ctx(self) -> lb.Context:
        return self.engine.engine.target

    def client(self, **more: Any) -> Any:
        return httpx.Client(base_url=self.url, timeout=120, **more)

    def __enter__(self) -> Serving:
        self.thread.start()
        assert self._ready.wait(120)
        if self.failure is not None:
            raise self.failure
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ctx = self.ctx
        self.server.stop()
        self.thread.join(120)
        assert not self.thread.is_alive()
        assert ctx.n_seq_free == ctx.n_seq_max
        ctx.audit()
        ctx.close()
        if kind is None and self.failure is not None:
            raise self.failure


@contextmanager
def serving(**settings: Any) -> Iterator[Serving]:
    """Run a server on the bundled model."""
    with Serving(bundled_engine, **settings) as running:
        yield running
