"""A page on a thread of this process, over the bundled model, and a script that calls it."""

from __future__ import annotations

import itertools
import json
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

import llamabranch as lb
from llamabranch.serve import ServeSettings

pytest.importorskip("starlette", reason="needs the extra page")
pytest.importorskip("uvicorn", reason="needs the extra page")
pytest.importorskip("msgspec", reason="needs the extra page")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from llamabranch.loom import Loom, front_of  # noqa: E402
from llamabranch.serve.server import Server  # noqa: E402

__all__ = ["DRAFT", "TARGET", "Paged", "drafted"]

TARGET = Path(lb.__file__).parent / "data" / "tale-target-q8_0.gguf"
DRAFT = Path(lb.__file__).parent / "data" / "tale-draft-q8_0.gguf"
WAIT_S = 120


def drafted() -> lb.Drafter:
    """Return a drafter over the bundled draft model."""
    return lb.ModelDrafter(lb.load(DRAFT, n_ctx=1024, n_seq_max=12, n_threads=1))


class Paged:
    """A page over a file in ``folder``; leaving the block ends it and checks what is left.

    Args:
        folder: where the file and the settings are.
        drafter: makes what drafts.
        partner: the model to compare with.
        name: of the file.
        n_ctx: of the context.
    """

    def __init__(
        self,
        folder: Path,
        *,
        drafter: Callable[[], lb.Drafter | None] = lambda: None,
        partner: Path | None = None,
        name: str = "tale.loom.jsonl",
        read_only: bool = False,
        n_ctx: int = 1024,
        target: Path = TARGET,
        waits: bool = True,
    ) -> None:
        self._ready = threading.Event()
        self.may_load = threading.Event()
        self.may_load.set()
        self.contexts: list[lb.Context] = []
        self.drafter: lb.Drafter | None = None
        self.failure: BaseException | None = None
        self._waits = waits

        def open_engine() -> lb.AsyncEngine:
            self.may_load.wait(WAIT_S)
            ctx = lb.load(target, n_ctx=n_ctx, n_seq_max=12, n_threads=1, prefix_cache=True)
            self.contexts.append(ctx)
            if partner is not None:
                self.contexts.append(
                    lb.load(partner, n_ctx=n_ctx, n_seq_max=4, n_threads=1, kv_type=ctx.kv_type)
                )
            self.drafter = drafter()
            config = lb.SpeculativeConfig(draft_k=4) if self.drafter is not None else None
            return lb.AsyncEngine(ctx, self.drafter, config, max_tokens=None, parallel=4)

        def ready(*_: object) -> None:
            self.loom.ready()
            self._ready.set()

        settings = ServeSettings(port=0, shutdown_timeout_s=0.0)
        self.server = Server(open_engine, settings, ready, print)
        self.loom = Loom(
            folder / name, self.server.port, lambda: self.server.service,
            lambda: self.contexts[1] if len(self.contexts) > 1 else None,
            read_only=read_only, settings_file=folder / "config" / "page.json",
        )  # fmt: skip
        self.server.front = front_of(self.loom)
        self.url = self.server.url
        self.client = httpx.Client(
            base_url=self.url,
            timeout=WAIT_S,
            headers={"Authorization": f"Bearer {self.loom.guard.key}"},
        )
        self.events: list[tuple[str, Any]] = []
        self._news = threading.Condition()
        self._numbers = itertools.count()
        self._name = uuid.uuid4().hex[:8]
        self._thread = threading.Thread(target=self._run, name="page")
        self._listener = threading.Thread(target=self._listen, daemon=True)

    def _run(self) -> None:
        try:
            self.server.run()
        except BaseException as error:
            self.failure = error
        self._ready.set()

    def __enter__(self) -> Paged:
        self._thread.start()
        if self._waits:
            assert self._ready.wait(WAIT_S)
            if self.failure is not None:
                raise self.failure
            self._listener.start()
            self.wait(lambda: bool(self.events))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.may_load.set()
        assert self._ready.wait(WAIT_S)
        self.server.stop()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self.client.close()
        for ctx in self.contexts:
            assert ctx.n_seq_free == ctx.n_seq_max
            ctx.audit()
            ctx.close()
        if self.drafter is not None:
            for ctx in self.drafter.contexts:
                ctx.close()
        if kind is None and self.failure is not None:
            raise self.failure

    # -- events ----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            with self.client.stream("GET", "/loom/events?since=old", timeout=None) as answer:
                name = ""
                for line in answer.iter_lines():
                    field, _, value = line.partition(": ")
                    if field == "event":
                        name = value
                    elif field == "data":
                        with self._news:
                            self.events.append((name, json.loads(value)))
                            self._news.notify_all()
        except httpx.HTTPError:
            pass

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait until something is so; it is looked at after each event."""
        with self._news:
            assert self._news.wait_for(until, WAIT_S), self.events[-3:]

    def of(self, name: str, **fields: object) -> list[Any]:
        """Return the events of a kind that have these fields."""
        return [
            data
            for kind, data in list(self.events)
            if kind == name and all(data.get(key) == value for key, value in fields.items())
        ]

    def finish(self, job: str) -> Any:
        """Wait for the end of a job and return it."""
        self.wait(lambda: any(each["state"] != "running" for each in self.of("job", id=job)))
        return next(each for each in self.of("job", id=job) if each["state"] != "running")

    # -- requests --------------------------------------------------------------------------------------

    def do(self, op: str, status: int | None = None, **fields: object) -> Any:
        """Do an operation and return its answer, which has this status."""
        body = {"op": op, "cid": f"{self._name}-{next(self._numbers)}", **fields}
        answer = self.client.post("/loom/do", json=body)
        if status is None:
            assert answer.status_code in (200, 202), answer.text
        else:
            assert answer.status_code == status, answer.text
        return answer.json()

    def done(self, op: str, **fields: object) -> Any:
        """Do an operation, wait for its job, and return the answer; the job must not have failed."""
        answer = self.do(op, None, **fields)
        job = self.finish(answer["job"])
        assert job["state"] == "done", job
        return answer | {"ended": job}

    def type(self, text: str, node: str | None = None, **fields: object) -> Any:
        """Type a text, wait until it is scored, and return its node."""
        return self.done("type", node=node, text=text, **fields)["node"]

    def doc(self) -> Any:
        """Return the document."""
        return self.client.get("/loom/doc").json()

    def tokens(self, node: str, **more: object) -> Any:
        """Return the tokens of a node, those of all its owners in one."""
        query = {"node": node, **{key: str(value) for key, value in more.items()}}
        answer = self.client.get("/loom/tokens", params=query)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        parts = found.pop("parts")
        for name in ("ids", "lp", "h", "rk", "text", *(("top",) if "top" in more else ())):
            found[name] = [value for part in parts for value in part[name]]
        return found | {"src": "".join(part["src"] for part in parts)}

    def text(self, node: str) -> str:
        """Return the text of a node, from its root on."""
        found = self.client.get("/loom/export", params={"format": "markdown", "node": node})
        assert found.status_code == 200, found.text
        return str(found.text)
