"""What tests of drafts share: a fixed length ("auto" drafts only where that pays), prompts, settings."""

from llamabranch import Branch, SamplingParams, SpeculativeConfig, Speculator

__all__ = ["FIXED", "GREEDY", "PROMPTS", "WARM", "take_turns"]

FIXED = SpeculativeConfig(draft_k=4)
PROMPTS = [
    "Once upon a time there was a king who had three daughters, and the youngest",
    "“Who is there?” cried the old woman,",
    "The cat sat on the mat. The dog sat on the log. The cat sat on the mat. The dog",
]
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.8, seed=42)


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
