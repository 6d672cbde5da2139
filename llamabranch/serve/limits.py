"""Middleware that limits requests: access, size of the body, slow clients. It also formats errors."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from ..pictures import visible
from . import require_server
from .errors import HttpError, door_of, http_error
from .messages import reply
from .settings import ServeSettings

require_server()
from anyio import fail_after  # noqa: E402
from starlette.requests import ClientDisconnect  # noqa: E402

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


_Headers = Sequence[tuple[bytes, bytes]]


class Limits:
    """Middleware: refuses requests, and ends those whose client is gone or stops reading.

    An error becomes the answer, unless the answer has begun.

    Args:
        app: the application.
        settings: limits.
        check: raises HttpError unless a request may be answered; may set headers of the answer.
        log: is called with a line for each refused request.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServeSettings,
        check: Callable[[Scope], None],
        log: Callable[[str], None],
    ) -> None:
        self._app, self._settings, self._check, self._log = app, settings, check, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        state: dict[str, object] = {
            "max_body": self._settings.max_body, "fields": None, "headers": (),
        }  # fmt: skip
        scope["state"] = state
        n_bytes, has_begun = 0, False

        async def limited() -> Message:
            nonlocal n_bytes
            message = await receive()
            n_bytes += len(message.get("body", b""))
            if n_bytes > cast(int, most := state["max_body"]):  # an endpoint may take more
                raise HttpError(413, f"the body has more than {most} bytes")
            return message

        async def patient(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                message["headers"] = [*message["headers"], *cast(_Headers, state["headers"])]
            with fail_after(self._settings.send_timeout_s):
                await send(message)

        error: HttpError | None = None
        try:
            self._check(scope)
            await self._app(scope, limited, patient)
        except ClientDisconnect:
            pass
        except CancelledError:
            error = HttpError(503, "the server is shutting down")
            raise
        except Exception as failure:
            if not (has_begun and isinstance(failure, TimeoutError)):  # the client does not read
                error = http_error(failure, state["fields"])
        finally:
            if error is not None and not has_begun:
                if self._settings.log_requests:
                    asked = f"{scope['method']} {scope['path'][:100]}"
                    why = str(error).removesuffix(f": {asked}")
                    self._log(visible(f"{asked}: {error.status}, {why}"))
                body = error.body_for(door_of(scope["path"]))
                await reply(body, error.status, error.headers)(scope, limited, patient)
