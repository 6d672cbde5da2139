"""The exception tree.

    LlamaBranchError
    ├── ConfigError (ValueError)          an argument or a setting is wrong
    ├── ModelLoadError                    the file is not a model this library can run
    ├── TokenizeError                     text or token ids the vocabulary cannot take
    ├── UsageError (RuntimeError)         the call makes no sense in this state
    │   ├── ClosedError                   the model or context is closed
    │   └── BranchStateError              the branch is pruned, has children, holds no logits, ...
    ├── CapacityError                     something is full; the hint says what to raise or prune
    │   ├── CacheFullError
    │   └── SequencesExhaustedError
    ├── DecodeError                       llama.cpp could not compute; carries its return code
    │   └── DecodeInterruptedError        interrupt() or a time limit stopped it
    ├── GrammarError                      a grammar that does not parse, or a token it forbids
    ├── SnapshotError                     a saved branch that cannot be trusted
    ├── UnsupportedError                  this model or memory type cannot do that
    └── VocabularyMismatchError           two models that do not speak the same tokens

Every error can be pickled and carries an optional ``hint``: what the user can do about it.

Warnings, for what works but not as its user would want:

    LlamaBranchWarning (UserWarning)
    ├── ContextLengthWarning              texts get longer than the model was trained for
    └── PerformanceWarning                decoding is far slower than it could be
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

__all__ = [
    "BranchStateError",
    "CacheFullError",
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "ContextLengthWarning",
    "DecodeError",
    "DecodeInterruptedError",
    "GrammarError",
    "LlamaBranchError",
    "LlamaBranchWarning",
    "ModelLoadError",
    "PerformanceWarning",
    "SequencesExhaustedError",
    "SnapshotError",
    "TokenizeError",
    "UnsupportedError",
    "UsageError",
    "VocabularyMismatchError",
    "warn",
]


class LlamaBranchError(Exception):
    """Base of every error this library raises on purpose."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[Callable[..., LlamaBranchError], tuple[object, ...]]:
        return _rebuild, (type(self), self.message, dict(self.__dict__))


def _rebuild(
    kind: type[LlamaBranchError], message: str, state: dict[str, object]
) -> LlamaBranchError:
    error = kind(message)
    error.__dict__.update(state)
    return error


class ConfigError(LlamaBranchError, ValueError):
    """An argument or a setting is wrong."""


class ModelLoadError(LlamaBranchError):
    """The file is not a model this library can run."""


class TokenizeError(LlamaBranchError):
    """Text or token ids the vocabulary cannot take."""


class UsageError(LlamaBranchError, RuntimeError):
    """The call makes no sense in this state."""


class ClosedError(UsageError):
    """The model, context or stream was closed."""


class BranchStateError(UsageError):
    """The branch is pruned, has children, holds no logits, or is leased to somebody else."""


class CapacityError(LlamaBranchError):
    """Something is full; the hint says what to raise or prune."""


class CacheFullError(CapacityError):
    """No free cell is left in the K/V cache."""


class SequencesExhaustedError(CapacityError):
    """Every sequence id of the context is taken."""


class DecodeError(LlamaBranchError):
    """llama.cpp could not compute a batch.

    ``code`` is llama.cpp's return code; ``memory_changed`` says whether the sequences of the batch
    were truncated back to where they stood before it (True) or never touched (False). Where the
    memory cannot be truncated they are emptied, and the message says which; branches read what they
    need again by themselves.
    """

    def __init__(
        self,
        message: str,
        *,
        code: int = 0,
        memory_changed: bool = False,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.memory_changed = memory_changed


class DecodeInterruptedError(DecodeError):
    """``Context.interrupt()`` or a ``time_limit`` stopped the decode; the context can be used on."""


class GrammarError(LlamaBranchError):
    """A grammar that does not parse, or a token that the grammar forbids."""


class SnapshotError(LlamaBranchError):
    """A saved branch that cannot be trusted."""


class UnsupportedError(LlamaBranchError):
    """This model, memory type or build cannot do that."""


class VocabularyMismatchError(LlamaBranchError):
    """Two models that do not speak the same tokens."""


class LlamaBranchWarning(UserWarning):
    """Base of every warning of this library."""


class ContextLengthWarning(LlamaBranchWarning):
    """Texts may get, or have become, longer than the model was trained for."""


class PerformanceWarning(LlamaBranchWarning):
    """Decoding is far slower than it could be."""


_PACKAGE = str(Path(__file__).parent)


def warn(message: str, category: type[LlamaBranchWarning]) -> None:
    """Warn at the line outside this package that made the call."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
