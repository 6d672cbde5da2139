"""The routes, and what is the same for all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from . import branches, chat, completions, utilities
from .errors import HttpError
from .exchange import Exchange
from .security import Guard
from .service import Service
from .settings import ServeSettings

__all__ = ["Holder", "make_app"]

Handler = Callable[[Exchange, Service], Awaitable[None]]

_ROUTES: list[tuple[str, str, Handler]] = [
    ("POST", "/v1/completions", completions.completions),
    ("POST", "/v1/chat/completions", chat.chat),
    ("POST", "/chat/completions", chat.chat),
    ("POST", "/v1/chat/completions/input_tokens", chat.input_tokens),
    ("POST", "/chat/completions/input_tokens", chat.input_tokens),
    ("POST", "/completion", completions.completion),
    ("POST", "/completions", completions.completion),
    ("GET", "/v1/models", utilities.models),
    ("GET", "/v1/models/{name:path}", utilities.models),
    ("GET", "/models", utilities.models),
    ("GET", "/health", utilities.health),
    ("GET", "/v1/health", utilities.health),
    ("GET", "/props", utilities.props),
    ("GET", "/slots", utilities.slots),
    ("GET", "/metrics", utilities.metrics),
    ("POST", "/tokenize", utilities.tokenize),
    ("POST", "/detokenize", utilities.detokenize),
    ("GET", "/tokenizer_info", utilities.tokenizer_info),
    ("POST", "/apply-template", chat.input_tokens),
    ("POST", "/v1/branches", branches.create),
    ("GET", "/v1/branches", branches.listing),
    ("GET", "/v1/branches/{id}", branches.get),
    ("DELETE", "/v1/branches/{id}", branches.delete),
    ("POST", "/v1/branches/{id}/continue", branches.continue_),
    ("POST", "/v1/branches/{id}/fork", branches.fork),
    ("POST", "/v1/branches/{id}/score", branches.score),
]


class Holder(Protocol):
    """Has the service once the model is loaded."""

    @property
    def service(self) -> Service | None:
        """The service, None while the model is loaded."""


def make_app(holder: Holder, settings: ServeSettings, log: Callable[[str], None]) -> ASGIApp:
    """Return the ASGI application.

    Args:
        holder: the service, once there is one; until then all requests are answered with 503.
        settings: of the server.
        log: gets one line for each request, if the settings ask for it.
    """
    routes = [
        Route(path, _Endpoint(handler, holder, settings, log), methods=[method])
        for method, path, handler in _ROUTES
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _http_exception})
    return Guard(app, settings)


class _Endpoint:
    def __init__(
        self, handler: Handler, holder: Holder, settings: ServeSettings, log: Callable[[str], None]
    ) -> None:
        self._handler = handler
        self._holder = holder
        self._settings = settings
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._holder.service
        headers = [] if service is None or service.is_exact else [(b"x-batch-invariant", b"false")]
        call = Exchange(scope, receive, send, self._settings, headers)
        await call.run(self._answer(call, service))
        if service is not None:
            service.counters.note_request(0 if call.note == "disconnected" else call.status)
        if self._settings.log_requests:
            ms = 1e3 * call.elapsed_s
            self._log(
                f"{scope['method']} {scope['path']} {call.status} {ms:.0f} ms {call.note}".rstrip()
            )

    async def _answer(self, call: Exchange, service: Service | None) -> None:
        if service is None:
            raise HttpError(503, "the model is being loaded")
        if service.is_draining:
            raise HttpError(503, "the server is shutting down")
        await self._handler(call, service)


async def _http_exception(_: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    told = {404: "there is nothing at this path", 405: "this path does not take this method"}
    body = HttpError(status, told.get(status, "internal error")).body
    headers = error.headers if isinstance(error, HTTPException) else None
    return Response(msgspec.json.encode(body), status, headers, "application/json")
