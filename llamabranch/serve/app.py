"""The ASGI application: its routes, and the common handling of requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from . import branches, completions, require_server, utilities
from .errors import HttpError
from .http_call import Headers, HttpCall
from .security import Guard
from .service import Service
from .settings import ServeSettings

require_server()
from starlette.routing import Match, Route  # noqa: E402

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

__all__ = ["App", "Front"]

Handler = Callable[[HttpCall, Service], Awaitable[None]]
_ROUTES: dict[str, Handler] = {
    "GET /": utilities.index,
    "POST /v1/completions": completions.completions,
    "POST /v1/chat/completions /chat/completions": completions.chat,
    "POST /v1/chat/completions/input_tokens /chat/completions/input_tokens": completions.input_tokens,
    "POST /apply-template": completions.input_tokens,
    "POST /completion /completions": completions.completion,
    "GET /v1/models /v1/models/{name:path} /models": utilities.models,
    "GET /v1/health /health": utilities.health,
    "GET /props": utilities.props,
    "GET /slots": utilities.slots,
    "GET /metrics": utilities.metrics,
    "POST /tokenize": utilities.tokenize,
    "POST /detokenize": utilities.detokenize,
    "GET /tokenizer_info": utilities.tokenizer_info,
    "POST /v1/branches": branches.create,
    "GET /v1/branches": branches.listing,
    "GET /v1/branches/{id}": branches.get,
    "DELETE /v1/branches/{id}": branches.delete,
    "POST /v1/branches/{id}/continue": branches.continue_,
    "POST /v1/branches/{id}/fork": branches.fork,
    "POST /v1/branches/{id}/score": branches.score,
}


class Front(NamedTuple):
    """Handlers in front of the API, which also work while the model is being loaded.

    Attributes:
        check: raises HttpError unless a request may be answered; replaces the rules of the settings.
        headers: sent with every answer.
        routes: handlers, by method and path.
        close: awaited when no more requests are accepted.
    """

    check: Callable[[Scope], None]
    headers: Headers
    routes: Mapping[str, Callable[[HttpCall], Awaitable[None]]]
    close: Callable[[], Awaitable[None]]


class App:
    """The application.

    Args:
        service_of: returns the service; None while the model is being loaded.
        settings: limits.
        log: called with a line for each request, if the settings ask for it.
        front: handlers in front of the API.
    """

    def __init__(
        self,
        service_of: Callable[[], Service | None],
        settings: ServeSettings,
        log: Callable[[str], None],
        front: Front | None = None,
    ) -> None:
        self._service_of = service_of
        self._settings = settings
        self._log = log
        self._front = front
        self._guard = Guard(settings)
        routes = [] if front is None else [*front.routes.items()]
        routes += [
            (route_text, partial(self._serve, handler)) for route_text, handler in _ROUTES.items()
        ]
        self._routes = [
            (Route(path, self._answer, methods=[route_text.split()[0]]), handler)
            for route_text, handler in routes
            for path in route_text.split()[1:]
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and log it if the settings ask for that."""
        if scope["type"] != "http":
            return
        service, front = self._service_of(), self._front
        headers = self._guard.cors(scope) if front is None else [*front.headers]
        if service is not None and not service.is_exact:
            headers.append((b"x-exact", b"false"))
        call = HttpCall(scope, receive, send, self._settings, headers)
        await call.run(self._answer(call))
        if self._settings.log_requests:
            ms = 1e3 * (perf_counter() - call.start)
            line = f"{scope['method']} {scope['path']} {call.status} {ms:.0f} ms {call.ended_by}"
            self._log(line.rstrip())

    async def _answer(self, call: HttpCall) -> None:
        scope = call.scope
        check = self._guard.check if self._front is None else self._front.check
        check(scope)
        if scope["method"] == "OPTIONS":
            await call.reply(b"")
            return
        status, message = 404, "there is nothing at this path"
        for route, handler in self._routes:
            match, child_scope = route.matches(scope)
            if match is Match.FULL:
                scope.update(child_scope)
                await handler(call)
                return
            if match is Match.PARTIAL:
                status, message = 405, "this path supports other methods"
        raise HttpError(status, message)

    async def _serve(self, handler: Handler, call: HttpCall) -> None:
        """Answer a request of the API; HttpError if the model is not loaded."""
        service = self._service_of()
        if service is None:
            raise HttpError(503, "the model is being loaded")
        if service.is_draining:
            raise HttpError(503, "the server is shutting down")
        await handler(call, service)
