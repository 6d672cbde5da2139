"""An HTTP server over the engine, with OpenAI's and Anthropic's API.

settings.py     the settings of a server, checked
server.py       the socket, loading, the end
app.py          the routes
security.py     hosts, origins, keys
page.py         pages for a browser: their files, links, sessions, policy
view.py         the page of the requests: why each has read tokens
messages.py     bodies of requests, and answers: JSON, events
limits.py       bodies, clients that leave or do not read, errors
errors.py       errors in the form for clients
fields.py       the fields of requests, converted for the engine
generation.py   the texts of one request, and its answer
completions.py  OpenAI's completions, chat completions
anthropic.py    Anthropic's messages
utilities.py    models, health, the tokenizer
service.py      what all endpoints share: model, engine, settings

Importing this imports neither Starlette nor uvicorn; both come with ``pip install 'llamabranch[serve]'``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..extras import require
from .settings import ServeSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..engine import AsyncEngine

__all__ = ["ServeSettings", "require_server", "serve"]


def require_server(extra: str = "serve", feature: str = "the server") -> None:
    """Check that the server's packages are installed, without importing them.

    Raises:
        UnsupportedError: a package is missing; the hint names ``extra``.
    """
    require(extra, feature, "starlette", "uvicorn")


def serve(
    open_engine: Callable[[], AsyncEngine],
    settings: ServeSettings | None = None,
    *,
    ready: Callable[[str, str], None] = lambda _url, _name: None,
    log: Callable[[str], None] = print,
) -> None:
    """Serve a model over HTTP until SIGINT or SIGTERM.

    Args:
        open_engine: loads the model and returns its engine; meanwhile the server answers 503.
        settings: where to listen, who may use the server, and the limits.
        ready: called with the URL and the name of the model after it is loaded.
        log: called with messages for people, for example while the server waits for running texts.

    Raises:
        UnsupportedError: a package of the extra ``serve`` is missing.
        ConfigError: the address cannot be used.
        LlamaBranchError: the model cannot be loaded.
    """
    require_server()
    from .server import Server

    server = Server(open_engine, settings or ServeSettings(), ready, log)
    log(f"the page of its requests: {server.page_url}/#{server.page.link()}")
    server.run()
