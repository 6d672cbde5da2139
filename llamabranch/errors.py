"""The exceptions (subclasses of LlamaBranchError) and the warnings (subclasses of LlamaBranchWarning).

Every error can be pickled. It has an optional ``hint``, which says what the user can do about it; a
traceback shows it (Python 3.11 or later).
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


class _TextSoFar(Protocol):
    """The attributes of an engine's `Result` that errors use."""

    @property
    def id(self) -> str: ...
    @property
    def prompt(self) -> object: ...
    @property
    def text(self) -> str: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str | None: ...


class LlamaBranchError(Exception):
    """Base class of all errors that this library raises on purpose."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint and sys.version_info >= (3, 11):
            self.add_note(f"hint: {hint}")


def said(error: BaseException) -> str:
    """Return the message of an exception; "" if it has none that can be read."""
    try:
        text = str(getattr(error, "message", error))
        return text.encode("utf-8", "replace").decode()
    except BaseException:  # an object's own method may raise anything
        return ""


def told(error: BaseException) -> str:
    """Return the message of an exception, after the name of its type if it is unclear alone.

    For example "KeyError: 12345". A `ToolError` is written for its reader.
    """
    text, name = said(error), type(error).__name__
    is_clear = isinstance(error, LlamaBranchError) or (
        any(map(str.isspace, text)) and not isinstance(error, KeyError)
    )
    return text if text and is_clear else f"{name}: {text}" if text else name


class ConfigError(LlamaBranchError, ValueError):
    """An argument or a setting is invalid."""


class ModelLoadError(LlamaBranchError):
    """The file is not a model that this library can run."""


class TokenizeError(LlamaBranchError):
    """A text cannot be encoded as tokens, or token ids are invalid."""


class UsageError(LlamaBranchError, RuntimeError):
    """The call is not possible in this state."""


class ClosedError(UsageError):
    """The model, context or stream is closed."""


class BranchStateError(UsageError):
    """The branch is pruned, has children, has no logits, or is in use by a generation."""


class ConstraintError(LlamaBranchError):
    """No token may follow a text under its constraint."""


class CapacityError(LlamaBranchError):
    """No cells or sequence ids are left; the hint says what to increase or prune."""


class CacheFullError(CapacityError):
    """The K/V cache has no free cell."""

    @classmethod
    def of_prompt(cls, n_prompt: int, n_ctx: int) -> CacheFullError:
        """Return the error for a prompt of ``n_prompt`` tokens that does not fit into ``n_ctx``."""
        return cls(
            f"the prompt has {n_prompt} tokens, the context has room for {n_ctx}",
            hint="shorten the prompt, or open the context with a larger n_ctx",
        )

    @classmethod
    def beside_parent(cls, n_tokens: int, n_kept: int, n_ctx: int) -> CacheFullError:
        """Return the error for a text that does not fit next to the texts of its parent sessions."""
        return cls(
            f"the text has {n_tokens} tokens; the context has room for {n_ctx - n_kept}, because "
            f"{n_kept} are kept for its parent session",
            hint=f"open the context with n_ctx={n_tokens + n_kept} (-c), or name no parent session",
        )


class QueueFullError(CapacityError):
    """The queue is full: ``max_waiting`` requests are waiting."""


class SequencesExhaustedError(CapacityError):
    """All sequence ids of the context are in use."""

    @classmethod
    def of_forks(cls, n: int, n_free: int, n_seq_max: int) -> SequencesExhaustedError:
        """Return the error for ``n`` forks if only ``n_free`` of ``n_seq_max`` sequences are free."""
        return cls(
            f"{n} forks need {n} free sequences, but {n_free} {'is' if n_free == 1 else 'are'} free",
            hint=f"create the context with n_seq_max={n_seq_max + n - n_free} (at most 256), make fewer "
            "forks, or prune other branches",
        )


class DecodeError(LlamaBranchError):
    """llama_decode failed for a batch.

    ``code`` is its return code. If the decode had already changed the sequences of the batch,
    ``memory_changed`` is True, and they were cut back to the length that they had before. If their
    memory cannot be cut, the sequences are emptied instead, and the message names them; a branch then
    evaluates its tokens again when it needs them.
    """

    def __init__(
        self, message: str, *, code: int = 0, memory_changed: bool = False, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.code, self.memory_changed = code, memory_changed


class DecodeInterruptedError(DecodeError):
    """``Context.interrupt()`` or a ``time_limit`` stopped the decode; the context remains usable.

    If `Context.complete`, `Context.chat` or `Engine.generate` was stopped, ``results`` has its texts:
    those that had ended, and the beginnings of the others with the ``finish_reason`` "cancelled". It is
    empty for all other calls.
    """

    results: Sequence[_TextSoFar] = ()


class DownloadError(LlamaBranchError):
    """A model cannot be downloaded: no connection, access refused, incomplete file, or full disk.

    ``status`` is the HTTP status of the hub's answer; None if there was no answer.
    """

    def __init__(self, message: str, *, status: int | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status


class GrammarError(LlamaBranchError):
    """A grammar is invalid, or does not allow a token."""


class ParseError(LlamaBranchError, ValueError):
    """A text was cut off, or the type of its JSON schema refuses it; ``text`` is that text."""

    def __init__(self, message: str, *, text: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.text = text


class SnapshotError(LlamaBranchError):
    """A saved branch is damaged, or does not fit this model or context.

    If only a setting of the context is wrong, ``setting`` is its name, such as "kv_type"; else None.
    """

    def __init__(
        self, message: str, *, setting: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.setting = setting


class ToolError(LlamaBranchError):
    """A call of an agent's tool failed.

    A function raises it to tell the model why: ``raise ToolError("no such city")``. The agent continues.
    Any other exception of a function ends its agent; ``report.error`` is then a ToolError whose
    ``__cause__`` is that exception.
    """


class UnsupportedError(LlamaBranchError):
    """This model, memory type or build does not support the call."""


class VocabularyMismatchError(LlamaBranchError):
    """Two models have different vocabularies."""


class LlamaBranchWarning(UserWarning):
    """Base class of all warnings of this library."""


class ContextLengthWarning(LlamaBranchWarning):
    """A text is longer than the model was trained for."""


class CacheFolderWarning(LlamaBranchWarning):
    """The folder of ``cache_dir`` can no longer be written, for example because the disk is full."""


class GrammarWarning(LlamaBranchWarning):
    """The arguments of a tool are not constrained, because its schema is not supported."""


class _Place(NamedTuple):
    """A line of code, and the globals of its module."""

    file: str
    line: int
    module: dict[str, object]


_PACKAGE = str(Path(__file__).parent) + os.sep
_BETWEEN = ("asyncio", "concurrent", "contextlib", "functools", "threading")  # they call for others
_thread = threading.local()  # ``caller``: the line that started a thread of this package


def _caller() -> _Place:
    """Return the line outside this package that made the call, or that started this thread."""
    frame, ours = sys._getframe(), sys._getframe()
    while frame.f_code.co_filename.startswith(_PACKAGE) or _is_between(frame):
        ours = ours if _is_between(frame) else frame
        if frame.f_back is None:
            return getattr(_thread, "caller", _place(ours))
        frame = frame.f_back
    return _place(frame)


def _is_between(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _BETWEEN


def _place(frame: FrameType) -> _Place:
    return _Place(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)


def in_thread(run: Callable[P, T]) -> Callable[P, T]:
    """Return ``run`` for a new thread; its warnings show the line that called this function."""
    caller = _caller()

    def running(*args: P.args, **named: P.kwargs) -> T:
        _thread.caller = caller
        return run(*args, **named)

    return running


def warn(message: str, category: type[LlamaBranchWarning]) -> None:
    """Warn, and show the line outside this package that made the call."""
    file, line, module = _caller()
    registry = module.setdefault("__warningregistry__", {})
    name = str(module.get("__name__", file))
    warnings.warn_explicit(message, category, file, line, name, cast("Any", registry))
