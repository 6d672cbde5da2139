"""The ASGI application: its routes, and what is the same for all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from . import branches, chat, completions, utilities
from .errors import HttpError
from .exchange import Exchange, Headers
from .security import Guard
from .service import Service
from .settings import ServeSettings

__all__ = ["Front", "make_app"]

_ROUTES: dict[str, Callable[[Exchange, Service], Awaitable[None]]] = {
    "POST /v1/completions": completions.completions,
    "POST /v1/chat/completions /chat/completions": chat.chat,
    "POST /v1/chat/completions/input_tokens /chat/completions/input_tokens": chat.input_tokens,
    "POST /apply-template": chat.input_tokens,
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
    """What a server has in front of its API, also while the model is loaded.

    Attributes:
        check: raises HttpError unless a request may be answered; in place of the settings' rules.
        headers: of every answer.
        routes: handlers, by method and path.
        close: awaited once no more requests are taken.
    """

    check: Callable[[Scope], None]
    headers: Headers
    routes: Mapping[str, Callable[[Exchange], Awaitable[None]]]
    close: Callable[[], Awaitable[None]]


def make_app(
    service_of: Callable[[], Service | None],
    settings: ServeSettings,
    log: Callable[[str], None],
    front: Front | None = None,
) -> ASGIApp:
    """Return the application.

    Args:
        service_of: returns the service, None while the model is loaded.
        settings: limits.
        log: gets a line for each request, if the settings ask for it.
        front: what is in front of the API.
    """
    guard = Guard(settings)
    check, own = (guard.check, {}) if front is None else (front.check, front.routes)
    handlers: dict[str, Callable[..., Awaitable[None]]] = {**own, **_ROUTES}
    routes = []
    for asked, handler in handlers.items():
        method, *paths = asked.split()
        routes += [(Route(path, handler, methods=[method]), asked) for path in paths]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        service = service_of()
        headers = guard.cors(scope) if front is None else [*front.headers]
        if service is not None and not service.is_exact:
            headers.append((b"x-batch-invariant", b"false"))
        call = Exchange(scope, receive, send, settings, headers)
        await call.run(answer(call))
        if service is not None:
            if call.note == "disconnected":
                service.counters.cancelled += 1
            else:
                service.counters.requests[call.status] += 1
        if settings.log_requests:
            line = f"{scope['method']} {scope['path']} {call.status} {1e3 * call.elapsed_s:.0f} ms"
            log(f"{line} {call.note}".rstrip())

    async def answer(call: Exchange) -> None:
        scope, service = call.scope, service_of()
        check(scope)
        if scope["method"] == "OPTIONS":
            await call.reply(b"")
            return
        status = 404
        for route, asked in routes:
            match, found = route.matches(scope)
            if match is Match.FULL:
                scope.update(found)
                if asked in own:
                    await own[asked](call)
                    return
                if service is None:
                    raise HttpError(503, "the model is being loaded")
                if service.is_draining:
                    raise HttpError(503, "the server is shutting down")
                await _ROUTES[asked](call, service)
                return
            status = 405 if match is Match.PARTIAL else status
        told = "there is nothing at this path" if status == 404 else "this path takes other methods"
        raise HttpError(status, told)

    return app
