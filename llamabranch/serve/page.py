"""Pages for a browser: their files, the links that open them, and the browser's security policy."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from http.cookies import CookieError, SimpleCookie
from importlib.resources import files
from time import monotonic
from typing import TYPE_CHECKING

from .errors import HttpError
from .messages import json_of, reply
from .security import sends_key

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Scope

_KINDS = {"js": "text/javascript", "css": "text/css", "html": "text/html"}
_LINK_S = 300.0
_NAME = re.compile(r"[a-z][a-z0-9_-]*\.(js|css|html)")
TRUSTED = "require-trusted-types-for 'script'; trusted-types 'none'"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
) + TRUSTED
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


class Files:
    """The files of pages, in the folders ``app`` of packages; the first that has a file counts.

    Args:
        packages: the packages.
        pages: the HTML files, by their paths; all others are at ``/app/NAME``.
    """

    def __init__(self, *packages: str, pages: Mapping[str, str]) -> None:
        self.pages = pages
        self._folders = [files(package) / "app" for package in packages]

    def read(self, name: str) -> str:
        """Return a file; "" if it does not exist."""
        found = [folder / name for folder in self._folders if (folder / name).is_file()]
        return found[0].read_text("utf-8") if found else ""

    def at(self, path: str) -> tuple[bytes, str] | None:
        """Return the file at the path of a request, and its type; None if it does not exist."""
        name = self.pages.get(path) or path.removeprefix("/app/")
        match = _NAME.fullmatch(name)
        text = self.read(name) if match else ""
        return (text.encode(), _KINDS[match[1]]) if match and text else None


class Page:
    """A page, and who may use it: a browser that came by a link, or a script with the key.

    Its files hold no data, so every program on this machine may read them.

    Args:
        port: where the page is served.
        files: its files.
        keys: further keys of scripts.

    Attributes:
        key: what scripts send as ``Authorization: Bearer``.
        routes: the handlers that serve the files and begin a session.
    """

    def __init__(self, port: int, files: Files, keys: Iterable[str] = ()) -> None:
        self.key = secrets.token_urlsafe(32)
        self.files = files
        self.routes: dict[str, Callable[[Request], Awaitable[Response]]] = {
            f"GET {' '.join(files.pages)} /app/{{name}}": self._file,
            "POST /session": self._session,
        }
        self._keys = [key.encode() for key in (self.key, *keys)]
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self._name = f"lb-{port}"
        self._links: dict[str, float] = {}
        self._sessions: set[str] = set()

    def link(self) -> str:
        """Return a new token for a link. It works once, within five minutes."""
        token = secrets.token_urlsafe(32)
        self._links[token] = monotonic() + _LINK_S
        return token

    def check(self, scope: Scope) -> None:
        """Raise HttpError unless the request may be answered; every answer gets the security policy."""
        scope["state"]["headers"] = _HEADERS
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if host not in self._hosts:
            raise HttpError(
                403, f"unknown host {host[:100]!r}: the page is at 127.0.0.1 or localhost"
            )
        is_read = scope["method"] in ("GET", "HEAD")
        is_script = sends_key(headers, self._keys)
        if origin != f"http://{host}" and (origin is not None or not (is_read or is_script)):
            raise HttpError(403, "a request that changes something must come from the page itself")
        if headers.get(b"sec-fetch-site", "same-origin") not in {
            "same-origin",
            *["none"] * is_read,
        }:
            raise HttpError(403, "requests from other sites are refused")
        path = scope["path"]
        is_known = is_script or self._has_cookie(headers) or path == "/session"
        if not is_known and not (is_read and self.files.at(path) is not None):
            raise HttpError(
                401,
                "open the link that the terminal shows, or send a key: one of the server's, or the one "
                "that --json prints",
            )

    def _has_cookie(self, headers: Mapping[bytes, str]) -> bool:
        try:
            cookie = SimpleCookie(headers.get(b"cookie", "")).get(self._name)
        except CookieError:
            return False
        return cookie is not None and cookie.value in self._sessions

    async def _file(self, call: Request) -> Response:
        file = self.files.at(call.url.path)
        if file is None:
            raise HttpError(404, "there is no such file")
        return reply(file[0], kind=file[1])

    async def _session(self, call: Request) -> Response:
        """Return a session cookie for a key, or for a link's token that is neither used nor expired."""
        token = (await json_of(call, dict[str, str])).get("token", "")
        is_key = token.isascii() and sends_key({b"x-api-key": token}, self._keys)
        if not is_key and self._links.pop(token, 0.0) < monotonic():
            raise HttpError(
                401, "this link was used or has expired: press Enter in the terminal for a new one"
            )
        value = secrets.token_urlsafe(32)
        self._sessions.add(value)
        cookie = f"{self._name}={value}; HttpOnly; SameSite=Strict; Path=/"
        return reply(b"", 204, {"set-cookie": cookie})
