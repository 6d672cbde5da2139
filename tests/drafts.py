"""What tests of drafts share: a fixed length ("auto" drafts only where that pays), prompts, settings."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from decodes import hooked

from llamabranch import (
    Branch,
    ChainDrafter,
    Context,
    Drafter,
    Model,
    ModelDrafter,
    Produced,
    SamplingParams,
    SpeculativeConfig,
    SuffixDrafter,
)
from llamabranch.generation.drafter import Draft, NullState
from llamabranch.speculative.copying import doubling

FIXED = SpeculativeConfig(draft_k=4)
PROMPTS = [
    "Once upon a time there was a king who had three daughters, and the youngest",
    "“Who is there?” cried the old woman,",
    "The cat sat on the mat. The dog sat on the log. The cat sat on the mat. The dog",
]
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.8, seed=42)


class Eager(SuffixDrafter):
    """A drafter that proposes whatever it has seen, however improbable."""

    floor = 0.0

    def __init__(self, factor: float = 4.0) -> None:
        super().__init__()
        self.lengths = doubling(1, 8)
        self.factor = self.offset = factor


class Newest(SuffixDrafter):
    """A drafter that copies from the newest place, as one of version 0.1 did."""

    most, floor, factor, offset = 1, 0.0, 0.0, math.inf

    def __init__(self, longest: int, shortest: int) -> None:
        super().__init__()
        self.lengths = range(shortest, longest + 1)


def make(which: str, draft: Context) -> Drafter | None:
    """Return a new drafter of a kind; ``draft`` is the context of a draft model."""
    makers: dict[str, Callable[[], Drafter | None]] = {
        "none": lambda: None,
        "model": lambda: ModelDrafter(draft),
        "suffix": Eager,
        "chain": lambda: ChainDrafter([SuffixDrafter(), ModelDrafter(draft)]),
    }
    return makers[which]()


class Knowing(NullState, Drafter):
    """A drafter that is its own state. It calls a function for tokens that may follow a text.

    ``drafted(tokens, limit)`` returns at most ``limit`` tokens.
    """

    name = "knowing"

    def __init__(self, drafted: Callable[[Sequence[int], int], list[int]]) -> None:
        self._drafted = drafted

    def check(self, target: Model) -> None:
        """Draft for any model."""

    def start(self, target: Any, rule: str) -> Any:
        """Return itself."""
        return self

    def propose(self, tokens: Sequence[int], length: Any, limit: int) -> Draft:
        """Return the tokens of the function."""
        return Draft(self._drafted(tokens, min(limit, length.limit)))


@contextmanager
def counting(ctx: Context) -> Iterator[list[int]]:
    """Collect the number of tokens of each decode."""
    counts: list[int] = []

    def around(decode: Callable[[int], int], n: int) -> int:
        code = decode(n)
        if code == 0:  # otherwise there was no room, and nothing was computed
            counts.append(n)
        return code

    with hooked(ctx, around):
        yield counts


def plain(ctx: Context, prompt: str | list[int], params: SamplingParams, n: int) -> list[Produced]:
    """Return at most ``n`` tokens of plain decoding, with one decode per token."""
    with Branch.start(ctx, prompt, sampling=params) as branch:
        return list(branch.generate(n))
