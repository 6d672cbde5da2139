"""The server: a socket, an event loop, loading the model in a thread, and a clean shutdown."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from ..engine import AsyncEngine
from ..errors import ConfigError
from ..startup import quit_interrupted
from . import require_server, view
from .app import Front, application
from .page import Page
from .service import Service
from .settings import ServeSettings

require_server()
import uvicorn  # noqa: E402

_MOST_BYTES = 128 << 10  # of headers, chunk extensions and trailers
_SEND_BYTES = 128 << 10
_IDLE_S = 75  # how long a connection may be idle between two requests


class Server:
    """Serves a model until ``stop`` is called.

    For arguments and errors see `serve`; ``open_engine`` is called in a thread of its own.

    Attributes:
        service: the service; None until the model is loaded.
        port, url: where it listens.
        page, page_url: the page of the requests, and where it is: on this machine only.
        front: handlers in front of the API, by default the handlers of ``page``; set it before ``run``.
    """

    def __init__(
        self,
        open_engine: Callable[[], AsyncEngine],
        settings: ServeSettings,
        ready: Callable[[str, str], None] = lambda _url, _name: None,
        log: Callable[[str], None] = print,
    ) -> None:
        self.settings = settings
        self.service: Service | None = None
        self._open_engine, self._ready, self._log = open_engine, ready, log
        self._uvicorn: uvicorn.Server | None = None
        host = settings.host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, settings.port), family=family, backlog=1024)
        except (OSError, OverflowError) as error:
            why = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
            raise ConfigError(
                f"cannot listen on {settings.host}:{settings.port}: {why}",
                hint="--port sets another port; 0 takes any free one",
            ) from None
        # Per connection. It limits the memory for a client that does not read.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        self.port = int(self._socket.getsockname()[1])
        self.page = Page(self.port, view.FILES, settings.api_keys)
        self.front = Front(view.check_of(self.page, settings), self.page.routes)
        self.page_url = f"http://{'localhost' if ':' in host else '127.0.0.1'}:{self.port}"
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def stop(self) -> None:
        """Take no more requests, and give running ones time to end. A second call ends them at once."""
        server, service = self._uvicorn, self.service
        if server is not None:
            server.force_exit = server.should_exit
            server.should_exit = True
            if service is not None and service.n_texts and not server.force_exit:
                n = service.n_texts
                self._log(f"waiting for {n} running text{'s' * (n > 1)}; another Ctrl-C ends them")

    def run(self) -> None:
        """Serve until ``stop`` is called, or the process gets SIGINT or SIGTERM.

        Raises:
            LlamaBranchError: the model cannot be loaded.
        """
        try:
            from uvloop import run
        except ImportError:  # not there on Windows
            from asyncio import run  # type: ignore[assignment]
        run(self._serve())

    def _on_signal(self, *_: object) -> None:
        if self.service is None:  # no request has begun while the model loads
            quit_interrupted()
        self.stop()

    async def _serve(self) -> None:
        app = application(lambda: self.service, self.settings, self.front, self._log)
        config = uvicorn.Config(
            app, http="h11", h11_max_incomplete_event_size=_MOST_BYTES, loop="none", ws="none",
            lifespan="off", log_config=None,
            access_log=False, log_level="critical", server_header=False,
            proxy_headers=False, timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=self.settings.shutdown_timeout_s,  # type: ignore[arg-type]
        )  # fmt: skip
        self._uvicorn = server = uvicorn.Server(config)
        server.handle_exit = self._on_signal  # type: ignore[assignment]  # of SIGINT and SIGTERM
        serving = asyncio.ensure_future(server.serve(sockets=[self._socket]))
        engine: AsyncEngine | None = None
        try:
            engine = await asyncio.to_thread(self._open_engine)
            self.service = service = Service(engine, self.settings, self._log)
            self._ready(self.url, service.name)
            await serving
        finally:
            server.should_exit = True
            await serving
            await self.front.close()
            if engine is not None:
                await engine.close()
