"""One HTTP request and its answer, over ASGI: the body, JSON, server-sent events, and the time limits.

After the body is read, a task watches whether the client disconnects. If it does, the request's task is
cancelled, and the engine frees its sequences at the next step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import parse_qsl

import msgspec

from .errors import HttpError, http_error
from .settings import ServeSettings

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

__all__ = ["Headers", "HttpCall"]

T = TypeVar("T")
Headers = Iterable[tuple[bytes, bytes]]

_JSON = b"application/json"
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_log = logging.getLogger("llamabranch.serve")


class HttpCall:
    """A request being answered.

    Args:
        scope, receive, send: of ASGI.
        settings: limits.
        headers: sent with every answer.

    Attributes:
        status: the status of the answer; 0 before there is one.
        ended_by: why it was cancelled: "timeout", "disconnected" or "slow reader"; otherwise "".
        start: when it came, by `time.perf_counter`.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, settings: ServeSettings, headers: Headers
    ) -> None:
        self.scope = scope
        self.status = 0
        self.ended_by = ""
        self.start = perf_counter()
        self._receive, self._send = receive, send
        self._settings = settings
        self._headers = list(headers)
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._is_open = False  # a stream that has not ended
        self._has_failed = False
        self._fields: object = None  # of the body

    @property
    def query(self) -> dict[str, str]:
        """The parameters of the URL; if a name is repeated, the last value."""
        return dict(parse_qsl(self.scope["query_string"].decode("latin-1"), keep_blank_values=True))

    # -- running -------------------------------------------------------------------------------------

    async def run(self, work: Coroutine[object, object, None]) -> None:
        """Run the coroutine that answers the request; its errors become the answer."""
        limit = self._settings.request_timeout_s
        if limit:
            self._timer = self._loop.call_later(limit, self._cancel, "timeout")
        try:
            await work
        except asyncio.CancelledError:
            if not self.ended_by:
                raise
            if self.ended_by == "timeout":
                await self._fail(HttpError(504, f"the request took more than {limit:g} s"))
        except Exception as error:
            failure = http_error(error, self._fields)
            if failure.status == 500:
                _log.error("%s %s failed", self.scope["method"], self.scope["path"], exc_info=error)
            await self._fail(failure)
        finally:
            self.exempt()
            if self._watcher is not None:
                self._watcher.cancel()

    def exempt(self) -> None:
        """Remove the time limit of the request, because a stream of events may last for days."""
        if self._timer is not None:
            self._timer.cancel()

    def _cancel(self, reason: str) -> None:
        if not self.ended_by and not self._has_failed and self._task is not None:
            self.ended_by = reason
            self._task.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._cancel("disconnected")

    async def _fail(self, error: HttpError) -> None:
        """Answer with an error; in a stream as its last event."""
        self._has_failed = True  # a disconnect no longer matters
        if self._is_open:
            await self.event([error.body])
            await self._close()
        elif not self.status:
            await self.reply(error.body, error.status, error.headers)

    # -- the request -----------------------------------------------------------------------------------

    async def body(self, most: int | None = None) -> bytes:
        """Return the body, at most ``most`` bytes long, and start watching for a disconnect.

        Raises:
            HttpError: it is too long.
        """
        most, body, more = most or self._settings.max_body, bytearray(), True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise HttpError(400, "the request ended before its body was complete")
            body += message.get("body", b"")
            if len(body) > most:
                raise HttpError(413, f"the body has more than {most} bytes")
            more = message.get("more_body", False)
        self._watcher = asyncio.ensure_future(self._watch())
        return bytes(body)

    async def json(self, kind: type[T]) -> T:
        """Return the body as an object of ``kind``.

        Raises:
            HttpError: the body is too long or not JSON, or a field has a wrong type.
        """
        body = await self.body()
        try:
            fields = msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as error:
            place = str(error).partition(" - at `$.")[2] or str(error).partition(" field `")[2]
            raise HttpError(400, str(error), param=place.rstrip("`") or None) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise HttpError(400, f"the body is not JSON: {error}") from None
        self._fields = fields
        return fields

    # -- the answer ------------------------------------------------------------------------------------

    async def reply(
        self, body: object, status: int = 200, headers: Headers = (), kind: bytes = _JSON
    ) -> None:
        """Send an answer: bytes as they are, anything else as JSON."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        length = str(len(data)).encode()
        await self._begin(status, [(b"content-type", kind), (b"content-length", length), *headers])
        await self._send({"type": "http.response.body", "body": data})

    async def _begin(self, status: int, headers: Headers) -> None:
        self.status = status
        own = [*headers, *self._headers]
        await self._send({"type": "http.response.start", "status": status, "headers": own})

    async def event(self, events: Iterable[object]) -> None:
        """Send events together; a client that does not read them in time is disconnected."""
        data = b"".join([b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events])
        if data:
            await self.write(data)

    async def end_stream(self) -> None:
        """Send the event that ends a stream."""
        await self.write(b"data: [DONE]\n\n")
        await self._close()

    async def write(self, data: bytes) -> None:
        """Send a part of a stream; a client that does not read it in time is disconnected."""
        if not self.status:
            self._is_open = True
            await self._begin(200, _STREAM_HEADERS)
        limit = self._settings.send_timeout_s
        timer = self._loop.call_later(limit, self._cancel, "slow reader")
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            timer.cancel()

    async def _close(self) -> None:
        self._is_open = False
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
