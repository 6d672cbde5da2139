"""The ASGI application: its routes, and who may use them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from . import completions, require_server, utilities
from .errors import HttpError
from .limits import Limits
from .messages import reply
from .security import Guard
from .service import Service
from .settings import ServeSettings

require_server()
from starlette.applications import Starlette  # noqa: E402
from starlette.exceptions import HTTPException  # noqa: E402
from starlette.middleware import Middleware  # noqa: E402
from starlette.routing import Route  # noqa: E402

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Front", "application"]

Headers = list[tuple[bytes, bytes]]
_ROUTES: dict[str, Callable[[Request, Service], Awaitable[Response]]] = {
    "GET /": utilities.index,
    "POST /v1/completions": completions.completions,
    "POST /v1/chat/completions": completions.chat,
    "GET /v1/models /v1/models/{name:path}": utilities.models,
    "GET /health /v1/health": utilities.health,
    "GET /metrics": utilities.metrics,
    "GET /tokenizer_info": utilities.tokenizer_info,
    "POST /tokenize": utilities.tokenize,
}


class Front(NamedTuple):
    """Handlers in front of the API, which also work while the model is being loaded.

    Attributes:
        check: raises HttpError unless a request may be answered; replaces the rules of the settings.
        headers: sent with every answer.
        routes: handlers, by method and paths.
        close: awaited when no more requests are accepted.
    """

    check: Callable[[Scope], None]
    headers: Headers
    routes: Mapping[str, Callable[[Request], Awaitable[Response]]]
    close: Callable[[], Awaitable[None]]


def application(
    service_of: Callable[[], Service | None],
    settings: ServeSettings,
    log: Callable[[str], None],
    front: Front | None = None,
) -> Starlette:
    """Return the application.

    Args:
        service_of: returns the service; None while the model is being loaded.
        settings: limits.
        log: called with a line for each request, if the settings ask for it.
        front: handlers in front of the API.
    """

    async def serve(
        handler: Callable[[Request, Service], Awaitable[Response]], request: Request
    ) -> Response:
        service = service_of()
        if service is None:
            raise HttpError(503, "the model is being loaded")
        if service.is_draining:
            raise HttpError(503, "the server is shutting down")
        return await handler(request, service)

    own = [(name, partial(serve, handler)) for name, handler in _ROUTES.items()]
    handlers = [*(front.routes.items() if front is not None else ()), *own]
    app = Starlette(
        routes=[
            Route(path, handler, methods=[name.split()[0]])
            for name, handler in handlers
            for path in name.split()[1:]
        ],
        middleware=[
            Middleware(_Headers, service_of, settings, front),
            Middleware(Limits, settings, log),
            Middleware(_Access, settings, front),
        ],
        exception_handlers={HTTPException: _not_found},
    )
    app.router.redirect_slashes = False
    return app


async def _not_found(_request: Request, error: Exception) -> Response:
    is_path = getattr(error, "status_code", 404) == 404
    text = "there is nothing at this path" if is_path else "this path supports other methods"
    found = HttpError(404 if is_path else 405, text)
    return reply(found.body, found.status)


class _Headers:
    """Middleware: headers of every answer."""

    def __init__(
        self,
        app: ASGIApp,
        service_of: Callable[[], Service | None],
        settings: ServeSettings,
        front: Front | None,
    ) -> None:
        self._app, self._service_of, self._guard, self._front = (
            app,
            service_of,
            Guard(settings),
            front,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, front = self._service_of(), self._front
        headers = self._guard.cors(scope) if front is None else [*front.headers]
        if service is not None and not service.is_exact:
            headers.append((b"x-batch-invariant", b"false"))

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        await self._app(scope, receive, sent)


class _Access:
    """Middleware: refuses requests from elsewhere, and without a key."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, front: Front | None) -> None:
        self._app, self._check = app, Guard(settings).check if front is None else front.check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._check(scope)
        app: ASGIApp = reply(b"") if scope["method"] == "OPTIONS" else self._app
        await app(scope, receive, send)
