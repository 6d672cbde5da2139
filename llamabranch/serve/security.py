"""Access control: host names, origins of web pages, API keys."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from . import require_server
from .errors import HttpError
from .settings import ServeSettings

require_server()
from starlette.middleware.cors import CORSMiddleware  # noqa: E402
from starlette.routing import Router  # noqa: E402

if TYPE_CHECKING:
    from starlette.types import Scope

_PUBLIC = {"/health", "/v1/health"}  # without a key
_LOCAL = r"https?://(localhost|127(\.\d+){3}|\[::1\])(:\d+)?"  # the pages of this machine


def cors(settings: ServeSettings) -> partial[CORSMiddleware]:
    """Return Starlette's middleware for the pages that may read answers."""
    return partial(
        CORSMiddleware,
        allow_origins=settings.allow_origins,
        allow_origin_regex=_LOCAL if "localhost" in settings.allow_origins else None,
        allow_methods=("*",),
        allow_headers=("*",),
        allow_credentials=True,
    )


class Guard:
    """Refuses requests from web pages of other sites, and requests without a key.

    A page can make a browser send a request to any address, and with DNS rebinding it can read the
    answer. The host name in the request reveals that, so the complete name is checked. Numeric addresses
    pass.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self._hosts = {"localhost", settings.host.lower(), *map(str.lower, settings.allowed_hosts)}
        self._keys = [key.encode() for key in settings.api_keys]
        self._is_allowed = cors(settings)(Router()).is_allowed_origin

    def check(self, scope: Scope) -> None:
        """Raise HttpError unless the request may be answered."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if not self._knows_host(host):
            raise HttpError(
                403, f"unknown host {host[:100]!r}: --limit allowed_hosts=HOST allows it"
            )
        is_same = origin is None or origin.partition("://")[2] == host
        if not is_same and not self._is_allowed(str(origin)):
            raise HttpError(403, "pages of this origin need --limit allow_origins=ORIGIN")
        if self._keys and scope["path"] not in _PUBLIC and not sends_key(headers, self._keys):
            message = (
                "the API key is missing or wrong: Authorization: Bearer KEY, or x-api-key: KEY"
            )
            raise HttpError(401, message)

    def _knows_host(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return not self._hosts.isdisjoint(("*", name)) or bool(ip_address(name))
        except ValueError:  # it is not an address
            return False


def sends_key(headers: Mapping[bytes, str], keys: Iterable[bytes]) -> bool:
    """Return whether headers have one of the keys."""
    scheme, _, key = headers.get(b"authorization", "").partition(" ")
    bearer = key.strip() if scheme.lower() == "bearer" else ""
    sent = [each.encode("latin-1") for each in (bearer, headers.get(b"x-api-key", ""))]
    matches = [hmac.compare_digest(each, known) for known in keys for each in sent]
    return any(matches)  # compares all keys, so that the time does not reveal which one matched
