"""How long the texts of a job can get, and the cache that suits them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from llamabranch import ConfigError, LlamaBranchError, Model, Request, hub

from .options import too_long, trained_length

__all__ = ["JobLengths"]

_MOST_NAMED = 20  # ids in a message
_N_COMPARED = 64  # prompts whose beginnings are compared
# Of all texts together, from which attention to other texts costs more than it saves.
_LEAST_CELLS = 1024
_MOST_CELLS = 32_768  # of a cache that is divided among the texts
_STEP = 256  # llama.cpp rounds the cells of a sequence up to a multiple of this
_BYTES = 2  # of text for a token: most have more
_SHORT = 2048  # tokens: the default size of a context
_TEMPLATE = " " * 32  # what a chat template puts around a message, about
_NO_LIMIT = float("inf")


@dataclass(frozen=True)
class JobLengths:
    """How many cells the texts of a job need, estimated from the bytes of their prompts.

    Attributes:
        n_texts: how many there are.
        needed: of the longest; a text without a limit counts with 2,048 tokens.
        longest: that a text needs at most.
        own: that only one text has, on average; ``shared`` are those that all begin with.
    """

    n_texts: int
    needed: float
    longest: float
    own: float
    shared: float

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        max_tokens: int | None,
        length: Callable[[Request], float] | None = None,
        most: float = _NO_LIMIT,
    ) -> JobLengths:
        """Look at all requests.

        Args:
            requests: of the job; each has an id.
            max_tokens: the limit of requests that give none.
            length: returns how many tokens a prompt has; None = an estimate from its bytes.
            most: a longer prompt cannot run: it does not count.

        Raises:
            ConfigError: two have the same id.
        """
        names = Counter(str(request.id) for request in requests)
        twice = [name for name, n in names.items() if n > 1]
        if twice:
            shown = ", ".join(map(repr, twice[:_MOST_NAMED]))
            more = ", ..." if len(twice) > _MOST_NAMED else ""
            raise ConfigError(
                f"two requests have the id {shown}"
                if len(twice) == 1
                else f"{len(twice)} ids are given to several requests: {shown}{more}"
            )
        longest = needed = 0.0
        first: list[Request] = []
        lengths: list[float] = []
        for request in requests:
            n_prompt = (length or _n_prompt)(request)
            n_new = max_tokens if request.max_tokens is None else request.max_tokens
            if not n_prompt <= most:
                continue
            longest = max(longest, n_prompt + (_NO_LIMIT if n_new is None else n_new))
            needed = max(needed, min(most, n_prompt + (_SHORT if n_new is None else n_new)))
            if len(first) < _N_COMPARED:
                first.append(request)
                lengths.append(n_prompt + (_NO_LIMIT if n_new is None else n_new) / 2)
        shared = _n_shared(first)
        own = sum(lengths) / max(1, len(lengths)) - shared
        return cls(sum(request.n for request in requests), needed, longest, own, shared)

    @classmethod
    def measured(
        cls, requests: Sequence[Request], max_tokens: int | None, name: str, n_ctx: int | None
    ) -> JobLengths:
        """Look at all requests, with the long prompts tokenized and without those that cannot run.

        Args:
            requests, max_tokens: as for ``of``.
            name: the model. If all prompts are short it is not read.
            n_ctx: the given size of the context, None for up to what the model was trained for.

        Raises:
            ConfigError: two have the same id. CacheFullError: the only prompt is too long.
        """
        found = cls.of(requests, max_tokens)
        if found.needed <= min(_SHORT, n_ctx or _SHORT):
            return found
        with Model(hub.resolve(name), vocab_only=True) as model:
            most = n_ctx or trained_length(model) or _NO_LIMIT

            def length(request: Request) -> float:
                about = _n_prompt(request)
                if about <= min(most, _SHORT):
                    return about
                try:
                    return len(model.prompt_tokens(request.prompt))
                except LlamaBranchError:  # the request fails with it
                    return float("nan")

            if len(requests) == 1 and (n := length(requests[0])) > most:
                raise too_long(int(n), int(most), is_given=bool(n_ctx))
            return cls.of(requests, max_tokens, length, most)

    def cells_per_text(self, n_texts: int) -> int | None:
        """Return how many cells each of ``n_texts`` at a time should have of its own.

        None where a unified cache is as good: the texts are short, or most of them is shared; or where
        the texts may need too much memory.
        """
        n = min(n_texts, self.n_texts)
        together = self.shared + n * self.own
        if n < 2 or n * self.own < _LEAST_CELLS or together < 2 * (self.shared + self.own):
            return None
        if self.longest * n_texts > _MOST_CELLS:
            return None
        return _whole_steps(self.longest + 8)

    def most_cells_per_text(self, n_texts: int) -> int:
        """Return how many cells the longest text needs, or as many as ``n_texts`` may have each."""
        return min(self.n_ctx, max(_STEP, _MOST_CELLS // n_texts // _STEP * _STEP))

    @property
    def n_ctx(self) -> int:
        """The size of a context in which the longest text has room."""
        return _whole_steps(self.needed + len(_TEMPLATE))


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
