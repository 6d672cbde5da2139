"""Access control: host names, origins of web pages, API keys."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from .errors import HttpError
from .settings import ServeSettings, is_loopback

if TYPE_CHECKING:
    from starlette.types import Scope

__all__ = ["Guard", "sends_key"]

_PUBLIC = {"/health", "/v1/health"}  # without a key


class Guard:
    """Refuses requests from web pages of other sites, and requests without a key.

    A page can make a browser send a request to any address, and with DNS rebinding it can read the
    answer. The host name in the request reveals that, so the complete name is checked. Numeric addresses
    pass.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self._origins = settings.allow_origins
        self._hosts = {"localhost", settings.host.lower(), *map(str.lower, settings.allowed_hosts)}
        self._keys = [key.encode() for key in settings.api_keys]

    def cors(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Return the headers that let the sending page read the answer, if it is allowed to."""
        origin: bytes | None = dict(scope["headers"]).get(b"origin")
        if origin is None or not self._allows(origin.decode("latin-1")):
            return []
        return [
            (b"access-control-allow-origin", origin),
            (b"vary", b"Origin"),
            (b"access-control-allow-credentials", b"true"),
            (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
            (b"access-control-allow-headers", b"*"),
        ]

    def check(self, scope: Scope) -> None:
        """Raise HttpError unless the request may be answered."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if not self._knows_host(host):
            raise HttpError(
                403, f"unknown host {host[:100]!r}: --limit allowed_hosts=HOST allows it"
            )
        if scope["method"] == "OPTIONS":  # a browser asks first, without a key
            return
        is_same = origin is None or origin.partition("://")[2] == host
        if not is_same and not self._allows(str(origin)):
            raise HttpError(403, "pages of this origin are not allowed: --allow-origin allows them")
        if self._keys and scope["path"] not in _PUBLIC and not sends_key(headers, self._keys):
            raise HttpError(401, "the API key is missing or wrong: Authorization: Bearer KEY")

    def _knows_host(self, host: str) -> bool:
        name = host.partition("]")[0].strip("[") if host[:1] == "[" else host.partition(":")[0]
        if not self._hosts.isdisjoint(("*", name.lower())):
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True

    def _allows(self, origin: str) -> bool:
        if not {"*", origin}.isdisjoint(self._origins):
            return True
        try:
            name = urlsplit(origin).hostname
        except ValueError:
            return False
        return "localhost" in self._origins and name is not None and is_loopback(name)


def sends_key(headers: Mapping[bytes, str], keys: Iterable[bytes]) -> bool:
    """Return whether headers have one of the keys."""
    scheme, _, key = headers.get(b"authorization", "").partition(" ")
    sent = key.strip() if scheme.lower() == "bearer" else headers.get(b"x-api-key", "")
    matches = [hmac.compare_digest(sent.encode("latin-1"), known) for known in keys]
    return any(matches)  # compares all keys, so that the time does not reveal which one matched
