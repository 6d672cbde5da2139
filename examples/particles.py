"""Particles (sequential Monte Carlo): texts under a grammar without the bias of masking, in numbers.

Masking draws the first word by its own probability, even if what the grammar demands next is improbable.
Here each particle is weighted by the mass that the grammar has left at each of its tokens. Where the
weights have become unequal, heavy particles are forked and light ones dropped. The mean weight
estimates, without bias, the probability that the model keeps to the grammar by itself.
"""

import math
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np

import llamabranch as lb
from llamabranch import search

PROMPT = "The old king took his daughter by the hand and gave her"
ENDINGS = [" a golden apple.", " to him."]
GRAMMAR = 'root ::= " a golden apple." | " to him."'
PLAIN = lb.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
N = 64


class Group(NamedTuple):
    """Equal particles: their branch, their number, their log-weight, and whether they have ended."""

    branch: lb.Branch
    n: int
    weight: float = 0.0
    has_ended: bool = False


def particles(root: lb.Branch, n: int, most: int, rng: np.random.Generator) -> dict[str, float]:
    """Return the texts of at most ``most`` tokens, each with its part of the mean weight."""
    groups = [Group(root.fork(), n)]
    for _ in range(most + 1):  # the last token may be EOG
        groups = resampled([new for group in groups for new in drawn(group, rng)], n, rng)
    weights = defaultdict[str, float](float)
    for branch, k, weight, has_ended in groups:
        text = root.ctx.detokenize(branch.generated_tokens)
        weights[text] += has_ended * k * math.exp(weight) / n
    return weights


def drawn(group: Group, rng: np.random.Generator) -> list[Group]:
    """Draw the next token of equal particles; those that draw the same one stay together."""
    if group.has_ended:
        return [group]
    allowed, moved = group.branch.distribution(), []
    left = math.log(np.exp(group.branch.log_probs()[allowed.ids]).sum())  # by the grammar
    draws = Counter(rng.choice(len(allowed), p=allowed.probs) for _ in range(group.n))
    for i, n in draws.items():
        token, child = int(allowed.ids[i]), group.branch.fork()
        child.detach()
        if not (ends := child.ctx.model.is_eog(token)):
            child.commit(token)
        moved.append(Group(child, n, group.weight + left, ends))
    group.branch.prune()
    return moved


def resampled(groups: list[Group], n: int, rng: np.random.Generator) -> list[Group]:
    """Draw ``n`` particles by their weights, if these are worth fewer than half as many equal ones."""
    counts, weights = (np.array([group[i] for group in groups]) for i in (1, 2))
    shares = counts * np.exp(weights - weights.max())
    mean, shares = weights.max() + math.log(shares.sum() / n), shares / shares.sum()
    if (shares**2 / counts).sum() <= 2 / n:
        return groups
    kept = Counter(rng.choice(len(groups), p=shares) for _ in range(n))
    return [groups[i]._replace(n=k, weight=mean) for i, k in kept.items()]


def main() -> None:
    with lb.load(n_seq_max=N + 2, n_ctx=4096) as ctx:
        with lb.Branch.start(ctx, PROMPT, sampling=PLAIN) as root:
            exact = {text: math.exp(sum(t.logprob for t in root.score(text))) for text in ENDINGS}
        with lb.Branch.start(ctx, PROMPT, grammar=GRAMMAR, sampling=PLAIN) as root:
            masked = Counter(h.text for h in search.best_of_n(root, N, 12).hypotheses)
            found = particles(root, N, 12, np.random.default_rng(1))
    print(f"{PROMPT} ...\n\n{'ending':20} {'exact':>8} {'masking':>8} {'particles':>10}")
    evidence = sum(found.values())
    for text in ENDINGS:
        share = exact[text] / sum(exact.values())
        print(f"{text:20} {share:8.3f} {masked[text] / N:8.3f} {found[text] / evidence:10.3f}")
    print(f"\nBy itself the model keeps to the grammar in one of {1 / evidence:,.0f} texts.")


if __name__ == "__main__":
    main()
