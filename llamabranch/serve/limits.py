"""Limits of a request, as middleware: its time, its client's patience, and the form of its errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

from .errors import HttpError, http_error
from .messages import encoded, reply
from .settings import ServeSettings

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Limits"]

_log = logging.getLogger("llamabranch.serve")


class Limits:
    """Middleware: cancels a request that takes too long, or whose client has gone or does not read.

    The engine frees the sequences of a cancelled request at its next step. Errors become answers; in a
    stream they are its last event.

    Args:
        app: the application.
        settings: limits.
        log: called with a line for each request, if the settings ask for it.
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings, log: Callable[[str], None]) -> None:
        self._app, self._settings, self._log = app, settings, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "http":
            await _Call(self._app, self._settings, self._log, scope, receive, send).run()


class _Call:
    def __init__(
        self, app: ASGIApp, settings: ServeSettings, log: Callable[[str], None],
        scope: Scope, receive: Receive, send: Send,
    ) -> None:  # fmt: skip
        self._app, self._settings, self._log = app, settings, log
        self._scope, self._receive, self._send = scope, receive, send
        self._status, self._ended_by = 0, ""
        self._is_over = self._is_stream = False
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._watcher: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        scope, begun, limit = self._scope, perf_counter(), self._settings.request_timeout_s
        if limit:
            self._timer = self._loop.call_later(limit, self._cancel, "timeout")
        scope["state"] = {
            "max_body": self._settings.max_body,
            "fields": None,
            "endless": self._endless,
        }
        try:
            await self._app(scope, self._received, self._sent)
        except asyncio.CancelledError:
            if not self._ended_by:
                raise
            if self._ended_by == "timeout":
                await self._fail(HttpError(504, f"the request took more than {limit:g} s"))
        except Exception as error:
            failure = http_error(error, scope["state"]["fields"])
            if failure.status == 500:
                _log.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
            await self._fail(failure)
        finally:
            self._endless()
            if self._watcher is not None:
                self._watcher.cancel()
        if self._settings.log_requests:
            ms = 1e3 * (perf_counter() - begun)
            line = f"{scope['method']} {scope['path']} {self._status} {ms:.0f} ms {self._ended_by}"
            self._log(line.rstrip())

    def _endless(self) -> None:
        """Remove the time limit: a stream of events may last for days."""
        if self._timer is not None:
            self._timer.cancel()

    def _cancel(self, reason: str) -> None:
        if not self._ended_by and not self._is_over and self._task is not None:
            self._ended_by = reason
            self._task.cancel()

    async def _received(self) -> Message:
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
        self._cancel("disconnected")

    async def _sent(self, message: Message) -> None:
        """Send a part of the answer; a client that does not read it in time is disconnected."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            kinds = [value for name, value in message["headers"] if name == b"content-type"]
            self._is_stream = kinds[:1] == [b"text/event-stream; charset=utf-8"]
        timer = self._loop.call_later(self._settings.send_timeout_s, self._cancel, "slow reader")
        try:
            await self._send(message)
        finally:
            timer.cancel()
        is_body = message["type"] == "http.response.body"
        self._is_over = is_body and not message.get("more_body", False)

    async def _fail(self, error: HttpError) -> None:
        """Answer with an error; in a stream as its last event."""
        if not self._status:
            await reply(error.body, error.status, error.headers)(
                self._scope, self._received, self._sent
            )
        elif self._is_stream and not self._is_over:
            data = encoded([error.body])
            await self._send({"type": "http.response.body", "body": data, "more_body": False})
