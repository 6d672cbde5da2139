"""Speculative decoding with the low-level K/V operations: draft, fork, verify, accept, bonus, clean up.

Two models, greedy. The text is the target's own; the draft only affects how many tokens a decode
yields.
"""

import llamabranch as lb

PROMPT, MAX_TOKENS, DRAFT_LENGTH, MAX_ENTROPY = "The quick brown fox", 30, 5, 5.0
GREEDY = lb.SamplingParams(temperature=0.0)


def main() -> None:
    with lb.load("tale-target") as target, lb.load("tale-draft") as draft:
        output = target.tokenize(PROMPT)
        n_prompt = len(output)
        target.decode(output, 0)
        output.append(target.sample(GREEDY))  # sampled, but not decoded yet
        iterations = drafted = accepted = 0

        while len(output) - n_prompt < MAX_TOKENS and not target.model.is_eog(output[-1]):
            # 1. DRAFT: decode what the draft model has not seen, then draft until its entropy is high.
            draft.decode(output[draft.kv_cache_size(0) :], draft.kv_cache_size(0))
            guesses: list[int] = []
            while len(guesses) < DRAFT_LENGTH and draft.model_entropy("nats") < MAX_ENTROPY:
                guesses.append(draft.sample(GREEDY))
                draft.decode(guesses[-1:], draft.kv_cache_size(0))

            # 2. FORK the target's sequence: its cells get a second sequence id, no K/V is copied.
            target.kv_seq_copy(0, 1)

            # 3. VERIFY the last sampled token and all guesses in one decode.
            start = target.kv_cache_size(1)
            target.decode([output[-1], *guesses], start, seq_id=1, logits="all")
            choices = [int(target.logits(row).argmax()) for row in range(len(guesses) + 1)]

            # 4. ACCEPT guesses that equal the target's choice; 5. BONUS: its next choice.
            n = 0
            while n < len(guesses) and guesses[n] == choices[n]:
                n += 1
            output += [*guesses[:n], choices[n]]

            # 6. CLEAN UP: remove rejected tokens from both caches; the fork replaces sequence 0.
            target.kv_cache_remove(1, start + 1 + n)
            target.kv_seq_copy(1, 0)
            target.kv_cache_remove(1)
            draft.kv_cache_remove(0, min(draft.kv_cache_size(0), start + 1 + n))
            iterations, drafted, accepted = iterations + 1, drafted + len(guesses), accepted + n

        text = output[n_prompt : n_prompt + MAX_TOKENS]
        print(PROMPT + target.detokenize(text))
        print("=" * 50 + "\nStatistics\n" + "=" * 50)
        print(f"  Iterations: {iterations}\n  Tokens drafted: {drafted}")
        print(f"  Tokens accepted: {accepted}\n  Accept rate: {accepted / max(drafted, 1):.1%}")
        print(f"  Output tokens: {len(text)}")


if __name__ == "__main__":
    main()
