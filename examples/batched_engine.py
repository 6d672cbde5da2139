"""Continuous batching: many prompts share one K/V cache and one decode a step, with one draft model.

There is no padding, a finished text makes room for the next prompt, shared prefixes are evaluated once,
and every text equals the one its prompt would get alone. Usage: batched_engine.py [PROMPT ...]
"""

import sys

import llamabranch as lb

PROMPTS = [
    "What is random forest?",
    "Explain black holes",
    "Who is the father of python programming?",
    "What is the capital of France?",
    "Once upon a time there was a king who had three daughters, and the youngest",
    "Once upon a time there was a king who had three daughters, and the eldest",
]
GAMMA, MAX_TOKENS, SEED = 5, 40, 7
SETTINGS = lb.SamplingParams(temperature=0.75)


def alone(target: lb.Context, result: lb.Result) -> str:
    """Return the text of plain decoding for the same prompt, without other prompts."""
    sampling = SETTINGS.replace(seed=result.seed)
    with lb.Branch.start(target, result.prompt, sampling=sampling) as branch:
        return branch.generate_text(MAX_TOKENS)


def main() -> None:
    with (
        lb.load("tale-target", n_seq_max=4, exact=True) as target,
        lb.load("tale-draft", n_seq_max=4) as small,
    ):
        engine = lb.Engine(
            target,
            lb.ModelDrafter(small),
            lb.SpeculativeConfig(draft_k=GAMMA),
            sampling=SETTINGS,
            max_tokens=MAX_TOKENS,
            seed=SEED,
        )
        results = engine.generate(sys.argv[1:] or PROMPTS)
        for result in results:
            print(f"[{result.id}] {result.prompt}{result.text}\n")

        stats, drafting = engine.stats, engine.stats.speculative
        print("=" * 50 + "\nStatistics\n" + "=" * 50)
        print(f"  Output tokens: {stats.generated}")
        print(f"  Tokens a second: {stats.tokens_per_second:.0f}")
        print(f"  Accept rate: {drafting.draft_acceptance_rate:.1%}")
        print(f"  Target forward passes: {stats.target_forward_passes}")
        print(f"  Draft forward passes: {stats.draft_forward_passes}")
        print(f"  Prompt tokens shared: {stats.shared}")
        same = all(alone(target, result) == result.text for result in results)
        print(f"  Same texts as alone: {'yes' if same else 'no'}")


if __name__ == "__main__":
    main()
