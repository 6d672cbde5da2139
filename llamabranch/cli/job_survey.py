"""What a job's requests are, read once before a model loads, without keeping more than some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llamabranch import ConfigError, Request

from .prompts import digest

__all__ = ["JobSurvey"]

_MOST_KEPT = 10_000  # requests; beyond, they are read again as they are needed
_MOST_NAMED = 20  # ids in a message
_N_COMPARED = 64  # prompts whose beginnings are compared
_LEAST_CELLS = (
    1024  # of all texts together, from which attention to other texts costs more than it saves
)
_MOST_CELLS = 32_768  # of a cache that is divided among the texts
_STEP = 256  # llama.cpp rounds the cells of a sequence up to a multiple of this
_BYTES = 2  # of text for a token: most have more
_TEMPLATE = " " * 32  # what a chat template puts around a message, about


@dataclass(frozen=True)
class JobSurvey:
    """The number of a job's requests, and how long their texts can get.

    Attributes:
        n_requests, n_texts: how many.
        kept: all requests in their order, None if there are too many.
    """

    n_requests: int
    n_texts: int
    kept: list[Request] | None
    _read: Callable[[], Iterator[Request]]
    _longest: float  # cells that a text needs at most, estimated
    _own: float  # of these, how many only it has
    _shared: float

    @classmethod
    def of(cls, read: Callable[[], Iterator[Request]], max_tokens: int | None) -> JobSurvey:
        """Read all requests.

        Args:
            read: yields them, each time it is called.
            max_tokens: the limit of requests that give none.

        Raises:
            ConfigError: two have the same id; or as ``read``.
        """
        names = bytearray()
        kept: list[Request] | None = []
        first: list[Request] = []
        n_requests = n_texts = 0
        longest = 0.0
        for request in read():
            n_requests += 1
            n_texts += request.n
            names += bytes.fromhex(digest(request.id))
            longest = max(longest, _n_prompt(request) + _most_tokens(request, max_tokens))
            if len(first) < _N_COMPARED:
                first.append(request)
            if kept is not None:
                kept.append(request)
                if len(kept) > _MOST_KEPT:
                    kept = None
        _check_names(names, read)
        shared = _n_shared(first)
        lengths = [_n_prompt(r) + _most_tokens(r, max_tokens) / 2 for r in first] or [0.0]
        own = sum(lengths) / len(lengths) - shared
        return cls(n_requests, n_texts, kept, read, longest, own, shared)

    def requests(self) -> Iterable[Request]:
        """Return the requests, in memory if there are few."""
        return self._read() if self.kept is None else self.kept

    def cells_per_text(self, n_texts: int) -> int | None:
        """Return how many cells each of ``n_texts`` at a time should have of its own.

        None where a unified cache is as good: the texts are short, or most of them is shared; or where
        the texts may need too much memory.
        """
        n = min(n_texts, self.n_texts)
        together = self._shared + n * self._own
        if n < 2 or n * self._own < _LEAST_CELLS or together < 2 * (self._shared + self._own):
            return None
        if self._longest * n_texts > _MOST_CELLS:
            return None
        return -(-int(self._longest + 8) // _STEP) * _STEP


def _text(request: Request) -> bytes | None:
    """Return the text of a prompt, of messages all their contents; None for token ids."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "replace")
    if not len(prompt) or not isinstance(prompt[0], Mapping):
        return None
    parts = [m for m in prompt if isinstance(m, Mapping)]
    return b"".join(
        f"{m.get('role')}{_TEMPLATE}{m.get('content')}".encode("utf-8", "replace") for m in parts
    )


def _n_prompt(request: Request) -> float:
    """Return how many tokens a prompt has: about, and rather too many."""
    text = _text(request)
    return len(request.prompt) if text is None else len(text) / _BYTES


def _most_tokens(request: Request, max_tokens: int | None) -> float:
    most = max_tokens if request.max_tokens is None else request.max_tokens
    return float("inf") if most is None else most


def _n_shared(requests: Sequence[Request]) -> float:
    """Return with how many tokens all of these prompts begin."""
    texts = [text for r in requests if (text := _text(r)) is not None]
    if texts and len(texts) < len(requests):
        return 0
    # What the first and the last in order have in common, all have.
    if texts:
        return _n_equal(min(texts), max(texts)) / _BYTES
    tokens = [[int(token) for token in r.prompt] for r in requests]  # type: ignore[arg-type]
    return _n_equal(min(tokens, default=[]), max(tokens, default=[]))


def _n_equal(first: Sequence[int], last: Sequence[int]) -> int:
    pairs = zip(first, last, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(last)))


def _check_names(names: bytearray, read: Callable[[], Iterator[Request]]) -> None:
    """Raise if two ids have the same digest of eight bytes."""
    digests = np.frombuffer(bytes(names), dtype=np.uint64)
    if len(np.unique(digests)) == len(digests):
        return
    seen: set[str | None] = set()
    twice: dict[str | None, None] = {}
    for request in read():
        if request.id in seen:
            twice[request.id] = None
        seen.add(request.id)
    names_shown = ", ".join(repr(name) for name in list(twice)[:_MOST_NAMED])
    if len(twice) == 1:
        raise ConfigError(f"two requests have the id {names_shown}")
    if twice:
        more = ", ..." if len(twice) > _MOST_NAMED else ""
        raise ConfigError(f"{len(twice)} ids are given to several requests: {names_shown}{more}")
