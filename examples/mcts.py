"""Monte Carlo tree search over texts: a lock that tells how many of its digits fit.

The tree is walked down by PUCT (Silver et al. 2017): to the move with the largest mean value, plus a
bonus for moves that the model finds probable and that were tried seldom. A new text is scored by the
program, and its value counts for all texts above it.
"""

import math
from dataclasses import dataclass, field

import llamabranch as lb

SECRET = "7203"
PROMPT = "The number of the lock is"


@dataclass
class Node:
    """A text in the tree: the probability of its last move, its visits, and the sum of their values."""

    text: str
    prior: float = 1.0
    visits: int = 0
    total: float = 0.0
    moves: list["Node"] = field(default_factory=list)

    def worth(self, parent: "Node") -> float:
        """Return the mean value with the bonus of PUCT; a new text has its parent's mean."""
        of = self if self.visits else parent
        return of.total / of.visits + 1.4 * self.prior * math.sqrt(parent.visits) / (
            1 + self.visits
        )


def expand(branch: lb.Branch, node: Node) -> None:
    """Add the digits that may follow a text, each with its probability among them."""
    digits = node.text.strip()
    if len(digits) == len(SECRET):
        return
    with branch.fork() as reader:
        if node.text:
            reader.append(node.text)
        texts = [("" if digits else " ") + digit for digit in "0123456789"]
        probs = [math.exp(sum(token.logprob for token in reader.score(text))) for text in texts]
    node.moves = [
        Node(node.text + text, p / sum(probs)) for text, p in zip(texts, probs, strict=True)
    ]


def reward(text: str) -> float:
    """Return the share of digits that fit, so far."""
    return sum(a == b for a, b in zip(text.strip(), SECRET, strict=False)) / len(SECRET)


def search(branch: lb.Branch, most: int) -> tuple[Node, Node]:
    """Return the tree after at most ``most`` texts, and the best text."""
    root = best = Node("")
    while root.visits < most and reward(best.text) < 1.0:
        node, path = root, [root]
        while node.moves:
            parent = node
            node = max(parent.moves, key=lambda move: move.worth(parent))
            path.append(node)
        if node.visits and not node.moves:
            expand(branch, node)
        value = reward(node.text)
        for above in path:
            above.visits += 1
            above.total += value
        best = max(best, node, key=lambda each: reward(each.text))
    return root, best


def main() -> None:
    with lb.load() as ctx, lb.Branch.start(ctx, PROMPT, seed=1) as branch:
        tree, best = search(branch, 2000)
        print(f"{PROMPT}{best.text}\n")
        print(f"Texts evaluated: {tree.visits}, of 10000 numbers")
        print("The first digit, how often it was tried, and its mean value:")
        for move in sorted(tree.moves, key=lambda move: -move.visits)[:4]:
            print(f"  {move.text} {move.visits:4} {move.total / max(1, move.visits):.2f}")


if __name__ == "__main__":
    main()
