"""What tests of drafts share: a fixed length ("auto" drafts only where that pays), prompts, settings."""

from llamabranch import Branch, Context, Produced, SamplingParams, SpeculativeConfig, SuffixDrafter
from llamabranch.speculative.copying import doubling

__all__ = ["FIXED", "GREEDY", "PROMPTS", "WARM", "Eager", "plain"]

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


def plain(ctx: Context, prompt: str | list[int], params: SamplingParams, n: int) -> list[Produced]:
    """Return what plain decoding says, one decode a token, at most ``n`` tokens."""
    with Branch.start(ctx, prompt, sampling=params) as branch:
        return list(branch.generate(n))
