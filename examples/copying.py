"""Drafting without a draft model: copy the tokens that followed the same tokens before.

It costs almost nothing, and is faster where a text repeats itself: refrains, code, quotations, summaries.
"""

import llamabranch as lb

REFRAIN = "Mirror, mirror on the wall, who is the fairest of them all?"
PROMPT = f"'{REFRAIN}' asked the queen. Every day she asked it again:\n\n" + f"'{REFRAIN}'\n\n" * 4
MAX_TOKENS = 96


def main() -> None:
    with lb.load("tale-target", exact=True) as target, lb.load("tale-draft") as small:
        suffix = lb.SuffixDrafter()
        drafters: dict[str, lb.Drafter] = {
            "no drafter": lb.speculative.NullDrafter(),
            "suffix": suffix,
            "suffix, then model": lb.ChainDrafter([suffix, lb.ModelDrafter(small)]),
        }
        config = lb.SpeculativeConfig(draft_k=8)
        greedy = lb.SamplingParams(temperature=0.0)
        print(
            f"{'drafter':20}{'rounds':>8}{'drafted':>9}{'accepted':>10}{'decodes':>9}{'tok/s':>9}"
        )
        texts = {}
        for name, drafter in drafters.items():
            speculator = lb.Speculator(target, drafter, config)
            speculator.generate(PROMPT, max_tokens=8, sampling=greedy).finish()  # warm up
            result = speculator.generate(PROMPT, max_tokens=MAX_TOKENS, sampling=greedy).finish()
            stats, texts[name] = result.stats, result.text
            print(
                f"{name:20}{stats.num_drafts:8}{stats.num_draft_tokens:9}"
                f"{stats.num_accepted_tokens:10}{stats.num_rounds:9}"
                f"{result.tokens_per_second:9.0f}"
            )
        same = len(set(texts.values())) == 1
        print(f"the same text every time: {'yes' if same else 'no'}\n")
        print(PROMPT + texts["no drafter"])


if __name__ == "__main__":
    main()
