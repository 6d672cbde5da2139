"""The page's files, sessions and access, the browser's security policy, and the exported HTML file."""

from __future__ import annotations

import gzip
import html
import re
import secrets
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from http.cookies import CookieError, SimpleCookie
from importlib.resources import files
from time import monotonic
from typing import TYPE_CHECKING

from ..serve.errors import HttpError
from ..serve.security import sends_key

if TYPE_CHECKING:
    from starlette.types import Scope

_APP = files(__package__) / "app"
_KINDS = {"js": "text/javascript", "css": "text/css", "html": "text/html"}
_LINK_S = 300.0
_NAME = re.compile(r"[a-z][a-z0-9_-]*\.(js|css|html)")
_IMPORT = re.compile(r'^import\s[^;]*?from\s+"\./([^"]+)";\n?', re.M)
_LINK = '<link rel="stylesheet" href="/loom/app/app.css">'
_SCRIPT = '<script type="module" src="/loom/app/main.js"></script>'
_TRUSTED = "require-trusted-types-for 'script'; trusted-types 'none'"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
) + _TRUSTED
_HEADERS = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]


def static_file(path: str) -> tuple[bytes, str] | None:
    """Return a file of the page and its type, by the path of a request; None if it does not exist."""
    name = "index.html" if path == "/" else path.removeprefix("/loom/app/")
    match = _NAME.fullmatch(name)
    if match is None or not (_APP / name).is_file():
        return None
    return (_APP / name).read_bytes(), _KINDS[match[1]]


class Guard:
    """Checks that a request comes from the page or from a script with the key.

    Args:
        port: where the page is served.

    Attributes:
        key: what scripts send as ``Authorization: Bearer``.
    """

    headers = _HEADERS

    def __init__(self, port: int) -> None:
        self.key = secrets.token_urlsafe(32)
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self._name = f"lb-{port}"
        self._links: dict[str, float] = {}
        self._sessions: set[str] = set()

    def link(self) -> str:
        """Return a new token for a link. It works once, within five minutes."""
        token = secrets.token_urlsafe(32)
        self._links[token] = monotonic() + _LINK_S
        return token

    def session(self, token: str) -> str:
        """Return the session cookie for a token. Raises HttpError if it is used, expired or wrong."""
        if self._links.pop(token, 0.0) < monotonic():
            raise HttpError(
                401, "this link was used or has expired: press Enter in the terminal for a new one"
            )
        value = secrets.token_urlsafe(32)
        self._sessions.add(value)
        return f"{self._name}={value}; HttpOnly; SameSite=Strict; Path=/"

    def check(self, scope: Scope) -> None:
        """Raise HttpError unless the request may be answered."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if host not in self._hosts:
            raise HttpError(
                403, f"unknown host {host[:100]!r}: the page is at 127.0.0.1 or localhost"
            )
        is_read = scope["method"] in ("GET", "HEAD")
        is_script = sends_key(headers, [self.key.encode()])
        if origin != f"http://{host}" and (origin is not None or not (is_read or is_script)):
            raise HttpError(403, "a request that changes something must come from the page itself")
        if headers.get(b"sec-fetch-site", "same-origin") not in {
            "same-origin",
            *["none"] * is_read,
        }:
            raise HttpError(403, "requests from other sites are refused")
        path = scope["path"]
        is_known = is_script or self._has_cookie(headers) or path == "/loom/session"
        if not is_known and not (is_read and static_file(path) is not None):
            raise HttpError(401, "no session: open the link that the terminal shows")

    def _has_cookie(self, headers: Mapping[bytes, str]) -> bool:
        try:
            cookie = SimpleCookie(headers.get(b"cookie", "")).get(self._name)
        except CookieError:
            return False
        return cookie is not None and cookie.value in self._sessions


def _joined(name: str, seen: set[str]) -> str:
    """Return a module and those it imports as one script, imported ones first and each once."""
    if name in seen:
        return ""
    seen.add(name)
    text = (_APP / name).read_text(encoding="utf-8")
    before = "".join(_joined(other, seen) for other in _IMPORT.findall(text))
    return before + re.sub(r"^export (?=\w)", "", _IMPORT.sub("", text), flags=re.M)


def html_file(data: bytes, title: str) -> bytes:
    """Return the page as one HTML file that contains a document (JSON). It makes no request."""
    script = _joined("static.js", set()).replace("</script", "<\\/script")
    style = (_APP / "app.css").read_text(encoding="utf-8")
    hashes = [b64encode(sha256(text.encode()).digest()).decode() for text in (script, style)]
    policy = (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; "
        f"img-src data:; base-uri 'none'; form-action 'none'; {_TRUSTED}"
    )
    page = (_APP / "index.html").read_text(encoding="utf-8")
    packed = b64encode(gzip.compress(data, mtime=0)).decode()
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    block = f'<script type="application/json" id="loom-data">{packed}</script>'
    page = page.replace(_LINK, f"{meta}\n<style>{style}</style>")
    page = page.replace(_SCRIPT, f'{block}\n<script type="module">{script}</script>')
    name = html.escape(title, quote=False)
    return re.sub("<title>.*?</title>", lambda _: f"<title>{name}</title>", page).encode()
