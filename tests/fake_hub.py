"""A hub for tests: a server on this machine that answers as the Hugging Face hub does."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest


def empty_caches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set empty caches below ``folder``; remove packages, the token and settings of downloads."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "LLAMABRANCH_DOWNLOAD", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    # HF_HOME is where a token would be.
    places = {
        "HOME": "home",
        "HF_HOME": "home/hf",
        "HF_HUB_CACHE": "hub",
        "LLAMABRANCH_CACHE": "ours",
    }
    for name, place in places.items():
        monkeypatch.setenv(name, str(folder / place))
    monkeypatch.setattr("llamabranch.hub.caches.PACKAGES", {})
    return folder


@dataclass
class FakeHub:
    """What the server has and what it was asked.

    Answers to ``faulty`` requests ("api", "head" or "get") have the ``status`` and the error code
    RepoNotFound if it is 404. A file breaks off after ``cut`` bytes, and its second half waits for
    ``gate``.
    """

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    faulty: str = ""
    status: int = 0
    cut: int | None = None
    gate: threading.Event | None = None
    requests: list[str] = field(default_factory=list)  # "GET /path"
    sent: int = 0  # bytes of files

    def add(self, repository: str, files: dict[str, bytes]) -> str:
        """Publish files; return the commit, which is made from their names and bytes."""
        self.repositories[repository] = files
        return _commit(files)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer("head")

    def do_GET(self) -> None:
        self._answer("get")

    def _answer(self, method: str) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        is_api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models").split("/", 5)
        repository, revision = "/".join(parts[1:3]), parts[4] if parts[4:] else "main"
        files = self.hub.repositories.get(repository)
        file = None if files is None or is_api else files.get(parts[-1])
        if ("api" if is_api else method) == self.hub.faulty:
            self._error(self.hub.status)
        elif files is None or revision not in ("main", _commit(files)):
            self._error(404)
        elif is_api:
            siblings = [{"rfilename": name, "size": len(files[name])} for name in files]
            body = {"id": repository, "sha": _commit(files), "siblings": siblings}
            self._send(200, {"Content-Type": "application/json"}, json.dumps(body).encode())
        elif file is None:
            self._error(404)
        else:
            etag = hashlib.sha256(file).hexdigest()
            self._send(200, {"X-Repo-Commit": _commit(files), "ETag": f'"{etag}"'}, file)

    def _error(self, status: int) -> None:
        code = {"X-Error-Code": "RepoNotFound"} if status == 404 else {}
        self._send(status, {**code, "X-Error-Message": "because of the weather"}, b"")

    def _send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        is_file = "ETag" in headers
        half = len(body) // 2
        if is_file and self.hub.cut is not None:  # the connection breaks
            self.close_connection = True
            half, body = self.hub.cut, body[: self.hub.cut]
        try:
            self.wfile.write(body[:half])
            self.wfile.flush()
            if is_file and self.hub.gate is not None:
                self.hub.gate.wait(30)
            self.wfile.write(body[half:])
        except OSError:  # the client has gone
            self.close_connection = True
        self.hub.sent += len(body) if is_file else 0


def _commit(files: Mapping[str, bytes]) -> str:
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


@contextmanager
def running_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Run a fake hub until the block ends, with empty caches; skip the test without huggingface_hub."""
    pytest.importorskip("huggingface_hub", reason="downloads need huggingface_hub")
    empty_caches(folder, monkeypatch)
    # huggingface_hub reads this when it is imported, and a test of evaluation may have been offline then.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
