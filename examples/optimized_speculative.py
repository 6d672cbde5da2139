"""The speculative lab: the same text as the baseline's, drafted by a small model, verified in blocks.

Both ways are measured in turn. Whether it pays depends on c and v: a target this small on a few cores
mostly loses, and the last lines say why, in numbers.
"""

import statistics

import llamabranch as lb

PROMPT, MAX_TOKENS, DRAFT_LENGTH, N_RUNS = "Once upon a time", 128, 4, 3
SAMPLING = lb.SamplingParams(temperature=0.8, seed=7)


def run(speculator: lb.Speculator) -> lb.Generation:
    return speculator.generate(PROMPT, max_tokens=MAX_TOKENS, sampling=SAMPLING).finish()


def main() -> None:
    with lb.load("tale-target") as target, lb.load("tale-draft") as draft:
        config = lb.SpeculativeConfig(draft_k=DRAFT_LENGTH)
        speculative = lb.Speculator(target, lb.ModelDrafter(draft), config)
        baseline = lb.Speculator(target)
        for speculator in (speculative, baseline):
            run(speculator)  # warm up
        pairs = [(run(speculative), run(baseline)) for _ in range(N_RUNS)]
        fast = statistics.median(fast.tokens_per_s for fast, _ in pairs)
        slow = statistics.median(slow.tokens_per_s for _, slow in pairs)
        (said, plain), stats = pairs[-1], pairs[-1][0].stats

        print(PROMPT + said.text)
        print("=" * 50 + "\nStatistics\n" + "=" * 50)
        print(f"  Iterations: {stats.num_drafts}\n  Tokens drafted: {stats.num_draft_tokens}")
        print(f"  Tokens accepted: {stats.num_accepted_tokens}")
        print(f"  Accept rate: {stats.draft_acceptance_rate:.1%}")
        print(f"  Output tokens: {len(said.tokens)}")
        print(f"  Target decodes: {stats.target_forward_passes}")
        print(f"  Tokens a round: {stats.mean_acceptance_length:.2f}")
        rates = ", ".join(f"{rate:.2f}" for rate in stats.conditional_rates_per_pos)
        print(f"  Chance to stand, by position in the draft: {rates}")
        print(f"  Tokens a second: {fast:.1f} speculative, {slow:.1f} plain (medians)")
        print(f"  Speedup: {fast / slow:.2f}")
        print(f"  Same text: {'yes' if said.tokens == plain.tokens else 'no'}\n")

        step_s = plain.stats.plain_time_s / plain.stats.num_plain_steps
        c = stats.draft_time_s / stats.num_draft_tokens / step_s
        v = stats.verify_time_s / stats.num_drafts / step_s
        expected = lb.theory.speedup(stats.alpha_hat, DRAFT_LENGTH, c, v)
        best = lb.theory.best_draft_length(
            stats.alpha_hat, c, lambda n: 1 + (v - 1) * (n - 1) / DRAFT_LENGTH
        )
        print(f"A drafted token costs c = {c:.2f} target steps, verifying a draft v = {v:.2f}.")
        print(
            f"At an acceptance of {stats.alpha_hat:.2f} the theory expects {expected:.2f} times plain"
        )
        print(f"speed, and that {best} tokens a draft are best.")


if __name__ == "__main__":
    main()
