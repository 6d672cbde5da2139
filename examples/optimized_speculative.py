"""Speculative decoding: the text of the baseline, drafted by a small model and verified in batches.

Both are measured in turns. The speedup depends on the costs c and v: with such a small target on a few
cores it is mostly below 1, and the last lines show the reason in numbers.
"""

import statistics

import llamabranch as lb

PROMPT, MAX_TOKENS, DRAFT_LENGTH, N_RUNS = "Once upon a time", 128, 4, 3
SAMPLING = lb.SamplingParams(temperature=0.8, seed=7)


def run(speculator: lb.Speculator) -> lb.speculative.Generation:
    return speculator.generate(PROMPT, max_tokens=MAX_TOKENS, sampling=SAMPLING).finish()


def speedup(a: float, gamma: int, c: float, v: float = 1.0) -> float:
    """Return the speed over plain decoding's: theorem 3.8 of Leviathan et al. 2022."""
    return sum(a**i for i in range(gamma + 1)) / (gamma * c + v) if gamma else 1.0


def main() -> None:
    with lb.load("tale-target", exact=True) as target, lb.load("tale-draft") as draft:
        config = lb.SpeculativeConfig(draft_k=DRAFT_LENGTH)
        speculative = lb.Speculator(target, lb.ModelDrafter(draft), config)
        baseline = lb.Speculator(target)
        for speculator in (speculative, baseline):
            run(speculator)  # warm up
        pairs = [(run(speculative), run(baseline)) for _ in range(N_RUNS)]
        fast = statistics.median(fast.tokens_per_second for fast, _ in pairs)
        slow = statistics.median(slow.tokens_per_second for _, slow in pairs)
        (drafted, plain), stats = pairs[-1], pairs[-1][0].stats

        print(PROMPT + drafted.text)
        print("=" * 50 + "\nStatistics\n" + "=" * 50)
        print(f"  Iterations: {stats.num_drafts}\n  Tokens drafted: {stats.num_draft_tokens}")
        print(f"  Tokens accepted: {stats.num_accepted_tokens}")
        print(f"  Accept rate: {stats.draft_acceptance_rate:.1%}")
        print(f"  Output tokens: {len(drafted.tokens)}")
        print(f"  Target decodes: {stats.num_rounds}")
        print(f"  Tokens a round: {stats.mean_acceptance_length:.2f}")
        rates = ", ".join(f"{rate:.2f}" for rate in stats.conditional_rates_per_pos)
        print(f"  Acceptance rate by position in the draft: {rates}")
        print(f"  Tokens a second: {fast:.1f} speculative, {slow:.1f} plain (medians)")
        is_same = "yes" if drafted.tokens == plain.tokens else "no"
        print(f"  Speedup: {fast / slow:.2f}\n  Same text: {is_same}\n")

        step_s = plain.stats.plain_time_s / plain.stats.num_plain_steps
        c = stats.draft_step_s / step_s
        v = max(1.0, stats.verify_time_s / stats.num_drafts / step_s)  # a value below 1 is noise
        a, expected = stats.alpha_hat, speedup(stats.alpha_hat, DRAFT_LENGTH, c, v)
        print(f"A drafted token takes c = {c:.2f} target steps, verifying a draft v = {v:.2f}.")
        print(f"With an acceptance of {a:.2f}, {expected:.2f} times the plain speed is expected.")


if __name__ == "__main__":
    main()
