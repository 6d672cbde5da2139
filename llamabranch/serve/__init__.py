"""An OpenAI-compatible HTTP server over the engine, with branches.

settings.py     the settings of a server, checked
errors.py       errors as a client gets them
exchange.py     one request and its answer over ASGI: body, JSON, events, who gives up when
security.py     hosts, origins, keys
fields.py       the fields of requests, as sampling settings and grammars
prompts.py      prompts as token ids
requests.py     fields as the engine's requests
generation.py   the texts of one HTTP request, as they come
vocabulary.py   how tokens are written in answers
counters.py     totals and times
service.py      what all endpoints share
completions.py  /v1/completions
chat.py         /v1/chat/completions
tools.py        tool calls
native.py       /completion, llama-server's own
branches.py     /v1/branches
utilities.py    models, properties, tokens, metrics
app.py          the routes
server.py       the socket, loading, the end

Importing this imports neither Starlette nor uvicorn; both come with ``pip install 'llamabranch[serve]'``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UnsupportedError
from .settings import ServeSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..engine import AsyncEngine

__all__ = ["ServeSettings", "serve"]


def serve(
    open_engine: Callable[[], AsyncEngine],
    settings: ServeSettings | None = None,
    *,
    log: Callable[[str], None] = print,
) -> None:
    """Serve a model over HTTP until SIGINT or SIGTERM comes.

    Args:
        open_engine: loads the model and returns its engine, while the server answers 503 already.
        settings: where to listen, whom to serve, and the limits.
        log: gets lines for people: where it listens, and what it waits for.

    Raises:
        UnsupportedError: a package of the extra ``serve`` is missing.
        ConfigError: the address cannot be used.
        LlamaBranchError: what loading the model raises.
    """
    try:
        from .server import Server
    except ImportError as error:
        raise UnsupportedError(
            f"the server needs a package that is not installed: {error.name}",
            hint="pip install 'llamabranch[serve]'",
        ) from error
    Server(open_engine, settings or ServeSettings(), log).run()
