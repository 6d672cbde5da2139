"""The ASGI application: its routes, and who may use them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from . import anthropic, completions, require_server, utilities, view
from .errors import HttpError
from .limits import Limits
from .security import cors
from .service import Service
from .settings import ServeSettings

require_server()
from starlette.applications import Starlette  # noqa: E402
from starlette.exceptions import HTTPException  # noqa: E402
from starlette.middleware import Middleware  # noqa: E402
from starlette.requests import ClientDisconnect  # noqa: E402
from starlette.routing import Route  # noqa: E402

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Scope

_ROUTES: dict[str, Callable[[Request, Service], Awaitable[Response]]] = {
    "POST /v1/completions": completions.completions,
    "POST /v1/chat/completions": completions.chat,
    "POST /v1/messages": anthropic.messages,
    "POST /v1/messages/count_tokens": anthropic.count_tokens,
    "GET /v1/models /v1/models/{name:path}": utilities.models,
    "GET /health /v1/health": utilities.health,
    "GET /tokenizer_info": utilities.tokenizer_info,
    "POST /tokenize": utilities.tokenize,
    "GET /requests": view.requests,
}


async def _nothing() -> None:
    pass


class Front(NamedTuple):
    """Handlers in front of the API, which also work while the model is being loaded.

    Attributes:
        check: raises HttpError unless a request may be answered, and may set headers of the answer.
        routes: handlers, by method and paths.
        close: awaited when all requests have ended.
    """

    check: Callable[[Scope], None]
    routes: Mapping[str, Callable[[Request], Awaitable[Response]]]
    close: Callable[[], Awaitable[None]] = _nothing


def application(
    service_of: Callable[[], Service | None],
    settings: ServeSettings,
    front: Front,
    log: Callable[[str], None],
) -> Starlette:
    """Return the application.

    Args:
        service_of: returns the service; None while the model is being loaded.
        settings: limits.
        front: handlers in front of the API.
        log: is called with a line for each request that is refused.
    """

    async def serve(
        handler: Callable[[Request, Service], Awaitable[Response]], request: Request
    ) -> Response:
        service = service_of()
        if service is None:
            raise HttpError(503, "the model is being loaded")
        await request.body()  # the next message says that the client is gone
        answer = asyncio.ensure_future(handler(request, service))
        gone = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ClientDisconnect
            return answer.result()
        finally:
            answer.cancel()
            gone.cancel()

    handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {**front.routes}
    handlers |= {name: partial(serve, handler) for name, handler in _ROUTES.items()}
    return Starlette(
        routes=[
            Route(path, handler, methods=[name.split()[0]])
            for name, handler in handlers.items()
            for path in name.split()[1:]
        ],
        middleware=[Middleware(cors(settings)), Middleware(Limits, settings, front.check, log)],
        exception_handlers={HTTPException: _not_found},
    )


async def _not_found(request: Request, error: Exception) -> Response:
    told = f"{error.detail}: {request.method} {request.url.path[:100]}"  # type: ignore[attr-defined]
    raise HttpError(error.status_code, told)  # type: ignore[attr-defined]
