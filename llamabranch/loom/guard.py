"""Who may call the page: this machine's browser with a link of its own, or a script with the key."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from time import monotonic

from starlette.types import Scope

from ..serve.errors import HttpError
from ..serve.security import sends_key
from .page import HEADERS, static_file

__all__ = ["Guard"]

_LINK_S = 300.0
_SESSION = "/loom/session"


class Guard:
    """Lets nobody else in; its headers tell a browser what the page may do.

    Args:
        port: the page's.

    Attributes:
        key: for ``Authorization: Bearer``.
    """

    headers = HEADERS

    def __init__(self, port: int) -> None:
        self.key = secrets.token_urlsafe(32)
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self._name = f"lb-{port}"
        self._links: dict[str, float] = {}
        self._sessions: set[str] = set()

    def link(self) -> str:
        """Return a new token for a link: it works once, and for five minutes."""
        token = secrets.token_urlsafe(32)
        self._links[token] = monotonic() + _LINK_S
        return token

    def session(self, token: str) -> bytes:
        """Return the cookie for a token. Raises HttpError if it is used, old or wrong."""
        if self._links.pop(token, 0.0) < monotonic():
            raise HttpError(
                401, "this link was used, or is too old: Enter in the terminal prints another"
            )
        value = secrets.token_urlsafe(32)
        self._sessions.add(value)
        return f"{self._name}={value}; HttpOnly; SameSite=Strict; Path=/".encode()

    def check(self, scope: Scope) -> None:
        """Raise HttpError unless the request may be answered."""
        given = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = given.get(b"host", ""), given.get(b"origin")
        if host not in self._hosts:
            raise HttpError(
                403, f"unknown host {host[:100]!r}: the page is at 127.0.0.1 or localhost"
            )
        is_read = scope["method"] in ("GET", "HEAD")
        is_script = sends_key(given, [self.key.encode()])
        if origin != f"http://{host}" and (origin is not None or not (is_read or is_script)):
            raise HttpError(403, "a request that changes something must come from the page itself")
        if given.get(b"sec-fetch-site", "same-origin") not in {"same-origin", *["none"] * is_read}:
            raise HttpError(403, "pages of other sites may not call")
        path = scope["path"]
        is_known = is_script or self._has_cookie(given) or path == _SESSION
        if not is_known and not (is_read and static_file(path) is not None):
            raise HttpError(401, "no session: open the link that the terminal shows")

    def _has_cookie(self, given: Mapping[bytes, str]) -> bool:
        try:
            found = SimpleCookie(given.get(b"cookie", "")).get(self._name)
        except CookieError:
            return False
        return found is not None and found.value in self._sessions
