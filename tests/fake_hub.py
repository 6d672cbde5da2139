"""A hub for tests: two hosts on this machine that answer as the Hugging Face hub and its CDN do.

The hub is 127.0.0.1, the CDN localhost: a redirect between them leaves the host, as on the real one.
Files get the headers of LFS (``X-Linked-Etag`` is the SHA-256). `faults` makes the next answers go wrong.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_" + "a" * 34


def empty_caches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set empty caches below ``folder``; remove packages, the token and settings of downloads."""
    for name in (
        *("HF_TOKEN", "HF_HUB_OFFLINE", "HUGGINGFACE_HUB_CACHE", "LLAMABRANCH_DOWNLOAD"),
        *("MODEL_ENDPOINT", "XDG_CACHE_HOME"),
    ):
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
class Fault:
    """A wrong answer: to ``api``, ``head`` or ``get`` requests, ``times`` times.

    A ``status`` with an ``X-Error-Code``; an answer that is ``cut`` after so many bytes; a complete
    answer that is ``short`` and has only half of the file; or one with ``wrong`` bytes, of which one is
    changed.
    """

    where: str
    status: int = 0
    code: str = ""
    message: str = ""
    cut: int | None = None
    short: bool = False
    wrong: bool = False
    times: int = 1_000_000


@dataclass
class Repository:
    """Files of one commit, and the commit of each revision."""

    files: dict[str, bytes]
    commit: str
    gated: bool = False
    private: bool = False
    names: list[str] | None = None  # a false listing, if there is one


@dataclass
class FakeHub:
    """What the two servers share; `endpoint` is for ``HF_ENDPOINT``."""

    endpoint: str = ""
    cdn: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str, Mapping[str, str]]] = field(default_factory=list)
    sent: int = 0  # requests for bytes of files
    gate: threading.Event | None = None  # the second half of a file waits for this
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, repository: str, files: dict[str, bytes], **more: Any) -> Repository:
        """Publish files under a commit made from their names and bytes."""
        listed = sorted((name, _sha(data)) for name, data in files.items())
        digest = hashlib.sha1(repr(listed).encode()).hexdigest()
        self.repositories[repository] = added = Repository(files, digest, **more)
        return added

    def fault(self, where: str) -> Fault | None:
        """Return the fault of the next answer to such a request, and count it."""
        with self.lock:
            for fault in self.faults:
                if fault.where == where and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None

    def sendings(self) -> list[Mapping[str, str]]:
        """Return the headers of the requests for the bytes of files."""
        return [h for _, h in self.of("GET", "/resolve/") if h["Host"].startswith("localhost")]

    def of(self, method: str, part: str = "") -> list[tuple[str, Mapping[str, str]]]:
        """Return (path, headers) of a method's requests whose path contains this text."""
        return [(path, h) for m, path, h in self.requests if m == method and part in path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub
    is_cdn = False

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer("head")

    def do_GET(self) -> None:
        self._answer("get")

    def _answer(self, method: str) -> None:
        path = unquote(urlsplit(self.path).path)
        with self.hub.lock:
            self.hub.requests.append((self.command, self.path, dict(self.headers)))
        where = "api" if path.startswith("/api/") else method
        fault = self.hub.fault(where)
        if fault is not None and fault.status:
            self._error(fault.status, fault.code, fault.message)
        elif where == "api":
            self._api(path)
        else:
            self._file(path, fault)

    def _error(self, status: int, code: str = "", message: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        set_headers = {name: value for name, value in headers.items() if value}
        self._send(status, set_headers, json.dumps({"error": message or code}).encode())

    def _repository(self, name: str, revision: str) -> Repository | None:
        """Return the requested repository, or send the error."""
        repository = self.hub.repositories.get(name)
        may_see = self.is_cdn or self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or (repository.private and not may_see):
            self._error(401 if repository is None else 404, "RepoNotFound", "Repository not found")
        elif repository.gated and not may_see and "/resolve/" in self.path:
            self._error(
                401, "GatedRepo", "Access to model is restricted. You must be authenticated"
            )
        elif revision not in ("main", repository.commit):
            self._error(404, "RevisionNotFound", "Invalid rev id")
        else:
            return repository
        return None

    def _api(self, path: str) -> None:
        parts = path.split("/")
        if parts[2] != "models":  # `hf` asks for more
            self._error(404)
            return
        name = "/".join(parts[3:5])
        repository = self._repository(name, parts[6] if parts[5:6] == ["revision"] else "main")
        if repository is None:
            return
        siblings = []
        for file in repository.names or list(repository.files):
            data = repository.files.get(file, b"hostile")
            lfs = {"sha256": _sha(data), "size": len(data), "pointerSize": 134}
            siblings.append({"rfilename": file, "size": len(data), "lfs": lfs})
        body = {
            "id": name,
            "modelId": name,
            "sha": repository.commit,
            "siblings": siblings,
            "tags": [],
        }
        self._send(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def _file(self, path: str, fault: Fault | None) -> None:
        owner, name, _, revision, *rest = path.strip("/").split("/")
        repository = self._repository(f"{owner}/{name}", revision)
        if repository is None:
            return
        data = repository.files.get("/".join(rest))
        if data is None:
            self._error(404, "EntryNotFound", "Entry not found")
        elif self.is_cdn:
            self._bytes(data, fault or Fault("get"))
        else:
            headers = {
                "X-Repo-Commit": repository.commit,
                "ETag": f'"{_sha(data)[:32]}"',
                "X-Linked-Etag": f'"{_sha(data)}"',
                "X-Linked-Size": str(len(data)),
                "Location": f"{self.hub.cdn}{self.path}",
            }
            self._send(302, headers, b"")

    def _bytes(self, data: bytes, fault: Fault) -> None:
        status, begin, headers = 200, 0, {"Accept-Ranges": "bytes"}
        if fault.short:
            data = data[: len(data) // 2]
        if fault.wrong:
            at = len(data) // 2
            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        byte_range = self.headers.get("Range")
        if byte_range:
            status, begin = 206, int(byte_range.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self._send(status, headers, data[begin:], only=fault.cut)

    def _send(
        self, status: int, headers: Mapping[str, str], body: bytes, only: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if only is not None:  # the connection breaks
            self.close_connection = True
            body = body[:only]
        half = len(body) // 2 if self.hub.gate is not None and self.is_cdn else len(body)
        try:
            self.wfile.write(body[:half])
            self.wfile.flush()
            if half < len(body) and self.hub.gate is not None:
                self.hub.gate.wait(30)
                self.wfile.write(body[half:])
        except OSError:  # the client has gone
            self.close_connection = True
        if self.is_cdn:
            self.hub.sent += len(body)


@lru_cache(maxsize=64)
def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextmanager
def serve() -> Iterator[FakeHub]:
    """Run a fake hub until the block ends."""
    hub = FakeHub()
    servers = []
    for name in ("127.0.0.1", "localhost"):
        handler = type("Handler", (_Handler,), {"hub": hub, "is_cdn": name == "localhost"})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
    hub.endpoint, hub.cdn = (
        f"http://{name}:{server.server_port}"
        for name, server in zip(("127.0.0.1", "localhost"), servers, strict=True)
    )
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
