"""Errors as a client gets them: an HTTP status and OpenAI's ``{"error": {...}}``."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import (
    CacheFullError,
    CapacityError,
    ClosedError,
    ConfigError,
    DecodeInterruptedError,
    GrammarError,
    LlamaBranchError,
    QueueFullError,
    TokenizeError,
    UnsupportedError,
)

__all__ = ["HttpError", "http_error"]

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
    504: "timeout_error",
}
_RETRY_S = {429: "1", 503: "1"}


class HttpError(Exception):
    """What ends a request.

    Args:
        status: the HTTP status.
        message: what is wrong, and what to do about it.
        param: the field of the request that is wrong.
        kind: the error's type, if it is not the one that its status implies.
        more: further fields of the error object.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        kind: str | None = None,
        more: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self._error = {
            "message": message,
            "type": kind or _TYPES.get(status, "invalid_request_error"),
            "param": param,
            "code": status,
            **(more or {}),
        }

    @property
    def body(self) -> dict[str, object]:
        """The JSON body."""
        return {"error": self._error}

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers that this error needs."""
        seconds = _RETRY_S.get(self.status)
        return [] if seconds is None else [(b"retry-after", seconds.encode())]

    @classmethod
    def too_long(cls, n_prompt: int, n_ctx: int) -> HttpError:
        """Return the error of a prompt of ``n_prompt`` tokens in a context of ``n_ctx``."""
        return cls(
            400,
            f"the prompt has {n_prompt} tokens, the context has room for {n_ctx}, the answer included",
            kind="exceed_context_size_error",
            more={"n_prompt_tokens": n_prompt, "n_ctx": n_ctx},
        )


def http_error(error: BaseException) -> HttpError:
    """Return what a client is told about an exception; only what the library raises is described."""
    if isinstance(error, HttpError):
        return error
    if not isinstance(error, LlamaBranchError):
        return HttpError(500, f"internal error: {type(error).__name__}")
    message = error.message if error.hint is None else f"{error.message} ({error.hint})"
    if isinstance(error, QueueFullError):
        return HttpError(429, f"{error.message}; try again later")
    if isinstance(error, (ClosedError, DecodeInterruptedError)):
        return HttpError(503, "the server is shutting down")
    if isinstance(error, CapacityError):
        kind = "exceed_context_size_error" if isinstance(error, CacheFullError) else None
        return HttpError(400 if kind else 503, message, kind=kind)
    refused = (ConfigError, GrammarError, TokenizeError, UnsupportedError)
    return HttpError(400 if isinstance(error, refused) else 500, message)
