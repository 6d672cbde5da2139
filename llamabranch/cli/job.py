"""Estimate how long the texts of a job can get, and how large a cache they need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isinf, nan

from llamabranch import ConfigError, LlamaBranchError, Request
from llamabranch.errors import CacheFullError

from .options import ModelFlags, trained_length, vocabulary

_N_COMPARED = 64  # the most prompts whose beginnings are compared
# If the texts together have fewer cells of their own than this, they use a unified cache. With
# more, attention to the cells of other texts costs more than sharing saves.
_LEAST_CELLS = 1024
_MOST_CELLS = 32_768  # the most cells of a cache that is divided among the texts
_STEP = 256  # llama.cpp rounds the cells of a sequence up to a multiple of this
_BYTES = 2  # bytes of text per token; most tokens have more
# Tokens: the default size of a context, and the assumed length of a text without a limit.
_SHORT = 2048
_TEMPLATE = 32  # about how many bytes a chat template adds to a message


@dataclass(frozen=True)
class JobLengths:
    """How many cells the texts of a job need, estimated from the bytes of their prompts.

    Attributes:
        n_texts: number of texts.
        needed: cells of the longest text; a text without a limit counts as 2,048 tokens.
        longest: the most cells that a text can need.
        own, shared: the cells of a text that no other text uses, on average, and the cells of the
            common beginning.
        most: the largest size of a context.
    """

    n_texts: int
    needed: float
    longest: float
    own: float
    shared: float
    most: float = inf

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        max_tokens: int | None,
        lengths: Sequence[float] | None = None,
        most: float = inf,
    ) -> JobLengths:
        """Look at all requests; ConfigError if two have the same id.

        ``max_tokens`` is the limit for requests without one. ``lengths`` has the number of tokens
        of each prompt; None = estimate it from the bytes. A prompt longer than ``most`` cannot run,
        and is not counted.
        """
        counts = Counter(str(request.id) for request in requests)
        if twice := [name for name, n in counts.items() if n > 1]:
            raise ConfigError(f"several requests have the id {twice[0]!r}")
        lengths = list(map(_n_prompt, requests)) if lengths is None else lengths
        limits = [max_tokens if r.max_tokens is None else r.max_tokens for r in requests]
        runnable = [
            (request, length, inf if limit is None else limit)
            for request, length, limit in zip(requests, lengths, limits, strict=True)
            if length <= most
        ]
        longest = max((length + n for _, length, n in runnable), default=0.0)
        sizes = (min(most, length + (_SHORT if isinf(n) else n)) for _, length, n in runnable)
        first = runnable[:_N_COMPARED]
        shared = _n_shared([request for request, _, _ in first])
        own = sum(length + n / 2 for _, length, n in first) / max(1, len(first)) - shared
        n_texts = sum(request.n for request in requests)
        return cls(n_texts, max(sizes, default=0.0), longest, own, shared, most)

    @classmethod
    def measured(
        cls, requests: Sequence[Request], max_tokens: int | None, name: str, n_ctx: int | None
    ) -> JobLengths:
        """Look at all requests that can run. Long prompts are tokenized, others are estimated.

        The model ``name`` is not opened if all prompts are short. ``n_ctx`` is the requested size of the
        context; None allows any size up to the trained length.

        Raises:
            ConfigError: two requests have the same id. CacheFullError: the only prompt is too long.
        """
        # A single prompt must fit, so it is counted with one byte per token, the fewest possible.
        about = [_n_prompt(request, 1 if len(requests) == 1 else _BYTES) for request in requests]
        estimate = cls.of(requests, max_tokens, about)
        if estimate.needed <= min(_SHORT, n_ctx or _SHORT):
            return estimate
        with vocabulary(name) as model:
            most = n_ctx or trained_length(model) or inf

            def length(request: Request, n: float) -> float:
                if n <= min(most, _SHORT):
                    return n
                try:
                    return len(model.prompt_tokens(request.prompt))
                except LlamaBranchError:  # running the request raises this error later
                    return nan

            lengths = list(map(length, requests, about))
        if len(requests) == 1 and lengths[0] > most:
            limit = "--n-ctx is" if n_ctx else "the model is made for"
            raise CacheFullError(
                f"the prompt has {lengths[0]:,.0f} tokens, {limit} {most:,.0f}",
                hint="shorten the prompt, or raise --n-ctx",
            )
        return cls.of(requests, max_tokens, lengths, most)

    def cells_per_text(self, n_texts: int) -> int | None:
        """Return how many separate cells each text should have if ``n_texts`` run at a time.

        None = use a unified cache: the texts are short or mostly shared, or separate cells could take too
        much memory.
        """
        n = min(n_texts, self.n_texts)
        together = self.shared + n * self.own
        if n < 2 or n * self.own < _LEAST_CELLS or together < 2 * (self.shared + self.own):
            return None
        if self.longest * n_texts > _MOST_CELLS:
            return None
        return _whole_steps(self.longest + 8)

    def most_cells_per_text(self, n_texts: int) -> int:
        """Return the cells of the longest text, but at most the share of one of ``n_texts``."""
        return min(self.n_ctx, max(_STEP, _MOST_CELLS // n_texts // _STEP * _STEP))

    @property
    def n_ctx(self) -> int:
        """The size of a context that the longest text fits into."""
        return int(min(self.most, _whole_steps(self.needed + _TEMPLATE)))


def with_room(models: ModelFlags, name: str, prompt: str, max_tokens: int | None) -> ModelFlags:
    """Return options for a context with room for a prompt and ``max_tokens``, unless ``-c`` is set.

    Raises:
        CacheFullError: the prompt alone is longer than ``-c``, or than the model's trained length.
    """
    lengths = JobLengths.measured([Request(prompt, id="0")], max_tokens, name, models.n_ctx)
    is_short = models.n_ctx is not None or lengths.n_ctx <= _SHORT
    return models if is_short else replace(models, n_ctx=lengths.n_ctx)


def _whole_steps(n: float) -> int:
    return -(-int(n) // _STEP) * _STEP


def _parts(request: Request) -> Sequence[object]:
    """Return a prompt in a form that can be compared: bytes of text, or token ids."""
    prompt = request.prompt
    if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], dict):
        prompt = "".join(f"{m['role']}{' ' * _TEMPLATE}{m['content']}" for m in prompt)  # type: ignore[call-overload,index]
    return prompt.encode("utf-8", "replace") if isinstance(prompt, str) else prompt


def _n_prompt(request: Request, n_bytes: int = _BYTES) -> float:
    """Estimate how many tokens a prompt has. The estimate is usually too high."""
    parts = _parts(request)
    return len(parts) / (n_bytes if isinstance(parts, bytes) else 1)


def _n_shared(requests: Sequence[Request]) -> float:
    """Return the length, in tokens, of the common beginning of all prompts."""
    prompts = [_parts(request) for request in requests]
    # There are no prompts, or some are texts and others token ids.
    if len({type(prompt) is bytes for prompt in prompts}) != 1:
        return 0
    # What the first and the last prompt in sorted order share, all prompts share.
    first, last = min(prompts), max(prompts)  # type: ignore[type-var]
    pairs = zip(first, last, strict=False)
    n = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(last)))
    return n / (_BYTES if isinstance(first, bytes) else 1)
