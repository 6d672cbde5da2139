"""Who may call: names of the host, origins of web pages, API keys. ASGI middleware."""

from __future__ import annotations

import hmac
from ipaddress import ip_address
from urllib.parse import urlsplit

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import HttpError
from .settings import ServeSettings, is_loopback

__all__ = ["Guard"]

_PUBLIC = {"/health", "/v1/health"}  # without a key
_METHODS = b"GET, POST, DELETE, OPTIONS"


class Guard:
    """Refuses requests that a web page of another site, or somebody without a key, has sent.

    A page can make a browser send a request to any address, and through DNS rebinding read the answer:
    the name of the host tells these, so it is compared as a whole. An address needs no name.

    Args:
        app: what answers the others.
        settings: hosts, origins and keys.
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app = app
        self._settings = settings
        self._hosts = {"localhost", settings.host.lower(), *map(str.lower, settings.allowed_hosts)}
        self._keys = [key.encode() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or let the application do so."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given: dict[bytes, bytes] = dict(scope["headers"])
        origin = given.get(b"origin")
        allowed = origin is not None and self._allows(origin.decode("latin-1"))
        cors = _cors(origin) if allowed and origin is not None else []

        async def send_with_cors(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *cors]
            await send(message)

        error = self._error(scope, given, cross=origin is not None and not allowed)
        if error is not None:
            await _answer(send_with_cors, error.status, msgspec.json.encode(error.body))
        elif scope["method"] == "OPTIONS":
            await _answer(send_with_cors, 200, b"")
        else:
            await self._app(scope, receive, send_with_cors if cors else send)

    def _error(self, scope: Scope, given: dict[bytes, bytes], *, cross: bool) -> HttpError | None:
        host = given.get(b"host", b"").decode("latin-1")
        if not self._knows_host(host):
            return HttpError(403, f"unknown host {host[:100]!r}: --allowed-host lets it pass")
        if scope["method"] == "OPTIONS":  # a browser asks first, without a key
            return None
        if cross and not _same(given[b"origin"].decode("latin-1"), host):
            return HttpError(403, "pages of this origin may not call: --allow-origin lets them")
        if self._keys and scope["path"] not in _PUBLIC and not self._has_key(given):
            return HttpError(401, "the API key is missing or wrong: Authorization: Bearer KEY")
        return None

    def _knows_host(self, host: str) -> bool:
        name = _without_port(host).lower()
        if "*" in self._hosts or name in self._hosts:
            return True
        try:
            ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True

    def _allows(self, origin: str) -> bool:
        allowed = self._settings.allow_origins
        if "*" in allowed or origin in allowed:
            return True
        if "localhost" not in allowed:
            return False
        try:
            name = urlsplit(origin).hostname
        except ValueError:
            return False
        return name is not None and is_loopback(name)

    def _has_key(self, given: dict[bytes, bytes]) -> bool:
        scheme, _, key = given.get(b"authorization", b"").partition(b" ")
        sent = key.strip() if scheme.lower() == b"bearer" else given.get(b"x-api-key", b"")
        found = [hmac.compare_digest(sent, each) for each in self._keys]  # all, in equal time
        return any(found)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def _same(origin: str, host: str) -> bool:
    return origin.partition("://")[2] == host


def _cors(origin: bytes) -> list[tuple[bytes, bytes]]:
    return [
        (b"access-control-allow-origin", origin),
        (b"vary", b"Origin"),
        (b"access-control-allow-credentials", b"true"),
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-allow-headers", b"*"),
    ]


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [
        (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
    ]  # fmt: skip
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
