"""What a job's requests are, read once before a model loads, without keeping more than some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llamabranch import CacheFullError, ConfigError, LlamaBranchError, Model, Request

from .prompts import digest, trained_length

__all__ = ["JobSurvey"]

_MOST_KEPT = 10_000  # requests; beyond, they are read again as they are needed
_MOST_NAMED = 20  # ids in a message
_N_COMPARED = 64  # prompts whose beginnings are compared
# Of all texts together, from which attention to other texts costs more than it saves.
_LEAST_CELLS = 1024
_MOST_CELLS = 32_768  # of a cache that is divided among the texts
_STEP = 256  # llama.cpp rounds the cells of a sequence up to a multiple of this
_BYTES = 2  # of text for a token: most have more
_SHORT = 2048  # tokens: the default size of a context
_NO_LIMIT = float("inf")
_TEMPLATE = " " * 32  # what a chat template puts around a message, about


@dataclass(frozen=True)
class JobSurvey:
    """The number of a job's requests, and how long their texts can get.

    Attributes:
        n_requests, n_texts: how many.
        kept: all requests in their order, None if there are too many.
        n_needed: cells that the longest text needs, estimated; a text without a limit counts with
            2,048 tokens.
    """

    n_requests: int
    n_texts: int
    kept: list[Request] | None
    n_needed: float
    _read: Callable[[], Iterator[Request]]
    _max_tokens: int | None
    _longest: float  # cells that a text needs at most, estimated
    _own: float  # of these, how many only it has
    _shared: float

    @classmethod
    def of(
        cls,
        read: Callable[[], Iterator[Request]],
        max_tokens: int | None,
        length: Callable[[Request], float] | None = None,
        most: float = float("inf"),
    ) -> JobSurvey:
        """Read all requests.

        Args:
            read: yields them, each time it is called.
            max_tokens: the limit of requests that give none.
            length: returns how many tokens a prompt has; None = an estimate from its bytes.
            most: a longer prompt cannot run: it does not count for the lengths.

        Raises:
            ConfigError: two have the same id; or as ``read``.
        """
        length = length or _n_prompt
        names = bytearray()
        kept: list[Request] | None = []
        first: list[Request] = []
        n_requests = n_texts = 0
        longest = needed = 0.0
        lengths: list[float] = []
        for request in read():
            n_requests += 1
            n_texts += request.n
            names += bytes.fromhex(digest(request.id))
            n_prompt, n_new = length(request), _most_tokens(request, max_tokens)
            if n_prompt <= most:
                longest = max(longest, n_prompt + n_new)
                needed = max(needed, min(most, n_prompt + (n_new if n_new < _NO_LIMIT else _SHORT)))
                if len(first) < _N_COMPARED:
                    first.append(request)
                    lengths.append(n_prompt + n_new / 2)
            if kept is not None:
                kept.append(request)
                if len(kept) > _MOST_KEPT:
                    kept = None
        _check_names(names, read)
        shared = _n_shared(first)
        own = sum(lengths) / max(1, len(lengths)) - shared
        return cls(n_requests, n_texts, kept, needed, read, max_tokens, longest, own, shared)

    def measured(self, path: Path, n_ctx: int | None) -> JobSurvey:
        """Return it with the long prompts tokenized, and without those that cannot run.

        Args:
            path: the model. If all prompts are short it is not read.
            n_ctx: the given size of the context, None for up to what the model was trained for.

        Raises:
            CacheFullError: the only prompt is too long.
        """
        if self.n_needed <= min(_SHORT, n_ctx or _SHORT):
            return self
        with Model(path, vocab_only=True) as model:
            most = n_ctx or trained_length(model) or float("inf")

            def length(request: Request) -> float:
                about = _n_prompt(request)
                if about <= min(most, _SHORT):
                    return about
                try:
                    return len(model.prompt_tokens(request.prompt))
                except LlamaBranchError:  # the request fails with it
                    return float("nan")

            if self.n_requests == 1:
                n = length(next(iter(self.requests())))
                if n > most:
                    raise CacheFullError(
                        f"the prompt has {int(n):,} tokens, "
                        + (f"--n-ctx is {most:,}" if n_ctx else f"the model is made for {most:,}"),
                        hint="shorten the prompt, or raise --n-ctx",
                    )
            return JobSurvey.of(self._read, self._max_tokens, length, most)

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
        return _whole_steps(self._longest + 8)

    def most_cells_per_text(self, n_texts: int) -> int:
        """Return how many cells the longest text needs, or as many as ``n_texts`` may have each."""
        return min(self.n_ctx, max(_STEP, _MOST_CELLS // n_texts // _STEP * _STEP))

    @property
    def n_ctx(self) -> int:
        """The size of a context in which the longest text has room."""
        return _whole_steps(self.n_needed + len(_TEMPLATE))


def _whole_steps(n: float) -> int:
    return -(-int(n) // _STEP) * _STEP


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
