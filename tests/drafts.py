"""What tests of drafts share: a fixed length ("auto" drafts only where that pays), prompts, settings."""

from llamabranch import Branch, Context, Produced, SamplingParams, SpeculativeConfig, Speculator

__all__ = ["FIXED", "GREEDY", "PROMPTS", "WARM", "plain", "take_turns"]

FIXED = SpeculativeConfig(draft_k=4)
PROMPTS = [
    "Once upon a time there was a king who had three daughters, and the youngest",
    "“Who is there?” cried the old woman,",
    "The cat sat on the mat. The dog sat on the log. The cat sat on the mat. The dog",
]
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.8, seed=42)


def plain(ctx: Context, prompt: str | list[int], params: SamplingParams, n: int) -> list[Produced]:
    """Return what plain decoding says, one decode a token, at most ``n`` tokens."""
    with Branch.start(ctx, prompt, sampling=params) as branch:
        return list(branch.generate(n))


def take_turns(speculator: Speculator, root: Branch, n: int) -> list[Branch]:
    """Generate ``n`` tokens after each of three forks in turns; each must be as if it were alone."""
    children = root.fork_many(3)
    expected = []
    for child in children:
        with child.fork() as copy:
            expected.append([t.token for t in copy.generate(n)])
    running = [speculator.generate(child, max_tokens=n) for child in children]
    for _ in range(n):
        for generation in running:
            next(generation, None)
    assert [generation.finish().tokens for generation in running] == expected
    assert [child.generated for child in children] == expected
    return children
