"""Errors for clients: an HTTP status, and a body as OpenAI or Anthropic writes it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

from .. import errors

_log = logging.getLogger("llamabranch.serve")
_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    409: "conflict_error", 429: "rate_limit_error", 500: "server_error",
    501: "not_supported_error", 503: "unavailable_error", 504: "timeout_error",
}  # fmt: skip
_ANTHROPIC = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}  # other types
_BAD = errors.ConfigError, errors.GrammarError, errors.TokenizeError, errors.UnsupportedError


class HttpError(Exception):
    """An error that ends a request.

    Args:
        status: the HTTP status.
        message: what is wrong, and what to do about it.
        param: the field of the request that is wrong.
        kind: the type of the error; None = the usual type for the status.
        details: more about it, for Anthropic's clients.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        kind: str | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        kind = kind or _TYPES.get(status, "invalid_request_error")
        error = {"message": message, "type": kind, "param": param, "code": status}
        self.status, self._details = status, details
        self.body = {"error": error}
        self.headers = {"retry-after": "1"} if status in (429, 503) else {}

    def body_for(self, door: str) -> dict[str, object]:
        """Return the body in the form of an endpoint, see `door_of`."""
        if door != "messages":
            return {**self.body}
        kind = _ANTHROPIC.get(self.status, self.body["error"]["type"])
        error: dict[str, object] = {"type": kind, "message": str(self)}
        more = {} if self._details is None else {"details": self._details}
        return {"type": "error", "error": error | more}


def door_of(path: str) -> str:
    """Return the endpoint of a path: "messages", "chat" or "completions"."""
    parts = path.removeprefix("/v1/").split("/")
    return parts[0] if parts[0] in ("messages", "chat") else "completions"


def http_error(
    error: BaseException, fields: object = None, *, param: str | None = None
) -> HttpError:
    """Return the error that a client gets for an exception; only the library's own errors are described.

    Args:
        error: the exception.
        fields: the fields of the request; if the message begins with the name of one, that one is wrong.
        param: the wrong field, if it is known.
    """
    if isinstance(error, HttpError):
        return error
    if not isinstance(error, errors.LlamaBranchError):
        _log.error("a request failed", exc_info=error)
        return HttpError(500, f"internal error: {type(error).__name__}")
    message = error.message if error.hint is None else f"{error.message} ({error.hint})"
    match error:
        case errors.QueueFullError():
            return HttpError(429, f"{error.message}; try again later")
        case errors.ClosedError() | errors.DecodeInterruptedError():
            return HttpError(503, "the server is shutting down")
        case errors.CacheFullError():
            return HttpError(400, message)
        case errors.CapacityError():
            return HttpError(503, message)
        case error if isinstance(error, _BAD):
            name = re.split(r"\W", message, maxsplit=1)[0]
            was_sent = getattr(fields, name, None) is not None
            return HttpError(400, message, param=name if was_sent else param)
    return HttpError(500, message)
