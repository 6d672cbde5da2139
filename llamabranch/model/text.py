"""Text from tokens: UTF-8, lists of token ids, and a search for stop strings in the stream."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from ..arguments import plain_int
from ..errors import ConfigError, TokenizeError

# Accepted as token ids; NumPy integers and arrays of them, too.
TokenIds = Iterable[SupportsIndex] | npt.NDArray[np.integer]


TEXT_TYPES = (str, bytes, bytearray, memoryview)


def token_list(tokens: TokenIds) -> list[int]:
    """Return token ids as a list of plain integers; ``check_tokens`` rejects items that are not integers.

    Raises:
        TokenizeError: ``tokens`` is text, bytes, an array of anything but integers, or not iterable.
    """
    if isinstance(tokens, np.ndarray):
        if tokens.ndim == 1 and (tokens.dtype.kind in "iu" or not tokens.size):
            return [int(token) for token in tokens.tolist()]
        raise TokenizeError(
            f"token ids must be a list of integers, not an array of {tokens.dtype}, shape {tokens.shape}"
        )
    if isinstance(tokens, TEXT_TYPES) or not isinstance(tokens, Iterable):
        raise TokenizeError(
            f"token ids must be a list of integers, not {tokens!r:.40}",
            hint="turn text into tokens with tokenize(text), bytes into text with decode()",
        )
    items = list(tokens)
    if all(type(token) is int for token in items):
        return items  # type: ignore[return-value]
    return [token if (n := plain_int(token)) is None else n for token in items]  # type: ignore[misc]


def decode_utf8(data: bytes) -> tuple[str, bytes]:
    """Return the text of ``data``, and the bytes of an incomplete character at the end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(data), decoder.getstate()[0]


def n_common(left: Sequence[object], right: Sequence[object]) -> int:
    """Return the length of the common prefix of two lists or texts."""
    n = min(len(left), len(right))
    if left[:n] == right[:n]:
        return n
    low, high = 0, n  # equal up to low, different before high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


NO_TOKEN = -1  # llama.cpp's LLAMA_TOKEN_NULL


def stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Return one stop string, or several, as a tuple.

    Raises:
        ConfigError: ``stop`` is neither of these, or a stop string is empty.
    """
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence):
        raise ConfigError(f"stop must be a string or a list of strings, not {stop!r:.40}")
    if any(not isinstance(text, str) or not text for text in stops):
        raise ConfigError("stop strings must be strings that are not empty")
    return tuple(stops)


class StopStrings:
    """Searches a stream of text for stop strings, and holds back text that may begin one.

    Raises:
        ConfigError: a stop string is empty, or is not a string.
    """

    def __init__(self, stops: str | Sequence[str]) -> None:
        self._stops = stop_strings(stops)
        self.held = ""  # the text that is held back
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that can be emitted now; sets ``found`` at the first stop string."""
        if not self._stops or self.found is not None:
            return text if self.found is None else ""
        self.held += text
        # The stop string that is complete first counts, however the text was split.
        places = [
            (at + len(stop), at, stop) for stop in self._stops if (at := self.held.find(stop)) >= 0
        ]
        if places:
            _, at, self.found = min(places)
            emitted, self.held = self.held[:at], ""
            return emitted
        keep = max(self._overlap(stop) for stop in self._stops)
        cut = len(self.held) - keep
        emitted, self.held = self.held[:cut], self.held[cut:]
        return emitted

    def show(self, text: str, *, last: bool) -> str:
        """Return the text to emit for the next piece; nothing is held back after the ``last`` one."""
        emitted = self.feed(text)
        return emitted + self.flush() if last else emitted

    def _overlap(self, stop: str) -> int:
        """Return how many characters at the end of the held text could be the start of ``stop``."""
        for n in range(min(len(stop) - 1, len(self.held)), 0, -1):
            if stop.startswith(self.held[-n:]):
                return n
        return 0

    def flush(self) -> str:
        """Return the held text, at the end of a stream without a stop string."""
        held, self.held = self.held, ""
        return held
