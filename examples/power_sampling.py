"""Power sampling: texts drawn in proportion to their probability to the power of 4, by particles.

A lower temperature favours probable tokens; this favours probable texts (2510.14901). Each token is drawn
from the model's distribution to a power, which rises to 4 during the first tokens. A particle's weight
is its probability to the power, over that of its draw. Heavy particles are forked, light ones dropped.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np

import llamabranch as lb
from llamabranch import search

PROMPT, N = "Once upon a time", 16
PLAIN = lb.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)


class Group(NamedTuple):
    """Equal particles: their branch and number; the log-probabilities of their text and of its draw."""

    branch: lb.Branch
    n: int
    logprob: float = 0.0
    drawn: float = 0.0
    has_ended: bool = False


def power_sampling(
    root: lb.Branch, n: int, most: int, stop: str, rng: np.random.Generator, power: float = 4.0
) -> list[tuple[str, float, float]]:
    """Return texts with log p and their shares of the weight; some are cut at ``most`` tokens."""
    groups = [Group(root.fork(), n)]
    for i in range(most):
        rising = min(power, 1.0 + (power - 1.0) * 4 * i / most)
        groups = [new for group in groups for new in drawn(group, rising, stop, rng)]
        groups = resampled(groups, n, rising, rng)
    texts = [root.ctx.detokenize(group.branch.generated_tokens).split(stop)[0] for group in groups]
    return list(zip(texts, [g.logprob for g in groups], shares(groups, power), strict=True))


def drawn(group: Group, power: float, stop: str, rng: np.random.Generator) -> list[Group]:
    """Draw the next token of equal particles; those that draw the same one stay together."""
    if group.has_ended:
        return [group]
    ids, moved = group.branch.distribution().ids, []
    logprobs = group.branch.log_probs()[ids]
    raised = lb.Distribution.from_logits(power * logprobs, ids)
    for i, n in Counter(rng.choice(len(ids), p=raised.probs) for _ in range(group.n)).items():
        child, token = group.branch.fork(), int(ids[i])
        child.detach()
        if not (ends := child.ctx.model.is_eog(token)):
            child.commit(token)
            ends = stop in child.ctx.detokenize(child.generated_tokens)
        sums = group.logprob + logprobs[i], group.drawn + raised.logprobs[i]
        moved.append(Group(child, n, *sums, ends))
    group.branch.prune()
    return moved


def shares(groups: list[Group], power: float) -> np.ndarray:
    """Return the share of each group in the weight of all."""
    logs = np.array([power * group.logprob - group.drawn for group in groups])
    weights = np.exp(logs - logs.max()) * [group.n for group in groups]
    return np.asarray(weights / weights.sum())


def resampled(groups: list[Group], n: int, power: float, rng: np.random.Generator) -> list[Group]:
    """Draw ``n`` particles by their weights, if these are worth fewer than half as many equal ones."""
    share = shares(groups, power)
    if sum(share**2 / [group.n for group in groups]) <= 2 / n:
        return groups
    kept = Counter(rng.choice(len(groups), p=share) for _ in range(n))
    return [groups[i]._replace(n=k, drawn=power * groups[i].logprob) for i, k in kept.items()]


def main() -> None:
    with lb.load(n_seq_max=N + 2, n_ctx=4096) as ctx:
        root = lb.Branch.start(ctx, PROMPT, sampling=PLAIN)
        plain = search.best_of_n(root, N, 16, stop="\n").hypotheses
        found = power_sampling(root, N, 16, "\n", np.random.default_rng(1))
    for name, texts in (("Samples", [(h.text, h.logprob, 1 / N) for h in plain]), ("Power", found)):
        print(f"{name}, mean log p: {sum(log_p * share for _, log_p, share in texts):.1f} nats")
        for text, log_p, share in sorted(texts, key=lambda each: -each[2])[:4]:
            print(f"  {share:4.0%} {log_p:6.1f}  {PROMPT}{text}")


if __name__ == "__main__":
    main()
