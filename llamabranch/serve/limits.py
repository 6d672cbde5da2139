"""The limits of a request, as middleware: access, its client's patience, and the form of its errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .errors import HttpError, http_error
from .messages import encoded, reply
from .settings import ServeSettings

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Limits"]

_log = logging.getLogger("llamabranch.serve")
_EVENTS = b"text/event-stream; charset=utf-8"


class Limits:
    """Middleware: refuses requests, and cancels those whose client has gone or does not read.

    The engine frees the sequences of a cancelled request at its next step. Errors become answers; in a
    stream they are its last event.

    Args:
        app: the application.
        settings: limits.
        check: raises HttpError unless a request may be answered.
        headers: sent with every answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServeSettings,
        check: Callable[[Scope], None],
        headers: Sequence[tuple[bytes, bytes]],
    ) -> None:
        self._app, self._settings, self._check, self._headers = app, settings, check, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        call = _Call(receive, send, self._settings, self._headers)
        scope["state"] = {"max_body": self._settings.max_body, "fields": None}
        try:
            self._check(scope)
            await self._app(scope, call.receive, call.send)
        except asyncio.CancelledError:
            if not call.has_left:
                await call.fail(scope, HttpError(503, "the server is shutting down"))
                raise
        except Exception as error:
            failure = http_error(error, scope["state"]["fields"])
            if failure.status == 500:
                _log.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
            await call.fail(scope, failure)
        finally:
            call.end()


class _Call:
    """The two directions of a request. They cancel its task when the client has left.

    Attributes:
        status: of the answer; 0 before it begins.
        has_left: whether the client has gone, or does not read.
    """

    def __init__(
        self,
        receive: Receive,
        send: Send,
        settings: ServeSettings,
        headers: Sequence[tuple[bytes, bytes]],
    ) -> None:
        self._receive, self._send, self._headers = receive, send, headers
        self._patience_s = settings.send_timeout_s
        self._is_over = self._is_stream = self.has_left = False
        self._task = asyncio.current_task()
        self._watcher: asyncio.Task[None] | None = None
        self.status = 0

    def _leave(self) -> None:
        if not self._is_over and self._task is not None:
            self.has_left = True
            self._task.cancel()

    async def receive(self) -> Message:
        """Return the next piece of the body. After the last one, watch whether the client leaves."""
        if self._watcher is not None:
            await asyncio.Event().wait()  # until the task is cancelled
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise HttpError(400, "the request ended before its body was complete")
        if not message.get("more_body", False):
            self._watcher = asyncio.ensure_future(self._watch())
        return message

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    async def send(self, message: Message) -> None:
        """Send a part of the answer; a client that does not read it in time has left."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._is_stream = (b"content-type", _EVENTS) in message["headers"]
            message["headers"] = [*message["headers"], *self._headers]
        timer = asyncio.get_running_loop().call_later(self._patience_s, self._leave)
        try:
            await self._send(message)
        finally:
            timer.cancel()
        is_body = message["type"] == "http.response.body"
        self._is_over = is_body and not message.get("more_body", False)

    async def fail(self, scope: Scope, error: HttpError) -> None:
        """Answer with an error; in a stream as its last event."""
        if not self.status:
            await reply(error.body, error.status, error.headers)(scope, self.receive, self.send)
        elif self._is_stream and not self._is_over:
            data = encoded([error.body])
            await self._send({"type": "http.response.body", "body": data, "more_body": False})

    def end(self) -> None:
        """Stop watching."""
        if self._watcher is not None:
            self._watcher.cancel()
