"""A tree search for a puzzle whose reward a program computes: a lock that tells how many digits fit."""

import llamabranch as lb
from llamabranch import search

SECRET = "7203"
PROMPT = "The number of the lock is"


def moves(text: str) -> list[str]:
    """Return the digits that may follow; [] for a complete number."""
    digits = text.strip()
    return [] if len(digits) == len(SECRET) else [("" if digits else " ") + d for d in "0123456789"]


def reward(text: str) -> float:
    """Return the share of digits that fit, so far."""
    return sum(a == b for a, b in zip(text.strip(), SECRET, strict=False)) / len(SECRET)


def main() -> None:
    with lb.load(n_seq_max=33) as ctx, lb.Branch.start(ctx, PROMPT, seed=1) as branch:
        result = search.tree_search(
            branch, reward, 1000, expand=moves, prior="uniform", enough=1.0, n=3
        )
        print(f"{PROMPT}{result.text}\n")
        print(f"Texts evaluated: {result.tree.n_visits}, of 10000 numbers")
        print(f"Decodes: {result.stats.decodes}, each of all moves in a text")

        # The same tree, step by step: ask for texts, and tell their values.
        with search.TreeSearch(branch, moves, prior="uniform") as tree:
            for _ in range(3):
                for node, text in tree.ask(4):
                    print(f"  asked about {text!r}, worth {reward(text):.2f}")
                    tree.tell(node, reward(text))


if __name__ == "__main__":
    main()
