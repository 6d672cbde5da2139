"""Bodies of requests, and answers: JSON, and server-sent events."""

from __future__ import annotations

import re
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
_EXPECTED = re.compile("Expected `([^`]*)`, got `([^`]*)`")
_MISSING = re.compile("Object missing required field (`[^`]*`)")
_KINDS = {  # msgspec's names of JSON's types
    "str": "a text", "array": "a list", "object": "an object", "int": "a whole number",
    "float": "a number", "bool": "true or false", "null": "null",
}  # fmt: skip
_REFUSED = re.compile("^Invalid (?:enum )?value ('.*')(?= - at `)", re.DOTALL)  # msgspec's words


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
        raise HttpError(400, in_words(error), param=place.rstrip("`") or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON: {error}") from None
    return fields


def in_words(error: msgspec.ValidationError) -> str:
    """Return what is wrong with a field, as a person would say it; ranges are left as they are."""
    if (message := _REFUSED.sub(r"\1 is not supported", str(error))) != str(error):
        return message
    message, _, place = message.partition(" - at `")
    field = place.removeprefix("key in ").rstrip("`").removeprefix("$").removeprefix(".")
    if match := _EXPECTED.fullmatch(message):
        kinds = [_KINDS.get(kind, kind) for kind in match[1].split(" | ")]
        found = _KINDS.get(match[2], match[2])
        return f"{f'`{field}`' if field else 'this'} is {found}, not {' or '.join(kinds)}"
    if message.startswith("Expected `"):  # a range, or a constant
        message = "must be " + message.removeprefix("Expected ").replace("`", "")
    message = _MISSING.sub(r"the field \1 is missing", message)
    return f"`{field}`: {message}" if field else message


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

    def __init__(self, pieces: AsyncGenerator[bytes, None], door: str = "") -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(pieces, headers=headers, media_type="text/event-stream")
        self._pieces, self._door = pieces, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except CancelledError:
            error = HttpError(503, "the server is shutting down")
            end = encoded([error.body_for(self._door)])
            await send({"type": "http.response.body", "body": end, "more_body": False})
            raise
        finally:
            await self._pieces.aclose()


async def event_stream(frames: AsyncGenerator[Iterable[object], None], door: str) -> EventStream:
    """Return a stream of events in the form of an endpoint.

    It ends with an error, or, as OpenAI's streams do, with ``[DONE]``.

    Raises:
        Exception: ``frames`` raised it before its first event, so the answer gets a status of its own.
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
            if door != "messages":
                yield b"data: [DONE]\n\n"
        except Exception as error:
            yield encoded([http_error(error).body_for(door)])
        finally:
            await frames.aclose()

    return EventStream(pieces(), door)


def encoded(events: Iterable[object]) -> bytes:
    """Return events as they are sent: the type of the event, if it has one, and then JSON."""
    lines = []
    for event in events:
        kind = event.get("type") if isinstance(event, Mapping) else None
        lines += [b"" if kind is None else f"event: {kind}\n".encode(), b"data: "]
        lines += [msgspec.json.encode(event), b"\n\n"]
    return b"".join(lines)
