"""A rule in Python: texts without the letter e, drawn by token, with weights, and as whole texts."""

import math

import llamabranch as lb
from llamabranch import search

PROMPT = "Once upon a time"
N_TOKENS = 12


def no_e(text: str) -> bool:
    """Return whether a text has no e."""
    return "e" not in text.lower()


def is_good(text: str) -> bool:
    """Return whether a complete text is valid."""
    return "cat" in text


def main() -> None:
    search.check_constraint(no_e, [" a king ran into a small room", " it was a warm day"])
    with lb.load(n_seq_max=33, n_ctx=4096) as ctx:
        whole = lb.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=3)
        with lb.Branch.start(ctx, PROMPT, sampling=whole) as branch:
            text = branch.fork().generate(N_TOKENS, constraint=no_e).finish()
            print(f"token by token: {PROMPT}{text.text}")
            stats = text.stats
            print(f"  {stats.constraint_calls} calls, {stats.constraint_rejections} tokens refused")
            weighted = search.smc(branch, 32, N_TOKENS, constraint=no_e, force_end=False)
            evidence = math.exp(weighted.log_evidence or 0.0)
            print(f"weighted: {PROMPT}{weighted.text}")
            print(f"  by itself the model keeps to it with probability: {evidence:.4f}")
            exact = search.rejection(branch, is_good, 1, 24, stop=".", max_draws=2000)
            _, high = exact.valid_mass or (0.0, 0.0)
            print(f"a whole text, a sentence with a cat: {PROMPT}{exact.text}.")
            print(f"  {exact.stats.decodes} decodes; at most {high:.4f} of all texts are like this")


if __name__ == "__main__":
    main()
