"""A rule in Python: a text without the letter e. `rejection.py` draws whole texts by a rule."""

import llamabranch as lb

PROMPT = "Once upon a time"
N_TOKENS = 24


def no_e(text: str) -> bool:
    """Return whether a text has no e."""
    return "e" not in text.lower()


def main() -> None:
    with lb.load() as ctx, lb.Branch.start(ctx, PROMPT, temperature=0.8, seed=3) as branch:
        text = branch.generate(N_TOKENS, constraint=no_e).finish()
        print(f"without an e: {PROMPT}{text.text}")
        stats = text.stats
        print(f"  {stats.constraint_calls} calls, {stats.constraint_rejections} tokens refused")


if __name__ == "__main__":
    main()
