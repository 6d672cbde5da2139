"""Bodies of requests, and answers: JSON, and server-sent events."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

import msgspec

from . import require_server
from .errors import HttpError, http_error

require_server()
from starlette.responses import Response, StreamingResponse  # noqa: E402

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

T = TypeVar("T")


async def json_of(request: Request, kind: type[T]) -> T:
    """Return the body as an object of ``kind``.

    Raises:
        HttpError: the body is too long or not JSON, or a field has a wrong type.
    """
    body = await request.body()
    try:
        request.state.fields = fields = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        place = str(error).partition(" - at `$.")[2] or str(error).partition(" field `")[2]
        raise HttpError(400, str(error), param=place.rstrip("`") or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON: {error}") from None
    return fields


def reply(
    body: object,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    kind: str = "application/json",
) -> Response:
    """Return an answer: bytes as they are, anything else as JSON."""
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return Response(data, status, headers, kind)


class EventStream(StreamingResponse):
    """Server-sent events; its generator is closed when the request ends, however it does."""

    def __init__(self, pieces: AsyncGenerator[bytes, None]) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(pieces, headers=headers, media_type="text/event-stream")
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except CancelledError:
            end = encoded([HttpError(503, "the server is shutting down").body])
            await send({"type": "http.response.body", "body": end, "more_body": False})
            raise
        finally:
            await self._pieces.aclose()


async def event_stream(frames: AsyncGenerator[Iterable[object], None]) -> EventStream:
    """Return a stream of events, encoded as JSON, that ends with ``[DONE]``, or with an error.

    Raises:
        Exception: ``frames`` raised it before its first events; it gets a status of its own.
    """
    try:
        first = await anext(frames)
    except BaseException:
        await frames.aclose()
        raise

    async def pieces() -> AsyncGenerator[bytes, None]:
        try:
            yield encoded(first)
            async for events in frames:
                if data := encoded(events):
                    yield data
            yield b"data: [DONE]\n\n"
        except Exception as error:
            yield encoded([http_error(error).body])
        finally:
            await frames.aclose()

    return EventStream(pieces())


def encoded(events: Iterable[object]) -> bytes:
    """Return events as they are sent."""
    return b"".join([b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events])
