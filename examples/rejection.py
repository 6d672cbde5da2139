"""Rejection: whole texts that follow a rule, exactly from the model's own distribution of them.

Texts are drawn until one follows the rule. A refused text is never drawn again: a tree of all texts so
far remembers how much of the mass behind each token may still be valid, and draws avoid the rest
(2510.01902). The distribution is that of throwing refused texts away, with fewer draws. The mass that
is left bounds the probability that the model follows the rule by itself.
"""

from collections.abc import Callable

import numpy as np

import llamabranch as lb

PROMPT = "Once upon a time"
PLAIN = lb.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=3)


class Node:
    """The tokens that may follow a text, with the mass of each that may still be valid."""

    def __init__(self, branch: lb.Branch) -> None:
        following = branch.distribution()
        self.ids, self.probs, self.left = following.ids, following.probs, following.probs.copy()
        self.children: dict[int, Node] = {}


def is_good(text: str) -> bool:
    """Return whether a sentence follows the rule."""
    return text.count("e") <= 1 and len(text.split()) >= 3


class Rejection:
    """Draws texts that start with a branch, end with EOG or ``stop``, and follow a rule.

    ``mass`` bounds the probability of the rule from above; ``n_drawn`` counts all texts.
    """

    def __init__(
        self, root: lb.Branch, rule: Callable[[str], bool], most: int, stop: str = "\0"
    ) -> None:
        self.rule, self.most, self.stop, self.n_drawn = rule, most, stop, 0
        self._start, self._branch, self._tree = root.position, root.fork(), Node(root)

    @property
    def mass(self) -> float:
        return float(self._tree.left.sum())

    def draw(self, rng: np.random.Generator) -> str | None:
        """Draw one text; return None if it breaks the rule, or has not ended after ``most`` tokens."""
        model, self.n_drawn = self._branch.ctx.model, self.n_drawn + 1
        node, tokens, path = self._tree, [], []
        self._branch.rewind(self._start)
        while True:
            i = int(rng.choice(len(node.left), p=node.left / node.left.sum()))
            path.append((node, i))
            token = int(node.ids[i])
            is_end = model.is_eog(token)
            tokens += [] if is_end else [token]
            text = model.detokenize(tokens)
            if is_end or self.stop in text or len(tokens) > self.most:
                break
            if i not in node.children:  # the branch reads what it lacks
                self._branch.extend(tokens[self._branch.position - self._start :])
                node.children[i] = Node(self._branch)
            node = node.children[i]
        text = text.split(self.stop)[0]
        if len(tokens) <= self.most and self.rule(text):
            return text
        left = 0.0
        for node, i in reversed(path):
            node.left[i] = node.probs[i] * left
            left = float(node.left.sum())
        return None


def main() -> None:
    with lb.load() as ctx, lb.Branch.start(ctx, PROMPT, sampling=PLAIN) as root:
        texts = Rejection(root, is_good, 10, ".")
        rng = np.random.default_rng(3)
        while texts.n_drawn < 200 and (text := texts.draw(rng)) is None:
            pass
    print(f"A sentence with at most one e: {PROMPT}{text}.")
    print(f"Texts drawn: {texts.n_drawn}")
    print(f"At most {texts.mass:.3f} of all texts are like this")


if __name__ == "__main__":
    main()
