"""Constrained text by sequential Monte Carlo and by masking: the bias of masking, in numbers.

Masking draws the first word by its own probability, even if what the grammar demands next is improbable.
"""

import math
from collections import Counter

import llamabranch as lb
from llamabranch import search

PROMPT = "The old king took his daughter by the hand and gave her"
ENDINGS = [" a golden apple.", " to him."]
GRAMMAR = 'root ::= " a golden apple." | " to him."'
N = 64
PLAIN = lb.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)


def main() -> None:
    with lb.load(n_seq_max=N + 1, n_ctx=4096) as ctx:
        with lb.Branch.start(ctx, PROMPT, sampling=PLAIN) as branch:
            # By Bayes' rule: the model's own probability of each ending, normalised over both. It counts
            # the usual tokens of an ending only; smc also draws the other ways to spell it.
            sums = search.select(branch, ENDINGS, method="sum").scores
        total = sum(map(math.exp, sums))
        exact = {text: math.exp(s) / total for text, s in zip(ENDINGS, sums, strict=True)}

        with lb.Branch.start(ctx, PROMPT, grammar=GRAMMAR, sampling=PLAIN) as branch:
            masked = search.best_of_n(branch, N, 12, stop=["."])
            counts = Counter(hypothesis.text + "." for hypothesis in masked.hypotheses)
            steered = search.smc(branch, N, 12, stop=["."], threshold=0.5)
        shares = dict.fromkeys(ENDINGS, 0.0)
        for hypothesis in steered.hypotheses:
            shares[hypothesis.text + "."] += math.exp(hypothesis.score)

    print(f"{PROMPT} ...\n")
    print(f"{'ending':20} {'exact':>8} {'masking':>8} {'smc':>8}")
    for text in ENDINGS:
        print(f"{text:20} {exact[text]:8.4f} {counts[text] / N:8.4f} {shares[text]:8.4f}")
    print(
        f"\nLog evidence: {steered.log_evidence:.2f} nats, {math.log(total):.2f} for the usual tokens"
    )
    print(f"Decodes: {masked.stats.decodes} for masking, {steered.stats.decodes} for smc")


if __name__ == "__main__":
    main()
