"""Plain autoregressive decoding, as a baseline: one decode of the target for each token.

`optimized_speculative.py` generates the same text with the help of a draft model.
"""

import statistics
from time import perf_counter

import llamabranch as lb

PROMPT, MAX_TOKENS, SEED, N_RUNS = "Once upon a time", 128, 7, 3


def main() -> None:
    with lb.load("tale-target", exact=True) as target:
        speeds = []
        for _ in range(1 + N_RUNS):  # the first run warms up
            before = perf_counter()
            with lb.Branch.start(target, PROMPT, temperature=0.8, seed=SEED) as branch:
                start, n_prompt = perf_counter(), branch.position
                text = branch.generate_text(max_tokens=MAX_TOKENS)
                elapsed_s, n_tokens = perf_counter() - start, branch.position - n_prompt
                perplexity = branch.perplexity()
            speeds.append(n_tokens / elapsed_s)

        print(PROMPT + text)
        print("=" * 50 + "\nAutoregressive baseline\n" + "=" * 50)
        speed = statistics.median(speeds[1:])
        print(f"  Prompt: {n_prompt} tokens in {1e3 * (start - before):.2f} ms")
        print(f"  Output tokens: {n_tokens}")
        print(f"  Target decodes: {n_tokens}")
        print(f"  Perplexity of the output: {perplexity:.1f}")
        print(f"  Time a token: {1e3 / speed:.3f} ms")
        print(f"  Tokens a second: {speed:.1f} (median of {N_RUNS} runs)")


if __name__ == "__main__":
    main()
