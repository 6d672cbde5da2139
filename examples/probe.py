"""A linear probe on hidden states: it tells where a sentence is about to end, and chooses a text."""

from collections.abc import Callable

import numpy as np

import llamabranch as lb
from llamabranch import search

LAYER = -2  # all layers but the last
PROMPTS = ["The king", "The old woman", "One day the fox", "In the forest", "The youngest son"]
HELD_OUT = ["The wolf", "The miller's daughter"]


def examples(ctx: lb.Context, prompts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the hidden states of generated tokens, and whether the next one ends a sentence."""
    states, ends = [], []
    for result in ctx.complete(prompts, n=3, max_tokens=150, seed=1):
        for choice in result.choices:
            with lb.Branch.start(ctx, choice.tokens) as branch:
                states.append(branch.hidden_states(LAYER)[:-1])
                ends += [ctx.detokenize([t]).endswith((".", "!", "?")) for t in choice.tokens[1:]]
    return np.concatenate(states), np.array(ends)


def train(states: np.ndarray, ends: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return a logistic regression, fitted by gradient descent."""
    mean, scale = states.mean(axis=0), states.std(axis=0) + 1e-6
    x, weights, bias = (states - mean) / scale, np.zeros(states.shape[1]), 0.0
    for _ in range(300):
        error = 1 / (1 + np.exp(-(x @ weights + bias))) - ends
        weights -= 0.5 * (x.T @ error / len(x) + 0.01 * weights)
        bias -= 0.5 * error.mean()
    return lambda states: 1 / (1 + np.exp(-((states - mean) / scale @ weights + bias)))


def main() -> None:
    with lb.load() as ctx:
        probe = train(*examples(ctx, PROMPTS))
        states, ends = examples(ctx, HELD_OUT)
        scores = probe(states)
        better = (scores[ends][:, None] > scores[~ends]).mean()
        print(f"{len(ends)} tokens the probe has not seen, {ends.sum()} of them before an end")
        print(f"An end is ranked above another token: {100 * better:.1f} % of the time")

        with lb.Branch.start(ctx, "The princess", seed=3) as branch:
            reader = branch.fork()  # before the search, which takes all free sequences

            def about_to_end(text: str) -> float:
                reader.rewind(branch.position)
                reader.append(text)
                return float(probe(reader.hidden_state(LAYER)))

            result = search.best_of_n(branch, 16, 10, reward=about_to_end)
            print(f"The princess{result.text} (an end comes next: {result.best.score:.2f})")


if __name__ == "__main__":
    main()
