"""Stop strings, found in a stream that arrives piece by piece.

What could become a stop string is held back. A text that ends in another way gets it at its end: with the
last token it may have, with its end token, or, where there is neither (the cache is full, the request is
cancelled, a call fails), in an item of its own with ``is_stop`` and the id ``NO_TOKEN``.
"""

from __future__ import annotations

from collections.abc import Sequence

from .errors import ConfigError

__all__ = ["NO_TOKEN", "StopStrings"]

NO_TOKEN = -1  # llama.cpp's LLAMA_TOKEN_NULL


class StopStrings:
    """Watches a stream for any of some strings and holds back what may become one.

    Raises:
        ConfigError: an empty stop string, or one string where a sequence belongs.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise ConfigError("stop must be a sequence of strings, not one string")
        if any(not isinstance(s, str) or not s for s in stops):
            raise ConfigError("stop strings must be strings that are not empty")
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Return what of the stream is safe to show; sets ``found`` at the first stop string."""
        if not self._stops or self.found is not None:
            return text if self.found is None else ""
        self._held += text
        # The first one to be complete counts, so that it does not matter how the text was cut.
        places = [
            (at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0
        ]
        if places:
            _, at, self.found = min(places)
            shown, self._held = self._held[:at], ""
            return shown
        keep = max(self._overlap(stop) for stop in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def show(self, text: str, *, last: bool) -> str:
        """Return what to show of the next piece, and of what was held if it is the ``last``."""
        shown = self.feed(text)
        return shown + self.flush() if last else shown

    @property
    def held(self) -> str:
        """What is held back now."""
        return self._held

    def _overlap(self, stop: str) -> int:
        """Return how many characters at the end of what is held could begin ``stop``."""
        for n in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if stop.startswith(self._held[-n:]):
                return n
        return 0

    def flush(self) -> str:
        """Return what was held back: the stream ends here without a stop string."""
        held, self._held = self._held, ""
        return held
